"""Scores of tokens by chunks equal those of whole logits: values and gradients, for any chunk, mask, bias and change."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.support.tensor_sizes import LargestTensor
from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import DataError, LayoutError
from zeromesh.kernels import chunked_head
from zeromesh.kernels.chunked_head import LogitChange
from zeromesh.losses import TokenScores, token_scores

Case = tuple[Tensor, Tensor, Tensor, Tensor | None]


def case(
    shape: tuple[int, ...], width: int, vocab: int, *, bias: bool = True, masked: float = 0.3, dtype: torch.dtype = torch.float64
) -> Case:
    """Hidden states, weight, targets and bias."""
    generator = torch.Generator().manual_seed(vocab * 31 + sum(shape))

    def leaf(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, vocab, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < masked] = -100
    return leaf(*shape, width), leaf(vocab, width), targets, leaf(vocab) if bias else None


def scores_of(one: Case, *, chunk: int = 256, temperature: float = 1.0, **keys: Any) -> TokenScores:
    hidden, weight, targets, bias = one
    ranks = {name: keys.pop(name) for name in ("exchange", "sizes") if name in keys}
    with patch.object(chunked_head, "_CHUNK_TOKENS", chunk):
        rows = hidden.reshape(-1, hidden.shape[-1])
        how = {"temperature": temperature, "change": LogitChange(**keys), **ranks}
        found = token_scores(rows, weight, bias, targets.reshape(-1), **how)  # type: ignore[arg-type]
    return TokenScores(*(each.view(targets.shape) for each in found))


def plain(one: Case, temperature: float = 1.0, scale: float = 1.0, cap: float = 0.0) -> TokenScores:
    hidden, weight, targets, bias = one
    logits = functional.linear(hidden, weight, bias)
    logits = scale * (logits if logits.dtype is torch.float64 else logits.float())
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    logs = logits.log_softmax(-1)
    found = (
        logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1),
        -(logs.exp() * logs).sum(-1),
        (2 * logs).logsumexp(-1),
        logits.mean(-1),
        (logits.argmax(-1) == targets).to(logs.dtype),
    )
    return TokenScores(*(each.masked_fill(targets == -100, 0) for each in found))


def gradients(scores: TokenScores, one: Case, *, of: str = "both") -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    total = scores.log_probs.new_zeros(())
    for name in ("log_probs", "entropy"):
        seeds = torch.randn(one[2].shape, generator=generator, dtype=torch.float64).to(total.dtype)
        if of in ("both", name):
            total = total + (getattr(scores, name) * seeds).sum()
    leaves = [each for each in (one[0], one[1], one[3]) if each is not None and each.requires_grad]
    return list(torch.autograd.grad(total, leaves, retain_graph=True))


def check(scores: TokenScores, expected: TokenScores, one: Case, *, of: str = "both") -> None:
    for mine, wanted in zip(scores, expected, strict=True):
        torch.testing.assert_close(mine, wanted.detach(), rtol=1e-11, atol=1e-11)
    assert [each.requires_grad for each in scores] == [True, True, False, False, False]
    for mine, wanted in zip(gradients(scores, one, of=of), gradients(expected, one, of=of), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-11)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.sampled_from([(1,), (23,), (2, 9), (2, 3, 4)]),
    width=st.integers(1, 9),
    vocab=st.integers(1, 40),
    chunk=st.integers(1, 30),
    bias=st.booleans(),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
    of=st.sampled_from(["both", "log_probs", "entropy"]),
    how=st.sampled_from(
        [{}, {"temperature": 0.7}, {"scale": 0.3, "temperature": 2.0}, {"scale": -2.0, "cap": 0.7, "temperature": 1.3}]
    ),
)
def test_equals_whole_logits_in_float64(
    shape: tuple[int, ...], width: int, vocab: int, chunk: int, bias: bool, masked: float, of: str, how: dict[str, Any]
) -> None:
    one = case(shape, width, vocab, bias=bias, masked=masked)
    check(scores_of(one, chunk=chunk, **how), plain(one, **how), one, of=of)


def test_blocks_of_rows_and_what_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "_ROW_ELEMENTS", 30)  # two rows of logits
    for frozen in range(4):
        one = case((3, 5), 4, 11)
        if frozen in (0, 1, 3):
            one[frozen].requires_grad_(False)  # type: ignore[union-attr]
        check(scores_of(one, chunk=4, cap=3.0), plain(one, cap=3.0), one)
        alone = scores_of(one, chunk=4, exchange=Exchange(), sizes=(11,))
        check(alone, plain(one), one)
    with torch.no_grad():
        assert not any(each.requires_grad for each in scores_of(one))


def test_the_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, targets, bias = case((5,), 3, 7)

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        found = token_scores(*leaves, targets)
        return found.log_probs, found.entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("widened", [False, True])
def test_is_as_precise_as_whole_logits(dtype: torch.dtype, widened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "product_dtype", lambda *_: torch.float32 if widened else dtype)
    one = case((4, 16), 16, 300, dtype=dtype)
    exact: Case = tuple(  # type: ignore[assignment]
        each.detach().double().requires_grad_() if each is not None and each.is_floating_point() else each for each in one
    )
    scores, whole, truth = scores_of(one, chunk=7), plain(one), plain(exact)
    assert all(each.dtype is torch.float32 for each in scores[:4])
    mine = [*scores[:2], *gradients(scores, one)]
    others = [*whole[:2], *gradients(whole, one)]
    for found, other, true in zip(mine, others, [*truth[:2], *gradients(truth, exact)], strict=True):
        assert (found.double() - true).norm() <= 1.2 * (other.double() - true).norm() + 1e-6 * true.norm()


def test_logits_are_never_held_whole() -> None:
    """The largest tensor that forward and backward make is one chunk of logits in backward, or the weight's gradient."""
    one = case((2, 256), 8, 256, bias=False, masked=0.0, dtype=torch.float32)
    with LargestTensor() as largest:
        scores = scores_of(one, chunk=64)
        (scores.log_probs + scores.entropy).sum().backward()
    assert largest.nbytes == 2 * 64 * 256 * 4


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight, targets, bias = case((3,), 4, 11)
    for how in ({"temperature": 0.0}, {"targets": targets[:2]}, {"bias": targets}):
        with pytest.raises(LayoutError):
            token_scores(**{"hidden": hidden, "weight": weight, "bias": bias, "targets": targets, **how})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="tokenizer"):
        token_scores(hidden, weight, None, targets.clamp(min=11))
