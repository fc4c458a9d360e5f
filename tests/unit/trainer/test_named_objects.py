"""Python code that a configuration names: model, data, collator, loss and callbacks, found, called and checked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from zeromesh.errors import ConfigError
from zeromesh.trainer import Trainer
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.monitoring.step_metrics import read_metrics

CODE = """
import torch
from torch import nn
from zeromesh.trainer.callbacks.callback import Callback

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(3, width), nn.Linear(width, 1)
    def forward(self, x, y=None):
        return self.down(torch.relu(self.up(x)))

def rows(count=16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(3, generator=draw), "y": torch.randn(1, generator=draw)} for _ in range(count)]

def stream(count=16):
    yield from rows(count)

def loss(model, batch, scale=1.0):
    output = model(batch["x"])
    return scale * (output - batch["y"]).square().sum(), output.numel()

def collate(samples):
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}

class Seen(Callback):
    steps = []
    def __init__(self, word="step"):
        self.word = word
    def on_step_end(self, trainer, step, metrics):
        self.steps.append((self.word, step))

number, BROKEN = 3, iter
"""
NAMED: dict[str, Any] = {
    "model": {"python": "own_code:Net", "config": {"width": 8}, "loss": {"python": "own_code:loss"}},
    "data": {
        "train": {"python": "own_code:rows"},
        "eval": {"a": {"python": "own_code:rows", "seed": 1}, "b_c": {"python": "own_code:stream", "count": 6}},
        "collator": {"python": "own_code:collate"},
    },
    "run": {"max_steps": 3, "eval_every": 2, "callbacks": [{"python": "own_code:Seen", "word": "made"}]},
    "batch": {"global_size": 4},
    "checkpoint": {"every_steps": 0},
    "precision": {"compute": "float32"},
}


NUMBER = {"python": "own_code:number"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    return tmp_path


def written(folder: Path, **changes: Any) -> Path:
    """The configuration with other values of keys such as `data__train`, in a file beside the code."""
    values = json.loads(json.dumps(NAMED))
    for key, value in changes.items():
        section, name = key.split("__")
        values[section][name] = value
    path = folder / "code" / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_all_of_a_run_from_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Trainer(config=written(folder)) as trainer:
        report = trainer.fit()
        code: Any = sys.modules["own_code"]
        assert code.Seen.steps == [("made", 1), ("made", 2), ("made", 3)]
        assert trainer.model.up.out_features == 8
        started = json.loads((trainer.run_directory / "starts.jsonl").read_text())
        evaluated = read_metrics(trainer.run_directory / "evaluations.jsonl")
    assert started["given"] == []
    assert {"eval_a_loss", "eval_b_c_loss", "eval_loss"} <= evaluated[0].keys()
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluation loss" in line]
    # Each set has targets of its own, and the mean of their losses has none.
    assert lines == [f"step {each['step']}: evaluation loss {each['eval_loss']:.4f}" for each in evaluated]
    torch.manual_seed(0)
    plain = Trainer(
        lambda: code.Net(8),
        {**NAMED, "model": {}, "data": {}, "run": {"max_steps": 3, "name": "plain"}},
        train_dataset=code.rows(),
        compute_loss=code.loss,
    )
    with plain:
        assert plain.fit().losses == report.losses


def test_a_generator_is_a_stream_that_begins_anew(folder: Path) -> None:
    path = written(folder, data__train={"python": "own_code:stream", "count": 8}, data__eval=None)
    with Trainer(config=path) as trainer:
        assert trainer.inputs.train_dataset in {trainer.inputs.train_dataset}, "it can be a key, as any dataset"
        assert len(trainer.fit().losses) == 3


def test_what_is_given_to_the_trainer_counts_for_more(folder: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with Trainer(model, written(folder), callbacks=[Callback()]) as trainer:
        assert trainer.inputs.model is model
        assert trainer.inputs.names()["model"] == "given"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model__python", "own_cod:Net", r"own_cod cannot be imported .*No module .*looked for in .*code.*nearest: own_code"),
        ("model__python", "own_code:net", r"own_code \(.*own_code.py\) has no net; nearest: Net"),
        ("model__python", "own_code.Net", "model.python: got 'own_code.Net'; allowed is text such as"),
        ("model__config", {"wide": 3}, r"model.python: own_code:Net\(width=4\) does not take {'wide': 3}"),
        ("model__source", "gpt2", "model.python returns the model, and model.source gpt2 is one too"),
        ("data__train", {"python": "own_code:rows", "m": 1}, r"data.train: own_code:rows\(.*does not take {'m': 1}"),
        ("data__train", NUMBER, "data.train: own_code:number gave a int; allowed are samples"),
        ("data__train", {"pyton": "own_code:rows"}, "data.train: got a mapping of 1 key; allowed is text"),
        ("data__train", ".", "data.train and data.eval: one is Python code"),
        ("data__eval", {"a": NUMBER}, "data.eval.a: own_code:number gave a int"),
        ("data__eval", {"python": "own_code"}, "data.eval.python: got 'own_code'; allowed is text such as"),
        ("data__eval", {"a b": "x"}, "data.eval.a b: got 'x'; allowed is a name of letters"),
        ("data__collator", NUMBER, "data.collator: own_code:number is a int; give a function"),
        ("model__loss", {"python": "own_code:loss", "by": 2}, r"model.loss: own_code:loss\(.*does not take {'by': 2}"),
        ("run__callbacks", [{"python": "own_code:rows"}], "callbacks holds a list; give objects"),
        ("run__callbacks", [NUMBER | {"a": 1}], "run.callbacks: own_code:number is a int, which takes no"),
    ],
)
def test_one_clear_error(folder: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(config=written(folder, **{key: value}))


def test_code_that_fails_is_named_with_its_line(folder: Path) -> None:
    (folder / "code" / "own_failing.py").write_text("a = 1\nb = a.z\n")
    said = r"own_failing cannot be imported \(AttributeError.* in .*own_failing.py, line 2\)"
    with pytest.raises(ConfigError, match=said):
        Trainer(config=written(folder, model__python="own_failing:Net"))


@pytest.mark.parametrize(("metric", "said"), [("loss", "eval_a_loss or eval_b_c_loss"), ("a_accuracy", "no value|none of")])
def test_the_best_of_several_sets_needs_the_name_of_one(folder: Path, metric: str, said: str) -> None:
    path = written(folder, run__metric=metric, run__patience=2)
    with Trainer(config=path) as trainer, pytest.raises(ConfigError, match=f"run.metric: {metric} is .*{said}"):
        trainer.fit()


def test_the_best_of_one_set(folder: Path) -> None:
    with Trainer(config=written(folder, run__metric="eval_b_c_loss", run__patience=1)) as trainer:
        trainer.fit()
        lines = read_metrics(trainer.run_directory / "evaluations.jsonl")
        assert trainer.state.best_metric == min(line["eval_b_c_loss"] for line in lines)
