"""Types of transformers that workers train beside plain PyTorch, by the columns of `scripts/zoo.py`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from model_zoo.columns import outcomes
from model_zoo.small_models import heads_of_types, small_model

from zeromesh.mesh.process_mesh import Mesh


def trained(mesh: Mesh, folder: str, kind: str, columns: list[str]) -> dict[str, Any]:
    """The outcome of each column, as rank 0 knows it."""
    small = small_model(kind, heads_of_types()[kind])
    return {column: asdict(outcome) for column, outcome in outcomes(small, columns, Path(folder), mesh.rank)}
