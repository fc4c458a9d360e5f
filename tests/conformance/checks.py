"""Running a problem in the workers, keeping references, comparing; and short lists of rows in which all pairs of values meet."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.workers import Workers

from .recipe import LEARNING_RATE, Extra, Layout, Problem

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Row, idle: Callable[[Row], set[str]]) -> set[Pair]:
    """All pairs of a row, leaving out factors that have no effect in it."""
    effective = [(name, value) for name, value in row.items() if name not in idle(row)]
    return set(combinations(effective, 2))


def pairwise(factors: Mapping[str, Sequence[Any]], idle: Callable[[Row], set[str]] = lambda row: set()) -> list[Row]:
    """Rows that cover all pairs, greedily and always the same. `idle(row)` names factors without effect in a (partial) row.

    Each row starts from the first pair that is still missing; every further factor takes the value that covers most.
    """
    wanted: dict[Pair, None] = {}
    for (first, values), (second, others) in combinations(factors.items(), 2):
        for value in values:
            for other in others:
                pair = ((first, value), (second, other))
                if not idle(dict(pair)) & {first, second}:
                    wanted[pair] = None
    rows: list[Row] = []
    while wanted:
        row = _complete(dict(next(iter(wanted))), factors, wanted, idle, len(rows))
        rows.append(row)
        for pair in pairs_of(row, idle):
            wanted.pop(pair, None)
    return rows


def _complete(
    row: Row, factors: Mapping[str, Sequence[Any]], wanted: Mapping[Pair, None], idle: Callable[[Row], set[str]], turn: int
) -> Row:
    for name, values in factors.items():
        if name in row:
            continue

        def gain(value: Any, name: str = name) -> int:
            trial = {key: row.get(key, value) for key in factors if key in row or key == name}
            return sum(pair in wanted for pair in pairs_of(trial, idle))

        # Rotated, so that ties do not always fall to the first value.
        rotated = [values[(number + turn) % len(values)] for number in range(len(values))]
        row[name] = max(rotated, key=gain)
    return {name: row[name] for name in factors}


EXACT = 1e-9
"""Relative, in float64. A single process differs from itself by 1e-14 when sums are taken in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    losses: list[float]
    norms: list[float]
    final_loss: float
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    ranks: list[dict[str, Any]]


class Laboratory:
    """Runs problems in workers; references are computed once in a session and kept on disk."""

    def __init__(self, workers: Workers, folder: Path) -> None:
        self.workers = workers
        self._folder = folder
        self._count = 0

    def reference(self, problem: Problem) -> Result:
        path = self._folder / f"reference-{problem.key}.safetensors"
        numbers = path.with_suffix(".json")
        if not numbers.exists():
            (found,) = self.workers.run(1, f"{_CASES}:reference_run", problem=asdict(problem), out=str(path))
            numbers.write_text(json.dumps(found))
        return _result([json.loads(numbers.read_text())], path)

    def train(self, size: int, problem: Problem, layout: Layout, extra: Extra | None = None, **axes: int) -> Result:
        """The engine's result on `size` ranks; `axes` are sizes of those but shard."""
        self._count += 1
        path = self._folder / f"run-{self._count}.safetensors"
        arguments = {"problem": asdict(problem), "layout": asdict(layout), "extra": asdict(extra or Extra())}
        ranks = self.workers.run(size, f"{_CASES}:train", out=str(path), **axes, **arguments)
        result = _result(ranks, path)
        path.unlink()
        return result

    def check(self, size: int, problem: Problem, layout: Layout, **axes: int) -> float:
        return check_equal(self.train(size, problem, layout, **axes), self.reference(problem), problem)


_CASES = "tests.conformance.cases"


def _result(ranks: list[dict[str, Any]], path: Path) -> Result:
    tensors = load_file(path)
    first = ranks[0]
    return Result(
        losses=first["losses"],
        norms=first["norms"],
        final_loss=first["final_loss"],
        gradients=_under("gradient/", tensors),
        parameters=_under("parameter/", tensors),
        ranks=ranks,
    )


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_ranks_agree(result: Result) -> None:
    """What every rank can say for itself is the same on all: bit by bit."""
    for key in ("losses", "norms", "skipped", "scales", "final_loss", "parameters"):
        said = [json.dumps(rank[key]) for rank in result.ranks]
        assert len(set(said)) == 1, f"ranks disagree on {key}: {said}"


def check_equal(found: Result, wanted: Result, problem: Problem, tolerance: float = EXACT) -> float:
    """Losses, norms, every gradient and every parameter by name, within `tolerance`; returns the largest difference.

    Differences are relative. A parameter of n elements counts as (|p| + lr x steps x sqrt(n)) large in norms.
    """
    check_ranks_agree(found)
    differences = _of_numbers(found, wanted)
    assert found.parameters.keys() == wanted.parameters.keys()
    for name, value in wanted.parameters.items():
        scale = float(value.norm()) + LEARNING_RATE * problem.steps * value.numel() ** 0.5
        differences[f"parameter {name}"] = _difference(found.parameters[name], value, scale)
    if wanted.gradients and found.gradients:
        assert found.gradients.keys() == wanted.gradients.keys()
        norm = torch.stack([value.norm() for value in wanted.gradients.values()]).norm()
        for name, value in wanted.gradients.items():
            differences[f"gradient {name}"] = _difference(found.gradients[name], value, float(value.norm() + norm))
    wrong = {what: difference for what, difference in differences.items() if not difference <= tolerance}
    assert not wrong, f"relative differences above {tolerance:g}: {wrong}"
    return max(differences.values())


def _of_numbers(found: Result, wanted: Result) -> dict[str, float]:
    differences = {}
    for what, ours, theirs in (
        ("loss", found.losses, wanted.losses),
        ("gradient norm", found.norms, wanted.norms),
        ("loss afterwards", [found.final_loss], [wanted.final_loss]),
    ):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            differences[f"{what} of step {step}"] = abs(a - b) / abs(b) if a != b else 0.0
    return differences


def _difference(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> float:
    """Distance as a part of `scale`; infinite for another shape or dtype."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    distance = float((found - wanted).norm())
    return distance / scale if distance else 0.0


def check_same_bits(found: Result, wanted: Result, *keys: str) -> None:
    for key in keys:
        ours, theirs = ([rank[key] for rank in result.ranks] for result in (found, wanted))
        assert ours == theirs, f"{key} differ in bits"


def whole_product(short: int, *choices: Iterable[Any]) -> list[Any]:
    """Every combination; one of `short` of them is in the short run.

    That is a diagonal where `short` shares no divisor with the number of the last choices.
    """
    marks: dict[bool, Any] = {True: (), False: (pytest.mark.full,)}
    return [
        pytest.param(*values, marks=marks[number % short == 0], id=", ".join(map(str, values)))
        for number, values in enumerate(product(*choices))
    ]
