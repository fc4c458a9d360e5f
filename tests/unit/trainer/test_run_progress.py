"""Counters of a run, what is due after a step, requests to stop, and the lines of the log."""

import math
import os
import signal
import time
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from zeromesh.errors import ConfigError
from zeromesh.launch import signals
from zeromesh.launch.signals import StopRequest
from zeromesh.optim.optimizer_step import StepOutcome
from zeromesh.trainer.checkpoints.trainer_state import Best, TrainerState
from zeromesh.trainer.config.sections.optimizer import OptimizerSection
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.loop import training_loop
from zeromesh.trainer.loop.context import RunContext, RunProgress, UserInputs
from zeromesh.trainer.loop.train_step import DeviceBatch, _count_inputs
from zeromesh.trainer.loop.training_loop import TrainingLoop
from zeromesh.trainer.monitoring.step_stats import StepResult
from zeromesh.trainer.torch_lr_scheduler import TorchSchedule


def result(loss: float, *, skipped: bool = False, cause: str = "", **more: Any) -> StepResult:
    outcome = StepOutcome(grad_norm=1.0, loss_scale=1.0, skipped=skipped, cause=cause)
    return StepResult(**{"loss": loss, "outcome": outcome, "seconds": 0.5, "tokens": 10, **more})


def traffic(calls: int) -> Any:
    return {"shard": {"all-gather": {"calls": calls, "bytes": calls << 20, "seconds": 0.25 * calls}}}


def test_steps_are_counted_from_where_a_run_was_resumed() -> None:
    progress = RunProgress(max_nonfinite=3)
    assert (progress.last_loss, progress.notes()) == (None, [])
    best = Best(value=0.5, step=4, waited=1)
    log = [{"loss": "nan", "step": 4}]
    progress.resume(
        TrainerState(step=5, samples=0, tokens=50, updates=4, skipped=1, passed_over=2, loss=3.0, best=best, log_history=log)
    )
    assert (progress.step, progress.position, progress.reached) == (5, 7, 7)
    assert (progress.tokens, progress.skipped, progress.best, progress.last_loss) == (50, 1, best, 3.0)
    assert math.isnan(progress.log[0]["loss"])
    for number, (skipped, cause) in enumerate(((True, "first"), (True, "second"), (False, ""), (True, ""))):
        bubble = {"measured": 0.1 * (number + 1), "predicted": 0.25}
        progress.add(result(number, skipped=skipped, cause=cause, unit="samples", communication=traffic(2), bubble=bubble))
        assert progress.skipped_in_a_row == (1, 2, 0, 1)[number]
    assert (progress.step, progress.position, progress.reached) == (9, 11, 11)
    assert (progress.tokens, progress.unit, progress.skipped, progress.cause) == (90, "samples", 4, "second")
    assert (progress.losses, progress.seconds, progress.last_loss) == ([0, 1, 2, 3], [0.5] * 4, 3)
    progress.without_targets = 6
    skipped_note, targets_note, table, bubble_note = progress.notes()
    assert skipped_note == "4 steps made no update: their gradients were not finite"
    assert targets_note == "6 global batches passed over, without an update"
    assert table.splitlines()[-1].split() == ["shard", "all-gather", "2.0", "2.00", "500.00"]
    assert bubble_note == "pipeline: ranks were idle for 30% of a step (median; 25% predicted)"


def context(progress: RunProgress, **given: Any) -> RunContext:
    empty: dict[str, Any] = dict.fromkeys(each.name for each in fields(RunContext) if each.init)
    model = given.pop("model", None)
    run = RunContext(**{**empty, "progress": progress, **given})
    run.model = model
    return run


def test_figures_of_a_run_follow_from_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RunProgress(max_nonfinite=0, step=5, passed_over=1, reached=6, tokens=100, losses=[1.0, 3.0])
    events: list[Any] = []
    control = SimpleNamespace(should_evaluate=True)
    run = context(
        progress,
        config=SimpleNamespace(run=SimpleNamespace(max_steps=6), optimizer=SimpleNamespace(lr=0.5)),
        plan=BatchPlan(global_size=8, micro_size=1, data_ranks=1, epoch_size=32),
        model=SimpleNamespace(flop_parameters=7),
        schedule=SimpleNamespace(factor=lambda step: 0.25 * step),
        events=SimpleNamespace(control=control, call=lambda *event: events.append(event)),
    )
    assert (run.finished, run.epoch, run.samples, run.total_flos) == (True, 1.5, 48, 4200.0)
    assert run.learning_rate_of(2) == 0.25
    monkeypatch.setattr(time, "perf_counter", lambda: 104.0)
    progress.began = (100.0, 40)
    assert run.summary_values() == {
        "train_runtime": 4.0,
        "train_samples_per_second": 2.0,
        "train_steps_per_second": 0.5,
        "total_flos": 4200.0,
        "train_loss": 2.0,
        "epoch": 1.5,
    }
    progress.losses.clear()
    assert run.summary_values()["train_loss"] == 0.0
    values = {"eval_loss": 2.0}
    run.log_evaluation(values)
    assert progress.log == [{"eval_loss": 2.0, "epoch": 1.5, "step": 5}]
    assert events == [("on_log", 5, values), ("on_evaluate", 5, values)]
    assert control.should_evaluate is False
    progress.passed_over = 0
    assert run.finished is False


