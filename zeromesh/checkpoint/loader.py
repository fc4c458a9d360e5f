"""Collective loading of a checkpoint: all ranks choose alike, each verifies what it reads, and any layout is possible. Hosts
without a shared disk have a part each ("Parts, and merging them" in docs/checkpoint-format.md)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io.file_slices import PlacedValues, TensorShard
from zeromesh.checkpoint.io.format import ChecksumPiece, FileRecord, Manifest, TensorSpec
from zeromesh.checkpoint.io.reader import CheckpointReader, copy_file
from zeromesh.checkpoint.store import CheckpointStore, write_directory
from zeromesh.errors import CheckpointError, LayoutError, ZeromeshError, first_lines
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import grouped
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.telemetry.status_board import Activity

_FALLBACKS = {"master": "model", "ema": "model"}
"""The kind of tensor to read where a checkpoint lacks one: absent master weights and averages are equal to the parameters. A
replica that a checkpoint lacks begins with what the first one has of its own."""
_MOST_NAMED = 5  # tensors in an error message


def candidates(mesh: Mesh, store: CheckpointStore) -> list[int]:
    """List the steps of the checkpoints that any rank sees, newest first: a newly joined host may see none. All ranks call it."""
    rows = mesh.world.all_or_raise(f"looking into {store.root}", store.steps, CheckpointError)
    return sorted(set().union(*rows), reverse=True)


def open_checkpoint(mesh: Mesh, directory: Path, source: Path | None = None) -> CheckpointReader:
    """Open the checkpoint that ranks see in a directory, or of which each host has a part; all ranks call it. `source` is where
    the frozen weights it refers to are, if they moved. Raises `CheckpointError` if it is incomplete or ranks see different ones."""
    world, rank = mesh.world, mesh.rank
    reader: CheckpointReader | None = None

    def look() -> str:
        nonlocal reader
        reader = CheckpointReader(directory, parts=True) if directory.is_dir() else None
        if reader is not None and source is not None and not reader.source.is_dir():
            reader.source = source
        return "" if reader is None else f"{reader.manifest.part[1]} {reader.digest}"

    identities = world.all_or_raise(f"opening {directory}", look, CheckpointError, kept=LayoutError)
    holders = grouped((text, other) for other, text in enumerate(identities))
    blind = holders.pop("", [])
    if not holders:
        raise CheckpointError(f"no rank sees {directory}")
    in_parts = bool(blind) or all(not text.startswith("1 ") for text in holders)  # A whole one is the only part.
    if reader is not None and len(holders) == 1 and not in_parts:
        return reader
    leads = reader is not None and holders[identities[rank]][0] == rank
    texts = world.gather_bytes(reader.manifest.to_json() if reader and leads else b"", "manifests of the parts")
    # Leaders are in rank order here and in `holders`, so each manifest is paired with the ranks that see it.
    parts = [formats.parse_manifest(directory / formats.MANIFEST, text) for text in texts if text]
    first_ranks = [ranks[0] for ranks in holders.values()]
    if not in_parts or len({part.part[0] for part in parts}) < len(parts):
        why = f"{directory} is another checkpoint on rank {first_ranks[1]} than on rank {first_ranks[0]}"
        raise CheckpointError(f"{why}; give all hosts the same directory")
    check_parts([(f"{directory} on rank {first}", part) for first, part in zip(first_ranks, parts, strict=True)])
    ordered = sorted(zip(parts, holders.values(), strict=True), key=lambda pair: pair[0].part[0])
    return PartsReader(directory, reader, ordered, world)


def fill_shards(mesh: Mesh, reader: CheckpointReader, tensors: Sequence[TensorSpec], shards: list[TensorShard]) -> None:
    """Fill the ranks' shards of `tensors` with the checkpoint's values. Raises `LayoutError`, with nothing changed, when its
    tensors are not those here; `CheckpointError`, with some shards filled, when some rank found damage."""
    targets: list[PlacedValues] = []

    def compare() -> None:
        problems: list[str] = []
        for spec in tensors:
            if (stored := _stored(reader, spec.kind, spec.name)) is None:
                problems.append(f"{spec.name} has no {spec.kind} in it")
            elif stored.shape != spec.shape:
                problems.append(f"{spec.name} is {list(stored.shape)} in it and {list(spec.shape)} here ({spec.kind})")
        known = {spec.name for spec in tensors} | reader.manifest.aliases.keys()
        extra = {tensor.name for tensor in reader.manifest.tensors} - known
        problems += [f"{name} is in it and not in the model" for name in sorted(extra)]
        if problems:
            shown = "; ".join(first_lines(problems, _MOST_NAMED))
            raise LayoutError(f"{reader.directory} does not fit this model and optimizer: {shown}")
        targets.extend(places_of(reader, shards))

    world = mesh.world
    world.all_or_raise("comparison with the checkpoint", compare, CheckpointError, kept=LayoutError)
    read = partial(reader.read, targets, lambda: mesh.post(Activity.LOAD))
    world.all_or_raise(f"reading {reader.directory}", read, CheckpointError, kept=LayoutError)


def places_of(reader: CheckpointReader, shards: Sequence[TensorShard]) -> Iterator[PlacedValues]:
    """Yield the file positions of shards' elements: one object per shard of columns of a tensor, else one per contiguous run."""
    for shard in shards:
        if (stored := _stored(reader, shard.spec.kind, shard.spec.name)) is None:
            raise LayoutError(f"{reader.directory} has no {shard.spec.kind} of {shard.spec.name}")
        rows = StridedRows.whole(stored.numel) if shard.region.is_whole else shard.region.rows()
        if rows is not None:
            yield PlacedValues(tensor=stored, rows=rows, values=shard.values, first=shard.interval.start)
        else:
            yield from PlacedValues.runs(stored, shard)


