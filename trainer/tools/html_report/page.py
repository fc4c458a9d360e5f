"""The page: one self-contained file of HTML, which loads nothing and runs no scripts but its own. `page.html` has its elements."""

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from zeromesh import __version__
from zeromesh.errors import counted, plural, some
from zeromesh.intervals import grouped
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds
from zeromesh.trainer.monitoring.step_metrics import sentence
from zeromesh.trainer.tools.html_report.charts import COLORS, Chart, charts_of, get_plotlyjs, to_json_plotly
from zeromesh.trainer.tools.html_report.runs import RunRecord, as_number, settings_of

_STEPS_NAMED, _NOTES, _RANKS_DRAWN, _YEAR_9999 = 20, 100, 1024, 253370764800
_LONG = ("start", "hardware", "versions")  # Figures of a run that stand in lines of their own.
Part = tuple[str, str, Any]  # A heading, which may be empty, a macro of `page.html`, and its argument.


class Table(NamedTuple):
    """A table that scrolls horizontally on a narrow screen. `numbers` are the indices of right-aligned columns."""

    columns: Sequence[object]
    rows: Sequence[Sequence[object]]
    numbers: Sequence[int] = ()


def visible(content: object) -> object:
    """Return markup as it is, and text with what cannot be seen, or is outside of UTF-8, replaced; None becomes empty."""
    if content is None or isinstance(content, Markup):
        return content or ""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in str(content))


def markup(form: str, *values: object) -> Markup:
    """Return `form` as markup with values in place of `{}`, which are escaped."""
    return Markup(form).format(*map(visible, values))


