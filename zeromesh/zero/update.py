"""From gradient shards to the next values of the parameters: norm, clipping and the optimizer, after backward or inside it."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from zeromesh import faults
from zeromesh.errors import NonFiniteError, PhaseError
from zeromesh.flat.placement import Placement
from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.watch import Activity
from zeromesh.offload import Ledger, Purpose, Tier
from zeromesh.optim.sharded import BucketOptimizer, GroupRules
from zeromesh.zero.norm import clip_factor, global_norm, squared_norm
from zeromesh.zero.options import ZeroOptions
from zeromesh.zero.scaler import LossScaler
from zeromesh.zero.unit import Bucket, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What `finish` did. `grad_norm` is before clipping; `skipped` when it was not finite, and then `cause` says where."""

    grad_norm: float
    skipped: bool
    loss_scale: float
    cause: str = ""


class Updater:
    """Owns the optimizer state of this rank's shards."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, options: ZeroOptions, ledger: Ledger) -> None:
        self.scaler = LossScaler(options.precision.loss_scale)
        self._mesh = mesh
        self._options = options
        self._ledger = ledger
        self._buckets = [bucket for unit in units for bucket in unit.trainable]
        self._units = {id(bucket): unit for unit in units for bucket in unit.trainable}
        groups = GroupRules(options.optimizer).groups
        self._optimizers = {id(bucket): BucketOptimizer(bucket, options.optimizer, groups) for bucket in self._buckets}
        for optimizer in self._optimizers.values():
            ledger.add(Tier.DEVICE, Purpose.MOMENTS, sum(moment.nbytes for moment in optimizer.moments.values()))
        self._sums: dict[int, Callable[[], None]] = {}
        self._ready: deque[Bucket] = deque()
        self._retired: set[int] = set()
        self._in_backward = False
        self._lr_factor = 1.0
        self._squares = 0.0
        self.updates = 0
        """Updates that were made: steps that were not skipped."""
        self.last_order: list[Bucket] = []
        """Buckets in the order in which the latest step has updated them."""
        self.before_change: Callable[[Bucket], None] = _do_nothing
        """Called before a bucket's states change: whoever reads them beside training has to have done so."""

    def resume(self, updates: int) -> None:
        """The states are those after `updates` updates."""
        self.updates = updates
        for optimizer in self._optimizers.values():
            optimizer.set_steps(updates)

    def begin_step(self, lr_factor: float) -> None:
        """Learning rates of this step are the optimizer groups' times `lr_factor`."""
        self._lr_factor = lr_factor
        self._squares = 0.0
        self.last_order = []

    def begin_backward(self, *, last: bool) -> None:
        """Backward begins; buckets that it reduces are updated at once if it is the step's last and options say so."""
        self._retired = set()
        self._in_backward = last and self._options.optimizer_in_backward

    def make_room(self, bucket: Bucket) -> None:
        """A bucket's sum is about to be made: give it memory if it has none of its own."""
        if bucket.grad is None:
            bucket.grad = torch.empty(
                bucket.interval.length, dtype=self._options.precision.reduce, device=self._mesh.device
            )
            self._ledger.add(Tier.DEVICE, Purpose.GRADIENTS, bucket.grad.nbytes)

    def take(self, bucket: Bucket) -> None:
        """The last reduction of a bucket in this step is done in its shard group: sum over replicas, and update if that is now."""
        if self._mesh.replicate.size > 1:
            self._sums[id(bucket)] = self._mesh.replicate.start_sum(gradient_of(bucket), "sum over replicas")
        if self._in_backward:
            self._ready.append(bucket)
            self._update_ready()

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
        for bucket in self._buckets:
            self._complete(bucket)

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
            self._squares = squared_norm(gradient_of(bucket) for bucket in self._buckets)
        owners = None if options.placements.optimizer is Placement.REPLICATED else self._mesh.shard
        scale = self.scaler.scale
        factor /= scale
        norm = global_norm(self._squares, owners) * abs(factor)
        finite = math.isfinite(norm)
        cause = "" if finite else self._cause(norm, loss_finite)
        if not finite and options.on_nonfinite == "stop":
            raise NonFiniteError(f"{cause}; no parameter was changed (run.on_nonfinite: stop)")
        self.scaler.update(overflow=not finite)
        if finite and not options.optimizer_in_backward:
            factor *= clip_factor(norm, options.clip_norm)
            for bucket in self._buckets:
                self._update(bucket, factor)
        self.updates += finite
        return StepOutcome(grad_norm=norm, skipped=not finite, loss_scale=scale, cause=cause)

    def _cause(self, norm: float, loss_finite: bool) -> str:
        """Where the gradients are not finite, and on which ranks the loss is not; all ranks say the same."""
        found = {
            self._units[id(bucket)].index: self._units[id(bucket)].name
            for bucket in self._buckets
            if bucket.grad is not None and not math.isfinite(squared_norm([bucket.grad]))
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

    def _retire(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.index in self._retired:
                continue  # It may hold the next generation already, which this rank has still to read.
            self._retired.add(unit.index)
            for bucket in unit.trainable:
                bucket.buffer.retire()

    def _complete(self, bucket: Bucket) -> None:
        """Wait for a bucket's sum over replicas."""
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
            grad = gradient_of(bucket)
            square = squared_norm([grad])
            if not math.isfinite(square):
                raise NonFiniteError(
                    f"gradients of unit {self._units[id(bucket)].name} are not finite; the optimizer runs inside backward, "
                    "so the step is half done and its state must not be saved"
                )
            self._squares += square
            self._update(bucket, 1.0)
            if self._options.gradients_pass_through:
                bucket.grad = None
                self._ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -grad.nbytes)

    def _update(self, bucket: Bucket, factor: float) -> None:
        faults.visit("optimizer")
        self.before_change(bucket)
        self.last_order.append(bucket)
        grad = gradient_of(bucket)
        if factor != 1.0:
            grad.mul_(factor)
        self._mesh.post(Activity.OPTIMIZER, self._units[id(bucket)].index)
        bucket.buffer.begin_write()
        self._optimizers[id(bucket)].step(grad, self._lr_factor)
        bucket.publish()


def _do_nothing(bucket: Bucket) -> None:
    """Nobody reads the states beside training."""


def gradient_of(bucket: Bucket) -> torch.Tensor:
    """A bucket's gradient shard.

    Raises:
        PhaseError: when it has none now.
    """
    if bucket.grad is None:
        raise PhaseError(f"bucket {bucket.name} has no gradients")
    return bucket.grad
