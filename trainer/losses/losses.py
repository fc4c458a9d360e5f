"""Losses of models, as sums over targets with their number, never as means."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from zeromesh.errors import ConfigError, DataError
from zeromesh.kernels.chunked_head import UNCHANGED, TokenScores, require_targets_in
from zeromesh.offload.accelerator import on_accelerator
from zeromesh.overrides import WIDE_LOSSES, replaced
from zeromesh.trainer.data.collate import IGNORED_LABEL, count_targets, shifted
from zeromesh.trainer.formatting import Detail
from zeromesh.trainer.losses.chunked_head import ChunkedHead
from zeromesh.trainer.losses.trial import Verdict, examine
from zeromesh.trainer.models.adapters import is_adapted, learns_prompts, output_layer, pretrained_of
from zeromesh.trainer.monitoring.step_stats import require_free_names

Batch = Mapping[str, Any]
ComputeLoss = Callable[[nn.Module, Batch], tuple[Tensor, int | Tensor] | tuple[Tensor, int | Tensor, Mapping[str, Any]]]
"""A user's `(model, batch) -> (sum, count)`, a scalar sum of losses and their number, and perhaps scalars to log, by name."""

LossMode = Literal["auto", "native"]
# The library's names of losses (`model.loss_type`).
_LANGUAGE = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
_LABELLED = tuple(f"For{kind}Classification" for kind in ("Token", "Sequence", "Image", "Video", "Audio"))
_LABELLED_CLASSES = ("ForMultipleChoice", "ForNextSentencePrediction")  # without `loss_type` in the library
_POSITIONS = ("start_positions", "end_positions")
Computed = tuple[Tensor, Any, int | Tensor, Mapping[str, Any]]
"""The sum of a batch's losses, the model's outputs (None if unknown), the number of targets (a device scalar, not yet read, if
forward counted them there), and scalars to log."""


@dataclass(kw_only=True)
class Loss:
    kind: Literal["labels", "answers", "transcripts", "examples", "user"]
    count: Callable[[Batch], int | None]
    """Count the targets of a batch from its labels; None if only forward counts them. Raises `DataError` without labels."""
    compute: Callable[[Any, Batch, int, float | None], Computed]
    """Compute the loss of a batch from the model, the batch, its number of targets (0 if only forward counts them) and the gradient
    of the sum from which backward starts; None computes the outputs too."""
    notes: tuple[str, ...] = ()
    causal: bool = False  # True if the model predicts the next token, so that the first label is no target.
    classes: int | None = None
    auxiliary: bool = False
    """True if it has terms that are computed per microbatch, such as auxiliary losses of experts."""
    narrow: torch.dtype | None = None
    """The 16-bit dtype of the weights of a model that runs under autocast with inputs in float32, as others than transformers'."""

    def __call__(self, model: nn.Module, batch: Batch, *, seed: float, targets: int | None = None) -> Tensor:
        return self.run(model, batch, seed=seed, targets=targets)[0]

    def run(self, model: nn.Module, batch: Batch, *, seed: float | None, targets: int | None = None) -> Computed:
        """Compute the sum of the losses, a scalar, whose backward will start with `seed` (0 for evaluation without gradients); 0,
        with gradients of 0, without targets. None computes the outputs too, also of a batch without labels, whose loss is 0.
        `targets` is the batch's `count` before it went to a device; None counts here."""
        if seed is None and self.kind == "labels" and not isinstance(batch.get("labels"), Tensor):
            return torch.zeros(()), model(**batch), 0, {}
        counted = self.count(batch) if targets is None else targets
        kind = next(model.parameters()).device.type if self.narrow else ""
        with torch.autocast(kind, self.narrow, cache_enabled=False) if self.narrow else wide_losses():  # Weights change memory.
            total, outputs, found, scalars = self.compute(model, batch, counted or 0, seed)
            return total, model(**batch) if seed is None and outputs is None else outputs, found, scalars


