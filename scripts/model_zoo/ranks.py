"""Two ranks for one type at a time, forked from a process that has imported everything; what hangs or dies is told and ended."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from bench.processes import free_port

from model_zoo import columns as training
from model_zoo.small_models import NotBuiltError, heads_of_types, small_model

RANKS = 2
_SECONDS = 90.0
"""Seconds that a column may take before it counts as hanging."""


def import_once() -> None:
    """Import what every type needs, in one thread."""
    import peft.tuners.lora  # noqa: F401

    import zeromesh.trainer.trainer  # noqa: F401

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ranks are ended on the way out.
    tf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def results_of(kind: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a line for each column of a type, as soon as it is known."""
    left = list(columns)
    while left:
        for line in _one_launch(kind, left):
            yield {"type": kind, **line}
            if line["column"] == "":
                return
            left.remove(line["column"])
            if line["outcome"] == training.CRASHED:
                break  # Ranks that crashed may be anywhere: the rest is run by others.


def _one_launch(kind: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    port, (end, other) = free_port(), os.pipe()
    children = [_fork(rank, port, kind, columns, folder, other) for rank in range(RANKS)]
    os.close(other)
    waiting, text, built = list(columns), b"", False
    begun = time.monotonic()
    try:
        while waiting:
            ready, _, _ = select.select([end], [], [], max(0.0, begun + _SECONDS - time.monotonic()))
            block = os.read(end, 1 << 16) if ready else b""
            if not block:
                log = (folder / "rank0.log").read_text(errors="replace").strip().splitlines()
                if not built:
                    yield {"column": "", "outcome": training.ABSENT, "reason": f"no small model after {_SECONDS:g} seconds"}
                    return
                what = "the processes died" if ready else f"no end after {_SECONDS:g} seconds"
                yield {"column": waiting[0], "outcome": training.CRASHED, "reason": f"{what}: {' '.join(log[-3:])}"[:600]}
                return
            *lines, text = (text + block).split(b"\n")
            for line in map(json.loads, filter(None, lines)):
                if "built" in line:
                    built = True
                    continue
                yield {**line, "seconds": round(time.monotonic() - begun, 2)}
                if line["column"] == "":
                    return
                waiting.remove(line["column"])
                begun = time.monotonic()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(end)
        shutil.rmtree(folder, ignore_errors=True)


def _fork(rank: int, port: int, kind: str, columns: Sequence[str], folder: Path, pipe: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
        os.environ["HF_HUB_OFFLINE"] = "1"
        _work(rank, kind, columns, folder, pipe)
        time.sleep(30)  # Who leaves before the others have read what they wait for ends them; the parent ends all.
    except BaseException:  # noqa: BLE001 - a child never returns
        traceback.print_exc()
    finally:
        os._exit(0)


def _work(rank: int, kind: str, columns: Sequence[str], folder: Path, pipe: int) -> None:
    def tell(line: dict[str, Any]) -> None:
        if rank == 0:
            os.write(pipe, json.dumps(line).encode() + b"\n")

    try:
        small = small_model(kind, heads_of_types()[kind])
    except NotBuiltError as error:
        tell({"column": "", "outcome": training.ABSENT, "reason": str(error)})
        return
    tell({"built": kind})
    about = {"head": small.head, "note": small.note}
    for column, outcome in training.outcomes(small, columns, folder, rank):
        tell({"column": column, **asdict(outcome), **about})
