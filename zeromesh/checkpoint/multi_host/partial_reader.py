"""A checkpoint of which each host has a part, read by all ranks together: what a rank needs of other parts comes over the network.

Ranks say which bytes they miss. Those bytes are served in rounds, of a bounded size, by ranks that see the part in which they are:
each verifies the whole piece that it takes bytes from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, Manifest, StoredTensor
from zeromesh.checkpoint.format.safetensors_layout import parse_json
from zeromesh.checkpoint.io.blocks import overlapping
from zeromesh.checkpoint.io.reader import CheckpointReader, ReadTarget, targets_by_file
from zeromesh.checkpoint.multi_host.merge import merged_manifest
from zeromesh.errors import CheckpointError, ZeromeshError
from zeromesh.mesh.process_mesh import ProcessSet

_ROUND_BYTES = 32 << 20
"""Served by all ranks together in one round, each an equal part of it; every rank receives all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """Bytes [begin, end) of a piece, by its number, that a rank misses."""

    rank: int
    piece: int
    begin: int
    end: int


class PartsReader:
    """Reads a checkpoint from its parts; all ranks make one and call its methods alike.

    `reader` is of the part that this rank sees in `directory`, None where it sees none; `parts` are the manifests of all, in order,
    and `holders` the ranks that see each.

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
        self.manifest = merged_manifest(parts)
        self.directory = directory
        self._reader = reader
        self._world = world
        self._rank = world.ranks[world.index]
        self._pieces = [piece for record in self.manifest.files.values() for piece in record.pieces]
        self._numbers = {(piece.path, piece.begin): number for number, piece in enumerate(self._pieces)}
        part_of = {
            (piece.path, piece.begin): index
            for index, part in enumerate(parts)
            for record in part.files.values()
            for piece in record.pieces
        }
        self._part_of = [part_of[piece.path, piece.begin] for piece in self._pieces]
        self._here = {(piece.path, piece.begin) for piece in reader.pieces()} if reader is not None else set()
        self._tensors = {(tensor.spec.kind, tensor.spec.name): tensor for tensor in self.manifest.tensors}
        self._holders = holders

    def tensor(self, kind: str, name: str) -> StoredTensor | None:
        """As `CheckpointReader.tensor`."""
        return self._tensors.get((kind, self.manifest.aliases.get(name, name)))

    def document(self, path: str) -> dict[str, Any]:
        """As `CheckpointReader.document`."""
        record = self.manifest.files.get(path)
        if record is None:
            raise CheckpointError(f"{self.directory} has no {path}")
        requests = [
            _Request(rank=self._rank, piece=self._numbers[piece.path, piece.begin], begin=piece.begin, end=piece.end)
            for piece in record.pieces
        ]
        # Each rank takes every request for its own: all of them want the same bytes.
        parts = [data.numpy().tobytes() for _, data in self._serve(requests, lambda: None)]
        return parse_json(self.directory / path, b"".join(parts))

    def read(self, targets: Iterable[ReadTarget], tell: Callable[[], None]) -> None:
        """As `CheckpointReader.read`, whose errors all ranks raise."""
        by_file = targets_by_file(targets)
        wanted = [target for members in by_file.values() for target in members]

        def read_here() -> bytes:
            if self._reader is not None:
                self._reader.read(wanted, tell)
            return json.dumps([[each.piece, each.begin, each.end] for each in self._missing(wanted)]).encode()

        rows = self._gather(read_here, "reading this host's part of the checkpoint")
        requests = [
            _Request(rank=rank, piece=piece, begin=begin, end=end)
            for rank, text in enumerate(rows)
            for piece, begin, end in json.loads(text)
        ]
        problem: ZeromeshError | None = None
        for batch in self._rounds(requests):
            for request, data in self._serve(batch, tell):
                got = replace(self._pieces[request.piece], begin=request.begin, end=request.end)
                try:
                    for target in by_file[got.path].touching(got.begin, got.end):
                        target.fill_from(got, data)
                except ZeromeshError as error:  # The others go on to the next round, and this rank with them.
                    problem = problem or error
        if problem is not None:
            raise problem

    def _missing(self, targets: Iterable[ReadTarget]) -> Iterator[_Request]:
        """What of the targets is in no piece of this rank's part."""
        for target in targets:
            pieces = self.manifest.files[target.tensor.path].pieces
            for piece in overlapping(pieces, target.begin, target.end):
                if (piece.path, piece.begin) not in self._here:
                    begin, end = max(target.begin, piece.begin), min(target.end, piece.end)
                    number = self._numbers[piece.path, piece.begin]
                    yield _Request(rank=self._rank, piece=number, begin=begin, end=end)

    def _serve(self, requests: Sequence[_Request], tell: Callable[[], None]) -> Iterator[tuple[_Request, torch.Tensor]]:
        """One round: what all ranks ask for, of which this rank gets its own, 1-D uint8."""
        mine = [request for request in requests if self._server(request) == self._rank]
        every = self._gather(lambda: self._bytes_of(mine, tell), "reading other hosts' parts of the checkpoint")
        taken = [0] * len(every)
        for request in requests:
            server, length = self._server(request), request.end - request.begin
            if request.rank == self._rank:
                data = every[server][taken[server] : taken[server] + length]
                yield request, torch.frombuffer(bytearray(data), dtype=torch.uint8)
            taken[server] += length

    def _rounds(self, requests: Sequence[_Request]) -> Iterator[list[_Request]]:
        """Requests in order, as many at a time as a round may have bytes of a server, and one at least."""
        most = _ROUND_BYTES // self._world.size
        batch: list[_Request] = []
        served: dict[int, int] = {}
        for request in requests:
            server, length = self._server(request), request.end - request.begin
            if batch and served.get(server, 0) + length > most:
                yield batch
                batch, served = [], {}
            batch.append(request)
            served[server] = served.get(server, 0) + length
        if batch:
            yield batch

    def _server(self, request: _Request) -> int:
        """The rank that reads a piece for others: those that see its part take turns."""
        holders = self._holders[self._part_of[request.piece]]
        return holders[request.piece % len(holders)]

    def _bytes_of(self, requests: Sequence[_Request], tell: Callable[[], None]) -> bytes:
        """The bytes of requests, one after the other, each out of a verified piece."""
        wanted: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            wanted.setdefault(request.piece, []).append(number)
        found = [b""] * len(requests)

        def use(piece: ChecksumPiece, data: torch.Tensor) -> None:
            for number in wanted[self._numbers[piece.path, piece.begin]]:
                request = requests[number]
                found[number] = data[request.begin - piece.begin : request.end - piece.begin].numpy().tobytes()
            tell()

        if self._reader is None:
            return b""  # What is not here, nobody asks this rank for.
        self._reader.stream([self._pieces[number] for number in sorted(wanted)], use, tell)
        return b"".join(found)

    def _gather(self, make: Callable[[], bytes], what: str) -> list[bytes]:
        """What each rank makes. Where one cannot, all raise its error: none may go on to the next exchange alone."""
        try:
            mine = b"+" + make()
        except (ZeromeshError, OSError) as error:
            mine = b"-" + str(error).encode(errors="backslashreplace")
        every = self._world.gather_bytes(mine, what)
        for rank, text in enumerate(every):
            if text[:1] == b"-":
                raise CheckpointError(f"rank {rank}: {text[1:].decode()}")
        return [text[1:] for text in every]
