"""Ranks that hold the same elements of a bucket: who sums gradients with whom, who counts them, what travels
between hosts, and how replicas come together after local steps."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from zeromesh.comm.transport import Reduction
from zeromesh.comm.wire import LEVELS, Wire, WireCodec, gather_parts, sum_parts
from zeromesh.environment import number_of_start
from zeromesh.errors import ConfigError
from zeromesh.flat.layout import Positions
from zeromesh.intervals import Interval, grouped
from zeromesh.mesh.mesh_shape import axes_of
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Purpose, TierChoice, Tiers, accelerator
from zeromesh.options import ZeroOptions
from zeromesh.settings.keys import OuterSettings
from zeromesh.units.unit import Bucket

SUMMED = Reduction(lambda: True, lambda: None)
"""Stands for the reduction of a bucket whose sums are complete without other ranks."""
_TRIED_ELEMENTS = 1 << 20  # of a part of a shard, in the trial of codecs
_ROUNDS = 3
_LEAST_GAIN = 0.9  # of the time without a codec, above which none is taken


class ReplicaGroups:
    """Groups of ranks beside the shard group that hold the same elements of a bucket, sum their gradients, and of which one counts
    these in norms: replicas, tensor ranks with what is not divided among all, stages with tied parameters. All ranks make it."""

    def __init__(self, mesh: Mesh, buckets: Iterable[Bucket], options: ZeroOptions, replicate: ProcessSet) -> None:
        """`replicate`: replicas whose gradients are summed, one in local steps. Raises `ConfigError` for a codec without use."""
        self._coordinate, self._shape = mesh.coordinate, mesh.shape
        self.sets: dict[Positions, ProcessSet] = {(): replicate}
        """The ranks that sum gradients, this rank included, by `Bucket.shared_by`."""
        self.wire, self.note = _choose_wire(mesh, sum(each.length for each in buckets if each.divided), options)
        """The codec of parameters of replicas that divide states; the note says why."""
        self._wire_of_sums = self.wire or _wire_without_codec(options)
        if mesh.model_size == 1:
            return
        rows = mesh.world.gather_json(sorted({bucket.shared_by for bucket in buckets} - {()}), "who shares parameters")
        pairs = ((tuple((axis, tuple(at)) for axis, at in row), rank) for rank, own in enumerate(rows) for row in own)
        for positions, ranks in sorted(grouped(pairs).items()):
            # The mesh keeps these process sets, so that the next engine on it finds them.
            axes = [*axes_of("batch", but=["states"])] if replicate.size > 1 else []
            axes += [axis for axis, _ in positions]
            name = f"sharers {hashlib.blake2b(repr((positions, ranks, axes)).encode(), digest_size=6).hexdigest()}"
            colour = mesh.shape.group_index(mesh.rank, *axes) if mesh.rank in ranks else None
            if not any(each.startswith(name) for each in mesh.process_sets):
                mesh.process_sets.split(colour, name=name)
            if colour is not None:
                self.sets[positions] = mesh.process_sets[f"{name} {colour}"]

    def counts(self, bucket: Bucket) -> bool:
        """Return True if this rank counts and writes a bucket's shard, among the ranks that hold it for the same samples."""
        return all(self._coordinate[axis] == first for axis, first in bucket.counted_at.items())

    def sum_async(self, bucket: Bucket, gradient: torch.Tensor) -> Reduction:
        """Start to sum a gradient shard in place over sharers, in rank order; of divided states this rank's part, at its start."""
        ranks = self.sets[bucket.shared_by]
        if ranks.size == 1:
            return SUMMED
        if not bucket.divided:
            whole = ranks.all_reduce_async(gradient, "sum of gradients over replicas")
            return Reduction(whole.done, whole.wait)
        order = [self._shape.coordinate(rank)["replicate"] for rank in ranks.ranks]
        return sum_parts(ranks, gradient, order, gradient[: bucket.length], self._wire_of_sums)


