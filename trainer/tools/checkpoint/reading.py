"""The contents of checkpoints as text or JSON, and what all commands for checkpoints need: paths, counters, reading of tensors."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.io.file_slices import WORDS, PlacedValues, overlapping
from zeromesh.checkpoint.io.format import DTYPE_NAMES, MANIFEST, Manifest, TensorSpec
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.store import FOLDER, CheckpointStore, stores_at
from zeromesh.errors import CheckpointError, ConfigError, StorageError, counted, first_lines, ranks_text
from zeromesh.intervals import grouped
from zeromesh.offload import TieredTensor
from zeromesh.trainer.checkpoints.trainer_state import state_of
from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds, table_lines
from zeromesh.trainer.monitoring.console import Console

WINDOW_BYTES = 32 << 20  # The most bytes of tensors that are read at once.


def store_at(path: Path) -> CheckpointStore:
    """Return the store of a run's directory, or of a directory of checkpoints. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    for store in stores_at(path):
        if store.steps() or store.leftovers():
            return store
    hint = "; it is one: `inspect` shows it" if (path / MANIFEST).exists() else ""
    raise ConfigError(f"{path} holds no checkpoints: neither step-* nor {FOLDER}/step-*{hint}")


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or all of a run, newest first. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if (path / MANIFEST).exists() or (CheckpointStore.step_of(path) is not None and path.is_dir()):
        return [path]
    store = store_at(path)
    if not (found := store.paths()):
        left = ", ".join(store.leftovers())
        raise ConfigError(f"{store.root} holds no checkpoint, but {left}, which a kill has left or a run is writing")
    return found


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest of a run. Raises `ConfigError` where there is none."""
    return checkpoints_at(path)[0]


def part_text(reader: CheckpointReader) -> str:
    """Return the part number of a partial checkpoint, such as ` (part 1 of 2)`; empty for a whole one."""
    index, count = reader.manifest.part
    return f" (part {index + 1} of {count})" if count > 1 else ""


def read_tensors(
    reader: CheckpointReader, tensors: Iterable[TensorSpec], moved: Callable[[int], object]
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield each tensor with its verified value, read in windows, whose bytes `moved` gets. Raises `CheckpointError` for damage."""
    window: list[tuple[TensorSpec, torch.Tensor]] = []
    nbytes = 0
    for tensor in (*tensors, None):
        if window and (tensor is None or nbytes + tensor.nbytes > WINDOW_BYTES):
            reader.read([PlacedValues.stored(spec, 0, TieredTensor.of(values.view(-1))) for spec, values in window])
            moved(nbytes)
            yield from window
            window, nbytes = [], 0
        if tensor is not None:
            nbytes += tensor.nbytes
            window.append((tensor, torch.empty(tensor.shape, dtype=tensor.dtype)))


