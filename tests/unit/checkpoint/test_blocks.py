"""Blocks, edges and pieces of a file: however ranks share it, each block has one writer that gets all of its bytes."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.checkpoint.io.file_slices import (
    GRID,
    cut_at_grid,
    merged,
    overlapping,
    starts_in_blocks_of_others,
    written_blocks,
)
from zeromesh.intervals import Interval
from zeromesh.offload.io.direct_io import BLOCK

RANKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A file of `nbytes` bytes; `extents` has each rank's, merged."""

    nbytes: int
    extents: tuple[list[Interval], ...]


@st.composite
def shared_files(draw: st.DrawFn) -> Shared:
    """Files cut anywhere, most often near the ends of blocks, the parts dealt to ranks at random."""
    nbytes = draw(near(BLOCK, 7))
    cuts = sorted(min(cut, nbytes) for cut in draw(st.lists(near(BLOCK, 7), max_size=12)))
    parts = [Interval(start=a, end=b) for a, b in pairwise([0, *cuts, nbytes])]
    owners = draw(st.lists(st.integers(0, RANKS - 1), min_size=len(parts), max_size=len(parts)))
    dealt = [[part for part, owner in zip(parts, owners, strict=True) if owner == rank] for rank in range(RANKS)]
    return Shared(nbytes=nbytes, extents=tuple(merged(each) for each in dealt))


def near(unit: int, most: int) -> st.SearchStrategy[int]:
    """Numbers up to `most` units, often multiples or almost."""
    exact = st.builds(lambda k, offset: max(0, k * unit + offset), st.integers(0, most), st.integers(-2, 2))
    return st.one_of(exact, st.integers(0, most * unit))


def owner_of(shared: Shared, byte: int) -> int:
    (owner,) = [
        rank for rank, extents in enumerate(shared.extents) if any(each.start <= byte < each.end for each in extents)
    ]
    return owner


@given(shared=shared_files())
def test_what_ranks_write_tiles_the_file(shared: Shared) -> None:
    written = sorted(
        (block.start, block.end) for extents in shared.extents for block in written_blocks(extents, shared.nbytes)
    )
    assert all(first[1] == second[0] for first, second in pairwise(written))
    if shared.nbytes:
        assert (written[0][0], written[-1][1]) == (0, shared.nbytes)
    else:
        assert not written


@given(shared=shared_files())
def test_a_block_is_written_by_the_owner_of_its_first_byte(shared: Shared) -> None:
    written = [written_blocks(extents, shared.nbytes) for extents in shared.extents]
    for start in range(0, shared.nbytes, BLOCK):
        end = min(start + BLOCK, shared.nbytes)
        writers = [rank for rank, found in enumerate(written) if any(b.start < end and b.end > start for b in found)]
        assert writers == [owner_of(shared, start)]


@given(shared=shared_files())
def test_writers_have_every_byte_once_of_their_own_or_of_the_others_edges(shared: Shared) -> None:
    for rank, extents in enumerate(shared.extents):
        held = np.zeros(shared.nbytes, dtype=int)
        theirs = [
            edge
            for other, found in enumerate(shared.extents)
            if other != rank
            for edge in starts_in_blocks_of_others(found)
        ]
        for part in [*extents, *theirs]:
            held[part.start : part.end] += 1
        for block in written_blocks(extents, shared.nbytes):
            assert (held[block.start : block.end] == 1).all()


@given(shared=shared_files())
def test_edges_are_less_than_a_block_each(shared: Shared) -> None:
    for extents in shared.extents:
        found = starts_in_blocks_of_others(extents)
        assert len(found) <= len(extents)
        for edge in found:
            assert 0 < edge.length < BLOCK
            assert edge.start // BLOCK == (edge.end - 1) // BLOCK
            assert edge.start % BLOCK


@given(shared=shared_files())
def test_whole_blocks_are_written_but_the_files_last(shared: Shared) -> None:
    for extents in shared.extents:
        found = written_blocks(extents, shared.nbytes)
        assert all(block.start % BLOCK == 0 and block.length for block in found)
        assert all(block.end % BLOCK == 0 or block.end == shared.nbytes for block in found)
        assert all(first.end < second.start for first, second in pairwise(found))


@given(start=near(GRID, 3), length=near(GRID, 3))
def test_pieces_tile_an_interval_and_lie_in_one_cell_each(start: int, length: int) -> None:
    found = list(cut_at_grid(Interval(start=start, end=start + length)))
    if not length:
        assert not found
        return
    assert (found[0].start, found[-1].end) == (start, start + length)
    assert all(first.end == second.start for first, second in pairwise(found))
    assert all(first.end % GRID == 0 for first in found[:-1])
    assert all(piece.length and piece.start // GRID == (piece.end - 1) // GRID for piece in found)


def test_the_grid_is_made_of_whole_blocks() -> None:
    assert GRID % BLOCK == 0


@given(data=st.data())
def test_merging_joins_neighbours_and_drops_what_is_empty(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=12)))
    parts = [Interval(start=a, end=b) for a, b in pairwise(cuts)]
    kept = [part for part in parts if data.draw(st.booleans())]
    found = merged(data.draw(st.permutations(kept)))
    assert {at for part in kept for at in range(part.start, part.end)} == {
        at for part in found for at in range(part.start, part.end)
    }
    assert all(part.length for part in found)
    assert all(first.end < second.start for first, second in pairwise(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    begin: int
    end: int


@given(data=st.data())
def test_overlapping_finds_what_a_look_at_all_of_them_finds(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, 60), unique=True, max_size=16)))
    members = [Member(begin=a, end=b) for a, b in pairwise(cuts) if data.draw(st.booleans())]
    begin = data.draw(st.integers(0, 60))
    end = data.draw(st.integers(begin + 1, 61))
    expected = [member for member in members if member.begin < end and member.end > begin]
    assert list(overlapping(members, begin, end)) == expected
