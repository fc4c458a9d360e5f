"""The page: one file of HTML with everything inside, which asks for nothing over a network and runs no code but its own."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from importlib import resources

from zeromesh import __version__
from zeromesh.trainer.tools.html_report import sections
from zeromesh.trainer.tools.html_report.chart import Chart
from zeromesh.trainer.tools.html_report.curves import curves_of
from zeromesh.trainer.tools.html_report.draw import data, figure
from zeromesh.trainer.tools.html_report.markup import Html, data_block, element, join
from zeromesh.trainer.tools.html_report.runs import RunRecord
from zeromesh.trainer.tools.html_report.stacks import stacks_of


def page_of(runs: Sequence[RunRecord], *, now: float | None = None) -> str:
    """The page of one run, or of several beside each other. `now`: seconds since 1970, of the page's date."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    script, style = _own("page.js"), _own("page.css")
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    body = join(
        element("header", element("h1", title), element("p", f"zeromesh {__version__}, {date}")),
        element("main", *_main(runs)),
        element("footer", element("p", ", ".join(str(run.path) for run in runs))),
    )
    head = join(
        element("meta", charset="utf-8"),
        # Whatever a run's files hold, the browser runs this one script and loads nothing.
        element("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", f"{title} - zeromesh report"),
        Html(f"<style>{style}</style>"),
    )
    whole = element("html", element("head", head), element("body", body, Html(f"<script>{script}</script>")), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """All charts of one run, or of several: their curves on top of each other, their stacks beside each other."""
    found = curves_of(runs)
    for place, run in enumerate(runs):
        found += stacks_of(run, place if len(runs) > 1 else None)
    return found


def _main(runs: Sequence[RunRecord]) -> list[Html]:
    charts = charts_of(runs)
    steps = [line["step"] for run in runs for line in run.lines]
    low, high = (min(steps), max(steps)) if steps else (0, 1)
    domain = (float(low), float(high)) if high > low else (low - 0.5, low + 0.5)
    drawn = [figure(chart, domain) for chart in charts]
    found = [_section("", "figures", sections.summary(runs))]
    if len(runs) > 1:
        found.append(_section("What differs", "differences", sections.differences(runs)))
    found.append(_section("Notes", "notes", _each(runs, sections.notes)))
    found.append(_section("Over the steps", "pictures", element("div", *drawn, class_="charts") if drawn else None))
    found.append(_section("Mesh", "mesh", _each(runs, sections.mesh)))
    found.append(_section("Communication of a step", "communication", _each(runs, sections.communication)))
    found.append(_section("Checkpoints", "checkpoints", _each(runs, sections.checkpoints)))
    found.append(_section("Configuration", "configuration", _each(runs, sections.configuration)))
    return [each for each in found if each is not None] + [
        data_block("data", [data(chart, domain) for chart in charts])
    ]


def _section(title: str, name: str, content: Html | None) -> Html | None:
    if content is None:
        return None
    return element("section", element("h2", title) if title else None, content, class_=name)


def _each(runs: Sequence[RunRecord], make: Callable[[RunRecord], Html | None]) -> Html | None:
    """What `make` has to say of each run, under the runs' names where there are several; None where it is nothing."""
    made = [(run, content) for run in runs if (content := make(run)) is not None]
    if not made:
        return None
    return join(*[content if len(runs) == 1 else join(element("h3", run.name), content) for run, content in made])


def _own(name: str) -> str:
    """A file of this package, which goes into the page as it is."""
    return resources.files("zeromesh.trainer.tools.html_report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
