"""What a page says in tables: figures, the mesh, communication, checkpoints, notes, the configuration."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from zeromesh.mesh.mesh_shape import AXES, Coordinate, MeshShape
from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds
from zeromesh.trainer.monitoring.start_times import sentence
from zeromesh.trainer.tools.html_report.chart import COLORS
from zeromesh.trainer.tools.html_report.figures import median
from zeromesh.trainer.tools.html_report.markup import Html, element
from zeromesh.trainer.tools.html_report.runs import Key, RunRecord, number

_SENTENCES = ("start", "hardware", "versions")
"""Figures that are too long for a card."""
_STEPS_NAMED = 20
_NOTES = 100
_YEAR_9999 = 253370764800
_COUNTED = ("calls", "bytes", "seconds")
_RANKS_NAMED, _RANKS_DRAWN = 64, 1024


def table(
    columns: Sequence[object], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = (), class_: str = ""
) -> Html:
    """A table that scrolls by itself where the screen is narrow. `numbers` are columns that stand to the right."""
    head = element(
        "tr", *[element("th", name, scope="col", class_=_right(place, numbers)) for place, name in enumerate(columns)]
    )
    body = [
        element("tr", *[element("td", cell, class_=_right(place, numbers)) for place, cell in enumerate(row)])
        for row in rows
    ]
    return element(
        "div", element("table", element("thead", head), element("tbody", *body)), class_=f"scroll {class_}".strip()
    )


def _right(place: int, numbers: Sequence[int]) -> str | None:
    return "number" if place in numbers else None


# Figures


def figures_of(run: RunRecord) -> dict[str, str]:
    """The figures of a run that people look for first, by name; those that are not known are left out."""
    found: dict[str, str] = {}
    last = run.lines[-1] if run.lines else {}
    if last:
        of = f" / {run.max_steps:,}" if run.max_steps is not None else ""
        found["steps"] = f"{last['step']:,}{of}"
    losses = [loss for line in run.lines if (loss := number(line.get("loss"))) is not None]
    if losses:
        found["last loss"] = f"{losses[-1]:.4f}"
    evaluations = [
        value for line in [*run.checkpoints, *run.lines] if (value := number(line.get("eval_loss"))) is not None
    ]
    if any(map(math.isfinite, evaluations)):
        found["best eval loss"] = f"{min(filter(math.isfinite, evaluations)):.4f}"
    unit = "samples" if last.get("unit") == "samples" else "tokens"
    tokens = [count for line in run.lines if (count := number(line.get("tokens")))]
    if tokens:
        found[unit] = human_count(tokens[-1])
    speeds = _finite(run, "tokens_per_second")
    if any(speeds):
        found[f"{unit}/s"] = human_count(median(speeds))
    seconds = _finite(run, "step_seconds")
    if seconds:
        found["step time"] = human_seconds(median(seconds))
    peaks = _finite(run, "peak_memory_bytes")
    if any(peaks):
        found["peak memory"] = human_bytes(max(peaks))
    if run.shape is not None:
        found["ranks"] = str(run.shape.world_size)
    found |= _facts(run)
    skipped = sum(bool(line.get("skipped")) for line in run.lines)
    if skipped:
        found["skipped steps"] = str(skipped)
    return found


def _facts(run: RunRecord) -> dict[str, str]:
    """The size of the model, how long the run's processes have trained, the hardware and the versions, from its starts."""
    if not run.starts:
        return {}
    found, last = {}, run.starts[-1]
    parts: Mapping[str, Any] = next(
        (each for line in reversed(run.lines) if isinstance(each := line.get("start"), dict)), {}
    )
    seconds = {part: value for part, each in parts.items() if (value := number(each)) is not None}
    if seconds:
        found["start"] = sentence(seconds)
    if parameters := number(last.get("parameters")):
        found["parameters"] = human_count(parameters)
    begins = [begin for start in run.starts if (begin := number(start.get("time"))) is not None]
    times = [at for line in run.lines if (at := number(line.get("time"))) is not None]
    ends = [
        max((at for at in times if begin <= at < end), default=begin) for begin, end in pairwise([*begins, math.inf])
    ]
    if times and begins:
        found["wall time"] = human_seconds(sum(end - begin for begin, end in zip(begins, ends, strict=True)))
    if isinstance(last.get("hardware"), str):
        found["hardware"] = last["hardware"]
    if isinstance(last.get("versions"), dict):
        found["versions"] = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    return found


