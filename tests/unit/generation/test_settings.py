"""Settings of a request: lengths, special tokens, what joins a running batch, and what a layout allows."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from tests.support.architectures import tiny
from tests.support.trainer_cases import LLAMA, gpt2, llama
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.generation.settings import (
    ModelSettings,
    add_end_tokens,
    check_arguments,
    decoder_positions,
    ends_of,
    rope_kinds,
)

BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


def bart() -> Any:
    return tf.BartForConditionalGeneration(tf.BartConfig(**BART))


def long_llama(**own: Any) -> Any:
    model = llama(max_position_embeddings=256)
    model.generation_config.update(**own)
    return model


def dynamic(**changes: Any) -> Any:
    return llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}, **changes)


@pytest.mark.parametrize(
    ("model", "fields", "prompt", "lengths"),
    [
        (long_llama(), {}, 3, (128, None)),
        (long_llama(), {}, 128, (128, None)),
        (long_llama(), {}, 129, (127, None)),
        (long_llama(), {}, 255, (1, None)),
        (long_llama(), {"max_new_tokens": 253}, 3, (253, None)),
        (long_llama(), {"max_length": 256}, 3, (253, None)),
        (long_llama(), {"max_length": 3}, 3, (1, None)),
        (long_llama(max_length=300), {}, 3, (253, None)),
        (long_llama(max_length=9), {}, 3, (6, None)),
        (long_llama(max_new_tokens=9), {}, 3, (9, None)),
        (dynamic(max_position_embeddings=16), {}, 300, (128, None)),
        (bart(), {}, 32, (32, None)),
        (bart(), {"max_new_tokens": 32}, 9, (32, None)),
        (bart(), {"max_length": 7}, 9, (None, 7)),
        (tiny("t5"), {}, 500, (128, None)),
    ],
)
def test_lengths(model: Any, fields: dict[str, Any], prompt: int, lengths: tuple[int | None, int | None]) -> None:
    made = ModelSettings(model, None).for_request(fields, prompt, trial=False)
    assert (made.max_new_tokens, made.max_length) == lengths
    assert (made.use_cache, made.top_k) == (True, 50)


@pytest.mark.parametrize(
    ("model", "fields", "prompt", "message"),
    [
        (long_llama(), {}, 256, "256 tokens, which with the new ones become 257, .* 256 positions; .* max_new_tokens"),
        (long_llama(), {"max_new_tokens": 254}, 3, "3 tokens, which .* become 257, .*; shorten it, or lower max_new_t"),
        (long_llama(), {"max_length": 257}, 3, "which with the new ones become 257, .* lower max_length"),
        (bart(), {"max_new_tokens": 33}, 9, "the prompt has 0 tokens, which with the new ones become 33"),
        (bart(), {}, 33, "the prompt has 33 tokens, the encoder 32 positions; shorten it"),
    ],
)
def test_a_prompt_that_is_too_long(model: Any, fields: dict[str, Any], prompt: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ModelSettings(model, None).for_request(fields, prompt, trial=False)


@pytest.mark.parametrize(
    ("own", "fields", "padding"),
    [
        ({}, {}, 0),
        ({"eos_token_id": 5}, {}, 5),
        ({"eos_token_id": [6, 5]}, {}, 6),
        ({"pad_token_id": 3, "eos_token_id": 5}, {}, 3),
        ({"pad_token_id": 63}, {}, 63),
        ({"pad_token_id": 64}, {}, 0),
        ({"pad_token_id": -1}, {}, 0),
        ({"pad_token_id": 3}, {"pad_token_id": 4}, 4),
    ],
)
def test_the_token_of_padding_is_in_the_vocabulary(own: dict[str, Any], fields: dict[str, Any], padding: int) -> None:
    assert ModelSettings(long_llama(**own), None).for_request(fields, 3).pad_token_id == padding


def test_fields_are_tried_by_their_values_and_errors_say_whose_they_are() -> None:
    known = ModelSettings(long_llama(), None)
    known.for_request({"do_sample": True, "typical_p": 0.5}, 3)
    with pytest.raises(ConfigError, match=r"typical_p.*\d$"):
        known.for_request({"do_sample": True, "typical_p": 0.0}, 3)
    known.for_request({"do_sample": True, "typical_p": 0.0}, 3, trial=False)
    own = ModelSettings(long_llama(do_sample=True, typical_p=0.0), None)
    with pytest.raises(ConfigError, match=r"typical_p.*\(the model's generation_config.json says so\)$"):
        own.for_request({"max_new_tokens": 3}, 3)


CAUSAL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip


def causal(kind: str, **fields: Any) -> Any:
    return tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize(
    ("model", "fields", "why"),
    [
        (llama(), {}, ""),
        (gpt2(), {"do_sample": True}, ""),
        (causal("bloom", vocab_size=64, hidden_size=32, n_layer=1, n_head=4), {}, ""),
        (causal("mistral", **CAUSAL, sliding_window=4), {}, ""),
        (llama(), {"num_beams": 2}, "beam_search goes on with several texts of a prompt"),
        (llama(), {"use_cache": False}, "use_cache is false"),
        (llama(), {"guidance_scale": 2.0}, "guidance_scale is a matter of the library's own loop"),
        (llama(), {"cache_implementation": "static"}, "cache_implementation is a matter of the library's own loop"),
        (llama(), {"prefill_chunk_size": 4}, "prefill_chunk_size is a matter of the library's own loop"),
        (bart(), {}, "BartForConditionalGeneration has an encoder"),
        (
            causal("ctrl", vocab_size=64, n_embd=32, n_positions=32, dff=48, n_layer=1, n_head=4),
            {},
            "CTRLLMHeadModel prepares its inputs in a way of its own",
        ),
        (
            tf.BartForCausalLM(tf.BartConfig(**BART, is_decoder=True)),
            {},
            "BartForCausalLM counts positions from the first column of a batch",
        ),
        (dynamic(), {}, "LlamaForCausalLM turns positions by frequencies .* the longest text .dynamic."),
        (causal("moshi", **CAUSAL, ffn_dim=48), {}, "MoshiForCausalLM looks at what its cache keeps of a window"),
    ],
)
def test_why_requests_cannot_join_a_running_batch(model: Any, fields: dict[str, Any], why: str) -> None:
    known = ModelSettings(model, None)
    found = known.why_unbatched(known.for_request(fields, 3, trial=False))
    assert re.fullmatch(why, found)


def mesh_of(*, staged: bool = False, shared: bool = True) -> Any:
    shape = SimpleNamespace(divides=lambda what: staged and what == "blocks")
    return SimpleNamespace(shape=shape, model_size=2 if shared else 1)


ALONE, TENSOR, STAGES = mesh_of(shared=False), mesh_of(), mesh_of(staged=True)
RIGHT, LEFT = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1, 1], [0, 1]])
HIDDEN = tf.GenerationConfig(output_hidden_states=True)


@pytest.mark.parametrize(
    ("model", "arguments", "mesh", "message"),
    [
        (llama(), {"attention_mask": LEFT}, STAGES, ""),
        (llama(), {"attention_mask": RIGHT}, None, "a prompt ends with padding"),
        (bart(), {"attention_mask": RIGHT}, None, ""),
        (torch.nn.Linear(1, 1), {}, None, "Linear has no generate"),
        (llama(), {"synced_gpus": None}, None, "synced_gpus is decided here"),
        (llama(), {"generation_config": 3}, ALONE, ""),
        (llama(), {"generation_config": 3}, TENSOR, "generation_config is a int, not a GenerationConfig"),
        (llama(), {"max_time": 1.0}, ALONE, ""),
        (llama(), {"max_time": 1.0}, TENSOR, "max_time ends ranks of one model at different tokens"),
        (llama(), {"num_beams": 2}, TENSOR, ""),
        (llama(), {"num_beams": 2}, STAGES, "beam_search is not possible under parallel.pipeline"),
        (llama(), {"num_beams": 2, "num_beam_groups": 2}, None, "group_beam_search is code on the Hub"),
        (llama(), {"num_beams": 2, "num_beam_groups": 2, "trust_remote_code": True}, None, ""),
        (llama(), {"penalty_alpha": 0.5, "top_k": 4, "custom_generate": "x"}, None, ""),
        (llama(), {"penalty_alpha": 0.5, "top_k": 4}, None, "contrastive_search is code on the Hub"),
        (llama(), {"inputs_embeds": LEFT}, TENSOR, ""),
        (llama(), {"inputs_embeds": LEFT}, STAGES, "inputs_embeds is not possible under parallel.pipeline"),
        (llama(), {"token_type_ids": LEFT, "streamer": None, "do_sample": True}, STAGES, ""),
        (llama(), {"generation_config": HIDDEN}, TENSOR, ""),
        (llama(), {"generation_config": HIDDEN}, STAGES, "output_hidden_states is not possible"),
        (llama(), {"guidance_scale": 1.0, "cache_implementation": "dynamic"}, STAGES, ""),
        (llama(), {"guidance_scale": 2.0}, STAGES, "guidance_scale is not possible"),
        (llama(), {"cache_implementation": "static"}, STAGES, "cache_implementation: static is not possible"),
    ],
)
def test_what_a_layout_allows(model: Any, arguments: dict[str, Any], mesh: Any, message: str) -> None:
    if not message:
        check_arguments(model, arguments, mesh)
        return
    with pytest.raises((ConfigError, DataError), match=message):
        check_arguments(model, arguments, mesh)


@pytest.mark.parametrize(
    ("before", "added", "after", "notes"),
    [(None, [7], [7], 1), (5, [7, 7, 5], [5, 7], 1), ([5, 6], [8, 6, 7], [5, 6, 8, 7], 2), (5, [5], 5, 0), (None, [], None, 0)],
)
def test_end_tokens_are_added_once(before: Any, added: list[int], after: Any, notes: int) -> None:
    model = llama()
    model.generation_config.eos_token_id = before
    said = add_end_tokens(model, added, lambda tokens: f"<{tokens[0]}>")
    assert (model.generation_config.eos_token_id, len(said)) == (after, notes)
    assert not said or f"generation_config.eos_token_id: {after[-1]} ('<{after[-1]}>') is added" in said[-1]
    assert ends_of(model.generation_config) == ([after] if isinstance(after, int) else after or [])
    assert add_end_tokens(torch.nn.Linear(1, 1), [7], str) == []


def test_positions_and_rotary_kinds() -> None:
    layers = {"rope_parameters": {"full_attention": {"rope_type": "linear"}, "sliding_attention": {"rope_type": "yarn"}}}
    nested: Any = SimpleNamespace(**layers)
    nested.get_text_config = lambda **_: nested
    assert rope_kinds(nested) == {"linear", "yarn"}
    assert rope_kinds(llama().config) == {"default"}
    assert rope_kinds(gpt2().config) == set()
    found = [decoder_positions(model) for model in (llama(), gpt2(), dynamic(), bart(), tiny("t5"))]
    assert found == [LLAMA["max_position_embeddings"], 32, None, 32, None]
