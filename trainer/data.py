"""From the `data` section of a configuration to datasets that training and evaluation read.

    find_text -> documents -> held out or not -> token ids -> packed sequences

Every rank does the same, and gets the same: nothing here knows a rank. The order in which a run reads the
sequences is `batching.SampleOrder`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from zeromesh.errors import DataError
from zeromesh.trainer.documents import Source, find_text
from zeromesh.trainer.packing import (
    PackedDataset,
    TokenBuffer,
    byte_pair_entropy,
    encode_documents,
    pack,
)
from zeromesh.trainer.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer


class DataSection(Protocol):
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
class _Part:
    """Packed sequences, what text they are, and a note about them."""

    dataset: PackedDataset
    text: TextStatistics
    note: str


def load_datasets(section: DataSection, *, tokenizer: Tokenizer | None = None) -> LoadedData:
    """Read, tokenise and pack what `section` names; a `tokenizer` given replaces the section's.

    Without `data.eval`, `data.eval_fraction` of the documents are held out, chosen by a hash of their names:
    the same ones for every seed and machine. Where that leaves less than a sequence (few documents), it is
    the last sequences instead. Raises `DataError`: a path, file or tokenizer that cannot be used, or text for
    less than one sequence.
    """
    if not 0.0 <= section.eval_fraction < 1.0:
        raise DataError(f"data.eval_fraction is {section.eval_fraction}; give 0 (nothing held out) to below 1")
    tokenizer = load_tokenizer(section.tokenizer) if tokenizer is None else tokenizer
    source = find_text(section.train, text_field=section.text_field, where="data.train")
    evaluation: _Part | None
    if section.eval is None:
        train, evaluation = _hold_out(source, tokenizer, section.sequence_length, section.eval_fraction)
    else:
        eval_source = find_text(section.eval, text_field=section.text_field, where="data.eval")
        kept, _ = _read(source, tokenizer, 0.0)
        train = _pack(kept, section.sequence_length, f"data.train {source.name!r}")
        held, _ = _read(eval_source, tokenizer, 0.0)
        evaluation = _pack(held, section.sequence_length, f"data.eval {eval_source.name!r}")
    if section.separate_documents:
        train = _apart(train, tokenizer.end_of_text)
        evaluation = None if evaluation is None else _apart(evaluation, tokenizer.end_of_text)
    notes = [train.note] + ([evaluation.note] if evaluation is not None else [])
    if source.skipped:
        notes.append(
            f"data.train: left out {len(source.skipped)} files that are not text, such as {source.skipped[0]!r}"
        )
    entropy = byte_pair_entropy(train.dataset.tokens) if isinstance(tokenizer, ByteTokenizer) else None
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


def _apart(part: _Part, separator: int) -> _Part:
    """The same, with documents that do not see each other."""
    return replace(part, dataset=replace(part.dataset, separator=separator))


def is_held_out(key: str, fraction: float) -> bool:
    """Whether the document named `key` belongs to the `fraction` that is held out.

    A function of both alone.
    """
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _hold_out(
    source: Source, tokenizer: Tokenizer, sequence_length: int, fraction: float
) -> tuple[_Part, _Part | None]:
    """Training and held-out sequences of one source."""
    where = f"data.train {source.name!r}"
    kept, held = _read(source, tokenizer, fraction)
    if len(held) >= sequence_length and len(kept) >= sequence_length:
        return _pack(kept, sequence_length, where), _pack(held, sequence_length, f"{where}, held out")
    kept.extend(held)
    whole = _pack(kept, sequence_length, where)
    if fraction == 0.0:
        return whole, None
    if len(whole.dataset) < 2:
        return replace(whole, note=f"{whole.note}; too little to hold any out for evaluation"), None
    front, tail = whole.dataset.split_tail(fraction)
    note = f"{where}: too few documents to hold out whole ones; the last {len(tail)} sequences are held out"
    return replace(whole, dataset=front), _Part(dataset=tail, text=whole.text, note=note)


def _read(source: Source, tokenizer: Tokenizer, fraction: float) -> tuple[TokenBuffer, TokenBuffer]:
    """The tokens of a source: those kept, and those of the `fraction` of documents that is held out."""
    kept, held = TokenBuffer(tokenizer.vocab_size), TokenBuffer(tokenizer.vocab_size)
    for document, tokens in encode_documents(source.documents(), tokenizer):
        buffer = held if is_held_out(document.key, fraction) else kept
        text_bytes = len(document.text.encode("utf-8", errors="replace"))
        buffer.append(tokens, end_of_text=tokenizer.end_of_text, text_bytes=text_bytes)
    return kept, held


def _pack(buffer: TokenBuffer, sequence_length: int, where: str) -> _Part:
    """Sequences of a text. Raises `DataError` where it is shorter than one."""
    dataset, dropped = pack(buffer, sequence_length)
    text = TextStatistics(documents=buffer.documents, text_bytes=buffer.text_bytes, tokens=len(buffer), dropped=dropped)
    if len(dataset) == 0:
        raise DataError(
            f"{where} holds {text.tokens} tokens in {text.documents} documents, less than one sequence of "
            f"{sequence_length}; give more text, or lower data.sequence_length"
        )
    note = (
        f"{where}: {text.text_bytes:,} bytes of text in {text.documents:,} documents, {text.tokens:,} "
        f"tokens, {len(dataset):,} sequences of {sequence_length}"
    )
    if dropped:
        note += f"; the last {dropped} tokens are no whole sequence and are dropped"
    return _Part(dataset=dataset, text=text, note=note)
