"""Callbacks of transformers, and such as its users write, see and do under zeromesh's Trainer what they do under transformers'."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import Workers
from zeromesh.trainer.monitoring.step_metrics import METRICS, read_metrics

CASES = "callback_cases"
STEPS = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 2, "max_steps": 6}
OFF = {"eval_strategy": "no", "save_strategy": "no"}
RUNS: dict[str, dict[str, Any]] = {
    "steps": {**STEPS, "gradient_accumulation_steps": 2, "warmup_steps": 2, "weight_decay": 0.1},
    "epochs": {
        **dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch"),
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 4,
        "load_best_model_at_end": True,
    },
    "cut": {
        **dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch"),
        "max_steps": 5,
        "gradient_accumulation_steps": 4,
    },
    "bare": {**OFF, "max_steps": 3, "logging_steps": 3, "eval_on_start": True},
}
"""Runs by what decides their events: steps, epochs, epochs that the run's end cuts short, nothing."""


def like(mine: Any, theirs: Any, where: str = "") -> None:
    """Assert that two nests of values are the same but for rounding."""
    if isinstance(theirs, Mapping):
        assert list(mine) == list(theirs), where
        for name, value in theirs.items():
            like(mine[name], value, f"{where}.{name}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), where
        for number, value in enumerate(theirs):
            like(mine[number], value, f"{where}[{number}]")
    elif isinstance(theirs, float) and isinstance(mine, float | int):
        assert math.isclose(mine, theirs, rel_tol=2e-4, abs_tol=1e-7), (where, mine, theirs)
    else:
        assert mine == theirs, where


def same_events(found: Mapping[str, Any], *, judged: bool = False) -> None:
    """Assert that two recorders saw the same, and name the first event in which they did not."""
    mine, theirs = found["ours"][-1], found["theirs"][-1]
    for seen in (mine, theirs) if not judged else ():
        for each in seen:
            each["best"] = None  # Which transformers looks for only where it is to load it.
    names = [[f"{each['event']} {each['state'][0]}" for each in seen] for seen in (mine, theirs)]
    assert names[0] == names[1]
    for number, (own, other) in enumerate(zip(mine, theirs, strict=True)):
        like(own, other, f"{number}: {names[0][number]}")


@pytest.mark.parametrize("name", RUNS)
def test_every_event_sees_the_same(workers: Workers, tmp_path: Path, name: str) -> None:
    """Order of events, state, control, arguments, logs, metrics and rates, in training and after it."""
    found = workers.run(1, f"{CASES}:both", folder=str(tmp_path), fields=RUNS[name], after=True)[0]
    same_events(found, judged="load_best_model_at_end" in RUNS[name])
    events = {each["event"] for each in found["ours"][-1]}
    assert {"on_init_end", "on_prediction_step", "on_predict", "on_evaluate", "on_log", "on_train_end"} <= events


FIRST: dict[str, tuple[dict[str, Any], list[int]]] = {
    "beside others": ({"logging_steps": 2, "max_steps": 4}, [1, 2, 4]),
    "alone": ({"logging_strategy": "no", "max_steps": 2}, [1]),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_step_is_logged(workers: Workers, tmp_path: Path, name: str) -> None:
    """In callbacks, where `loss` of the second line is the mean since the first, and in metrics.jsonl."""
    fields, steps = FIRST[name]
    fields = {**OFF, **fields, "logging_first_step": True}
    same_events(workers.run(1, f"{CASES}:both", folder=str(tmp_path), fields=fields)[0])
    assert [line["step"] for line in read_metrics(tmp_path / "ours" / "run" / METRICS)] == steps


@pytest.mark.parametrize(
    ("keys", "never", "gathered"),
    [(["hidden_states"], [], 1), ([], ["hidden_states"], 2), (None, ["hidden_states"], 1)],
)
def test_outputs_that_an_evaluation_ignores(
    workers: Workers, tmp_path: Path, keys: list[str] | None, never: list[str], gathered: int
) -> None:
    """They are named in place of those that the model's configuration names."""
    found = workers.run(1, f"{CASES}:ignoring", folder=str(tmp_path), keys=keys, never=never)[0]
    assert found["ours"] == found["theirs"]
    logits, states = [7, 12, 64], [[7, 12, 32]] * 3
    assert found["ours"] == [logits if gathered == 1 else [logits, states]]


def test_every_event_sees_the_same_on_two_ranks(workers: Workers, tmp_path: Path) -> None:
    """Of the same global batch: all but whether a rank is the first."""
    fields = {**RUNS["steps"], "gradient_accumulation_steps": 1}
    callbacks = [["KeepEvaluated"], ["SaveWhen", []]]
    whole = {**fields, "per_device_train_batch_size": 4}
    theirs = workers.run(1, f"{CASES}:both", folder=str(tmp_path / "one"), fields=whole, callbacks=callbacks)[0][
        "theirs"
    ]
    seen = workers.run(2, f"{CASES}:recorded", folder=str(tmp_path / "two"), fields=fields, callbacks=callbacks)
    assert seen[0][:2] == seen[1][:2]
    like(seen[0][:2], theirs[:2])
    assert [each["first"] for each in seen[1][-1]] == [[False, False]] * len(seen[1][-1])
    for mine in seen:
        pair = {"ours": shared(mine[-1]), "theirs": shared(theirs[-1])}
        same_events({name: [each] for name, each in pair.items()})


def shared(seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on the number of ranks."""
    own = {"first": None, "every": None}
    return [{**each, **own} for each in seen if each["event"] != "on_prediction_step"]


SCORES = [0.3, 0.6, 0.5, 0.6, 0.4, 0.2, 0.1, 0.0, 0.0]
EARLY = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "logging_steps": 1,
    "max_steps": 9,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "save_total_limit": 2,
}
CALLBACKS: dict[str, tuple[list[list[Any]], dict[str, Any], list[float]]] = {
    "DefaultFlowCallback": ([["DefaultFlowCallback"]], RUNS["steps"], []),
    "EarlyStoppingCallback": ([["EarlyStoppingCallback", 3]], EARLY, SCORES),
    "StopAtLoss": ([["StopAtLoss", 4.15]], {**OFF, "logging_steps": 1, "max_steps": 9}, []),
    "EvaluateEarly": ([["EvaluateEarly"]], {**OFF, "logging_steps": 3, "max_steps": 3}, []),
    "SaveWhen": ([["SaveWhen", [1, 3]]], {**OFF, "logging_steps": 4, "max_steps": 4}, []),
    "SaveWhen beside the run's own": ([["SaveWhen", [1]]], {**STEPS, "eval_strategy": "no", "max_steps": 4}, []),
    "KeepEvaluated": ([["KeepEvaluated"]], {**STEPS, "save_strategy": "no"}, []),
    "CutEpochs": ([["CutEpochs"]], {**OFF, "logging_steps": 2, "num_train_epochs": 3, "save_strategy": "epoch"}, []),
    "CountTime": ([["CountTime"]], {**OFF, "gradient_accumulation_steps": 4, "logging_steps": 4, "max_steps": 4}, []),
    "Summary": ([["Summary"]], EARLY, SCORES),
    "Annotate": ([["Annotate"]], {**OFF, "logging_steps": 1, "max_steps": 2}, []),
}
ALIKE = {"DefaultFlowCallback", "SaveWhen", "CountTime"}
"""What others show as well: each event of `RUNS` by transformers' own flow, `SaveWhen` beside the run's own, substeps."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in CALLBACKS]
)
def test_a_callback_sees_and_does_the_same(workers: Workers, tmp_path: Path, name: str) -> None:
    """Also by what it makes the run do: a recorder beside it sees the same."""
    callbacks, fields, scores = CALLBACKS[name]
    found = workers.run(1, f"{CASES}:both", folder=str(tmp_path), fields=fields, callbacks=callbacks, scores=scores)[0]
    assert found["theirs"][0] is None or found["theirs"][0]
    like(found["ours"][:-1], found["theirs"][:-1])
    same_events(found, judged="load_best_model_at_end" in fields)


def test_a_run_that_goes_on_sees_the_same(workers: Workers, tmp_path: Path) -> None:
    """With what was logged, which was best, and what callbacks had kept before: one bad evaluation more ends the run."""
    fields = {**EARLY, "lr_scheduler_type": "constant", "save_total_limit": None}
    fields["restore_callback_states_from_checkpoint"] = True  # Which zeromesh always does.
    found = workers.run(1, f"{CASES}:resumed", folder=str(tmp_path), fields=fields, scores=[0.6, 0.5, 0.4, 0.3])[0]
    for which in found.values():
        assert [each["event"] for each in which[0][:2]] == ["on_train_begin", "on_epoch_begin"]
        for each in which[0][:2]:
            each["flags"] = None  # transformers brings back those that stood when the checkpoint was written.
    same_events(found, judged=True)
    assert [each["state"][0] for each in found["ours"][0] if each["event"] == "on_step_end"] == [3]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_checkpoints_have_the_names_of_transformers(workers: Workers, tmp_path: Path, ranks: int) -> None:
    said = workers.run(ranks, f"{CASES}:linked", folder=str(tmp_path))
    named = "checkpoint.resume names step-00000003, and this run has gone on since: it goes on from step 4."
    assert [line.startswith(named) for line in said[0]["said"]] == [True]
    for found in said:
        assert found["names"] == [["checkpoint-3", "checkpoint-4"], ["checkpoint-5", "checkpoint-6"]]
        assert found["loads"] == ["LlamaForCausalLM"] * 2
        assert found["own"]
        assert found["step"] == 6


@pytest.mark.parametrize("name", ["PrinterCallback", "ProgressCallback"])
def test_what_is_printed(workers: Workers, tmp_path: Path, name: str) -> None:
    found = workers.run(1, f"{CASES}:shown", folder=str(tmp_path), name=name)[0]
    assert len(found["theirs"]) == 6
    assert [sorted(line) for line in found["ours"]] == [sorted(line) for line in found["theirs"]]
    for mine, theirs in zip(found["ours"], found["theirs"], strict=True):
        for key, value in theirs.items():
            assert value is None or math.isclose(float(mine[key]), float(value), rel_tol=2e-3), key


def test_what_tensorboard_gets(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(1, f"{CASES}:tensorboard", folder=str(tmp_path))[0]
    (mine, own_texts), (theirs, texts) = found["ours"], found["theirs"]
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "eval/loss"} <= set(theirs)
    assert set(mine) == set(theirs)
    like({name: mine[name] for name in theirs}, theirs)
    assert own_texts == texts


def test_what_wandb_gets(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(1, f"{CASES}:wandb_offline", folder=str(tmp_path))[0]
    (mine, own_settings), (theirs, settings) = found["ours"], found["theirs"]
    assert len(theirs) == 5
    for own, other in zip(mine, theirs, strict=True):
        assert set(own) == set(other)
        like({name: own[name] for name in other}, other)
    assert own_settings == settings
