"""Builds the runtime units of a model: layouts, memory, initial values, and parameters as views of flat buffers."""

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice
from math import prod

import torch
from torch import nn

from zeromesh.comm.shm_transport import open_transport
from zeromesh.comm.transport import BufferRequest, DecodingBuffer, GatherBuffer, Transport, choose_transport
from zeromesh.errors import CheckpointError, LayoutError, StorageError, some
from zeromesh.flat.encoded_shard import EncodedShard, EncodedTensor, codec_of, encoded_part
from zeromesh.flat.layout import BucketLayout, ParameterSpec, ShardPiece, StridedRows, UnitLayouts, build_layout
from zeromesh.intervals import ALIGNMENT, Interval, grouped
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Ledger, Purpose, Tier, TieredPart, TieredTensor, Tiers, allocate_lasting
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.options import Placement, ZeroOptions
from zeromesh.units.plan import UnitPlan
from zeromesh.units.unit import Bucket, StateGroup, Unit
from zeromesh.weight_init.weight_sources import ParameterSource

_Runs = list[TieredPart] | None
_Weights = tuple[TieredTensor, TieredTensor | None]
_CPU = torch.device("cpu")
_PLACE = re.compile(r" at 0x\w+|, device='\w+:\d+'")  # what texts of equal values do not have in common on all ranks
_CHUNK = 1 << 20  # the most elements of a parameter that are copied to an offloaded shard at a time
_LEAST_RUN = 1 << 18  # bytes of a run of rows below which neighbouring runs are read together


def require_equal_plans(group: ProcessSet, layouts: Sequence[BucketLayout], options: ZeroOptions) -> None:
    """Raise `LayoutError` on all ranks of `group`, which all call this, naming the options and parameters that differ: such ranks
    would sum gradients of different parameters, or map memory past its end."""
    values: dict[str, object] = {f"option {each.name}": getattr(options, each.name) for each in fields(options)}
    for number, own in enumerate(options.optimizer.groups):
        values |= {f"{name} of parameter group {number}": each for name, each in own.items()}
    for layout in layouts:
        for number, spec in enumerate(slot.spec for slot in layout.slots):
            trained = "trained" if spec.requires_grad else "frozen"
            where = f"number {number} of bucket {layout.name}"
            values[f"parameter {spec.fqn}"] = f"{list(spec.shape)} {spec.dtype} {trained}, {where}"
    advice = "All ranks must build one model, with equal shapes, dtypes and frozen parameters, under the same options"
    group.require_same({n: _PLACE.sub("", str(each)) for n, each in values.items()}, LayoutError, advice=advice)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltUnits:
    """A model's units, and the ranks that share the states of their buckets: of experts, and of all others."""

    units: tuple[Unit, ...]
    releases: bool  # True if units are released after use; otherwise they stay live from one update to the next
    groups: tuple[StateGroup, ...]
    tiers: Tiers


