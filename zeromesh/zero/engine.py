"""`ZeroEngine` trains a model whose parameters, gradients and optimizer states are divided among ranks.

A step is

    engine.begin_step(step, groups)
    driver.train(engine, work, loss)    # a schedule of passes: forward gathers each unit around its use, and so does backward,
                                        # which reduces gradients as buckets complete
    engine.finish_step(factor)          # norm, clipping, update of the shards, next values of the parameters

Before `finish_step` a caller may `read_step` what it wants to know of the device, so that the host waits for it once a step.

A stage changes where tensors lie (`options.placements`), never which code runs. `passes.py` has what happens in a pass,
`optim/optimizer_step.py` what happens from the gradient shards on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, Self, TypeVar

import torch
from torch import nn

from zeromesh.errors import ConfigError, LayoutError, NonFiniteError, PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import TieredTensor, Tiers
from zeromesh.optim.fused_optimizer import BucketOptimizer, GroupRules, Hyperparameters
from zeromesh.optim.optimizer_step import OptimizerStep, StepOutcome
from zeromesh.options import ZeroOptions
from zeromesh.telemetry.event_ring import Activity
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.units.build import Built, build_units, open_tiers
from zeromesh.units.plan import ModelCuts, plan_model
from zeromesh.units.unit import Bucket, Phase, Unit, all_buckets
from zeromesh.weight_init.weight_sources import BuiltSource, ParameterSource
from zeromesh.zero.full_state import CheckpointState, FullState
from zeromesh.zero.gather_order import PassMode
from zeromesh.zero.hooks import Hooks
from zeromesh.zero.passes import Passes
from zeromesh.zero.requires_grad import RequiresGradFlags

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProgress:
    """The progress of an engine that a checkpoint keeps beside tensors."""

    updates: int
    """Updates of the parameters: steps that were not skipped."""
    trained: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Parameters that are not trained as the model was built, by name: whether they are, and in how many updates they were."""
    averaged_updates: int = 0
    """Updates that the averages of the weights have taken in."""
    loss_scale: float = 1.0
    good_steps: int = 0
    """Steps without an overflow since the loss scale has changed."""


