"""The chunked head equals the plain one: loss and every gradient, for any chunk, mask, bias and seed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.support.tensor_sizes import LargestTensor
from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import DataError, LayoutError, PhaseError
from zeromesh.kernels import chunked_head as cross_entropy
from zeromesh.kernels import cpu_matmul
from zeromesh.kernels.chunked_head import UNCHANGED, LogitChange, chunk_for, chunked_cross_entropy

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def leaves(tokens: int, hidden: int, vocab: int, *, bias: bool, masked: float, dtype: torch.dtype) -> Leaves:
    generator = torch.Generator().manual_seed(tokens * 1009 + vocab)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < masked] = -100
    return h, w, b, targets


def plain(case: Leaves, change: LogitChange = UNCHANGED) -> torch.Tensor:
    h, w, b, targets = case
    logits = functional.linear(h, w, b)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    wide = change.scale * wide
    if change.cap:
        wide = change.cap * torch.tanh(wide / change.cap)
    return functional.cross_entropy(wide, targets, reduction="sum")


def gradients(loss: torch.Tensor, case: Leaves, seed: float) -> list[torch.Tensor]:
    wanted = [t for t in case[:3] if t is not None and t.requires_grad]
    return list(torch.autograd.grad(loss, wanted, torch.tensor(seed, dtype=loss.dtype)))


def check(loss: torch.Tensor, case: Leaves, seed: float, change: LogitChange = UNCHANGED) -> None:
    expected = plain(case, change)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(loss, case, seed), gradients(expected, case, seed), strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 23),
    hidden=st.integers(1, 9),
    vocab=st.integers(1, 40),
    chunk=st.integers(1, 30),
    bias=st.booleans(),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.sampled_from([1.0, 0.125, -3.0]),
    change=st.sampled_from([UNCHANGED, LogitChange(scale=0.3), LogitChange(cap=1.5), LogitChange(scale=-2.0, cap=0.7)]),
)
def test_equals_the_plain_loss_in_float64(
    tokens: int, hidden: int, vocab: int, chunk: int, bias: bool, masked: float, seed: float, change: LogitChange
) -> None:
    case = leaves(tokens, hidden, vocab, bias=bias, masked=masked, dtype=torch.float64)
    check(chunked_cross_entropy(*case, seed=seed, chunk_tokens=chunk, change=change), case, seed, change)


def test_another_gradient_than_the_announced_one_is_right_too() -> None:
    case = leaves(11, 5, 13, bias=True, masked=0.2, dtype=torch.float64)
    for other in (7.0, 0.5 * (1 + 1e-11)):  # More than rounding.
        check(chunked_cross_entropy(*case, seed=0.5, chunk_tokens=4), case, other)
    check(chunked_cross_entropy(*case, seed=0.0, chunk_tokens=4), case, 7.0)
    nothing = chunked_cross_entropy(*case, seed=0.0, chunk_tokens=4)
    assert all(bool((gradient == 0).all()) for gradient in gradients(nothing, case, 0.0))


class Afresh(torch.autograd.Function):
    """The chunked loss, evaluated anew in each backward: gradcheck calls backward many times on one graph."""

    @staticmethod
    def forward(ctx, h, w, b, targets):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, w, b, targets)
        return chunked_cross_entropy(h, w, b, targets, seed=0.7, chunk_tokens=2)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *tensors, targets = ctx.saved_tensors
        with torch.enable_grad():
            fresh = [t.detach().requires_grad_() for t in tensors]
            loss = chunked_cross_entropy(*fresh, targets, seed=0.7, chunk_tokens=2)
        return *torch.autograd.grad(loss, fresh, grad), None


def test_gradcheck() -> None:
    h, w, b, targets = leaves(5, 3, 7, bias=True, masked=0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: Afresh.apply(*t, targets), (h, w, b))


@pytest.mark.parametrize("frozen", range(3))
def test_computes_only_what_is_trained(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_ROW_ELEMENTS", 10)  # less than a row of logits
    case = leaves(9, 4, 11, bias=True, masked=0.3, dtype=torch.float64)
    leaf = case[frozen]
    assert leaf is not None
    leaf.requires_grad_(False)
    check(chunked_cross_entropy(*case, seed=1.0, chunk_tokens=3), case, 1.0)


def test_keeps_nothing_without_gradients() -> None:
    case = leaves(9, 4, 11, bias=False, masked=0.3, dtype=torch.float32)
    with torch.no_grad():
        loss = chunked_cross_entropy(*case, seed=1.0, chunk_tokens=3)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, plain(case).detach())
    detached = (case[0].detach(), case[1].detach(), None, case[3])
    assert not chunked_cross_entropy(*detached, seed=1.0, chunk_tokens=3).requires_grad


def test_backward_runs_once() -> None:
    case = leaves(4, 3, 5, bias=False, masked=0.0, dtype=torch.float32)
    loss = chunked_cross_entropy(*case, seed=1.0, chunk_tokens=2)
    loss.backward(retain_graph=True)
    with pytest.raises(PhaseError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunk", [1, 32, 1000])
@pytest.mark.parametrize("widened", [False, True])
def test_is_as_precise_as_plain(dtype: torch.dtype, chunk: int, widened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.float32 if widened else dtype
    monkeypatch.setattr(cross_entropy, "product_dtype", lambda dtype, device: product)
    monkeypatch.setattr(cpu_matmul, "_WEIGHT_TILE", 64)  # several blocks of the vocabulary
    case = leaves(61, 16, 300, bias=True, masked=0.1, dtype=dtype)
    exact: Leaves = tuple(None if t is None else t.detach().double() for t in case[:3]) + (case[3],)  # type: ignore[assignment]
    for leaf in exact[:3]:
        assert leaf is not None
        leaf.requires_grad_()
    seed = 1 / 64
    ours = gradients(chunked_cross_entropy(*case, seed=seed, chunk_tokens=chunk), case, seed)
    theirs = gradients(plain(case), case, seed)
    for mine, other, truth in zip(ours, theirs, gradients(plain(exact), exact, seed), strict=True):
        assert mine.dtype is dtype
        error, reference = (mine.double() - truth).norm(), (other.double() - truth).norm()
        assert error <= 1.2 * reference + 1e-6 * truth.norm()


@pytest.mark.parametrize("change", [UNCHANGED, LogitChange(scale=0.3), LogitChange(scale=-2.0, cap=0.7)])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_rank_with_the_whole_vocabulary_exchanges_nothing_new(
    monkeypatch: pytest.MonkeyPatch, change: LogitChange, frozen: tuple[int, ...]
) -> None:
    monkeypatch.setattr(cross_entropy, "_ROW_ELEMENTS", 30)  # two rows of logits
    case = leaves(11, 5, 13, bias=True, masked=0.3, dtype=torch.float64)
    case[3][:2] = torch.tensor([0, 12])
    for number in frozen:
        case[number].requires_grad_(False)  # type: ignore[union-attr]
    whole: dict[str, Any] = {"exchange": Exchange(), "sizes": (13,)}
    loss = chunked_cross_entropy(*case, seed=0.5, chunk_tokens=4, change=change, **whole)
    if len(frozen) == 3:
        torch.testing.assert_close(loss, plain(case, change), rtol=1e-12, atol=1e-12)
    else:
        check(loss, case, 0.5, change)
    narrow = leaves(11, 5, 13, bias=True, masked=0.3, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"seed": 1.0, "chunk_tokens": 4, "change": change}
    losses = [chunked_cross_entropy(*narrow, **arguments, **more) for more in ({}, whole)]
    torch.testing.assert_close(*losses)
    for one, other in zip(*(gradients(each, narrow, 1.0) for each in losses), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_logits_are_never_held_whole() -> None:
    """The largest tensor that any operation makes is one chunk of logits or the weight's gradient."""
    case = leaves(512, 8, 256, bias=False, masked=0.0, dtype=torch.float32)
    with LargestTensor() as largest:
        chunked_cross_entropy(*case, seed=1.0, chunk_tokens=64).backward()
    assert largest.nbytes == 64 * 256 * 4


