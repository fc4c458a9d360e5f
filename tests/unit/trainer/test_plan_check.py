"""A plan beside what was measured: every term, and what a person reads."""

from typing import Any

import pytest

from zeromesh.trainer.monitoring.plan_check import PlanCheck, comparison_lines

MIB = 1 << 20


def compared(*, forward: float = 0.2, peak: int = 100, moments: int = 10, master: int = 0) -> dict[str, Any]:
    """A plan of 0.3 seconds and 100 MiB, beside these seconds and MiB."""
    check = PlanCheck(
        layout="shard 2",
        phases={"forward": 0.2, "backward": 0.1},
        memory={"device": {"moments": 10 * MIB}, "host": {"master": 20 * MIB}},
        peak=100 * MIB,
    )
    for seconds in (9.0, forward, forward):  # The first step does not count.
        check.add(seconds + 0.1, {"forward": seconds, "backward": 0.1})
    device = {"moments": moments * MIB, "activations": 7 * MIB, **({"master": master * MIB} if master else {})}
    return check.record({"device": device, "host": {"master": 20 * MIB}}, peak * MIB)


def test_every_term_is_beside_what_was_measured() -> None:
    record = compared(master=5)
    assert record["seconds"] == [pytest.approx(0.3), pytest.approx(0.3)]
    assert record["phases"]["forward"] == [0.2, 0.2]
    # What was measured and not predicted counts too; what nobody counts is the rest of the peak.
    wanted = {"moments": [10 * MIB, 10 * MIB], "master": [0, 5 * MIB], "uncounted": [90 * MIB, 85 * MIB]}
    assert record["memory"] == {"device": wanted, "host": {"master": [20 * MIB, 20 * MIB]}}
    shown = [line.split() for line in comparison_lines(compared(forward=0.4, peak=130))]
    assert ["step:", "forward", "200", "ms", "400", "ms", "-50%"] in shown
    assert ["highest", "memory", "100.0", "MiB", "130.0", "MiB", "-23%"] in shown
