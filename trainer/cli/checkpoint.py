"""`zeromesh checkpoint`: looks at checkpoints, verifies, exports, merges and compares them. Nothing heavy is imported to parse."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeromesh.errors import StorageError

_DTYPES = ("float32", "bfloat16", "float16", "keep")
_SHOWN_TENSORS = 20


def add_checkpoint_command(commands: Any) -> None:
    """Add `checkpoint` and its commands to the subparsers of `zeromesh`."""
    parser = commands.add_parser("checkpoint", help="list, inspect, verify, export, merge and compare checkpoints")
    parser.set_defaults(nproc=None, worker=False, overrides=[])
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = actions.add_parser("list", help="the checkpoints of a run: what each holds, and whether it is whole")
    listing.add_argument("path", type=Path, metavar="RUN_OR_DIR", help="a run's directory, or one of checkpoints")

    inspect = actions.add_parser("inspect", help="what one checkpoint holds")
    inspect.add_argument("path", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run: its newest one")
    inspect.add_argument(
        "--tensors", metavar="PATTERN", help="also a line for each tensor of such a name, as in '*norm*'"
    )
    for command in (listing, inspect):
        command.add_argument("--json", action="store_true", help="print JSON")

    verify = actions.add_parser(
        "verify", help="read every byte and name every damaged file; exit code 1 if there is one"
    )
    verify.add_argument("path", type=Path, metavar="CHECKPOINT_OR_RUN", help="a checkpoint, or a run: all of them")

    export = actions.add_parser("export", help="write the model as a plain Hugging Face model directory")
    export.add_argument("path", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run: its newest one")
    export.add_argument("out", type=Path, metavar="OUT", help="a directory that does not exist or is empty")
    export.add_argument(
        "--dtype", choices=_DTYPES, default="float32", help="of floating-point weights (default float32)"
    )
    export.add_argument(
        "--merge",
        action="store_true",
        help="merge adapters into the weights of the model, instead of writing the adapter alone",
    )
    export.add_argument("--ema", action="store_true", help="write the averaged weights of a run with ema.decay")

    merge = actions.add_parser("merge", help="one checkpoint from the parts that hosts without a shared disk wrote")
    merge.add_argument("parts", nargs="+", type=Path, metavar="PART", help="the part of each host")
    merge.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory of the whole checkpoint")

    diff = actions.add_parser("diff", help="what differs between two checkpoints; exit code 1 if anything does")
    diff.add_argument("one", type=Path, metavar="A", help="a checkpoint, or a run: its newest one")
    diff.add_argument("two", type=Path, metavar="B", help="another")
    diff.add_argument(
        "--tolerance", type=_distance, metavar="X", help="ignore differences up to X (default: compare bitwise)"
    )


def _distance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is a number >= 0")
    return value


def run_checkpoint(options: argparse.Namespace) -> int:
    """Run one of the commands; returns its exit code.

    Raises:
        ZeromeshError: for whatever went wrong.
    """
    try:
        return _ACTIONS[options.action](options)
    except BrokenPipeError:
        # Who read the output has seen enough; what is flushed at exit has nowhere to go either.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        raise StorageError(f"{error.filename or options.action}: {error.strerror or error}") from error


def _list(options: argparse.Namespace) -> int:
    from zeromesh.trainer.tools.checkpoint.inspect import list_checkpoints

    sys.stdout.write(list_checkpoints(options.path, as_json=options.json))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from zeromesh.trainer.tools.checkpoint.inspect import inspect_checkpoint

    sys.stdout.write(inspect_checkpoint(options.path, options.tensors, as_json=options.json))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from zeromesh.checkpoint.io.reader import CheckpointReader
    from zeromesh.checkpoint.verify import find_damage
    from zeromesh.errors import CheckpointError
    from zeromesh.trainer.monitoring.console import Console
    from zeromesh.trainer.tools.checkpoint.paths import checkpoints_at
    from zeromesh.trainer.tools.checkpoint.progress import Throughput

    console, damaged = Console(), 0
    for directory in checkpoints_at(options.path):
        try:
            reader = CheckpointReader(directory, checked=False)
        except CheckpointError as error:
            console.note(f"{directory}: DAMAGED: {error}")
            damaged += 1
            continue
        moved = Throughput(console, f"verifying {directory.name}", sum(p.end - p.begin for p in reader.pieces()))
        found = list(find_damage(reader, moved))
        index, count = reader.manifest.part
        part = f" (part {index + 1} of {count})" if count > 1 else ""
        files = f"{len(reader.manifest.files)} files, {moved}"
        verdict = f"DAMAGED: {len(found)} of {files}" if found else f"whole: {files}"
        console.note(f"{directory}{part}: {verdict}")
        for each in found:
            for line in _damage_lines(each.path, each.reasons, each.tensors):
                console.note(line)
        damaged += bool(found)
    return 1 if damaged else 0


def _damage_lines(path: str, reasons: tuple[str, ...], tensors: tuple[str, ...]) -> list[str]:
    lines = [f"  {path}", *(f"    {reason}" for reason in reasons)]
    if tensors:
        more = f" and {len(tensors) - _SHOWN_TENSORS} more" if len(tensors) > _SHOWN_TENSORS else ""
        lines.append(f"    tensors: {', '.join(tensors[:_SHOWN_TENSORS])}{more}")
    return lines


def _export(options: argparse.Namespace) -> int:
    from zeromesh.trainer.monitoring.console import Console
    from zeromesh.trainer.tools.checkpoint.paths import checkpoint_at

    directory, console = checkpoint_at(options.path), Console()
    console.status("loading transformers")
    from zeromesh.trainer.tools.checkpoint.export import export_checkpoint

    export_checkpoint(directory, options.out, options.dtype, console, merge=options.merge, ema=options.ema)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from zeromesh.checkpoint.multi_host.merge import merge, open_parts
    from zeromesh.trainer.monitoring.console import Console
    from zeromesh.trainer.tools.checkpoint.progress import Throughput

    parts = open_parts(options.parts)
    console = Console()
    total = sum(piece.end - piece.begin for part in parts for piece in part.pieces())
    moved = Throughput(console, "merging", total)
    whole = merge(parts, options.out, moved)
    console.note(f"{options.out}: step {whole.step} of {len(parts)} parts, {len(whole.files)} files, {moved}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    from zeromesh.trainer.monitoring.console import Console
    from zeromesh.trainer.tools.checkpoint.diff import diff_checkpoints
    from zeromesh.trainer.tools.checkpoint.paths import checkpoint_at

    one, two = checkpoint_at(options.one), checkpoint_at(options.two)
    return 0 if diff_checkpoints(one, two, options.tolerance, Console()) else 1


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "inspect": _inspect,
    "verify": _verify,
    "export": _export,
    "merge": _merge,
    "diff": _diff,
}
