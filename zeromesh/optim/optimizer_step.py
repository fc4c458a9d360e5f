"""From gradient shards to updated parameters: norm, clipping and the optimizer, after backward or inside it.

[Note: Updates inside backward] A bucket is updated once it is reduced and this rank does not read its parameters any more. The
update then waits until the other ranks have read the parameters too. This cannot be circular: all ranks leave units in one order,
and a rank waits only for units that it has left itself. A bucket of a unit that is not left yet, such as the root, is passed
over. A bucket that lacks a gradient on this rank is updated at the end of the step, when ranks know which of them had one."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

from zeromesh.errors import NonFiniteError, PhaseError, plural, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Purpose, Tier, TierChoice, TieredTensor, Tiers, WaitTime, accelerator
from zeromesh.offload.accelerator import is_accelerator, on_accelerator
from zeromesh.offload.update_stream import Access, StreamOperand, StreamRow, UpdateStream, run_whole
from zeromesh.optim import fused_optimizer
from zeromesh.optim.class_optimizer import ClassStates, make_optimizers
from zeromesh.optim.gradients import GradientReducer, gradient_of
from zeromesh.optim.journal import COMPLETE, Journal
from zeromesh.optim.replicas import OuterOptimizer
from zeromesh.options import Placement, ZeroOptions
from zeromesh.settings.keys import AverageSettings, ScalerSettings, UpdateOn
from zeromesh.telemetry.status_board import Activity
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.units.unit import Bucket, Unit, all_buckets

_INSIDE_BACKWARD = "the optimizer runs inside backward, so the step is half done and its state must not be saved"
_SWAPPED_ELEMENTS = 1 << 20  # swapped at a time with their averages


def clip_factor(norm: float, limit: float) -> float:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients; 1 for limit 0, which means no clipping."""
    return 1.0 if limit <= 0 else min(limit / (norm + 1e-6), 1.0)  # nan where the norm is


class LossScaler:
    """The dynamic loss scale of float16 gradients (Micikevicius et al., "Mixed Precision Training", 2018); 1 without settings."""

    def __init__(self, settings: ScalerSettings | None) -> None:
        self._settings = settings
        self.scale = settings.initial_scale if settings else 1.0
        self.good_steps = 0  # the number of steps without an overflow since the scale changed

    def load(self, scale: float, good_steps: int) -> None:
        if self._settings is not None:
            self.scale, self.good_steps = scale, good_steps

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale to a step with or without overflow. All ranks call it with the same `overflow`."""
        if (settings := self._settings) is None:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = max(1.0, self.scale * settings.backoff_factor)
        elif self.good_steps == settings.growth_interval:
            self.scale, self.good_steps = self.scale * settings.growth_factor, 0


class WeightAverage:
    """Exponential moving averages of this rank's shards, `[shard]` in the master dtype, on the tier of the moments. They equal
    `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` after each `every_steps` updates. Never-trained
    parameters have none, and an averaged model has the model's buffers."""

    def __init__(self, settings: AverageSettings, tiers: Tiers, at: TierChoice) -> None:
        self.count = 0
        """The number of updates in the averages. Before the first one, the averages equal the weights."""
        self._settings, self._tiers, self._tier = settings, tiers, at

    def allocate(self, bucket: Bucket) -> None:
        master, what = bucket.master, f"averages of {bucket.name}"
        bucket.average = self._tiers.allocate(master.numel, master.dtype, self._tier, Purpose.AVERAGES, what)
        if not self._tiers.keeps(bucket.average):
            bucket.average.copy_from(master)

    def is_due(self, update: int) -> bool:
        """Return True if update number `update`, counted from 1, enters the average."""
        return update >= self._settings.start_step and update % self._settings.every_steps == 0

    def blend(self, average: torch.Tensor, weights: torch.Tensor) -> None:
        """Blend new weights into an average in place; both are the same part of a shard."""
        if self.count:
            average.lerp_(weights, 1 - self._settings.decay)
        else:
            average.copy_(weights)

    @staticmethod
    def swap(average: torch.Tensor, weights: torch.Tensor) -> None:
        """Exchange the same part of the averages and of their shard, a little at a time."""
        for first, second in zip(*(torch.split(each, _SWAPPED_ELEMENTS) for each in (weights, average)), strict=True):
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


