"""Tensors that are divided inside of their rows: copied by blocks of rows, written by several ranks at once, checked by one."""

import json
import random
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_cases import KINDS, bits, manifest_of, plans_of, spec, targets_of, tell, write, writers_of, written
from test_regions import Slices, intervals_of, oracle, regions

from zeromesh.checkpoint.format.safetensors_layout import FileLayout, TensorSpec, plan_files
from zeromesh.checkpoint.io import file_slices
from zeromesh.checkpoint.io.file_slices import TensorShard, merged, minus
from zeromesh.checkpoint.io.write_plan import WritePlan, check_interleaved
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, StorageError
from zeromesh.flat.layout import Region
from zeromesh.intervals import Interval
from zeromesh.offload import TieredTensor
from zeromesh.offload.io.direct_io import BLOCK

FEW = settings(max_examples=8)
BF16 = torch.bfloat16


# Rows


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
    local = Interval(start=rows.before(window.start), end=rows.before(window.end))
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


few_intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6).map(
    lambda rows: [Interval(start=start, end=start + length) for start, length in rows]
)


def covered(intervals: list[Interval]) -> set[int]:
    return {at for each in intervals for at in range(each.start, each.end)}


@given(some=few_intervals, others=few_intervals)
def test_stretches_are_sets(some: list[Interval], others: list[Interval]) -> None:
    for found, wanted in ((merged(some), covered(some)), (minus(some, others), covered(some) - covered(others))):
        assert covered(found) == wanted
        assert all(each.length for each in found)
        assert all(one.end < other.start for one, other in pairwise(found))


# Interleaved blocks


def columns_of(shape: tuple[int, int], own: Slices) -> Region:
    return Region(shape=shape, dims=((Interval(start=0, end=shape[0]),), own))


def dealt(
    values: dict[TensorSpec, torch.Tensor], tensor: int, shards: int, rng: random.Random
) -> tuple[list[list[TensorShard]], list[list[torch.Tensor]]]:
    """Columns to tensor ranks, and to each shard an interval, of which other tensor ranks have another; memory is a copy."""
    ranks: list[list[TensorShard]] = [[] for _ in range(tensor * shards)]
    for each, value in values.items():
        cuts = [0, *sorted(rng.sample(range(1, each.shape[1]), 2 * tensor - 1)), each.shape[1]]
        slices = [Interval(start=a, end=b) for a, b in pairwise(cuts)]
        for number in range(tensor):
            own = tuple(slices[number::tensor])
            region = columns_of((each.shape[0], each.shape[1]), own)
            local = torch.cat([value[:, one.start : one.end] for one in own], 1).reshape(-1)
            ends = [0, *(len(local) * n // shards + rng.randrange(9) for n in range(1, shards)), len(local)]
            for shard, (start, end) in enumerate(pairwise(ends)):
                holding = TensorShard(
                    spec=each,
                    region=region,
                    interval=Interval(start=start, end=end),
                    values=TieredTensor.of(local[start:end].clone()),
                    owner=shard,
                )
                ranks[shard * tensor + number].append(holding)
    return ranks, [[each.values.memory for each in holdings] for holdings in ranks]


def matrices(rng: random.Random) -> dict[TensorSpec, torch.Tensor]:
    """Matrices of 64 KiB to some more, between them something small that is not divided into columns."""
    found = {}
    for number, kind in enumerate((*KINDS, "model")):
        shape, dtype = (rng.randrange(150, 200), rng.randrange(120, 150)), rng.choice([torch.float32, torch.float64])
        wide = spec(f"w{number}", shape, dtype, kind)
        found[wide] = torch.randn(wide.shape).to(wide.dtype)
    return found


@given(
    tensor=st.integers(1, 3), shards=st.integers(1, 3), hosts=st.sampled_from(["one", "by shard", "by rank"]),
    seed=st.integers(0, 2**32), readers=st.integers(1, 3),
)  # fmt: skip
@FEW
def test_what_ranks_write_between_each_other_is_read_by_any(
    tensor: int, shards: int, hosts: str, seed: int, readers: int
) -> None:
    rng = random.Random(seed)
    values = matrices(rng)
    ranks, _ = dealt(values, tensor, shards, rng)
    number = [{"one": 0, "by shard": rank // tensor, "by rank": rank}[hosts] for rank in range(tensor * shards)]
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_slices, "GRID", 4 * BLOCK)
        reader = write(Path(root), 7, ranks, hosts=number)
        reader.verify()
        for wanted in dealt(values, readers, 2, rng)[0]:
            before = [bits(holding.values.memory) for holding in wanted]
            for holding in wanted:
                holding.values.memory.zero_()
            targets = targets_of(reader, wanted)
            assert len(targets) == len(wanted)
            reader.read(targets, tell)
            assert [bits(holding.values.memory) for holding in wanted] == before


LARGE = {spec("w", (2000, 600)): torch.randn(2000, 600), spec("v", (600, 1000), BF16): torch.randn(600, 1000).to(BF16)}


def divided(hosts: list[int]) -> tuple[tuple[FileLayout, ...], list[WritePlan]]:
    """Two matrices of 6 MB, two columns by two shards."""
    ranks, _ = dealt(LARGE, 2, 2, random.Random(3))
    files = plan_files(LARGE, 4)
    return files, plans_of(files, ranks, hosts)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 0, 1, 1]])
