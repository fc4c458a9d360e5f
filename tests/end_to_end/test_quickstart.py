"""What a newcomer does first: the configurations of the repository, a script, a launcher, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import ended, wait_for
from tests.support.workers import Workers
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.monitoring.step_metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "configs").iterdir() if path.name != "dpo.yaml")
"""Those whose steps are zeromesh's own; tests of TRL run the other."""
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, with a space in its name, with some text."""
    folder = tmp_path_factory.mktemp("my runs")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return folder


def shortened(here: Path, **more: Any) -> list[str]:
    """Overrides that make any of the configurations a matter of seconds."""
    short = {"data.train": here / "text.txt", "data.sequence_length": 16, "run.max_steps": 3, "run.output_dir": here}
    short |= {key.replace("__", "."): value for key, value in more.items()}
    return [f"{key}={value}" for key, value in short.items()]


RANKS = {"tensor.yaml": (2, 4), "pipeline.yaml": (2, 4), "hybrid.yaml": (2, 4), "tensor-pipeline-data.yaml": (4, 8)}
"""Ranks for configurations that cannot do with one."""
OFTEN = {
    **dict.fromkeys(("quickstart.yaml", "offload.yaml", "tensor.yaml", "pipeline.yaml"), 2),
    **dict.fromkeys(("finetune.yaml", "chat.yaml", "lora.yaml", "deepspeed.json"), 1),
}
TRIED = [
    pytest.param(name, size, marks=() if OFTEN.get(name) == size else pytest.mark.full)
    for name in CONFIGS
    for size in RANKS.get(name, (2, 1))
]


@pytest.fixture(scope="module")
def pretrained(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    workers.run(1, "example_cases:prepare", folder=str(folder))
    return folder / "llama"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "size"), TRIED)
def test_every_configuration_of_the_repository_trains(
    workers: Workers, here: Path, request: pytest.FixtureRequest, name: str, size: int
) -> None:
    path = ROOT / "configs" / name
    short: dict[str, Any] = {"run__name": f"{path.stem}-{size}"}
    asked = load_config(path)
    if asked.model.source is not None:
        short["model__source"] = short["data__tokenizer"] = request.getfixturevalue("pretrained")
    if asked.data.format != "text" or asked.data.mixture is not None:  # They bring rows of their own.
        short["data__train"], short["data__sequence_length"] = asked.data.train, 64
        template = "{% for each in messages %}{{ each.role }} {{ each.content }} ; {% endfor %}"
        short["data__chat_template"] = f"'{template}'"
    if asked.run.epochs is not None:
        short["run__epochs"] = "null"
    if asked.run.load_best:
        short["run__eval_every"] = short["checkpoint__every_steps"] = 1
    if (asked.schedule.warmup_steps or 0) > 3:
        short["schedule__warmup_steps"] = 1
    found = workers.run(size, "input_cases:command", words=["train", str(path), *shortened(here, **short)])
    assert [each["code"] for each in found] == [0] * size, found
    assert [each["err"] for each in found] == [""] * size
    assert [each["out"] for each in found[1:]] == [""] * (size - 1)
    check_run(here / f"{path.stem}-{size}", path, found[0]["out"])


def check_run(folder: Path, path: Path, said: str) -> None:
    asked, resolved = load_config(path), load_config(folder / "config.resolved.yaml")
    same = ("zero", "parallel", "precision", "offload", "optimizer", "batch", "tracking")
    assert {name: getattr(resolved, name) for name in same} == {name: getattr(asked, name) for name in same}
    assert (resolved.model.config is None) == (asked.model.source is not None)
    assert resolved.model.lora == asked.model.lora
    assert resolved.run.max_steps == 3
    assert [name for name in asked.tracking.backends if not any((folder / name).iterdir())] == []
    if asked.run.load_best:
        assert len([line for line in said.splitlines() if "evaluation loss" in line]) == 3
    losses = [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    lines = said.splitlines()
    for start in ("batch: global", "precision: parameters and gradients", "data.", "step 1/3", "done: 3 steps"):
        assert [line for line in lines if line.startswith(start)], said
    assert not [line for line in lines if "Warning" in line or "[transformers]" in line]
    check_start(folder, lines)


def check_start(folder: Path, lines: list[str]) -> float:
    """One line, after that of step 1, has the parts of the start; returns their sum in seconds."""
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/"))
    (line,) = (line for line in lines if line.startswith("start: "))
    assert lines[first + 1] == line
    parts = read_metrics(folder / "metrics.jsonl")[0]["start"]
    assert list(parts)[-1] == "first step"
    total, *shown = map(float, re.findall(r"\d+\.\d", line))
    assert total == pytest.approx(sum(parts.values()), abs=0.06)
    hidden = len(parts) - len(shown)
    assert total == pytest.approx(sum(shown), rel=0.1, abs=0.1 + 0.05 * (hidden + len(shown)))
    return total


@pytest.mark.full
@pytest.mark.usefixtures("at_once")
def test_a_command_with_two_processes(here: Path) -> None:
    words = [sys.executable, "-m", "zeromesh", "train", str(ROOT / "configs/quickstart.yaml"), "--nproc", "2"]
    small = {"model__config__hidden_size": 64, "model__config__num_hidden_layers": 1, "run__name": "two"}
    began = time.time()
    done = ended([*words, *shortened(here, **small)], seconds=240, **OFFLINE)
    assert (done.returncode, done.stderr) == (0, "")
    first = read_metrics(here / "two/metrics.jsonl")[0]
    assert {"launch", "imports", "rendezvous", "data"} <= set(first["start"])
    # Python itself starts before a run can look at a clock.
    assert check_start(here / "two", done.stdout.splitlines()) == pytest.approx(first["time"] - began, rel=0.1, abs=0.5)
    assert done.stdout.splitlines()[0] == "two: ZeRO stage 3 on 2 CPU ranks: shard 2"
    assert [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("step ")][:3] == [
        *("step 1/3", "step 2/3", "step 3/3")
    ]


def test_a_second_run_without_checkpoints_begins_anew(workers: Workers, here: Path) -> None:
    path = str(ROOT / "configs/zero1.yaml")
    for steps in (4, 2):
        changes = {"run__name": "twice", "run__log_every": 0 if steps == 4 else 1, "checkpoint__every_steps": 0}
        words = ["train", path, *shortened(here, **changes)]
        (found,) = workers.run(1, "input_cases:command", words=[*words, f"run.max_steps={steps}"])
        assert found["code"] == 0
        assert ("step 1/" in found["out"]) == (steps == 2)
        assert f"done: {steps} steps" in found["out"]
        assert "peak memory 0 B" not in found["out"]
        expected = [] if steps == 4 else [1, 2]
        assert [record["step"] for record in read_metrics(here / "twice/metrics.jsonl")] == expected


SCRIPT = """
import sys, torch
from torch import nn
from zeromesh import Trainer

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x, y):
        return ((self.layers(x) - y) ** 2).mean()

