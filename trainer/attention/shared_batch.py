"""Batches of ranks that share sequences: whole ones are padded, and cut once all is made that depends on the whole."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zeromesh.context.shares import Context
from zeromesh.errors import DataError
from zeromesh.intervals import round_up
from zeromesh.overrides import override
from zeromesh.pipeline.stages.build import BALANCE
from zeromesh.trainer.attention.packed_attention import PackedAttention
from zeromesh.trainer.data.collate import IGNORED_LABEL, shifted
from zeromesh.units.plan import without_adapters


class SharedAttention(PackedAttention):
    """Attention of ranks that share a batch's sequences."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], shares: Context, *, on_device: bool = False) -> None:
        """Read a whole `batch` on the CPU. Raises `DataError` for one that cannot be shared."""
        self._model, self._unpadded, self._context = model, batch, shares
        self._padded = padded_batch(batch, shares.multiple)
        super().__init__(self._padded, on_device=on_device, shares=shares)

    def told(self, model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's share of the batch."""
        return super().told(model, cut_batch(self._padded, self._context))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the block masks are those of whole sequences, and experts are balanced over the tokens of all ranks."""
        names = unwrap(type(without_adapters(self._model)[0]).forward).__globals__
        with ExitStack() as undone:
            undone.enter_context(super().in_force())
            if (own := names.get(BALANCE)) is not None:
                undone.callback(override(names, BALANCE, partial(self._balance, own)))
            yield

    def _balance(self, own: Callable[..., Any], logits: Any, /, *arguments: Any, **named: Any) -> Any:
        """Return this rank's part of the balance loss, from the router logits `[rows x tokens, experts]` of its tokens."""
        if not isinstance(logits, tuple):
            return own(logits, *arguments, **named)
        rows, length = self._unpadded["labels"].shape
        wholes = [self._context.gather_with_gradient(each.unflatten(0, (rows, -1)), 1) for each in logits]
        call = signature(own).bind(tuple(each[:, :length].flatten(0, 1) for each in wholes), *arguments, **named)
        if (padding := self._unpadded.get("attention_mask")) is not None:
            padding = padding.to(logits[0].device, non_blocking=True)
        call.arguments["attention_mask"] = padding
        return own(*call.args, **call.kwargs) / self._context.exchange.size


def padded_batch(batch: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Return a batch of whole sequences, on the CPU, padded at the end to a multiple of tokens by what is no target. It gets
    `position_ids`, and with `labels` also `shift_labels`. Raises `DataError` for a field that does not go along sequences."""
    ids = next((batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)), None)
    if ids is None or ids.dim() < 2:
        raise DataError(
            f"parallel.context divides sequences, and the batch has no input_ids; it has {', '.join(batch)}"
        )
    rows, length = ids.shape[:2]
    found: dict[str, Any] = {"position_ids": torch.arange(length).expand(rows, length), **batch}
    if isinstance(labels := batch.get("labels"), Tensor):
        found["shift_labels"] = shifted(labels)
    more = round_up(length, multiple) - length
    for name, value in found.items():
        if not isinstance(value, Tensor):
            continue
        dim = _sequence_dim(name, value)
        if value.dim() < 2 or value.shape[dim] != length:
            raise DataError(
                f"{name} has shape {list(value.shape)}, and goes not along the {length} tokens of sequences that ranks share "
                "(parallel.context); leave the field out, or set parallel.context: 1"
            )
        if name == "position_ids":  # Padding is a document of its own, so that no position is beyond what a model has.
            more_of_them = torch.arange(more, dtype=value.dtype).expand(*value.shape[:-1], more)
            found[name] = torch.cat([value, more_of_them], -1)
        else:
            ends = (0, 0) * (value.dim() - 1 - dim) + (0, more)
            found[name] = pad(value, ends, value=IGNORED_LABEL if name in ("labels", "shift_labels") else 0)
    return found


def cut_batch(batch: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Return this rank's share of a padded batch."""
    return {
        name: context.share(value, _sequence_dim(name, value)) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _sequence_dim(name: str, value: Tensor) -> int:
    """Return the dim of tokens: positions may have a dim before that of rows, `[3, batch, sequence]`."""
    return value.dim() - 1 if name == "position_ids" else 1
