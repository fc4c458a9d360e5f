"""The contents of checkpoints as text or as JSON (`zeromesh checkpoint list` and `inspect`), and common functions of the checkpoint
tools: paths of the command line, counters, and reading tensors."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import NAME, Manifest
from zeromesh.checkpoint.format.safetensors_layout import DTYPE_NAMES, TensorSpec
from zeromesh.checkpoint.io.file_slices import PlacedValues, overlapping
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, ConfigError, StorageError, counted, printable, ranks_text
from zeromesh.offload import TieredTensor
from zeromesh.trainer.checkpoints.manager import FOLDER, stores_at
from zeromesh.trainer.checkpoints.trainer_state import state_of
from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds, table_lines
from zeromesh.trainer.monitoring.console import Console

WINDOW_BYTES = 32 << 20
"""The most bytes of tensors that are read at once."""


def store_at(path: Path) -> CheckpointStore:
    """Return the store of a run's directory, or of a directory of checkpoints. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    for store in stores_at(path):
        if store.steps() or store.leftovers():
            return store
    hint = "; it is one: `inspect` shows it" if (path / NAME).exists() else ""
    raise ConfigError(f"{path} holds no checkpoints: neither step-* nor {FOLDER}/step-*{hint}")


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or all of a run, newest first. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if (path / NAME).exists() or (CheckpointStore.step_of(path) is not None and path.is_dir()):
        return [path]
    store = store_at(path)
    steps = store.steps()
    if not steps:
        left = ", ".join(store.leftovers())
        raise ConfigError(
            f"{store.root} holds no checkpoint, but {left}, which a kill has left behind or a run is writing"
        )
    return [store.path(step) for step in steps]


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
    """Yield verified tensors of a checkpoint with their values, and read as many at once as fit into a window, or one.

    `moved` gets the bytes of each window. Raises `CheckpointError` where the checkpoint is damaged.
    """
    window: list[tuple[TensorSpec, torch.Tensor]] = []
    nbytes = 0
    for tensor in (*tensors, None):
        if window and (tensor is None or nbytes + tensor.nbytes > WINDOW_BYTES):
            reader.read(
                [PlacedValues.stored(stored, 0, TieredTensor.of(values.view(-1))) for stored, values in window],
                lambda: None,
            )
            moved(nbytes)
            yield from window
            window, nbytes = [], 0
        if tensor is not None:
            nbytes += tensor.nbytes
            window.append((tensor, torch.empty(tensor.shape, dtype=tensor.dtype)))


class Throughput:
    """Called with the bytes of each finished transfer, shows the progress of all; as text, their bytes and seconds."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, total
        self._done = 0
        self._began = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        of_total = f"{human_bytes(self._done)} of {human_bytes(self._total)}"
        self._console.status(f"{self._what}: {of_total}, {self._rate()}")

    def _rate(self) -> str:
        return f"{human_bytes(self._done / max(time.monotonic() - self._began, 1e-6))}/s"

    def __str__(self) -> str:
        return f"{human_bytes(self._done)} in {human_seconds(time.monotonic() - self._began)} ({self._rate()})"


COLUMNS = ("step", "date (UTC)", "size", "loss", "eval loss", "tokens", "written by", "state")
_NUMBERS = frozenset({"step", "size", "loss", "eval loss", "tokens", "tensors", "parameters", "bytes"})
_SEPARATE_LINES = frozenset({"step", "tracker", "settings"})


def list_checkpoints(path: Path, *, as_json: bool) -> str:
    """Return the checkpoints of a run or a directory, oldest first.

    Raises:
        ConfigError: where there are none.
    """
    store = store_at(path)
    found = [summary_of(store, step) for step in reversed(store.steps())]
    left = store.leftovers()
    if as_json:
        return _json({"directory": str(store.root), "checkpoints": found, "leftovers": left})
    rows = [summary_row(each) for each in found]
    lines = [str(store.root), *(table_lines(COLUMNS, rows, _NUMBERS) if rows else ["no checkpoints"])]
    what = "being written or removed, or left behind by a kill; the next start of the run removes it"
    return _text([*lines, *(f"{name}: {what}" for name in left)])


def summary_of(store: CheckpointStore, step: int) -> dict[str, Any]:
    """Return the known facts of a checkpoint without reading its weights; `reason` is the reason why it is unusable, if so."""
    directory = store.path(step)
    size = sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(directory) for name in names)
    found: dict[str, Any] = {
        "step": step,
        "path": str(directory),
        "date": _date(directory),
        "bytes": size,
        "whole": False,
    }
    found |= dict.fromkeys(("part", "reason", "loss", "eval_loss", "tokens")) | {"layout": {}}
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
    path = directory / NAME
    seconds = (path if path.is_file() else directory).stat().st_mtime
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


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


def inspect_checkpoint(path: Path, pattern: str | None, *, as_json: bool) -> str:
    """Return the contents of a checkpoint; with a pattern also the tensors with matching names.

    Raises:
        CheckpointError: when it is damaged.
        ConfigError: where there is none, or no tensor has such a name.
    """
    directory = checkpoint_at(path)
    reader = CheckpointReader(directory, checked=False)
    manifest, whole = reader.manifest, reader.manifest.part[1] == 1
    if whole:
        reader = CheckpointReader(directory)
    state = state_of(reader) if whole else None
    content = {
        "path": str(directory),
        "date": _date(directory),
        "step": manifest.step,
        "state": None if state is None else asdict(state),
        "kinds": _kinds(manifest),
        "files": {name: record.nbytes for name, record in sorted(manifest.files.items())},
        "bytes": manifest.nbytes,
        "aliases": dict(manifest.aliases),
        "layout": dict(manifest.layout),
        "part": list(manifest.part),
    }
    if pattern is not None:
        content["tensors"] = [_tensor(manifest, each) for each in _matching(manifest, pattern)]
    return _json(content) if as_json else _text(_lines(content, manifest, f"{directory}{part_text(reader)}"))


def _matching(manifest: Manifest, pattern: str) -> list[TensorSpec]:
    glob = pattern if any(letter in pattern for letter in "*?[") else f"*{pattern}*"
    found = [tensor for tensor in manifest.tensors if fnmatchcase(tensor.name, glob)]
    if not found:
        raise ConfigError(f"--tensors {pattern!r}: no tensor has such a name; --tensors '*' shows all")
    return found


def _kinds(manifest: Manifest) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for spec in manifest.tensors:
        kind = found.setdefault(spec.kind, {"tensors": 0, "parameters": 0, "bytes": 0, "dtypes": []})
        kind["tensors"] += 1
        kind["parameters"] += spec.numel
        kind["bytes"] += spec.nbytes
        if DTYPE_NAMES[spec.dtype] not in kind["dtypes"]:
            kind["dtypes"].append(DTYPE_NAMES[spec.dtype])
    return found


def _tensor(manifest: Manifest, tensor: TensorSpec) -> dict[str, Any]:
    pieces = manifest.files[tensor.path].pieces
    return {
        "kind": tensor.kind,
        "name": tensor.name,
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "file": tensor.path,
        "begin": tensor.begin,
        "end": tensor.end,
        "ranks": sorted({piece.rank for piece in overlapping(pieces, tensor.begin, tensor.end)}),
    }


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
        columns = ("kind", "name", "dtype", "shape", "file", "begin", "end", "written by")
        yield from ("", *table_lines(columns, rows, _NUMBERS))


def _text(lines: Iterator[str] | Sequence[str]) -> str:
    return "".join(f"{printable(line)}\n" for line in lines)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"
