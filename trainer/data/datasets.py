"""From the `data` section of a configuration to datasets that training and evaluation read.

    find_text -> documents -> held out or not -> token ids -> packed sequences
                 rows -> conversations.py ------^

Token ids are kept in a cache on disk, and mapped into memory (`token_cache.py`). Every rank does the same, and gets the same:
nothing here knows a rank. The order in which a run reads the sequences is that of `sampler.SampleOrder`, and of several datasets
that are mixed that of `sampler.MixedOrder`.
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeromesh.environment import available_cores
from zeromesh.errors import DataError, counted, some
from zeromesh.trainer.config.sections.training import EVAL, DataSection, MixturePart, paths_of
from zeromesh.trainer.data.conversations import Renderer, encode_rows, read_template
from zeromesh.trainer.data.packing import (
    ConversationDataset,
    MixedDataset,
    PackedDataset,
    byte_pair_entropy,
    encode_documents,
)
from zeromesh.trainer.data.text_sources import TextSource, find_text
from zeromesh.trainer.data.token_cache import StoredText, TextAmount, TokenCache, TokenWriter
from zeromesh.trainer.data.tokenizer import (
    BYTES,
    ByteTokenizer,
    PretrainedTokenizer,
    TokenArray,
    Tokenizer,
    load_tokenizer,
)
from zeromesh.trainer.formatting import Detail, human_bytes

_VERSION = 4
"""Version of how text becomes tokens here. Tokens that another version has cached are not read."""

_LARGE = 16 << 20
"""Bytes of files above which several processes make conversations into tokens."""
_MOST_PROCESSES = 32
_ASKED = 64
"""Rows that are looked at for what ends an answer."""

Sequences = PackedDataset | ConversationDataset
Evaluated = Sequences | Mapping[str, Sequences] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedData:
    """Datasets made of text."""

    train: Sequences | MixedDataset
    eval: Evaluated
    """The held-out sequences; for a mixture, those of its parts by their names; None where nothing is held out."""
    tokenizer: Tokenizer
    byte_pair_entropy: float | None
    """Nats per token of the training text; it is there for text and the byte tokenizer alone."""
    notes: tuple[str, ...]
    """Lines for the person who runs it."""
    endings: tuple[int, ...] = ()
    """The tokens that end answers, where there are any."""
    classes: tuple[str, ...] = ()
    """The names of the classes of labelled text."""


def load_datasets(
    section: DataSection,
    *,
    tokenizer: Tokenizer | None = None,
    cache: TokenCache | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> LoadedData:
    """Read, tokenise and pack what `section` names; a `tokenizer` replaces the section's.

    Text that `cache` has is not read again. `tell` is called every few documents, with a line about how far it is.

    Without `data.eval`, `data.eval_fraction` of the documents are held out, chosen by a hash of their names: the same ones for
    every seed and machine. Where that leaves less than a sequence (few documents), it is the last sequences instead.

    Raises:
        DataError: for a path, file, row, template or tokenizer that cannot be used, and for text of less than one sequence.
        ConfigError: for weights of a mixture that are too fine.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(section.tokenizer or BYTES)
    template = read_template(section.chat_template)
    if template is not None and isinstance(tokenizer, PretrainedTokenizer):
        tokenizer, template = tokenizer.with_template(template), None
    loader = _DatasetLoader(
        tokenizer=tokenizer,
        digest=tokenizer.digest(),
        template=template,
        separate=section.separates,
        masked=not section.separates and any(part.format != "text" for part in section.parts().values()),
        cache=cache or TokenCache(None),
        tell=tell,
    )
    if section.mixture is None:
        train: Sequences | MixedDataset
        evaluation: Evaluated
        train, evaluation, notes, entropy = loader.load(section, "data.train")
        if entropy is not None:
            line = f"byte-pair entropy of the training text: {entropy:.4f} nats per byte, the loss to beat"
            notes.append(Detail(line))
    else:
        train, evaluation, notes, entropy = loader.mix(section, section.mixture)
    return LoadedData(
        train=train,
        eval=evaluation,
        tokenizer=tokenizer,
        byte_pair_entropy=entropy,
        notes=tuple(notes),
        endings=tuple(loader.endings),
        classes=tuple(loader.classes),
    )


def is_held_out(key: str, fraction: float) -> bool:
    """Return True if the document named `key` belongs to the `fraction` that is held out: a function of both alone."""
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


