"""Weights that ranks read from a directory: what they become, and how much memory reading takes at once."""

import json
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.architectures import ARCHITECTURES
from tests.support.trainer_cases import digest, settings
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.models.build import build_model
from zeromesh.zero.engine import ZeroEngine


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements that results of operations, as long as they live, have had memory for at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu" and out.numel():
            self._results.append(weakref.ref(out))
            self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        living = {each: tensor for each in self._results if (tensor := each()) is not None}
        self._results = list(living)
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in living.values()}
        return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in memory.values())


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


def narrow(folder: Path, places: range) -> None:
    """Have some tensors of a directory in bfloat16, by their places in the order of names."""
    names = sorted(name for path in folder.glob("*.safetensors") for name in load_file(path))
    chosen = {names[place] for place in places if place < len(names)}
    for path in folder.glob("*.safetensors"):
        tensors = {name: value.bfloat16() if name in chosen else value for name, value in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})


def loaded(mesh: Mesh, folder: str, name: str, compute: str, master: str, **model: Any) -> dict[str, Any]:
    """The state of a run that starts from `folder`, and what its building took. `model` is on top of that section."""
    subject = ARCHITECTURES[name]
    config = settings(
        f"{folder}-run",
        model={"source": folder, "head": subject.head, **model},
        precision={"compute": compute, "master": master, "reduce": master},
        zero={"stage": 3, "gathered_budget": 0},
    )
    held = Held()

    def watched(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with held:
                return call(*args, **kwargs)

        return run

    with (
        patch("zeromesh.trainer.setup.model.build_model", watched(build_model)),
        patch.object(ZeroEngine, "build", watched(ZeroEngine.build)),
        Trainer(None, config, subject.samples(4)) as trainer,
    ):
        engine = trainer.engine
        transient = held.peak - held.now()
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        units = [sum(bucket.layout.padded for bucket in unit.buckets) for unit in engine.units] if engine else []
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    return {
        "state": digest(state),
        "parts": {name: digest({name: tensor}) for name, tensor in state.items()},
        "transient": transient,
        "units": units,
        "dtypes": dtypes,
    }
