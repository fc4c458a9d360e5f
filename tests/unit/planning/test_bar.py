"""Plans are no slower than layouts that people chose by hand, and hold what a run takes alone."""

import pytest
from plan_bar import BARS, tried

from zeromesh.environment import read_environment
from zeromesh.offload import TierChoice
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.planning import auto
from zeromesh.trainer.planning.auto import settle, subject_of
from zeromesh.trainer.planning.layouts import Layout, with_layout
from zeromesh.trainer.planning.machine import Machine, find_machine
from zeromesh.trainer.planning.planner import Plan, Planner
from zeromesh.trainer.planning.report import plan_lines
from zeromesh.trainer.planning.subject import Subject

_HOST = TierChoice(tier="host")
_MODEL = (
    "model.config={model_type: llama, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2}"
)
_KEYS = (_MODEL, "data.sequence_length=32", "batch.global_size=8")


def _subject(*keys: str) -> Subject:
    return subject_of(load_config(None, [*_KEYS, *keys]), device="cuda")


def _card(memory: float, *, disk: bool = True) -> Machine:
    """A card with so much of the memory that a layout needs, on which libraries take none."""
    card = find_machine("a10", devices=2)
    device = card.device.model_copy(update={"memory_bytes": int(memory)})
    library = card.library.model_copy(update={"device": 0})
    return card.model_copy(update={"device": device, "library": library, "disk": card.disk if disk else None})


# States on a file beside parameters on the host; the others take too long here.
@pytest.mark.parametrize(
    "bar", [BARS[8], pytest.param(BARS[9], marks=pytest.mark.full)], ids=["8B on 16GB", "8B on 16GB with adapters"]
)
def test_a_plan_is_no_slower_than_a_layout_by_hand(bar: object) -> None:
    result = tried(bar)  # type: ignore[arg-type]
    assert not result.lacks
    assert not result.beaten


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_and_parameters_leave_one_card_as_they_leave_many(ranks: int) -> None:
    subject = _subject()
    planner = Planner(subject, _card(1 << 40))
    layout = Layout(shard=ranks, stage=3, accumulation=8 // ranks, recompute="block", optimizer=_HOST, parameters=_HOST)
    needed = planner._estimator.estimate(layout).device_bytes
    plan = Planner(subject, _card(needed / 0.95 + 64)).plan(ranks)
    assert plan.best is not None
    assert plan.best.estimate.seconds <= planner._estimator.estimate(layout).seconds
    least = min(row.estimate.device_bytes for row in plan.rows if row.fits)
    assert plan.least.estimate.device_bytes == least
    assert any(f"{row.estimate.layout}" in "\n".join(plan_lines(plan)) for row in [plan.least])


def _axes(plan: Plan) -> set[int]:
    return {row.estimate.layout.tensor * row.estimate.layout.pipeline for row in plan.rows}


def test_a_plan_holds_what_a_run_takes_alone() -> None:
    """Adapters are on data axes alone, and keys that a configuration joins to others leave layouts out."""
    plan = Planner(_subject("model.lora={rank: 2}"), _card(1 << 34)).plan(2)
    assert _axes(plan) == {1}
    assert "a model with adapters is shared out over data axes alone" in "\n".join(plan_lines(plan))
    compiled = Planner(_subject("model.compile=true"), _card(1 << 18)).plan(1)
    assert all(row.estimate.layout.activations.tier == "none" for row in compiled.rows)
    inside = ("optimizer.in_backward=true", "run.clip_norm=0", "run.on_nonfinite=stop")
    plan = Planner(_subject(*inside), _card(1 << 34)).plan(2)
    assert "zero_bubble" not in {row.estimate.layout.schedule for row in plan.rows}
    float8 = Planner(_subject("precision.linear=float8"), _card(1 << 34)).plan(2)
    assert {row.estimate.layout.tensor for row in float8.rows} == {1}


def test_what_is_left_out_for_want_of_a_disk_is_said() -> None:
    plan = Planner(_subject(), _card(1 << 34, disk=False)).plan(1)
    assert "states on files: not possible: the machine has no disk; add disk with read" in "\n".join(plan_lines(plan))
    assert "no disk" not in "\n".join(plan_lines(Planner(_subject(), _card(1 << 34)).plan(1)))


def test_rows_that_a_plan_cannot_tell_apart_are_one() -> None:
    lines = plan_lines(Planner(_subject(), find_machine("h100")).plan(2))
    steps = [line.split(" ms")[0].split()[-1] for line in lines[3:] if " ms" in line]
    assert len(set(steps)) >= len(steps) - 1  # The row with the least memory may have the time of another.
    assert "0.9" not in "\n".join(line for line in lines if "times as fast" in line)


def test_the_keys_of_a_layout_are_a_configuration_with_its_tiers() -> None:
    layout = Layout(stage=3, optimizer=_HOST, parameters=TierChoice(tier="host", fraction=0.5))
    settled = with_layout(load_config(None, list(_KEYS)), layout)
    assert settled.offload.parameters.fraction == 0.5
    assert load_config(None, [*_KEYS, "zero.stage=3", "offload.optimizer=host"]).offload.optimizer == (
        settled.offload.optimizer
    )


def test_auto_takes_keys_that_are_not_given_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [*_KEYS, "parallel=auto", "batch.micro_size=8"])
    layout = Layout(stage=1, micro=8, recompute="block")
    needed = Planner(_subject(), _card(1 << 40))._estimator.estimate(layout).device_bytes
    monkeypatch.setattr(auto, "machine_here", lambda *_: _card(needed / 0.95 + 64))
    settled, _ = settle(config, UserInputs(), read_environment())
    assert settled.batch.micro_size == 8
    assert settled.model.activation_checkpointing != "none"
