"""`zeromesh serve` with OpenAI's own client: answers, a signal, a rank that is killed."""

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
import psutil
import pytest
import torch
import transformers as tf

from tests.distributed.inference.generate_command_cases import write_model
from tests.support.workers import Workers

pytestmark = pytest.mark.usefixtures("at_once")

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[tuple["subprocess.Popen[str]", openai.OpenAI]]:
    """A server of a tiny model, and a client of it."""
    write_model(folder / "model")
    command = [sys.executable, "-m", "zeromesh", "serve", "model", "--port", "0", "--grace", "3", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while not (found := re.search(r"serving model at (\S+)", said)):
            line = server.stderr.readline() if server.stderr is not None else ""
            assert line, f"it has ended: {said}"
            said += line
        client = openai.OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=30)
        yield server, client
    finally:
        for child in psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []:
            child.kill()
        server.kill()
        server.wait()


def alone(folder: Path, prompt: str, new: int) -> list[int]:
    """What transformers goes on with."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / "model")
    found = tokenizer(prompt, return_tensors="pt")
    tokens: list[int] = model.generate(**found, max_new_tokens=new, do_sample=False)[
        0, found["input_ids"].shape[1] :
    ].tolist()
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
        assert made.usage is not None
        assert made.usage.completion_tokens == len(wanted)
        parts = list(
            client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=9, temperature=0, stream=True)
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == tokenizer.decode(alone(tmp_path, "user: Hi\nassistant:", 9), skip_special_tokens=True)
        drawn = [
            client.completions.create(model="model", prompt="Once", max_tokens=9, temperature=1.3, seed=seed)
            .choices[0]
            .text
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
    with serving(tmp_path, "--nproc", "2", "zero.stage=3", "parallel.timeout_seconds=5") as (server, client):
        stream = client.completions.create(model="model", prompt="Once", max_tokens=500, stream=True, temperature=2.0)
        next(iter(stream))
        ranks = [child for child in psutil.Process(server.pid).children() if "--worker" in child.cmdline()]
        began = time.monotonic()
        ranks[1].kill()
        with pytest.raises(openai.APIError, match=r"the generator has failed: .*rank 1 is gone"):
            list(stream)
        assert server.wait(20) == 128 + signal.SIGKILL, "that of the rank that failed first"
        assert time.monotonic() - began < 15
        assert server.stderr is not None
        assert "rank 1" in server.stderr.read()


@pytest.mark.full
def test_a_second_signal_ends_open_requests_with_an_answer(tmp_path: Path) -> None:
    with serving(tmp_path, "--nproc", "2", "--grace", "60") as (server, client):
        stream = client.completions.create(model="model", prompt="Once", max_tokens=500, stream=True, temperature=2.0)
        next(iter(stream))
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server stops"):
            list(stream)
        assert server.wait(20) == 0


def test_models_that_cannot_be_served_are_refused_before_anyone_listens(workers: Workers, tmp_path: Path) -> None:
    for said in workers.run(2, "generate_command_cases:refusals", folder=str(tmp_path)):
        assert said["encoder"]["code"] == said["wordless"]["code"] == 2
        assert "T5ForConditionalGeneration has an encoder" in said["encoder"]["err"]
        assert "answers are text, and the model's directory has no tokenizer" in said["wordless"]["err"]
        assert not any("serving" in each["err"] for each in said.values())


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zeromesh.errors import ConfigError
    from zeromesh.trainer.cli.main import main
    from zeromesh.trainer.generation.requests import Inbox
    from zeromesh.trainer.inference.server.app import HttpServer, ServerOptions

    served: Any = None
    first = HttpServer(Inbox(), "m", ServerOptions(port=0))
    port = int(first.start(served).removesuffix("/v1").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: .*in use"):
        HttpServer(Inbox(), "m", ServerOptions(port=port)).start(served)
    # Nothing of the model is looked at before: that takes minutes.
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err
    first.close()
