"""Signals that ask a run to stop are one request; outputs of an evaluation are put together without copies on the way; the best
of its values is remembered."""

import math
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from zeromesh.errors import CollectiveError, DataError
from zeromesh.launch.signals import STOP_SIGNALS, StopSignals, handled_signals, stop_requests
from zeromesh.offload.memory import state_memory
from zeromesh.trainer import trainer as trainer_module
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.checkpoints.trainer_state import LENGTH, Best, differences, goal_of, value_of
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import BatchRules
from zeromesh.trainer.data.feed import Feeds, RunData
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.loop.context import RunContext, RunProgress, UserInputs
from zeromesh.trainer.loop.evaluation import evaluation_line
from zeromesh.trainer.loop.prediction import Collector
from zeromesh.trainer.loop.snapshots import Slots
from zeromesh.trainer.setup.model import _check_first
from zeromesh.trainer.trainer import Trainer


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_signal_is_a_request_to_stop(number: signal.Signals) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with stop_requests(said.append) as request:
        signal.raise_signal(number)
        signal.raise_signal(number)  # At once, as where a terminal and a launcher both send it.
    assert request.signal == (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    assert said == [f"{number.name}: stopping after this step; a second one stops at once"]
    assert signal.getsignal(number) is before


def test_a_snapshot_with_a_large_record_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no room, so that the one before it is gone on from, and the next one counts."""
    monkeypatch.setattr(state_memory, "_RECORD_BYTES", 1 << 12)
    descriptor = os.memfd_create("snapshots")
    slots = Slots(state_memory.StateMemory(descriptor), 7)
    slots.open(1, warm=False)
    for number, known in ((1, [1]), (2, [1]), (3, [3]), (4, [4, 3])):
        facts = {"step": number, "start": 0, "number": number, "rank": 0, "world": 1, "nbytes": 1}
        slots.commit(number, [{**facts, "state": "x" * (5000 if number == 2 else 1)}])
        found = Slots(state_memory.StateMemory(os.dup(descriptor)), 7).images()
        assert [each.facts["step"] for each in found] == known
    os.close(descriptor)


def test_what_a_plan_chose_is_chosen_again_for_the_ranks_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script has joined the mesh before `fit`."""
    shards = iter((2, 1))

    def chosen(config: TrainerConfig, *_: Any) -> Any:
        assert config.parallel.auto
        assert config.parallel.shard == "auto"
        return config.changed(parallel={"auto": (), "shard": next(shards)}), SimpleNamespace(check=lambda: None)

    def fit(self: Trainer, recovery: Any) -> Any:
        assert self.mesh is not None
        if self.config.parallel.shard == 2:
            raise CollectiveError("a host is lost")
        return self.config

    watch = SimpleNamespace(operations_begun=0, cause_of=lambda error: error)
    recovery = SimpleNamespace(leaves=lambda *_: True, rest=lambda: None, end=lambda: None)
    for name, each in (("set_auto", chosen), ("connect", lambda config: SimpleNamespace(watch=watch))):
        monkeypatch.setattr(trainer_module, name, each)
    monkeypatch.setattr(trainer_module.Recovery, "begin", lambda *_, **__: recovery)
    monkeypatch.setattr(Trainer, "_fit", fit)
    trainer = Trainer(torch.nn.Linear(1, 1), {"parallel": "auto", "run": {"output_dir": str(tmp_path)}})
    assert trainer.mesh is not None
    assert cast(Any, trainer.fit(resume=False)).parallel.shard == 1
    assert trainer.config.checkpoint.resume == "never"


def test_what_nohup_has_started_ignores_the_end_of_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        seen: list[int] = []
        with stop_requests(lambda line: None) as request, handled_signals(STOP_SIGNALS, lambda *_: seen.append(1)):
            signal.raise_signal(signal.SIGHUP)
        assert not seen
        assert not request.signal
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_server_hears_of_a_second_signal() -> None:
    """Its open requests get an answer then; the third one kills."""
    done: list[str] = []
    requests = StopSignals(passes=2)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM):
        requests.receive(number, None)
    requests.pass_on(lambda number: done.append("sent"), lambda: done.append("killed"))
    assert done == ["sent", "sent", "killed"]


