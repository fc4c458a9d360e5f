"""Rows of text, of conversations, or of prompts and completions, as tokens, and which of them are targets of the loss.

    row -> text and the characters of its answers (`Renderer`) -> tokens and targets (`encode_rows`)

The text of a conversation is what its chat template makes of it. Where the answers lie in it, the template says itself by
`{% generation %}`; of other templates it is what each turn of the assistant adds to the text before it, where that text, and the
one with the turn, are beginnings of the whole. A template for which they are not is refused.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers.utils.chat_template_utils import render_jinja_template

from zeromesh.environment import export
from zeromesh.errors import DataError, summary
from zeromesh.trainer.config.sections.formats import FOR_TEMPLATES, FORMATS, Messages, RowFormat
from zeromesh.trainer.data.text_sources import Row, TextSource, read_text
from zeromesh.trainer.data.tokenizer import TEMPLATE_ERRORS, TokenArray, Tokenizer, require_bounded

_ROWS_AT_ONCE, _CHARACTERS_AT_ONCE = 256, 4 << 20
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NEARLY = 0.9
"""Part of all answers that a token has to end."""


class RenderedRow(NamedTuple):
    """The text of a row, and the first and last (exclusive) character of each answer in it."""

    row: Row
    text: str
    answers: tuple[tuple[int, int], ...]
    plain: bool
    """True if the text was not made by a template: then it has neither a token that begins it nor one that ends it."""
    label: str | None = None
    """The class of the text, where that is what is learnt."""


class EncodedRow(NamedTuple):
    """The ids of a row, `[tokens]`, which of them are targets, bool `[tokens]`, and whether some answer begins or ends inside of a
    token. Such a token is no target."""

    key: str
    text_bytes: int
    ids: TokenArray
    targets: NDArray[np.bool_]
    inside: bool
    label: str | None


@dataclass(frozen=True, slots=True)
class Renderer:
    """Makes text of the rows of a format. `columns` are their names in the files, and `template` is text, a name that the tokenizer
    knows, or None.

    `answers`: False: all that is in a row is an answer. `limit`: tokens to which labelled text is cut.
    """

    tokenizer: Tokenizer
    form: str
    columns: Mapping[str, str]
    template: str | None
    answers: bool
    limit: int

    @property
    def format(self) -> RowFormat:
        """The row of the table of formats."""
        return FORMATS[self.form]

    def named(self, *names: str) -> list[str]:
        """The names in the files of some columns."""
        return [self.columns.get(name, name) for name in names]

    def rows(self, source: TextSource, skipped: list[str]) -> Iterator[Row]:
        """Yield the rows of a source, as `TextSource.rows` does; where they are documents, each file of text is one."""
        form = self.format
        needed, label = form.needed, (form.label,) if form.label else ()
        optional = (*form.optional, *(FOR_TEMPLATES if form.answers else ()))
        return source.rows(self.named(*needed, *label), self.named(*optional), skipped, whole=form.joined)

    def _parts(self, row: Row) -> Mapping[str, Any]:
        """The contents of a row, by the columns that they come from: text, or messages."""
        form = self.format
        if form.parts is None:
            return {name: row.values[name] for name in self.named(*form.needed)}
        names = (*form.needed, *form.optional)
        try:
            return form.parts({name: row.values.get(own) for name, own in zip(names, self.named(*names), strict=True)})
        except (TypeError, AttributeError, KeyError) as error:
            raise DataError(f"{row.where} is no row of data.format {self.form}: {summary(error)}") from error

    def render(self, row: Row) -> RenderedRow:
        """Return the text of a row. Raises `DataError` for one that is not as its format asks, and for templates, as above."""
        given, label = self._parts(row), None
        values = list(given.values())
        if self.format.label is not None:
            (name,), (column,) = given, self.named(self.format.label)
            label = row.values[column]
            if not isinstance(values[0], str) or not isinstance(label, str | int):
                raise DataError(
                    f"{row.where}: {name!r} is {type(values[0]).__name__} and {column!r} {type(label).__name__}; a row has text "
                    "and the name or number of its class (data.text_field, data.columns: {label: ...})"
                )
        elif self.format.holds == "text" and not isinstance(values[0], str):
            (name,), kind = given, type(values[0]).__name__
            raise DataError(f"{row.where}: field {name!r} is {kind}, not text; set data.text_field or remove the row")
        plain = self.format.holds != "messages" and all(isinstance(value, str) for value in values)
        if plain:
            text = "".join(values)
            answers = [(len(text) - len(values[-1]), len(text))]
        else:
            text, answers = self._conversation(row, given)
        if label is not None:
            return RenderedRow(row, text, (), False, str(label))
        return RenderedRow(row, text, tuple(answers) if self.answers else ((0, len(text)),), plain)

    def _conversation(self, row: Row, given: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text that the template makes of messages, and the characters of the answers in it. Raises `DataError`."""
        # What is neither text nor a list is wrong by itself, and is looked at before text that is wrong only beside a list.
        names = sorted(given, key=lambda name: isinstance(given[name], str))
        turns = {name: self._messages(row, name, given[name]) for name in names}
        whole = [message for name in given for message in turns[name]]
        marked = len(given) == 1 and self.answers and _GENERATION.search(self._template(row)) is not None
        text, answers = self._apply(row, whole, marked=marked)
        if len(given) > 1:
            answers = [self._added(row, text, whole, len(whole) - len(turns[list(given)[-1]]), len(whole))]
        elif self.answers and not marked:
            said = [number for number, message in enumerate(whole) if message["role"] == "assistant"]
            answers = [self._added(row, text, whole, number, number + 1) for number in said]
        return text, answers

    def __getitems__(self, rows: Sequence[Row]) -> list[EncodedRow] | str:
        """What a process of a `DataLoader` makes, whose indices are rows: their tokens, or what is wrong with one of them."""
        try:
            return list(_encode([self.render(row) for row in rows], self))
        except DataError as error:
            return str(error)

    def ending(self, rows: Iterable[Row]) -> int | None:
        """The token that ends nearly all answers of some rows, such as <|im_end|>; None where there is none."""
        found: Counter[int] = Counter()
        count = 0
        for row in rows:
            rendered = replace(self, answers=True).render(row)
            if rendered.plain:
                return self.tokenizer.end_of_text
            turns = [each for value in self._parts(row).values() for each in value if each.get("role") == "assistant"]
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

    def _messages(self, row: Row, name: str, value: Any) -> Messages:
        """The messages of a column, without the keys that only other rows have: files of columns hold null for them."""
        if not isinstance(value, list) or not value or not all(isinstance(each, Mapping) for each in value):
            kind = "an empty list" if value == [] else type(value).__name__
            rest = ", as the other column is" if self.format.holds == "either" else ""
            raise DataError(
                f"{row.where}: field {name!r} is {kind}; it should be {'text, or ' if rest else ''}a list of messages{rest} "
                "({role: ..., content: ...})"
            )
        if bare := [each for each in value if not isinstance(each.get("role"), str)]:
            raise DataError(
                f"{row.where}: field {name!r} has a message without role, only {', '.join(map(repr, bare[0]))}; messages are "
                "{role: system, user, assistant or tool, content: text}"
            )
        return [_without_null(message) for message in value]

    def _tools(self, row: Row) -> Any:
        """The row's tools, JSON schemas, which may be one text; None where it has none."""
        (name,) = self.named("tools")
        tools = row.values.get(name)
        try:
            return _without_null(json.loads(tools) if isinstance(tools, str) and tools else tools) or None
        except ValueError as error:
            raise DataError(f"{row.where}: field {name!r} is text, and no JSON: {error}") from error

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
        more = row.values.get(*self.named("chat_template_kwargs")) or {}
        keys = {**self.tokenizer.special_tokens, **_without_null(more)}
        template = self._template(row)
        render = partial(render_jinja_template, chat_template=template, **keys)
        require_bounded(template, lambda each, tools: render([each], tools=tools), messages)
        try:
            wanted = {"return_assistant_tokens_mask": marked, "add_generation_prompt": asking}
            texts, answers = render([messages], tools=self._tools(row), **wanted)
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
    loader: DataLoader[Any] = DataLoader(
        renderer,  # type: ignore[arg-type]
        batch_sampler=_batches(rows),
        num_workers=processes,
        collate_fn=lambda found: found,
        worker_init_fn=_begin_process,
        generator=torch.Generator(),  # else a number would be drawn from the user's
    )
    try:
        for found in loader:
            if isinstance(found, str):
                raise DataError(found)
            yield from found
    except RuntimeError as error:
        if not processes:
            raise
        raise DataError(f"a process that tokenizes has ended ({summary(error)}); is memory short?") from error


