"""What user code does aside of the engine is noticed: writes in place, and entries of backward into a unit without a hook."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zeromesh.units import unit
from zeromesh.zero.hooks import Edge, UnitCalls


def entered(aside: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """Units that are entered without a hook where a call returns `product` and keeps `aside(weight, product)` for the loss."""
    calls = UnitCalls()
    calls.begin(3)
    weight = torch.ones(2, 2, requires_grad=True)
    product = (torch.ones(2, 2) @ weight).view(4)
    kept = aside(weight, product)
    calls.end(3, [product])
    loss = kept.sum()
    edge: Edge = (loss.grad_fn, loss.output_nr)  # type: ignore[assignment]
    return [unit for unit, _ in calls.unhooked_entries([edge])]


@pytest.mark.parametrize(
    ("aside", "found"),
    [
        (lambda weight, product: product, []),
        (lambda weight, product: product[0].clone(), []),
        (lambda weight, product: product * 2, [3]),
        (lambda weight, product: weight.clone(), [3]),
        (lambda weight, product: product[0] * weight[0, 0], [3]),
    ],
)
def test_views_and_copies_of_outputs_need_no_hook(aside: Callable[[Tensor, Tensor], Tensor], found: list[int]) -> None:
    assert entered(aside) == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_device", [False, True])
def test_values_and_their_order_count(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, on_device: bool) -> None:
    monkeypatch.setattr(unit, "on_accelerator", lambda values: on_device)
    monkeypatch.setattr(unit, "_DIGEST_WORDS", 64)
    values = torch.randn(40, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    swapped, changed = values.clone(), values.clone()
    swapped[[3, 7]] = swapped[[7, 3]]
    changed[-1, -1] += 1
    found = [int(unit.digest(each)) for each in (values, swapped, changed, values.flatten().roll(64), -values)]
    assert len(set(found)) == len(found)
    assert int(unit.digest(values.clone())) == found[0]
    assert int(unit.digest(values[:0])) == int(unit.digest(values[:0].clone()))
