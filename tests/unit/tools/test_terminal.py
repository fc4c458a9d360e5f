"""`zeromesh status`, and what else reaches a terminal: names and messages of anybody's, without what a terminal would obey."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from tests.support.commands import ended
from tests.support.damage_cases import STATE, Json, replace, resign
from tests.support.step_lines import metrics
from tests.support.terminal import on_terminal, seen
from zeromesh import errors
from zeromesh.errors import counted, plural, printable, printable_lines, ranks_text
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.formatting import Detail, table_lines, wrapped
from zeromesh.trainer.loop.context import FitReport
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.run_directory import RunDirectory

EVIL = "[/]\x1b[31m\x07\x9b2J\u202eend"
SHOWN = r"[/]\x1b[31m\x07\x9b2J\u202eend"


@given(st.text(alphabet=st.characters()))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable_lines(text).replace("\n", "").isprintable()
    assert printable_lines(text).count("\n") == text.count("\n")
    if text.isprintable():
        assert printable(text) == text


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.CheckpointError, errors.StorageError])
def test_errors_show_names_as_escapes(kind: Any) -> None:
    assert str(kind(f"{EVIL} is no file\nsecond line")) == f"{SHOWN} is no file\nsecond line"


def test_the_console_shows_notes_and_status_as_escapes() -> None:
    plain = io.StringIO()
    console = Console(plain)
    console.note(f"{EVIL}\nsecond line")
    assert plain.getvalue() == f"{SHOWN}\nsecond line\n"
    terminal = io.StringIO()
    console = Console(terminal)
    plainly = {"highlight": False, "markup": False, "emoji": False}
    console._rich = RichConsole(file=terminal, force_terminal=True, width=200, **plainly)
    console._is_terminal = True
    console.status(EVIL)
    console.start(total_steps=3)
    console._drawn_at = -1e9
    console.status(EVIL)
    console.close()
    assert terminal.getvalue().count(SHOWN) >= 2
    assert not any(each in terminal.getvalue() for each in ("\x1b[31m\x07", "\x9b", "\u202e"))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """All output so far, in one line; nothing in it may be anything but text."""
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert text.replace("\n", "").isprintable(), repr(text)
    return "".join(text.split("\n"))


def run_in(folder: Path, note: str = "ended", *, age: float = 0.0, ranks: Any = None) -> Path:
    """A run's directory as the lock's `note` and files of `age` seconds leave it."""
    folder.mkdir()
    (folder / "run.lock").write_text(f"{note}\n")
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n')
    if ranks is not None:
        (folder / "ranks.json").write_text(json.dumps({"time": 1.0, "ranks": ranks}))
    for path in folder.iterdir():
        os.utime(path, (time.time() - age,) * 2)
    return folder


def test_status_shows_hostile_names_and_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"rank": 0, "pid": EVIL, "step": [EVIL], "doing": EVIL, "failure": "", "seconds_without_progress": 1.0}
    run = run_in(tmp_path / EVIL.replace("/", "|"), EVIL, ranks=[row])
    assert main(["status", str(run)]) == 0
    found = said(capsys)
    assert "[|]\\x1b[31m" in found
    assert "[/]" in found
    link = {"for": EVIL, "ranks": [], "seconds": EVIL}
    for wrong in ({"seconds_without_progress": 10**4000}, {"waits": link}):
        (run / "ranks.json").write_text(json.dumps({"ranks": [{**row, **wrong}]}))
        assert main(["status", str(run)]) == 1
        assert "ranks.json" in said(capsys)


def test_status_gives_rows_with_the_rank_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path / "run", ranks=[{"rank": 1, "step": 3}, {"rank": 0, "step": 3}])
    rows = json.loads(ended(capsys, ["status", str(run), "--json"]).out)["ranks"]
    assert [(next(iter(row)), row["rank"]) for row in rows] == [("rank", 0), ("rank", 1)]
    many = run_in(tmp_path / "many", ranks=[{"rank": rank, "step": 3, "seconds": float(rank)} for rank in range(66)])
    shown = ended(capsys, ["status", str(many)]).out.partition("progress\n")[2]
    assert "and 2 more ranks" in shown  # Those that do what they do for the shortest time.
    assert [line.split()[0] for line in shown.splitlines()[:64]] == [str(rank) for rank in range(2, 66)]


HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("note", "age", "monitored", "code", "words"),
    [
        ("ended", 1e6, True, 0, "the run has ended"),
        ("ended", 1e6, False, 0, "the run has ended"),
        ("ended by StorageError", 1.0, True, 1, "the run has ended by StorageError"),
        ("pid 999999999 on {here}", 1.0, True, 1, "the run was killed"),
        ("pid {own} on {here}", 1.0, True, 0, ""),
        ("pid {own} on {here}", 60.0, True, 1, "not heard of for 60 seconds"),
        ("pid {own} on {here}", 60.0, False, 0, "its last line is 60 seconds old"),
        ("pid 1 on elsewhere", 7.0, False, 0, ""),
        ("pid 1 on elsewhere", 11.0, True, 1, "not heard of for 1"),
    ],
)
def test_status_tells_runs_that_ended_from_those_that_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], note: str, age: float, monitored: bool, code: int, words: str
) -> None:
    note = note.format(own=os.getpid(), here=HERE)
    run = run_in(tmp_path / "run", note, age=age, ranks=[] if monitored else None)
    assert main(["status", str(run)]) == code
    assert words in said(capsys).replace("\n", " ")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def written(run: Path, pids: list[int], **more: Any) -> Path:
    """A run that goes on in this process: rank 0 waits for the others, which have made no progress for a while."""
    common = {"step": 3, "microbatch": 1, "activity": "forward", "doing": "in forward of unit layers.0", "disk": ""}
    common |= {"seconds": 2.0, "seconds_without_progress": 2.0, "failure": "", "waits": None}
    rows = [{**common, "rank": rank, "pid": pid} for rank, pid in enumerate(pids)]
    rows[0]["waits"] = {"for": "gather of layers.0/0", "ranks": [1], "seconds": 2.0}
    rows[-1] |= more
    run_in(run, f"pid {os.getpid()} on {HERE}", ranks=rows)
    (run / "metrics.jsonl").unlink()  # There is no line of metrics yet.
    return run


def test_a_stopped_rank(tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", [os.getpid(), sleeper.pid])
    assert "rank 0 waits for rank 1: compute" in ended(capsys, ["status", str(run)]).out
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    said = ended(capsys, ["status", str(run)]).out
    assert "rank 0 waits for rank 1: stopped" in said
    assert "stopped in forward of unit layers.0" in said
    assert "more rank" not in said


def test_a_failure_stands_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", [os.getpid(), os.getpid()], failure="OSError: " + "long " * 60)
    main(["status", str(run)])
    said = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in said[1:4]) < 200
    assert any(line.startswith("rank 1 failed: OSError: long") for line in said)


def test_what_holds_runs_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text("")
    assert f"runs in it are {tmp_path / 'one'}" in ended(capsys, ["status", str(tmp_path)], 1).err


@pytest.mark.parametrize(
    ("count", "noun", "spec", "text"),
    [
        (1, "step", "", "1 step"),
        (0, "rank", "", "0 ranks"),
        (1200, "file", ",", "1,200 files"),
        (2, "batch", "", "2 batches"),
        (3, "process", "", "3 processes"),
        (2, "more directory", "", "2 more directories"),
        (1, "whole step", "", "1 whole step"),
    ],
)
def test_a_noun_goes_with_its_number(count: int, noun: str, spec: str, text: str) -> None:
    assert counted(count, noun, spec) == text
    assert text.endswith(plural(count, noun))
    assert [ranks_text([3]), ranks_text([1, 2])] == ["rank 3", "ranks 1, 2"]


def test_a_table_is_no_wider_than_the_terminal() -> None:
    columns, row = ("rank", "doing", "seconds without progress"), ("0", "reducing gradients of unit layers.12", "1.5")
    assert table_lines(columns, [row], columns[2:], width=200) == table_lines(columns, [row], columns[2:])
    lines = table_lines(columns, [row], columns[2:], width=40)
    assert max(map(len, lines)) <= 40
    shown = "rank doing seconds without progress 0 reducing gradients of 1.5 unit layers.12"
    assert " ".join(" ".join(lines).split()) == shown
    assert list(wrapped(["  one two three"], 10)) == ["  one two", "    three"]
    assert list(wrapped(["", "one two"], None)) == ["", "one two"]
    assert list(wrapped(["", "one /a/path-that-is-long two"], 10)) == ["", "one", "  /a/path-that-is-long", "  two"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["name                     seconds in all  x", "one two three four five            1234  a"]),
        # Names of numbers become narrow first, then texts, and numbers stay whole in any width.
        (36, ["name                      seconds  x", "                           in all", "one two three four five      1234  a"]),
        (28, ["name              seconds  x", "                   in all", "one two three        1234  a", "  four five"]),
        (9, ["name            seconds  x", "                 in all", "one two three      1234  a", "  four five"]),
    ],
)
def test_what_a_table_gives_up_in_a_narrow_terminal(width: int | None, lines: list[str]) -> None:
    columns, row = ("name", "seconds in all", "x"), ("one two three four five", 1234, "a")
    assert table_lines(columns, [row], ("seconds in all",), width=width) == lines
    assert table_lines(("n", "x"), [("12345", "a")], ("n",), width=3) == ["    n  x", "12345  a"]


def test_a_run_notes_how_it_has_ended(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    with RunDirectory(tmp_path, 0).locked():
        assert lock.read_text() == f"pid {os.getpid()} on {HERE}\n"
    assert lock.read_text() == "ended\n"
    with pytest.raises(KeyError), RunDirectory(tmp_path, 0).locked():
        raise KeyError("a bug")
    assert lock.read_text() == "ended by KeyError\n"


def test_only_one_rank_has_the_directory_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = RunDirectory(tmp_path / "other", 1)
    with other.locked():
        assert not other.path.exists()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(errors.StorageError, match=r"run' cannot be written: Permission denied; change run.output_dir"):
        RunDirectory(tmp_path / "run", 0)
    assert RunDirectory(tmp_path / "run", 1).path == tmp_path / "run"
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError, match=r"change run\.output_dir"):
        RunDirectory(tmp_path / "file" / "run", 0)


def test_a_lock_says_nothing_of_the_process_before(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("pid 1 on a host whose name is rather longer than the name of this one\n")
    with RunDirectory(tmp_path, 0).locked():
        assert (tmp_path / "run.lock").read_text() == f"pid {os.getpid()} on {HERE}\n"


def test_commands_about_checkpoints_show_hostile_names(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rename(content: Json) -> None:
        tensors = content["tensors"]["model"]
        tensors[EVIL] = tensors.pop(next(iter(tensors)))
        content["layout"][EVIL] = EVIL
        content["layout"]["stage"] = EVIL

    resign(copy, rename)
    counters = {"step": 7, "samples": 1, "tokens": 1, "updates": 1, "skipped": 0, "settings": {EVIL: EVIL}}
    replace(copy, STATE, json.dumps({"schema": 1, **counters, "callbacks": {EVIL: 1}}).encode())
    main(["checkpoint", "verify", str(copy)])
    with (copy / "model-00001-of-00001.safetensors").open("rb+") as file:
        file.seek(5000)
        file.write(b"\0" * 100)
    main(["checkpoint", "verify", str(copy)])
    for command in ("list", "inspect"):
        main(["checkpoint", command, str(copy.parent if command == "list" else copy)])
    main(["checkpoint", "inspect", str(copy), "--tensors", "*"])
    main(["checkpoint", "export", str(copy), str(copy.parent / EVIL.replace("/", "|"))])
    main(["checkpoint", "diff", str(copy), str(copy)])
    found = said(capsys)
    assert SHOWN in found


def test_a_message_with_a_name_that_is_no_text_is_still_shown(tmp_path: Path) -> None:
    """Bytes of a name that are no UTF-8 cannot even be encoded for a terminal."""
    name = os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff\x1b")
    code = "import sys; from zeromesh.trainer.cli.main import main; sys.exit(main(['status', sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert rb"\udcff\x1b" in done.stderr
    assert b"Traceback" not in done.stderr


SHOWN_RUN = """
import sys
from zeromesh.trainer.formatting import Detail, table_lines, wrapped
from zeromesh.trainer.monitoring.console import Console

