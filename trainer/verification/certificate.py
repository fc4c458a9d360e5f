"""What a verification has found, as a value, as text and as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from zeromesh import __version__
from zeromesh.errors import StorageError, ranks_text
from zeromesh.files import write_whole
from zeromesh.mesh.mesh_shape import AXES, MeshShape
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.formatting import table_lines
from zeromesh.trainer.verification.compare import Difference

FILE = "certificate.json"
_LINES = 12
"""Differences that are printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """Loss and norm of a step, of the layout and of the plain process."""

    step: int
    loss: float
    plain_loss: float
    norm: float
    plain_norm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedRun:
    """What the run in its own precision came to."""

    precision: str
    bound: str
    """Where the bound comes from."""
    largest: Mapping[str, float]
    """The largest relative distance from the plain float64 run, by kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What `verify` has found. `passed` says whether the layout computes what one plain process does."""

    passed: bool
    model: str
    parameters: int
    layout: Mapping[str, Any]
    changes: tuple[str, ...]
    """What the verified run has otherwise than the user's."""
    config_digest: str
    result_digest: str
    """Of every bit of the losses, gradients and parameters of the float64 run."""
    steps: tuple[StepNumbers, ...]
    gradients: Mapping[str, float]
    """By name: the largest difference in any step, relative to the plain process's gradient."""
    weights: Mapping[str, float]
    """The same of parameters after updates."""
    outputs: Mapping[str, float]
    """The same of what modules return."""
    compared: int
    """Outputs of modules that were compared, over all ranks."""
    rounded: RoundedRun | None = None
    checks: Mapping[str, str] = field(default_factory=dict)
    """By name: `passed`, or what was found."""
    differences: tuple[Difference, ...] = ()
    """In the order in which they came about, so that the first one is nearest to the cause."""
    seconds: float = 0.0

    @property
    def module(self) -> str | None:
        """The first module whose output differs, in the step in which anything does first: later ones follow from that."""
        names = (
            each.name if each.kind in ("output", "recomputed") else each.module or None
            for each in self.differences
            if each.step == self.differences[0].step
        )
        return next((name for name in names if name is not None), None)

    @property
    def parameter(self) -> str | None:
        """The first parameter, in the order of the model, that differs or whose gradient does."""
        kinds = ("weight", "copies", "gradient", "parameter", "average")
        return next((each.name for each in self.differences if each.kind in kinds), None)

    @property
    def backward_parameter(self) -> str | None:
        """The one of the parameters whose gradient differs that backward comes to first."""
        found = [each for each in self.differences if each.kind == "gradient"]
        return max(found, key=lambda each: each.place).name if found else None

    def to_json(self) -> str:
        """Return it as JSON, with the versions of what has computed."""
        head = {"passed": self.passed, "versions": versions(), "located": self.located()}
        values = {**head, **asdict(self)}
        return json.dumps(values, indent=1, default=str)

    def located(self) -> dict[str, Any]:
        """Where the first difference is, as far as that is known; empty where there is none."""
        if not self.differences:
            return {}
        first = self.differences[0]
        return {
            "step": first.step,
            "microbatch": first.microbatch,
            "module": self.module,
            "parameter": self.parameter,
            "parameter_first_in_backward": self.backward_parameter,
            "ranks": list(first.ranks),
            "what": first.line(),
        }

    def write(self, path: Path) -> None:
        """Write it. Raises `StorageError`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{self.to_json()}\n".encode(), sync=False)
        except OSError as error:
            raise StorageError(f"the certificate cannot be written to {path}: {error.strerror}") from error

    def lines(self) -> list[str]:
        """Return it for a person."""
        shown = ", ".join(f"{name} {value}" for name, value in self.layout.items() if value not in (None, "", 0))
        found = [
            f"{self.model}, {self.parameters:,} parameters; {shown}",
            " ".join(f"{name} {value}," for name, value in versions().items()) + f" configuration {self.config_digest}",
            *self.changes,
        ]
        rows = [
            (
                str(each.step),
                f"{each.loss:.12f}",
                f"{each.plain_loss:.12f}",
                f"{each.norm:.10g}",
                f"{each.plain_norm:.10g}",
            )
            for each in self.steps
        ]
        found += table_lines(("step", "loss", "plain loss", "norm", "plain norm"), rows)
        for what, values in (("gradients", self.gradients), ("parameters", self.weights), ("outputs", self.outputs)):
            if values:
                name = max(values, key=lambda each: values[each])
                found.append(f"{what}: {len(values)} compared, the largest difference is {values[name]:.2g} ({name})")
        if self.rounded is not None:
            largest = ", ".join(f"{name} {value:.2g}" for name, value in self.rounded.largest.items())
            found.append(f"in {self.rounded.precision}: {largest} from float64; {self.rounded.bound}")
        found += [f"check {name}: {text}" for name, text in self.checks.items()]
        found += [each.line() for each in self.differences[:_LINES]]
        if len(self.differences) > _LINES:
            found.append(f"... and {len(self.differences) - _LINES} more differences in the certificate")
        return [*found, self.verdict()]

    def verdict(self) -> str:
        """Return the last line."""
        if self.passed:
            return f"PASSED in {self.seconds:.0f} s (results {self.result_digest})"
        first = self.differences[0]
        module, parameter = self.module, self.parameter
        where = [f"module {module}"] if module else []
        where += [f"parameter {parameter}"] if parameter else []
        later = self.backward_parameter
        where += [f"the first in backward is {later}"] if later not in (None, parameter) else []
        on = f" on {ranks_text(first.ranks)}" if first.ranks else ""
        return (
            f"FAILED in {self.seconds:.0f} s: first at step {first.step}{on}{': ' if where else ''}{', '.join(where)}"
        )


def versions() -> dict[str, str]:
    """The versions of what computes."""
    return {"zeromesh": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def layout_of(config: TrainerConfig, shape: MeshShape, accumulation: int) -> dict[str, Any]:
    """What a certificate says of the layout of a run."""
    parallel, offload = config.parallel, config.offload
    found: dict[str, Any] = {"ranks": shape.world_size}
    found |= {axis: size for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1}
    if shape.pipeline > 1:
        found |= {"schedule": parallel.schedule} | ({"chunks": parallel.chunks} if parallel.chunks > 1 else {})
    found |= {"sequence": True} if parallel.sequence else {}
    found |= {"stage": config.zero.stage, "accumulation": accumulation}
    for name in ("optimizer", "gradients", "parameters", "activations"):
        share = getattr(offload, name)
        if share.tier not in ("none", "auto"):
            found[f"offload {name}"] = share.tier + (f" {share.fraction:g}" if share.fraction < 1 else "")
    if config.model.activation_checkpointing != "none":
        found["recomputation"] = config.model.activation_checkpointing
    return found


def digest_of(config: TrainerConfig) -> str:
    """Of every value of a configuration, but for where files lie."""
    values = config.model_dump(mode="json", exclude={"run": {"output_dir"}, "offload": {"directory"}})
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def largest_of(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest value of each name in several tables."""
    found: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            found[name] = max(found.get(name, 0.0), value)
    return found
