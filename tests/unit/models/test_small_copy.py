"""Small copies: what becomes smaller, which copy is the first that can be taken, and how two runs of it are compared."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from zeromesh.trainer.models.small_copy import (
    InFloat64,
    deviation,
    first_copy,
    first_difference,
    module_label,
    perturb,
    run_pass,
    shrink_config,
    small_copy,
)

KINDS = ["full_attention", "sliding_attention", "full_attention", "full_attention"]


def test_sizes_shrink_to_limits_and_layers_keep_each_kind() -> None:
    config = tf.Qwen3Config(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=1, head_dim=8, intermediate_size=20, vocab_size=90,
        num_hidden_layers=4, layer_types=KINDS, eos_token_id=32, bos_token_id=31, pad_token_id=None,
    )  # fmt: skip
    config._attn_implementation_internal = "flash_attention_2"
    small = shrink_config(config, {"hidden_size": 32, "vocab_size": 32, "intermediate_size": 20, "no_such": 1}, 1)
    assert (small.hidden_size, small.vocab_size, small.intermediate_size, small.num_key_value_heads) == (32, 32, 20, 1)
    assert not hasattr(small, "no_such")
    assert (small.num_hidden_layers, small.layer_types) == (2, KINDS[:2])
    assert (small.bos_token_id, small.eos_token_id, small.pad_token_id) == (31, 0, None)
    assert (small._attn_implementation, small._experts_implementation) == ("eager", "eager")
    assert (config.hidden_size, config.num_hidden_layers, config.layer_types) == (64, 4, KINDS)
    config._attn_implementation_internal = "sdpa"
    assert shrink_config(config, {}, 3)._attn_implementation == "sdpa"
    assert [shrink_config(config, {}, layers).num_hidden_layers for layers in (3, 4, 9)] == [3, 4, 4]
    many = tf.Qwen3Config(num_hidden_layers=12, layer_types=["full_attention"] * 11 + ["sliding_attention"])
    assert (shrink_config(many, {}, 2).num_hidden_layers, len(shrink_config(many, {}, 2).layer_types)) == (8, 8)


def test_nested_configurations_shrink_too() -> None:
    config = tf.LlavaConfig(
        text_config={"model_type": "llama", "num_hidden_layers": 5}, vision_config={"model_type": "clip_vision_model"}
    )
    small = shrink_config(config, {"hidden_size": 32, "vocab_size": 96}, 2)
    assert (small.text_config.hidden_size, small.text_config.num_hidden_layers) == (32, 2)
    assert (small.vision_config.hidden_size, small.vision_config.num_hidden_layers) == (32, 2)
    assert small.text_config.vocab_size == 96
    assert config.text_config.num_hidden_layers == 5


class Sized(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_size == 5:
            raise ValueError("five is odd")
        self.weight = nn.Parameter(torch.randn(config.hidden_size))


def sized(hidden: int) -> Any:
    config = tf.LlamaConfig()
    config.hidden_size = hidden
    return config


def test_the_first_copy_that_is_small_enough_and_passes_is_taken() -> None:
    tried: list[int] = []

    def check(model: Any) -> None:
        assert not model.weight.is_meta
        tried.append(model.weight.numel())
        if tried[-1] == 4:
            raise RuntimeError("four is even")

    def first(*sizes: int, seed: int = 0) -> Any:
        tried.clear()
        rows = [({"hidden_size": size}, 1) for size in sizes]
        return first_copy(sized(9), Sized, rows, check, most=8, seed=seed)

    state = torch.get_rng_state()
    found = first(9, 5, 4, 8, 3)
    assert (found.weight.numel(), tried) == (8, [4, 8])
    assert torch.equal(found.weight, first(8).weight)
    assert not torch.equal(found.weight, first(8, seed=1).weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert first(9, 5, 4) == ["9 parameters", "ValueError: five is odd", "RuntimeError: four is even"]


def test_a_model_of_which_there_is_no_small_copy_says_why() -> None:
    assert small_copy(nn.Linear(1, 1), lambda each: each) == "it has no configuration of which a small one could be made"
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64))
    said = small_copy(model, lambda each: each.lm_head.weight.sum() / 0)
    assert said == "ValueError: its numbers are not finite"
    found: Any = small_copy(model, lambda each: each.lm_head.weight)
    assert (type(found), found.dtype, found.training) == (type(model), torch.float64, False)
    assert found.config.hidden_size == 32


def test_casts_to_fp32_are_casts_to_float64() -> None:
    half, single = torch.ones(2, dtype=torch.float16), torch.float32
    with InFloat64():
        found = [half.float(), half.to(single), half.to(dtype=single), torch.zeros(2, dtype=single), half.double()]
        others = [half + half, half.to(torch.bfloat16), half.long()]
    assert {each.dtype for each in found} == {torch.float64}
    assert [each.dtype for each in others] == [torch.float16, torch.bfloat16, torch.int64]
    assert half.float().dtype == single


def test_how_far_a_tensor_is_from_another() -> None:
    wanted = torch.tensor([3.0, 4.0])
    rows: tuple[tuple[torch.Tensor, float, float], ...] = (
        (wanted, 0.0, 0.0),
        (wanted + torch.tensor([0.0, 1.0]), 0.0, 0.2),
        (wanted + torch.tensor([0.0, 1.0]), 5.0, 0.1),
        (torch.ones(3), 0.0, float("inf")),
        (torch.tensor([3.0, float("nan")]), 1.0, float("inf")),
    )
    for found, scale, distance in rows:
        assert deviation(found, wanted, scale) == pytest.approx(distance)
    assert deviation(torch.zeros(2), torch.zeros(2)) == 0.0
    assert deviation(torch.ones(1), torch.zeros(1)) > 1e200
    assert deviation(torch.ones(1), torch.zeros(1), 2.0) == 0.5


def test_the_first_module_whose_output_differs_by_call() -> None:
    one, two, three = (torch.tensor(float(number)) for number in (1, 2, 3))

    def part_of(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor | None:
        return wanted if found.shape == wanted.shape else None

    wanted = [("a", [one]), ("b", [two, three]), ("a", [three]), ("", [one])]
    for found, name in (
        (wanted, None),
        ([("b", [two, one]), ("a", [two])], "b"),
        ([("a", [one]), ("a", [one])], "a"),
        ([("a", [one]), ("a", [three]), ("a", [two]), ("c", [two])], None),
        ([("", [two])], ""),
        ([("b", [two])], None),
        ([("b", [torch.ones(2)])], None),
    ):
        assert first_difference(found, wanted, part_of, 1e-9) == name


def test_gradients_outputs_and_names_of_a_model() -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    model[1].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(2))
    model.register_parameter("unused", unused)
    outputs, found = run_pass(model, lambda: 3 * model(torch.ones(1, 1)).sum())
    assert [name for name, _ in outputs] == ["0", "1", ""]
    assert not outputs[0][1][0].requires_grad
    assert not any(each._forward_hooks for each in model.modules())
    assert set(found) == {"", "unused", "0.weight", "1.weight"}
    assert torch.equal(found[""], 3 * outputs[-1][1][0].sum())
    assert found["unused"].tolist() == [0, 0]
    assert found["0.weight"].item() == pytest.approx(3 * model[1].weight.item())
    assert (module_label(model, ""), module_label(model, "0")) == ("the model, a Sequential", "0, a Linear")
    before = {name: each.clone() for name, each in model.named_parameters()}
    perturb(model)
    assert all(0 < float((each - before[name]).abs().max()) < 0.5 for name, each in model.named_parameters())
