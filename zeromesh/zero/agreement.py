"""Before anything moves: do all data-parallel ranks build the same buckets, under the same options?

Ranks that differ would sum gradients of different parameters, or map memory past its end. A hash of each bucket finds that
while it can still be said in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from zeromesh.errors import LayoutError
from zeromesh.flat.layout import BucketLayout
from zeromesh.mesh.groups import ProcessSet
from zeromesh.offload import FileSettings
from zeromesh.zero.options import ZeroOptions


def require_equal_plans(group: ProcessSet, layouts: Sequence[BucketLayout], options: ZeroOptions) -> None:
    """Compare with the other ranks of `group`; all of them call this.

    Raises:
        LayoutError: on every rank, naming another one and the first bucket or the options that differ.
    """
    # Where a host's swap files lie is its own business.
    shared = replace(options, offload=replace(options.offload, files=FileSettings()))
    mine = [_hash(repr(shared)), len(layouts)]
    for rank, (theirs, count) in zip(group.ranks, group.gather_integers(mine), strict=True):
        if theirs != mine[0]:
            raise LayoutError(f"rank {rank} was given other options than this rank, which has {options}")
        if count != mine[1]:
            raise LayoutError(
                f"rank {rank} cuts its model into {count} buckets and this rank into {mine[1]}: "
                f"{', '.join(layout.name for layout in layouts)}. All ranks must build one model"
            )
    hashes = [_hash(repr(layout)) for layout in layouts]
    for rank, row in zip(group.ranks, group.gather_integers(hashes), strict=True):
        for layout, ours, theirs in zip(layouts, hashes, row, strict=True):
            if ours != theirs:
                raise LayoutError(
                    f"rank {rank} has something else than this rank in the place of unit {_describe(layout)}. "
                    "All ranks must build one model, with the same shapes, dtypes and frozen parameters"
                )


def _describe(layout: BucketLayout) -> str:
    unit, _, number = layout.name.rpartition("/")
    specs = [slot.spec for slot in layout.slots]
    shown = ", ".join(f"{spec.fqn} {list(spec.shape)}" for spec in specs[:3])
    more = f" and {len(specs) - 3} more" if len(specs) > 3 else ""
    kind = f"{specs[0].dtype}, {'trainable' if specs[0].requires_grad else 'frozen'}" if specs else "empty"
    return f"{unit}, bucket {number} ({kind}): {shown}{more}"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
