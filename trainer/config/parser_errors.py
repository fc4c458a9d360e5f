"""What a parser of YAML or JSON stumbled over, in words for a person, with what to write in its place."""

from __future__ import annotations

import json
import re

import yaml

from zeromesh.errors import printable

_YAML = (
    (r"found character '\\t'", "a tab; indent with spaces, and put spaces after ':'"),
    (
        "mapping values are not allowed",
        "a second ':' in one entry, or a line indented too far; a text with ': ' needs quotes",
    ),
    ("<stream end>", "the text ends where something is still open; close it with ], } or a quote"),
    ("while scanning a quoted scalar", "a text whose quote is never closed"),
    ("could not find expected ':'", "a line that is neither `key: value` nor `- item`"),
    ("expected <block end>", "this is not indented as the lines above; keys of one section begin in one column"),
    ("expected ',' or", "a comma or a closing bracket is missing"),
    (r"found character '[@`%]'", "a text that begins with @, ` or % needs quotes"),
    ("unknown escape character", r"an unknown escape; write \\ for a backslash, or single quotes around the text"),
    ("found undefined alias", "a text that begins with * needs quotes"),
)


def yaml_mistake(error: yaml.MarkedYAMLError) -> str:
    """What is wrong where `error` has its mark. The mark's own text is not quoted: it may hold a secret."""
    said = f"{error.context or ''} {error.problem or ''}"
    for pattern, words in _YAML:
        if re.search(pattern, said):
            return words
    return f"not YAML: {error.problem or error.context}"


def unreadable(error: yaml.YAMLError, text: str) -> str:
    """What is wrong where the reader of YAML refused a character."""
    position = getattr(error, "position", None)
    if not isinstance(position, int) or not position < len(text):
        return f"not YAML: {getattr(error, 'reason', 'it cannot be read')}"
    code = printable(text[position])
    return f"line {line_of(text, position)}: the character {code} is not allowed; write the text in double quotes, with {code}"


def json_mistake(error: json.JSONDecodeError) -> str:
    """What is wrong where `error` points to."""
    text, rest = error.doc, error.doc[error.pos :]
    before = text[: error.pos].rstrip()
    if not rest.strip():
        return "the text ends where something is still open; close it with ], } or a quote"
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments; remove this one, or name the file .yaml, whose comments begin with #"
    if rest[0] in "]}" and before.endswith(","):
        return f"a comma before {rest[0]}; remove it"
    if rest[0] == "'":
        return "a text in single quotes; JSON has double quotes"
    if word := re.match(r"(True|False|None)\b", rest):
        return f"{word[0]}; write {'null' if word[0] == 'None' else word[0].lower()}"
    if "control character" in error.msg:
        return r"a tab or a line break inside a text; write \t or \n"
    if "delimiter" in error.msg:
        return f"{error.msg.partition(' ')[2].partition(' ')[0]} is missing before this"
    if "Extra data" in error.msg:
        return "something follows the end; a configuration is one object"
    if re.match(r"[A-Za-z_]", rest):
        return "keys and texts are in double quotes in JSON"
    return f"not JSON: {error.msg}"


def line_of(text: str, position: int) -> int:
    """The line of a position in a text, from 1."""
    return text.count("\n", 0, position) + 1
