"""Gradients on their way from autograd to this rank's summed shard, and to its tier.

    autograd --copy--> slot of the ring --launch--> reduction in flight --finish--> bucket.grad
             \\--add--> bucket.partial (stages that reduce once per step, before the last microbatch; a group of one rank)
    bucket.grad --sum over replicas, in a step's last backward--> kept, offloaded, or updated at once (`optimizer_in_backward`);
                  where replicas divide states, each keeps the sum of its part, at the beginning of the shard's memory

Buckets are launched in one order that all ranks share: the reverse of the order in which their units ran forward. While no slot is
free, gradients stay on `.grad` until backward leaves the unit. On a device the host runs ahead of the kernels and cannot query when
a slot will be free: a bucket is copied into its slot as soon as it is complete and next, and the compute stream waits for the
slot's previous reduction. The order of launches thus follows from the program alone, alike on all ranks."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import compress, count

import torch
import xxhash
from torch import nn
from torch.autograd.graph import get_gradient_edge

from zeromesh.comm.transport import Reduction
from zeromesh.errors import PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier, Tiers, Transfer, allocate_lasting
from zeromesh.optim.replicas import SUMMED, ReplicaGroups
from zeromesh.options import ZeroOptions
from zeromesh.telemetry.status_board import Activity
from zeromesh.units.unit import Bucket


@dataclass(slots=True)
class BucketArrivals:
    """One bucket's progress in one backward: the indices of the parameters whose gradients `arrived`, or wait for its slot."""

    bucket: Bucket
    sequence: int | None  # The number of its reduction among those of its ranks; None: this rank only adds to its sums.
    missing: int  # The number of parameters that have no gradient yet.
    first: bool  # True if nothing was added to the bucket's sums in the step yet, so that they are to be overwritten.
    slot: torch.Tensor | None = None
    waiting: list[int] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    launched: bool = False


