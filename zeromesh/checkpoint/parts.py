"""One checkpoint from the parts written by hosts without a shared disk: read by all ranks together, or merged.

Each part is a directory with the same files at their full sizes, and its manifest lists the pieces that the part contains:

    part 0 of 2    pieces  [0, 4 MiB)               [8 MiB, 9 MiB)
    part 1 of 2    pieces            [4 MiB, 8 MiB)
    merged         pieces  [0, 4 MiB) [4 MiB, 8 MiB) [8 MiB, 9 MiB)

`PartsReader` receives the missing pieces of other parts over the network: all ranks exchange lists of their missing pieces. Of
the ranks that see the part with a piece, one reads and verifies the piece and sends it to all ranks, in rounds of one piece from
each rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format import manifest as manifests
from zeromesh.checkpoint.format.manifest import ChecksumPiece, FileRecord, Manifest
from zeromesh.checkpoint.io.reader import CheckpointReader, OpenedCheckpoint, copy_file
from zeromesh.checkpoint.store import fresh_directory
from zeromesh.errors import CheckpointError, ZeromeshError
from zeromesh.files import write_whole
from zeromesh.mesh.process_set import ProcessSet


def open_parts(directories: Sequence[Path]) -> list[CheckpointReader]:
    """Open the parts of one checkpoint, in order.

    Raises:
        CheckpointError: when the parts are of several checkpoints, one is missing, or pieces do not cover each byte once.
    """
    readers = [CheckpointReader(directory, parts=True) for directory in directories]
    found: dict[int, CheckpointReader] = {}
    for reader in readers:
        index, count = reader.manifest.part
        if count == 1:
            raise CheckpointError(
                f"{reader.directory} is a whole checkpoint, not a part of one; there is nothing to merge"
            )
        if index in found:
            raise CheckpointError(
                f"{found[index].directory} and {reader.directory} are both part {index + 1} of {count}"
            )
        found[index] = reader
    check_parts([(str(reader.directory), reader.manifest) for reader in readers])
    return [found[index] for index in sorted(found)]


def check_parts(parts: Sequence[tuple[str, Manifest]]) -> None:
    """Raise `CheckpointError` unless these parts, each with a name for messages, are all parts of one checkpoint."""
    name, first = parts[0]
    for other, manifest in parts[1:]:
        shared = first.files.keys() & manifest.files.keys()
        facts = _facts(manifest, shared)
        differ = [what for what, fact in _facts(first, shared).items() if fact != facts[what]]
        if differ:
            raise CheckpointError(
                f"{name} and {other} are not parts of one checkpoint: they differ in {', '.join(differ)}"
            )
    there, count = {manifest.part[0] for _, manifest in parts}, first.part[1]
    absent = [str(index + 1) for index in range(count) if index not in there]
    if absent:
        raise CheckpointError(
            f"of the checkpoint in {name}, part {', '.join(absent[:5])} of {count} is missing; give the directories of all hosts"
        )


def _facts(part: Manifest, shared: Iterable[str]) -> dict[str, Any]:
    return {
        "step": part.step,
        "number of parts": part.part[1],
        "the sizes of files": {path: part.files[path].nbytes for path in shared},
        "tensors": set(part.tensors),
        "aliases": dict(part.aliases),
        "layout": dict(part.layout),
    }


def merged_manifest(parts: Sequence[Manifest]) -> Manifest:
    """Merge the manifests of all parts. Raises `CheckpointError` if pieces overlap or leave a gap."""
    one = parts[0]
    files = {}
    for path in {path: None for part in parts for path in part.files}:
        records = [part.files[path] for part in parts if path in part.files]
        pieces = tuple(sorted((piece for each in records for piece in each.pieces), key=lambda piece: piece.begin))
        _check_tiles(path, pieces, records[0].nbytes)
        files[path] = FileRecord(nbytes=records[0].nbytes, pieces=pieces)
    return replace(one, files=files, part=(0, 1))


def _check_tiles(path: str, pieces: Sequence[ChecksumPiece], nbytes: int) -> None:
    end = 0
    for begin, stop in [*((piece.begin, piece.end) for piece in pieces), (nbytes, nbytes)]:
        if begin > end:
            raise CheckpointError(
                f"{path}: bytes [{end:,}, {begin:,}) are in no part: the checkpoint was never complete"
            )
        if begin < end:
            raise CheckpointError(f"{path}: bytes [{begin:,}, {end:,}) are in two parts")
        end = stop


def merge(parts: Sequence[CheckpointReader], out: Path, on_progress: Callable[[int], None]) -> Manifest:
    """Write the whole checkpoint to `out`, verifying every piece; `on_progress` receives the bytes of each piece.

    Raises:
        CheckpointError: when a piece is not what was written, or pieces are not each byte once.
        ConfigError, StorageError: where `out` cannot be written.
    """
    whole = merged_manifest([part.manifest for part in parts])
    text = whole.to_json()
    manifests.parse(out / manifests.NAME, text)
    with fresh_directory(out, whole.nbytes) as directory:
        for path in whole.files:
            if not whole.is_elsewhere(path):
                copy_file(parts, path, directory, on_progress)
        write_whole(directory / manifests.NAME, text)
    return whole


class PartsReader(OpenedCheckpoint):
    """Reads a checkpoint from its parts; all ranks make one and call its methods alike.

    `reader` reads the part that this rank sees in `directory`, and is None if it sees none; `parts` are the manifests of all
    parts, in order, and `holders` the ranks that see each part.

    Raises:
        CheckpointError: at construction, when the parts do not make a whole.
    """

    def __init__(
        self,
        directory: Path,
        reader: CheckpointReader | None,
        parts: Sequence[Manifest],
        holders: Sequence[Sequence[int]],
        world: ProcessSet,
    ) -> None:
        super().__init__(directory, merged_manifest(parts))
        self._reader = reader
        self._world = world
        self._rank = world.ranks[world.index]
        self._pieces = self.pieces()
        part_of = {
            piece: ranks
            for part, ranks in zip(parts, holders, strict=True)
            for record in part.files.values()
            for piece in record.pieces
        }
        # The ranks that see a part take turns reading its pieces for the other ranks.
        self._servers = [part_of[piece][number % len(part_of[piece])] for number, piece in enumerate(self._pieces)]
        self._here = set(reader.pieces()) if reader is not None else set()

    def stream(self, pieces: Sequence[ChecksumPiece], use: Callable[[ChecksumPiece, torch.Tensor], None]) -> None:
        """Stream as `OpenedCheckpoint.stream`, this host's pieces first. An error of one rank is raised on all."""
        wanted = set(pieces)

        def read_here() -> list[int]:
            if self._reader is not None:
                self._reader.stream([piece for piece in pieces if piece in self._here], use)
            return [number for number, piece in enumerate(self._pieces) if piece in wanted - self._here]

        missing = self._world.all_or_raise("reading this host's part of the checkpoint", read_here, CheckpointError)
        queues: list[list[ChecksumPiece]] = [[] for _ in range(self._world.size)]
        for number in sorted(set().union(*missing)):
            queues[self._servers[number]].append(self._pieces[number])
        problem: ZeromeshError | None = None
        for served in zip_longest(*queues):
            what = "reading other hosts' parts of the checkpoint"
            found = self._world.all_or_raise(what, partial(self._bytes_of, served), CheckpointError)
            for piece, data in zip(served, found, strict=True):
                if piece not in wanted or piece in self._here or problem is not None:
                    continue
                try:
                    use(piece, torch.frombuffer(bytearray(data), dtype=torch.uint8))
                except ZeromeshError as error:  # The other ranks go on to the next round, so this rank must too.
                    problem = error
        if problem is not None:
            raise problem

    def _bytes_of(self, served: Sequence[ChecksumPiece | None]) -> bytes:
        piece, found = served[self._rank], [b""]
        if piece is not None and self._reader is not None:
            self._reader.stream([piece], lambda _, data: found.append(data.numpy().tobytes()))
        return found[-1]
