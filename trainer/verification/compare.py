"""How far two results may be apart, and what is found where they are further.

In float64 two orders of the same sums differ by some 1e-14 of them, and what the layout computes wrongly shows in far more than
1e-9, which is allowed. In the run's own precision the plain process has been trained in it too. Its distance from float64 is what
rounding does: the layout, which rounds in other places, may be `FACTOR` times as far from float64 as the plain process is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from zeromesh.errors import ranks_text
from zeromesh.trainer.verification.reference import PlainRun
from zeromesh.trainer.verification.shrink import STEPS

EXACT = 1e-9
"""Relative; see above."""
FACTOR = 8.0
Kind = Literal[
    "weight", "output", "recomputed", "loss", "gradient", "norm", "parameter", "average", "copies", "error", "check"
]
_PHASES: dict[str, int] = {
    each: place
    for place, each in enumerate(
        ("weight", "copies", "output", "loss", "recomputed", "gradient", "norm", "parameter", "average", "error", "check")
    )
}  # fmt: skip
_WORDS: dict[str, str] = {
    "weight": "the parameter that forward reads",
    "copies": "copies that should be equal bit by bit, of the parameter",
    "output": "the output of the module",
    "recomputed": "the output, computed again in backward, of the module",
    "loss": "the loss of the microbatch",
    "gradient": "the gradient of",
    "norm": "the norm of all gradients",
    "parameter": "after the update the parameter",
    "average": "the averaged weights of",
    "error": "the run ended with an error",
    "check": "the check",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that the layout computed otherwise than the plain process. Steps and microbatches count from 1."""

    kind: Kind
    name: str
    """The module's or the parameter's name in the whole model."""
    step: int
    microbatch: int | None = None
    """Of the rank's own."""
    ranks: tuple[int, ...] = ()
    distance: float = math.nan
    """The norm of the difference by that of the plain process's."""
    allowed: float = math.nan
    place: int = 0
    """In the order of execution of modules, or of parameters in the model."""
    detail: str = ""
    module: str = ""
    """The module that a check has found something about."""

    @property
    def when(self) -> tuple[int, int, int, int]:
        """Sorts differences: what came first is most likely the cause."""
        return self.step, _PHASES[self.kind], self.microbatch or 0, self.place

    def line(self) -> str:
        """Return it as a sentence."""
        found = f"step {self.step}" if self.step else "at the end"
        found += f", microbatch {self.microbatch}" if self.microbatch else ""
        found += f": {_WORDS[self.kind]}{f' {self.name}' if self.name else ''}"
        if self.kind not in ("error", "check", "copies"):
            found += f" differs by {self.distance:.2g} (allowed {self.allowed:.1g})"
        found += f", on {ranks_text(self.ranks)}" if self.ranks else ""
        return found + (f": {self.detail}" if self.detail else "")


def merged(found: Iterable[Difference]) -> tuple[Difference, ...]:
    """One difference for what several ranks have found, in the order in which they came about."""
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for each in found:
        groups.setdefault((each.kind, each.name, each.step, each.microbatch, each.detail), []).append(each)
    joined = []
    for group in groups.values():
        worst = max(group, key=lambda one: (not math.isfinite(one.distance), one.distance))
        ranks = tuple(sorted({rank for one in group for rank in one.ranks}))
        joined.append(
            Difference(**{name: getattr(worst, name) for name in Difference.__slots__ if name != "ranks"}, ranks=ranks)
        )
    return tuple(sorted(joined, key=lambda each: each.when))


class Bounds(Protocol):
    """How large the norm of a difference may be."""

    def outputs(self, wanted: Tensor) -> float: ...

    def gradient(self, step: int, name: str) -> float: ...

    def parameter(self, step: int, name: str, *, read: bool = False) -> float: ...

    def number(self, step: int, wanted: float, of: Literal["loss", "norm"]) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactBounds:
    """Those of float64: of rounding alone."""

    plain: PlainRun
    rate: float
    """The learning rate: what a step changes of an element, by an optimizer of Adam's kind."""

    def outputs(self, wanted: Tensor) -> float:
        """Of what a module returns."""
        return float(EXACT * (norm_of(wanted) + 1e-6 * wanted.numel() ** 0.5))

    def gradient(self, step: int, name: str) -> float:
        """Of the gradient of a parameter: some are zero but for rounding, which is that of the others."""
        found = self.plain.steps[step]
        return EXACT * (norm_of(found.gradients[name]) + 0.01 * found.norm)

    def parameter(self, step: int, name: str, *, read: bool = False) -> float:
        """Of a parameter."""
        value = self.plain.steps[step].parameters[name]
        return float(EXACT * (norm_of(value) + self.rate * STEPS * value.numel() ** 0.5))

    def number(self, step: int, wanted: float, of: Literal["loss", "norm"]) -> float:
        """Of a loss, or of the norm of all gradients."""
        return EXACT * max(abs(wanted), 1e-3)


class RoundedBounds:
    """Those of the run's own precision, in which `rounded` is the plain process's run, and `exact` that in float64."""

    def __init__(self, exact: PlainRun, rounded: PlainRun, compute: torch.dtype) -> None:
        self._unit = torch.finfo(compute).eps / 2
        self._exact, self._rounded = exact, rounded
        self._gradients = [
            _errors(one.gradients, other.gradients, exact.trained)
            for one, other in zip(exact.steps, rounded.steps, strict=True)
        ]
        self._parameters = [
            _errors(one.parameters, other.parameters, exact.names)
            for one, other in zip(exact.steps, rounded.steps, strict=True)
        ]

    def outputs(self, wanted: Tensor) -> float:
        """Modules are compared in float64 alone."""
        return math.inf

    def gradient(self, step: int, name: str) -> float:
        """Of the gradient of a parameter."""
        return FACTOR * self._gradients[step][name]

    def parameter(self, step: int, name: str, *, read: bool = False) -> float:
        """Of a parameter."""
        return FACTOR * self._parameters[step][name]

    def number(self, step: int, wanted: float, of: Literal["loss", "norm"]) -> float:
        """Of a loss, or of the norm of all gradients: that of the worst step so far."""
        pairs = zip(self._exact.steps[: step + 1], self._rounded.steps[: step + 1], strict=True)
        worst = max(float(abs(getattr(one, of) - getattr(other, of))) for one, other in pairs)
        return FACTOR * (worst + self._unit * abs(wanted))


def _errors(exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, float]:
    """How far rounding has moved each tensor: its own error, and its share by elements of the error of all."""
    own = {name: norm_of(rounded[name].double() - exact[name]) for name in names}
    elements = {name: exact[name].numel() for name in own}
    everything, total = math.hypot(*own.values()), max(1, sum(elements.values()))
    return {
        alias: own[name] + everything * math.sqrt(elements[name] / total)
        for name in own
        for alias in (each for each, value in exact.items() if value is exact[name])
    }


def norm_of(tensor: Tensor) -> float:
    """The Euclidean norm."""
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def differing_elements(found: Tensor, wanted: Tensor, allowed: float) -> str:
    """Which part of a tensor differs, where it is a part alone."""
    apart = (found.double() - wanted.double()).abs().reshape(-1) > allowed / max(1, found.numel()) ** 0.5
    count = int(apart.sum())
    if not 0 < count < found.numel():
        return ""
    places = apart.nonzero().reshape(-1)
    return f"{count} of {found.numel()} elements, from {int(places[0])} to {int(places[-1])}"
