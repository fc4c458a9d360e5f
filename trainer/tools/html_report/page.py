"""The page: one self-contained file of HTML, which loads nothing and runs no scripts but its own."""

import base64
import hashlib
import html
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from math import inf
from statistics import median

from zeromesh import __version__
from zeromesh.errors import counted, plural
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds
from zeromesh.trainer.monitoring.step_metrics import sentence
from zeromesh.trainer.tools.html_report.charts import COLORS, Chart, charts_of, get_plotlyjs, to_json_plotly
from zeromesh.trainer.tools.html_report.runs import RunRecord, as_number, settings_of

_STEPS_NAMED, _NOTES, _RANKS_DRAWN, _YEAR_9999 = 20, 100, 1024, 253370764800


class Html(str):
    """Markup. Other text is escaped when it becomes a child of an element."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """`<name attributes>children</name>`. Children are `Html`, other values (as escaped text), lists of these, or None.

    `class_` is the attribute `class`, `_` stands for `-`. An attribute that is None or False is left out, True has no value.
    """
    words = ""
    for key, value in attributes.items():
        if value not in (None, False):
            words += f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
    return Html(f"<{name}{words}>{_escaped(children)}" + ("" if name in ("meta", "link") else f"</{name}>"))


def _escaped(content: object) -> str:
    if isinstance(content, Html):
        return content
    if isinstance(content, list | tuple):
        return "".join(map(_escaped, content))
    # Control characters, and characters outside UTF-8, are replaced.
    text = "" if content is None else str(content)
    return html.escape("".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text))


def page_of(runs: Sequence[RunRecord]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    charts = charts_of(runs)
    sections = {
        "": _summary(runs),
        "What differs": _differences(runs),
        "Notes": _for_each_run(runs, _notes),
        "Over the steps": charts,
        "Plan": _for_each_run(runs, lambda run: run.planned and table_of(*run.planned, numbers=(1, 2, 3))),
        "Mesh": _for_each_run(runs, _mesh),
        "Communication of a step": _for_each_run(runs, _communication),
        "Checkpoints": _for_each_run(runs, _checkpoints),
        "Configuration": _for_each_run(runs, _configuration),
    }
    return document(title, sections, charts, ", ".join(str(run.path) for run in runs))


def document(title: str, sections: Mapping[str, object], charts: Sequence[Chart], footer: str) -> str:
    """Return a page of sections by heading, each an element or the page's `charts`."""
    cards, figures = [], []
    for chart in charts:
        button = element("button", "log", type="button", title="logarithmic or linear scale") if chart.log else None
        label = f"{chart.title}: {chart.note}"
        plot = element("div", id=f"plot-{chart.name}", class_="plot", role="img", aria_label=label)
        card = element("h3", chart.title, button), element("p", chart.note), plot
        cards.append(element("figure", card, id=f"chart-{chart.name}"))
        figures.append({**chart.figure.to_dict(), "id": f"plot-{chart.name}", "over_steps": chart.over_steps})
    drawn = element("div", cards, class_="charts")
    parts = {name: drawn if part is charts else part for name, part in sections.items() if part}
    scripts = get_plotlyjs(), _file("page.js")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{each}'" for each in hashes)
    # The policy allows these scripts alone and no loading, whatever a run's files hold.
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", f"{title} - zeromesh"),
        element("style", Html(_file("page.css"))),
    ]
    body = [
        element("header", element("h1", title), element("p", f"zeromesh {__version__}, {date}")),
        [element("section", element("h2", name) if name else None, part) for name, part in parts.items()],
        element("footer", element("p", footer)),
        element("script", Html(to_json_plotly(figures)), type="application/json", id="charts"),
        [element("script", Html(script)) for script in scripts],
    ]
    return f"<!DOCTYPE html>\n{element('html', element('head', head), element('body', body), lang='en')}\n"


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _for_each_run(runs: Sequence[RunRecord], make: Callable[[RunRecord], Html | None]) -> list[Html]:
    """Return the results of `make` for all runs, with the run's name above each if there are several runs."""
    parts = [(run, content) for run in runs if (content := make(run)) is not None]
    return [each for run, content in parts for each in ([element("h3", run.name)] * (len(runs) > 1) + [content])]


def table_of(columns: Sequence[object], rows: Sequence[Sequence[object]], numbers: Sequence[int] = ()) -> Html | None:
    """Return a table that scrolls horizontally on a narrow screen; None without rows. `numbers` are right-aligned columns."""

    def row(kind: str, cells: Sequence[object]) -> Html:
        return element("tr", [element(kind, cell, class_=at in numbers and "number") for at, cell in enumerate(cells)])

    body = element("tbody", [row("td", cells) for cells in rows])
    table = element("table", element("thead", row("th", columns)), body)
    return element("div", table, class_="scroll") if rows else None


def _run_labels(runs: Sequence[RunRecord]) -> list[Html]:
    colors = [element("i", style=f"background:{COLORS[place % len(COLORS)]}") for place in range(len(runs))]
    return [element("span", color, run.name, class_="run") for color, run in zip(colors, runs, strict=True)]


def _summary(runs: Sequence[RunRecord]) -> list[Html | None]:
    figures = [_summary_of(run) for run in runs]
    names = list(dict.fromkeys(name for each in figures for name in each))
    if len(runs) > 1:
        return [table_of(["", *_run_labels(runs)], [[name, *(each.get(name) for each in figures)] for name in names])]
    long = [name for name in names if name in ("start", "hardware", "versions")]
    cards = [element("div", element("dt", name), element("dd", figures[0][name])) for name in names if name not in long]
    return [element("dl", cards, class_="cards"), *(element("p", f"{name}: {figures[0][name]}") for name in long)]


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
    parameters, parts = as_number(facts.get("parameters")), {}
    for keys, values in run.columns.items():
        if keys[0] == "start":
            parts[keys[-1]] = list(values.values())[-1]
    begins = [begin for start in run.starts if (begin := as_number(start.get("time"))) is not None]
    times = [*run.column("time").values(), *begins]
    seconds = sum(
        max((at for at in times if begin <= at < end), default=begin) - begin for begin, end in pairwise([*begins, inf])
    )
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


