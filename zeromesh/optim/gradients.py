"""Gradient shards between the reduction of a bucket and its update: their tier, sums over replicas, norm and scale.

    allocate -> the reducer sums into bucket.grad -> offload      for each microbatch
    norm                                                          at the end of the step, for the norm of all

An offloaded shard has memory only while its bucket is being summed: at most `LEAVING` shards are on their way out at a time.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable

import torch

from zeromesh.errors import PhaseError
from zeromesh.flat.layout import Positions
from zeromesh.mesh.mesh_shape import axes_of
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Purpose, Tier, Tiers, Transfer, allocate_lasting
from zeromesh.options import ScalerSettings, ZeroOptions
from zeromesh.units.unit import Bucket


def clip_factor(norm: float, limit: float) -> float:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients; 1 for limit 0, which means no clipping."""
    return 1.0 if limit <= 0 else min(1.0, limit / (norm + 1e-6))


class LossScaler:
    """The dynamic loss scale for float16 gradients, as in Micikevicius et al., "Mixed Precision Training", 2018. Without settings
    the scale is 1 and stays so."""

    def __init__(self, settings: ScalerSettings | None) -> None:
        self._settings = settings
        self.scale = settings.initial_scale if settings else 1.0
        self.good_steps = 0
        """The number of steps without an overflow since the scale changed."""

    def load(self, scale: float, good_steps: int) -> None:
        """Continue from the scale of an earlier run. Without settings the scale stays 1."""
        if self._settings is not None:
            self.scale, self.good_steps = scale, good_steps

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale to a step with or without overflow. All ranks call it with the same `overflow`."""
        if (settings := self._settings) is None:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = max(settings.smallest, self.scale * settings.backoff_factor)
        elif self.good_steps == settings.growth_interval:
            self.scale, self.good_steps = self.scale * settings.growth_factor, 0


LEAVING = 2
"""The number of gradient shards that may be on their way to another tier at once."""


class GradientShards:
    """One rank's gradient shards: their memory, and their transfers to another tier and back."""

    def __init__(self, options: ZeroOptions, tiers: Tiers) -> None:
        self._dtype = options.precision.sums
        self._tiers = tiers
        self._stay = options.gradients_stay(tiers.device)
        self._pass_through = options.gradients_pass_through
        self._first = True
        self._arriving: dict[int, tuple[torch.Tensor, Transfer]] = {}
        self._leaving: deque[tuple[Transfer, int]] = deque()
        self._ordered: list[Transfer] = []
        """Transfers to the host that the device's later work is already ordered after."""
        self._norms: dict[int, torch.Tensor] = {}

    def require_room(self, buckets: Iterable[Bucket]) -> None:
        """Raise `StorageError` before training if a step's shards would not fit beside all other states."""
        if self._stay or self._pass_through:
            return
        nbytes = sum(bucket.length for bucket in buckets) * self._dtype.itemsize
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, nbytes)
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -nbytes)

    def begin_step(self) -> None:
        """Forget the norms and transfers of the previous step."""
        self._norms.clear()
        self._ordered.clear()

    def begin(self, *, first: bool) -> None:
        """Begin a backward; `first` is True for the first one of its step."""
        self._first = first

    def prefetch(self, bucket: Bucket) -> None:
        """Prepare for a bucket's gradients: start to read the sum of earlier microbatches if it is offloaded. A shard without
        lasting memory gets it now, before its block is recomputed. Allocated later it would lie between what the recomputation
        allocates, and leave holes."""
        rest = bucket.grad_rest
        if bucket.grad is not None:
            return
        if not (self._stay or self._pass_through) and bucket.layout.parts > 1:
            bucket.grad = self._memory_for(bucket)
        elif rest is not None and bucket.partial is None and not self._first and id(bucket) not in self._arriving:
            memory = self._memory_for(bucket)
            self._arriving[id(bucket)] = (memory, rest.read(0, memory))

    def allocate(self, bucket: Bucket) -> None:
        """Allocate `bucket.grad` before a reduction, filled with the sum of earlier microbatches.

        Raises:
            StorageError: when the earlier sum cannot be read.
        """
        self.prefetch(bucket)
        found = self._arriving.pop(id(bucket), None)
        if found is not None:
            bucket.grad, transfer = found
            transfer.wait()
        elif bucket.grad is None:
            bucket.grad = self._memory_for(bucket)

    def _memory_for(self, bucket: Bucket) -> torch.Tensor:
        while len(self._leaving) >= LEAVING:
            self._order_oldest()
        length = bucket.length
        if bucket.grad_rest is None:
            grad = torch.empty(length, dtype=self._dtype, device=self._tiers.device)
        else:
            grad = allocate_lasting(length, self._dtype, self._tiers.device)  # on pages of its own, as files want it
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, grad.nbytes)
        return grad

    def offload(self, bucket: Bucket, *, last: bool) -> None:
        """Write a sum to the tier of the gradients, if they are offloaded. With `last`, the step's last sum, its norm is computed
        first.

        Raises:
            StorageError: when an earlier offload has failed.
        """
        if bucket.grad_rest is None:
            return
        self.allocate(bucket)
        grad = gradient_of(bucket)
        if last:
            self._norms[id(bucket)] = torch.linalg.vector_norm(grad)
        self._leaving.append((bucket.grad_rest.write(0, grad), grad.nbytes))
        bucket.grad = None

    def order(self) -> None:
        """Order later device work after all offloads so far. Raises `StorageError` if one failed."""
        while self._leaving:
            self._order_oldest()

    def wait(self) -> None:
        """Wait until all offloads are complete, so that the host may read the data."""
        self.order()
        ordered, self._ordered = self._ordered, []
        for transfer in ordered:
            transfer.wait()

    def _order_oldest(self) -> None:
        transfer, nbytes = self._leaving.popleft()
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -nbytes)
        transfer.order()
        if transfer.crosses:
            self._ordered.append(transfer)

    def drop(self, bucket: Bucket) -> None:
        """Release the memory of a bucket's used gradients, unless it is kept for the next step."""
        grad = bucket.grad
        if grad is None or (self._stay and bucket.grad_rest is None):
            return
        bucket.grad = None
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -grad.nbytes)

    def norm(self, bucket: Bucket) -> torch.Tensor:
        """The norm of a shard, a scalar on the device; nan or inf if an element is, 0 if the gradient was already used."""
        found = self._norms.get(id(bucket))
        if found is None and bucket.grad is not None:
            found = torch.linalg.vector_norm(bucket.grad)
        return torch.zeros((), dtype=self._dtype, device=self._tiers.device) if found is None else found

    def abandon(self, buckets: Iterable[Bucket]) -> None:
        """Drop the gradients of a step that has ended early."""
        arriving, self._arriving = self._arriving, {}
        for memory, transfer in arriving.values():
            self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -memory.nbytes)
            transfer.end()  # Read errors do not matter any more.
        for bucket in buckets:
            self.drop(bucket)
        self.order()


