"""The figures of a step as its line has them, means of users' values, and profiles, without a run."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromesh.errors import ConfigError
from zeromesh.offload import Purpose, Tier
from zeromesh.optim.optimizer_step import StepOutcome
from zeromesh.telemetry.step_recorder import StepRecorder
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.monitoring import step_stats
from zeromesh.trainer.monitoring.profiler import Profile
from zeromesh.trainer.monitoring.step_metrics import leaves, unstrict
from zeromesh.trainer.monitoring.step_stats import Patience, StepResult, StepStats, UserScalars, rank_figures, require_free_names

RESULT: dict[str, Any] = {"loss": 2.0, "tokens": 80, "seconds": 4.0}
OUTCOME: dict[str, Any] = {"grad_norm": 0.5, "skipped": False, "loss_scale": 1.0}
COMMON = {"step": 3, "loss": 2.0, "grad_norm": 0.5, "lr": 0.1, "tokens": 240}
COMMON |= {"tokens_per_second": 20.0, "step_seconds": 4.0, "peak_memory_bytes": 7, "memory": {"host": {"master": 9}}}
FULL = {"waited": {Tier.FILE: 0.12346}, "bubble": {"measured": 0.33339}, "phases": {"data": 0.1234567}}


def mesh_of(*others: Any) -> Any:
    """A mesh whose other ranks give these rows of whatever is gathered."""
    gathered = SimpleNamespace(
        gather_integers=lambda row: [row, *others],
        gather_json=lambda row, what: [row, *others],
        all_reduce_max=lambda tensor, what: torch.maximum(tensor, torch.tensor([max(map(len, others), default=0)])),
    )
    return SimpleNamespace(world=gathered, device=torch.device("cpu"))


def line_of(flops: bool = False, **changes: Any) -> dict[str, Any]:
    """The line of a step, beside a model of 10 FLOPs a token and 3 a squared token of each sequence."""
    of_step = SimpleNamespace(of_step=lambda tokens, length: 10.0 * tokens + 3.0 * length)
    ledger: Any = SimpleNamespace(take_highest=lambda: {Tier.HOST: {Purpose.MASTER: 9}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_stats, "peak_flops", lambda device, dtype: (400.0, "as measured"))
        stats = StepStats(of_step if flops else None, mesh_of([600]), torch.float32, 16, ledger)  # type: ignore[arg-type]
    assert len(stats.notes) == flops
    assert all("10 a token" in note and "1.0k a second, as measured" in note for note in stats.notes)
    of_update = {each.name: changes.pop(each.name) for each in fields(StepOutcome) if each.name in changes}
    result = StepResult(**RESULT | changes, outcome=StepOutcome(**OUTCOME | of_update))
    return stats.line(result, step=3, lr=0.1, tokens=240, peak=7)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {}),
        ({"unit": "samples"}, {"unit": "samples"}),
        ({"skipped": True, "cause": "rank 1"}, {"skipped": True, "cause": "rank 1"}),
        ({"cause": "none"}, {}),
        ({"loss_scale": 512.0}, {"loss_scale": 512.0}),
        (FULL, {"file_wait_seconds": 0.1235, "bubble": {"measured": 0.3334}, "phases": {"data": 0.123457}}),
        ({"communication": {"shard": {"all-gather": {"calls": 1}}}},) * 2,
        # 80 tokens in 16 sequences of 5 tokens: 815 FLOPs in 4 seconds, of 1000 a second on both ranks.
        ({"flops": True}, {"mfu": 0.20375}),
        ({"flops": True, "tokens": 0}, {"tokens_per_second": 0.0}),
    ],
)
def test_the_line_of_a_step(changes: dict[str, Any], more: dict[str, Any]) -> None:
    assert line_of(**changes) == COMMON | more


def test_users_values_are_means_over_ranks_and_steps() -> None:
    scalars = UserScalars()
    scalars.add({"a": 1, "b": torch.tensor([4.0]), "loss": 9.0, "text": "x", "two": torch.ones(2), "lr": 1})
    scalars.add({"a": 2.0, "c": True})
    others = mesh_of({"a": [9.0, 1], "z": [5.0, 2]})
    assert list(scalars.take(others).items()) == [("a", 4.0), ("b", 4.0), ("c", 1.0), ("z", 2.5)]
    assert scalars.take(mesh_of()) == {}
    assert scalars.take(mesh_of({"z": [1.0, 1]})) == {"z": 1.0}


def test_names_of_fields_are_not_free() -> None:
    require_free_names({"mine": 1}, "a callback")
    with pytest.raises(ConfigError, match="a callback: loss, unit is a field of every step's line; choose"):
        require_free_names({"unit": 1, "mine": 1, "loss": 2}, "a callback")


def test_figures_of_ranks_are_the_most_memory_and_everyones_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stats, "peak_bytes", lambda: 50)
    assert rank_figures(mesh_of([70, 250_000], [60, 0]), 0.5) == (70, (0.5, 0.25, 0.0))


@pytest.mark.parametrize(("every", "at", "seconds"), [(1, 21, 40.0), (30, 30, 160.0)])
def test_a_rank_is_late_by_the_longest_wait_of_steps_with_a_sync(every: int, at: int, seconds: float) -> None:
    """Of 20 steps and a sync, without the first step; in the others replicas do not meet."""
    mesh = mesh_of(2.0)
    mesh.watch = SimpleNamespace(step_seconds=math.inf)
    patience, told = Patience(mesh), dict[int, str]()
    for step in range(1, 41):
        idle = 99.0 if step == 1 else 8.0 if step == 30 else 0.1
        result = StepResult(**RESULT, outcome=StepOutcome(**OUTCOME), idle=idle)
        if line := patience.after(result, syncs=step % every == 0):
            told[step] = line
    assert mesh.watch.step_seconds == seconds
    assert [*told] == [at]


def test_leaves_of_nested_values_have_paths() -> None:
    assert list(leaves({"a": {"b": 1, "c": {}}, "d": [2]})) == [(("a", "b"), 1), (("a", "c"), {}), (("d",), [2])]
    back = unstrict({"a": {"b": "inf"}, "c": "-inf", "d": "words", "e": 1})
    assert back == {"a": {"b": float("inf")}, "c": float("-inf"), "d": "words", "e": 1}


def profile_in(folder: Path, rank: int = 0, **section: Any) -> Profile:
    """The profile of a process that begins at step 5, whose ledger changes once before a step and once in it."""

    @contextmanager
    def recording(most: int) -> Iterator[list[Any]]:
        change = {"tier": Tier.DEVICE, "purpose": Purpose.MOMENTS}
        yield [SimpleNamespace(at=-1.0, nbytes=5, **change), SimpleNamespace(at=1e9, nbytes=8, **change)]

    mesh = SimpleNamespace(rank=rank, world_size=1)
    engine: Any = SimpleNamespace(mesh=mesh, ledger=SimpleNamespace(recording=recording))
    return Profile(load_config({"profile": section}).profile, folder, engine, 5, print)


def test_the_memory_of_the_second_step_is_written_by_one_rank(tmp_path: Path) -> None:
    profiles = [profile_in(tmp_path), profile_in(tmp_path, rank=1), profile_in(tmp_path, step_figures=False)]
    assert [each.measured for each in profiles] == [6, 0, 0]
    assert not profiles[0].steps
    assert list(profile_in(tmp_path, steps=[2, 4]).steps) == [2, 3, 4]
    for number in (5, 6, 7):
        with profiles[0].step(number):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["step_memory.json"]
    content = json.loads((tmp_path / "step_memory.json").read_text())
    assert (content["step"], content["seconds"] >= 0) == (6, True)
    (first, second) = content["events"]
    assert first == [0.0, "device", "moments", 5]
    assert second[0] > 0
    assert second[1:] == ["device", "moments", 8]


@pytest.mark.parametrize(("world_size", "ended"), [(1, True), (2, False)])
def test_a_profile_of_a_run_that_fails_is_not_written(tmp_path: Path, world_size: int, ended: bool) -> None:
    """Where peers may be in a collective still, recording goes on."""
    recorder = StepRecorder()
    mesh = SimpleNamespace(rank=0, world_size=world_size, device=torch.device("cpu"), recorder=recorder)
    section = load_config({"profile": {"steps": [1, 2], "step_figures": False}}).profile
    engine: Any = SimpleNamespace(mesh=mesh)
    profile = Profile(section, tmp_path, engine, 1, print)
    with pytest.raises(KeyError), profile, profile.step(1):
        raise KeyError("a bug")
    assert torch.autograd._profiler_enabled() is not ended
    assert list(tmp_path.iterdir()) == []
    profile._open.close()
