"""Drivers of steps: `StepDriver` runs a schedule's actions as passes of the engine; `Pipeline` is the driver of a staged
model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zeromesh.comm.point_to_point import Channels
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.pipeline.deferred_weight_grad import WeightQueue, defer_weights
from zeromesh.pipeline.executor import Bubble, Executor, Measured, StageRunner, signature_of, take_gradient
from zeromesh.pipeline.generation import StagedForward, StagedLane, TurnRunner
from zeromesh.pipeline.schedule import Kind, PipelineSchedule, ScheduleName, forward_only, make_schedule
from zeromesh.pipeline.stages.build import Stages
from zeromesh.rng import Streams
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.passes import Passes, PassProgress, Tensors

LossOf = Callable[[Mapping[str, Any], float], torch.Tensor]
"""Runs the model on `(batch, seed)` and returns the sum of its losses, a scalar, whose backward will start with `seed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchWork:
    """A microbatch of a step or of an evaluation, and the gradient of its loss's sum."""

    batch: Mapping[str, Any]
    seed: float = 1.0
    streams: Streams | None = None
    """The microbatch's random number streams; None: it draws from the global generators."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager that is entered around each of the microbatch's forwards."""


@dataclass(kw_only=True, slots=True)
class ZeroRunner(StageRunner):
    """Runs one step's microbatches. `losses` has the sum of each microbatch's losses, on the last stage."""

    passes: Passes
    stages: Stages | None
    """The model's stages; None if the model is a single stage."""
    work: Sequence[MicrobatchWork]
    loss: LossOf
    queue: WeightQueue
    scale: float = 1.0
    """The loss scale, by which gradients of losses are multiplied."""
    goes_on: frozenset[tuple[int, int]] = frozenset()
    """The pairs of chunk and microbatch whose backward follows their forward directly."""
    after: Callable[[int], None] | None = None
    """Called with the number of each microbatch whose backward is complete."""
    losses: list[torch.Tensor] = field(init=False)
    _inputs: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    _forwards: dict[tuple[int, int], PassProgress] = field(default_factory=dict)
    _reduced: dict[int, int] = field(default_factory=dict)
    """The number of backwards that have begun to add to the gradients of each chunk."""

    def __post_init__(self) -> None:
        self.losses = [torch.zeros(()) for _ in self.work]

    def signature(self, microbatch: int) -> Hashable:
        return signature_of(self.work[microbatch].batch)

    def forward(self, chunk: int, microbatch: int, received: Tensors) -> Tensors:
        run = partial(self._run, chunk, microbatch, received)
        if not torch.is_grad_enabled():
            with self.passes.drawing(self.work[microbatch].streams):
                return self._sent(chunk, microbatch, run())
        key = chunk, microbatch
        outputs, forward = self.passes.forward(chunk, run, self.work[microbatch].streams, goes_on=key in self.goes_on)
        self._inputs[key] = [tensor for tensor in received if tensor.requires_grad]
        self._forwards[key] = forward
        return self._sent(chunk, microbatch, outputs)

    def _run(self, chunk: int, microbatch: int, received: Tensors) -> Tensors:
        work, stages = self.work[microbatch], self.stages
        with work.around():
            if stages is None:
                return (self.loss(work.batch, work.seed * self.scale),)
            if not stages.is_last(chunk):
                self.passes.begin_without_root()
                return stages.forward(chunk, work.batch, received)
            with stages.chunk(chunk, received):
                return (self.loss(work.batch, work.seed * self.scale),)

    def _is_last(self, chunk: int) -> bool:
        return self.stages is None or self.stages.is_last(chunk)

    def _sent(self, chunk: int, microbatch: int, outputs: Tensors) -> Tensors:
        if not self._is_last(chunk):
            return outputs
        self.losses[microbatch] = outputs[0].detach()
        return ()

    def backward(self, chunk: int, microbatch: int, gradients: Tensors) -> Tensors:
        forward = self._placed(chunk, self._forwards.pop((chunk, microbatch)))
        self.passes.backward(forward, self._start(chunk, microbatch, forward, gradients))
        if self.after is not None:
            self.after(microbatch)
        return self._returned(chunk, microbatch)

    def backward_input(self, chunk: int, microbatch: int, gradients: Tensors) -> Tensors:
        forward = self._forwards[chunk, microbatch]
        with self.queue.deferring((chunk, microbatch)):
            self.passes.backward_input(forward, self._start(chunk, microbatch, forward, gradients))
        return self._returned(chunk, microbatch)

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        forward = self._placed(chunk, self._forwards.pop((chunk, microbatch)))
        self.passes.backward_weight(forward, partial(self.queue.run, (chunk, microbatch)))

    def _placed(self, chunk: int, forward: PassProgress) -> PassProgress:
        """Mark a forward as first or last of its chunk in the order of backwards: the first begins gradient sums, the last ends
        them."""
        number = self._reduced.get(chunk, 0)
        self._reduced[chunk] = number + 1
        forward.first, forward.last = number == 0, number == len(self.work) - 1
        return forward

    def _start(self, chunk: int, microbatch: int, forward: PassProgress, gradients: Tensors) -> Tensors:
        """Return the gradients that backward starts with: those from the next stage, or the seed of a loss that requires one."""
        if not self._is_last(chunk):
            return gradients
        seed = self.work[microbatch].seed * self.scale
        return [torch.full_like(self.losses[microbatch], seed)] if forward.roots else ()

    def _returned(self, chunk: int, microbatch: int) -> list[torch.Tensor]:
        return [take_gradient(tensor) for tensor in self._inputs.pop((chunk, microbatch))]


class StepDriver:
    """Runs one rank's passes over its microbatches by a schedule, which has a single stage for a model that is not cut."""

    def __init__(self, mesh: Mesh, stages: Stages | None = None, name: ScheduleName = "1f1b", chunks: int = 1) -> None:
        """All ranks of the world call this together."""
        self._stages = stages
        self._name: ScheduleName = name
        self._ranks, self._chunks = mesh.pipeline.size, chunks
        self._channels = Channels(mesh.pipeline, mesh.device, shape=mesh.shape, ring=chunks > 1)
        self._executor = Executor(mesh.pipeline, self._channels)
        self._queue = WeightQueue()
        self._measured: Measured | None = None

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, which computes the loss."""
        return self._stages is None or self._stages.is_last(self._chunks - 1)

    @property
    def at_once(self) -> int:
        """The number of microbatches of an evaluation that keep all ranks busy."""
        return 2 * self._ranks if self._ranks > 1 else 1

    def schedule(self, microbatches: int) -> PipelineSchedule:
        """Return the schedule of a step of `microbatches` microbatches."""
        return make_schedule(self._name, ranks=self._ranks, microbatches=microbatches, chunks=self._chunks)

    def train(
        self,
        engine: ZeroEngine,
        work: Sequence[MicrobatchWork],
        loss: LossOf,
        after: Callable[[int], None] = lambda number: None,
    ) -> list[torch.Tensor]:
        """Run forward and backward of a step's microbatches; returns their losses on the last stage, zeros elsewhere.

        `after` is called with the number of each completed microbatch, in order on all ranks; in a pipeline at the end of the
        step.

        Raises:
            CollectiveError: when a neighbour is gone or late.
            PhaseError: during another pass; nothing is begun then.
        """
        schedule = self.schedule(len(work))
        each, actions = self._ranks == 1, schedule.actions[self._executor.group.index]
        follows = frozenset(
            (first.chunk, first.microbatch)
            for first, second in pairwise(actions)
            if first.kind is Kind.FORWARD and second == replace(first, kind=second.kind)
        )

        def run(passes: Passes) -> list[torch.Tensor]:
            runner = ZeroRunner(
                passes=passes,
                stages=self._stages,
                work=work,
                loss=loss,
                queue=self._queue,
                scale=engine.loss_scale,
                goes_on=follows,
                after=after if each else None,
            )
            with torch.enable_grad():
                self._measured = self._executor.run(schedule, runner)
            return runner.losses

        losses = engine.run_schedule(run)
        for number in range(0 if each else len(work)):
            after(number)
        return losses

    def evaluate(self, engine: ZeroEngine, work: Sequence[MicrobatchWork], loss: LossOf) -> list[torch.Tensor]:
        """Run forward alone; returns losses as `train` does."""
        schedule = forward_only(ranks=self._ranks, microbatches=len(work), chunks=self._chunks)
        with engine.evaluation() as passes:
            runner = ZeroRunner(passes=passes, stages=self._stages, work=work, loss=loss, queue=self._queue)
            self._executor.run(schedule, runner)
        return runner.losses

    def bubble(self) -> Bubble | None:
        """Return the idle part of the latest step, predicted and measured; None before the first step, and for a single rank."""
        if self._measured is None or self._ranks == 1:
            return None
        return self._executor.bubble(self._measured)


class Pipeline(StepDriver):
    """One rank's part of the pipeline. All ranks of the pipeline axis call its methods alike."""

    def __init__(self, mesh: Mesh, stages: Stages, name: ScheduleName, blocks: Sequence[nn.Module]) -> None:
        """`blocks` are this rank's blocks, whose gradients a schedule may compute in halves."""
        super().__init__(mesh, stages, name, len(stages.own))
        self.stages = stages
        self._put_back = defer_weights(stages.model, blocks if name == "zero_bubble" else (), self._queue)

    def generation(self, *, microbatches: int, call: Callable[..., Any]) -> StagedForward:
        """Return the forward for one generation's token loop; each of its calls belongs inside a pass of the engine."""
        return StagedForward(self._executor, self.stages, microbatches=microbatches, call=call)

    def run_turns(self, lanes: Sequence[StagedLane], turns: int, call: Callable[..., Any]) -> None:
        """Run `turns` forwards of each lane, and choose a token of each row after each, inside a pass of the engine. All ranks of
        the pipeline call this; `call` is the model's own call."""
        schedule = forward_only(ranks=self._ranks, microbatches=turns * len(lanes), chunks=self._chunks)
        runner = TurnRunner(self.stages, call, lanes, self._executor.group)
        with torch.no_grad():
            self._executor.run(schedule, runner)
        runner.finish()

    def restore(self) -> None:
        """Restore the model's own modules."""
        self._put_back()
        self.stages.restore()

    def close(self) -> None:
        """Leave the channels to the neighbours."""
        self._channels.close()
