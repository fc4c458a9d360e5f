"""Kills, full disks and damage while a run saves: nothing is lost but what was not yet saved, and every reason is named."""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.test_resume import step, unequal
from tests.support.workers import Outcome, Pool, PoolOptions, Workers

STEPS = 15
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def undisturbed(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The run that every other one has to become, and its losses."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = workers.run(2, "checkpoint_cases:trained", folder=str(folder), steps=STEPS, sections={})
    return folder, found[0]["losses"]


@pytest.fixture
def fresh(workers: Workers) -> Iterator[Any]:
    """Runs a case in processes of its own, in which anything may happen."""
    pools: list[Pool] = []

    def play(case: str, *, size: int = 2, stuck: tuple[int, ...] = (), **arguments: Any) -> list[Outcome]:
        pools.append(workers.fresh(PoolOptions(size=size, timeout_seconds=3.0)))
        return pools[-1].outcomes(f"checkpoint_cases:{case}", timeout=60, stuck=stuck, **arguments)

    yield play
    for pool in pools:
        pool.close()


def pieces_of(checkpoint: Path, rank: int) -> int:
    """How many pieces of tensors a rank has written."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    rows = [row for path, file in files.items() if path.endswith(".safetensors") for row in file["pieces"]]
    return sum(row[3] == rank for row in rows)


def resumes(workers: Workers, folder: Path, undisturbed: tuple[Path, list[float]]) -> dict[str, Any]:
    """Go on in fresh health to the last step; the end has to be that of the undisturbed run."""
    found = workers.run(2, "checkpoint_cases:noted", folder=str(folder), steps=STEPS, sections={})[0]
    assert found["all"] == undisturbed[1]
    assert unequal(step(folder, STEPS), step(undisturbed[0], STEPS)) == []
    left = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert left == ["step-00000005", "step-00000010", "step-00000015"]
    return found


SITES = ("before-tmp", "mid-write", "before-manifest", "before-rename", "after-rename", "during-retention")


@pytest.mark.parametrize(
    "site",
    [
        pytest.param("before-tmp", marks=FULL),
        "mid-write",
        pytest.param("before-manifest", marks=FULL),
        pytest.param("before-rename", marks=FULL),
        pytest.param("after-rename", marks=FULL),
        "during-retention",
        pytest.param("forward", marks=FULL),
        pytest.param("reduce", marks=FULL),
        "optimizer",
    ],
)
@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=FULL), True])
def test_a_kill_anywhere_loses_nothing_that_was_saved(
    workers: Workers, fresh: Any, tmp_path: Path, undisturbed: tuple[Path, list[float]], site: str, asynchronous: bool
) -> None:
    inside_step = site in ("forward", "reduce", "optimizer")
    rank = int(site == "mid-write" or inside_step)
    count = 40 if inside_step else 2 if site != "during-retention" else 1
    if site == "mid-write":
        count = pieces_of(step(undisturbed[0], 5), rank) + 1  # the first of the second save
    keep = 1 if site == "during-retention" else 3
    outcomes = fresh(
        "struck",
        fault=f"kill@{site}:{rank}:{count}",
        folder=str(tmp_path),
        steps=STEPS,
        sections={"checkpoint": {"asynchronous": asynchronous, "keep_last": keep}},
    )
    assert outcomes[rank].error == "died"
    assert outcomes[1 - rank].error == "CollectiveError"
    assert f"rank {rank} is gone" in outcomes[1 - rank].message
    found = resumes_or_keeps_one(workers, tmp_path, undisturbed, keep)
    assert "resumed from step" in found["said"]


def resumes_or_keeps_one(
    workers: Workers, folder: Path, undisturbed: tuple[Path, list[float]], keep: int
) -> dict[str, Any]:
    if keep == 3:
        return resumes(workers, folder, undisturbed)
    found = workers.run(2, "checkpoint_cases:noted", folder=str(folder), steps=STEPS, sections={})[0]
    assert unequal(step(folder, STEPS), step(undisturbed[0], STEPS)) == []
    assert found["all"] == undisturbed[1]
    return found


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bit-flip", "are not what rank"),
        pytest.param("short-write", "are not what rank", marks=FULL),
        ("truncate", "were written|are not what rank"),  # what others write behind the cut makes the file long again
    ],
)
@pytest.mark.parametrize("site", ["mid-write", pytest.param("after-rename", marks=FULL)])
def test_damage_is_named_and_the_checkpoint_before_it_used(
    workers: Workers,
    fresh: Any,
    tmp_path: Path,
    undisturbed: tuple[Path, list[float]],
    kind: str,
    words: str,
    site: str,
) -> None:
    # The write that is damaged is of the second of two checkpoints: it is found when the run is resumed.
    count = pieces_of(step(undisturbed[0], 5), 0) + 1 if site == "mid-write" else 2
    fresh("struck", fault=f"{kind}@{site}:0:{count}", folder=str(tmp_path), steps=10, sections={})
    found = resumes(workers, tmp_path, undisturbed)
    assert "checkpoint of step 10 skipped" in found["said"]
    assert re.search(words, found["said"].replace("\n", " "))
    assert "safetensors" in found["said"]
    assert "resumed from step 5" in found["said"]


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=FULL), True])
@pytest.mark.parametrize(
    "site",
    ["before-tmp", "mid-write", *(pytest.param(site, marks=FULL) for site in ("before-manifest", "before-rename"))],
)
def test_a_full_disk_is_said_and_training_goes_on(
    workers: Workers, fresh: Any, tmp_path: Path, undisturbed: tuple[Path, list[float]], site: str, asynchronous: bool
) -> None:
    rank = int(site == "mid-write")
    outcomes = fresh(
        "noted",
        fault=f"disk-full@{site}:{rank}:1",
        folder=str(tmp_path),
        steps=STEPS,
        sections={"checkpoint": {"asynchronous": asynchronous}},
    )
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    said = " ".join(outcomes[0].result["said"].split())
    assert "WARNING: the checkpoint of step 5 was not written" in said
    assert "No space left on device" in said
    assert f"rank {rank}" in said
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["step-00000010", "step-00000015"]
    assert unequal(step(tmp_path, STEPS), step(undisturbed[0], STEPS)) == []


def test_where_no_checkpoint_could_be_written_no_step_is_made(fresh: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").parent.mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the directory should be")
    for outcome in fresh("trained", folder=str(tmp_path), steps=20, sections={}):
        assert outcome.error == "StorageError"
        assert "checkpoints' cannot be written: File exists" in outcome.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_disk_that_is_too_small_is_found_before_the_first_step(fresh: Any, tmp_path: Path) -> None:
    for outcome in fresh("cramped", folder=str(tmp_path), free=1 << 20):
        assert outcome.error == "StorageError"
        assert re.search(
            r"rank 0: .*a checkpoint takes [0-9,]+ bytes, 16,777,216 more are kept free, and 1,048,576 are free; make room",
            outcome.message,
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_saves_that_always_fail_end_the_run(fresh: Any, tmp_path: Path) -> None:
    sections = {"checkpoint": {"max_failures": 2, "asynchronous": False}}
    outcomes = fresh("trained", folder=str(tmp_path), steps=20, sections=sections, lost_disk=True)
    assert [outcome.error for outcome in outcomes] == ["StorageError", "StorageError"]
    assert "2 saves in a row have failed" in outcomes[0].message
    assert "checkpoints" in outcomes[0].message


def test_a_rank_that_hangs_in_a_save_is_named(fresh: Any, tmp_path: Path) -> None:
    sections = {"parallel": {"timeout_seconds": 4.0}}
    arguments = {"fault": "hang@mid-write:1:2", "folder": str(tmp_path), "steps": STEPS, "sections": sections}
    outcomes = fresh("struck", stuck=(1,), **arguments)
    assert outcomes[0].error == "CollectiveError"
    assert "rank 1" in outcomes[0].message


def test_other_settings_are_refused_and_listed(workers: Workers, fresh: Any, tmp_path: Path) -> None:
    workers.run(2, "checkpoint_cases:trained", folder=str(tmp_path), steps=5, sections={})
    outcomes = fresh(
        "trained", folder=str(tmp_path), steps=10, sections={"optimizer": {"lr": 0.5}, "batch": {"global_size": 4}}
    )
    assert {outcome.error for outcome in outcomes} == {"ConfigError"}
    assert "optimizer.lr: 0.01 then, 0.5 now" in outcomes[0].message
    assert "batch.global_size: 8 then, 4 now" in outcomes[0].message
    outcomes = fresh("trained", folder=str(tmp_path), steps=10, sections={}, kind="gpt2")
    assert {outcome.error for outcome in outcomes} == {"ConfigError"}
    assert "model.class: LlamaForCausalLM then, GPT2LMHeadModel now" in outcomes[0].message
    outcomes = fresh("trained", folder=str(tmp_path), steps=10, sections={"checkpoint": {"resume": "never"}})
    assert "holds checkpoints of an earlier run, up to step 5" in outcomes[0].message


def test_a_path_starts_from_another_run_all_the_same(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, "checkpoint_cases:trained", folder=f"{tmp_path}/a", steps=5, sections={})
    for given in (f"{tmp_path}/a/run", str(step(tmp_path / "a", 5))):
        folder = tmp_path / str(len(given))
        sections = {"optimizer": {"lr": 0.02}, "checkpoint": {"resume": given}}
        found = workers.run(3, "checkpoint_cases:noted", folder=str(folder), steps=7, sections=sections)[0]
        assert len(found["losses"]) == 2
        assert "resumed with another setting: optimizer.lr: 0.01 then, 0.02 now" in found["said"]


def test_no_usable_checkpoint_is_an_error_and_not_a_new_start(workers: Workers, fresh: Any, tmp_path: Path) -> None:
    workers.run(2, "checkpoint_cases:trained", folder=str(tmp_path), steps=5, sections={})
    manifest = step(tmp_path, 5) / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "step": 6}))
    outcomes = fresh("trained", folder=str(tmp_path), steps=10, sections={})
    assert {outcome.error for outcome in outcomes} == {"CheckpointError"}
    assert "does not agree with its own sha256" in outcomes[0].message


def test_a_second_run_in_one_directory_is_refused(workers: Workers, fresh: Any, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "run.lock").open("w") as lock:
        lock.write("pid 1 on elsewhere\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcomes = fresh("trained", folder=str(tmp_path), steps=5, sections={})
    assert outcomes[0].error == "StorageError"
    assert "belongs to a run that is going on (pid 1 on elsewhere)" in outcomes[0].message


KILLS = 30


@pytest.mark.full
def test_kills_at_random_instants(workers: Workers, tmp_path: Path) -> None:
    """Half of them inside saving. Each time the run starts again, with a checkpoint after every second step."""
    chosen = random.Random(KILLS)
    run = {"steps": 8 * KILLS, "sections": {"checkpoint": {"every_steps": 2}}}
    straight = workers.run(2, "checkpoint_cases:trained", folder=f"{tmp_path}/a", **run)[0]
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
    found = workers.run(2, "checkpoint_cases:trained", folder=f"{tmp_path}/b", **run)[0]
    assert found["all"] == straight["all"]
    assert unequal(step(tmp_path / "a", 8 * KILLS), step(tmp_path / "b", 8 * KILLS)) == []


def kill_later(marker: Path, pid: int, seconds: float, *signals: signal.Signals) -> None:
    """Signal a process a while after training has begun, and again after as long."""
    while not marker.exists():
        time.sleep(0.01)
    for number in signals or (signal.SIGKILL,):
        time.sleep(seconds)
        os.kill(pid, number)


@pytest.mark.parametrize(
    ("number", "error", "words"), [(signal.SIGTERM, "SystemExit", "143"), (signal.SIGINT, "KeyboardInterrupt", "")]
)
def test_a_signal_to_one_rank_saves_and_ends_all(
    workers: Workers,
    tmp_path: Path,
    undisturbed: tuple[Path, list[float]],
    number: signal.Signals,
    error: str,
    words: str,
) -> None:
    marker = tmp_path / "started"
    run = {"folder": str(tmp_path), "steps": STEPS, "sections": {"checkpoint": {"every_steps": 100}}}
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5.0)) as pool:
        killer = threading.Thread(target=kill_later, args=(marker, pool.pids[1], 0.5, number))
        killer.start()
        outcomes = pool.outcomes("checkpoint_cases:trained", timeout=60, marker=str(marker), rest=0.2, **run)
        killer.join()
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [(error, words)] * 2
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert 1 <= int(saved.name.removeprefix("step-")) < STEPS
    found = workers.run(2, "checkpoint_cases:trained", **run)[0]
    assert found["all"] == undisturbed[1]
    assert unequal(step(tmp_path, STEPS), step(undisturbed[0], STEPS)) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "SystemExit 143"), pytest.param(signal.SIGINT, "KeyboardInterrupt", marks=FULL)],
)
def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(
    workers: Workers, tmp_path: Path, number: signal.Signals, words: str
) -> None:
    for found in workers.run(2, "checkpoint_cases:signalled", folder=str(tmp_path), number=int(number)):
        assert found == {"ended": words, "batches": 3, "all": 11}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


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
