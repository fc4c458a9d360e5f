"""Tokenization of rows (`encode_rows`), rendered to text (`Renderer`) in which the characters of answers become targets.

A template marks answers by `{% generation %}`; in other templates, an answer is the text that a turn of the assistant appends,
provided that the text before it, and the text with the turn, are prefixes of the whole. A template that breaks this is refused."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers.utils.chat_template_utils import render_jinja_template

from zeromesh.environment import export
from zeromesh.errors import DataError, errors_as, library_errors, summary
from zeromesh.trainer.config.sections.formats import FOR_TEMPLATES, Messages
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.text_sources import Row, TextSource
from zeromesh.trainer.data.tokenizer import Encoded, TokenArray, Tokenizer, joined_text, readable, require_bounded

_ROWS_AT_ONCE, _CHARACTERS_AT_ONCE = 256, 4 << 20
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ENDING_SHARE = 0.9  # of answers, which have to end with the token that `Renderer.answer_end_token` returns
Spans = list[tuple[int, int]]  # of characters, `[begin, end)`


class RenderedRow(NamedTuple):
    """The rendered text of a row, and the character spans `[begin, end)` of the answers."""

    row: Row
    text: str
    answers: tuple[tuple[int, int], ...]
    plain: bool  # True for text that no chat template rendered, to which prefix and end-of-text tokens are still added.
    label: str | None = None


class EncodedRow(NamedTuple):
    """The token ids of a row, int `[tokens]`, and their target mask, bool `[tokens]`. `split`: a token is partly an answer."""

    key: str
    text_bytes: int
    ids: TokenArray
    targets: NDArray[np.bool_]
    split: bool
    label: str | None


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renderer of the rows of a format to text. `template` is Jinja text, a name that the tokenizer knows, or None."""

    tokenizer: Tokenizer
    section: DataSection
    template: str | None

    @property
    def columns(self) -> dict[str, str]:
        """The names of columns in the files, by their names in the format, where the configuration sets others."""
        return {**self.section.columns, "text": self.section.text_field}

    def _named(self, *names: str) -> list[str]:
        return [self.columns.get(name, name) for name in names]

    @property
    def needed(self) -> list[str]:
        """The columns that each row has, by their names in the files."""
        form = self.section.rows
        return self._named(*form.needed, *((form.label,) if form.label else ()))

    def rows(self, source: TextSource, skipped: list[str]) -> Iterator[Row]:
        """Yield the rows of a source, as `TextSource.rows` does; for formats of documents, each text file is a row."""
        form = self.section.rows
        optional = (*form.optional, *(FOR_TEMPLATES if form.has_answers else ()))
        return source.rows(self.needed, self._named(*optional), skipped, whole=form.is_joined)

    def _parts(self, row: Row) -> Mapping[str, Any]:
        if (form := self.section.rows).parts is None:
            return {name: row.values[name] for name in self._named(*form.needed)}
        names = (*form.needed, *form.optional)
        with library_errors(before=f"{row.where} is no row of data.format {self.section.format}: ", kind=DataError):
            return form.parts({name: row.values.get(own) for name, own in zip(names, self._named(*names), strict=True)})

    def render(self, row: Row) -> RenderedRow:
        """Render a row. Raises `DataError` for a row that does not fit its format, and for unusable templates."""
        given = self._parts(row)
        values, form, answering = list(given.values()), self.section.rows, self.section.loss_on == "answers"
        if form.label is not None:
            (name,), (column,) = given, self._named(form.label)
            label = row.values[column]
            if not isinstance(values[0], str) or not isinstance(label, str | int):
                kinds = f"{name!r} is {type(values[0]).__name__} and {column!r} {type(label).__name__}"
                cure = "the name or number of its class (data.text_field, data.columns: {label: ...})"
                raise DataError(f"{row.where}: {kinds}; a row has text and {cure}")
            return RenderedRow(row, values[0], (), False, str(label))
        if form.holds == "text" and not isinstance(values[0], str):
            (name,), kind = given, type(values[0]).__name__
            raise DataError(f"{row.where}: field {name!r} is {kind}, not text; set data.text_field or remove the row")
        if plain := form.holds != "messages" and all(isinstance(value, str) for value in values):
            text = "".join(values)
            answers = [(len(text) - len(values[-1]), len(text))]
        else:
            # Other types than text come first, so that the error is about them and not about text beside a list.
            names = sorted(given, key=lambda name: isinstance(given[name], str))
            turns = {name: self._messages(row, name, given[name]) for name in names}
            whole = [message for name in given for message in turns[name]]
            marked = len(given) == 1 and answering and _GENERATION.search(self._template(row)[0]) is not None
            text, answers = self._apply(row, whole, marked=marked)
            if len(given) > 1:
                answers = [self._added(row, text, whole, len(whole) - len(turns[list(given)[-1]]), len(whole))]
            elif answering and not marked:
                answered = [number for number, message in enumerate(whole) if message["role"] == "assistant"]
                answers = [self._added(row, text, whole, number, number + 1) for number in answered]
        return RenderedRow(row, text, tuple(answers) if answering else ((0, len(text)),), plain)

    def __getitems__(self, rows: Sequence[Row]) -> list[EncodedRow] | str:
        """Encode rows in a `DataLoader` worker, whose indices are rows; a data error is returned as its message."""
        try:
            return list(_encode([self.render(row) for row in rows], self))
        except DataError as error:
            return str(error)

    def answer_end_token(self, rows: Iterable[Row]) -> int | None:
        """Return the token that ends more than 90 % of the answers of the rows, such as <|im_end|>, or None."""
        found: Counter[int] = Counter()
        count = 0
        answering = replace(self, section=self.section.model_copy(update={"loss_on": "answers"}))
        for row in rows:
            if (rendered := answering.render(row)).plain:
                return self.tokenizer.end_of_text
            turns = [each for value in self._parts(row).values() for each in value if each.get("role") == "assistant"]
            for (begin, end), turn in zip(rendered.answers[::-1], turns[::-1], strict=False):
                if not (content := str(joined_text(turn.get("content")) or "").strip()):
                    continue
                # A template closes a turn with one token (white space aside), or the content ends with a special one.
                behind = rendered.text[begin:end].rpartition(content)[2].strip()
                ends = not behind and content.endswith(tuple(map(str, self.tokenizer.special_tokens.values())))
                (closing, _), (inner, _) = self.tokenizer.encode([behind, content])
                found.update(closing.tolist() if len(closing) == 1 else inner[-1:].tolist() if ends else [])
                count += 1
        token, times = max(found.items(), key=itemgetter(1), default=(None, 0))
        return token if times > _ENDING_SHARE * count else None

    def _messages(self, row: Row, name: str, value: Any) -> Messages:
        if not isinstance(value, list) or not value or not all(isinstance(each, Mapping) for each in value):
            kind = "an empty list" if value == [] else type(value).__name__
            rest = ", as the other column is" if self.section.rows.holds == "either" else ""
            cure = f"it should be {'text, or ' if rest else ''}a list of messages{rest} ({{role: ..., content: ...}})"
            raise DataError(f"{row.where}: field {name!r} is {kind}; {cure}")
        if bare := [each for each in value if not isinstance(each.get("role"), str)]:
            why = f"{row.where}: field {name!r} has a message without role, only {', '.join(map(repr, bare[0]))}"
            raise DataError(f"{why}; messages are {{role: system, user, assistant or tool, content: text}}")
        with errors_as(DataError, f"{row.where}: field {name!r}: ", DataError):
            return readable([_without_null(each) for each in value], lambda turns: self._apply(row, turns)[0])

    def _template(self, row: Row) -> tuple[str, Any]:
        """Return the chat template for a row, and the row's tools or None."""
        (name,) = self._named("tools")
        tools = row.values.get(name)
        with library_errors(before=f"{row.where}: field {name!r} is text, and no JSON: ", kind=DataError):
            tools = _without_null(json.loads(tools) if isinstance(tools, str) and tools else tools) or None
        if (template := self.tokenizer.template(self.template, tools)) is None:
            cure = "or to a file that holds one (chat_template.jinja of a model that was trained on such conversations)"
            raise DataError(f"data.tokenizer has no chat template; set data.chat_template to a Jinja template, {cure}")
        return template, tools

    def _apply(self, row: Row, messages: Messages, *, marked: bool = False, prompts: bool = False) -> tuple[str, Spans]:
        """Render messages; return the text and, if `marked`, its {% generation %} spans. `prompts` adds the generation prompt."""
        more = row.values.get(*self._named("chat_template_kwargs")) or {}
        keys = {**self.tokenizer.special_tokens, **_without_null(more)}
        template, tools = self._template(row)
        render = partial(render_jinja_template, chat_template=template, **keys)
        require_bounded(template, lambda each, tools: render([each], tools=tools), messages)
        wanted = {"return_assistant_tokens_mask": marked, "add_generation_prompt": prompts}
        with library_errors(before=f"{row.where}: the chat template refuses it: ", kind=DataError):
            texts, answers = render([messages], tools=tools, **wanted)
        return texts[0], [tuple(span) for span in answers[0]] if marked else []

    def _added(self, row: Row, text: str, messages: Messages, begin: int, end: int) -> tuple[int, int]:
        """Return the span of characters that `messages[begin:end]` add to `text`, the rendering of all messages."""
        before, _ = self._apply(row, messages[:begin], prompts=True)
        through = text if end == len(messages) else self._apply(row, messages[:end])[0]
        if text.startswith(through) and through.startswith(before):
            return len(before), len(through)
        why = f"{row.where}: the chat template writes the messages before an answer otherwise when the answer follows"
        cure = "put {% generation %} and {% endgeneration %} around the assistant's turns in a copy of it (data.chat_template)"
        raise DataError(f"{why}, so where the answer begins and ends cannot be told; {cure}, or set data.loss_on: all")


