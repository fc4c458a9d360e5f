"""`ZeroEngine`: one path for all ZeRO stages.

A step is
    for each microbatch: forward_backward(run, ...)      units are gathered around use, gradients reduced as buckets complete
    finish_step(...)                                     norm, clipping, update of the shards, next generation of parameters

What a stage changes is where things lie (`options.placements`), never which code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeromesh import faults
from zeromesh.errors import ConfigError, LayoutError, NonFiniteError, PhaseError
from zeromesh.flat.placement import Placement
from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.watch import Activity
from zeromesh.offload import Tiers
from zeromesh.optim.sharded import GroupRules
from zeromesh.zero.access import StateAccess
from zeromesh.zero.build import Built, build_units, open_tiers
from zeromesh.zero.holdings import StateHoldings
from zeromesh.zero.hooks import Hooks, on_gradient_of
from zeromesh.zero.options import ZeroOptions
from zeromesh.zero.order import GatherOrder
from zeromesh.zero.phase import Phase
from zeromesh.zero.plan import plan_model
from zeromesh.zero.randomness import own_randomness, seed_forward
from zeromesh.zero.reduction import GradientReducer
from zeromesh.zero.sources import BuiltSource, ParameterSource
from zeromesh.zero.unit import Bucket, Unit, all_buckets
from zeromesh.zero.update import StepOutcome, Updater
from zeromesh.zero.walk import Microbatch, Mode, Walk


class ZeroEngine:
    """Runs forward, backward and update of a model whose units `build_units` has made."""

    def __init__(self, model: nn.Module, built: Built, mesh: Mesh, options: ZeroOptions) -> None:
        self.model = model
        self.mesh = mesh
        self.options = options
        self.units = built.units
        self.tiers = built.tiers
        self.ledger = built.ledger
        self.transport = built.transport
        self._reduction = built.reduction
        self._sharded = options.placements.parameters is Placement.SHARDED
        self._unit_of = {id(bucket): unit for unit in self.units for bucket in unit.buckets}
        self.updater = Updater(self.units, mesh, options, built.tiers)
        self._order = GatherOrder()
        self._mode = Mode.IDLE
        self._mixed = False
        """Whether some weights may be of one state and some of another."""
        self._entry: nn.Module | None = None
        self._microbatch: Microbatch | None = None
        self._walk = Walk()
        self._last_reductions: list[int] = []
        self._reductions_settled = False
        self._gradients = GradientReducer(
            self._reduction.reducer,
            options.precision.reduce,
            direct=mesh.shard.size == 1,
            overlap=options.overlap,
            prepare=self.updater.shards.make_room,
            announce=self._announce_reduction,
            on_reduced=self._on_reduced,
            on_complete=self._on_complete,
        )
        if mesh.watch is not None:
            mesh.watch.name_units([f"unit {unit.name}" for unit in self.units])
        self._hooks = Hooks(self.units, self)
        if not self._sharded:
            self._gather_all()

    @classmethod
    def build(
        cls,
        model: nn.Module,
        mesh: Mesh,
        options: ZeroOptions,
        source: ParameterSource | None = None,
        tiers: Tiers | None = None,
    ) -> ZeroEngine:
        """Cut the model into units, allocate and fill them, and hook the model.

        `source` gives initial values; None stands for the values that the model has. `tiers` are the engine's from now on, and
        closed with it; None: it opens its own.
        """
        tiers = tiers or open_tiers(mesh, options)
        try:
            return cls(model, cls._build(model, mesh, options, source, tiers), mesh, options)
        except BaseException:
            tiers.close()
            raise

    @staticmethod
    def _build(
        model: nn.Module, mesh: Mesh, options: ZeroOptions, source: ParameterSource | None, tiers: Tiers
    ) -> Built:
        rules = GroupRules(options.optimizer)
        plan = plan_model(model, options.precision.compute, rules.group_of)
        unmatched = rules.unmatched([name for spec in plan.specs() for name in (spec.fqn, *spec.aliases)])
        if unmatched:
            raise ConfigError(f"optimizer.no_decay: {', '.join(unmatched)} matches no parameter of the model")
        return build_units(model, plan, mesh, options, source or BuiltSource(model), tiers)

    @property
    def reduction_name(self) -> str:
        """The transport that sums gradients."""
        return self._reduction.name

    @property
    def state(self) -> StateAccess:
        """Whole parameters and gradients by name."""
        return StateAccess(self.model, self.units, self.mesh)

    @property
    def holdings(self) -> StateHoldings:
        """This rank's part of all states, by the names of whole tensors."""
        return StateHoldings(self.model, self.units, self.updater, self.mesh, self.options)

    # A step

    def begin_step(self, step: int, lr_factor: float) -> None:
        """Begin a step; learning rates are the optimizer groups' times `lr_factor`."""
        self.tiers.check()
        self.updater.begin_step(lr_factor)
        self.mesh.post(Activity.FORWARD, 0, step=step)

    def forward_backward(self, run: Callable[[], torch.Tensor], seed: float, microbatch: Microbatch) -> torch.Tensor:
        """Run one microbatch: `run()` gives the sum of its losses, a scalar, whose backward starts with `seed`.

        Returns the detached loss. Gradients are afterwards on their way to, or in, this rank's shards.

        Raises:
            CollectiveError: when a peer is gone, late or in another unit.
        """
        self._begin_pass(Mode.FORWARD, "train")
        self._microbatch = microbatch
        try:
            with own_randomness(), torch.enable_grad():
                loss = run()
                self._backward(loss, seed * self.updater.scaler.scale, microbatch)
            self._end_pass()
        except BaseException as error:
            self.mesh.fail(error)
            raise
        return loss.detach()

    def _backward(self, loss: torch.Tensor, seed: float, microbatch: Microbatch) -> None:
        self._mode = Mode.BACKWARD
        self._mixed = microbatch.last and self.options.optimizer_in_backward
        reduce = microbatch.last or self.options.placements.accumulating is Placement.SHARDED
        order = self._walk.reduction_order(range(len(self.units)))
        self._reductions_settled = order == self._last_reductions
        self._last_reductions = order
        buckets = [bucket for index in order for bucket in self.units[index].trainable]
        self._walk.turn({unit.index: len(unit.trainable) for unit in self.units})
        self.updater.begin_backward(buckets, first=microbatch.first, last=microbatch.last)
        self._gradients.begin(buckets, reduce=reduce, first=microbatch.first)
        if loss.requires_grad:
            torch.autograd.backward(loss, torch.full_like(loss, seed))
        else:
            # A microbatch without targets may have a constant for its loss; its gradients are zeros. Nothing is computed, but
            # peers gather units around their backward.
            for index, place in reversed(self._walk.calls):
                self.before_backward(self.units[index], place)
        self._gradients.flush()
        self.updater.end_backward(self.units)

    def finish_step(self, factor: float = 1.0, *, loss_finite: bool = True) -> StepOutcome:
        """Update the parameters from the gradients, which are first multiplied by `factor`.

        A norm that is not finite skips the update on all ranks, or ends the run where options say so. Then the outcome, or the
        error, names units, and ranks with `loss_finite` False: whose own loss was not finite.

        Raises:
            NonFiniteError: under `on_nonfinite: stop`.
        """
        self._mixed = True
        try:
            outcome = self.updater.finish(self.units, factor, loss_finite=loss_finite)
            self._next_generation()
            self.tiers.check()  # Before anything is saved of it.
        except BaseException as error:
            self._mixed = self.options.optimizer_in_backward or not isinstance(error, NonFiniteError)
            self.mesh.fail(error)
            raise
        self._mixed = False
        return outcome

    def abandon_pass(self) -> bool:
        """Forget what an exception has cut short, so that the next pass can begin; for a rank without peers.

        Returns False where weights are mixed: an update had begun, or loading a checkpoint.
        """
        if self._mixed:
            return False
        for unit in self.units:
            if unit.phase is Phase.REDUCING:
                unit.enter(Phase.LIVE)
            for bucket in unit.trainable:
                for parameter in bucket.parameters:
                    parameter.grad = None
        self.updater.abandon()
        if self._mode is not Mode.IDLE:
            self._end_pass()
        return True

    def _next_generation(self) -> None:
        """Parameters are out of date everywhere: units rest, and replicated ones start to gather again."""
        for unit in self.units:
            if unit.phase is Phase.LIVE:
                unit.release()
                unit.enter(Phase.RESTING)
        if not self._sharded:
            self._gather_all()
        self.transport.poll()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside the block this rank's shards may be overwritten, on all ranks alike; afterwards all is gathered anew.

        After an error they are in part something else until such a block ends well; `LayoutError` says that nothing was read.
        """
        for unit in self.units:
            if unit.phase is Phase.GATHERING:
                unit.wait()
        buckets = all_buckets(self.units)
        for bucket in buckets:
            bucket.buffer.retire()
        for bucket in buckets:
            bucket.buffer.begin_write()
        mixed, self._mixed = self._mixed, True
        try:
            yield
        except LayoutError:
            self._mixed = mixed
            raise
        self._mixed = False
        for bucket in buckets:
            bucket.publish()
        self._next_generation()

    def _gather_all(self) -> None:
        for unit in self.units:
            self._start_gather(unit, settled=True)

    # Passes over the model

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forward passes under no_grad, on all ranks alike; units are gathered around use as in training."""
        with torch.no_grad():
            self._begin_pass(Mode.EVALUATION, "eval")
            try:
                yield
                self._end_pass()
            except BaseException as error:
                self.mesh.fail(error)
                raise

    @contextmanager
    def gathered(self, fqns: Sequence[str]) -> Iterator[None]:
        """Inside the block these parameters are whole on every rank, in the compute dtype, to be read."""
        with self.evaluation():
            for unit in self.state.units_of(fqns):
                self._need(unit)
            yield

    def _begin_pass(self, mode: Mode, kind: str) -> None:
        if self._entry is not None:
            self._end_pass()  # A call of the user's own that failed half-way.
        if self._mode is not Mode.IDLE:
            raise PhaseError(f"a pass cannot begin during {self._mode.value}")
        self._mode = mode
        self._walk = Walk()
        self._order.begin(kind)

    def _end_pass(self) -> None:
        for unit in self.units:
            if self._sharded and unit.phase in (Phase.GATHERING, Phase.LIVE):
                if unit.phase is Phase.GATHERING:
                    unit.wait()
                unit.release()
                unit.enter(Phase.RESTING)
        self._order.end()
        self._mode = Mode.IDLE
        self._entry = None
        self._microbatch = None
        self.transport.poll()

    def _need(self, unit: Unit) -> None:
        """Make a unit live, and start to gather what the recorded order expects next."""
        settled = self._order.visit(unit.index)
        if unit.phase is Phase.RESTING:
            self._start_gather(unit, settled=settled)
        if unit.phase is Phase.GATHERING:
            unit.wait()
        for index in self._order.upcoming(self.options.prefetch):
            if self.units[index].phase is Phase.RESTING:
                self._start_gather(self.units[index], settled=True)

    def _start_gather(self, unit: Unit, *, settled: bool) -> None:
        self._event(Activity.GATHER, unit, settled=settled)
        unit.gather()

    def _event(self, activity: Activity, unit: Unit, *, settled: bool) -> None:
        if self.mesh.watch is not None:
            # All data-parallel ranks: replicas sum over one another in the order of reductions.
            self.mesh.watch.event(activity, unit.index, self.mesh.data.ranks, settled=settled)

    # What hooks tell

    def before_forward(self, unit: Unit) -> None:
        """A unit is about to run: in a pass, in recomputation during backward, or because the user called the model."""
        if self._mode is Mode.BACKWARD:
            self._need_in_backward(unit)
            self._seed(unit)  # After `checkpoint` has restored the state from before this hook ran in forward.
            return
        if self._mode is Mode.IDLE:
            self._begin_users_pass(unit.module)
        faults.visit("forward")
        self._walk.visit(unit.index)
        self._need(unit)
        self.mesh.post(Activity.FORWARD, unit.index)
        self._seed(unit)

    def before_part(self, module: nn.Module) -> None:
        """A module that holds some of the root's parameters is about to run, perhaps without the root."""
        if self._mode is Mode.IDLE:
            self._begin_users_pass(module)
        if self.units[0].phase is not Phase.LIVE:
            self._need(self.units[0])

    def after_part(self, module: nn.Module) -> None:
        """It has run."""
        if self._entry is module and self._mode is Mode.EVALUATION:
            self._end_pass()

    def _begin_users_pass(self, module: nn.Module) -> None:
        if torch.is_grad_enabled():
            raise PhaseError(
                "the model was called outside a training step with gradients enabled; call it under torch.no_grad(), "
                "or train through the trainer"
            )
        self._begin_pass(Mode.EVALUATION, "user")
        self._entry = module
        if module is not self.units[0].module:
            self._need(self.units[0])

    def after_forward(self, unit: Unit, output: Any) -> None:
        """A unit has run: hook its outputs for backward, or rest."""
        if self._mode is Mode.BACKWARD:
            return
        if self._mode is Mode.FORWARD:
            place = self._walk.place
            if on_gradient_of(output, lambda: self.before_backward(unit, place)):
                self._walk.calls.append((unit.index, place))
        if self._sharded and unit.index != 0 and unit.phase is Phase.LIVE:
            unit.release()
            unit.enter(Phase.RESTING)
        if self._entry is unit.module:
            self._end_pass()

    def before_backward(self, unit: Unit, place: int) -> None:
        """Backward has reached the outputs of a unit's call; the calls of units after number `place` came after it."""
        if self._mode is not Mode.BACKWARD:
            raise PhaseError(
                f"backward reached unit {unit.name} outside a training step; let the trainer call backward"
            )
        for index in self._walk.leave_passed(place):
            self._leave_backward(self.units[index])
        if not self._walk.reach(unit.index):
            return
        self._need_in_backward(unit)
        if self.options.overlap:
            self._gradients.pump()
        self.mesh.post(Activity.BACKWARD, unit.index)

    def _need_in_backward(self, unit: Unit) -> None:
        if self._walk.enter(unit.index):
            for bucket in unit.trainable:
                self.updater.shards.expect(bucket)
            self._need(unit)

    def on_gradient(self, unit: Unit, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Autograd has a parameter's gradient."""
        self._gradients.take(bucket, index, parameter)

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
        self.updater.leave([unit])

    def _on_reduced(self, bucket: Bucket) -> None:
        """A bucket's sum over its group is in this rank's shard."""
        self.updater.take(bucket)

    def _seed(self, unit: Unit) -> None:
        """Seed what a unit's forward draws, by what it computes and not by who does."""
        at = self._microbatch
        if at is not None:
            seed_forward(self.options.seed, at.step, at.first_sample, unit.name)

    def close(self) -> None:
        """Take the hooks off, give shared memory back and remove files."""
        self._hooks.remove()
        self.tiers.close()
        self.transport.close()
        if self._reduction is not self.transport:
            self._reduction.close()