def wide_losses() -> AbstractContextManager[None]:
    """Return a context in which torch's losses of 16-bit tensors are computed in float32, as under autocast."""

    def widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments, **named: function(*_widened(arguments), **_widened(named))

    return replaced(functional, {name: widened(getattr(functional, name)) for name in WIDE_LOSSES})


def _widened(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.float() if each.is_floating_point() and each.itemsize < 4 else each, arguments)


def make_loss(
    model: nn.Module, *, mode: LossMode = "auto", compute_loss: ComputeLoss | None = None, smoothing: float = 0.0
) -> Loss:
    """Return the loss of `model`, which is undivided, may be on the meta device, and is not run. `auto` computes a language model's
    loss in chunks of tokens, or over a divided vocabulary, where a trial on a small copy gives the model's own loss and gradients.
    `native` always takes the model's own, and a user's `compute_loss` is taken as is. With `smoothing`, the share of each target
    that is spread over all classes, it is computed from the model's logits. Raises `ConfigError` for smoothing of a loss with
    unknown targets, and for models without a loss."""
    kind: Any = getattr(model, "loss_type", None)
    if smoothing:
        causal = False if kind in _LABELLED else _shifts_labels(model)
        if compute_loss is not None or pretrained_of(model) is None or causal is None:
            whose = "compute_loss" if compute_loss is not None else f"{type(model).__name__} (loss_type {kind})"
            raise ConfigError(f"run.label_smoothing: the targets of {whose} are not known; smooth them there, and set it to 0")
        return _label_loss(model, f"loss: cross entropy with label smoothing {smoothing:g}", causal=causal, smoothing=smoothing)
    if compute_loss is not None:
        return _user_loss(compute_loss)
    if (inside := pretrained_of(model)) is None:
        return _example_loss(f"the loss of {type(model).__name__}")
    if is_adapted(model) and learns_prompts(model):
        cure = "pass compute_loss, or use LoRA"
        raise ConfigError(f"adapters that learn prompts make targets of their own, which only the model knows; {cure}")
    arguments = signature(type(inside).forward).parameters
    if inside.base_model is inside and not any("label" in name for name in arguments):
        why, cure = "has no head, and so no loss of its own", "pass compute_loss, or set model.head to a task"
        if "return_loss" in arguments:
            why = "gives the mean loss of a microbatch, and only if it is called with return_loss=True"
            cure = "pass compute_loss=lambda model, batch: (model(**batch, return_loss=True).loss * n, n)"
        raise ConfigError(f"{type(inside).__name__} {why}; {cure}")
    kind, config = getattr(inside, "loss_type", None), inside.config
    if kind in _LABELLED or type(inside).__name__.endswith(_LABELLED_CLASSES):
        single = getattr(config, "problem_type", None) in (None, "single_label_classification")
        classes = config.num_labels if kind in _LABELLED and single and config.num_labels > 1 else None
        return replace(_label_loss(inside, causal=False), classes=classes)
    if "_loss_function" in vars(inside):
        return _language_loss(inside, mode)
    # Models with these positions may also classify pictures, or add losses of a beam search.
    if kind == "ForQuestionAnswering" and "start_positions" in arguments and "is_impossible" not in arguments:
        return _answer_loss()
    if kind == "ForCTC":
        return _transcript_loss(getattr(config, "ctc_loss_reduction", "mean"))
    if kind == "ForSemanticSegmentation" and config.num_labels > 1:
        return _label_loss(inside, causal=False, ignored=getattr(config, "semantic_loss_ignore_index", 255))
    return _language_loss(inside, mode)


