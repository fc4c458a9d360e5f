"""The state of a run in strict JSON, and the settings that a resumed run must match."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.architectures import on_meta
from zeromesh.errors import CheckpointError, ConfigError, StorageError
from zeromesh.trainer.checkpoints.trainer_state import (
    EVALUATED,
    NAME,
    Best,
    TrainerState,
    description_of,
    differences,
    goal_of,
    settings_of,
    state_file_of,
    state_of,
    value_of,
)
from zeromesh.trainer.config.load import load_config

COUNTERS: dict[str, Any] = {"step": 3, "samples": 24, "tokens": 96, "updates": 2, "skipped": 1}


def test_numbers_that_json_does_not_have() -> None:
    kept: Any = {
        "array": np.arange(3), "scalar": np.float32(0.5), "tuple": (1, torch.tensor([2])), "nan": math.nan, "low": -math.inf,
        "flag": True, "none": None, "text": "x",
        "mapping": {3: {"deep": [math.inf]}, None: 1, "a": 2, math.inf: 3}, "like": {"__float__": "1"},
    }  # fmt: skip
    state = TrainerState(**COUNTERS, loss=math.nan, eval_loss=math.inf, metric=-math.inf, callbacks=kept)
    content = json.loads(state.to_json(), parse_constant=pytest.fail)
    assert content["schema"] == 1
    assert [content[name] for name in ("loss", "eval_loss", "metric")] == [None] * 3
    assert content["callbacks"] == {
        "array": [0, 1, 2], "scalar": 0.5, "tuple": [1, [2]], "nan": {"__float__": "nan"}, "low": {"__float__": "-inf"},
        "flag": True, "none": None, "text": "x",
        "mapping": {"__dict__": [[3, {"deep": [{"__float__": "inf"}]}], [None, 1], ["a", 2], [{"__float__": "inf"}, 3]]},
        "like": {"__dict__": [["__float__", "1"]]},
    }  # fmt: skip
    read = TrainerState.from_json(content, "here").callbacks
    assert [read[name] for name in ("low", "mapping", "like")] == [kept[name] for name in ("low", "mapping", "like")]
    finite = TrainerState(**COUNTERS, loss=1.5, eval_loss=0.0, metric=-2.0, log_history=[], paces=[], owes=[])
    assert TrainerState.from_json(json.loads(finite.to_json()), "here") == finite
    for value, place in ((1j, "a.0"), ({("x",): 1}, "a.0")):
        with pytest.raises(StorageError, match=rf"^callbacks\.{place[0]}: a {type(value).__name__}, which a checkpoint"):
            TrainerState(**COUNTERS, callbacks={"a": [value]}).to_json()


def test_schedulers_go_on_from_their_states() -> None:
    """Milestones are steps, by which torch's schedulers keep them in a Counter."""

    def made() -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2), lr_scheduler.MultiStepLR(optimizer, [0, 2, 2], gamma=0.1)]
        return optimizer, lr_scheduler.SequentialLR(optimizer, parts, [3])

    optimizer, scheduler = made()
    for _ in range(8):
        state = TrainerState(**COUNTERS, callbacks={"loop": scheduler.state_dict()})
        other, resumed = made()
        resumed.load_state_dict(TrainerState.from_json(json.loads(state.to_json()), "here").callbacks["loop"])
        other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        for each in (optimizer, other, scheduler, resumed):
            each.step()
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, f"^here: {NAME} has schema 2; this version reads 1$"),
        ({"schema": True}, "has schema True"),
        ({"schema": None}, "has schema None"),
        ({"step": -1}, r"other fields.*\(step: Input should be greater"),
        ({"seed": 1 << 63}, r"\(seed: "),
        ({"more": 1}, r"\(more: "),
        ({"step": 3.0}, r"\(step: "),
        *(({"callbacks": {"a": {"__dict__": pairs}}}, r"\(callbacks.a") for pairs in (3, [3], [[1]], [[[1], 2]])),
        ({"callbacks": {"a": {"__float__": []}}}, r"\(callbacks.a"),
    ],
)
def test_states_of_others_are_refused(change: dict[str, Any], message: str) -> None:
    for given in ({"schema": 1}, {"schema": 0}):
        assert TrainerState.from_json({**given, **COUNTERS, "seed": (1 << 63) - 1}, "here").step == 3
    with pytest.raises(CheckpointError, match=message):
        TrainerState.from_json({"schema": 1, **COUNTERS, **change}, "here")


def test_the_state_after_an_evaluation_supersedes_the_one_before() -> None:
    assert state_file_of({NAME: 0, EVALUATED: 0}) == EVALUATED
    assert state_file_of({}) == state_file_of({NAME: 0}) == NAME
    documents = {NAME: 3, EVALUATED: 4}

    def found(*files: str) -> TrainerState | None:
        reader: Any = SimpleNamespace(
            manifest=SimpleNamespace(files=files), directory=Path("here"),
            document=lambda name: {"schema": 1, **COUNTERS, "step": documents[name]},
        )  # fmt: skip
        return state_of(reader)

    assert found("model.safetensors") is None
    assert [state.step for state in (found(NAME), found(NAME, EVALUATED)) if state] == [3, 4]


class Odd:
    pass


