"""The memory that forward and backward of one rank's part of the workload allocate, in one process: no engine and no peers.

    python -m bench.divided_activations SYSTEM WORKLOAD RANK

As `activations.py` does it for a whole model. What other ranks would give (sums of activations, inputs of a stage, gradients of its
outputs) has the right shapes and any values. A stage of a pipeline runs all actions of its rank in the order of the schedule.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.activations import RESULT, Activations, forget, running
from bench.divided import CHUNKS, Form
from bench.without_zero import PlainRunner
from bench.workload import Workload
from zeromesh.comm.activation_collectives import Exchange, Pending
from zeromesh.pipeline.deferred_weight_grad import WeightQueue, defer_weights
from zeromesh.pipeline.schedule import Kind, make_schedule, message_of
from zeromesh.pipeline.stages.build import Stages, block_costs, plan_cut
from zeromesh.pipeline.stages.model_anatomy import examine
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.prepare import use_fastest_linear
from zeromesh.trainer.models.tensor_trial import load_parts


class AloneExchange(Exchange):
    """Stands for the exchange of rank `index` of `size`: all others have what this one has."""

    def __init__(self, size: int, index: int) -> None:
        self.size = size
        self.index = index

    def all_reduce_async(self, tensor: Tensor) -> Pending:
        return Pending(tensor.detach().clone)

    def all_gather_async(self, tensor: Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        return Pending(lambda: torch.cat([tensor.detach()] * self.size, dim))

    def reduce_scatter_async(self, tensor: Tensor, dim: int) -> Pending:
        return Pending(lambda: tensor.detach().chunk(self.size, dim)[self.index].clone())


def divide_layers(model: nn.Module, form: Form, rank: int) -> Parallelized:
    """Leave rank `rank`'s part of each layer."""
    return Parallelized(model, AloneExchange(form.tensor, rank), plan_tensor(model, form.tensor))


def cut_stages(model: nn.Module, form: Form, rank: int) -> Stages:
    """Leave rank `rank`'s stages, as `divide` cuts them."""
    anatomy, chunks = examine(model), CHUNKS.get(form.schedule, 1)
    cut = plan_cut(block_costs(model, anatomy), form.pipeline * chunks)
    return Stages(model, anatomy, cut, [chunk * form.pipeline + rank for chunk in range(chunks)])


def measure(name: str, workload: Workload, rank: int) -> Activations:
    """One step after a first one, which fills the libraries' caches."""
    torch.manual_seed(workload.seed)
    form = Form.of(name, workload.ranks)
    model = workload.build_model().to(workload.compute).train()
    step = (_layers if form.tensor > 1 else _stages)(model, workload, form, rank)
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    sums = running(profiled)
    return Activations(saved=0, peak=max(sums))


def _layers(model: Any, workload: Workload, form: Form, rank: int) -> Callable[[], None]:
    loss = make_loss(model)  # Tried on the undivided model, as by the trainer.
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    load_parts(model, divide_layers(model, form, rank).parts, whole)
    _prepare(model, workload)
    (batch,) = _batches(workload)
    seed = 1.0 / batch["labels"].numel()

    def step() -> None:
        total = loss(model, batch, seed=seed)
        total.backward(torch.full_like(total, seed))

    return step


def _stages(model: Any, workload: Workload, form: Form, rank: int) -> Callable[[], None]:
    loss = make_loss(model)
    _prepare(model, workload)
    stages = cut_stages(model, form, rank)
    schedule = make_schedule(form.schedule, ranks=form.pipeline, microbatches=workload.microbatches, chunks=len(stages.own))
    queue = WeightQueue() if form.schedule == "zero_bubble" else None
    if queue is not None:
        defer_weights(model, list(model.model.layers), queue)
    batches = _batches(workload)
    seed = 1.0 / (len(batches) * batches[0]["labels"].numel())

    def hidden() -> Tensor:
        return torch.zeros(workload.micro, workload.sequence, workload.hidden, dtype=workload.compute)

    def step() -> None:
        runner = PlainRunner(stages, batches, lambda model, batch: loss(model, batch, seed=seed), seed, queue)
        for action in schedule.actions[rank]:
            given = [hidden()] if message_of(schedule, rank, action, received=True) is not None else []
            if action.kind is Kind.FORWARD:
                given = [tensor.requires_grad_() for tensor in given]
            runner.run(action, given)

    return step


def _prepare(model: nn.Module, workload: Workload) -> None:
    use_fastest_linear(model, workload.compute, "cpu")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(forget)


def _batches(workload: Workload) -> list[dict[str, Tensor]]:
    return [{"input_ids": part, "labels": part} for part in workload.tokens()[0].split(workload.micro)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(RESULT + json.dumps(asdict(measure(sys.argv[1], Workload.from_json(sys.argv[2]), int(sys.argv[3])))))
