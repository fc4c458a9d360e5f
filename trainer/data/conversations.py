"""Rows of conversations, or of prompts and completions, as tokens, and which of them are targets of the loss.

    row -> text and the characters of its answers (`Renderer`) -> tokens and targets (`encode_rows`)

The text of a conversation is what its chat template makes of it. Where the answers lie in it, the template says itself by
`{% generation %}`; of other templates it is what each turn of the assistant adds to the text before it, where that text, and the
one with the turn, are beginnings of the whole. A template for which they are not is refused.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers.utils.chat_template_utils import render_jinja_template

from zeromesh.environment import export
from zeromesh.errors import DataError, summary
from zeromesh.trainer.data.text_sources import Row, read_text
from zeromesh.trainer.data.tokenizer import TEMPLATE_ERRORS, TokenArray, Tokenizer, require_bounded

_ROWS_AT_ONCE = 256
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NEARLY = 0.9
"""Part of all answers that a token has to end."""
_OPTIONAL = ("tools", "chat_template_kwargs")

Messages = list[dict[str, Any]]


_ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant")
"""By the names of ShareGPT."""


def _alpaca(row: Mapping[str, Any]) -> Messages:
    """An instruction, which may have an input, and its output."""
    asked = [*_said("user", row["instruction"], needed=True), *_said("user", row["input"])]
    question = _said("user", "\n\n".join(each["content"] for each in asked))
    return [*_said("system", row["system"]), *question, *_said("assistant", row["output"], needed=True)]


def _sharegpt(row: Mapping[str, Any]) -> Messages:
    """Turns with `from` and `value`."""
    turns = [_said(_ROLES[turn["from"]], turn["value"], needed=True) for turn in row["conversations"]]
    return [*_said("system", row["system"]), *chain(*turns)]


def _said(role: str, text: Any, *, needed: bool = False) -> Messages:
    """A message; none where there is no text. Raises `TypeError` for what is no text, and for none where it is `needed`."""
    if not isinstance(text, str if needed else str | None):
        raise TypeError(f"what the {role} says is {type(text).__name__}, not text")
    return [{"role": role, "content": text}] if text or needed else []


class RowFormat(NamedTuple):
    """The columns of rows of a `data.format`, and what makes messages of them; None: they are messages, or text."""

    wanted: tuple[str, ...]
    optional: tuple[str, ...] = ()
    messages: Callable[[Mapping[str, Any]], Messages] | None = None


FORMATS = {
    "chat": RowFormat(("messages",)),
    "pairs": RowFormat(("prompt", "completion")),
    "alpaca": RowFormat(("instruction", "output"), ("input", "system"), _alpaca),
    "sharegpt": RowFormat(("conversations",), ("system",), _sharegpt),
}


class RenderedRow(NamedTuple):
    """The text of a row, and the first and last (exclusive) character of each answer in it."""

    row: Row
    text: str
    answers: tuple[tuple[int, int], ...]
    plain: bool
    """True if the text was not made by a template: then it has neither a token that begins it nor one that ends it."""


class EncodedRow(NamedTuple):
    """The ids of a row, int32 `[tokens]`, which of them are targets, bool `[tokens]`, and whether some answer begins or ends inside
    of a token. Such a token is no target."""

    key: str
    text_bytes: int
    ids: TokenArray
    targets: NDArray[np.bool_]
    inside: bool


@dataclass(frozen=True, slots=True)
class Renderer:
    """Makes text of rows. `columns` are their names in the files, and `template` is text, a name that the tokenizer knows, or None.

    `answers`: False: all that is in a row is an answer.
    """

    tokenizer: Tokenizer
    form: str
    columns: Mapping[str, str]
    template: str | None
    answers: bool

    @property
    def wanted(self) -> list[str]:
        """The columns that each row must have."""
        return [self._column(name) for name in FORMATS[self.form].wanted]

    @property
    def optional(self) -> list[str]:
        """The columns that a row may have."""
        return [self._column(name) for name in (*FORMATS[self.form].optional, *_OPTIONAL)]

    def _turns(self, row: Row) -> dict[str, Any]:
        """The messages of a row, or its prompt and completion, by their columns."""
        made = FORMATS[self.form].messages
        if made is None:
            return {name: row.values[name] for name in self.wanted}
        names = (*FORMATS[self.form].wanted, *FORMATS[self.form].optional)
        try:
            return {"messages": made({name: row.values.get(self._column(name)) for name in names})}
        except (TypeError, AttributeError, KeyError) as error:
            raise DataError(f"{row.where} is no row of data.format {self.form}: {summary(error)}") from error

    def render(self, row: Row) -> RenderedRow:
        """Return the text of a row. Raises `DataError` for one that is not as its format asks, and for templates, as above."""
        given = self._turns(row)
        values = list(given.values())
        if all(isinstance(value, str) for value in values) and self.form == "pairs":
            prompt, completion = values
            return self._rendered(row, prompt + completion, [(len(prompt), len(prompt + completion))], plain=True)
        # What is neither text nor a list is wrong by itself, and is looked at before text that is wrong only beside a list.
        names = sorted(given, key=lambda name: isinstance(given[name], str))
        turns = {name: self._messages(row, name, given[name]) for name in names}
        whole = [message for name in given for message in turns[name]]
        if self.form == "pairs":
            text, _ = self._apply(row, whole)
            return self._rendered(row, text, [self._added(row, text, whole, len(turns[self.wanted[0]]), len(whole))])
        marked = self.answers and _GENERATION.search(self._template(row)) is not None
        text, answers = self._apply(row, whole, marked=marked)
        if self.answers and not marked:
            said = [number for number, message in enumerate(whole) if message["role"] == "assistant"]
            answers = [self._added(row, text, whole, number, number + 1) for number in said]
        return self._rendered(row, text, answers)

    def ending(self, rows: Iterable[Row]) -> int | None:
        """The token that ends nearly all answers of some rows, such as <|im_end|>; None where there is none."""
        found: Counter[int] = Counter()
        count = 0
        for row in rows:
            rendered = replace(self, answers=True).render(row)
            if rendered.plain:
                return self.tokenizer.end_of_text
            turns = [each for value in self._turns(row).values() for each in value if each.get("role") == "assistant"]
            for (begin, end), turn in zip(rendered.answers[::-1], turns[::-1], strict=False):
                content = str(turn.get("content") or "").strip()
                if not content:
                    continue
                # What the template writes behind it is one token but for white space, or else the turn ends with a special one.
                behind = rendered.text[begin:end].rpartition(content)[2].strip()
                ends = not behind and content.endswith(tuple(map(str, self.tokenizer.special_tokens.values())))
                own, said = self.tokenizer.encode([behind, content])
                found.update(own.tolist() if len(own) == 1 else said[-1:].tolist() if ends else [])
                count += 1
        token, times = max(found.items(), key=itemgetter(1), default=(None, 0))
        return token if times > _NEARLY * count else None

    def _rendered(self, row: Row, text: str, answers: Sequence[tuple[int, int]], *, plain: bool = False) -> RenderedRow:
        return RenderedRow(row, text, tuple(answers) if self.answers else ((0, len(text)),), plain)

    def _column(self, name: str) -> str:
        return self.columns.get(name, name)

    def _messages(self, row: Row, name: str, value: Any) -> Messages:
        """The messages of a column, without the keys that only other rows have: files of columns hold null for them."""
        if not isinstance(value, list) or not value or not all(isinstance(each, Mapping) for each in value):
            kinds = (
                "a list of messages" if self.form != "pairs" else "text, or a list of messages, as the other column is"
            )
            given = "an empty list" if value == [] else type(value).__name__
            raise DataError(
                f"{row.where}: field {name!r} is {given}; it should be {kinds} ({{role: ..., content: ...}})"
            )
        for message in value:
            if not isinstance(message.get("role"), str):
                raise DataError(
                    f"{row.where}: field {name!r} has a message without role, only {', '.join(map(repr, message))}; messages are "
                    "{role: system, user, assistant or tool, content: text}"
                )
        return [_without_null(message) for message in value]

    def _tools(self, row: Row) -> Any:
        """The row's tools, JSON schemas, which may be one text; None where it has none."""
        tools = row.values.get(self._column("tools"))
        try:
            return _without_null(json.loads(tools) if isinstance(tools, str) and tools else tools) or None
        except ValueError as error:
            raise DataError(f"{row.where}: field {self._column('tools')!r} is text, and no JSON: {error}") from error

    def _template(self, row: Row) -> str:
        template = self.tokenizer.template(self.template, self._tools(row))
        if template is None:
            raise DataError(
                "data.tokenizer has no chat template; set data.chat_template to a Jinja template, or to a file that holds one "
                "(chat_template.jinja of a model that was trained on such conversations)"
            )
        return template

    def _apply(
        self, row: Row, messages: Messages, *, marked: bool = False, asking: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and the characters that the template marks; `asking`: up to where the assistant is to answer."""
        more = row.values.get(self._column("chat_template_kwargs")) or {}
        keys = {**self.tokenizer.special_tokens, **_without_null(more)}
        template = self._template(row)
        render = partial(render_jinja_template, chat_template=template, **keys)
        require_bounded(template, lambda each, tools: render([each], tools=tools), messages)
        try:
            texts, answers = render_jinja_template(
                [messages],
                tools=self._tools(row),
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=asking,
                **keys,
            )
        except TEMPLATE_ERRORS as error:
            raise DataError(f"{row.where}: the chat template refuses it: {summary(error)}") from error
        return texts[0], [tuple(span) for span in answers[0]] if marked else []

    def _added(self, row: Row, text: str, messages: Messages, begin: int, end: int) -> tuple[int, int]:
        """The characters of `text`, that of all messages, which those from `begin` to `end` add. Raises `DataError`."""
        asked, _ = self._apply(row, messages[:begin], asking=True)
        told = text if end == len(messages) else self._apply(row, messages[:end])[0]
        if text.startswith(told) and told.startswith(asked):
            return len(asked), len(told)
        raise DataError(
            f"{row.where}: the chat template writes the messages before an answer otherwise when the answer follows, so where the "
            "answer begins and ends cannot be told; put {% generation %} and {% endgeneration %} around the assistant's turns in "
            "a copy of the template (data.chat_template), or set data.loss_on: all"
        )


def read_template(given: str | None) -> str | None:
    """The chat template that `data.chat_template` gives: the text of a file, or the value itself. Raises `DataError`.

    A value with neither a line break nor a brace is a path or a name that the tokenizer knows.
    """
    if given is None or "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if path.is_file():
        return read_text(path, cure="save it as UTF-8")
    if "/" in given or path.suffix:
        raise DataError(f"data.chat_template: no file {given!r}; give a file, or the template itself")
    return given


def encode_rows(rows: Iterable[Row], renderer: Renderer, processes: int = 0) -> Iterator[EncodedRow]:
    """Yield the tokens of each row, in order; `processes` of its own make them, or this one.

    Raises `DataError` for a row or template that cannot be used, and where a process ends before its time.
    """
    batches = _batches(rows)
    if not processes:
        for batch in batches:
            yield from _encode([renderer.render(row) for row in batch], renderer.tokenizer)
        return
    loader: DataLoader[Any] = DataLoader(
        _Encoder(renderer),  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=processes,
        collate_fn=_as_it_is,
        worker_init_fn=_begin_process,
    )
    try:
        for found in loader:
            if isinstance(found, str):
                raise DataError(found)
            yield from found
    except RuntimeError as error:
        raise DataError(f"a process that tokenizes has ended ({summary(error)}); is memory short?") from error


class _Encoder:
    """Rows as what a process of a `DataLoader` reads: its indices are the rows themselves."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __getitems__(self, rows: Sequence[Row]) -> list[EncodedRow] | str:
        """The tokens of some rows, or what is wrong with one of them."""
        try:
            return list(_encode([self._renderer.render(row) for row in rows], self._renderer.tokenizer))
        except DataError as error:
            return str(error)


def _begin_process(number: int) -> None:
    # Each process has a core, and the tokenizer's own threads would compete for all of them.
    export({"TOKENIZERS_PARALLELISM": "false"})


def _as_it_is(found: Any) -> Any:
    return found


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rest = iter(rows)
    while batch := list(islice(rest, _ROWS_AT_ONCE)):
        yield batch


def _encode(batch: Sequence[RenderedRow], tokenizer: Tokenizer) -> Iterator[EncodedRow]:
    beginning = np.asarray(tokenizer.beginning, dtype=np.int64)
    encoded = tokenizer.encode_places([row.text for row in batch])
    for row, (ids, places) in zip(batch, encoded, strict=True):
        targets, inside = _targets(row, ids, places, tokenizer)
        if row.plain:
            ids = np.concatenate([beginning, ids, [tokenizer.end_of_text]])
            # What ends a text is learnt, and what begins it is given.
            targets = np.concatenate([np.zeros(len(beginning), np.bool_), targets, [True]])
        text_bytes = len(row.text.encode("utf-8", errors="replace"))
        yield EncodedRow(row.row.key, text_bytes, ids.astype(np.int32), targets, inside)


def _targets(
    row: RenderedRow, ids: TokenArray, places: TokenArray | None, tokenizer: Tokenizer
) -> tuple[NDArray[np.bool_], bool]:
    """Which tokens are of an answer, and whether some are only in part. Raises `DataError`.

    The places of the tokens say so, or the tokens of the pieces of the text, cut where answers begin and end, where these are
    together the tokens of the whole text.
    """
    if row.answers == ((0, len(row.text)),):
        return np.ones(len(ids), np.bool_), False
    targets, inside = (np.zeros(len(ids), np.bool_), True) if places is None else _by_places(places, row.answers)
    if not inside:
        return targets, False
    cuts = sorted({0, len(row.text), *(cut for answer in row.answers for cut in answer)})
    pieces = tokenizer.encode([row.text[begin:end] for begin, end in pairwise(cuts)])
    if np.array_equal(np.concatenate([*pieces, []]), ids):
        answered = [any(begin <= cut < end for begin, end in row.answers) for cut in cuts[:-1]]
        sizes = np.asarray([len(piece) for piece in pieces], np.int64)
        return np.repeat(np.asarray(answered, np.bool_), sizes), False
    if places is None:
        raise DataError(
            f"{row.row.where}: a token has a part of an answer and of what is beside it, and the tokenizer does not say where its "
            "tokens lie; use a fast tokenizer (with tokenizer.json), or set data.loss_on: all"
        )
    return targets, True


def _by_places(places: TokenArray, answers: Sequence[tuple[int, int]]) -> tuple[NDArray[np.bool_], bool]:
    """Which tokens lie in an answer with all of their characters, and whether some lie in it with a part of them.

    Some tokenizers leave white space out of the places of the token that holds it, so a token begins where the one before it ends.
    A token without characters of its own is one of several of the character before it.
    """
    ends = np.maximum.accumulate(places[:, 1])
    starts = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]]))
    empty = starts == ends
    targets, inside = np.zeros(len(places), np.bool_), False
    for begin, end in answers:
        targets |= (starts >= begin) & (ends <= end) & (~empty | (starts > begin))
        inside |= bool(((starts < begin) & (ends > begin) | (starts < end) & (ends > end)).any())
    return targets, inside


def _without_null(value: Any) -> Any:
    """A value without the keys that hold null, at any depth."""
    if isinstance(value, Mapping):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list | tuple) else value