def _finite(run: RunRecord, key: str) -> list[float]:
    values = [number(line.get(key)) for line in run.lines]
    return [value for value in values if value is not None and math.isfinite(value)]


def summary(runs: Sequence[RunRecord]) -> Html:
    """The figures: as cards of one run, as a table of several."""
    figures = [figures_of(run) for run in runs]
    if len(runs) == 1:
        short = {name: value for name, value in figures[0].items() if name not in _SENTENCES}
        cards = [element("div", element("dt", name), element("dd", value)) for name, value in short.items()]
        sentences = [element("p", f"{name}: {figures[0][name]}") for name in _SENTENCES if name in figures[0]]
        return element("div", element("dl", *cards, class_="cards"), *sentences)
    names = list(dict.fromkeys(name for each in figures for name in each))
    rows = [[name, *(each.get(name, "") for each in figures)] for name in names]
    return table(["", *heads(runs)], rows)


def heads(runs: Sequence[RunRecord]) -> list[Html]:
    """The names of runs, each with its color, for columns of tables."""
    return [
        element("span", element("i", class_=f"swatch line c{place % COLORS}"), run.name, class_="run")
        for place, run in enumerate(runs)
    ]


# Mesh


def mesh(run: RunRecord) -> Html | None:
    """Who is where: a box for each index of an axis around those of the next one; None where the mesh is not known."""
    shape = run.shape
    if shape is None:
        return None
    count = shape.world_size
    axes = [axis for axis in AXES if getattr(shape, axis) > 1]
    beside = f", beside each other along {axes[-1]}" if axes else ""
    words = element("p", f"{shape}: {count} rank{'s' * (count > 1)}{beside}")
    if count > _RANKS_DRAWN:
        return element("div", words, element("p", f"More than {_RANKS_DRAWN:,} ranks are not drawn."), class_="mesh")
    states = {row["rank"]: row for row in run.ranks}
    failed = [row for row in run.ranks if row.get("failure")]
    return element(
        "div",
        words,
        _box(shape, axes, {}, states),
        [element("p", f"Rank {row['rank']} has failed: {row['failure']}", class_="bad") for row in failed[:8]],
        class_=f"mesh{' many' if count > _RANKS_NAMED else ''}",
    )


def _box(shape: MeshShape, axes: Sequence[str], at: Mapping[str, int], states: Mapping[int, Mapping[str, Any]]) -> Html:
    """The ranks at some indices, over the axes that are left."""
    if not axes:
        return _rank(shape.rank(Coordinate(**at)), shape, at, states)
    axis, *inner = axes
    boxes = [_box(shape, inner, {**at, axis: index}, states) for index in range(getattr(shape, axis))]
    if not inner:
        return element("div", *boxes, class_=f"ranks {axis}")
    named = [
        element("div", element("span", f"{axis} {index}", class_="axis"), box, class_="group")
        for index, box in enumerate(boxes)
    ]
    return element("div", *named, class_=f"groups {axis}")


def _rank(rank: int, shape: MeshShape, at: Mapping[str, int], states: Mapping[int, Mapping[str, Any]]) -> Html:
    state = states.get(rank, {})
    where = ", ".join(f"{axis} {index}" for axis, index in at.items()) or "alone"
    words = [f"rank {rank}: {where}"]
    if state:
        words.append(f"step {state.get('step')}, {state.get('failure') or state.get('doing')}")
    kind = "rank failed" if state.get("failure") else "rank"
    return element("div", str(rank), class_=kind, title="\n".join(words))


# Communication


def communication(run: RunRecord) -> Html | None:
    """What the first rank told others in a step, on average, by axis and collective."""
    found = [line["communication"] for line in run.lines if isinstance(line.get("communication"), dict)]
    sums: dict[tuple[str, str], list[float]] = {}
    for axes in found:
        for axis, collectives in axes.items():
            for name, row in collectives.items() if isinstance(collectives, dict) else ():
                for place, key in enumerate(_COUNTED if isinstance(row, dict) else ()):
                    value = number(row.get(key))
                    if value is not None and math.isfinite(value):
                        sums.setdefault((axis, name), [0.0] * len(_COUNTED))[place] += value
    if not sums:
        return None
    steps = len(found)
    rows = sorted(sums.items(), key=lambda each: -each[1][2])
    most = rows[0][1][2]
    cells = [
        [
            axis,
            name,
            f"{calls / steps:,.1f}",
            human_bytes(nbytes / steps),
            human_seconds(seconds / steps),
            _bar(seconds, most),
        ]
        for (axis, name), (calls, nbytes, seconds) in rows
    ]
    return table(["axis", "collective", "calls", "bytes", "time", ""], cells, numbers=(2, 3, 4))


