"""Slips in configurations and overrides: one clear error that names the place and what to write; never a parser's own words."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromesh.errors import ConfigError
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.config.foreign_names import TABLE
from zeromesh.trainer.config.load import Consent, load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import parse_yaml


@contextmanager
def plainly() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        text = str(error)
        assert text.replace("\n", "").isprintable()


def message(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("max_steps=3", "the override 'max_steps=3': did you mean run.max_steps=3?"),
        ("learning_rate=3", "the override 'learning_rate=3': did you mean optimizer.lr?"),
        ("gradient_accumulation_steps=2", "did you mean batch.global_size (accumulation is derived from it)?"),
        ("run=3", "the override 'run=3': run is a section; write run.KEY=VALUE"),
        ("run.max_steps", "the override 'run.max_steps': it has no value; write run.max_steps=VALUE"),
        ("run.=3", "the override 'run.=3': write section.key=value"),
        ("nothing=3", "the override 'nothing=3': write section.key=value"),
        ("run.max_steps=x", "run.max_steps: got 'x'; allowed is an integer >= 1 (the override 'run.max_steps=x')"),
        ("run.name=[", "the override 'run.name=[': line 1, column 2"),
        ("tracking.backends=wandb", "write a list: [wandb] (the override 'tracking.backends=wandb')"),
        ("model.config.api_key=[1", "the override 'model.config.api_key=<redacted>'"),
    ],
)
def test_an_override_is_blamed_and_not_the_file(tmp_path: Path, override: str, words: str) -> None:
    path = write(tmp_path, "a.yaml", "run: {max_steps: 3}")
    found = message(path, override)
    assert words in found
    assert path not in found


def test_a_file_and_an_override_that_are_both_wrong_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "run: {seed: x}")
    found = message(path, "run.max_steps=x")
    assert found.startswith(f"{path}: 2 problems")
    assert found.count("the override") == 1


def test_an_override_with_dashes_gets_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", write(tmp_path, "a.yaml", "run: {seed: 1}"), "--run.max_steps=5"])
    assert ended.value.code == 2
    assert "keys of the configuration have no dashes: run.max_steps=5" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", write(tmp_path, "a.yaml", "run: {seed: 1}"), "--learning-rate", "1e-4"])
    assert "unknown arguments: --learning-rate; learning_rate is here the key optimizer.lr" in capsys.readouterr().err


def test_a_slip_in_the_number_of_ranks_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.yaml", "run: {seed: 1}")
    assert main(["train", path, "--nproc", "100000"]) == 2
    assert "--nproc 100000: this host has" in capsys.readouterr().err


def test_a_configuration_that_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, mine = write(tmp_path, "a.yaml", "run: {seed: 1}"), write(tmp_path, "mine.yaml", "run: {seed: 2}")
    assert main(["train", path, "--save-config", mine]) == 2
    assert f"--save-config {mine}: another file is there" in capsys.readouterr().err
    assert Path(mine).read_text() == "run: {seed: 2}"


def test_a_missing_path_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"'nowhere.txt' does not exist in {tmp_path};" in message({"data": {"train": "nowhere.txt"}})
    assert "several paths are a list: [a.txt,b.txt]" in message({"data": {"train": "a.txt,b.txt"}})
    assert "'/nowhere.txt' does not exist;" in message({"data": {"train": "/nowhere.txt"}})


def test_tabs_indent_json(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "a.json", '{\n\t"run": {\n\t\t"seed": 5\n\t}\n}\n')).run.seed == 5


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_whole_number_in_any_spelling_is_an_integer(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, '{"run": {"max_steps": 1e3, "eval_every": 5.0}, "zero": {"stage": 2.0}}')
    config = load_config(path, ["run.log_every=2e1"])
    assert (config.run.max_steps, config.run.eval_every, config.zero.stage, config.run.log_every) == (1000, 5, 2, 20)
    assert type(config.run.max_steps) is int
    assert load_config({"train_micro_batch_size_per_gpu": 2, "zeromesh": {"parallel": {"tensor": 2.0}}}, ranks=4)
    for wrong in ("1.5", "1e300", "-1e3"):
        assert "run.max_steps: got" in message({}, f"run.max_steps={wrong}")


def test_braces_are_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "a.yaml", "{}")) == load_config(write(tmp_path, "a.json", "{}"))
    assert "is empty; write what to train" in message(write(tmp_path, "a.json", ""))


# A file that a configuration inherits, whose keys are known by their file


def inherited(folder: Path, **files: str) -> Path:
    """Write files, whose names have `__` for `/` and `_` for `.`; returns the topmost."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "top.yaml"


def test_a_chain_of_files_is_summed(tmp_path: Path) -> None:
    top = inherited(
        tmp_path,
        top_yaml="base: sub/middle.yaml\nrun: {max_steps: 3}\nmodel: {lora: null}\ndata:\n",
        sub__middle_yaml="base: ../up/root.json\noptimizer: {betas: [0.1, 0.2]}\nrun: {seed: 4, max_steps: 5}",
        up__root_json='{"model": {"lora": {"rank": 2}}, "optimizer": {"lr": 0.5, "betas": [0.3, 0.4]}, "data": {"shuffle": false}}',
    )
    config = load_config(top)
    assert (config.run.max_steps, config.run.seed, config.run.name) == (3, 4, "top")
    assert (config.optimizer.lr, config.optimizer.betas) == (0.5, (0.1, 0.2))
    assert (config.model.lora, config.data.shuffle) == (None, False)
    assert config.folders == (str(tmp_path), str(tmp_path / "sub"), str(tmp_path / "up"))
    assert load_config(yaml.safe_load(config.to_yaml())).model_dump() == config.model_dump()
    assert load_config({"base": str(top), "run": {"seed": 1}}).run.seed == 1
    assert load_config(top, ["optimizer.lr=0.25"]).optimizer.lr == 0.25


