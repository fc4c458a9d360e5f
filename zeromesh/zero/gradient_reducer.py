"""Gradients on their way from autograd to this rank's summed shard.

    autograd --copy--> slot of the ring --launch--> reduction in flight --finish--> bucket.grad
             \\--add--> bucket.partial (stages that reduce once per step, before the last microbatch; a group of one rank)

Buckets are launched in one order that all ranks share: the reverse of the order in which their units ran forward. A bucket that
completes early waits for its turn; while no slot is free, its gradients stay on `.grad` until backward leaves the unit.

On a device the host runs ahead of the kernels and cannot query when a slot will be free. A bucket is therefore copied into its
slot as soon as it is complete and next, and the compute stream waits for the slot's previous reduction. The order and the time of
launches thus follow from the program alone, alike on all ranks.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zeromesh.comm.transport import Reducer, Reduction
from zeromesh.errors import PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.optim.gradients import GradientShards, ReplicaGroups
from zeromesh.options import ZeroOptions
from zeromesh.telemetry.event_ring import Activity
from zeromesh.telemetry.step_recorder import NOTHING
from zeromesh.units.unit import Bucket


@dataclass(slots=True)
class BucketArrivals:
    """One bucket's progress in one backward: the gradients that have arrived, and those that wait to be copied into its slot."""

    bucket: Bucket
    sequence: int
    missing: int
    """The number of parameters that have no gradient yet."""
    filled: torch.Tensor | None = None
    waiting: list[int] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    launched: bool = False


