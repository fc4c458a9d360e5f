"""Losses whose mean is over something else than labels: positions of answers, and transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from zeromesh.errors import ConfigError, DataError

_POSITIONS = ("start_positions", "end_positions")


class SpanLoss:
    """Extractive question answering: cross entropy of where an answer starts, and of where it ends; both count.

    As in transformers, a position beyond the sequence is no target. Where an example has either both or none, as transformers' own
    preparation of such data makes them, the mean is that of the model's own loss: the mean of the two means.
    """

    counts_examples = False
    causal = False
    notes = ()

    def __init__(self) -> None:
        self.last_count = 0
        self.last_scalars: Mapping[str, Any] = {}

    def count(self, batch: Mapping[str, Any]) -> int:
        """Positions inside their sequences. Raises `DataError` where the batch has none."""
        length = _length(batch)
        return sum(int((positions < length).sum()) for positions in _positions(batch))

    def __call__(self, model: Any, batch: Mapping[str, Any], *, seed: float) -> torch.Tensor:
        """See `Loss`."""
        return self.with_outputs(model, batch)[0]

    def with_outputs(self, model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """See `Loss`."""
        self.last_count = self.count(batch)
        length = _length(batch)
        output = model(**{name: value for name, value in batch.items() if name not in _POSITIONS})
        total = torch.zeros((), device=output.start_logits.device)
        for logits, positions in zip((output.start_logits, output.end_logits), _positions(batch), strict=True):
            targets = positions.clamp(min=0).masked_fill(positions >= length, -100)
            wide = logits.float() if logits.dtype.itemsize < 4 else logits
            total = total + F.cross_entropy(wide, targets, ignore_index=-100, reduction="sum")
        return total, output


def _positions(batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Where answers start and end, `[batch]` each."""
    for name in _POSITIONS:
        positions = batch.get(name)
        if not isinstance(positions, torch.Tensor):
            raise DataError(
                f"the batch has no `{name}` tensor; it has {', '.join(map(str, batch)) or 'nothing'}. Give each sample the "
                "positions of the first and of the last token of its answer"
            )
        yield positions.reshape(-1)


def _length(batch: Mapping[str, Any]) -> int:
    """Positions that an answer can be at."""
    for name in ("input_ids", "inputs_embeds"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return value.shape[1]
    raise DataError(f"the batch has no input_ids; it has {', '.join(map(str, batch)) or 'nothing'}")


class TranscriptLoss:
    """Connectionist temporal classification: the mean over examples, each of which is aligned with its transcript as a whole.

    transformers' `ctc_loss_reduction` says what an example counts: the sum over its frames, or that divided by the length of its
    transcript.
    """

    counts_examples = False
    causal = False

    def __init__(self, reduction: str) -> None:
        """Raises `ConfigError` for a reduction that gives no scalar."""
        if reduction not in ("sum", "mean"):
            raise ConfigError(f"ctc_loss_reduction is {reduction!r}; give sum or mean", where="model.config")
        self._sums = reduction == "sum"
        self.notes = ("loss: the mean over examples of their alignments with transcripts (CTC)",)
        self.last_count = 0
        self.last_scalars: Mapping[str, Any] = {}

    def count(self, batch: Mapping[str, Any]) -> int:
        """Examples. Raises `DataError` where the batch has no labels."""
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            raise DataError(f"the batch has no `labels` tensor; it has {', '.join(map(str, batch)) or 'nothing'}")
        return labels.shape[0]

    def __call__(self, model: Any, batch: Mapping[str, Any], *, seed: float) -> torch.Tensor:
        """See `Loss`."""
        return self.with_outputs(model, batch)[0]

    def with_outputs(self, model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """See `Loss`."""
        self.last_count = self.count(batch)
        outputs = model(**batch)
        return outputs.loss if self._sums else outputs.loss * self.last_count, outputs
