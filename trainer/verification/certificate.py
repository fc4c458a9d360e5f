"""The certificate with the differences that a verification has found, as text and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from zeromesh.errors import first_lines, ranks_text, some
from zeromesh.intervals import grouped
from zeromesh.trainer.monitoring.step_metrics import strict

KINDS = ("initial", "output", "loss", "gradient", "norm", "parameter", "average", "rounding", "error", "check")
"""The kinds of compared values, in the order in which a step computes them."""
_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A value that the user's layout computes differently from the plain process."""

    kind: str  # One of `KINDS`.
    step: int  # The step, counted from 1; 0: before the first.
    name: str  # The name of the module or the parameter; empty for a value of the whole step.
    size: float
    """The relative difference; infinite for another shape or a value that is not finite; 0 without a number."""
    place: int = 0  # The position in the order of the step: modules by forward, parameters by backward.
    microbatch: int = -1  # The index of the microbatch in the global batch, from 0; -1 for the whole step.
    ranks: tuple[int, ...] = ()
    run: str = "exact"  # The name of the run that found the difference.
    detail: str = ""

    def sentence(self) -> str:
        words = {"output": "the output of", "initial": "the initial value of", "average": "the averaged weight of"}
        what = f"{words.get(self.kind, f'the {self.kind} of')} {self.name}" if self.name else f"the {self.kind}"
        detailed = self.kind in ("check", "rounding", "error")
        what = self.detail or what if detailed else what
        when = f" in step {self.step}" if self.step and self.kind != "error" else ""
        when += f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        # The text of an error names its rank, which may have raised it first.
        where = f" on {ranks_text(self.ranks, 8)}" if self.ranks and self.kind != "error" else ""
        more = f" ({self.detail})" if self.detail and not detailed else ""
        return f"{what}{when}{where}{f' differs by {self.size:.3g}' if self.size else ''}{more}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """One run in the user's layout, compared with the plain process."""

    losses: Sequence[float]
    plain_losses: Sequence[float]
    norms: Sequence[float]
    plain_norms: Sequence[float]
    bound: float  # The largest relative difference that is accepted.
    gradients: Mapping[str, float] = field(default_factory=dict)  # The largest difference of any step, by parameter.
    parameters: Mapping[str, float] = field(default_factory=dict)
    outputs: int = 0  # The number of compared outputs of modules.


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The result of `Trainer.verify`, the same on all ranks."""

    passed: bool
    differences: tuple[Difference, ...]  # The differences, nearest to the cause first.
    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    digests: Mapping[str, str]  # The xxh3 digests of the configuration, the data and the initial weights.
    passes: Mapping[str, PassRecord]
    checks: Mapping[str, str]  # The results of the requested checks, by name.
    notes: tuple[str, ...]
    seconds: float

    @property
    def located(self) -> str:
        """The difference nearest to the cause, as a sentence; empty where there is none."""
        return self.differences[0].sentence() if self.differences else ""

    def to_json(self) -> str:
        """Return the certificate as JSON; NaN and infinities become strings."""
        values = {**asdict(self), "located": self.located, "kind": "zeromesh certificate", "version": 1}
        return json.dumps(strict(values), indent=1, allow_nan=False) + "\n"

    def lines(self) -> list[str]:
        lines = [f"{name}: {value}" for name, value in self.layout.items()]
        lines += [f"small run: {note}" for note in self.notes]
        for name, each in self.passes.items():
            lines.append(f"{name}: losses {', '.join(f'{loss:.6g}' for loss in each.losses)}")
            largest = max([0.0, *each.gradients.values(), *each.parameters.values()])
            figures = [f"largest difference {largest:.2g} (bound {each.bound:.2g})"]
            figures += [f"{len(each.gradients)} gradients in each step"] if each.gradients else []
            figures += [f"{len(each.parameters)} parameters"]
            figures += [f"{each.outputs:,} outputs of modules"] if each.outputs else []
            lines.append(f"{name}: {', '.join(figures)}")
        lines += [f"{name}: {result}" for name, result in self.checks.items()]
        if self.differences:
            lines.append("FIRST DIFFERENCE: " + self.located)
            also = [f"also: {each.sentence()}" for each in self.differences[1:]]
            lines += [f"  {line}" for line in first_lines(also, _SHOWN - 1)]
        versions = some([f"{name} {version}" for name, version in self.versions.items()], 8)
        return [*lines, f"{'PASSED' if self.passed else 'FAILED'} in {self.seconds:.0f} s with {versions}"]


def merged(rows: Sequence[Sequence[Difference]]) -> tuple[Difference, ...]:
    """Merge the differences of all ranks, with the ranks that found each; sorted, the nearest to the cause first."""
    place_of, size_of = attrgetter("run", "kind", "step", "name", "microbatch"), attrgetter("size")
    groups = grouped((place_of(each), replace(each, ranks=(rank,))) for rank, row in enumerate(rows) for each in row)
    ranks = [tuple(dict.fromkeys(rank for each in group for rank in each.ranks)) for group in groups.values()]
    joined = [replace(max(each, key=size_of), ranks=found) for each, found in zip(groups.values(), ranks, strict=True)]

    def key(each: Difference) -> tuple[bool, int, int, int, int]:
        return each.run != "exact", each.step, KINDS.index(each.kind), max(0, each.microbatch), each.place

    return tuple(sorted(joined, key=key))
