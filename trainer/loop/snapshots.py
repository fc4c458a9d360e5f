"""Copies of a rank's states in memory that outlives it, every few steps: for states on a device, or that no journal guards, and
for hosts that may be lost.

    image    the states of one rank of some layout, in the order in which a checkpoint would be read into it
    slots    two for images, written in turn between two steps; one counts once its record is there, and then its number

So a rank has whole images at any instant. Ranks of the layout that wrote them go on each from its own, and ranks of another one
read what they need from those that have them, as from a checkpoint of which each host has a part."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zeromesh.checkpoint.io.file_slices import TensorShard, cut_at_grid
from zeromesh.checkpoint.io.format import DTYPE_NAMES, DTYPES, ChecksumPiece, FileRecord, Manifest, TensorSpec
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.loader import PartsReader, fill_shards
from zeromesh.environment import number_of_start
from zeromesh.errors import CheckpointError, LayoutError
from zeromesh.flat.redistribute import one_after_another, redistribute
from zeromesh.intervals import Interval, grouped, round_up
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier, available_bytes
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.memory.state_memory import StateMemory
from zeromesh.trainer.checkpoints.manager import load_engine
from zeromesh.trainer.checkpoints.trainer_state import TrainerState
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import MODEL, require_storable

_COST = 0.02  # the part of the time of training that copies take at most, where their steps are not given
ROOM = 0.5  # the part of a host's available memory that slots take at most
_ALIGNMENT = 64
_SENT = 32 << 20  # bytes that a rank sends to another host at once
_MOST_RUNS = 1 << 17  # of an image that ranks of another layout can read


class Image(NamedTuple):
    """The states of one rank. `facts`: `step`, `start` and `number` of the snapshot, `rank` and `world` of the layout `mesh`,
    `nbytes`, the `rows` of tensors, and the trainer's `state`."""

    facts: dict[str, Any]
    data: Tensor

    @property
    def snapshot(self) -> tuple[int, ...]:
        return tuple(self.facts[name] for name in ("step", "start", "number", "world"))


class Slots:
    """Two slots in `memory`, each for the images of some ranks one after another."""

    def __init__(self, memory: StateMemory, key: int) -> None:
        self._memory, self._key, self.slots = memory, key, list[Tensor]()
        newest, _ = memory.position(key) or (0, 0)
        self._records = {number: memory.record(number) for number in (newest, newest - 1)}

    def open(self, nbytes: int, *, warm: bool) -> None:
        """Map slots of `nbytes` bytes; without `warm` what is there does not count any more."""
        self._memory.warm = warm
        with self._memory.allocating():
            self.slots = [self._memory.allocate(max(1, nbytes)) for _ in range(2)]
        if not warm:
            self._memory.begin(0, self._key)

    def images(self) -> list[Image]:
        """Return the images that count."""
        records, found = {number: each["images"] for number, each in self._records.items() if each}, []
        if records:
            self.open(max(sum(each["nbytes"] for each in images) for images in records.values()), warm=True)
        for number, images in records.items():
            ends = accumulate(each["nbytes"] for each in images)
            slot = self.slots[number % 2]
            found += [Image(each, slot[end - each["nbytes"] : end]) for each, end in zip(images, ends, strict=True)]
        return found

    def commit(self, number: int, images: Sequence[dict[str, Any]]) -> None:
        self._memory.write_record(number, {"images": images})
        self._memory.begin(number, self._key)  # Also after one that was too large.

    def clear(self) -> None:
        self.slots.clear()
        self._memory.clear()


