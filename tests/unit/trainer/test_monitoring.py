"""Figures about ranks and times: who waits for whom and why, who is slow, a plan beside what was measured, the parts of a start."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeromesh.optim.optimizer_step import StepOutcome
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.monitoring import step_metrics
from zeromesh.trainer.monitoring.plan_check import PlanCheck, comparison_lines
from zeromesh.trainer.monitoring.rank_records import blames, read_ranks, recent, sentences, verdicts
from zeromesh.trainer.monitoring.step_metrics import StartTimes, now, process_began, sentence
from zeromesh.trainer.monitoring.step_stats import Balance, StepResult, Stragglers

MIB = 1 << 20

# Waits, from rows as `StateMonitor` writes them


def row(rank: int, activity: str = "backward", waits: list[int] | None = None, **more: Any) -> dict[str, Any]:
    awaited = None if waits is None else {"for": "gather of a/0", "ranks": waits, "seconds": 2.0}
    doing = f"doing {activity}"
    return {"rank": rank, "activity": activity, "doing": doing, "seconds": 3.0, "failure": "", "waits": awaited, **more}


def means(data: float, compute: float, communication: float, between: float = 0.0) -> dict[str, Any]:
    found = {"data": data, "compute": compute, "offload": 0.0, "communication": communication, "between": between}
    return {"recent": {"steps": 10, **found}}


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([row(0), row(1, "data")], []),
        # The rank at the end of a chain is named, with what it does.
        ([row(0, waits=[1]), row(1, waits=[2]), row(2, "data")], [(2, "data", (0, 1))]),
        ([row(0, waits=[1]), row(1, "forward")], [(1, "compute", (0,))]),
        ([row(0, waits=[1]), row(1, "optimizer", disk="write of 'x' for 3 seconds")], [(1, "disk", (0,))]),
        ([row(0, waits=[1]), row(1, failure="OSError: x", stopped=True)], [(1, "failed", (0,))]),
        ([row(0, waits=[1]), row(1, stopped=True, disk="write of 'x'")], [(1, "stopped", (0,))]),
        # Of a rank without a row nothing is known.
        ([row(0, waits=[1])], []),
        # A chain that comes back to its begin, and has an end besides.
        ([row(0, waits=[1, 2]), row(1, waits=[0]), row(2, "data")], [(2, "data", (0, 1))]),
        ([row(0, waits=[1]), row(1, "forward", stopped=True)], [(1, "stopped", (0,))]),
        ([row(0, waits=[1]), row(1, "idle")], [(1, "between steps", (0,))]),
        # All have come, or all wait for each other.
        ([row(0, waits=[]), row(1, waits=[])], [(None, "link", (0, 1))]),
        ([row(0, waits=[1]), row(1, waits=[0])], [(None, "each other", (0, 1))]),
        # The rank that most others wait for comes first.
        (
            [row(0, waits=[3]), row(1, waits=[4]), row(2, waits=[4]), row(3, "save"), row(4, "load")],
            [(4, "disk", (1, 2)), (3, "disk", (0,))],
        ),
        # A transfer among some, while a third is late, is not what is waited for.
        ([row(0, waits=[1, 2]), row(1, waits=[]), row(2, "data")], [(2, "data", (0,)), (None, "link", (1,))]),
    ],
)
def test_who_waits_for_whom_and_why(rows: list[dict[str, Any]], wanted: list[Any]) -> None:
    assert [(each.rank, each.cause, each.waiting) for each in blames(rows)] == wanted


def test_waits_and_the_latest_steps_as_sentences() -> None:
    assert sentences(blames([row(0, waits=[1]), row(1, "data")])) == [
        "rank 0 waits for rank 1: data (rank 1 is doing data, for 3.0 s)"
    ]
    assert sentences(blames([row(0, waits=[2]), row(1, waits=[2]), row(2, failure="OSError: x")])) == [
        "ranks 0, 1 wait for rank 2: failed (rank 2 is OSError: x, for 3.0 s)"
    ]
    assert sentences(blames([row(0, waits=[1]), row(1, waits=[0])])) == [
        "ranks 0, 1 wait for each other (in gather of a/0, for 2.0 s)"
    ]
    assert recent([row(0, **means(0.01, 0.1, 0.75)), row(1, **means(0.2, 0.1, 0.25)), row(2)]) == {
        0: {"data": 0.01, "compute": 0.1, "offload": 0.0, "between": 0.0, "waiting": 0.5, "link": 0.25},
        1: {"data": 0.2, "compute": 0.1, "offload": 0.0, "between": 0.0, "waiting": 0.0, "link": 0.25},
    }
    longer = {"for": "gather of b/0", "ranks": [], "seconds": 5.0}
    (link,) = sentences(blames([row(0, waits=[]), row(1) | {"waits": longer}]))
    assert link.endswith("link (all ranks have come to gather of b/0, for 5.0 s)")
    slow = verdicts([row(0, **means(0.01, 0.1, 0.2)), row(1, **means(0.2, 0.1, 0.01)), row(2, **means(0.01, 0.1, 0.2))])
    assert slow == ["the others wait for rank 1 190 ms a step, because of data: 200 ms there, 10 ms elsewhere"]
    (slow,) = verdicts([row(0, **means(0.01, 0.1, 0.2)), row(1, **means(0.01, 0.3, 0.01))])
    assert "rank 1 200 ms a step, because of computation: 300 ms there" in slow
    (slow,) = verdicts([row(0, **means(0.01, 0.1, 0.2)), row(1, **means(0.01, 0.1, 0.01, between=0.2))])
    assert "because of what is between steps" in slow
    # A wait is told from 15 % of a step, and from a millisecond.
    for own, late, told in ((0.8, 1.0, True), (0.88, 1.0, False), (0.001, 0.004, True), (0.0005, 0.001, False)):
        (line,) = verdicts([row(0, **means(0.0, own, late - own)), row(1, **means(0.0, late, 0.0))])
        assert line.startswith("the others wait for rank 1") == told, (own, late)
    # A slow link is the rank with the least communication.
    traffic = {"shard": {"all-gather": {"seconds": 0.25, "bytes": 2**20}, "all-reduce": {"seconds": 0.01, "bytes": 9}}}
    (line,) = verdicts([row(0, **means(0.01, 0.1, 0.3)), row(1, **means(0.01, 0.1, 0.31))], traffic)
    assert line.startswith("the link takes 300 ms of a step of 420 ms")
    assert line.endswith("on rank 0 most in all-gather over shard (250 ms, 1.0 MiB)")
    assert verdicts([row(0, **means(0.01, 0.1, 0.001)), row(1, **means(0.01, 0.1, 0.002))]) == [
        "no rank is late: a step takes 112 ms, of which the link has 1 ms"
    ]
    assert verdicts([row(0, **means(0.01, 0.1, 0.0))]) == []
    assert verdicts([row(0, recent=None), row(1, recent=None)]) == []


def test_rows_of_ranks_are_read_in_order_and_without_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps({"ranks": [{"rank": 10}, {"rank": 9, "step": 4, "waits": None, "doing": "x"}]}))
    common = {"pid": 0, "seconds": 0, "seconds_without_progress": 0, "failure": ""}
    assert read_ranks(path) == [
        {**common, "rank": 9, "step": 4, "waits": None, "doing": "x"},
        {**common, "rank": 10, "step": 0, "doing": ""},
    ]


def looks(busy: Sequence[float], count: int, steps: int = 1) -> dict[int, str]:
    """The lines by number of so many looks, one after so many steps, whose ranks are at work for `busy` seconds a step."""
    looker = Stragglers()
    looker.add(9.0, 0.0)  # The first step is not looked at.
    lines = {}
    for look in range(1, count + 1):
        for _ in range(steps):
            looker.add(0.4, 0.4 - busy[0])
        assert looker.busy == pytest.approx(busy[0])
        lines[look] = looker.compare(look * steps, busy)
    return {look: line for look, line in lines.items() if line}


@pytest.mark.parametrize(
    ("busy", "count", "steps", "when", "said"),
    [
        ([0.1, 0.11, 0.35, 0.1], 139, 1, [10, 110], "rank 2 is slow: over 10 steps it was at work for 350 ms"),
        # Seconds are those of one step, however rarely ranks are looked at.
        ([0.1, 0.35], 3, 6, [2], "rank 1 is slow: over 12 steps it was at work for 350 ms"),
        ([0.1, 0.14], 39, 1, [], ""),
        ([0.001, 0.01], 39, 1, [], ""),
        ([0.2], 39, 1, [], ""),
        # Half as long again is the least factor that is named.
        ([0.2, 0.29], 10, 1, [], ""),
        ([0.2, 0.31], 10, 1, [10], "rank 1 is slow: over 10 steps it was at work for 310 ms"),
        # A twentieth of a second is the least that is named, however many times as long it is.
        ([0.01, 0.059], 10, 1, [], ""),
        ([0.01, 0.061], 10, 1, [10], "rank 1 is slow: over 10 steps it was at work for 61 ms"),
    ],
)
def test_a_slow_rank_is_named_rarely(busy: list[float], count: int, steps: int, when: list[int], said: str) -> None:
    found = looks(busy, count, steps)
    assert list(found) == when
    whole = f"{said} a step, the others for {1000 * busy[0]:.0f} ms, and waited for it"
    assert all(line == whole for line in found.values())


def test_a_rank_is_never_at_work_for_less_than_no_time() -> None:
    looker = Stragglers()
    for _ in range(3):
        looker.add(0.1, 0.4)
    assert looker.busy == 0.0


def compared(*, forward: float = 0.2, peak: int = 100, master: int = 0) -> dict[str, Any]:
    """A plan of 0.3 seconds and 100 MiB, beside these seconds and MiB."""
    check = PlanCheck(
        layout="shard 2",
        phases={"forward": 0.2, "backward": 0.1},
        memory={"device": {"moments": 10 * MIB}, "host": {"master": 20 * MIB}},
        peak=100 * MIB,
    )
    for seconds in (9.0, forward + 0.5, forward - 0.1, forward):  # Medians, for which the first step does not count.
        check.steps.append((seconds + 0.1, {"forward": seconds, "backward": 0.1, "data": 0.05}))
    device = {"moments": 10 * MIB, "activations": 7 * MIB, **({"master": master * MIB} if master else {})}
    return check.record({"device": device, "host": {"master": 20 * MIB}}, peak * MIB)


def test_every_term_of_a_plan_is_beside_what_was_measured() -> None:
    record = compared(master=5)
    assert record["seconds"] == [pytest.approx(0.3), pytest.approx(0.3)]
    assert record["phases"] == {"forward": [0.2, 0.2], "backward": [0.1, 0.1], "data": [0.0, 0.05]}
    # What was measured and not predicted counts too; what nobody counts is the rest of the peak.
    wanted = {"moments": [10 * MIB, 10 * MIB], "master": [0, 5 * MIB], "uncounted": [90 * MIB, 85 * MIB]}
    assert record["memory"] == {"device": wanted, "host": {"master": [20 * MIB, 20 * MIB]}}
    shown = [line.split() for line in comparison_lines(compared(forward=0.4, peak=130))]
    assert ["step:", "forward", "200", "ms", "400", "ms", "-50%"] in shown
    assert ["highest", "memory", "100.0", "MiB", "130.0", "MiB", "-23%"] in shown


def test_a_plan_beside_a_run_of_one_step_or_none() -> None:
    phases = {"forward": 0.2, "backward": 0.0}
    check = PlanCheck(layout="shard 2", phases=phases, memory={"host": {"master_weights": 4}}, peak=9)
    assert check.record({}, 5) == {
        "layout": "shard 2",
        "seconds": [0.2, 0.0],
        "phases": {"forward": [0.2, 0.0]},
        "memory": {"device": {"uncounted": [9, 5]}, "host": {"master_weights": [4, 0]}},
        "peak": [9, 5],
    }
    assert [line.split() for line in comparison_lines(check.result)] == [
        ["plan", "of", "shard", "2", "predicted", "measured", "off"],
        ["step", "200", "ms", "0", "ms"],
        ["step:", "forward", "200", "ms", "0", "ms"],
        ["highest", "memory", "9", "B", "5", "B", "+80%"],
        ["device:", "activations", "and", "libraries", "9", "B", "5", "B", "+80%"],
        ["host:", "master", "weights", "4", "B", "0", "B"],
    ]
    check.steps.append((0.5, {"data": 0.5}))
    record = check.record({}, 5)
    assert (record["seconds"], record["phases"]) == ([0.2, 0.5], {"forward": [0.2, 0.0], "data": [0.0, 0.5]})


def test_parts_of_a_start_follow_each_other_and_end_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((13.0, 100.0, 102.5, 104.0))
    monkeypatch.setattr(step_metrics, "now", lambda: next(clock))
    times = StartTimes(10.0)
    times.end("launch", at=11.0)
    times.end("imports", at=12.0)
    times.end("imports")
    times.begin()  # What a script did since then is no part of it.
    times.end("data")
    times.end("first step")
    times.over = True
    times.end("a later call")
    assert times.parts == {"launch": 1.0, "imports": 2.0, "data": 2.5, "first step": 1.5}
    assert sentence(times.parts) == "7.0 s (launch 1.0, imports 2.0, data 2.5, first step 1.5)"


@pytest.mark.parametrize(
    ("parts", "shown"),
    # Parts too short to matter are counted and not shown.
    [({"data": 0.04, "first step": 1.06}, "1.1 s (first step 1.1)"), ({"data": 0.05}, "0.1 s (data 0.1)"), ({}, "0.0 s")],
)
def test_a_start_as_a_sentence(parts: dict[str, float], shown: str) -> None:
    assert sentence(parts) == shown


def test_the_clock_is_that_of_all_processes() -> None:
    """The launcher's time is compared with that of its workers."""
    assert 0 <= now() - process_began() < 86400


