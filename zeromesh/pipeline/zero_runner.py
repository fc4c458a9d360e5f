"""Runs stages of a model whose parameters ZeRO partitions: each action of a schedule is a pass of the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from zeromesh.errors import PhaseError
from zeromesh.pipeline.deferred_weight_grad import WeightQueue
from zeromesh.pipeline.executor import signature_of, take_gradient
from zeromesh.pipeline.stages.build import Stages
from zeromesh.rng import Streams
from zeromesh.zero.pass_progress import MicrobatchPosition
from zeromesh.zero.passes import Forward, Passes, Tensors

LossOf = Callable[[Mapping[str, Any], float], torch.Tensor]
"""`(batch, seed)` to the sum of its losses, a scalar, whose backward will start with `seed`; runs the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchWork:
    """A microbatch: what it is, where it stands in the step, and the gradient of its loss's sum."""

    batch: Mapping[str, Any]
    where: MicrobatchPosition
    seed: float = 1.0
    streams: Streams | None = None
    """What it draws in an evaluation; None: it draws from the generators as they are."""


@dataclass(slots=True)
class ZeroRunner:
    """The `StageRunner` of one step's microbatches. `losses` has the sum of each one's losses, on the last stage."""

    passes: Passes
    stages: Stages
    work: Sequence[MicrobatchWork]
    loss: LossOf
    queue: WeightQueue | None = None
    losses: list[torch.Tensor] = field(init=False)
    _inputs: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    _forwards: dict[tuple[int, int], Forward] = field(default_factory=dict)
    _reduced: dict[int, int] = field(default_factory=dict)
    """By chunk: how many backwards have begun to add to its gradients."""

    def __post_init__(self) -> None:
        self.losses = [torch.zeros(()) for _ in self.work]

    def signature(self, microbatch: int) -> Hashable:
        return signature_of(self.work[microbatch].batch)

    def forward(self, chunk: int, microbatch: int, received: Tensors) -> Tensors:
        run = partial(self._run, chunk, microbatch, received)
        if not torch.is_grad_enabled():
            with self.passes.drawing(self.work[microbatch].streams):
                return self._sent(chunk, microbatch, run())
        made, forward = self.passes.forward(chunk, run, self.work[microbatch].where)
        self._inputs[chunk, microbatch] = [tensor for tensor in received if tensor.requires_grad]
        self._forwards[chunk, microbatch] = forward
        return self._sent(chunk, microbatch, made)

    def _run(self, chunk: int, microbatch: int, received: Tensors) -> Tensors:
        work = self.work[microbatch]
        if not self.stages.is_last(chunk):
            self.passes.begin_without_root()
            return self.stages.forward(chunk, work.batch, received)
        with self.stages.chunk(chunk, received):
            return (self.loss(work.batch, work.seed),)

    def _sent(self, chunk: int, microbatch: int, made: Tensors) -> Tensors:
        if not self.stages.is_last(chunk):
            return made
        self.losses[microbatch] = made[0].detach()
        return ()

    def backward(self, chunk: int, microbatch: int, gradients: Tensors) -> Tensors:
        forward = self._placed(chunk, self._forwards.pop((chunk, microbatch)))
        self.passes.backward(forward, self._start(chunk, microbatch, forward, gradients))
        return self._returned(chunk, microbatch)

    def backward_input(self, chunk: int, microbatch: int, gradients: Tensors) -> Tensors:
        forward = self._forwards[chunk, microbatch]
        with self._require_queue().deferring((chunk, microbatch)):
            self.passes.backward_input(forward, self._start(chunk, microbatch, forward, gradients))
        forward.outputs = ()
        return self._returned(chunk, microbatch)

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        forward = self._placed(chunk, self._forwards.pop((chunk, microbatch)))
        self.passes.backward_weight(forward, partial(self._require_queue().run, (chunk, microbatch)))

    def _placed(self, chunk: int, forward: Forward) -> Forward:
        """Gradients are summed in the order in which they come: the first of a chunk begins the sums, the last one ends them."""
        number = self._reduced.get(chunk, 0)
        self._reduced[chunk] = number + 1
        last = number == len(self.work) - 1
        forward.microbatch = replace(forward.microbatch, first=number == 0, last=last)
        return forward

    def _start(self, chunk: int, microbatch: int, forward: Forward, gradients: Tensors) -> Tensors:
        """What backward starts with: the gradients that the next stage has sent, or the seed of a loss that needs one."""
        if not self.stages.is_last(chunk):
            return gradients
        return [torch.full_like(self.losses[microbatch], self.work[microbatch].seed)] if forward.outputs else ()

    def _returned(self, chunk: int, microbatch: int) -> list[torch.Tensor]:
        """Gradients of what the chunk received."""
        return [take_gradient(tensor) for tensor in self._inputs.pop((chunk, microbatch))]

    def _require_queue(self) -> WeightQueue:
        if self.queue is None:
            raise PhaseError("a schedule that splits backward needs a queue for the gradients of weights")
        return self.queue