def _choose_wire(mesh: Mesh, elements: int, options: ZeroOptions) -> tuple[Wire, str | None]:
    """Return the codec of what replicas with parts of `elements` send each other, alike on all ranks, and a line for the log."""
    name, between = options.wire, "wire     {} between replicas{}"
    if name == "exact":
        return None, None
    replicas = mesh.shape.groups(*axes_of("batch", but=["states"]))
    across = any(len({mesh.locations[rank].host for rank in ranks}) > 1 for ranks in replicas)
    obstacle = ""
    if options.dividing(mesh.replicate.size) == 1:
        obstacle = "no replicas divide states; set zero.replicas: divided and parallel.replicate to the number of hosts"
    elif not across and (name == "auto" or options.transport != "gloo"):
        obstacle = "replicas share a host, inside which nothing is sent that needs a codec; leave it out"
    if name != "auto" and not (obstacle and number_of_start()):  # A later start goes on with the hosts that are left.
        if obstacle:
            problem = f"{name} encodes what replicas on several hosts send each other, and {obstacle}"
            raise ConfigError(problem, where="parallel.wire")
        return (chosen := WireCodec(name=name)), between.format(name, f": {_cost(chosen, options)}")
    if obstacle or options.precision.compute is torch.float64:
        return None, between.format("exact", f", since {obstacle or 'float64 is not rounded'}")
    numel, codecs = max(1, min(elements, _TRIED_ELEMENTS)), [WireCodec(name=each) for each in ("bfloat16", *LEVELS)]
    tried = [int(1e9 * _seconds(mesh, numel, each, options)) for each in (None, *codecs)]
    exact, *others = map(max, zip(*mesh.world.gather_integers(tried), strict=True))
    least, best = min(zip(others, codecs, strict=True), key=lambda each: each[0])
    times = ", ".join(f"{codec.name} {each / 1e6:.1f}" for codec, each in zip(codecs, others, strict=True))
    why = f" (a part of {numel:,} elements took exact {exact / 1e6:.1f} ms, {times})"
    if least > _LEAST_GAIN * exact:
        return None, between.format("exact", why)
    return best, between.format(best.name, f": {_cost(best, options)}{why}")


def _wire_without_codec(options: ZeroOptions) -> Wire:
    """Return how sums travel without `parallel.wire`."""
    return WireCodec(name="bfloat16") if options.precision.reduce.itemsize < options.precision.sums.itemsize else None


def _cost(wire: WireCodec, options: ZeroOptions) -> str:
    exact = options.precision.reduce.itemsize + options.precision.compute.itemsize
    saved = 1 - 2 * wire.nbytes(1 << 20) / (exact << 20)
    return f"{saved:.0%} fewer bytes, each value off by at most {wire.error}"


def _seconds(mesh: Mesh, numel: int, wire: Wire, options: ZeroOptions) -> float:
    """Return the seconds in which replicas sum gradients of parts of `numel` elements and gather them, the least of some rounds."""
    ranks, precision, seconds = mesh.replicate, options.precision, list[float]()
    gradient = torch.ones(ranks.size * numel, dtype=precision.sums, device=mesh.device)
    values = torch.zeros(ranks.size * numel, dtype=precision.compute, device=mesh.device)
    own = Interval(start=ranks.index * numel, end=(ranks.index + 1) * numel)
    for _ in range(_ROUNDS):
        accelerator.synchronize(mesh.device)
        mesh.world.barrier("trial of codecs")
        began = time.perf_counter()
        sum_parts(ranks, gradient, range(ranks.size), gradient[:numel], wire or _wire_without_codec(options)).finish()
        encoded = None if wire is None else wire.encode(gradient[:numel] - values[:numel])
        gather_parts(ranks, values, own, wire, encoded)()
        accelerator.synchronize(mesh.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class OuterOptimizer:
    """Brings the weights of replicas together after local steps: its gradient is the way that they went since the last sync, in the
    mean (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023). Its states are `[shard]`
    each in the master dtype, on the tier of the moments, and alike on all `replicas`."""

    def __init__(self, settings: OuterSettings, tiers: Tiers, at: TierChoice, replicas: ProcessSet) -> None:
        self._settings, self._tiers, self._tier, self.replicas = settings, tiers, at, replicas

    def allocate(self, bucket: Bucket) -> None:
        labels = [f"{what} of {bucket.name}" for what in ("weights of the last sync", "outer momentum")]
        make = partial(self._tiers.allocate, bucket.master.numel, bucket.master.dtype, self._tier, Purpose.MOMENTS)
        bucket.outer = [make(each) for each in labels[: self._settings.tensors]]
        self.begin(bucket)

    def begin(self, bucket: Bucket) -> None:
        """Measure the way of a bucket's weights from those that it has now."""
        for synced in bucket.outer[:1]:
            synced.copy_from(bucket.master)

    def step(self, weights: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Give `weights` the values of all replicas, which call it alike; `states` are the same part of the bucket's `outer`."""
        summed = weights.to(self._tiers.device)  # Other devices' memory is out of reach of its collectives.
        self.replicas.all_reduce_async(summed, "sum of the replicas' weights").wait()
        weights.copy_(summed.div_(self.replicas.size))
        if states:
            synced, *momenta = states
            way = synced - weights
            for momentum in momenta:
                momentum.mul_(self._settings.momentum).add_(way)
                way.add_(momentum, alpha=self._settings.momentum)
            weights.copy_(synced.sub_(way, alpha=self._settings.lr))