class GradientReducer:
    """Takes gradients as autograd produces them, launches reductions in order, and finishes them as peers complete them."""

    def __init__(
        self,
        reducer: Reducer,
        shards: GradientShards,
        mesh: Mesh,
        options: ZeroOptions,
        reduced: Callable[[Bucket], None],
    ) -> None:
        """`reduced(bucket)` is called once `bucket.grad` holds the sum over the shard group; in a group of one, over its
        microbatches."""
        self.shards = shards
        self._reducer = reducer
        self._options = options
        self._direct = mesh.shard.size == 1
        """True if the shard group is this rank alone, so that its own sums are the result."""
        self._overlap = options.overlap
        self._mesh = mesh
        self._compared = mesh.data.ranks if mesh.data.size > 1 else ()
        self._recorder = mesh.recorder
        self._reduced = reduced
        self._settled = False
        self._incomplete: Counter[int] = Counter()
        """The number of each unit's buckets that lack a gradient in the running backward."""
        self.keep_zeros = False
        """True if a parameter without a gradient counts as one with a zero gradient, as after `zero_grad(set_to_none=False)`."""
        self._next_sequence = 0
        self._arrivals: dict[int, BucketArrivals] = {}
        self._queue: deque[BucketArrivals] = deque()
        self._flying: deque[tuple[Bucket, Reduction]] = deque()
        self._whole: list[tuple[Bucket, Reduction]] = []
        self._reduce = False
        self._first = False
        self.came: dict[int, set[int]] = {}
        """The numbers of each bucket's parameters that have had a gradient on this rank in the present step."""

    def use(self, reducer: Reducer) -> None:
        """Reduce through another reducer, which has launched nothing yet. Allowed between two backwards."""
        self._reducer, self._next_sequence = reducer, 0

    def begin(self, buckets: Sequence[Bucket], *, reduce: bool, first: bool, settled: bool = False) -> None:
        """Begin a backward. `reduce`: sum over ranks now, rather than only accumulate this rank's sums. `first`: it is the step's
        first backward. `settled`: its order of buckets is that of an earlier backward."""
        self._reduce = reduce and not self._direct
        self._first, self._settled = first, settled
        self._incomplete = Counter(bucket.unit for bucket in buckets)
        self._queue.clear()
        self._arrivals = {}
        for bucket in buckets:
            arrivals = BucketArrivals(bucket, self._next_sequence, sum(bucket.training))
            self._arrivals[id(bucket)] = arrivals
            self._queue.append(arrivals)
            if first:
                self.came[id(bucket)] = set()
            if self._reduce:
                self._next_sequence += 1

    def take(self, bucket: Bucket, index: int) -> None:
        """Take the gradient of a bucket's parameter from autograd.

        Raises:
            PhaseError: when the bucket was already reduced, as under reentrant activation checkpointing.
        """
        if not bucket.training[index]:
            bucket.parameters[index].grad = None  # `requires_grad` was set amid a step: it counts from the next.
            return
        arrivals = self._arrivals.get(id(bucket))
        if arrivals is None or arrivals.launched:
            raise PhaseError(
                f"parameter {bucket.layout.slots[index].spec.fqn} got a gradient outside its backward, or a second one in it. "
                "Call backward through the trainer, and checkpoint activations with use_reentrant=False"
            )
        self.came[id(bucket)].add(index)
        again = index in arrivals.arrived
        arrivals.arrived.add(index)
        arrivals.missing -= not again
        if self._reducer.on_stream:
            if not again:  # Autograd adds a second gradient to the first.
                arrivals.waiting.append(index)
        elif not self._reduce:
            _put(self._own_sum(bucket), bucket, [index], add=again or not self._first)
        elif again:
            # Autograd has added the gradient to an earlier one that still waits.
            if index not in arrivals.waiting and bucket.parameters[index].grad is not None:
                _put(arrivals.filled, bucket, [index], add=True)
        elif (slot := self._slot_of(arrivals)) is not None:
            _put(slot, bucket, [index], add=False)
        else:
            arrivals.waiting.append(index)
        if not arrivals.missing:
            if not again:
                self._incomplete[bucket.unit] -= 1
            if not self._reduce:
                self._keep(arrivals)
                arrivals.launched = True
                self._hand_on()
            elif self._overlap:
                self.pump()

    def pump(self) -> None:
        """Launch the complete buckets that are next in order, and finish reductions that peers completed. The host never
        waits."""
        on_stream = self._reducer.on_stream
        while self._queue and not self._queue[0].missing and (on_stream or self._slot_of(self._queue[0]) is not None):
            self._launch_next()
        while not on_stream and self._flying and self._flying[0][1].ready():
            self._finish_one()

    def keep_up(self) -> None:
        """Launch the complete buckets that are next in order when backward leaves a unit, waiting for peers until slots are free.

        Gradients that wait for a slot stay on `.grad`, so a rank that ran ahead of its peers would hold all of its gradients at
        once. The wait cannot be circular: all ranks launch in one order, the reductions that a slot waits for were launched
        before, and this rank has left the units that its peers may be waiting to update.
        """
        self.pump()
        while self._queue and not self._queue[0].missing:
            self._launch_next()

    def flush(self) -> None:
        """End a backward: launch all remaining buckets, with zeros for missing gradients, and finish every reduction."""
        if not self._reduce:
            for arrivals in self._queue:
                if not arrivals.launched:
                    self._keep(arrivals)
                    arrivals.launched = True
            self._hand_on()
        while self._queue:
            self._launch_next()
        while self._flying:
            self._finish_one()
        for bucket, reduction in self._whole:
            reduction.settle()
            self._hand_over(bucket)
        self._whole.clear()
        self._arrivals = {}
        self._incomplete.clear()

    def owes(self, unit: int) -> bool:
        """Return True if gradients of a unit are still missing in the running backward."""
        return self._incomplete[unit] > 0

    def lacking(self, bucket: Bucket) -> frozenset[int]:
        """The numbers of a bucket's trained parameters that have had no gradient on this rank in the present step."""
        came = self.came.get(id(bucket), ())
        return frozenset(n for n, trained in enumerate(bucket.training) if trained and n not in came)

    def find_missing(self, buckets: Sequence[Bucket], sharing: ReplicaGroups) -> None:
        """Record the parameters without a gradient on any rank, which torch's optimizers skip. All ranks call it."""
        came = [[float(n not in self.lacking(each)) for n in range(len(each.training))] for each in buckets]
        sums = torch.tensor([each for row in came for each in row])
        self._mesh.data.all_reduce(sums, "parameters with gradients")
        for bucket, counts in zip(buckets, torch.split(sums, [len(row) for row in came]), strict=True):
            if bucket.spec.copies is not None:  # Other pipeline stages have a copy too.
                sharing.sharers(bucket).all_reduce(counts, "shared parameters with gradients")
            missing = (n for n, count in enumerate(counts.tolist()) if not count and bucket.training[n])
            bucket.missing = frozenset(() if self.keep_zeros else missing)

    def _launch_next(self) -> None:
        arrivals = self._queue.popleft()
        while self._slot_of(arrivals) is None:
            if self._flying:
                self._finish_one()
            else:
                arrivals.filled = self._typed(arrivals.bucket, self._reducer.acquire(arrivals.sequence, block=True))
        self._launch(arrivals)

    def _hand_on(self) -> None:
        """Pass on the sums of this rank alone, in the order that all ranks share, since sums over replicas may follow."""
        while self._queue and self._queue[0].launched:
            bucket = self._queue.popleft().bucket
            if self._direct:
                self._announce(bucket)
            self._hand_over(bucket)

    def _hand_over(self, bucket: Bucket) -> None:
        # As far as this rank knows: `find_missing` asks the others.
        bucket.missing = frozenset() if self.keep_zeros else self.lacking(bucket)
        self._reduced(bucket)

    def _announce(self, bucket: Bucket) -> None:
        """Let the other ranks compare which sum starts now. Replicas compare too, as they sum in the order of reductions."""
        if self._compared:
            self._mesh.watch.event(Activity.REDUCE, bucket.unit, self._compared, settled=self._settled)

    def _keep(self, arrivals: BucketArrivals) -> None:
        """Add the waiting gradients to this rank's sum; gradients of frozen and of unused parameters are zeros in it."""
        if self._first or arrivals.waiting:
            target = self._own_sum(arrivals.bucket)
            _put(target, arrivals.bucket, arrivals.waiting, add=not self._first)
            if self._first:
                _zero_missing(target, arrivals)

    def _own_sum(self, bucket: Bucket) -> torch.Tensor:
        fresh = self._direct and bucket.grad is None
        if fresh:
            self.shards.allocate(bucket)
        target = bucket.grad if self._direct else bucket.partial
        if target is None:
            raise PhaseError(f"bucket {bucket.name} has no memory for gradients")
        if fresh:
            _zero_gaps(target, bucket)
        return target

    def _slot_of(self, arrivals: BucketArrivals) -> torch.Tensor | None:
        if arrivals.filled is None:
            slot = self._reducer.acquire(arrivals.sequence, block=False)
            arrivals.filled = self._typed(arrivals.bucket, slot)
        return arrivals.filled

    def _typed(self, bucket: Bucket, slot: torch.Tensor | None) -> torch.Tensor | None:
        """A slot viewed as a bucket's gradients, `[padded]`, in the dtype of the reduction."""
        if slot is None:
            return None
        dtype = self._options.wire_dtype(bucket.dtype, on_device=self._reducer.on_stream)
        return slot[: bucket.layout.padded * dtype.itemsize].view(dtype)

    def _launch(self, arrivals: BucketArrivals) -> None:
        bucket, filled = arrivals.bucket, arrivals.filled
        self.shards.allocate(bucket)
        self._announce(bucket)
        if filled is None or bucket.grad is None:
            raise PhaseError(f"bucket {bucket.name} is launched without a slot or a gradient shard")
        _put(filled, bucket, arrivals.waiting, add=False)
        _zero_missing(filled, arrivals)
        _zero_gaps(filled, bucket)
        if bucket.partial is not None and not self._first:
            filled.add_(bucket.partial)
        add = bucket.partial is None and not self._first
        with self._recorder.range("reduce", bucket.name) if self._recorder.profiling else NOTHING:
            reduction = self._reducer.launch(arrivals.sequence, filled, bucket.grad, add=add)
        arrivals.launched = True
        self._flying.append((bucket, reduction))
        if not self._overlap:
            self._finish_one()

    def _finish_one(self) -> None:
        bucket, reduction = self._flying.popleft()
        with self._recorder.range("finish reducing", bucket.name) if self._recorder.profiling else NOTHING:
            reduction.finish()
        if bucket.is_shard:
            self._hand_over(bucket)
        else:
            self._whole.append((bucket, reduction))


