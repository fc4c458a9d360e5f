"""From the `data` section of a configuration to datasets that training and evaluation read.

    find_text -> documents -> held out or not -> token ids -> packed sequences

Token ids are kept in a cache on disk, and mapped into memory (`token_cache.py`). Every rank does the same, and gets the same:
nothing here knows a rank. The order in which a run reads the sequences is `batching.SampleOrder`'s.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from zeromesh.errors import DataError
from zeromesh.trainer.data.packing import PackedDataset, TokenWriter, byte_pair_entropy, encode_documents, pack
from zeromesh.trainer.data.text_sources import TextSource, find_text
from zeromesh.trainer.data.token_cache import Amount, StoredText, TokenCache
from zeromesh.trainer.data.tokenizer import ByteTokenizer, TokenArray, Tokenizer, load_tokenizer
from zeromesh.trainer.formatting import human_bytes

_VERSION = 1
"""Of how text becomes tokens here. Tokens that another version has cached are not taken."""


class DataOptions(Protocol):
    """The keys of the configuration's `data` section that decide what is read."""

    @property
    def train(self) -> str | Path | Sequence[str | Path]: ...

    @property
    def eval(self) -> str | Path | Sequence[str | Path] | None: ...

    @property
    def text_field(self) -> str: ...

    @property
    def tokenizer(self) -> str | Path: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def separate_documents(self) -> bool: ...

    @property
    def eval_fraction(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStatistics:
    """What a text came to: `tokens` count end-of-text ones, `dropped` those at its end in no sequence."""

    documents: int
    text_bytes: int
    tokens: int
    dropped: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedData:
    """Datasets made of text. `eval` is None where nothing is held out.

    `train_text` and `eval_text` are what the sequences were cut from, the same text where its last sequences
    are held out. `byte_pair_entropy` (nats per token, of the training text) is there for the byte tokenizer
    alone. `notes` are lines for the person who runs it.
    """

    train: PackedDataset
    eval: PackedDataset | None
    tokenizer: Tokenizer
    train_text: TextStatistics
    eval_text: TextStatistics | None
    byte_pair_entropy: float | None
    notes: tuple[str, ...]

    def fingerprint(self) -> str:
        """Equal for equal data: to compare ranks, and a run with the one it resumes."""
        return self.train.fingerprint() + (self.eval.fingerprint() if self.eval is not None else "")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TextPart:
    """Packed sequences, what text they are, and a note about them."""

    dataset: PackedDataset
    text: TextStatistics
    note: str


def load_datasets(
    section: DataOptions,
    *,
    tokenizer: Tokenizer | None = None,
    cache: TokenCache | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> LoadedData:
    """Read, tokenise and pack what `section` names; a `tokenizer` given replaces the section's.

    Text that `cache` has is not read again. `tell` is called every few documents, with a line about how far it is.

    Without `data.eval`, `data.eval_fraction` of the documents are held out, chosen by a hash of their names:
    the same ones for every seed and machine. Where that leaves less than a sequence (few documents), it is
    the last sequences instead. Raises `DataError`: a path, file or tokenizer that cannot be used, or text for
    less than one sequence.
    """
    if not 0.0 <= section.eval_fraction < 1.0:
        raise DataError(f"data.eval_fraction is {section.eval_fraction}; give 0 (nothing held out) to below 1")
    tokenizer = load_tokenizer(section.tokenizer) if tokenizer is None else tokenizer
    source = find_text(section.train, text_field=section.text_field, where="data.train")
    reader = _Reader(tokenizer, cache or TokenCache(None), tell)
    evaluation: _TextPart | None
    if section.eval is None:
        text = reader.read(source, section.eval_fraction)
        train, evaluation = _hold_out(text, source, section.sequence_length, section.eval_fraction)
    else:
        eval_source = find_text(section.eval, text_field=section.text_field, where="data.eval")
        text, held = reader.read(source, 0.0), reader.read(eval_source, 0.0)
        train = _pack(text, 0, text.kept, section.sequence_length, f"data.train {source.name!r}")
        evaluation = _pack(held, 0, held.kept, section.sequence_length, f"data.eval {eval_source.name!r}")
    if section.separate_documents:
        train = _apart(train, tokenizer.end_of_text)
        evaluation = None if evaluation is None else _apart(evaluation, tokenizer.end_of_text)
    notes = [train.note] + ([evaluation.note] if evaluation is not None else [])
    skipped = text.remarks["skipped"]
    if skipped:
        notes.append(f"data.train: left out {len(skipped)} files that are not text, such as {skipped[0]!r}")
    entropy = text.remarks["entropy of all" if train.text.tokens > text.kept.tokens else "entropy"]
    if entropy is not None:
        notes.append(f"byte-pair entropy of the training text: {entropy:.4f} nats per byte, the loss to beat")
    return LoadedData(
        train=train.dataset,
        eval=None if evaluation is None else evaluation.dataset,
        tokenizer=tokenizer,
        train_text=train.text,
        eval_text=None if evaluation is None else evaluation.text,
        byte_pair_entropy=entropy,
        notes=tuple(notes),
    )


def _apart(part: _TextPart, separator: int) -> _TextPart:
    """The same, with documents that do not see each other."""
    return replace(part, dataset=replace(part.dataset, separator=separator))


def is_held_out(key: str, fraction: float) -> bool:
    """Whether the document named `key` belongs to the `fraction` that is held out.

    A function of both alone.
    """
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _hold_out(
    text: StoredText, source: TextSource, sequence_length: int, fraction: float
) -> tuple[_TextPart, _TextPart | None]:
    """Training and held-out sequences of one source."""
    where = f"data.train {source.name!r}"
    if text.held.tokens >= sequence_length and text.kept.tokens >= sequence_length:
        held = _pack(text, text.kept.tokens, text.held, sequence_length, f"{where}, held out")
        return _pack(text, 0, text.kept, sequence_length, where), held
    whole = _pack(text, 0, text.kept + text.held, sequence_length, where)
    if fraction == 0.0:
        return whole, None
    if len(whole.dataset) < 2:
        return replace(whole, note=f"{whole.note}; too little to hold any out for evaluation"), None
    front, tail = whole.dataset.split_tail(fraction)
    note = f"{where}: too few documents to hold out whole ones; the last {len(tail)} sequences are held out"
    return replace(whole, dataset=front), _TextPart(dataset=tail, text=whole.text, note=note)


class _Reader:
    """Reads and tokenises sources that the cache does not have."""

    def __init__(self, tokenizer: Tokenizer, cache: TokenCache, tell: Callable[[str], None]) -> None:
        self._tokenizer, self._cache, self._tell = tokenizer, cache, tell
        self._digest = tokenizer.digest()

    def read(self, source: TextSource, fraction: float) -> StoredText:
        """The tokens of a source: of those documents that are kept, and of the `fraction` that is held out."""
        key = None
        if self._digest is not None:
            described = json.dumps([_VERSION, self._digest, fraction, source.description()])
            key = hashlib.blake2b(described.encode(errors="surrogateescape"), digest_size=16).hexdigest()

        skipped: list[str] = []

        def remarks(tokens: TokenArray, count: int) -> dict[str, Any]:
            found: dict[str, Any] = {"skipped": skipped}
            for name, part in {"entropy": tokens[:count], "entropy of all": tokens}.items():
                counted = isinstance(self._tokenizer, ByteTokenizer) and part.size > 1
                found[name] = byte_pair_entropy(part) if counted else None
            return found

        return self._cache.get(
            key, self._tokenizer.vocab_size, partial(self._write, source, fraction, skipped), remarks
        )

    def _write(
        self, source: TextSource, fraction: float, skipped: list[str], kept: TokenWriter, held: TokenWriter
    ) -> None:
        tokenizer, began = self._tokenizer, time.monotonic()
        total = human_bytes(sum(file.path.stat().st_size for file in source.files))
        for document, tokens in encode_documents(source.documents(skipped), tokenizer):
            out = is_held_out(document.key, fraction)
            text_bytes = len(document.text.encode("utf-8", errors="replace"))
            (held if out else kept).append(tokens, end_of_text=tokenizer.end_of_text, text_bytes=text_bytes)
            done = kept.text_bytes + held.text_bytes
            speed = done / max(time.monotonic() - began, 1e-3)
            self._tell(f"tokenizing {source.name}: {human_bytes(done)} of {total}, {human_bytes(speed)}/s")


def _pack(text: StoredText, first: int, amount: Amount, sequence_length: int, where: str) -> _TextPart:
    """Sequences of a part of a text. Raises `DataError` where it is shorter than one."""
    dataset = pack(text.tokens[first : first + amount.tokens], sequence_length, text, first)
    if len(dataset) == 0:
        raise DataError(
            f"{where} holds {amount.tokens} tokens in {amount.documents} documents, less than one sequence of "
            f"{sequence_length}; give more text, or lower data.sequence_length"
        )
    dropped = amount.tokens - dataset.tokens.size
    note = (
        f"{where}: {amount.text_bytes:,} bytes of text in {amount.documents:,} documents, {amount.tokens:,} "
        f"tokens, {len(dataset):,} sequences of {sequence_length}"
    )
    if dropped:
        note += f"; the last {dropped} tokens are no whole sequence and are dropped"
    statistics = TextStatistics(
        documents=amount.documents, text_bytes=amount.text_bytes, tokens=amount.tokens, dropped=dropped
    )
    return _TextPart(dataset=dataset, text=statistics, note=note)
