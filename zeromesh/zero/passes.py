"""Passes over the model: what the hooks tell becomes gathers, releases and reductions.

    forward     units are gathered around use, the next one ahead of it by the recorded order
    backward    the same in reverse; gradients leave as buckets complete

A microbatch's backward may follow its forward at once, or after other microbatches have run: `Forward` keeps what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeromesh import faults
from zeromesh.errors import PhaseError
from zeromesh.flat.placement import Placement
from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.watch import Activity
from zeromesh.zero.build import Built
from zeromesh.zero.hooks import on_gradient_of
from zeromesh.zero.options import ZeroOptions
from zeromesh.zero.order import GatherOrder
from zeromesh.zero.phase import Phase
from zeromesh.zero.randomness import own_randomness, seed_forward
from zeromesh.zero.reduction import GradientReducer
from zeromesh.zero.unit import Bucket, Unit
from zeromesh.zero.update import Updater
from zeromesh.zero.walk import Microbatch, Mode, Walk

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A microbatch between its forward, of a chunk of the model, and its backward. `outputs` are what backward starts from."""

    chunk: int
    microbatch: Microbatch
    outputs: tuple[torch.Tensor, ...]
    walk: Walk


class Passes:
    """Of one engine; what `Hooks` listens for. One pass at a time."""

    def __init__(self, built: Built, mesh: Mesh, options: ZeroOptions, updater: Updater) -> None:
        self.units = built.units
        self.mode = Mode.IDLE
        self._mesh = mesh
        self._options = options
        self._updater = updater
        self._transport = built.transport
        self._sharded = options.placements.parameters is Placement.SHARDED
        self._unit_of = {id(bucket): unit for unit in self.units for bucket in unit.buckets}
        self._order = GatherOrder()
        self._entry: nn.Module | None = None
        self._microbatch: Microbatch | None = None
        self._walk = Walk()
        self._last_reductions: dict[int, list[int]] = {}
        self._reductions_settled = False
        self.gradients = GradientReducer(
            built.reduction.reducer,
            options.precision.reduce,
            direct=mesh.shard.size == 1,
            overlap=options.overlap,
            prepare=updater.shards.make_room,
            announce=self._announce_reduction,
            on_reduced=updater.take,
            on_complete=self._on_complete,
        )

    # Training

    def train(self, run: Callable[[], torch.Tensor], seed: float, microbatch: Microbatch) -> torch.Tensor:
        """Forward and backward of a microbatch at once: `run()` gives a scalar, whose backward starts with `seed`.

        Returns the detached scalar.
        """
        self._begin(Mode.FORWARD, "train", microbatch)
        with own_randomness(), torch.enable_grad():
            loss = run()
            done = Forward(chunk=0, microbatch=microbatch, outputs=(loss,), walk=self._walk)
            self.mode = Mode.BACKWARD
            self._backward(done, [torch.full_like(loss, seed)])
        self.end()
        return loss.detach()

    def _backward(self, forward: Forward, gradients: Tensors) -> None:
        microbatch = forward.microbatch
        reduce = microbatch.last or self._options.placements.accumulating is Placement.SHARDED
        order = self._walk.reduction_order(range(len(self.units)))
        self._reductions_settled = order == self._last_reductions.get(forward.chunk)
        self._last_reductions[forward.chunk] = order
        buckets = [bucket for index in order for bucket in self.units[index].trainable]
        self._walk.turn({unit.index: len(unit.trainable) for unit in self.units})
        self._updater.begin_backward(buckets, first=microbatch.first, last=microbatch.last)
        self.gradients.begin(buckets, reduce=reduce, first=microbatch.first)
        pairs = [(out, grad) for out, grad in zip(forward.outputs, gradients, strict=True) if out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        else:
            # A microbatch without targets may have a constant for its loss; its gradients are zeros. Nothing is computed, but
            # peers gather units around their backward.
            for index, place in reversed(self._walk.calls):
                self.before_backward(self.units[index], place)
        self.gradients.flush()
        self._updater.end_backward(self.units)

    # Any pass

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forward passes under no_grad, on all ranks alike."""
        with torch.no_grad():
            self._begin(Mode.EVALUATION, "eval")
            try:
                yield
                self.end()
            except BaseException as error:
                self._mesh.fail(error)
                raise

    def _begin(self, mode: Mode, kind: str, microbatch: Microbatch | None = None) -> None:
        if self._entry is not None:
            self.end()  # A call of the user's own that failed half-way.
        if self.mode is not Mode.IDLE:
            raise PhaseError(f"a pass cannot begin during {self.mode.value}")
        self.mode = mode
        self._walk = Walk()
        self._microbatch = microbatch
        self._order.begin(kind)

    def end(self) -> None:
        """The pass is over, well or not."""
        for unit in self.units:
            if self._sharded and unit.phase in (Phase.GATHERING, Phase.LIVE):
                if unit.phase is Phase.GATHERING:
                    unit.wait()
                unit.release()
                unit.enter(Phase.RESTING)
        self._order.end()
        self.mode = Mode.IDLE
        self._entry = None
        self._microbatch = None
        self._transport.poll()

    def need(self, unit: Unit) -> None:
        """Make a unit live, and start to gather what the recorded order expects next."""
        settled = self._order.visit(unit.index)
        if unit.phase is Phase.RESTING:
            self.start_gather(unit, settled=settled)
        if unit.phase is Phase.GATHERING:
            unit.wait()
        for index in self._order.upcoming(self._options.prefetch):
            if self.units[index].phase is Phase.RESTING:
                self.start_gather(self.units[index], settled=True)

    def start_gather(self, unit: Unit, *, settled: bool) -> None:
        """Begin to gather a unit; `settled` where that follows a recorded order."""
        self._event(Activity.GATHER, unit, settled=settled)
        unit.gather()

    def _event(self, activity: Activity, unit: Unit, *, settled: bool) -> None:
        if self._mesh.watch is not None:
            # All data-parallel ranks: replicas sum over one another in the order of reductions.
            self._mesh.watch.event(activity, unit.index, self._mesh.data.ranks, settled=settled)

    # What hooks tell

    def before_forward(self, unit: Unit) -> None:
        """A unit is about to run: in a pass, in recomputation during backward, or because the user called the model."""
        if self.mode is Mode.BACKWARD:
            self._need_in_backward(unit)
            self._seed(unit)  # After `checkpoint` has restored the state from before this hook ran in forward.
            return
        if self.mode is Mode.IDLE:
            self._begin_users_pass(unit.module)
        faults.visit("forward")
        self._walk.visit(unit.index)
        self.need(unit)
        self._mesh.post(Activity.FORWARD, unit.index)
        self._seed(unit)

    def before_part(self, module: nn.Module) -> None:
        """A module that holds some of the root's parameters is about to run, perhaps without the root."""
        if self.mode is Mode.IDLE:
            self._begin_users_pass(module)
        if self.units[0].phase is not Phase.LIVE:
            self.need(self.units[0])

    def after_part(self, module: nn.Module) -> None:
        """It has run."""
        if self._entry is module and self.mode is Mode.EVALUATION:
            self.end()

    def _begin_users_pass(self, module: nn.Module) -> None:
        if torch.is_grad_enabled():
            raise PhaseError(
                "the model was called outside a training step with gradients enabled; call it under torch.no_grad(), "
                "or train through the trainer"
            )
        self._begin(Mode.EVALUATION, "user")
        self._entry = module
        if module is not self.units[0].module:
            self.need(self.units[0])

    def after_forward(self, unit: Unit, output: Any) -> None:
        """A unit has run: hook its outputs for backward, or rest."""
        if self.mode is Mode.BACKWARD:
            return
        if self.mode is Mode.FORWARD:
            place = self._walk.place
            if on_gradient_of(output, lambda: self.before_backward(unit, place)):
                self._walk.calls.append((unit.index, place))
        if self._sharded and unit.index != 0 and unit.phase is Phase.LIVE:
            unit.release()
            unit.enter(Phase.RESTING)
        if self._entry is unit.module:
            self.end()

    def before_backward(self, unit: Unit, place: int) -> None:
        """Backward has reached the outputs of a unit's call; the calls of units after number `place` came after it."""
        if self.mode is not Mode.BACKWARD:
            raise PhaseError(
                f"backward reached unit {unit.name} outside a training step; let the trainer call backward"
            )
        for index in self._walk.leave_passed(place):
            self._leave_backward(self.units[index])
        if not self._walk.reach(unit.index):
            return
        self._need_in_backward(unit)
        if self._options.overlap:
            self.gradients.pump()
        self._mesh.post(Activity.BACKWARD, unit.index)

    def _need_in_backward(self, unit: Unit) -> None:
        if self._walk.enter(unit.index):
            for bucket in unit.trainable:
                self._updater.shards.expect(bucket)
            self.need(unit)

    def on_gradient(self, unit: Unit, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Autograd has a parameter's gradient."""
        self.gradients.take(bucket, index, parameter)

    # Gradients

    def _announce_reduction(self, bucket: Bucket) -> None:
        """A bucket's sum over its group is about to start."""
        faults.visit("reduce")
        self._event(Activity.REDUCE, self._unit_of[id(bucket)], settled=self._reductions_settled)

    def _on_complete(self, bucket: Bucket) -> None:
        """All gradients of a bucket have arrived."""
        self._walk.complete(self._unit_of[id(bucket)].index)

    def _leave_backward(self, unit: Unit) -> None:
        if unit.phase is not Phase.LIVE:
            return
        unit.enter(Phase.REDUCING)
        if self._sharded:
            unit.release()
            unit.enter(Phase.RESTING)
        else:
            unit.enter(Phase.LIVE)
        self._updater.leave([unit])

    def _seed(self, unit: Unit) -> None:
        """Seed what a unit's forward draws, by what it computes and not by who does."""
        at = self._microbatch
        if at is not None:
            seed_forward(self._options.seed, at.step, at.first_sample, unit.name)