def test_default_chunks_and_changes_that_are_alike_in_16_bits() -> None:
    for factor, alike in ((1.008, True), (1.02, False)):
        changes = LogitChange(scale=2.0, cap=30.0 * factor), LogitChange(scale=2.0 * factor, cap=30.0)
        assert [LogitChange(scale=2.0, cap=30.0).close_to(each) for each in changes] == [alike, alike]
    wide, narrow = torch.float32, torch.bfloat16
    assert [chunk_for(tokens, 512, wide) for tokens in (512, 3, 0)] == [256, 3, 1]
    assert [chunk_for(tokens, 512, narrow) for tokens in (512, 0, 1280, 1281)] == [512, 1, 1280, 256]
    assert chunk_for(65536, 4096, narrow) == chunk_for(512, 512, narrow, trained=False) == 256


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"targets": torch.tensor([0, 1, 5, 2]), "count": 4}, DataError, r"\[0, 5\)"),
        ({"targets": torch.tensor([0, 1, -1, 2])}, DataError, "-1"),
        ({"targets": torch.tensor([0, 1])}, LayoutError, "expected hidden"),
        ({"weight": torch.zeros(5, 3, dtype=torch.float64)}, LayoutError, "share one floating dtype"),
        ({"bias": torch.zeros(4)}, LayoutError, "expected hidden"),
        ({"exchange": SimpleNamespace(index=0, size=2), "sizes": (5,)}, LayoutError, r"rank 0 of 2 .* sizes are \[5\]"),
        ({"exchange": SimpleNamespace(index=1, size=2), "sizes": (5, 4)}, LayoutError, r"rank 1 of 2 has 5 tokens"),
        ({"hidden": torch.ones(4, 3).int(), "weight": torch.ones(5, 3).int()}, LayoutError, "one floating dtype"),
        ({"seed": float("nan")}, LayoutError, "seed"),
        ({"chunk_tokens": 0}, LayoutError, "chunk_tokens"),
    ],
)
def test_bad_inputs_are_named(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    names = ("hidden", "weight", "bias", "targets")
    given = dict(zip(names, leaves(4, 3, 5, bias=False, masked=0.0, dtype=torch.float32), strict=True))
    with pytest.raises(error, match=said):
        chunked_cross_entropy(**{**given, "seed": 1.0, "chunk_tokens": 2, **changes})


def test_changes_that_16_bits_do_not_tell_apart_are_one() -> None:
    change = LogitChange(scale=0.5, cap=30.0)
    others = (LogitChange(scale=0.501, cap=30.1), LogitChange(scale=0.6, cap=30.0), LogitChange(scale=0.5, cap=31.0))
    assert [change.close_to(each) for each in others] == [True, False, False]
