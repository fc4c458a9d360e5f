"""Hosts without a shared disk: each has a part of every checkpoint, and a run goes on from the parts, whoever has which."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.test_resume import full, step, train, unequal
from tests.support.stored_cases import verify
from tests.support.workers import CaseError, Pool, PoolOptions, Workers
from zeromesh.checkpoint.io.reader import CheckpointReader, TensorFiles
from zeromesh.checkpoint.loader import merge, open_parts
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.trainer.checkpoints.manager import _metric_of
from zeromesh.trainer.tools.checkpoint.reading import list_checkpoints

STEPS = 6
EVERY = {"checkpoint": {"every_steps": 2}}
TWO = [0, 0, 1, 1]


@pytest.fixture(scope="module")
def apart(workers: Workers) -> Iterator[Any]:
    """Runs a case with ranks that take themselves to be on hosts of their own; a host's disk is what `disks` says."""
    pools: dict[int, Pool] = {}

    def play(disks: list[int], folder: Path, steps: int = STEPS, case: str = "noted", **arguments: Any) -> list[Any]:
        size = len(disks)
        if size not in pools or not pools[size].open:
            pools[size] = workers.fresh(PoolOptions(size=size, hosts=1, timeout_seconds=10.0))
        given = {"folder": str(folder), "steps": steps, "disks": disks, "sections": EVERY, **arguments}
        return pools[size].run(f"checkpoint_cases:{case}", **given)

    yield play
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def undisturbed(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of four ranks with one disk that every other one has to become."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(workers, 4, folder, STEPS, sections=EVERY)
    return folder


@pytest.fixture(scope="module")
def parted(apart: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of four ranks on two disks."""
    folder = tmp_path_factory.mktemp("parted")
    apart(TWO, folder, 4)
    return folder


@pytest.fixture
def copied(parted: Path, tmp_path: Path) -> Path:
    shutil.copytree(parted, tmp_path / "run", dirs_exist_ok=True)
    return tmp_path / "run"


def whole(folder: Path, number: int, out: Path) -> Path:
    """The parts of a step put together."""
    merge(open_parts([step(disk, number) for disk in sorted(folder.glob("disk-*"))]), out, lambda nbytes: None)
    verify(CheckpointReader(out))
    return out


def test_parts_put_together_are_the_checkpoint(parted: Path, undisturbed: Path, tmp_path: Path) -> None:
    assert unequal(whole(parted, 4, tmp_path / "out"), step(undisturbed, 4)) == []
    ours, theirs = (json.loads((path / "trainer_state.json").read_text()) for path in (tmp_path / "out", step(undisturbed, 4)))
    for each in (ours, theirs):  # The runs were to have other lengths.
        each["max_steps"] = each["settings"]["run.max_steps"] = 0
    assert ours == theirs


def test_a_part_takes_no_room_for_what_others_write(parted: Path) -> None:
    used = [sum(path.stat().st_blocks * 512 for path in step(parted / f"disk-{disk}", 4).rglob("*.safetensors")) for disk in (0, 1)]
    total = sum(path.stat().st_size for path in step(parted / "disk-0", 4).rglob("*.safetensors"))
    assert total <= sum(used) < 1.3 * total
    assert max(used) < 0.8 * total


@pytest.mark.parametrize(
    "disks",
    [full(TWO), full([1, 0, 1]), full([0, 1]), full([0, 1, 1, 0, 1]), [2, 0, 1], full([0, 1, 2])],
    ids=lambda disks: "-".join(map(str, disks)),
)
def test_a_run_goes_on_from_parts(apart: Any, copied: Path, undisturbed: Path, tmp_path: Path, disks: list[int]) -> None:
    """Other numbers of ranks need bytes of parts that they do not see; a host that joins has an empty disk, 2."""
    before = whole(copied, 4, tmp_path / "before")
    assert "resumed from step 4" in apart(disks, copied, mirror=str(tmp_path / "mirror"))[0]["said"]
    assert unequal(before, tmp_path / "mirror" / "step-00000000") == []
    if disks == TWO:
        assert unequal(whole(copied, STEPS, tmp_path / "out"), step(undisturbed, STEPS)) == []
    if 2 in disks:
        assert len(open_parts([step(disk, STEPS) for disk in sorted(copied.glob("disk-*"))])) == 3
        return
    for disk in (0, 1):
        assert sorted(path.name for path in step(copied / f"disk-{disk}", 2).parent.iterdir()) == [
            "step-00000002", "step-00000004", "step-00000006"
        ]  # fmt: skip


def test_a_host_that_joins_reads_a_whole_checkpoint_through_those_that_have_it(
    apart: Any, undisturbed: Path, tmp_path: Path
) -> None:
    """The first rank is on a disk that has nothing, as where a run of one host goes on with two of them."""
    shutil.copytree(undisturbed / "run", tmp_path / "disk-0" / "run")
    shutil.rmtree(step(tmp_path / "disk-0", STEPS))
    said = apart([1, 0], tmp_path, mirror=str(tmp_path / "mirror"))[0]["said"]
    assert "resumed from step 4" in said
    assert unequal(step(undisturbed, 4), tmp_path / "mirror" / "step-00000000") == []
    assert len(open_parts([step(tmp_path / f"disk-{disk}", STEPS) for disk in (0, 1)])) == 2


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("flip", "are not what rank"),
        ("absent", "part 2 of 2 is missing"),
        full("foreign", "are not parts of one checkpoint"),
        full("whole", "is another checkpoint on rank"),
    ],
)
def test_a_part_that_is_not_right_is_named_and_the_checkpoint_before_used(
    apart: Any, copied: Path, undisturbed: Path, tmp_path: Path, harm: str, words: str
) -> None:
    victim = step(copied / "disk-1", 4)
    if harm == "flip":
        path = next(victim.glob("model-*.safetensors"))
        piece = json.loads((victim / "manifest.json").read_text())["files"][path.name]["pieces"][0]
        content = bytearray(path.read_bytes())
        content[piece[0] + 1] ^= 1
        path.write_bytes(content)
    elif harm == "absent":
        shutil.rmtree(victim)
    elif harm == "foreign":  # of another save of the same step
        apart(TWO, tmp_path / "again", 4)
        shutil.rmtree(victim)
        shutil.copytree(step(tmp_path / "again" / "disk-1", 4), victim)
    else:
        shutil.rmtree(victim)
        shutil.copytree(step(undisturbed, 4), victim)
    said = " ".join(apart(TWO, copied)[0]["said"].split())
    assert "checkpoint of step 4 skipped" in said
    assert any(word in said for word in words.split("|")), said
    assert "resumed from step 2" in said
    assert unequal(whole(copied, STEPS, tmp_path / "out"), step(undisturbed, STEPS)) == []


def test_without_a_host_no_new_run_begins(apart: Any, copied: Path) -> None:
    shutil.rmtree(copied / "disk-0")
    with pytest.raises(CaseError, match=r"no checkpoint in .* can be used, and a new run would replace them"):
        apart([0, 1], copied)
    assert step(copied / "disk-1", 4).exists()


def test_a_part_that_cannot_be_committed_leaves_no_sibling(apart: Any, tmp_path: Path) -> None:
    (found, *_) = apart(TWO, tmp_path, 4, fault="disk-full@before-manifest:2:1")
    assert "the checkpoint of step 2 was not written: rank 2" in " ".join(found["said"].split())
    for disk in (0, 1):
        assert [path.name for path in step(tmp_path / f"disk-{disk}", 2).parent.iterdir()] == ["step-00000004"]


def test_a_host_that_cannot_write_is_named_before_training(apart: Any, tmp_path: Path) -> None:
    (tmp_path / "disk-1" / "run").mkdir(parents=True)
    (tmp_path / "disk-1" / "run" / "checkpoints").write_text("a file")
    with pytest.raises(CaseError, match=r"rank 2: .*checkpoints' cannot be written: File exists"):
        apart(TWO, tmp_path)


def test_a_part_says_that_it_is_one(parted: Path) -> None:
    """Its files have holes, which would be read as zeros; its metric is in the first part, and must not be taken for the worst."""
    text = "\n".join(list_checkpoints(parted / "disk-1" / "run", as_json=False))
    assert text.count("part 2 of 2") == 2
    assert "NOT WHOLE" not in text
    part = step(parted / "disk-1", 4)
    with pytest.raises(ConfigError, match=r"is part 2 of 2 of a checkpoint.*zeromesh checkpoint merge"):
        TensorFiles(part)
    with pytest.raises(CheckpointError, match="is part 2 of 2"):
        CheckpointReader(part)
    assert _metric_of(step(parted / "disk-0", 4)) == float("inf")
    assert _metric_of(part) is None
