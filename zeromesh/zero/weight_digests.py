"""Checks that ranks that hold the same weights hold the same values, by a digest of each tensor and region.

The digests cover gathered parameters that a rank keeps for forward, shards at rest, and persistent buffers. So the check compares
replicas along data axes, parameters that tensor ranks hold whole, and the copies of a tied parameter on stages of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
import xxhash

from zeromesh.errors import WeightsDifferError, ranks_text
from zeromesh.flat.layout import Region
from zeromesh.intervals import Interval
from zeromesh.offload import tensor_bytes
from zeromesh.units.unit import Bucket, all_buckets
from zeromesh.zero.engine import ZeroEngine

_SHOWN = 8


def require_same_weights(engine: ZeroEngine) -> None:
    """Compare the weights of all ranks, between passes over the model; every rank calls it.

    A rank reads all of its weights once, one tensor at a time, and exchanges digests of 64 bits (XXH3).

    Raises:
        WeightsDifferError: on all ranks, with the tensors and ranks, where ranks hold other values of the same weights.
    """
    engine.settle()
    world = engine.mesh.world
    holders: dict[str, dict[int, str]] = {}
    for rank, row in zip(world.ranks, world.gather_json(dict(_digests(engine)), "digests of weights"), strict=True):
        for what, found in row.items():
            holders.setdefault(what, {})[rank] = found
    lines = [_difference(what, digests) for what, digests in holders.items() if len(set(digests.values())) > 1]
    if lines:
        rest = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        listed = "\n".join([*lines[:_SHOWN], *rest])
        raise WeightsDifferError(f"ranks hold other values of the same weights:\n{listed}")


def _difference(what: str, digests: Mapping[int, str]) -> str:
    """Name a tensor whose digest differs between its ranks; the most frequent digest is taken as right."""
    most, count = Counter(digests.values()).most_common(1)[0]
    others = [rank for rank, digest in digests.items() if digest != most]
    if 2 * count > len(digests):
        rest = [rank for rank in digests if rank not in others]
        return f"{what}: {ranks_text(others)} has other values than {ranks_text(rest, 8)}"
    return f"{what}: {', '.join(f'rank {rank} has {digest}' for rank, digest in digests.items())}"


def _digests(engine: ZeroEngine) -> Iterator[tuple[str, str]]:
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
    """Describe the elements of a part within its tensor; empty for all."""
    boxes = " x ".join("+".join(f"{each.start}:{each.end}" for each in dim) for dim in region.dims)
    cut = "" if region == Region.whole(region.shape) else f"[{boxes}]"
    return cut if interval.length == region.numel else f"{cut} elements {interval.start}:{interval.end}"


def _digest(values: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor_bytes(values).numpy().data)
