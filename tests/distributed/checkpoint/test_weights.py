"""Weights of a directory become shards: exact, whatever their names and dtypes, and never whole on any rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.checkpoint.weight_cases import narrow, rename, write
from tests.support.architectures import ARCHITECTURES
from tests.support.trainer_cases import digest
from tests.support.workers import Workers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read(
    workers: Workers, folder: Path, name: str, compute: str = "float32", master: str = "float32", ranks: int = 2, **model: Any
) -> dict[str, Any]:
    """What ranks have made of a directory, at stage 3."""
    cases = {"folder": str(folder), "name": name, "compute": compute, "master": master, **model}
    found = workers.run(ranks, "weight_cases:loaded", **cases)
    assert len({each["state"] for each in found}) == 1
    return dict(found[0])


def as_read(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """The digest of a model's parameters in another dtype."""
    return digest({name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()})


@pytest.mark.parametrize(
    ("stored", "compute", "master"),
    [("bfloat16", "bfloat16", "float32"), ("bfloat16", "float64", "float64"), ("float32", "bfloat16", "float32")],
)
def test_master_weights_are_the_files_exactly(workers: Workers, tmp_path: Path, stored: str, compute: str, master: str) -> None:
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


@pytest.mark.parametrize("first", [0, 1])
def test_files_may_have_several_dtypes(workers: Workers, tmp_path: Path, first: int) -> None:
    folder = tmp_path / "model"
    model = write(folder, "llama", torch.float32)
    narrow(folder, range(first, 100, 2))
    names = sorted(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if names.index(name) % 2 == first:
            parameter.data = parameter.data.bfloat16().float()
    assert read(workers, folder, "llama")["state"] == as_read(model, torch.float32)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_parameter_is_read_under_either_name(workers: Workers, tmp_path: Path, stored: str) -> None:
    folder = tmp_path / "model"
    model = write(folder, "gemma", torch.bfloat16, num_hidden_layers=6)
    rename(folder, {"model.embed_tokens.weight": stored})
    found = read(workers, folder, "gemma", "bfloat16")
    assert found["state"] == as_read(model, torch.float32)
    assert "lm_head.weight" not in found["parts"]


def test_a_new_head_on_an_encoder_is_the_same_on_any_number_of_ranks(workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    encoder = ARCHITECTURES["bert"].build().bert
    encoder.save_pretrained(folder, max_shard_size="40KB")
    model = {"head": "sequence_classification", "config": {"num_labels": 97}}
    found = [read(workers, folder, "bert", ranks=ranks, **model)["parts"] for ranks in (1, 2)]
    assert found[0] == found[1]
    wanted = {f"bert.{name}": parameter.detach() for name, parameter in encoder.named_parameters()}
    new = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    assert found[1].keys() == wanted.keys() | new
    assert all(found[1][name] == digest({name: value}) for name, value in wanted.items())


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_no_rank_ever_has_the_whole_model(workers: Workers, tmp_path: Path, name: str) -> None:
    """What reading holds beyond the shards that it fills is less than two units, of which there are several."""
    model = write(tmp_path / "model", name, torch.bfloat16, num_hidden_layers=6)
    found = read(workers, tmp_path / "model", name)
    assert found["state"] == as_read(model, torch.float32)
    units = found["units"]
    assert found["transient"] <= 2 * max(units) < sum(units) / 2
