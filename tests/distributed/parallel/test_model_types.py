"""Types of transformers on two ranks, each beside plain PyTorch in float64. `scripts/zoo.py` trains all that there are."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from model_zoo.columns import ABSENT, COLUMNS, EQUAL, REFUSED, outcomes
from model_zoo.small_models import heads_of_types, small_model

from tests.support.devices import DEVICE
from tests.support.workers import Workers
from zeromesh.mesh.process_mesh import Mesh

QUICK = [
    ("llava", ["pipeline"]),  # a tower of pictures runs before the blocks of its decoder
    ("convnext", ["pipeline"]),  # blocks change the shape of what they pass on
    ("llama4_text", ["pipeline"]),  # its forward reads a root parameter's attribute
    ("qwen3_next", ["sequence"]),  # linear attention, all of whose outputs are gathered
    ("whisper", ["tensor"]),  # cross attention, without a plan of transformers'
]
FAMILIES = (
    *("llama", "gpt2", "mixtral", "mamba", "bert", "modernbert", "bart", "t5", "whisper", "wav2vec2", "vit", "convnext"),
    *("llava", "gemma3", "qwen3_next", "gpt_oss", "deepseek_v3", "distilbert", "clip", "segformer"),
)


def trained(mesh: Mesh, folder: str, kind: str, columns: list[str]) -> dict[str, Any]:
    """The outcome of each column, as rank 0 knows it."""
    small = small_model(kind, heads_of_types()[kind])
    return {column: asdict(outcome) for column, outcome in outcomes(small, columns, Path(folder), mesh.rank)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "columns"), QUICK, ids=[kind for kind, _ in QUICK])
def test_a_type_trains_as_plain_pytorch_does(workers: Workers, tmp_path: Path, kind: str, columns: list[str]) -> None:
    if kind == "llama4_text" and DEVICE.type == "sim":
        pytest.skip("the simulated device has no gradients of complex numbers, of which its rotary positions are made")
    found, _ = workers.run(2, "test_model_types:trained", folder=str(tmp_path), kind=kind, columns=columns)
    assert {column: outcome["outcome"] for column, outcome in found.items()} == dict.fromkeys(columns, EQUAL), found


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_equal_or_refused_in_every_layout(workers: Workers, tmp_path: Path, kind: str) -> None:
    for column in COLUMNS:
        found, _ = workers.run(2, "test_model_types:trained", folder=str(tmp_path), kind=kind, columns=[column])
        assert found[column]["outcome"] in (EQUAL, REFUSED, ABSENT), found
