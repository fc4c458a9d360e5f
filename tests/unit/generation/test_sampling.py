"""Tokens are drawn by each row's own seed, and probabilities are those before any processor."""

import math
from typing import Any

import pytest
import torch

from tests.support.trainer_cases import llama
from zeromesh.trainer.generation.sampling import RowDraws, RowSampler, at_least_float32, logprobs_of
from zeromesh.trainer.generation.settings import ModelSettings

CPU = torch.device("cpu")


def sampler(seed: int = 0, **fields: Any) -> RowSampler:
    model = llama()
    settings = ModelSettings(model, None).for_request({"max_new_tokens": 4, **fields}, 2, trial=False)
    return RowSampler(model, settings, [1, 2], seed, CPU)


@pytest.mark.parametrize(
    ("fields", "plain"), [({}, True), ({"do_sample": True}, False), ({"repetition_penalty": 2.0}, False), ({"top_k": 3}, True)]
)
def test_greedy_rows_without_processors_are_plain(fields: dict[str, Any], plain: bool) -> None:
    assert sampler(**fields).is_plain is plain


def test_a_row_draws_as_torch_does_by_its_seed() -> None:
    logits = torch.linspace(-1, 2, 64, dtype=torch.float64)
    kept = logits.clone()
    for seed in (3, 4):
        own, generator = sampler(seed, do_sample=True, top_k=0, temperature=0.5), torch.Generator().manual_seed(seed)
        wanted = [int(torch.multinomial((logits.float() / 0.5).softmax(-1)[None], 1, generator=generator)) for _ in range(9)]
        assert [int(own.choose(logits, [1, 2])) for _ in range(9)] == wanted
    assert torch.equal(logits, kept)
    assert int(sampler(repetition_penalty=9.0).choose(torch.tensor([0.0] * 62 + [2.0, 1.0]), [62])) == 63
    # Logits that are not finite still give some token, which is dropped later.
    assert 0 <= int(sampler(do_sample=True).choose(torch.full((64,), math.nan), [1])) < 64


def test_rows_of_one_draw_have_their_own_seeds() -> None:
    weights = torch.rand(3, 50, generator=torch.Generator().manual_seed(1))
    weights[2] = math.nan
    with RowDraws([5, 6, 5], CPU):
        found = [torch.multinomial(weights, 2) for _ in range(3)]
        torch.manual_seed(9)
        others = [torch.multinomial(weights[:2], 1), torch.multinomial(weights[0], 1)]
    torch.manual_seed(9)
    assert all(map(torch.equal, others, [torch.multinomial(weights[:2], 1), torch.multinomial(weights[0], 1)]))
    for row, seed in enumerate((5, 6, 5)):
        own, generator = torch.ones(50) if row == 2 else weights[row], torch.Generator().manual_seed(seed)
        assert [each[row].tolist() for each in found] == [torch.multinomial(own, 2, generator=generator).tolist() for _ in range(3)]


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_logprobs(dtype: torch.dtype, wanted: torch.dtype) -> None:
    logits = at_least_float32(torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, math.inf], [math.nan, 0.0, 0.0]], dtype=dtype))
    assert logits.dtype is wanted
    found = logprobs_of(logits, torch.tensor([1, 0, 1]))
    assert found[0].item() == pytest.approx(1 - math.log(1 + math.e + math.e**2), abs=1e-6)
    assert not found[1:].isfinite().any()