def _bar(value: float, most: float) -> Html:
    return element("meter", value=f"{value / most if most else 0:.3f}")


# Checkpoints and notes


def checkpoints(run: RunRecord) -> Html | None:
    """The checkpoints that are there, oldest first."""
    if not run.checkpoints:
        return None
    rows = [
        [
            f"{each['step']:,}",
            each["date"].replace("T", " ").removesuffix("Z"),
            human_bytes(each["bytes"]),
            *("" if (value := number(each[name])) is None else f"{value:.4f}" for name in ("loss", "eval_loss")),
            _state(each),
        ]
        for each in run.checkpoints
    ]
    return table(["step", "date (UTC)", "size", "loss", "evaluation loss", "state"], rows, numbers=(0, 2, 3, 4))


def _state(found: Mapping[str, Any]) -> Html:
    if found["reason"] is not None:
        return element("span", f"not whole: {found['reason']}", class_="bad")
    if not found["whole"]:
        return element("span", f"part {found['part'][0] + 1} of {found['part'][1]}")
    return element("span", "whole", class_="good")


def notes(run: RunRecord) -> Html | None:
    """What is worth knowing of single steps, and what of the run could not be read."""
    found = [element("li", remark, class_="bad") for remark in run.remarks]
    found += [element("li", _start(start)) for start in run.starts[-_NOTES:] if len(run.starts) > 1 or start["step"]]
    causes: dict[str, list[int]] = {}
    for line in run.lines:
        if line.get("skipped"):
            causes.setdefault(str(line.get("cause") or "not finite"), []).append(line["step"])
    for cause, steps in list(causes.items())[:_NOTES]:
        found.append(element("li", f"No update in step{'s' * (len(steps) > 1)} {_steps(steps)}: {cause}", class_="bad"))
    if len(causes) > _NOTES:
        found.append(element("li", f"{len(causes) - _NOTES:,} more causes of steps without an update are left out."))
    return element("ul", *found, class_="notes") if found else None


def _start(start: Mapping[str, Any]) -> str:
    seconds, step = number(start.get("time")), start["step"]
    known = seconds is not None and 0 <= seconds < _YEAR_9999
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if known else "at an unknown time"
    return f"{when}: {f'went on after step {step:,}' if step else 'began'} on {start.get('host', 'an unknown host')}"


def _steps(steps: Sequence[int]) -> str:
    some = ", ".join(f"{step:,}" for step in steps[:_STEPS_NAMED])
    return f"{some} and {len(steps) - _STEPS_NAMED:,} more" if len(steps) > _STEPS_NAMED else some


# Configuration


def configuration(run: RunRecord) -> Html | None:
    """Every key, section by section; those that are not at their default are marked, and say what that is."""
    if not run.keys:
        return None
    sections: dict[str, list[Key]] = {}
    for key in run.keys:
        sections.setdefault(key.path.partition(".")[0], []).append(key)
    changed = Counter(key.path.partition(".")[0] for key in run.keys if key.default is not None)
    boxes = [
        element(
            "details",
            element("summary", name, element("small", f" {changed[name]} changed" if changed[name] else "")),
            table(["key", "value", "default"], [_row(key) for key in keys]),
            open=bool(changed[name]),
        )
        for name, keys in sections.items()
    ]
    return element("div", *boxes, class_="config")


def _row(key: Key) -> list[object]:
    name, value = key.path.partition(".")[2] or key.path, key.value
    if key.default is None:
        return [element("code", name), element("code", value), ""]
    return [
        element("code", name, class_="changed"),
        element("code", value, class_="changed"),
        element("code", key.default),
    ]


def differences(runs: Sequence[RunRecord]) -> Html | None:
    """The keys in which runs differ; None where they do not."""
    values = [{key.path: key.value for key in run.keys} for run in runs]
    paths = dict.fromkeys(path for each in values for path in each)
    rows = [
        [element("code", path), *(element("code", each.get(path, "(none)")) for each in values)]
        for path in paths
        if len({each.get(path) for each in values}) > 1
    ]
    return table(["key", *heads(runs)], rows) if rows else None