def _put(flat: torch.Tensor | None, bucket: Bucket, indices: Sequence[int], *, add: bool) -> None:
    """Copy or add the gradients on `.grad` of parameters to their places in `flat`: on a device by one kernel, with the cast."""
    if not indices:
        return
    places, gradients = [], []
    for index in indices:
        slot, parameter = bucket.layout.slots[index], bucket.parameters[index]
        if flat is None or parameter.grad is None:
            raise PhaseError(f"bucket {bucket.name}: no slot or no gradient of {slot.spec.fqn} to put into it")
        places.append(flat[slot.where.start : slot.where.end].view(slot.spec.shape))
        gradients.append(parameter.grad)
        parameter.grad = None
    if add:
        torch._foreach_add_(places, gradients)
    else:
        torch._foreach_copy_(places, gradients)


def _zero_missing(flat: torch.Tensor, arrivals: BucketArrivals) -> None:
    for index, slot in enumerate(arrivals.bucket.layout.slots):
        if index not in arrivals.arrived:
            flat[slot.where.start : slot.where.end].zero_()


def _zero_gaps(flat: torch.Tensor, bucket: Bucket) -> None:
    """Zero the elements that belong to no parameter, so that they add nothing to norms and move no master weight."""
    for gap in bucket.gaps:
        flat[gap].zero_()
