"""A small checkpoint to be damaged, how to sign a manifest again as someone would who means harm, and how refusals look."""

import hashlib
import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.stored_cases import small_units, split, values_of, verify, write
from zeromesh.checkpoint.io import format as manifest
from zeromesh.checkpoint.io.file_slices import GRID
from zeromesh.checkpoint.io.format import TensorSpec, checksum
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.errors import CheckpointError

Json = dict[str, Any]
F32, BF16 = torch.float32, torch.bfloat16
SPECS = [
    TensorSpec(kind="model", name="embed", dtype=F32, shape=(70, 60)),
    TensorSpec(kind="model", name="head", dtype=F32, shape=(60, 70)),
    TensorSpec(kind="model", name="norm", dtype=BF16, shape=(37,)),
    TensorSpec(kind="model", name="none", dtype=BF16, shape=(0, 4)),
    TensorSpec(kind="model", name="scale", dtype=BF16, shape=()),
    TensorSpec(kind="exp_avg", name="embed", dtype=F32, shape=(70, 60)),
    TensorSpec(kind="exp_avg", name="norm", dtype=F32, shape=(37,)),
]
FILE, MOMENTS = "model-00001-of-00001.safetensors", "optimizer/exp_avg-00001-of-00001.safetensors"
STATE = "trainer_state.json"
MB = 1 << 20


def made(root: Path, step: int, seed: int) -> Path:
    """A checkpoint of two ranks, a few KB large, of pieces of two blocks."""
    documents = {"config.json": b'{"seed": %d}' % seed, STATE: b'{"step": 7, "seed": %d}' % seed, "tokenizer.json": b""}
    with small_units(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeromesh.checkpoint.io.format._LEAST_FILE", MB)
        return write(root, step, split(values_of(SPECS, seed), 2, random.Random(seed)), documents).directory


def files_in(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def refused(directory: Path, *words: str, by: Callable[[Path], object] | None = None) -> str:
    """The reason for which a checkpoint is refused, which has these words in it; nothing large is made to find it."""
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            (by or (lambda path: verify(CheckpointReader(path))))(directory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.isprintable(), repr(message)
    assert len(message) < 2000
    assert peak < 4 * MB
    assert time.process_time() - began < 10
    return message


def resign(directory: Path, change: Callable[[Json], object]) -> None:
    """Change the manifest as someone would who knows the format: its own hash is right again."""
    path = directory / manifest.MANIFEST
    content = json.loads(path.read_bytes())
    del content["sha256"]
    change(content)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    content["sha256"] = hashlib.sha256(canonical).hexdigest()
    path.write_bytes(json.dumps(content, separators=(",", ":")).encode())


def replace(directory: Path, name: str, data: bytes, cuts: tuple[int, ...] = ()) -> None:
    """Put other bytes into a file and record them, in pieces that end at `cuts`, or else at the grid."""
    (directory / name).write_bytes(data)
    ends = sorted({*(cuts or range(GRID, len(data), GRID)), len(data)} - {0})
    rows = [[a, b, checksum(data[a:b]), 0] for a, b in zip([0, *ends], ends, strict=False)]
    resign(directory, lambda content: content["files"].update({name: {"bytes": len(data), "pieces": rows}}))


class Payload:
    """What executes code when it is unpickled: it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)
