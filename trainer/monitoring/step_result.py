"""`StepResult`: what one optimizer step did, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeromesh.telemetry.step_recorder import Figures


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did, over all ranks. `loss` is the mean over `targets`; `tokens` counts inputs; `cause`: why it was skipped."""

    loss: float
    targets: int
    tokens: int
    unit: str = "tokens"
    """What `tokens` counts: samples, where the model has no `input_ids`."""
    grad_norm: float
    skipped: bool
    loss_scale: float
    seconds: float
    cause: str = ""
    idle: float = 0.0
    """Seconds in which this rank has waited for others."""
    waited: Mapping[str, float] = field(default_factory=dict)
    """Seconds that this rank stood still for bytes of a tier, by its name."""
    communication: Figures = field(default_factory=dict)
    """What this rank told others, by axis and collective."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """This rank's seconds in the step, by what they went to."""
    bubble: Mapping[str, float] = field(default_factory=dict)
    """The part of the step in which ranks of a pipeline did not compute, `predicted` and `measured`."""
    stop_signal: int = 0
    """The signal by which some rank was asked to stop after this step; 0: none."""
