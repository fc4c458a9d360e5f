"""This rank's gradient shards between a bucket's reduction and its update: in memory, or at rest on another tier.

    make_room  -> reduction adds into bucket.grad ->  put_away       microbatch by microbatch; in the last one its square is kept
    square                                                           of what the norm is the root

What rests elsewhere has memory only while a bucket is being summed: at most `LEAVING` shards are on their way out at a time.

Dynamic loss scale for float16 gradients, as in Micikevicius et al., "Mixed Precision Training", 2018.

The global gradient norm: every element counted once over the ranks that own it.

Ranks beside the shard group that hold the same elements of a bucket: their gradients are summed, and one of them counts them.

replicas            of all parameters, on other samples
tensor ranks        of what tensor parallelism does not divide, or less often than there are ranks
pipeline stages     of tied parameters, such as an embedding that is the head too
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from zeromesh.errors import PhaseError
from zeromesh.flat.layout import ParameterSpec
from zeromesh.mesh.process_mesh import Mesh, ProcessSet
from zeromesh.offload import Purpose, Tier, Tiers, Transfer, allocate_lasting
from zeromesh.options import ScalerSettings, ZeroOptions
from zeromesh.units.unit import Bucket


def norm_of(shard: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient shard, a scalar where that lies; nan or inf where it holds such. Padding is zero and adds nothing."""
    norm: torch.Tensor = torch.linalg.vector_norm(shard)
    return norm


def global_norm(squares: float, owners: ProcessSet) -> float:
    """The norm from the sums of squares of `owners`, who count every element once.

    All ranks get the same number, so what follows from it (skipping a step, clipping) they do together.
    """
    total = torch.tensor([squares], dtype=torch.float64)
    owners.sum_(total, "sum of the gradient norm")
    return float(total.sqrt())


def clip_factor(norm: float, limit: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients by: min(1, limit / (norm + 1e-6)); 1 for limit 0 (off)."""
    if limit <= 0:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))


class LossScaler:
    """The present scale. With settings None it is 1 for ever."""

    def __init__(self, settings: ScalerSettings | None) -> None:
        self._settings = settings
        self.scale = settings.initial if settings else 1.0
        self.good_steps = 0
        """Steps without an overflow since the scale has changed."""

    @property
    def dynamic(self) -> bool:
        return self._settings is not None

    def load(self, scale: float, good_steps: int) -> None:
        """Go on from an earlier run's. A scale that is fixed here stays."""
        if self._settings is not None:
            self.scale, self.good_steps = scale, good_steps

    def update(self, *, overflow: bool) -> None:
        """Learn from a step; all ranks call it with the same verdict."""
        settings = self._settings
        if settings is None:
            return
        if overflow:
            self.scale = max(settings.smallest, self.scale * settings.backoff)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == settings.growth_interval:
            self.scale *= settings.growth
            self.good_steps = 0


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


_Positions = tuple[tuple[int, ...], tuple[int, ...]]
"""Along tensor and pipeline."""
_ALONE: _Positions = ((), ())


class ReplicaGroups:
    """Of the buckets of one rank. All ranks of the world make one, whatever buckets they have."""

    def __init__(self, mesh: Mesh, buckets: Iterable[Bucket]) -> None:
        self._mesh = mesh
        self._sets: dict[_Positions, ProcessSet] = {_ALONE: mesh.replicate}
        mine = sorted({_spec(bucket).shared_by for bucket in buckets} - {_ALONE})
        if mesh.tensor.size == mesh.pipeline.size == 1:
            return
        rows = mesh.world.gather_bytes(json.dumps(mine).encode(), "who shares parameters")
        sharers: dict[_Positions, list[int]] = {}
        for rank, text in enumerate(rows):
            for row in json.loads(text):
                sharers.setdefault(_positions(row), []).append(rank)
        for positions, ranks in sorted(sharers.items()):
            found = self._set_of(positions, ranks)
            if found is not None:
                self._sets[positions] = found

    def _set_of(self, positions: _Positions, ranks: list[int]) -> ProcessSet | None:
        """This rank's set, of `ranks` that share so; None on others. A mesh keeps such sets for the next engine."""
        name = f"sharers {hashlib.blake2b(repr((positions, ranks)).encode(), digest_size=6).hexdigest()}"
        colour = self._colour(positions) if self._mesh.rank in ranks else None
        if not any(each.startswith(name) for each in self._mesh.process_sets):
            return self._mesh.process_sets.split(colour, name=name)
        return None if colour is None else self._mesh.process_sets[f"{name} {colour}"]

    def _colour(self, positions: _Positions) -> int:
        """Equal on the ranks that share: those that differ along replicate, and along what `positions` names."""
        here, shape = self._mesh.coordinate, self._mesh.shape
        tensor = 0 if positions[0] else here.tensor
        pipeline = 0 if positions[1] else here.pipeline
        return (pipeline * shape.shard + here.shard) * shape.tensor + tensor

    def counts(self, bucket: Bucket) -> bool:
        """Whether this rank, of those that hold a bucket's shard beside its replicas, is the one that counts and writes it."""
        spec, here = _spec(bucket), self._mesh.coordinate
        first = spec.holders[0] if spec.holders else 0
        stage = here.pipeline if spec.copies is None else spec.copies.ranks[0]
        return (here.tensor, here.pipeline) == (first, stage)

    def over_stages(self, bucket: Bucket) -> bool:
        """Whether other stages of a pipeline have a bucket's parameters too."""
        return _spec(bucket).copies is not None

    def start_sum(self, bucket: Bucket, gradient: torch.Tensor) -> Callable[[], None] | None:
        """Begin to sum a gradient shard over those that share it, in place; the returned call waits for it. None: nobody does."""
        found = self._sets[_spec(bucket).shared_by]
        return found.start_sum(gradient, f"sum of gradients over {found.name}") if found.size > 1 else None


def _spec(bucket: Bucket) -> ParameterSpec:
    """Any of a bucket's parameters: all are shared alike."""
    return bucket.layout.slots[0].spec


def _positions(row: list[list[int]]) -> _Positions:
    tensor, pipeline = row
    return tuple(tensor), tuple(pipeline)
