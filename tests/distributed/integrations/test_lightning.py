"""`zeromesh.lightning.ZeromeshStrategy`: runs of Lightning are what they were, and what cannot be right is refused."""

from pathlib import Path

import pytest
from workers import Workers

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
    ],
)
def test_what_cannot_be_right_is_refused(workers: Workers, arguments: dict[str, str], said: str) -> None:
    assert said in workers.run(1, "lightning_cases:refused", **arguments)[0]
