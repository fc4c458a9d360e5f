"""How a model's loss is computed and counted. A loss is a sum over targets and their number, never a mean.

a language model of Hugging Face   sum = mean x targets, or the sum of a head that is shown to be equal (in chunks, or divided)
a classifier of Hugging Face       sum = mean x labels: of examples, tokens or pixels
question answering, CTC            sums over positions of answers, over transcripts (`task_losses.py`)
compute_loss(model, batch)         the user's sum and count
any other module                   sum = its scalar x examples, and the run says so
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from zeromesh.errors import ConfigError, DataError, PhaseError
from zeromesh.kernels.chunked_cross_entropy import UNCHANGED
from zeromesh.trainer.data.collate import IGNORED_LABEL, count_targets
from zeromesh.trainer.losses.chunked_head import ChunkedHead
from zeromesh.trainer.losses.task_losses import SpanLoss, TranscriptLoss
from zeromesh.trainer.losses.trial import Verdict, examine, shifted
from zeromesh.trainer.models.peft import is_adapted, learns_prompts, pretrained_of
from zeromesh.trainer.monitoring.user_scalars import require_free_names, scalars_of
from zeromesh.trainer.weights.library_logging import quiet_library

ComputeLoss = Callable[
    [nn.Module, Mapping[str, Any]],
    tuple[torch.Tensor, int | torch.Tensor] | tuple[torch.Tensor, int | torch.Tensor, Mapping[str, Any]],
]
"""A user's `(model, batch) -> (sum, count)`: the sum of the losses, a scalar, and how many they are; a third element, if there is
one, holds scalars by name, which are logged."""

# The library's names for what a class computes (`model.loss_type`).
_LANGUAGE = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
_LABELLED = (
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
# Those that it has no name for, by the ends of the names of classes.
_LABELLED_TOO = ("ForMultipleChoice", "ForNextSentencePrediction")


class Loss(Protocol):
    """How a model's loss is computed and counted."""

    @property
    def counts_examples(self) -> bool:
        """Whether it counts examples because nothing is known about what its loss is the mean of."""
        ...

    @property
    def causal(self) -> bool:
        """Whether the model predicts the next token, so that its first label is no target."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that the run prints about how it counts and computes."""
        ...

    @property
    def last_count(self) -> int:
        """Targets of the batch that was computed last."""
        ...

    @property
    def last_scalars(self) -> Mapping[str, Any]:
        """What else the batch that was computed last gave, to be logged: numbers by name."""
        ...

    def count(self, batch: Mapping[str, Any]) -> int | None:
        """Targets of a batch, known from its labels; None where only the forward tells."""
        ...

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], *, seed: float) -> torch.Tensor:
        """The sum of the losses, a scalar, whose backward will start with `seed` (0 and no gradients: evaluation)."""
        ...

    def with_outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """The sum of the losses and what the model returned, without gradients. A batch without targets of any kind counts none."""
        ...


def make_loss(
    model: nn.Module,
    *,
    mode: Literal["auto", "native"] = "auto",
    chunk_tokens: int | None = None,
    compute_loss: ComputeLoss | None = None,
    divided: bool = False,
    smoothing: float = 0.0,
) -> Loss:
    """How `model`'s loss is computed and counted; `model` is whole, may be on the meta device, and is not run.

    Args:
        mode: `auto` computes a language model's loss in chunks of tokens, or over a divided vocabulary, where a trial on a
            small copy gives the model's own loss and gradients; `native` always takes the model's own.
        chunk_tokens: tokens whose logits exist at once; None: what needs the least memory.
        compute_loss: a user's own, which is then taken as it is.
        divided: tensor ranks will each have some of the vocabulary.
        smoothing: part of each target that is spread over all classes; the loss is then computed from the model's logits.

    Raises:
        ConfigError: for smoothing of a loss whose targets are not known.
    """
    if smoothing:
        return _smoothed(model, compute_loss, smoothing)
    if compute_loss is not None:
        line = ("loss: tensor ranks gather the logits that compute_loss reads",) if divided else ()
        return UserLoss(compute_loss, line)
    inside = pretrained_of(model)
    if inside is None:
        return ExampleLoss(f"the loss of {type(model).__name__}")
    if is_adapted(model) and learns_prompts(model):
        raise ConfigError(
            "adapters that learn prompts make targets of their own, which only the model knows; pass compute_loss, or use LoRA"
        )
    if inside.base_model is inside and not any("label" in name for name in _arguments(inside)):
        raise ConfigError(
            f"{type(inside).__name__} has no head, and so no loss of its own; pass compute_loss, or set model.head to a task"
        )
    return _known_loss(inside) or _language_loss(inside, mode, chunk_tokens, divided=divided)


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(model).forward).parameters