def _language_loss(model: Any, mode: LossMode) -> Loss:
    """Return the loss of a language model, chunked over tokens if a trial shows that to be equal."""
    whose = f"the loss of {type(model).__name__}"
    if output_layer(model) is None:
        return _example_loss(f"{whose} (loss_type {getattr(model, 'loss_type', None)})")
    known = _shifts_labels(model)
    own = Verdict(causal=known, reason="its loss function was replaced")
    verdict = own if "_loss_function" in vars(model) else examine(model, known)
    if verdict.sees_later:
        why = f"{type(model).__name__} is to predict the next token and sees it (a trial shows): its logits depend on later tokens"
        raise ConfigError(f"{why}. Set is_decoder: true in model.config, or model.head: masked_lm", where="model.head")
    if verdict.causal is None:
        return _example_loss(f"{whose} ({verdict.reason})")
    notes: list[str] = []
    head = None
    if mode != "native" and verdict.route is not None:
        head = ChunkedHead(model=model, route=verdict.route, change=verdict.change or UNCHANGED)
        how = "" if verdict.change == UNCHANGED else f", of logits changed by {verdict.change}"
        notes.append(Detail(f"loss: cross entropy in chunks of tokens{how}, equal to the model's own in a trial"))
    elif mode == "auto":
        notes.append(f"loss: the model's own, with all logits in memory, because {verdict.reason}")
    if verdict.auxiliary:
        what = "the loss has auxiliary terms that are computed per microbatch (balance of experts)"
        notes.append(f"{what}: with other sizes of microbatches it is another loss")
    return replace(_label_loss(model, *notes, causal=verdict.causal, head=head), auxiliary=verdict.auxiliary)


def _shifts_labels(model: Any) -> bool | None:
    """Return True if a language model shifts its labels; None for an unknown kind."""
    if (kind := getattr(model, "loss_type", None)) not in _LANGUAGE:
        return None
    return kind != "ForMaskedLM" and not getattr(model.config, "is_encoder_decoder", False)


def _label_loss(
    model: nn.Module,
    *notes: str,
    causal: bool,
    head: ChunkedHead | None = None,
    ignored: int = IGNORED_LABEL,
    smoothing: float = 0.0,
) -> Loss:
    """Return a Hugging Face loss that is a mean over labels, as `mean x count`, or as the sum that `head` computes, or with
    `smoothing` the cross entropy with smoothed targets (Szegedy et al. 2016), as in transformers' `LabelSmoother`."""
    # Each position is read once: a key-value cache would only take memory.
    fixed = {"use_cache": False} if "use_cache" in signature(type(model).forward).parameters else {}

    def count(batch: Batch) -> int:
        copied = "for a causal model a copy of input_ids, -100 where nothing is to be learnt"
        labels = _tensor_of(batch, "labels", f"Give each sample labels ({copied}), or a data_collator that does")
        found = count_targets(labels, causal=causal, ignored=ignored)
        if head is not None:  # Kernels of devices do not check the range of labels.
            require_targets_in(labels[..., 1:] if causal else labels, head.vocabulary)
        return found

    def compute(model: Any, batch: Batch, found: int, seed: float | None) -> Computed:
        inputs, labels = {**fixed, **batch}, batch["labels"]
        targets = batch.get("shift_labels")  # Of a share of sequences, whose labels were shifted before they were cut.
        if smoothing or (head is not None and seed is not None):
            inputs.pop("shift_labels", None)
            targets = targets if targets is not None else shifted(labels) if causal else labels
            if head is not None and seed is not None:
                return head.run(model, inputs, targets=targets, seed=seed, count=found), None, found, {}
            outputs = model(**inputs)
            logits, targets = outputs.logits.flatten(0, -2), targets.flatten()
            return functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing), outputs, found, {}
        if targets is not None:
            inputs["num_items_in_batch"] = max(1, found)  # The mean over targets of all ranks.
        elif not found:
            # A mean over no target is NaN, even times 0. With valid labels it is finite, and is multiplied by 0.
            inputs["labels"] = torch.zeros_like(labels)
        outputs = model(**inputs)
        return outputs.loss * found, outputs, found, _scalars_of(outputs)

    return Loss(kind="labels", count=count, compute=compute, notes=notes, causal=causal)


