"""`zeromesh checkpoint`: lists, inspects, verifies, exports, merges and compares checkpoints."""

import argparse
from pathlib import Path

import torch

from zeromesh.checkpoint.io.reader import CheckpointReader, find_damage
from zeromesh.checkpoint.loader import merge, open_parts
from zeromesh.errors import CheckpointError, counted, some
from zeromesh.trainer.formatting import print_lines
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint import reading
from zeromesh.trainer.tools.checkpoint.reading import Throughput, checkpoint_at, checkpoints_at, part_text

_SHOWN_TENSORS = 20


def run_checkpoint(options: argparse.Namespace) -> int:
    console, threads = Console(), torch.get_num_threads()
    # Copies between files are bound by memory and disk: with threads that wait for each other they took five times as long.
    torch.set_num_threads(1)
    try:
        match options.action:
            case "list":
                print_lines(reading.list_checkpoints(options.path, as_json=options.json))
            case "inspect":
                print_lines(reading.inspect_checkpoint(options.path, options.tensors, as_json=options.json))
            case "verify":
                damaged = [directory for directory in checkpoints_at(options.path) if _is_damaged(directory, console)]
                return int(bool(damaged))
            case "export":
                directory = checkpoint_at(options.path)
                console.status("loading transformers")
                from zeromesh.trainer.tools.checkpoint.export import export_checkpoint

                how = {"merge": options.merge, "decoded": options.base == "decoded", "ema": options.ema}
                export_checkpoint(directory, options.out, options.dtype, console, **how)
            case "merge":
                parts = open_parts(options.parts)
                moved = Throughput(console, "merging", sum(piece.end - piece.begin for part in parts for piece in part.pieces()))
                whole = merge(parts, options.out, moved)
                of = f"step {whole.step} of {counted(len(parts), 'part')}"
                console.note(f"{options.out}: {of}, {counted(len(whole.files), 'file')}, {moved}")
            case "diff":
                one, two = checkpoint_at(options.one), checkpoint_at(options.two)
                return 0 if reading.diff_checkpoints(one, two, options.tolerance, console) else 1
    finally:
        torch.set_num_threads(threads)
    return 0


def _is_damaged(directory: Path, console: Console) -> bool:
    try:
        reader = CheckpointReader(directory, checked=False)
    except CheckpointError as error:
        console.note(f"{directory}: DAMAGED: {error}")
        return True
    moved = Throughput(console, f"verifying {directory.name}", sum(p.end - p.begin for p in reader.pieces()))
    damages = list(find_damage(reader, moved))
    files = f"{counted(len(reader.manifest.files), 'file')}, {moved}"
    state = f"DAMAGED: {len(damages)} of {files}" if damages else f"whole: {files}"
    console.note(f"{directory}{part_text(reader)}: {state}")
    for each in damages:
        console.note("\n".join([f"  {each.path}", *(f"    {reason}" for reason in each.reasons)]))
        if each.tensors:
            console.note(f"    tensors: {some(each.tensors, _SHOWN_TENSORS)}")
    return bool(damages)