def plan_layouts(
    plan: Sequence[UnitPlan], parts: int, alignment: int = ALIGNMENT, *, experts: int = 1, dividers: int = 1
) -> list[list[BucketLayout]]:
    """Return the layouts of each unit's buckets over `parts` ranks, of which `experts` neighbours have different experts, and each
    of which shares its shard with `dividers` that divide its states."""

    def build(name: str, specs: Sequence[ParameterSpec]) -> BucketLayout:
        return build_layout(name, specs, parts // experts if specs[0].in_experts else parts, alignment, dividers)

    return [[build(f"{unit.name}/{n}", specs) for n, specs in enumerate(unit.buckets())] for unit in plan]


def open_tiers(mesh: Mesh, options: ZeroOptions) -> Tiers:
    """Open the memory tiers of this rank. The engine built on them closes them; without an engine, the caller does."""
    files = options.offload.files
    return Tiers(device=mesh.device, ledger=Ledger(), files=replace(files, label=f"{files.label}-rank{mesh.rank}"))


def build_units(
    model: nn.Module, plan: list[UnitPlan], mesh: Mesh, options: ZeroOptions, source: ParameterSource, tiers: Tiers
) -> BuiltUnits:
    """Allocate buffers, fill this rank's shards from `source` bucket by bucket, and turn parameters into views. A rank holds at
    most one parameter beyond its shards at a time. All units are at rest afterwards. Raises `LayoutError` when ranks have different
    plans, or a parameter is wider than its master weight. Raises `StorageError` when memory is short."""
    dividers = options.dividing(mesh.replicate.size)
    layouts = plan_layouts(plan, mesh.shard.size, options.alignment, experts=mesh.experts.size, dividers=dividers)
    flat = [layout for unit in layouts for layout in unit]
    require_equal_plans(mesh.peers, flat, options)
    _require_master_weights([slot.spec for layout in flat for slot in layout.slots if slot.spec.requires_grad], options)
    if options.offload.durable:
        _open_durable(flat, mesh, options, tiers)
    builder = _BucketBuilder(model=model, mesh=mesh, options=options, source=source, tiers=tiers)
    # The source reads ahead while memory is reserved.
    source.expect(builder.reads(flat))
    kind = choose_transport(options.transport, mesh.shard, mesh.device)
    keep = [stays for unit in kept_buckets(layouts, options, mesh.device, kind) for stays in unit]
    stored = [None if kept else builder.runs_in_files(layout) for layout, kept in zip(flat, keep, strict=True)]
    groups, made = list[StateGroup](), dict[str, tuple[StateGroup, GatherBuffer]]()
    for ranks, of_experts in ((mesh.shard, False), (mesh.expert_shard, True)):
        rows = [row for row in zip(flat, keep, stored, strict=True) if row[0].first.in_experts == of_experts]
        if rows or not of_experts:
            groups.append(group := _open_group(ranks, rows, mesh, options, tiers.ledger))
            made |= {layout.name: (group, buffer) for (layout, *_), buffer in zip(rows, group.transport.buffers, strict=True)}
    tiers.ledger.add(Tier.DEVICE, Purpose.COMMUNICATORS, mesh.communicator_bytes)
    built = (builder.build(*made[layout.name], layout, runs) for layout, runs in zip(flat, stored, strict=True))
    units, fetched = list[Unit](), dict[str, list[Bucket]]()
    for number, (unit_plan, unit_layouts) in enumerate(zip(plan, layouts, strict=True)):
        buckets = islice(built, len(unit_layouts))
        apart = grouped((fetched_module(each.layout, options, mesh.device), each) for each in buckets)
        module, gathered = model.get_submodule(unit_plan.module), apart.pop("", [])
        units.append(Unit(number, unit_plan.name, module, gathered, tiers.ledger))
        fetched |= apart
    for name, gathered in fetched.items():
        units.append(unit := Unit(len(units), name, model.get_submodule(name), gathered, tiers.ledger))
        unit.is_fetched = True
    alone = all(each.transport.name == "local" for each in groups) and all(keep)
    releases = options.placements.parameters is Placement.SHARDED and not alone
    releases = releases or any(layout.first.codec is not None for layout in flat)
    return BuiltUnits(units=tuple(units), releases=releases, groups=tuple(groups), tiers=tiers)


def _open_group(
    ranks: ProcessSet, rows: Sequence[tuple[BucketLayout, bool, _Runs]], mesh: Mesh, options: ZeroOptions, usage: Ledger
) -> StateGroup:
    """Allocate the buffers of buckets, each with its layout, True if it stays gathered, and the runs of files that it is in."""
    kind = choose_transport(options.transport, ranks, mesh.device)
    trained = [layout for layout, *_ in rows if layout.first.requires_grad]
    ring = options.gradient_slots, slot_bytes(trained, options, mesh.device)
    moved = [layout.first.dtype if layout.first.codec is None else torch.uint8 for layout, *_ in rows]
    leads = [_page_offset(dtype, runs) for dtype, (*_, runs) in zip(moved, rows, strict=True)]
    if options.offload.in_place or options.weights is not None:
        leads = ranks.gather_integers(leads)[0]  # Ranks may share the buffers, which need one offset.
    replicated = options.placements.optimizer is Placement.REPLICATED
    requests = [
        BufferRequest(
            name=layout.name,
            padded=layout.travelling_nbytes(1 if replicated else ranks.size) // dtype.itemsize,
            dtype=dtype,
            persistent=kept,
            lead=lead,
        )
        for (layout, kept, _), dtype, lead in zip(rows, moved, leads, strict=True)
    ]
    # If every rank updates all elements, parameters are never communicated, and gradients are all-reduced.
    transport = open_transport("local" if replicated else kind, ranks, mesh.device, requests, *ring)
    reduction = open_transport(kind, ranks, mesh.device, [], *ring) if replicated else transport
    kept_bytes = sum(buffer.full.nbytes for buffer in transport.buffers if buffer.persistent)
    usage.add(Tier.DEVICE, Purpose.PARAMETERS, int(kept_bytes * transport.share))
    usage.add(Tier.DEVICE, Purpose.GRADIENT_BUCKETS, ring_bytes(reduction.name, *ring))
    return StateGroup(ranks, mesh.replicate, transport, reduction, ring[1])


def _open_durable(layouts: Sequence[BucketLayout], mesh: Mesh, options: ZeroOptions, tiers: Tiers) -> None:
    """Open the files in which this rank's states outlive it. These come from the newest step that all ranks have committed, if that
    is newer than `tiers.checkpoint`. Raises `StorageError`, or `CheckpointError` if neither is whole."""
    trained = [each for each in layouts if each.first.requires_grad]
    slots = [(one.parts, slot.spec.name, slot.spec.region, slot.where) for one in trained for slot in one.slots]
    precision, optimizer = options.precision, options.optimizer
    dtypes = precision.master, precision.sums, precision.compensated, optimizer.states
    stage = options.stage, options.replicas
    kinds = optimizer.name, bool(optimizer.momentum), options.average is not None, *stage, mesh.shape
    files = tiers.open_durable(hashlib.blake2b(f"{slots} {dtypes} {kinds}".encode(), digest_size=5).hexdigest())
    own = {(each["generation"], each["number"], each["step"]): each for each in files.records}
    there = [files.other_step, [*map(str, files.others)]]
    rows = mesh.world.gather_json([secrets.token_hex(4), [*own], *there], "states on files")
    known = [{tuple(each) for each in records} for _, records, *_ in rows]
    common = max(set.intersection(*known), key=lambda each: each[1], default=None)
    files.generation, newest, problem = rows[0][0], max(tiers.checkpoint, 0), ""
    if common is not None and common[2] > newest:
        try:
            files.resume(own[common])
        except StorageError as error:
            problem = str(error)
    elif common is None and any(each[2] > newest + 1 for each in chain.from_iterable(known)):
        problem = f"not all ranks have committed a step that some have ({files.paths[0]})"
    problems = [each for each in mesh.world.gather_json(problem, "states on files") if each]
    if problems and tiers.checkpoint < 0:
        raise CheckpointError(f"{problems[0]}. There is no checkpoint; remove the files to begin the run anew")
    if problems or files.resumed is None:
        files.clear()
    others, elsewhere = [path for *_, paths in rows for path in paths], max(row[2] for row in rows)
    files.notes = [f"WARNING: {each}; the checkpoint of step {newest} is used" for each in problems[:1]]
    text = f"{some(others)}: of another layout (ranks, mesh, stage, dtypes or optimizer)"
    if elsewhere > (newest if files.resumed is None else files.resumed["step"]):
        text += f", which alone reads its states of step {elsewhere}: to keep these, start the run as it was, and save a checkpoint"
        if tiers.checkpoint < 0 and files.resumed is None:
            raise CheckpointError(f"{text}. There is none now; remove the files to begin the run anew")
    files.notes += [f"WARNING: {text}; kept until the run is over"] if others else []


def _require_master_weights(specs: Sequence[ParameterSpec], options: ZeroOptions) -> None:
    master = options.precision.master
    for spec in specs:
        if not spec.dtype.is_floating_point:
            cure = "make it a real parameter with a last dimension of 2, and use torch.view_as_complex in forward"
            raise LayoutError(f"{spec.fqn} is {spec.dtype}, and master weights are real numbers; {cure}")
        if spec.dtype.itemsize > master.itemsize:
            why = f"{spec.fqn} is {spec.dtype}, wider than precision.master {master}, which would round it"
            raise LayoutError(f"{why}; convert the parameter, or set precision.master and precision.reduce to its dtype")


def ring_bytes(transport: str, slots: int, nbytes: int) -> int:
    """Return the bytes of `slots` gradient slots of `nbytes` each; gloo needs as many again to receive into."""
    return {"local": 0, "gloo": 2}.get(transport, 1) * slots * nbytes


def slot_bytes(trained: Sequence[BucketLayout], options: ZeroOptions, device: torch.device) -> int:
    """Return the bytes of one gradient slot: the largest bucket in the dtype of the transfer."""
    wire_dtype = partial(options.wire_dtype, on_device=is_accelerator(device))
    return max((each.padded * wire_dtype(each.first.dtype).itemsize for each in trained), default=0)


def kept_buckets(units: UnitLayouts, options: ZeroOptions, device: torch.device, kind: str) -> list[list[bool]]:
    """Return for each bucket of each unit, the root first, whether its gathered parameters are kept between uses. With the budget
    `auto`, a single rank keeps all, and ranks that share pages keep the root and units that rest in the gathered dtype. A single
    rank always keeps buckets whose shards are themselves the parameters."""
    away, budget = options.offload.parameters.leaves_device(device), options.gathered_budget
    fetched = partial(fetched_module, options=options, device=device)
    # A rank may be the only one with its experts.
    alone = [[not away and (kind == "local" or (each.first.in_experts and each.parts == 1)) for each in unit] for unit in units]
    if options.placements.parameters is Placement.REPLICATED:
        return [[True] * len(unit) for unit in units]
    at_rest = [[rests_as_gathered(each, options) for each in unit] for unit in units]
    if not isinstance(budget, int):
        shared = [kind == "shared" and not away and (number == 0 or all(unit)) for number, unit in enumerate(at_rest)]
        return [[kept or each for each in unit] for unit, kept in zip(alone, shared, strict=True)]
    kept = [[each and rests for each, rests in zip(*unit, strict=True)] for unit in zip(alone, at_rest, strict=True)]
    # A unit near the end of forward comes first in backward: keeping it saves a gather soon. The root is always last.
    for number in [*range(len(units) - 1, 0, -1), 0]:
        pairs = list(zip(units[number], kept[number], strict=True))
        size = sum(each.travelling_nbytes(each.parts) for each, stays in pairs if not (stays or fetched(each)))
        if size <= budget:
            budget -= size
            kept[number] = [stays or not fetched(each) for each, stays in pairs]
    return kept


def fetched_module(layout: BucketLayout, options: ZeroOptions, device: torch.device) -> str:
    """Return the module of experts that are brought when tokens have chosen them, and not gathered with their block: frozen ones
    that rest encoded or away from `device`, and of which each rank has whole ones. Empty for all other buckets."""
    whole = layout.parts == 1 or options.placements.optimizer is Placement.REPLICATED
    away = options.offload.parameters.leaves_device(device)
    return layout.first.experts if whole and (away or layout.first.codec is not None) else ""


def goes_ahead(unit: Sequence[BucketLayout], options: ZeroOptions) -> bool:
    """Return True if a unit may be gathered ahead of its use. Where weights are encoded, memory is what a run lacks: only the bytes
    of encoded units go ahead, and not an embedding or a head, which have many times as many."""
    return options.weights is None or any(layout.first.codec is not None for layout in unit)


def rests_as_gathered(layout: BucketLayout, options: ZeroOptions) -> bool:
    """Return True if the shard of a bucket is stored in the dtype of the gather, and can be a part of the gathered buffer."""
    spec = layout.first
    trained = spec.requires_grad and spec.dtype.is_floating_point
    alike = spec.dtype == options.precision.master and not options.offload.durable
    return not trained or alike or layout.dividers > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _BucketBuilder:
    model: nn.Module
    mesh: Mesh
    options: ZeroOptions
    source: ParameterSource
    tiers: Tiers

    def build(self, group: StateGroup, gathered: GatherBuffer, layout: BucketLayout, stored: _Runs) -> Bucket:
        """Build a bucket, whose shard stays in the runs `stored` of files if there are any."""
        if layout.first.codec is None:
            buffer, weights = gathered, self._read_weights(layout, gathered, stored)
        else:
            buffer, weights = self._encode_weights(group.transport, layout, gathered, stored)
        for slot in layout.slots:
            self.source.release(slot.spec.name)
        parameters = [self.model.get_parameter(slot.spec.fqn) for slot in layout.slots]
        for parameter in parameters:
            _move_parameter(parameter, self.mesh.device)
        bucket = Bucket(layout, group, parameters, buffer, self._intervals(layout)[0], *weights)
        bucket.share_copy()()
        buffer.end_write()
        bucket.hide_values()
        if bucket.trainable:
            _allocate_gradients(bucket, self.options, self.tiers)
        return bucket

    def _intervals(self, layout: BucketLayout) -> tuple[Interval, Interval]:
        """Return the elements whose parameters this rank holds, and those of them whose states it has."""
        whole = self.options.placements.optimizer is Placement.REPLICATED
        ranks = self.mesh.expert_shard if layout.first.in_experts else self.mesh.shard
        held = Interval(start=0, end=layout.padded) if whole else layout.shard(ranks.index)
        return held, layout.part(held, self.mesh.replicate.index) if layout.first.requires_grad else held

    def _read_weights(self, layout: BucketLayout, gathered: GatherBuffer, stored: _Runs) -> _Weights:
        """Return the master weights of a bucket, and the copy that is gathered in their place, if it is not they themselves."""
        (held, interval), spec, options = self._intervals(layout), layout.first, self.options
        if stored is not None:
            return self.tiers.stored(interval.length, spec.dtype, stored, Purpose.PARAMETERS), None
        copy = None
        if rests_as_gathered(layout, options) and interval == held:  # No copy: master weights themselves are gathered.
            purpose = Purpose.MASTER if spec.requires_grad else Purpose.PARAMETERS
            master = self._allocate_gathered(layout, gathered, interval.length, spec.dtype, purpose)
        else:
            what, dtype = f"master weights of {layout.name}", options.precision.master
            master = self.tiers.allocate(interval.length, dtype, options.offload.optimizer, Purpose.MASTER, what)
            if interval != held or gathered.persistent or master.whole(self.tiers.device) is None:
                copy = self._allocate_gathered(layout, gathered, held.length, spec.dtype, Purpose.PARAMETERS)
        # What the ranks of a host share is brought from the buffers that they had before.
        brought = self.tiers.warm and gathered.persistent and copy is None
        for piece in () if brought or self.tiers.keeps(master) else layout.pieces(interval):
            _fill_piece(master, piece, self.source)
        if copy is not None:
            own = interval.after(held.start)
            copy.slice(own.start, own.end).copy_from(master)
        return master, copy

    def _allocate_gathered(
        self, layout: BucketLayout, gathered: GatherBuffer, numel: int, dtype: torch.dtype, purpose: Purpose
    ) -> TieredTensor:
        """Return memory for the shard that is gathered: its part of the buffer where that is kept, else a tensor on its tier."""
        if gathered.persistent:
            gathered.begin_write()
            return TieredTensor.of(gathered.own())
        return self.tiers.allocate(numel, dtype, self.options.offload.parameters, purpose, f"weights of {layout.name}")

    def _encode_weights(
        self, transport: Transport, layout: BucketLayout, gathered: GatherBuffer, stored: _Runs
    ) -> tuple[GatherBuffer, _Weights]:
        """Return the buffer that decodes a bucket, and this rank's shard of it, encoded from the source one parameter at a time."""
        (_, interval), dtype, device = self._intervals(layout), layout.first.dtype, self.mesh.device
        nbytes = layout.rest_nbytes(interval.length)
        if stored is not None:
            encoded = self.tiers.stored(nbytes, torch.uint8, stored, Purpose.PARAMETERS)
        else:
            encoded = self._allocate_gathered(layout, gathered, nbytes, torch.uint8, Purpose.PARAMETERS)
        whole = interval.length == layout.padded
        parts = [interval] if whole else [layout.shard(index) for index in range(layout.parts)]
        tables: list[torch.Tensor] = []
        shard = EncodedShard(codec=codec_of(layout), length=interval.length, pieces=())
        pieces = {piece.spec.fqn: piece for piece in layout.pieces(interval)}
        codec = self.options.weights.codec if self.options.weights is not None else codec_of(layout)
        for slot in layout.slots:
            origin, name = self.source.origin(slot.spec.name)
            if stored is not None and (place := origin.encoded_place(name, codec, slot.spec.dtype)) is not None:
                tables.append(place.tables.to(device))
                continue
            parameter = encoded_part(slot.spec, codec, self.source.read, origin.encoded(name, codec, slot.spec.dtype))
            tables.append(parameter.tables.to(device))
            known = slot.spec.fqn not in pieces or self.tiers.keeps(encoded)
            for begin, data in () if known else shard.stored(pieces[slot.spec.fqn], parameter):
                encoded.write(begin, data).wait()
        shards = [EncodedShard.of(layout, each, tables) for each in parts]
        buffer = DecodingBuffer(gathered, shards, dtype, transport.spare_pages)
        return buffer, (EncodedTensor(dtype, EncodedShard.of(layout, interval, tables), encoded), None)

    def runs_in_files(self, layout: BucketLayout) -> _Runs:
        """Return the runs of a bucket in the files of the source, if it can stay there; None if it must be copied."""
        offload, first = self.options.offload, layout.first
        whole = offload.parameters.tier == "file" and offload.parameters.fraction >= 1
        if whole and first.codec is not None and not offload.files.checksums:
            return self._encoded_runs(layout)
        if not (offload.in_place and whole) or first.requires_grad or first.codec is not None:
            return None
        runs = []
        for piece in layout.pieces(self._intervals(layout)[1]):
            if _short_rows(piece) is not None:
                return None
            origin, name = self.source.origin(piece.spec.name)
            for _, part, start in _selections(piece):
                if (place := origin.file_position(name, part.start, first.dtype)) is None:
                    return None
                slot, begin = self.tiers.file().open_stored(place[0]), place[1] // first.dtype.itemsize
                runs.append(TieredPart(start=start, end=start + part.length, tier=Tier.FILE, slot=slot, first=begin))
        return runs

    def _encoded_runs(self, layout: BucketLayout) -> _Runs:
        places, (_, interval) = {}, self._intervals(layout)
        for slot in layout.slots:
            origin, name = self.source.origin(slot.spec.name)
            if (place := origin.encoded_place(name, codec_of(layout), slot.spec.dtype)) is None or not slot.spec.region.is_whole:
                return None
            places[slot.spec.fqn] = place
        shard, runs = EncodedShard(codec=codec_of(layout), length=interval.length, pieces=()), []
        for piece in layout.pieces(interval):
            place = places[piece.spec.fqn]
            for (start, part), (path, begin) in zip(shard.ranges(piece), (place.codes, place.scales), strict=True):
                file, end = self.tiers.file().open_stored(path), start + part.length
                runs.append(TieredPart(start=start, end=end, tier=Tier.FILE, slot=file, first=begin + part.start))
        return sorted(runs, key=lambda run: run.start)

    def reads(self, layouts: Sequence[BucketLayout]) -> Iterator[tuple[str, int, int]]:
        """Yield the parameter ranges that this rank will read, in order, without those that may stay in their files."""
        if self.options.offload.in_place and self.options.offload.parameters.tier == "file":
            return
        for layout in layouts:
            if layout.first.codec is not None:  # Every rank reads these whole.
                yield from ((slot.spec.name, 0, prod(slot.spec.region.shape)) for slot in layout.slots)
                continue
            for piece in layout.pieces(self._intervals(layout)[1]):
                for rows, interval, _ in _selections(piece):
                    hull = rows.hull(interval)
                    yield piece.spec.name, hull.start, hull.end


def _page_offset(dtype: torch.dtype, stored: _Runs) -> int:
    """Return the bytes from the start of a page at which a bucket's memory aligns with most of its blocks in the files."""
    alike = Counter({0: 0})
    for run in stored or ():
        alike[(run.first - run.start) * dtype.itemsize % BLOCK] += run.end - run.start
    return max(alike, key=alike.__getitem__)


def _selections(piece: ShardPiece) -> Iterator[tuple[StridedRows, Interval, int]]:
    """Yield the selections of a piece: columns of a parameter's rows, elements of these, and their position in the shard."""
    region, part, start = piece.spec.region, piece.in_parameter, piece.in_shard.start
    if (rows := _short_rows(piece)) is not None:
        yield rows, part, start
        return
    whole = StridedRows.whole(prod(region.shape))
    for run in region.runs(part):
        yield whole, Interval(start=run.logical, end=run.logical + run.length), start + run.local - part.start


def _short_rows(piece: ShardPiece) -> StridedRows | None:
    """Return the rows of a piece that consists of many short runs; None for few or long runs."""
    rows = piece.spec.region.rows()
    return rows if rows and rows.count > 1 and rows.local_width * piece.spec.dtype.itemsize < _LEAST_RUN else None


def _fill_piece(master: TieredTensor, piece: ShardPiece, source: ParameterSource) -> None:
    origin, name = source.origin(piece.spec.name)
    for rows, interval, start in _selections(piece):
        if (memory := master.view(start, start + interval.length, _CPU)) is not None:
            origin.fill(name, rows, interval, memory)
            continue
        for begin in range(0, interval.length, _CHUNK):
            part = Interval(start=interval.start + begin, end=min(interval.start + begin + _CHUNK, interval.end))
            passing = torch.empty(part.length, dtype=master.dtype)
            origin.fill(name, rows, part, passing)
            master.write(start + begin, passing).wait()


def make_trainable(bucket: Bucket, options: ZeroOptions, tiers: Tiers) -> None:
    """Give a frozen bucket master weights, initialized with its weights, and memory for gradients; raises as `build_units` does."""
    _require_master_weights([slot.spec for slot in bucket.layout.slots], options)
    dtype = options.precision.master
    bucket.set_trainable(True)
    if bucket.master.dtype != dtype or bucket.divided or options.offload.durable:
        what = f"master weights of {bucket.name}"
        bucket.copy = bucket.master
        bucket.master = tiers.allocate(bucket.length, dtype, options.offload.optimizer, Purpose.MASTER, what)
        if not tiers.keeps(bucket.master) and (own := bucket.own_copy) is not None:
            bucket.master.copy_from(own)
    _allocate_gradients(bucket, options, tiers)


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Move the model's parameter object to `device`, so that its hooks and lists that hold it stay valid."""
    placeholder = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    if not torch._has_compatible_shallow_copy_type(parameter, placeholder):
        # The data of a meta parameter cannot be replaced, nor on some devices that of a CPU one; tensors can be swapped.
        replacement = nn.Parameter(placeholder, requires_grad=parameter.requires_grad)
        replacement.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, replacement)  # type: ignore[no-untyped-call]
    elif parameter.device.type != device.type:
        parameter.data = placeholder


def _allocate_gradients(bucket: Bucket, options: ZeroOptions, tiers: Tiers) -> None:
    dtype, padded = options.precision.sums, bucket.layout.padded
    if options.gradients_keep_memory(tiers.device):
        what = f"gradients of {bucket.name}"
        length = options.resting_gradients(bucket.length, bucket.held.length, tiers.device)
        rest = tiers.allocate(length, dtype, options.offload.gradients_at, Purpose.GRADIENTS, what)
        bucket.grad = rest.whole(tiers.device)
        bucket.grad_rest = rest if bucket.grad is None else None
    if options.sums_before_reducing and bucket.layout.parts > 1:
        bucket.partial = allocate_lasting(padded, dtype, tiers.device)
        tiers.ledger.add(Tier.DEVICE, Purpose.PARTIAL_GRADIENTS, padded * dtype.itemsize)
