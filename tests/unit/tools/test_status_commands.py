"""What `zeromesh status` and `zeromesh trace` tell of files that a run has written."""

import gzip
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ended
from zeromesh.telemetry.status_board import REQUEST, STEP_SHIFT, UNIT_BITS, Activity, EventRing
from zeromesh.trainer.cli import status

MEANS = {"compute": 0.1, "offload": 0.0, "between": 0.0}


def row(rank: int, **more: Any) -> dict[str, Any]:
    common = {"pid": 7, "step": 3, "microbatch": 0, "activity": "forward", "doing": "in forward", "disk": ""}
    return {"rank": rank, **common, "seconds": 2.0, "seconds_without_progress": 2.5, "failure": "", **more}


def late(**waits: Any) -> list[dict[str, Any]]:
    """Two ranks, of which the second is late with its data, and the first waits for it."""
    awaited = {"for": "gather of a/0", "ranks": [1], "seconds": 2.0, **waits}
    first = row(0, waits=awaited, recent={"data": 0.01, "communication": 0.25, **MEANS})
    second = row(1, activity="data", doing="data", microbatch=2, disk="read of 'x'")
    return [first, {**second, "recent": {"data": 0.2, "communication": 0.05, **MEANS}}]


def run_of(folder: Path, ranks: list[dict[str, Any]] | None = None, note: str = "") -> Path:
    """The directory of a run that goes on in this process, if `note` says nothing else."""
    folder.mkdir()
    (folder / "run.lock").write_text(note or f"pid {os.getpid()} on {socket.gethostname()}\n")
    traffic = {"shard": {"all-gather": {"seconds": 0.05, "bytes": 1 << 20, "calls": 1}}}
    lines = [{"step": 2, "loss": 9.0}, {"step": 3, "loss": "nan", "communication": traffic}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if ranks is not None:
        (folder / "ranks.json").write_text(json.dumps({"ranks": ranks}))
    return folder


def test_status_as_json_has_the_state_the_waits_and_their_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", late())
    found = json.loads(ended(capsys, ["status", str(run), "--json"]).out)
    assert abs(found.pop("time") - time.time()) < 60
    assert found == {
        "step": 3,
        "loss": "nan",
        "state": "goes on",
        "recoveries": [],
        "ranks": late(),
        "waited_for": [{"rank": 1, "cause": "disk", "doing": "data", "seconds": 2.0, "waiting": [0]}],
        "recent": {
            "0": {"data": 0.01, **MEANS, "waiting": 0.2, "link": 0.05},
            "1": {"data": 0.2, **MEANS, "waiting": 0.0, "link": 0.05},
        },
        "verdicts": ["the others wait for rank 1 190 ms a step, because of data: 200 ms there, 10 ms elsewhere"],
    }
    together = [row(rank, recent={"data": 0.0, "communication": 0.3, **MEANS}) for rank in (0, 1)]
    linked = run_of(tmp_path / "linked", together)
    (verdict,) = json.loads(ended(capsys, ["status", str(linked), "--json"]).out)["verdicts"]
    assert verdict.endswith("communicate, on rank 0 most in all-gather over shard (50 ms, 1.0 MiB)")
    assert verdict in ended(capsys, ["status", str(linked)]).out
    over = run_of(tmp_path / "over", late(), "ended by KeyError\n")
    assert json.loads(ended(capsys, ["status", str(over), "--json"], 1).out)["state"] == "the run has ended by KeyError"


def test_status_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", late())
    lines = [" ".join(line.split()) for line in ended(capsys, ["status", str(run)]).out.splitlines()]
    assert lines == [
        f"{run}: step 3, loss nan",
        "rank pid step doing for seconds waits for seconds without progress",
        "0 7 3 in forward 2.0 gather of a/0: rank 1 2.5",
        "1 7 3, micro 2 data, read of 'x' 2.0 2.5",
        "rank 0 waits for rank 1: disk (rank 1 is data, for 2.0 s)",
        "milliseconds of a step, lately:",
        "rank data compute offload between waiting link",
        "0 10.0 100.0 0.0 0.0 200.0 50.0",
        "1 200.0 100.0 0.0 0.0 0.0 50.0",
        "the others wait for rank 1 190 ms a step, because of data: 200 ms there, 10 ms elsewhere",
    ]
    told = {"step": 2, "seconds": 0.74, "source": "memory", "lost_steps": 0, "cause": "rank 1 is gone"}
    (run / "recoveries.jsonl").write_text(2 * (json.dumps(told) + "\n"))
    second = ended(capsys, ["status", str(run)]).out.splitlines()[1]
    assert second == "2 recoveries; the last after step 2 took 0.7 s, from its memory, 0 steps done again: rank 1 is gone"
    # Nobody waits in a run that is over.
    over = run_of(tmp_path / "over", [*late(ranks=[]), row(2, failure="OSError: x")], "ended\n")
    out = ended(capsys, ["status", str(over)]).out
    assert "gather of a/0: the link" in out
    assert "rank 2 failed: OSError: x\n" in out
    assert "rank 0 waits" not in out
    assert out.endswith("the run has ended\n")


def test_the_most_important_of_many_ranks_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [row(rank, seconds=float(rank)) for rank in range(70)]
    ranks[69]["waits"] = {"for": "a", "ranks": [0], "seconds": 1.0}
    ranks[1]["failure"] = "OSError: x"
    out = ended(capsys, ["status", str(run_of(tmp_path / "run", ranks))]).out
    shown = [int(line.split()[0]) for line in out.splitlines() if line[:1].isdigit()]
    assert shown == [0, 1, *range(8, 70)]
    assert "and 6 more ranks" in out


def test_a_watch_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, slept = run_of(tmp_path / "run", late()), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            (run / "run.lock").write_text("ended by OSError\n")

    monkeypatch.setattr(status.time, "sleep", sleep)
    out = ended(capsys, ["status", str(run), "--watch", "--json", "--interval", "7"], 1).out
    assert slept == [7.0, 7.0]
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["goes on"] * 2 + ["the run has ended by OSError"]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", interrupt)
    (run / "run.lock").write_text("pid 1 on elsewhere\n")
    assert ended(capsys, ["status", str(run), "--watch", "--json"]).err == ""


def test_a_process_that_makes_progress_is_not_called_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "process_state", {7: "T"}.__getitem__)
    ranks = [row(rank, seconds_without_progress=silent) for rank, silent in enumerate((0.9, 1.0))]
    run = run_of(tmp_path / "run", ranks)
    for note, stopped in ((None, [False, True]), ("pid 1 on elsewhere", [False, False]), ("ended", [False, False])):
        if note is not None:
            (run / "run.lock").write_text(note)
        rows = json.loads(ended(capsys, ["status", str(run), "--json"]).out)["ranks"]
        assert ["stopped" in each for each in rows] == stopped


