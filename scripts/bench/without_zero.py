"""Divided layers and stages of a model whose parameters are simply there, with autograd and without ZeRO."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeromesh.errors import PhaseError
from zeromesh.pipeline.deferred_weight_grad import WeightQueue
from zeromesh.pipeline.executor import signature_of, take_gradient
from zeromesh.pipeline.schedule import Action, Kind
from zeromesh.pipeline.stages.build import Stages, block_costs, plan_cut
from zeromesh.pipeline.stages.model_anatomy import examine


def cut_model(
    model: nn.Module,
    *,
    ranks: int,
    index: int,
    chunks: int = 1,
    counts: Sequence[int] = (),
    example: Mapping[str, Any] | None = None,
) -> Stages:
    """Cut a model whose layers are whole for `ranks` ranks of `chunks` chunks each and leave in it what belongs to rank `index`;
    `counts` as in `plan_cut`.

    Raises:
        LayoutError: for a model that cannot be cut, or not in this way.
    """
    anatomy = examine(model, example)
    cut = plan_cut(block_costs(model, anatomy), ranks * chunks, counts)
    return Stages(model, anatomy, cut, [chunk * ranks + index for chunk in range(chunks)])


class PlainRunner:
    """`loss(model, batch)` gives a microbatch's loss, a scalar; its backward starts with `seed`. `losses` are those of all
    microbatches, on the last stage; elsewhere zeros."""

    def __init__(
        self,
        stages: Stages,
        batches: Sequence[Mapping[str, Any]],
        loss: Callable[[Any, Mapping[str, Any]], torch.Tensor],
        seed: float = 1.0,
        queue: WeightQueue | None = None,
    ) -> None:
        self._stages = stages
        self._batches = batches
        self._loss = loss
        self._seed = seed
        self._queue = queue
        self.losses = torch.zeros(len(batches), dtype=torch.float64)
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._outputs: dict[tuple[int, int], Sequence[GradientEdge] | torch.Tensor] = {}

    def signature(self, microbatch: int) -> Hashable:
        return signature_of(self._batches[microbatch])

    def run(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        key = action.chunk, action.microbatch
        if action.kind is Kind.FORWARD:
            return self._forward(*key, received)
        if self._queue is None and action.kind is not Kind.BACKWARD:
            raise PhaseError("a schedule that splits backward needs a queue for the gradients of weights")
        if self._queue is not None and action.kind is Kind.BACKWARD_WEIGHT:
            self._queue.run(key)
            return ()
        inputs, outputs = self._inputs.pop(key), self._outputs.pop(key, None)
        with self._queue.deferring(key) if self._queue and action.kind is Kind.BACKWARD_INPUT else nullcontext():
            if isinstance(outputs, torch.Tensor):
                torch.autograd.backward(outputs, torch.full_like(outputs, self._seed))
            elif outputs is not None:
                torch.autograd.backward(outputs, received)
        return [take_gradient(tensor) for tensor in inputs]

    def _forward(self, chunk: int, microbatch: int, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        batch, key = self._batches[microbatch], (chunk, microbatch)
        if torch.is_grad_enabled():
            self._inputs[key] = [tensor for tensor in received if tensor.requires_grad]
        if self._stages.is_last(chunk):
            with self._stages.chunk(chunk, received):
                loss = self._loss(self._stages.model, batch)
            self.losses[microbatch] = loss.detach()
            if loss.requires_grad:
                self._outputs[key] = loss
            return ()
        made = self._stages.forward(chunk, batch, received)
        # The edge alone: what was sent need not stay until backward.
        edges = [get_gradient_edge(tensor) for tensor in made if tensor.requires_grad]
        if edges:
            self._outputs[key] = edges
        return made
