"""Parameters that are frozen, and groups of the optimizer, by patterns of the configuration, against a plain loop."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from tests.support.plain import compare, plain_fit
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh.mesh.process_mesh import Mesh

TRAIN = ["*", "!*norm*", "model.norm.*", "!*.layers.0.mlp.*"]
GROUPS = [
    {"match": ["*.embed_tokens.*", "lm_head.*"], "lr_factor": 0.1, "weight_decay": 0.0},
    {"match": "*.q_proj.*", "lr_factor": 3.0},
    {"match": "*.self_attn.*", "weight_decay": 0.5},
]


def _trained(name: str) -> bool:
    return name == "model.norm.weight" or not ("norm" in name or ".layers.0.mlp." in name)


def _grouped(model: Any) -> list[Any]:
    found = []
    for name, each in model.named_parameters():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            values = {"lr": 1e-3, "weight_decay": 0.0}
        elif ".self_attn." in name:
            values = {"lr": 3e-2, "weight_decay": 0.1} if "q_proj" in name else {"lr": 1e-2, "weight_decay": 0.5}
        else:
            values = {"lr": 1e-2, "weight_decay": 0.0 if fnmatchcase(name, "*.down_proj.*") else 0.1}
        found.append({"params": [each], **values})
    return found


def grouped(mesh: Mesh, folder: str, stage: int, axes: Mapping[str, int] | None = None) -> None:
    """Losses, gradients and parameters of a model of which a part is trained, in several groups."""
    sections = {"zero": {"stage": stage, "gathered_budget": 0}, "parallel": axes or {}, "model": {"train": TRAIN}}
    optimizer = {"lr": 1e-2, "groups": GROUPS, "no_decay": ["*.down_proj.*"]}
    config = settings(folder, optimizer=optimizer, **sections)
    plain = seeded(llama)
    for name, each in plain.named_parameters():
        each.requires_grad_(_trained(name))
    wanted = plain_fit(plain, sentences(), config, groups=_grouped)
    found, _ = compare(seeded(llama), config, sentences(), wanted)
    assert all(value <= 1e-9 for value in found.values()), found
