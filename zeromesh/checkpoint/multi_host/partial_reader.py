"""A checkpoint of which each host has a part, read by all ranks together: what a rank needs of other parts comes over the network.

All ranks exchange which pieces they miss. Of the ranks that see the part with a piece, one reads and verifies it, and sends it to
all, in rounds of a bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, Manifest
from zeromesh.checkpoint.io.reader import CheckpointReader, OpenedCheckpoint
from zeromesh.checkpoint.multi_host.agreement import together, together_bytes
from zeromesh.checkpoint.multi_host.merge import merged_manifest
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_set import ProcessSet

_ROUND_BYTES = 32 << 20
"""Bytes that all ranks together send in one round, each at most an equal part of them or one piece; every rank receives all."""


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
        self._pieces = self.pieces()
        part_of = {
            piece: ranks
            for part, ranks in zip(parts, holders, strict=True)
            for record in part.files.values()
            for piece in record.pieces
        }
        # The ranks that see a part take turns in reading its pieces for others.
        self._servers = [part_of[piece][number % len(part_of[piece])] for number, piece in enumerate(self._pieces)]
        self._here = set(reader.pieces()) if reader is not None else set()

    def stream(self, pieces: Sequence[ChecksumPiece], use: Callable[[ChecksumPiece, torch.Tensor], None]) -> None:
        """As `OpenedCheckpoint.stream`; those of this host come first. All ranks raise the error of one."""
        wanted = set(pieces)

        def read_here() -> list[int]:
            if self._reader is not None:
                self._reader.stream([piece for piece in pieces if piece in self._here], use)
            return [number for number, piece in enumerate(self._pieces) if piece in wanted - self._here]

        missing = together(self._world, "reading this host's part of the checkpoint", read_here)
        problem: ZeromeshError | None = None
        for batch in self._rounds(sorted(set().union(*missing))):
            served = [self._pieces[number] for number in batch if self._servers[number] == self._rank]
            what = "reading other hosts' parts of the checkpoint"
            every = together_bytes(self._world, what, partial(self._bytes_of, served))
            used = [0] * len(every)
            for number in batch:
                piece, server = self._pieces[number], self._servers[number]
                begin, used[server] = used[server], used[server] + piece.end - piece.begin
                if piece not in wanted or piece in self._here or problem is not None:
                    continue
                try:
                    use(piece, torch.frombuffer(bytearray(every[server][begin : used[server]]), dtype=torch.uint8))
                except ZeromeshError as error:  # The others go on to the next round, and this rank with them.
                    problem = error
        if problem is not None:
            raise problem

    def _rounds(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """The numbers of pieces in order, in rounds in which each server sends a bounded number of bytes, or one piece."""
        most = _ROUND_BYTES // self._world.size
        batch: list[int] = []
        served: dict[int, int] = {}
        for number in numbers:
            server, length = self._servers[number], self._pieces[number].end - self._pieces[number].begin
            if batch and served.get(server, 0) + length > most:
                yield batch
                batch, served = [], {}
            batch.append(number)
            served[server] = served.get(server, 0) + length
        if batch:
            yield batch

    def _bytes_of(self, pieces: Sequence[ChecksumPiece]) -> bytes:
        found: list[bytes] = []
        if self._reader is not None:  # Only ranks that see a part are asked.
            self._reader.stream(pieces, lambda piece, data: found.append(data.numpy().tobytes()))
        return b"".join(found)
