"""The picture of a plan: everything drawn is in the plan."""

from pathlib import Path

import pytest

from tests.unit.planning.test_machine import MACHINE
from tests.unit.tools.browser import Browser, find_browser, looks_of
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.planning.auto import subject_of
from zeromesh.trainer.planning.planner import GIB, Planner
from zeromesh.trainer.planning.report import plan_charts, plan_picture
from zeromesh.trainer.planning.subject import Subject

_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
_KEYS = ("data.sequence_length=32", "batch.global_size=8", "precision.compute=float32")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(load_config(None, [f"model.config={_MODEL}", *_KEYS]))


def test_everything_drawn_is_in_the_plan(subject: Subject) -> None:
    plan = Planner(subject, MACHINE, fixed={"micro": 1}).plan(2)
    best = plan.rows[0].estimate
    memory, times = (chart.figure for chart in plan_charts(plan, shown=2))
    bars, seconds = ({each.name: each.x[0] for each in figure.data} for figure in (memory, times))
    assert sum(bars.values()) == pytest.approx(best.device_bytes / GIB)
    assert sum(seconds.values()) == pytest.approx(best.seconds)
    # No color without a name beside it: each chart has a legend of its own.
    assert all(each.showlegend is not False for figure in (memory, times) for each in figure.data)


def test_the_layouts_stand_in_a_table(subject: Subject) -> None:
    """Whole, however narrow the screen is, and the page loads nothing."""
    plan = Planner(subject, MACHINE, fixed={"micro": 1}).plan(2)
    page = plan_picture(plan, shown=3)
    for row in plan.rows[:3]:
        assert f"<td>{row.estimate.layout}</td>" in page
    assert "default-src &#x27;none&#x27;" in page


@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine")
def test_it_fits_a_phone_and_a_wide_screen(subject: Subject, tmp_path: Path) -> None:
    plan = Planner(subject, MACHINE, fixed={}).plan(4)
    page = tmp_path / "plan.html"
    page.write_text(plan_picture(plan), encoding="utf-8")
    with Browser(str(find_browser()), tmp_path / "browser") as browser:
        assert looks_of(browser, page) == []
