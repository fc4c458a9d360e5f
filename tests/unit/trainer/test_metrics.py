"""Metrics files of strict JSON that survive a kill, and a console that never ends a run."""

import io
import json
import logging
import math
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_lines import metrics
from zeromesh.errors import StorageError
from zeromesh.trainer.formatting import Detail, human_bytes, human_count, human_seconds
from zeromesh.trainer.monitoring import console as display
from zeromesh.trainer.monitoring import step_metrics
from zeromesh.trainer.monitoring.console import Console, step_line
from zeromesh.trainer.monitoring.step_metrics import MetricsWriter, read_metrics
from zeromesh.trainer.monitoring.tracking import evaluation_row


def test_a_line_per_step_with_the_fields_of_the_design(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(metrics(1))
        writer.write(metrics(2, grad_norm=None, skipped=True, loss_scale=1024.0))
        assert len(path.read_text().splitlines()) == 2  # flushed while the file is open
    first, second = read_metrics(path)
    assert list(first) == [
        *("step", "loss", "grad_norm", "lr"),
        *("tokens", "tokens_per_second", "step_seconds", "peak_memory_bytes"),
        "time",
    ]
    assert [second[name] for name in ("step", "grad_norm", "skipped", "loss_scale")] == [2, None, True, 1024]


@given(value=st.floats())
def test_every_line_is_strict_json(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("strict") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(metrics(loss=value, nested={"norms": [value]}))
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    expected = value if math.isfinite(value) else str(value)
    assert record["loss"] == expected
    assert record["nested"]["norms"] == [expected]


def test_numbers_of_torch_and_numpy_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_metrics, "time", SimpleNamespace(time=lambda: 1700000000.98765))
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        tensors = {"loss": torch.tensor(float("nan")), "norms": torch.tensor([1.0, 2.0])}
        writer.write({"step": np.int64(3), **tensors, "path": tmp_path})
    (line,) = read_metrics(tmp_path / "m.jsonl")
    assert line == {"step": 3, "loss": "nan", "norms": [1.0, 2.0], "path": str(tmp_path), "time": 1700000000.988}


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_resuming_removes_the_steps_that_come_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        for record in ({"event": "start"}, {"step": 1}, {"step": 2}, {"step": 2, "eval_loss": 1.0}, {"step": 3}):
            writer.write(record)
    with MetricsWriter(path, keep_through=2) as writer:
        writer.write({"step": 3, "again": True})
    assert [line.get("step") for line in read_metrics(path)] == [None, 1, 2, 2, 3]
    assert read_metrics(path)[-1]["again"] is True
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"m\.jsonl' cannot be opened"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")
    (tmp_path / "m.jsonl").write_text("1\n")
    with pytest.raises(StorageError, match="line 1 is not a JSON object"):
        MetricsWriter(tmp_path / "m.jsonl", keep_through=0)
    (tmp_path / "m.jsonl").write_text("{]\n")
    with pytest.raises(StorageError, match="line 1 is not JSON"):
        read_metrics(tmp_path / "m.jsonl")
    with pytest.raises(StorageError, match="cannot be read"):
        read_metrics(tmp_path)
    assert read_metrics(tmp_path / "nowhere") == []
    writer = MetricsWriter(tmp_path / "other.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(StorageError, match="cannot be written"):
        writer.write(metrics())


def test_a_full_disk_is_an_error_and_its_lines_come_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(metrics(1))
        for step, room in ((2, path.stat().st_size + 7), (3, path.stat().st_size + 7)):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
                with pytest.raises(StorageError, match=r"m\.jsonl' cannot be written: File too large"):
                    writer.write(metrics(step))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert [line["step"] for line in read_metrics(path)] == [1], "the second one is there in part"
        writer.write(metrics(4))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_later_steps_are_left_out_without_room_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_metrics, "write_whole", lambda *_: pytest.fail("a copy of the file"))
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        for step in (1, 2, 3):
            writer.write(metrics(step))
        writer.keep_through(1)
        writer.write(metrics(2))
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2]


