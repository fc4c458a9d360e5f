"""A generator in one process: the configuration that it is built with, its prompts and seeds, and what it says of results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
import yaml

from zeromesh import Trainer
from zeromesh.checkpoint.io.format import Manifest
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.cli.generate import _stream
from zeromesh.trainer.data.tokenizer import ByteTokenizer
from zeromesh.trainer.generation.adapter_rows import BASE
from zeromesh.trainer.generation.requests import Inbox
from zeromesh.trainer.inference.generator import Generator, find_source, layout_of, served_models

TINY = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 40, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
DRAWN: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}


def saved(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    torch.manual_seed(0)
    tf.LlamaForCausalLM(tf.LlamaConfig(**{**TINY, **changes})).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("generator") / "model")


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[Generator]:
    with Generator(folder, data={"tokenizer": "bytes"}) as made:
        yield made


def test_a_layout_is_the_configuration_without_what_trains(folder: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model": {"source": "other/model", "config": {"use_cache": False}},
        "data": {"train": "stdlib", "tokenizer": "bytes", "sequence_length": 8},
        "run": {"seed": 3},
        "zero": {"stage": 2},
        "precision": {"compute": "bfloat16"},
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config))
    for given, name in ((config, "generate"), (path, "c")):
        found = layout_of(folder, given, {"zero": {"stage": 1}, "run": {"max_steps": 7}}, ["run.max_steps=9"])
        assert (found.model.source, found.model.config) == (str(folder), {"use_cache": False})
        assert found.data.model_fields_set == {"tokenizer"}
        assert (found.data.tokenizer, found.zero.stage) == ("bytes", 1)
        assert (found.run.name, found.run.seed, found.run.max_steps) == (name, 3, 9)
        precision = found.precision
        assert (precision.compute, precision.master, precision.reduce) == ("bfloat16", "float64", "float64")
    named = layout_of(folder, {"model": {"config": {"model_type": "gpt2"}}, "run": {"name": "own"}}, {})
    assert (named.model.config, named.run.name) == (None, "own")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"lora": {"rank": 2}}}, "model.lora is for adapters that are trained, and nothing is trained here"),
        ({"precision": {"linear": "float8"}}, "precision.linear is for products of training, and nothing is trained"),
    ],
)
def test_what_only_training_has_is_refused(folder: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(folder, None, sections)


def test_the_tokenizer_of_a_checkpoint_is_that_of_its_run(tmp_path: Path) -> None:
    source = tmp_path / "run/checkpoints/step-1"
    saved(source)
    resolved = tmp_path / "run/config.resolved.yaml"
    assert layout_of(source, None, {}).data.tokenizer is None
    resolved.write_text(yaml.safe_dump({"data": {"tokenizer": "bytes", "train": "stdlib"}}))
    assert layout_of(source, None, {}).data.tokenizer is None, "a model's directory belongs to no run"
    (source / "manifest.json").write_bytes(Manifest(step=1, files={}).to_json())
    assert layout_of(source, None, {}).data.tokenizer == "bytes"
    assert layout_of(source, None, {"data": {"tokenizer": "other"}}).data.tokenizer == "other"
    (source / "tokenizer.json").write_text("{}")
    assert layout_of(source, None, {}).data.tokenizer is None


def test_sources(folder: Path, tmp_path: Path) -> None:
    assert find_source(folder) == str(folder)
    assert find_source("owner/name") == "owner/name"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert find_source(tmp_path / "adapter") == str(tmp_path / "adapter")
    (tmp_path / "config.resolved.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="checkpoint"):
        find_source(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"a directory without config.json or config.resolved.yaml; .*TRL has one: model"):
        find_source(tmp_path / "empty")


@pytest.mark.parametrize(
    ("dtype", "sections", "compute"),
    [
        (torch.bfloat16, {}, "bfloat16"),
        (torch.float64, {}, "float64"),
        (torch.bfloat16, {"precision": {"compute": "float32"}}, "float32"),
    ],
)
def test_a_model_computes_in_its_own_dtype(tmp_path: Path, dtype: torch.dtype, sections: Any, compute: str) -> None:
    with Generator(saved(tmp_path / "m", dtype), **sections) as made:
        assert made.config.precision.compute == compute
        assert {parameter.dtype for parameter in made.engine.model.parameters()} == {getattr(torch, compute)}
        assert made.config.model.head == "causal_lm"
        assert not made.engine.model.training


def test_a_model_with_an_encoder_is_built_with_its_head(tmp_path: Path) -> None:
    config = tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=1)
    tf.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "m")
    with Generator(tmp_path / "m") as made:
        assert (made.config.model.head, made.model_type, made.positions) == ("seq2seq_lm", "t5", None)
        assert not made.can_serve({})
        (found,) = made.generate([[5, 6]], max_new_tokens=3, eos_token_id=None)
        assert (found.new_tokens, found.prompt_tokens, found.text) == (3, 2, None)
        with pytest.raises(DataError, match=r"no tokenizer; set data\.tokenizer"):
            made.decode([1])
        with pytest.raises(ConfigError, match=r"serve: requests cannot join a running batch: T5.* has an encoder"):
            made.require_serving({})
        with pytest.raises(ConfigError, match="has an encoder, which requests that join a running batch cannot"):
            made.check_request([1], {})


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model.eval()(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def adapter(base: Path, out: Path, seed: int = 1, **changes: Any) -> Any:
    """PEFT's model of a base and an adapter, which is saved."""
    torch.manual_seed(seed)
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"], "init_lora_weights": False, **changes}
    made = peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings))
    made.save_pretrained(out)
    return made