def test_a_signal_that_does_not_ask_to_stop_is_always_passed_on() -> None:
    """It is not counted among those after which the next one kills."""
    done: list[str] = []
    requests = StopSignals((signal.SIGINT,))
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        requests.receive(number, None)
    requests.pass_on(lambda number: done.append(signal.Signals(number).name), lambda: done.append("killed"))
    assert done == ["SIGINT", "SIGINT", "SIGTERM", "SIGINT", "killed"]
    assert requests.first == signal.SIGTERM


@pytest.mark.parametrize("again", [False, True])
def test_a_stop_waits_while_ranks_recover_unless_it_comes_again(again: bool) -> None:
    done, recover = list[str](), [True]
    requests = StopSignals(holds=lambda: recover[0])

    def passed_on() -> list[str]:
        requests.pass_on(lambda number: done.append("sent"), lambda: done.append("killed"))
        return done

    requests.receive(signal.SIGTERM, None)
    assert (requests.first, passed_on()) == (0, [])
    if again:
        requests.receive(signal.SIGTERM, None)
        assert requests.first == signal.SIGTERM
    recover[0] = again
    assert passed_on() == ["sent", *["killed"] * again]
    assert requests.first == signal.SIGTERM
    recover[0] = True
    assert requests.first == signal.SIGTERM, "who was told to save is not held back by a rank that is lost meanwhile"


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone_ends_by_its_timeout(rank: int) -> None:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29391 + rank}
    variables = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    code = "from zeromesh.trainer import Trainer; Trainer(config={'parallel': {'timeout_seconds': 1}}).fit()"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    assert "within 5 seconds" in found.stderr


def test_the_end_of_a_step_that_was_cut_short_counts_once() -> None:
    """Also in another `fit` after an error, without a launcher."""
    progress, events = RunProgress(max_nonfinite=0, step=2, unlogged=[0.5]), CallbackDispatcher(cast(Any, None), [])
    run: Any = SimpleNamespace(progress=progress, events=events, states_of_callbacks=dict)
    for _ in range(2):
        RunContext.begin_end(run)
        assert (progress.best.waited, progress.unlogged, progress.owes, progress.log, progress.ended) == (0, [0.5], set(), [], "")
        assert not events.control.should_evaluate
        progress.best, progress.ended = replace(progress.best, waited=1), "1 evaluations without a better loss"
        progress.unlogged.clear()
        progress.owes.add("evaluate")
        progress.log.append({"step": 2})
        events.request(evaluate=True)
    progress.step = 3
    RunContext.begin_end(run)
    assert progress.best.waited == 1, "of another step"


ALONE: Any = SimpleNamespace(
    world=SimpleNamespace(gather_bytes=lambda payload, what: [payload], ranks=[0]), shape=SimpleNamespace(data_index=lambda rank: 0)
)


def collected(*outputs: Any, of: Callable[..., Any] = lambda found: found) -> Collector:
    collector = Collector(ALONE, (), None)
    for each in outputs:
        collector.add([collector.part_of(of(each), {"labels": torch.arange(2)})])
    return collector


def test_pieces_of_several_lengths_are_padded() -> None:
    pieces = torch.ones(2, 3, 4), torch.zeros(1, 5, 4)
    found = collected(*pieces, of=lambda each: {"logits": each, "state": (each[:, 0], None)})
    logits, state = found.result().predictions
    assert (logits.shape, state[0].shape, state[1]) == ((3, 5, 4), (3, 4), None)
    assert logits[:2, :3].min() == 1
    assert (logits[:2, 3:] == -100).all()
    assert (logits[2] == 0).all()