def _known_loss(model: Any) -> Loss | None:
    """The loss of a task that needs no trial; None for a language model, and for what nothing is known of."""
    kind, name = getattr(model, "loss_type", None), type(model).__name__
    if kind in _LABELLED or name.endswith(_LABELLED_TOO):
        return LabelLoss(model, causal=False)
    if "_loss_function" in vars(model):
        return None
    config, arguments = model.config, _arguments(model)
    # Answers may also be classes (of a picture), or be searched for with beams and a loss of several parts.
    if kind == "ForQuestionAnswering" and "start_positions" in arguments and "is_impossible" not in arguments:
        return SpanLoss()
    if kind == "ForCTC":
        return TranscriptLoss(getattr(config, "ctc_loss_reduction", "mean"))
    if kind == "ForSemanticSegmentation" and config.num_labels > 1:
        return LabelLoss(model, causal=False, ignored=getattr(config, "semantic_loss_ignore_index", 255))
    return None


def _language_loss(
    model: Any, mode: Literal["auto", "native"], chunk_tokens: int | None, *, divided: bool
) -> LabelLoss | ExampleLoss:
    kind = getattr(model, "loss_type", None)
    embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
    if embeddings() is None:
        return ExampleLoss(f"the loss of {type(model).__name__} (loss_type {kind})")
    verdict = _verdict(model, _shifts(model))
    if verdict.causal is None:
        return ExampleLoss(f"the loss of {type(model).__name__} ({verdict.reason})", gathered=divided)
    notes = _auxiliary_note(verdict)
    if mode == "native":
        line = (
            ("loss: the model's own, for which tensor ranks gather all logits (model.loss: native)",) if divided else ()
        )
        return LabelLoss(model, causal=verdict.causal, notes=(*line, *notes))
    return _in_parts(model, verdict, chunk_tokens, notes, divided=divided)


def _smoothed(model: nn.Module, compute_loss: ComputeLoss | None, smoothing: float) -> Loss:
    kind = str(getattr(model, "loss_type", None))
    causal = False if kind in _LABELLED else _shifts(model)
    if compute_loss is not None or pretrained_of(model) is None or causal is None:
        whose = "compute_loss" if compute_loss is not None else f"{type(model).__name__} (loss_type {kind})"
        raise ConfigError(
            f"run.label_smoothing: the targets of the loss of {whose} are not known; smooth them there, and set it to 0"
        )
    return SmoothedLoss(model, causal=causal, smoothing=smoothing)


def _shifts(model: Any) -> bool | None:
    """Whether a language model is known to shift its labels; None: it is not one that the library has a name for."""
    kind = getattr(model, "loss_type", None)
    if kind not in _LANGUAGE:
        return None
    return kind != "ForMaskedLM" and not getattr(model.config, "is_encoder_decoder", False)


def _in_parts(
    model: nn.Module, verdict: Verdict, chunk_tokens: int | None, notes: tuple[str, ...], *, divided: bool
) -> LabelLoss:
    """The loss of a language model, of as few logits at once as a trial has shown to be possible."""
    causal, route = bool(verdict.causal), verdict.route
    if route is None:
        where = " of every tensor rank" if divided else ""
        line = f"loss: the model's own, with all logits in memory{where}, because {verdict.reason}"
        return LabelLoss(model, causal=causal, notes=(line, *notes))
    head = ChunkedHead(model, route=route, chunk_tokens=chunk_tokens, change=verdict.change)
    changed = "" if verdict.change == UNCHANGED else f", of logits changed by {verdict.change}"
    line = f"loss: cross entropy in chunks of tokens{changed}, equal to the model's own in a trial"
    return LabelLoss(model, causal=causal, head=head, notes=(line, *notes))


