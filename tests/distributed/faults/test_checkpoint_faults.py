"""Kills, full disks and damage while a run saves: nothing is lost but what was not yet saved, and every reason is named."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.test_resume import full, step, train, unequal
from tests.support.workers import Outcome, PoolOptions, Workers

STEPS = 15
Undisturbed = tuple[Path, list[float]]


@pytest.fixture(scope="module")
def undisturbed(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that every other one has to become, and its losses."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, train(workers, 2, folder, STEPS)["losses"]


@pytest.fixture(scope="module")
def five(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of two ranks, with a checkpoint after them; not to be changed."""
    folder = tmp_path_factory.mktemp("five")
    train(workers, 2, folder, 5)
    return folder


@pytest.fixture
def fresh(workers: Workers, tmp_path: Path) -> Iterator[Any]:
    """Runs a case in processes of its own, in which anything may happen, up to the last step unless told otherwise."""
    with ExitStack() as pools:

        def play(case: str, *, size: int = 2, stuck: tuple[int, ...] = (), **arguments: Any) -> list[Outcome]:
            pool = pools.enter_context(workers.fresh(PoolOptions(size=size, timeout_seconds=3.0)))
            given = {"folder": str(tmp_path), "steps": STEPS, "sections": {}, **arguments}
            return pool.outcomes(f"checkpoint_cases:{case}", timeout=60, stuck=stuck, **given)

        yield play


