"""Checks that ranks that hold the same weights hold the same values, by a digest of each tensor and region.

The digests cover gathered parameters that a rank keeps for forward, shards at rest, and persistent buffers. So the check compares
replicas along data axes, parameters that tensor ranks hold whole, and the copies of a tied parameter on stages of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash

from zeromesh.errors import WeightsDifferError, ranks_text
from zeromesh.flat.layout import Region
from zeromesh.intervals import Interval
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import tensor_bytes
from zeromesh.units.unit import Bucket, all_buckets
from zeromesh.zero.engine import ZeroEngine

_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDifference:
    """Elements of a tensor that ranks hold with other values."""

    what: str
    """The tensor's name, and which part of it."""
    digests: Mapping[int, str]
    """The digest of each rank that holds these elements, by rank."""

    def __str__(self) -> str:
        most, count = Counter(self.digests.values()).most_common(1)[0]
        others = [rank for rank, digest in self.digests.items() if digest != most]
        if 2 * count > len(self.digests):
            rest = [rank for rank in self.digests if rank not in others]
            return f"{self.what}: {ranks_text(others)} has other values than {ranks_text(rest, 8)}"
        return f"{self.what}: {', '.join(f'rank {rank} has {digest}' for rank, digest in self.digests.items())}"


def compare_weights(engine: ZeroEngine) -> list[WeightDifference]:
    """Compare the weights of all ranks, between passes over the model; every rank calls it and gets the same answer.

    A rank reads all that it holds once, one tensor at a time, and gives the others digests of 64 bits (XXH3).
    """
    engine.settle()
    mesh: Mesh = engine.mesh
    own = dict(_digests(engine))
    holders: dict[str, dict[int, str]] = {}
    for rank, row in zip(mesh.world.ranks, mesh.world.gather_json(own, "digests of weights"), strict=True):
        for what, found in row.items():
            holders.setdefault(what, {})[rank] = found
    return [
        WeightDifference(what=what, digests=digests)
        for what, digests in holders.items()
        if len(set(digests.values())) > 1
    ]


def require_same_weights(engine: ZeroEngine) -> None:
    """Raise `WeightsDifferError` on all ranks, with tensors and ranks, where `compare_weights` finds a difference."""
    found = compare_weights(engine)
    if found:
        rest = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        lines = "\n".join([*(str(each) for each in found[:_SHOWN]), *rest])
        raise WeightsDifferError(f"ranks hold other values of the same weights:\n{lines}")


def _digests(engine: ZeroEngine) -> Iterator[tuple[str, str]]:
    """Yield the name of each part that this rank holds, and its digest."""
    for bucket in all_buckets(engine.units):
        if bucket.buffer.persistent:
            yield from _gathered(bucket)
    for shard in engine.checkpoint_state.wanted():
        part = _part(shard.region, shard.interval)
        name = shard.spec.name if shard.spec.kind == "model" else f"{shard.spec.name} ({shard.spec.kind})"
        if shard.values.numel:
            yield f"{name}{part}, at rest", _digest(shard.values.load(engine.mesh.device))


def _gathered(bucket: Bucket) -> Iterator[tuple[str, str]]:
    for slot in bucket.layout.slots:
        region = slot.spec.region
        part = _part(region, Interval(start=0, end=region.numel))
        yield f"{slot.spec.name}{part}", _digest(bucket.buffer.full[slot.where.start : slot.where.end])


def _part(region: Region, interval: Interval) -> str:
    """Which elements of a tensor these are; empty for all."""
    boxes = " x ".join("+".join(f"{each.start}:{each.end}" for each in dim) for dim in region.dims)
    cut = "" if region == Region.whole(region.shape) else f"[{boxes}]"
    return cut if interval.length == region.numel else f"{cut} elements {interval.start}:{interval.end}"


def _digest(values: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor_bytes(values).numpy().data)
