"""Documents as token ids, joined and cut into sequences of one length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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
    """Sequences of `sequence_length` tokens: those of `text` from its token `first` on; a map-style dataset."""

    text: StoredText
    first: int
    sequences: int
    sequence_length: int
    separator: int | None = None
    """The token that ends a document, if documents are to be apart: positions begin anew after it, by which transformers' attention
    knows documents, and what comes first in a document is no target."""

    @property
    def tokens(self) -> TokenArray:
        """The ids of all sequences, flat: uint8, uint16 or int32."""
        return self.text.tokens[self.first : self.first + self.sequences * self.sequence_length]

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `labels`, int64 `[sequence]`, equal: a causal model shifts labels itself; for separate documents
        also `position_ids`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = self.first + index * self.sequence_length
        end = start + self.sequence_length
        self.text.check(start, end)
        ids = torch.from_numpy(self.text.tokens[start:end].astype(np.int64))
        if self.separator is None:
            return {"input_ids": ids, "labels": ids.clone()}
        places = torch.arange(len(ids))
        begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[:-1] == self.separator])
        positions = places - torch.where(begins, places, 0).cummax(0).values
        return {"input_ids": ids, "labels": ids.masked_fill(begins, IGNORED_LABEL), "position_ids": positions}

    def split_tail(self, fraction: float) -> tuple[PackedDataset, PackedDataset]:
        """Return all but the last `fraction` of the sequences, and those; at least one on each side."""
        tail = min(max(1, math.floor(len(self) * fraction)), len(self) - 1)
        head = len(self) - tail
        end = self.first + head * self.sequence_length
        return replace(self, sequences=head), replace(self, sequences=tail, first=end)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `DataError` for a text with an id that a model of `vocab_size` does not have."""
        if self.text.largest >= vocab_size:
            raise DataError(
                f"the text has token id {self.text.largest} but the model's vocabulary has {vocab_size} tokens (ids 0 to "
                f"{vocab_size - 1}); set vocab_size in model.config, or use the tokenizer that belongs to the model"
            )

    def fingerprint(self) -> str:
        """Return a hash (xxh3, 16 hexadecimal digits) of the tokens and their length, equal for equal data."""
        size = self.sequences * self.sequence_length
        described = f"{self.text.tokens.dtype.str} {self.sequence_length} {self.text.digest} {self.first} {size}"
        return xxhash.xxh3_64_hexdigest(described.encode())


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
