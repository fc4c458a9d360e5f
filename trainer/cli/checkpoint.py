"""`zeromesh checkpoint`: lists, inspects, verifies, exports, merges and compares checkpoints."""

import argparse
import sys
from collections.abc import Callable

import torch

from zeromesh.checkpoint.io.reader import CheckpointReader, find_damage
from zeromesh.checkpoint.loader import merge, open_parts
from zeromesh.errors import CheckpointError, counted, some
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint import reading
from zeromesh.trainer.tools.checkpoint.reading import Throughput, checkpoint_at, checkpoints_at, part_text

_SHOWN_TENSORS = 20


def run_checkpoint(options: argparse.Namespace) -> int:
    """Run one of the commands; returns its exit code. Raises `ZeromeshError` for any failure."""
    threads = torch.get_num_threads()
    # Copies between files are bound by memory and disk: with threads that wait for each other they took five times as long.
    torch.set_num_threads(1)
    try:
        return _ACTIONS[options.action](options)
    finally:
        torch.set_num_threads(threads)


def _verify(options: argparse.Namespace) -> int:
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
        files = f"{counted(len(reader.manifest.files), 'file')}, {moved}"
        console.note(
            f"{directory}{part_text(reader)}: " + (f"DAMAGED: {len(found)} of {files}" if found else f"whole: {files}")
        )
        for each in found:
            console.note("\n".join([f"  {each.path}", *(f"    {reason}" for reason in each.reasons)]))
            if each.tensors:
                console.note(f"    tensors: {some(each.tensors, _SHOWN_TENSORS)}")
        damaged += bool(found)
    return 1 if damaged else 0


def _export(options: argparse.Namespace) -> int:
    directory, console = checkpoint_at(options.path), Console()
    console.status("loading transformers")
    from zeromesh.trainer.tools.checkpoint.export import export_checkpoint

    export_checkpoint(directory, options.out, options.dtype, console, merge=options.merge, ema=options.ema)
    return 0


def _merge(options: argparse.Namespace) -> int:
    parts, console = open_parts(options.parts), Console()
    moved = Throughput(console, "merging", sum(piece.end - piece.begin for part in parts for piece in part.pieces()))
    whole = merge(parts, options.out, moved)
    console.note(
        f"{options.out}: step {whole.step} of {counted(len(parts), 'part')}, {counted(len(whole.files), 'file')}, {moved}"
    )
    return 0


def _diff(options: argparse.Namespace) -> int:
    one, two = checkpoint_at(options.one), checkpoint_at(options.two)
    return 0 if reading.diff_checkpoints(one, two, options.tolerance, Console()) else 1


def _show(options: argparse.Namespace) -> int:
    if options.action == "list":
        sys.stdout.write(reading.list_checkpoints(options.path, as_json=options.json))
    else:
        sys.stdout.write(reading.inspect_checkpoint(options.path, options.tensors, as_json=options.json))
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _show,
    "inspect": _show,
    "verify": _verify,
    "export": _export,
    "merge": _merge,
    "diff": _diff,
}
