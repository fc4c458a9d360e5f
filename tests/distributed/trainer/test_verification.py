"""`Trainer.verify`: right layouts pass, wrong ones are found and located; and machines that are measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import PoolOptions, Workers

CASES = "verification_cases"
CONFIGS = sorted(path.name for path in (Path(__file__).parents[3] / "configs").iterdir())
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


def test_a_right_layout_passes(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, f"{CASES}:small_llama", folder=str(tmp_path), fault="", checks=["resume"])[0]
    assert found["passed"], found
    assert found["outputs"] > 100
    assert found["gradients"] == 21
    certificate = json.loads((tmp_path / "run/certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["layout"]["layout"] == "2 ranks: shard 2"
    assert set(certificate["digests"]) == {"config", "weights", "data"}


@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        pytest.param("output", "output", "model.layers.1.mlp", id="a module"),
        pytest.param("scale", "gradient", "", id="a scale"),
        pytest.param("error", "error", "", id="an error", marks=pytest.mark.full),
    ],
)
def test_what_is_wrong_is_found_and_named(workers: Workers, tmp_path: Path, fault: str, kind: str, name: str) -> None:
    found = workers.run(2, f"{CASES}:small_llama", folder=str(tmp_path), fault=fault, checks=[])[0]
    assert not found["passed"]
    first = found["found"][0]
    assert (first[0], first[2]) == (kind, 1)
    if kind == "error":
        assert found["located"].startswith("the run ends in step 1, and rank 0 says: ")
        assert "shapes do not fit" in found["located"]
    if name:
        assert first[1] == name
        assert first[3] == [1]
        assert "model.layers.1.mlp in step 1, microbatch 1 on rank 1" in found["located"]


def test_a_large_model_of_ones_own_is_refused(workers: Workers, tmp_path: Path) -> None:
    said = workers.run(2, f"{CASES}:refused", folder=str(tmp_path))[0]
    assert "Sequential has 2,266,510 parameters" in said


@pytest.mark.full
@pytest.mark.parametrize("hosts", [0, 2])
def test_a_machine_is_measured_by_all_ranks_alike(workers: Workers, tmp_path: Path, hosts: int) -> None:
    with workers.fresh(PoolOptions(size=3, hosts=hosts)) as pool:
        pool.run("profiling_cases:measured", folder=str(tmp_path), hosts=hosts)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_architectures_pass_on_four_ranks(workers: Workers, tmp_path: Path, name: str) -> None:
    found = workers.run(4, f"{CASES}:architecture", folder=str(tmp_path), name=name, **LAYOUTS[name])[0]
    assert found["passed"], found


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_every_example_passes_on_four_ranks(
    workers: Workers, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = workers.run(4, f"{CASES}:example", folder=str(tmp_path), name=name, overrides=[])[0]
    assert found["passed"], found
    assert found["seconds"] < 120
