"""Evaluation and prediction during a run: the loss, the user's metrics, the outputs of samples, and throughput."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from transformers.trainer_utils import EvalPrediction

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.data.collate import MapDataset, check_dataset
from zeromesh.trainer.data.feed import require_same_data
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.trainer.generation.evaluation_prompts import BatchGeneration
from zeromesh.trainer.loop.context import RunContext, Values
from zeromesh.trainer.loop.prediction import Collector

_NOTED_BYTES = 64 << 20  # Bytes of gathered outputs above which an evaluation notes their size.


def evaluate(
    run: RunContext,
    dataset: MapDataset | Mapping[str, MapDataset] | None,
    prefix: str = "eval",
    ignored: Sequence[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    generation: BatchGeneration | None = None,
) -> Values | None:
    """Evaluate one dataset, or several by name (`eval_NAME_loss`); returns None on all ranks once `stop` returns True. `ignored`
    are names of outputs not to gather, by default the model's. Raises `ConfigError` without a set, `DataError` for a bad one."""
    chosen = dataset if dataset is not None else run.data.eval
    if chosen is None:
        raise ConfigError("there is no evaluation data; give eval_dataset, or set data.eval or data.eval_fraction")
    sets = {f"_{name}": each for name, each in chosen.items()} if isinstance(chosen, Mapping) else {"": chosen}
    values: Values = {}
    for suffix, each in sets.items():
        found = run_dataset(run, each, f"{prefix}{suffix}", ignored, stop, generation)
        if found is None:
            return None
        targets, own, _ = found
        values |= own
        run.progress.evaluated_targets = targets if chosen is each else None
    losses = [values[f"{prefix}{suffix}_loss"] for suffix in sets]
    return {f"{prefix}_loss": sum(losses) / len(losses), **values}


def require_metric(run: RunContext) -> None:
    """Raise `ConfigError` where `run.metric` is known to be no value of the evaluations, or is ambiguous between sets."""
    section, metric = run.config.run, run.config.run.metric.removeprefix("eval_")
    judges = section.load_best or section.patience or run.config.checkpoint.keep_best
    sets = list(run.data.eval) if isinstance(run.data.eval, Mapping) else []
    losses = [f"{name}_loss" for name in sets] or ["loss"]
    if run.data.eval is None or metric in losses or (metric == "loss" and not judges):
        return
    if run.inputs.compute_metrics is None or (sets and not any(metric.startswith(f"{name}_") for name in sets)):
        what = f"of none of the evaluation sets {', '.join(sets)}" if sets else "no value of the evaluation"
        known = " or ".join(f"eval_{each}" for each in losses)
        raise ConfigError(f"{metric} is {what}; give {known}, or a value of compute_metrics", where="run.metric")


def generation_of(run: RunContext, requested: bool | None, fields: Mapping[str, Any], *, metrics: bool) -> BatchGeneration | None:
    """Return the generation of an evaluation, by `fields` of `GenerationConfig` on top of the configuration's; None without one.
    `requested` overrides the configuration. With `metrics`, only `compute_metrics` sees the tokens. Raises `ConfigError` for fields
    or a model that do not go with it, or that differ between ranks, and where nothing sees the tokens."""
    section = run.config.run
    if not (section.predict_with_generate if requested is None else requested):
        if fields:
            how = "predict_with_generate=True (run.predict_with_generate)"
            raise ConfigError(f"{', '.join(fields)}: an evaluation generates with {how}")
        return None
    if metrics and run.inputs.compute_metrics is None:
        raise ConfigError("predict_with_generate: what is generated is for compute_metrics; pass it to the Trainer")
    fields = {**(section.generation or {}), **fields}
    generation = BatchGeneration(run.model, fields, seed=f"{section.seed}/{run.progress.step}")
    advice, shown = "Give all of them the same fields of GenerationConfig", generation.settings.to_json_string()
    run.mesh.world.require_same({"predict_with_generate": shown}, ConfigError, advice=advice)
    return generation


