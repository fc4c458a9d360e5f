"""Which charts a page has: what is in the lines of metrics, each in one picture. What is not there has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zeromesh.trainer.page.figures import MOST_POINTS, Scale, Unit, kept, line_scale, median, shown, smoothed
from zeromesh.trainer.page.runs import RunRecord, number

COLORS = 10
"""Colors that page.css has for series; a stack has no more of them, and draws those with least as one."""
_MOST_BARS = 300
_SMOOTHED_FROM = 60
"""Steps. A shorter curve is looked at point by point."""
_LOG_FROM = 50.0
"""Highest over lowest value from which on a logarithmic scale shows more."""
_BEYOND = 3.0
"""Times the median sum of a stack that its scale reaches to at least; single steps beyond 4 times it are cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Values over steps, both of one length, steps ascending. `color` is the number of one, and taken modulo `COLORS`."""

    name: str
    color: int
    xs: Sequence[float]
    ys: Sequence[float]
    style: Literal["line", "faint", "dots", "dashed"] = "line"
    breaks: Sequence[float] = ()
    """Steps whose value is not finite: the line is broken there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One picture. The series of a `stack` have the same steps and are drawn on top of each other, the first at the bottom."""

    identifier: str
    title: str
    unit: Unit
    series: Sequence[Series]
    kind: Literal["lines", "stack"] = "lines"
    note: str = ""
    zero: bool = False
    """Whether the scale begins at 0."""

    def scale(self) -> Scale:
        """The vertical one."""
        if self.kind == "stack":
            return Scale(0.0, 1.06 * self._reach())
        values = [value for each in self.series for value in each.ys] or [0.0]
        low, high = min(values), max(values)
        log = not self.zero and low > 0 and high / low >= _LOG_FROM
        return line_scale(low, high, zero=self.zero, log=log)

    def totals(self) -> list[float]:
        """The sums of a stack, by step."""
        return [sum(column) for column in zip(*(each.ys for each in self.series), strict=True)]

    def _reach(self) -> float:
        """The highest sum of a stack that is to be seen whole."""
        totals = self.totals()
        usual = median(totals)
        if 0 < 4 * usual < max(totals):
            return max(_BEYOND * usual, *(total for total in totals if total <= 4 * usual))
        return max(totals) or 1.0

    def beyond(self) -> list[tuple[float, float]]:
        """Steps of a stack that do not fit into the picture, and their sums."""
        if self.kind != "stack":
            return []
        high = self.scale().high
        return [(x, total) for x, total in zip(self.series[0].xs, self.totals(), strict=True) if total > high]


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """All charts of one run, or of several on top of each other; stacks, which cannot be, are beside each other then."""
    found = [_loss(runs)]
    found += [_evaluated(runs, name) for name in _names(runs, "eval_") if name != "eval_loss"]
    found += [_plain(runs, *row) for row in _PLAIN]
    found += [_waits(runs), _bubble(runs)]
    for place, run in enumerate(runs):
        found += _stacks(run, place if len(runs) > 1 else None)
    return [chart for chart in found if chart is not None]


# Lines


_PLAIN: tuple[tuple[str, str, Unit, bool, str], ...] = (
    ("lr", "Learning rate", "plain", True, ""),
    ("grad_norm", "Gradient norm", "plain", False, "before clipping"),
    ("tokens_per_second", "Throughput", "count", True, "tokens per second, over all ranks"),
    ("step_seconds", "Time of a step", "seconds", True, ""),
    ("mfu", "Model FLOPs utilisation", "percent", True, "of the peak of the devices"),
    ("peak_memory_bytes", "Peak memory", "bytes", True, "the most that any rank has needed so far"),
    ("loss_scale", "Loss scale", "plain", False, "of float16"),
)
"""Key, title, unit, whether the scale begins at 0, and a note."""


def _loss(runs: Sequence[RunRecord]) -> Chart | None:
    series: list[Series] = []
    for place, run in enumerate(runs):
        name = f"{run.name}, training" if len(runs) > 1 else "training"
        series += _curve(run.lines, lambda line: line.get("loss"), name, place)
        steps = _evaluations(run)
        if steps:
            color = place if len(runs) > 1 else 1
            name = f"{run.name}, evaluation" if len(runs) > 1 else "evaluation"
            series.append(Series(name=name, color=color, xs=list(steps), ys=list(steps.values()), style="dots"))
    window = max((_window(len(each.xs)) for each in series if each.style == "faint"), default=0)
    note = "mean over the targets of a step" + (f"; bold: smoothed over up to {window} lines" if window else "")
    return Chart(identifier="loss", title="Loss", unit="plain", series=series, note=note) if series else None


def _evaluations(run: RunRecord) -> dict[float, float]:
    """Evaluation losses by step, of lines and of checkpoints."""
    found = {each["step"]: each["eval_loss"] for each in run.checkpoints}
    found |= {line["step"]: line["eval_loss"] for line in run.lines if "eval_loss" in line}
    numbers = {float(step): number(value) for step, value in sorted(found.items())}
    return {step: value for step, value in numbers.items() if value is not None and math.isfinite(value)}


def _curve(
    lines: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], object], name: str, color: int
) -> list[Series]:
    """A value of lines as a line, where it is long as a faint one under a smooth one; none where no line has it."""
    xs, ys, breaks = _points(lines, value)
    if not xs and not breaks:
        return []
    if len(xs) < _SMOOTHED_FROM:
        return [Series(name=name, color=color, xs=xs, ys=ys, breaks=breaks)]
    places, smooth = kept(ys), smoothed(ys, _window(len(ys)))
    few = kept(smooth, MOST_POINTS // 2)
    return [
        Series(name=name, color=color, xs=_at(xs, places), ys=_at(ys, places), style="faint", breaks=breaks),
        Series(name=f"{name}, smoothed", color=color, xs=_at(xs, few), ys=_at(smooth, few), breaks=breaks),
    ]


def _window(count: int) -> int:
    return max(5, count // 40) | 1


def _points(
    lines: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], object]
) -> tuple[list[float], list[float], list[float]]:
    """Steps and values, and the steps whose value is not finite, at most `MOST_POINTS` of them."""
    found = [(float(line["step"]), each) for line in lines if (each := number(value(line))) is not None]
    good = [(x, y) for x, y in found if math.isfinite(y)]
    bad = [x for x, y in found if not math.isfinite(y)]
    return [x for x, _ in good], [y for _, y in good], _at(bad, kept(bad))


def _at(values: Sequence[float], places: Iterable[int]) -> list[float]:
    return [values[place] for place in places]


def _plain(runs: Sequence[RunRecord], key: str, title: str, unit: Unit, zero: bool, note: str) -> Chart | None:
    """A key of lines, one line for each run that has it."""
    series = [
        each
        for place, run in enumerate(runs)
        if (each := _line(run, lambda line: line.get(key), run.name if len(runs) > 1 else title.lower(), place))
        is not None
    ]
    values = [value for each in series for value in each.ys]
    if not any(values) and not any(each.breaks for each in series):
        return None
    if key in ("tokens_per_second", "step_seconds") and len(series) == 1:
        note = f"{note}; " if note else ""
        note += f"median {shown(median(series[0].ys), unit)}"
    return Chart(identifier=key.replace("_", "-"), title=title, unit=unit, series=series, zero=zero, note=note)


def _line(
    run: RunRecord,
    value: Callable[[Mapping[str, Any]], object],
    name: str,
    color: int,
    style: Literal["line", "dashed"] = "line",
) -> Series | None:
    xs, ys, breaks = _points(run.lines, value)
    places = kept(ys)
    if not xs and not breaks:
        return None
    return Series(name=name, color=color, xs=_at(xs, places), ys=_at(ys, places), breaks=breaks, style=style)


def _names(runs: Sequence[RunRecord], prefix: str, suffix: str = "") -> list[str]:
    """Keys of numbers in lines, in the order in which they first appear."""
    found: dict[str, None] = {}
    for run in runs:
        for line in run.lines:
            for name, value in line.items():
                if (
                    name not in found
                    and name.startswith(prefix)
                    and name.endswith(suffix)
                    and number(value) is not None
                ):
                    found[name] = None
    return list(found)


def _evaluated(runs: Sequence[RunRecord], name: str) -> Chart | None:
    """A metric of evaluations."""
    return _plain(runs, name, name, "plain", False, "of evaluations")


def _waits(runs: Sequence[RunRecord]) -> Chart | None:
    names = _names(runs, "", "_wait_seconds")
    series = []
    for place, run in enumerate(runs):
        for other, name in enumerate(names):
            tier = name.removesuffix("_wait_seconds")
            words, color = (f"{run.name}, {tier}", place) if len(runs) > 1 else (f"{tier} tier", other)
            found = _line(run, lambda line, name=name: line.get(name), words, color)  # type: ignore[misc]
            series += [found] if found is not None else []
    note = "that the first rank stood still for bytes of a tier"
    chart = Chart(
        identifier="waits", title="Waiting for offloaded bytes", unit="seconds", series=series, zero=True, note=note
    )
    return chart if any(any(each.ys) for each in series) else None


def _bubble(runs: Sequence[RunRecord]) -> Chart | None:
    series = []
    for place, run in enumerate(runs):
        for other, name in enumerate(("measured", "predicted")):
            words, color = (f"{run.name}, {name}", place) if len(runs) > 1 else (name, other)
            style: Literal["line", "dashed"] = "dashed" if name == "predicted" else "line"
            found = _line(run, lambda line, name=name: _inside(line, "bubble", name), words, color, style)  # type: ignore[misc]
            series += [found] if found is not None else []
    note = "part of a step in which ranks of the pipeline stood still"
    chart = Chart(identifier="bubble", title="Pipeline bubble", unit="percent", series=series, zero=True, note=note)
    return chart if series else None


def _inside(line: Mapping[str, Any], *names: str) -> object:
    """The value inside of mappings; None where there is none."""
    found: object = line
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


# Stacks


def _stacks(run: RunRecord, place: int | None) -> Iterator[Chart | None]:
    """What adds up, of one run; the `place`-th of several."""
    end, of = (f"-{place}", f": {run.name}") if place is not None else ("", "")
    yield _stack(run, _phases, f"phases{end}", f"Time by phase{of}", "seconds", "seconds of a step")
    tiers = dict.fromkeys(tier for line in run.lines if isinstance(line.get("memory"), dict) for tier in line["memory"])
    for tier in tiers:
        note = (
            "bytes that the run has allocated there, after a step"
            if tier != "file"
            else "bytes in swap files, after a step"
        )
        rows = lambda line, tier=tier: _numbers(_inside(line, "memory", tier))  # noqa: E731
        yield _stack(run, rows, f"memory-{tier}{end}", f"Memory by purpose, {tier}{of}", "bytes", note)
    note = "seconds of a step that a rank's own thread spent in starting collectives and waiting for them"
    yield _stack(run, _told, f"communication{end}", f"Communication by axis{of}", "seconds", note)


_PHASES = ("data", "forward", "backward", "communication", "optimizer", "offload_wait")


def _phases(line: Mapping[str, Any]) -> dict[str, float]:
    found = _numbers(line.get("phases"))
    whole = number(line.get("step_seconds"))
    named = {name.replace("_", " "): found[name] for name in (*_PHASES, *found) if name in found}
    if named and whole is not None and math.isfinite(whole):
        rest = whole - sum(named.values())
        if rest > 0.01 * whole:
            named["other"] = rest
    return named


def _told(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by axis and collective."""
    found = {}
    axes = line.get("communication")
    for axis, collectives in axes.items() if isinstance(axes, dict) else ():
        for name, row in collectives.items() if isinstance(collectives, dict) else ():
            for seconds in _numbers({"seconds": row.get("seconds")} if isinstance(row, dict) else {}).values():
                found[f"{axis}: {name}"] = seconds
    return found


