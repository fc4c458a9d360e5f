"""What checkpoints hold, as text for a person or as JSON: `zeromesh checkpoint list` and `inspect`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.format import manifest as manifests
from zeromesh.checkpoint.format.manifest import Manifest, StoredTensor
from zeromesh.checkpoint.format.safetensors_layout import DTYPE_NAMES
from zeromesh.checkpoint.io.file_slices import overlapping
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, ConfigError, StorageError, printable
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, name_in
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.trainer.tools.checkpoint.paths import checkpoint_at, store_at

COLUMNS = ("step", "date (UTC)", "size", "loss", "eval loss", "tokens", "written by", "state")
_NUMBERS = frozenset({"step", "size", "loss", "eval loss", "tokens", "tensors", "parameters", "bytes"})
_APART = frozenset({"step", "tracker", "settings"})
"""Of the counters, what has lines of its own."""


def list_checkpoints(path: Path, *, as_json: bool) -> str:
    """The checkpoints of a run or a directory, oldest first.

    Raises:
        ConfigError: where there are none.
    """
    store = store_at(path)
    found = [summary_of(store, step) for step in reversed(store.steps())]
    left = store.leftovers()
    if as_json:
        return _json({"directory": str(store.root), "checkpoints": found, "leftovers": left})
    rows = [summary_row(each) for each in found]
    lines = [str(store.root), *(_table(COLUMNS, rows) if rows else ["no checkpoints"])]
    lines += [
        f"{name}: being written or removed, or left behind by a kill; the next start of the run removes it"
        for name in left
    ]
    return _text(lines)


def summary_of(store: CheckpointStore, step: int) -> dict[str, Any]:
    """What is known of a checkpoint without reading its weights; `reason` says why it cannot be used, if so."""
    directory = store.path(step)
    found: dict[str, Any] = {"step": step, "path": str(directory), "date": _date(directory), "bytes": _size(directory)}
    found |= {
        "whole": False,
        "part": None,
        "reason": None,
        "loss": None,
        "eval_loss": None,
        "tokens": None,
        "layout": {},
    }
    try:
        reader = CheckpointReader(directory, parts=True)
        found["layout"] = dict(reader.manifest.layout)
        if reader.manifest.step != step:
            raise CheckpointError(f"its manifest is of step {reader.manifest.step}")
        state = state_of(reader)
    except (CheckpointError, StorageError) as error:
        found["reason"] = str(error)
        return found
    found |= {"whole": reader.manifest.part[1] == 1, "part": list(reader.manifest.part)}
    if state is not None:
        found |= {"loss": state.loss, "eval_loss": state.eval_loss, "tokens": state.tokens}
    return found


def state_of(reader: CheckpointReader) -> TrainerState | None:
    """Its counters; None where it has none. Raises `CheckpointError` for those that no trainer has written."""
    name = name_in(reader.manifest.files)
    if name not in reader.manifest.files:
        return None
    return TrainerState.from_json(reader.document(name), str(reader.directory))


def _date(directory: Path) -> str:
    """When it was written, in UTC: the manifest comes last."""
    path = directory / manifests.NAME
    seconds = (path if path.is_file() else directory).stat().st_mtime
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _size(directory: Path) -> int:
    """Bytes of all files."""
    return sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(directory) for name in names)


def summary_row(found: Mapping[str, Any]) -> list[str]:
    """The texts of a summary for the columns of a table, `COLUMNS`."""
    numbers = [found["loss"], found["eval_loss"]]
    return [
        str(found["step"]),
        found["date"].replace("T", " ").removesuffix("Z"),
        human_bytes(found["bytes"]),
        *("" if number is None else f"{number:.4f}" for number in numbers),
        "" if found["tokens"] is None else human_count(found["tokens"]),
        _layout_text(found["layout"]),
        _state_text(found),
    ]


def _state_text(found: Mapping[str, Any]) -> str:
    if found["reason"] is not None:
        return f"NOT WHOLE: {found['reason']}"
    return "whole" if found["whole"] else f"part {found['part'][0] + 1} of {found['part'][1]}"


def _layout_text(layout: Mapping[str, Any]) -> str:
    """The layout as far as it is of the form that is written here: it is only information."""
    mesh = layout.get("mesh")
    axes = [f"{axis} {size}" for axis, size in mesh.items() if size != 1] if isinstance(mesh, dict) else []
    ranks = layout.get("ranks")
    words = [f"{ranks} rank{'' if ranks == 1 else 's'}"] if ranks is not None else []
    words += axes
    words += [f"stage {layout['stage']}"] if "stage" in layout else []
    words += ["/".join(str(layout[name]) for name in ("compute", "master") if name in layout)]
    return ", ".join(word for word in words if word)


# One of them


def inspect_checkpoint(path: Path, pattern: str | None, *, as_json: bool) -> str:
    """What a checkpoint holds; with a pattern also the tensors of such names.

    Raises:
        CheckpointError: when it is damaged.
        ConfigError: where there is none, or no tensor has such a name.
    """
    directory = checkpoint_at(path)
    reader = CheckpointReader(directory, checked=False)
    if reader.manifest.part[1] == 1:
        reader = CheckpointReader(directory)
    state = state_of(reader) if reader.manifest.part[1] == 1 else None
    tensors = [] if pattern is None else _matching(reader.manifest, pattern)
    if as_json:
        content = _content(reader, state)
        return _json(
            content if pattern is None else {**content, "tensors": [_tensor(reader, each) for each in tensors]}
        )
    lines = _lines(reader, state)
    if tensors:
        lines += [
            "",
            *_table(("kind", "name", "dtype", "shape", "file", "begin", "end", "written by"), _rows(reader, tensors)),
        ]
    return _text(lines)


def _matching(manifest: Manifest, pattern: str) -> list[StoredTensor]:
    """Tensors whose name matches a pattern of the shell's kind, or has it somewhere in it."""
    glob = pattern if any(letter in pattern for letter in "*?[") else f"*{pattern}*"
    found = [tensor for tensor in manifest.tensors if fnmatchcase(tensor.spec.name, glob)]
    if not found:
        raise ConfigError(f"--tensors {pattern!r}: no tensor has such a name; --tensors '*' shows all")
    return found


