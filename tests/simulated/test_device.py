"""The simulated device finds what is wrong on a real one. Whatever runs on it elsewhere is held by this."""

import pytest

from tests.simulated import device
from tests.support.tables import row, tried
from tests.support.workers import CaseError, PoolOptions, Workers

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="the simulated device needs a C++ compiler")


ALONE = ("reads_before_the_copy", "overwrites_what_is_copied_out", "frees_what_is_copied_out", "waits_of_the_host")
test_what_is_wrong_shows = tried(
    "tests.simulated.checks", [*(row(1, case) for case in ALONE), row(2, "arrives_late")], folder=False, device="sim"
)


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
