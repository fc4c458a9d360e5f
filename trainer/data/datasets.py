"""From the `data` section of a configuration to datasets that training and evaluation read.

    find_text -> documents -> held out or not -> token ids -> packed sequences

Token ids are kept in a cache on disk, and mapped into memory (`token_cache.py`). Every rank does the same, and gets the same:
nothing here knows a rank. The order in which a run reads the sequences is that of `sampler.SampleOrder`.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from zeromesh.errors import DataError
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.packing import PackedDataset, byte_pair_entropy, encode_documents
from zeromesh.trainer.data.text_sources import TextSource, find_text
from zeromesh.trainer.data.token_cache import StoredText, TextAmount, TokenCache, TokenWriter
from zeromesh.trainer.data.tokenizer import ByteTokenizer, TokenArray, Tokenizer, load_tokenizer
from zeromesh.trainer.formatting import human_bytes

_VERSION = 2
"""Version of how text becomes tokens here. Tokens that another version has cached are not read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedData:
    """Datasets made of text."""

    train: PackedDataset
    eval: PackedDataset | None
    """None where nothing is held out."""
    tokenizer: Tokenizer
    byte_pair_entropy: float | None
    """Nats per token of the training text; it is there for the byte tokenizer alone."""
    notes: tuple[str, ...]
    """Lines for the person who runs it."""


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
    every seed and machine. Where that leaves less than a sequence (few documents), it is the last sequences instead. Raises
    `DataError` for a path, file or tokenizer that cannot be used, and for text of less than one sequence.
    """
    fraction, length = section.eval_fraction, section.sequence_length
    tokenizer = load_tokenizer(section.tokenizer) if tokenizer is None else tokenizer
    separator = tokenizer.end_of_text if section.separate_documents else None
    source = find_text(section.train, text_field=section.text_field, where="data.train")
    where = f"data.train {source.name!r}"
    read = partial(_read, tokenizer, tokenizer.digest(), cache or TokenCache(None), tell)
    eval_source = None
    if section.eval is not None:
        eval_source = find_text(section.eval, text_field=section.text_field, where="data.eval")
    text = read(source, fraction if eval_source is None else 0.0)
    kept, held = text.kept, text.held
    entropy, evaluation, eval_note = text.remarks["entropy"], None, ""
    if eval_source is not None:
        other = read(eval_source, 0.0)
        evaluation, eval_note = _pack(other, 0, other.kept, length, separator, f"data.eval {eval_source.name!r}")
    elif held.tokens >= length and kept.tokens >= length:
        evaluation, eval_note = _pack(text, kept.tokens, held, length, separator, f"{where}, held out")
    else:
        entropy = text.remarks["entropy of all"] if held.tokens else entropy
        kept = TextAmount(*map(sum, zip(kept, held, strict=True)))
    train, note = _pack(text, 0, kept, length, separator, where)
    if fraction and evaluation is None and len(train) < 2:
        note += "; too little to hold any out for evaluation"
    elif fraction and evaluation is None:
        train, evaluation = train.split_tail(fraction)
        few = f"the last {len(evaluation)} sequences are held out"
        eval_note = f"{where}: too few documents to hold out whole ones; {few}"
    notes = [each for each in (note, eval_note) if each]
    skipped = text.remarks["skipped"]
    if skipped:
        notes.append(f"data.train: left out {len(skipped)} files that are not text, such as {skipped[0]!r}")
    if entropy is not None:
        notes.append(f"byte-pair entropy of the training text: {entropy:.4f} nats per byte, the loss to beat")
    return LoadedData(train=train, eval=evaluation, tokenizer=tokenizer, byte_pair_entropy=entropy, notes=tuple(notes))


def is_held_out(key: str, fraction: float) -> bool:
    """Whether the document named `key` belongs to the `fraction` that is held out: a function of both alone."""
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _read(
    tokenizer: Tokenizer,
    digest: str | None,
    cache: TokenCache,
    tell: Callable[[str], None],
    source: TextSource,
    fraction: float,
) -> StoredText:
    """The tokens of a source: of those documents that are kept, and of the `fraction` that is held out."""
    key = None
    if digest is not None:
        described = json.dumps([_VERSION, digest, fraction, source.description()])
        key = hashlib.blake2b(described.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    skipped: list[str] = []

    def write(kept: TokenWriter, held: TokenWriter) -> None:
        began, total = time.monotonic(), human_bytes(sum(file.path.stat().st_size for file in source.files))
        for document, tokens in encode_documents(source.documents(skipped), tokenizer):
            writer = held if is_held_out(document.key, fraction) else kept
            text_bytes = len(document.text.encode("utf-8", errors="replace"))
            writer.append(tokens, end_of_text=tokenizer.end_of_text, text_bytes=text_bytes)
            done = kept.amount.text_bytes + held.amount.text_bytes
            speed = done / max(time.monotonic() - began, 1e-3)
            tell(f"tokenizing {source.name}: {human_bytes(done)} of {total}, {human_bytes(speed)}/s")

    def remarks(tokens: TokenArray, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {"skipped": skipped}
        for name, part in {"entropy": tokens[:count], "entropy of all": tokens}.items():
            counted = isinstance(tokenizer, ByteTokenizer) and part.size > 1
            found[name] = byte_pair_entropy(part) if counted else None
        return found

    return cache.get(key, tokenizer.vocab_size, write, remarks)


def _pack(
    text: StoredText, first: int, amount: TextAmount, sequence_length: int, separator: int | None, where: str
) -> tuple[PackedDataset, str]:
    """Return the sequences of a part of a text, and a note. Raises `DataError` where it is shorter than one."""
    sequences, dropped = divmod(amount.tokens, sequence_length)
    if not sequences:
        raise DataError(
            f"{where} holds {amount.tokens} tokens in {amount.documents} documents, less than one sequence of "
            f"{sequence_length}; give more text, or lower data.sequence_length"
        )
    note = (
        f"{where}: {amount.text_bytes:,} bytes of text in {amount.documents:,} documents, {amount.tokens:,} "
        f"tokens, {sequences:,} sequences of {sequence_length}"
    )
    if dropped:
        note += f"; the last {dropped} tokens are no whole sequence and are dropped"
    return PackedDataset(
        text=text, first=first, sequences=sequences, sequence_length=sequence_length, separator=separator
    ), note