def test_pieces_that_do_not_go_together_are_refused() -> None:
    for outputs in ((torch.ones(2, 3, 4), torch.ones(2, 3, 1)), (torch.ones(2), (torch.ones(2), torch.ones(2)))):
        with pytest.raises(DataError, match="cannot be put together"):
            collected(*outputs).result()


def test_pieces_are_put_right_into_the_whole() -> None:
    found = collected(*(torch.full((2, 64, 1000), float(number)) for number in range(16)))
    assert found.nbytes >= 16 * 2 * 64 * 1000 * 4
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    whole = found.result().predictions
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert [float(each) for each in whole[::2, 0, 0]] == list(range(16))
    assert peak <= 1.2 * whole.nbytes
    assert isinstance(whole, np.ndarray)


def test_the_best_of_evaluations_and_those_since() -> None:
    for metric, least, values, best in (
        ("eval_Loss", 0.0, (3.0, 2.0, 2.0, math.nan), Best(value=2.0, step=1, waited=2)),
        ("word_error_rate", 0.5, (3.0, 2.5, 2.25), Best(value=2.25, step=2, waited=1)),
        ("perplexity", 0.0, (math.nan, 1.0, 2.0), Best(value=1.0, step=1, waited=1)),
        ("bleu", 0.5, (3.0, 2.0, 3.5), Best(value=3.5, step=2)),
    ):
        found = Best()
        for step, value in enumerate(values):
            found = found.after(value_of(metric, {f"eval_{metric}": value}), step, goal_of(metric, "auto"), least)
        assert found == best, metric
    assert goal_of("loss", "highest") == "highest"


def test_the_length_and_the_warm_up_that_follows_from_it_may_differ_from_a_checkpoint() -> None:
    warmup, long = "schedule.warmup_steps", "x" * 81
    then = {LENGTH: 100, warmup: 10, "a": float("nan"), "b": 1, "b2": 1, "c": 1, "d": long[1:]}
    now = {LENGTH: 200, warmup: 20, "a": math.nan, "b": 2, "b2": 1, "c": 3, "e": long}
    told = ["c: 1 then, 3 now", f"d: {long[1:]} then, (absent) now", f"e: (absent) then, {long[:77]}... now"]
    assert differences(then, now, {"b": 2, "b2": 2, "c": 2}) == told
    assert differences({LENGTH: 100, warmup: 11}, now)[0] == "schedule.warmup_steps: 11 then, 20 now"


def test_the_line_of_an_evaluation() -> None:
    run: Any = SimpleNamespace(progress=SimpleNamespace(step=3, evaluated_targets=1500))
    run.model, run.data = SimpleNamespace(evaluates_average=True), SimpleNamespace(byte_pair_entropy=2.0)
    values: Any = {"eval_loss": 2.0, "eval_runtime": 1.0, "eval_samples_per_second": 2.0, "eval_f1": 0.5, "eval_who": "me"}
    said = "step 3: evaluation loss 2.0000 with averaged weights over 1.5k targets, above the byte-pair entropy 2.0000"
    assert evaluation_line(run, values) == f"{said}\n  eval_f1  0.5"


@pytest.mark.parametrize(
    ("samples", "last", "said"),
    [
        (1, "carry", ["train_dataset has 1 sample, fewer than a global batch of 8: samples come again in each"]),
        (3, "carry", ["train_dataset has 3 samples, fewer than a global batch of 8: samples come again in each"]),
        (3, "partial", []),
        (8, "carry", []),
        (None, "carry", []),
    ],
)
def test_samples_that_come_again_in_a_batch_are_noted(samples: int | None, last: Any, said: list[str]) -> None:
    config = load_config({"batch": {"global_size": 8, "last": last}})
    plan = BatchPlan(global_size=8, micro_size=1, data_ranks=1, epoch_size=samples, last=last)
    feeds = Feeds(config=config, data=RunData(train=None), plan=plan, rules=BatchRules())
    unused: Any = None
    assert _check_first(feeds, config, unused, unused, UserInputs()) == said