def _stored(reader: CheckpointReader, kind: str, name: str) -> TensorSpec | None:
    found, other = reader.tensor(kind, name), _FALLBACKS.get(kind, kind.partition(formats.REPLICA)[0])
    return found if found is not None or other == kind else reader.tensor(other, name)


def open_parts(directories: Sequence[Path]) -> list[CheckpointReader]:
    """Open the parts of one checkpoint, of which each directory has one; returns the readers in the order of parts. Raises
    `CheckpointError` when the parts are of several checkpoints, or one is missing or doubled."""
    readers = [CheckpointReader(directory, parts=True) for directory in directories]
    for reader in readers:
        if reader.manifest.part[1] == 1:
            raise CheckpointError(f"{reader.directory} is a whole checkpoint, not a part of one; nothing to merge")
    check_parts([(str(reader.directory), reader.manifest) for reader in readers])
    return sorted(readers, key=lambda reader: reader.manifest.part[0])


def check_parts(parts: Sequence[tuple[str, Manifest]]) -> None:
    """Raise `CheckpointError` unless these parts, each with a name for messages, are all parts of one checkpoint."""
    name, first = parts[0]

    def facts(part: Manifest, other: Manifest) -> dict[str, Any]:
        found: dict[str, Any] = {"step": part.step, "number of parts": part.part[1]}
        found["the sizes of files"] = {path: each.nbytes for path, each in part.files.items() if path in other.files}
        return found | {"tensors": set(part.tensors), "aliases": dict(part.aliases), "layout": dict(part.layout)}

    for other, manifest in parts[1:]:
        theirs = facts(manifest, first)
        if differ := ", ".join(what for what, fact in facts(first, manifest).items() if fact != theirs[what]):
            raise CheckpointError(f"{name} and {other} are not parts of one checkpoint: they differ in {differ}")
    holders, count = grouped((manifest.part[0], name) for name, manifest in parts), first.part[1]
    for index, names in holders.items():
        if len(names) > 1:
            raise CheckpointError(f"{names[0]} and {names[1]} are both part {index + 1} of {count}")
    if absent := [str(index + 1) for index in range(count) if index not in holders]:
        why = f"of the checkpoint in {name}, part {', '.join(absent[:5])} of {count} is missing"
        raise CheckpointError(f"{why}; give the directories of all hosts")


