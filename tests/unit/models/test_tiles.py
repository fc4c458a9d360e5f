"""Modules that act on each token alone run in tiles, compute the same, and save less; others are refused by name."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.architectures import on_meta, small_model
from zeromesh.errors import ConfigError, PhaseError
from zeromesh.kernels.tiles import run_in_tiles
from zeromesh.options import ZeroOptions
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.prepare import enable_activation_checkpointing, find_token_wise, prepare_model, use_tiles
from zeromesh.trainer.models.small_copy import whole_passes_in_float64
from zeromesh.trainer.planning.tracing.trace import trace_microbatch

KV = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**KV, **EXPERTS, "shared_expert_intermediate_size": 16}
NORMS = ["input_layernorm", "post_attention_layernorm"]
RATES = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
IDS = torch.arange(40).reshape(2, 20) % 50


def build(kind: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    torch.manual_seed(0)
    fields = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None, "use_cache": False, **fields}
    return small_model(kind, **fields).to(dtype).train()


def in_tiles(model: Any, tokens: int = 7) -> Any:
    use_tiles(model, tokens, find_token_wise(model))
    return model


def gradients(model: Any, **given: Any) -> dict[str, torch.Tensor]:
    """The gradient of each trained parameter, and the loss under the empty name."""
    torch.manual_seed(1)
    with whole_passes_in_float64():
        loss = model(input_ids=IDS, labels=IDS, **given).loss
        loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"": loss.detach(), **found}


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(each.norm()) for each in wanted.values())
    for name, each in wanted.items():
        assert float((found[name] - each).norm()) <= 1e-12 * largest, name


@pytest.mark.parametrize(
    ("kind", "fields", "taken"),
    [
        ("llama", KV, ["mlp", *NORMS]),
        ("gpt2", {}, ["mlp"]),
        ("bert", {"is_decoder": True}, ["intermediate"]),
        ("mixtral", {**KV, **EXPERTS}, ["mlp", *NORMS]),
        ("qwen2_moe", SHARED, ["mlp", *NORMS]),
    ],
)
def test_what_acts_on_each_token_alone_is_found(kind: str, fields: dict[str, Any], taken: list[str]) -> None:
    found = find_token_wise(on_meta(kind, vocab_size=96, **fields))
    assert not isinstance(found, str)
    assert [name for name, _ in found] == taken


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mixtral", {**KV, **EXPERTS, "output_router_logits": True}),  # The auxiliary loss reads what routers choose.
        ("mixtral", {**KV, **EXPERTS, "router_jitter_noise": 0.1}),
        ("qwen2_moe", {**SHARED, "output_router_logits": True}),
        ("gpt_oss", {**KV, **EXPERTS}),
        ("bloom", {}),
    ],
)
def test_where_nothing_is_found_tiles_are_refused(kind: str, fields: dict[str, Any]) -> None:
    model = on_meta(kind, vocab_size=96, **fields)
    with pytest.raises(ConfigError, match=r"model.tile_tokens: \w+ cannot run in tiles: .* no MLP in .*; set it to null"):
        in_tiles(model)


def _frozen(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name and "embed" not in name and "layers.0" not in name)
    return model


def _adapted(model: Any) -> Any:
    torch.manual_seed(2)
    targets = ["q_proj", "gate_proj", "down_proj"]
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return made.double()


CHANGES: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
    "llama": ("llama", KV, lambda model: model),
    "gpt2": ("gpt2", RATES, lambda model: model),
    "experts": ("mixtral", {**KV, **EXPERTS, "experts_implementation": "eager"}, lambda model: model),
    "frozen": ("llama", KV, _frozen),
    "adapted": ("llama", KV, _adapted),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_are_those_without_tiles(name: str, recompute: Any) -> None:
    """Of tiles of 7 of 20 tokens; each parameter gets its gradient once."""
    kind, fields, change = CHANGES[name]
    wanted = gradients(change(build(kind, **fields)))
    model = change(build(kind, **fields))
    in_tiles(model)
    enable_activation_checkpointing(model, recompute)
    came: list[str] = []
    for each, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, each=each: came.append(each))
    require_equal(gradients(model), wanted)
    assert len(came) == len(set(came)) == len(wanted) - 1


def test_dropout_draws_in_backward_what_it_drew_before() -> None:
    dropout, x = nn.Dropout(0.5), torch.rand(2, 11, 8) + 1
    x.requires_grad_()
    out = run_in_tiles(dropout, [], 4, x)
    torch.rand(3)  # Others draw in between.
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(before, torch.get_rng_state())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (out / x).detach())
    assert 0 < int((out == 0).sum()) < out.numel()


def test_narrow_gradients_are_summed_in_float32() -> None:
    linear = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    torch.manual_seed(0)
    x = torch.randn(1, 4096, 8, dtype=torch.bfloat16)
    run_in_tiles(linear, [linear.weight], 1, x).sum().backward()
    found, wanted = linear.weight.grad, x.double().sum((0, 1)).expand(8, 8)
    assert found is not None
    assert float((found - wanted).norm() / wanted.norm()) < 2**-7


def test_what_no_tile_uses_has_no_gradient() -> None:
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    run_in_tiles(used, [*used.parameters(), *unused.parameters()], 2, torch.randn(1, 5, 4)).sum().backward()
    assert used.weight.grad is not None
    assert unused.weight.grad is None


def test_autocast_is_that_of_forward() -> None:
    def run(model: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return {"": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}}

    wanted = run(build("llama", torch.float32, **KV))
    found = run(in_tiles(build("llama", torch.float32, **KV)))
    assert all(each.dtype == torch.float32 for each in found.values())
    for name, each in wanted.items():
        assert float((found[name] - each).norm()) <= 2e-2 * float(each.norm()), name


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_recomputed_blocks_do_not_run_a_last_mlp_for_nothing() -> None:
    """An MLP of 3 products is run once in forward, and once for each tile's backward, of 6 products more."""

    def products(tokens: int) -> int:
        model = in_tiles(build("llama", **KV), tokens)
        enable_activation_checkpointing(model, "block")
        with Products() as found:
            gradients(model)
        return found.count

    # 2 tiles more in 2 MLPs; no other module with products is run in tiles.
    assert products(5) - products(10) == 2 * 2 * (3 + 3 + 6)


