"""16-bit linear layers whose products run in fp32."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from tests.support.trainer_cases import llama
from zeromesh.kernels import cpu_matmul
from zeromesh.kernels.cpu_matmul import linear
from zeromesh.kernels.cpu_matmul import product_dtype as product_by_trial
from zeromesh.options import Precision, ZeroOptions
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.models import prepare
from zeromesh.trainer.models.prepare import enable_activation_checkpointing, prepare_model, use_fastest_linear

WIDE = "wide_linear"


@pytest.fixture(autouse=True)
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that is faster in fp32; factors are cut into several blocks both ways."""
    narrow = (torch.bfloat16, torch.float16)
    for module in (cpu_matmul, prepare):
        monkeypatch.setattr(module, "product_dtype", lambda dtype, _device: torch.float32 if dtype in narrow else dtype)
    monkeypatch.setattr(cpu_matmul, "_WEIGHT_TILE", 640)
    monkeypatch.setattr(cpu_matmul, "_TOKEN_TILE", 1280)
    monkeypatch.setattr(cpu_matmul, "_LEAST_ROWS", 4)


def _tensors(shape: tuple[int, ...], out: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(7)
    sizes = (shape, (out, shape[-1]), (out,))
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 50, 40), (1, 40), (97, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_results_are_exact_but_for_the_last_rounding(dtype: torch.dtype, shape: tuple[int, ...], biased: bool) -> None:
    tensors = _tensors(shape, 70, dtype)[: 3 if biased else 2]
    bias = tensors[2] if biased else None
    found = linear(tensors[0], tensors[1], bias)
    exact = functional.linear(*(tensor.double() for tensor in tensors))
    seed = torch.randn_like(found)
    gradients = torch.autograd.grad(found, tensors, seed)
    wanted = torch.autograd.grad(exact, tensors, seed.double())
    assert WIDE in type(found.grad_fn).__name__
    one_rounding = torch.finfo(dtype).eps / 2
    for value, true in zip((found, *gradients), (exact, *wanted), strict=True):
        assert value.dtype == dtype
        assert value.shape == true.shape
        error = (value.double() - true.double()).abs()
        # `wanted` comes back rounded to the tensors' dtype itself, and fp32 sums may fall to the other side.
        assert (error <= 2.1 * one_rounding * true.double().abs() + 1e-4).all()


def test_frozen_weights_and_inputs_without_gradients() -> None:
    x, weight, bias = _tensors((5, 40), 30, torch.bfloat16)
    linear(x.detach(), weight.detach(), bias).sum().backward()
    assert bias.grad is not None
    assert x.grad is None
    with torch.no_grad():
        assert not linear(x, weight, bias).requires_grad


def test_other_dtypes_and_empty_inputs_are_left_alone() -> None:
    x, weight, bias = _tensors((5, 40), 30, torch.float32)
    assert WIDE not in type(linear(x, weight, bias).grad_fn).__name__
    assert linear(x[:0].bfloat16(), weight.bfloat16(), None).shape == (0, 30)
    assert linear(x[0].bfloat16(), weight.bfloat16(), None).shape == (30,)


def test_tiles_are_used_again() -> None:
    x, weight, bias = _tensors((50, 40), 70, torch.bfloat16)
    assert cpu_matmul.row_blocks(40, 40) == [slice(0, 16), slice(16, 32), slice(32, 40)]  # of 640 elements
    assert cpu_matmul.row_blocks(6, 640) == [slice(0, 4), slice(4, 6)]  # of four rows at least
    first = linear(x, weight, bias)
    kept = first.clone()
    linear(x + 1, weight, bias).sum().backward()
    assert torch.equal(first, kept)


def test_pytorch_knows_the_operator() -> None:
    for biased in (True, False):
        x, weight, bias = _tensors((6, 40), 30, torch.bfloat16)
        torch.library.opcheck(cpu_matmul.wide_linear, (x, weight, bias if biased else None))


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _layers() -> nn.Module:
    torch.manual_seed(3)
    parts = (nn.Linear(20, 30), nn.SiLU(), Conv1D(24, 30), Scaled(24, 10), nn.LayerNorm(10))
    return nn.Sequential(*parts).bfloat16()


@pytest.mark.parametrize("mode", ["none", "block", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_of_a_model(mode: Any, compiled: bool) -> None:
    """The same numbers up to roundings, activations recomputed or not."""
    plain, model = _layers(), _layers()
    assert use_fastest_linear(model, torch.bfloat16, "cpu") == 2
    enable_activation_checkpointing(model, mode, blocks=[model])
    if compiled:
        model.forward = torch.compile(model.forward, backend="aot_eager")
    x = torch.randn(2, 7, 20).bfloat16()
    for each in (plain, model):
        each(x).square().sum().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0.1, atol=0.1)


def test_a_cpu_that_is_fast_in_16_bits_keeps_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "product_dtype", lambda dtype, _device: dtype)
    model = _layers()
    assert use_fastest_linear(model, torch.bfloat16, "cpu") == 0
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_frozen_head_makes_no_copies_of_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch alone would take the last positions of texts, which lie apart, as one product each."""
    monkeypatch.setattr(prepare, "product_dtype", lambda dtype, _device: dtype)
    model = llama().requires_grad_(False).double()
    use_fastest_linear(model, torch.float64, "cpu")
    watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    with torch.no_grad(), watched as profile:
        logits = model(torch.ones(3, 5, dtype=torch.long), logits_to_keep=1).logits
    assert logits.shape == (3, 1, model.config.vocab_size)
    batched = [each.input_shapes for each in profile.events() if each.key == "aten::bmm"]
    assert not [shapes for shapes in batched if shapes[1][2] == model.config.vocab_size]


def test_a_run_says_so() -> None:
    tiers: Any = SimpleNamespace(device=torch.device("cpu"))
    narrow = ZeroOptions(precision=Precision(compute=torch.bfloat16))
    assert prepare_model(_layers(), ModelSection(), ZeroOptions(), tiers)[1] == ()
    assert prepare_model(_layers(), ModelSection(), narrow, tiers)[1] == (
        "products: 2 linear layers multiply in float32, which a trial found faster here than bfloat16",
    )


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((3.0, 1.0), torch.float32), ((1.0, 0.8), torch.float32), ((1.0, 0.81), torch.bfloat16), ((1.0, 2.0), torch.bfloat16)],
)
def test_trials_decide_once(monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], chosen: torch.dtype) -> None:
    asked: list[torch.dtype] = []

    def trial(dtype: torch.dtype) -> tuple[float, float]:
        asked.append(dtype)
        return seconds

    monkeypatch.setattr(cpu_matmul, "_try_products", trial)
    monkeypatch.setattr(cpu_matmul, "_fastest", {})
    assert [product_by_trial(torch.bfloat16, "cpu") for _ in range(2)] == [chosen, chosen]
    assert asked == [torch.bfloat16]
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.bfloat16, "cuda")):
        assert product_by_trial(dtype, device) == dtype
    assert asked == [torch.bfloat16]


def test_the_trial_tells_a_slow_product_from_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this CPU is: products of one dtype are made five times."""
    real = torch.mm

    def slow(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        for _ in range(4 if left.dtype == torch.bfloat16 else 0):
            real(left.float(), right.float())
        return real(left.float(), right.float()).to(left.dtype)

    monkeypatch.setattr(torch, "mm", slow)
    narrow, wide = cpu_matmul._try_products(torch.bfloat16)
    assert narrow > 2 * wide > 0