def test_piped_output_is_one_plain_line_per_logged_step() -> None:
    stream = io.StringIO()
    with Console(stream) as console:
        console.note("global 16 = micro 2 x accumulation 4 x data-parallel 2 [not markup] " + "x" * 200)
        console.start(total_steps=200)
        console.advance(1)
        console.step(metrics(2))
        console.step(metrics(200, loss=math.nan, grad_norm=None, skipped=True))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "[not markup] xxx" in lines[0]
    assert lines[1].startswith("step 2/200  loss 3.2500  grad 1.5  lr 0.0003  12.3k tokens/s  250 ms/step  1.5 GiB  ")
    assert lines[1].endswith(" left")
    assert "loss nan" in lines[2]
    assert lines[2].endswith("skipped True")
    assert "\x1b" not in stream.getvalue()


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return FakeTerminal()


def test_a_terminal_gets_a_bar_with_the_last_numbers(terminal: FakeTerminal) -> None:
    for verbose in (False, True):
        Console(terminal, verbose=verbose).note(Detail(f"a detail, {verbose}"))
    assert terminal.getvalue() == "a detail, True\n"
    with Console(terminal) as console:
        console.start(total_steps=10, first_step=4)
        console.step(metrics(5))
        console.note("saved")
        console.advance(7)
        console.step(metrics(10))
    shown = terminal.getvalue()
    assert "5/10" in shown
    assert "10/10" in shown
    assert "loss 3.250  12.3k tok/s  1.5 GiB" in shown
    assert "saved" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is back


def test_a_bar_counts_what_the_model_reads(terminal: FakeTerminal) -> None:
    with Console(terminal) as console:
        console.start(total_steps=10)
        console.step(metrics(5, unit="samples"))
    assert "12.3k samples/s" in terminal.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_is_a_log(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Console(terminal) as console:
        console.note(Detail("a detail"))
        console.start(total_steps=2)
        console.step(metrics(2))
    assert terminal.getvalue() == f"a detail\n{step_line(metrics(2), total_steps=2)}\n"


def test_what_is_left_and_what_goes_on_by_the_clock(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = SimpleNamespace(now=0.0), io.StringIO()
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with Console(stream) as console:
        clock.now = 10.0
        console.start(total_steps=10, first_step=4, after=2.0)
        console.note(None, "begun")  # What is left is told by the time since then.
        for clock.now in (14.9, 15.0, 19.9):  # A log is silent for 5 seconds.
            console.status(f"busy at {clock.now}")
        clock.now = 70.0
        console.step(metrics(6))
    begun, busy, step = stream.getvalue().splitlines()
    assert (begun, busy) == ("begun", "busy at 15.0")
    assert step.endswith("  3:00 left")  # 30 seconds for each of 4 steps, and of 2 more
    with Console(terminal) as console:
        for clock.now in (100.0, 100.24, 100.25):  # At most four times a second.
            console.status(f"busy at {clock.now}")
    assert [f"at {at}" in terminal.getvalue() for at in (100.0, 100.24, 100.25)] == [True, False, True]


def test_an_evaluation_has_a_bar_on_a_terminal_alone(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.trainer.monitoring.console._REFRESH_SECONDS", 0.0)
    with Console(terminal) as console:
        console.show_evaluation(1, 3)
        console.show_evaluation(3, 3)  # Before a run has begun, there is no other bar.
        alone = terminal.getvalue()
        console.start(total_steps=10)
        console.step(metrics(4))
        for done in range(1, 4):
            console.show_evaluation(done, 3)
            console.note("a line meanwhile")
        console.step(metrics(5))
    assert "1/3" in alone
    assert "4/10" not in alone
    during = terminal.getvalue()[len(alone) :]
    assert "2/3" in during
    assert "evaluating" in during
    assert during.rindex("evaluating") < during.rindex("5/10")
    plain = io.StringIO()
    with Console(plain) as console:
        console.show_evaluation(1, 3)
    assert not plain.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, FakeTerminal])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("closed file")])
