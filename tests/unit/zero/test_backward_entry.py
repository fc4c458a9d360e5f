"""Where backward enters a call of a unit: through outputs that are hooked, through views and copies of them, or aside of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
    return [unit for unit, _ in calls.entrances([edge])]


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
def test_only_views_and_copies_of_hooked_outputs_need_no_hook(
    aside: Callable[[Tensor, Tensor], Tensor], found: list[int]
) -> None:
    assert entered(aside) == found
