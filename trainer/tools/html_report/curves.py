"""Charts of values that do not add up: one line for each run, on top of each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zeromesh.trainer.tools.html_report.chart import Chart, Series, Style
from zeromesh.trainer.tools.html_report.figures import MOST_POINTS, kept, median, picked, shown, smoothed
from zeromesh.trainer.tools.html_report.runs import RunRecord, number, value_at

_DOTS_UP_TO = 40
"""Evaluations. More of them are drawn as a line: their dots would touch."""
_EVALUATION_SPEED = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
_SMOOTHED_FROM = 60
"""Steps. A shorter curve is looked at point by point."""


def curves_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """The charts that there are values for."""
    found = [_loss(runs)]
    values = [name for name in _names(runs, prefix="eval_") if name not in ("eval_loss", *_EVALUATION_SPEED)]
    found += [_of_evaluations(runs, name) for name in values]
    found += [_chart(runs, chart, {"": (key,)}) for key, chart in _PLAIN.items()]
    tiers = {name.removesuffix("_wait_seconds"): (name,) for name in _names(runs, suffix="_wait_seconds")}
    found.append(_chart(runs, _WAITS, tiers))
    found.append(_chart(runs, _BUBBLE, {word: ("bubble", word) for word in ("measured", "predicted")}))
    found += [_of_evaluations(runs, name) for name in _EVALUATION_SPEED]
    return [chart for chart in found if chart is not None]


_PLAIN = {
    "lr": Chart(identifier="lr", title="Learning rate", unit="plain", zero=True),
    "grad_norm": Chart(identifier="grad-norm", title="Gradient norm", unit="plain", note="before clipping"),
    "tokens_per_second": Chart(
        identifier="throughput",
        title="Throughput",
        unit="count",
        zero=True,
        note="tokens (of models without tokens, samples) per second, over all ranks",
    ),
    "step_seconds": Chart(identifier="step-seconds", title="Time of a step", unit="seconds", zero=True),
    "mfu": Chart(
        identifier="mfu",
        title="Model FLOPs utilisation",
        unit="percent",
        zero=True,
        note="of what the ranks could do at most",
    ),
    "peak_memory_bytes": Chart(
        identifier="peak-memory",
        title="Peak memory",
        unit="bytes",
        zero=True,
        note="the most that any rank has needed so far",
    ),
    "loss_scale": Chart(identifier="loss-scale", title="Loss scale", unit="plain", note="of float16"),
}
"""Charts of one key of the lines, still without series."""
_WAITS = Chart(
    identifier="waits",
    title="Waiting for offloaded bytes",
    unit="seconds",
    zero=True,
    note="that the first rank stood still in a step",
)
_BUBBLE = Chart(
    identifier="bubble",
    title="Pipeline bubble",
    unit="percent",
    zero=True,
    note="part of a step in which ranks of the pipeline stood still",
)
_WITH_MEDIAN = ("throughput", "step-seconds")


def _loss(runs: Sequence[RunRecord]) -> Chart | None:
    """Losses of steps, which are smoothed where they are many, and of evaluations."""
    series: list[Series] = []
    for place, run in enumerate(runs):
        of = f"{run.name}, " if len(runs) > 1 else ""
        series += _smoothed(run.lines, f"{of}training", place)
        steps = _evaluations(run)
        if steps:
            color = place if len(runs) > 1 else 1
            series.append(
                Series(
                    name=f"{of}evaluation",
                    color=color,
                    xs=list(steps),
                    ys=list(steps.values()),
                    style=_style(len(steps)),
                )
            )
    note = "mean over the targets of a step"
    note += "; bold: smoothed" if any(each.style == "faint" for each in series) else ""
    return Chart(identifier="loss", title="Loss", unit="plain", series=series, note=note) if series else None


def _of_evaluations(runs: Sequence[RunRecord], name: str) -> Chart | None:
    """A chart of one value of evaluations."""
    chart = Chart(identifier=name, title=name, unit="plain", note="of evaluations")
    most = max((sum(name in line for line in run.lines) for run in runs), default=0)
    return _chart(runs, chart, {"": (name,)}, style=_style(most))


def _style(points: int) -> Style:
    return "dots" if points <= _DOTS_UP_TO else "line"


def _evaluations(run: RunRecord) -> dict[float, float]:
    """Evaluation losses by step, of lines and of checkpoints."""
    found = {each["step"]: each["eval_loss"] for each in run.checkpoints}
    found |= {line["step"]: line["eval_loss"] for line in run.lines if "eval_loss" in line}
    numbers = {float(step): number(value) for step, value in sorted(found.items())}
    return {step: value for step, value in numbers.items() if value is not None and math.isfinite(value)}


def _smoothed(lines: Sequence[Mapping[str, Any]], name: str, color: int) -> list[Series]:
    """The loss as a line, where it is long as a faint one under a smooth one; none where no line has it."""
    xs, ys, breaks = _points(lines, ("loss",))
    if not xs and not breaks:
        return []
    if len(xs) < _SMOOTHED_FROM:
        return [Series(name=name, color=color, xs=xs, ys=ys, breaks=breaks)]
    places, smooth = kept(ys), smoothed(ys, max(5, len(ys) // 40))
    few = kept(smooth, MOST_POINTS // 2)
    return [
        Series(name=name, color=color, xs=picked(xs, places), ys=picked(ys, places), style="faint", breaks=breaks),
        Series(name=f"{name}, smoothed", color=color, xs=picked(xs, few), ys=picked(smooth, few), breaks=breaks),
    ]


def _points(lines: Sequence[Mapping[str, Any]], path: Sequence[str]) -> tuple[list[float], list[float], list[float]]:
    """Steps and values, and the steps whose value is not finite, at most `MOST_POINTS` of them."""
    found = [(float(line["step"]), each) for line in lines if (each := number(value_at(path, line))) is not None]
    good = [(x, y) for x, y in found if math.isfinite(y)]
    bad = [x for x, y in found if not math.isfinite(y)]
    return [x for x, _ in good], [y for _, y in good], picked(bad, kept(bad))


def _chart(
    runs: Sequence[RunRecord], chart: Chart, paths: Mapping[str, Sequence[str]], style: Style = "line"
) -> Chart | None:
    """`chart` with a line for each run and each of the `paths` into its lines, which are words; None where all would be 0."""
    series = []
    for place, run in enumerate(runs):
        for other, (word, path) in enumerate(paths.items()):
            xs, ys, breaks = _points(run.lines, path)
            if not xs and not breaks:
                continue
            several = len(runs) > 1
            names = [run.name] * several + [word] * bool(word)
            places = kept(ys)
            made = Series(
                name=", ".join(names) or chart.title.lower(),
                color=place if several else other,
                xs=picked(xs, places),
                ys=picked(ys, places),
                breaks=breaks,
                style="dashed" if word == "predicted" else style,
            )
            series.append(made)
    if not any(any(each.ys) or each.breaks for each in series):
        return None
    note = chart.note
    if chart.identifier in _WITH_MEDIAN and len(series) == 1 and series[0].ys:
        note = "; ".join([*([note] if note else []), f"median {shown(median(series[0].ys), chart.unit)}"])
    return replace(chart, series=series, note=note)


def _names(runs: Sequence[RunRecord], *, prefix: str = "", suffix: str = "") -> list[str]:
    """Keys of numbers in lines, in the order in which they first appear."""
    found: dict[str, object] = {}
    for run in runs:
        for line in run.lines:
            if line.keys() - found.keys():
                found |= {name: value for name, value in line.items() if name not in found}
    return [
        name
        for name, value in found.items()
        if name.startswith(prefix) and name.endswith(suffix) and number(value) is not None
    ]
