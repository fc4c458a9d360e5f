"""What one rank's memory will be, by purpose, from the layout alone: a formula, before anything is allocated.

For a bucket of P elements (padded) over W ranks, `own` = P / W elements, or P where every rank updates all (stage 0):

    purpose             bytes
    parameters          c P                at stages 0-2, and at stage 3 where they are kept between uses
                        c P / W            the same where ranks share pages: they are counted once over all of them
    master weights      m own              nothing where the kept parameters themselves are of the master dtype
    moments             k m own            k of them by optimizer
    averaged weights    m own              where there is an average of them (`ema`)
    gradient shards     r own              or, where they live only inside backward, the largest few of them
    partial gradients   r P                where microbatches are summed before one reduction
    buckets in flight   slots x largest    twice over gloo, which receives into buffers of its own

with c, m, r the bytes of the compute, master and reduce dtypes. At stage 3 what is not kept comes and goes: at most the root and
`prefetch` + 1 units are there at once. Activations and what libraries take are not states, and not here.

What rests on files is on disk instead: master weights, moments, gradient shards, and with them c own for the copy that is gathered.
In memory there are then gradient shards on their way, the largest few of them, and buffers of the stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zeromesh.flat.layout import BucketLayout
from zeromesh.offload import Purpose, Tier, TierChoice, stream_bytes
from zeromesh.optim.fused_optimizer import moment_names
from zeromesh.optim.gradients import LEAVING
from zeromesh.options import Placement, ZeroOptions
from zeromesh.units.build import kept_units, plan_layouts
from zeromesh.units.plan import ModelPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """Bytes of one rank once every bucket has been updated. `files` are on disk, everything else in memory."""

    terms: Mapping[Purpose, int]
    """What stays from step to step, by purpose; purposes without bytes are left out. `GRADIENTS` inside backward is the most
    that can be there."""
    gathered: int
    """The most that parameters gathered around their use take beside that."""
    passing: int
    """The most that gradient shards on their way to another tier take beside that."""
    files: Mapping[Purpose, int]

    @property
    def total(self) -> int:
        """The highest sum in memory."""
        return sum(self.terms.values()) + self.gathered + self.passing

    @property
    def on_disk(self) -> int:
        """Bytes of swap files."""
        return sum(self.files.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """What the terms depend on beside the layout. `kept`: whether the parameters of each unit stay gathered."""

    options: ZeroOptions
    parts: int
    transport: str
    kept: tuple[bool, ...]

    @property
    def device(self) -> torch.device:
        """Where ranks compute."""
        return torch.device("cuda" if self.transport == "nccl" else "cpu")

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
) -> MemoryModel:
    """Memory of each of `parts` ranks that share the states of the planned model.

    `transport` is what `choose_transport` gives for them: `local`, `shared`, `gloo` or `nccl`. `budget` is bytes of gathered
    parameters kept at stage 3; None: all of them where ranks share pages, none elsewhere.
    """
    layouts = plan_layouts(plan, parts)
    kept = _kept(layouts, options, transport, budget)
    setting = _Setting(options=options, parts=parts, transport=transport, kept=kept)
    buckets = [(layout, stays) for unit, stays in zip(layouts, kept, strict=True) for layout in unit]
    trained = [layout for layout, _ in buckets if layout.first.requires_grad]
    resting = [rest for layout, stays in buckets for rest in _resting(layout, setting, stays=stays)]
    memory: Counter[Purpose] = Counter()
    files: Counter[Purpose] = Counter()
    for rest in resting:
        files[rest.purpose] += rest.nbytes(Tier.FILE)
        memory[rest.purpose] += rest.nbytes(Tier.DEVICE) + rest.nbytes(Tier.HOST)
    memory[Purpose.PARAMETERS] += int(setting.share * sum(layout.nbytes for layout, stays in buckets if stays))
    if options.gradients_pass_through:
        memory[Purpose.GRADIENTS] += _passing_gradients(layouts, setting)
    memory[Purpose.PARTIAL_GRADIENTS] += sum(_partial_bytes(layout, setting) for layout in trained)
    memory[Purpose.GRADIENT_BUCKETS] += _ring_bytes(trained, setting)
    memory[Purpose.STAGING] += _staging_bytes(buckets, setting, on_files=bool(files.total()))
    return MemoryModel(
        terms={purpose: memory[purpose] for purpose in Purpose if memory[purpose]},
        gathered=_passing_bytes(layouts, setting),
        passing=_leaving_bytes(trained, setting),
        files={purpose: files[purpose] for purpose in Purpose if files[purpose]},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rest:
    """`numel` elements that rest where `choice` says."""

    purpose: Purpose
    numel: int
    dtype: torch.dtype
    choice: TierChoice

    def nbytes(self, tier: Tier) -> int:
        """Bytes on a tier."""
        return self.choice.on(tier, self.numel) * self.dtype.itemsize


def _resting(layout: BucketLayout, setting: _Setting, *, stays: bool) -> Iterator[_Rest]:
    """The tensors of a bucket's shard, as `build_units` allocates them."""
    spec, own, options = layout.first, setting.own(layout), setting.options
    offload = options.offload
    trained = spec.requires_grad and spec.dtype.is_floating_point
    dtype = options.precision.master if trained else spec.dtype
    if dtype != spec.dtype:
        yield _Rest(purpose=Purpose.MASTER, numel=own, dtype=dtype, choice=offload.optimizer)
        if not stays and not offload.optimizer.in_reach(own, setting.device):
            yield _Rest(purpose=Purpose.PARAMETERS, numel=own, dtype=spec.dtype, choice=offload.parameters)
    elif not stays:
        yield _Rest(purpose=Purpose.MASTER, numel=own, dtype=dtype, choice=offload.parameters)
    if spec.requires_grad:
        for _ in moment_names(options.optimizer):
            yield _Rest(purpose=Purpose.MOMENTS, numel=own, dtype=options.precision.master, choice=offload.optimizer)
        if options.average is not None:
            yield _Rest(purpose=Purpose.AVERAGES, numel=own, dtype=options.precision.master, choice=offload.optimizer)
        if not options.gradients_pass_through:
            yield _Rest(
                purpose=Purpose.GRADIENTS, numel=own, dtype=options.precision.reduce, choice=offload.gradients_at
            )


