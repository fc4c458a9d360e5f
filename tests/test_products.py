"""16-bit linear layers whose products run in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from zeromesh.tensor import products
from zeromesh.tensor.products import fastest_products, product_dtype


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without matrix tiles; factors are cut into several blocks both ways."""
    narrow = (torch.bfloat16, torch.float16)
    monkeypatch.setattr(products, "product_dtype", lambda dtype, _device: torch.float32 if dtype in narrow else dtype)
    monkeypatch.setattr(products, "_WEIGHT_TILE", 640)
    monkeypatch.setattr(products, "_TOKEN_TILE", 1280)
    monkeypatch.setattr(products, "_LEAST_ROWS", 4)


def _tensors(shape: tuple[int, ...], out: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(7)
    sizes = (shape, (out, shape[-1]), (out,))
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 50, 40), (40,), (1, 40), (97, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_results_are_exact_but_for_the_last_rounding(dtype: torch.dtype, shape: tuple[int, ...], biased: bool) -> None:
    tensors = _tensors(shape, 70, dtype)[: 3 if biased else 2]
    with fastest_products(dtype, "cpu"):
        found = functional.linear(*tensors)
    exact = functional.linear(*(tensor.double() for tensor in tensors))
    seed = torch.randn_like(found)
    gradients = torch.autograd.grad(found, tensors, seed)
    wanted = torch.autograd.grad(exact, tensors, seed.double())
    assert "WideLinear" in type(found.grad_fn).__name__
    one_rounding = torch.finfo(dtype).eps / 2
    for value, true in zip((found, *gradients), (exact, *wanted), strict=True):
        assert value.dtype == dtype
        assert value.shape == true.shape
        error = (value.double() - true.double()).abs()
        # `wanted` comes back rounded to the tensors' dtype itself, and fp32 sums may fall to the other side.
        assert (error <= 2.1 * one_rounding * true.double().abs() + 1e-4).all()


def test_transposed_layers_of_gpt2() -> None:
    x, weight, bias = _tensors((30, 40), 70, torch.bfloat16)
    with fastest_products(torch.bfloat16, "cpu"):
        found = torch.addmm(bias, x, weight.t())
    assert "WideLinear" in type(found.grad_fn).__name__
    torch.testing.assert_close(found, functional.linear(x, weight, bias), rtol=0.02, atol=0.02)


def test_frozen_weights_and_inputs_without_gradients() -> None:
    layer = nn.Linear(40, 30).bfloat16()
    layer.weight.requires_grad_(False)
    x = torch.randn(5, 40).bfloat16()
    with fastest_products(torch.bfloat16, "cpu"):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert x.grad is None
    with fastest_products(torch.bfloat16, "cpu"), torch.no_grad():
        assert not layer(x).requires_grad


def test_other_dtypes_and_calls_are_left_alone() -> None:
    x, weight, bias = _tensors((5, 40), 30, torch.float32)
    with fastest_products(torch.bfloat16, "cpu"):
        assert "WideLinear" not in type(functional.linear(x, weight, bias).grad_fn).__name__
        scaled = torch.addmm(bias.bfloat16(), x.bfloat16(), weight.t().bfloat16(), beta=0.5)
        assert "WideLinear" not in type(scaled.grad_fn).__name__
        empty = functional.linear(x[:0].bfloat16(), weight.bfloat16())
    assert empty.shape == (0, 30)
    with fastest_products(torch.float32, "cpu"):
        narrow = functional.linear(x.bfloat16(), weight.bfloat16())
    assert "WideLinear" not in type(narrow.grad_fn).__name__


def test_tiles_are_used_again() -> None:
    x, weight, bias = _tensors((50, 40), 70, torch.bfloat16)
    with fastest_products(torch.bfloat16, "cpu"):
        first = functional.linear(x, weight, bias)
        kept = first.clone()
        functional.linear(x + 1, weight, bias).sum().backward()
    assert torch.equal(first, kept)


def test_what_has_no_faster_dtype_keeps_its_own() -> None:
    for dtype in (torch.float32, torch.float64):
        assert product_dtype(dtype, "cpu") == dtype
    assert product_dtype(torch.bfloat16, "cuda") == torch.bfloat16
