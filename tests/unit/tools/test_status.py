"""`zeromesh status` of runs that begin, hang or have failed, as wide as the terminal; what `zeromesh trace` cannot show."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zeromesh.trainer.cli.main import main
from zeromesh.trainer.formatting import table_lines, wrapped


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def written(run: Path, pids: list[int], **more: Any) -> Path:
    """A run that goes on in this process: rank 0 waits for the others, which have made no progress for a while."""
    run.mkdir(exist_ok=True)
    (run / "run.lock").write_text(f"pid {os.getpid()} on {socket.gethostname()}")
    common = {"step": 3, "microbatch": 1, "activity": "forward", "doing": "in forward of unit layers.0", "disk": ""}
    waits = {"for": "gather of layers.0/0", "ranks": [1], "seconds": 2.0}
    rows = [
        {
            **common,
            "rank": rank,
            "pid": pid,
            "seconds": 2.0,
            "seconds_without_progress": 2.0,
            "failure": "",
            "waits": None,
        }
        for rank, pid in enumerate(pids)
    ]
    rows[0]["waits"] = waits
    rows[-1] |= more
    (run / "ranks.json").write_text(json.dumps({"time": time.time(), "ranks": rows}))
    return run


def test_a_stopped_rank_is_named(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "run", [os.getpid(), sleeper.pid])
    assert main(["status", str(run)]) == 0  # There is no line of metrics yet.
    assert "rank 0 waits for rank 1: compute" in capsys.readouterr().out
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert "rank 0 waits for rank 1: stopped" in said
    assert "stopped in forward of unit layers.0" in said


def test_a_failure_stands_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", [os.getpid(), os.getpid()], failure="OSError: " + "long " * 60)
    main(["status", str(run)])
    said = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in said[1:4]) < 200
    assert any(line.startswith("rank 1 failed: OSError: long") for line in said)


def test_what_holds_runs_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text("")
    assert main(["status", str(tmp_path)]) == 1
    assert f"runs in it are {tmp_path / 'one'}" in capsys.readouterr().err


def test_a_table_is_no_wider_than_the_terminal() -> None:
    columns, row = ("rank", "doing", "seconds without progress"), ("0", "reducing gradients of unit layers.12", "1.5")
    assert table_lines(columns, [row], columns[2:], width=200) == table_lines(columns, [row], columns[2:])
    lines = table_lines(columns, [row], columns[2:], width=40)
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == (
        "rank doing seconds without progress 0 reducing gradients of 1.5 unit layers.12"
    )
    assert list(wrapped(["  one two three"], 10)) == ["  one two", "    three"]
    assert list(wrapped(["", "one two"], None)) == ["", "one two"]
