"""What a trace says of a microbatch, beside what PyTorch's allocator and its counter of operations see of the same one."""

import copy
from typing import Any

import peft
import pytest
import torch
from bench.activations import forget, running
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.architectures import ARCHITECTURES
from tests.unit.planning.test_machine import MODEL
from zeromesh.errors import ConfigError
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models import prepare
from zeromesh.trainer.models.prepare import enable_activation_checkpointing, find_token_wise, use_tiles
from zeromesh.trainer.planning.tracing.meter import AFTER, BEFORE, Work
from zeromesh.trainer.planning.tracing.trace import trace_microbatch
from zeromesh.units.plan import block_modules

_LLAMA = MODEL | {"vocab_size": 512}


def _llama(**changes: Any) -> Any:
    values = {**_LLAMA, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def _tokens(rows: int = 2, length: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 500, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _allocated(model: nn.Module, batch: dict[str, Any], mode: Any, monkeypatch: pytest.MonkeyPatch, tiles: int = 0) -> int:
    """The most bytes that PyTorch's allocator gives a forward and backward of a model with values."""
    monkeypatch.setattr(prepare, "allocate_lasting", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))
    model = copy.deepcopy(model).train()
    loss = make_loss(model)
    if tiles:
        use_tiles(model, tiles, find_token_wise(model))
    enable_activation_checkpointing(model, mode, blocks=block_modules(model))
    for parameter in (each for each in model.parameters() if each.requires_grad):
        parameter.register_post_accumulate_grad_hook(forget)

    def step() -> None:
        loss(model, batch, seed=1.0).backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return max(running(profiled))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mode", "tiles"), [("none", 0), ("block", 0), ("selective", 0), ("none", 128), ("block", 128)])
def test_bytes_are_those_of_the_allocator(mode: Any, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _llama(), _tokens(length=64 if not tiles else 1024)
    found = trace_microbatch(model, batch, make_loss(model), torch.float32, recompute=mode, tiles=tiles)
    assert found.peak == pytest.approx(_allocated(model, batch, mode, monkeypatch, tiles), rel=0.03)
    assert [each.name for each in found.segments] == [BEFORE, *(f"model.layers.{n}" for n in range(6)), AFTER]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bytes_of_architectures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    samples = architecture.samples(4)
    batch = {key: torch.stack([each[key] for each in samples]) for key in samples[0]}
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    found = trace_microbatch(model, batch, make_loss(model), torch.float32)
    # Experts get as many tokens each here, and others there.
    assert found.peak == pytest.approx(_allocated(model, batch, "none", monkeypatch), rel=0.15)


def _flops(work: Work) -> float:
    return sum(product.flops for product in work.products)


def test_operations_are_those_that_pytorch_counts() -> None:
    # The counter does not know the CPU's fused attention.
    model, batch = _llama(attn_implementation="eager"), _tokens()
    loss = make_loss(model, mode="native")
    with FlopCounterMode(display=False) as counter:
        loss(model, batch, seed=1.0).backward()
    found = trace_microbatch(model, batch, loss, torch.float32)
    assert _flops(found.work) == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_a_deep_model_is_its_blocks_many_times() -> None:
    short, deep = _llama(num_hidden_layers=4), _llama(num_hidden_layers=9)
    few, many = (trace_microbatch(each, _tokens(), make_loss(each), torch.float32) for each in (short, deep))
    assert many.segments[1:4] == few.segments[1:4]
    less, more = (sum(each.kept for each in found.segments) for found in (few, many))
    assert more - less == 5 * few.segments[2].kept
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 9
    assert not any(each.is_meta for each in deep.parameters())


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_chosen_evenly_and_multiplied_by_groups(kind: str, compute: torch.dtype) -> None:
    """As a configuration builds them: the library counts tokens of experts by an operator that a CPU has for floats alone."""
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    few, many = (
        trace_microbatch(each, _tokens(), make_loss(each), compute)
        for each in (_llama(model_type=kind, **{**experts, "num_experts_per_tok": n}) for n in (1, 2))
    )
    width = 32 if kind == "qwen3_moe" else 160
    one_expert = 6 * 3 * _LLAMA["hidden_size"] * width * 2 * 64  # Three products, forward and for both gradients.
    assert _flops(many.work) - _flops(few.work) == pytest.approx(6 * one_expert, rel=1e-6)


def test_adapters_of_experts_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT adds them in a context of autocast on the device of their weights, and PyTorch has no such context on meta."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = peft.LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model, batch = peft.get_peft_model(_llama(model_type="qwen3_moe", **experts), config), _tokens()
    found = trace_microbatch(model, batch, make_loss(model), torch.float32)
    assert found.peak == pytest.approx(_allocated(model, batch, "none", monkeypatch), rel=0.15)
    assert not any(each.is_meta for each in model.parameters())


def test_tensor_ranks_exchange_what_they_divide() -> None:
    model, batch = _llama(), _tokens()
    whole = trace_microbatch(model, batch, make_loss(model), torch.float32)
    part = trace_microbatch(model, batch, make_loss(model), torch.float32, tensor=2)
    block = part.segments[2]
    assert len(block.forward.exchanges) == 2
    assert _flops(block.forward) == pytest.approx(_flops(whole.segments[2].forward) / 2, rel=1e-6)
    assert block.kept < whole.segments[2].kept


def test_a_model_that_needs_values_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum() + float(self.layer(x).detach().numpy().sum())

    model = Odd()
    with pytest.raises(ConfigError, match="Odd cannot be run without values"):
        trace_microbatch(model, {"x": torch.zeros(2, 4)}, make_loss(model), torch.bfloat16)