def _answer_loss() -> Loss:
    """Return the loss of extractive question answering: cross entropy of the start and of the end of an answer; both count, unless
    they lie beyond the sequence. Its mean equals the model's own loss if each example has both positions or none."""

    def answers(batch: Batch) -> list[Tensor]:
        fields = (batch.get(name) for name in ("input_ids", "inputs_embeds"))
        length = next((each.shape[1] for each in fields if isinstance(each, Tensor) and each.dim() > 1), None)
        if length is None:
            raise DataError(f"the batch has no input_ids; it has {_field_names(batch)}")
        cure = "Give each sample the positions of the first and of the last token of its answer"
        found = [_tensor_of(batch, name, cure).reshape(-1) for name in _POSITIONS]
        return [each.clamp(min=0).masked_fill(each >= length, IGNORED_LABEL) for each in found]

    def compute(model: Any, batch: Batch, count: int, seed: float | None) -> Computed:
        outputs = model(**{name: value for name, value in batch.items() if name not in _POSITIONS})
        total = torch.zeros((), device=outputs.start_logits.device)
        for logits, targets in zip((outputs.start_logits, outputs.end_logits), answers(batch), strict=True):
            total = total + functional.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum")
        return total, outputs, count, {}

    def count(batch: Batch) -> int:
        return sum(count_targets(positions, causal=False) for positions in answers(batch))

    return Loss(kind="answers", count=count, compute=compute)


def _transcript_loss(reduction: str) -> Loss:
    """Return the CTC loss as a mean over examples, each aligned with its transcript as a whole. `reduction` (transformers'
    `ctc_loss_reduction`) is the sum over an example's frames, or that sum divided by the transcript's length."""
    if reduction not in ("sum", "mean"):
        raise ConfigError(f"ctc_loss_reduction is {reduction!r}; give sum or mean", where="model.config")

    def compute(model: Any, batch: Batch, found: int, seed: float | None) -> Computed:
        outputs = model(**batch)
        return outputs.loss * (1 if reduction == "sum" else found), outputs, found, {}

    return Loss(
        kind="transcripts",
        count=lambda batch: _tensor_of(batch, "labels", "Give each sample its transcript").shape[0],
        compute=compute,
        notes=("loss: the mean over examples of their alignments with transcripts (CTC)",),
    )


def _example_loss(what: str) -> Loss:
    """Return a module's own scalar loss as a mean over the batch's examples (dim 0 of its first tensor)."""

    def count(batch: Batch) -> int:
        for value in batch.values():
            if isinstance(value, Tensor) and value.dim() > 0:
                return value.shape[0]
        raise DataError(f"the batch holds no tensor with a batch dim; it has {_field_names(batch)}")

    def compute(model: nn.Module, batch: Batch, count: int, seed: float | None) -> Computed:
        if isinstance(output := model(**batch), Mapping):
            found = output.get("loss")
        else:
            found = output[0] if isinstance(output, tuple | list) and output else getattr(output, "loss", output)
        if not isinstance(found, Tensor) or found.numel() != 1:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            why = f"{type(model).__name__}.forward gave {shape} where a scalar loss was expected"
            raise ConfigError(f"{why}; return one or an object with `loss`, or pass compute_loss=(model, batch) -> (sum, count)")
        return found.reshape(()) * count, output, count, _scalars_of(output)

    note = f"{what} is taken for a mean over examples; pass compute_loss to count otherwise"
    return Loss(kind="examples", count=count, compute=compute, notes=(note,))


