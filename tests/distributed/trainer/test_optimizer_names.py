"""Optimizers by the name in a configuration: each equals its class in plain PyTorch, or is refused before anything begins."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.trainer.optimizer_cases import MODES
from tests.support.tables import tried
from tests.support.workers import Workers

FULL = pytest.mark.full
CASES = "optimizer_cases"
NARROW = {"within": 1e-6, "timeout": 240.0}
"""Torchao's kernels compute in float32, and are slow to import."""
WITHOUT = {
    each: pytest.mark.skipif(find_spec(each) is None, reason=f"needs {each}")
    for each in ("torchao", "galore_torch", "apollo_torch", "optimi", "schedulefree")
}

test_a_named_optimizer_is_its_class = pytest.mark.sampled(4)(
    tried(
        CASES,
        [
            pytest.param(1, "named", {"name": "nadam", "stage": 3}, marks=FULL),
            (1, "named", {"name": MODES.replace("TwoModes", "any_arguments"), "stage": 1}),
            (2, "named", {"name": "rmsprop", "stage": 2}),
            (2, "named", {"name": "torch.optim:Adamax", "stage": 3}),
            (2, "named", {"name": "nadam", "stage": 2, "stages": 2}),
            pytest.param(2, "named", {"name": "radam", "stage": 1}, marks=FULL),
            pytest.param(1, "named", {"name": "adadelta", "stage": 3}, marks=FULL),
            pytest.param(2, "named", {"name": "lion", "stage": 3}, marks=FULL),
            (2, "named", {"name": "adamw", "stage": 3}),
            (2, "named", {"name": "adamw_torch", "stage": 2}),
            pytest.param(2, "named", {"name": "adafactor", "stage": 3, "whole": True}, marks=FULL),
            (2, "named", {"name": "muon", "stage": 3, "whole": True}),
            (2, "named", {"name": "lamb", "stage": 2, "whole": True}),
            (2, "named", {"name": "lion_32bit", "stage": 3, "tier": "file"}),
            (2, "named", {"name": "adamw_8bit", "stage": 3, "tier": "host", "whole": True}),
            (1, "named", {"name": "ademamix_8bit", "stage": 2, "whole": True}),
            (2, "named", {"name": MODES, "stage": 3}),
            (1, "named", {"name": MODES, "stage": 2, "tier": "file"}),
            pytest.param(2, "named", {"name": "adamw_torch_8bit", "stage": 3, **NARROW}, marks=WITHOUT["torchao"]),
            pytest.param(1, "named", {"name": "adamw_torch_4bit", "stage": 2, **NARROW}, marks=WITHOUT["torchao"]),
            pytest.param(2, "named", {"name": "adamw_torch_fp8", "stage": 3, **NARROW}, marks=WITHOUT["torchao"]),
            pytest.param(2, "named", {"name": "galore_adamw", "stage": 3}, marks=WITHOUT["galore_torch"]),
            pytest.param(2, "named", {"name": "apollo_adamw", "stage": 3}, marks=WITHOUT["apollo_torch"]),
            pytest.param(2, "named", {"name": "stable_adamw", "stage": 3}, marks=WITHOUT["optimi"]),
            pytest.param(2, "named", {"name": "schedule_free_adamw", "stage": 3}, marks=WITHOUT["schedulefree"]),
            pytest.param(1, "named", {"name": "schedule_free_sgd", "stage": 2}, marks=WITHOUT["schedulefree"]),
        ],
    )
)


@pytest.mark.parametrize(
    ("name", "sections", "said"),
    [
        ("muon", {"parallel": {"tensor": 2}}, "needs whole tensors, and tensor parallelism divides"),
        (MODES, {"ema": {"decay": 0.5}}, "ema.decay averages weights, and so does the optimizer itself"),
        ("torch.optim:LBFGS", {"optimizer": {}}, "takes no weight_decay"),
        ("torch.optim:Nothing", {}, "torch.optim .* has no Nothing"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    workers: Workers, tmp_path: Path, name: str, sections: dict[str, dict[str, object]], said: str
) -> None:
    given = {key: each for key, each in sections.items() if each}
    found = workers.run(2, f"{CASES}:refused", folder=str(tmp_path), name=name, **given)
    for each in found:
        assert re.search(said, each)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        pytest.param({"states": "bfloat16"}, {}, marks=FULL),
        ({"states": "int8"}, {}),
        pytest.param({"name": "lion", "states": "int8"}, {}, marks=FULL),
        pytest.param({"name": "rmsprop", "states": "bfloat16"}, {}, marks=FULL),
        ({"states": "bfloat16"}, {"master": "none"}),
        pytest.param({}, {"master": "kahan"}, marks=FULL),
    ],
)
def test_narrow_states_have_the_same_bits_on_any_number_of_ranks(
    workers: Workers, tmp_path: Path, optimizer: dict[str, str], precision: dict[str, str]
) -> None:
    """Also of those that stop a run and that resume it, and on another tier."""

    def trained(first: int, second: int, tier: str = "none", **given: object) -> set[str]:
        folder = str(tmp_path / f"{first}{second}{tier}{len(given)}")
        common = {"folder": folder, "tier": tier, **given}
        workers.run(first, f"{CASES}:narrow", stop=True, **common)
        return set(workers.run(second, f"{CASES}:narrow", stop=False, **common))

    given = {"precision": precision, **optimizer}
    found = trained(1, 2, **given) | trained(2, 1, "file", **given)
    assert len(found) == 1
    assert found != trained(1, 1, precision={})


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ("kahan", "float32", "has master_compensation, which would be lost"),
        pytest.param("kahan", "none", "has master_compensation, which would be lost", marks=FULL),
        pytest.param("none", "kahan", "has no master_compensation in it", marks=FULL),
    ],
)
def test_compensations_are_neither_lost_nor_made_up(workers: Workers, tmp_path: Path, then: str, now: str, said: str) -> None:
    for each in workers.run(2, f"{CASES}:other_masters", folder=str(tmp_path), then=then, now=now):
        assert said in each
