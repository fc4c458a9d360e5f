"""Assigns the bytes of files to ranks: contiguous runs, which are rounded to whole disk blocks.

Each whole block has one writer, the rank of the block's first byte, which first receives the other ranks' bytes of the block:

    block           |      0      |      1      |      2      |
    elements of     | rank 0               | rank 1           |
    sent to rank 0                |  r1's  |
    written by      | rank 0      | rank 0      | rank 1      |

Each rank's bytes are cut at multiples of `GRID` bytes of the file into pieces with a checksum each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from zeromesh.checkpoint.format.safetensors_layout import FileLayout
from zeromesh.checkpoint.io.file_slices import (
    PlacedValues,
    TensorShard,
    cut_at_grid,
    merged,
    overlapping,
    starts_in_blocks_of_others,
    written_blocks,
)
from zeromesh.intervals import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePiece:
    """Bytes `where` of a file, which are copied from `sources`."""

    path: str
    where: Interval
    sources: tuple[PlacedValues, ...]

    @property
    def owners(self) -> frozenset[int]:
        """Numbers of the buckets whose update changes some of the elements."""
        return frozenset(source.owner for source in self.sources if source.owner is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    """One rank's planned writes: contiguous `runs` by file, in order."""

    files: Sequence[FileLayout]
    runs: Mapping[str, Sequence[PlacedValues]]

    @classmethod
    def of(cls, files: Sequence[FileLayout], shards: Iterable[TensorShard], rank: int) -> Self:
        """Plan the writes of a rank's shards; rank 0 also writes the headers."""
        tensors = {(each.spec.kind, each.spec.name): each for file in files for each in file.tensors}
        headers = [PlacedValues.of_bytes(file.path, 0, file.header) for file in files] if rank == 0 else []
        runs = (PlacedValues.runs(tensors[shard.spec.kind, shard.spec.name], shard) for shard in shards)
        return cls(files=files, runs=_by_file(chain(headers, *runs)))

    def bytes_for_others(self) -> list[tuple[str, int, bytes]]:
        """List this rank's parts of blocks that other ranks write: the file, the first byte, and the bytes."""
        found = []
        for path, runs in self.runs.items():
            for edge in starts_in_blocks_of_others(_extents(runs)):
                cuts = (run.cut(edge).to_bytes() for run in overlapping(runs, edge.start, edge.end))
                found.append((path, edge.start, b"".join(cuts)))
        return found

    def pieces(self, received: Iterable[tuple[str, int, bytes]], order: Mapping[int, int]) -> list[WritePiece]:
        """List the pieces that this rank writes, with the bytes received from other ranks, those that are updated first at the
        front. `order` has the position of each owner in the next update."""
        content = _by_file(chain(*self.runs.values(), (PlacedValues.of_bytes(*each) for each in received)))
        sizes = {file.path: file.nbytes for file in self.files}
        found = []
        for path, runs in self.runs.items():
            for block in written_blocks(_extents(runs), sizes[path]):
                for where in cut_at_grid(block):
                    sources = overlapping(content[path], where.start, where.end)
                    cuts = tuple(source.cut(where) for source in sources)
                    found.append(WritePiece(path=path, where=where, sources=cuts))
        last = len(order)
        return sorted(found, key=lambda piece: min((order.get(owner, last) for owner in piece.owners), default=last))


def _by_file(sources: Iterable[PlacedValues]) -> dict[str, list[PlacedValues]]:
    found: dict[str, list[PlacedValues]] = {}
    for source in sorted(sources, key=lambda each: (each.path, each.begin)):
        if source.values.numel:
            found.setdefault(source.path, []).append(source)
    return found


def _extents(runs: Sequence[PlacedValues]) -> list[Interval]:
    return merged(Interval(start=run.begin, end=run.end) for run in runs)
