"""Models whose token-wise modules run in tiles, trained by workers beside a plain loop without tiles."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from torch import nn

from tests.distributed.parallel.parallel_cases import KINDS
from tests.distributed.trainer.expert_cases import KINDS as EXPERTS
from tests.distributed.trainer.lora_cases import adapted
from tests.support.architecture_cases import differences
from tests.support.plain import apart
from tests.support.trainer_cases import LLAMA, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.models import prepare


def _with_unused() -> Any:
    """A Llama with a weight in an MLP that no token uses, and that is not updated."""
    model = KINDS["llama"]()
    model.model.layers[1].mlp.extra = nn.Linear(4, 4, dtype=model.dtype)
    return model


BUILDS: dict[str, Any] = {
    "unused": lambda: seeded(_with_unused),
    **{kind: lambda kind=kind: seeded(KINDS[kind]) for kind in ("llama", "gpt2", "frozen")},
    "experts": lambda: seeded(EXPERTS["mixtral"]),
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
    model = {"tile_tokens": tokens, **model}
    pair = build(), build()
    with patch.object(prepare, "_tile", wraps=prepare._tile) as tile:
        found = differences(folder, "tiles", pair, sentences(), model=model, **sections)
    if kind == "experts":
        assert any(call.args[0] is pair[0].model.layers[0].mlp for call in tile.call_args_list)
    assert all(value <= 1e-9 for value in found.values()), found


def encoded(mesh: Mesh, folder: str) -> None:
    """Adapters over a base in four bits lose as much with tiles as without."""
    losses = []
    for name, tiles in (("whole", None), ("tiles", 3)):
        model = {"config": {"model_type": "llama", **LLAMA}, "weights": "nf4", "tile_tokens": tiles}
        lora = {"rank": 2, "targets": ["q_proj", "gate_proj", "down_proj"]}
        config = settings(folder, model={**model, "lora": lora}, run={"name": name, "max_steps": 4})
        with Trainer(None, config, sentences()) as trainer:
            losses.append(list(trainer.fit().losses))
    assert apart(*losses) <= 1e-9, losses
    assert len({round(each, 9) for each in losses[0]}) == 4, losses
