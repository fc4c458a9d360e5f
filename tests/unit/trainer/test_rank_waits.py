"""Who waits for whom and why, from rows as `StateMonitor` writes them."""

from typing import Any

from zeromesh.trainer.monitoring.rank_waits import blames, sentences, verdicts


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
