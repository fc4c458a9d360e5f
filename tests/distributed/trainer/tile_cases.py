"""Models whose token-wise modules run in tiles, trained by workers beside a plain loop without tiles."""

from collections.abc import Mapping
from typing import Any

from tests.distributed.parallel.parallel_cases import KINDS
from tests.distributed.trainer.lora_cases import adapted
from tests.support.architecture_cases import differences
from tests.support.trainer_cases import seeded, sentences
from zeromesh.mesh.process_mesh import Mesh

BUILDS: dict[str, Any] = {
    **{kind: lambda kind=kind: seeded(KINDS[kind]) for kind in ("llama", "gpt2", "frozen")},
    "adapted": lambda: adapted(target_modules=["q_proj", "gate_proj", "down_proj"]),
}


def trained(
    mesh: Mesh,
    folder: str,
    kind: str,
    stage: int,
    tokens: int = 3,
    model: Mapping[str, Any] = {},
    axes: Mapping[str, Any] = {},
    **sections: Mapping[str, Any],
) -> None:
    """Tiles of 3 tokens leave a shorter last one of the sequence."""
    build = BUILDS[kind]
    sections = {"zero": {"stage": stage, "gathered_budget": 0}, "parallel": axes, **sections}
    found = differences(
        folder, "tiles", (build(), build()), sentences(), model={"tile_tokens": tokens, **model}, **sections
    )
    assert all(value <= 1e-9 for value in found.values()), found
