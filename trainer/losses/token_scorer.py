"""`TokenScorer`: log-probabilities and entropies of a model's targets without its logits, for losses of one's own."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn

from zeromesh.errors import ConfigError, DataError
from zeromesh.kernels.chunked_head import UNCHANGED, TokenScores
from zeromesh.trainer.data.collate import shifted
from zeromesh.trainer.losses.chunked_head import ChunkedHead
from zeromesh.trainer.losses.trial import examine
from zeromesh.trainer.models.adapters import is_adapted, learns_prompts, output_layer, pretrained_of


class TokenScorer:
    """Scores the targets of a Hugging Face language model, by the route on which the chunked head replaces its loss.

    scorer = TokenScorer(model)  # before shard() or Trainer
    scores = scorer(model, {"input_ids": ids, "labels": labels})
    loss = -(weights * scores.log_probs).sum() - 0.01 * scores.entropy.sum()
    """

    def __init__(self, model: nn.Module) -> None:
        """Try a small copy of the model's class in float64. Raises `ConfigError` for a model whose loss and gradients the chunked
        head does not give exactly, with the reason, and for one that is partitioned already."""
        inside: Any = pretrained_of(model)
        reason = "it is no language model of transformers"
        if output_layer(inside) is not None:
            verdict = examine(inside)
            reason = verdict.reason
        if is_adapted(model) and learns_prompts(model):
            reason = "its adapters learn prompts, which have no labels"
        if reason or verdict.route is None:
            raise ConfigError(
                f"the tokens of {type(model if inside is None else inside).__name__} cannot be scored without its logits, because "
                f"{reason}; make a TokenScorer of a model before it is partitioned, or compute the loss from its logits"
            )
        self._causal = verdict.causal
        self._fixed = {"use_cache": False} if "use_cache" in signature(type(inside).forward).parameters else {}
        self._head = ChunkedHead(model=inside, route=verdict.route, change=verdict.change or UNCHANGED)

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], *, temperature: float = 1.0) -> TokenScores:
        """Return the scores of a batch's labels, float32 (float64 for a float64 model) `[batch, tokens]`. Position i has those of
        the target that is predicted there: label i + 1 of a causal model, which has none at the last position, else label i.

        Args:
            model: the model, or what wraps it, as the loop calls it; partitioned or not.
            batch: the model's inputs with `labels` [batch, tokens], -100 where nothing is to be scored.
            temperature: a positive number by which the logits are divided.

        Raises `DataError` for a batch without labels or with labels outside of the vocabulary, and `PhaseError` for a model that
        changes its logits otherwise than the small copy did.
        """
        if not isinstance(labels := batch.get("labels"), Tensor):
            raise DataError(f"the batch has no `labels` to score; it has {', '.join(map(str, batch)) or 'nothing'}")
        targets = shifted(labels) if self._causal else labels
        return self._head.scores(model, {**self._fixed, **batch}, targets=targets, temperature=temperature)