class Snapshots:
    """The snapshots of a rank in `memory`, every `every_steps` steps (auto: as copies take 2 % of the time). `others` is memory for
    those of ranks of another host; None: there are no copies. `key` is that of the run, whatever its layout. `frozen`: weights that
    are not trained are copied too, since nothing else has their values. All ranks make the same calls."""

    def __init__(
        self,
        memory: StateMemory,
        others: StateMemory | None,
        mesh: Mesh,
        key: int,
        every_steps: int | Literal["auto"],
        *,
        frozen: bool,
    ) -> None:
        self._mesh, self._frozen, self._every_steps = mesh, frozen, every_steps
        self._own, self._others = Slots(memory, key), None if others is None else Slots(others, key)
        self._sources = _sources(mesh)
        self._since = (0, 0.0)  # The step after which training has gone on, and when.
        self._due = 0  # The step after which the next one is taken.
        self._lengths: list[int] = []  # of the images of all ranks
        both = filter(None, (self._own, self._others)) if number_of_start() else ()  # In a first start there are none.
        there = [image for slots in both for image in slots.images()]
        holders: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        own_rows = [[image.snapshot, image.facts["rank"]] for image in there]
        for holder, rows in enumerate(mesh.world.gather_json(own_rows, "snapshots")):
            for snapshot, rank in rows:
                holders[tuple(snapshot)].setdefault(rank, holder)
        best = max((each for each, found in holders.items() if len(found) == each[-1]), default=None)
        images = {image.facts["rank"]: image for image in there if image.snapshot == best}
        own = images.get(mesh.rank)
        alike = all(mesh.world.gather_json(own is not None and own.facts["mesh"] == str(mesh.shape), "layouts of snapshots"))
        self._image = own if alike else None  # where this layout has written it
        self._served = [each for rank, each in images.items() if best and holders[best][rank] == mesh.rank]
        self._start, self.number = best[1:3] if best else (0, 0)  # The start in which slots were new, and the latest one since.
        states = [each.facts["state"] for each in self._served]
        known = [each for row in mesh.world.gather_json(states, "the trainer's state") for each in row]
        trained = {name: row for each in known for name, row in each["trained"].items()}
        self.state = TrainerState.from_json({**known[0], "trained": trained}, "a snapshot") if known else None
        """The state of the trainer in the newest that is whole; None: there is none."""
        if self.state is None:  # What others have left is of no use to anybody.
            self.clear()

    def load(self, engine: ZeroEngine, state: TrainerState) -> bool:
        """Fill a new engine from the newest one, of this `state`. Returns False, on all ranks, if it lacks states of the model."""
        before = replace(state, **engine.progress(own=True))
        try:
            load_engine(None, engine, state)
            loaded = self._fill(engine)
        except (CheckpointError, LayoutError):
            loaded = False
        if not loaded:
            self._image = None  # Nobody is to go on from it.
            load_engine(None, engine, before)
        return loaded

    def _fits(self, shards: Sequence[TensorShard]) -> bool:
        """Return True if the images have the tensors of all ranks."""
        fits = self._image is None or self._image.facts["rows"] == self._rows(shards)
        return all(self._mesh.world.gather_json(fits, "tensors of snapshots"))

    def _fill(self, engine: ZeroEngine) -> bool:
        shards = self._shards(engine)
        if not self._fits(shards):
            return False
        reader = _reader(self._served, self._mesh) if self._image is None else None
        with engine.loading():
            if self._image is not None:
                for shard, part in _parts(shards, self._image.data):
                    shard.values.copy_from(part)
            if reader is not None:
                specs = engine.checkpoint_state.tensors(reading=True)
                known = [each for each in specs if reader.tensor(each.kind, each.name) is not None]
                fill_shards(self._mesh, reader, known, shards)
        return True

    def begin(self, engine: ZeroEngine, step: int) -> bool:
        """Expect that training goes on after `step`. Returns False, on all ranks, where a host has no room for slots."""
        require_storable(engine.model, "set recovery.memory: off")
        shards, hosts = self._shards(engine), [each.host for each in self._mesh.locations]
        self._lengths = [row[0] for row in self._mesh.world.gather_integers([_nbytes(shards)])]
        sizes = {self._own: self._lengths[self._mesh.rank]}
        if self._others is not None:
            sizes[self._others] = sum(self._lengths[each] for each in self._sources[self._mesh.rank])
        # Also one that is older than what training goes on from counts until it is replaced: other ranks may be lost soon.
        kept = self._image is not None and self._fits(shards)
        if not kept:
            self.clear()
            self._start, self.number = number_of_start(), 0
            wanted = 2 * sum(sizes.values()) * hosts.count(hosts[self._mesh.rank])
            if not all(self._mesh.world.gather_json(wanted <= ROOM * available_bytes(), "room for snapshots")):
                return False
        for slots, nbytes in sizes.items():
            if not slots.slots:
                slots.open(nbytes, warm=False)
        where = Tier.HOST if is_accelerator(self._mesh.device) else Tier.DEVICE
        known = engine.ledger.by_purpose(where).get(Purpose.SNAPSHOTS, 0)
        engine.ledger.add(where, Purpose.SNAPSHOTS, 2 * sum(sizes.values()) - known)
        self._since = (step, time.perf_counter())
        newest = self.state.step if kept and self.state is not None else 0
        self._due = max(step, newest + (0 if self._every_steps == "auto" else self._every_steps - 1)) + 1
        return True

    def after_step(self, step: int, engine: ZeroEngine, state: Callable[[], TrainerState]) -> None:
        """Copy all states, if a snapshot is due after this step. `state` returns that of the trainer on this rank."""
        if not self._own.slots or step < self._due:
            return
        (before, since), began, mesh, shards = self._since, time.perf_counter(), self._mesh, self._shards(engine)
        # Parameters that are trained since then have more states than there is room for.
        changed = mesh.world.gather_json(_nbytes(shards) != self._lengths[mesh.rank], "sizes of snapshots")
        if any(changed) and not self.begin(engine, step):
            return
        number = self.number = self.number + 1
        slot = self._own.slots[number % 2]
        for shard, part in _parts(shards, slot):
            shard.values.copy_to(part)
        facts: dict[str, Any] = {"step": step, "start": self._start, "number": number, "rank": mesh.rank}
        facts |= {"world": mesh.world_size, "mesh": str(mesh.shape), "nbytes": self._lengths[mesh.rank]}
        facts |= {"rows": self._rows(shards), "state": json.loads(state().to_json())}
        self._own.commit(number, [facts])
        if self._others is not None and any(self._sources):
            self._copy_to_other_hosts(slot, self._others.slots[number % 2])
            known = mesh.world.gather_json(facts, "images of other hosts")
            self._others.commit(number, [known[each] for each in self._sources[mesh.rank]])
        self._since = (step, time.perf_counter())
        cost = (self._since[1] - began) / _COST * (step - before) / max(began - since, 1e-9)
        costs: list[float] = mesh.world.gather_json(cost, "the cost of snapshots") if self._every_steps == "auto" else []
        self._due = step + (max(1, *map(math.ceil, costs)) if self._every_steps == "auto" else self._every_steps)

    def _copy_to_other_hosts(self, image: Tensor, copies: Tensor) -> None:
        rank = self._mesh.rank
        starts = [0, *accumulate(self._lengths[each] for each in self._sources[rank])]
        for first in range(0, max(self._lengths), _SENT):
            lengths = [max(0, min(length - first, _SENT)) for length in self._lengths]
            before = one_after_another(lengths)
            after = tuple(tuple(before[each][0] for each in sources) for sources in self._sources)
            arrived = redistribute(image[first : first + lengths[rank]], before, after, self._mesh.world, "copies of snapshots")
            parts = torch.split(arrived, [lengths[each] for each in self._sources[rank]])
            for start, part in zip(starts[:-1], parts, strict=True):
                copies[start + first : start + first + part.numel()] = part

    def clear(self) -> None:
        """Give the memory back."""
        self._image = None
        self._served.clear()
        for slots in filter(None, (self._own, self._others)):
            slots.clear()

    def _shards(self, engine: ZeroEngine) -> list[TensorShard]:
        shards = engine.checkpoint_state.shards_to_read()
        return [each for each in shards if self._frozen or each.owner is None or each.spec.kind != MODEL]

    def _rows(self, shards: Sequence[TensorShard]) -> list[list[Any]]:
        """Describe an image's shards: kind, name, dtype, shape, and runs `[first, count]`, null if no other layout reads them."""
        runs: list[Any] = [None] * len(shards)
        if self._others is not None:
            found = [[[run.logical, run.length] for run in each.region.runs(each.interval)] for each in shards]
            runs = found if sum(map(len, found)) <= _MOST_RUNS else runs
        return [
            [each.spec.kind, each.spec.name, DTYPE_NAMES[each.values.dtype], list(each.spec.shape), own]
            for each, own in zip(shards, runs, strict=True)
        ]