def run_dataset(
    run: RunContext,
    dataset: MapDataset,
    prefix: str,
    ignored: Sequence[str] | None,
    stop: Callable[[], bool] = lambda: False,
    generation: BatchGeneration | None = None,
    *,
    predicts: bool = False,
) -> tuple[int, Values, EvalPrediction | None] | None:
    """Run the model over a dataset; returns the targets, values by name, and the gathered outputs if something reads them, or None
    once `stop` returns True. One that `predicts` may lack labels, and then has no loss or metrics. Raises `DataError`."""
    began, compute_metrics = time.perf_counter(), run.inputs.compute_metrics
    check_dataset(dataset, name="eval_dataset")
    require_same_data(run.mesh, {"eval_dataset": dataset}, {})
    feed = run.model.feeds.evaluation(dataset)
    collector = None
    if predicts or compute_metrics is not None:
        if ignored is None:
            config = getattr(run.model.module, "config", None)
            ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        collector = Collector(run.mesh, ignored, run.inputs.preprocess_logits_for_metrics, generation)
        collector.blocks = feed.plan.blocks and feed.plan.blocks(0)

    def should_continue(done: int, total: int) -> bool:
        run.console.show_evaluation(done, total)
        expected = 0 if collector is None else collector.nbytes // done * total
        if expected >= _NOTED_BYTES and collector is not None and not collector.size_noted:
            collector.size_noted = True
            cure = "preprocess_logits_for_metrics would reduce it first, to the most likely tokens for instance"
            run.console.note(f"evaluation: each rank collects {human_bytes(expected)} of what the model returns; {cure}")
        run.events.call("on_prediction_step", done, total)
        return not stop()

    with run.model.averaged() if run.model.evaluates_average else nullcontext(), run.loader(feed, last=1) as loader:
        result = run.model.stepper.evaluate(loader, should_continue, collector)
    if result is None:
        return None
    loss, targets = result
    values = {} if predicts and not targets else {f"{prefix}_loss": loss}
    prediction = collector.result() if collector is not None else None
    if prediction is not None and compute_metrics is not None and not (predicts and prediction.label_ids is None):
        values |= _named_metrics(compute_metrics(prediction), prefix)
    seconds = time.perf_counter() - began
    values |= {
        f"{prefix}_runtime": round(seconds, 4),
        f"{prefix}_samples_per_second": round(feed.plan.global_size / seconds, 3),
        f"{prefix}_steps_per_second": round(feed.plan.rounds_of(0) / seconds, 3),
    }
    # A drawn metric, or one of a judge, differs between ranks, which have to decide alike.
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    values |= run.mesh.world.gather_json(numbers, "values of the evaluation")[0]
    return targets, values, prediction


def _named_metrics(metrics: Any, prefix: str) -> Values:
    if not isinstance(metrics, Mapping):
        raise DataError(f"compute_metrics returned a {type(metrics).__name__}, not a mapping of names to numbers")
    named = {}
    for name, value in metrics.items():
        # NumPy's and PyTorch's scalars become Python's.
        scalar = value.item() if hasattr(value, "item") and np.size(value) == 1 else value
        named[name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"] = scalar
    return named


def evaluation_line(run: RunContext, values: Mapping[str, float]) -> str:
    loss, targets = values["eval_loss"], run.progress.evaluated_targets
    text = f"step {run.progress.step}: evaluation loss {loss:.4f}"
    text += " with averaged weights" if run.model.evaluates_average else ""
    text += f" over {human_count(targets)} targets" if targets is not None else ""
    if (entropy := run.data.byte_pair_entropy) is not None:
        text += f", {'below' if loss < entropy else 'above'} the byte-pair entropy {entropy:.4f}"
    rows = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "eval_loss"}
    rows = {name: value for name, value in rows.items() if not name.endswith(("_runtime", "_per_second"))}
    width = max(map(len, rows), default=0)
    return "\n".join([text, *(f"  {name:{width}}  {value:.4g}" for name, value in rows.items())])
