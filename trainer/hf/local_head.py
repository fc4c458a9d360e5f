"""The loss of a model whose output embedding is divided by vocabulary, where logits change between head and loss.

Soft-capping and scaling change logits one by one, so each rank can do that to its own, and take part in a cross entropy that
exchanges three numbers a token. The model's code stays as it is: it is given the logits of fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.errors import PhaseError
from zeromesh.tensor.layers import VocabParallelHead
from zeromesh.tensor.vocab_loss import logits_cross_entropy
from zeromesh.trainer.hf.chunked_head import Route, put_back, without_labels
from zeromesh.zero.initial import seeded_cpu

CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [tokens, part of the vocabulary] and targets [tokens] to the sum of the losses over the whole vocabulary."""


class LocalHead:
    """Runs a model whose head is divided among tensor ranks; between runs the model is as it was.

    Args:
        model: a Hugging Face language model, which may be divided later, and whole again after that.
        route: how logits leave the model, see `Route`.
    """

    def __init__(self, model: Any, *, route: Route) -> None:
        self._model = model
        self._route = route

    @property
    def divided(self) -> bool:
        """Whether the model's head is divided now, so that `run` can stand for its loss."""
        return isinstance(self._model.get_output_embeddings(), VocabParallelHead)

    def run(
        self, model: Any, inputs: dict[str, Any], *, targets: torch.Tensor, seed: float, count: int
    ) -> torch.Tensor:
        """See `ChunkedHead.run`; backward does not need to know its `seed` ahead.

        Raises `PhaseError` if the model gives its loss something else than logits of all targets.
        """
        head: VocabParallelHead = self._model.get_output_embeddings()
        cross_entropy = partial(logits_cross_entropy, sizes=head.sizes, exchange=head.exchange)
        part = _Part(self._model, self._route, targets, count, cross_entropy)
        with head.local_logits():
            return part.run(model, inputs)


class _Part:
    """One forward of a model whose head gives some logits, with `cross_entropy` for its loss."""

    def __init__(
        self, model: Any, route: Route, targets: torch.Tensor, count: int, cross_entropy: CrossEntropy
    ) -> None:
        self._model = model
        self._route = route
        self._targets = targets
        self._count = count
        self._cross_entropy = cross_entropy
        self._called = False

    def run(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """The sum of the losses."""
        if self._route == "logits":
            return self._sum(model(**without_labels(model, inputs)).logits)
        before = vars(self._model).get("_loss_function")
        self._model.loss_function = self._mean
        try:
            # What the model adds to its mean loss (auxiliary losses of experts) is scaled as the mean is.
            loss: torch.Tensor = model(**inputs).loss * self._count
        finally:
            put_back(self._model, "_loss_function", before)
        if not self._called:
            raise PhaseError("the model computed a loss without its loss function")
        return loss

    def _mean(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._called = True
        return self._sum(args[0] if args else kwargs["logits"]) / max(1, self._count)

    def _sum(self, logits: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        if rows.shape[0] != self._targets.numel():
            raise PhaseError(f"the loss got {rows.shape[0]} rows of logits for {self._targets.numel()} labels")
        return self._cross_entropy(rows, self._targets.reshape(-1).to(rows.device))


def loss_of_halves(
    small: Any, route: Route, inputs: dict[str, Any], *, targets: torch.Tensor, count: int, name: str
) -> torch.Tensor:
    """What two tensor ranks would compute, one after the other: the sum of the losses of logits that were made in halves.

    Both draw what `seeded_cpu(0, name)` gives. Raises `PhaseError` where a half of the logits does not arrive at the loss as one.
    """
    head: nn.Linear = small.get_output_embeddings()
    vocab = head.weight.shape[0]
    found: list[torch.Tensor] = []

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wanted = (vocab // 2, vocab - vocab // 2)[len(found)]
        if logits.shape[-1] != wanted:
            raise PhaseError(f"{logits.shape[-1]} logits a token arrive at the loss where the head gave {wanted}")
        found.append(logits)
        if len(found) == 1:
            return logits.sum()  # The second rank knows the loss.
        return nn.functional.cross_entropy(torch.cat(found, -1), targets, reduction="sum")

    loss = torch.zeros(())
    for part in (slice(0, vocab // 2), slice(vocab // 2, vocab)):
        with _narrowed(head, part), seeded_cpu(0, name), torch.enable_grad():
            loss = _Part(small, route, targets, count, cross_entropy).run(small, inputs)
    return loss


@contextmanager
def _narrowed(head: nn.Linear, part: slice) -> Iterator[None]:
    """Inside the block a call of the head gives the logits of some tokens."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, head.weight[part], None if head.bias is None else head.bias[part])

    before = vars(head).get("forward")
    vars(head)["forward"] = forward
    try:
        yield
    finally:
        put_back(head, "forward", before)