def test_a_model_is_described_by_what_it_computes() -> None:
    assert description_of(nn.Linear(1, 1)) == {"class": "Linear"}
    model, other = on_meta("llama", vocab_size=8), on_meta("llama", vocab_size=8, use_cache=False)
    other.config.name_or_path, other.config.dtype, other.config.architectures = "elsewhere", "bfloat16", ["B"]
    model.config.odd, other.config.odd = Odd(), Odd()
    assert description_of(model) == description_of(other)
    assert description_of(model)["config.vocab_size"] == 8
    assert "at 0x" not in description_of(model)["config.odd"]
    made = on_meta("llama", vocab_size=8)
    settings = {"target_modules": ["v_proj", "q_proj"], "revision": "x"}
    described = description_of(peft.get_peft_model(made, peft.LoraConfig(r=3, **settings)))
    assert described["adapter.default.target_modules"] == ["q_proj", "v_proj"]
    assert described["adapter.default.r"] == 3
    assert described["class"] == "PeftModel"
    left_out = {"revision", "base_model_name_or_path", "inference_mode", "peft_version", "exclude_modules"}
    assert not {f"adapter.default.{name}" for name in left_out} & described.keys()


BASE: dict[str, dict[str, Any]] = {"run": {"max_steps": 10}}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("batch.global_size", 24, {"batch.global_size"}),
        ("batch.last", "partial", {"batch.last"}),
        ("batch.average", "samples", {"batch.average"}),
        ("batch.micro_size", 1, set()),
        ("run.label_smoothing", 0.5, {"run.label_smoothing"}),
        ("run.max_steps", 20, {"run.max_steps"}),
        ("run.seed", 9, {"run.seed"}),
        ("run.clip_norm", 2.0, {"run.clip_norm"}),
        ("run.eval_every", 2, set()),
        ("data.seed", 4, {"data.seed"}),
        ("optimizer.lr", 0.5, {"optimizer.lr"}),
        ("schedule.name", "constant", {"schedule.name"}),
        ("ema.decay", 0.5, {"ema.decay"}),
        ("zero.stage", 1, set()),
    ],
)
def test_settings_that_determine_the_weights(key: str, value: Any, named: set[str]) -> None:
    described = {"model": {"class": "A"}, "data": {"path": "p"}}
    section, _, name = key.partition(".")
    before = settings_of(load_config(BASE), **described)
    after = settings_of(load_config({**BASE, section: {**BASE.get(section, {}), name: value}}), **described)
    changed = {each for each in before.keys() | after.keys() if before.get(each) != after.get(each)}
    derived = {each for each in changed if each.startswith(("schedule.warmup", "ema."))}
    assert changed - (derived - named) == named
    assert (after["model.class"], after["data.path"]) == ("A", "p")
    assert not after.keys() & {"optimizer.in_backward", "ema.evaluate"}


def test_what_differs_is_shortened_and_what_the_model_wrote_is_known() -> None:
    exact, longer = "x" * 80, "y" * 81
    assert differences({"a": exact, "b": [1, "z"]}, {"a": longer, "b": None}) == [
        f"a: {exact} then, {longer[:77]}... now",
        'b: [1, "z"] then, null now',
    ]
    assert differences({"a": 1}, {"a": 1.0}) == []
    assert differences({"a": None}, {}) == ["a: null then, (absent) now"]
    assert differences({"a": 1}, {"a": 2}, {"b": 2}) == ["a: 1 then, 2 now"]


def test_a_gain_that_is_as_large_as_asked_ends_the_wait() -> None:
    best = Best(value=2.0, step=1, waited=3)
    for value, goal, least, wanted in (
        (1.5, "lowest", 0.5, Best(value=1.5, step=9)),
        (1.75, "lowest", 0.5, Best(value=1.75, step=9, waited=4)),
        (2.0, "lowest", 0.0, Best(value=2.0, step=1, waited=4)),
        (2.5, "highest", 0.5, Best(value=2.5, step=9)),
        (1.0, "highest", 0.0, Best(value=2.0, step=1, waited=4)),
        (math.nan, "highest", 0.0, Best(value=2.0, step=1, waited=4)),
    ):
        assert best.after(value, 9, goal, least) == wanted  # type: ignore[arg-type]
    assert Best().after(math.nan, 1, "lowest", 0.0) == Best(waited=1)
    for kept, wanted, again in (
        (Best(), {}, Best()),
        (Best(waited=3), {}, Best()),
        (best, {"value": 2.0, "step": 1, "waited": 3}, best),
        (Best(value=math.inf, step=1), {"value": {"__float__": "inf"}, "step": 1, "waited": 0}, None),
    ):
        content = json.loads(TrainerState(**COUNTERS, best=kept).to_json())
        assert content["best"] == wanted
        assert TrainerState.from_json(content, "x").best == (again or kept)


def test_the_goal_and_the_value_of_a_metric() -> None:
    names = ("eval_loss", "Perplexity", "word_error_rate", "accuracy", "f1")
    assert [goal_of(name, "auto") for name in names] == ["lowest"] * 3 + ["highest"] * 2
    assert (goal_of("loss", "highest"), goal_of("f1", "lowest")) == ("highest", "lowest")
    values = {"eval_f1": 1, "f1": 0.5, "eval_x": 2.0}
    assert [value_of(name, values) for name in ("f1", "eval_f1", "x")] == [0.5, 1.0, 2.0]
    with pytest.raises(ConfigError, match=r"^run\.metric: 'y' is no value of an evaluation; it has eval_f1, f1, eval_x\."):
        value_of("y", values)