def _leaving_bytes(trained: Sequence[BucketLayout], setting: _Setting) -> int:
    """Bytes of gradient shards that are in memory on their way to another tier: those that leave, and the next one."""
    options = setting.options
    lengths = sorted((setting.own(layout) for layout in trained), reverse=True)
    if (
        options.gradients_pass_through
        or not lengths
        or options.offload.gradients_at.in_reach(lengths[0], setting.device)
    ):
        return 0
    return sum(lengths[: LEAVING + 1]) * options.precision.reduce.itemsize


def _staging_bytes(buckets: Sequence[tuple[BucketLayout, bool]], setting: _Setting, *, on_files: bool) -> int:
    """Bytes of the buffers of the update stream, and of the threads of the file tier."""
    width = longest = 0
    offload, device = setting.options.offload, setting.device
    for layout, stays in buckets:
        if not layout.first.requires_grad:
            continue
        own = setting.own(layout)
        rests = list(_resting(layout, setting, stays=stays))
        width = max(width, sum(not rest.choice.in_reach(rest.numel, device) for rest in rests))
        longest = max(longest, own * setting.options.precision.master.itemsize)
    staging = stream_bytes(width, longest, offload.staging_bytes) if width else 0
    return staging + (offload.files.staging_bytes if on_files else 0)


def _kept(
    layouts: Sequence[Sequence[BucketLayout]], options: ZeroOptions, transport: str, budget: int | None
) -> tuple[bool, ...]:
    """Whether each unit's parameters stay gathered."""
    sizes = [sum(layout.nbytes for layout in unit) for unit in layouts]
    away = options.offload.parameters.leaves(torch.device("cuda" if transport == "nccl" else "cpu"))
    if options.placements.parameters is Placement.REPLICATED or (transport == "local" and not away):
        return (True,) * len(sizes)
    if budget is None:
        budget = sum(sizes) if transport == "shared" and not away else 0
    return tuple(kept_units(sizes, budget))


def _passing_gradients(layouts: Sequence[Sequence[BucketLayout]], setting: _Setting) -> int:
    """Gradient shards that live from reduction to update: those in flight, and beside them those of the root, which are updated
    last. With nothing to reduce, those of the root and of the unit that backward is in. Stage 0 completes them all at the end."""
    root, *units = [[setting.own(layout) for layout in unit if layout.first.requires_grad] for unit in layouts]
    largest = max((length for unit in units for length in unit), default=0)
    if setting.parts == 1:
        count = sum(root) + max(map(sum, units), default=0)
    elif setting.replicated:
        count = sum(root) + sum(map(sum, units))
    else:
        flying = min(sum(map(len, units)), setting.options.gradient_slots) * largest
        # One of the root's is in flight itself when all of them are there.
        count = sum(root) + flying - min(largest, *root) if root else flying
    return count * setting.options.precision.reduce.itemsize


def _partial_bytes(layout: BucketLayout, setting: _Setting) -> int:
    summed = setting.options.sums_before_reducing and setting.parts > 1
    return layout.padded * setting.options.precision.reduce.itemsize if summed else 0


def _ring_bytes(trained: Sequence[BucketLayout], setting: _Setting) -> int:
    """Gradients travel in their own dtype, or in that of the sum where earlier sums join them."""
    if setting.transport == "local":
        return 0
    options = setting.options
    sizes = [
        layout.padded * (options.precision.reduce if options.sums_before_reducing else layout.first.dtype).itemsize
        for layout in trained
    ]
    return (2 if setting.transport == "gloo" else 1) * options.gradient_slots * max(sizes, default=0)


def _passing_bytes(layouts: Sequence[Sequence[BucketLayout]], setting: _Setting) -> int:
    """Bytes of the root, and of the largest `prefetch` + 1 units that follow each other, of those that are not kept."""
    root, *others = [
        0 if stays else int(setting.share * sum(layout.nbytes for layout in unit))
        for unit, stays in zip(layouts, setting.kept, strict=True)
    ]
    window = setting.options.prefetch + 1
    return root + max((sum(others[start : start + window]) for start in range(len(others))), default=0)