def gradient_of(bucket: Bucket) -> torch.Tensor:
    """A bucket's gradient shard, in memory. Raises `PhaseError` if it has none now."""
    if bucket.grad is None:
        raise PhaseError(f"bucket {bucket.name} has no gradients")
    return bucket.grad


class ReplicaGroups:
    """Groups of ranks beside the shard group that hold the same elements of a bucket: they sum their gradients, and one of them
    counts these in norms.

    replicas            have all parameters, and other samples
    tensor ranks        have what tensor parallelism does not divide, or divides among fewer ranks than there are
    pipeline stages     have tied parameters, such as an embedding that is the head too

    All ranks of the world construct it together, with different buckets if need be.
    """

    def __init__(self, mesh: Mesh, buckets: Iterable[Bucket]) -> None:
        self._coordinate = mesh.coordinate
        self._sets: dict[Positions, ProcessSet] = {(): mesh.replicate}
        if mesh.model_size == 1:
            return
        shared = sorted({bucket.spec.shared_by for bucket in buckets} - {()})
        sharers: dict[Positions, list[int]] = {}
        for rank, rows in enumerate(mesh.world.gather_json(shared, "who shares parameters")):
            for row in rows:
                sharers.setdefault(tuple((axis, tuple(at)) for axis, at in row), []).append(rank)
        for positions, ranks in sorted(sharers.items()):
            # The mesh caches these sets for the next engine.
            name = f"sharers {hashlib.blake2b(repr((positions, ranks)).encode(), digest_size=6).hexdigest()}"
            axes = [*axes_of("batch", but=["states"]), *(axis for axis, _ in positions)]
            colour = mesh.shape.group_index(mesh.rank, *axes) if mesh.rank in ranks else None
            if not any(each.startswith(name) for each in mesh.process_sets):
                mesh.process_sets.split(colour, name=name)
            if colour is not None:
                self._sets[positions] = mesh.process_sets[f"{name} {colour}"]

    def counts(self, bucket: Bucket) -> bool:
        """Return True if this rank counts and writes a bucket's shard, among the ranks that hold it and see the same samples."""
        return all(self._coordinate[axis] == first for axis, first in bucket.spec.counted_at.items())

    def sharers(self, bucket: Bucket) -> ProcessSet:
        """The ranks that share a bucket's elements, this rank included."""
        return self._sets[bucket.spec.shared_by]

    def all_reduce_async(self, bucket: Bucket, gradient: torch.Tensor) -> Callable[[], None] | None:
        """Start to sum a gradient shard in place over the ranks that share it. Returns a call that waits for the sum; None if no
        other rank shares it."""
        found = self.sharers(bucket)
        return found.all_reduce_async(gradient, f"sum of gradients over {found.name}") if found.size > 1 else None
