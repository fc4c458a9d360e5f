"""Weights of a directory become shards: exact, whatever their names and dtypes, and never whole on any rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_cases import digest
from weight_cases import rename, write
from workers import Workers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read(
    workers: Workers, folder: Path, name: str, compute: str = "float32", master: str = "float32"
) -> dict[str, object]:
    """What two ranks have made of a directory."""
    found = workers.run(2, "weight_cases:loaded", folder=str(folder), name=name, compute=compute, master=master)
    assert found[0]["state"] == found[1]["state"]
    return dict(found[0])


def as_read(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """The digest of a model's parameters in another dtype."""
    return digest({name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()})


@pytest.mark.parametrize(
    ("stored", "compute", "master"),
    [("bfloat16", "bfloat16", "float32"), ("bfloat16", "float64", "float64"), ("float32", "bfloat16", "float32")],
)
def test_master_weights_are_the_files_exactly(
    workers: Workers, tmp_path: Path, stored: str, compute: str, master: str
) -> None:
    model = write(tmp_path / "model", "llama", DTYPES[stored])
    found = read(workers, tmp_path / "model", "llama", compute, master)
    assert found["state"] == as_read(model, getattr(torch, master))
    assert found["dtypes"] == [master]


def test_names_of_older_versions_are_understood(workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = write(folder, "bert", torch.float32)
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    changes = {n: n.replace(new, old) for n in model.state_dict() for new, old in ends.items() if n.endswith(new)}
    assert len(changes) == 12
    tied = [name for name in model.state_dict() if name.startswith("cls.predictions.decoder.")]
    rename(folder, {**changes, **dict.fromkeys(tied)})
    assert read(workers, folder, "bert")["state"] == as_read(model, torch.float32)


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_no_rank_ever_has_the_whole_model(workers: Workers, tmp_path: Path, name: str) -> None:
    """The largest piece of memory that reading asks for is within one unit, of which there are several."""
    model = write(tmp_path / "model", name, torch.bfloat16, num_hidden_layers=6)
    found = read(workers, tmp_path / "model", name)
    assert found["state"] == as_read(model, torch.float32)
    units = found["units"]
    assert isinstance(units, list)
    assert found["largest"] <= max(units) < sum(units) / 4
