"""Figures of a step beside its result: utilisation of the hardware, memory by tier and purpose, time by phase."""

from __future__ import annotations

from typing import Any

import torch

from zeromesh.mesh.groups import Mesh
from zeromesh.offload import Ledger
from zeromesh.trainer.console import human_count
from zeromesh.trainer.flops import ModelFlops, peak_flops
from zeromesh.trainer.step import StepResult


class StepFigures:
    """Of one run; all ranks make it together. `samples`: of a global batch."""

    def __init__(
        self, flops: ModelFlops | None, mesh: Mesh, compute: torch.dtype, samples: int, ledger: Ledger
    ) -> None:
        self._flops = flops
        self._samples = samples
        self._ledger = ledger
        self._peak = 0.0
        self.notes: list[str] = []
        """What utilisation is measured against, where it is."""
        if flops is not None:
            mine, how = peak_flops(mesh.device, compute)
            self._peak = float(sum(row[0] for row in mesh.world.gather_integers([int(mine)])))
            self.notes.append(
                f"model FLOPs: {human_count(flops.of_step(1, 0))} a token without attention; all ranks can do "
                f"{human_count(self._peak)} a second, {how}"
            )

    def of(self, result: StepResult) -> dict[str, Any]:
        """Fields of the step's line of metrics.

        `mfu`: model FLOPs utilisation. `phases`: this rank's seconds by what they went to. `memory`: by tier and purpose, the most
        bytes of this rank in the step.
        """
        found: dict[str, Any] = {}
        if self._flops is not None and result.tokens:
            needed = self._flops.of_step(result.tokens, result.tokens / self._samples)
            found["mfu"] = round(needed / (result.seconds * self._peak), 5)
        if result.phases:
            found["phases"] = {phase: round(seconds, 6) for phase, seconds in result.phases.items()}
        found["memory"] = {
            tier.value: {purpose.name.lower(): nbytes for purpose, nbytes in purposes.items()}
            for tier, purposes in self._ledger.take_highest().items()
        }
        return found
