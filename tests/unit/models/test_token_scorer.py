"""Scores of a model's targets without its logits: those of its logits, for every route, before and after it is partitioned."""

from typing import Any

import pytest
import torch
import transformers as tf

import zeromesh
from tests.unit.models.test_losses import CHANGED, MODELS, batch_of, gradients, hooked, model_of, subclassed
from zeromesh.errors import ConfigError, DataError
from zeromesh.losses import TokenScorer, TokenScores
from zeromesh.trainer.models.small_copy import InFloat64

NAMES = ["llama", "gemma2", "bert-masked", "t5", *(name for name in ("granite", "mixtral-auxiliary") if name in MODELS)]


def whole(model: Any, batch: dict[str, torch.Tensor], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    shifts = "Masked" not in type(model).__name__ and not model.config.is_encoder_decoder
    labels = batch["labels"]
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shifts else labels
    logs = (model(**batch).logits / temperature).log_softmax(-1)
    chosen = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(targets == -100, 0), -(logs.exp() * logs).sum(-1).masked_fill(targets == -100, 0)


def combined(scores: Any) -> torch.Tensor:
    seeds = torch.randn(2, *scores[0].shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (scores[0] * seeds[0]).sum() + (scores[1] * seeds[1]).sum()


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_logits(name: str) -> None:
    model, batch = model_of(name), batch_of()
    with InFloat64():
        expected = whole(model, batch, 0.7)
        theirs = gradients(model, combined(expected), 1.0)
        scorer = TokenScorer(model)
        for _ in range(2):  # The second call does not measure the change of the logits again.
            scores = scorer(model, batch, temperature=0.7)
            ours = gradients(model, combined(scores), 1.0)
    assert str(scorer._head.change) == CHANGED.get(name, "a factor of 1")
    for mine, wanted in zip(scores[:2], expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    for parameter, gradient in ours.items():
        error = float((gradient - theirs[parameter]).norm())
        assert error <= 1e-10 * (float(theirs[parameter].norm()) + 1e-3 * largest), parameter


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loop_of_ones_own_over_a_partitioned_model(stage: int) -> None:
    plain, batch = model_of("llama"), batch_of()
    model = model_of("llama")
    scorer = TokenScorer(model)
    model, optimizer = zeromesh.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=stage)
    own = torch.optim.SGD(plain.parameters(), lr=0.5)
    assert optimizer is not None
    with InFloat64():
        for _ in range(2):
            for scores, each in ((scorer(model, batch), optimizer), (whole(plain, batch), own)):
                combined(scores).backward()
                each.step()
                each.zero_grad()
    zeromesh.unshard(model)
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_scored_is_refused() -> None:
    model = model_of("llama")
    with pytest.raises(DataError, match="no `labels`"):
        TokenScorer(model)(model, {"input_ids": torch.ones(1, 2, dtype=torch.long)})
    hooked(model)
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    classifier = tf.BertForSequenceClassification(tf.BertConfig(**sizes))
    for each, said in ((model, "its head has hooks"), (torch.nn.Linear(2, 2), "no language model"), (classifier, "no lang")):
        with pytest.raises(ConfigError, match=said):
            TokenScorer(each)


def test_trl_scores_by_our_kernel_what_its_own_scores() -> None:
    """In float64, of which TRL's own kernel has float32 alone; and a head that is not only its weight is refused."""
    utils = pytest.importorskip("trl.trainer.utils")
    from zeromesh.trainer.integrations.transformers import _score_by_our_kernel

    assert not _score_by_our_kernel(model_of("llama"))
    for name in ("llama", "gemma2", "cohere"):
        model, batch = model_of(name), batch_of()
        names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        with InFloat64():
            expected = [each[:, :-1] for each in whole(model, batch, 0.7)]
            theirs = gradients(model, combined(expected), 1.0)
            utils.add_fused_lm_head(model, temperature=0.7, outputs=names)
            before = model(**batch, fused_lm_head=True)
            assert _score_by_our_kernel(model)
            found = model(**batch, fused_lm_head=True)
            ours = gradients(model, combined((found.log_probs, found.entropy)), 1.0)
        for mine, wanted in zip((found.log_probs, found.entropy), expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
        for each in (*names, "label_mask", "loss"):
            torch.testing.assert_close(found[each], before[each].to(found[each].dtype), rtol=1e-4, atol=1e-5)
        for parameter, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[parameter], rtol=1e-9, atol=1e-9)
    assert len(names) == len(TokenScores._fields)
    other = model_of("llama")
    other.config.logit_scale = 0.5  # which TRL reads and the model does not
    utils.add_fused_lm_head(other)
    assert _score_by_our_kernel(other)
    with pytest.raises(ConfigError, match=r"changes its logits by a factor of 0\.5, and a trial finds a factor of 1"):
        other(**batch, fused_lm_head=True)
    subclassed(model)
    with pytest.raises(ConfigError, match="the head is a DoubledHead"):
        model(**batch, fused_lm_head=True)
