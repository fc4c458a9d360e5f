"""A path that the system refuses, and a directory that makes the libraries fail, are one line each, at every command."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.data import tokenizer as tokenizers
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, load_tokenizer

LONG = "n" * 300
COMMANDS = [
    ["train", "{}"],
    ["train", "{c}", "run.output_dir={}"],
    ["train", "{c}", "data.train=[{}]"],
    ["train", "{c}", "data.tokenizer={}"],
    ["train", "{c}", "model.source={}"],
    ["train", "{c}", "checkpoint.resume={}"],
    ["train", "{c}", "offload.directory={}", "offload.optimizer=file"],
    ["launch", "--hostfile", "{}", "{c}"],
    ["evaluate", "{}"],
    ["config", "{}"],
    ["plan", "{}"],
    ["plan", "{c}", "--ranks", "1", "--device", "{}"],
    ["verify", "{}"],
    ["generate", "{}", "--prompts", "{p}"],
    ["generate", "{m}", "--prompts", "{}"],
    ["generate", "{m}", "--config", "{}", "--prompts", "{p}"],
    ["generate", "{m}", "--prompts", "{p}", "--out", "{}"],
    ["serve", "{}"],
    ["status", "{}"],
    ["trace", "{}"],
    ["report", "{}"],
    ["report", "{r}", "--out", "{}"],
    ["checkpoint", "list", "{}"],
    ["checkpoint", "inspect", "{}"],
    ["checkpoint", "verify", "{}"],
    ["checkpoint", "export", "{}", "{}"],
    ["checkpoint", "diff", "{}", "{}"],
    ["checkpoint", "merge", "{}", "--out", "{}"],
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    sizes: Any = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path / "m")
    (tmp_path / "p").write_text('{"input_ids": [1]}\n')
    (tmp_path / "c.yaml").write_text("run: {max_steps: 1}\n")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text("")
    return {name: str(tmp_path / name) for name in "mpr"} | {"c": str(tmp_path / "c.yaml")}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_name_of_300_letters(places: dict[str, str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main([word.replace("{}", LONG).format(**places) if "{" in word else word for word in words])
    said = capsys.readouterr().err
    assert code in (1, 2), words
    assert "nnn" in said


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_directory_that_one_may_not_enter(
    places: dict[str, str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter all, so the system's calls refuse in its place."""
    closed = Path(places["c"]).parent / "closed"
    closed.mkdir()
    for name in ("stat", "lstat", "open", "mkdir", "listdir", "scandir"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name), f"{closed}/"))
    monkeypatch.setattr(io, "open", _refusing(io.open, f"{closed}/"))
    code = main([word.replace("{}", f"{closed}/in").format(**places) if "{" in word else word for word in words])
    said = capsys.readouterr().err
    assert code in (1, 2), words
    assert f"{closed}/in" in said
    assert "ermission denied" in said


def _refusing(call: Callable[..., Any], where: str) -> Callable[..., Any]:
    def refuse(path: Any = ".", *args: Any, **more: Any) -> Any:
        if isinstance(path, str | os.PathLike) and where in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return call(path, *args, **more)

    return refuse


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_below_checkpoints(
    places: dict[str, str], number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> list[int]:
        raise OSError(number, os.strerror(number), str(self.root))

    monkeypatch.setattr(CheckpointStore, "steps", fail)
    Path(places["r"], "config.resolved.yaml").write_text("{}")
    for words in (["evaluate", "{r}"], ["generate", "{r}", "--prompts", "{p}"], ["checkpoint", "list", "{r}"]):
        assert main([word.format(**places) for word in words]) == 1
        said = capsys.readouterr().err
        assert os.strerror(number) in said
        assert str(Path(places["r"], "checkpoints")) in said


def test_a_home_that_is_nobodys(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["checkpoint", "list"], ["evaluate"], ["report"]):
        assert main([*words, "~nobody-at-all/x"]) == 2
        assert "~nobody-at-all/x: Could not determine home directory" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"data\.train: '~nobody-at-all/x' cannot be reached"):
        load_config(None, ["data.train=[~nobody-at-all/x]"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", "many"),
        ("num_hidden_layers", 1_000_000),
        ("hidden_size", -1),
        ("hidden_size", [1]),
        ("rope_parameters", {"rope_type": "none such", "rope_theta": 0}),
        ("rope_scaling", 3),
        ("hidden_act", 7),
        ("vocab_size", 1.5),
        ("model_type", ["llama"]),
        ("dtype", "floatish"),
        ("pad_token_id", 10**12),
        ("layer_types", ["none such"]),
    ],
)
def test_broken_model_directories(places: dict[str, str], field: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(places["m"], "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    began = time.monotonic()
    for words in (
        ["generate", "{m}", "--prompts", "{p}"],
        ["train", "{c}", "model.source={m}", "model.config=null", "data.tokenizer=bytes"],
    ):
        code = main([word.format(**places) for word in words])
        said = capsys.readouterr().err
        assert code in (1, 2), (words, said)
        assert "Traceback" not in said
        assert "config.json" in said or field in said or "model." in said, said
    assert time.monotonic() - began < 20


def _tokenizer(folder: Path, **more: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", **more)
    found.save_pretrained(folder)
    return found


def test_tokenizers_that_libraries_fail_on(tmp_path: Path) -> None:
    _tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = path.read_text()
    added = {"content": "b", **dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)}
    wrong = [
        '{"a":' * 100_000,
        "[" * 100_000 + "]" * 100_000,
        json.dumps({**json.loads(whole), "added_tokens": [{"id": 10**12, **added}]}),
        json.dumps({**json.loads(whole), "added_tokens": [{"id": -1, **added}]}),
        json.dumps({**json.loads(whole), "model": {"type": "none such"}}),
        "",
    ]
    for text in wrong:
        path.write_text(text)
        with pytest.raises(DataError, match=r"data\.tokenizer .* cannot be loaded"):
            load_tokenizer(tmp_path)
    path.write_text(whole)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "model_max_length": "x"}))
    with pytest.raises(DataError, match=r"data\.tokenizer .* cannot be loaded: .*'>' not supported"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "comes to no end"),
        ("{{ 'a' * 2000000000 }}", "makes too much text"),
        ("{% if messages[0].role == 'system' %}{{ 'a' * 2000000000 }}{% endif %}", "makes too much text"),
        ("{% if tools %}{{ 'a' * 2000000000 }}{% endif %}", "makes too much text"),
        ("{% if messages | length > 9 %}{{ 'a' * 2000000000 }}{% endif %}", "makes too much text"),
        (
            "{% set n = namespace(t='aaaaaaaaaaaaaaaa') %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
            "too much|no end",
        ),
    ],
)
def test_chat_templates_are_bounded(tmp_path: Path, template: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_TEMPLATE_SECONDS", 1.5)
    made = PretrainedTokenizer(tokenizer=_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(DataError, match=what):
        made.require_bounded_template()
    good = PretrainedTokenizer(tokenizer=_tokenizer(tmp_path, chat_template="{{ messages[0]['content'] }}"))
    good.require_bounded_template()
    assert good.encode_messages([{"role": "user", "content": "a"}]) == [0]
