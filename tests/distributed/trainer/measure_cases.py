"""Measures the workers' machine with tiny sizes."""

from pathlib import Path
from typing import Any

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.planning.measure import TINY_SIZES, measure_machine


def measured(mesh: Mesh, folder: str) -> dict[str, Any]:
    told: list[str] = []
    machine = measure_machine(mesh, Path(folder), told.append, TINY_SIZES)
    return {
        "machine": machine.to_yaml(),
        "told": told,
        "left": [name for name in mesh.process_sets if name.startswith(("shared", "gloo"))],
    }