def _verdict(model: Any, causal: bool | None) -> Verdict:
    if "_loss_function" in vars(model):
        return Verdict(causal=causal, reason="its loss function was replaced")
    with quiet_library():
        verdict = examine(model)
    if verdict.causal is None and causal is not None and verdict.reason.startswith("no small copy"):
        return Verdict(causal=causal, reason=verdict.reason)
    return verdict


def _auxiliary_note(verdict: Verdict) -> tuple[str, ...]:
    if not verdict.auxiliary:
        return ()
    return (
        "the loss has auxiliary terms that are computed per microbatch (balance of experts): with other sizes of "
        "microbatches it is another loss",
    )


class LabelLoss:
    """A Hugging Face model's loss that is a mean over its labels: `sum = mean x count`, or the sum that `head` computes."""

    counts_examples = False

    def __init__(
        self,
        model: nn.Module,
        *,
        causal: bool,
        head: ChunkedHead | None = None,
        notes: tuple[str, ...] = (),
        ignored: int = IGNORED_LABEL,
    ) -> None:
        """`ignored` is the label of what is no target."""
        self.causal = causal
        self._ignored = ignored
        self.notes = notes
        self.last_count = 0
        self.last_scalars: Mapping[str, Any] = {}
        self._head = head
        # Training and evaluation read each position once: a cache of keys and values would only take memory.
        self._fixed = {"use_cache": False} if "use_cache" in _arguments(model) else {}

    @property
    def chunked(self) -> bool:
        """Whether logits are computed in chunks."""
        return self._head is not None

    def count(self, batch: Mapping[str, Any]) -> int:
        """Targets among `labels`. Raises `DataError` if there are none of that name."""
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            raise DataError(
                f"the batch has no `labels` tensor; it has {', '.join(map(str, batch)) or 'nothing'}. Give each sample "
                "labels (for a causal model a copy of input_ids, -100 where nothing is to be learnt), or a data_collator "
                "that does"
            )
        return count_targets(labels, causal=self.causal, ignored=self._ignored)

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], *, seed: float) -> torch.Tensor:
        """See `Loss`. A batch without targets gives 0, with gradients of 0."""
        count = self.last_count = self.count(batch)
        inputs = {**self._fixed, **batch}
        labels = inputs["labels"]
        if self._head is not None:
            targets = shifted(labels) if self.causal else labels
            return self._head.run(model, inputs, targets=targets, seed=seed, count=count)
        outputs = model(**self._with_some_target(inputs, count))
        self.last_scalars = scalars_of(outputs)
        loss: torch.Tensor = outputs.loss
        return loss * count

    def with_outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """See `Loss`: by the model's own loss, with all logits."""
        if not isinstance(batch.get("labels"), torch.Tensor):
            self.last_count = 0
            return torch.zeros(()), model(**batch)
        count = self.last_count = self.count(batch)
        outputs = model(**self._with_some_target({**self._fixed, **batch}, count))
        return outputs.loss * count, outputs

    @staticmethod
    def _with_some_target(inputs: dict[str, Any], count: int) -> dict[str, Any]:
        """A mean over nothing is NaN, and NaN times 0 too: let it be the mean over something, times 0."""
        return inputs if count else {**inputs, "labels": torch.zeros_like(inputs["labels"])}


class SmoothedLoss(LabelLoss):
    """Cross entropy of the model's logits with smoothed targets (Szegedy et al. 2016), as transformers' `LabelSmoother`."""

    def __init__(self, model: nn.Module, *, causal: bool, smoothing: float) -> None:
        super().__init__(model, causal=causal, notes=(f"loss: cross entropy with label smoothing {smoothing:g}",))
        self._smoothing = smoothing

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], *, seed: float) -> torch.Tensor:
        """See `Loss`."""
        return self.with_outputs(model, batch)[0]

    def with_outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """See `Loss`."""
        self.last_count = self.count(batch)
        outputs = model(**{**self._fixed, **batch})
        logits, labels = outputs.logits, batch["labels"]
        if self.causal:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        # In 32 bits at least, as the model's own loss.
        wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        targets = labels.flatten()
        total = cross_entropy(wide, targets, reduction="sum", label_smoothing=self._smoothing)
        return total, outputs


