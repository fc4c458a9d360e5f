"""Which bytes each rank writes: contiguous runs, of which whole disk blocks are made, and its slices of interleaved blocks.

Each whole block has one writer, the rank that has the block's first byte. It gets the other ranks' bytes of the block beforehand:

    block           |      0      |      1      |      2      |
    elements of     | rank 0               | rank 1           |
    sent to rank 0                |  r1's  |
    written by      | rank 0      | rank 0      | rank 1      |

What a rank writes is cut at multiples of `GRID` bytes of the file into pieces with a checksum each.

Interleaved tensors are those that ranks of one host divide inside of their rows, so that short runs of each alternate in the file.
Each rank writes exactly its own bytes of an interleaved block, through the page cache that the host's ranks share. When all have,
one of them reads each block back, compares what every rank has in it with what that rank was to write, and takes the checksum of
the whole.

    tensor     | head |                core of whole blocks                                   | tail |
    host 0            |  interleaved: ranks 0 and 1 |      |
    host 1                                          | both |  interleaved: ranks 2 and 3      |

Blocks with bytes of two hosts, and the head and the tail, have one writer each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.format.manifest import ChecksumPiece, checksum
from zeromesh.checkpoint.format.safetensors_layout import FileLayout, StoredTensor
from zeromesh.checkpoint.io.file_slices import (
    GRID,
    FileSlice,
    PlacedValues,
    TensorShard,
    cut_at_grid,
    merged,
    minus,
    overlapping,
    starts_in_blocks_of_others,
    written_blocks,
)
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


def is_interleaved(shard: TensorShard) -> bool:
    """Return True if a tensor is divided into many short runs. All ranks that divide one tensor come to the same answer."""
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


def check_interleaved(
    directory: Path, blocks: Sequence[InterleavedBlock], rows: Sequence[Sequence[Sequence[Any]]], rank: int
) -> list[ChecksumPiece]:
    """Read back the blocks that `rank` checks, once every rank has written and synced its bytes of them; returns their pieces.

    `rows` has the `digests` of each rank's writer.

    Raises:
        CheckpointError: when the file has not what some rank was to write, or the ranks' slices do not fill a block.
        StorageError: when the system cannot read.
    """
    found: list[ChecksumPiece] = []
    digests = {(path, begin, place): digest for own in rows for path, begin, place, digest in own}
    pool = StagingPool(2, GRID)
    buffer, spare = pool.take(), pool.take()
    opened: dict[str, PositionalFile] = {}
    with ExitStack() as stack:
        for block in blocks:
            if block.checker != rank:
                continue
            if block.path not in opened:
                opened[block.path] = stack.enter_context(PositionalFile(directory / block.path, direct=False))
            file, where, filled = opened[block.path], block.where, 0
            data = buffer[: where.length]
            file.read(data, where.start)
            bytes_read = f"bytes [{where.start:,}, {where.end:,})"
            for place, (writer, each) in enumerate(block.slices):
                own = each.cut(where).gather(data, where.start, spare)
                filled += own.numel()
                if checksum(own) != digests.get((block.path, where.start, place)):
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
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePiece:
    """Bytes `where` of a file, which `sources` fill; or of an interleaved block, what slice number `place` has of it."""

    path: str
    where: Interval
    sources: tuple[PlacedValues, ...]
    block: InterleavedBlock | None = None
    place: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return self.where.length if self.block is None else self.sources[0].where.nbytes

    @property
    def owners(self) -> frozenset[int]:
        """Buckets whose update changes some of the elements."""
        return frozenset(source.owner for source in self.sources if source.owner is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    """The plan of one rank's writes.

    `runs` are contiguous, by file and in order. `shares` are this rank's parts of `blocks`, its host's interleaved blocks.
    `any_interleaved`: some host has interleaved blocks, which all ranks then read back.
    """

    files: Sequence[FileLayout]
    runs: Mapping[str, Sequence[PlacedValues]]
    shares: Sequence[WritePiece] = ()
    blocks: Sequence[InterleavedBlock] = ()
    any_interleaved: bool = False

    def bytes_for_others(self) -> list[tuple[str, int, bytes]]:
        """Return this rank's parts of blocks that other ranks write: the file, the first byte, and the bytes."""
        found = []
        for path, runs in self.runs.items():
            for edge in starts_in_blocks_of_others(_extents(runs)):
                cuts = (run.cut(edge).to_bytes() for run in overlapping(runs, edge.start, edge.end))
                found.append((path, edge.start, b"".join(cuts)))
        return found

    def pieces(self, received: Iterable[tuple[str, int, bytes]], order: Mapping[int, int]) -> list[WritePiece]:
        """Return the pieces that this rank writes, those that change first first, given the bytes that the other ranks have for it.

        `order` has the position of each owner in the next update.
        """
        content = _by_file(chain(*self.runs.values(), (PlacedValues.of_bytes(*each) for each in received)))
        sizes = {file.path: file.nbytes for file in self.files}
        found = list(self.shares)
        for path, runs in self.runs.items():
            for block in written_blocks(_extents(runs), sizes[path]):
                for where in cut_at_grid(block):
                    sources = overlapping(content[path], where.start, where.end)
                    cuts = tuple(source.cut(where) for source in sources)
                    found.append(WritePiece(path=path, where=where, sources=cuts))
        last = len(order)
        return sorted(found, key=lambda piece: min((order.get(owner, last) for owner in piece.owners), default=last))


