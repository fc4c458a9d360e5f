"""Slips in configurations and overrides: one clear error that names the place and what to write; never a parser's own words."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zeromesh.errors import ConfigError
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.config.deepspeed_table import TABLE
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import parse_yaml, with_variables

LONG = "9" * 5000


def is_plain(error: ConfigError) -> bool:
    return str(error).replace("\n", "").isprintable()


def message(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "run:\n\tmax_steps: 3\n", "line 2, column 1: a tab; indent with spaces"),
        ("a.yaml", "run:\n  name: a: b\n", "line 2, column 10: a second ':' in one entry"),
        ("a.yaml", "run: {max_steps: 3\n", "where something is still open"),
        ("a.yaml", "run:\n  name: a\x1bb\n", r"line 2: the character \x1b is not allowed"),
        ("a.yaml", f"run:\n  max_steps: {LONG}\n", "run.max_steps: got inf; allowed is an integer >= 1"),
        ("a.yaml", "# run:\n", "is empty; write what is to be trained"),
        ("a.yaml", "", "is empty; write what is to be trained"),
        ("a.json", "", "is empty; write what is to be trained"),
        (
            "a.json",
            '{\n // why\n "run": {}}',
            "line 3, column 7: a comma or a closing bracket is missing, or a comment",
        ),
        ("a.json", '{"run":\t{"name": "a\tb"}}', "line 1, column 8: a tab; indent with spaces"),
        ("a.json", '{"run": {"max_steps": 3', "where something is still open"),
        ("a.json", f'{{"optimizer": {{"lr": {"9" * 302}}}}}', "optimizer.lr: an integer of 1,004 bits"),
        (
            "a.yaml",
            'run: {max_steps: "3"}',
            "run.max_steps: got '3'; allowed is an integer >= 1; write it without quotes",
        ),
        ("a.yaml", 'run: {deterministic: "true"}', "allowed is true or false; write it without quotes"),
        ("a.yaml", "tracking: {backends: wandb}", "allowed is a list of text; write a list: [wandb]"),
    ],
)
def test_a_slip_in_a_file_is_named_with_what_to_write(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = write(tmp_path, name, text)
    found = message(path)
    assert found.startswith(path)
    assert words in found
    assert not any(each in found for each in ("not YAML", "not JSON", "sys.set_int_max_str_digits", "Expecting"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("max_steps=3", "the override 'max_steps=3': did you mean run.max_steps=3?"),
        ("learning_rate=3", "the override 'learning_rate=3': did you mean optimizer.lr?"),
        (
            "gradient_accumulation_steps=2",
            "did you mean batch.global_size (accumulation is derived from it)?",
        ),
        ("run=3", "the override 'run=3': run is a section; write run.KEY=VALUE"),
        ("run.max_steps", "the override 'run.max_steps': it has no value; write run.max_steps=VALUE"),
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
    for wrong in ("1.5", "1e300", "-1e3"):
        assert "run.max_steps: got" in message({}, f"run.max_steps={wrong}")


def test_braces_are_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "a.yaml", "{}")) == load_config(write(tmp_path, "a.json", "{}"))


KEYS = st.sampled_from(
    ["<<", "=", "null", "?", "1", "true", "run", "max_steps", "model", "config", "a b", "\u0085", ""]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | KEYS
VALUES = st.recursive(
    LEAVES, lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=3), max_leaves=10
)
SECTIONS = st.dictionaries(st.sampled_from([*TrainerConfig.model_fields, "x"]), VALUES, max_size=3)


@given(SECTIONS | VALUES)
@settings(max_examples=300, deadline=None)
def test_any_document_is_a_configuration_or_an_error(document: Any) -> None:
    """Whatever its values are; nothing that a terminal would obey is in the error."""
    plain = True
    try:
        value = parse_yaml(json.dumps(document), where="document")
        load_config(value if isinstance(value, dict) else {"run": value})
    except ConfigError as error:
        plain = is_plain(error)
    assert plain


@given(st.dictionaries(KEYS | st.text(max_size=8), VALUES, max_size=4), st.text(min_size=1, max_size=8))
@example({"a": "${HOME}"}, "${")
@settings(max_examples=200, deadline=None)
def test_a_printed_configuration_is_read_back(config: dict[str, Any], text: str) -> None:
    try:
        sections = {
            "model": {"config": {**config, "model_type": "llama"}},
            "tracking": {"project": text, "tags": [text]},
        }
        made = load_config(sections)
    except ConfigError:
        return
    assert load_config(with_variables(parse_yaml(made.to_yaml(), where="printed"), lambda path: True)) == made


ODD = [
    None,
    True,
    0,
    1,
    -1,
    0.5,
    1e300,
    float("inf"),
    10**290,
    10**400,
    "auto",
    "cpu",
    "Adam",
    "x",
    "",
    "\x1b",
    [1],
    {},
    [[1]],
]
NAMES = st.sampled_from([row.name for row in TABLE])


@given(
    st.dictionaries(NAMES, st.sampled_from(ODD), max_size=5),
    st.sampled_from(["WarmupLR", "OneCycle", "WarmupCosineLR", ["x"]]),
)
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
    plain = True
    try:
        load_config(source)
    except ConfigError as error:
        plain = is_plain(error)
    assert plain