class ExampleLoss:
    """A module's own scalar, taken for a mean over the examples of the batch (dim 0 of its first tensor)."""

    counts_examples = True
    causal = False

    def __init__(self, what: str, *, gathered: bool = False) -> None:
        """`gathered`: its model is a language model whose divided logits all tensor ranks gather."""
        where = "; tensor ranks gather all its logits" if gathered else ""
        self.notes = (f"{what} is taken for a mean over examples; pass compute_loss to count otherwise{where}",)
        self.last_count = 0
        self.last_scalars: Mapping[str, Any] = {}

    def count(self, batch: Mapping[str, Any]) -> int:
        """Examples of the batch. Raises `DataError` if it holds no tensor."""
        for value in batch.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                return value.shape[0]
        raise DataError(f"the batch holds no tensor with a batch dim; it has {', '.join(map(str, batch)) or 'nothing'}")

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], *, seed: float) -> torch.Tensor:
        """See `Loss`. Raises `ConfigError` if the module returns no scalar loss."""
        return self.with_outputs(model, batch)[0]

    def with_outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """See `Loss`. Raises `ConfigError` if the module returns no scalar loss."""
        self.last_count = self.count(batch)
        outputs = model(**batch)
        self.last_scalars = scalars_of(outputs)
        return _scalar(outputs, type(model).__name__) * self.last_count, outputs


def _scalar(output: Any, name: str) -> torch.Tensor:
    """The loss among what a module returned: a tensor, an object or mapping with `loss`, or a tuple that begins so."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ConfigError(
            f"{name}.forward gave {shape} where a scalar loss was expected; return the loss (a scalar, or an object "
            "with `loss`) or pass compute_loss=(model, batch) -> (sum, count)"
        )
    return found.reshape(())


class UserLoss:
    """A user's `compute_loss`, whose count is known after it has run."""

    counts_examples = False
    causal = False

    def __init__(self, compute_loss: ComputeLoss, notes: tuple[str, ...] = ()) -> None:
        self.notes = notes
        self._compute = compute_loss
        self._count: int | None = None
        self.last_scalars: Mapping[str, Any] = {}

    @property
    def last_count(self) -> int:
        """Targets of the batch that was computed last. Raises `PhaseError` before the first."""
        if self._count is None:
            raise PhaseError("compute_loss has not run yet, so its count is not known")
        return self._count

    def count(self, batch: Mapping[str, Any]) -> None:
        """None: only the forward tells."""
        return

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], *, seed: float) -> torch.Tensor:
        """See `Loss`. Raises `ConfigError` unless `compute_loss` gives a scalar and a whole number of 0 or more."""
        result = self._compute(model, batch)
        if (
            not isinstance(result, tuple)
            or len(result) not in (2, 3)
            or not isinstance(result[1], int | float | str | torch.Tensor)
            or not isinstance(result[-1], Mapping | int | float | str | torch.Tensor)
        ):
            raise ConfigError(
                f"compute_loss returned a {type(result).__name__}; it must return (sum, count): the sum of the losses and the "
                "number of targets, so that microbatches of different sizes add up. If `loss` is a mean over n targets: "
                "return loss * n, n"
            )
        total, count = result[:2]
        self.last_scalars = result[2] if len(result) == 3 else {}
        require_free_names(self.last_scalars, "compute_loss")
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            raise ConfigError("compute_loss: the sum must be a tensor of one element")
        number = count.item() if isinstance(count, torch.Tensor) and count.numel() == 1 else count
        if isinstance(number, bool) or not isinstance(number, int | float) or number != int(number) or number < 0:
            raise ConfigError(f"compute_loss: the count must be a whole number of 0 or more; got {count!r}")
        self._count = int(number)
        return total.reshape(())

    def with_outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """See `Loss`: the model runs once for the loss, and once for what it returns."""
        return self(model, batch, seed=0.0), model(**batch)
