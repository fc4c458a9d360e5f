"""Predicts one rank's memory, by purpose, from the layout alone, before anything is allocated.

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

with c, m, r the bytes of the compute, master and reduce dtypes. At stage 3 parameters that are not kept come and go: at most the
root and `prefetch` + 1 units are gathered at once. Activations and the memory of libraries are not included.

Offloaded to files, the master weights, moments and gradient shards are on disk, with another c own for the copy that is gathered.
Memory then has the largest few gradient shards on their way, and the stream's buffers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from zeromesh.flat.layout import BucketLayout
from zeromesh.offload import Purpose, Tier, TierChoice, stream_bytes
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.file_tier import THREAD_BYTES
from zeromesh.optim.fused_optimizer import moment_names
from zeromesh.optim.gradients import LEAVING
from zeromesh.options import Placement, ZeroOptions
from zeromesh.units.build import kept_buckets, plan_layouts, ring_bytes, slot_bytes
from zeromesh.units.plan import ModelPlan

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBytes:
    """Bytes of memory, required or available: of an accelerator (0 without one), of the host, and of disks."""

    device: int
    host: int
    disk: int

    @property
    def critical(self) -> int:
        """Bytes of the memory in which ranks compute, which runs short first."""
        return self.device or self.host

    def beyond(self, room: "MemoryBytes") -> str:
        """The first of `device`, `host` and `disk` that exceeds `room`; empty if everything fits."""
        names = ("device", "host", "disk")
        return next((name for name in names if getattr(self, name) > getattr(room, name)), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """Bytes of one rank once every bucket has been updated: in the memory of its compute device, in host memory beside an
    accelerator (`hosted`), and on disk (`files`)."""

    terms: Mapping[Purpose, int]
    """Bytes that stay from step to step, by purpose, without empty purposes. `GRADIENTS` inside backward is the peak."""
    gathered: int
    """The peak of further bytes for parameters that are gathered around their use."""
    kept: int
    """Bytes of gathered parameters that stay between uses, of all ranks where ranks share pages."""
    passing: int
    """The peak of further bytes for gradient shards on their way to another tier."""
    files: Mapping[Purpose, int]
    hosted: Mapping[Purpose, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The peak in the memory of the compute device, in bytes."""
        return sum(self.terms.values()) + self.gathered + self.passing

    @property
    def on_disk(self) -> int:
        """Bytes of swap files."""
        return sum(self.files.values())


def predict_memory(
    plan: ModelPlan,
    options: ZeroOptions,
    *,
    parts: int,
    transport: str,
    device: torch.device = _CPU,
) -> MemoryModel:
    """Predict the memory of each of `parts` ranks that share the states of the planned model. `transport` is the result of
    `choose_transport` for them: `local`, `shared`, `gloo` or `nccl`. `device` is the compute device."""
    return predict_layouts(plan_layouts(plan, parts), options, parts, transport, device)


def predict_layouts(
    units: list[list[BucketLayout]],
    options: ZeroOptions,
    parts: int,
    transport: str,
    device: torch.device,
) -> MemoryModel:
    """Do the same from the layouts of each unit's buckets for `parts` ranks, the root's layouts first."""
    return _Formula(units, options, parts, transport, device).result()


