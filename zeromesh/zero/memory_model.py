"""Predicts one rank's memory by purpose, without activations and libraries, from the layout alone (see docs/architecture.md)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from zeromesh.experts.fetch import group_of
from zeromesh.flat.layout import BucketLayout, UnitLayouts
from zeromesh.intervals import grouped
from zeromesh.offload import Purpose, Tier, TierChoice, stream_bytes
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.file_tier import THREAD_BYTES
from zeromesh.offload.tiers import DURABLE
from zeromesh.optim.class_optimizer import most_owned_nbytes
from zeromesh.optim.fused_optimizer import moment_dtypes
from zeromesh.optim.gradients import MOST_OFFLOADS, MOST_SUMS
from zeromesh.options import Placement, ZeroOptions
from zeromesh.units.build import fetched_module, goes_ahead, kept_buckets, rests_as_gathered, ring_bytes, slot_bytes

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBytes:
    """Bytes of memory: of an accelerator (0 without one), of the host, and of disks."""

    device: int
    host: int
    disk: int

    @property
    def critical(self) -> int:
        """Bytes of the memory in which ranks compute: the accelerator's, or the host's without one."""
        return self.device or self.host

    def beyond(self, room: "MemoryBytes") -> str:
        """The first of `device`, `host` and `disk` that exceeds `room`; empty if everything fits."""
        return next((name for name in ("device", "host", "disk") if getattr(self, name) > getattr(room, name)), "")


class MemoryModel:
    """The predicted bytes of one rank after the first update, by purpose, without purposes of 0 bytes: in the memory of its
    compute device (`terms`), in host memory beside an accelerator (`host_terms`), and on disk (`files`). Gradients: the peak."""

    def __init__(self, units: UnitLayouts, options: ZeroOptions, parts: int, transport: str, device: torch.device = _CPU) -> None:
        """`units` are the layouts of each unit's buckets for `parts` ranks that share states, the root's first, and `transport` is
        what `choose_transport` returns for these ranks. Fewer share the states of experts that are spread over them."""
        self.units, self._options, self._parts, self._device = units, options, parts, device
        self._replicated = options.placements.optimizer is Placement.REPLICATED
        kept = kept_buckets(units, options, device, transport)
        pairs = [list(zip(*each, strict=True)) for each in zip(units, kept, strict=True)]
        # Equal blocks may share a layout object, which is then counted once with its number.
        alike = grouped(((id(layout), stays), layout) for unit in pairs for layout, stays in unit)
        self._buckets = [(layouts[0], stays, len(layouts)) for (_, stays), layouts in alike.items()]
        """Each layout, True if its parameters stay gathered, and the number of alike buckets."""
        self._trained = [layout for unit in units for layout in unit if layout.first.requires_grad]
        alone = transport != "shared" or self._replicated

        def gathered(layout: BucketLayout, *, own: bool = True) -> int:
            whole = 1 if self._replicated else layout.parts
            return layout.travelling_nbytes(whole) // (1 if alone or not own else layout.parts)

        fetched = partial(fetched_module, options=options, device=device)
        own = [[each for each in unit if not fetched(each)] for unit in units]
        root, *moved = [sum(gathered(each) for each, stays in unit if not (stays or fetched(each))) for unit in pairs]
        root_decoded, *decoded = [sum(each.nbytes for each in unit if each.first.codec is not None) for unit in own]
        # Forward and backward go through the units in opposite orders.
        ahead = [nbytes if goes_ahead(unit, options) else 0 for nbytes, unit in zip(moved, units[1:], strict=True)]
        used, windows = list(map(sum, zip(moved, decoded, strict=True))), range(len(moved))
        after = [sum(ahead[number + 1 : number + 1 + options.prefetch]) for number in windows]
        before = [sum(ahead[max(number - options.prefetch, 0) : number]) for number in windows]
        self.gathered = root + root_decoded + max(map(sum, zip(used, map(max, after, before), strict=True)), default=0)
        self.gathered += max(group_of(filter(fetched, unit))[1] for unit in units)
        """The peak of bytes, beside `terms`, of parameters gathered around use: of the root, of one unit and of what it is decoded
        into, of the `prefetch` units next to it as they travel, and of experts that are brought."""
        staying = [(layout, count) for layout, stays, count in self._buckets if stays]
        self.kept_bytes = sum(count * gathered(layout, own=False) for layout, count in staying)
        """Bytes of gathered parameters that stay between uses, of all ranks where ranks share pages."""
        self.parameters = sum(count * layout.nbytes for layout, _, count in self._buckets)
        """Bytes of all parameters in the compute dtype."""
        lengths, sums = sorted(map(self._length, self._trained), reverse=True), options.precision.sums.itemsize
        stay = not lengths or options.offload.gradients_at.is_whole_on(lengths[0], device)
        self.transit_bytes = 0 if stay or options.gradients_pass_through else sum(lengths[: MOST_OFFLOADS + 1]) * sums
        """Peak bytes, beside `terms`, of gradient shards on the way to a tier or to replicas that divide them, with the next."""
        dividers = max((layout.dividers for layout in self._trained), default=1)
        if dividers > 1:
            waiting = sum(lengths[: MOST_SUMS + 1] if is_accelerator(device) else lengths)
            others = 0 if options.gradients_keep_memory(device) else waiting - waiting // dividers
            self.transit_bytes += (sum(lengths[:MOST_SUMS]) + others) * sums
        memory, host, files = (Counter[Purpose]() for _ in range(3))
        memory[Purpose.PARAMETERS] += sum(count * gathered(layout) for layout, count in staying)
        for ranks, layouts in grouped((layout.parts, layout) for layout in self._trained).items():
            kind, slot = "local" if ranks == 1 else transport, slot_bytes(layouts, options, device)
            memory[Purpose.GRADIENT_BUCKETS] += ring_bytes(kind, options.gradient_slots, slot)
        # Where ranks compute on a CPU, host memory is device memory.
        hosted = host if is_accelerator(device) else memory
        self._add_bytes({Tier.DEVICE: memory, Tier.HOST: hosted, Tier.FILE: files})
        self.terms, self.host_terms, self.files = (
            {purpose: each[purpose] for purpose in Purpose if each[purpose]} for each in (memory, host, files)
        )

    @property
    def total(self) -> int:
        return sum(self.terms.values()) + self.gathered + self.transit_bytes

    @property
    def snapshot(self) -> int:
        """Bytes of a copy of this rank's states as they are read, with moments decoded, without weights that are not trained."""
        options = self._options
        wide = [options.precision.master, *moment_dtypes(options.optimizer, options.precision.sums).values()]
        wide += [options.precision.master] if options.average is not None else []
        wide += [torch.bfloat16] if options.precision.compensated else []
        return sum(map(self._length, self._trained)) * sum(each.itemsize for each in wide)

    @cached_property
    def moved(self) -> Mapping[int, tuple[int, int]]:
        """Bytes of parameters in the compute dtype, and of gradients as they travel, by the number of ranks that share them."""
        sent = {id(each): slot_bytes([each], self._options, self._device) for each in self._trained}
        return _sums((each.parts, (each.nbytes, sent.get(id(each), 0))) for unit in self.units for each in unit)

    @cached_property
    def trained(self) -> Mapping[torch.dtype, tuple[int, int]]:
        """The numbers of trained elements, in whole buckets and in one rank's shards, by dtype."""
        return _sums((each.first.dtype, (each.padded, each.shard_length)) for each in self._trained)

    def _add_bytes(self, tiers: Mapping[Tier, Counter[Purpose]]) -> None:
        options, memory, files = self._options, tiers[Tier.DEVICE], tiers[Tier.FILE]
        for layout, stays, count in self._buckets:
            for purpose, lengths, choice in self._shard_tensors(layout, stays=stays):
                for tier, placed in tiers.items():
                    places = 2 if options.offload.durable and tier is Tier.FILE and purpose in DURABLE else 1
                    for dtype, numel in lengths.items():
                        placed[purpose] += places * choice.numel_on(tier, numel) * dtype.itemsize * count
        if (own_class := options.optimizer.own_class) is not None and own_class.whole:
            nbytes = most_owned_nbytes(self._trained, own_class, self._parts, options.precision.master)
            for tier, placed in tiers.items():
                placed[Purpose.MOMENTS] += options.offload.optimizer.numel_on(tier, nbytes)
        sums = options.precision.sums.itemsize
        if options.gradients_pass_through:
            memory[Purpose.GRADIENTS] += self._transient_elements() * sums
        if options.sums_before_reducing and self._parts > 1:
            memory[Purpose.PARTIAL_GRADIENTS] += sum(each.padded for each in self._trained if each.parts > 1) * sums
        memory[Purpose.STAGING] += self._staging_bytes()
        kinds = {options.offload.durable and purpose in DURABLE for purpose, nbytes in files.items() if nbytes}
        tiers[Tier.HOST][Purpose.STAGING] += THREAD_BYTES * len(kinds)

    def _length(self, layout: BucketLayout) -> int:
        return layout.padded if self._replicated else layout.shard_length

    def _own_length(self, layout: BucketLayout) -> int:
        """Return the elements whose states a rank has: of a trained bucket, its part of a shard that replicas divide."""
        return self._length(layout) // (layout.dividers if layout.first.requires_grad else 1)

    def _shard_tensors(
        self, layout: BucketLayout, *, stays: bool
    ) -> Iterator[tuple[Purpose, Mapping[torch.dtype, int], TierChoice]]:
        """Yield the tensors of a bucket's shard as `build_units` allocates them, with the elements of each dtype in them."""
        spec, options, offload, length = layout.first, self._options, self._options.offload, self._own_length(layout)
        shard, divided = self._length(layout), length < self._length(layout)
        if divided or not rests_as_gathered(layout, options):
            yield Purpose.MASTER, {options.precision.master: length}, offload.optimizer
            if not stays and (divided or not offload.optimizer.is_whole_on(length, self._device)):
                yield Purpose.PARAMETERS, {spec.dtype: shard}, offload.parameters
        elif not stays:
            rest = {spec.dtype: length} if spec.codec is None else {torch.uint8: layout.rest_nbytes(length)}
            yield Purpose.MASTER if spec.requires_grad else Purpose.PARAMETERS, rest, offload.parameters
        if spec.requires_grad:
            for wide in moment_dtypes(options.optimizer, options.precision.sums).values():
                yield Purpose.MOMENTS, options.optimizer.format.lengths(length, wide), offload.optimizer
            if options.precision.compensated:
                yield Purpose.MOMENTS, {torch.bfloat16: length}, offload.optimizer
            for _ in range(options.outer.tensors if options.outer is not None else 0):
                yield Purpose.MOMENTS, {options.precision.master: length}, offload.optimizer
            if options.average is not None:
                yield Purpose.AVERAGES, {options.precision.master: length}, offload.optimizer
            if not options.gradients_pass_through:
                if options.gradients_keep_memory(self._device):
                    length = options.resting_gradients(length, shard, self._device)
                yield Purpose.GRADIENTS, {options.precision.sums: length}, offload.gradients_at

    def _staging_bytes(self) -> int:
        # Moments with scales are decoded wherever they rest.
        widths = [
            sum(
                len(lengths) > 1 or not choice.is_whole_on(max(lengths.values()), self._device)
                for _, lengths, choice in self._shard_tensors(layout, stays=stays)
            )
            for layout, stays, _ in self._buckets
            if layout.first.requires_grad
        ]
        longest = max(map(self._own_length, self._trained), default=0) * self._options.precision.master.itemsize
        width = max(widths, default=0)
        return stream_bytes(width, longest, self._options.offload.staging_on(self._device)) if width else 0

    def _transient_elements(self) -> int:
        """Return the elements of gradient shards that live from reduction to update: those in flight (without a reduction, of the
        unit in backward), and the root's, which are updated last. Stage 0 completes all at the end."""
        root, *units = [[self._length(layout) for layout in unit if layout.first.requires_grad] for unit in self.units]
        if self._parts == 1:
            return sum(root) + max(map(sum, units), default=0)
        if self._replicated:
            return sum(root) + sum(map(sum, units))
        largest = max((length for unit in units for length in unit), default=0)
        flying = min(sum(map(len, units)), self._options.gradient_slots) * largest
        # The last of the root's shards is in flight itself, so its largest is not counted twice.
        return sum(root) + flying - min(largest, *root) if root else flying


def _sums(pairs: Iterable[tuple[Any, tuple[int, int]]]) -> dict[Any, tuple[int, int]]:
    return {key: (sum(first for first, _ in own), sum(last for _, last in own)) for key, own in grouped(pairs).items()}
