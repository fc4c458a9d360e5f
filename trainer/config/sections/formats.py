"""The formats of rows (`data.format`). A new one is a row of `FORMATS`, and a function that makes text or messages of columns."""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

Messages = list[dict[str, Any]]
Parts = dict[str, str | Messages]
"""The contents of a row by the columns that they come from: text, or messages. Of several, the last one is the answer."""

_ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant")
"""By the names of ShareGPT."""


class RowFormat(NamedTuple):
    """A format of rows: its columns, and what becomes of a row."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    parts: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Makes contents of columns, which are None where a row lacks them, and raises `TypeError` or `KeyError` for others than it can
    read; None: the needed columns are the contents."""
    holds: Literal["text", "messages", "either", "pictures"] = "messages"
    """The kind of these contents."""
    known_by: str | None = None
    """A column that only rows of this format have."""
    label: str | None = None
    """The column of a class, which is what is learnt, and not the next token."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.needed, *self.optional, *((self.label,) if self.label else ()))

    @property
    def joined(self) -> bool:
        """True if rows are documents that are joined and cut into sequences; else each is whole in one sequence."""
        return self.holds == "text" and self.label is None

    @property
    def answers(self) -> bool:
        """True if rows have answers, on which the loss may be, and may share a sequence."""
        return self.holds in ("messages", "either")


def _alpaca(row: Mapping[str, Any]) -> Parts:
    """An instruction, which may have an input, and its output."""
    asked = [*_said("user", row["instruction"], needed=True), *_said("user", row["input"])]
    question = _said("user", "\n\n".join(each["content"] for each in asked))
    turns = [*_said("system", row["system"]), *question, *_said("assistant", row["output"], needed=True)]
    return {"messages": turns}


def _sharegpt(row: Mapping[str, Any]) -> Parts:
    """Turns with `from` and `value`."""
    turns = [_said(_ROLES[turn["from"]], turn["value"], needed=True) for turn in row["conversations"]]
    return {"messages": [*_said("system", row["system"]), *chain(*turns)]}


def _said(role: str, text: Any, *, needed: bool = False) -> Messages:
    """A message; none where there is no text. Raises `TypeError` for what is no text, and for none where it is `needed`."""
    if not isinstance(text, str if needed else str | None):
        raise TypeError(f"what the {role} says is {type(text).__name__}, not text")
    return [{"role": role, "content": text}] if text or needed else []


FORMATS = {
    "text": RowFormat(("text",), holds="text"),
    "chat": RowFormat(("messages",), known_by="messages"),
    "sharegpt": RowFormat(("conversations",), ("system",), _sharegpt, known_by="conversations"),
    "alpaca": RowFormat(("instruction", "output"), ("input", "system"), _alpaca, known_by="instruction"),
    "pairs": RowFormat(("prompt", "completion"), holds="either", known_by="completion"),
    "labels": RowFormat(("text",), holds="text", label="label"),
    "pictures": RowFormat(holds="pictures"),
}
FOR_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that any row of messages may have, for its chat template."""
COLUMNS = (*dict.fromkeys(name for row in FORMATS.values() for name in row.columns if name != "text"), *FOR_TEMPLATES)
"""The columns that may have other names in files (`data.columns`); that of text has a key of its own."""


def format_of(columns: Collection[str]) -> str:
    """Return the `data.format` of rows by a column that they alone have; text where there is none."""
    return next((name for name, each in FORMATS.items() if each.known_by in columns), "text")