def test_an_adapter_and_a_run_with_adapters_generate(folder: Path, tmp_path: Path) -> None:
    wanted = adapter(folder, tmp_path / "adapter", use_dora=True)
    plain = greedy(tf.AutoModelForCausalLM.from_pretrained(folder), [5, 6], 12)
    assert plain != (expected := greedy(wanted, [5, 6], 12))
    for source, keys in ((tmp_path / "adapter", []), (folder, [f"model.adapters={tmp_path / 'adapter'}"])):
        with Generator(source, overrides=[*keys, "zero.stage=3"]) as made:
            assert made.generate([[5, 6]], max_new_tokens=12)[0].tokens == expected
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    model = {"source": str(folder), "weights": "nf4", "lora": {"rank": 2, "targets": "all-linear"}}
    sections: dict[str, Any] = {"run": {"name": "r", "output_dir": str(tmp_path), "max_steps": 2}, "model": model}
    sections |= {"optimizer": {"lr": 0.1}, "precision": {"compute": "float32"}, "schedule": {"name": "constant"}}
    with Trainer(None, {**sections, "checkpoint": {"every_steps": 2}}, rows) as trainer:
        trainer.fit()
        trained = greedy(trainer.model, [5, 6], 12)
    with Generator(tmp_path / "r") as made:
        assert made.config.model.weights is not None
        assert made.generate([[5, 6]], max_new_tokens=12)[0].tokens == trained
    assert trained not in (plain, expected)


def test_an_adapter_without_a_base_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter(folder, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match=r"names no directory of its base; give it as model\.source=DIRECTORY"):
        layout_of(tmp_path / "adapter", None, {})
    assert layout_of(tmp_path / "adapter", None, {}, [f"model.source={folder}"]).model.source == str(folder)
    with pytest.raises(ConfigError, match=r"model\.adapters\.a has settings of a new adapter, and nothing is trained here"):
        layout_of(folder, None, {"model": {"adapters": {"a": {"r": 2}}}})


def test_seeds_of_prompts_and_of_calls(generator: Generator, folder: Path) -> None:
    def tokens(made: Generator, prompts: list[Any], **fields: Any) -> list[list[int]]:
        return [each.tokens for each in made.generate(prompts, **{**DRAWN, **fields})]

    given = tokens(generator, [[7], [7], {"input_ids": [7], "seed": 4}], seed=1)
    assert len({*map(tuple, given)}) == 3, "prompts of one call have their own seeds"
    assert given == tokens(generator, [[7], [7], {"input_ids": [7], "seed": 4}], seed=1, batch=1)
    assert given[2:] == tokens(generator, [{"input_ids": [7], "seed": 4}], seed=2)
    assert given[:1] != tokens(generator, [[7]], seed=2)
    calls = []
    for seed in (0, 0, 1):
        with Generator(folder, run={"seed": seed}) as made:
            calls += [tokens(made, [[7]]) for _ in range(2)]
    assert calls[:2] == calls[2:4]
    assert len({str(each) for each in calls}) == 4