def test_another_kind_replaces_what_was_of_the_first(tmp_path: Path) -> None:
    top = inherited(
        tmp_path,
        top_yaml="base: root.yaml\nmodel: {config: {model_type: gpt2, n_embd: 8}}\ndata: {train: {python: 'a:c'}}",
        root_yaml="model: {config: {model_type: llama, hidden_size: 8}}\ndata: {train: {python: 'a:b', rows: 3}}",
    )
    with pytest.raises(ConfigError, match=r"data.train.python: would run code"):
        load_config(top)
    config = load_config(top, consent=Consent.GIVEN)
    assert config.model.config == {"model_type": "gpt2", "n_embd": 8}
    assert config.data.model_dump()["train"] == {"python": "a:c"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"root_yaml": "optimizer: {lr: -1}"}, r"optimizer.lr: got -1; .*\(set in .*root.yaml\)"),
        ({"root_yaml": "batch: {micro_size: 99}"}, r"batch.micro_size: 99 is more .*\(set in .*root.yaml\)"),
        ({"root_yaml": "data: {mixture: {a: {trian: x}}}"}, r"data.mixture.a.*\(set in .*root.yaml\)"),
        ({"root_yaml": "base: top.yaml"}, r"root.yaml: base: 'top.yaml' inherits itself: .*top.yaml -> .*root.yaml -> .*top"),
        ({"root_yaml": "base: none.yaml"}, r"root.yaml: base: '.*none.yaml' does not exist"),
        ({"root_yaml": "base: [a, b]"}, r"root.yaml: base: got \['a', 'b'\]; allowed is a YAML"),
        ({"root_yaml": "run: {max_steps: ${NOT_SET_HERE}}"}, "root.yaml"),
    ],
)
def test_errors_name_the_file_that_set_the_key(tmp_path: Path, files: dict[str, str], said: str) -> None:
    top = inherited(tmp_path, top_yaml="base: root.yaml\nrun: {max_steps: 3}", **files)
    with pytest.raises(ConfigError, match=said):
        load_config(top)


def test_a_key_of_the_file_itself_is_its_own(tmp_path: Path) -> None:
    top = inherited(tmp_path, top_yaml="base: root.yaml\noptimizer: {lr: -2}", root_yaml="optimizer: {lr: -1}")
    with pytest.raises(ConfigError) as raised:
        load_config(top)
    assert "root.yaml" not in str(raised.value)


KEYS = st.sampled_from(["<<", "=", "null", "?", "1", "true", "run", "max_steps", "model", "config", "a b", "\u0085", ""])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | KEYS
VALUES = st.recursive(LEAVES, lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=3), max_leaves=10)
SECTIONS = st.dictionaries(st.sampled_from([*TrainerConfig.model_fields, "x"]), VALUES, max_size=3)


@given(SECTIONS | VALUES)
@settings(max_examples=300, deadline=None)
def test_any_document_is_a_configuration_or_an_error(document: Any) -> None:
    """Whatever its values are; nothing that a terminal would obey is in the error."""
    with plainly():
        value = parse_yaml(json.dumps(document), where="document")
        load_config(value if isinstance(value, dict) else {"run": value})


ODD = [
    *(None, True, 0, 1, -1, 0.5, 1e300, float("inf"), 10**290, 10**400),
    *("auto", "cpu", "Adam", "x", "", "\x1b", [1], {}, [[1]]),
]
NAMES = st.sampled_from([row.name for row in TABLE])


@given(st.dictionaries(NAMES, st.sampled_from(ODD), max_size=5), st.sampled_from(["WarmupLR", "OneCycle", "WarmupCosineLR", ["x"]]))
@settings(max_examples=300, deadline=None)
def test_any_values_of_deepspeed_are_a_configuration_or_an_error(values: dict[str, Any], scheduler: Any) -> None:
    source: dict[str, Any] = {}
    for name, value in {"train_batch_size": 8, "scheduler.type": scheduler, **values}.items():
        *parents, key = name.split(".")
        at = source
        for parent in parents:
            at = at.setdefault(parent, {}) if isinstance(at, dict) else {}
        if isinstance(at, dict):
            at[key] = value
    with plainly():
        load_config(source)


def test_a_base_that_was_removed_is_the_one_that_the_launcher_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = inherited(tmp_path, top_yaml="base: root.yaml", root_yaml="optimizer: {lr: 0.5}")
    read = {path: path.read_bytes() for path in tmp_path.rglob("*.yaml")}
    for path in read:
        path.unlink()
    monkeypatch.setattr("zeromesh.trainer.config.yaml_reader.file_as_launched", lambda path, most: read[path])
    assert load_config(top).optimizer.lr == 0.5
