"""The simulated device finds what is wrong on a real one. Whatever runs on it elsewhere is held by this."""

import math

import pytest

from tests.simulated import device
from tests.support.workers import CaseError, PoolOptions, Workers

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="the simulated device needs a C++ compiler")


def run(workers: Workers, case: str, ranks: int = 1) -> list:
    return workers.run(ranks, f"tests.simulated.checks:{case}", device="sim")


def test_what_is_read_before_its_copy_is_not_there(workers: Workers) -> None:
    (found,) = run(workers, "reads_before_the_copy")
    assert (found["early"], found["late"]) == (0.0, 1000.0)
    assert len(found["races"]) == 1
    assert "aten::sum (reads) on stream 0 is not ordered after copy in" in found["races"][0]


def test_what_is_overwritten_while_it_is_copied_shows(workers: Workers) -> None:
    (found,) = run(workers, "overwrites_what_is_copied_out")
    assert found["copied"] == 2000.0
    assert [race.split(" on stream")[0] for race in found["races"]] == ["aten::fill_ (writes)"]


def test_memory_that_is_freed_while_it_is_copied_shows(workers: Workers) -> None:
    (found,) = run(workers, "frees_what_is_copied_out")
    assert [race.split(" on stream")[0] for race in found["freed"]] == ["freeing"]
    assert found["recorded"] == []


def test_waits_of_the_host_are_counted(workers: Workers) -> None:
    (found,) = run(workers, "waits_of_the_host")
    assert found == {
        "item": ["item"],
        "to the host": ["copy out"],
        "from pageable memory": ["copy in"],
        "from pinned memory": [],
        "nonzero": ["aten::nonzero"],
        "computing": [],
        "an event": ["an event"],
    }


def test_a_collective_brings_nothing_before_something_waits(workers: Workers) -> None:
    for rank, found in enumerate(run(workers, "arrives_late", 2)):
        assert not found["asked"]
        assert (found["early"], found["late"]) == (rank + 1.0, 3.0)
        assert math.isfinite(found["late"])
        assert found["races"], "reading before the wait is a race"


@pytest.mark.parametrize(("case", "said"), [("first_use_alone", "did not come"), ("waits_in_slices", "aborted")])
def test_the_rules_of_nccl(workers: Workers, case: str, said: str) -> None:
    with workers.fresh(PoolOptions(size=2, device="sim")) as pool:
        outcomes = pool.outcomes(f"tests.simulated.checks:{case}")
    assert [said in (outcome.result or outcome.traceback) for outcome in outcomes] == [True, False], outcomes


def test_launches_in_different_orders_fail_a_case(workers: Workers) -> None:
    with (
        workers.fresh(PoolOptions(size=2, device="sim")) as pool,
        pytest.raises(CaseError, match="ranks 0 and 1 part at launch 2 of 4 and 4"),
    ):
        pool.run("tests.simulated.checks:parts_from_the_others")
