"""What differs between two checkpoints: counters, settings and every element, a bounded number of them in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import StoredTensor
from zeromesh.checkpoint.format.safetensors_layout import DTYPE_NAMES
from zeromesh.checkpoint.io.reader import CheckpointReader, ReadTarget
from zeromesh.offload import TieredTensor
from zeromesh.trainer.checkpoints.trainer_state import TrainerState
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.inspect import state_of
from zeromesh.trainer.tools.checkpoint.progress import Throughput, one_core

_WINDOW_BYTES = 32 << 20
"""Of both checkpoints' elements together that are in memory at once."""
_SHOWN = 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = "(absent)"


@dataclass(kw_only=True, slots=True)
class _Apart:
    """How far a tensor of one checkpoint is from that of the other, as far as they have been compared."""

    one: StoredTensor
    two: StoredTensor
    count: int = 0
    largest: float = 0.0
    at: int = 0
    values: tuple[float, float] = (0.0, 0.0)

    @property
    def same_dtype(self) -> bool:
        return self.one.spec.dtype == self.two.spec.dtype

    def within(self, tolerance: float | None) -> bool:
        """Whether that is no difference: of bits without a tolerance, else of values."""
        return not self.count and self.same_dtype if tolerance is None else self.largest <= tolerance

    def line(self) -> str:
        spec = self.one.spec
        text = f"{spec.kind} {spec.name}:"
        if not self.same_dtype:
            text += f" {DTYPE_NAMES[spec.dtype]} in A, {DTYPE_NAMES[self.two.spec.dtype]} in B;"
        if not self.count:
            return f"{text} the values are the same"
        where = list(_index(self.at, spec.shape))
        return (
            f"{text} max |difference| {self.largest:.6g} at {where} ({self.values[0]!r} in A, {self.values[1]!r} in B); "
            f"{self.count:,} of {spec.numel:,} elements differ"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _CommonPart:
    """Elements [first, first + count) of a tensor of both."""

    apart: _Apart
    first: int
    count: int


def diff_checkpoints(one: Path, two: Path, tolerance: float | None, console: Console) -> bool:
    """Tell a person what differs; whether nothing does, bit by bit, or beyond the tolerance.

    Raises:
        CheckpointError: when one of them is damaged.
    """
    readers = (CheckpointReader(one), CheckpointReader(two))
    console.note(f"A: {one}")
    console.note(f"B: {two}")
    missing, common = _paired(*readers)
    said = [*_state_lines(state_of(readers[0]), state_of(readers[1]), tolerance), _alias_lines(*readers), missing]
    with one_core():
        compared = _compare(readers, common, console)
    apart = sorted((each for each in compared if not each.within(tolerance)), key=lambda each: -each.largest)
    said.append([each.line() for each in apart])
    for lines in said:
        _tell(console, lines)
    if not any(said):
        how = "bit by bit" if tolerance is None else f"within {tolerance:g}"
        count = sum(each.one.spec.numel for each in compared)
        console.note(f"the same {how}: {len(compared):,} tensors, {count:,} elements")
        return True
    both = f"{len(compared):,} tensors that both have"
    console.note(f"{len(apart):,} of {both} differ" if apart or not compared else f"the {both} are the same")
    return False


def _tell(console: Console, lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        console.note(line)
    if len(lines) > _SHOWN:
        console.note(f"... and {len(lines) - _SHOWN:,} more")


# Counters, settings and names


def _state_lines(one: TrainerState | None, two: TrainerState | None, tolerance: float | None) -> list[list[str]]:
    """Lines for counters, and lines for settings."""
    if one is None or two is None:
        names = [name for name, state in (("A", one), ("B", two)) if state is None]
        return [[f"{names[0]} has no trainer_state.json"]] if len(names) == 1 else []
    counters = [field.name for field in fields(one) if field.name not in ("settings", "tracker")]
    first, second = ({name: getattr(state, name) for name in counters} for state in (one, two))
    return [[*_differences(first, second, tolerance)], [*_differences(one.settings, two.settings, None)]]


def _differences(one: Mapping[str, Any], two: Mapping[str, Any], tolerance: float | None) -> Iterator[str]:
    for name in {**one, **two}:
        here, there = one.get(name, _ABSENT), two.get(name, _ABSENT)
        close = tolerance is not None and isinstance(here, float) and isinstance(there, float)
        if here != there and not (close and abs(here - there) <= (tolerance or 0)):
            yield f"{name}: {here!r} in A, {there!r} in B"


def _alias_lines(one: CheckpointReader, two: CheckpointReader) -> list[str]:
    lines = _differences(one.manifest.aliases, two.manifest.aliases, None)
    return [f"alias {line}" for line in lines]


def _paired(one: CheckpointReader, two: CheckpointReader) -> tuple[list[str], list[_Apart]]:
    """Lines for tensors that only one has or that have other shapes, and the others, as they lie in A."""
    first, second = ({(t.spec.kind, t.spec.name): t for t in each.manifest.tensors} for each in (one, two))
    lines = [*_only(first, second, "A"), *_only(second, first, "B")]
    common = []
    for key, tensor in first.items():
        other = second.get(key)
        if other is not None and other.spec.shape != tensor.spec.shape:
            lines.append(f"{' '.join(key)}: {list(tensor.spec.shape)} in A, {list(other.spec.shape)} in B")
        elif other is not None:
            common.append(_Apart(one=tensor, two=other))
    return lines, sorted(common, key=lambda each: (each.one.path, each.one.begin))


def _only(here: Iterable[tuple[str, str]], there: Iterable[tuple[str, str]], which: str) -> Iterator[str]:
    """Lines for what only one has: a kind that the other has nothing of is one line."""
    others = set(there)
    kinds = {kind for kind, _ in others}
    absent = Counter(kind for kind, _ in here if kind not in kinds)
    yield from (f"{kind} ({count:,} tensors): only in {which}" for kind, count in absent.items())
    yield from (
        f"{kind} {name}: only in {which}" for kind, name in here if kind in kinds and (kind, name) not in others
    )


# Elements


def _compare(readers: Sequence[CheckpointReader], common: list[_Apart], console: Console) -> list[_Apart]:
    moved = Throughput(console, "comparing", sum(each.one.spec.nbytes + each.two.spec.nbytes for each in common))
    for batch in _batches(common):
        memories = []
        for reader, side in zip(readers, ("one", "two"), strict=True):
            tensors = [getattr(part.apart, side) for part in batch]
            memory = [torch.empty(part.count, dtype=t.spec.dtype) for part, t in zip(batch, tensors, strict=True)]
            parts = zip(batch, tensors, memory, strict=True)
            reader.read(
                [ReadTarget(tensor=t, first=part.first, values=TieredTensor.of(m)) for part, t, m in parts],
                lambda: None,
            )
            moved(sum(each.nbytes for each in memory))
            memories.append(memory)
        for part, here, there in zip(batch, *memories, strict=True):
            _note(part, here, there)
    return common


def _batches(common: Iterable[_Apart]) -> Iterator[list[_CommonPart]]:
    """All elements, as many at a time as a window takes."""
    batch: list[_CommonPart] = []
    filled = 0
    for apart in common:
        size = apart.one.spec.dtype.itemsize + apart.two.spec.dtype.itemsize
        first, numel = 0, apart.one.spec.numel
        while first < numel:
            count = min(numel - first, max(1, (_WINDOW_BYTES - filled) // size))
            batch.append(_CommonPart(apart=apart, first=first, count=count))
            first, filled = first + count, filled + count * size
            if filled + size > _WINDOW_BYTES:
                yield batch
                batch, filled = [], 0
    if batch:
        yield batch


def _note(part: _CommonPart, here: torch.Tensor, there: torch.Tensor) -> None:
    """Take these elements of both into account."""
    apart = part.apart
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
    if not apart.count or float(distance[worst]) > apart.largest:
        apart.largest, apart.at = float(distance[worst]), part.first + int(places[worst])
        apart.values = (float(one[worst]), float(two[worst]))
    apart.count += len(places)


def _index(at: int, shape: Sequence[int]) -> Iterator[int]:
    for dim in range(len(shape)):
        inner = math.prod(shape[dim + 1 :])
        yield at // inner
        at %= inner
