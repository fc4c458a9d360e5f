"""The differences between two checkpoints: counters, settings and every element, a bounded number of them in memory."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeromesh.checkpoint.format.safetensors_layout import DTYPE_NAMES, StoredTensor
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, state_of
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint import reading
from zeromesh.trainer.tools.checkpoint.reading import Throughput, read_elements, windows

_SHOWN = 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = "(absent)"


@dataclass(kw_only=True, slots=True)
class _Pair:
    """A tensor of both checkpoints, and how far one is from the other, as far as they have been compared."""

    one: StoredTensor
    two: StoredTensor
    count: int = 0
    largest: float = 0.0
    at: int = 0
    values: tuple[float, float] = (0.0, 0.0)

    @property
    def element_nbytes(self) -> int:
        """Bytes of an element of both."""
        return self.one.spec.dtype.itemsize + self.two.spec.dtype.itemsize

    def compare(self, first: int, here: torch.Tensor, there: torch.Tensor) -> None:
        """Take the elements from `first` on of both into account."""
        if here.dtype == there.dtype:
            bits = [each.view(_BITS[each.dtype.itemsize]) for each in (here, there)]
            if torch.equal(*bits):
                return
            places = (bits[0] != bits[1]).nonzero()[:, 0]
        else:
            here, there = here.double(), there.double()
            places = ((here != there) & ~(here.isnan() & there.isnan())).nonzero()[:, 0]
        if not len(places):
            return
        one, two = here[places].double(), there[places].double()
        distance = (one - two).abs()
        distance[one.isnan() & two.isnan()] = 0.0
        distance[distance.isnan()] = math.inf
        worst = int(distance.argmax())
        if not self.count or float(distance[worst]) > self.largest:
            self.largest, self.at = float(distance[worst]), first + int(places[worst])
            self.values = (float(one[worst]), float(two[worst]))
        self.count += len(places)

    def within(self, tolerance: float | None) -> bool:
        """Return whether that is no difference: of bits without a tolerance, else of values."""
        if tolerance is None:
            return not self.count and self.one.spec.dtype == self.two.spec.dtype
        return self.largest <= tolerance

    def line(self) -> str:
        one, two = self.one.spec, self.two.spec
        text = f"{one.kind} {one.name}:"
        if one.dtype != two.dtype:
            text += f" {DTYPE_NAMES[one.dtype]} in A, {DTYPE_NAMES[two.dtype]} in B;"
        if not self.count:
            return f"{text} the values are the same"
        where = [int(each) for each in np.unravel_index(self.at, one.shape)]
        return (
            f"{text} max |difference| {self.largest:.6g} at {where} ({self.values[0]!r} in A, {self.values[1]!r} in B); "
            f"{self.count:,} of {one.numel:,} elements differ"
        )


def diff_checkpoints(one: Path, two: Path, tolerance: float | None, console: Console) -> bool:
    """Show what differs; returns whether nothing does, bit by bit, or beyond the tolerance.

    Raises:
        CheckpointError: when one of them is damaged.
    """
    first, second = CheckpointReader(one), CheckpointReader(two)
    console.note(f"A: {one}")
    console.note(f"B: {two}")
    missing, pairs = _paired(first, second)
    aliases = _differences(first.manifest.aliases, second.manifest.aliases)
    differences = [
        *_state_lines(state_of(first), state_of(second), tolerance),
        [f"alias {line}" for line in aliases],
        missing,
    ]
    moved = Throughput(console, "comparing", sum(each.one.spec.nbytes + each.two.spec.nbytes for each in pairs))
    for batch in windows(_stretches(pairs), lambda each: each[2] * each[0].element_nbytes):
        here = read_elements(first, [(pair.one, begin, count) for pair, begin, count in batch], moved)
        there = read_elements(second, [(pair.two, begin, count) for pair, begin, count in batch], moved)
        for (pair, begin, _), *values in zip(batch, here, there, strict=True):
            pair.compare(begin, *values)
    apart = sorted((each for each in pairs if not each.within(tolerance)), key=lambda each: -each.largest)
    differences.append([each.line() for each in apart])
    for lines in differences:
        for line in lines[:_SHOWN]:
            console.note(line)
        if len(lines) > _SHOWN:
            console.note(f"... and {len(lines) - _SHOWN:,} more")
    if not any(differences):
        how = "bit by bit" if tolerance is None else f"within {tolerance:g}"
        count = sum(each.one.spec.numel for each in pairs)
        console.note(f"the same {how}: {len(pairs):,} tensors, {count:,} elements")
        return True
    both = f"{len(pairs):,} tensors that both have"
    console.note(f"{len(apart):,} of {both} differ" if apart or not pairs else f"the {both} are the same")
    return False


def _state_lines(one: TrainerState | None, two: TrainerState | None, tolerance: float | None) -> list[list[str]]:
    """Return lines for counters, and lines for settings."""
    if one is None or two is None:
        names = [name for name, state in (("A", one), ("B", two)) if state is None]
        return [[f"{names[0]} has no trainer_state.json"]] if len(names) == 1 else []
    counters = [field.name for field in fields(one) if field.name not in ("settings", "tracker")]
    first, second = ({name: getattr(state, name) for name in counters} for state in (one, two))
    return [[*_differences(first, second, tolerance)], [*_differences(one.settings, two.settings)]]


def _differences(one: Mapping[str, Any], two: Mapping[str, Any], tolerance: float | None = None) -> Iterator[str]:
    for name in {**one, **two}:
        here, there = one.get(name, _ABSENT), two.get(name, _ABSENT)
        close = tolerance is not None and isinstance(here, float) and isinstance(there, float)
        if here != there and not (close and abs(here - there) <= (tolerance or 0)):
            yield f"{name}: {here!r} in A, {there!r} in B"


def _paired(one: CheckpointReader, two: CheckpointReader) -> tuple[list[str], list[_Pair]]:
    """Return lines for tensors that only one has or that have other shapes, and the others, as they lie in A."""
    first, second = ({(t.spec.kind, t.spec.name): t for t in each.manifest.tensors} for each in (one, two))
    lines = [*_only(first, second, "A"), *_only(second, first, "B")]
    pairs = [_Pair(one=tensor, two=second[key]) for key, tensor in first.items() if key in second]
    same = [pair for pair in pairs if pair.one.spec.shape == pair.two.spec.shape]
    for spec, other in ((pair.one.spec, pair.two.spec) for pair in pairs):
        if spec.shape != other.shape:
            lines.append(f"{spec.kind} {spec.name}: {list(spec.shape)} in A, {list(other.shape)} in B")
    return lines, sorted(same, key=lambda each: (each.one.path, each.one.begin))


def _only(here: Iterable[tuple[str, str]], there: Iterable[tuple[str, str]], which: str) -> Iterator[str]:
    """Yield lines for what only one has: a kind that the other has nothing of is one line."""
    others = set(there)
    kinds = {kind for kind, _ in others}
    absent = Counter(kind for kind, _ in here if kind not in kinds)
    yield from (f"{kind} ({count:,} tensors): only in {which}" for kind, count in absent.items())
    yield from (
        f"{kind} {name}: only in {which}" for kind, name in here if kind in kinds and (kind, name) not in others
    )


def _stretches(pairs: Iterable[_Pair]) -> Iterator[tuple[_Pair, int, int]]:
    """Yield all elements as `(pair, first, count)`, each within the memory that is used at once."""
    for pair in pairs:
        most, numel = max(1, reading.WINDOW_BYTES // pair.element_nbytes), pair.one.spec.numel
        yield from ((pair, first, min(most, numel - first)) for first in range(0, numel, most))