def test_inputs_say_where_they_come_from() -> None:
    assert UserInputs().reads_text
    for name in ("train_dataset", "eval_dataset", "processing_class"):
        given: Any = {name: [1]}
        assert not UserInputs(**given).reads_text
    found = UserInputs(model=torch.nn.Identity(), collate=len, named=frozenset({"collate"})).names()
    assert (found["model"], found["collate"], found["train_dataset"]) == ("given", "named in the configuration", "not given")


def run_of(progress: RunProgress, every: dict[str, Any], saves: Any = 0, sync: int = 1, epoch: int = 400) -> RunContext:
    defaults = {"log_every": 0, "log_first_step": False, "eval_every": 0, "eval_at_end": False, "max_steps": 6}
    config: Any = SimpleNamespace(
        run=SimpleNamespace(**{**defaults, "prompts_every": None, **every}),
        checkpoint=SimpleNamespace(every_steps=saves),
        parallel=SimpleNamespace(sync_every=sync),
    )
    plan = BatchPlan(global_size=8, micro_size=1, data_ranks=1, epoch_size=epoch)
    return context(progress, config=config, plan=plan)


@pytest.mark.parametrize(
    ("every", "saves", "due"),
    [
        # The steps of six after which each is due.
        ({"log_every": 4}, 4, {"log": [4, 6], "evaluate": [], "save": [4, 6]}),
        ({"log_every": 4, "log_first_step": True}, 0, {"log": [1, 4, 6], "evaluate": [], "save": []}),
        ({"log_every": "epoch"}, "epoch", {"log": [], "evaluate": [], "save": []}),
        ({"eval_every": 4}, 3, {"log": [], "evaluate": [4], "save": [3, 6]}),
        ({"eval_every": 4, "eval_at_end": True}, 3, {"log": [], "evaluate": [4, 6], "save": [3, 6]}),
        ({"eval_every": 3, "eval_at_end": True}, 0, {"log": [], "evaluate": [3, 6], "save": []}),
        ({"eval_every": 0, "eval_at_end": True}, 0, {"log": [], "evaluate": [6], "save": []}),
        # What judges at the end of the epoch, comes before the last checkpoint.
        ({"eval_every": "epoch", "eval_at_end": True}, 2, {"log": [], "evaluate": [], "save": [2, 4]}),
    ],
)
def test_what_is_due_after_each_step(every: dict[str, Any], saves: Any, due: dict[str, list[int]]) -> None:
    run = run_of(RunProgress(max_nonfinite=0), every, saves)
    found = {number: run.due_after(number, number - 1) for number in range(1, 7)}
    assert {name: [number for number in found if found[number][name]] for name in due} == due
    assert [number for number in found if found[number]["stop"]] == [6]
    assert run.due_after(5, 5)["stop"] is True, "data that was passed over counts too"


@pytest.mark.parametrize(
    ("every", "saves", "epoch", "syncs"),
    [
        ({}, 0, 400, [4, 6]),
        ({"log_every": 1}, 0, 400, [4, 6]),
        ({"eval_every": 3}, 0, 400, [3, 4, 6]),
        ({"prompts_every": 5}, 0, 400, [4, 5, 6]),
        ({}, 1, 400, [1, 2, 3, 4, 5, 6]),
        ({}, 0, 16, [2, 4, 6]),
    ],
)
def test_replicas_are_alike_where_something_needs_them_to_be(
    every: dict[str, Any], saves: Any, epoch: int, syncs: list[int]
) -> None:
    run = run_of(RunProgress(max_nonfinite=0), every, saves, sync=4, epoch=epoch)
    assert [number for number in range(1, 7) if run.due_after(number, number - 1)["sync"]] == syncs


