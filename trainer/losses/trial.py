"""The trial, on a small copy, of the targets that a model's loss averages over, and of the chunked head in its place.

The copy is in float64 throughout (`models/small_copy.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from zeromesh.errors import PhaseError, summary
from zeromesh.kernels.chunked_cross_entropy import UNCHANGED, LogitChange
from zeromesh.trainer.data.collate import count_targets
from zeromesh.trainer.losses.chunked_head import ChunkedHead, Route
from zeromesh.trainer.models.adapters import output_layer
from zeromesh.trainer.models.small_copy import ERRORS, InFloat64, apart, gradients_of, small_copy
from zeromesh.weight_init.weight_sources import seeded_cpu

_TOLERANCE = 1e-10  # relative; two orders of the same float64 sums differ by less than 1e-13
_TRIAL = "trial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The results of the trial."""

    causal: bool | None
    """True if the loss is a mean over shifted labels, False if over labels; None if over neither, as far as is known."""
    route: Route | None = None
    """The route by which the chunked head replaces the loss; None with the `reason` why it cannot."""
    reason: str = ""
    change: LogitChange = UNCHANGED
    """The transformation of the logits before the model's loss."""
    auxiliary: bool = False
    """True if the loss has terms that are no mean over targets, such as auxiliary losses of experts."""
    sees_later: bool = False
    """True if logits depend on the tokens that they are to predict."""


def examine(model: Any, known: bool | None = None) -> Verdict:
    """Try a small copy of a Hugging Face language model on a batch with `input_ids` and `labels` of one shape.

    `known` tells if its class is known to shift labels, which is the fallback without a small copy.
    """
    small = small_copy(model, lambda each: each(**_inputs(each)).loss)
    if isinstance(small, str):
        return Verdict(causal=known, reason="no small copy of it could be tried")
    auxiliary = bool(getattr(small.config, "output_router_logits", False))
    small.config.output_router_logits = False
    causal = next((shifted for shifted in (True, False) if _is_mean_over(small, shifted)), None)
    small.config.output_router_logits = auxiliary
    if causal is None:
        return Verdict(causal=None, reason="its loss is a mean over neither labels nor shifted labels")
    if causal and getattr(small.config, "is_decoder", None) is False and _sees_later(small):
        return Verdict(causal=True, reason="it sees the tokens that it is to predict", sees_later=True)
    if auxiliary:
        auxiliary = not _is_mean_over(small, causal)
    unlike = _unlike_its_class(model)
    if unlike:
        return Verdict(causal=causal, reason=unlike, auxiliary=auxiliary)
    reason = ""
    for route in get_args(Route):
        found = _try_chunked_head(small, route, causal=causal)
        if isinstance(found, LogitChange):
            return Verdict(causal=causal, route=route, change=found, auxiliary=auxiliary)
        reason = reason or found  # The first route, the loss function, gives the reason.
    return Verdict(causal=causal, reason=reason, auxiliary=auxiliary)


def _sees_later(small: Any) -> bool:
    """Return True if a change of the last token changes earlier logits."""
    ids = _inputs(small).get("input_ids")
    if ids is None or small.config.is_encoder_decoder:
        return False
    other = ids.clone()
    other[:, -1] = torch.where(ids[:, -1] == 1, 2, 1)
    with InFloat64(), torch.no_grad():
        one, two = (small(input_ids=each).logits[:, :-1] for each in (ids, other))
    return not torch.allclose(one, two, rtol=1e-9, atol=1e-9)


def _unlike_its_class(model: Any) -> str:
    """Return the reason why logits may differ from those of a copy of the class; empty if none."""
    head = output_layer(model)
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__module__}.{type(head).__name__}, and no nn.Linear"
    if "forward" in vars(model) or "forward" in vars(head):
        return "forward of the model or of its head was replaced"
    return "its head has hooks" if head._forward_hooks or head._forward_pre_hooks else ""


def _try_chunked_head(small: Any, route: Route, *, causal: bool) -> LogitChange | str:
    """Return the transformation of `small`'s logits if the chunked head gives the same loss and gradients, else the reason. Both
    run in training mode with the same random numbers, so dropout makes no difference."""
    head = small.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a Linear"
    inputs = _inputs(small)
    count = count_targets(inputs["labels"], causal=causal)
    targets = shifted(inputs["labels"]) if causal else inputs["labels"]
    change = UNCHANGED
    small.train()
    try:
        with InFloat64():
            own = _gradients(small, lambda: small(**inputs).loss * count)
            while True:
                chunked = ChunkedHead(small, route=route, chunk_tokens=3, change=change)
                run = partial(chunked.run, small, inputs, targets=targets, seed=1.0, count=count)
                try:
                    found = _gradients(small, run)
                    break
                except PhaseError:
                    if chunked.found in (None, change):
                        raise
                    change = chunked.found  # The first run has measured it.
    except ERRORS as error:
        return str(error) if isinstance(error, PhaseError) else summary(error)
    finally:
        small.eval()
    rounding = 1e-4 * max(float(gradient.norm()) for gradient in own.values())
    for name, gradient in own.items():
        if not apart(found[name], gradient, rounding) <= _TOLERANCE:
            return f"the {'loss' if name == '' else 'gradient of ' + name} differs"
    return change


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return labels `[batch, sequence]` shifted left, so that position i holds the label of i + 1, and the last -100."""
    return nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]


def _gradients(small: Any, evaluate: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss under the empty name, and the gradients of all trained parameters."""
    with seeded_cpu(0, _TRIAL), torch.enable_grad():
        loss = evaluate()
        return {"": loss.detach(), **gradients_of(small, [loss])}


def _inputs(small: Any, sequences: slice = slice(None)) -> dict[str, Any]:
    """Return two sequences with 4 and 6 labels, of which 4 and 5 are targets when shifted, or one of them. The decoder of a model
    of pictures or sound gets random encoder outputs, as its loss depends on labels alone."""
    vocab = small.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab, (2, 8), generator=generator)
    labels = ids.roll(3, dims=1).clone()
    labels[0, :4] = -100
    labels[1, 6:] = -100
    if not small.config.is_encoder_decoder or small.main_input_name == "input_ids":
        return {"input_ids": ids[sequences], "labels": labels[sequences]}
    width = getattr(small.config, "encoder", small.config).hidden_size
    hidden = torch.randn(2, 6, width, generator=generator, dtype=torch.float64)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden[sequences]), "labels": labels[sequences]}


def _is_mean_over(small: Any, causal: bool) -> bool:
    """Return True if mean x count is additive: the value of two sequences is the sum of the two values."""
    parts = [_inputs(small, sequences) for sequences in (slice(None), slice(0, 1), slice(1, 2))]
    try:
        with InFloat64(), torch.no_grad():
            sums = [float(small(**part).loss) * count_targets(part["labels"], causal=causal) for part in parts]
    except ERRORS:
        return False
    return abs(sums[1] + sums[2] - sums[0]) <= 1e-9 * abs(sums[0])