class ZeroEngine:
    """Runs forward, backward and update of a model whose units `build_units` has made."""

    passes_class: ClassVar[type[Passes]] = Passes

    def __init__(
        self,
        model: nn.Module,
        built: Built,
        mesh: Mesh,
        options: ZeroOptions,
        cuts: ModelCuts | None = None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.options = options
        self.units = built.units
        self._buckets = all_buckets(built.units)
        self._tiers = built.tiers
        self.ledger = built.tiers.ledger
        self.waits = built.tiers.waits
        """How long this rank has stood still for bytes of other tiers."""
        self.transport = built.transport
        self._reduction = built.reduction
        self._releases = built.releases
        self.optimizer_step = OptimizerStep(self.units, mesh, options, built.tiers)
        self._passes = self.passes_class(
            built, mesh, options, self.optimizer_step, _chunks(self.units, cuts or ModelCuts())
        )
        self._exchanged = False
        """True if averaged weights and master weights have been exchanged."""
        self._mixed = False
        """True if some weights may be older than others, because an update or a load was cut short."""
        # Stages of a pipeline have units of their own.
        stages = mesh.pipeline.gather_json([f"unit {unit.name}" for unit in self.units], "names of units")
        mesh.watch.unit_names = {rank: stages[mesh.shape.coordinate(rank)["pipeline"]] for rank in mesh.world.ranks}
        self._hooks = Hooks(self.units, self._passes)
        self._flags = RequiresGradFlags(built, mesh, options, self.optimizer_step, self._passes.gradients, self._hooks)
        self._states: dict[bool, FullState] = {}
        """Kept for `state` and `averaged_state` as long as the same is trained."""
        self._states_followed: list[list[int]] = []
        self.checkpoint_state = CheckpointState(model, self.units, self.optimizer_step, mesh, options)
        """This rank's part of all states, by the names of whole tensors."""
        if not self._releases:
            self._gather_all()

    @classmethod
    def build(
        cls,
        model: nn.Module,
        mesh: Mesh,
        options: ZeroOptions,
        source: ParameterSource | None = None,
        tiers: Tiers | None = None,
        cuts: ModelCuts | None = None,
    ) -> Self:
        """Cut the model into units, allocate and fill them, and hook the model.

        `source` gives initial values; None stands for the values that the model has. `tiers` are the engine's from now on, and
        closed with it; None: it opens its own. `cuts` say what of the whole model tensor and pipeline parallelism have left here;
        then `source` is one of the whole model.
        """
        tiers = tiers or open_tiers(mesh, options)
        try:
            rules = GroupRules(options.optimizer)
            plan = plan_model(model, options.precision.compute, rules.group_of, cuts)
            own = [name for spec in plan.specs() for name in (spec.name, *spec.other_names)]
            names = chain.from_iterable(mesh.pipeline.gather_json(own, "names of all parameters"))
            unmatched = rules.unmatched(list(names))
            if unmatched:
                raise ConfigError(f"optimizer.no_decay: {', '.join(unmatched)} matches no parameter of the model")
            built = build_units(model, plan, mesh, options, source or BuiltSource(model), tiers)
            return cls(model, built, mesh, options, cuts)
        except BaseException:
            tiers.close()
            raise

    @property
    def reduction_name(self) -> str:
        """The transport that sums gradients."""
        return self._reduction.name

    @property
    def state(self) -> FullState:
        """Whole parameters and gradients by name."""
        return self._access(averaged=False)

    @property
    def averaged_state(self) -> FullState:
        """Whole averaged weights and gradients by name. Where no average is kept, these are the weights themselves."""
        return self._access(averaged=True)

    def _access(self, *, averaged: bool) -> FullState:
        # To find out what all ranks have takes a while. It changes with what is trained, perhaps in one stage alone.
        followed = self.mesh.pipeline.gather_integers([self._flags.followed])
        if followed != self._states_followed:
            self._states, self._states_followed = {}, followed

        def weights_of(bucket: Bucket) -> TieredTensor:
            averages = self.optimizer_step.averages if averaged != self._exchanged else None
            average = averages.of(bucket) if averages is not None and averages.count else None
            return average or bucket.master

        if averaged not in self._states:
            self._states[averaged] = FullState(
                self.model, self.units, self.mesh, self.options.precision.sums, weights_of
            )
        return self._states[averaged]

    @property
    def loss_scale(self) -> float:
        """The factor by which losses of this step are multiplied before backward; 1 without float16 gradients."""
        return self.optimizer_step.scaler.scale

    def optimizer_of(self, bucket: Bucket) -> BucketOptimizer | None:
        """The optimizer of a bucket's shard, with its moments; None for a bucket that was never trained."""
        return self.optimizer_step.optimizer_of(bucket)

    def progress(self) -> EngineProgress:
        """Return the progress that a checkpoint keeps beside tensors. All ranks call it."""
        step = self.optimizer_step
        return EngineProgress(
            updates=step.updates,
            trained=self._flags.changes(),
            averaged_updates=step.averages.count if step.averages is not None else 0,
            loss_scale=step.scaler.scale,
            good_steps=step.scaler.good_steps,
        )

    def load_progress(self, progress: EngineProgress) -> None:
        """Go on from what `progress` returned, with other tensors to be loaded afterwards; see `loading`. All ranks call it.

        Raises:
            CheckpointError: where parameters are named that the model does not have.
        """
        self._flags.restore(progress.trained, progress.updates)
        self.optimizer_step.scaler.load(progress.loss_scale, progress.good_steps)

    # A step

    def begin_step(self, step: int, groups: Sequence[Hyperparameters] | None = None) -> None:
        """Begin a step, whose update is made with these hyperparameters of each group; None: with those of the options.

        What `requires_grad` of parameters says now holds for the whole step.
        """
        if any(bucket.changed_flags() for bucket in self._buckets):
            self._flags.follow()
        self.optimizer_step.begin_step(groups or self.options.optimizer.groups())
        self.mesh.post(Activity.FORWARD, 0, step=step)

    def run_schedule(self, run: Callable[[Passes], _Result]) -> _Result:
        """Run all microbatches of a step: `run` calls the passes of each action of a schedule in its turn.

        Gradients are afterwards on their way to this rank's shards, or in them.

        Raises:
            CollectiveError: when a peer is gone, late or in another unit.
            PhaseError: during another pass; nothing is begun then.
        """
        self._passes.require_idle()
        try:
            result = run(self._passes)
            self.optimizer_step.end_backwards()
            return result
        except BaseException as error:
            self.mesh.fail(error)
            raise
        finally:
            self._mixed = bool(self.optimizer_step.last_order)  # Inside backward some buckets were updated.

    def read_step(self, scalars: Sequence[torch.Tensor] = ()) -> tuple[list[float], float]:
        """Read, after the last backward, what the caller has on the device and wants to know, scalars: the host waits once.

        Returns them as numbers, and this rank's part of the squared norm of all gradients, to be summed over the world.

        Raises:
            PhaseError: when forward has changed a parameter in place, which a device tells only here.
        """
        writes = self._passes.writes
        unread = writes.unread(self.units)
        try:
            with self.mesh.recorder.span(StepPhase.OPTIMIZER):
                found, squares = self.optimizer_step.read([*scalars, *(each for *_, each in unread)])
            for (unit, bucket, _), first in zip(unread, found[len(scalars) :], strict=True):
                writes.refuse_changed(unit, bucket, int(first))
        except BaseException as error:
            self.mesh.fail(error)
            raise
        return found[: len(scalars)], squares

    def _sum_squares(self) -> float:
        """The squared norm of all gradients as they were summed, with the loss scale in it; all ranks call it."""
        total = torch.tensor([self.read_step()[1]], dtype=torch.float64)
        return float(self.mesh.world.sum_(total, "sum of the gradient norm"))

    @property
    def lacks_gradients(self) -> bool:
        """True if a trained parameter has had no gradient on this rank in the present step, or on any in the latest."""
        trained = [bucket for bucket in self._buckets if any(bucket.training)]
        return any(bucket.missing or self._passes.gradients.lacking(bucket) for bucket in trained)

    @property
    def without_gradient(self) -> list[str]:
        """The parameters that the latest update has passed over, because no rank had a gradient of them."""
        return [bucket.layout.slots[n].spec.name for bucket in self._buckets for n in sorted(bucket.missing)]

    def finish_step(
        self, factor: float = 1.0, *, squares: float | None = None, loss_finite: bool = True, lacking: bool = True
    ) -> StepOutcome:
        """Update the parameters from the gradients, which are first multiplied by `factor`.

        One that no rank has a gradient of keeps its value and its moments, as in torch; `lacking` says whether some rank
        `lacks_gradients`, and may be one of them.
        `squares` is the sum over the world of what `read_step` has returned; None: that is done here. A norm that is not finite
        skips the update on all ranks, or ends the run where options say so. Then the outcome, or the error, names units, and ranks
        with `loss_finite` False: whose own loss was not finite.

        Raises:
            NonFiniteError: under `on_nonfinite: stop`.
        """
        with self._updating():
            if squares is None:
                squares = self._sum_squares()
            if lacking:
                trained = [bucket for unit in self.units for bucket in unit.trainable]
                self._passes.gradients.find_missing(trained, self.optimizer_step.sharing)
            return self.optimizer_step.finish(self.units, factor, squares, loss_finite=loss_finite)

    def end_without_update(self) -> None:
        """End a step whose gradients are of nothing: they are forgotten, and the optimizer's states and the weights stay."""
        with self._updating():
            self.optimizer_step.update(self.units, 0.0, skip=True)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Inside the block the optimizer changes the shards, which the model's parameters follow afterwards."""
        self._mixed = True
        try:
            with self.mesh.recorder.span(StepPhase.OPTIMIZER):
                yield
                self._next_generation()
        except BaseException as error:
            self._mixed = self.options.optimizer_in_backward or not isinstance(error, NonFiniteError)
            self.mesh.fail(error)
            raise
        self._mixed = False

    def abandon_pass(self) -> bool:
        """Forget what an exception has cut short, so that the next pass can begin. Only for a rank without peers.

        Returns False where weights are mixed: an update had begun, or loading a checkpoint.
        """
        if self._mixed:
            return False
        for unit in self.units:
            for bucket in unit.trainable:
                for parameter in bucket.parameters:
                    parameter.grad = None
        self.optimizer_step.abandon()
        if self._passes.mode is not PassMode.IDLE:
            self._passes.end()
        return True

    def _next_generation(self) -> None:
        """Let all units rest after an update, as their parameters are out of date, and start to gather replicated ones again."""
        for unit in self.units:
            unit.leave()
        if not self._releases:
            self._gather_all()
        self.transport.poll()

    @contextmanager
    def loading(self, averaged_updates: int | None = None) -> Iterator[None]:
        """Inside the block this rank's shards may be overwritten, on all ranks alike; afterwards all parameters are gathered anew.

        `averaged_updates`: how many updates are in the averages of the weights that are loaded; None leaves the number as it is.
        After an error the shards hold parts of both states, until such a block ends well; `LayoutError` says that nothing was
        read.
        """
        for unit in self.units:
            if unit.phase is Phase.GATHERING:
                unit.wait()
        for bucket in self._buckets:
            bucket.buffer.retire()
        for bucket in self._buckets:
            bucket.buffer.begin_write()
        mixed, self._mixed = self._mixed, True
        try:
            yield
        except LayoutError:
            self._mixed = mixed
            raise
        self._mixed = False
        for bucket in self._buckets:
            bucket.publish()
        self._next_generation()
        averages = self.optimizer_step.averages
        if averages is not None and averaged_updates is not None:
            averages.count = averaged_updates

    def _gather_all(self) -> None:
        for unit in self.units:
            self._passes.gathers.start(unit, settled=True)

    def settle(self) -> None:
        """Wait for the gathers that run in the background, such as those that an update has begun."""
        for bucket in self._buckets:
            bucket.buffer.wait()

    # Passes over the model

    def evaluation(self) -> AbstractContextManager[Passes]:
        """Inside the block forward runs under no_grad, on all ranks alike; units are gathered around use as in training.

        Random numbers come from the generators as they are. A driver's schedule calls the passes that the block is given.
        """
        return self._passes.evaluation()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model has its averaged weights, and their memory has the others; on all ranks alike.

        After an error of several ranks together they stay exchanged: no rank can go on then.
        """
        self._exchange()
        try:
            yield
        except BaseException:
            if self.mesh.world_size == 1:
                self._exchange()
            raise
        self._exchange()

    def _exchange(self) -> None:
        averages = self.optimizer_step.averages
        if averages is None or not averages.count:
            return
        with self.loading():
            for bucket in self._buckets:
                if averages.of(bucket) is not None:
                    self.optimizer_step.before_change(bucket)
                    averages.exchange(bucket)
        self._exchanged = not self._exchanged

    def gathered(self, fqns: Sequence[str]) -> AbstractContextManager[None]:
        """Inside the block these parameters are whole on every rank, in the compute dtype, to be read; see `FullState.whole`."""
        if self._passes.mode in (PassMode.FORWARD, PassMode.BACKWARD):
            raise PhaseError(
                f"gathered() was called during {self._passes.mode.value}; call it between passes over the model"
            )
        return self.state.whole(fqns, self.options.precision.compute)

    def close(self) -> None:
        """Take the hooks off, give shared memory back and remove files."""
        self._hooks.remove()
        self.optimizer_step.before_change = lambda bucket: None  # What it belongs to often has the engine.
        self._states.clear()
        self._flags.close()
        self._tiers.close()
        self.transport.close()
        if self._reduction is not self.transport:
            self._reduction.close()


def _chunks(units: Sequence[Unit], cuts: ModelCuts) -> list[list[Unit]]:
    """The units of each chunk. A unit without parameters is in the first."""
    chunks: list[list[Unit]] = [[] for _ in range(cuts.chunks)]
    for unit in units:
        chunks[cuts.chunk_of(unit.names()[0]) if unit.names() else 0].append(unit)
    return chunks