class _Document(NamedTuple):
    """A document in tokens, with the bytes of its text; `targets` are those of a conversation."""

    key: str
    text_bytes: int
    ids: TokenArray
    targets: TokenArray | None
    label: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _DatasetLoader:
    """Makes datasets of sections: of the whole one, or of the parts of its mixture."""

    tokenizer: Tokenizer
    digest: str | None
    """None where the tokenizer cannot be recognised."""
    template: str | None
    """The chat template of a tokenizer that has none itself."""
    separate: bool
    masked: bool
    """Samples have an `attention_mask`: those of rows do that are not packed."""
    cache: TokenCache
    tell: Callable[[str], None]
    endings: set[int] = field(default_factory=set)
    """The tokens that end nearly all answers of what was loaded."""
    classes: list[str] = field(default_factory=list)
    """The classes of labelled text in the order of their numbers, as the first text that is loaded has them."""

    def load(self, section: DataSection, where: str) -> tuple[Sequences, Evaluated, list[str], float | None]:
        """Return the sequences to be trained on, those of `data.eval` or held out, notes, and the byte-pair entropy."""
        fraction = section.eval_fraction
        source = self.source(section, section.train, where)
        where = f"{where} {source.name!r}"
        eval_sources = self.eval_sources(section)
        text = self._read(section, source, 0.0 if eval_sources else fraction)
        kept, held = text.kept, text.held
        if section.format == "labels" and not self.classes:
            names = set(text.remarks["labels"])
            if len(names) == 1:  # Of one class, transformers makes a regression.
                raise DataError(f"{where} has no class but {names.pop()!r}; labels need two")
            self.classes.extend(
                sorted(names, key=int if all(re.fullmatch(r"\d{1,9}", each) for each in names) else str)
            )
        if section.format not in ("text", "labels"):
            renderer = self._renderer(section)
            with suppress(DataError):  # Where all tokens are learnt, the template may not tell which are answers.
                ending = renderer.ending(islice(source.rows(renderer.wanted, renderer.optional, []), _ASKED))
                self.endings.update([ending] if ending is not None else [])
        entropy, eval_notes = text.remarks["entropy"], list[str]()
        evaluation: Evaluated = None
        if eval_sources:
            evaluation, eval_notes = self.evaluation(section, eval_sources)
        elif _fills(section, held) and _fills(section, kept):
            evaluation, eval_note = self._pack(section, text, kept.tokens, held, f"{where}, held out")
            eval_notes = [eval_note]
        else:
            entropy = text.remarks["entropy of all"] if held.tokens else entropy
            kept = TextAmount(*map(sum, zip(kept, held, strict=True)))
        train, note = self._pack(section, text, 0, kept, where)
        if fraction and evaluation is None and len(train) < 2:
            note += "; too little to hold any out for evaluation"
        elif fraction and evaluation is None:
            train, evaluation = train.split_tail(fraction)
            few = f"the last {len(evaluation)} sequences are held out"
            eval_notes = [f"{where}: too few documents to hold out whole ones; {few}"]
        notes = [*source.notes, note, *eval_notes]
        skipped = text.remarks["skipped"]
        if skipped:
            kind = "text" if section.format == "text" else "rows"
            notes.append(
                f"{where}: left out {counted(len(skipped), 'file')} that are not {kind}, such as {skipped[0]!r}"
            )
        return train, evaluation, notes, entropy

    def mix(
        self, section: DataSection, parts: Mapping[str, MixturePart]
    ) -> tuple[MixedDataset, Evaluated, list[str], None]:
        """Return the same of a mixture, whose held-out sequences are those of its parts by their names."""
        sets: dict[str, Sequences] = {}
        held: dict[str, Any] = {}
        lines: list[str] = []
        eval_sources = self.eval_sources(section)
        own = {"eval_fraction": 0.0, "eval": None} if eval_sources else {}
        for name, part in section.parts().items():
            sets[name], evaluation, notes, _ = self.load(part.model_copy(update=own), f"data.mixture.{name}.train")
            lines += notes
            held |= {name: evaluation} if evaluation is not None else {}
        mixed = MixedDataset(list(sets.values()), [part.weight for part in parts.values()])
        shares = [f"{name} {weight / sum(mixed.weights):.1%}" for name, weight in zip(sets, mixed.weights, strict=True)]
        lines.append(f"data.mixture: {', '.join(shares)} of the sequences; {len(mixed):,} of them count as an epoch")
        chosen: Evaluated = held or None
        if eval_sources:
            chosen, notes = self.evaluation(section, eval_sources)
            lines += notes
        return mixed, chosen, lines, None

    def _renderer(self, section: DataSection) -> Renderer:
        columns = {str(name): own for name, own in section.columns.items()}
        return Renderer(self.tokenizer, section.format, columns, self.template, section.loss_on == "answers")

    def source(self, section: DataSection, given: Any, where: str) -> TextSource:
        """Find the text that is `given` under a key."""
        return find_text(paths_of(given), text_field=section.text_field, where=where, encoding=section.encoding)

    def eval_sources(self, section: DataSection) -> dict[str, TextSource]:
        """Find what `data.eval` names, by the key; nothing where that is null."""
        return {where: self.source(section, each, where) for where, each in section.evaluated().items()}

    def evaluation(self, section: DataSection, sources: Mapping[str, TextSource]) -> tuple[Evaluated, list[str]]:
        """Return the sequences of `data.eval`, or of its sets by their names, and notes."""
        found: dict[str, Sequences] = {}
        notes = []
        for where, source in sources.items():
            text = self._read(section, source, 0.0)
            name = where.removeprefix(EVAL).removeprefix(".")
            found[name], note = self._pack(section, text, 0, text.kept, f"{where} {source.name!r}")
            notes.append(note)
        return found.get("", found), notes

    def _read(self, section: DataSection, source: TextSource, fraction: float) -> StoredText:
        """The tokens of a source: of those documents that are kept, and of the `fraction` that is held out."""
        values: list[Any] = [_VERSION, self.digest, fraction, source.description()]
        renderer = None
        if section.format == "labels":
            values += [section.format, section.columns.get("label"), section.sequence_length]
        elif section.format != "text":
            renderer = self._renderer(section)
            values += [section.format, renderer.columns, self.template, renderer.answers, section.sequence_length]
        key = None
        if self.digest is not None:
            described = json.dumps(values).encode(errors="surrogateescape")
            key = hashlib.blake2b(described, digest_size=16).hexdigest()
        skipped: list[str] = []
        counts: Counter[str] = Counter()
        labels: tuple[list[Any], list[Any]] = ([], [])

        def write(kept: TokenWriter, held: TokenWriter) -> None:
            began, total = time.monotonic(), human_bytes(sum(file.path.stat().st_size for file in source.files))
            if section.format == "labels":
                documents = self._labelled(source, section, skipped, counts)
            elif renderer is None:
                documents = self._documents(source, skipped)
            else:
                documents = self._conversations(source, renderer, section.sequence_length, skipped, counts)
            for key, text_bytes, ids, targets, label in documents:
                apart = is_held_out(key, fraction)
                (held if apart else kept).append(ids, text_bytes=text_bytes, targets=targets)
                labels[apart].append(label)
                done = kept.amount.text_bytes + held.amount.text_bytes
                speed = done / max(time.monotonic() - began, 1e-3)
                self.tell(f"tokenizing {source.name}: {human_bytes(done)} of {total}, {human_bytes(speed)}/s")

        def remarks(tokens: TokenArray, count: int) -> dict[str, Any]:
            found: dict[str, Any] = {"skipped": skipped, "counts": counts}
            found |= {"labels": [*labels[0], *labels[1]]} if section.format == "labels" else {}
            for name, part in {"entropy": tokens[:count], "entropy of all": tokens}.items():
                counted = section.format == "text" and isinstance(self.tokenizer, ByteTokenizer) and part.size > 1
                found[name] = byte_pair_entropy(part) if counted else None
            return found

        return self.cache.get(key, self.tokenizer.vocab_size, write, remarks, marked=section.format != "text")

    def _documents(self, source: TextSource, skipped: list[str]) -> Iterator[_Document]:
        beginning, end = self.tokenizer.beginning, self.tokenizer.end_of_text
        for document, tokens in encode_documents(source.documents(skipped), self.tokenizer):
            text_bytes = len(document.text.encode("utf-8", errors="replace"))
            ids = np.concatenate([np.asarray(beginning, tokens.dtype), tokens, [end]])
            yield _Document(document.key, text_bytes, ids, None)

    def _labelled(
        self, source: TextSource, section: DataSection, skipped: list[str], counts: Counter[str]
    ) -> Iterator[_Document]:
        """Texts, cut to a sequence, with their classes as text."""
        column = section.columns.get("label", "label")
        for row in source.rows([section.text_field, column], [], skipped):
            text, label = row.values[section.text_field], row.values[column]
            if not isinstance(text, str) or not isinstance(label, str | int):
                raise DataError(
                    f"{row.where}: {section.text_field!r} is {type(text).__name__} and {column!r} {type(label).__name__}; a row "
                    "has text and the name or number of its class (data.text_field, data.columns: {label: ...})"
                )
            counts["rows"] += 1
            ids = self.tokenizer.encode_whole(text, section.sequence_length)
            text_bytes = len(text.encode("utf-8", errors="replace"))
            if ids.size:
                yield _Document(row.key, text_bytes, ids, np.zeros(len(ids), np.bool_), str(label))

    def _conversations(
        self, source: TextSource, renderer: Renderer, limit: int, skipped: list[str], counts: Counter[str]
    ) -> Iterator[_Document]:
        """Conversations and pairs, cut to `limit` tokens; those without a target are left out. What is cut and so on is counted."""
        rows = source.rows(renderer.wanted, renderer.optional, skipped)
        large = sum(file.path.stat().st_size for file in source.files) > _LARGE
        processes = min(available_cores(), _MOST_PROCESSES) if large else 0
        for key, text_bytes, ids, targets, inside in encode_rows(rows, renderer, processes):
            counts["rows"] += 1
            counts["cut"] += len(ids) > limit
            counts["inside"] += inside
            ids, targets = ids[:limit], targets[:limit]
            counts["targets"] += int(targets[1:].sum())
            if targets[1:].any():
                yield _Document(key, text_bytes, ids, targets)
            else:
                counts["without a target"] += 1

    def _pack(
        self, section: DataSection, text: StoredText, first: int, amount: TextAmount, where: str
    ) -> tuple[Sequences, str]:
        """Return the sequences of a part of a text, and a note. Raises `DataError` where it is shorter than one."""
        length = section.sequence_length
        if section.format != "text":
            return self._pack_conversations(section, text, first, amount, where)
        sequences, dropped = divmod(amount.tokens, length)
        if not sequences:
            raise DataError(
                f"{where} holds {amount.tokens} tokens in {amount.documents} documents, less than one sequence of "
                f"{length}; give more text, or lower data.sequence_length"
            )
        note = (
            f"{where}: {amount.text_bytes:,} bytes of text in {amount.documents:,} documents, {amount.tokens:,} "
            f"tokens, {sequences:,} sequences of {length}"
        )
        if dropped:
            note += f"; the last {dropped} tokens are no whole sequence and are dropped"
        separator = self.tokenizer.end_of_text if self.separate else None
        return PackedDataset(
            text=text,
            first=first,
            sequences=sequences,
            sequence_length=length,
            masked=self.masked,
            separator=separator,
        ), Detail(note)

    def _classes(self, text: StoredText, first: int, amount: TextAmount, where: str) -> NDArray[np.int64]:
        """The numbers of the classes of a part of a text. Raises `DataError` for a class that the training text does not have."""
        own = text.remarks["labels"][text.kept.documents if first else 0 :][: amount.documents]
        if unknown := set(own) - set(self.classes):
            raise DataError(f"{where} has classes that the training text does not have: {some(sorted(unknown))}")
        return np.asarray([self.classes.index(each) for each in own], np.int64)

    def _pack_conversations(
        self, section: DataSection, text: StoredText, first: int, amount: TextAmount, where: str
    ) -> tuple[ConversationDataset, str]:
        length, counts = section.sequence_length, Counter(text.remarks["counts"])
        if not counts["rows"]:
            raise DataError(f"{where} has no rows")
        if not amount.documents:
            raise DataError(
                f"{where} holds {counted(counts['rows'], 'row')}, and none has a target of the loss in its "
                f"first {counted(length, 'token')}; raise "
                "data.sequence_length, look whether the messages have an answer of role assistant, or set data.loss_on: all"
            )
        labelled = section.format == "labels"
        found = ConversationDataset.pack(
            text,
            first,
            amount,
            length,
            packing=section.packing and not labelled,
            separate=self.separate and not labelled,
            padding=self.tokenizer.padding if labelled else self.tokenizer.end_of_text,
            labels=self._classes(text, first, amount, where) if labelled else None,
        )
        filled = amount.tokens / (len(found) * length)
        note = (
            f"{where}: {counted(amount.documents, 'row', ',')}, {counted(amount.tokens, 'token', ',')}, in "
            f"{counted(len(found), 'sequence', ',')} of {length}, which they "
            f"fill to {filled:.0%}"
        )
        if labelled:
            return found, f"{note}; {len(self.classes)} classes: {some(self.classes, 8)}"
        if first:  # What follows is of all rows, and was said with the others.
            return found, Detail(note)
        note += f"; targets of the loss are {counts['targets']:,} tokens of all rows"
        if counts["cut"]:
            note += f"; {counts['cut']:,} rows are longer than data.sequence_length and are cut"
        if counts["without a target"]:
            note += f"; {counts['without a target']:,} have no target and are left out"
        if counts["inside"]:
            note += f"; in {counts['inside']:,} an answer begins or ends inside of a token, which is no target then"
        lost = counts["cut"] or counts["without a target"] or counts["inside"]
        return found, note if lost else Detail(note)


def _fills(section: DataSection, amount: TextAmount) -> bool:
    """Return True if there is a sequence in this amount."""
    return amount.tokens >= section.sequence_length if section.format == "text" else amount.documents > 0