# Traces


def ring_in(run: Path, rank: int, steps: int = 3) -> None:
    """The ring of a rank that has made so many steps."""
    ring, zero = EventRing(), time.monotonic_ns()
    for step in range(1, steps + 1):
        ring.add((step << STEP_SHIFT) | (Activity.FORWARD << UNIT_BITS), zero + step)
    ring.write(run / "trace" / f"rank-{rank}.ring", {"rank": rank, "host": "a b", "axes": {}, "units": []})


def events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    found: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return found


def test_a_trace_of_chosen_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", late(), "ended\n")
    ring_in(run, 0)
    (run / "trace" / "rank-1.ring").write_bytes(b"")
    (run / "profile").mkdir()
    (run / "profile" / "steps-1-2-rank-0.json.gz").touch()
    said = ended(capsys, ["trace", str(run)])
    out = run / "trace" / "trace.json.gz"
    assert said.out.startswith(f"{out}: open it at https://ui.perfetto.dev\n")
    assert said.out.endswith(f"operators too: {run}/profile/steps-1-2-rank-0.json.gz\n")
    assert "rank-1.ring cannot be read" in said.err
    assert {event["args"]["step"] for event in events(out) if event["ph"] == "X"} == {1, 2, 3}
    names = {event["name"]: event["args"] for event in events(out) if event["ph"] == "M"}
    assert (names["process_name"], names["process_sort_index"]) == ({"name": "rank 0 on a"}, {"sort_index": 0})
    plain = tmp_path / "plain.json"
    ended(capsys, ["trace", str(run), "--steps", "2:3", "--out", str(plain)])
    assert {event["args"]["step"] for event in events(plain) if event["ph"] == "X"} == {2, 3}
    assert not (run / REQUEST).exists()
    assert "--steps 4:9: the ranks remember none of these" in ended(capsys, ["trace", str(run), "--steps", "4:9"], 2).err


def test_ranks_of_a_run_that_goes_on_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", [row(0), row(1)])
    ring_in(run, 0)
    os.utime(run / "trace" / "rank-0.ring", (1.0, 1.0))

    def answer(seconds: float) -> None:
        if (run / REQUEST).exists():
            ring_in(run, 0, steps=5)

    monkeypatch.setattr(status.time, "sleep", answer)
    monkeypatch.setattr(status, "_ANSWER_SECONDS", 0.05)
    said = ended(capsys, ["trace", str(run)])
    assert said.err == "zeromesh: rank 1 did not answer within 0.05 seconds\n"
    found = events(run / "trace" / "trace.json.gz")
    assert max(event["args"]["step"] for event in found if event["ph"] == "X") == 5
