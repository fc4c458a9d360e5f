"""Prompts are what stands before the first label that counts, padded on the left."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.trainer_cases import llama
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.generation.evaluation_prompts import BatchGeneration, prompts_of, without_targets

IDS = torch.tensor([[11, 12, 13, 14], [21, 22, 0, 0], [0, 31, 32, 33]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])
LABELS = torch.tensor([[-100, -100, -100, 14], [-100, 22, -100, -100], [-100, -100, 32, -100]])


def test_a_prompt_ends_before_the_first_label_that_counts() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "position_ids": IDS, "token_type_ids": IDS + 1}
    inputs, lengths = prompts_of(batch, [4, 5, 6], 9)
    assert inputs["input_ids"].tolist() == [[11, 12, 13], [9, 9, 21], [9, 9, 31]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert inputs["token_type_ids"].tolist() == [[12, 13, 14], [0, 0, 22], [0, 0, 32]]
    assert inputs.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert lengths.tolist() == [3, 1, 1]


def test_without_labels_all_of_a_sample_is_the_prompt() -> None:
    inputs, lengths = prompts_of({"input_ids": IDS, "attention_mask": MASK}, [4, 5, 6], 9)
    assert inputs["input_ids"].tolist() == [[11, 12, 13, 14], [9, 9, 21, 22], [9, 31, 32, 33]]
    assert lengths.tolist() == [4, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": IDS}, "samples 4, 5, 6 have no prompt"),
        ({"labels": torch.cat([LABELS[:2], IDS[2:]])}, "sample 6 has no prompt"),
        ({"input_ids": IDS.reshape(1, -1)}, r"need one row of input_ids each, \[3, length\]; the batch has \[1, 12\]"),
        ({"attention_mask": MASK[:, None]}, r"attention_mask has shape \[3, 1, 4\]"),
    ],
)
def test_batches_without_prompts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompts_of({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, **changes}, [4, 5, 6], 0)


def test_inputs_of_a_decoder_that_are_made_of_labels_are_left_out() -> None:
    batch = {"input_ids": IDS, "labels": LABELS, "decoder_input_ids": LABELS, "decoder_attention_mask": LABELS}
    assert without_targets(batch).keys() == {"input_ids"}
    begun = {**batch, "decoder_input_ids": LABELS[:, :1]}
    assert without_targets(begun).keys() == {"input_ids", "decoder_input_ids", "decoder_attention_mask"}


def test_a_prompt_that_leaves_no_room_is_named() -> None:
    model: Any = llama()
    placed: Any = SimpleNamespace(module=model, processing_class=None, mesh=None, engine=None)
    generation = BatchGeneration(placed, {"max_new_tokens": 30}, seed="0")
    with pytest.raises(
        DataError, match="the prompt of sample 4 has 3 tokens, which with 30 new ones are more than the model's 32"
    ):
        generation.tokens({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}, [4, 5, 6], torch.float32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_sample": True, "top_k": -1}, "top_k is -1; give a whole number from 0"),
        ({"temperature": float("nan")}, "temperature is nan; give a number"),
        ({"suppress_tokens": [10**6]}, "suppress_tokens is .1000000.; give ids of tokens"),
        ({"max_length": 9}, "max_length counts the padding of prompts; give max_new_tokens"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2: a sample has one prediction"),
    ],
)
def test_settings_are_refused_before_an_evaluation_begins(fields: dict[str, Any], message: str) -> None:
    placed: Any = SimpleNamespace(module=llama(), processing_class=None, mesh=None, engine=None)
    with pytest.raises(ConfigError, match=f"predict_with_generate: {message}"):
        BatchGeneration(placed, fields, seed="0")


def test_a_model_may_suppress_tokens_beyond_its_own_vocabulary() -> None:
    model: Any = llama()
    model.generation_config.begin_suppress_tokens = [220, 50256]  # The defaults of Whisper, in a copy with few tokens.
    placed: Any = SimpleNamespace(module=model, processing_class=None, mesh=None, engine=None)
    generation = BatchGeneration(placed, {"max_new_tokens": 2}, seed="0")
    assert generation.settings.begin_suppress_tokens == [220, 50256]
    with pytest.raises(ConfigError, match="forced_eos_token_id is 50256; give ids of tokens"):
        BatchGeneration(placed, {"forced_eos_token_id": 50256}, seed="0")
