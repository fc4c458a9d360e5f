"""What evaluations generate for a batch: lengths, padding and seeds, with models that are not partitioned."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.architectures import tiny
from tests.support.trainer_cases import llama
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.generation import evaluation_prompts
from zeromesh.trainer.generation.evaluation_prompts import BatchGeneration, prompts_of

NO_END: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
IDS = torch.tensor([[11, 12, 13], [21, 22, 23]])


def generation(model: Any, tokenizer: Any = None, seed: str = "0", **fields: Any) -> BatchGeneration:
    divided = SimpleNamespace(pipeline=None)
    placed: Any = SimpleNamespace(module=model, processing_class=tokenizer, engine=None, divided=divided)
    placed.mesh = SimpleNamespace(device=torch.device("cpu"))
    return BatchGeneration(placed, fields, seed=seed)


def t5(**own: Any) -> Any:
    model = tiny("t5")
    model.generation_config.update(**{**NO_END, "decoder_start_token_id": 1, **own})
    return model


@pytest.mark.parametrize(
    ("model", "fields", "width"),
    [
        (t5(), {"max_length": 5}, 5),
        (t5(), {"max_new_tokens": 5}, 6),
        (t5(), {}, 65),
        (t5(max_new_tokens=3), {}, 4),
        (llama(max_position_embeddings=128), {}, 64),
        (llama(), {"max_new_tokens": 4}, 4),
    ],
    ids=["max_length", "max_new_tokens", "default", "of the model", "llama", "llama-max_new_tokens"],
)
def test_predictions_are_as_long_as_asked(model: Any, fields: dict[str, Any], width: int) -> None:
    made = generation(model, **NO_END, **fields)
    assert made.tokens({"input_ids": IDS, "attention_mask": IDS > 0}, [0, 1], torch.float32).shape == (2, width)


@pytest.mark.parametrize(
    ("own", "of_tokenizer", "fields", "padding"),
    [
        ({"pad_token_id": 7, "eos_token_id": 5}, 9, {}, 7),
        ({"pad_token_id": 7}, 9, {"pad_token_id": 3}, 3),
        ({"eos_token_id": 5}, 9, {}, 9),
        ({"eos_token_id": 5}, 0, {}, 0),
        ({"eos_token_id": [5, 6]}, None, {}, 5),
        ({}, None, {}, 0),
    ],
)
def test_the_padding_token(own: dict[str, Any], of_tokenizer: int | None, fields: dict[str, Any], padding: int) -> None:
    model = llama()
    model.generation_config.update(**own)
    for tokenizer in [SimpleNamespace(pad_token_id=of_tokenizer), *([None] if of_tokenizer is None else [])]:
        assert generation(model, tokenizer, **fields).padding == padding


@pytest.mark.parametrize(
    ("model", "batch", "ends", "wanted"),
    [
        (llama(), {}, [5, 6], [[9, 5, 0, 0], [6, 0, 0, 0]]),
        (llama(), {}, 5, [[9, 5, 0, 0], [6, 9, 5, 0]]),
        (llama(), {}, None, [[9, 5, 9, 6], [6, 9, 5, 9]]),
        # The start token may be the one that ends texts.
        (t5(), {}, 5, [[5, 1, 1, 9, 5, 0, 0], [5, 1, 1, 6, 9, 5, 0]]),
        (t5(), {"decoder_input_ids": IDS[:, :3]}, 1, [[5, 1, 1, 9, 5, 9, 6], [5, 1, 1, 6, 9, 5, 9]]),
    ],
    ids=["two ends", "one end", "no end", "encoder", "decoder inputs"],
)
def test_what_comes_after_an_end_is_padding(
    monkeypatch: pytest.MonkeyPatch, model: Any, batch: dict[str, Any], ends: Any, wanted: list[list[int]]
) -> None:
    given: dict[str, Any] = {}

    def generate(placed: Any, arguments: dict[str, Any], *, seed: Any) -> torch.Tensor:
        given.update(arguments)
        return torch.tensor([[5, 1, 1, 9, 5, 9, 6], [5, 1, 1, 6, 9, 5, 9]])

    monkeypatch.setattr(evaluation_prompts, "generate", generate)
    made = generation(model, max_new_tokens=4, pad_token_id=0, eos_token_id=ends)
    batch = {"input_ids": IDS, "attention_mask": IDS > 0, "weights": torch.ones(2, 3, dtype=torch.float64), **batch}
    assert made.tokens(batch, [0, 1], torch.bfloat16).tolist() == wanted
    assert (given["weights"].dtype, given["input_ids"].dtype) == (torch.bfloat16, torch.int64)


def test_draws_depend_on_the_seed_and_on_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(evaluation_prompts, "generate", lambda *_, seed: [seed(), seeds.append(torch.initial_seed()), IDS][-1])
    with torch.random.fork_rng(devices=[]):
        for seed, samples in (("0", [0, 1]), ("0", [0, 5]), ("0", [1, 0]), ("1", [0, 1])):
            generation(llama(), seed=seed, max_new_tokens=4).tokens({"input_ids": IDS}, samples, torch.float32)
    assert seeds[0] == seeds[1]
    assert len({*seeds}) == 3


def test_a_prompt_may_fill_all_positions_but_those_of_new_tokens() -> None:
    batch, model = {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, llama()
    assert generation(model, max_new_tokens=29).inputs(batch, [4, 7])["input_ids"].shape == (2, 3)
    with pytest.raises(DataError, match="the prompt of sample 7 has 3 tokens, which with 30 new ones are more"):
        generation(model, max_new_tokens=30).inputs(batch, [4, 7])


def test_a_batch_has_a_row_for_each_sample() -> None:
    with pytest.raises(DataError, match=r"samples 4, 5, 6 need one row .*\[3, length\]; the batch has \[2, 3\]"):
        prompts_of({"input_ids": IDS}, [4, 5, 6], 0)
    inputs, _ = prompts_of({"input_ids": IDS, "name": "a", "pixels": torch.ones(2, 5)}, [4, 5], 0)
    assert (inputs["name"], inputs["pixels"].shape) == ("a", (2, 5))


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (torch.nn.Linear(1, 1), {}, "Linear does not generate"),
        (llama(), {"min_length": 4}, "min_length counts the padding of prompts; give min_new_tokens"),
        (llama(), {"stop_strings": ["a"]}, "stop_strings needs a tokenizer"),
        (llama(), {"return_dict_in_generate": True}, "predictions are tokens"),
    ],
)
def test_what_an_evaluation_cannot_generate(model: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"predict_with_generate: .*{message}"):
        generation(model, **fields)
