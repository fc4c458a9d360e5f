"""Ranks beside the shard group that hold the same elements of a bucket: their gradients are summed, and one of them counts them.

replicas            of all parameters, on other samples
tensor ranks        of what tensor parallelism does not divide, or less often than there are ranks
pipeline stages     of tied parameters, such as an embedding that is the head too
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable

import torch

from zeromesh.flat.layout import ParameterSpec
from zeromesh.mesh.process_mesh import Mesh, ProcessSet
from zeromesh.units.unit import Bucket

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
