"""Tensors that are divided inside of their rows: copied by blocks of rows, and exchanged for rows before they are written."""

import random
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stored_cases import KINDS, bits, exchanged, runs_of, small_units, spec, targets_of, tell, verify, write
from tests.unit.checkpoint.test_regions import Slices, intervals_of, oracle, regions
from zeromesh.checkpoint.io import writer
from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.checkpoint.io.format import TensorSpec, plan_files
from zeromesh.checkpoint.io.writer import bytes_for_others
from zeromesh.errors import StorageError
from zeromesh.flat.layout import Region
from zeromesh.intervals import Interval
from zeromesh.offload import TieredTensor, Transfer
from zeromesh.offload.io.direct_io import BLOCK

FEW = settings(max_examples=8)
BF16 = torch.bfloat16


@given(region=regions(), data=st.data())
def test_rows_are_where_numpy_has_the_elements(region: Region, data: st.DataObject) -> None:
    """The elements of any stretch of the logical tensor are one stretch of the local one, and are taken as one."""
    rows, expected = region.rows(), oracle(region).tolist()
    divided = [dim for dim, slices in enumerate(region.dims) if slices != (Interval(start=0, end=region.shape[dim]),)]
    if rows is None:
        assert len(divided) != 1 or expected != sorted(expected) or not expected
        return
    assert len(divided) == 1
    assert rows.count * rows.width == len(torch.zeros(region.shape).reshape(-1))
    window = data.draw(intervals_of(rows.count * rows.width))
    local = Interval(start=rows.count_before(window.start), end=rows.count_before(window.end))
    wanted = [at for at in expected if window.start <= at < window.end]
    assert expected[local.start : local.end] == wanted
    out = torch.zeros(local.length, dtype=torch.int64)
    rows.take(torch.arange(window.start, window.end), window.start, local, out)
    assert out.tolist() == wanted
    tiles = list(rows.tiles(local))
    assert len(tiles) <= 3 * len(rows.columns)
    assert sum(tile.rows * tile.length for tile in tiles) == local.length
    if wanted:
        assert rows.hull(local) == Interval(start=wanted[0], end=wanted[-1] + 1)


def shard_of(each: TensorSpec, value: torch.Tensor, own: Slices, interval: Interval | None) -> TensorShard:
    """Elements of columns, all where no interval is given; memory is a copy."""
    region = Region(shape=each.shape, dims=((Interval(start=0, end=each.shape[0]),), own))
    local = torch.cat([value[:, one.start : one.end] for one in own], 1).reshape(-1)
    interval = interval or Interval(start=0, end=local.numel())
    values = TieredTensor.of(local[interval.start : interval.end].clone())
    return TensorShard(spec=each, region=region, interval=interval, values=values, owner=3)


