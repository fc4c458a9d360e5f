"""Learning rates equal those of transformers' schedulers, step by step, and wrong options are refused."""

import math
import warnings
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.schedule import SCHEDULES, LRSchedule, ScheduleSection

BASE_LR = 0.3
STEPS = 60

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("linear", {}, {}),
    ("cosine", {}, {}),
    ("cosine", {"num_cycles": 1.25}, {"num_cycles": 1.25}),
    ("cosine_with_restarts", {}, {}),
    ("cosine_with_restarts", {"num_cycles": 3}, {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_ratio": 0.1}, {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_ratio": 0.1}, {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_ratio": 0.1, "start_ratio": 0.2}, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
    ("inverse_sqrt", {"timescale": 30}, {"timescale": 30}),
    ("constant_with_warmup", {}, {}),
    ("inverse_sqrt", {}, {}),
    ("polynomial", {"min_ratio": 0.0}, {"lr_end": 0.0}),
    ("polynomial", {"min_ratio": 0.1, "power": 2.0}, {"lr_end": 0.03, "power": 2.0}),
    ("warmup_stable_decay", {"decay_steps": 15}, {"num_decay_steps": 15}),
    *(
        (
            "warmup_stable_decay",
            {"decay_steps": 10, f"{part}_shape": shape, "min_ratio": 0.05},
            {"num_decay_steps": 10, f"{part}_type": shape, "min_lr_ratio": 0.05},
        )
        for part in ("decay", "warmup")
        for shape in ("linear", "cosine", "1-sqrt")
    ),
]


def reference(name: str, warmup: int, total: int, options: dict[str, Any]) -> list[float]:
    """The learning rates that a run with transformers' scheduler would have, past its end too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: the scheduler steps and the optimizer does not
        scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=options)
        rates = []
        for _ in range(total + 10):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("name", "own", "theirs"), CASES)
def test_rates_equal_those_of_transformers(name: str, own: dict[str, Any], theirs: dict[str, Any], warmup: int) -> None:
    schedule = LRSchedule(name=name, warmup_steps=warmup, total_steps=STEPS, **own)
    rates = [BASE_LR * schedule.factor(step) for step in range(STEPS + 10)]
    expected = reference(name, warmup, STEPS, theirs)
    if name == "polynomial":  # transformers rounds in units of the learning rate, here of the factor
        assert rates == pytest.approx(expected, rel=1e-14, abs=1e-17)
    else:
        assert rates == expected


def test_constant_equals_transformers_and_refuses_a_warm_up() -> None:
    schedule = LRSchedule(name="constant", warmup_steps=0, total_steps=5)
    assert [BASE_LR * schedule.factor(step) for step in range(15)] == reference("constant", 0, 5, {})
    with pytest.raises(ConfigError, match="has no effect on constant"):
        LRSchedule(name="constant", warmup_steps=4, total_steps=5)


def test_wsd_is_a_name_of_warmup_stable_decay_and_decays_in_a_tenth() -> None:
    short = LRSchedule(name="wsd", warmup_steps=5, total_steps=100)
    long = LRSchedule(name="warmup_stable_decay", warmup_steps=5, total_steps=100, decay_steps=10)
    assert [short.factor(step) for step in range(120)] == [long.factor(step) for step in range(120)]
    assert short.factor(90) == 1.0
    assert short.factor(91) < 1.0
    assert short.factor(100) == 0.0
    assert LRSchedule(name="wsd", warmup_steps=5, total_steps=100, decay_steps=95).factor(5) == 1.0


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (5, 5), (20, 3), (1, 2)])
def test_factors_are_in_range_whatever_the_lengths(name: str, warmup: int, total: int) -> None:
    options = {"min_ratio": 0.1} if name.endswith("_with_min_lr") else {}
    for shape in (None, "linear", "log", "cosine", "1-sqrt"):
        schedule = LRSchedule(name=name, warmup_steps=warmup, total_steps=total, warmup_shape=shape, **options)
        assert all(0.0 <= schedule.factor(step) <= 1.0 for step in range(40))


@pytest.mark.parametrize("shape", ["linear", "log", "cosine", "1-sqrt"])
def test_a_warm_up_rises_from_its_start_in_its_shape(shape: str) -> None:
    schedule = LRSchedule(name="linear", warmup_steps=10, total_steps=20, warmup_shape=shape, start_ratio=0.25)
    factors = [schedule.factor(step) for step in range(11)]
    assert factors[0] == 0.25
    assert factors == sorted(factors)
    assert factors[10] == 1.0
    assert factors[9] <= 1.0
    if shape == "log":
        assert factors[4] == pytest.approx(0.25 + 0.75 * math.log(5) / math.log(10))
        assert LRSchedule(name="linear", warmup_steps=2, total_steps=4, warmup_shape=shape).factor(1) == 1.0


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 5), ({"warmup_ratio": 0.1}, 6), ({"warmup_steps": 3}, 3), ({"name": "constant"}, 0)]
)
def test_a_warm_up_of_55_steps_is_a_tenth_or_what_is_given(options: dict[str, Any], steps: int) -> None:
    assert ScheduleSection(**options).warmup_of(55) == steps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "cosine_with_min_lr"}, "min_ratio is missing"),
        ({"name": "cosine", "min_ratio": 0.1}, "min_ratio has no effect on cosine"),
        ({"name": "wsd", "decay_steps": 95}, "give 0 to 90"),
        ({"name": "wsd", "decay_shape": "linear", "num_cycles": 1.0}, "num_cycles has no effect"),
        ({"name": "linear", "timescale": 3}, "timescale has no effect on linear"),
        ({"name": "cosine_warmup_with_min_lr"}, "min_ratio is missing; cosine_warmup_with_min_lr"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LRSchedule(**({"warmup_steps": 10, "total_steps": 100} | options))


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LRSchedule(name="linear", warmup_steps=1, total_steps=2, power=2.0, timescale=3)
    assert len(caught.value.problems) == 2
