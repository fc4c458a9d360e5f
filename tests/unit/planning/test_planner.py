"""Layouts, what they need and take, and their order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_zoo.small_models import small_model

from tests.unit.planning.test_machine import MACHINE, SMALL
from tests.unit.tools.browser import Browser, find_browser, looks_of
from zeromesh.errors import ConfigError
from zeromesh.offload import Purpose
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import load_tokenizer
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.models.build import build_model
from zeromesh.trainer.planning.auto import fixed_fields, subject_of
from zeromesh.trainer.planning.estimate import ACTIVATIONS, Estimator
from zeromesh.trainer.planning.layouts import FIELDS, Layout, with_layout
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.planner import GIB, Planner
from zeromesh.trainer.planning.report import plan_charts, plan_json, plan_lines, plan_picture
from zeromesh.trainer.planning.subject import Subject
from zeromesh.units.plan import ModelCuts, plan_model
from zeromesh.zero.memory_model import predict_memory

_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_KEYS = ("data.sequence_length=32", "batch.global_size=8", "precision.compute=float32")


def _config(**model: Any) -> TrainerConfig:
    return load_config(None, [f"model.config={ {**_MODEL, **model} }", *_KEYS])


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(_config())


def test_a_model_of_pictures_is_cut_as_its_own_data_show() -> None:
    small = small_model("vit", ("image_classification",))
    inputs = UserInputs(model=small.build(), train_dataset=small.samples)
    config = load_config(None, ["model.head=image_classification", "precision.compute=float32"])
    subject = subject_of(config, inputs, device="cpu")
    assert subject.mesh_refusal(pipeline=2) == ""
    assert subject.blocks == 4
    subject.close()


def _small(memory: int) -> Machine:
    """The machine with so many bytes of memory, on which libraries take none."""
    return Machine.model_validate({**SMALL, "host": {**SMALL["host"], "memory_bytes": memory}, "disk": None})  # type: ignore[dict-item]


def test_states_are_those_of_the_formula(subject: Subject) -> None:
    estimate = Estimator(subject, MACHINE, 2).estimate(Layout(shard=2, stage=2, micro=1, accumulation=4))
    options = replace(subject.zero, stage=2, accumulation=4)
    model = build_model(_config().model, 0, load_tokenizer("bytes")).model
    plan = plan_model(model, options.precision.compute, GroupRules(options.optimizer).group_of)
    wanted = predict_memory(plan, options, parts=2, transport="shared")
    for purpose in (Purpose.MASTER, Purpose.MOMENTS, Purpose.GRADIENTS, Purpose.GRADIENT_BUCKETS):
        # Small blocks are units of their own here, whose buckets are filled up each.
        assert estimate.device.get(purpose.value, 0) == pytest.approx(wanted.terms.get(purpose, 0), rel=0.02)


def test_units_follow_each_other_as_in_the_whole_model(subject: Subject) -> None:
    """Units that are gathered ahead are there together: a head stands after the blocks, and not beside the embedding."""
    model = build_model(_config().model, 0, load_tokenizer("bytes")).model
    rules = GroupRules(subject.zero.optimizer).group_of
    whole = plan_model(model, subject.zero.precision.compute, rules, ModelCuts(chunks=2))
    assert [unit.module for unit in subject.units(1)] == [unit.module for unit in whole.units]


def test_a_plan_has_the_fastest_layout_first(subject: Subject) -> None:
    plan = Planner(subject, MACHINE).plan(2)
    places = [(float(f"{row.estimate.seconds:.3g}"), row.estimate.device_bytes) for row in plan.rows if row.fits]
    assert places[:40] == sorted(places)[:40]  # Schedules of later ones are not simulated.
    kinds = {(row.estimate.layout.shard, row.estimate.layout.tensor, row.estimate.layout.pipeline) for row in plan.rows}
    assert kinds == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert {row.estimate.layout.schedule for row in plan.rows} == {"1f1b", "zero_bubble", "interleaved"}
    assert all(row.estimate.layout.ranks == 2 for row in plan.rows)
    text = "\n".join(plan_lines(plan))
    assert "the keys of the first row: parallel.pipeline=" in text
    assert len(plan_json(plan)) == len(plan.rows)


def test_what_does_not_fit_says_what_it_lacks(subject: Subject) -> None:
    plan = Planner(subject, _small(2 << 20)).plan(2)
    assert plan.best is None
    assert all("of 1.0 MiB, most of it" in row.lacks for row in plan.rows)
    assert "nothing fits" in "\n".join(plan_lines(plan))


def test_more_microbatches_keep_less(subject: Subject) -> None:
    estimator = Estimator(subject, MACHINE, 2)
    one, many = (estimator.estimate(Layout(micro=micro, accumulation=8 // micro, stage=1)) for micro in (1, 8))
    kept = ACTIVATIONS
    assert 7 < many.device[kept] / one.device[kept] < 9
    recomputed = estimator.estimate(Layout(micro=8, stage=1, recompute="block"))
    assert recomputed.device[kept] < many.device[kept] / 2
    assert recomputed.seconds > many.seconds


def test_ranks_that_nothing_divides_are_one_error(subject: Subject) -> None:
    with pytest.raises(ConfigError, match="3 ranks do not fill hosts of 2"):
        Planner(subject, MACHINE).plan(3)
    with pytest.raises(ConfigError, match="no layout has 2 ranks with tensor 3"):
        Planner(subject, MACHINE, fixed={"tensor": 3}).plan(2)


def test_given_keys_stay_as_they_are(subject: Subject) -> None:
    config = load_config(None, ["parallel.pipeline=2", "zero.stage=1", *_KEYS])
    fixed = fixed_fields(config, ["parallel.pipeline=2", "zero.stage", "run.seed"])
    assert fixed == {"pipeline": 2, "stage": 1}
    plan = Planner(subject, MACHINE, fixed=fixed).plan(2)
    assert {(row.estimate.layout.pipeline, row.estimate.layout.stage) for row in plan.rows} == {(2, 1)}


def test_keys_of_a_layout_make_a_configuration() -> None:
    layout = Layout(pipeline=2, tensor=2, sequence=True, schedule="zero_bubble", stage=1, micro=2)
    config = load_config(None, ["parallel=auto", *_KEYS])
    assert config.parallel.auto == ("parallel",)
    settled = with_layout(config, layout, set(FIELDS))
    assert settled.parallel.auto == ()
    assert (settled.parallel.tensor, settled.parallel.schedule, settled.batch.micro_size) == (2, "zero_bubble", 2)


def test_auto_is_short_for_a_place_in_a_list() -> None:
    config = load_config(None, ["batch.micro_size=auto", "zero.stage=auto"])
    assert config.parallel.auto == ("batch.micro_size", "zero.stage")
    with pytest.raises(ConfigError, match=r"parallel\.auto"):
        load_config(None, ["parallel.auto=[run.seed]"])


# The picture: everything drawn is in the plan.


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