class WritePlanner:
    """Plans what one rank writes, in two steps, between which every rank gets every other's `describe`."""

    def __init__(self, files: Sequence[FileLayout], shards: Sequence[TensorShard], rank: int) -> None:
        self._files = files
        self._rank = rank
        self._placed: list[tuple[TensorShard, StoredTensor, PlacedValues | None]] = []
        """Each shard, its whole tensor, and the shard as columns of rows if it can be in interleaved blocks."""
        tensors = {(each.spec.kind, each.spec.name): each for file in files for each in file.tensors}
        for shard in shards:
            tensor = tensors[shard.spec.kind, shard.spec.name]
            rows = shard.region.rows() if is_interleaved(shard) and shard.interval.length else None
            source = PlacedValues.in_rows(tensor, rows, shard) if rows is not None else None
            self._placed.append((shard, tensor, source))

    def describe(self) -> list[list[Any]]:
        """Return the facts that other ranks need, as JSON: slices for interleaved blocks, and tensors that cannot be in any."""
        slices = [source.where.to_row() for *_, source in self._placed if source is not None]
        excluded = [
            (tensor.path, tensor.begin)
            for shard, tensor, source in self._placed
            if source is None and shard.interval.length and is_interleaved(shard)
        ]
        return [slices, excluded]

    def plan(self, descriptions: Sequence[list[list[Any]]], hosts: Sequence[Hashable]) -> WritePlan:
        """Return the plan of this rank's writes, given each rank's description and, in `hosts`, what tells its host."""
        of_hosts = zip(hosts, descriptions, strict=True)
        here = {(row[0], row[1]) for host, (own, _) in of_hosts if host == hosts[self._rank] for row in own}
        slices = [
            (rank, FileSlice.from_row(row))
            for rank, (own, _) in enumerate(descriptions)
            for row in own
            if (row[0], row[1]) in here  # Other tensors have no blocks of this host.
        ]
        excluded = [(path, begin) for _, tensors in descriptions for path, begin in tensors]
        blocks = plan_interleaved(slices, excluded, hosts, self._rank)
        by_tensor: dict[TensorPlace, list[InterleavedBlock]] = {}
        for block in blocks:
            by_tensor.setdefault((block.path, block.slices[0][1].origin), []).append(block)
        runs, shares = [], []
        if self._rank == 0:
            runs += [PlacedValues.of_bytes(file.path, 0, file.header) for file in self._files]
        for shard, tensor, source in self._placed:
            rest = [shard.interval]
            own = by_tensor.get((tensor.path, tensor.begin), [])
            if source is not None and own:
                shares += [
                    WritePiece(path=block.path, where=block.where, sources=(cut,), block=block, place=number)
                    for block in own
                    for number, member in enumerate(block.slices)
                    if member == (self._rank, source.where) and (cut := source.cut(block.where))
                ]
                where = source.where
                rest = [where.cut(each).interval for each in minus([where.hull], [block.where for block in own])]
            runs += [run for interval in rest for run in PlacedValues.runs(tensor, shard, interval)]
        interleaved = any(own for own, _ in descriptions)
        return WritePlan(
            files=self._files, runs=_by_file(runs), shares=shares, blocks=blocks, any_interleaved=interleaved
        )


def _by_file(sources: Iterable[PlacedValues]) -> dict[str, list[PlacedValues]]:
    found: dict[str, list[PlacedValues]] = {}
    for source in sorted(sources, key=lambda each: (each.where.path, each.begin)):
        if source.values.numel:
            found.setdefault(source.where.path, []).append(source)
    return found


def _extents(runs: Sequence[PlacedValues]) -> list[Interval]:
    return merged(run.where.hull for run in runs)
