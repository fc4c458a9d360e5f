"""Evaluations of one set and of several, their metric, what they generate, and the outputs that are gathered."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.loop import evaluation
from zeromesh.trainer.loop.evaluation import evaluate, generation_of, require_metric, run_dataset
from zeromesh.trainer.loop.prediction import Collector

ONE, TWO = [1], [1, 2]


def test_sets_by_name_have_their_own_values_and_the_mean_of_their_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_run: Any, dataset: Any, prefix: str, *_: Any) -> Any:
        number = len(dataset)
        return None if number > 2 else (10 * number, {f"{prefix}_loss": number, f"{prefix}_own_loss": 100}, None)

    monkeypatch.setattr(evaluation, "run_dataset", found)
    run: Any = SimpleNamespace(data=SimpleNamespace(eval=TWO), progress=SimpleNamespace(evaluated_targets=None))
    assert evaluate(run, None) == {"eval_loss": 2, "eval_own_loss": 100}
    assert run.progress.evaluated_targets == 20
    assert evaluate(run, ONE, "test") == {"test_loss": 1, "test_own_loss": 100}
    assert run.progress.evaluated_targets == 10
    values = {"eval_loss": 1.5, "eval_a_loss": 1, "eval_a_own_loss": 100, "eval_b_loss": 2, "eval_b_own_loss": 100}
    assert evaluate(run, {"a": ONE, "b": TWO}) == values
    assert run.progress.evaluated_targets is None
    assert evaluate(run, {"a": ONE, "b": [1, 2, 3]}) is None
    run.data.eval = None
    with pytest.raises(ConfigError, match="there is no evaluation data"):
        evaluate(run, None)


SETS = {"a": ONE, "b": TWO}
OF_SETS = "of none of the evaluation sets a, b; give eval_a_loss or eval_b_loss, or a value of compute_metrics"


@pytest.mark.parametrize(
    ("metric", "sets", "metrics", "judge", "said"),
    [
        ("f1", None, False, "patience", ""),
        *(("eval_loss", ONE, False, judge, "") for judge in ("", "patience")),
        ("f1", ONE, True, "", ""),
        ("eval_f1", ONE, False, "", "f1 is no value of the evaluation; give eval_loss, or a value of compute_metrics"),
        ("loss", SETS, False, "", ""),
        *(("loss", SETS, True, judge, f"loss is {OF_SETS}") for judge in ("patience", "load_best", "keep_best")),
        ("eval_a_loss", SETS, False, "patience", ""),
        ("b_f1", SETS, True, "patience", ""),
        ("b_f1", SETS, False, "patience", f"b_f1 is {OF_SETS}"),
        ("c_f1", SETS, True, "patience", f"c_f1 is {OF_SETS}"),
    ],
)
def test_a_metric_is_a_value_of_the_evaluations(metric: str, sets: Any, metrics: bool, judge: str, said: str) -> None:
    judges = {name: judge == name for name in ("patience", "load_best", "keep_best")}
    run: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(metric=metric, **judges), checkpoint=SimpleNamespace(**judges)),
        data=SimpleNamespace(eval=sets),
        inputs=SimpleNamespace(compute_metrics=len if metrics else None),
    )
    if not said:
        require_metric(run)
        return
    with pytest.raises(ConfigError) as refused:
        require_metric(run)
    assert str(refused.value) == f"run.metric: {said}"


def test_fields_of_a_generation_are_on_top_of_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(_model: Any, fields: Any, *, seed: str) -> Any:
        return SimpleNamespace(fields=fields, seed=seed, settings=SimpleNamespace(to_json_string=lambda: "shown"))

    monkeypatch.setattr(evaluation, "BatchGeneration", made)
    section = SimpleNamespace(predict_with_generate=False, generation={"top_k": 5, "num_beams": 2}, seed=7)
    compared: list[Any] = []
    run: Any = SimpleNamespace(
        config=SimpleNamespace(run=section),
        inputs=SimpleNamespace(compute_metrics=None),
        progress=SimpleNamespace(step=3),
        model=None,
        mesh=SimpleNamespace(world=SimpleNamespace(require_same=lambda values, *_, **__: compared.append(values))),
    )
    assert generation_of(run, None, {}, metrics=True) is None
    with pytest.raises(ConfigError, match=r"^top_k: an evaluation generates with predict_with_generate=True"):
        generation_of(run, None, {"top_k": 1}, metrics=False)
    found: Any = generation_of(run, True, {"top_k": 1}, metrics=False)
    assert (found.fields, found.seed) == ({"top_k": 1, "num_beams": 2}, "7/3")
    assert compared == [{"predict_with_generate": "shown"}]
    section.predict_with_generate, section.generation = True, None
    assert generation_of(run, False, {}, metrics=True) is None
    with pytest.raises(ConfigError, match="what is generated is for compute_metrics"):
        generation_of(run, None, {}, metrics=True)
    run.inputs.compute_metrics = len
    found = generation_of(run, None, {}, metrics=True)
    assert found.fields == {}


class Evaluated:
    """A run whose model has a loss of 2 over `targets`, and outputs of `nbytes` in each of its four microbatches."""

    def __init__(self, targets: int, nbytes: int = 0, metrics: Any = None, stop_at: int = 5, *, ema: bool = False) -> None:
        self.targets, self.nbytes, self.stop_at = targets, nbytes, stop_at
        self.notes: list[str] = []
        self.events_seen: list[Any] = []
        self.averages = 0
        self.feed = SimpleNamespace(plan=BatchPlan(global_size=8, micro_size=2, data_ranks=1))
        stepper = SimpleNamespace(evaluate=self._evaluate)
        feeds = SimpleNamespace(evaluation=lambda dataset: self.feed)
        self.model = SimpleNamespace(module=None, feeds=feeds, stepper=stepper, averaged=self._averaged, evaluates_average=ema)
        self.console = SimpleNamespace(show_evaluation=lambda *_: None, note=self.notes.append)
        self.events = SimpleNamespace(call=lambda *event: self.events_seen.append(event))
        self.inputs = SimpleNamespace(compute_metrics=metrics, preprocess_logits_for_metrics=None)
        self.mesh: Any = SimpleNamespace(world=SimpleNamespace(gather_json=lambda values, _: [values]))
        self.collector = None

    def _averaged(self) -> Any:
        self.averages += 1
        return nullcontext()

    def loader(self, feed: Any, *, last: int) -> Any:
        assert (feed, last) == (self.feed, 1)
        return nullcontext()

    def _evaluate(self, _loader: Any, should_continue: Any, collector: Any) -> Any:
        self.collector = collector
        for done in range(1, 5):
            if collector is not None:
                collector.nbytes += self.nbytes
            if not should_continue(done, 4):
                return None
        return 2.0, self.targets


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The labels that outputs come with; datasets are not looked at."""
    labels: list[Any] = [None]
    monkeypatch.setattr(evaluation, "check_dataset", lambda *_, **__: None)
    monkeypatch.setattr(evaluation, "require_same_data", lambda *_: None)
    monkeypatch.setattr(Collector, "result", lambda _: SimpleNamespace(predictions=1, label_ids=labels[0]))
    return labels