@pytest.mark.usefixtures("terminal")
def test_a_stream_that_fails_silences_the_console_and_nothing_else(
    kind: type[io.StringIO], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stream: Any = Mock(wraps=kind(), write=Mock(side_effect=error))
    with caplog.at_level(logging.WARNING), Console(stream) as console:
        console.note("hello")
        console.start(total_steps=3)
        console.step(metrics(1))
        console.advance(2)
        console.note("bye")
    assert len([record for record in caplog.records if "nothing more is shown" in record.message]) == 1


def test_a_text_that_the_stream_cannot_encode_does_not_end_a_run() -> None:
    console = Console(io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    console.note("caf\u00e9")
    console.step(metrics())


def test_ranks_above_zero_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with Console(shown=False) as console:
        console.start(total_steps=3)
        console.note("x")
        console.status("y")
        console.advance(1)
        console.step(metrics())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (human_bytes(0), "0 B"),
        (human_bytes(1023), "1023 B"),
        (human_bytes((1 << 20) - 1), "1.0 MiB"),
        (human_seconds(0.9996), "1 s"),
        (human_bytes(1024), "1.0 KiB"),
        (human_bytes(5 << 30), "5.0 GiB"),
        (human_bytes(1 << 40), "1.0 TiB"),
        (human_bytes(1 << 20), "1.0 MiB"),
        (human_bytes(3 << 50), "3072.0 TiB"),
        (human_bytes(-3 << 20), "-3.0 MiB"),
        (human_count(999), "999"),
        (human_count(1000), "1.0k"),
        (human_count(2_500_000), "2.5M"),
        (human_count(-2500), "-2.5k"),
        (human_count(999_960), "1.0M"),  # Not 1000.0k
        (human_count(3e9), "3.0G"),
        (human_count(5e15), "5000.0T"),
        (human_count(math.nan), "nan"),
        (human_seconds(0.0123), "12 ms"),
        (human_seconds(1.25), "1.25 s"),
        (human_seconds(1), "1 s"),
        (human_seconds(60), "1:00"),
        (human_seconds(119.6), "2:00"),
        (human_seconds(185), "3:05"),
        (human_seconds(3600), "1:00:00"),
        (human_seconds(3723), "1:02:03"),
        (human_seconds(math.inf), "inf"),
        (step_line(metrics(3)).split("  ")[0], "step 3"),
        (step_line(metrics(3, unit="samples")).split("  ")[4], "12.3k samples/s"),
        (
            step_line(metrics(3, unit="samples", time=1.0, phases={"data": 1.0}, scale=2.0), total_steps=9),
            "step 3/9  loss 3.2500  grad 1.5  lr 0.0003  12.3k samples/s  250 ms/step  1.5 GiB  scale 2.0",
        ),
    ],
)
def test_units_are_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_tracker_has_the_values_of_each_evaluation_set_below_its_name() -> None:
    values = {"loss": 3.0, "a_loss": 1.0, "a_runtime": 0.5, "a_b_loss": 5.0, "a_b_runtime": 0.25}
    line = {f"eval_{name}": value for name, value in values.items()}
    row = evaluation_row({"step": 7, **line, "eval_a_text": "x", "time": 1.0})
    assert row.position.step == 7
    names = ("eval/loss", "eval/a/loss", "eval/a/runtime", "eval/a_b/loss", "eval/a_b/runtime")
    assert row.values == dict(zip(names, values.values(), strict=True))
    of_one_set = evaluation_row({"step": 1, "eval_loss": 1.0, "eval_runtime": 2.0})
    assert of_one_set.values == {"eval/loss": 1.0, "eval/runtime": 2.0}
