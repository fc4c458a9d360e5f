"""The formats of rows (`data.format`). Add one as a row of `FORMATS`, and a function that converts columns to text or messages."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

Messages = list[dict[str, Any]]
Parts = dict[str, str | Messages]
"""The contents of a row by column, text or messages; the last of several is the answer."""

_ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant")  # by ShareGPT's names


class RowFormat(NamedTuple):
    """A format of rows: its columns, their conversion, and what contents it `holds`."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    parts: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Converts columns (None if a row lacks one) to contents, or raises `TypeError` or `KeyError`. None: they are the contents."""
    holds: Literal["text", "messages", "either", "pictures"] = "messages"
    identifying_column: str | None = None
    label: str | None = None
    """The column of the class, which is then the training target in place of the next token."""

    @property
    def is_joined(self) -> bool:
        """True if rows are documents that are joined and cut into sequences; else each row is whole in one sequence."""
        return self.holds == "text" and self.label is None

    @property
    def has_answers(self) -> bool:
        """True if rows have answers, which may restrict the loss, and may share a sequence."""
        return self.holds in ("messages", "either")


def _alpaca(row: Mapping[str, Any]) -> Parts:
    asked = [*_message("user", row["instruction"], needed=True), *_message("user", row["input"])]
    question = _message("user", "\n\n".join(each["content"] for each in asked))
    turns = [*_message("system", row["system"]), *question, *_message("assistant", row["output"], needed=True)]
    return {"messages": turns}


def _sharegpt(row: Mapping[str, Any]) -> Parts:
    turns = _message("system", row["system"])
    for turn in row["conversations"]:
        if "role" not in turn and turn["from"] not in _ROLES:
            raise TypeError(f"a turn is from {turn['from']!r}, and has to be from one of {', '.join(_ROLES)}")
        turns += [turn] if "role" in turn else _message(_ROLES[turn["from"]], turn["value"], needed=True)
    return {"messages": turns}


def _message(role: str, text: Any, *, needed: bool = False) -> Messages:
    """Return a message, or none without text. Raises `TypeError` for other values, and for a missing text that is `needed`."""
    if not isinstance(text, str if needed else str | None):
        raise TypeError(f"what the {role} says is {type(text).__name__}, not text")
    return [{"role": role, "content": text}] if text or needed else []


FORMATS = {
    "text": RowFormat(("text",), holds="text"),
    "chat": RowFormat(("messages",), identifying_column="messages"),
    "sharegpt": RowFormat(("conversations",), ("system",), _sharegpt, identifying_column="conversations"),
    "alpaca": RowFormat(("instruction", "output"), ("input", "system"), _alpaca, identifying_column="instruction"),
    "pairs": RowFormat(("prompt", "completion"), holds="either", identifying_column="completion"),
    "labels": RowFormat(("text",), holds="text", label="label"),
    "pictures": RowFormat(holds="pictures"),
}
FOR_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that any row of messages may have for its chat template."""
_NAMES = dict.fromkeys(name for row in FORMATS.values() for name in (*row.needed, *row.optional, row.label))
COLUMNS = (*(name for name in _NAMES if name not in ("text", None)), *FOR_TEMPLATES)
"""Columns that may have other names in files (`data.columns`); the text column has its own key."""


def format_of(columns: Collection[str]) -> str:
    """Return the `data.format` whose identifying column is among `columns`, else text."""
    return next((name for name, each in FORMATS.items() if each.identifying_column in columns), "text")
