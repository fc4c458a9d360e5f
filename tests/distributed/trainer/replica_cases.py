"""Replicas that divide the states of their shards, beside one process that has all of them."""

from collections.abc import Mapping
from typing import Any

from tests.distributed.trainer.context_cases import KINDS as CONTEXT_KINDS
from tests.distributed.trainer.expert_cases import KINDS as EXPERT_KINDS
from tests.support.architecture_cases import differences
from tests.support.trainer_cases import seeded, sentences
from zeromesh.mesh.process_mesh import Mesh

KINDS = CONTEXT_KINDS | EXPERT_KINDS


def exact(mesh: Mesh, folder: str, axes: Mapping[str, Any], stage: int = 3, kind: str = "llama", **sections: Any) -> None:
    """A model trains with divided states as in one process."""
    pair = seeded(KINDS[kind]), seeded(KINDS[kind])
    zero = {"stage": stage, "replicas": "divided", **sections.pop("zero", {})}
    found = differences(folder, kind, pair, sentences(), zero=zero, parallel=dict(axes), **sections)
    assert all(value <= 1e-9 for value in found.values()), found
