"""Callbacks of transformers, and such as its users write, see and do under zeromesh's Trainer what they do under transformers'."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import tried
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


FIRST: dict[str, tuple[dict[str, Any], list[int]]] = {
    "beside others": ({"logging_steps": 2, "max_steps": 4}, [1, 2, 4]),
    "alone": ({"logging_strategy": "no", "max_steps": 2}, [1]),
}
RESUMED = {**EARLY, "lr_scheduler_type": "constant", "save_total_limit": None}
RESUMED["restore_callback_states_from_checkpoint"] = True  # Which zeromesh always does.
FULL = pytest.mark.full


@pytest.mark.parametrize("name", RUNS)
def test_every_event_sees_the_same(workers: Workers, tmp_path: Path, name: str) -> None:
    """Order of events, state, control, arguments, logs, metrics and rates, in training and after it."""
    events = workers.run(1, f"{CASES}:both", folder=str(tmp_path), fields=RUNS[name], after=True)[0]
    assert {"on_init_end", "on_prediction_step", "on_predict", "on_evaluate", "on_log", "on_train_end"} <= set(events)


@pytest.mark.parametrize("name", FIRST)
def test_the_first_step_is_logged(workers: Workers, tmp_path: Path, name: str) -> None:
    """In callbacks, where `loss` of the second line is the mean since the first, and in metrics.jsonl."""
    fields, steps = FIRST[name]
    workers.run(1, f"{CASES}:both", folder=str(tmp_path), fields={**OFF, **fields, "logging_first_step": True})
    assert [line["step"] for line in read_metrics(tmp_path / "ours" / "run" / METRICS)] == steps


def test_every_event_sees_the_same_on_two_ranks(workers: Workers, tmp_path: Path) -> None:
    fields = {**RUNS["steps"], "gradient_accumulation_steps": 1}
    callbacks = [["KeepEvaluated"], ["SaveWhen", []]]
    whole = {**fields, "per_device_train_batch_size": 4}
    theirs = workers.run(1, f"{CASES}:single", folder=str(tmp_path / "one"), fields=whole, callbacks=callbacks)[0]
    given = {"fields": fields, "callbacks": callbacks, "theirs": theirs}
    workers.run(2, f"{CASES}:recorded", folder=str(tmp_path / "two"), **given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL) if name in ALIKE else name for name in CALLBACKS])
def test_a_callback_sees_and_does_the_same(workers: Workers, tmp_path: Path, name: str) -> None:
    """Also by what it makes the run do: a recorder beside it sees the same."""
    callbacks, fields, scores = CALLBACKS[name]
    workers.run(1, f"{CASES}:both", folder=str(tmp_path), fields=fields, callbacks=callbacks, scores=scores)


test_what_is_around_callbacks_is_the_same = pytest.mark.sampled(2)(
    tried(
        CASES,
        [
            (1, "ignoring", {"keys": ["hidden_states"], "never": [], "gathered": 1}),
            (1, "ignoring", {"keys": [], "never": ["hidden_states"], "gathered": 2}),
            (1, "ignoring", {"keys": None, "never": ["hidden_states"], "gathered": 1}),
            (1, "resumed", {"fields": RESUMED, "scores": [0.6, 0.5, 0.4, 0.3]}),
            pytest.param(1, "linked", {}, marks=FULL),
            (2, "linked", {}),
            (1, "shown", {"name": "PrinterCallback"}),
            (1, "shown", {"name": "ProgressCallback"}),
            pytest.param(1, "tensorboard", {}, marks=pytest.mark.skipif(find_spec("tensorboard") is None, reason="no TensorBoard")),
            pytest.param(1, "wandb_offline", {}, marks=FULL),
        ],
    )
)
