"""The differences between two checkpoints: counters, settings and every element of every tensor."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeromesh.checkpoint.format.safetensors_layout import DTYPE_NAMES, TensorSpec
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.errors import counted
from zeromesh.trainer.checkpoints.trainer_state import state_of
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.reading import Throughput, read_tensors

_SHOWN = 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = "(absent)"
_Tensors = dict[tuple[str, str], TensorSpec]


def diff_checkpoints(one: Path, two: Path, tolerance: float | None, console: Console) -> bool:
    """Show the differences; returns True for bitwise equality, or equality within the tolerance.

    Raises:
        CheckpointError: when one of them is damaged.
    """
    readers = CheckpointReader(one), CheckpointReader(two)
    console.note(f"A: {one}")
    console.note(f"B: {two}")
    a, b = ({(each.kind, each.name): each for each in reader.manifest.tensors} for reader in readers)
    shared = [key for key in a if key in b and a[key].shape == b[key].shape]
    shared.sort(key=lambda key: (a[key].path, a[key].begin))
    moved = Throughput(console, "comparing", sum(each[key].nbytes for key in shared for each in (a, b)))
    values = (
        read_tensors(reader, [held[key] for key in shared], moved) for reader, held in zip(readers, (a, b), strict=True)
    )
    rows = (_compared(*here, *there) for here, there in zip(*values, strict=True))
    apart = sorted(row for row in rows if row[1] and (tolerance is None or -row[0] > tolerance))
    tensors = [*_one_sided(a, b, "A"), *_one_sided(b, a, "B"), *_other_shapes(a, b)]
    differences = [
        [*_differences(_facts(readers[0]), _facts(readers[1]), tolerance)],
        tensors,
        [line for _, line in apart],
    ]
    for lines in differences:
        for line in lines[:_SHOWN]:
            console.note(line)
        if len(lines) > _SHOWN:
            console.note(f"... and {len(lines) - _SHOWN:,} more")
    if not any(differences):
        how = "bit by bit" if tolerance is None else f"within {tolerance:g}"
        count = sum(a[key].numel for key in shared)
        console.note(f"the same {how}: {counted(len(shared), 'tensor', ',')}, {counted(count, 'element', ',')}")
        return True
    both = f"{counted(len(shared), 'tensor', ',')} that both have"
    console.note(f"{len(apart):,} of {both} differ" if apart or not shared else f"the {both} are the same")
    return False


def _compared(one: TensorSpec, here: torch.Tensor, two: TensorSpec, there: torch.Tensor) -> tuple[float, str]:
    """Return minus the largest absolute difference of two elements, and a line with its place; an empty line for equal bits."""
    text, same_dtype = f"{one.kind} {one.name}:", here.dtype == there.dtype
    if same_dtype:
        bits = _BITS[here.dtype.itemsize]
        differ = here.view(bits) != there.view(bits)
    else:
        text += f" {DTYPE_NAMES[here.dtype]} in A, {DTYPE_NAMES[there.dtype]} in B;"
        differ = (here != there) & ~(here.isnan() & there.isnan())
    places = differ.view(-1).nonzero()[:, 0]
    if not len(places):
        return 0.0, "" if same_dtype else f"{text} the values are the same"
    ours, theirs = (each.view(-1)[places].double() for each in (here, there))
    distance = (ours - theirs).abs()
    distance[ours.isnan() & theirs.isnan()] = 0.0
    distance[distance.isnan()] = math.inf
    worst = int(distance.argmax())
    where = [int(each) for each in np.unravel_index(int(places[worst]), one.shape)]
    return -float(distance[worst]), (
        f"{text} max |difference| {float(distance[worst]):.6g} at {where} ({float(ours[worst])!r} in A, "
        f"{float(theirs[worst])!r} in B); {len(places):,} of {one.numel:,} elements differ"
    )


def _facts(reader: CheckpointReader) -> dict[str, Any]:
    """Return aliases, counters and settings by name; the last two only for a trainer's checkpoint."""
    state = state_of(reader)
    facts = {} if state is None else asdict(state)
    settings: dict[str, Any] = facts.pop("settings", {})
    facts.pop("tracker", None)
    return {**{f"alias {name}": first for name, first in reader.manifest.aliases.items()}, **facts, **settings}


def _differences(one: Mapping[str, Any], two: Mapping[str, Any], tolerance: float | None) -> Iterator[str]:
    for name in {**one, **two}:
        here, there = one.get(name, _ABSENT), two.get(name, _ABSENT)
        close = tolerance is not None and isinstance(here, float) and isinstance(there, float)
        if here != there and not (close and abs(here - there) <= (tolerance or 0)):
            yield f"{name}: {here!r} in A, {there!r} in B"


def _one_sided(here: _Tensors, there: _Tensors, which: str) -> Iterator[str]:
    """Yield lines about tensors that only one checkpoint has; a kind that the other one lacks is one line."""
    kinds = {kind for kind, _ in there}
    absent = Counter(f"{kind} {name}" if kind in kinds else kind for kind, name in here if (kind, name) not in there)
    for what, count in absent.items():
        several = "" if " " in what else f" ({counted(count, 'tensor', ',')})"
        yield f"{what}{several}: only in {which}"


def _other_shapes(one: _Tensors, two: _Tensors) -> Iterator[str]:
    for (kind, name), tensor in one.items():
        other = two.get((kind, name), tensor)
        if tensor.shape != other.shape:
            yield f"{kind} {name}: {list(tensor.shape)} in A, {list(other.shape)} in B"
