"""What a person reads of a run: a plan beside what was measured, who waits for whom and why, how long a start takes."""

import re
from typing import Any

import pytest

from zeromesh.trainer.monitoring import step_metrics
from zeromesh.trainer.monitoring.plan_check import PlanCheck, comparison_lines
from zeromesh.trainer.monitoring.rank_waits import blames, sentences, verdicts
from zeromesh.trainer.monitoring.step_metrics import StartTimes, now, process_began, sentence

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


def row(rank: int, activity: str = "backward", waits: list[int] | None = None, **more: Any) -> dict[str, Any]:
    awaited = None if waits is None else {"for": "gather of a/0", "ranks": waits, "seconds": 2.0}
    doing = f"doing {activity}"
    return {"rank": rank, "activity": activity, "doing": doing, "seconds": 3.0, "failure": "", "waits": awaited, **more}


def means(data: float, compute: float, communication: float, between: float = 0.0) -> dict[str, Any]:
    found = {"data": data, "compute": compute, "offload": 0.0, "communication": communication, "between": between}
    return {"recent": {"steps": 10, **found}}


def causes(*rows: dict[str, Any]) -> list[tuple[int | None, str, tuple[int, ...]]]:
    return [(each.rank, each.cause, each.waiting) for each in blames(rows)]


def test_nobody_waits() -> None:
    assert blames([row(0), row(1, "data")]) == []


def test_the_rank_at_the_end_of_a_chain_is_named_with_what_it_does() -> None:
    assert causes(row(0, waits=[1]), row(1, waits=[2]), row(2, "data")) == [(2, "data", (0, 1))]
    assert causes(row(0, waits=[1]), row(1, "forward")) == [(1, "compute", (0,))]
    assert causes(row(0, waits=[1]), row(1, "optimizer", disk="write of 'x' for 3 seconds")) == [(1, "disk", (0,))]
    assert causes(row(0, waits=[1]), row(1, failure="OSError: x")) == [(1, "failed", (0,))]
    assert causes(row(0, waits=[1]), row(1, "forward", stopped=True)) == [(1, "stopped", (0,))]
    assert causes(row(0, waits=[1]), row(1, "idle")) == [(1, "between steps", (0,))]


def test_all_have_come_or_all_wait_for_each_other() -> None:
    assert causes(row(0, waits=[]), row(1, waits=[])) == [(None, "link", (0, 1))]
    assert causes(row(0, waits=[1]), row(1, waits=[0])) == [(None, "each other", (0, 1))]
    # A transfer among some, while a third is late, is not what is waited for.
    assert causes(row(0, waits=[1, 2]), row(1, waits=[]), row(2, "data")) == [(2, "data", (0,)), (None, "link", (1,))]
    assert sentences(blames([row(0, waits=[1]), row(1, "data")])) == [
        "rank 0 waits for rank 1: data (rank 1 is doing data, for 3.0 s)"
    ]


def test_a_slow_rank_and_the_cause() -> None:
    slow = verdicts([row(0, **means(0.01, 0.1, 0.2)), row(1, **means(0.2, 0.1, 0.01)), row(2, **means(0.01, 0.1, 0.2))])
    assert slow == ["the others wait for rank 1 190 ms a step, because of data: 200 ms there, 10 ms elsewhere"]
    (slow,) = verdicts([row(0, **means(0.01, 0.1, 0.2)), row(1, **means(0.01, 0.3, 0.01))])
    assert "rank 1 200 ms a step, because of computation: 300 ms there" in slow
    (slow,) = verdicts([row(0, **means(0.01, 0.1, 0.2)), row(1, **means(0.01, 0.1, 0.01, between=0.2))])
    assert "because of what is between steps" in slow


def test_a_slow_link_is_the_rank_with_the_least_communication() -> None:
    traffic = {"shard": {"all-gather": {"seconds": 0.25, "bytes": 2**20}, "all-reduce": {"seconds": 0.01, "bytes": 9}}}
    (line,) = verdicts([row(0, **means(0.01, 0.1, 0.3)), row(1, **means(0.01, 0.1, 0.31))], traffic)
    assert line.startswith("the link takes 300 ms of a step of 420 ms")
    assert line.endswith("on rank 0 most in all-gather over shard (250 ms, 1.0 MiB)")


def test_even_ranks_and_a_single_one() -> None:
    assert verdicts([row(0, **means(0.01, 0.1, 0.001)), row(1, **means(0.01, 0.1, 0.002))]) == [
        "no rank is late: a step takes 112 ms, of which the link has 1 ms"
    ]
    assert verdicts([row(0, **means(0.01, 0.1, 0.0))]) == []
    assert verdicts([row(0, recent=None), row(1, recent=None)]) == []


def test_parts_follow_each_other_and_end_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((13.0, 100.0, 102.5, 104.0))
    monkeypatch.setattr(step_metrics, "now", lambda: next(clock))
    times = StartTimes(10.0)
    times.end("launch", at=11.0)
    times.end("imports")
    times.begin()  # What a script did since then is no part of it.
    times.end("data")
    times.end("first step")
    times.over = True
    times.end("a later call")
    assert times.parts == {"launch": 1.0, "imports": 2.0, "data": 2.5, "first step": 1.5}
    assert sentence(times.parts) == "7.0 s (launch 1.0, imports 2.0, data 2.5, first step 1.5)"


def test_parts_too_short_to_matter_are_counted_and_not_shown() -> None:
    assert sentence({"data": 0.04, "first step": 1.06}) == "1.1 s (first step 1.1)"
    assert sentence({"data": 0.01}) == "0.0 s"


def test_the_clock_is_that_of_all_processes() -> None:
    """The launcher's time is compared with that of its workers."""
    assert 0 <= now() - process_began() < 86400
    assert re.fullmatch(r"0\.0 s", sentence({}))
