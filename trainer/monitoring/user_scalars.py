"""Values of the user's own that are logged beside those of a step: of losses, of `trainer.log`, of callbacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.monitoring.step_metrics import StepMetrics

RESERVED_NAMES = frozenset(each.name for each in fields(StepMetrics)) | {"time"}
"""Names that a step's line has already."""


class UserScalars:
    """The means of values since the last logged line, over all that any rank has given."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor | float]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Take numbers, or tensors of one element, which are not read before the next line. What is neither, and what has a
        reserved name, is left out."""
        for name, value in values.items():
            if name in RESERVED_NAMES:
                continue
            if isinstance(value, Tensor) and value.numel() == 1:
                self._values.setdefault(name, []).append(value.detach())
            elif isinstance(value, int | float):
                self._values.setdefault(name, []).append(float(value))

    def take(self, mesh: Mesh) -> dict[str, float]:
        """The means, which begin anew; all ranks call it, and any of them may have given other names than others."""
        sums = {name: [sum(map(float, values)), len(values)] for name, values in self._values.items()}
        self._values = {}
        if not int(mesh.world.max_(torch.tensor([len(sums)]), "values that are logged")[0]):
            return {}
        found: dict[str, list[float]] = {}
        for row in mesh.world.gather_bytes(json.dumps(sums).encode(), "values that are logged"):
            for name, (total, count) in json.loads(row).items():
                so_far = found.setdefault(name, [0.0, 0])
                so_far[0] += total
                so_far[1] += count
        return {name: total / count for name, (total, count) in sorted(found.items())}


def require_free_names(values: Mapping[str, Any], whose: str) -> None:
    """Raise `ConfigError` for names that fields of a step's line have already."""
    taken = sorted(RESERVED_NAMES.intersection(values))
    if taken:
        raise ConfigError(f"{whose}: {', '.join(taken)} is a field of every step's line already; choose another name")