_CPU = torch.device("cpu")
_TRIED_ELEMENTS = 1 << 25
"""The elements of a timed update: half a gibibyte of states and gradients, since less may fit a cache and be too fast."""
_TIMED_ROUNDS = 3


def choose_device(
    update_on: UpdateOn, mesh: Mesh, try_on: Callable[[torch.device], float], *, states_on_device: bool
) -> tuple[torch.device, str | None]:
    """Choose the device of updates, alike on all ranks. Unless `states_on_device`, updates on the CPU save transfers, and the
    device computes faster: `try_on(device)` gives seconds per billion elements. Returns the device, and a log line if it tried."""
    device = mesh.device
    if not is_accelerator(device) or states_on_device or update_on == "device":
        return device, None
    if update_on == "host":
        return _CPU, None
    rows = mesh.world.gather_integers([int(1e9 * try_on(each)) for each in (_CPU, device)])
    host, there = (sum(row[number] for row in rows) / len(rows) / 1e9 for number in range(2))
    chosen, name = (_CPU, "the CPU") if host <= there else (device, "the device")
    tried = f"{host:.2f} s for a billion elements on the CPU, {there:.2f} s on the device with the way there and back"
    return chosen, f"offload: updates are computed on {name} (tried: {tried}); offload.update says otherwise"


def time_update(device: torch.device, tiers: Tiers, options: ZeroOptions, most: int = _TRIED_ELEMENTS) -> float:
    """Return the seconds for a billion elements of an update on `device`, tried with `most` elements in host memory."""
    elements = min(most, _TRIED_ELEMENTS)
    pinned, settings, dtype = tiers.pinned.used, options.optimizer, options.precision.master
    nbytes, moments = elements * dtype.itemsize, fused_optimizer.moment_dtypes(settings, dtype)
    modes = [Access.UPDATE, Access.READ] + [Access.UPDATE] * len(moments)  # Of master weights, gradients and moments.
    uses = [StreamOperand(tensor=TieredTensor.of(tiers.buffer(nbytes, _CPU).view(dtype), Tier.HOST), mode=mode) for mode in modes]
    stream = _open_stream(device, tiers, options, len(uses) if is_accelerator(device) else 0, nbytes, WaitTime())
    group = {**fused_optimizer.hyperparameters(settings)[1], "lr": 0.0}

    def compute(_row: StreamRow, tensors: list[torch.Tensor]) -> None:
        master, gradient, *moments = tensors
        fused_optimizer.fused_update(settings.name, group, master, gradient, moments, 1)

    rows = list(stream.rows(0, elements, uses))
    seconds = []
    for _ in range(_TIMED_ROUNDS):
        began = time.perf_counter()
        stream.run(rows, compute)
        stream.wait_for_writes()
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    tiers.pinned.release(tiers.pinned.used - pinned)
    return min(seconds) * 1e9 / elements


