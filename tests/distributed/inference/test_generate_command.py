"""`zeromesh generate`: what it writes and says, and that no result is lost or made twice when ranks are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.inference.generate_command_cases import write_model
from tests.support.terminal import on_terminal, seen
from tests.support.workers import Workers

pytestmark = pytest.mark.usefixtures("at_once")


def test_results_and_messages(workers: Workers, tmp_path: Path) -> None:
    first, second = workers.run(2, "generate_command_cases:commands", folder=str(tmp_path))
    said, rows = first["said"], first["rows"]
    shown = [json.loads(line) for line in said["shown"]["out"].splitlines() if line.startswith("{")]
    assert [row["id"] for row in rows] == ["a", 1, 9, 3]
    assert [row["new_tokens"] for row in rows if row["finish"] == "length"][1:2] == [3]
    # Another layout gives the same tokens, those that are drawn too.
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in shown]
    assert all(
        abs(a - b) < 1e-9
        for one, two in zip(rows, shown, strict=True)
        for a, b in zip(one["logprobs"], two["logprobs"], strict=True)
    )
    assert not second["said"]["shown"]["out"]
    assert "bad.jsonl, line 2: the prompt has token 999, and the model knows 258" in said["bad"]["err"]
    assert said["bad"]["code"] == said["field"]["code"] == said["chat"]["code"] == 2
    assert "temprature is no field of transformers' GenerationConfig" in said["field"]["err"]
    assert "--chat reads from standard input, which is closed; leave it open" in said["closed"]["err"]
    assert "--chat reads from the terminal" in said["chat"]["err"]
    assert said["one"]["out"].rstrip("\n") == rows[0]["text"]
    # What is written as it comes is of a running batch, which beams that a prompt asks for cannot join.
    (beams,) = (json.loads(line) for line in said["beams"]["out"].splitlines() if line.startswith("{"))
    assert beams["logprobs"] is None
    answers = said["talk"]["out"].split("> ")
    assert "bytes that are no UTF-8, which is no text; /reset begins anew" in answers[4]
    assert len(answers) == 8, "a greeting, and a sign for each line that was read"
    assert said["talk"]["code"] == 0


def _ranks(command: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    children = psutil.Process(command.pid).children()
    return [child for child in children if "--worker" in " ".join(child.cmdline())]


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True])
def test_a_killed_generation_goes_on(tmp_path: Path, whole: bool) -> None:
    """A rank is killed, whose launcher starts all again; or the whole command, which is given again."""
    write_model(tmp_path / "model", layers=4, hidden=128)
    prompts = [{"input_ids": [7 + number, 9], "max_new_tokens": 10 + 4 * number} for number in range(60)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    words = [
        sys.executable,
        "-m",
        "zeromesh",
        "generate",
        "model",
        "--prompts",
        "p.jsonl",
        "--nproc",
        "2",
        "--batch",
        "4",
    ]
    words += ["--out", "r.jsonl", "zero.stage=0", "parallel.timeout_seconds=10", "generation.eos_token_id=-1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    journal = tmp_path / "r.jsonl.part"
    deadline = time.monotonic() + 120
    while not journal.exists() or len(journal.read_bytes().splitlines()) < 5:
        assert time.monotonic() < deadline
        assert command.poll() is None, "it was over before anything was killed"
        time.sleep(0.02)
    ranks = _ranks(command)
    assert len(ranks) == 2
    if whole:
        command.kill()
    else:
        os.kill(ranks[1].pid, signal.SIGKILL)
    error = command.communicate(timeout=120)[1].decode()
    if whole:
        for rank in ranks:
            rank.wait(30)
        kept = len(journal.read_bytes().splitlines()) - 1
        assert 0 < kept < 60
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=120)
    else:
        assert command.returncode == 0, error
        assert "start" in error, "all ranks started again"
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(60))
    assert [row["new_tokens"] for row in rows] == [line["max_new_tokens"] for line in prompts]
    assert not journal.exists()


@pytest.mark.full
def test_ctrl_c_ends_answers_and_then_the_conversation(tmp_path: Path) -> None:
    """As often as somebody likes, over several ranks."""
    write_model(tmp_path / "model", layers=8, hidden=256)
    words = [sys.executable, "-m", "zeromesh", "generate", "model", "--chat", "--nproc", "2", "zero.stage=0"]
    words += ["--max-new-tokens", "400", "generation.eos_token_id=-1", "generation.do_sample=true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdin is not None
    assert command.stdout is not None

    def heard(many: int) -> bytes:
        return os.read(command.stdout.fileno(), many) if command.stdout is not None else b""

    said = b""
    for turn in range(3):
        while not said.endswith(b"> "):
            said += heard(1)
        command.stdin.write(b"Hi\n")
        command.stdin.flush()
        said = heard(1)
        command.send_signal(signal.SIGINT)
        assert command.poll() is None, turn
    while not said.endswith(b"\n> "):
        said += heard(1)
    assert len(said) < 400, "the answer was not cut short"
    command.send_signal(signal.SIGINT)
    error = command.stderr.read().decode() if command.stderr is not None else ""
    assert command.wait(60) == 0, error
    command.stdin.close()
    assert "Traceback" not in error


def test_an_answer_streams_in_one_line_of_a_terminal(tmp_path: Path) -> None:
    """The line of status is gone, and nothing stands between the program and its terminal, when an answer comes."""
    write_model(tmp_path / "model")
    words = [sys.executable, "-m", "zeromesh", "generate", "model", "--chat", "--max-new-tokens", "12"]
    # Letters alone, so that an answer is one line.
    forbidden = json.dumps([token for token in range(2, 258) if not 67 <= token < 90])
    words.append(f"generation.suppress_tokens={forbidden}")
    written = on_terminal(words, tmp_path, answers=[(b"\n> ", b"Hi\n"), (b"\n> ", b"/exit\n")])
    lines = seen(written)
    at = lines.index("Say something; /reset begins anew, /exit or Ctrl-D ends.")
    assert lines[at + 1] == "> Hi"
    assert len(lines[at + 2]) == 12, lines
    assert lines[at + 3] == "> /exit"