def test_values_of_a_set(gathered: list[Any]) -> None:
    def values_of(run: Any, *, predicts: bool = False, **options: Any) -> Any:
        found = run_dataset(run, ONE, "x", None, lambda: len(run.events_seen) >= run.stop_at, predicts=predicts, **options)
        if found is None:
            return None
        speed = {name: found[1].pop(f"x_{name}") for name in ("runtime", "samples_per_second", "steps_per_second")}
        assert speed["samples_per_second"] == pytest.approx(2 * speed["steps_per_second"], rel=1e-3)
        return found

    plain = Evaluated(5)
    assert values_of(plain) == (5, {"x_loss": 2.0}, None)
    assert (plain.collector, plain.averages, len(plain.events_seen)) == (None, 0, 4)
    assert values_of(Evaluated(5, stop_at=4)) is None
    assert values_of(averaged := Evaluated(5, ema=True)) is not None
    assert averaged.averages == 1
    metrics = lambda outputs: {"a": np.float32(0.5), "x_b": torch.tensor([2]), "c": "text"}  # noqa: E731
    named = {"x_loss": 2.0, "x_a": 0.5, "x_b": 2, "x_c": "text"}
    assert values_of(measured := Evaluated(5, metrics=metrics))[1] == named
    assert list(measured.collector.ignored) == ["past_key_values"]  # type: ignore[attr-defined]
    assert values_of(Evaluated(0, metrics=metrics), predicts=True)[1] == {}, "without labels there is nothing to measure"
    assert values_of(Evaluated(0), predicts=True)[2] is not None
    gathered[0] = 1
    assert values_of(Evaluated(5, metrics=metrics), predicts=True)[1] == named
    with pytest.raises(DataError, match="compute_metrics returned a list"):
        values_of(Evaluated(5, metrics=lambda outputs: [1]))


