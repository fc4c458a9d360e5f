"""A language model's head that computes the loss chunk by chunk instead of returning logits. During a microbatch, the head
module's `forward` computes the loss, so that hooks on it (which may gather its weight) work as usual, and returns the loss and a
few known probe values in place of logits. What the rest of the model makes of the probes shows how it transforms its logits."""

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromesh.errors import PhaseError
from zeromesh.kernels.chunked_head import UNCHANGED, LogitChange, TokenScores, chunked_cross_entropy, token_scores
from zeromesh.overrides import override
from zeromesh.tensor.layers import ColumnParallelLinear
from zeromesh.trainer.models.adapters import output_layer

_Compute = Callable[..., Tensor]
Route = Literal["loss_function", "logits"]
"""The place where the model's logits end: in its replaced `loss_function`, or in the output of a call without labels."""

_TINY, _HUGE = 2.0**-26, 2.0**40
_PROBES = (_TINY, _HUGE, -7.0, -0.5, 0.3, 1.0, 4.0, 40.0)
"""Probe values in place of logits: the first two reveal scale and cap, and the others check them."""


@dataclass(kw_only=True, slots=True)
class _HeadCall:
    targets: Tensor  # [tokens]
    compute: _Compute
    """Takes what `chunked_cross_entropy` takes, but for the seed and the count; returns a tensor of any shape."""
    result: Tensor | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class ChunkedHead:
    """Replaces the `forward` of a model's output embedding, an `nn.Linear`, during `run`, and by the route "loss_function" the
    model's `loss_function`. `chunk_tokens` is the number of tokens whose logits exist at once; None minimises memory. The first run
    checks `change`, the transformation of logits before the loss."""

    model: Any
    route: Route
    chunk_tokens: int | None = None
    change: LogitChange = UNCHANGED
    vocabulary: int = field(init=False)
    found: LogitChange | None = field(default=None, init=False)
    """The transformation of the logits that the first run has measured."""
    _probes: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.vocabulary = len(output_layer(self.model).weight)

    def run(self, model: Any, inputs: dict[str, Any], *, targets: Tensor, seed: float, count: int) -> Tensor:
        """Return the sum of the losses over `targets`, where -100 marks no target; the model's inputs include `labels`. Raises
        `PhaseError` if the model uses its head in an unsupported way, or transforms its logits otherwise than `change`."""
        kernel: Callable[..., Tensor] = partial(chunked_cross_entropy, seed=seed, count=count)
        if self.route == "logits":
            return self._run(model, inputs, targets, kernel)[0]
        mean = lambda *head, **keys: kernel(*head, **keys) / max(1, count)  # noqa: E731
        # Terms that the model adds to its mean loss (auxiliary losses of experts) are scaled as the mean is.
        loss: Tensor = self._run(model, inputs, targets, mean)[1].loss * count
        return loss

    def scores(self, model: Any, inputs: dict[str, Any], *, targets: Tensor, temperature: float) -> TokenScores:
        """Return the scores of `targets`, of their shape; inputs and errors are those of `run`. The model's loss is not used."""

        def kernel(*head: Any, chunk_tokens: None, **keys: Any) -> Tensor:
            return torch.stack(token_scores(*head, temperature=temperature, **keys))

        log_probs, entropy, *others = self._run(model, inputs, targets, kernel)[0].view(-1, *targets.shape)
        return TokenScores(log_probs, entropy, *(each.detach() for each in others))

    def _run(self, model: Any, inputs: dict[str, Any], targets: Tensor, compute: _Compute) -> tuple[Tensor, Any]:
        """Return what `compute` has returned to the head, as the head's hooks have passed it on, and the model's outputs."""
        current = _HeadCall(targets=targets.reshape(-1), compute=compute)
        with ExitStack() as undone:
            undone.callback(override(output_layer(self.model), "forward", partial(self._forward, current)))
            if self.route == "logits":
                outputs = model(**_without_labels(model, inputs))
                return self._check_logits(current, outputs.logits), outputs
            given = lambda *logits, **more: self._check_logits(current, *logits, **more).sum()  # noqa: E731
            undone.callback(override(self.model, "_loss_function", given))
            outputs = model(**inputs)
        if current.result is None:
            raise PhaseError("the model computed a loss without calling its output embedding")
        return current.result, outputs

    def _forward(self, current: _HeadCall, hidden: Tensor) -> Tensor:
        if current.result is not None:
            raise PhaseError("the model called its output embedding twice in one forward")
        rows = hidden.reshape(-1, hidden.shape[-1])
        if (count := len(rows)) != current.targets.numel():
            raise PhaseError(f"{count} hidden states reached the head for {current.targets.numel()} labels")
        # The head is looked up for each call, as a divided model gets its own head back after training.
        head: nn.Linear | ColumnParallelLinear = output_layer(self.model)
        keys: Any = {"chunk_tokens": self.chunk_tokens, "change": self.change}
        if isinstance(head, ColumnParallelLinear):
            keys |= {"sizes": head.sizes, "exchange": head.exchange}
        found = current.compute(rows, head.weight, head.bias, current.targets.to(rows.device), **keys)
        if self._probes is None or (self._probes.dtype, self._probes.device) != (found.dtype, found.device):
            self._probes = found.new_tensor(_PROBES)  # The tensor is kept, as a copy to a device blocks the host.
        returned = torch.cat((found.reshape(-1), self._probes)).reshape(1, 1, -1)
        # The result depends on the returned tensor, so that gradient hooks of the head run; the model may write in place.
        current.result = returned[0, 0, : found.numel()].view(found.shape).clone()
        return returned

    def _check_logits(self, current: _HeadCall, /, logits: Tensor, *_: Any, **__: Any) -> Tensor:
        if current.result is None:
            raise PhaseError("the model computed a loss without calling its output embedding")
        if self.found is None and not logits.is_meta:  # Meta tensors have no values.
            if logits.numel() != (given := len(_PROBES) + current.result.numel()):
                raise PhaseError(f"{logits.numel()} logits arrive at the loss where the head gave {given}")
            # The probes after the result show the scale and the cap.
            made = logits.detach().flatten()[-len(_PROBES) :].double().cpu()
            scale, most = float(made[0]) / _TINY, float(made[1])
            change = LogitChange(scale=scale, cap=0.0 if math.isclose(most, scale * _HUGE, rel_tol=1e-2) else most)
            expected = torch.tensor(_PROBES, dtype=torch.float64)
            change.apply_(expected)
            rounding = 1e-12 if logits.dtype is torch.float64 else 16 * torch.finfo(logits.dtype).eps
            if not torch.allclose(made, expected, rtol=rounding, atol=0):
                raise PhaseError("the model changes its logits between the head and the loss")
            self.found = change
            if not self.found.close_to(self.change):
                why = f"the model changes its logits before its loss by {self.found}"
                raise PhaseError(f"{why}, and a small copy of it by {self.change}; set model.loss: native")
        return current.result


def _without_labels(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without labels, from which an encoder-decoder model gets its decoder inputs."""
    rest, labels = {name: value for name, value in inputs.items() if name != "labels"}, inputs["labels"]
    if any(rest.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds")):
        return rest
    if (method := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        return rest | {"decoder_input_ids": method(labels=labels)}
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        for cls in type(model).__mro__:
            if (shift := getattr(sys.modules[cls.__module__], "shift_tokens_right", None)) is not None:
                return rest | {"decoder_input_ids": shift(labels, config.pad_token_id, config.decoder_start_token_id)}
    return rest