def merged_manifest(parts: Sequence[Manifest]) -> Manifest:
    """Merge the manifests of all parts. Raises `CheckpointError` if pieces overlap or leave a gap."""
    files = {}
    for path in {path: None for part in parts for path in part.files}:
        records = [part.files[path] for part in parts if path in part.files]
        pieces = sorted((piece for each in records for piece in each.pieces), key=lambda piece: piece.begin)
        nbytes, end = records[0].nbytes, 0
        for begin, stop in [*((piece.begin, piece.end) for piece in pieces), (nbytes, nbytes)]:
            if begin > end:
                raise CheckpointError(f"{path}: bytes [{end:,}, {begin:,}) are in no part: an unfinished checkpoint")
            if begin < end:
                raise CheckpointError(f"{path}: bytes [{begin:,}, {end:,}) are in two parts")
            end = stop
        files[path] = FileRecord(nbytes=nbytes, pieces=tuple(pieces))
    return replace(parts[0], files=files, part=(0, 1))


def merge(parts: Sequence[CheckpointReader], out: Path, on_progress: Callable[[int], None]) -> Manifest:
    """Merge the parts of a checkpoint into the new directory `out`; `on_progress` receives the bytes of each piece. Raises
    `CheckpointError` when pieces are damaged, overlap or leave a gap; `ConfigError` or `StorageError` as `write_directory` does."""
    whole = merged_manifest([part.manifest for part in parts])
    with write_directory(out, whole.nbytes) as directory:
        for path in whole.files:
            if not whole.is_elsewhere(path):
                copy_file(parts, path, directory, on_progress)
        CheckpointStore.put_manifest(directory, whole)
    return whole


class PartsReader(CheckpointReader):
    """Reads a checkpoint from its parts; all ranks make one and call its methods alike. `own` reads the part that this rank sees,
    or is None; `parts` are in order, each with the ranks that see it. Of the ranks that see a piece, one reads and verifies it and
    sends it to all ranks, in rounds of one piece from each. Raises `CheckpointError` when the parts do not make a whole."""

    def __init__(
        self, folder: Path, own: CheckpointReader | None, parts: Sequence[tuple[Manifest, list[int]]], world: ProcessSet
    ) -> None:
        super().__init__(folder, checked=False, manifest=merged_manifest([part for part, _ in parts]))
        self._reader, self._world, self._pieces = own, world, self.pieces()
        holders = {piece: ranks for part, ranks in parts for each in part.files.values() for piece in each.pieces}
        # The ranks that see a part take turns in reading its pieces for the others.
        self._servers = [holders[piece][number % len(holders[piece])] for number, piece in enumerate(self._pieces)]
        self._here = set(own.pieces()) if own is not None else set()

    def stream(self, pieces: Sequence[ChecksumPiece], use: Callable[[ChecksumPiece, torch.Tensor], None]) -> None:
        """Stream as `CheckpointReader.stream`, this host's pieces first. An error of one rank is raised on all."""
        lacking, world = set(pieces) - self._here, self._world

        def read_here() -> list[int]:
            if self._reader is not None:
                self._reader.stream([piece for piece in pieces if piece in self._here], use)
            return [number for number, piece in enumerate(self._pieces) if piece in lacking]

        missing = world.all_or_raise("reading this host's part of the checkpoint", read_here, CheckpointError)
        queues: list[list[ChecksumPiece]] = [[] for _ in range(world.size)]
        for number in sorted(set().union(*missing)):
            queues[self._servers[number]].append(self._pieces[number])

        def own_bytes(served: Sequence[ChecksumPiece | None]) -> bytes:
            piece, found = served[world.index], [b""]
            if piece is not None and self._reader is not None:
                self._reader.stream([piece], lambda _, data: found.append(data.numpy().tobytes()))
            return found[-1]

        problem: ZeromeshError | None = None
        for served in zip_longest(*queues):
            what = "reading other hosts' parts of the checkpoint"
            found = world.all_or_raise(what, partial(own_bytes, served), CheckpointError)
            for piece, data in zip(served, found, strict=True):
                if piece not in lacking or problem is not None:
                    continue
                try:
                    use(piece, torch.frombuffer(bytearray(data), dtype=torch.uint8))
                except ZeromeshError as error:  # The other ranks go on to the next round, so this rank must too.
                    problem = error
        if problem is not None:
            raise problem