class GradientReducer:
    """Takes gradients as autograd produces them, launches reductions in order, and finishes them as peers complete them."""

    def __init__(self, shards: "GradientShards", replicas: ReplicaGroups, mesh: Mesh, options: ZeroOptions) -> None:
        self.shards = shards
        self.replicas = replicas
        self.on_summed: Callable[[Bucket], None] = lambda bucket: None
        """Called inside the last backward with `optimizer_in_backward`, once a bucket's sum over its replicas has started."""
        self.digests: Counter[int] | None = None
        """Digests of the gradients of each microbatch before any sum, where a caller asks for them; else None."""
        self.buckets: Sequence[Bucket] = ()  # of the running backward, in the order in which they are reduced
        self.updates_in_backward = False  # True in a backward whose buckets are updated as soon as they are summed
        self._options, self._mesh = options, mesh
        self._wire_dtype = cache(options.wire_dtype)
        self._on_stream = False  # True if buckets are reduced on a device's stream
        self.incomplete: Counter[int] = Counter()  # each unit's buckets that lack a gradient in the running backward
        self.keep_zeros = False  # A missing gradient counts as zeros, as after `zero_grad(set_to_none=False)`.
        self._arrivals: dict[int, BucketArrivals] = {}
        self._queue: deque[BucketArrivals] = deque()
        self._in_flight: deque[tuple[Bucket, Reduction]] = deque()
        self._unfinished_wholes: list[tuple[Bucket, Reduction]] = []
        self._last_microbatch = self._known_order = False
        self.with_gradient: dict[int, set[int]] = {}  # what had a gradient here in the present step, by the bucket's id
        self._sums: dict[int, tuple[Bucket, Reduction]] = {}  # the running sums over replicas, by the bucket's id
        self._to_sum: deque[Bucket] = deque()  # whose sum over replicas is to start
        self._tied: list[Bucket] = []  # with parameters tied between stages, summed after all backwards of the step

    def begin(self, buckets: Sequence[Bucket], *, reduce: bool, first: bool, last: bool, known_order: bool) -> None:
        """Begin a backward, the step's `first` or `last` one. `reduce`: sum over ranks now, rather than only accumulate this
        rank's sums. `known_order`: its order of buckets is that of an earlier backward."""
        self.buckets = buckets
        self._on_stream = any(bucket.group.reduction.reducer.on_stream for bucket in buckets)
        self.updates_in_backward = last and self._options.optimizer_in_backward
        self.shards.first_microbatch = first
        self._last_microbatch, self._known_order = last, known_order
        self.incomplete = Counter(bucket.unit_index for bucket in buckets)
        self._arrivals, sequence = {}, None
        for bucket in buckets:
            if reduces := reduce and bucket.group.ranks.size > 1:
                sequence, bucket.group.sequence = bucket.group.sequence, bucket.group.sequence + 1
            if is_first := first or id(bucket) not in self.with_gradient:
                self.with_gradient[id(bucket)] = set()
            number, expected = sequence if reduces else None, sum(bucket.training)
            self._arrivals[id(bucket)] = BucketArrivals(bucket, number, expected, is_first)
        self._queue = deque(self._arrivals.values())

    def take(self, bucket: Bucket, index: int) -> None:
        """Take the gradient of a bucket's parameter from autograd. Raises `PhaseError` when the bucket was already reduced."""
        if not bucket.training[index]:
            bucket.parameters[index].grad = None  # `requires_grad` was set within a step, and counts from the next one.
            return
        arrivals = self._arrivals.get(id(bucket))
        if arrivals is None or arrivals.launched:
            why = f"parameter {bucket.layout.slots[index].spec.fqn} got a gradient outside its backward, or a second one in it"
            raise PhaseError(f"{why}. Call backward through the trainer, and checkpoint activations with use_reentrant=False")
        self.with_gradient[id(bucket)].add(index)
        again = index in arrivals.arrived
        if self.digests is not None and not again:  # A second gradient may be added to the first already.
            number = self._mesh.watch.microbatch  # A sum does not depend on the order of parameters.
            self.digests[number] = (self.digests[number] + _digest(bucket, index)) % (1 << 64)
        arrivals.arrived.add(index)
        arrivals.missing -= not again
        waits = again and index in arrivals.waiting  # Autograd has added the gradient to an earlier one, on `.grad`.
        if not self._on_stream and arrivals.sequence is None:
            _store_gradients(self._accumulator(bucket), bucket, [index], add=again or not arrivals.first)
        elif not (waits or self._on_stream) and (slot := self._slot_of(arrivals)) is not None:
            _store_gradients(slot, bucket, [index], add=again)
        elif not waits:
            arrivals.waiting.append(index)
        if not arrivals.missing:
            if not again:
                self.incomplete[bucket.unit_index] -= 1
            if arrivals.sequence is None:
                self._add_to_sum(arrivals)
            if arrivals.sequence is None or self._options.overlap:
                self.launch_ready()

    def give_up_missing(self, bucket: Bucket) -> None:
        """Wait no longer for gradients that the running backward will not compute, as those of modules that only other ranks have
        called: those ranks may wait for this bucket before they exchange the activations that this rank's backward needs next."""
        arrivals = self._arrivals[id(bucket)]
        if arrivals.missing:
            lacking = set(compress(count(), bucket.training)) - arrivals.arrived
            arrivals.missing = sum(backward_reaches(bucket.parameters[index]) for index in lacking)
            if not arrivals.missing:
                self.incomplete[bucket.unit_index] -= 1
                if arrivals.sequence is None:
                    self._add_to_sum(arrivals)

    def launch_ready(self, *, wait: bool = False) -> None:
        """Launch the complete buckets that are next in order, and finish reductions that peers completed. `wait`: wait for peers
        until slots are free, when backward leaves a unit: a rank ahead of its peers would else hold all of its gradients. The wait
        cannot be circular: all ranks launch in one order, and have left the units that peers may be waiting to update."""
        wait = wait or self._on_stream
        while self._queue and not (first := self._queue[0]).missing:
            if not wait and first.sequence is not None and self._slot_of(first) is None:
                break
            self._launch_next()
        while self._in_flight and ((one := self._in_flight[0][1]) is SUMMED or (not self._on_stream and one.ready())):
            self._finish_oldest()
        self._advance_sums()

    def flush(self) -> None:
        """End a backward: launch the remaining buckets, with zeros for missing gradients, and finish all reductions and sums."""
        while self._queue:
            self._launch_next()
        while self._in_flight:
            self._finish_oldest()
        for bucket, reduction in self._unfinished_wholes:
            reduction.gather_sums()
            self._after_reduction(bucket)
        self._unfinished_wholes.clear()
        self._arrivals = {}
        self.incomplete.clear()
        self._wait_for_sums()

    def without_gradient(self, bucket: Bucket) -> frozenset[int]:
        """Return the indices of trained parameters that have had no gradient on this rank in the present step."""
        came = self.with_gradient.get(id(bucket), ())
        return frozenset(n for n, trained in enumerate(bucket.training) if trained and n not in came)

    def find_missing(self, buckets: Sequence[Bucket]) -> None:
        """Record the parameters without a gradient on any rank, which torch's optimizers skip. All ranks call it."""
        lacking = [(self.without_gradient(each), len(each.training)) for each in buckets]
        came = [[float(n not in without) for n in range(count)] for without, count in lacking]
        sums = torch.tensor([each for row in came for each in row])
        self._mesh.peers.all_reduce(sums, "parameters with gradients")
        for bucket, counts in zip(buckets, torch.split(sums, [len(row) for row in came]), strict=True):
            if bucket.spec.copies is not None:  # Other pipeline stages have a copy of the parameter, too.
                self.replicas.sets[bucket.shared_by].all_reduce(counts, "shared parameters with gradients")
            missing = (n for n, count in enumerate(counts.tolist()) if not count and bucket.training[n])
            bucket.missing = frozenset(() if self.keep_zeros else missing)

    def _launch_next(self) -> None:
        arrivals, reduction = self._queue.popleft(), SUMMED
        bucket = arrivals.bucket
        if arrivals.sequence is not None:
            reduction = self._launch(arrivals, arrivals.sequence)
        elif not arrivals.launched:
            self._add_to_sum(arrivals)
        if bucket.group.ranks.size == 1:
            self._post_reduction(bucket)
        arrivals.launched = True
        self._in_flight.append((bucket, reduction))
        if not self._options.overlap:
            self._finish_oldest()

    def _launch(self, arrivals: BucketArrivals, sequence: int) -> Reduction:
        while self._slot_of(arrivals) is None and self._in_flight:
            self._finish_oldest()
        bucket, filled = arrivals.bucket, self._slot_of(arrivals, block=True)
        self.shards.allocate(bucket)
        self._post_reduction(bucket)
        if filled is None or bucket.grad is None:
            raise PhaseError(f"bucket {bucket.name} is launched without a slot or a gradient shard")
        _store_gradients(filled, bucket, arrivals.waiting, add=False)
        _zero_missing(filled, arrivals)
        _zero_gaps(filled, bucket)
        if bucket.partial is not None and not arrivals.first:
            filled.add_(bucket.partial)
        add = bucket.partial is None and not arrivals.first
        with self._mesh.recorder.range("reduce", bucket.name):
            return bucket.group.reduction.reducer.launch(sequence, filled, bucket.grad, add=add)

    def _add_to_sum(self, arrivals: BucketArrivals) -> None:
        if arrivals.first or arrivals.waiting:
            target = self._accumulator(arrivals.bucket)
            _store_gradients(target, arrivals.bucket, arrivals.waiting, add=not arrivals.first)
            if arrivals.first:
                _zero_missing(target, arrivals)
        arrivals.launched = True

    def _after_reduction(self, bucket: Bucket) -> None:
        # Preliminary: `find_missing` also takes other ranks' gradients into account.
        bucket.missing = frozenset() if self.keep_zeros else self.without_gradient(bucket)
        if not self._last_microbatch:
            if bucket.grad is not None:
                self.shards.offload(bucket, last=False)
            return
        self.shards.allocate(bucket)
        if bucket.spec.copies is not None:
            self._tied.append(bucket)  # The other stage may wait for a message sent after this backward.
        else:
            self._sum_replicas(bucket)

    def _sum_replicas(self, bucket: Bucket) -> None:
        self._to_sum.append(bucket)
        self._advance_sums()
        if self.updates_in_backward:
            self.on_summed(bucket)

    def _advance_sums(self, *, wait: bool = False) -> None:
        """Start the sums over replicas that are due, of divided shards `MOST_SUMS` at a time, as each takes memory, and finish what
        is complete, in order. Only with `wait`, at the end of a backward, does the host wait for replicas: before, those that
        this rank waits for might wait, through ranks of other groups, for what it would do next."""
        while self._to_sum or self._sums:
            while self._to_sum and not (self._to_sum[0].divided and len(self._sums) >= MOST_SUMS):
                bucket = self._to_sum.popleft()
                self.shards.count_received(bucket, 1)
                self._sums[id(bucket)] = bucket, self.replicas.sum_async(bucket, gradient_of(bucket))
            bucket, reduction = next(iter(self._sums.values()))
            # A stream that waits holds up only the work after it, which all ranks launch in one order.
            soon = self._on_stream and len(self._sums) > 1 and (bucket.divided or bucket.grad_rest is not None)
            if not wait and not (soon if self._on_stream else reduction.ready()):
                return
            self.complete(bucket)

    def complete(self, bucket: Bucket) -> None:
        """Wait for the sum of a bucket over its replicas, and offload it unless backward updates by it."""
        if id(bucket) in self._sums:
            self._sums.pop(id(bucket))[1].finish()
            self.shards.count_received(bucket, -1)
            self.shards.keep_part(bucket)
            if bucket.grad_rest is not None and not self.updates_in_backward:
                self.shards.offload(bucket, last=True)

    def _wait_for_sums(self) -> None:
        """Wait for the sums over replicas, unless updates inside backward wait for them, and order device work after offloads."""
        if not self.updates_in_backward:
            self._advance_sums(wait=True)
        self.shards.order_offloads()

    def sum_tied(self) -> None:
        """Sum gradients of parameters tied between stages, after the step's last backward, when no rank waits for another."""
        tied, self._tied = sorted(self._tied, key=lambda bucket: bucket.spec.name), []
        for bucket in tied:
            self._sum_replicas(bucket)
        self._wait_for_sums()

    def abandon(self, buckets: Iterable[Bucket]) -> None:
        """Drop the gradients of a step that has ended early."""
        for pending in (self._to_sum, self._tied, self._sums):
            pending.clear()
        self.shards.abandon(buckets)

    def _post_reduction(self, bucket: Bucket) -> None:
        ranks = self._mesh.peers.ranks
        if len(ranks) > 1:
            self._mesh.watch.event(Activity.REDUCE, bucket.unit_index, ranks, known_order=self._known_order)

    def _accumulator(self, bucket: Bucket) -> torch.Tensor:
        alone = bucket.group.ranks.size == 1  # Its own sums are the result.
        if alone and (bucket.grad is None or (bucket.divided and self.shards.first_microbatch)):
            self.shards.allocate(bucket)  # The part of an earlier sum may lie where there are gaps.
            _zero_gaps(gradient_of(bucket), bucket)
        target = bucket.grad if alone else bucket.partial
        if target is None:
            raise PhaseError(f"bucket {bucket.name} has no memory for gradients")
        return target

    def _slot_of(self, arrivals: BucketArrivals, *, block: bool = False) -> torch.Tensor | None:
        """Return a bucket's slot, `[padded]` in the dtype of the reduction; None while the ring has no free one."""
        bucket = arrivals.bucket
        acquire = partial(bucket.group.reduction.reducer.acquire, arrivals.sequence or 0, block=block)
        if arrivals.slot is None and (slot := acquire()) is not None:
            dtype = self._wire_dtype(bucket.dtype, on_device=self._on_stream)
            arrivals.slot = slot[: bucket.layout.padded * dtype.itemsize].view(dtype)
        return arrivals.slot

    def _finish_oldest(self) -> None:
        bucket, reduction = self._in_flight.popleft()
        with self._mesh.recorder.range("finish reducing", bucket.name):
            reduction.finish()
        if bucket.held.length == bucket.layout.shard_length:
            self._after_reduction(bucket)
        else:
            self._unfinished_wholes.append((bucket, reduction))


