"""`Trainer.verify`: right layouts pass, wrong ones are found and located; and machines that are measured."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import PoolOptions, Workers

CONFIGS = sorted({path.name for path in (Path(__file__).parents[3] / "configs").iterdir()} - {"dpo.yaml"})
"""The examples but the one that is handed to TRL."""
DIVIDED = {"tensor": 2}
STAGED = {"pipeline": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"parallel": {"tensor": 2, "pipeline": 2, "sequence": False}, "zero": {"stage": 1}},
    "qwen3": {"parallel": DIVIDED, "zero": {"stage": 3}},
    "gemma": {"parallel": DIVIDED, "zero": {"stage": 2}},
    "mistral": {"parallel": STAGED, "zero": {"stage": 1}},
    "phi": {"parallel": DIVIDED, "zero": {"stage": 1}},
    "gpt2": {"parallel": {"tensor": 2, "pipeline": 2, "schedule": "zero_bubble"}, "zero": {"stage": 1}},
    "gpt-neox": {"parallel": STAGED, "zero": {"stage": 2}},
    "opt": {"parallel": {"replicate": 2}, "zero": {"stage": 3}},
    "mixtral": {"parallel": {"replicate": 2}, "zero": {"stage": 2}},
    "bert": {"parallel": DIVIDED, "zero": {"stage": 3}},
    "modernbert": {"zero": {"stage": 3}},
    "t5": {"zero": {"stage": 3}},
    "vit": {"zero": {"stage": 2}},
    "whisper": {"zero": {"stage": 3}},
    "mamba": {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host"}},
}


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("ranks", "case", "arguments"),
    [
        (2, "right", {}),
        (2, "wrong", {"fault": "a module", "kind": "output", "name": "model.layers.1.mlp"}),
        (2, "wrong", {"fault": "a scale", "kind": "gradient", "name": ""}),
        pytest.param(2, "wrong", {"fault": "an error", "kind": "error", "name": ""}, marks=FULL),
        (2, "refused", {}),
        *(
            pytest.param(4, "architecture", {"name": name, **layout}, id=name, marks=FULL)
            for name, layout in LAYOUTS.items()
        ),
        *(pytest.param(4, "example", {"name": name}, id=name, marks=FULL) for name in CONFIGS),
    ],
)
def test_right_layouts_pass_and_wrong_ones_are_located(
    workers: Workers, tmp_path: Path, ranks: int, case: str, arguments: dict[str, Any]
) -> None:
    workers.run(ranks, f"verification_cases:{case}", folder=str(tmp_path), **arguments)


@FULL
@pytest.mark.parametrize("hosts", [0, 2])
def test_a_machine_is_measured_by_all_ranks_alike(workers: Workers, tmp_path: Path, hosts: int) -> None:
    with workers.fresh(PoolOptions(size=3, hosts=hosts)) as pool:
        pool.run("profiling_cases:measured", folder=str(tmp_path), hosts=hosts)
