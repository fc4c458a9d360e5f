"""Drivers of steps: `StepDriver` runs a schedule's actions as passes of the engine; `Pipeline` is that of a staged model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from zeromesh.comm.point_to_point import Channels
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.pipeline.deferred_weight_grad import WeightQueue, defer_weights
from zeromesh.pipeline.executor import Executor, signature_of, take_gradient
from zeromesh.pipeline.generation import GenerationBatch, InterleavedBatches, StagedForward
from zeromesh.pipeline.schedule import Action, Kind, PipelineSchedule, Timeline, make_schedule
from zeromesh.pipeline.stages.build import Stages
from zeromesh.rng import Streams
from zeromesh.settings.keys import ScheduleName
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.passes import Passes, PassProgress, Tensors

LossOf = Callable[[Mapping[str, Any], float], torch.Tensor]
"""Runs the model on `(batch, seed)` and returns the sum of its losses, a scalar, whose backward will start with `seed`."""
Completed = Callable[[int], None]  # Called with the number of each microbatch whose backward is complete.


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchWork:
    """A microbatch of a step or of an evaluation; `seed` is the gradient of its summed loss, with which backward starts."""

    batch: Mapping[str, Any]
    seed: float = 1.0
    streams: Streams | None = None
    """The microbatch's random number streams; None: it draws from the global generators."""
    forward_context: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager that is entered around each of the microbatch's forwards."""


@dataclass(kw_only=True)
class ZeroRunner:
    """Runs the actions of one step's microbatches as passes of the engine."""

    passes: Passes
    stages: Stages | None  # The model's stages; None if the model is a single stage.
    work: Sequence[MicrobatchWork]
    loss: LossOf
    queue: WeightQueue
    scale: float = 1.0  # The loss scale, by which gradients of losses are multiplied.
    backward_follows: frozenset[tuple[int, int]] = frozenset()
    """The pairs of chunk and microbatch whose backward follows their forward directly."""
    after: Completed | None = None
    losses: list[torch.Tensor] = field(init=False)  # The sum of each microbatch's losses, on the last stage.
    _forwards: dict[tuple[int, int], tuple[PassProgress, list[torch.Tensor]]] = field(default_factory=dict)
    """By (chunk, microbatch), each pass between forward and backward, with the received tensors that require a gradient."""
    _reduced: dict[int, int] = field(default_factory=dict)
    """The number of microbatches, by chunk, whose backward has started to add to the gradients."""

    def __post_init__(self) -> None:
        self.losses = [torch.zeros(()) for _ in self.work]

    def signature(self, microbatch: int) -> Hashable:
        return signature_of(self.work[microbatch].batch)

    def run(self, action: Action, received: Tensors) -> Tensors:
        key, last = (action.chunk, action.microbatch), self.stages is None or self.stages.is_last(action.chunk)
        if action.kind is Kind.FORWARD:
            outputs = self._forward(*key, received, last)
            if not last:
                return outputs
            self.losses[action.microbatch] = outputs[0].detach()
            return ()
        forward, inputs = self._forwards[key]
        if action.kind is not Kind.BACKWARD_INPUT:
            # The first backward of a chunk begins the sums of gradients, the last one ends them.
            number = self._reduced.get(action.chunk, 0)
            self._reduced[action.chunk] = number + 1
            forward.first, forward.last = number == 0, number == len(self.work) - 1
            del self._forwards[key]
        if action.kind is Kind.BACKWARD_WEIGHT:
            self.passes.backward_weight(forward, partial(self.queue.run, key))
            return ()
        if last:  # Backward starts with the seed of the loss, if that requires a gradient.
            seed = self.work[action.microbatch].seed * self.scale
            received = [torch.full_like(self.losses[action.microbatch], seed)] if forward.roots else ()
        if action.kind is Kind.BACKWARD_INPUT:
            with self.queue.deferring(key):
                self.passes.backward(forward, received, inputs_only=True)
        else:
            self.passes.backward(forward, received)
            if self.after is not None:
                self.after(action.microbatch)
        taken = [take_gradient(tensor) for tensor in inputs]
        inputs.clear()
        return taken

    def _forward(self, chunk: int, microbatch: int, received: Tensors, last: bool) -> Tensors:
        work, stages = self.work[microbatch], self.stages

        def run() -> Tensors:
            with work.forward_context():
                if stages is not None and not last:
                    self.passes.begin_without_root()
                    return stages.forward(chunk, work.batch, received)
                with stages.chunk(chunk, received) if stages is not None else nullcontext():
                    return (self.loss(work.batch, work.seed * self.scale),)

        if not torch.is_grad_enabled():
            with self.passes.drawing(work.streams):
                return run()
        key = chunk, microbatch
        outputs, forward = self.passes.forward(chunk, run, work.streams, backward_follows=key in self.backward_follows)
        self._forwards[key] = forward, [tensor for tensor in received if tensor.requires_grad]
        return outputs


