"""The operations of a token by the sizes in a model's configuration, and the peak that they are compared with."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.trainer.models import flops
from zeromesh.trainer.models.flops import ModelFlops, peak_flops

SIZES = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 3}


class Tokens(nn.Module):
    """A model with a table of 5 x 4, a matrix of 4 x 6 outside and one of 4 x 3 among its experts, a bias and two gains."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.table, self.matrix = nn.Embedding(5, 4), nn.Linear(4, 6)
        self.gain, self.experts = nn.Parameter(torch.ones(7)), nn.ModuleList([nn.Linear(4, 3, bias=False)])

    def forward(self, input_ids: Any) -> None: ...


@pytest.mark.parametrize(
    ("config", "attention", "windows"),
    [
        (SIZES, 12 * 32, (math.inf,) * 3),
        ({**SIZES, "head_dim": 5}, 12 * 4 * 5, (math.inf,) * 3),
        ({**SIZES, "sliding_window": 9}, 12 * 32, (9.0,) * 3),
        ({"n_head": 2, "n_embd": 16, "n_layer": 1}, 12 * 16, (math.inf,)),
        (
            {**SIZES, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "linear_attention"]},
            12 * 32,
            (math.inf, 9.0),
        ),
        ({**SIZES, "layer_types": ["mamba", "conv", "recurrent", "attention"]}, 12 * 32, (math.inf,)),
        ({"num_hidden_layers": 3, "layer_types": ["attention"]}, 0.0, ()),
    ],
    ids=["plain", "head size", "windows", "names of GPT-2", "kinds of layers", "without attention", "no heads"],
)
def test_attention_by_layers(config: dict[str, Any], attention: float, windows: tuple[float, ...]) -> None:
    found = ModelFlops.of(Tokens(**config))
    assert found is not None
    assert (found.attention, found.windows) == (attention, windows)


@pytest.mark.parametrize(
    ("config", "reached"),
    [
        ({}, 1.0),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"n_routed_experts": 4, "moe_topk": 1}, 0.25),
        ({"num_experts": 4, "num_experts_per_token": 2}, 0.5),
        ({"num_experts": 4}, 1.0),
        ({"num_experts_per_tok": 2}, 1.0),
    ],
)
def test_experts_count_as_far_as_a_token_reaches_them(config: dict[str, Any], reached: float) -> None:
    model = Tokens(**config)
    assert ModelFlops.of(model) == ModelFlops(dense=6 * (24 + 12 * reached))
    model.matrix.requires_grad_(False)
    assert ModelFlops.of(model) == ModelFlops(dense=4 * 24 + 6 * 12 * reached)


def test_a_table_that_is_a_head_too_is_multiplied() -> None:
    model: Any = Tokens()
    tied = nn.Linear(4, 5, bias=False)
    tied.weight = model.table.weight
    model.get_output_embeddings = lambda: tied
    assert ModelFlops.of(model) == ModelFlops(dense=6 * (24 + 12 + 20))
    assert ModelFlops.of(Tokens(is_encoder_decoder=True)) is None


def test_a_token_sees_no_more_than_its_window_and_its_sequence() -> None:
    found = ModelFlops(dense=100.0, attention=10.0, windows=(4.0, math.inf))
    assert [found.of_step(3, length) for length in (2, 4, 6)] == [3 * (100 + 40), 3 * (100 + 80), 3 * (100 + 100)]


SHEET = (7.0, "by the data sheet of card")
TIMES = {torch.bfloat16: 2.0, torch.float32: 3.0, torch.float64: 1.0}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "dtype", "known", "wanted"),
    [
        (GPU, torch.bfloat16, True, SHEET),
        (GPU, torch.float32, True, (3.0, "measured by a product of matrices")),
        (GPU, torch.bfloat16, False, (2.0, "measured by a product of matrices")),
        (CPU, torch.bfloat16, True, (3.0, "measured by a product of matrices")),
        (CPU, torch.float64, True, (1.0, "measured by a product of matrices")),
    ],
)
def test_the_peak_of_a_device_and_dtype(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, known: bool, wanted: tuple[float, str]
) -> None:
    names = {"bfloat16": (7.0, "card"), "float32": (9.0, "card")}
    monkeypatch.setattr(flops, "device_name", lambda device: "card")
    monkeypatch.setattr(flops, "peak_of", lambda name, dtype: names.get(dtype) if known else None)
    monkeypatch.setattr(flops, "_timed", lambda device, dtype, threads: TIMES[dtype])
    assert peak_flops(device, dtype) == wanted


def test_products_grow_until_they_take_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are 1024 and more on an accelerator, which starts and ends a product slowly, and 512 on two threads of a CPU."""
    made: list[int] = []

    def took(function: Any, device: Any, *, rounds: int, fill: float) -> float:
        made.append(rounds)
        return 5e-4 if len(made) < 3 else 2e-3

    monkeypatch.setattr(flops, "time_call", took)
    monkeypatch.setattr(flops, "is_accelerator", lambda device: device.index == 1)
    meta = torch.device("meta", 1)
    assert flops._timed.__wrapped__(meta, torch.float32, 1) == 2 * 4096**3 / 2e-3
    assert made == [3, 3, 3]
    for threads, size in ((1, 512), (7, 512), (8, 1024)):
        assert flops._timed.__wrapped__(torch.device("meta"), torch.float32, threads) == 2 * size**3 / 2e-3
    monkeypatch.setattr(flops, "time_call", lambda *_, **__: 1e-9)
    assert flops._timed.__wrapped__(meta, torch.float32, 1) == 2 * 16384**3 / 1e-9
