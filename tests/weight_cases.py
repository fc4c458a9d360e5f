"""Weights that ranks read from a directory: what they become, and how much memory reading takes at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_cases import digest, settings

from zeromesh import Trainer
from zeromesh.mesh.groups import Mesh
from zeromesh.trainer.hf.build import build_model
from zeromesh.trainer.hf.source import SafetensorsSource
from zeromesh.zero.engine import ZeroEngine


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements that any operation has made memory for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            self.numel = max(self.numel, out.untyped_storage().nbytes() // out.element_size())
        return out


def write(folder: Path, name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A directory of several files; returns the model."""
    torch.manual_seed(4)
    model = ARCHITECTURES[name].build(dtype=dtype, **changes)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def rename(folder: Path, changes: dict[str, str | None]) -> None:
    """Give tensors of a directory's files other names, or take them away (None)."""

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        kept = {changes.get(name, name): value for name, value in values.items()}
        return {name: value for name, value in kept.items() if name is not None}

    for path in folder.glob("*.safetensors"):
        save_file(renamed(load_file(path)), path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "weight_map": renamed(content["weight_map"])}))


def loaded(mesh: Mesh, folder: str, name: str, compute: str, master: str) -> dict[str, Any]:
    """The state of a run that starts from `folder`, and what its building took."""
    subject = ARCHITECTURES[name]
    config = settings(
        f"{folder}-run",
        model={"source": folder, "head": subject.head},
        precision={"compute": compute, "master": master, "reduce": master},
        zero={"stage": 3, "gathered_budget": 0},
    )
    largest = Largest()

    def watched(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with largest:
                return call(*args, **kwargs)

        return run

    with (
        patch.dict(SafetensorsSource.__init__.__kwdefaults__, cache_bytes=1),
        patch("zeromesh.trainer.setup.build_model", watched(build_model)),
        patch.object(ZeroEngine, "build", watched(ZeroEngine.build)),
        Trainer(None, config, subject.samples(4)) as trainer,
    ):
        engine = trainer.engine
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        units = [sum(bucket.layout.padded for bucket in unit.buckets) for unit in engine.units] if engine else []
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    return {"state": digest(state), "largest": largest.numel, "units": units, "dtypes": dtypes}
