"""Rings of ranks, and the traces that are made of them."""

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeromesh.errors import StorageError
from zeromesh.telemetry import status_board as codes
from zeromesh.telemetry.status_board import STEP_SHIFT, UNIT_BITS, Activity, EventRing, read_ring
from zeromesh.trainer.monitoring.rank_records import RankRing, read_rings, trace_content, trace_of

NAMES = ("", "data", "agreement over world", "gather of b/0")
MS = 1_000_000


def state(step: int, activity: Activity, unit: int = -1) -> int:
    return (step << STEP_SHIFT) | (activity << UNIT_BITS) | (unit + 1)


def ring(rank: int, late: float, host: str = "a", shift: int = 0, steps: int = 3) -> RankRing:
    """A rank that needs `late` ms for data, by a clock that is `shift` ms ahead, and then agrees with the other, which needs 10."""
    events: list[tuple[float, int]] = []
    for step in range(1, steps + 1):
        zero = step * 100
        events += [
            (zero, state(step, Activity.DATA)),
            (zero, codes.BEGIN | 1),
            (zero + late, codes.END | 1),
            (zero + late, codes.BEGIN | 2),
            (zero + 12, codes.END | 2),
            (zero + 13, codes.MEETING | step),
            (zero + 14, codes.NEW_MICROBATCH | 1),
            (zero + 20, state(step, Activity.GATHER, 1)),
            (zero + 21, codes.WAIT | 3),
            (zero + 25, codes.WAITED | (2 if rank == 0 else 0)),
            (zero + 25, state(step, Activity.FORWARD, 1)),
            (zero + 40, state(step, Activity.IDLE)),
        ]
    clock = (steps + 1) * 100 * MS + shift * MS
    return RankRing(
        rank=rank,
        host=host,
        axes={"world": (0, 1)},
        units=("root", "b"),
        names=NAMES,
        clock=clock,
        wall=clock,
        events=[(round((at + shift) * MS), code) for at, code in events],
    )


def slices(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if all(event[name] == value for name, value in wanted.items())]


