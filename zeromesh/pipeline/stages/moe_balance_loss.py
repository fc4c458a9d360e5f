"""The load-balancing loss of experts across stages.

A mixture-of-experts model of transformers adds to its loss (Fedus et al., "Switch Transformer", 2021, equations 4 to 6)

    experts x sum over e of (count_e / rows) x (probability_e / rows)

where count_e is how many tokens chose expert e, probability_e the sum of its routing probabilities and rows the number of tokens,
each over the layers of the whole model. A product of sums over layers is no sum over stages: the sums so far travel with the
hidden state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeromesh.errors import LayoutError

_FUNCTION = "load_balancing_loss_func"


class ExpertBalance:
    """The balance term of a model's loss. `terms` is `[2 x experts + 1]` in fp32: counts, probabilities, rows."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[str, Any] = inspect.unwrap(type(model).forward).__globals__
        experts, top_k = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
        function = self._names.get(_FUNCTION)
        if not isinstance(experts, int) or not isinstance(top_k, int) or function is None:
            raise _refusal(model, "it is not known how it balances its experts")
        self._experts = experts
        self._top_k = top_k
        if not self._agrees(function):
            raise _refusal(model, "it balances its experts in a way that is not known here")

    @classmethod
    def of(cls, model: nn.Module) -> ExpertBalance | None:
        """None for a model whose loss has no such term, as it is configured.

        Raises:
            LayoutError: for one that is not known.
        """
        return cls(model) if getattr(getattr(model, "config", None), "output_router_logits", False) else None

    def _agrees(self, function: Callable[..., torch.Tensor]) -> bool:
        """Tell whether the model's own function gives the same for two layers of arbitrary logits."""
        generator = torch.Generator().manual_seed(0)
        logits = tuple(torch.randn(6, self._experts, generator=generator) for _ in range(2))
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        for each in (None, mask):
            ours = self._loss(self.add(self.add(None, logits[:1], each), logits[1:], each))
            if not torch.equal(ours, function(logits, self._experts, self._top_k, each)):
                return False
        return True

    def add(
        self, terms: torch.Tensor | None, logits: Sequence[torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Add more layers to the sums so far, each `[batch x sequence, experts]`, added in order."""
        if terms is None:
            terms = torch.zeros(2 * self._experts + 1, device=logits[0].device)
        counts, probabilities, rows = self._parts(terms)
        weights = None if mask is None else mask.reshape(-1).to(device=terms.device, dtype=torch.float32)
        for layer in logits:
            routing = layer.softmax(dim=-1)
            chosen = routing.topk(self._top_k, dim=-1).indices.reshape(-1)
            each = torch.ones_like(chosen, dtype=torch.float32) if weights is None else weights
            each = each if weights is None else each.repeat_interleave(self._top_k)
            counts = counts + torch.zeros_like(counts).scatter_add_(0, chosen, each)
            wide = routing.float() if weights is None else routing.float() * weights.unsqueeze(-1)
            probabilities = probabilities + wide.sum(dim=0)
            rows = rows + (float(len(layer)) if weights is None else weights.sum())
        return torch.cat([counts, probabilities, rows])

    def _loss(self, terms: torch.Tensor) -> torch.Tensor:
        counts, probabilities, rows = self._parts(terms)
        return torch.sum((counts / rows) * (probabilities / rows)) * self._experts

    def _parts(self, terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        experts = self._experts
        return terms[:experts], terms[experts : 2 * experts], terms[2 * experts :]

    @contextmanager
    def continuing(self, terms: torch.Tensor | None) -> Iterator[None]:
        """Count the layers of earlier stages, whose sums are `terms`, in the model's own balance loss inside the block."""
        if terms is None:
            yield
            return

        def continued(logits: Any, _experts: Any = None, _top_k: Any = 2, mask: Any = None) -> torch.Tensor:
            return self._loss(self.add(terms, logits, mask))

        original = self._names[_FUNCTION]
        self._names[_FUNCTION] = continued
        try:
            yield
        finally:
            self._names[_FUNCTION] = original


def _refusal(model: nn.Module, reason: str) -> LayoutError:
    return LayoutError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {reason}; set output_router_logits to false to train without"
    )
