"""`Pipeline`: the stages of one rank, how they run a step, and what that took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zeromesh.comm.point_to_point import Channels
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.pipeline.deferred_weight_grad import WeightQueue, defer_weights
from zeromesh.pipeline.executor import Bubble, Executor, Measured
from zeromesh.pipeline.generation import StagedForward
from zeromesh.pipeline.schedule.actions import PipelineSchedule, ScheduleName, forward_only, make_schedule
from zeromesh.pipeline.stages.build import Stages
from zeromesh.pipeline.zero_runner import LossOf, MicrobatchWork, ZeroRunner
from zeromesh.zero.passes import Passes


class Pipeline:
    """One rank's part of the pipeline. All ranks of the pipeline axis call its methods alike."""

    def __init__(self, mesh: Mesh, stages: Stages, name: ScheduleName, blocks: Sequence[nn.Module]) -> None:
        """`blocks` are this rank's own: those whose gradients a schedule may compute in halves."""
        self.stages = stages
        self._name: ScheduleName = name
        self._ranks, self._chunks = mesh.pipeline.size, len(stages.own)
        sets = mesh.shape.groups("pipeline")
        self._channels = Channels(mesh.pipeline, mesh.device, sets=sets, ring=self._chunks > 1)
        self._executor = Executor(mesh.pipeline, self._channels)
        self._queue = WeightQueue() if name == "zero_bubble" else None
        self._put_back: Callable[[], None] = lambda: None
        if self._queue is not None:
            self._put_back = defer_weights(stages.model, blocks, self._queue)
        self._measured: Measured | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which knows the loss."""
        return self.stages.is_last(self._chunks - 1)

    def schedule(self, microbatches: int) -> PipelineSchedule:
        """Return the order in which a step of so many microbatches runs."""
        return make_schedule(self._name, ranks=self._ranks, microbatches=microbatches, chunks=self._chunks)

    def train(self, passes: Passes, work: Sequence[MicrobatchWork], loss: LossOf) -> list[torch.Tensor]:
        """Run forward and backward of a step's microbatches; returns their losses on the last stage, zeros elsewhere.

        Raises:
            CollectiveError: when a neighbour is gone or late.
        """
        runner = ZeroRunner(passes, self.stages, work, loss, self._queue)
        with torch.enable_grad():
            self._measured = self._executor.run(self.schedule(len(work)), runner)
        passes.end_backwards()
        return runner.losses

    def evaluate(self, passes: Passes, work: Sequence[MicrobatchWork], loss: LossOf) -> list[torch.Tensor]:
        """Forward alone, inside an evaluation of the engine."""
        runner = ZeroRunner(passes, self.stages, work, loss)
        with torch.no_grad():
            self._executor.run(forward_only(ranks=self._ranks, microbatches=len(work), chunks=self._chunks), runner)
        return runner.losses

    def generation(self, *, microbatches: int, call: Callable[..., Any]) -> StagedForward:
        """The model's forward for the loop of one generation; each call of it belongs inside a pass of the engine."""
        return StagedForward(self._executor, self.stages, microbatches=microbatches, call=call)

    def bubble(self) -> Bubble | None:
        """Return how much of the latest step ranks have stood still, predicted and measured; None before the first."""
        return self._executor.bubble(self._measured) if self._measured is not None else None

    def restore(self) -> None:
        """Give the model its own modules back."""
        self._put_back()
        self.stages.restore()

    def close(self) -> None:
        """Leave the channels to the neighbours."""
        self._channels.close()
