"""Interleaved tensors: those that ranks of one host divide inside of their rows, so that short runs of each alternate in the file.

Each rank writes exactly its own bytes of an interleaved block, through the page cache that the host's ranks share. When all have,
one of them reads each block back, compares what every rank has in it with what that rank was to write, and takes the checksum of
the whole.

    tensor     | head |                core of whole blocks                                   | tail |
    host 0            |  interleaved: ranks 0 and 1 |      |
    host 1                                          | both |  interleaved: ranks 2 and 3      |

Blocks with bytes of two hosts, and the head and the tail, have one writer each (`write_plan`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.format.manifest import ChecksumPiece, checksum
from zeromesh.checkpoint.io.blocks import GRID, cut_at_grid, merged, minus
from zeromesh.checkpoint.io.tensor_shard import FileSlice, TensorShard
from zeromesh.errors import CheckpointError
from zeromesh.intervals import Interval, round_up
from zeromesh.offload.io.direct_io import BLOCK, PositionalFile
from zeromesh.offload.io.transfer import StagingPool

LEAST_TENSOR = 64 << 10
"""Bytes. A smaller tensor has few runs, however it is divided."""
LONGEST_ROW = 512 << 10
"""Bytes. Runs of longer rows are few enough to be pieces of their own."""

TensorPlace = tuple[str, int]
"""The file of a tensor, and the tensor's first byte there."""
BlockDigests = Mapping[tuple[int, int], str]
"""The checksum of what a rank was to write in a block, by the block's number and the place of the rank's slice in it."""


def is_interleaved(shard: TensorShard) -> bool:
    """Whether a tensor is divided into many short runs. All ranks that divide one tensor come to the same answer."""
    spec, region = shard.spec, shard.region
    if spec.nbytes < LEAST_TENSOR or not region.is_strided:
        return False
    return region.row_numel * spec.dtype.itemsize <= LONGEST_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedBlock:
    """Bytes `where` of a file, whole disk blocks and at most `GRID` bytes, which are exactly those of `slices`.

    Each slice comes with the rank that has its elements; the ranks are on one host, where all number the block alike.
    """

    number: int
    path: str
    where: Interval
    slices: tuple[tuple[int, FileSlice], ...]

    @property
    def checker(self) -> int:
        """The rank that reads the block back."""
        return self.slices[self.number % len(self.slices)][0]


def plan_interleaved(
    slices: Iterable[tuple[int, FileSlice]], excluded: Iterable[TensorPlace], hosts: Sequence[Hashable], rank: int
) -> list[InterleavedBlock]:
    """The interleaved blocks of a rank's host.

    `slices` are those of all ranks. `excluded` are tensors of which some rank has a part that is no columns of rows. `hosts` tells
    each rank's host.
    """
    tensors: dict[TensorPlace, list[tuple[int, FileSlice]]] = {}
    for owner, each in slices:
        tensors.setdefault((each.path, each.origin), []).append((owner, each))
    for tensor in set(excluded):
        tensors.pop(tensor, None)
    found: list[InterleavedBlock] = []
    for (path, _), members in sorted(tensors.items()):
        here = [member for member in members if hosts[member[0]] == hosts[rank]]
        elsewhere = [member for member in members if hosts[member[0]] != hosts[rank]]
        for stretch in minus(_blocks_of(here), _blocks_of(elsewhere)):
            for where in cut_at_grid(stretch):
                inside = tuple(member for member in here if member[1].cut(where).nbytes)
                if inside:
                    found.append(InterleavedBlock(number=len(found), path=path, where=where, slices=inside))
    return found


def _blocks_of(slices: Sequence[tuple[int, FileSlice]]) -> list[Interval]:
    """The disk blocks that slices of one tensor reach into, as far as the blocks have bytes of that tensor alone."""
    found = []
    for _, each in slices:
        hull, nbytes = each.hull, each.rows.count * each.rows.width * each.dtype.itemsize
        start = max(hull.start // BLOCK * BLOCK, round_up(each.origin, BLOCK))
        end = min(round_up(hull.end, BLOCK), (each.origin + nbytes) // BLOCK * BLOCK)
        if start < end:
            found.append(Interval(start=start, end=end))
    return merged(found)


def collect_digests(
    blocks: Sequence[InterleavedBlock], rows: Sequence[Sequence[Sequence[Any]]]
) -> dict[tuple[int, int], str]:
    """The digests of this host's blocks, from the rows `[number, place, checksum]` of each rank; other hosts number others."""
    ranks = {(block.number, place): rank for block in blocks for place, (rank, _) in enumerate(block.slices)}
    return {
        (number, place): digest
        for rank, own in enumerate(rows)
        for number, place, digest in own
        if ranks.get((number, place)) == rank
    }


def check_interleaved(
    directory: Path, blocks: Sequence[InterleavedBlock], digests: BlockDigests, rank: int
) -> list[ChecksumPiece]:
    """Read back the blocks that `rank` checks, once every rank has written and synced its bytes of them; returns their pieces.

    Raises:
        CheckpointError: when the file has not what some rank was to write, or the ranks' slices do not fill a block.
        StorageError: when the system cannot read.
    """
    found: list[ChecksumPiece] = []
    pool = StagingPool(2, GRID)
    buffer, spare = pool.take(), pool.take()
    opened: dict[str, PositionalFile] = {}
    try:
        for block in blocks:
            if block.checker != rank:
                continue
            if block.path not in opened:
                opened[block.path] = PositionalFile(directory / block.path, direct=False)
            file, where, filled = opened[block.path], block.where, 0
            data = buffer[: where.length]
            file.read(data, where.start)
            bytes_read = f"bytes [{where.start:,}, {where.end:,})"
            for place, (writer, each) in enumerate(block.slices):
                own = each.cut(where).gather(data, where.start, spare)
                filled += own.numel()
                if checksum(own) != digests.get((block.number, place)):
                    raise CheckpointError(
                        f"{file.path}: of {bytes_read}, those of rank {writer} are not what rank {writer} wrote"
                    )
            if filled != data.numel():
                raise CheckpointError(
                    f"{file.path}: {filled} of the {bytes_read} belong to some rank; the ranks' parts do not make whole tensors"
                )
            file.forget(where.start, where.length)
            digest = checksum(data)
            found.append(ChecksumPiece(path=block.path, begin=where.start, end=where.end, checksum=digest, rank=rank))
    finally:
        for file in opened.values():
            file.close()
    return found