class StepDriver:
    """Runs a rank's microbatches of a step or an evaluation by a pipeline schedule; an uncut model is a single stage."""

    def __init__(self, mesh: Mesh, stages: Stages | None = None, name: ScheduleName = "1f1b") -> None:
        """All ranks of the world call this together."""
        self._stages = stages
        self._name: ScheduleName = name
        self._ranks, self._chunks = mesh.pipeline.size, 1 if stages is None else len(stages.own)
        self._channels = Channels(mesh.pipeline, mesh.device, shape=mesh.shape, ring=self._chunks > 1)
        self._executor = Executor(self._channels)
        self._queue = WeightQueue()
        self._runner = partial(ZeroRunner, stages=stages, queue=self._queue)
        self._measured: tuple[PipelineSchedule, list[Any]] | None = None
        """The schedule of the latest step, and the moments that its run has returned."""

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, which computes the loss."""
        return self._stages is None or self._stages.is_last(self._chunks - 1)

    @property
    def evaluation_microbatches(self) -> int:
        """The number of microbatches to pass to one call of `evaluate` so that all ranks are busy."""
        return 2 * self._ranks if self._ranks > 1 else 1

    def _schedule(self, name: ScheduleName | Literal["forward"], microbatches: int) -> PipelineSchedule:
        return make_schedule(name, ranks=self._ranks, microbatches=microbatches, chunks=self._chunks)

    def train(
        self, engine: ZeroEngine, work: Sequence[MicrobatchWork], loss: LossOf, after: Completed = lambda number: None
    ) -> list[torch.Tensor]:
        """Run forward and backward of a step's microbatches; returns their losses on the last stage, zeros elsewhere. `after` is
        called with the number of each completed microbatch, in order on all ranks; in a pipeline at the end of the step. Raises
        `CollectiveError` when a neighbour is gone or late, and `PhaseError` during another pass, when nothing is begun."""
        schedule = self._schedule(self._name, len(work))
        each, actions = self._ranks == 1, schedule.actions[self._executor.group.index]
        follows = frozenset(
            (first.chunk, first.microbatch)
            for first, second in pairwise(actions)
            if first.kind is Kind.FORWARD and second == replace(first, kind=second.kind)
        )

        def run(passes: Passes) -> list[torch.Tensor]:
            then, scale = after if each else None, engine.loss_scale
            runner = self._runner(passes=passes, work=work, loss=loss, scale=scale, backward_follows=follows, after=then)
            with torch.enable_grad():
                self._measured = schedule, self._run(schedule, runner)
            return runner.losses

        losses = engine.run_schedule(run)
        for number in range(0 if each else len(work)):
            after(number)
        return losses

    def evaluate(self, engine: ZeroEngine, work: Sequence[MicrobatchWork], loss: LossOf) -> list[torch.Tensor]:
        """Run the forwards of microbatches without gradients; returns their losses on the last stage, zeros elsewhere."""
        with engine.evaluation() as passes:
            runner = self._runner(passes=passes, work=work, loss=loss)
            self._run(self._schedule("forward", len(work)), runner)
        return runner.losses

    def _run(self, schedule: PipelineSchedule, runner: ZeroRunner) -> list[Any]:
        """Carry out this rank's part of a schedule, as `Executor.run`; a single stage sends nothing, and waits for no rank."""
        if self._ranks * self._chunks > 1:
            return self._executor.run(schedule, runner)
        for action in schedule.actions[0]:
            self._executor.group.watch.begin_microbatch(action.microbatch)
            runner.run(action, ())
        return []

    def timelines(self) -> tuple[Timeline, Timeline] | None:
        """Return the predicted and measured timeline of the latest step; None before the first step, and for a single rank."""
        return None if self._measured is None or self._ranks == 1 else self._executor.timelines(*self._measured)


class Pipeline(StepDriver):
    """The step driver of a model cut into pipeline stages. All ranks of the pipeline axis make the same calls of its methods."""

    def __init__(self, mesh: Mesh, stages: Stages, name: ScheduleName, blocks: Sequence[nn.Module]) -> None:
        """`blocks` are this rank's blocks, whose gradients a schedule may compute in halves."""
        super().__init__(mesh, stages, name)
        self.stages = stages
        self._undo_deferral = defer_weights(stages.model, blocks if name == "zero_bubble" else (), self._queue)

    def generation(self, *, microbatches: int, call: Callable[..., Any]) -> StagedForward:
        """Return the forward for one generation's token loop; each of its calls belongs inside a pass of the engine."""
        return StagedForward(self._executor, self.stages, self._schedule("forward", microbatches), call)

    def run_token_forwards(self, batches: Sequence[GenerationBatch], count: int, call: Callable[..., Any]) -> None:
        """Run `count` forwards of each batch, after each of which the last stage chooses the next token of each row, inside a pass
        of the engine. All ranks of the pipeline call this; `call` calls the model."""
        runner = InterleavedBatches(self.stages, call, batches, self._executor.group)
        with torch.no_grad():
            self._executor.run(self._schedule("forward", count * len(batches)), runner)
        runner.finish()

    def restore(self) -> None:
        """Undo all changes of the model: its modules are whole again, and its linear layers compute weight gradients at once."""
        self._undo_deferral()
        self.stages.restore()

    def close(self) -> None:
        """Close the channels over which this rank exchanges tensors with neighbouring stages."""
        self._channels.close()
