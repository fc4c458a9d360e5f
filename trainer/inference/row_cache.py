"""`RowCache`: the key-value cache of a batch whose rows change between forwards.

All rows end at one column, so that each forward adds the same columns to all of them, and masks and positions are those of prompts
that are padded on the left:

    columns     start               end     capacity
    row 0         | k k k k k k k k k |
    row 1         | 0 0 0 0 0 k k k k |         missing tokens are zero, and masked
    row 2         | 0 0 k k k k k k k |
    free          |                   |

Buffers are written in place, and reallocated by factors when their columns or rows run out, so that a token does not copy the whole
cache, as in transformers' `DynamicCache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

_FEWEST_COLUMNS = 64


def layers_of(config: PreTrainedConfig) -> int | None:
    """Return the number of layers with keys and values; None for a model with another kind of state between tokens.

    Layers with a sliding window keep all columns, as the mask implements the window.
    """
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return len(layers) if plain and layers else None


def numbers_kept(config: PreTrainedConfig, tensor_ranks: int) -> list[int]:
    """Return for each layer the number of elements of one token's keys and values on a rank."""
    found = []
    for layer in config.per_layer_config:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        # Latent attention has keys wider than values, and its head_dim is the width of the rotary part.
        keys, values = (max(width, getattr(layer, name, None) or 0) for name in ("qk_head_dim", "v_head_dim"))
        found.append(-(-heads // tensor_ranks) * (keys + values))
    return found


class _Extent:
    def __init__(self) -> None:
        self.rows = self.start = self.end = 0
        self.capacity = _FEWEST_COLUMNS

    @property
    def width(self) -> int:
        return self.end - self.start


class RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, each `[rows, heads, columns, width of a head]` with room for more rows and columns."""

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self._extent = extent
        self.buffers: list[torch.Tensor] = []
        """The key buffer and the value buffer; none before the first forward, and in layers of other stages."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for each in (key_states, value_states):
            rows, heads, _, width = each.shape
            self.buffers.append(each.new_zeros(rows, heads, self._extent.capacity, width))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `[rows, heads, new columns, width]`; returns those of all columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        (keys, values), (rows, _, new, _) = self.buffers, key_states.shape
        start, end = self._extent.start, self._extent.end
        keys[:rows, :, end : end + new] = key_states
        values[:rows, :, end : end + new] = value_states
        return keys[:rows, :, start : end + new], values[:rows, :, start : end + new]

    def get_seq_length(self) -> int:
        return self._extent.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._extent.width + query_length, 0

    def get_max_length(self) -> int:
        """There is no limit."""
        return -1

    get_max_cache_shape = get_max_length


class RowCache(Cache):  # type: ignore[misc]
    """The key-value cache of all rows, with the layout that the module describes.

    `length_without_layers` tells stubs of other pipeline stages that the length is known without entries in their layers.
    """

    length_without_layers = True

    def __init__(self, layers: int) -> None:
        self._extent = _Extent()
        super().__init__(layers=[RowLayer(self._extent) for _ in range(layers)])

    @property
    def width(self) -> int:
        """The number of columns of the longest row."""
        return self._extent.width

    def make_room(self, new: int) -> None:
        """Make room for `new` more columns, before a forward over them."""
        extent = self._extent
        if extent.end + new <= extent.capacity:
            return
        needed = extent.width + new
        # Unused columns are reclaimed where they are a quarter of all; otherwise buffers grow by half.
        longer = extent.capacity if 4 * needed <= 3 * extent.capacity else max(needed, extent.capacity * 3 // 2)
        self._move(self, rows=None, capacity=longer, end=extent.width)

    def added(self, rows: int, new: int) -> None:
        """Record that a forward over `rows` rows has added `new` columns to all layers of this rank."""
        self._extent.rows = rows
        self._extent.end += new

    def merge(self, other: RowCache, lengths: Sequence[int], own_lengths: Sequence[int], *, most_rows: int) -> None:
        """Add one row for each of `lengths`: the first tokens of that row of `other`, from its first column on.

        `own_lengths` are the tokens of the existing rows, `most_rows` is the limit of rows.
        """
        extent = self._extent
        rows, width = extent.rows + len(lengths), max(extent.width, *lengths)
        wider = width > extent.width
        held = min((len(layer.buffers[0]) for layer in self._filled()), default=0)
        if held < rows or width > extent.end:
            more = min(most_rows, max(rows, 2 * extent.rows)) if held < rows else held
            self._move(other, rows=more, capacity=max(extent.capacity, width + _FEWEST_COLUMNS), end=width)
        extent.start = extent.end - width
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            for index, buffer in enumerate(layer.buffers):
                for row, length in enumerate(own_lengths if wider else ()):
                    buffer[row, :, extent.start : extent.end - length] = 0
                for row, length in enumerate(lengths):
                    target = buffer[extent.rows + row, :, extent.start : extent.end]
                    target[:, : width - length] = 0
                    if length:
                        target[:, width - length :] = theirs.buffers[index][row, :, :length]
        extent.rows = rows

    def remove(self, row: int, lengths: Sequence[int]) -> None:
        """Remove a row, and move the last row to its place; `lengths` are those of the rows that are left, whose maximum is the
        width."""
        extent = self._extent
        last = extent.rows - 1
        if row != last:
            for layer in self._filled():
                for buffer in layer.buffers:
                    buffer[row, :, extent.start : extent.end] = buffer[last, :, extent.start : extent.end]
        extent.rows = last
        extent.start = extent.end - max(lengths, default=0)
        if not last:
            extent.start = extent.end = 0

    def _filled(self) -> Iterator[RowLayer]:
        return (layer for layer in self.layers if layer.buffers)

    def _move(self, like: RowCache, *, rows: int | None, capacity: int, end: int) -> None:
        """Reallocate buffers with `rows` rows (None: as many as now) and `capacity` columns, and move the contents to end at column
        `end`; new buffers get the shapes of `like`."""
        extent = self._extent
        kept, begin = slice(extent.start, extent.end), end - extent.width
        for layer, model in zip(self.layers, like.layers, strict=True):
            moved = []
            for buffer in layer.buffers or model.buffers:
                moved.append(buffer.new_zeros(rows or len(buffer), buffer.shape[1], capacity, buffer.shape[3]))
                if layer.buffers:
                    moved[-1][: extent.rows, :, begin:end] = buffer[: extent.rows, :, kept]
            layer.buffers, layer.is_initialized = moved, bool(moved)
        extent.start, extent.end, extent.capacity = begin, end, capacity