def samples(count):
    xs = torch.randn(count, 4)
    return [{"x": x, "y": x.sum(dim=0, keepdim=True)} for x in xs]

data, held = samples(64), samples(16)
config = {"run": {"max_steps": 30, "output_dir": sys.argv[1], "name": "script", "log_every": 0},
          "optimizer": {"lr": 1e-2}, "precision": {"compute": "float32"}}
net = Net()
trainer = Trainer(net, config, data, held)
before = trainer.evaluate()["eval_loss"]
report = trainer.fit()
after = trainer.evaluate()["eval_loss"]
assert after == report.eval_loss < before / 2, (before, after)
net.eval()
with torch.no_grad():
    mean = float(sum(net(s["x"][None], s["y"][None]) for s in held)) / 16
assert abs(mean - after) < 1e-5
again = Trainer(net, config, data, held)
assert abs(again.evaluate()["eval_loss"] - after) < 1e-6
print("script ended well")
"""


ONE_AFTER_ANOTHER = """
import gc, sys, torch
from torch import nn
from zeromesh import Callback, Trainer

class Forget(Callback):
    # What is left of the trainer before goes in the middle of this one's run, on one rank first.
    def on_step_end(self, trainer, step, metrics):
        if step == 1 + trainer.mesh.rank:
            before.clear()
            gc.collect()

before = []
torch.manual_seed(0)
net, data = nn.Linear(4, 1), [{"x": x} for x in torch.randn(16, 4)]

def loss(model, batch):
    return (model(batch["x"]) - 1).square().sum(), len(batch["x"])

losses = []
for stage in (3, 2, 0):
    run = {"name": f"stage-{stage}", "max_steps": 2, "output_dir": sys.argv[1], "log_every": 0}
    config = {"run": run, "optimizer": {"lr": 1e-2},
              "precision": {"compute": "float32"}, "schedule": {"name": "constant"}, "zero": {"stage": stage}}
    config["parallel"] = {"transport": "gloo"}
    trainer = Trainer(net, config, data, compute_loss=loss, callbacks=[Forget()])
    losses += trainer.fit().losses
    before.append(trainer)
    if stage == 2:
        trainer.close()
    del trainer
assert losses == sorted(losses, reverse=True), losses
print("script ended well")
"""


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("program", "launcher", "done"),
    [
        (SCRIPT, [], "done: 30 steps"),
        pytest.param(SCRIPT, TORCHRUN, "done: 30 steps", marks=pytest.mark.full),
        # Each trainer makes process groups of its own, in the one store of the launch.
        pytest.param(ONE_AFTER_ANOTHER, TORCHRUN, "done: 2 steps", marks=pytest.mark.full),
    ],
    ids=["alone", "under torchrun", "one after another"],
)
def test_a_script_alone_and_under_torchrun(here: Path, program: str, launcher: list[str], done: str) -> None:
    (here / "my script.py").write_text(program)
    found = ended([sys.executable, *launcher, str(here / "my script.py"), str(here)], seconds=240, **OFFLINE)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("script ended well") == (2 if launcher else 1)
    assert found.stdout.count(done) == (1 if program == SCRIPT else 3)
    assert "Warning" not in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.usefixtures("at_once")
def test_an_interruption_ends_the_command_and_leaves_whole_lines(here: Path) -> None:
    words = [sys.executable, "-m", "zeromesh", "train", str(ROOT / "configs/zero1.yaml"), "--nproc", "2"]
    words += shortened(here, run__name="stopped", data__eval_fraction=0.0)
    words += ["run.max_steps=100000", "schedule.name=constant"]
    metrics = here / "stopped/metrics.jsonl"
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **OFFLINE}, start_new_session=True
    ) as process:
        wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2), 120)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "zeromesh: stopped; all workers have ended\n"
    lines = metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert "Traceback" not in out
