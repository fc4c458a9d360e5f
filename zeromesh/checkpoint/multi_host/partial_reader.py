"""A checkpoint of which each host has a part, read by all ranks together: what a rank needs of other parts comes over the network.

All ranks exchange which bytes they miss. Ranks that see the part with these bytes send them, in rounds of a bounded size, after
they have verified the whole piece that the bytes belong to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, Manifest
from zeromesh.checkpoint.io.blocks import overlapping
from zeromesh.checkpoint.io.reader import CheckpointReader, OpenedCheckpoint, ReadTarget, targets_by_file
from zeromesh.checkpoint.multi_host.merge import merged_manifest
from zeromesh.errors import CheckpointError, ZeromeshError
from zeromesh.mesh.process_mesh import ProcessSet

_ROUND_BYTES = 32 << 20
"""Bytes that all ranks together send in one round, each at most an equal part of them; every rank receives all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """Bytes [begin, end) of a piece, by its number, that a rank misses."""

    rank: int
    piece: int
    begin: int
    end: int


class PartsReader(OpenedCheckpoint):
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
        super().__init__(directory, merged_manifest(parts))
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
        self._holders = holders

    def content(self, path: str) -> bytes:
        record = self.record(path)
        requests = [
            _Request(rank=self._rank, piece=self._numbers[piece.path, piece.begin], begin=piece.begin, end=piece.end)
            for piece in record.pieces
        ]
        # All ranks have the same requests, and each of them gets the bytes as if it were the only one.
        return b"".join(data.numpy().tobytes() for _, data in self._serve(requests, lambda: None))

    def read(self, targets: Iterable[ReadTarget], on_progress: Callable[[], None]) -> None:
        """As `OpenedCheckpoint.read`; all ranks raise the error of one."""
        by_file = targets_by_file(targets)
        wanted = [target for members in by_file.values() for target in members]

        def read_here() -> bytes:
            if self._reader is not None:
                self._reader.read(wanted, on_progress)
            return json.dumps([[each.piece, each.begin, each.end] for each in self._missing(wanted)]).encode()

        rows = self._gather(read_here, "reading this host's part of the checkpoint")
        requests = [
            _Request(rank=rank, piece=piece, begin=begin, end=end)
            for rank, text in enumerate(rows)
            for piece, begin, end in json.loads(text)
        ]
        problem: ZeromeshError | None = None
        for batch in self._rounds(requests):
            for request, data in self._serve(batch, on_progress):
                got = replace(self._pieces[request.piece], begin=request.begin, end=request.end)
                try:
                    for target in by_file[got.path].touching(got.begin, got.end):
                        target.fill_from(got, data)
                except ZeromeshError as error:  # The others go on to the next round, and this rank with them.
                    problem = problem or error
        if problem is not None:
            raise problem

    def _missing(self, targets: Iterable[ReadTarget]) -> Iterator[_Request]:
        """Requests for the bytes of targets that are in no piece of this rank's part."""
        for target in targets:
            pieces = self.manifest.files[target.tensor.path].pieces
            for piece in overlapping(pieces, target.begin, target.end):
                if (piece.path, piece.begin) not in self._here:
                    begin, end = max(target.begin, piece.begin), min(target.end, piece.end)
                    number = self._numbers[piece.path, piece.begin]
                    yield _Request(rank=self._rank, piece=number, begin=begin, end=end)

    def _serve(
        self, requests: Sequence[_Request], on_progress: Callable[[], None]
    ) -> Iterator[tuple[_Request, torch.Tensor]]:
        """Exchange one round of requests; yields the requests of this rank with their bytes, 1-D uint8."""
        served = [request for request in requests if self._server(request) == self._rank]
        every = self._gather(
            lambda: self._bytes_of(served, on_progress), "reading other hosts' parts of the checkpoint"
        )
        used = [0] * len(every)
        for request in requests:
            server, length = self._server(request), request.end - request.begin
            if request.rank == self._rank:
                data = every[server][used[server] : used[server] + length]
                yield request, torch.frombuffer(bytearray(data), dtype=torch.uint8)
            used[server] += length

    def _rounds(self, requests: Sequence[_Request]) -> Iterator[list[_Request]]:
        """The requests in order, in rounds in which each server sends a bounded number of bytes, or a single request."""
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
        """The rank that reads a piece for others; the ranks that see its part take turns."""
        holders = self._holders[self._part_of[request.piece]]
        return holders[request.piece % len(holders)]

    def _bytes_of(self, requests: Sequence[_Request], on_progress: Callable[[], None]) -> bytes:
        """The bytes of requests, one after the other, from verified pieces."""
        wanted: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            wanted.setdefault(request.piece, []).append(number)
        found = [b""] * len(requests)

        def use(piece: ChecksumPiece, data: torch.Tensor) -> None:
            for number in wanted[self._numbers[piece.path, piece.begin]]:
                request = requests[number]
                found[number] = data[request.begin - piece.begin : request.end - piece.begin].numpy().tobytes()
            on_progress()

        if self._reader is None:
            return b""  # Requests go only to ranks that see a part.
        self._reader.stream([self._pieces[number] for number in sorted(wanted)], use)
        return b"".join(found)

    def _gather(self, make: Callable[[], bytes], what: str) -> list[bytes]:
        """What `make` returns on each rank. Where it fails on one, all raise its error: none may go on alone."""
        try:
            answer = b"+" + make()
        except (ZeromeshError, OSError) as error:
            answer = b"-" + str(error).encode(errors="backslashreplace")
        every = self._world.gather_bytes(answer, what)
        for rank, text in enumerate(every):
            if text[:1] == b"-":
                raise CheckpointError(f"rank {rank}: {text[1:].decode()}")
        return [text[1:] for text in every]