def _sources(mesh: Mesh) -> list[list[int]]:
    """Return for each rank those of the host before its own, if there is one, whose images it keeps; all are kept by some rank."""
    hosts = list(grouped((location.host, rank) for rank, location in enumerate(mesh.locations)).values())
    found: list[list[int]] = [[] for _ in mesh.locations]
    for number, here in enumerate(hosts):
        for place, rank in enumerate(hosts[number - 1] if len(hosts) > 1 else ()):
            found[here[place % len(here)]].append(rank)
    return found


def _nbytes(shards: Iterable[TensorShard]) -> int:
    # As elements are read: states in int8 are decoded.
    return sum(round_up(each.values.numel * each.values.dtype.itemsize, _ALIGNMENT) for each in shards)


def _parts(shards: Iterable[TensorShard], image: Tensor) -> Iterator[tuple[TensorShard, Tensor]]:
    """Yield each shard with its part of an image, as elements."""
    at = 0
    for each in shards:
        yield each, image[at : at + each.values.numel * each.values.dtype.itemsize].view(each.values.dtype)
        at += _nbytes([each])


class _Served(CheckpointReader):
    """The part of a checkpoint that the images on this rank are."""

    def __init__(self, manifest: Manifest, data: dict[str, list[tuple[Interval, Tensor]]]) -> None:
        super().__init__(Path("snapshots"), checked=False, manifest=manifest)
        self._data = data

    def stream(self, pieces: Sequence[ChecksumPiece], use: Callable[[ChecksumPiece, Tensor], None]) -> None:
        for each in pieces:
            where, data = next(pair for pair in self._data[each.path] if pair[0].start <= each.begin < pair[0].end)
            use(each, data[each.begin - where.start : each.end - where.start])