class Throughput:
    """A progress display that is called with the bytes of each finished transfer. Its text is the total bytes, seconds and rate."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, human_bytes(total)
        self._done, self._began = 0, time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        self._console.status(f"{self._what}: {human_bytes(self._done)} of {self._total}, {self._rate()}")

    def _rate(self) -> str:
        return f"{human_bytes(self._done / max(time.monotonic() - self._began, 1e-6))}/s"

    def __str__(self) -> str:
        return f"{human_bytes(self._done)} in {human_seconds(time.monotonic() - self._began)} ({self._rate()})"


COLUMNS = ("step", "date (UTC)", "size", "loss", "eval loss", "tokens", "written by", "state")
_NUMBERS = frozenset({"step", "size", "loss", "eval loss", "tokens", "tensors", "parameters", "bytes"})
_SEPARATE_LINES = frozenset({"step", "tracker", "settings"})


def list_checkpoints(path: Path, *, as_json: bool) -> list[str]:
    """Return lines about the checkpoints of a run or a directory, oldest first. Raises `ConfigError` where there are none."""
    store = store_at(path)
    found = [summary_of(store, step) for step in reversed(store.steps())]
    if as_json:
        content = {"directory": str(store.root), "checkpoints": found, "leftovers": store.leftovers()}
        return json.dumps(content, indent=1).splitlines()
    rows = [summary_row(each) for each in found]
    lines = [str(store.root), *(table_lines(COLUMNS, rows, _NUMBERS) if rows else ["no checkpoints"])]
    what = "being written or removed, or left behind by a kill; the next start of the run removes it"
    return [*lines, *(f"{name}: {what}" for name in store.leftovers())]


def summary_of(store: CheckpointStore, step: int) -> dict[str, Any]:
    """Return the known facts of a checkpoint without reading its weights; `reason` is the reason why it is unusable, if so."""
    directory = store.path(step)
    size = sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(directory) for name in names)
    found: dict[str, Any] = {"step": step, "path": str(directory), "date": _date(directory), "bytes": size}
    found |= {"whole": False, **dict.fromkeys(("part", "reason", "loss", "eval_loss", "tokens")), "layout": {}}
    try:
        reader = CheckpointReader(directory, parts=True)
        found["layout"] = dict(reader.manifest.layout)
        if reader.manifest.step != step:
            raise CheckpointError(f"its manifest is of step {reader.manifest.step}")
        state = state_of(reader)
    except (CheckpointError, StorageError) as error:
        return found | {"reason": str(error)}
    found |= {"whole": reader.manifest.part[1] == 1, "part": list(reader.manifest.part)}
    if state is not None:
        found |= {"loss": state.loss, "eval_loss": state.eval_loss, "tokens": state.tokens}
    return found


def _date(directory: Path) -> str:
    """Return the time of the manifest, which is written last, in UTC."""
    path = directory / MANIFEST
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((path if path.is_file() else directory).stat().st_mtime))


def summary_row(found: Mapping[str, Any]) -> list[str]:
    """Return the texts of a summary for the columns of a table, `COLUMNS`."""
    state = "whole" if found["whole"] else f"NOT WHOLE: {found['reason']}"
    if found["part"] is not None and not found["whole"]:
        state = f"part {found['part'][0] + 1} of {found['part'][1]}"
    return [
        str(found["step"]),
        found["date"].replace("T", " ").removesuffix("Z"),
        human_bytes(found["bytes"]),
        *("" if found[name] is None else f"{found[name]:.4f}" for name in ("loss", "eval_loss")),
        "" if found["tokens"] is None else human_count(found["tokens"]),
        _layout_text(found["layout"]),
        state,
    ]


def _layout_text(layout: Mapping[str, Any]) -> str:
    """Return the layout as text, as far as it has the expected form: it is informational only."""
    mesh, ranks = layout.get("mesh"), layout.get("ranks")
    words = [f"{counted(ranks, 'rank')}"] if ranks is not None else []
    words += [f"{axis} {size}" for axis, size in mesh.items() if size != 1] if isinstance(mesh, dict) else []
    words += [f"stage {layout['stage']}"] if "stage" in layout else []
    words += ["/".join(str(layout[name]) for name in ("compute", "master") if name in layout)]
    return ", ".join(word for word in words if word)


def inspect_checkpoint(path: Path, pattern: str | None, *, as_json: bool) -> list[str]:
    """Return lines about a checkpoint; with a pattern also about the tensors with matching names. Raises `CheckpointError` for
    damage and `ConfigError` without a checkpoint, or a tensor of such a name."""
    directory = checkpoint_at(path)
    reader = CheckpointReader(directory, checked=False)
    manifest = reader.manifest
    state = state_of(CheckpointReader(directory)) if manifest.part[1] == 1 else None
    kinds = {
        kind: {
            "tensors": len(specs),
            "parameters": sum(each.numel for each in specs),
            "bytes": sum(each.nbytes for each in specs),
            "dtypes": list(dict.fromkeys(DTYPE_NAMES[each.dtype] for each in specs)),
        }
        for kind, specs in grouped((each.kind, each) for each in manifest.tensors).items()
    }
    content: dict[str, Any] = {"path": str(directory), "date": _date(directory), "step": manifest.step}
    content |= {"state": None if state is None else asdict(state), "kinds": kinds}
    content["files"] = {name: record.nbytes for name, record in sorted(manifest.files.items())}
    content |= {"bytes": manifest.nbytes, "aliases": dict(manifest.aliases), "layout": dict(manifest.layout)}
    content["part"] = list(manifest.part)
    if pattern is not None:
        content["tensors"] = _tensors(manifest, pattern)
    if as_json:
        return json.dumps(content, indent=1).splitlines()
    return list(_lines(content, manifest, f"{directory}{part_text(reader)}"))


def _tensors(manifest: Manifest, pattern: str) -> list[dict[str, Any]]:
    glob = pattern if any(letter in pattern for letter in "*?[") else f"*{pattern}*"
    found: list[dict[str, Any]] = []
    for each in (each for each in manifest.tensors if fnmatchcase(each.name, glob)):
        ranks = {piece.rank for piece in overlapping(manifest.files[each.path].pieces, each.begin, each.end)}
        row = {"kind": each.kind, "name": each.name, "dtype": DTYPE_NAMES[each.dtype], "shape": list(each.shape)}
        found.append({**row, "file": each.path, "begin": each.begin, "end": each.end, "ranks": sorted(ranks)})
    if not found:
        raise ConfigError(f"--tensors {pattern!r}: no tensor has such a name; --tensors '*' shows all")
    return found


def _lines(content: Mapping[str, Any], manifest: Manifest, head: str) -> Iterator[str]:
    yield head
    state = content["state"] or {}
    values = {"step": content["step"], **{name: value for name, value in state.items() if name not in _SEPARATE_LINES}}
    values |= {f"tracker {name}": value for name, value in state.get("tracker", {}).items()}
    values["written by"] = _layout_text(content["layout"]) or "unknown"
    values["date"] = f"{content['date'].replace('T', ' ').removesuffix('Z')} UTC"
    values["size"] = f"{human_bytes(content['bytes'])} in {counted(len(content['files']), 'file')}"
    yield from (f"{name:<14} {value}" for name, value in values.items() if value is not None)
    kinds = [
        [name, kind["tensors"], f"{kind['parameters']:,}", human_bytes(kind["bytes"]), ", ".join(kind["dtypes"])]
        for name, kind in content["kinds"].items()
    ]
    yield from ("", *table_lines(("kind", "tensors", "parameters", "size", "dtypes"), kinds, _NUMBERS))
    files = [[path, f"{nbytes:,}", len(manifest.files[path].pieces)] for path, nbytes in content["files"].items()]
    yield from ("", *table_lines(("file", "bytes", "pieces"), files, _NUMBERS))
    if content["aliases"]:
        yield from ("", "aliases", *(f"  {alias} is {name}" for alias, name in content["aliases"].items()))
    if state.get("settings"):
        yield from ("", "settings", *(f"  {name}: {json.dumps(value)}" for name, value in state["settings"].items()))
    if tensors := content.get("tensors"):
        rows = [[*list(each.values())[:-1], ranks_text(each["ranks"], 8)] for each in tensors]
        yield from ("", *table_lines(("kind", "name", "dtype", "shape", "file", "begin", "end", "written by"), rows, _NUMBERS))


_SHOWN = 20
_ABSENT = "(absent)"


def diff_checkpoints(one: Path, two: Path, tolerance: float | None, console: Console) -> bool:
    """Show the differences, of any bit or above the tolerance; returns True for none. Raises `CheckpointError` for damage."""
    readers = CheckpointReader(one), CheckpointReader(two)
    console.note(f"A: {one}", f"B: {two}")
    a, b = ({(each.kind, each.name): each for each in reader.manifest.tensors} for reader in readers)
    shared = [key for key in a if key in b and a[key].shape == b[key].shape]
    shared.sort(key=lambda key: (a[key].path, a[key].begin))
    moved = Throughput(console, "comparing", sum(each[key].nbytes for key in shared for each in (a, b)))
    values = (read_tensors(reader, [held[key] for key in shared], moved) for reader, held in zip(readers, (a, b), strict=True))
    rows = (_compare_tensors(*here, *there) for here, there in zip(*values, strict=True))
    apart = sorted(row for row in rows if row[1] and (tolerance is None or -row[0] > tolerance))
    differences = [[*_fact_lines(*readers, tolerance)], [*_tensor_lines(a, b)], [line for _, line in apart]]
    for lines in differences:
        console.note(*first_lines(lines, _SHOWN))
    if not any(differences):
        how = "bit by bit" if tolerance is None else f"within {tolerance:g}"
        count = sum(a[key].numel for key in shared)
        console.note(f"the same {how}: {counted(len(shared), 'tensor', ',')}, {counted(count, 'element', ',')}")
        return True
    both = f"{counted(len(shared), 'tensor', ',')} that both have"
    console.note(f"{len(apart):,} of {both} differ" if apart or not shared else f"the {both} are the same")
    return False


def _compare_tensors(one: TensorSpec, here: torch.Tensor, two: TensorSpec, there: torch.Tensor) -> tuple[float, str]:
    """Return the negative of the largest difference of two tensors, to sort by, and a line about it, empty for equal bits."""
    text, same_dtype = f"{one.kind} {one.name}:", here.dtype == there.dtype
    if same_dtype:
        bits = WORDS[here.dtype.itemsize]
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
    where = [int(each) for each in torch.unravel_index(places[worst], one.shape)]
    text += f" max |difference| {float(distance[worst]):.6g} at {where}"
    pair = f"{float(ours[worst])!r} in A, {float(theirs[worst])!r} in B"
    return -float(distance[worst]), f"{text} ({pair}); {len(places):,} of {one.numel:,} elements differ"


def _fact_lines(one: CheckpointReader, two: CheckpointReader, tolerance: float | None) -> Iterator[str]:
    """Yield a line for each alias that differs and, of checkpoints of a trainer, each counter and setting."""
    found: list[dict[str, Any]] = []
    for reader in (one, two):
        state = state_of(reader)
        facts = {} if state is None else asdict(state)
        settings, _ = facts.pop("settings", {}), facts.pop("tracker", None)
        aliases = {f"alias {name}": first for name, first in reader.manifest.aliases.items()}
        found.append({**aliases, **facts, **settings})
    for name in {**found[0], **found[1]}:
        here, there = (facts.get(name, _ABSENT) for facts in found)
        close = tolerance is not None and isinstance(here, float) and isinstance(there, float)
        if here != there and not (close and abs(here - there) <= (tolerance or 0)):
            yield f"{name}: {here!r} in A, {there!r} in B"


def _tensor_lines(a: Mapping[tuple[str, str], TensorSpec], b: Mapping[tuple[str, str], TensorSpec]) -> Iterator[str]:
    """Yield a line for each tensor, or each whole kind of tensors, that one checkpoint lacks, and for each of different shapes."""
    for here, there, which in ((a, b, "A"), (b, a, "B")):
        kinds = {kind for kind, _ in there}
        absent = [f"{kind} {name}" if kind in kinds else kind for kind, name in here if (kind, name) not in there]
        for what, count in Counter(absent).items():
            several = "" if " " in what else f" ({counted(count, 'tensor', ',')})"
            yield f"{what}{several}: only in {which}"
    for (kind, name), tensor in a.items():
        other = b.get((kind, name), tensor)
        if tensor.shape != other.shape:
            yield f"{kind} {name}: {list(tensor.shape)} in A, {list(other.shape)} in B"
