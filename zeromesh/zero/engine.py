"""`ZeroEngine` trains a model whose parameters, gradients and optimizer states are divided among ranks.

A step is `begin_step`, a driver's schedule of passes (`passes.py`), and `finish_step`: norm, clipping, update of the shards, next
values of the parameters. A ZeRO stage changes the placement of tensors (`options.placements`), never the code path.

[Note: Changed requires_grad] A bucket is allocated for the parameters that are trained when the model is built. A frozen bucket
gets master weights, moments and gradients when the first of its parameters is trained. A bucket that is frozen later keeps them,
as a torch optimizer does for parameters without a gradient: trained again, it continues with its own moments and update count."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from zeromesh.comm.shm_transport import open_transport
from zeromesh.errors import CheckpointError, ConfigError, LayoutError, NonFiniteError, PhaseError, some
from zeromesh.experts.fetch import FetchedExperts
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier, TieredTensor, Tiers
from zeromesh.optim.fused_optimizer import GroupRules, Hyperparameters, hyperparameters
from zeromesh.optim.gradients import GradientReducer, GradientShards
from zeromesh.optim.optimizer_step import OptimizerStep, StepOutcome
from zeromesh.optim.replicas import ReplicaGroups
from zeromesh.options import Placement, ZeroOptions
from zeromesh.telemetry.status_board import Activity
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.units.build import BuiltUnits, build_units, make_trainable, open_tiers, ring_bytes, slot_bytes
from zeromesh.units.plan import ModelCuts, plan_model
from zeromesh.units.unit import Bucket, Phase, StateGroup, Unit, all_buckets
from zeromesh.weight_init.weight_sources import BuiltSource, ParameterSource
from zeromesh.zero.full_state import CheckpointState, FullState, persistent_buffers
from zeromesh.zero.hooks import Hooks
from zeromesh.zero.passes import Passes, PassMode

_Result = TypeVar("_Result")


class ZeroEngine:
    """Runs forward, backward and update of a model whose units `build_units` has built."""

    passes_class: ClassVar[type[Passes]] = Passes

    def __init__(self, model: nn.Module, built: BuiltUnits, mesh: Mesh, options: ZeroOptions, cuts: ModelCuts) -> None:
        self.model, self.mesh, self.options = model, mesh, options
        self.units, self._buckets, self._releases = built.units, all_buckets(built.units), built.releases
        self._tiers, self.ledger = built.tiers, built.tiers.ledger
        self.durable = built.tiers.durable
        """The files that have the states of each committed step, and outlive this process (`offload.durable`)."""
        self.waits = built.tiers.waits  # the time that this rank has waited for transfers from other tiers
        self.groups = built.groups
        """The ranks that share the states of buckets: of most parameters, and of experts if these are spread over ranks."""
        self.ranks = mesh.within_replica if options.outer is not None else mesh
        """The mesh as the ranks that sum gradients see it: with local steps each replica is on its own."""
        mesh.watch.ranks_with_same_events = frozenset(self.ranks.peers.ranks)
        shards = GradientShards(options, built.tiers)
        replicas = ReplicaGroups(mesh, self._buckets, options, self.ranks.replicate)
        gradients = GradientReducer(shards, replicas, self.ranks, options)
        self.optimizer_step = OptimizerStep(self.units, mesh, options, built.tiers, gradients)
        chunks: list[list[Unit]] = [[] for _ in range(cuts.chunks)]
        for unit in self.units:  # Units without parameters are in the first chunk.
            chunks[cuts.chunk_of(unit.names()[0]) if unit.names() else 0].append(unit)
        self._experts = FetchedExperts(model, self.units, self.ledger)
        self._passes = self.passes_class(built, self.ranks, options, self.optimizer_step, chunks)
        self._passes.on_end = self._experts.hold
        self._averages_swapped = self._shows_averages = False
        self._inconsistent = False
        """True if some weights may be older than others, because an update or a load was cut short."""
        # Each stage of a pipeline has its own units.
        stages = mesh.pipeline.gather_json([f"unit {unit.name}" for unit in self.units], "names of units")
        mesh.watch.unit_names = {rank: stages[mesh.shape.coordinate(rank)["pipeline"]] for rank in mesh.world.ranks}
        self._hooks = Hooks(self.units, self._passes)
        self._flag_changes = 0
        self._states: dict[bool, FullState] = {}
        """The values of `full_state` by `averaged`, cached until `requires_grad` of a parameter changes."""
        self._states_valid_at: list[list[int]] = []
        self.checkpoint_state = CheckpointState(model, self.units, self.optimizer_step, mesh, options)
        """The tensors of a checkpoint, whole and by name, and this rank's part of each."""
        self._gather_kept()

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
        """Cut the model into units, allocate and fill them, and hook the model. `source` has the initial values of the whole model,
        also where `cuts` leave a part of it on this rank; None: the model's own. The engine closes `tiers`; None: it opens them."""
        tiers = tiers or open_tiers(mesh, options)
        try:
            group_of = GroupRules(options.optimizer).group_of
            plan = plan_model(model, options.precision.compute, group_of, cuts, options.weights)
            if options.offload.durable and (buffers := list(persistent_buffers(model))):
                raise ConfigError(f"{some(buffers)}: buffers that are saved are not on files", where="offload.durable")
            with tiers.states.allocating() if tiers.states is not None else nullcontext():
                built = build_units(model, plan, mesh, options, source or BuiltSource(model), tiers)
                return cls(model, built, mesh, options, cuts or ModelCuts())
        except BaseException:
            tiers.close()
            raise

    @property
    def state(self) -> FullState:
        """Whole parameters, as the model has them now, and gradients by name."""
        return self.full_state(averaged=self._has_averages)

    def full_state(self, *, averaged: bool) -> FullState:
        """Return whole parameters by name, if `averaged` their averages where these are kept, and gradients. All ranks call it."""
        self.require_alike("whole weights and gradients")
        # Gathering the layout of all ranks takes a while. It changes with the trained parameters, perhaps in one stage alone.
        followed = self.mesh.pipeline.gather_integers([self._flag_changes])
        if followed != self._states_valid_at:
            self._states, self._states_valid_at = {}, followed

        def weights_of(bucket: Bucket) -> TieredTensor:
            averages = self.optimizer_step.averages if averaged != self._averages_swapped else None
            return (bucket.average if averages is not None and averages.count else None) or bucket.master

        if averaged not in self._states:
            self._states[averaged] = FullState(self.model, self.units, self.mesh, self.options, weights_of)
        return self._states[averaged]

    @property
    def _has_averages(self) -> bool:
        return self._averages_swapped or self._shows_averages

    @property
    def lacks_parameters(self) -> bool:
        """True if data ranks lack parameters, those of other shards or other experts. Each call of the model then needs all of
        these ranks, which make equally many, and none can save the model by itself."""
        return self.options.placements.parameters is Placement.SHARDED or self.mesh.shape.swaps_tokens

    @property
    def loss_scale(self) -> float:
        """The factor that multiplies losses of this step before backward; 1 without float16 gradients."""
        return self.optimizer_step.scaler.scale

    def progress(self, *, own: bool = False) -> dict[str, Any]:
        """Return the progress that a checkpoint stores beside tensors, see docs/checkpoint-format.md. All ranks call it; with `own`
        it is that of this rank's stage, and no other rank is asked."""
        step = self.optimizer_step
        if not own:
            self.require_alike("a checkpoint")
            self.require_trained("a checkpoint")
        changed = {
            slot.spec.name: (trained, steps)
            for bucket in self._buckets
            if (optimizer := step.optimizer_of(bucket)) is not None
            for slot, trained, steps in zip(bucket.layout.slots, bucket.training, optimizer.steps, strict=True)
            if slot.spec.fqn in bucket.ever_trained and (trained, steps) != (slot.spec.requires_grad, step.updates)
        }
        rows = [changed] if own else self.mesh.pipeline.gather_json(changed, "changes of requires_grad")
        return {
            "updates": step.updates,
            "trained": {name: (trained, steps) for row in rows for name, (trained, steps) in row.items()},
            "averages": step.averages.count if step.averages is not None else 0,
            "loss_scale": step.scaler.scale,
            "good_steps": step.scaler.good_steps,
        }

    def require_trained(self, what: str) -> None:
        """Raise `PhaseError` where the model has its averaged weights."""
        if self._has_averages:
            raise PhaseError(f"{what} is of trained weights, and the model has averaged ones: leave the block averaged() first")

    def load_progress(self, *, updates: int, trained: Mapping[str, Any], loss_scale: float, good_steps: int) -> None:
        """Continue from values of `progress`; tensors and the count of `averages` are loaded afterwards, see `loading`. All ranks
        call it. Raises `CheckpointError` for names of parameters that the model does not have."""
        specs = [(spec, parameter) for bucket in self._buckets for spec, parameter, _ in bucket.rows()]
        unknown = trained.keys() - {spec.name for spec, _ in specs}
        if unknown and self.mesh.pipeline.size == 1:
            raise CheckpointError(f"the checkpoint has trained {min(unknown)}, and the model has no such parameter")
        final = [bool(trained.get(spec.name, (spec.requires_grad,))[0]) for spec, _ in specs]
        # First, all parameters that were ever trained are set to be trained: their states are allocated, to be loaded later.
        for flags in ([on or spec.name in trained for on, (spec, _) in zip(final, specs, strict=True)], final):
            for (_, parameter), flag in zip(specs, flags, strict=True):
                parameter.requires_grad_(flag)
            self._apply_flags()
        self.optimizer_step.resume(updates, {name: steps for name, (_, steps) in trained.items()})
        self.optimizer_step.scaler.load(loss_scale, good_steps)

    # A step

    def begin_step(self, step: int, groups: Sequence[Hyperparameters] | None = None, *, syncs: bool = True) -> None:
        """Begin a step, with the present `requires_grad` of parameters, and these hyperparameters; None: those of the options. With
        local steps, its update brings the replicas together if it `syncs`."""
        self._apply_flags()
        self.optimizer_step.begin_step(step, groups or hyperparameters(self.options.optimizer), syncs=syncs)
        self.mesh.post(Activity.FORWARD, 0, step=step)

    def _apply_flags(self, *, within_step: bool = False) -> None:
        """Train from now on exactly the parameters with `requires_grad`; see [Note: Changed requires_grad]. Raises `LayoutError`
        where ranks set different flags, and for parameters that stages share. Raises `StorageError` when memory is short."""
        changed = [(bucket, index) for bucket in self._buckets for index in bucket.changed_flags()]
        if within_step:  # What has had a gradient keeps it.
            changed = [(bucket, index) for bucket, index in changed if bucket.parameters[index].requires_grad]
        if not changed:
            return
        flags: dict[str, bool] = {}
        for bucket, index in changed:
            spec = bucket.layout.slots[index].spec
            if spec.copies is not None:
                why = f"requires_grad of {spec.name} was changed, which several stages of the pipeline share"
                raise LayoutError(f"{why}; set it before training")
            flags[f"requires_grad of {spec.name}, changed"] = bucket.parameters[index].requires_grad
        for group in (self.mesh.peers, self.mesh.tensor):
            group.require_same(flags, LayoutError, advice="Change requires_grad on all ranks alike")
        self._flag_changes += 1
        for bucket, index in changed:
            unit = self.units[bucket.unit_index]
            if not within_step:
                bucket.parameters[index].grad = None  # Gradients computed since the change are dropped on all ranks.
            elif not any(bucket.training):
                self._passes.gradients.with_gradient.pop(id(bucket), None)
            if not bucket.trainable:
                make_trainable(bucket, self.options, self._tiers)
                self._hooks.on_gradients(unit, bucket)
            unit.adopt_requires_grad(within_step=within_step)
        for sharers in self.groups:
            self._widen(sharers)
        self.optimizer_step.adapt_to_trained()

    def _widen(self, group: StateGroup) -> None:
        """Open larger gradient slots, from the next backward on, if a bucket of the group needs them."""
        trained = [bucket.layout for bucket in self._buckets if bucket.trainable and bucket.group is group]
        needed = slot_bytes(trained, self.options, self.mesh.device)
        name, slots = group.reduction.name, self.options.gradient_slots
        if needed > group.slot_bytes and name != "local":
            wider = open_transport(name, group.ranks, self.mesh.device, [], slots, needed)
            if group.reduction is not group.transport:
                group.reduction.close()
            group.reduction, group.slot_bytes, group.sequence = wider, needed, 0
            self.ledger.add(Tier.DEVICE, Purpose.GRADIENT_BUCKETS, ring_bytes(name, slots, needed))

    def run_schedule(self, run: Callable[[Passes], _Result]) -> _Result:
        """Run all microbatches of a step into this rank's gradient shards: `run` calls the passes. Raises `CollectiveError` when a
        peer is gone, late or in another unit, and `PhaseError` during another pass; nothing is begun then."""
        self._passes.require_idle()
        try:
            result = run(self._passes)
            self._passes.gradients.sum_tied()
            return result
        except BaseException as error:
            self.mesh.fail(error)
            raise
        finally:
            self._inconsistent = bool(self.optimizer_step.last_order)  # True if buckets were updated inside backward.

    def read_step(self, scalars: Sequence[torch.Tensor] = ()) -> tuple[list[float], float]:
        """Read the caller's `scalars` from the device after the last backward, for which the host waits once, and this rank's part
        of the squared norm of all gradients. Raises `PhaseError` when forward has changed a parameter in place."""
        writes = self._passes.writes
        unread = writes.unread_comparisons(self.units)
        try:
            with self.mesh.recorder.span(StepPhase.OPTIMIZER):
                values, squares = self.optimizer_step.read([*scalars, *(each for *_, each in unread)])
            for (unit, bucket, _), first in zip(unread, values[len(scalars) :], strict=True):
                writes.require_unchanged(unit, bucket, int(first))
            if self.durable is not None:  # The update that follows on all ranks overwrites the step before.
                self.durable.wait()
        except BaseException as error:
            self.mesh.fail(error)
            raise
        return values[: len(scalars)], squares

    def _sum_squares(self) -> float:
        total = torch.tensor([self.read_step()[1]], dtype=torch.float64)
        return float(self.ranks.world.all_reduce(total, "sum of the gradient norm"))

    @property
    def lacks_gradients(self) -> bool:
        """True if a trained parameter has had no gradient on this rank in the present step, or on any rank in the latest."""
        trained = [bucket for bucket in self._buckets if any(bucket.training)]
        return any(bucket.missing or self._passes.gradients.without_gradient(bucket) for bucket in trained)

    @property
    def without_gradient(self) -> list[str]:
        """The parameters that the latest update skipped, because no rank had a gradient for them."""
        return [bucket.layout.slots[n].spec.name for bucket in self._buckets for n in sorted(bucket.missing)]

    def finish_step(
        self, factor: float = 1.0, *, squares: float | None = None, loss_finite: bool = True, lacking: bool = True
    ) -> StepOutcome:
        """Update the parameters from the gradients, which are first multiplied by `factor`. A parameter without a gradient on
        any rank keeps its value and its moments, as in torch; `lacking` says if some rank `lacks_gradients`. `squares` is the
        sum over the world of the parts that `read_step` has returned; None: the sum is made here. A norm that is not finite
        skips the update on all ranks, or raises `NonFiniteError` under `on_nonfinite: stop`; the outcome or error names units,
        and the ranks that pass `loss_finite` False because their own loss was not finite."""
        with self._updating():
            if squares is None:
                squares = self._sum_squares()
            if lacking:
                self._passes.gradients.find_missing([bucket for unit in self.units for bucket in unit.trainable])
            return self.optimizer_step.finish(self.units, factor, squares, loss_finite=loss_finite)

    def end_without_update(self) -> None:
        """End a step without any gradients: the weights and the optimizer's states stay unchanged."""
        with self._updating():
            self.optimizer_step.update(self.units, 0.0, skip=True)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        self._inconsistent = True
        try:
            with self.mesh.recorder.span(StepPhase.OPTIMIZER):
                yield
                self._next_generation()
        except BaseException as error:
            self._inconsistent = self.options.optimizer_in_backward or not isinstance(error, NonFiniteError)
            self.mesh.fail(error)
            raise
        self._inconsistent = False

    def abandon_pass(self) -> bool:
        """Forget a pass or step that an exception has cut short, so that the next pass can begin. Only for a rank without peers.
        Returns False if weights may be of two updates, since an update or a load had begun."""
        if self._inconsistent:
            return False
        for parameter in chain.from_iterable(bucket.parameters for bucket in self._buckets if any(bucket.training)):
            parameter.grad = None
        self.optimizer_step.abandon()
        if self._passes.mode is not PassMode.IDLE:
            self._passes.end()
        return True

    def _next_generation(self) -> None:
        """Release all units after an update, as their parameters are outdated, and start to gather replicated ones again."""
        for unit in self.units:
            unit.leave()
        self._gather_kept()
        for group in self.groups:
            group.transport.poll()

    @contextmanager
    def loading(self, averaged_updates: int | None = None, *, swaps: bool = False, finishing: bool = False) -> Iterator[None]:
        """Inside the block all ranks may overwrite their shards; afterwards all parameters are gathered anew. `averaged_updates` is
        the number of updates in the loaded averages; None keeps the present one. After an error the shards hold parts of both
        states until such a block succeeds; after a `LayoutError` nothing was read. `swaps`: they
        are swapped with the weights. `finishing`: the block ends a recorded update."""
        if not swaps and not finishing:
            self.require_trained("a load")
        journal = None if finishing else self.optimizer_step.journal
        if journal is not None and not swaps:  # The journal guards a swap, as it does an update.
            journal.memory.forget()
        if self.durable is not None and not finishing:
            self.durable.forget()
        for unit in self.units:
            if unit.phase is Phase.GATHERING:
                unit.wait()
        for bucket in self._buckets:
            bucket.buffer.end_read()
        for bucket in self._buckets:
            bucket.buffer.begin_write()
        mixed, self._inconsistent = self._inconsistent, True
        try:
            yield
        except LayoutError:
            self._inconsistent = mixed
            raise
        self._inconsistent = False
        for bucket in self._buckets:
            if (copy := bucket.own_copy) is not None:
                shown = bucket.average if self._shows_averages else None
                copy.copy_from(bucket.master if shown is None else shown)
            bucket.share_copy()()
            if self.optimizer_step.outer is not None:
                self.optimizer_step.outer.begin(bucket)
            bucket.buffer.end_write()
        self._next_generation()
        averages = self.optimizer_step.averages
        if averages is not None and averaged_updates is not None:
            averages.count = averaged_updates
        self._averages_swapped ^= swaps
        if journal is not None and not self._averages_swapped:
            journal.begin()

    def _gather_kept(self) -> None:
        for unit in self.units if not self._releases else ():
            self._passes.start(unit, known_order=True)

    def wait_for_gathers(self) -> None:
        """Wait for the gathers that run in the background, such as those that an update starts."""
        for bucket in self._buckets:
            bucket.buffer.wait()

    # Passes over the model

    def evaluation(self) -> AbstractContextManager[Passes]:
        """Inside the block forward runs under no_grad, on all ranks alike, by the yielded passes and with the global generators."""
        self.require_alike("an evaluation")
        return self._passes.evaluation()

    def require_alike(self, what: str) -> None:
        """Raise `PhaseError` where replicas have weights of their own, between syncs of local steps."""
        if self.optimizer_step.diverged:
            why = f"{what} between syncs: replicas have weights of their own after this step (parallel.sync_every)"
            cure = "Take it after a step that brings them together"
            raise PhaseError(f"{why}. {cure}; a request of a callback (should_save, should_evaluate) waits for the next one")

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model has its averaged weights, and the averages' memory has the others; on all ranks alike. After
        an error on several ranks at once they stay exchanged, as no rank can go on then. A block inside of another has them too."""
        averages, inside = self.optimizer_step.averages, self._has_averages
        if inside or averages is None or not averages.count:
            yield
            return
        self._swap_averages(inside)
        try:
            yield
        except BaseException:
            if self.mesh.world_size == 1:
                self._swap_averages(not inside)
            raise
        self._swap_averages(not inside)

    def _swap_averages(self, present: bool) -> None:
        if self._has_averages != present:  # The engine was closed in between.
            return
        if self.durable is not None:  # Every weight has a copy to be gathered, and the files stay as they are.
            self._shows_averages ^= True
            with self.loading(finishing=True):
                return
        with self.loading(swaps=True):
            self.optimizer_step.swap_averages()

    def gathered(self, fqns: Sequence[str]) -> AbstractContextManager[None]:
        """Inside the block these parameters are whole on every rank, in the compute dtype, for reading; see `FullState.whole`."""
        if self._passes.mode in (PassMode.FORWARD, PassMode.BACKWARD):
            raise PhaseError(f"gathered() was called during {self._passes.mode.value}; call it between passes")
        return self.state.whole(fqns, self.options.precision.compute)

    def close(self) -> None:
        """Remove the hooks, release shared memory and remove files."""
        self._averages_swapped = self._shows_averages = False
        self._hooks.remove()
        self._passes.close()
        self._experts.close()
        # The callbacks and the objects that call them refer to each other, a cycle that would keep memory alive.
        self.optimizer_step.before_change = self._passes.gradients.on_summed = lambda bucket: None
        self._states.clear()
        self._tiers.close()
        for transport in dict.fromkeys(chain.from_iterable((each.transport, each.reduction) for each in self.groups)):
            transport.close()