def test_a_line_of_the_log_has_the_mean_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    control = SimpleNamespace(should_log=True)
    progress = RunProgress(max_nonfinite=0, losses=[9.0, 1.0, 2.0], unlogged=[1.0, 2.0], reached=2)
    written: list[Any] = []
    run = context(
        progress,
        events=SimpleNamespace(control=control, listeners=lambda _: False),
        plan=BatchPlan(global_size=8, micro_size=1, data_ranks=1, epoch_size=16),
        model=SimpleNamespace(engine=None),
    )
    loop = TrainingLoop(run=run, directory=None)  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "_write", written.append)
    monkeypatch.setattr(training_loop, "rank_figures", lambda _mesh: (77, ()))
    loop._line, loop._last_written_step = {"step": 3, "grad_norm": 4.0, "lr": 0.5}, 2
    assert loop._log() is True
    assert written == [{"step": 3, "grad_norm": 4.0, "lr": 0.5, "peak_memory_bytes": 77}]
    line = {"loss": 1.5, "grad_norm": 4.0, "learning_rate": 0.5, "epoch": 1.0, "step": 3}
    assert progress.log == [line]
    assert (loop._log(), control.should_log, progress.unlogged) == (False, False, [])
    control.should_log = True
    assert loop._log() is False, "a step is logged once"
    progress.unlogged.append(7.0)
    loop._line, loop._last_written_step = {"step": 4, "grad_norm": None, "lr": 0.5}, 4
    assert loop._log() is True
    assert progress.log[1:] == [{"loss": 7.0, "learning_rate": 0.5, "epoch": 1.0, "step": 4}]
    assert len(written) == 1


def test_a_second_signal_ends_the_process_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ended, said = [10.0], list[Any](), list[str]()
    fake = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr(signals, "time", fake)
    monkeypatch.setattr(os, "kill", lambda *given: ended.append(given))
    monkeypatch.setattr(signal, "signal", lambda *given: ended.append(given))
    request = StopRequest(said.append)
    for clock[0] in (10.0, 10.5, 11.0):
        request.receive(signal.SIGUSR1, None)
    assert (request.signal, len(said), ended) == (signal.SIGTERM, 1, [])
    clock[0] = 11.5
    request.receive(signal.SIGINT, None)
    assert ended == [(signal.SIGINT, signal.SIG_DFL), (os.getpid(), signal.SIGINT)]
    assert request.signal == signal.SIGTERM


def test_a_scheduler_of_torch_is_a_function_of_the_step() -> None:
    steps = TorchSchedule(lambda optimizer: StepLR(optimizer, 2, gamma=0.5), OptimizerSection(lr=0.1))
    assert [steps.factor(step) for step in (5, 0, 1, 2)] == pytest.approx([0.25, 1.0, 1.0, 0.5])
    assert steps.momentum(3) is None
    cycle = TorchSchedule(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9), OptimizerSection(lr=0.1))
    assert (cycle.momentum(0), cycle.momentum(8)) == pytest.approx((0.95, 0.95))
    assert min(cycle.momentum(step) or 0.0 for step in range(9)) < 0.87
    still = TorchSchedule(lambda optimizer: ConstantLR(optimizer, 1.0, 1), OptimizerSection(lr=0.0))
    assert still.factor(3) == 0.0
    plain = TorchSchedule(lambda optimizer: StepLR(optimizer, 2), OptimizerSection(name="sgd"))
    assert not plain.momentum(0)


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (lambda optimizer: ReduceLROnPlateau(optimizer), "adamw", "lr_scheduler gave a ReduceLROnPlateau"),
        (lambda optimizer: optimizer, "adamw", "lr_scheduler gave a AdamW"),
        (StepLR(torch.optim.SGD([torch.zeros(1)], 1.0), 1), "adamw", "lr_scheduler gave a StepLR; give a function of"),
        (lambda optimizer: LambdaLR(optimizer, [abs, abs]), "adamw", "lr_scheduler, with optimizer.name adamw: "),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9), "sgd", "lr_scheduler changes the momentum to 0.95, "),
    ],
)
def test_what_is_no_schedule_is_refused(make: Any, name: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TorchSchedule(make, OptimizerSection(name=name))
    assert str(refused.value).startswith(said)


def test_a_schedule_of_a_momentum_needs_an_optimizer_that_has_one() -> None:
    def raising(optimizer: Any) -> Any:
        scheduler = StepLR(optimizer, 2)
        optimizer.param_groups[0]["momentum"] = 0.5
        return scheduler

    with pytest.raises(ConfigError, match=r"changes the momentum to 0\.5, and optimizer\.momentum is 0"):
        TorchSchedule(raising, OptimizerSection(name="sgd"))
    assert TorchSchedule(raising, OptimizerSection(name="sgd", momentum=0.25)).momentum(0) == 0.5


def test_inputs_become_the_compute_dtype_and_labels_do_not() -> None:
    given = {"pixels": torch.ones(2), "labels": torch.ones(2), "input_ids": torch.ones(2, dtype=torch.int64), "name": "n"}
    batch = DeviceBatch(given, torch.device("cpu"), torch.float64, None, None)
    with batch.present():
        dtypes = {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert dtypes == {"pixels": torch.float64, "labels": torch.float32, "input_ids": torch.int64}
    assert _count_inputs({"labels": torch.ones(3), "input_ids": torch.ones(2, 5)}) == ("tokens", 10)
    assert _count_inputs({"name": "n", "pixels": torch.ones(3, 2)}) == ("samples", 3)
    assert _count_inputs({"name": "n"}) == ("samples", 0)