def page_of(runs: Sequence[RunRecord]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"

    def of_each(kind: str, make: Callable[[RunRecord], Any]) -> list[Part]:
        return [(run.name if len(runs) > 1 else "", kind, made) for run in runs if (made := make(run))]

    charts = charts_of(runs)
    sections = {
        "": [_summary(runs)],
        "What differs": _differences(runs),
        "Notes": of_each("notes", _notes),
        "Over the steps": [("", "charts", charts)],
        "Plan": of_each("table", lambda run: run.planned and Table(*run.planned, numbers=(1, 2, 3))),
        "Mesh": of_each("mesh", _mesh),
        "Communication of a step": of_each("table", _communication),
        "Checkpoints": of_each("table", _checkpoints),
        "Configuration": of_each("config", _configuration),
    }
    return document(title, sections, charts, ", ".join(str(run.path) for run in runs))


def document(title: str, sections: Mapping[str, Sequence[Part]], charts: Sequence[Chart], footer: str) -> str:
    """Return a page of sections by heading; `charts` are those of its parts."""
    figures = [{**each.figure.to_dict(), "id": f"plot-{each.name}", "over_steps": each.over_steps} for each in charts]
    scripts = get_plotlyjs(), _file("page.js")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return (
        Environment(autoescape=True, finalize=visible)
        .from_string(_file("page.html"))
        .render(
            title=title,
            sections=sections,
            footer=footer,
            scripts=scripts,
            sources=" ".join(f"'sha256-{each}'" for each in hashes),
            style=_file("page.css"),
            drawn=to_json_plotly(figures),
            version=__version__,
            date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            long=_LONG,
        )
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _run_labels(runs: Sequence[RunRecord]) -> list[Markup]:
    label = '<span class="run"><i style="background:{}"></i>{}</span>'
    return [markup(label, COLORS[place % len(COLORS)], run.name) for place, run in enumerate(runs)]


def _summary(runs: Sequence[RunRecord]) -> Part:
    figures = [_summary_of(run) for run in runs]
    if len(runs) == 1:
        return "", "summary", figures[0]
    names = dict.fromkeys(name for each in figures for name in each)
    return "", "table", Table(["", *_run_labels(runs)], [[name, *(each.get(name) for each in figures)] for name in names])


def _summary_of(run: RunRecord) -> dict[str, object]:
    last = run.lines[-1] if run.lines else {}
    unit = "samples" if any(line.get("unit") == "samples" for line in run.lines) else "tokens"
    section, facts = run.config.get("run"), run.starts[-1] if run.starts else {}
    most = as_number(section.get("max_steps")) if isinstance(section, dict) else None
    figures: dict[str, object] = {"steps": f"{last['step']:,}" + (f" / {most:,.0f}" if most else "")} if last else {}
    for name, column, pick, shown in (
        ("last loss", run.columns.get(("loss",), {}), lambda values: values[-1], "{:.4f}".format),
        ("best eval loss", run.evaluation_losses(), min, "{:.4f}".format),
        (unit, run.column("tokens"), max, human_count),
        (f"{unit}/s", run.column("tokens_per_second"), median, human_count),
        ("step time", run.column("step_seconds"), median, human_seconds),
        ("peak memory", run.column("peak_memory_bytes"), max, human_bytes),
    ):
        figures[name] = shown(pick(list(column.values()))) if any(column.values()) else None
    parameters = as_number(facts.get("parameters"))
    parts = {keys[-1]: list(values.values())[-1] for keys, values in run.columns.items() if keys[0] == "start"}
    begins = [begin for start in run.starts if (begin := as_number(start.get("time"))) is not None]
    times = [*run.column("time").values(), *begins]
    seconds = sum(max((at for at in times if begin <= at < end), default=begin) - begin for begin, end in pairwise([*begins, inf]))
    versions = packages if isinstance(packages := facts.get("versions"), dict) else {}
    figures |= {
        "ranks": run.shape and run.shape.world_size,
        "start": sentence(parts) if parts else None,
        "parameters": parameters and human_count(parameters),
        "wall time": human_seconds(seconds) if seconds else None,
        "hardware": facts.get("hardware"),
        "versions": ", ".join(f"{name} {each}" for name, each in versions.items()) or None,
        "skipped steps": sum(bool(line.get("skipped")) for line in run.lines) or None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _mesh(run: RunRecord) -> dict[str, Any] | None:
    shape = run.shape
    if shape is None:
        return None
    axes = [axis for axis in AXES if getattr(shape, axis) > 1]
    text = f"{shape}: {counted(shape.world_size, 'rank')}" + (f", beside each other along {axes[-1]}" if axes else "")
    states = {row["rank"]: row for row in run.ranks}
    return {"text": text, "shape": shape, "axes": axes, "states": states, "drawn": shape.world_size <= _RANKS_DRAWN}


def _communication(run: RunRecord) -> Table | None:
    columns = {keys[1:]: run.column(*keys) for keys in run.columns if len(keys) == 4 and keys[0] == "communication"}
    steps = len({step for values in columns.values() for step in values})
    means = {keys: sum(values.values()) / max(1, steps) for keys, values in columns.items()}
    pairs = sorted({keys[:2] for keys in means}, key=lambda pair: -means.get((*pair, "seconds"), 0.0))
    most = max((means.get((*pair, "seconds"), 0.0) for pair in pairs), default=0.0) or 1.0
    rows = []
    for pair in pairs:
        calls, nbytes, seconds = (means.get((*pair, name), 0.0) for name in ("calls", "bytes", "seconds"))
        bar = markup('<meter value="{}"></meter>', f"{seconds / most:.3f}")
        rows.append([*pair, f"{calls:,.1f}", human_bytes(nbytes), human_seconds(seconds), bar])
    return Table(["axis", "collective", "calls", "bytes", "time", ""], rows, numbers=(2, 3, 4)) if rows else None


def _checkpoints(run: RunRecord) -> Table | None:
    if not run.checkpoints:
        return None
    from zeromesh.trainer.tools.checkpoint.reading import COLUMNS, summary_row  # This import loads torch.

    rows = []
    for each in run.checkpoints:
        *texts, state = summary_row(each)
        rows.append([*texts, markup('<span class="{}">{}</span>', "good" if each["whole"] else "bad", state)])
    return Table(COLUMNS, rows, numbers=(0, 2, 3, 4, 5))


def _notes(run: RunRecord) -> list[tuple[str, bool]]:
    """Return texts, and True for those about something bad."""
    items = [(remark, True) for remark in run.remarks]
    for start in run.starts[-_NOTES:] if len(run.starts) > 1 or any(start["step"] for start in run.starts) else ():
        seconds = as_number(start.get("time"))
        known = seconds is not None and 0 <= seconds < _YEAR_9999
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if known else "at an unknown time"
        what = f"resumed after step {start['step']:,}" if start["step"] else "began"
        items.append((f"{when}: {what} on {start.get('host', 'an unknown host')}", False))
    skipped = (line for line in run.lines if line.get("skipped"))
    causes = grouped((str(line.get("cause") or "not finite"), line["step"]) for line in skipped)
    for cause, steps in list(causes.items())[:_NOTES]:
        named = some([f"{step:,}" for step in steps], _STEPS_NAMED)
        items.append((f"No update in {plural(len(steps), 'step')} {named}: {cause}", True))
    if len(causes) > _NOTES:
        items.append((f"{len(causes) - _NOTES:,} more causes of steps without an update are left out.", False))
    return items


def _configuration(run: RunRecord) -> dict[str, Any] | None:
    rows = [_code(path, *(each for each in values if each is not None)) for path, values in settings_of(run).items()]
    changed, others = ([row for row in rows if len(row) == length] for length in (3, 2))
    tables = {"changed": Table(["key", "value", "default"], changed), "others": Table(["key", "value"], others)}
    return {"summary": f"{counted(len(others), 'key')} at their defaults", **tables} if rows else None


def _differences(runs: Sequence[RunRecord]) -> list[Part]:
    settings = [settings_of(run) for run in runs]
    values = {path: [each.get(path, ("(none)",))[0] for each in settings] for each in settings for path in each}
    rows = [_code(path, *words) for path, words in values.items() if len({*words}) > 1]
    return [("", "table", Table(["key", *_run_labels(runs)], rows))] if rows else []


def _code(*words: str) -> list[Markup]:
    return [markup("<code>{}</code>", word) for word in words]
