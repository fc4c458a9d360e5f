"""Small runs with checkpoints, made in this process, and what tests do to their files."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors import safe_open

from tests.distributed.checkpoint.test_save import tokenizer_in
from tests.support.trainer_cases import LLAMA, Pictures, gpt2, llama, pictures, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io.format import Manifest
from zeromesh.checkpoint.io.reader import CheckpointReader

NARROW = {"compute": "float32", "master": "float32", "reduce": "float32"}
MIXED = {**NARROW, "compute": "bfloat16"}
MIXTRAL = {"model_type": "mixtral", **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
Copied = Callable[[str], Path]
"""Makes a copy of a run that may be damaged."""
SMALL_GRID = 16384
"""Bytes between checksum boundaries here, so that a tiny file has several pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Runs by name: their directories, and the trained models, whole, with master weights."""

    folder: Path
    models: dict[str, Any]

    def run(self, name: str) -> Path:
        return self.folder / name

    def last(self, name: str) -> Path:
        return max((self.folder / name / "checkpoints").glob("step-*"))

    def copy(self, name: str, folder: Path) -> Path:
        return Path(shutil.copytree(self.run(name), folder / name))


def trained_runs(folder: Path) -> Iterator[Trained]:
    """A run of each kind: two checkpoints of a llama, mixed precision, tied weights and a tokenizer, converted weights, no
    model of transformers.
    """
    runs: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "llama": (seeded(llama), {"precision": NARROW, "run": {"max_steps": 2}}, sentences()),
        "mixed": (seeded(llama), {"precision": MIXED}, sentences()),
        "tied": (seeded(gpt2), {"precision": NARROW}, sentences()),
        "mixtral": (None, {"precision": NARROW, "model": {"config": MIXTRAL}}, sentences()),
        "pictures": (Pictures(loss=True), {"precision": NARROW}, pictures()),
    }
    tokenizer = tf.AutoTokenizer.from_pretrained(tokenizer_in(folder / "words"))
    models = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeromesh.checkpoint.io.file_slices.GRID", SMALL_GRID)
        for name, (model, sections, data) in runs.items():
            run = {"max_steps": 1, **sections.pop("run", {}), "name": name}
            config = settings(str(folder), **sections, run=run, checkpoint={"every_steps": 1})
            with Trainer(model, config, data, processing_class=tokenizer if name == "tied" else None) as trainer:
                trainer.fit()
                models[name] = trainer.model
            models[name].eval()
    yield Trained(folder=folder, models=models)
    shutil.rmtree(folder)


def flip(path: Path, at: int) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != formats.MANIFEST]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all tensor files of a model directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / formats.MANIFEST).write_bytes(manifest.to_json())


def rewritten(directory: Path, name: str, value: float) -> None:
    """Put a value into the first element of a parameter, as if it had been trained to it."""
    manifest = CheckpointReader(directory).manifest
    (tensor,) = [each for each in manifest.tensors if (each.kind, each.name) == ("model", name)]
    path = directory / tensor.path
    with path.open("rb+") as file:
        file.seek(tensor.begin)
        file.write(np.array([value], "<f4").tobytes())
    record = manifest.files[tensor.path]
    data = path.read_bytes()
    pieces = tuple(replace(p, checksum=formats.checksum(data[p.begin : p.end])) for p in record.pieces)
    write_manifest(directory, replace(manifest, files={**manifest.files, tensor.path: replace(record, pieces=pieces)}))