def _begin_process(number: int) -> None:
    # Each process has a core, and the tokenizer's own threads would compete for all of them.
    export({"TOKENIZERS_PARALLELISM": "false"})


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += sum(len(value) for value in row.values.values() if isinstance(value, str))
        if len(batch) >= _ROWS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[RenderedRow], renderer: Renderer) -> Iterator[EncodedRow]:
    tokenizer = renderer.tokenizer
    texts = [row.text for row in batch]
    encoded: Iterable[tuple[TokenArray, TokenArray | None]]
    if renderer.format.label is not None:
        encoded = [(tokenizer.encode_whole(text, renderer.limit), None) for text in texts]
    elif all(row.answers == ((0, len(row.text)),) for row in batch):
        encoded = zip(tokenizer.encode(texts), repeat(None))
    else:
        encoded = tokenizer.encode_places(texts)
    beginning = np.asarray(tokenizer.beginning, np.int64)
    for row, (ids, places) in zip(batch, encoded, strict=True):
        text_bytes = len(row.text.encode("utf-8", errors="replace"))
        targets, inside = _targets(row, ids, places, tokenizer)
        if row.plain:
            ids = np.concatenate([beginning.astype(ids.dtype), ids, np.asarray([tokenizer.end_of_text], ids.dtype)])
            # What ends a text is learnt, and what begins it is given.
            targets = np.concatenate([np.zeros(len(beginning), np.bool_), targets, [True]])
        yield EncodedRow(row.row.key, text_bytes, ids, targets, inside, row.label)


def _targets(
    row: RenderedRow, ids: TokenArray, places: TokenArray | None, tokenizer: Tokenizer
) -> tuple[NDArray[np.bool_], bool]:
    """Which tokens are of an answer, and whether some are only in part. Raises `DataError`.

    The places of the tokens say so, or the tokens of the pieces of the text, cut where answers begin and end, where these are
    together the tokens of the whole text.
    """
    if row.answers in ((), ((0, len(row.text)),)):
        return np.full(len(ids), bool(row.answers)), False
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