# Samples that ranks take by their speed


class Ranks:
    """A mesh of data ranks, and a loader, without processes: `busy` are the seconds of each rank in every step."""

    def __init__(self, plan: BatchPlan, busy: Sequence[float], known: Sequence[Sequence[float]] = ((),)) -> None:
        self.feed, self.world, self.data_index = SimpleNamespace(plan=plan), self, 0
        self.busy, self.known = busy, known

    def gather_json(self, value: Any, what: str) -> list[Any]:
        return [list(each) for each in self.known]

    def gather_integers(self, own: Sequence[int]) -> list[list[int]]:
        assert own == pytest.approx([0, 1e6 * self.busy[0]], abs=1)
        return [[rank, round(1e6 * each)] for rank, each in enumerate(self.busy)]

    def share_out(self, shares: tuple[int, ...]) -> None:
        self.feed.plan = replace(self.feed.plan, shares=shares)

    def steps(self, balance: Balance, count: int = 21) -> list[str]:
        outcome = StepOutcome(grad_norm=1.0, skipped=False, loss_scale=1.0)
        result = StepResult(loss=1.0, tokens=1, outcome=outcome, seconds=9.0, idle=9.0 - self.busy[0])
        return [line for line in (balance.after(result) for _ in range(count)) if line]


def balanced(plan: BatchPlan, busy: Sequence[float], known: Sequence[Sequence[float]] = ((),)) -> tuple[Ranks, Balance]:
    ranks: Any = Ranks(plan, busy, known)
    return ranks, Balance(ranks, ranks, known[0])


