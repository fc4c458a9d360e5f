"""What one rank's memory will be, by purpose, from the layout alone: a formula, before anything is allocated.

For a bucket of P elements (padded) over W ranks, `own` = P / W elements, or P where every rank updates all (stage 0):

    purpose             bytes
    parameters          c P                at stages 0-2, and at stage 3 where they are kept between uses
                        c P / W            the same where ranks share pages: they are counted once over all of them
    master weights      m own              nothing where the kept parameters themselves are of the master dtype
    moments             k m own            k of them by optimizer
    gradient shards     r own              or, where they live only inside backward, the largest few of them
    partial gradients   r P                where microbatches are summed before one reduction
    buckets in flight   slots x largest    twice over gloo, which receives into buffers of its own

with c, m, r the bytes of the compute, master and reduce dtypes. At stage 3 what is not kept comes and goes: at most the root and
`prefetch` + 1 units are there at once. Activations and what libraries take are not states, and not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeromesh.flat.layout import BucketLayout, ParameterSpec
from zeromesh.flat.placement import Placement
from zeromesh.offload import Purpose
from zeromesh.optim.sharded import moment_names
from zeromesh.zero.build import kept_units, plan_layouts
from zeromesh.zero.options import ZeroOptions
from zeromesh.zero.plan import ModelPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one rank once every bucket has been updated."""

    terms: Mapping[Purpose, int]
    """What stays from step to step, by purpose; purposes without bytes are left out. `GRADIENTS` inside backward is the most
    that can be there."""
    gathered: int
    """The most that parameters gathered around their use take beside that."""

    @property
    def total(self) -> int:
        """The highest sum."""
        return sum(self.terms.values()) + self.gathered


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """What the terms depend on beside the layout. `kept` tells of each unit whether its parameters stay gathered."""

    options: ZeroOptions
    parts: int
    transport: str
    kept: tuple[bool, ...]

    @property
    def replicated(self) -> bool:
        """Whether every rank updates all elements."""
        return self.options.placements.optimizer is Placement.REPLICATED

    @property
    def share(self) -> float:
        """Part of gathered parameters that counts for one rank."""
        return 1.0 / self.parts if self.transport == "shared" and not self.replicated else 1.0

    def own(self, layout: BucketLayout) -> int:
        """Elements that a rank updates."""
        return layout.padded if self.replicated else layout.shard_length


def predict_memory(
    plan: ModelPlan, options: ZeroOptions, *, parts: int, transport: str, budget: int | None = None
) -> Footprint:
    """Memory of each of `parts` ranks that share the states of the planned model.

    `transport` is what `choose_transport` gives for them: `local`, `shared`, `gloo` or `nccl`. `budget` is bytes of gathered
    parameters kept at stage 3; None: all of them where ranks share pages, none elsewhere.
    """
    layouts = plan_layouts(plan, parts)
    kept = _kept(layouts, options, transport, budget)
    setting = _Setting(options=options, parts=parts, transport=transport, kept=kept)
    buckets = [(layout, stays) for unit, stays in zip(layouts, kept, strict=True) for layout in unit]
    trained = [layout for layout, _ in buckets if _spec(layout).requires_grad]
    terms = {
        Purpose.PARAMETERS: int(setting.share * sum(_gathered_bytes(layout) for layout, stays in buckets if stays)),
        Purpose.MASTER: sum(_master_bytes(layout, setting, stays=stays) for layout, stays in buckets),
        Purpose.MOMENTS: sum(_moment_bytes(layout, setting) for layout in trained),
        Purpose.GRADIENTS: _gradient_bytes(layouts, setting),
        Purpose.PARTIAL_GRADIENTS: sum(_partial_bytes(layout, setting) for layout in trained),
        Purpose.GRADIENT_BUCKETS: _ring_bytes(trained, setting),
    }
    return Footprint(
        terms={purpose: nbytes for purpose, nbytes in terms.items() if nbytes},
        gathered=_passing_bytes(layouts, setting),
    )


def _spec(layout: BucketLayout) -> ParameterSpec:
    """Any parameter of a bucket: all have one dtype, and are trained or not together."""
    return layout.slots[0].spec


def _gathered_bytes(layout: BucketLayout) -> int:
    return layout.padded * _spec(layout).dtype.itemsize


def _kept(
    layouts: Sequence[Sequence[BucketLayout]], options: ZeroOptions, transport: str, budget: int | None
) -> tuple[bool, ...]:
    """Whether each unit's parameters stay gathered."""
    sizes = [sum(_gathered_bytes(layout) for layout in unit) for unit in layouts]
    if options.placements.parameters is Placement.REPLICATED or transport == "local":
        return (True,) * len(sizes)
    if budget is None:
        budget = sum(sizes) if transport == "shared" else 0
    return tuple(kept_units(sizes, budget))


def _master_bytes(layout: BucketLayout, setting: _Setting, *, stays: bool) -> int:
    spec = _spec(layout)
    trained = spec.requires_grad and spec.dtype.is_floating_point
    dtype = setting.options.precision.master if trained else spec.dtype
    return 0 if stays and dtype == spec.dtype else setting.own(layout) * dtype.itemsize


def _moment_bytes(layout: BucketLayout, setting: _Setting) -> int:
    count = len(moment_names(setting.options.optimizer))
    return count * setting.own(layout) * setting.options.precision.master.itemsize


def _gradient_bytes(layouts: Sequence[Sequence[BucketLayout]], setting: _Setting) -> int:
    """Gradient shards. Where each lives only from its reduction to its update, there are as many as reductions in flight; with
    nothing to reduce, those of the root and of the unit that backward is in. Stage 0 completes them all at the end."""
    units = [[setting.own(layout) for layout in unit if _spec(layout).requires_grad] for unit in layouts]
    lengths = [length for unit in units for length in unit]
    if setting.options.gradients_pass_through and setting.parts == 1:
        lengths = [sum(units[0]), max((sum(unit) for unit in units[1:]), default=0)]
    elif setting.options.gradients_pass_through and not setting.replicated:
        lengths = [max(lengths, default=0)] * min(len(lengths), setting.options.gradient_slots)
    return sum(lengths) * setting.options.precision.reduce.itemsize


def _partial_bytes(layout: BucketLayout, setting: _Setting) -> int:
    summed = setting.options.sums_before_reducing and setting.parts > 1
    return layout.padded * setting.options.precision.reduce.itemsize if summed else 0


def _ring_bytes(trained: Sequence[BucketLayout], setting: _Setting) -> int:
    """Gradients travel in their own dtype, or in that of the sum where earlier sums join them."""
    if setting.transport == "local":
        return 0
    options = setting.options
    sizes = [
        layout.padded * (options.precision.reduce if options.sums_before_reducing else _spec(layout).dtype).itemsize
        for layout in trained
    ]
    return (2 if setting.transport == "gloo" else 1) * options.gradient_slots * max(sizes, default=0)


def _passing_bytes(layouts: Sequence[Sequence[BucketLayout]], setting: _Setting) -> int:
    """The root, and the largest `prefetch` + 1 units that follow each other, of those that are not kept."""
    root, *others = [
        0 if stays else int(setting.share * sum(_gathered_bytes(layout) for layout in unit))
        for unit, stays in zip(layouts, setting.kept, strict=True)
    ]
    window = setting.options.prefetch + 1
    return root + max((sum(others[start : start + window]) for start in range(len(others))), default=0)
