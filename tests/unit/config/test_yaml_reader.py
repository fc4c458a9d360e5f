"""The reader of YAML and JSON: scalars, limits to the last value, and what a slip in the text is called."""

import json
from pathlib import Path
from typing import Any

import pytest

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.yaml_reader import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    parse_yaml,
    plain_scalar,
    plain_value,
    read_yaml,
    with_variables,
)

SCALARS: dict[str, Any] = {"True": True, "TRUE": True, "False": False, "FALSE": False, "false": False}
SCALARS |= dict.fromkeys(("null", "Null", "NULL"))
SCALARS |= {"+7": 7, "-1_0": -10, "0": 0, "1.5e+3": 1500.0, "-.5": -0.5, "+.Inf": float("inf"), "-.inf": -float("inf")}
SCALARS |= {text: text for text in ("tRUE", "nULL", "_1", "0b1", "0x", "0o8", "-0x1", ".", "1e", ".iNF", "-.nan", "1 2")}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    assert plain_scalar(text) == value
    assert type(plain_scalar(text)) is type(value)


def test_numbers_that_are_none_and_integers_of_many_digits() -> None:
    assert all(str(plain_scalar(text)) == "nan" for text in (".nan", ".NaN", ".NAN"))
    assert plain_scalar("9" * 302) == int("9" * 302)
    assert plain_scalar("9" * 303) == float("9" * 303)


def problem_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, where="here")
    (problem,) = caught.value.problems
    return problem


def test_limits_hold_to_the_last_value() -> None:
    deep = MAX_DEPTH - 1
    assert parse_yaml("[" * deep + "1" + "]" * deep, where="x")
    assert problem_of("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH) == "nested deeper than 32 levels"
    many = [0] * (MAX_VALUES - 1)
    assert plain_value(many, where="x") == many
    with pytest.raises(ConfigError, match="more than 20000 values"):
        plain_value([*many, 0], where="x")
    pairs = {str(number): 0 for number in range(MAX_VALUES // 2)}  # Keys are values too.
    with pytest.raises(ConfigError, match="more than 20000 values"):
        plain_value(pairs, where="x")
    assert parse_yaml("a" * MAX_BYTES, where="x") == "a" * MAX_BYTES
    assert "larger than 1048576 bytes" in problem_of("a" * (MAX_BYTES + 1))
    assert plain_value({"a": 2**1000 - 1}, where="x") == {"a": 2**1000 - 1}
    with pytest.raises(ConfigError, match=r"a\.b: an integer of 1,001 bits"):
        plain_value({"a": {"b": [2**1000]}}, where="x")


def test_a_file_of_the_largest_size_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path, "missing", where="x") == {"a": 1}
    path.write_bytes(b"a: 1\n" + b" " * (MAX_BYTES - 5))
    assert read_yaml(path, "missing", where="x") == {"a": 1}
    with pytest.raises(ConfigError, match="missing"):
        read_yaml(tmp_path / "none", "missing", where="x")
    with pytest.raises(ConfigError, match="is no path"):
        read_yaml(Path("a\0b"), "missing", where="x")
    tabs = tmp_path / "a.json"
    tabs.write_text('{\n \t"a":\n\t\t"b\tc"}')
    assert read_yaml(tabs, "missing", where="x") == {"a": "b\tc"}


def test_values_of_a_program_become_plain_ones() -> None:
    given = {"a": (1, Path("x") / "y"), "b": "\ud83d\ude00", "c": b"raw"}
    assert plain_value(given, where="x") == {"a": [1, "x/y"], "b": "\U0001f600", "c": b"raw"}
    shared = [1]
    copied = plain_value({"a": shared, "b": shared}, where="x")
    copied["a"].append(2)
    assert (copied["b"], shared) == ([1], [1])
    for odd, said in (({1: 2}, r"a key that is not text \(1\)"), ({"a": "\ud83d"}, "half a character")):
        with pytest.raises(ConfigError, match=said):
            plain_value(odd, where="x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 'c", "line 2, column 6: a text whose quote is never closed"),
        ("a: 1\nbc\nd: 1", "a line that is neither `key: value` nor `- item`"),
        ("a:\n  b: 1\n c: 1", "this is not indented as the lines above"),
        ("a: [1\nb: 2]\nc", "a comma or a closing bracket is missing"),
        ("a: @b", "line 1, column 4: a text that begins with @, ` or % needs quotes"),
        ('a: "\\d"', "an unknown escape"),
        ("a: &x 1\nb: &x 2", "line 2, column 4: an anchor of this name is there already"),
        ("? [a]\n: 1", "line 1, column 3: a key that is not text; write it in quotes"),
        ("{a: 1}: 2", "a key that is not text; write it in quotes"),
        ("true: 1", "line 1, column 1: a key that is not text (True); write it in quotes"),
        ("a:\n  b: 1\n  c: 2\n  b: 3", "line 4, column 3: key 'b' is given twice, first in line 2"),
        ("a: {b: ${C}}", "a text with ${...} needs quotes between { } or [ ]"),
        ("a: b\n\nc: \x07", "line 3: the character \\x07 is not allowed"),
    ],
)
def test_a_slip_has_its_place_and_a_cure(text: str, said: str) -> None:
    assert said in problem_of(text)


def test_a_quoted_key_is_a_key() -> None:
    assert parse_yaml("'<<': 1\n'1': 2\n\"true\": 'no'", where="x") == {"<<": 1, "1": 2, "true": "no"}


def test_variables_have_types_defaults_and_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBER", "7")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("ABSENT", raising=False)
    given = {
        "a": "${NUMBER}",
        "b": "x${NUMBER}",
        "c": ["${ABSENT:-1.5}", "${ABSENT:-}", "${EMPTY:-1}", "$${NUMBER}"],
        "t": {"u": "${NUMBER:-8}"},
        "$${x}": 3,
        "d": "$NUMBER",
    }
    found = with_variables(given, lambda path: path in ("t.u",))
    assert found == {"a": 7, "b": "x7", "c": [1.5, None, 1, "${NUMBER}"], "t": {"u": "7"}, "${x}": 3, "d": "$NUMBER"}
    assert json.dumps(with_variables({"a": 1, "b": None}, lambda path: True)) == '{"a": 1, "b": null}'
    for text, said in (
        ("${}", r"a\.b: \$\{\} is no variable"),
        ("${:-x}", "is no variable"),
        ("${ABSENT}", r"a\.b: the variable ABSENT is not set"),
        ("${MY_API_KEY:-x}", r"a\.b: \$\{MY_API_KEY\} names a secret"),
    ):
        with pytest.raises(ConfigError, match=said):
            with_variables({"a": {"b": text}}, lambda path: True)
