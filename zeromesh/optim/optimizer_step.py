"""From gradient shards to the next values of the parameters: norm, clipping and the optimizer, after backward or inside it."""

from __future__ import annotations

import json
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
    WaitTime,
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
    """What `finish` did. `grad_norm` is before clipping; `skipped` when it was not finite, and then `cause` says where.

    `waited` are this rank's seconds that it stood still in the step for bytes of a tier.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    cause: str = ""
    waited: Mapping[Tier, float] = field(default_factory=dict)


class OptimizerStep:
    """Owns the optimizer state of this rank's shards."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, options: ZeroOptions, tiers: Tiers) -> None:
        self.scaler = LossScaler(options.precision.loss_scale)
        self._mesh = mesh
        self._options = options
        self._tiers = tiers
        self.shards = GradientShards(options, tiers)
        self._all = [bucket for unit in units for bucket in unit.buckets]
        self._buckets: list[Bucket] = []
        """Those that are trained in the present step."""
        self._units = {id(bucket): unit for unit in units for bucket in unit.buckets}
        self._optimizers: dict[int, BucketOptimizer] = {}
        at = options.offload.optimizer
        self.averages = None if options.average is None else WeightAverage(options.average, tiers, at)
        """Of the weights, where options ask for it."""
        self._make_optimizers()
        self.shards.require_room(self._buckets)
        self._sums: dict[int, Callable[[], None]] = {}
        self._ready: deque[Bucket] = deque()
        self._tied: list[Bucket] = []
        self._retired: set[int] = set()
        self._last = True
        self._order: Sequence[Bucket] = ()
        self._in_backward = False
        self._rates = Rates()
        self._squares = 0.0
        self.sharing = ReplicaGroups(mesh, self._all)
        """Who else holds what this rank has."""
        replicated = options.placements.optimizer is Placement.REPLICATED
        self._owners = mesh["pipeline", "tensor"] if replicated else mesh["pipeline", "shard", "tensor"]
        """The ranks whose buckets are all of the model, once or several times."""
        self.updates = 0
        """Updates that were made: steps that were not skipped."""
        self.last_order: list[Bucket] = []
        """Buckets in the order in which the latest step has updated them."""
        self.before_change: Callable[[Bucket], None] = _do_nothing
        """Called before a bucket's states change: whoever reads them beside training has to have done so."""
        offload = options.offload
        settings, dtype = options.optimizer, options.precision.master
        try_on = partial(try_update, tiers=tiers, settings=settings, dtype=dtype, staging_bytes=offload.staging_bytes)
        self.place = place_updates(offload.update, mesh, try_on, in_reach=not self._missing(tiers.device))
        """Where updates are computed."""
        self._stream = self._make_stream(self.place.device, tiers)

    def _make_optimizers(self) -> None:
        """For all that has states and none yet."""
        self._buckets = [bucket for bucket in self._all if any(bucket.training)]
        settings, at = self._options.optimizer, self._options.offload.optimizer
        for bucket in self._all:
            if bucket.trainable and id(bucket) not in self._optimizers:
                groups = GroupRules(settings).groups
                self._optimizers[id(bucket)] = BucketOptimizer(bucket, settings, groups, self._tiers, at)
                if self.averages is not None:
                    self.averages.begin(bucket)

    def follow(self) -> None:
        """Other parameters are trained than before, between two steps."""
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
        """The most tensors of an update that are not in the memory of `device`."""
        uses = (self._uses(bucket, averaging=True) for bucket in self._buckets)
        return max((sum(use.tensor.whole(device) is None for use in each) for each in uses), default=0)

    def _make_stream(self, device: torch.device, tiers: Tiers) -> UpdateStream:
        stream = UpdateStream(
            device,
            width=self._missing(device),
            longest=max((bucket.master.nbytes for bucket in self._buckets), default=0),
            nbytes=self._options.offload.staging_bytes,
            waits=tiers.waited().get(Tier.FILE, WaitTime()),
            memory=partial(tiers.buffer, device=device),
        )
        tiers.ledger.add(Tier.HOST if device.type == "cpu" else Tier.DEVICE, Purpose.STAGING, stream.nbytes)
        return stream

    def resume(self, updates: int, steps: Mapping[str, int] = MappingProxyType({})) -> None:
        """The states are those after `updates` updates, of which parameters named in `steps` had others."""
        self.updates = updates
        for bucket in self._all:
            optimizer = self.optimizer_of(bucket)
            if optimizer is not None:
                specs = [slot.spec for slot in bucket.layout.slots]
                optimizer.steps = [steps.get(each.name, updates * bucket.learned(each.fqn)) for each in specs]
                optimizer.follow()

    def begin_step(self, rates: Rates) -> None:
        """A step begins, whose updates are made with these rates."""
        self._rates = rates
        self._squares = 0.0
        self.shards.begin_step()
        self._retired = set()
        self.last_order = []

    def begin_backward(self, order: Sequence[Bucket], *, first: bool, last: bool) -> None:
        """Backward begins, whose buckets are reduced in this order; they are updated at once if it is the step's last and options
        say so."""
        self._order = order
        self.shards.begin(first=first)
        self._last = last
        self._in_backward = last and self._options.optimizer_in_backward

    def take(self, bucket: Bucket) -> None:
        """A bucket is summed over its shard group. In a step's last backward: sum over its sharers, update if that is now."""
        if not self._last:
            if bucket.grad is not None:
                self.shards.put_away(bucket, last=False)
            return
        self.shards.make_room(bucket)
        if self.sharing.over_stages(bucket):
            self._tied.append(bucket)  # The other stage may be waiting for what comes after this backward.
        else:
            self._share(bucket)

    def _share(self, bucket: Bucket) -> None:
        """Sum over those that share a bucket, and update or put it away if that is now."""
        wait = self.sharing.start_sum(bucket, gradient_of(bucket))
        if wait is not None:
            self._sums[id(bucket)] = wait
        if self._in_backward:
            self._ready.append(bucket)
            self._update_ready()
        elif bucket.grad_rest is not None:
            self._ready.append(bucket)
            while len(self._ready) > 1:  # The newest one's sum over those that share it goes on meanwhile.
                self._put_away_oldest()

    def _put_away_oldest(self) -> None:
        bucket = self._ready.popleft()
        self._complete(bucket)
        self.shards.put_away(bucket, last=True)

    def leave(self, units: Iterable[Unit]) -> None:
        """This rank is done with these units in backward: what they hold may be updated by all."""
        if self._in_backward:
            self._retire(units)
            self._update_ready()

    def end_backward(self, units: Iterable[Unit]) -> None:
        """Backward is over on this rank."""
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
        """All of a step's backwards are over on this rank, and none of another rank waits for it: sum what stages share."""
        tied, self._tied = sorted(self._tied, key=lambda bucket: bucket.layout.slots[0].spec.name), []
        for bucket in tied:
            self._share(bucket)
        if tied:
            self.end_backward(())

    def finish(self, units: Iterable[Unit], factor: float, *, loss_finite: bool) -> StepOutcome:
        """Clip and update, unless backward has done so; gradients are first multiplied by `factor` and unscaled.

        All ranks see one norm, and so skip, stop and clip together. `loss_finite`: whether this rank's own losses were.

        Raises:
            NonFiniteError: for a norm that is not finite, under `on_nonfinite: stop`.
        """
        options = self._options
        self._mesh.post(Activity.OPTIMIZER)
        if not options.optimizer_in_backward:
            self._retire(units)
            squares = zip(self._buckets, self.shards.squares(self._buckets), strict=True)
            # What others count may be amiss here alone.
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
        waited = {tier: waits.take() for tier, waits in self._tiers.waited().items()}
        return StepOutcome(grad_norm=norm, skipped=not finite, loss_scale=scale, cause=cause, waited=waited)

    @property
    def _averaging(self) -> bool:
        """Whether the update at hand counts for the averages of weights."""
        return self.averages is not None and self.averages.due(self.updates + 1)

    def _end_averages(self) -> None:
        """All weights are updated, and with them their averages; those that rest now count too."""
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
        """Where the gradients are not finite, and on which ranks the loss is not; all ranks say the same."""
        found = {
            self._units[id(bucket)].index: self._units[id(bucket)].name
            for bucket in self._buckets
            if not math.isfinite(self.shards.square(bucket))
        }
        mine = json.dumps([not loss_finite, sorted(found.items())]).encode()
        rows = [json.loads(text) for text in self._mesh.world.gather_bytes(mine, "where gradients are not finite")]
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
        """The optimizer of a bucket's shard; None for a frozen bucket."""
        return self._optimizers.get(id(bucket))

    def abandon(self) -> None:
        """Forget a step that has ended before its time, and has changed nothing."""
        self._ready.clear()
        self._tied.clear()
        self._sums.clear()
        self._stream.forget()
        self.shards.abandon(self._buckets)

    def _retire(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.index in self._retired:
                continue  # It may hold the next generation already, which this rank has still to read.
            self._retired.add(unit.index)
            for bucket in unit.trainable:
                bucket.buffer.retire()

    def _complete(self, bucket: Bucket) -> None:
        """Wait for a bucket's sum over those that share it."""
        wait = self._sums.pop(id(bucket), None)
        if wait is not None:
            wait()

    def _update_ready(self) -> None:
        """Update, inside backward, what is reduced and no longer read by this rank.

        The wait for the others to have read it too cannot be circular: all leave units in one order, and a rank waits only
        for units that it has left itself.
        """
        ready, self._ready = self._ready, deque()
        for bucket in ready:
            if self._units[id(bucket)].index not in self._retired:
                self._ready.append(bucket)  # the root, say, which all others need not wait for
                continue
            self._complete(bucket)
            square = self.shards.square(bucket)
            if not math.isfinite(square):
                raise NonFiniteError(
                    f"gradients of unit {self._units[id(bucket)].name} are not finite; the optimizer runs inside backward, "
                    "so the step is half done and its state must not be saved"
                )
            self._squares += square if self.sharing.counts(bucket) else 0.0
            done = {id(bucket), *map(id, self.last_order)}
            self._update(bucket, 1.0, [each for each in self._order if id(each) not in done])
            self.shards.drop(bucket)

    def _update(self, bucket: Bucket, factor: float, following: Sequence[Bucket]) -> None:
        """Update a bucket's shard; `following` are those whose turn comes next, if that is known."""
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
        """What an update reads and writes of a bucket: master weights, moments, averages that take them in, gradients (inside
        backward they are just there, and nobody knows when), and the copy that is gathered."""
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
    """Nobody reads the states beside training."""