def test_compiled_blocks_run_in_tiles() -> None:
    wanted, model = gradients(build("llama", **KV)), build("llama", **KV)
    tiers: Any = SimpleNamespace(device=torch.device("cpu"))
    compile_: Any = partial(torch.compile, backend="eager")
    _, notes = prepare_model(model, ModelSection(tile_tokens=7), ZeroOptions(), tiers, compile_)
    assert notes[0] == ("tiles: 7 tokens at once in 2 x mlp, 2 x input_layernorm, 2 x post_attention_layernorm")
    require_equal(gradients(model), wanted)


def _hooked(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda *_: None)
    return model


def _replaced(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Softmax(dim=1)  # over the tokens
    return model


def _own(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.forward = lambda hidden: hidden.cumsum(1)
    return model


@pytest.mark.parametrize("change", [_hooked, _replaced, _own])
def test_modules_that_are_not_as_their_class_makes_them_stay_as_they_are(change: Callable[[Any], Any]) -> None:
    model = change(build("llama", **KV))
    found = find_token_wise(model)
    assert not isinstance(found, str)
    assert "mlp" not in use_tiles(model, 7, found)
    mlp = {key: module for key, module in found.items() if key[0] == "mlp"}
    with pytest.raises(ConfigError, match=r"model.tile_tokens: LlamaForCausalLM .* its MLPs have hooks, or .*; set it to null"):
        use_tiles(change(build("llama", **KV)), 7, mlp)


def test_a_model_without_a_copy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.tile_tokens: Linear cannot run in tiles: .* no model of .*; set it to null"):
        in_tiles(nn.Linear(2, 2))


def test_hooks_that_come_later_are_refused_and_not_fed_with_tiles() -> None:
    """Such as those by which transformers records what routers choose, when a loss asks for it."""
    model = in_tiles(build("mixtral", **KV, **EXPERTS, experts_implementation="eager"))
    gradients(model)
    with pytest.raises(PhaseError, match=r"hooks inside a MixtralSparseMoeBlock, such as .* set model.tile_tokens: null"):
        gradients(model, output_router_logits=True)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.full), "block"])
def test_a_trace_has_what_tiles_save(recompute: Any) -> None:
    model = on_meta("llama", vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    ids = torch.ones(1, 4096, dtype=torch.long)
    loss = make_loss(model)
    peaks = [
        trace_microbatch(model, {"input_ids": ids, "labels": ids}, loss, torch.bfloat16, recompute=recompute, tiles=tokens).peak
        for tokens in (0, 256)
    ]
    assert peaks[1] < 0.5 * peaks[0]