def _mesh(run: RunRecord) -> Html | None:
    """Return boxes of all ranks by mesh axis, with their last activity."""
    shape = run.shape
    if shape is None:
        return None
    states = {row["rank"]: row for row in run.ranks}
    axes = [axis for axis in AXES if getattr(shape, axis) > 1]
    sizes = " x ".join(f"{axis} {getattr(shape, axis)}" for axis in AXES)
    text = f"{sizes}: {counted(shape.world_size, 'rank')}"
    text += f", beside each other along {axes[-1]}" if axes else ""
    failed = [
        element("p", f"rank {rank} failed in step {row.get('step')}: {row['failure']}", class_="bad")
        for rank, row in states.items()
        if row.get("failure")
    ]

    def boxes(axes: Sequence[str], at: Mapping[str, int]) -> Html:
        if not axes:
            rank = shape.rank(at)
            state = states.get(rank, {})
            doing = f"rank {rank}: step {state.get('step')}, {state.get('failure') or state.get('doing')}"
            kind = "rank failed" if state.get("failure") else "rank"
            return element("div", rank, class_=kind, title=doing if state else None)
        inner = [boxes(axes[1:], {**at, axes[0]: index}) for index in range(getattr(shape, axes[0]))]
        if len(axes) > 1:
            labels = [element("span", f"{axes[0]} {index}") for index in range(len(inner))]
            inner = [element("div", pair, class_="group") for pair in zip(labels, inner, strict=True)]
        return element("div", inner, class_="groups")

    drawn = boxes(axes, {}) if shape.world_size <= _RANKS_DRAWN else None
    return element("div", element("p", text), failed, drawn, class_="mesh")


def _communication(run: RunRecord) -> Html | None:
    columns = {keys[1:]: run.column(*keys) for keys in run.columns if len(keys) == 4 and keys[0] == "communication"}
    steps = len({step for values in columns.values() for step in values})
    means = {keys: sum(values.values()) / max(1, steps) for keys, values in columns.items()}
    pairs = sorted({keys[:2] for keys in means}, key=lambda pair: -means.get((*pair, "seconds"), 0.0))
    most = max((means.get((*pair, "seconds"), 0.0) for pair in pairs), default=0.0) or 1.0
    rows = []
    for pair in pairs:
        calls, nbytes, seconds = (means.get((*pair, name), 0.0) for name in ("calls", "bytes", "seconds"))
        bar = element("meter", value=f"{seconds / most:.3f}")
        rows.append([*pair, f"{calls:,.1f}", human_bytes(nbytes), human_seconds(seconds), bar])
    return table_of(["axis", "collective", "calls", "bytes", "time", ""], rows, numbers=(2, 3, 4))


def _checkpoints(run: RunRecord) -> Html | None:
    if not run.checkpoints:
        return None
    from zeromesh.trainer.tools.checkpoint.reading import COLUMNS, summary_row  # This import loads torch.

    rows = []
    for each in run.checkpoints:
        *texts, state = summary_row(each)
        rows.append([*texts, element("span", state, class_="good" if each["whole"] else "bad")])
    return table_of(COLUMNS, rows, numbers=(0, 2, 3, 4, 5))


def _notes(run: RunRecord) -> Html | None:
    items = [element("li", remark, class_="bad") for remark in run.remarks]
    for start in run.starts[-_NOTES:] if len(run.starts) > 1 or any(start["step"] for start in run.starts) else ():
        seconds = as_number(start.get("time"))
        known = seconds is not None and 0 <= seconds < _YEAR_9999
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if known else "at an unknown time"
        what = f"resumed after step {start['step']:,}" if start["step"] else "began"
        items.append(element("li", f"{when}: {what} on {start.get('host', 'an unknown host')}"))
    causes: dict[str, list[int]] = {}
    for line in run.lines:
        if line.get("skipped"):
            causes.setdefault(str(line.get("cause") or "not finite"), []).append(line["step"])
    for cause, steps in list(causes.items())[:_NOTES]:
        some = ", ".join(f"{step:,}" for step in steps[:_STEPS_NAMED])
        more = f" and {len(steps) - _STEPS_NAMED:,} more" if len(steps) > _STEPS_NAMED else ""
        items.append(element("li", f"No update in {plural(len(steps), 'step')} {some}{more}: {cause}", class_="bad"))
    if len(causes) > _NOTES:
        items.append(element("li", f"{len(causes) - _NOTES:,} more causes of steps without an update are left out."))
    return element("ul", items, class_="notes") if items else None


def _configuration(run: RunRecord) -> Html | None:
    settings = settings_of(run).items()
    rows = [[element("code", each) for each in (path, *values) if each is not None] for path, values in settings]
    changed, others = ([row for row in rows if len(row) == length] for length in (3, 2))
    summary = element("summary", f"{counted(len(others), 'key')} at their defaults")
    more = element("details", summary, table_of(["key", "value"], others))
    return element("div", table_of(["key", "value", "default"], changed), more, class_="config") if settings else None


def _differences(runs: Sequence[RunRecord]) -> Html | None:
    settings = [settings_of(run) for run in runs]
    values = {path: [each.get(path, ("(none)",))[0] for each in settings] for each in settings for path in each}
    rows = [[element("code", each) for each in (path, *words)] for path, words in values.items() if len({*words}) > 1]
    return table_of(["key", *_run_labels(runs)], rows)
