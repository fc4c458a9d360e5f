"""Packing of documents into sequences of equal length, joined or each whole in one, and mixtures of datasets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from zeromesh.errors import DataError
from zeromesh.trainer.data.collate import IGNORED_LABEL, MORE_TOKENS
from zeromesh.trainer.data.sampler import integer_weights
from zeromesh.trainer.data.token_cache import BEGINS, ID_SHIFT, TARGET, StoredText, TextAmount
from zeromesh.trainer.data.tokenizer import TokenArray

_PAIRS_AT_ONCE = 1 << 18  # pairs of tokens that are counted together
_TOKENS_AT_ONCE = 1 << 24  # tokens that are searched for beginnings of documents together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenDataset:
    """A map-style dataset of sequences of `sequence_length` tokens. Documents are either joined and cut to that length, or,
    `marked` by `TokenWriter`, stay whole within a sequence, whose end is filled with padding that is no target."""

    text: StoredText
    sequence_length: int
    begins: Sequence[int] | NDArray[np.int64]
    """The first token of each piece (a document, or a sequence of joined text), ordered by sequence; a range costs no memory."""
    ends: Sequence[int] | NDArray[np.int64]
    cuts: Sequence[int] | NDArray[np.int64]  # Sequence i holds the pieces from cuts[i] to cuts[i + 1] - 1.
    marked: bool
    separate: bool  # True if position ids restart with each document, which tells transformers where it begins.
    masked: bool  # True if samples of documents that are not separate have an `attention_mask`, which is 0 for padding.
    separator: int  # The token that ends a document of joined text, and that fills sequences of whole documents.
    begin: int | None = None  # The token that begins a document of joined text, if one does; it may be the separator.
    labels: NDArray[np.int64] | None = None  # Classes of documents, each of which has its own sequence then.

    @classmethod
    def join(cls, text: StoredText, first: int, amount: TextAmount, sequence_length: int, **keys: Any) -> Self:
        """Build the dataset of joined documents from token `first`; tokens that fill no sequence are left out."""
        bounds = range(first, first + amount.tokens + 1, sequence_length)
        placed: dict[str, Any] = {"begins": bounds[:-1], "ends": bounds[1:], "cuts": range(len(bounds))}
        return cls(text=text, sequence_length=sequence_length, marked=False, **placed, **keys)

    @classmethod
    def pack(cls, text: StoredText, first: int, amount: TextAmount, length: int, *, packing: bool, **keys: Any) -> Self:
        """Build the dataset of the marked documents from token `first`, one per sequence or packed by best fit."""
        end = first + amount.tokens
        pieces = range(first, end, _TOKENS_AT_ONCE)
        found = [np.flatnonzero(text.tokens[at : min(at + _TOKENS_AT_ONCE, end)] & BEGINS) + at for at in pieces]
        begins = np.concatenate([np.empty(0, np.int64), *found])
        ends = np.append(begins[1:], end)[: len(begins)]
        sequence_of = best_fit(ends - begins, length) if packing else np.arange(len(begins))
        order = np.argsort(sequence_of, kind="stable")
        cuts = np.searchsorted(sequence_of[order], np.arange(sequence_of.max(initial=-1) + 2))
        placed: dict[str, Any] = {"begins": begins[order], "ends": ends[order], "cuts": cuts}
        return cls(text=text, sequence_length=length, marked=True, masked=True, **placed, **keys)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `labels` (a causal model shifts them itself) and `position_ids` for separate documents, else perhaps
        `attention_mask`: int64 `[sequence]`; the label of a class is a scalar."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        pieces = slice(self.cuts[index], self.cuts[index + 1])
        stored = np.zeros(self.sequence_length, dtype=np.int64)
        size = 0
        for begin, end in zip(self.begins[pieces], self.ends[pieces], strict=True):
            self.text.check(begin, end)
            stored[size : size + end - begin] = self.text.tokens[begin:end]
            size += end - begin
        if size < self.sequence_length:
            stored[size:] = self.separator << ID_SHIFT
            stored[size] |= BEGINS
        ids = tokens = torch.from_numpy(stored)
        if self.marked:
            ids, begins = tokens >> ID_SHIFT, (tokens & BEGINS).bool()
            labels = ids.masked_fill(((tokens & TARGET) == 0) | begins, IGNORED_LABEL)
        elif self.separate:
            begins = torch.ones(len(ids), dtype=torch.bool)
            begins[1:] = (ids[:-1] == self.separator) & (True if self.begin is None else ids[1:] == self.begin)
            labels = ids.masked_fill(begins, IGNORED_LABEL)
        else:
            labels = ids.clone()
        found = {"input_ids": ids, "labels": labels}
        if self.labels is not None:
            found["labels"] = torch.tensor(self.labels[self.cuts[index]])
        if self.separate:
            places = torch.arange(len(ids))
            found["position_ids"] = places - torch.where(begins, places, 0).cummax(0).values
        elif self.masked:
            found["attention_mask"] = (torch.arange(len(ids)) < size).long()
        return found

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `DataError` for a token id of `vocab_size` or more."""
        if self.text.largest >= vocab_size:
            allowed = f"the model's vocabulary has {vocab_size} tokens (ids 0 to {vocab_size - 1})"
            raise DataError(f"the text has token id {self.text.largest} but {allowed}; {MORE_TOKENS}")

    def fingerprint(self) -> str:
        """Return a hash (xxh3, 16 hexadecimal digits) of the tokens and of how they are packed, equal for equal data."""
        if not self.marked:
            place = f"{self.begins[self.cuts[0]]} {len(self) * self.sequence_length}"
            described = f"{self.text.tokens.dtype.str} {self.sequence_length} {self.text.digest} {place}"
            return xxhash.xxh3_64_hexdigest(described.encode())
        whole = xxhash.xxh3_64(f"{self.sequence_length} {self.text.digest} {self.separate} {self.separator}".encode())
        for each in (self.begins, self.cuts, *([] if self.labels is None else [self.labels])):
            whole.update(np.asarray(each, "<i8").tobytes())
        return whole.hexdigest()


class MixedDataset(ConcatDataset[dict[str, torch.Tensor]]):
    """The concatenation of several datasets, which `SampleOrder` mixes. Raises `ConfigError` for weights that are too fine."""

    def __init__(self, parts: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        super().__init__(parts)  # type: ignore[arg-type]
        self.parts = tuple(parts)
        self.weights = integer_weights(weights)
        self.sequence_length = parts[0].sequence_length

    def fingerprint(self) -> str:
        return xxhash.xxh3_64_hexdigest(" ".join(part.fingerprint() for part in self.parts).encode())


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the sequence of each document, of at most `capacity` tokens, by best-fit decreasing packing: at most 11/9 of the
    fewest, and one more (Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms", 1974)."""
    found = np.empty(len(lengths), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # Bit r: some sequence has room for r tokens.
    sequences = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        if fits := rooms >> length:
            room = length + (fits & -fits).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence = capacity, sequences
            sequences += 1
        found[document] = sequence
        if room > length:
            with_room[room - length].append(sequence)
            rooms |= 1 << (room - length)
    return found


def byte_pair_entropy(tokens: TokenArray) -> float:
    """Return the conditional entropy H(next token | token) in nats per token: the loss of the best bigram model of these tokens."""
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