def test_results_and_options_of_a_prompt(generator: Generator) -> None:
    seen: dict[int, Any] = {}
    free = {"input_ids": [72, 105], "max_new_tokens": 4}
    first = generator.generate(["Hi", free], max_new_tokens=2, on_results=seen.update)
    assert [(each.prompt_tokens, each.new_tokens, each.finish) for each in first] == [(2, 2, "length"), (2, 4, "length")]
    assert first == [seen[0], seen[1]]
    assert generator.computed == (1 + 2) + (1 + 4)
    assert [each.text for each in first] == [generator.decode(each.tokens) for each in first]
    assert [len(each.logprobs or ()) for each in first] == [2, 4]
    assert first[1].tokens[:2] == first[0].tokens
    (ended,) = generator.generate(["Hi"], max_new_tokens=4, eos_token_id=first[1].tokens[2])
    assert ended.tokens == first[1].tokens[: first[1].tokens.index(first[1].tokens[2]) + 1]
    assert ended.finish == "stop"
    looked_up = generator.generate([[5, 6, 5], [7, 8, 7]], max_new_tokens=3, prompt_lookup_num_tokens=2)
    assert [each.tokens for each in looked_up] == [
        each.tokens for each in generator.generate([[5, 6, 5], [7, 8, 7]], max_new_tokens=3)
    ]
    (beams,) = generator.generate(["Hi"], max_new_tokens=3, num_beams=2)
    assert (beams.logprobs, beams.new_tokens) == (None, 3)
    (plain,) = generator.generate(["Hi"], max_new_tokens=4, use_cache=False)
    assert plain.tokens == first[1].tokens
    assert plain.logprobs == pytest.approx(first[1].logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        (["Hi"], {"batch": 0}, "batch is 0; it must be 1 or more prompts"),
        ([], {}, "there are no prompts"),
        ([[300]], {}, "prompt 0 has token 300, and the model knows 300"),
        ([[299], [300]], {}, "prompt 1 has token 300"),
        ([[1] * 40], {}, "prompt 0: the prompt has 40 tokens, which with the new ones become 41"),
        (["a"], {"token_healing": True}, "token_healing is not taken; end the prompt where a token ends"),
        ([{"text": "a", "top_k": 3}, "b"], {"num_beams": 2}, "beam_search .* so prompts are generated alike"),
        ([{"text": "a", "max_tokens": 3}], {}, "max_tokens is no field"),
    ],
)
def test_prompts_that_are_refused(generator: Generator, prompts: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        generator.generate(prompts, **fields)
    assert generator.generate(["Hi"], max_new_tokens=1)[0].new_tokens == 1


def test_what_a_generator_knows(generator: Generator) -> None:
    assert (generator.model_type, generator.positions) == ("llama", 40)
    assert isinstance(generator.tokenizer, ByteTokenizer)
    assert (generator.can_serve({}), generator.can_serve({"num_beams": 2})) == (True, False)
    generator.check_request([1] * 36, {"max_new_tokens": 4})
    for tokens, fields in (([1] * 37, {"max_new_tokens": 4}), ([], {}), ([300], {})):
        with pytest.raises(DataError):
            generator.check_request(tokens, fields)
    assert json.loads(json.dumps(generator.encode("Hi"))) == [72, 105]


def test_the_names_of_served_models(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        adapter(folder, tmp_path / name)
    given = [f"model.adapters={{one: {tmp_path / 'one'}, two: {tmp_path / 'two'}}}"]

    def names(source: Path, keys: list[str], name: str | None = None, why: str = "") -> dict[str, str | None]:
        return served_models(str(source), name, layout_of(source, None, {}, keys), why)

    assert names(folder, []) == {folder.name: None}
    assert names(folder, given) == {folder.name: BASE, "one": "one", "two": "two"}
    assert names(tmp_path / "one", []) == {"one": "default", folder.name: BASE}
    two = [f"model.adapters.two={tmp_path / 'two'}"]
    assert names(tmp_path / "one", two, "mine") == {"mine": "default", "two": "two", folder.name: BASE}
    assert names(tmp_path / "one", [], None, "of a reason") == {"one": None}
    assert names(folder, [f"model.adapters.one={tmp_path / 'one'}"], None, "of a reason") == {"one": None}
    with pytest.raises(ConfigError, match=r"two models have one name: two, two, .*; give --name"):
        names(tmp_path / "one", two, "two")
    with pytest.raises(ConfigError, match=r"model\.adapters: of a reason; serve it without the other adapters"):
        names(folder, given, None, "of a reason")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bias": "all"}, r"default has biases of the base itself \(bias: all\)"),
        ({"init_lora_weights": "pissa", "target_modules": ["q_proj"]}, r"default subtracts from the base what it adds"),
    ],
)
def test_an_adapter_that_changes_the_base_runs_alone(folder: Path, tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    adapter(folder, tmp_path / "adapter", **settings)
    with Generator(tmp_path / "adapter") as made:
        assert made.generate([{"input_ids": [5, 6], "adapter": "default"}], max_new_tokens=2)
        with pytest.raises(ConfigError, match=f"prompt 0: no adapter '__base__'; there are default, as {why}"):
            made.generate([{"input_ids": [5, 6], "adapter": BASE}])


@pytest.mark.parametrize("beams", [1, 2])
def test_layers_without_rows_are_found_at_the_start(tmp_path: Path, beams: int) -> None:
    """OPT computes all tokens of a batch at once in its linear layers, so that nothing says what is of which row."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = tf.OPTForCausalLM(tf.OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64))
    base.generation_config.num_beams = beams  # Requests may ask for one all the same.
    base.save_pretrained(tmp_path / "opt")
    wanted = adapter(tmp_path / "opt", tmp_path / "adapter", target_modules=["q_proj", "fc1"])
    with Generator(tmp_path / "adapter") as made:
        (found,) = made.generate([[5, 6]], max_new_tokens=4, eos_token_id=-1, num_beams=1)
        assert found.tokens == greedy(wanted, [5, 6], 4)
        with pytest.raises(ConfigError, match=r"there are default, as .*layers\.0\.fc1.* all rows at once"):
            made.generate([{"input_ids": [5, 6], "adapter": BASE}])


def test_an_adapter_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    with Generator(folder) as made, pytest.raises(ConfigError, match="prompt 0: no adapter 'style'; there are none"):
        made.generate([{"input_ids": [5], "adapter": "style"}])
    adapter(folder, tmp_path / "style")
    with Generator(folder, overrides=[f"model.adapters.style={tmp_path / 'style'}"]) as made:
        with pytest.raises(ConfigError, match="prompt 1: no adapter 'other'; there are style, __base__"):
            made.generate([[5], {"input_ids": [5], "adapter": "other"}])
        with pytest.raises(ConfigError, match="prompts are generated alike; give all the same fields and adapter"):
            made.generate([{"input_ids": [5], "adapter": BASE}, [5]], num_beams=2)
        with pytest.raises(ConfigError, match="the request: no adapter 'other'; there are style, __base__"):
            made.check_request([5], {}, "other")
        inbox = Inbox()
        inbox.submit([5], lambda progress: None, adapter="other")
        with pytest.raises(ConfigError, match="request 0: no adapter 'other'"):
            made.serve(inbox)


def test_a_prompt_that_is_streamed_has_its_adapter(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter(folder, tmp_path / "one")
    adapter(folder, tmp_path / "two", seed=2)
    keys = [f"model.adapters={{one: {tmp_path / 'one'}, two: {tmp_path / 'two'}}}", "data.tokenizer=bytes"]
    written = set()
    with Generator(folder, overrides=keys) as made:
        for name in ("one", "two", BASE):
            prompt = {"text": "Hi", "adapter": name}
            (whole,) = made.generate([prompt], max_new_tokens=12)
            _stream(made, made.request_of(prompt, {})[0], {"max_new_tokens": 12})
            text = capsys.readouterr().out
            assert text == f"{whole.text}\n"
            written.add(text)
    assert len(written) == 3