PLAN = BatchPlan(global_size=32, micro_size=4, data_ranks=4)


def test_shares_follow_what_was_measured_after_twenty_steps() -> None:
    ranks, balance = balanced(PLAN, [0.4, 0.4, 0.4, 0.8])
    assert ranks.steps(balance, 20) == []
    assert ranks.feed.plan.shares == ()
    (line,) = ranks.steps(balance, 1)
    assert ranks.feed.plan.shares == (5, 5, 4, 2)
    assert line == (
        "of each round of 16 samples, data ranks take 5, 5, 4, 2 (batch.balance: speed): each takes data rank 3 2.0 times as "
        "long as the others"
    )
    # The next comparison finds the same paces, and others that are hardly better change nothing.
    ranks.busy = [0.5, 0.5, 0.4, 0.4]
    assert ranks.steps(balance) == []
    assert balance.paces == [0.1, 0.1, 0.1, 0.2]


def test_a_measurement_counts_by_half_and_no_rank_takes_more_than_twice_as_much() -> None:
    ranks, balance = balanced(PLAN, [0.4, 0.4, 0.4, 1.2], known=[[0.1] * 4] * 4)
    assert ranks.feed.plan.shares == (4, 4, 4, 4)
    ranks.steps(balance)
    assert [round(each, 6) for each in balance.paces] == [0.1, 0.1, 0.1, 0.2]
    assert ranks.feed.plan.shares == (5, 5, 4, 2)
    ranks, balance = balanced(BatchPlan(global_size=12, micro_size=4, data_ranks=3), [0.01, 1.0, 1.0])
    ranks.steps(balance)
    assert ranks.feed.plan.shares == (8, 2, 2)


def test_paces_are_those_of_rank_0_and_of_as_many_ranks() -> None:
    for known, wanted in (([[0.1, 0.2], []], (3, 1)), ([[], [0.1, 0.2]], ()), ([[0.1, 0.2, 0.1]] * 2, ())):
        ranks, balance = balanced(BatchPlan(global_size=8, micro_size=2, data_ranks=2), [1.0, 1.0], known)
        assert ranks.feed.plan.shares == wanted
        assert len(balance.paces) == (2 if wanted else 0)
