"""Documents as token ids, joined and cut into sequences of one length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from zeromesh.errors import DataError
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.data.text_sources import Document
from zeromesh.trainer.data.token_cache import StoredText
from zeromesh.trainer.data.tokenizer import TokenArray, Tokenizer

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4 << 20
_PAIRS_AT_ONCE = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedDataset:
    """Sequences of `sequence_length` tokens, cut from one text; a map-style dataset.

    `tokens` is a flat array of `len(self) * sequence_length` ids, uint8, uint16 or int32.
    """

    tokens: TokenArray
    sequence_length: int
    text: StoredText | None = None
    """The text that the tokens are a part of, from its token `first` on."""
    first: int = 0
    separator: int | None = None
    """The token that ends a document, if documents are to be apart: positions begin anew after it, by which transformers' attention
    knows documents, and what comes first in a document is no target."""

    def __len__(self) -> int:
        return self.tokens.size // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `labels`, int64 `[sequence]`, equal: a causal model shifts labels itself; for separate documents
        also `position_ids`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self.sequence_length
        if self.text is not None:
            self.text.check(self.first + start, self.first + start + self.sequence_length)
        ids = torch.from_numpy(self.tokens[start : start + self.sequence_length].astype(np.int64))
        if self.separator is None:
            return {"input_ids": ids, "labels": ids.clone()}
        places = torch.arange(len(ids))
        begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[:-1] == self.separator])
        positions = places - torch.where(begins, places, 0).cummax(0).values
        return {"input_ids": ids, "labels": ids.masked_fill(begins, IGNORED_LABEL), "position_ids": positions}

    def split_tail(self, fraction: float) -> tuple[PackedDataset, PackedDataset]:
        """Return all but the last `fraction` of the sequences, and those; at least one on each side."""
        tail = min(max(1, math.floor(len(self) * fraction)), len(self) - 1)
        cut = (len(self) - tail) * self.sequence_length
        return (
            replace(self, tokens=self.tokens[:cut]),
            replace(self, tokens=self.tokens[cut:], first=self.first + cut),
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `DataError` for the first sequence with an id that a model of `vocab_size` does not have.

        Tokens of a text whose largest id is known are looked at only where that is too large.
        """
        if self.tokens.size == 0 or (self.text is not None and self.text.largest < vocab_size):
            return
        if int(self.tokens.max()) < vocab_size:
            return
        position = int(np.argmax(self.tokens >= vocab_size))
        raise DataError(
            f"sample {position // self.sequence_length} has token id {int(self.tokens[position])} but the "
            f"model's vocabulary has {vocab_size} tokens (ids 0 to {vocab_size - 1}); set vocab_size in "
            "model.config, or use the tokenizer that belongs to the model"
        )

    def fingerprint(self) -> str:
        """Return a hash (xxh3, 16 hexadecimal digits) of the tokens and their length, equal for equal data."""
        digest = xxhash.xxh3_64(f"{self.tokens.dtype.str} {self.sequence_length} ".encode())
        digest.update(
            self.tokens.data if self.text is None else f"{self.text.digest} {self.first} {self.tokens.size}".encode()
        )
        return digest.hexdigest()


def pack(tokens: TokenArray, sequence_length: int, **of_text: Any) -> PackedDataset:
    """Cut tokens into sequences; those at the end that are no whole sequence are left out. `of_text` are more fields."""
    whole = tokens.size - tokens.size % sequence_length
    return PackedDataset(tokens=tokens[:whole], sequence_length=sequence_length, **of_text)


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, TokenArray]]:
    """Yield each document with text in it, and its ids. Tokenizers that use several threads get several documents at once."""

    def encoded(batch: list[Document]) -> Iterator[tuple[Document, TokenArray]]:
        return zip(batch, tokenizer.encode([each.text for each in batch]), strict=True)

    batch: list[Document] = []
    characters = 0
    for document in documents:
        if not document.text:
            continue
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield from encoded(batch)
            batch, characters = [], 0
    if batch:
        yield from encoded(batch)


def byte_pair_entropy(tokens: TokenArray) -> float:
    """Return the conditional entropy H(next token | token) of a text, in nats per token.

    It is the loss, on this text, of the best model that sees one token back: what a model that has learned anything beyond letter
    pairs is below. It is for small vocabularies such as bytes, as a table of all pairs is in memory, and for two tokens or more.
    """
    size = int(tokens.max()) + 1
    counts = np.zeros(size * size, dtype=np.int64)
    for start in range(0, tokens.size - 1, _PAIRS_AT_ONCE):
        piece = tokens[start : start + _PAIRS_AT_ONCE + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * size + piece[1:], minlength=size * size)
    pairs = counts.reshape(size, size)
    first, second = np.nonzero(pairs)
    seen = pairs[first, second].astype(np.float64)
    conditional = seen / pairs.sum(axis=1, dtype=np.float64)[first]
    return float(-(seen * np.log(conditional)).sum() / seen.sum())
