"""The loss of a model whose output embedding is divided by vocabulary, where logits change between head and loss.

Soft-capping and scaling change logits one by one, so each rank can do that to its own, and take part in a cross entropy that
exchanges three numbers a token. The model's code stays as it is: it is given the logits of fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    """Runs a model whose head gives some logits, with `cross_entropy` for its loss; between runs the model is as it was.

    Args:
        model: a Hugging Face language model.
        route: how logits leave the model, see `Route`.
        narrowed: inside this block the head gives the logits of its part alone.
        cross_entropy: makes the loss of them.
    """

    def __init__(
        self,
        model: Any,
        *,
        route: Route,
        narrowed: Callable[[], AbstractContextManager[None]],
        cross_entropy: CrossEntropy,
    ) -> None:
        self._model = model
        self._route = route
        self._narrowed = narrowed
        self._cross_entropy = cross_entropy

    @classmethod
    def of_rank(cls, model: Any, route: Route) -> LocalHead:
        """This tensor rank's, for a model whose head is a `VocabParallelHead` (on other stages of a pipeline, stands for one)."""
        head: VocabParallelHead = model.get_output_embeddings()
        cross_entropy = partial(logits_cross_entropy, sizes=head.sizes, exchange=head.exchange)
        return cls(model, route=route, narrowed=head.local_logits, cross_entropy=cross_entropy)

    def run(
        self, model: Any, inputs: dict[str, Any], *, targets: torch.Tensor, seed: float, count: int
    ) -> torch.Tensor:
        """See `ChunkedHead.run`; backward does not need to know its `seed` ahead.

        Raises `PhaseError` if the model gives its loss something else than logits of all targets.
        """
        with self._narrowed():
            if self._route == "logits":
                return self._sum(model(**without_labels(model, inputs)).logits, targets)
            with self._standing_in(targets, count) as called:
                # What the model adds to its mean loss (auxiliary losses of experts) is scaled as the mean is.
                loss: torch.Tensor = model(**inputs).loss * count
            if not called:
                raise PhaseError("the model computed a loss without its loss function")
            return loss

    @contextmanager
    def _standing_in(self, targets: torch.Tensor, count: int) -> Iterator[list[bool]]:
        called: list[bool] = []

        def mean(*args: Any, **kwargs: Any) -> torch.Tensor:
            called.append(True)
            return self._sum(args[0] if args else kwargs["logits"], targets) / max(1, count)

        before = vars(self._model).get("_loss_function")
        self._model.loss_function = mean
        try:
            yield called
        finally:
            put_back(self._model, "_loss_function", before)

    def _sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        if rows.shape[0] != targets.numel():
            raise PhaseError(f"the loss got {rows.shape[0]} rows of logits for {targets.numel()} labels")
        return self._cross_entropy(rows, targets.reshape(-1).to(rows.device))


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
        narrowed = partial(_narrowed, head, part)
        half = LocalHead(small, route=route, narrowed=narrowed, cross_entropy=cross_entropy)
        with seeded_cpu(0, name), torch.enable_grad():
            loss = half.run(small, inputs, targets=targets, seed=1.0, count=count)
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
