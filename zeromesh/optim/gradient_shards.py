"""This rank's gradient shards between a bucket's reduction and its update: in memory, or at rest on another tier.

    make_room  -> reduction adds into bucket.grad ->  put_away       microbatch by microbatch; in the last one its square is kept
    square                                                           of what the norm is the root

What rests elsewhere has memory only while a bucket is being summed: at most `LEAVING` shards are on their way out at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from zeromesh.errors import PhaseError
from zeromesh.offload import Purpose, Tier, Tiers, Transfer, allocate_lasting
from zeromesh.optim.gradient_scaling import norm_of
from zeromesh.options import ZeroOptions
from zeromesh.units.unit import Bucket

LEAVING = 2


class GradientShards:
    """Of one rank."""

    def __init__(self, options: ZeroOptions, tiers: Tiers) -> None:
        self._dtype = options.precision.reduce
        self._tiers = tiers
        self._stay = options.gradients_stay(tiers.device)
        self._pass_through = options.gradients_pass_through
        self._first = True
        self._arriving: dict[int, tuple[torch.Tensor, Transfer]] = {}
        self._leaving: deque[tuple[Transfer, int]] = deque()
        self._norms: dict[int, torch.Tensor] = {}

    def require_room(self, buckets: Iterable[Bucket]) -> None:
        """Raise `StorageError` before training where a step's shards would not fit beside all other states."""
        if self._stay or self._pass_through:
            return
        nbytes = sum(bucket.interval.length for bucket in buckets) * self._dtype.itemsize
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, nbytes)
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -nbytes)

    def begin_step(self) -> None:
        """Nothing is known of gradients any more."""
        self._norms.clear()

    def begin(self, *, first: bool) -> None:
        """A backward begins; `first` of its step."""
        self._first = first

    def expect(self, bucket: Bucket) -> None:
        """The bucket's gradients are about to arrive: what there is of earlier microbatches is read in meanwhile.

        A shard that comes and goes has its memory from now on, before a block is recomputed: between what that allocates it would
        leave holes.
        """
        if not (self._stay or self._pass_through) and bucket.layout.parts > 1:
            bucket.grad = self._memory_for(bucket) if bucket.grad is None else bucket.grad
            return
        rest = bucket.grad_rest if bucket.grad is None and bucket.partial is None else None
        if rest is not None and not self._first and id(bucket) not in self._arriving:
            memory = self._memory_for(bucket)
            self._arriving[id(bucket)] = (memory, rest.read(0, memory))

    def make_room(self, bucket: Bucket) -> None:
        """A sum is about to be made: `bucket.grad` has memory, and in it what is there of earlier microbatches.

        Raises:
            StorageError: when that cannot be read.
        """
        if bucket.grad is not None:
            return
        self.expect(bucket)
        found = self._arriving.pop(id(bucket), None)
        if found is not None:
            found[1].wait()
        bucket.grad = found[0] if found is not None else self._memory_for(bucket)

    def _memory_for(self, bucket: Bucket) -> torch.Tensor:
        while len(self._leaving) >= LEAVING:
            self._wait_for_oldest()
        length = bucket.interval.length
        if bucket.grad_rest is None:
            grad = torch.empty(length, dtype=self._dtype, device=self._tiers.device)
        else:
            grad = allocate_lasting(length, self._dtype, self._tiers.device)  # on pages of its own, as files want it
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, grad.nbytes)
        return grad

    def put_away(self, bucket: Bucket, *, last: bool) -> None:
        """A sum is made. If shards rest elsewhere, it leaves for there; `last` of its step: the square is taken before.

        Raises:
            StorageError: when an earlier one could not be written.
        """
        if bucket.grad_rest is None:
            return
        self.make_room(bucket)
        grad = gradient_of(bucket)
        if last:
            self._norms[id(bucket)] = norm_of(grad)
        self._leaving.append((bucket.grad_rest.write(0, grad), grad.nbytes))
        bucket.grad = None

    def settle(self) -> None:
        """Return when all that was put away is at rest. Raises `StorageError` where it is not."""
        while self._leaving:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        transfer, nbytes = self._leaving.popleft()
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -nbytes)
        transfer.wait()

    def drop(self, bucket: Bucket) -> None:
        """A bucket's gradients are used up, if there are any: their memory goes, unless it is kept for the next step."""
        grad = bucket.grad
        if grad is None or (self._stay and bucket.grad_rest is None):
            return
        bucket.grad = None
        self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -grad.nbytes)

    def square(self, bucket: Bucket) -> float:
        """The square of the norm of a bucket's shard; nan or inf where it holds such. 0 where it is used up already."""
        return self.squares([bucket])[0]

    def squares(self, buckets: Sequence[Bucket]) -> list[float]:
        """`square` of each; a device is waited for once."""
        nothing = torch.zeros((), dtype=self._dtype, device=self._tiers.device)
        norms = []
        for bucket in buckets:
            found = self._norms.get(id(bucket))
            if found is None:
                found = nothing if bucket.grad is None else norm_of(bucket.grad)
            norms.append(found)
        return [norm**2 for norm in torch.stack(norms).tolist()] if norms else []

    def abandon(self, buckets: Iterable[Bucket]) -> None:
        """A step has ended before its time: what rests elsewhere does so again, whatever it is."""
        arriving, self._arriving = self._arriving, {}
        for memory, transfer in arriving.values():
            self._tiers.ledger.add(Tier.DEVICE, Purpose.GRADIENTS, -memory.nbytes)
            transfer.end()  # What could not be read is not wanted any more.
        for bucket in buckets:
            self.drop(bucket)
        self.settle()


def gradient_of(bucket: Bucket) -> torch.Tensor:
    """A bucket's gradient shard, in memory.

    Raises:
        PhaseError: when it has none now.
    """
    if bucket.grad is None:
        raise PhaseError(f"bucket {bucket.name} has no gradients")
    return bucket.grad