def encode_rows(rows: Iterable[Row], renderer: Renderer, processes: int = 0) -> Iterator[EncodedRow]:
    """Yield the tokens of each row, in order, made by `processes` processes, or this one for 0. Raises `DataError` as `render`."""
    loader: DataLoader[Any] = DataLoader(
        renderer,  # type: ignore[arg-type]
        batch_sampler=_batches(rows),
        num_workers=processes,
        collate_fn=lambda found: found,
        # Each process has a core, and the tokenizer's own threads would compete for all of them.
        worker_init_fn=lambda _: export({"TOKENIZERS_PARALLELISM": "false"}),
        generator=torch.Generator(),  # without it, torch draws from the user's generator
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
    tokenizer, limit = renderer.tokenizer, renderer.section.sequence_length
    texts = [row.text for row in batch]
    encoded: list[Encoded]
    if renderer.section.rows.label is not None:
        encoded = [(np.asarray(tokenizer.encode_prompt(text, limit), np.int64), None) for text in texts]
    else:
        encoded = tokenizer.encode(texts, offsets=any(row.answers != ((0, len(row.text)),) for row in batch))
    prefix_ids = np.asarray(tokenizer.prefix_ids, np.int64)
    for row, (ids, offsets) in zip(batch, encoded, strict=True):
        text_bytes = len(row.text.encode("utf-8", errors="replace"))
        targets, inside = _targets(row, ids, offsets, tokenizer)
        if row.plain:
            ids = np.concatenate([prefix_ids.astype(ids.dtype), ids, np.asarray([tokenizer.end_of_text], ids.dtype)])
            # The end-of-text token is a target, and the prefix tokens are not.
            targets = np.concatenate([np.zeros(len(prefix_ids), np.bool_), targets, [True]])
        yield EncodedRow(row.row.key, text_bytes, ids, targets, inside, row.label)


def _targets(row: RenderedRow, ids: TokenArray, offsets: TokenArray | None, tokenizer: Tokenizer) -> tuple[NDArray[np.bool_], bool]:
    """Return the target mask, and True if an answer begins or ends within a token, by the tokens' offsets. Failing that, the text
    is cut at the answers' ends, if its pieces encoded one by one give the tokens of the whole text."""
    if row.answers in ((), ((0, len(row.text)),)):
        return np.full(len(ids), bool(row.answers)), False
    targets, inside = np.zeros(len(ids), np.bool_), offsets is None
    if offsets is not None:
        # Some tokenizers exclude white space from a token's offsets, so a token begins where the previous one ends. A token with an
        # empty span is a further piece of the previous character.
        ends = np.maximum.accumulate(offsets[:, 1])
        starts = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]]))
        empty = starts == ends
        for begin, end in row.answers:
            targets |= (starts >= begin) & (ends <= end) & (~empty | (starts > begin))
            inside |= bool(((starts < begin) & (ends > begin) | (starts < end) & (ends > end)).any())
    if not inside:
        return targets, False
    cuts = sorted({0, len(row.text), *(cut for answer in row.answers for cut in answer)})
    pieces = [piece for piece, _ in tokenizer.encode([row.text[begin:end] for begin, end in pairwise(cuts)])]
    if np.array_equal(np.concatenate([*pieces, []]), ids):
        answered = [any(begin <= cut < end for begin, end in row.answers) for cut in cuts[:-1]]
        sizes = np.asarray([len(piece) for piece in pieces], np.int64)
        return np.repeat(np.asarray(answered, np.bool_), sizes), False
    if offsets is None:
        why = "a token has a part of an answer and of what is beside it, and the tokenizer does not say where its tokens lie"
        raise DataError(f"{row.row.where}: {why}; use a fast tokenizer (with tokenizer.json), or set data.loss_on: all")
    return targets, True


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list | tuple) else value
