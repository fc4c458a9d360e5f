"""`RowCache`: the key-value cache of a batch whose rows change between forwards.

    columns     start               end     capacity
    row 0         | k k k k k k k k k |         all rows end at one column, to which each forward adds
    row 1         | 0 0 0 0 0 k k k k |         missing tokens are zero, and masked
    free          |                   |

Buffers are reallocated when columns or rows run out, so that a token does not copy the whole cache, as in `DynamicCache`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

_FEWEST_COLUMNS = 64  # for which memory is allocated, beyond those in use


def layers_of(config: PreTrainedConfig) -> int | None:
    """Return the number of layers with keys and values; None for a model with another kind of state between tokens."""
    # Layers with a sliding window keep all columns, as the mask implements the window.
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return len(layers) if plain and layers else None


def token_bytes(config: PreTrainedConfig, tensor_ranks: int, stages: int, dtype: torch.dtype) -> int:
    """Return an upper bound of the bytes of a token's keys and values on a rank."""
    most, layers = 0, config.per_layer_config
    for layer in layers:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        # Latent attention has keys wider than values, and its head_dim is the width of the rotary part.
        keys, values = (max(width, getattr(layer, name, None) or 0) for name in ("qk_head_dim", "v_head_dim"))
        most = max(most, -(-heads // tensor_ranks) * (keys + values))
    return -(-len(layers) // stages) * most * dtype.itemsize


@dataclass(slots=True)
class Columns:
    """The columns of the buffers that rows use, which all layers share."""

    lengths: list[int] = field(default_factory=list)  # The tokens of each row; in prefill its columns, with padding.
    width: int = 0  # The number of columns of the longest row.
    end: int = 0
    capacity: int = _FEWEST_COLUMNS


class RowLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, each `[rows, heads, columns, width of a head]` with room for more rows and columns."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self._columns = columns
        self.buffers: list[Tensor] = []  # Of keys and of values; none before the first forward and in other stages.

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[rows, heads, new columns, width]`; returns those of all columns."""
        if not self.buffers:
            for each in (key_states, value_states):
                rows, heads, _, width = each.shape
                self.buffers.append(each.new_zeros(rows, heads, self._columns.capacity, width))
            self.is_initialized = True
        (keys, values), (rows, _, new, _) = self.buffers, key_states.shape
        end = self._columns.end
        start = end - self._columns.width
        keys[:rows, :, end : end + new] = key_states
        values[:rows, :, end : end + new] = value_states
        return keys[:rows, :, start : end + new], values[:rows, :, start : end + new]

    def get_seq_length(self) -> int:
        return self._columns.width


class RowCache(Cache):  # type: ignore[misc]
    length_without_layers = True  # Stubs of other pipeline stages know it without entries in their layers.

    def __init__(self, layers: int) -> None:
        self.columns = Columns()
        super().__init__(layers=[RowLayer(self.columns) for _ in range(layers)])

    def make_room(self, new_columns: int) -> None:
        """Make room for so many more columns, before a forward over them."""
        columns = self.columns
        if columns.end + new_columns <= columns.capacity:
            return
        needed = columns.width + new_columns
        # Unused columns are reclaimed where they are a quarter of all; otherwise buffers grow by half.
        longer = columns.capacity if 4 * needed <= 3 * columns.capacity else max(needed, columns.capacity * 3 // 2)
        self._reallocate(self, rows=None, capacity=longer, end=columns.width)

    def record_columns(self, rows: int, new_columns: int) -> None:
        """Record that a forward over `rows` rows has added so many columns to all layers of this rank."""
        columns = self.columns
        columns.lengths = [length + new_columns for length in columns.lengths or [0] * rows]
        columns.width += new_columns
        columns.end += new_columns

    def merge(self, other: "RowCache", lengths: Sequence[int], *, most_rows: int) -> None:
        """Add one row for each of `lengths`: so many first columns of that row of `other`; buffers get at most `most_rows`."""
        columns = self.columns
        before, width = len(columns.lengths), max(columns.width, *lengths)
        rows, wider = before + len(lengths), width > columns.width
        held = min((len(layer.buffers[0]) for layer in self.layers if layer.buffers), default=0)
        if held < rows or width > columns.end:
            more = min(most_rows, max(rows, 2 * before)) if held < rows else held
            self._reallocate(other, rows=more, capacity=max(columns.capacity, width + _FEWEST_COLUMNS), end=width)
        start, end = columns.end - width, columns.end
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            for index, buffer in enumerate(layer.buffers):
                for row, length in enumerate(columns.lengths if wider else ()):
                    buffer[row, :, start : end - length] = 0
                for row, length in enumerate(lengths):
                    target = buffer[before + row, :, start:end]
                    target[:, : width - length] = 0
                    if length:
                        target[:, width - length :] = theirs.buffers[index][row, :, :length]
        columns.lengths += lengths
        columns.width = width

    def remove(self, row: int) -> None:
        """Remove a row, and move the last row to its place."""
        columns = self.columns
        last, start = len(columns.lengths) - 1, columns.end - columns.width
        for layer in self.layers if row != last else ():
            for buffer in layer.buffers:
                buffer[row, :, start : columns.end] = buffer[last, :, start : columns.end]
        columns.lengths[row] = columns.lengths[last]
        columns.lengths.pop()
        columns.width = max(columns.lengths, default=0)
        if not last:
            columns.end = 0

    def _reallocate(self, like: "RowCache", *, rows: int | None, capacity: int, end: int) -> None:
        """Reallocate buffers, as `like`, with `rows` rows (None: as many) and `capacity` columns; contents then end at `end`."""
        columns = self.columns
        kept, used = slice(columns.end - columns.width, columns.end), len(columns.lengths)
        for layer, model in zip(self.layers, like.layers, strict=True):
            moved = []
            for buffer in layer.buffers or model.buffers:
                moved.append(buffer.new_zeros(rows or len(buffer), buffer.shape[1], capacity, buffer.shape[3]))
                if layer.buffers:
                    moved[-1][:used, :, end - columns.width : end] = buffer[:used, :, kept]
            layer.buffers, layer.is_initialized = moved, bool(moved)
        columns.end, columns.capacity = end, capacity
