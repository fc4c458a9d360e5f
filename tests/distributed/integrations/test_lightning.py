"""`zeromesh.lightning.ZeromeshStrategy`: runs of Lightning are what they were, and what cannot be right is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import Workers

pytest.importorskip("lightning")


@pytest.mark.parametrize(("ranks", "stage", "accumulation"), [(1, 3, 1), (2, 3, 2), (2, 1, 1)])
def test_a_run_is_that_of_lightning(
    workers: Workers, tmp_path: Path, ranks: int, stage: int, accumulation: int
) -> None:
    case = "lightning_cases:as_lightning"
    found = workers.run(ranks, case, folder=str(tmp_path), stage=stage, accumulation=accumulation)[0]
    assert found["losses"] <= 1e-9
    assert found["weights"] <= 1e-9
    assert found["value"] <= 1e-9
    steps = 16 // accumulation
    assert [each for each in found["kept"] if each[0] != "."] == [f"lightning-{steps}.ckpt", f"step-{steps:08d}"]
    assert found["trained"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"precision": "bf16-mixed"}, "precision is bf16-mixed"),
        ({"gradient_clip_algorithm": "value"}, "set it to norm"),
        ({"averaging": "WeightAveraging"}, "ema.decay"),
        ({"averaging": "StochasticWeightAveraging"}, "ema.decay"),
        ({"rename": True}, "has put first.weight into state_dict"),
    ],
)
def test_what_cannot_be_right_is_refused(
    workers: Workers, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    assert said in workers.run(1, "lightning_cases:refused", folder=str(tmp_path), **arguments)[0]


def test_a_hook_leaves_entries_out_and_rates_are_logged_once(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, "lightning_cases:in_part", folder=str(tmp_path)):
        assert {name for name, apart in found["apart"].items() if apart} == {"net.0.weight"}
        assert found["first"] == 0
        assert found["rates"] == ["lr-AdamW"]
