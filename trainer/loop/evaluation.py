"""Evaluations and predictions of a run: the loss, a user's metrics, the samples' outputs, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import EvalPrediction
from transformers.trainer_utils import PredictionOutput

from zeromesh.errors import ConfigError, DataError, PhaseError
from zeromesh.trainer.data.collate import MapDataset, check_dataset
from zeromesh.trainer.data.feed import Feed, require_same_data
from zeromesh.trainer.formatting import human_count
from zeromesh.trainer.loop.prediction import Collector

if TYPE_CHECKING:
    from zeromesh.trainer.loop.train_step import EvaluationResult
    from zeromesh.trainer.run import Run

Values = dict[str, float]
"""Such as `eval_loss`; names begin with a prefix."""


class Evaluator:
    """Evaluates the model of a run; all ranks call the same."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._targets: int | None = None
        """Of the latest evaluation; None where it was of several sets."""
        self.feed: Feed | None = None
        """Of the latest evaluation or prediction."""
        self.ignored_in_training: Sequence[str] | None = None
        """Outputs that evaluations of the loop do not gather; as `ignored` of `evaluate`."""

    def evaluate(
        self,
        dataset: MapDataset | Mapping[str, MapDataset] | None,
        prefix: str = "eval",
        ignored: Sequence[str] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Values | None:
        """Values of the evaluation set, or of several by name (`eval_NAME_loss`); None once `stop`, on all ranks or on none.

        `ignored` are names of outputs that are not gathered; None: those that the model's configuration names.

        Raises:
            ConfigError: when there is no such set.
            DataError: when it cannot be used.
        """
        chosen = dataset if dataset is not None else self._run.data.eval
        if chosen is None:
            raise ConfigError("there is no evaluation data; give eval_dataset, or set data.eval or data.eval_fraction")
        named = (
            {f"{prefix}_{name}": each for name, each in chosen.items()}
            if isinstance(chosen, Mapping)
            else {prefix: chosen}
        )
        values: Values = {}
        for name, each in named.items():
            found = self._values(each, name, ignored, stop)
            if found is None:
                return None
            values |= found
        if isinstance(chosen, Mapping):
            self._targets = None
        losses = [value for name, value in values.items() if name.endswith("_loss")]
        return {f"{prefix}_loss": sum(losses) / len(losses), **values}

    def _values(
        self, dataset: MapDataset, prefix: str, ignored: Sequence[str] | None, stop: Callable[[], bool]
    ) -> Values | None:
        given, began = self._run.given, time.perf_counter()
        feed = self._feed(dataset)
        result = self._run_through(feed, ignored, stop, outputs=given.compute_metrics is not None)
        if result is None:
            return None
        self._targets = result.targets
        values = {f"{prefix}_loss": result.loss} | self._metrics(result, prefix)
        return values | self._speed(prefix, feed, time.perf_counter() - began)

    def predict(self, dataset: MapDataset, prefix: str, ignored: Sequence[str] | None) -> PredictionOutput:
        """What the model returns for a dataset, as transformers has it; `metrics` has a loss where there are labels.

        Raises:
            DataError: when it cannot be used.
        """
        began, feed = time.perf_counter(), self._feed(dataset)
        result = self._run_through(feed, ignored, lambda: False, outputs=True)
        if result is None or result.prediction is None:
            raise PhaseError("a prediction has ended early that nothing was to end")
        values = {f"{prefix}_loss": result.loss} if result.targets else {}
        labels = result.prediction.label_ids
        if labels is not None:
            values |= self._metrics(result, prefix)
        values |= self._speed(prefix, feed, time.perf_counter() - began)
        return PredictionOutput(predictions=result.prediction.predictions, label_ids=labels, metrics=values)

    def _feed(self, dataset: MapDataset) -> Feed:
        check_dataset(dataset, name="eval_dataset")
        require_same_data(self._run.mesh, {"eval_dataset": dataset}, {})
        self.feed = self._run.trained.feeds.evaluation(dataset)
        return self.feed

    def _run_through(
        self, feed: Feed, ignored: Sequence[str] | None, stop: Callable[[], bool], *, outputs: bool
    ) -> EvaluationResult | None:
        run, collector = self._run, None
        if outputs:
            if ignored is None:
                config = getattr(run.trained.model, "config", None)
                ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
            collector = Collector(run.mesh, ignored, run.given.preprocess_logits_for_metrics)

        def go_on(done: int, total: int) -> bool:
            run.console.status(f"evaluating: {done} of {total} batches")
            run.call("on_prediction_step", done, total)
            return not stop()

        with run.trained.averaged() if run.config.ema.evaluate else nullcontext():
            return run.trained.stepper.evaluate(feed, go_on, collector)

    def _metrics(self, result: EvaluationResult, prefix: str) -> Values:
        """What `compute_metrics` makes of all samples; every rank computes it."""
        compute, prediction = self._run.given.compute_metrics, result.prediction
        if compute is None or prediction is None:
            return {}
        found = compute(EvalPrediction(predictions=prediction.predictions, label_ids=prediction.label_ids))
        if not isinstance(found, Mapping):
            raise DataError(
                f"compute_metrics returned a {type(found).__name__}; it should return a mapping of names to numbers"
            )
        return {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": _plain(value)
            for name, value in found.items()
        }

    @staticmethod
    def _speed(prefix: str, feed: Feed, seconds: float) -> Values:
        """How long it took, in samples and in rounds of microbatches."""
        return {
            f"{prefix}_runtime": round(seconds, 4),
            f"{prefix}_samples_per_second": round(feed.plan.global_size / seconds, 3),
            f"{prefix}_steps_per_second": round(feed.plan.accumulation / seconds, 3),
        }

    def note(self, values: Mapping[str, float]) -> str:
        """A line about an evaluation."""
        run = self._run
        loss = values["eval_loss"]
        text = f"step {run.step}: evaluation loss {loss:.4f}"
        text += " with averaged weights" if run.config.ema.evaluate else ""
        if self._targets is not None:
            text += f" over {human_count(self._targets)} targets"
        measured = ("_loss", "_runtime", "_per_second")
        others = [
            f"{name} {value:.4g}" for name, value in values.items() if not name.endswith(measured) and _is_number(value)
        ]
        text += "".join(f", {each}" for each in others)
        loaded = run.data.loaded
        if loaded is not None and loaded.byte_pair_entropy is not None:
            word = "below" if loss < loaded.byte_pair_entropy else "above"
            text += f", {word} the byte-pair entropy {loaded.byte_pair_entropy:.4f}"
        return text


def _plain(value: Any) -> Any:
    """A number of NumPy's or PyTorch's as Python's."""
    if hasattr(value, "item") and np.size(value) == 1:
        return value.item()
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