@pytest.mark.parametrize(("nbytes", "count"), [((16 << 20) - 1, 0), (16 << 20, 1)])
def test_large_outputs_are_noted_once(gathered: list[Any], nbytes: int, count: int) -> None:
    run: Any = Evaluated(5, nbytes, metrics=lambda outputs: {})
    run_dataset(run, ONE, "x", None)
    assert len(run.notes) == count
    assert all("each rank collects 64" in note for note in run.notes)
    run = Evaluated(5, nbytes, metrics=lambda outputs: {})
    run.inputs.preprocess_logits_for_metrics = max
    run_dataset(run, ONE, "x", None)
    assert run.notes == []


def test_outputs_are_gathered_without_the_loss_in_the_order_of_the_data() -> None:
    """Of two ranks, the first has the later samples."""
    other: list[bytes] = [b""]
    world = SimpleNamespace(gather_bytes=lambda payload, what: [payload, other[0]], ranks=[0, 1])
    mesh: Any = SimpleNamespace(world=world, shape=SimpleNamespace(data_index=lambda rank: 1 - rank))
    collector = Collector(mesh, ("states",), None)
    logits, labels = (torch.ones(2, dtype=torch.bfloat16), {"start_positions": torch.zeros(2), "end_positions": torch.ones(2)})
    kept = {"loss": logits, "states": logits, "none": None, "logits": logits, "second": logits}
    part = collector.part_of(kept, labels)
    assert [each.dtype for each in part["predictions"]] == [np.float32] * 2
    assert [each.tolist() for each in part["label_ids"]] == [[0, 0], [1, 1]]
    for outputs in (logits, (torch.tensor(3.0), logits), {"logits": logits}):
        assert collector.part_of(outputs, {})["predictions"].tolist() == [1, 1]
    assert collector.part_of(logits, {})["label_ids"] is None
    doubled = Collector(mesh, (), lambda found, given: (found * 2, given))
    assert doubled.size_noted
    assert doubled.part_of(logits, {"labels": logits})["predictions"][0].tolist() == [2, 2]
    generating: Any = SimpleNamespace(padding=7)
    tokens = Collector(mesh, (), None, generating)
    assert tokens.part_of({"loss": logits}, {})["predictions"]["loss"].tolist() == [1, 1], "tokens are taken as they are"

    def piece(length: int) -> Any:
        return tokens.part_of(torch.full((1, length), length), {"labels": torch.full((1, length), length)})

    sent: list[bytes] = []

    def alone(payload: bytes, what: str) -> list[bytes]:
        sent.append(payload)
        return [payload]

    world.gather_bytes = alone
    world.ranks = [0]
    Collector(mesh, (), None).add([piece(1)])
    world.gather_bytes, world.ranks = (lambda payload, what: [payload, sent[0]]), [0, 1]
    tokens.add([piece(2), None])
    found = tokens.result()
    assert found.predictions.tolist() == [[1, 7], [2, 2], [1, 7]]
    assert found.label_ids.tolist() == [[1, -100], [2, 2], [1, -100]]
