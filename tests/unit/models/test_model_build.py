"""Building from a configuration: deferred where that is exact, and every mistake named with what is nearest."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.support.architectures import SIZES
from tests.support.text_files import word_tokenizer
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.data.tokenizer import ByteTokenizer, PretrainedTokenizer
from zeromesh.trainer.models.build import build_model, read_configuration
from zeromesh.trainer.weights.quantized_files import open_files
from zeromesh.weight_init.weight_sources import BuiltSource, SeededSource

LLAMA = {"model_type": "llama", **SIZES}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "vocab_size": 64}
TEXT = {**LLAMA, "vocab_size": 64}


def build(config: dict[str, Any] | None, head: Any = "causal_lm", vocab_size: int | None = None, **section: Any) -> Any:
    tokenizer = None if vocab_size is None else ByteTokenizer(vocab_size=vocab_size)
    return build_model(ModelSection(config=config, head=head, **section), 0, tokenizer)


def test_a_model_is_built_without_memory() -> None:
    built = build(LLAMA, vocab_size=77)
    assert isinstance(built.model, tf.LlamaForCausalLM)
    assert isinstance(built.source, SeededSource)
    assert built.notes == ()
    assert all(p.is_meta and p.dtype is torch.float32 for p in built.model.parameters())
    assert built.model.config.vocab_size == 77
    assert built.model.config._attn_implementation == "sdpa"
    assert build({**LLAMA, "vocab_size": 100}, vocab_size=77).model.config.vocab_size == 100


WORDS = ["a", "b", "c", "<end>", "<begin>", "<pad>"]


@pytest.mark.parametrize(
    ("kind", "special", "given", "ids"),
    [
        ("llama", {}, {}, (3, 3, None)),
        ("llama", {"bos_token": "<begin>", "pad_token": "<pad>"}, {}, (4, 3, 5)),
        ("llama", {"pad_token": "<end>"}, {}, (3, 3, None)),
        ("llama", {"pad_token": "<pad>"}, {"bos_token_id": None, "pad_token_id": 0}, (None, 3, 0)),
        ("llama", {"pad_token": "<pad>"}, {"vocab_size": 4}, (3, 3, None)),
        ("qwen3", {}, {}, (3, 3, None)),
        ("gemma", {}, {"vocab_size": 8}, (3, 3, None)),
        ("roberta", {"pad_token": "<pad>"}, {}, (3, 3, 5)),
        ("roberta", {}, {}, (3, 3, 1)),
        ("nomic_bert", {}, {}, (3, 3, 0)),
    ],
)
def test_special_ids_are_those_of_the_tokenizer(
    kind: str, special: dict[str, str], given: dict[str, Any], ids: tuple[int | None, ...]
) -> None:
    """Where there is no token of padding, it is none, or that of the class for those that cannot do without."""
    tokenizer = PretrainedTokenizer(tokenizer=word_tokenizer(WORDS, "a", eos_token="<end>", **special))
    made, *_ = read_configuration(ModelSection(config={"model_type": kind, **given}, head="base"), tokenizer)
    assert (made.bos_token_id, made.eos_token_id, made.pad_token_id) == ids
    assert made.vocab_size == given.get("vocab_size", len(WORDS))


@pytest.mark.parametrize(
    ("head", "cls"),
    [
        ("masked_lm", tf.BertForMaskedLM),
        ("sequence_classification", tf.BertForSequenceClassification),
        ("token_classification", tf.BertForTokenClassification),
    ],
)
def test_heads(head: str, cls: type) -> None:
    config = {**LLAMA, "model_type": "bert", "num_labels": 5}
    model = build(config, head).model
    assert isinstance(model, cls)
    assert model.config.num_labels == 5


def test_a_model_that_meta_would_lose_is_built_on_cpu() -> None:
    config = {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 60}
    built = build(config)
    assert isinstance(built.source, BuiltSource)
    assert "built whole on CPU" in built.notes[0]
    assert built.source.read("transformer.h.0.attn.c_attn.weight", 0, 100).std() > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type is missing"),
        (None, "model_type is missing"),
        ({**LLAMA, "model_type": "lama"}, "'lama' is not known.*llama"),
        ({**LLAMA, "torch_dtype": ["a"]}, r"dtype: got \['a'\]; give a dtype of torch"),
        ({**LLAMA, "num_labels": 10**9}, "num_labels: got 1000000000; give a number from 1 to 1,000,000"),
        ({**LLAMA, "return_dict": False}, "return_dict is false"),
        ({**LLAMA, "to_dict": 3}, "to_dict is not a field"),
        ({**LLAMA, "hidden_sise": 32}, "hidden_sise is not a field of LlamaConfig; nearest: hidden_size"),
        ({**LLAMA, "hidden_size": "a"}, "hidden_size.*expected int, got str"),
        ({**LLAMA, "num_attention_heads": 3}, "not a multiple"),
        ({**LLAMA, "hidden_act": "jump"}, "hidden_act 'jump' is not known.*relu"),
        ({**TEXT, "hidden_size": 10**9}, r"[\d,]{20,} parameters and more, and .* hidden_size 1000000000"),
        ({**TEXT, "vocab_size": 10**15}, "parameters and more, and this machine has .* vocab_size 1000000000000000"),
        ({**GPT2, "n_embd": 10**9}, r"more than 2\*\*63 bytes; .* n_embd 1000000000"),
        ({**TEXT, "intermediate_size": 10**30}, "intermediate_size is 1000000000000000000000000000000; at most"),
        ({**TEXT, "num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; at most 10000 are built"),
        (
            {"model_type": "gemma3", "text_config": {**SIZES, "head_dim": 8, "vocab_size": 10**16}},
            r"parameters and more, .* text_config\.vocab_size 10000000000000000",
        ),
    ],
)
def test_mistakes_and_models_that_no_memory_holds_are_named(config: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.config: .*{message}"):
        build(config, "image_text_to_text" if "text_config" in (config or {}) else "causal_lm")


def test_parts_that_take_long_to_describe_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.trainer.models.build._MOST_SECONDS", 0.01)
    with pytest.raises(ConfigError, match=r"take more than 0\.01 s to describe; .* num_hidden_layers 5000"):
        build({**TEXT, "num_hidden_layers": 5000, "max_position_embeddings": 16})


def test_what_the_models_code_reads_can_be_given() -> None:
    sizes = {"num_hidden_layers": 1, "moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}
    model = build({**LLAMA, **sizes, "model_type": "qwen3_moe", "head_dim": 12, "num_labels": 3e0}).model
    assert model.get_parameter("model.layers.0.self_attn.q_norm.weight").shape == (12,)
    assert model.config.num_labels == 3


def test_two_unknown_fields_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        build({**LLAMA, "hidden_sise": 32, "zzz": 1})
    assert len(caught.value.problems) == 2


def test_heads_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match="LlamaConfig has no masked_lm model; it has causal_lm"):
        build(LLAMA, "masked_lm")


def directory_with(tmp_path: Path, **fields: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return tmp_path


def test_directories_are_checked_before_they_are_read(tmp_path: Path) -> None:
    quantized = directory_with(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="quantized"):
        build(None, source=str(quantized))
    unknown = directory_with(tmp_path, model_type="nothing")
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(None, source=str(unknown))
    other = directory_with(tmp_path)
    with pytest.raises(ConfigError, match="is not 'llama'"):
        build({"model_type": "gpt2"}, source=str(other))


@pytest.mark.parametrize(("text", "said"), [("{'a': 1}", r"is not JSON \(Expecting"), ("[]", "is not a JSON object")])
def test_a_configuration_that_is_no_json_is_refused_before_weights_are_looked_for(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^model\.source: {tmp_path}/config\.json {said}"):
        open_files(tmp_path)


def test_code_in_a_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("raise SystemExit('this ran')")
    directory = directory_with(
        tmp_path, model_type="mine", auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    )
    with pytest.raises(ConfigError):
        build(None, source=str(directory))