def backward_reaches(parameter: nn.Parameter) -> bool:
    """Return whether the running backward gives a gradient to a parameter. Raises `RuntimeError` inside its `autograd.grad`."""
    # Keeping the node would keep its parameter alive, and with it the engine, which garbage collection could not free.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return parameter.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def _store_gradients(flat: torch.Tensor | None, bucket: Bucket, indices: Sequence[int], *, add: bool) -> None:
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
    (torch._foreach_add_ if add else torch._foreach_copy_)(places, gradients)


def _digest(bucket: Bucket, index: int) -> int:
    name, gradient = bucket.layout.slots[index].spec.name, bucket.parameters[index].grad
    digest = xxhash.xxh3_64(name.encode())
    if gradient is not None:  # The payload of a NaN may depend on the order of operands.
        values = gradient.masked_fill(gradient.isnan(), float("nan")).reshape(-1).cpu()
        digest.update(memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # as numpy declares it
    return digest.intdigest()


def _zero_missing(flat: torch.Tensor, arrivals: BucketArrivals) -> None:
    for index, slot in enumerate(arrivals.bucket.layout.slots):
        if index not in arrivals.arrived:
            flat[slot.where.start : slot.where.end].zero_()


def _zero_gaps(flat: torch.Tensor, bucket: Bucket) -> None:
    """Zero the elements that belong to no parameter, so that they add nothing to norms and move no master weight."""
    for gap in bucket.gaps:
        flat[gap].zero_()


MOST_OFFLOADS = 2  # gradient shards that may be in transfer to another tier at a time
MOST_SUMS = 2  # sums of divided shards that may be in flight at a time


class GradientShards:
    """One rank's gradient shards: their memory, and their transfers to another tier and back."""

    def __init__(self, options: ZeroOptions, tiers: Tiers) -> None:
        self._dtype = options.precision.sums
        self._tiers = tiers
        self._keeps_memory = options.gradients_keep_memory(tiers.device)
        self._pass_through = options.gradients_pass_through
        self.first_microbatch = True  # True in a step's first backward, for which no earlier sum is read
        self._arriving: dict[int, tuple[torch.Tensor, Transfer]] = {}
        self._offloading: deque[tuple[Transfer, int]] = deque()
        self._ordered: list[Transfer] = []  # to the host, which the device's later work is already ordered after
        self._norms: dict[int, torch.Tensor] = {}

    def begin_step(self) -> None:
        self._norms.clear()
        self._ordered.clear()

    def prefetch(self, bucket: Bucket) -> None:
        """Start to read the sum of earlier microbatches if it is offloaded. A shard without lasting memory gets it now, before its
        block is recomputed, since it would leave holes between what the recomputation allocates."""
        if bucket.grad is not None and bucket.grad.numel() < bucket.held.length:  # The part of a step that is computed again.
            self.drop(bucket)
        if bucket.grad is not None or id(bucket) in self._arriving:
            return
        if not (self._keeps_memory or self._pass_through) and bucket.layout.parts > 1:
            bucket.grad = self._allocate_grad(bucket)
        elif (rest := bucket.grad_rest) is not None and bucket.partial is None and not self.first_microbatch:
            memory = self._allocate_grad(bucket)
            self._arriving[id(bucket)] = (memory, rest.read(0, memory))

    def allocate(self, bucket: Bucket) -> None:
        """Allocate `bucket.grad` before a reduction, with the sum of earlier microbatches, which `StorageError` may prevent."""
        self.prefetch(bucket)
        if (arriving := self._arriving.pop(id(bucket), None)) is not None:
            bucket.grad, transfer = arriving
            transfer.wait()
        elif bucket.grad is None:
            bucket.grad = self._allocate_grad(bucket)

    def _allocate_grad(self, bucket: Bucket) -> torch.Tensor:
        while len(self._offloading) >= MOST_OFFLOADS:
            self._order_oldest()
        length = bucket.held.length
        if bucket.grad_rest is None:
            grad = torch.empty(length, dtype=self._dtype, device=self._tiers.device)
        else:
            grad = allocate_lasting(length, self._dtype, self._tiers.device)  # on pages outside the heap
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, grad.nbytes)
        return grad

    def offload(self, bucket: Bucket, *, last: bool) -> None:
        """Write a sum to the tier of gradients, if any; with `last` keep its norm. Raises an earlier one's `StorageError`."""
        if bucket.grad_rest is None:
            return
        self.allocate(bucket)
        grad = memory = gradient_of(bucket)
        if last:
            grad = memory[: bucket.length]
            self._norms[id(bucket)] = torch.linalg.vector_norm(grad)
        self._offloading.append((bucket.grad_rest.write(0, grad), memory.nbytes))
        bucket.grad = None

    def count_received(self, bucket: Bucket, sign: int) -> None:
        """Count the memory into which a shard that replicas divide is received, when it is allocated (1) or freed (-1)."""
        if bucket.divided:
            self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, sign * bucket.held.length * self._dtype.itemsize)

    def keep_part(self, bucket: Bucket) -> None:
        """Release the memory of a summed shard beyond this rank's part of it, if replicas divide it and it is not needed again."""
        if bucket.divided and bucket.grad_rest is None and not self._keeps_memory:
            whole = gradient_of(bucket)
            bucket.grad = whole[: bucket.length].clone()
            self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, bucket.grad.nbytes - whole.nbytes)

    def order_offloads(self) -> None:
        """Order later device work after all offloads so far. Raises `StorageError` if one failed."""
        while self._offloading:
            self._order_oldest()

    def wait(self) -> None:
        """Wait until all offloads are complete, so that the host may read the data."""
        self.order_offloads()
        while self._ordered:
            self._ordered.pop().wait()

    def _order_oldest(self) -> None:
        transfer, nbytes = self._offloading.popleft()
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -nbytes)
        transfer.order()
        if transfer.crosses_devices:
            self._ordered.append(transfer)

    def drop(self, bucket: Bucket) -> None:
        """Release the memory of a bucket's used gradients, unless it is kept for the next step."""
        if bucket.grad is not None and not (self._keeps_memory and bucket.grad_rest is None):
            self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -bucket.grad.nbytes)
            bucket.grad = None

    def norm(self, bucket: Bucket) -> torch.Tensor:
        """Return the norm of a gradient shard, a scalar on the device; nan or inf if an element is, 0 if it was already used."""
        norm = self._norms.get(id(bucket))
        if norm is None and bucket.grad is not None:
            norm = torch.linalg.vector_norm(bucket.grad[: bucket.length])
        return torch.zeros((), dtype=self._dtype, device=self._tiers.device) if norm is None else norm

    def abandon(self, buckets: Iterable[Bucket]) -> None:
        arriving, self._arriving = self._arriving, {}
        for memory, transfer in arriving.values():
            self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -memory.nbytes)
            transfer.wait_for_end()  # Read errors do not matter any more.
        for bucket in buckets:
            self.drop(bucket)
        self.order_offloads()


def gradient_of(bucket: Bucket) -> torch.Tensor:
    """Return a bucket's gradient shard, in memory. Raises `PhaseError` if it has none now."""
    if bucket.grad is None:
        raise PhaseError(f"bucket {bucket.name} has no gradients")
    return bucket.grad