class _Formula:
    def __init__(
        self,
        units: list[list[BucketLayout]],
        options: ZeroOptions,
        parts: int,
        transport: str,
        device: torch.device,
    ) -> None:
        self.units = units
        self.options = options
        self.parts = parts
        self.transport = transport
        self.device = device
        self.replicated = options.placements.optimizer is Placement.REPLICATED
        self.reduce_bytes = options.precision.sums.itemsize
        self.share = 1.0 / parts if transport == "shared" and not self.replicated else 1.0
        """The part of gathered parameters that counts for one rank."""
        self.kept = kept_buckets(units, options, device, transport)
        """True for each bucket of each unit whose parameters stay gathered."""
        buckets = [pair for unit, kept in zip(units, self.kept, strict=True) for pair in zip(unit, kept, strict=True)]
        alike = Counter((id(layout), stays) for layout, stays in buckets)
        distinct = {(id(layout), stays): layout for layout, stays in buckets}
        self.buckets = [(layout, stays, alike[key, stays]) for (key, stays), layout in distinct.items()]
        """Each layout, True if its parameters stay gathered, and the number of alike buckets: alike blocks may share a layout."""
        self.trained = [layout for layout, _ in buckets if layout.first.requires_grad]

    def result(self) -> MemoryModel:
        options, memory, files = self.options, Counter[Purpose](), Counter[Purpose]()
        # On a CPU the host's memory is the device's.
        hosted = Counter[Purpose]() if is_accelerator(self.device) else memory
        for layout, stays, count in self.buckets:
            for purpose, dtype, choice in self.resting(layout, stays=stays):
                on = {tier: choice.on(tier, self.own(layout)) * dtype.itemsize * count for tier in Tier}
                files[purpose] += on[Tier.FILE]
                memory[purpose] += on[Tier.DEVICE]
                hosted[purpose] += on[Tier.HOST]
        memory[Purpose.PARAMETERS] += int(
            self.share * sum(count * layout.nbytes for layout, stays, count in self.buckets if stays)
        )
        if options.gradients_pass_through:
            memory[Purpose.GRADIENTS] += self.passing_gradients()
        if options.sums_before_reducing and self.parts > 1:
            memory[Purpose.PARTIAL_GRADIENTS] += sum(layout.padded for layout in self.trained) * self.reduce_bytes
        slots = slot_bytes(self.trained, options, self.device)
        memory[Purpose.GRADIENT_BUCKETS] += ring_bytes(self.transport, options.gradient_slots, slots)
        memory[Purpose.STAGING] += self.staging()
        hosted[Purpose.STAGING] += THREAD_BYTES if files.total() else 0
        return MemoryModel(
            terms={purpose: memory[purpose] for purpose in Purpose if memory[purpose]},
            gathered=self.passing_parameters(),
            kept=sum(count * layout.nbytes for layout, stays, count in self.buckets if stays),
            passing=self.leaving(),
            files={purpose: files[purpose] for purpose in Purpose if files[purpose]},
            hosted={purpose: hosted[purpose] for purpose in Purpose if hosted[purpose] and hosted is not memory},
        )

    def own(self, layout: BucketLayout) -> int:
        """The number of elements that a rank updates."""
        return layout.padded if self.replicated else layout.shard_length

    def resting(self, layout: BucketLayout, *, stays: bool) -> Iterator[tuple[Purpose, torch.dtype, TierChoice]]:
        """Yield the tensors of a bucket's shard as `build_units` allocates them, each of `own` elements."""
        spec, options, offload = layout.first, self.options, self.options.offload
        trained = spec.requires_grad and spec.dtype.is_floating_point
        dtype = options.precision.master if trained else spec.dtype
        if dtype != spec.dtype:
            yield Purpose.MASTER, dtype, offload.optimizer
            if not stays and not offload.optimizer.in_reach(self.own(layout), self.device):
                yield Purpose.PARAMETERS, spec.dtype, offload.parameters
        elif not stays:
            yield Purpose.MASTER if spec.requires_grad else Purpose.PARAMETERS, dtype, offload.parameters
        if spec.requires_grad:
            for _ in moment_names(options.optimizer):
                yield Purpose.MOMENTS, options.precision.master, offload.optimizer
            if options.average is not None:
                yield Purpose.AVERAGES, options.precision.master, offload.optimizer
            if not options.gradients_pass_through:
                yield Purpose.GRADIENTS, options.precision.sums, offload.gradients_at

    def leaving(self) -> int:
        """Bytes of gradient shards in memory on their way to another tier: those in flight, and the next one."""
        lengths = sorted(map(self.own, self.trained), reverse=True)
        at, passing = self.options.offload.gradients_at, self.options.gradients_pass_through
        if passing or not lengths or at.in_reach(lengths[0], self.device):
            return 0
        return sum(lengths[: LEAVING + 1]) * self.reduce_bytes

    def staging(self) -> int:
        widths = [
            sum(not choice.in_reach(self.own(layout), self.device) for *_, choice in self.resting(layout, stays=stays))
            for layout, stays, _ in self.buckets
            if layout.first.requires_grad
        ]
        longest = max(map(self.own, self.trained), default=0) * self.options.precision.master.itemsize
        width = max(widths, default=0)
        return stream_bytes(width, longest, self.options.offload.staging_on(self.device)) if width else 0

    def passing_gradients(self) -> int:
        """Bytes of gradient shards that live from reduction to update: those in flight, and the root's, which are updated last.
        Without a reduction, they are the root's and those of the unit in backward. Stage 0 completes all at the end."""
        root, *units = [[self.own(layout) for layout in unit if layout.first.requires_grad] for unit in self.units]
        if self.parts == 1:
            count = sum(root) + max(map(sum, units), default=0)
        elif self.replicated:
            count = sum(root) + sum(map(sum, units))
        else:
            largest = max((length for unit in units for length in unit), default=0)
            flying = min(sum(map(len, units)), self.options.gradient_slots) * largest
            # When all of the root's shards exist, one of them is itself in flight.
            count = sum(root) + flying - min(largest, *root) if root else flying
        return count * self.reduce_bytes

    def passing_parameters(self) -> int:
        """Bytes of the root and of the largest `prefetch` + 1 consecutive units, among those that are not kept gathered."""
        root, *others = [
            int(self.share * sum(layout.nbytes for layout, stays in zip(unit, kept, strict=True) if not stays))
            for unit, kept in zip(self.units, self.kept, strict=True)
        ]
        window = self.options.prefetch + 1
        return root + max((sum(others[start : start + window]) for start in range(len(others))), default=0)