def pieces_of(checkpoint: Path, rank: int) -> int:
    """How many pieces of tensors a rank has written."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    rows = [row for path, file in files.items() if path.endswith(".safetensors") for row in file["pieces"]]
    return sum(row[3] == rank for row in rows)


@pytest.fixture
def resumed(workers: Workers, tmp_path: Path, undisturbed: Undisturbed) -> Any:
    """Goes on in fresh health to the last step, with which the undisturbed run ended; returns what is said."""

    def go_on(*kept: int) -> str:
        found = train(workers, 2, tmp_path, STEPS, "noted")
        assert found["all"] == undisturbed[1]
        assert unequal(step(tmp_path, STEPS), step(undisturbed[0], STEPS)) == []
        assert not kept or checkpoints(tmp_path) == [step(tmp_path, number) for number in kept]
        return str(found["said"])

    return go_on


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "checkpoints").iterdir())


SITES = ("before-tmp", "mid-write", "before-manifest", "before-rename", "after-rename", "during-retention")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "site",
    [
        *("mid-write", "during-retention", "optimizer"),
        *map(full, ("before-tmp", "before-manifest", "before-rename", "after-rename", "forward", "reduce")),
    ],
)
@pytest.mark.parametrize("asynchronous", [full(False), True])
def test_a_kill_anywhere_loses_nothing_that_was_saved(
    fresh: Any, resumed: Any, undisturbed: Undisturbed, site: str, asynchronous: bool
) -> None:
    inside_step = site in ("forward", "reduce", "optimizer")
    rank = int(site == "mid-write" or inside_step)
    count = 40 if inside_step else 2 if site != "during-retention" else 1
    if site == "mid-write":
        count = pieces_of(step(undisturbed[0], 5), rank) + 1  # the first of the second save
    keep = 1 if site == "during-retention" else 3
    sections = {"checkpoint": {"asynchronous": asynchronous, "keep_last": keep}}
    outcomes = fresh("struck", fault=f"kill@{site}:{rank}:{count}", sections=sections)
    assert outcomes[rank].error == "died"
    assert outcomes[1 - rank].error == "CollectiveError"
    assert f"rank {rank} is gone" in outcomes[1 - rank].message
    assert "resumed from step" in resumed(*(() if keep == 1 else (5, 10, 15)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bit-flip", "are not what rank"),
        full("short-write", "are not what rank"),
        full("truncate", "were written|are not what rank"),  # what others write behind the cut makes the file long again
    ],
)
@pytest.mark.parametrize("site", ["mid-write", full("after-rename")])
def test_damage_is_named_and_the_checkpoint_before_it_used(
    fresh: Any, resumed: Any, undisturbed: Undisturbed, kind: str, words: str, site: str
) -> None:
    # The write that is damaged is of the second of two checkpoints: it is found when the run is resumed.
    count = pieces_of(step(undisturbed[0], 5), 0) + 1 if site == "mid-write" else 2
    fresh("struck", fault=f"{kind}@{site}:0:{count}", steps=10)
    said = resumed(5, 10, 15)
    assert "checkpoint of step 10 skipped" in said
    assert re.search(words, said.replace("\n", " "))
    assert "safetensors" in said
    assert "resumed from step 5" in said


@pytest.mark.parametrize("asynchronous", [full(False), True])
@pytest.mark.parametrize("site", ["before-tmp", "mid-write", *map(full, ("before-manifest", "before-rename"))])
def test_a_full_disk_is_said_and_training_goes_on(
    fresh: Any, tmp_path: Path, undisturbed: Undisturbed, site: str, asynchronous: bool
) -> None:
    rank = int(site == "mid-write")
    sections = {"checkpoint": {"asynchronous": asynchronous}}
    outcomes = fresh("noted", fault=f"disk-full@{site}:{rank}:1", sections=sections)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    said = " ".join(outcomes[0].result["said"].split())
    assert "WARNING: the checkpoint of step 5 was not written" in said
    assert "No space left on device" in said
    assert f"rank {rank}" in said
    assert checkpoints(tmp_path) == [step(tmp_path, 10), step(tmp_path, 15)]
    assert unequal(step(tmp_path, STEPS), step(undisturbed[0], STEPS)) == []


def blocked(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "checkpoints").write_text("a file where the directory should be")


def changed(folder: Path) -> None:
    manifest = step(folder, 5) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": 6}))


TOO_SMALL = r"rank 0: .*a checkpoint takes [0-9,]+ bytes, and 16,777,216 stay free; 1,048,576 are free; make room"


@pytest.mark.parametrize(
    ("before", "given", "error", "words"),
    [
        (blocked, {}, "StorageError", r"checkpoints' cannot be written: File exists"),
        (None, {"case": "cramped", "free": 1 << 20}, "StorageError", TOO_SMALL),
        (
            *(5, {"sections": {"optimizer": {"lr": 0.5}, "batch": {"global_size": 4}}}, "ConfigError"),
            r"(?s)optimizer\.lr: 0\.01 then, 0\.5 now.*batch\.global_size: 8 then, 4 now",
        ),
        (5, {"kind": "gpt2"}, "ConfigError", "model.class: LlamaForCausalLM then, GPT2LMHeadModel now"),
        (
            *(5, {"sections": {"checkpoint": {"resume": "never"}}}, "ConfigError"),
            "holds checkpoints of an earlier run, up to step 5",
        ),
        (changed, {}, "CheckpointError", "does not agree with its own sha256"),
    ],
)
def test_what_cannot_be_saved_or_gone_on_from_is_said_before_the_first_step(
    workers: Workers, five: Path, tmp_path: Path, before: Any, given: dict[str, Any], error: str, words: str
) -> None:
    folder = five if before == 5 else tmp_path
    if before is changed:
        shutil.copytree(five, tmp_path, dirs_exist_ok=True)
    if callable(before):
        before(folder)
    arguments = {"folder": str(folder), "case": "trained", **given}
    case = arguments.pop("case")
    if case == "trained":
        arguments = {"steps": 20, "sections": {}, **arguments}
    lines = folder / "run" / "metrics.jsonl"
    known = lines.read_text() if lines.exists() else None
    for outcome in workers.pool(2).outcomes(f"checkpoint_cases:{case}", **arguments):
        assert outcome.error == error
        assert re.search(words, outcome.message)
    assert (lines.read_text() if lines.exists() else None) == known


def test_saves_that_always_fail_end_the_run(fresh: Any) -> None:
    sections = {"checkpoint": {"max_failures": 2, "asynchronous": False}}
    outcomes = fresh("trained", sections=sections, lost_disk=True)
    assert [outcome.error for outcome in outcomes] == ["StorageError", "StorageError"]
    assert "2 saves in a row failed" in outcomes[0].message
    assert "checkpoints" in outcomes[0].message


def test_a_rank_that_hangs_in_a_save_is_named(fresh: Any) -> None:
    sections = {"parallel": {"timeout_seconds": 1.0}}
    outcomes = fresh("struck", stuck=(1,), fault="hang@mid-write:1:2", sections=sections)
    assert outcomes[0].error == "CollectiveError"
    assert "rank 1" in outcomes[0].message


def test_a_path_starts_from_another_run_all_the_same(workers: Workers, five: Path, tmp_path: Path) -> None:
    for number, given in enumerate((five / "run", step(five, 5))):
        sections = {"optimizer": {"lr": 0.02}, "checkpoint": {"resume": str(given)}}
        found = train(workers, 3, tmp_path / str(number), 7, "noted", sections=sections)
        assert len(found["losses"]) == 2
        assert "resumed with another setting: optimizer.lr: 0.01 then, 0.02 now" in found["said"]


def test_a_second_run_in_one_directory_is_refused(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "run.lock").open("w") as lock:
        lock.write("pid 1 on elsewhere\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        arguments = {"folder": str(tmp_path), "steps": 5, "sections": {}}
        first, _ = workers.pool(2).outcomes("checkpoint_cases:trained", **arguments)
    assert first.error == "ConfigError"
    assert "belongs to a run that is going on (pid 1 on elsewhere)" in first.message


KILLS = 30


@pytest.mark.full
def test_kills_at_random_instants(workers: Workers, tmp_path: Path) -> None:
    """Half of them inside saving. Each time the run starts again, with a checkpoint after every second step."""
    chosen = random.Random(KILLS)
    run: dict[str, Any] = {"steps": 8 * KILLS, "sections": {"checkpoint": {"every_steps": 2}}}
    straight = train(workers, 2, tmp_path / "a", **run)
    for number in range(KILLS):
        marker = tmp_path / f"started-{number}"
        arguments = {**run, "folder": f"{tmp_path}/b", "marker": str(marker)}
        with workers.fresh(PoolOptions(size=2, timeout_seconds=3.0)) as pool:
            if number % 2:
                fault = f"kill@{chosen.choice(SITES[:-1])}:0:{chosen.randint(1, 3)}"
                outcomes = pool.outcomes("checkpoint_cases:struck", timeout=60, fault=fault, **arguments)
            else:
                killer = threading.Thread(
                    target=kill_later, args=(marker, pool.pids[chosen.randrange(2)], chosen.uniform(0.0, 0.6))
                )
                killer.start()
                outcomes = pool.outcomes("checkpoint_cases:trained", timeout=60, **arguments)
                killer.join()
        assert sorted(outcome.error for outcome in outcomes) == ["CollectiveError", "died"], outcomes
    assert train(workers, 2, tmp_path / "b", **run)["all"] == straight["all"]
    assert unequal(step(tmp_path / "a", 8 * KILLS), step(tmp_path / "b", 8 * KILLS)) == []


def kill_later(marker: Path, pid: int, seconds: float, *signals: signal.Signals) -> None:
    """Signal a process a while after training has begun, and again after as long."""
    while not marker.exists():
        time.sleep(0.01)
    for number in signals or (signal.SIGKILL,):
        time.sleep(seconds)
        os.kill(pid, number)


@pytest.mark.parametrize(
    ("number", "error", "words"), [(signal.SIGTERM, "SystemExit", "143"), full(signal.SIGINT, "KeyboardInterrupt", "")]
)
def test_a_signal_to_one_rank_saves_and_ends_all(
    workers: Workers, tmp_path: Path, resumed: Any, number: signal.Signals, error: str, words: str
) -> None:
    marker = tmp_path / "started"
    run = {"folder": str(tmp_path), "steps": STEPS, "sections": {"checkpoint": {"every_steps": 100}}}
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5.0)) as pool:
        killer = threading.Thread(target=kill_later, args=(marker, pool.pids[1], 0.5, number))
        killer.start()
        outcomes = pool.outcomes("checkpoint_cases:trained", timeout=60, marker=str(marker), rest=0.2, **run)
        killer.join()
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [(error, words)] * 2
    (saved,) = checkpoints(tmp_path)
    assert 1 <= int(saved.name.removeprefix("step-")) < STEPS
    resumed()


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "SystemExit 143"), full(signal.SIGINT, "KeyboardInterrupt")])
def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(
    workers: Workers, tmp_path: Path, number: signal.Signals, words: str
) -> None:
    for found in workers.run(2, "checkpoint_cases:signalled", folder=str(tmp_path), number=int(number)):
        assert found == {"ended": words, "batches": 3, "all": 11}
    assert checkpoints(tmp_path) == [step(tmp_path, 4)]


def test_a_second_signal_ends_a_rank_at_once(workers: Workers, tmp_path: Path) -> None:
    marker = tmp_path / "started"
    run = {"folder": str(tmp_path), "steps": STEPS, "sections": {}}
    with workers.fresh(PoolOptions(size=1)) as pool:
        signals = (signal.SIGTERM, signal.SIGTERM)
        killer = threading.Thread(target=kill_later, args=(marker, pool.pids[0], 1.2, *signals))
        killer.start()
        began = time.monotonic()
        outcomes = pool.outcomes("checkpoint_cases:trained", timeout=60, marker=str(marker), rest=30.0, **run)
        killer.join()
    assert outcomes[0].error == "died"
    assert time.monotonic() - began < 15