def _user_loss(compute_loss: ComputeLoss) -> Loss:
    def compute(model: nn.Module, batch: Batch, _: int, seed: float | None) -> Computed:
        result: Any = compute_loss(model, batch)
        number = int | float | str | Tensor
        whole = isinstance(result, tuple) and len(result) in (2, 3)
        if not whole or not isinstance(result[1], number) or not isinstance(result[-1], Mapping | number):
            why = f"compute_loss returned a {type(result).__name__}; it must return (sum, count)"
            what = "the sum of the losses and the number of targets, so that microbatches of different sizes add up"
            raise ConfigError(f"{why}: {what}: for a mean over n targets, return loss * n, n")
        total, count, scalars = (*result, {})[:3]
        require_free_names(scalars, "compute_loss")
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ConfigError("compute_loss: the sum must be a tensor of one element")
        if isinstance(count, Tensor) and count.numel() == 1:
            found = count.detach().reshape(()) if on_accelerator(count) else checked_count(count.item())
            return total.reshape(()), None, found, scalars
        return total.reshape(()), None, checked_count(count), scalars

    return Loss(kind="user", count=lambda batch: None, compute=compute)


def checked_count(count: object) -> int:
    """Return the count of a user's loss. Raises `ConfigError` unless it is an integer of 0 or more."""
    if isinstance(count, bool) or not isinstance(count, int | float) or count != int(count) or count < 0:
        raise ConfigError(f"compute_loss: the count must be a whole number of 0 or more; got {count!r}")
    return int(count)


def _scalars_of(outputs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in outputs.items() if isinstance(outputs, Mapping) else ():
        scalar = isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
        if name != "loss" and (scalar or isinstance(value, float)):
            found[name] = value
    return found


def _tensor_of(batch: Batch, name: str, cure: str) -> Tensor:
    if not isinstance(value := batch.get(name), Tensor):
        raise DataError(f"the batch has no `{name}` tensor; it has {_field_names(batch)}. {cure}")
    return value


def _field_names(batch: Batch) -> str:
    return ", ".join(map(str, batch)) or "nothing"


class TokenScorer:
    """Log-probabilities and entropies of the targets of a Hugging Face language model without its logits, by the chunked head:

    scorer = TokenScorer(model)  # before shard() or Trainer
    scores = scorer(model, {"input_ids": ids, "labels": labels})
    loss = -(weights * scores.log_probs).sum() - 0.01 * scores.entropy.sum()"""

    def __init__(self, model: nn.Module) -> None:
        """Try a small copy of the model's class in float64. Raises `ConfigError` for a model whose loss and gradients the chunked
        head does not give exactly, with the reason, and for one that is partitioned already."""
        inside: Any = pretrained_of(model)
        reason = "it is no language model of transformers"
        if output_layer(inside) is not None:
            verdict = examine(inside)
            reason = verdict.reason
        if is_adapted(model) and learns_prompts(model):
            reason = "its adapters learn prompts, which have no labels"
        if reason or verdict.route is None:
            whose = type(model if inside is None else inside).__name__
            cure = "make a TokenScorer of a model before it is partitioned, or compute the loss from its logits"
            raise ConfigError(f"the tokens of {whose} cannot be scored without its logits, because {reason}; {cure}")
        self._causal = verdict.causal
        self._fixed = {"use_cache": False} if "use_cache" in signature(type(inside).forward).parameters else {}
        self._head = ChunkedHead(model=inside, route=verdict.route, change=verdict.change or UNCHANGED)

    def __call__(self, model: nn.Module, batch: Batch, *, temperature: float = 1.0) -> TokenScores:
        """Return the scores of a batch's labels, float32 (float64 for a float64 model) `[batch, tokens]`. Position i has those of
        the target that is predicted there: label i + 1 of a causal model, which has none at the last position, else label i.
        `model` is the model, or what wraps it, as the loop calls it, partitioned or not; `batch` are its inputs with `labels`
        [batch, tokens], -100 where nothing is to be scored. Logits are divided by `temperature`, a positive number. Raises
        `DataError` for a batch without labels or with others than tokens, `PhaseError` if logits change unlike the small copy's."""
        if not isinstance(labels := batch.get("labels"), Tensor):
            raise DataError(f"the batch has no `labels` to score; it has {_field_names(batch)}")
        targets = shifted(labels) if self._causal else labels
        return self._head.scores(model, {**self._fixed, **batch}, targets=targets, temperature=temperature)