def _content(reader: CheckpointReader, state: TrainerState | None) -> dict[str, Any]:
    manifest = reader.manifest
    return {
        "path": str(reader.directory),
        "date": _date(reader.directory),
        "step": manifest.step,
        "state": None if state is None else asdict(state),
        "kinds": _kinds(manifest),
        "files": {path: record.nbytes for path, record in sorted(manifest.files.items())},
        "bytes": manifest.nbytes,
        "aliases": dict(manifest.aliases),
        "layout": dict(manifest.layout),
        "part": list(manifest.part),
    }


def _kinds(manifest: Manifest) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for tensor in manifest.tensors:
        spec = tensor.spec
        kind = found.setdefault(spec.kind, {"tensors": 0, "parameters": 0, "bytes": 0, "dtypes": []})
        kind["tensors"] += 1
        kind["parameters"] += spec.numel
        kind["bytes"] += spec.nbytes
        if DTYPE_NAMES[spec.dtype] not in kind["dtypes"]:
            kind["dtypes"].append(DTYPE_NAMES[spec.dtype])
    return found


def _tensor(reader: CheckpointReader, tensor: StoredTensor) -> dict[str, Any]:
    spec = tensor.spec
    return {
        "kind": spec.kind,
        "name": spec.name,
        "dtype": DTYPE_NAMES[spec.dtype],
        "shape": list(spec.shape),
        "file": tensor.path,
        "begin": tensor.begin,
        "end": tensor.end,
        "ranks": _writers(reader, tensor),
    }


def _writers(reader: CheckpointReader, tensor: StoredTensor) -> list[int]:
    pieces = reader.manifest.files[tensor.path].pieces
    return sorted({piece.rank for piece in overlapping(pieces, tensor.begin, tensor.end)})


def _rows(reader: CheckpointReader, tensors: Sequence[StoredTensor]) -> list[list[str]]:
    rows = []
    for tensor in tensors:
        place = _tensor(reader, tensor)
        ranks = place.pop("ranks")
        rows.append([*(str(value) for value in place.values()), _ranks_text(ranks)])
    return rows


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}" if ranks else ""


def _lines(reader: CheckpointReader, state: TrainerState | None) -> list[str]:
    manifest = reader.manifest
    index, count = manifest.part
    part = f" (part {index + 1} of {count})" if count > 1 else ""
    lines = [f"{reader.directory}{part}", f"step           {manifest.step}"]
    if state is not None:
        values = {field.name: getattr(state, field.name) for field in fields(state) if field.name not in _APART}
        lines += [f"{name:<14} {value}" for name, value in values.items() if value is not None]
        lines += [f"{'tracker ' + name:<14} {value}" for name, value in state.tracker.items()]
    lines.append(f"{'written by':<14} {_layout_text(manifest.layout) or 'unknown'}")
    lines.append(f"{'date':<14} {_date(reader.directory).replace('T', ' ').removesuffix('Z')} UTC")
    lines.append(f"{'size':<14} {human_bytes(manifest.nbytes)} in {len(manifest.files)} files")
    kinds = [
        [name, str(kind["tensors"]), f"{kind['parameters']:,}", human_bytes(kind["bytes"]), ", ".join(kind["dtypes"])]
        for name, kind in _kinds(manifest).items()
    ]
    lines += ["", *_table(("kind", "tensors", "parameters", "size", "dtypes"), kinds)]
    files = [[path, f"{record.nbytes:,}", str(len(record.pieces))] for path, record in sorted(manifest.files.items())]
    lines += ["", *_table(("file", "bytes", "pieces"), files)]
    if manifest.aliases:
        lines += ["", "aliases", *(f"  {alias} is {name}" for alias, name in manifest.aliases.items())]
    if state is not None and state.settings:
        lines += ["", "settings", *(f"  {name}: {json.dumps(value)}" for name, value in state.settings.items())]
    return lines


# Text


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under their columns, numbers to the right."""
    every = [columns, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in every) for place in range(len(columns))]
    return [
        "  ".join(
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ).rstrip()
        for row in every
    ]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{printable(line)}\n" for line in lines)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"
