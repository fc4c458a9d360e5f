"""Blocks, edges and pieces of a file: however ranks share it, each block has one writer that gets all of its bytes."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.checkpoint.io import file_slices
from zeromesh.checkpoint.io.file_slices import GRID
from zeromesh.intervals import Interval, merged
from zeromesh.offload.io.direct_io import BLOCK

RANKS = 4


@st.composite
def shared_files(draw: st.DrawFn) -> tuple[int, list[list[Interval]]]:
    """Bytes of files, and extents of each rank, merged: cut anywhere, most often near the ends of blocks, and dealt at random."""
    nbytes = draw(near(BLOCK, 7))
    cuts = sorted(min(cut, nbytes) for cut in draw(st.lists(near(BLOCK, 7), max_size=12)))
    parts = [Interval(start=a, end=b) for a, b in pairwise([0, *cuts, nbytes])]
    owners = draw(st.lists(st.integers(0, RANKS - 1), min_size=len(parts), max_size=len(parts)))
    dealt = [[part for part, owner in zip(parts, owners, strict=True) if owner == rank] for rank in range(RANKS)]
    return nbytes, [merged(each) for each in dealt]


def near(unit: int, most: int) -> st.SearchStrategy[int]:
    """Numbers up to `most` units, often multiples or almost."""
    exact = st.builds(lambda k, offset: max(0, k * unit + offset), st.integers(0, most), st.integers(-2, 2))
    return st.one_of(exact, st.integers(0, most * unit))


@given(shared=shared_files())
def test_each_block_has_one_writer_that_has_all_of_its_bytes(shared: tuple[int, list[list[Interval]]]) -> None:
    """The owner of a block's first byte writes it, and has each byte once: of its own or of the others' edges."""
    nbytes, owned = shared
    written = [file_slices.written_blocks(extents, nbytes) for extents in owned]
    edges = [file_slices.starts_in_others_blocks(extents) for extents in owned]
    ordered = sorted((block.start, block.end) for found in written for block in found)
    assert all(first[1] == second[0] for first, second in pairwise(ordered))
    assert [ordered[0][0], ordered[-1][1]] == [0, nbytes] if nbytes else not ordered
    for start in range(0, nbytes, BLOCK):
        end = min(start + BLOCK, nbytes)
        writers = [rank for rank, found in enumerate(written) if any(b.start < end and b.end > start for b in found)]
        assert writers == [rank for rank, found in enumerate(owned) if any(e.start <= start < e.end for e in found)]
        assert len(writers) == 1
    for rank, extents in enumerate(owned):
        held = np.zeros(nbytes, dtype=int)
        for part in [*extents, *(edge for other, found in enumerate(edges) if other != rank for edge in found)]:
            held[part.start : part.end] += 1
        for block in written[rank]:
            assert (held[block.start : block.end] == 1).all()
            assert block.start % BLOCK == 0
            assert block.length
            assert block.end % BLOCK == 0 or block.end == nbytes
        assert all(first.end < second.start for first, second in pairwise(written[rank]))
        assert len(edges[rank]) <= len(extents)
        for edge in edges[rank]:
            assert 0 < edge.length < BLOCK
            assert edge.start // BLOCK == (edge.end - 1) // BLOCK
            assert edge.start % BLOCK


@given(start=near(GRID, 3), length=near(GRID, 3))
def test_pieces_tile_an_interval_and_lie_in_one_cell_each(start: int, length: int) -> None:
    found = list(file_slices.cut_at_grid(Interval(start=start, end=start + length)))
    if not length:
        assert not found
        return
    assert (found[0].start, found[-1].end) == (start, start + length)
    assert all(first.end == second.start for first, second in pairwise(found))
    assert all(first.end % GRID == 0 for first in found[:-1])
    assert all(piece.length and piece.start // GRID == (piece.end - 1) // GRID for piece in found)
    assert GRID % BLOCK == 0


few_intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6).map(
    lambda rows: [Interval(start=start, end=start + length) for start, length in rows]
)


@given(some=few_intervals)
def test_merging_joins_neighbours_and_drops_what_is_empty(some: list[Interval]) -> None:
    found = merged(some)
    covered, expected = ({at for each in of for at in range(each.start, each.end)} for of in (found, some))
    assert covered == expected
    assert all(each.length for each in found)
    assert all(first.end < second.start for first, second in pairwise(found))


@given(data=st.data())
def test_overlapping_finds_what_a_look_at_all_of_them_finds(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, 60), unique=True, max_size=16)))
    members = [SimpleNamespace(begin=a, end=b) for a, b in pairwise(cuts) if data.draw(st.booleans())]
    begin = data.draw(st.integers(0, 60))
    end = data.draw(st.integers(begin + 1, 61))
    expected = [member for member in members if member.begin < end and member.end > begin]
    assert list(file_slices.overlapping(members, begin, end)) == expected
