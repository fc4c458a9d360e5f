"""`zeromesh generate` and `serve`: what they write and say, with OpenAI's own client, and what a signal or a killed rank does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import psutil
import pytest
import torch
import transformers as tf

from tests.distributed.inference.generate_command_cases import write_model
from tests.support.tables import row, tried
from tests.support.terminal import on_terminal, seen

pytestmark = pytest.mark.usefixtures("at_once")


test_results_and_messages = tried("generate_command_cases", [row(2, case) for case in ("commands", "refusals")])


PYTHON = sys.executable
"""The interpreter itself, which no fixture has replaced yet: the processes of its command are below it."""


def started(folder: Path, *words: str, python: str = "", **streams: Any) -> "subprocess.Popen[Any]":
    """`zeromesh WORDS` in a folder; its errors are read from a pipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [python or sys.executable, "-m", "zeromesh", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, **streams)


def _ranks(command: "subprocess.Popen[Any]") -> list[psutil.Process]:
    """The processes that the command's fork server has started."""
    (server,) = psutil.Process(command.pid).children()
    return sorted(server.children(), key=lambda child: child.pid)


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True])
def test_a_killed_generation_goes_on(tmp_path: Path, whole: bool) -> None:
    """A rank is killed, whose launcher starts all again; or the whole command, which is given again."""
    write_model(tmp_path / "model", layers=4, hidden=128)
    prompts = [{"input_ids": [7 + number, 9], "max_new_tokens": 10 + 4 * number} for number in range(60)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    words = ["generate", "model", "--prompts", "p.jsonl", "--nproc", "2", "--batch", "4", "--out", "r.jsonl"]
    words += ["zero.stage=0", "parallel.timeout_seconds=10", "generation.eos_token_id=-1"]
    command = started(tmp_path, *words, python=PYTHON)
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
        assert 0 < len(journal.read_bytes().splitlines()) - 1 < 60
        again = started(tmp_path, *words)
        assert again.wait(120) == 0, again.stderr and again.stderr.read()
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
    words = ["generate", "model", "--chat", "--nproc", "2", "zero.stage=0", "--max-new-tokens", "400"]
    words += ["generation.eos_token_id=-1", "generation.do_sample=true"]
    command = started(tmp_path, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

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
    lines = seen(on_terminal(words, tmp_path, answers=[(b"\n> ", b"Hi\n"), (b"\n> ", b"/exit\n")]))
    at = lines.index("Say something; /reset begins anew, /exit or Ctrl-D ends.")
    assert lines[at + 1] == "> Hi"
    assert len(lines[at + 2]) == 12, lines
    assert lines[at + 3] == "> /exit"


MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@contextmanager
def serving(folder: Path, *words: str, python: str = "") -> Iterator[tuple["subprocess.Popen[str]", openai.OpenAI]]:
    """A server of a tiny model, and a client of it."""
    write_model(folder / "model")
    server = started(folder, "serve", "model", "--port", "0", "--grace", "3", *words, python=python, text=True)
    try:
        said = ""
        while not (found := re.search(r"serving model.* at (\S+)", said)):
            line = server.stderr.readline() if server.stderr is not None else ""
            assert line, f"it has ended: {said}"
            said += line
        yield server, openai.OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=30)
    finally:
        for child in psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []:
            child.kill()
        server.kill()
        server.wait()


def alone(folder: Path, prompt: str, new: int) -> list[int]:
    """What transformers goes on with."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    found = tf.AutoTokenizer.from_pretrained(folder / "model")(prompt, return_tensors="pt")
    tokens: list[int] = model.generate(**found, max_new_tokens=new, do_sample=False)[0, found["input_ids"].shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(("--nproc", "2", "parallel.pipeline=2"), marks=pytest.mark.full),
        pytest.param(("--nproc", "2", "zero.stage=3"), marks=pytest.mark.full),
    ],
)
def test_answers_and_a_clean_stop(tmp_path: Path, words: tuple[str, ...]) -> None:
    with serving(tmp_path, *words) as (server, client):
        made = client.completions.create(model="model", prompt="Once", max_tokens=20, temperature=0)
        wanted = alone(tmp_path, "Once", 20)
        tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "model")
        assert made.choices[0].text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert made.usage.completion_tokens == len(wanted)
        parts = list(client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=9, temperature=0, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == tokenizer.decode(alone(tmp_path, "user: Hi\nassistant:", 9), skip_special_tokens=True)
        drawn = [
            client.completions.create(model="model", prompt="Once", max_tokens=9, temperature=1.3, seed=seed).choices[0].text
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        # A request joins the batch that runs: it has its answer while one that came before goes on.
        long = client.completions.create(model="model", prompt="Once", max_tokens=450, temperature=0, stream=True)
        next(iter(long))
        assert client.completions.create(model="model", prompt="Hi", max_tokens=2, temperature=0).choices
        assert httpx.get(str(client.base_url).replace("/v1/", "/health")).json()["open_requests"] == 1
        long.close()
        with pytest.raises(openai.BadRequestError, match="the model has 512 positions"):
            client.completions.create(model="model", prompt="Once", max_tokens=600)
        stream = client.completions.create(model="model", prompt="Once", max_tokens=60, temperature=0, stream=True)
        next(iter(stream))
        server.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason, "what was open has ended"
        assert server.wait(20) == 0


@pytest.mark.full
def test_a_killed_rank_ends_the_server(tmp_path: Path) -> None:
    words = ["zero.stage=3", "parallel.timeout_seconds=5", "generation.eos_token_id=-1"]
    with serving(tmp_path, "--nproc", "2", *words, python=PYTHON) as (server, client):
        stream = client.completions.create(model="model", prompt="Once", max_tokens=500, stream=True, temperature=2.0)
        next(iter(stream))
        ranks = _ranks(server)
        began = time.monotonic()
        ranks[1].kill()
        with pytest.raises(openai.APIError, match=r"the generator has failed: .*rank 1 is gone"):
            list(stream)
        assert server.wait(20) == 128 + signal.SIGKILL, "that of the rank that failed first"
        assert time.monotonic() - began < 15
        assert "rank 1" in server.stderr.read()


@pytest.mark.full
def test_a_second_signal_ends_open_requests_with_an_answer(tmp_path: Path) -> None:
    words = ["--nproc", "2", "--grace", "60", "generation.eos_token_id=-1"]
    with serving(tmp_path, *words) as (server, client):
        stream = client.completions.create(model="model", prompt="Once", max_tokens=500, stream=True, temperature=2.0)
        next(iter(stream))
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server stops"):
            list(stream)
        assert server.wait(20) == 0


@pytest.mark.parametrize("words", [(), ("--nproc", "2", "zero.stage=3")])
def test_adapters_are_names_of_models(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_model(tmp_path / "model")
    given, models = [], {"model": tf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)}
    for seed, name in enumerate(("style", "task")):
        torch.manual_seed(seed)
        base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_alpha=64)
        models[name] = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
        models[name].save_pretrained(tmp_path / name)
        given += ["--adapter", f"{name}={tmp_path / name}"]
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer("Once", return_tensors="pt")
    with serving(tmp_path, *given, *words) as (_, client):
        assert [each.id for each in client.models.list().data] == ["model", "style", "task"]
        # All of them are open together.
        open_ = [
            (name, client.completions.create(model=name, prompt="Once", max_tokens=24, temperature=0, stream=True))
            for name in ("task", "model", "style", "task")
        ]
        said = {}
        for name, stream in open_:
            text = "".join(part.choices[0].text for part in stream)
            tokens = models[name].eval().generate(**prompt, max_new_tokens=24, do_sample=False)[0]
            assert text == tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            said[name] = text
        assert len({*said.values()}) == 3
        with pytest.raises(openai.NotFoundError, match="the model other is not served; there are model, style, task"):
            client.completions.create(model="other", prompt="Once")


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zeromesh.errors import ConfigError
    from zeromesh.trainer.cli.main import main
    from zeromesh.trainer.generation.requests import Inbox
    from zeromesh.trainer.inference.server.app import HttpServer, ServerOptions

    served: Any = None
    first = HttpServer(Inbox(), ServerOptions(port=0))
    port = int(first.start(served, {"m": None}).removesuffix("/v1").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: .*in use"):
        HttpServer(Inbox(), ServerOptions(port=port)).start(served, {"m": None})
    # Nothing of the model is looked at before: that takes minutes.
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err
    first.close()
