"""Before anything moves: do all data-parallel ranks build the same buckets, under the same options?

Ranks that differ would sum gradients of different parameters, or map memory past its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from zeromesh.errors import LayoutError
from zeromesh.flat.layout import BucketLayout
from zeromesh.mesh.agreement import require_same
from zeromesh.mesh.groups import ProcessSet
from zeromesh.offload import FileSettings
from zeromesh.zero.options import ZeroOptions


def require_equal_plans(group: ProcessSet, layouts: Sequence[BucketLayout], options: ZeroOptions) -> None:
    """Compare with the other ranks of `group`; all of them call this.

    Raises:
        LayoutError: on every rank, naming the options and parameters that differ.
    """
    # Where a host's swap files lie is its own business.
    shared = replace(options, offload=replace(options.offload, files=FileSettings()))
    values: dict[str, object] = {f"option {each.name}": getattr(shared, each.name) for each in fields(shared)}
    values |= {
        f"parameter {spec.fqn}": f"{list(spec.shape)} {spec.dtype} {'trained' if spec.requires_grad else 'frozen'}, "
        f"number {number} of bucket {layout.name}"
        for layout in layouts
        for number, spec in enumerate(slot.spec for slot in layout.slots)
    }
    advice = (
        "All ranks must build one model, with the same shapes, dtypes and frozen parameters, under the same options"
    )
    require_same(group, values, LayoutError, advice=advice)
