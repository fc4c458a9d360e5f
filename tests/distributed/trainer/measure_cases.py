"""Measures the workers' machine with tiny sizes."""

from pathlib import Path
from typing import Any

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.planning.measuring.device_meter import TINY_SIZES
from zeromesh.trainer.planning.measuring.machine_meter import measure_machine


def measured(mesh: Mesh, folder: str) -> dict[str, Any]:
    told: list[str] = []
    machine = measure_machine(mesh, TINY_SIZES, Path(folder), told.append)
    return {
        "machine": machine.to_yaml(),
        "told": told,
        "left": [name for name in mesh.process_sets if name.startswith(("shared", "gloo"))],
    }
