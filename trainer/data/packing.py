"""Packing of token documents into sequences of equal length, of conversations that stay whole, and mixtures of datasets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from zeromesh.errors import DataError
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.data.sampler import whole_weights
from zeromesh.trainer.data.token_cache import BEGINS, ID_SHIFT, TARGET, StoredText, TextAmount
from zeromesh.trainer.data.tokenizer import TokenArray

_PAIRS_AT_ONCE = 1 << 18
_TOKENS_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenDataset:
    """A map-style dataset of sequences of `sequence_length` tokens."""

    text: StoredText
    sequence_length: int

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `DataError` for a token id of `vocab_size` or more."""
        if self.text.largest >= vocab_size:
            raise DataError(
                f"the text has token id {self.text.largest} but the model's vocabulary has {vocab_size} tokens (ids 0 to "
                f"{vocab_size - 1}); set vocab_size in model.config, or use the tokenizer that belongs to the model"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedDataset(TokenDataset):
    """Documents joined and cut into sequences, which begin at token `first` of `text`."""

    first: int
    sequences: int
    masked: bool = False
    """True if samples have an `attention_mask` of ones, to match conversations in a mixture."""
    separator: int | None = None
    """The token that ends a document, if attention separates documents: position ids restart after it, from which transformers
    derives document boundaries, and the first token of a document is no target."""

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids` and equal `labels`, int64 `[sequence]` (a causal model shifts labels itself), and `position_ids` if
        documents are separate."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = self.first + index * self.sequence_length
        end = start + self.sequence_length
        self.text.check(start, end)
        ids = torch.from_numpy(self.text.tokens[start:end].astype(np.int64))
        if self.separator is None:
            mask = {"attention_mask": torch.ones_like(ids)} if self.masked else {}
            return {"input_ids": ids, "labels": ids.clone(), **mask}
        begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[:-1] == self.separator])
        labels = ids.masked_fill(begins, IGNORED_LABEL)
        return {"input_ids": ids, "labels": labels, "position_ids": _positions(begins)}

    def split_tail(self, fraction: float) -> tuple[PackedDataset, PackedDataset]:
        """Split off the last `fraction` of the sequences; each side keeps at least one."""
        head = len(self) - min(max(1, math.floor(len(self) * fraction)), len(self) - 1)
        tail = self.first + head * self.sequence_length
        return replace(self, sequences=head), replace(self, sequences=len(self) - head, first=tail)

    def fingerprint(self) -> str:
        """Return a hash (xxh3, 16 hexadecimal digits) of the tokens and their length, equal for equal data."""
        size = self.sequences * self.sequence_length
        described = f"{self.text.tokens.dtype.str} {self.sequence_length} {self.text.digest} {self.first} {size}"
        return xxhash.xxh3_64_hexdigest(described.encode())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConversationDataset(TokenDataset):
    """Documents of marked tokens, each whole in one sequence; the rest of a sequence is padding without targets."""

    begins: NDArray[np.int64]
    """Offset in the text of each document, ordered by sequence."""
    ends: NDArray[np.int64]
    cuts: NDArray[np.int64]
    """Cumulative document counts: sequence i holds documents cuts[i] to cuts[i + 1]."""
    separate: bool
    """True if position ids restart with each document."""
    padding: int
    labels: NDArray[np.int64] | None = None
    """Class of each document for sequence classification, where each has its own sequence."""

    @classmethod
    def pack(
        cls, text: StoredText, first: int, amount: TextAmount, sequence_length: int, *, packing: bool, **keys: Any
    ) -> ConversationDataset:
        """Build the dataset of the documents from token `first`, one per sequence or packed by best fit."""
        end = first + amount.tokens
        pieces = range(first, end, _TOKENS_AT_ONCE)
        found = [np.flatnonzero(text.tokens[at : min(at + _TOKENS_AT_ONCE, end)] & BEGINS) + at for at in pieces]
        begins = np.concatenate([np.empty(0, np.int64), *found])
        ends = np.append(begins[1:], end)[: len(begins)]
        sequence_of = best_fit(ends - begins, sequence_length) if packing else np.arange(len(begins))
        order = np.argsort(sequence_of, kind="stable")
        cuts = np.searchsorted(sequence_of[order], np.arange(sequence_of.max(initial=-1) + 2))
        placed: dict[str, Any] = {"begins": begins[order], "ends": ends[order], "cuts": cuts}
        return cls(text=text, sequence_length=sequence_length, **placed, **keys)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `labels` and, for separate documents, `position_ids`, else `attention_mask`, which is 0 for padding:
        int64 `[sequence]`; the label of a class is a scalar."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        documents = slice(self.cuts[index], self.cuts[index + 1])
        marked = np.zeros(self.sequence_length, dtype=np.int64)
        size = 0
        for begin, end in zip(self.begins[documents].tolist(), self.ends[documents].tolist(), strict=True):
            self.text.check(begin, end)
            marked[size : size + end - begin] = self.text.tokens[begin:end]
            size += end - begin
        if size < self.sequence_length:
            marked[size:] = self.padding << ID_SHIFT
            marked[size] |= BEGINS
        tokens = torch.from_numpy(marked)
        ids, begins = tokens >> ID_SHIFT, (tokens & BEGINS).bool()
        labels = ids.masked_fill(((tokens & TARGET) == 0) | begins, IGNORED_LABEL)
        if self.labels is not None:
            labels = torch.tensor(self.labels[self.cuts[index]])
        found = {"input_ids": ids, "labels": labels}
        if self.separate:
            return {**found, "position_ids": _positions(begins)}
        return {**found, "attention_mask": (torch.arange(len(ids)) < size).long()}

    def split_tail(self, fraction: float) -> tuple[ConversationDataset, ConversationDataset]:
        head = len(self) - min(max(1, math.floor(len(self) * fraction)), len(self) - 1)
        return replace(self, cuts=self.cuts[: head + 1]), replace(self, cuts=self.cuts[head:])

    def fingerprint(self) -> str:
        """Return a hash (xxh3, 16 hexadecimal digits) of the tokens and of how they are packed, equal for equal data."""
        described = xxhash.xxh3_64(f"{self.sequence_length} {self.text.digest} {self.separate} {self.padding}".encode())
        for each in (self.begins, self.cuts, *([] if self.labels is None else [self.labels])):
            described.update(each.astype("<i8").tobytes())
        return described.hexdigest()


class MixedDataset(ConcatDataset[dict[str, torch.Tensor]]):
    """The concatenation of several datasets, which `SampleOrder` mixes. Raises `ConfigError` for weights that are too
    fine."""

    def __init__(self, parts: Sequence[PackedDataset | ConversationDataset], weights: Sequence[float]) -> None:
        super().__init__(parts)  # type: ignore[arg-type]
        self.parts = tuple(parts)
        self.weights = whole_weights(weights)
        self.sequence_length = parts[0].sequence_length

    def fingerprint(self) -> str:
        return xxhash.xxh3_64_hexdigest(" ".join(part.fingerprint() for part in self.parts).encode())


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the sequence index of each document, of at most `capacity` tokens, by best-fit decreasing bin packing: at most 11/9 of
    the fewest sequences possible, and one more (Johnson and others, "Worst-Case Performance Bounds for Simple One-Dimensional
    Packing Algorithms", 1974)."""
    found = np.empty(len(lengths), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # Bit r: some sequence has room for r tokens.
    sequences = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fits = rooms >> length
        if fits:
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


def _positions(begins: torch.Tensor) -> torch.Tensor:
    """Return position ids, int64 `[sequence]`, that restart where the bool tensor `begins` is True."""
    places = torch.arange(len(begins))
    return places - torch.where(begins, places, 0).cummax(0).values


def byte_pair_entropy(tokens: TokenArray) -> float:
    """Return the conditional entropy H(next token | token) of a text of two tokens or more, in nats per token: the loss of the best
    bigram model. A table of all pairs is kept in memory, so use it for small vocabularies such as bytes."""
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