def dealt(values: dict[TensorSpec, torch.Tensor], tensor: int, shards: int, rng: random.Random) -> list[list[TensorShard]]:
    """Columns to tensor ranks, and to each shard an interval, of which other tensor ranks have another."""
    ranks: list[list[TensorShard]] = [[] for _ in range(tensor * shards)]
    for each, value in values.items():
        cuts = [0, *sorted(rng.sample(range(1, each.shape[1]), 2 * tensor - 1)), each.shape[1]]
        slices = [Interval(start=a, end=b) for a, b in pairwise(cuts)]
        for number in range(tensor):
            own = tuple(slices[number::tensor])
            numel = each.shape[0] * sum(one.length for one in own)
            ends = [0, *(numel * n // shards + rng.randrange(9) for n in range(1, shards)), numel]
            for shard, (start, end) in enumerate(pairwise(ends)):
                interval = Interval(start=start, end=end)
                ranks[shard * tensor + number].append(shard_of(each, value, own, interval))
    return ranks


def matrices(rng: random.Random) -> dict[TensorSpec, torch.Tensor]:
    found = {}
    for number, kind in enumerate((*KINDS, "model")):
        shape, dtype = (rng.randrange(150, 200), rng.randrange(120, 150)), rng.choice([torch.float32, torch.float64])
        wide = spec(f"w{number}", shape, dtype, kind)
        found[wide] = torch.randn(wide.shape).to(wide.dtype)
    return found


@given(tensor=st.integers(1, 3), shards=st.integers(1, 3), seed=st.integers(0, 2**32), readers=st.integers(1, 3))
@FEW
def test_what_ranks_exchanged_and_wrote_is_read_by_any(tensor: int, shards: int, seed: int, readers: int) -> None:
    rng = random.Random(seed)
    values = matrices(rng)
    ranks = dealt(values, tensor, shards, rng)
    with tempfile.TemporaryDirectory() as root, small_units():
        reader = write(Path(root), 7, ranks, tensor=tensor)
        verify(reader)
        for wanted in dealt(values, readers, 2, rng):
            before = [bits(holding.values.memory) for holding in wanted]
            for holding in wanted:
                holding.values.memory.zero_()
            targets = targets_of(reader, wanted)
            assert len(targets) == len(wanted)
            reader.read(targets, tell)
            assert [bits(holding.values.memory) for holding in wanted] == before


def test_neither_runs_nor_what_ranks_send_each_other_grow_with_the_number_of_rows() -> None:
    """Two matrices of 6 MB, two columns by two shards: what a rank has no whole rows of are the ends of its shards."""
    wanted = (spec("w", (2000, 600)), spec("v", (600, 1000), BF16))
    values = {each: torch.randn(each.shape).to(each.dtype) for each in wanted}
    ranks = dealt(values, 2, 2, random.Random(3))
    planned = runs_of(plan_files(values, 4), ranks, 2)
    for after, runs in zip(exchanged(ranks, 2), planned, strict=True):
        whole = [each for each in after if each.region.is_whole]
        assert len(whole) == 2
        assert all(each.owner is None for each in whole)  # No update waits until they are written.
        assert sum(map(len, runs.values())) <= 40
        assert sum(len(data) for _, _, data in bytes_for_others(runs)) <= 20 * BLOCK


@pytest.mark.parametrize("how", ["not in order", "long rows", "another part of the rows"])
def test_what_has_no_whole_rows_is_not_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    wide, value = spec("w", (200, 150)), torch.randn(200, 150)
    ranks = dealt({wide: value}, 2, 1, random.Random(0))
    if how == "not in order":
        own = (Interval(start=100, end=150), Interval(start=0, end=30)), (Interval(start=30, end=100),)
        ranks = [[shard_of(wide, value, each, None)] for each in own]
    elif how == "long rows":
        monkeypatch.setattr(writer, "LONGEST_ROW", 150 * 4 - 1)
    else:
        halves = dealt({wide: value}, 2, 2, random.Random(0))
        ranks = [[*halves[0], *halves[2]], [*halves[3], *halves[1]]]
    assert exchanged(ranks, 2) == ranks
    reader = write(tmp_path, 1, ranks, tensor=2)
    found = torch.zeros(30000)
    whole = TensorShard(
        spec=wide, region=Region.whole((200, 150)), interval=Interval(start=0, end=30000), values=TieredTensor.of(found)
    )
    reader.read(targets_of(reader, [whole]), tell)
    assert torch.equal(found.view(200, 150), value)


def test_a_rank_that_cannot_read_its_values_ends_the_exchange_and_then_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = dealt(matrices(random.Random(1)), 2, 1, random.Random(2))
    lost = ranks[1][0].values

    def fail(start: int, out: torch.Tensor) -> Transfer:
        return Transfer.with_error(StorageError("the disk is gone"))

    monkeypatch.setattr(
        lost, "slice", lambda start, end: SimpleNamespace(read=fail, dtype=None, numel=end - start, whole=lambda device: None)
    )
    with pytest.raises(StorageError, match="the disk is gone"):
        exchanged(ranks, 2)
