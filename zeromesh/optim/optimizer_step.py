"""From gradient shards to the next values of the parameters: norm, clipping and the optimizer, after backward or inside it.

A step calls, in this order:

    begin_step        with the rates of the step
    begin_backward    for each microbatch, with the order in which its buckets are reduced
    take              for each bucket that is summed over its shard group; in the last backward it is summed over its replicas too,
                      and then put away, kept for `finish`, or updated at once (`optimizer_in_backward`)
    end_backward      to wait for the sums over replicas
    finish            for the global norm, clipping, and the update of what is not updated yet
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import MappingProxyType

import torch

from zeromesh import fault_injection
from zeromesh.errors import NonFiniteError
from zeromesh.flat.placement import Placement
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import (
    Access,
    Purpose,
    StreamOperand,
    StreamRow,
    Tier,
    TieredTensor,
    Tiers,
    UpdateStream,
)
from zeromesh.optim.fused_optimizer import BucketOptimizer, GroupRules, Rates
from zeromesh.optim.gradients import GradientShards, LossScaler, ReplicaGroups, clip_factor, global_norm, gradient_of
from zeromesh.optim.update_device import place_updates, try_update
from zeromesh.optim.weight_average import WeightAverage
from zeromesh.options import ZeroOptions
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.telemetry.watchdog import Activity
from zeromesh.units.unit import Bucket, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The outcome of a step. `grad_norm` is before clipping. When it is not finite, `skipped` is True and `cause` says where.

    `waited` has the seconds in which this rank stood still in the step for bytes of each tier.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    cause: str = ""
    waited: Mapping[Tier, float] = field(default_factory=dict)


class OptimizerStep:
    """Owns the optimizer states of this rank's shards, and updates them."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, options: ZeroOptions, tiers: Tiers) -> None:
        self.scaler = LossScaler(options.precision.loss_scale)
        self._mesh = mesh
        self._options = options
        self._tiers = tiers
        self.shards = GradientShards(options, tiers)
        self._all = [bucket for unit in units for bucket in unit.buckets]
        self._buckets: list[Bucket] = []
        """Buckets that are trained in the present step."""
        self._units = {id(bucket): unit for unit in units for bucket in unit.buckets}
        self._optimizers: dict[int, BucketOptimizer] = {}
        at = options.offload.optimizer
        self.averages = None if options.average is None else WeightAverage(options.average, tiers, at)
        """The averages of the weights, where options ask for them."""
        self._make_optimizers()
        self.shards.require_room(self._buckets)
        self._sums: dict[int, Callable[[], None]] = {}
        """Calls that wait for the sum of a bucket over its replicas."""
        self._ready: deque[Bucket] = deque()
        """Buckets whose gradients are to be updated with, or put away, inside this backward."""
        self._tied: list[Bucket] = []
        """Buckets that stages of a pipeline share, and that are summed when all backwards of the step are over."""
        self._retired: set[int] = set()
        """Units that this rank does not read again before the next update."""
        self._last = True
        self._order: Sequence[Bucket] = ()
        self._in_backward = False
        self._rates = Rates()
        self._squares = 0.0
        self.sharing = ReplicaGroups(mesh, self._all)
        replicated = options.placements.optimizer is Placement.REPLICATED
        self._owners = mesh["pipeline", "tensor"] if replicated else mesh["pipeline", "shard", "tensor"]
        """The ranks whose buckets together are all of the model."""
        self.updates = 0
        """How many updates were made: steps that were not skipped."""
        self.last_order: list[Bucket] = []
        """Buckets in the order in which the latest step has updated them."""
        self.before_change: Callable[[Bucket], None] = _do_nothing
        """Runs before a bucket's states change; whoever reads them beside training ends that in it."""
        offload = options.offload
        settings, dtype = options.optimizer, options.precision.master
        try_on = partial(try_update, tiers=tiers, settings=settings, dtype=dtype, staging_bytes=offload.staging_bytes)
        self.place = place_updates(offload.update, mesh, try_on, in_reach=not self._missing(tiers.device))
        self._stream = self._make_stream(self.place.device, tiers)

    def _make_optimizers(self) -> None:
        """Make optimizers, and averages, for the buckets that are trained and have none yet."""
        self._buckets = [bucket for bucket in self._all if any(bucket.training)]
        settings, at = self._options.optimizer, self._options.offload.optimizer
        for bucket in self._all:
            if bucket.trainable and id(bucket) not in self._optimizers:
                groups = GroupRules(settings).groups
                self._optimizers[id(bucket)] = BucketOptimizer(bucket, settings, groups, self._tiers, at)
                if self.averages is not None:
                    self.averages.begin(bucket)

    def follow(self) -> None:
        """Take in, between two steps, that other parameters are trained than before."""
        known = len(self._optimizers)
        self._make_optimizers()
        for optimizer in self._optimizers.values():
            optimizer.follow()
        if len(self._optimizers) > known:
            self._stream.forget()
            device = self._stream.device
            tier = Tier.HOST if device.type == "cpu" else Tier.DEVICE
            self._tiers.ledger.add(tier, Purpose.STAGING, -self._stream.nbytes)
            self._stream = self._make_stream(device, self._tiers)

    def _missing(self, device: torch.device) -> int:
        """How many tensors of a bucket's update are not in the memory of `device`, at most."""
        uses = (self._uses(bucket, averaging=True) for bucket in self._buckets)
        return max((sum(use.tensor.whole(device) is None for use in each) for each in uses), default=0)

    def _make_stream(self, device: torch.device, tiers: Tiers) -> UpdateStream:
        stream = UpdateStream(
            device,
            width=self._missing(device),
            longest=max((bucket.master.nbytes for bucket in self._buckets), default=0),
            nbytes=self._options.offload.staging_bytes,
            waits=tiers.waits,
            memory=partial(tiers.buffer, device=device),
        )
        tiers.ledger.add(Tier.HOST if device.type == "cpu" else Tier.DEVICE, Purpose.STAGING, stream.nbytes)
        return stream

    def resume(self, updates: int, steps: Mapping[str, int] = MappingProxyType({})) -> None:
        """Go on after `updates` updates; parameters in `steps` have had other numbers of updates, by name."""
        self.updates = updates
        for bucket in self._all:
            optimizer = self.optimizer_of(bucket)
            if optimizer is not None:
                specs = [slot.spec for slot in bucket.layout.slots]
                optimizer.steps = [steps.get(each.name, updates * bucket.learned(each.fqn)) for each in specs]
                optimizer.follow()

    def begin_step(self, rates: Rates) -> None:
        """Begin a step, whose updates are made with these rates."""
        self._rates = rates
        self._squares = 0.0
        self.shards.begin_step()
        self._retired = set()
        self.last_order = []

    def begin_backward(self, order: Sequence[Bucket], *, first: bool, last: bool) -> None:
        """Begin a backward, whose buckets are reduced in this order. `first` and `last` are those of a step."""
        self._order = order
        self.shards.begin(first=first)
        self._last = last
        self._in_backward = last and self._options.optimizer_in_backward

    def take(self, bucket: Bucket) -> None:
        """Go on with a bucket that is summed over its shard group."""
        if not self._last:
            if bucket.grad is not None:
                self.shards.put_away(bucket, last=False)
            return
        self.shards.make_room(bucket)
        if self.sharing.over_stages(bucket):
            self._tied.append(bucket)  # The other stage may wait for what follows this backward.
        else:
            self._share(bucket)

    def _share(self, bucket: Bucket) -> None:
        """Sum a bucket over its replicas, and update it or put it away where that is due."""
        wait = self.sharing.start_sum(bucket, gradient_of(bucket))
        if wait is not None:
            self._sums[id(bucket)] = wait
        if self._in_backward:
            self._ready.append(bucket)
            self._update_ready()
        elif bucket.grad_rest is not None:
            self._ready.append(bucket)
            while len(self._ready) > 1:  # The sum of the newest bucket over its replicas goes on meanwhile.
                self._put_away_oldest()

    def _put_away_oldest(self) -> None:
        bucket = self._ready.popleft()
        self._complete(bucket)
        self.shards.put_away(bucket, last=True)

    def leave(self, units: Iterable[Unit]) -> None:
        """Note that this rank is done with these units in backward, so that all ranks may update them."""
        if self._in_backward:
            self._retire(units)
            self._update_ready()

    def end_backward(self, units: Iterable[Unit]) -> None:
        """End a backward: wait for the sums over replicas, and for what is put away."""
        if self._in_backward:
            self._retire(units)
            self._update_ready()
        elif self._last:
            while self._ready:
                self._put_away_oldest()
        for bucket in self._buckets:
            self._complete(bucket)
        self.shards.settle()

    def end_backwards(self) -> None:
        """Sum what stages share, when all backwards of the step are over and no other rank waits for one of this rank."""
        tied, self._tied = sorted(self._tied, key=lambda bucket: bucket.layout.first.name), []
        for bucket in tied:
            self._share(bucket)
        if tied:
            self.end_backward(())

    def finish(self, units: Iterable[Unit], factor: float, *, loss_finite: bool) -> StepOutcome:
        """Multiply gradients by `factor`, unscale, clip, and update, unless backward has done so.

        All ranks see one norm, and so skip, stop and clip together. `loss_finite`: whether this rank's own losses were finite.

        Raises:
            NonFiniteError: for a norm that is not finite, under `on_nonfinite: stop`.
        """
        options = self._options
        self._mesh.post(Activity.OPTIMIZER)
        if not options.optimizer_in_backward:
            self._retire(units)
            squares = zip(self._buckets, self.shards.squares(self._buckets), strict=True)
            # A value that another rank counts may be not finite on this rank alone.
            self._squares = sum(
                value for each, value in squares if self.sharing.counts(each) or not math.isfinite(value)
            )
        scale = self.scaler.scale
        factor /= scale
        norm = global_norm(self._squares, self._owners) * abs(factor)
        finite = math.isfinite(norm)
        cause = "" if finite else self._cause(norm, loss_finite)
        if not finite and options.on_nonfinite == "stop":
            raise NonFiniteError(f"{cause}; no parameter was changed (run.on_nonfinite: stop)")
        self.scaler.update(overflow=not finite)
        if finite and not options.optimizer_in_backward:
            factor *= clip_factor(norm, options.clip_norm)
            for number, bucket in enumerate(self._buckets):
                self._update(bucket, factor, self._buckets[number + 1 :])
            self._stream.settle()
        for bucket in self._buckets:
            self.shards.drop(bucket)
        if finite:
            self._end_averages()
        self.updates += finite
        waited = self._tiers.waited()
        return StepOutcome(grad_norm=norm, skipped=not finite, loss_scale=scale, cause=cause, waited=waited)

    @property
    def _averaging(self) -> bool:
        """Whether the averages of the weights take in the present update."""
        return self.averages is not None and self.averages.due(self.updates + 1)

    def _end_averages(self) -> None:
        """Let the averages of buckets that are not trained now take in the update too; those of the others have done so."""
        averages = self.averages
        if averages is None or not self._averaging:
            return
        for bucket in self._all:
            average = averages.of(bucket)
            if average is not None and not any(bucket.training):
                self.before_change(bucket)
                uses = [
                    StreamOperand(tensor=bucket.master, mode=Access.READ),
                    StreamOperand(tensor=average, mode=Access.UPDATE),
                ]
                rows = list(self._stream.rows(id(bucket), bucket.interval.length, uses))
                self._stream.run(rows, lambda _row, tensors: averages.blend(tensors[1], tensors[0]))
        self._stream.settle()
        averages.count += 1

    def _cause(self, norm: float, loss_finite: bool) -> str:
        """Which units' gradients, and which ranks' losses, are not finite. All ranks call it, and return the same text."""
        found = {
            self._units[id(bucket)].index: self._units[id(bucket)].name
            for bucket in self._buckets
            if not math.isfinite(self.shards.square(bucket))
        }
        rows = self._mesh.world.gather_json([not loss_finite, sorted(found.items())], "where gradients are not finite")
        names = [name for _, name in sorted({(index, name) for _, units in rows for index, name in units})]
        text = f"the gradient norm is {norm}"
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text += f": gradients of unit {names[0]}{more} are not finite"
        ranks = [str(rank) for rank, (bad, _) in enumerate(rows) if bad]
        if ranks:
            text += f"; the loss is not finite on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        return text

    def optimizer_of(self, bucket: Bucket) -> BucketOptimizer | None:
        """The optimizer of a bucket's shard; None for a bucket that was never trained."""
        return self._optimizers.get(id(bucket))

    def abandon(self) -> None:
        """Forget a step that has ended before it has changed anything."""
        self._ready.clear()
        self._tied.clear()
        self._sums.clear()
        self._stream.forget()
        self.shards.abandon(self._buckets)

    def _retire(self, units: Iterable[Unit]) -> None:
        """Let the other ranks overwrite what this rank has gathered of these units, each once per step."""
        for unit in units:
            if (
                unit.index not in self._retired
            ):  # Else it may hold the next values already, which this rank still has to read.
                self._retired.add(unit.index)
                for bucket in unit.trainable:
                    bucket.buffer.retire()

    def _complete(self, bucket: Bucket) -> None:
        """Wait for the sum of a bucket over its replicas."""
        wait = self._sums.pop(id(bucket), None)
        if wait is not None:
            wait()

    def _update_ready(self) -> None:
        """Update, inside backward, the buckets that are reduced and that this rank does not read any more.

        The update waits until the other ranks have read them too. This cannot be circular: all ranks leave units in one order, and
        a rank waits only for units that it has left itself.
        """
        ready, self._ready = self._ready, deque()
        for bucket in ready:
            if self._units[id(bucket)].index not in self._retired:
                self._ready.append(bucket)  # It is in the root, for example, which the other buckets need not wait for.
                continue
            self._complete(bucket)
            square = self.shards.square(bucket)
            if not math.isfinite(square):
                raise NonFiniteError(
                    f"gradients of unit {self._units[id(bucket)].name} are not finite; the optimizer runs inside backward, "
                    "so the step is half done and its state must not be saved"
                )
            self._squares += square if self.sharing.counts(bucket) else 0.0
            following: Sequence[Bucket] = ()
            if self._stream.nbytes:  # Else nothing is away, and there is nothing to read ahead.
                done = {id(bucket), *map(id, self.last_order)}
                following = [each for each in self._order if id(each) not in done]
            self._update(bucket, 1.0, following)
            self.shards.drop(bucket)

    def _update(self, bucket: Bucket, factor: float, following: Sequence[Bucket]) -> None:
        """Update a bucket's shard. `following` are the buckets whose turn comes next, as far as that is known."""
        fault_injection.visit("optimizer")
        self.before_change(bucket)
        self.last_order.append(bucket)
        self._mesh.post(Activity.OPTIMIZER, self._units[id(bucket)].index)
        with self._mesh.recorder.span(StepPhase.OPTIMIZER, f"update {bucket.name}"):
            self._change(bucket, factor, following)

    def _change(self, bucket: Bucket, factor: float, following: Sequence[Bucket]) -> None:
        bucket.buffer.begin_write()
        optimizer = self._optimizers[id(bucket)]
        optimizer.begin()
        grad = gradient_of(bucket) if self._in_backward else None
        copied, averages = bucket.copy is not None, self.averages if self._averaging else None

        def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
            copy = tensors.pop() if copied else None
            part = tensors.pop() if grad is None else grad[row.start : row.end].to(self._stream.device)
            if factor != 1.0:
                part.mul_(factor)
            average = tensors.pop() if averages is not None else None
            master, *moments = tensors
            optimizer.step(row.start, row.end, master, part, moments, self._rates)
            if copy is not None:
                copy.copy_(master)
            if averages is not None and average is not None:
                averages.blend(average, master)

        ahead = chain.from_iterable(self._rows(each) for each in following)
        self._stream.run(list(self._rows(bucket)), compute, ahead)
        bucket.buffer.end_write()

    def _rows(self, bucket: Bucket) -> Iterator[StreamRow]:
        return self._stream.rows(id(bucket), bucket.interval.length, self._uses(bucket, averaging=self._averaging))

    def _uses(self, bucket: Bucket, *, averaging: bool) -> list[StreamOperand]:
        """The tensors that an update of a bucket reads and writes: master weights, moments, averages, gradients (other than inside
        backward, where they have just arrived in memory), and the copy that is gathered. `_change` takes them in this order."""
        states = [bucket.master, *self._optimizers[id(bucket)].moments.values()]
        average = self.averages.of(bucket) if self.averages is not None and averaging else None
        states += [average] if average is not None else []
        uses = [StreamOperand(tensor=tensor, mode=Access.UPDATE) for tensor in states]
        if not self._in_backward:
            rest = bucket.grad_rest if bucket.grad is None else TieredTensor.of(bucket.grad)
            if rest is not None:
                uses.append(StreamOperand(tensor=rest, mode=Access.READ))
        if bucket.copy is not None:
            uses.append(StreamOperand(tensor=bucket.copy, mode=Access.WRITE))
        return uses


def _do_nothing(bucket: Bucket) -> None:
    """The call before an update where nobody reads the states beside training."""