def _numbers(values: object) -> dict[str, float]:
    """The finite numbers of a mapping; none is below 0."""
    found = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        each = number(value)
        if each is not None and math.isfinite(each):
            found[name] = max(0.0, each)
    return found


def _stack(
    run: RunRecord,
    rows: Callable[[Mapping[str, Any]], dict[str, float]],
    identifier: str,
    title: str,
    unit: Unit,
    note: str,
) -> Chart | None:
    """Values by name of every line that has them; a name that a line does not have counts as 0 there."""
    found = [(float(line["step"]), row) for line in run.lines if (row := rows(line))]
    sums: dict[str, float] = {}
    for _, row in found:
        for name, value in row.items():
            sums[name] = sums.get(name, 0.0) + value
    if not any(sums.values()):
        return None
    names = [name for name, total in sums.items() if total]
    least = sorted(names, key=sums.__getitem__)[: max(0, len(names) - COLORS + 1)]
    places = kept([sum(row.values()) for _, row in found], _MOST_BARS)
    rows_kept = [found[place] for place in places]
    xs = [x for x, _ in rows_kept]
    series = [
        Series(name=name, color=color, xs=xs, ys=[row.get(name, 0.0) for _, row in rows_kept])
        for color, name in enumerate(name for name in names if name not in least or len(names) <= COLORS)
    ]
    if len(names) > COLORS:
        rest = [sum(row.get(name, 0.0) for name in least) for _, row in rows_kept]
        series.append(Series(name=f"{len(least)} others", color=len(series), xs=xs, ys=rest))
    return Chart(identifier=identifier, title=title, unit=unit, series=series, kind="stack", note=note)