console = Console(verbose=sys.argv[1] == "True")
console.status("reading the data")
console.note("layout   ZeRO stage 3 on 64 CUDA ranks: replicate 2 x shard 4 x tensor 4 x pipeline 2; batch 1024 = 4 x 16 x 16")
console.note(Detail("a detail"))
console.note("data     37,844 sequences of 256 tokens; 128 for evaluation")
console.start(total_steps=3)
for number in range(3):
    console.status(f"evaluating: {number} of 3 batches of a set of samples that has a name which is rather long, to be sure")
    console._drawn_at = -1e9
    print("a line of the user's own, with words enough for more than one line of a terminal of eighty columns")
    console.step(dict(step=number + 1, loss=5.0, grad_norm=1.0, lr=1e-3, tokens=10, tokens_per_second=1e5,
                      step_seconds=0.1, peak_memory_bytes=10**9, mfu=0.68712))
console.note("step 3: checkpoint of 37.7 MiB in runs/quickstart-of-somebody/checkpoints/step-00000003, on a disk that is slow")
console.close()
console.note("next     zeromesh generate runs/quickstart --chat")
"""


@pytest.mark.parametrize(("columns", "verbose"), [(80, False), (200, True)])
def test_what_a_terminal_shows_of_a_run(tmp_path: Path, columns: int, verbose: bool) -> None:
    written = on_terminal([sys.executable, "-c", SHOWN_RUN, str(verbose)], tmp_path, columns=columns)
    lines = seen(written, columns)
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= columns
    for words in (
        "replicate 2 x shard 4 x tensor 4 x pipeline 2; batch 1024 = 4 x 16 x 16",
        "in runs/quickstart-of-somebody/checkpoints/step-00000003, on a disk that is slow",
        "own, with words enough for more than one line of a terminal of eighty columns",
    ):
        assert words in text, lines
    starts = [line.split()[0] for line in lines if line]
    assert [each for each in starts if each in ("layout", "data", "next")] == ["layout", "data", "next"]
    assert len({line.index(line.split()[1]) for line in lines if line.startswith(("layout", "data", "next"))}) == 1
    assert ("a detail" in lines) is verbose
    assert not [line for line in lines if "reading the data" in line]
    (bar,) = [line for line in lines if "3/3" in line]
    assert "loss 5.000  100.0k tok/s  953.7 MiB" in bar
    assert written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l"), "the cursor is back"


def test_a_log_has_all_lines_whole_and_no_escapes() -> None:
    plain = io.StringIO()
    console = Console(plain)
    console.note("layout   word " * 60)
    console.note(Detail("a detail " * 20))
    console.start(total_steps=1)
    console.status("evaluating")
    console.close()
    assert len(plain.getvalue().splitlines()) == 2
    assert "\x1b" not in plain.getvalue()


def test_a_notebook_has_one_changing_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/plain"])
        return Handle()

    kernel = ModuleType("IPython")
    kernel.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    console = Console()
    console.note("a note", Detail("a detail"))
    console.start(total_steps=2)
    for number in (1, 2):
        console.step(metrics(number, loss=2.0, grad_norm=None, mfu=0.68712))
        console.status("evaluating")
    console.close()
    assert capsys.readouterr().out == "a note\n"
    assert shown[0].startswith("step 1/2  loss 2.0000")
    assert shown[-1].startswith("step 2/2  loss 2.0000")
    assert "mfu 68.7%" in shown[-1]


def test_the_report_of_a_run_is_short() -> None:
    report = FitReport(
        final_step=1000, final_loss=1.0, losses=(1.0,) * 1000, eval_loss=None, tokens=1, tokens_per_second=1.0,
        peak_memory_bytes=1, skipped_steps=0, metrics={"train_loss": 1.0},
    )  # fmt: skip
    assert len(repr(report)) < 200