def _reader(served: Sequence[Image], mesh: Mesh) -> CheckpointReader:
    """Make one checkpoint of the images on all ranks, of which each serves some. Raises `CheckpointError` if it is not whole."""
    data: dict[str, list[tuple[Interval, Tensor]]] = defaultdict(list)
    for image in served:
        at = 0
        for kind, name, code, _, runs in image.facts["rows"]:
            size = DTYPES[code].itemsize
            for first, length in runs or ():
                where = Interval(start=first * size, end=(first + length) * size)
                data[f"{kind}/{name}"].append((where, image.data[at : at + where.length]))
                at += where.length
            at = round_up(at, _ALIGNMENT)
    own = [[row[:4] for row in image.facts["rows"]] for image in served]
    places = {path: [[where.start, where.end] for where, _ in parts] for path, parts in data.items()}
    tensors: dict[str, TensorSpec] = {}
    extents: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, (described, intervals) in enumerate(mesh.world.gather_json([own, places], "tensors of the snapshots")):
        for kind, name, code, shape in (row for rows_of in described for row in rows_of):
            path = f"{kind}/{name}"
            tensors[path] = TensorSpec(kind=kind, name=name, dtype=DTYPES[code], shape=tuple(shape), path=path)
        for path, found in intervals.items():
            extents[path] += [(begin, end, rank) for begin, end in found]
    pieces: dict[int, dict[str, list[ChecksumPiece]]] = defaultdict(lambda: defaultdict(list))
    for path, found in extents.items():
        done = 0
        for begin, end, rank in sorted(found):  # Replicas have the same bytes, of which the first counts.
            for cut in cut_at_grid(Interval(start=max(begin, done), end=max(end, done))):
                pieces[rank][path].append(ChecksumPiece(path=path, begin=cut.start, end=cut.end, checksum="", rank=rank))
            done = max(done, end)
    parts = []
    for rank in mesh.world.ranks:
        sizes = {path: spec.nbytes for path, spec in tensors.items()}
        files = {path: FileRecord(nbytes=size, pieces=tuple(pieces[rank][path])) for path, size in sizes.items()}
        parts.append((Manifest(step=0, files=files, tensors=tuple(tensors.values())), [rank]))
    return PartsReader(Path("snapshots"), _Served(parts[mesh.rank][0], data), parts, mesh.world)
