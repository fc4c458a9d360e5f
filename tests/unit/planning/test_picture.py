"""The picture of a plan: memory over a step is as high as the plan says, and everything drawn is in the plan."""

from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser, looks_of
from test_machine import MACHINE

from zeromesh.offload import Purpose
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.planning.estimate import ACTIVATIONS, GATHERED, Estimator
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.picture import plan_charts, plan_picture
from zeromesh.trainer.planning.planner import GIB, Planner
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
    return Subject.of(load_config(None, [f"model.config={_MODEL}", *_KEYS]))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro=8),
        Layout(micro=2, accumulation=4, stage=1),
        Layout(shard=2, stage=3, micro=4),
        Layout(pipeline=2, micro=1, accumulation=8),
        Layout(pipeline=2, micro=1, accumulation=8, schedule="zero_bubble"),
        Layout(pipeline=2, micro=1, accumulation=8, schedule="interleaved", chunks=3, recompute="block"),
    ],
    ids=str,
)
def test_memory_over_a_step_is_as_high_as_the_plan_says(subject: Subject, layout: Layout) -> None:
    estimator = Estimator(subject, MACHINE, 2)
    estimate, moments = estimator.estimate(layout), list(estimator.over_step(layout))
    sums = [sum(each.device.values()) for each in moments]
    times = [each.seconds for each in moments]
    # The plan has room for gradient shards that come in backward beside activations that are highest in forward.
    passing = 0 if layout.accumulation > 1 else estimate.device[Purpose.GRADIENTS.value]
    assert estimate.device_bytes - passing <= max(sums) <= estimate.device_bytes
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == pytest.approx(estimate.seconds)
    activations = [each.device[ACTIVATIONS] for each in moments]
    assert activations[0] == activations[-1] == 0
    assert max(activations) == estimate.device[ACTIVATIONS]
    if layout.stage == 3 and layout.shard > 1:
        assert moments[-1].device.get(GATHERED, 0) == 0
    assert len(moments) == 3 * layout.accumulation * layout.chunks * (3 if layout.schedule == "zero_bubble" else 2) + 4


def test_everything_drawn_is_in_the_plan(subject: Subject) -> None:
    plan = Planner(subject, MACHINE, fixed={"micro": 1}).plan(2)
    best = plan.rows[0].estimate
    moments = list(Estimator(subject, MACHINE, 2).over_step(best.layout))
    over, memory, times = (chart.figure for chart in plan_charts(plan, moments, shown=2))
    areas: list[Any] = [each for each in over.data if each.type == "scatter"]
    colors = {each.name.partition("  up to")[0]: each.fillcolor for each in areas}
    assert set(colors) <= set(best.device)
    unit = {" KiB": 2**10, " MiB": 2**20, " GiB": 2**30}[over.layout.yaxis.ticksuffix]
    heights = [unit * sum(column) for column in zip(*(each.y for each in areas), strict=True)]
    assert max(heights) == pytest.approx(best.device_bytes, rel=1e-5)  # It accumulates.
    # Areas are stacked by equal x, each later than the one before.
    (xs,) = {tuple(each.x) for each in areas}
    assert list(xs) == sorted(set(xs))
    bars, seconds = ({each.name: each.x[0] for each in figure.data} for figure in (memory, times))
    assert sum(bars.values()) == pytest.approx(best.device_bytes / GIB)
    assert sum(seconds.values()) == pytest.approx(best.seconds)
    # No color without a name beside it: each chart has a legend of its own.
    assert all(each.showlegend is not False for figure in (over, memory, times) for each in figure.data)
    assert colors.items() <= {each.name: each.marker.color for each in memory.data}.items()


def test_the_layouts_stand_in_a_table(subject: Subject) -> None:
    """Whole, however narrow the screen is, and the page loads nothing."""
    plan = Planner(subject, MACHINE, fixed={"micro": 1}).plan(2)
    moments = list(Estimator(subject, MACHINE, 2).over_step(plan.rows[0].estimate.layout))
    page = plan_picture(plan, moments, shown=3)
    for row in plan.rows[:3]:
        assert f"<td>{row.estimate.layout}</td>" in page
    assert "default-src &#x27;none&#x27;" in page


@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine")
def test_it_fits_a_phone_and_a_wide_screen(subject: Subject, tmp_path: Path) -> None:
    plan = Planner(subject, MACHINE, fixed={}).plan(4)
    page = tmp_path / "plan.html"
    moments = list(Estimator(subject, MACHINE, 4).over_step(plan.rows[0].estimate.layout))
    page.write_text(plan_picture(plan, moments), encoding="utf-8")
    with Browser(str(find_browser()), tmp_path / "browser") as browser:
        assert looks_of(browser, page) == []
