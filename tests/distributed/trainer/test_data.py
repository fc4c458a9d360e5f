"""Data workers of ranks: bitwise the run without them, also after a kill; faults with names on every rank; batches on a device."""

import time
from pathlib import Path

import pytest

from tests.support.workers import PoolOptions, Workers

CASES = "data_cases"


def readers_left(folder: Path) -> list[str]:
    """Processes that have read samples and are still there, after a moment."""
    readers = [path.name.partition("-")[2] for path in folder.glob("reader-*")]
    assert readers
    until = time.monotonic() + 2
    while (left := [each for each in readers if Path("/proc", each).exists()]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def folders(tmp_path: Path) -> tuple[Path, Path]:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    return whole, cut


def check_the_rest(workers: Workers, whole: Path, cut: Path, kind: str) -> None:
    """What goes on in `cut`, with another number of workers, ends bitwise like a run without workers that nothing has ended."""
    wanted = workers.run(2, f"{CASES}:trains", folder=str(whole), workers=0, kind=kind)[0]
    rest = workers.run(2, f"{CASES}:trains", folder=str(cut), workers=3, kind=kind)[0]
    assert 0 < len(rest["losses"]) < 6
    assert rest["losses"] == wanted["losses"][-len(rest["losses"]) :]
    assert rest["parameters"] == wanted["parameters"]


def test_a_run_that_was_killed_goes_on_bitwise(workers: Workers, tmp_path: Path) -> None:
    whole, cut = folders(tmp_path)
    pool = workers.fresh(PoolOptions(size=2, timeout_seconds=5.0))
    try:
        arguments = {"folder": str(cut), "workers": 2, "kind": "stream", "after": 3}
        survivor, killed = pool.outcomes(f"{CASES}:trains", **arguments)
        assert (survivor.error, killed.error) == ("CollectiveError", "died")
        assert not set(readers_left(cut)) - {str(pid) for pid in pool.pids}
    finally:
        pool.close()
    check_the_rest(workers, whole, cut, "stream")


@pytest.mark.parametrize(
    ("fault", "message"),
    [("killed", "was ended by SIGKILL"), ("hangs", "a data worker took more than 2 seconds for one microbatch")],
)
def test_data_that_fails_on_one_rank_ends_all(workers: Workers, tmp_path: Path, fault: str, message: str) -> None:
    """The other rank is patient with one that waits for its data, and learns why it has failed. Samples are not lost."""
    whole, cut = folders(tmp_path)
    pool = workers.fresh(PoolOptions(size=2, timeout_seconds=5.0))
    try:
        other, own = pool.outcomes(f"{CASES}:fails", folder=str(cut), fault=fault, timeout=20)
    finally:
        pool.close()
    assert own.error == "DataError"
    assert message in own.message
    assert other.error == "CollectiveError"
    assert "rank 1" in other.message
    assert "DataError" in other.message
    assert other.at - own.at < 2
    if fault == "killed":
        check_the_rest(workers, whole, cut, "map")


def test_batches_are_sent_to_a_device_ahead_of_use(workers: Workers, tmp_path: Path) -> None:
    """From pinned memory, for which nothing waits, and each before the one before it is computed."""
    found = []
    for count, folder in enumerate(folders(tmp_path)):
        found += workers.run(1, f"{CASES}:sent_ahead", device="sim", folder=str(folder), workers=count)
    assert found[0] == found[1]
    assert found[0]["seen"] == ["sent", "sent", "computed", "sent", "computed", "sent", "computed", "computed"]