def _open_stream(
    device: torch.device, tiers: Tiers, options: ZeroOptions, width: int, longest: int, waits: WaitTime
) -> UpdateStream:
    memory, nbytes = partial(tiers.buffer, device=device), options.offload.staging_on(device)
    return UpdateStream(device, width=width, longest=longest, nbytes=nbytes, waits=waits, memory=memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The outcome of a step. `grad_norm` is the norm before clipping. If it is not finite, `skipped` is True and `cause` names
    units and ranks. `waited` has the seconds in which this rank waited for bytes of each tier."""

    grad_norm: float
    skipped: bool
    loss_scale: float
    cause: str = ""
    waited: Mapping[Tier, float] = field(default_factory=dict)


class OptimizerStep:
    """Owns the optimizer states of this rank's shards, and updates the shards."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, options: ZeroOptions, tiers: Tiers, gradients: GradientReducer) -> None:
        self.scaler = LossScaler(options.precision.loss_scale)
        self.gradients = gradients
        self._mesh = mesh.within_replica if options.outer is not None else mesh
        self._options = options
        self._tiers = tiers
        self._all_buckets = all_buckets(units)
        self._units = units
        self._optimizers: dict[int, fused_optimizer.BucketOptimizer] = {}
        self._shared = ClassStates(options.optimizer.own_class, self._mesh.shard)
        at = options.offload.optimizer
        self.averages = WeightAverage(options.average, tiers, at) if options.average else None
        self.outer = OuterOptimizer(options.outer, tiers, at, mesh.replicate) if options.outer else None
        self.syncs = True  # False in a local step, after which replicas have weights of their own
        self.diverged = False  # True between syncs: replicas have weights of their own
        self._make_optimizers()
        gradients.on_summed = self._update_ready
        self._encoded: dict[int, torch.Tensor] = {}  # what goes to replicas in place of parameters, by the bucket's id
        self._ready: list[Bucket] = []  # summed buckets that wait for an update inside this backward
        self._finished_units: set[int] = set()
        """The indices of units whose gathered parameters this rank reads no more in this step."""
        self.groups: Sequence[fused_optimizer.Hyperparameters] = fused_optimizer.hyperparameters(options.optimizer)
        self._updated: list[tuple[Bucket, torch.Tensor]] = []
        """Buckets that backward has reduced for an update, with the norms of their gradients."""
        self._norms: list[tuple[Bucket, float]] = []
        self._replicated = options.placements.optimizer is Placement.REPLICATED
        self.updates = 0  # the number of updates: steps that were not skipped
        self.step = 0  # the number of the present step, from 0
        self.last_order: list[Bucket] = []  # the buckets in the order of the latest step's updates
        self.before_change: Callable[[Bucket], None] = lambda bucket: None
        """Called before a bucket's states change; a concurrent reader, such as a save, finishes reading in it."""
        update_on, own_class = options.offload.update, options.optimizer.own_class
        # A user's class has an unknown cost, inside backward the device would wait for the CPU, and moments in blocks are decoded.
        untried = own_class is not None or options.optimizer_in_backward or options.optimizer.format.block
        device, self.note = choose_device(
            "device" if update_on == "auto" and untried else update_on,
            mesh,
            partial(time_update, tiers=tiers, options=options, most=sum(each.length for each in self._buckets)),
            states_on_device=not self._most_offloaded_tensors(tiers.device),
        )
        self._stream = self._make_stream(device)
        self.journal: Journal | None = None
        self.step_note: Any = None
        """A value that the caller wants to know of a step that another process finishes; JSON can express it."""

    @property
    def can_be_finished_by_others(self) -> bool:
        """True if all states and gradients are in memory that a `Journal` can guard, and change only in `finish`."""
        whole = any(optimizer.whole for optimizer in self._optimizers.values())
        inside = self._options.optimizer_in_backward or self._options.optimizer.own_class is not None
        return not (whole or inside or self._most_offloaded_tensors(_CPU) or is_accelerator(self._stream.device))

    def _make_optimizers(self) -> None:
        self._buckets = [bucket for bucket in self._all_buckets if any(bucket.training)]
        new = [bucket for bucket in self._all_buckets if bucket.trainable and id(bucket) not in self._optimizers]
        optimizers = make_optimizers(new, self._options, self._tiers, self._shared)
        for bucket, optimizer in zip(new, optimizers, strict=True):
            self._optimizers[id(bucket)] = optimizer
            if self.outer is not None:
                self.outer.allocate(bucket)
            if self.averages is not None:
                self.averages.allocate(bucket)

    def adapt_to_trained(self) -> None:
        """Make optimizers for newly trained buckets, and adapt the others, after `requires_grad` of parameters has changed."""
        known = len(self._optimizers)
        self._make_optimizers()
        for optimizer in self._optimizers.values():
            optimizer.update_segments()
        if len(self._optimizers) > known:
            self._drop_journal()  # The new states are elsewhere.
            self._stream.drop_read_ahead()
            self._stream = self._make_stream(self._stream.device, self._stream.nbytes)

    def _most_offloaded_tensors(self, device: torch.device) -> int:
        """Return the largest number of tensors that a bucket's update needs and that are outside the memory of `device`."""

        def count(bucket: Bucket) -> int:
            uses = self._operands(bucket, most=True)
            # Gradients that are not allocated yet will be allocated on this rank's compute device.
            coming = bucket.grad is None and bucket.grad_rest is None and device.type != self._tiers.device.type
            return sum(use.tensor.whole(device) is None for use in uses) + coming

        return max(map(count, self._buckets), default=0)

    def _make_stream(self, device: torch.device, replaced_nbytes: int = 0) -> UpdateStream:
        width = self._most_offloaded_tensors(device)
        longest = max((bucket.master.nbytes for bucket in self._buckets), default=0)
        stream = _open_stream(device, self._tiers, self._options, width, longest, self._tiers.waits)
        tier = Tier.DEVICE if is_accelerator(device) else Tier.HOST
        self._tiers.ledger.add(tier, Purpose.STAGING, stream.nbytes - replaced_nbytes)
        return stream

    def resume(self, updates: int, steps: Mapping[str, int]) -> None:
        """Continue after `updates` updates; `steps` has, by name, the counts of parameters that had another number of updates."""
        self.updates = updates
        for bucket in self._all_buckets:
            if (optimizer := self.optimizer_of(bucket)) is not None:
                specs = [slot.spec for slot in bucket.layout.slots]
                optimizer.steps = [steps.get(each.name, updates * (each.fqn in bucket.ever_trained)) for each in specs]
                optimizer.update_segments()

    def begin_step(self, step: int, groups: Sequence[fused_optimizer.Hyperparameters], *, syncs: bool = True) -> None:
        self.step, self.groups, self.syncs = step, groups, syncs
        self._updated = []
        self.gradients.shards.begin_step()
        self._finished_units = set()
        self.last_order = []

    def finish_units(self, units: Iterable[Unit]) -> None:
        """Record that this rank has finished backward of these units, and update inside backward the buckets that are ready."""
        if self.gradients.updates_in_backward:
            self._end_reads(units)
            self._update_ready()

    def read(self, scalars: Sequence[torch.Tensor]) -> tuple[list[float], float]:
        """Read the norms of gradients and the caller's `scalars` from the device. Returns the scalars, and this rank's part of the
        squared norm of all summed gradients, with the loss scale in it: the parts of all ranks add up to the whole. A value that
        is not finite is in the part of every rank that holds it."""
        measured = self._updated
        if not self._options.optimizer_in_backward:
            measured = [(bucket, self.gradients.shards.norm(bucket)) for bucket in self._buckets]
        values = accelerator.read_scalars([*scalars, *(norm for _, norm in measured)])
        self._norms = [(bucket, norm) for (bucket, _), norm in zip(measured, values[len(scalars) :], strict=True)]
        kept = [norm**2 for bucket, norm in self._norms if self._counts(bucket) or not math.isfinite(norm)]
        return values[: len(scalars)], sum(kept)

    def _counts(self, bucket: Bucket) -> bool:
        """Return True if this rank adds a bucket's gradients to the norm, as one of the ranks that update the same elements."""
        first = bucket.divided or not (self._mesh.replicate.index or (self._replicated and bucket.group.ranks.index))
        return first and self.gradients.replicas.counts(bucket)

    def _drop_journal(self) -> None:
        if self.journal is not None:
            self.journal.memory.forget()
            self.journal = None

    def finish(self, units: Iterable[Unit], factor: float, squares: float, *, loss_finite: bool) -> StepOutcome:
        """Multiply gradients by `factor`, unscale, clip, and update, unless backward has updated; see `ZeroEngine.finish_step`. All
        ranks get the same `squares`, and so skip, stop and clip together."""
        options = self._options
        self._mesh.post(Activity.OPTIMIZER)
        scale = self.scaler.scale
        norm = math.sqrt(squares) * abs(factor) / scale
        finite = math.isfinite(norm)
        cause = "" if finite else self._describe_nonfinite(norm, loss_finite)
        if not finite and options.on_nonfinite == "stop":
            unchanged = "no parameter was changed (run.on_nonfinite: stop)"
            raise NonFiniteError(f"{cause}; {_INSIDE_BACKWARD if options.optimizer_in_backward else unchanged}")
        factor *= clip_factor(norm, options.clip_norm) / scale
        if self.journal is not None and not self.journal.has_all:
            self._drop_journal()
        if self.journal is not None:
            self.journal.commit(self.step + 1, self._record(factor, norm, cause))
        self.scaler.update(overflow=not finite)
        files = self._tiers.durable
        for moment in chain.from_iterable(each.moments.values() for each in self._optimizers.values() if files):
            moment.wait_for_writes()  # Blocks of which a load has written a part are encoded in place.
        with nullcontext() if files is None else files.update():
            self.update(units, factor, skip=not finite)
        if self.journal is not None:
            self.journal.end()
        return StepOutcome(grad_norm=norm, skipped=not finite, loss_scale=scale, cause=cause, waited=self._tiers.waited())

    def _record(self, factor: float, norm: float, cause: str) -> dict[str, Any]:
        """Return what another process needs to finish an update on its own."""
        counts = {bucket.name: self._optimizers[id(bucket)].steps for bucket in self._buckets}
        return {
            "factor": factor if math.isfinite(norm) else None,
            "groups": self.groups,
            "missing": {bucket.name: sorted(bucket.missing) for bucket in self._buckets if bucket.missing},
            "updates": self.updates,
            "steps": {name: steps for name, steps in counts.items() if {*steps} != {self.updates}},
            "scaler": [self.scaler.scale, self.scaler.good_steps],
            "averages": 0 if self.averages is None else self.averages.count,
            "norm": str(norm),
            "cause": cause,
            "note": self.step_note,
        }

    def finish_recorded(self, record: Mapping[str, Any], steps: int, position: int) -> StepOutcome:
        """Finish the update of a `record` without other ranks, or an exchange with the averages after it: the states in memory are
        those after `steps` steps, and have `position` of what followed. Called inside `ZeroEngine.loading`."""
        if self.journal is None:
            raise PhaseError("an update without a journal cannot be finished")
        self.groups, self.updates = record["groups"], record["updates"]
        self.scaler.load(*record["scaler"])
        if self.averages is not None:
            self.averages.count = record["averages"]
        for bucket in self._buckets:
            optimizer = self._optimizers[id(bucket)]
            optimizer.steps = list(record["steps"].get(bucket.name, [self.updates] * len(optimizer.steps)))
            bucket.missing = frozenset(record["missing"].get(bucket.name, ()))
            optimizer.update_segments()
        skip, scale = record["factor"] is None, self.scaler.scale
        self.scaler.update(overflow=skip)
        over = steps == record["step"]
        self.journal.take_over(record["step"], COMPLETE if over else position)
        self._change_states(self._buckets if not skip else (), record["factor"] or 0.0, skip=skip)
        self._encoded.clear()  # Parameters are gathered from all master weights.
        self.journal.end()
        if over and position:
            self.journal.take_over(steps + 1, position)
            self.swap_averages()
            self.swap_averages()
            self.journal.begin()
        return StepOutcome(grad_norm=float(record["norm"]), skipped=skip, loss_scale=scale, cause=record["cause"])

    def update(self, units: Iterable[Unit], factor: float, *, skip: bool = False) -> None:
        """Update with gradients times `factor`, unless backward has, and release gradients; `skip` only releases them."""
        self._end_reads(units)
        late = [bucket for bucket, _ in self._updated if bucket not in self.last_order]
        due = late if self._options.optimizer_in_backward else self._buckets
        if not skip and not is_accelerator(self._stream.device):
            self.gradients.shards.wait()
        self._change_states(() if skip else due, factor, skip=skip)
        # All gathers are started before the first is waited for.
        wire, encoded, self._encoded = self.gradients.replicas.wire, self._encoded, {}
        changed = [bucket for bucket in due if bucket.divided and not skip]
        waits = [bucket.share_copy(wire, encoded.get(id(bucket))) for bucket in changed]
        for bucket, wait in zip(changed, waits, strict=True):
            wait()
            bucket.buffer.end_write()

    def _change_states(self, due: Sequence[Bucket], factor: float, *, skip: bool) -> None:
        for number, bucket in enumerate(due):
            self._update(bucket, factor, due[number + 1 :])
        if self.outer is not None and self.syncs:  # Replicas may also differ in what this step does not update here.
            for bucket in (*self._buckets, *self._all_buckets):
                if id(bucket) in self._optimizers and bucket not in self.last_order:
                    self._update(bucket, None, ())
        self._stream.wait_for_writes()  # Wait for updates inside backward too: states may be read now.
        self.drop_gradients()
        if skip and self.outer is None:
            return
        if (averages := self._due_averages) is not None:
            if not self._options.evaluates_average:  # The update has blended those of buckets that are trained now.
                others = (bucket for bucket in self._all_buckets if bucket not in self.last_order)
                self._change_averages(others, Access.READ, averages.blend)
            averages.count += 1
        self.updates += not skip
        if not skip:
            self._shared.end_update(self.groups)
        if self.outer is not None:
            self.diverged = not self.syncs
            if self.syncs:
                self._agree_on_updates(self.outer.replicas)

    def swap_averages(self) -> None:
        """Exchange master weights with their averages, or back. Raises `StorageError`."""
        self._change_averages(self._all_buckets, Access.UPDATE, WeightAverage.swap)

    def _change_averages(
        self, buckets: Iterable[Bucket], mode: Access, change: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Call `change` with each part of the averages and that of their weights, which it uses in `mode`."""

        def compute(_row: StreamRow, tensors: list[torch.Tensor]) -> None:
            weights, average = tensors
            with self._guarded(tensors if mode is Access.UPDATE else [average]) as changes:
                if changes:
                    change(average, weights)

        for bucket in buckets:
            if bucket.average is not None:
                self.before_change(bucket)
                modes = ((bucket.master, mode), (bucket.average, Access.UPDATE))
                uses = [StreamOperand(tensor=tensor, mode=each) for tensor, each in modes]
                self._stream.run(list(self._cut(self._stream.rows(id(bucket), bucket.length, uses))), compute)
        self._stream.wait_for_writes()

    def _agree_on_updates(self, replicas: ProcessSet) -> None:
        """Take the largest numbers of updates of all replicas, since one may have skipped some."""
        optimizers = [*self._optimizers.values()]
        own = torch.tensor([self.updates, *chain.from_iterable(each.steps for each in optimizers)])
        self.updates, *steps = replicas.all_reduce_max(own, "numbers of updates").tolist()
        for optimizer in optimizers:
            optimizer.steps, steps = steps[: len(optimizer.steps)], steps[len(optimizer.steps) :]
            optimizer.update_segments()

    def _guarded(self, states: Sequence[torch.Tensor]) -> AbstractContextManager[bool]:
        """Guard a change of states by the journal, if there is one; see `Journal.chunk`."""
        return nullcontext(True) if self.journal is None else self.journal.chunk(states)

    def _cut(self, rows: Iterable[StreamRow]) -> Iterable[StreamRow]:
        return rows if self.journal is None else chain.from_iterable(map(self.journal.rows, rows))

    def drop_gradients(self) -> None:
        for bucket in self._buckets:
            self.gradients.shards.drop(bucket)

    @property
    def _due_averages(self) -> WeightAverage | None:
        """The averages that the present step's weights enter. With local steps it is each sync, and steps count, not updates."""
        if self.averages is None or not self.syncs:
            return None
        return self.averages if self.averages.is_due((self.updates if self.outer is None else self.step) + 1) else None

    def _describe_nonfinite(self, norm: float, loss_finite: bool) -> str:
        """Name the units whose gradients, and the ranks whose losses, are not finite, alike on all ranks."""
        units = [self._units[bucket.unit_index] for bucket, norm in self._norms if not math.isfinite(norm)]
        causes = [not loss_finite, sorted({(unit.index, unit.name) for unit in units})]
        world = self._mesh.world
        rows = dict(zip(world.ranks, world.gather_json(causes, "where gradients are not finite"), strict=True))
        names = [name for _, name in sorted({(index, name) for _, units in rows.values() for index, name in units})]
        text = f"the gradient norm is {norm}"
        if names:
            text += f": gradients of unit {some(names, 1)} are not finite"
        if ranks := [str(rank) for rank, (bad, _) in rows.items() if bad]:
            text += f"; the loss is not finite on {plural(len(ranks), 'rank')} {', '.join(ranks)}"
        return text

    def optimizer_of(self, bucket: Bucket) -> fused_optimizer.BucketOptimizer | None:
        return self._optimizers.get(id(bucket))

    def abandon(self) -> None:
        """Drop the gradients and pending work of a step that ended before it changed any weight or state."""
        self._ready.clear()
        self._stream.drop_read_ahead()
        self.gradients.abandon(self._buckets)

    def _end_reads(self, units: Iterable[Unit]) -> None:
        """Let the other ranks overwrite what this rank has read of these units, once per step: later it may be the next values."""
        for unit in units:
            if unit.index not in self._finished_units:
                self._finished_units.add(unit.index)
                for bucket in unit.trainable:
                    bucket.buffer.end_read()

    def _update_ready(self, *summed: Bucket) -> None:
        """Update the buckets that can be updated, now that these are summed too; see [Note: Updates inside backward]."""
        ready, self._ready = [*self._ready, *summed], []
        for bucket in ready:
            unit = self._units[bucket.unit_index]
            if unit.index not in self._finished_units:
                self._ready.append(bucket)
                continue
            self.gradients.complete(bucket)
            norm = self.gradients.shards.norm(bucket)
            # On a device the norm is read at the end of the step, since the host would wait here for the device.
            if not on_accelerator(norm) and not math.isfinite(norm):
                raise NonFiniteError(f"gradients of unit {unit.name} are not finite; {_INSIDE_BACKWARD}")
            self._updated.append((bucket, norm))
            done = {id(bucket), *map(id, self.last_order)}
            if not bucket.missing:
                self._update(bucket, 1.0, [each for each in self.gradients.buckets if id(each) not in done])
                self.gradients.shards.drop(bucket)

    def _update(self, bucket: Bucket, factor: float | None, following: Sequence[Bucket]) -> None:
        """Update a bucket with gradients times `factor`; None: only bring it together with the replicas'."""
        self.before_change(bucket)
        self.last_order.append(bucket)
        self._mesh.post(Activity.OPTIMIZER, self._units[bucket.unit_index].index)
        optimizer = self._optimizers[id(bucket)]
        trained = any(bucket.training)
        if factor is not None:
            optimizer.begin()
        grad = gradient_of(bucket) if self.gradients.updates_in_backward else None
        averages, outer = self._due_averages, self.outer if self.syncs else None
        wire = self.gradients.replicas.wire if bucket.divided else None
        if wire is not None:
            nbytes, device = wire.nbytes(bucket.length), self._mesh.device
            encoded = self._encoded[id(bucket)] = torch.empty(nbytes, dtype=torch.uint8, device=device)

        def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
            copy = tensors.pop() if bucket.copy is not None else None
            part = tensors.pop() if trained and grad is None else None
            if grad is not None:
                part = grad[row.start : row.end].to(tensors[0].device)
            with self._guarded(tensors) as changes:
                if not changes:
                    return
                if part is not None and factor not in (None, 1.0):
                    # A journal keeps no copy of gradients, which have to stay as they are.
                    part = part.mul_(factor) if self.journal is None else part * factor
                average = tensors.pop() if averages is not None else None
                outer_states = [tensors.pop(1) for _ in bucket.outer] if outer is not None else []
                master, *moments = tensors
                if part is not None and factor is not None:
                    optimizer.step(row.start, [master, part, *moments], self.groups)
                if outer is not None:
                    outer.step(master, outer_states)
                if averages is not None and average is not None:
                    averages.blend(average, optimizer.evaluated(row.start, master, moments, self.groups))
            if copy is not None and wire is not None:
                wire.encode_into(encoded, master.float() - copy, row.start, bucket.length)
            elif copy is not None:
                copy.copy_(master)

        with self._mesh.recorder.span(StepPhase.OPTIMIZER, f"update {bucket.name}"):
            bucket.buffer.begin_write()
            if optimizer.whole:
                run_whole(self._operands(bucket), compute, self._mesh.device)
            else:
                # If no tensor is offloaded, nothing is read ahead.
                ahead = chain.from_iterable(map(self._rows, following)) if self._stream.nbytes else ()
                self._stream.run(list(self._rows(bucket)), compute, ahead)
            if not bucket.divided:
                bucket.buffer.end_write()

    def _rows(self, bucket: Bucket) -> Iterable[StreamRow]:
        return self._cut(self._stream.rows(id(bucket), bucket.length, self._operands(bucket)))

    def _operands(self, bucket: Bucket, *, most: bool = False) -> list[StreamOperand]:
        """List the operands of the present step in the order in which `_update` takes them: master weights, outer states, moments,
        averages, gradients unless backward has just left them in memory, and the copy that is gathered; `most`: list what any
        step needs. A bucket that is not trained now has neither moments nor gradients among them."""
        trained = any(bucket.training)
        states = [bucket.master, *(bucket.outer if most or self.syncs else ())]
        states += self._optimizers[id(bucket)].moments.values() if trained else ()
        if (most or self._due_averages is not None) and bucket.average is not None:
            states.append(bucket.average)
        uses = [StreamOperand(tensor=tensor, mode=Access.UPDATE) for tensor in states]
        if trained and not self.gradients.updates_in_backward and (summed := bucket.summed_gradient()) is not None:
            uses.append(StreamOperand(tensor=summed, mode=Access.READ))
        if (copy := bucket.own_copy) is not None:
            told = bucket.divided and self.gradients.replicas.wire is not None  # Its difference is sent.
            uses.append(StreamOperand(tensor=copy, mode=Access.READ if told else Access.WRITE))
        return uses
