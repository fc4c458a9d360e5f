"""Offload and saving beside training on the simulated device: orders, waits, threads, and what the driver refuses."""

from pathlib import Path

import pytest

from tests.simulated.device import compiler
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(compiler() is None, reason="the simulated device needs a C++ compiler")


@pytest.mark.parametrize(
    "case",
    [
        "the_gather_of_a_shard_in_two_memories_comes_after_both",
        "copies_in_do_not_wait_for_copies_out",
        "gradients_leave_and_come_back_without_the_host",
        "a_save_waits_for_nothing_but_its_own_copies_into_pinned_memory",
        "helper_threads_sleep_and_know_their_device",
        "what_the_driver_does_not_pin_is_ordinary_memory",
    ],
)
def test_a_rule(workers: Workers, tmp_path: Path, case: str) -> None:
    workers.run(1, f"device_memory_cases:{case}", device="sim", folder=str(tmp_path))
