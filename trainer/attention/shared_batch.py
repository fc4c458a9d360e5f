"""Batches of ranks that share sequences: whole ones are padded, and cut once all is made that depends on the whole."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeromesh.errors import DataError
from zeromesh.intervals import round_up
from zeromesh.trainer.data.collate import IGNORED_LABEL, shifted

if TYPE_CHECKING:  # Importing torch's compiler, which shares exclude from exchanges, takes two seconds that other runs save.
    from zeromesh.context.shares import Context


def padded_batch(batch: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Return a batch of whole sequences, on the CPU, padded at the end to a multiple of tokens by what is no target. It gets
    `position_ids`, and with `labels` also `shift_labels`. Raises `DataError` for a field that does not go along sequences."""
    ids = next((batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)), None)
    if ids is None or ids.dim() < 2:
        raise DataError(f"parallel.context divides sequences, and the batch has no input_ids; it has {', '.join(batch)}")
    rows, length = ids.shape[:2]
    found: dict[str, Any] = {"position_ids": torch.arange(length).expand(rows, length), **batch}
    if isinstance(labels := batch.get("labels"), Tensor):
        found["shift_labels"] = shifted(labels)
    more = round_up(length, multiple) - length
    for name, value in found.items():
        if not isinstance(value, Tensor):
            continue
        if value.shape[(dim := _sequence_dim(name, value)) :][:1] != (length,) or value.dim() < 2:
            raise DataError(
                f"{name} has shape {list(value.shape)}, and goes not along the {length} tokens of sequences that ranks share "
                "(parallel.context); leave the field out, or set parallel.context: 1"
            )
        # Padding is a document of its own, so that no position is beyond what a model has.
        fill = torch.arange(more).expand(*value.shape[:-1], more) if name == "position_ids" else None
        if fill is not None:
            found[name] = torch.cat([value, fill.to(value.dtype)], -1)
        else:
            ends = (0, 0) * (value.dim() - 1 - dim) + (0, more)
            found[name] = pad(value, ends, value=IGNORED_LABEL if name in ("labels", "shift_labels") else 0)
    return found


def cut_batch(batch: Mapping[str, Any], context: "Context") -> dict[str, Any]:
    """Return this rank's share of a padded batch."""
    return {
        name: context.share(value, _sequence_dim(name, value)) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _sequence_dim(name: str, value: Tensor) -> int:
    """Return the dim of tokens: positions may have a dim before that of rows, `[3, batch, sequence]`."""
    return value.dim() - 1 if name == "position_ids" else 1