def require_whole(trace: dict[str, Any]) -> None:
    """Every event has what the format asks for, in the order of time, and slices of a row lie inside each other or apart."""
    times = [event["ts"] for event in trace["traceEvents"]]
    assert times == sorted(times)
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert event["ph"] in "XMsfC"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        open_until: list[float] = []
        for event in sorted(row, key=lambda each: (each["ts"], -each["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-3
            open_until.append(event["ts"] + event["dur"])
    flows = {kind: [event["id"] for event in trace["traceEvents"] if event["ph"] == kind] for kind in "sf"}
    assert sorted(flows["s"]) == sorted(flows["f"])


def test_a_trace_has_every_span_of_every_rank_and_who_came_last() -> None:
    memory = [{"step": 2, "memory": {"device": {"master": 100}}}]
    trace = trace_of([ring(0, late=1), ring(1, late=10)], memory)
    require_whole(trace)
    for rank in (0, 1):
        assert [each["name"] for each in slices(trace, pid=rank, tid=1)] == ["step 1", "step 2", "step 3"]
        assert len(slices(trace, pid=rank, name="forward of b")) == 3
        assert len(slices(trace, pid=rank, name="gathering b")) == 3
        forward = slices(trace, pid=rank, name="forward of b")[0]
        assert (forward["ts"], forward["dur"]) == (25_000, 15_000)  # microseconds
        assert forward["args"] == {"step": 1, "microbatch": 1}
    first, second, _ = slices(trace, pid=0, name="agreement over world")
    assert "last to come" not in first["args"]
    assert second["args"] == {"step": 2, "last to come": 1, "waited ms": 9.0, "link ms": 2.0}
    assert slices(trace, pid=0, name="wait: gather of b/0")[0]["args"]["waited for rank"] == 1
    rows = [event["tid"] for event in trace["traceEvents"] if event["ph"] == "s" and event["pid"] == 1]
    assert sorted(rows) == [2, 2, 3, 3, 3]  # from collectives, and from what another rank does
    (counted,) = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert (counted["args"], counted["ts"]) == ({"master": 100}, 140_000)  # where step 2 ends
    chosen = trace_of([ring(0, late=1), ring(1, late=10)], memory, range(2, 3))
    require_whole(chosen)
    assert {event["args"]["step"] for event in slices(chosen)} == {2}


def test_clocks_of_hosts_are_aligned_where_all_ranks_met() -> None:
    apart = [ring(0, late=1), ring(1, late=10, host="b", shift=5000)]
    # Without a moment that all share, wall clocks count.
    events = [[event for event in each.events if event[1] & ~codes.DETAIL != codes.MEETING] for each in apart]
    walls = [replace(each, wall=400 * MS, events=own) for each, own in zip(apart, events, strict=True)]
    for trace in (trace_of(walls), trace_of(apart)):
        require_whole(trace)
        own, other = (slices(trace, pid=rank, name="step 2")[0]["ts"] for rank in (0, 1))
        assert own == other
    assert slices(trace, pid=0, name="agreement over world")[1]["args"]["last to come"] == 1


def test_what_has_not_ended_or_was_overwritten() -> None:
    whole = ring(0, late=1)
    cut = RankRing(**{name: getattr(whole, name) for name in RankRing.__slots__} | {"events": whole.events[2:-3]})
    trace = trace_of([cut])
    require_whole(trace)
    (waits,) = [each for each in slices(trace, name="wait: gather of b/0") if each["args"]["step"] == 3]
    assert waits["ts"] + waits["dur"] == max(each["ts"] + each["dur"] for each in slices(trace))


def test_rows_and_ranks_have_titles() -> None:
    trace = trace_of([ring(0, late=1, host="a domain"), ring(1, late=10)])
    titles = [(event["pid"], event["tid"], event["name"], event["args"]) for event in trace["traceEvents"] if event["ph"] == "M"]
    assert titles[:2] == [(0, 0, "process_name", {"name": "rank 0 on a"}), (0, 0, "process_sort_index", {"sort_index": 0})]
    rows = ("steps", "phases, collectives and waits", "what it does", "launches")
    assert titles[2:6] == [(0, row, "thread_name", {"name": name}) for row, name in enumerate(rows, 1)]
    assert len(titles) == 12


@pytest.mark.parametrize(("late", "arrows"), [(1.19, 1), (1.2, 2), (2, 2)])
def test_only_waits_of_a_fifth_of_a_millisecond_have_arrows(late: float, arrows: int) -> None:
    """Beside the one from what another rank does."""
    rings = [replace(each, events=[(int(at), code) for at, code in each.events]) for each in (ring(0, late=1), ring(1, late))]
    found = [event for event in trace_of(rings, (), range(2, 3))["traceEvents"] if event["ph"] == "s"]
    assert len(found) == arrows
    assert all(event["ts"] >= 0 for event in found)


def test_spans_end_with_those_around_them() -> None:
    """A wait ends where it is the innermost span, and an end of nothing that is open ends nothing."""
    events = [
        (0, state(1, Activity.DATA)),
        (1, codes.BEGIN | 1),
        (2, codes.BEGIN | 2),
        (3, codes.WAITED | 1),
        (4, codes.END | 3),
        (6, codes.END | 1),
        (7, codes.WAIT | 9),
        (8, codes.WAITED | 1),
    ]
    made = trace_of([replace(ring(0, late=1), events=events, clock=9)])
    spans = {each["name"]: (each["ts"] * 1e3, each["dur"] * 1e3, each["args"]) for each in slices(made, tid=2)}
    assert spans == {
        "data": (1, 5, {"step": 1}),
        "agreement over world": (2, 4, {"step": 1}),
        "wait: ": (7, 1, {"step": 1, "waited for rank": 0}),
    }
    assert not [event for event in made["traceEvents"] if event["ph"] == "s"], "it was a short wait"


def test_rings_of_an_earlier_start_are_left_out(tmp_path: Path) -> None:
    header, began = {"host": "a", "axes": {}, "units": []}, 0
    for rank in (5, 4, 1, 3, 0):
        made = EventRing()
        if rank != 3:  # A rank that has done nothing yet has no events.
            made.add(state(1, Activity.DATA), time.monotonic_ns() if rank > 3 else began)
        made.write(tmp_path / f"rank-{rank}.ring", {**header, "rank": rank})
        time.sleep(0.01 if rank == 4 else 0.0)
        began = time.monotonic_ns() if rank == 4 else began
    rings, remarks = read_rings(tmp_path)
    assert [each.rank for each in rings] == [0, 1]
    assert [remark.partition(" has")[0] for remark in remarks] == ["rank 4", "rank 5"]
    assert trace_content({"a": [1]}, packed=False) == b'{"a":[1]}'


def test_a_ring_keeps_the_latest_events(tmp_path: Path) -> None:
    ring = EventRing()
    path = tmp_path / "trace" / "rank-0.ring"
    header = {"rank": 0, "host": "a", "axes": {}, "units": []}
    for number in range(3):
        ring.add(codes.BEGIN | ring.name(f"n{number}"), 1 + number)
    ring.write(path, header)
    found, events = read_ring(path)
    assert (found["names"], events) == (["", "n0", "n1", "n2"], [(1 + n, codes.BEGIN | n + 1) for n in range(3)])
    for number in range(codes.EVENTS + 10):
        ring.add(codes.BEGIN | ring.name("n1"), 100 + number)
    ring.write(path, header)
    _, events = read_ring(path)
    assert [at for at, _ in events] == list(range(110, 110 + codes.EVENTS))


def test_files_that_are_no_rings_are_left_out_with_a_remark(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no trace is in"):
        read_rings(tmp_path)
    ring = EventRing()
    ring.add(codes.MEETING | 1)
    ring.write(tmp_path / "rank-0.ring", {"rank": 0, "host": "a", "axes": {}, "units": []})
    for rank, content in enumerate((b"", b"x" * 99, (tmp_path / "rank-0.ring").read_bytes()[:-9]), start=1):
        (tmp_path / f"rank-{rank}.ring").write_bytes(content)
    rings, remarks = read_rings(tmp_path)
    assert [each.rank for each in rings] == [0]
    assert len(remarks) == 3
    content = trace_content(trace_of(rings), packed=True)
    assert json.loads(gzip.decompress(content))["traceEvents"]