def test_neither_memory_nor_exchange_grows_with_the_number_of_rows(hosts: list[int]) -> None:
    _, plans = divided(hosts)
    for rank, each in enumerate(plans):
        assert each.any_interleaved
        assert len(each.shares) <= 4
        # Head and tail of each tensor, and what lies around the rows that two hosts have.
        assert sum(map(len, each.runs.values())) <= 12 + 16 * len(set(hosts)) + (rank == 0)
        assert sum(len(data) for _, _, data in each.bytes_for_others()) <= 20 * BLOCK
        assert all({hosts[owner] for owner, _ in block.slices} == {hosts[rank]} for block in each.blocks)
        assert all(block.where.start % BLOCK == block.where.end % BLOCK == 0 for block in each.blocks)


def test_a_rank_that_is_alone_on_its_host_shares_no_block() -> None:
    _, plans = divided([0, 1, 2, 3])
    assert all(len(block.slices) == 1 for each in plans for block in each.blocks)


def test_columns_that_are_not_in_order_are_not_interleaved(tmp_path: Path) -> None:
    """One rank's are enough: all of the tensor goes the other way then."""
    wide = spec("w", (200, 150))
    value = torch.randn(wide.shape)
    regions = [
        columns_of((200, 150), (Interval(start=100, end=150), Interval(start=0, end=30))),
        columns_of((200, 150), (Interval(start=30, end=100),)),
    ]
    locals_ = [torch.cat([value[:, 100:], value[:, :30]], 1), value[:, 30:100]]
    ranks = [
        [
            TensorShard(
                spec=wide,
                region=region,
                interval=Interval(start=0, end=local.numel()),
                values=TieredTensor.of(local.reshape(-1)),
            )
        ]
        for region, local in zip(regions, locals_, strict=True)
    ]
    files = plan_files([wide], 1)
    assert not any(each.blocks or each.shares for each in plans_of(files, ranks))
    reader = write(tmp_path, 1, ranks)
    found = torch.zeros(30000)
    whole = TensorShard(
        spec=wide, region=Region.whole((200, 150)), interval=Interval(start=0, end=30000), values=TieredTensor.of(found)
    )
    reader.read(targets_of(reader, [whole]), tell)
    assert torch.equal(found.view(200, 150), value)


@pytest.mark.parametrize("harm", ["flip", "cut", "silent rank", "missing rank"])
def test_what_is_not_what_a_rank_was_to_write_is_found_before_the_commit(tmp_path: Path, harm: str) -> None:
    files, plans = divided([0, 0, 0, 0])
    directory = CheckpointStore(tmp_path).create(1, files)
    writers = writers_of(directory, plans)
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(tell)
    block = plans[0].blocks[0]
    path = directory / block.path
    rows = [writer.digests for writer in writers]
    with path.open("r+b") as file:
        if harm == "cut":
            file.truncate(block.where.start + 5)
        elif harm == "flip":
            at = plans[1].shares[0].sources[0].begin
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    blocks_ = plans[0].blocks
    if harm == "silent rank":
        rows[1] = []
    elif harm == "missing rank":
        blocks_ = [replace(each, slices=each.slices[:1]) for each in blocks_]
    words = {
        "flip": r"of bytes \[.*\), those of rank 1 are not what rank 1 wrote",
        "silent rank": "those of rank 1 are not what rank 1 wrote",
        "cut": "ends after",
        "missing rank": "belong to some rank; the ranks' parts do not make whole tensors",
    }

    def check() -> None:
        for rank in range(4):
            check_interleaved(directory, blocks_, rows, rank)

    with pytest.raises((CheckpointError, StorageError), match=words[harm]):
        check()


def test_interleaved_blocks_are_pieces_of_the_grid_that_one_rank_has_read(tmp_path: Path) -> None:
    files, plans = divided([0, 0, 1, 1])
    store = CheckpointStore(tmp_path)
    directory = store.create(1, files)
    found = written(directory, plans)
    assert len(found) < 60
    assert {piece.rank for piece in found} == {0, 1, 2, 3}
    store.commit(1, manifest_of(1, files, found))
    manifest = json.loads((store.path(1) / "manifest.json").read_text())
    assert len(manifest["files"]["model-00001-of-00001.safetensors"]["pieces"]) == len(found)
