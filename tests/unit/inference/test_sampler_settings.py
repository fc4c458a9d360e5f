"""Settings of a sampler are tried where they enter, so that no running batch ends by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.commands import ended
from zeromesh.errors import ConfigError, PhaseError, StorageError
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.inference.generator import Generator
from zeromesh.trainer.shard import placed_of, shard, unshard

TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WRONG: list[dict[str, Any]] = [
    {"do_sample": True, "top_k": -1},
    {"do_sample": True, "top_k": 2.5},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": "hot"},
    {"do_sample": True, "temperature": -1.0},
    {"do_sample": True, "typical_p": 0.0},
    {"do_sample": True, "top_p": 7},
    {"do_sample": True, "min_p": 3.0},
    {"do_sample": True, "epsilon_cutoff": 2.0},
    {"repetition_penalty": -2.0},
    {"repetition_penalty": [1]},
    {"no_repeat_ngram_size": -3},
    {"suppress_tokens": [10**6]},
    {"suppress_tokens": "all"},
    {"begin_suppress_tokens": [64]},
    {"forced_eos_token_id": 10**6, "max_new_tokens": 1},
    {"bad_words_ids": [[10**6]]},
    {"bad_words_ids": [3]},
    {"sequence_bias": {"x": 1.0}},
    {"sequence_bias": [[[10**6], 1.0]]},
    {"eos_token_id": 10**23},
    {"num_beams": 10**23},
    {"num_beams": 0, "do_sample": True},
    {"num_beam_groups": 0},
    {"eos_token_id": "end"},
    {"min_new_tokens": "two"},
    {"max_new_tokens": "ten"},
    {"max_new_tokens": 0},
    {"max_new_tokens": -5},
    {"max_new_tokens": 2.5},
    {"exponential_decay_length_penalty": [1]},
    {"watermarking_config": {"bias": "x"}},
]
RIGHT: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 2, "top_k": 10**6, "top_p": 1},
    {"do_sample": False, "temperature": 0.0},
    {"eos_token_id": [1, 63]},
    {"eos_token_id": -1},
    {"suppress_tokens": [3, 63], "repetition_penalty": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("sampler") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[Generator]:
    with Generator(folder) as made:
        yield made


@pytest.mark.parametrize("fields", WRONG, ids=map(repr, WRONG))
def test_wrong_settings_are_refused_where_they_enter(generator: Generator, fields: dict[str, Any]) -> None:
    for check in (generator.check_fields, generator.require_serving, lambda each: generator.check_request([1], each)):
        with pytest.raises(ConfigError):
            check(fields)
    with pytest.raises(ConfigError):
        generator.generate([[1, 2]], **fields)
    assert not generator.placed.failure


@pytest.mark.parametrize("fields", RIGHT, ids=map(repr, RIGHT))
def test_right_settings_generate(generator: Generator, fields: dict[str, Any]) -> None:
    generator.check_request([1], fields)
    assert generator.generate([[1, 2]], **{"max_new_tokens": 2, **fields})[0].new_tokens == 2


def test_a_generator_and_a_sharded_model_give_their_weights(generator: Generator, folder: Path, tmp_path: Path) -> None:
    wanted = LlamaForCausalLM.from_pretrained(folder).state_dict()
    sharded, _ = shard(LlamaForCausalLM.from_pretrained(folder))
    for number, model in enumerate((generator, placed_of(sharded))):
        model.check_weights()
        model.save(tmp_path / str(number))
        with model.gathered(["model.norm.weight"]):
            assert model.placed.module.model.norm.weight.shape == (16,)
        again = LlamaForCausalLM.from_pretrained(tmp_path / str(number)).state_dict()
        for found in (dict(model.state_dict()), dict(model.stream_weights()), again):
            assert all(torch.equal(value, wanted[name]) for name, value in found.items())
            assert len(found) > 5
        with pytest.raises(ConfigError, match="no averaged weights"):
            model.save(tmp_path / "again", ema=True)
    unshard(sharded)
    with Generator(folder) as closed:
        pass
    with pytest.raises(PhaseError, match=r"ended with close\(\)"):
        closed.check_weights()


def test_an_error_of_the_hub_s_form_ends_the_stream(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    @contextmanager
    def call(_mesh: object, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            left.append(f"{name} {error}")
            raise

    def refuse(weights: Iterator[Any], dtype: torch.dtype) -> Iterator[Any]:
        yield next(weights)
        raise ConfigError("no form")

    monkeypatch.setattr(type(generator.mesh), "call", call)
    monkeypatch.setattr(generator.placed.hub_form, "convert", refuse)
    weights = generator.stream_weights()
    next(weights)
    with pytest.raises(ConfigError, match="no form") as caught:
        next(weights)
    # The other ranks hear of it at once, and not when the error is forgotten here.
    assert caught.value is not None
    assert left == ["generator.stream_weights() no form"]


def test_a_row_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"input_ids": [1]}, {"input_ids": [1], "do_sample": True, "top_k": -1}]
    prompts = tmp_path / "rows.jsonl"
    for wrong in (rows, [rows[0], {"input_ids": [1], "seed": 10**23}], [rows[0], {"input_ids": [10**12]}]):
        prompts.write_text("".join(json.dumps(row) + "\n" for row in wrong))
        assert "rows.jsonl, line 2" in ended(capsys, ["generate", str(folder), "--prompts", str(prompts)], 2).err
    prompts.write_text(json.dumps(rows[0]) + "\n")
    words = ["generate", str(folder), "--prompts", str(prompts), "generation.do_sample=true", "generation.top_k=-1"]
    said = ended(capsys, words, 2).err
    assert "top_k" in said
    assert "line" not in said, "what the command line says is not the row's"


def test_a_model_s_own_settings_are_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "m")
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"input_ids": [1]}\n')
    for own in ({"do_sample": True, "top_k": -1}, {"temperature": "hot"}, {"suppress_tokens": [10**6]}):
        (tmp_path / "m" / "generation_config.json").write_text(json.dumps(own))
        model = str(tmp_path / "m")
        for words in (["serve", "--port", "0", model], ["generate", model, "--prompts", str(prompts)]):
            assert main(words) == 2, own
            said = capsys.readouterr().err
            assert "generation_config.json" in said, said
            assert "Traceback" not in said


def test_memory_that_runs_out_is_named_with_what_to_lower(folder: Path) -> None:
    with Generator(folder) as own, pytest.raises(StorageError, match=r"ran out of memory.*lower batch.*num_beams"):
        own.generate([[1, 2]], num_beams=10**12, do_sample=True)
