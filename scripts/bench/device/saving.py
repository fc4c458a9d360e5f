"""Part `saving`: one checkpoint of a model of 1 billion parameters, written and read, beside plain files of as many bytes."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch

import zeromesh
from bench.device import rows, sizes, systems
from bench.device.place import Place

_PLAIN_BYTES = {True: 4 << 20, False: 2 << 30}
_PIECE = 16 << 20
_SPACE = 14
"""Bytes of a parameter in a checkpoint, at most."""
_WRITE, _READ = 0.7, 0.5


def run(place: Place) -> None:
    """Train two steps, save, train one more, load: then the weights are those that were saved."""
    place.join()
    workload = replace(sizes.workload(1, dry=place.dry, ranks=place.ranks), device=place.device.type)
    needed, free = sizes.parameters(workload) * _SPACE + _PLAIN_BYTES[place.dry], shutil.disk_usage(place.folder).free
    what = "a checkpoint"
    if needed > free:
        place.say(rows.not_run(what, f"it needs {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free in {place.folder}"))
        return
    with place.trying(what):
        net, optimizer = systems.sharded(workload, place)
        step = systems.loop_of(net, optimizer)
        tokens = systems.data(workload, place, 3)
        for batch in tokens[:2]:
            step(batch)
        before = _some(net)
        target = Path(place.folder, "checkpoint")
        wrote = place.seconds(lambda: zeromesh.save(target, net, optimizer))
        nbytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        raw_wrote, raw_read = _plain(place) if place.rank == 0 else (0.0, 0.0)
        step(tokens[2])
        moved = float((_some(net) - before).abs().max())
        read = place.seconds(lambda: zeromesh.load(target, net, optimizer))
        place.figure("checkpoint", nbytes / 1e9, "GB")
        place.figure("save", nbytes / wrote / 1e9, "GB/s")
        place.figure("load", nbytes / read / 1e9, "GB/s")
        if place.rank == 0:
            place.figure("save beside a plain file", nbytes / wrote / raw_wrote, least=_WRITE, than="of it", timing=True)
            place.figure("load beside a plain file", nbytes / read / raw_read, least=_READ, than="of it", timing=True)
        apart = float((_some(net) - before).abs().max())
        place.figure("weights after loading differ by", apart if moved else float("nan"), most=0)


def _some(net: torch.nn.Module) -> torch.Tensor:
    """The norms of the model, whole."""
    found = [tensor.flatten().cpu().float() for name, tensor in zeromesh.state_dict(net) if "norm" in name]
    return torch.cat(found)


def _plain(place: Place) -> tuple[float, float]:
    """Bytes a second of one file, written to the disk and read from it."""
    path, count = Path(place.folder, "plain"), _PLAIN_BYTES[place.dry]
    piece = os.urandom(min(_PIECE, count))

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(count // len(piece)):
                file.write(piece)
            os.fsync(file.fileno())
            # As a checkpoint, which is written past the page cache, it is then read from the disk.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.read(_PIECE):
                pass

    began = time.perf_counter()
    write()
    wrote = time.perf_counter()
    read()
    ended = time.perf_counter()
    path.unlink()
    return count / (wrote - began), count / (ended - wrote)
