"""Memory of this rank in files of the run's directory: over one step, and what holds it when it runs out."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from zeromesh.environment import secret_values
from zeromesh.errors import StorageError, ZeromeshError, summary
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Ledger, Tier, available_bytes, peak_bytes, resident_bytes
from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.formatting import human_bytes
from zeromesh.units.unit import Phase
from zeromesh.zero.engine import ZeroEngine

_LARGEST = 30
_WORDS = re.compile(r"can't allocate memory|out of memory|not enough memory", re.IGNORECASE)
"""How allocators say it, whose errors are of no kind of their own."""


def ran_out(error: BaseException) -> bool:
    """Whether memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    of_zeromesh = isinstance(error, ZeromeshError) and not isinstance(error, StorageError)
    return isinstance(error, RuntimeError) and not of_zeromesh and bool(_WORDS.search(str(error)))


def explained(error: BaseException, engine: ZeroEngine | None, mesh: Mesh, directory: Path, step: int) -> BaseException:
    """Where memory ran out, write down what holds that of this rank; the error that says so. Any other error as it is.

    `step`: the whole steps that were done.
    """
    if not ran_out(error):
        return error
    path = directory / f"memory-rank-{mesh.rank}.json"
    what = summary(error)
    text = f"rank {mesh.rank} ran out of memory after {step} whole steps ({what})"
    found = snapshot(engine, mesh)
    purposes = sorted(found["purposes"].get("device", {}).items(), key=lambda item: -item[1])
    if purposes:
        text += f"; it holds {', '.join(f'{human_bytes(nbytes)} {what}' for what, nbytes in purposes[:3])}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        error_text = Redaction(secret_values()).text(what)
        write_whole(path, json.dumps({"error": error_text, "step": step, **found}, indent=1).encode())
    except OSError as why:
        return StorageError(f"{text}. What holds the rest could not be written to {path}: {why.strerror}; {_CURES}")
    return StorageError(f"{text}. {path} says what holds the rest; {_CURES}")


_CURES = (
    "lower batch.micro_size or data.sequence_length, set model.activation_checkpointing: block, raise zero.stage, or offload "
    "more (docs/offload.md)"
)


def snapshot(engine: ZeroEngine | None, mesh: Mesh) -> dict[str, Any]:
    """Count the bytes of this rank: of the process, by tier and purpose, and the largest buffers.

    `uncounted` is what the process holds beside: activations, the libraries, and what is private to other people's code.
    """
    process = {"resident": resident_bytes(), "resident_peak": peak_bytes(), "available": available_bytes()}
    if mesh.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(mesh.device)
        process |= {
            "device_allocated": torch.cuda.memory_allocated(mesh.device),
            "device_reserved": torch.cuda.memory_reserved(mesh.device),
            "device_peak": torch.cuda.max_memory_allocated(mesh.device),
            "device_free": free,
            "device_total": total,
        }
    found: dict[str, Any] = {"rank": mesh.rank, "process": process, "purposes": {}, "largest": []}
    if engine is None:
        return found
    ledger = engine.ledger
    for tier in Tier:
        purposes = ledger.by_purpose(tier)
        if purposes:
            found["purposes"][tier.value] = {purpose.value: nbytes for purpose, nbytes in purposes.items()}
    held = process.get("device_allocated") or process["resident"]
    counted = ledger.total(Tier.DEVICE) if mesh.device.type == "cuda" else ledger.total()
    found |= {"counted": counted, "counted_peak": ledger.peak(), "uncounted": max(0, held - counted)}
    found["largest"] = _largest(engine)
    return found


def _largest(engine: ZeroEngine) -> list[dict[str, Any]]:
    """The largest buffers of units: whose, what for, and their bytes."""
    rows: list[tuple[int, str, str]] = []
    for unit in engine.units:
        for bucket in unit.buckets:
            if bucket.buffer.persistent or unit.phase is not Phase.RESTING:
                rows.append((bucket.nbytes, unit.name, f"gathered parameters, {unit.phase.value}"))
            if not (bucket.buffer.persistent and bucket.master.dtype == bucket.dtype):  # Else they are among these.
                rows.append((bucket.master.nbytes, unit.name, "master weights"))
            optimizer = engine.optimizer_of(bucket)
            rows.append((optimizer.nbytes if optimizer is not None else 0, unit.name, "optimizer moments"))
            for what, tensor in (
                ("gradient shard", bucket.grad),
                ("gradients summed over microbatches", bucket.partial),
            ):
                rows.append((0 if tensor is None else tensor.nbytes, unit.name, what))
    rows.sort(key=lambda row: -row[0])
    return [{"bytes": nbytes, "unit": unit, "what": what} for nbytes, unit, what in rows[:_LARGEST] if nbytes]


STEP_MEMORY = "step_memory.json"
_MOST_EVENTS = 20_000


@contextmanager
def recorded_memory(path: Path, step: int, ledger: Ledger) -> Iterator[None]:
    """Write to `path` when bytes of each purpose come and go in the block, which is step `step`, counted from 1.

        {"step": 2, "seconds": 0.41, "events": [[0.0, "device", "parameters", 8392704], [0.0031, ...], ...]}

    An event says how many bytes of a purpose there are on a tier from that moment on. The ledger counts what is allocated on
    purpose: states, gathered parameters, gradients, kept inputs of blocks; not what autograd keeps between.
    """
    began = time.perf_counter()
    with ledger.recording(_MOST_EVENTS) as changes:
        yield
    seconds = time.perf_counter() - began
    events = [
        [round(max(0.0, change.at - began), 6), change.tier.value, change.purpose.name.lower(), change.nbytes]
        for change in changes
    ]
    content = {"step": step, "seconds": round(seconds, 6), "events": events}
    with suppress(OSError):  # Nothing depends on it, and a full disk is reported by what matters.
        write_whole(path, json.dumps(content).encode(), sync=False)
