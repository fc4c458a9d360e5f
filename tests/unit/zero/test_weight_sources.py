"""Initial values: the same whatever the layout, distributed as a normal construction gives them, never invented."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.architectures import small_model
from zeromesh.errors import LayoutError
from zeromesh.weight_init.weight_sources import (
    BuiltSource,
    LostValuesError,
    SeededSource,
    build_deferred,
    materialize_buffers,
    wrap_passed_model,
)

SMALL = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 160}
KV = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
OPT = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 32}
MODELS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", "causal_lm", KV),
    "gpt2": ("gpt2", "causal_lm", {"num_hidden_layers": 3, "n_positions": 32, "bos_token_id": None, "eos_token_id": None}),
    "bert": ("bert", "sequence_classification", {}),
    "bert-masked": ("bert", "masked_lm", {}),
    "mixtral": ("mixtral", "causal_lm", {**KV, "num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", "causal_lm", {**KV, **EXPERTS}),
    "opt": ("opt", "causal_lm", OPT),
    "gemma2": ("gemma2", "causal_lm", {**KV, "head_dim": 16}),
    "mamba": ("mamba", "causal_lm", {"state_size": 8}),
}
FAMILIES = {name: partial(small_model, kind, head, **{**SMALL, **fields}) for name, (kind, head, fields) in MODELS.items()}


def on_meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


def read_all(source: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: source.read(name, 0, p.numel()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_seeded_values_are_distributed_as_the_library_does(family: str) -> None:
    built, model = FAMILIES[family](), on_meta(FAMILIES[family])
    source = SeededSource(model, seed=3)
    assert source.unset_parameters() == ()
    for name, reference in built.named_parameters():
        value = source.read(name, 0, reference.numel())
        n, std = reference.numel(), reference.std(unbiased=False).item()
        # The standard deviation of n normal samples is off by std / sqrt(2 n); six of those in either sample.
        assert abs(value.std(unbiased=False).item() - std) <= 12 * std / (2 * n) ** 0.5 + 1e-7, name
        assert abs((value.mean() - reference.mean()).item()) <= 12 * std / n**0.5 + 1e-7, name
        if std == 0.0:
            assert torch.equal(value, reference.detach().reshape(-1)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_equal_a_normal_construction(family: str) -> None:
    built, model = FAMILIES[family](), on_meta(FAMILIES[family])
    assert materialize_buffers(model, "cpu", 0) == ()
    expected = dict(built.named_buffers())
    assert {name for name, _ in model.named_buffers()} == set(expected)
    for name, buffer in model.named_buffers():
        assert buffer.dtype == expected[name].dtype, name
        assert torch.equal(buffer, expected[name]), name


def test_gpt2_residual_projections_are_scaled_by_their_container() -> None:
    model = on_meta(FAMILIES["gpt2"])
    source = SeededSource(model, seed=0)
    for kind in ("attn", "mlp"):
        weight = model.get_parameter(f"transformer.h.1.{kind}.c_proj.weight")
        std = source.read(f"transformer.h.1.{kind}.c_proj.weight", 0, weight.numel()).std().item()
        assert std == pytest.approx(0.02 / (2 * 3) ** 0.5, rel=0.05)


def test_values_depend_on_seed_and_name_only() -> None:
    model = on_meta(FAMILIES["mixtral"])
    first = read_all(SeededSource(model, seed=1), model)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = SeededSource(on_meta(FAMILIES["mixtral"]), seed=1)
    for name in reversed(first):
        n = first[name].numel()
        parts = [again.read(name, a, b) for a, b in ((0, n // 3), (n // 3, n))]
        assert torch.equal(torch.cat(parts), first[name]), name
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in model.parameters())
    other = read_all(SeededSource(model, seed=2), model)
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])
    layers = [first[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_the_live_model_is_never_written() -> None:
    model = on_meta(FAMILIES["gpt2"])
    source = SeededSource(model, seed=1)
    expected = read_all(source, model)
    for module in model.modules():  # what an engine does: parameters get memory while others are still read
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.full(parameter.shape, 7.0))
    for name, value in expected.items():
        assert torch.equal(source.read(name, 0, value.numel()), value)
    assert all(bool((p == 7.0).all()) for p in model.parameters())


def test_tied_parameters_have_the_value_of_their_first_name() -> None:
    model = on_meta(FAMILIES["gpt2"])
    source = SeededSource(model, seed=1)
    n = model.lm_head.weight.numel()
    assert torch.equal(source.read("lm_head.weight", 0, n), source.read("transformer.wte.weight", 0, n))


def test_built_model_keeps_its_weights() -> None:
    model = nn.Linear(3, 5)
    weight = model.weight.detach().clone()
    source = wrap_passed_model(model, seed=0).source
    assert isinstance(source, BuiltSource)
    model.weight.data = torch.zeros(5, 3)  # the engine may point the parameter elsewhere
    assert torch.equal(source.read("weight", 4, 9), weight.reshape(-1)[4:9])
    with pytest.raises(LayoutError, match="15 elements"):
        source.read("weight", 4, 16)
    source.release("weight")
    with pytest.raises(LayoutError, match="no longer"):
        source.read("weight", 0, 1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(3, 4)
        self.out = nn.Linear(4, 5)


def plain_but(change: Callable[[Any], object]) -> type[Plain]:
    class Changed(Plain):
        def __init__(self) -> None:
            super().__init__()
            change(self)

    return Changed


def redraw(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)


CONSTANT = plain_but(lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(3))))


def test_plain_modules_are_drawn_by_their_own_reset() -> None:
    built = build_deferred(Plain, seed=0)
    assert built.notes == ()
    assert isinstance(built.source, SeededSource)
    values = read_all(built.source, built.model)
    assert values["out.weight"].abs().max() <= 0.5  # uniform in +-1/sqrt(4)
    assert torch.equal(values["norm.weight"], torch.ones(4))
    assert torch.equal(values["attention.out_proj.bias"], torch.zeros(8))  # set by the attention around it
    assert materialize_buffers(built.model, "cpu", 0) == ()
    assert torch.equal(built.model.norm.running_var, torch.ones(4))
    assert built.model.norm.num_batches_tracked.item() == 0


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (plain_but(redraw), "initialises attention.out_proj.weight, out.weight otherwise"),
        (plain_but(lambda m: setattr(m.out, "weight", nn.Parameter(torch.randn(5, 4)))), "initialises out.weight otherwise"),
        (CONSTANT, "loses the values of scale"),
        (plain_but(lambda m: m.register_buffer("mask", torch.ones(3, 3).tril().bool())), "loses the values of mask"),
        (plain_but(lambda model: setattr(model, "table", torch.arange(4))), "loses the values of table"),
        (
            plain_but(lambda model: setattr(model, "bound", float(model.out.weight.detach().abs().max()))),
            "cannot be built on the meta device",
        ),
    ],
)
def test_what_meta_would_lose_is_built_on_cpu(cls: type[Plain], reason: str) -> None:
    before = torch.get_rng_state()
    first, second = build_deferred(cls, seed=5), build_deferred(cls, seed=5)
    assert reason in first.notes[0]
    assert isinstance(first.source, BuiltSource)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.requires_grad and not p.is_meta for p in first.model.parameters())
    again = read_all(second.source, second.model)
    for name, value in read_all(first.source, first.model).items():
        assert torch.equal(value, again[name])


def test_a_model_passed_on_meta_with_lost_values_is_refused() -> None:
    with pytest.raises(LostValuesError, match="initial values of scale are not known"):
        wrap_passed_model(on_meta(CONSTANT), seed=0)
    with pytest.raises(LostValuesError, match="scale"):
        SeededSource(on_meta(CONSTANT), seed=0).read("scale", 0, 1)


def test_unknown_integer_and_boolean_buffers_are_found() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("known", torch.zeros(2, dtype=torch.long))
            self.register_buffer("unknown", torch.arange(3))
            self.register_buffer("flag", torch.tensor([True]))
            self.register_buffer("alias", self.known)

        def reset_parameters(self) -> None:
            self.known.fill_(torch.iinfo(torch.long).max)  # even the filling itself is told apart

    model = on_meta(Buffers)
    assert materialize_buffers(model, "cpu", 0) == ("unknown", "flag")
    assert model.known.tolist() == [torch.iinfo(torch.long).max] * 2
    assert model.alias is model.known


def test_partly_built_models_keep_what_they_have() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[0] = nn.Linear(2, 2, device="cpu")
    wrapped = wrap_passed_model(model, seed=0)
    source = wrapped.source
    assert torch.equal(source.read("0.weight", 0, 4), model[0].weight.detach().reshape(-1))
    assert not source.read("1.weight", 0, 4).isnan().any()
    (note,) = wrapped.notes
    assert "weights of 1 are drawn by `reset_parameters`" in note
