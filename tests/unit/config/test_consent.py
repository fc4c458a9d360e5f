"""Code of a stranger's directory runs on what the person named in this very command alone."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from zeromesh.errors import ConfigError, ZeromeshError
from zeromesh.trainer import Trainer
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.config.load import Consent, foreign_code, load_config
from zeromesh.trainer.inference.generator import Generator

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
with (Path(MARK)).open("a") as mark:
    mark.write("ran ")
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
TINY = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
YES = "model.trust_remote_code=true"


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is a run, a checkpoint-like model and a configuration at once, whose code would leave a mark."""
    folder = tmp_path / "stranger"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    (folder / "own.py").write_text(CODE.replace("MARK", repr(str(tmp_path / "mark"))))
    _add(folder / "config.json", {"model_type": "own-llama", "architectures": ["OwnModel"]})
    _add(folder / "config.json", {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}})
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    _add(folder / "tokenizer_config.json", tokenizer)
    settings = {"model": {"source": str(folder), "trust_remote_code": True}, "run": {"name": "r", "max_steps": 1}}
    (tmp_path / "text.txt").write_text("once upon a time, in a land of code " * 4)
    data = {"train": [str(tmp_path / "text.txt")], "eval": [str(tmp_path / "text.txt")], "sequence_length": 8}
    settings |= {"data": data, "batch": {"global_size": 1, "micro_size": 1}}
    settings["run"]["output_dir"] = str(tmp_path / "runs")
    for name in ("config.resolved.yaml", "layout.yaml"):
        (folder / name).write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    with patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")):
        yield folder


def _add(path: Path, values: dict[str, object]) -> None:
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**held, **values}))


COMMANDS = [
    ["evaluate", "{}"],
    ["evaluate", "{}/config.resolved.yaml"],
    ["config", "{}/config.resolved.yaml"],
    ["config", "{}/config.resolved.yaml", YES],
    ["plan", "--ranks", "1", "{}/config.resolved.yaml"],
    ["plan", "--ranks", "1", "{}/config.resolved.yaml", YES],
    ["verify", "{}/config.resolved.yaml"],
    ["verify", "{}/config.resolved.yaml", YES],
    ["generate", "{}", "--prompts", "{}/config.json"],
    ["generate", "{}", "--config", "{}/layout.yaml", "--prompts", "{}/prompts"],
    ["serve", "{}", "--port", "0"],
    ["serve", "{}", "--config", "{}/layout.yaml", "--port", "0"],
    ["checkpoint", "list", "{}"],
    ["checkpoint", "inspect", "{}"],
    ["checkpoint", "verify", "{}"],
    ["checkpoint", "export", "{}", "{}/out", "--merge"],
    ["checkpoint", "diff", "{}", "{}"],
    ["report", "{}", "--out", "{}/page.html"],
    ["status", "{}"],
    ["trace", "{}"],
    ["doctor", "--directory", "{}", "--json"],
    ["train", "{}/config.resolved.yaml", "model.trust_remote_code=false"],
    ["train", "{}/config.resolved.yaml", "model.trust_remote_code=false", "data.tokenizer={}"],
]


def test_no_command_runs_code_of_a_directory(stranger: Path, tmp_path: Path) -> None:
    (stranger / "prompts").write_text('{"input_ids": [1]}\n')
    codes = {}
    for words in COMMANDS:
        filled = [word.replace("{}", str(stranger)) for word in words]
        with suppress(SystemExit):
            codes[" ".join(words)] = main(filled)
        assert not (tmp_path / "mark").exists(), words
    wrong = [words for words, code in codes.items() if words.startswith(("evaluate", "plan", "verify")) and code != 2]
    assert not wrong
    assert all(code == 0 for words, code in codes.items() if words.startswith("config"))


def test_no_entry_of_a_program_runs_code_of_a_directory(stranger: Path, tmp_path: Path) -> None:
    entries = [
        lambda: Trainer(config={"model": {"source": str(stranger)}}),
        lambda: Trainer(config={"data": {"tokenizer": str(stranger)}}),
        lambda: Generator(stranger),
        lambda: Generator(stranger, stranger / "layout.yaml"),
    ]
    for number, entry in enumerate(entries):
        with suppress(ZeromeshError, TypeError):
            entry().close()
        assert not (tmp_path / "mark").exists(), number


def test_code_that_a_person_names_runs(stranger: Path, tmp_path: Path) -> None:
    """Else the tests above would hold for a directory that never leaves a mark."""
    (stranger / "tokenizer_config.json").unlink()
    assert main(["train", f"{stranger}/config.resolved.yaml", "data.tokenizer=bytes"]) == 0
    assert (tmp_path / "mark").read_text().startswith("ran")
    assert main(["evaluate", str(tmp_path / "runs" / "r")]) == 2
    assert main(["evaluate", str(tmp_path / "runs" / "r"), YES]) == 0


def test_every_key_that_names_code_is_found(stranger: Path) -> None:
    data = {"data": {"train": [{"python": "a:b"}]}, "model": {"python": "c:d", "trust_remote_code": True}}
    data["callbacks"] = {"python": None, "mixture": {"python": {"train": "x"}}}
    assert list(foreign_code(data)) == ["data.train.0.python", "model.python", "model.trust_remote_code"]
    path = stranger / "layout.yaml"
    said = r"model\.trust_remote_code: would run code .* name the key on the command line"
    with pytest.raises(ConfigError, match=said):
        load_config(path)
    assert load_config(path, [YES]).model.trust_remote_code
    assert load_config(path, consent=Consent.GIVEN).model.trust_remote_code
    with pytest.raises(ConfigError, match="this command runs none"):
        load_config(path, [YES], consent=Consent.NEVER)
