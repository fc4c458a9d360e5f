"""Collation of samples into batches, mappings of the model's argument names to tensors whose dim 0 is the sample, and the checks
of a batch before training. Batches are on the CPU, so that no check waits for a device."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeromesh.errors import DataError, ZeromeshError, some

IGNORED_LABEL = -100  # The label of a position that is no target, as in `torch.nn.functional.cross_entropy`.

Collate = Callable[[list[Any]], Any]

_LABEL_NAMES = ("label", "label_ids")  # of labels in samples, beside `labels`, which collators rename to it
MORE_TOKENS = "use the model's own tokenizer, raise vocab_size in model.config, or resize_token_embeddings in model.source first"
_LABELS = frozenset({"labels", *_LABEL_NAMES})


class MapDataset(Protocol):
    """A map-style dataset, such as `torch.utils.data.Dataset`, `datasets.Dataset` or a list."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


def check_dataset(dataset: Any, *, name: str = "train_dataset") -> None:
    """Raise `DataError` for a dataset that is empty, has no length, is a mapping of splits, or has batches for samples."""
    if isinstance(dataset, str | bytes | os.PathLike):
        raise DataError(f"{name} is {str(dataset)!r}; give a dataset, or name text in the configuration: data.train")
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a mapping of splits ({', '.join(map(repr, dataset))}); pass one of them, such as {name}[...]")
    if getattr(dataset, "batch_sampler", None) is not None:  # None: of a DataLoader with batch_size=None
        cure = "give its dataset, with its collate_fn as data_collator, and batch.global_size and batch.micro_size"
        raise DataError(f"{name} is a {type(dataset).__name__}, whose items are batches and not samples; {cure}")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        why = "samples are dealt by index, so that any number of ranks sees the same data"
        cure = f"{why}: pass a map-style dataset, or list(dataset) where it fits in memory"
        raise DataError(f"{name} is a {type(dataset).__name__} without length or indexing; {cure}")
    if len(dataset) == 0:
        raise DataError(f"{name} is empty; give at least one sample")


def is_library(collate: Collate | None) -> bool:
    """Return True for transformers' collators and None (the default one), which make tensors of all fields."""
    return collate is None or str(getattr(collate, "__module__", "")).startswith("transformers.")


def default_collate(samples: Sequence[Any], indices: Sequence[int]) -> dict[str, Tensor]:
    """Stack samples, mappings of field to tensor, array, list or number, into tensors `[batch, ...]`, as transformers'
    `default_data_collator` does: a `label` or `label_ids` becomes `labels`, and fields of text or None are left out. Python
    integers become int64, floats float32. Raises `DataError`, with dataset `indices`, for samples that cannot be stacked."""
    first, batch = indices[0], dict[str, Tensor]()
    fields: dict[str, int] = {}  # with the first sample that has each
    for index, sample in zip(indices, samples, strict=True):
        if not isinstance(sample, Mapping):
            cure = "give mappings of field names (the model's arguments, such as input_ids and labels) to tensors"
            raise DataError(f"sample {index} is a {type(sample).__name__}; {cure}, or pass a data_collator")
        fields = {name: index for name, value in sample.items() if not isinstance(value, str | bytes | None)} | fields
    for field, having in fields.items():
        rows: list[Tensor] = []
        for index, sample in zip(indices, samples, strict=True):
            if isinstance(value := sample.get(field), str | bytes | None):
                cure = f"it has {_field_list(sample)}. Give all samples the same fields, or pass a data_collator"
                raise DataError(f"sample {index} has no numbers in {field!r}, as sample {having} has; {cure}")
            try:
                # torch has no indexing or comparison for wide unsigned types.
                wide = isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.dtype.itemsize > 1
                made = value if isinstance(value, Tensor) else torch.tensor(value.astype(np.int64) if wide else value)
            except (TypeError, ValueError, RuntimeError) as error:
                why = f"sample {index}: field {field!r} ({type(value).__name__}) is no array of numbers"
                raise DataError(f"{why}: {error}. Remove the field, or pass a data_collator") from error
            rows.append(made)
            if rows[-1].shape != rows[0].shape:
                why = f"sample {index}: field {field!r} has shape {list(rows[-1].shape)}, but that of sample {first}"
                cure = "pad or cut samples to one length, or pass a data_collator that pads"
                raise DataError(f"{why}, in the same batch, has {list(rows[0].shape)}; {cure}")
        batch["labels" if field in _LABEL_NAMES else field] = torch.stack(rows)
    if not batch:
        raise DataError(f"sample {first} has no field that holds numbers: {_field_list(samples[0])}")
    return batch


def _field_list(sample: Mapping[str, Any]) -> str:
    return ", ".join(f"{field!r} ({type(value).__name__})" for field, value in sample.items()) or "no field"


def padding_begins(batch: Mapping[str, Any]) -> Tensor:
    """Return where each row ends: before its last document by `position_ids` if that has no target and is not the first."""
    targets = batch["labels"] != IGNORED_LABEL
    places = torch.arange(targets.shape[1], device=targets.device)
    last = ((batch["position_ids"] == 0) * places).amax(dim=1)
    return torch.where((targets & (places >= last[:, None])).any(dim=1) | (last == 0), len(places), last)


def without_padding(batch: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Cut the trailing columns that are padding in all rows of a text batch, fields `[batch, sequence]`, to a `multiple` of
    columns: a model that balances experts by a loss counts padding too. An `attention_mask` of ones is dropped."""
    length = batch["input_ids"].shape[1]
    ends = batch["attention_mask"].sum(dim=1) if "attention_mask" in batch else padding_begins(batch)
    end = min(-(-int(ends.max()) // multiple) * multiple, length)
    found = {name: value[:, :end].contiguous() if value.ndim > 1 else value for name, value in batch.items()}
    if "attention_mask" in found and bool(found["attention_mask"].all()):
        found.pop("attention_mask")
    return found


def count_targets(labels: Tensor, *, causal: bool, ignored: int = IGNORED_LABEL) -> int:
    """Count the targets of a batch's loss: integer labels that are not `ignored`, without the first of each sequence for a causal
    model (labels `[batch, sequence]`, else `DataError`), or every floating-point label."""
    if labels.is_floating_point():
        return labels.numel()
    if causal:
        if labels.ndim < 2:
            raise DataError(f"labels of a causal model are [batch, sequence]; these have shape {list(labels.shape)}")
        labels = labels[..., 1:]
    return int((labels != ignored).sum())


def shifted(labels: Tensor) -> Tensor:
    """Return labels `[batch, sequence]` shifted left, so that position i holds the label of i + 1, and the last -100."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRules:
    collate: Collate | None = None
    vocab_size: int | None = None
    causal: bool = False
    classes: int | None = None
    fields: frozenset[str] | None = None  # Names of the fields that the model's forward accepts; None accepts all.
    named: frozenset[str] | None = None  # Names of the parameters of forward; None: samples keep all fields.
    unused: bool | None = None
    """True if collators get only what forward takes, False if they get all. None drops text beside the model's inputs, which cannot
    become a tensor, and before collators of transformers, which make tensors of all fields, what forward does not take."""
    length_multiple: int | None = None  # of tokens, to which padding at the end of texts is cut; None keeps all padding

    def make_batch(self, dataset: Any, indices: Sequence[int]) -> dict[str, Any]:
        """Return the checked batch of these dataset indices, which errors of the user's code name. Raises `DataError`."""
        samples: list[Any] = []
        with ending_children():
            try:
                for index in indices:
                    samples.append(self._collator_fields(dataset[index], index))
                batch: Any = default_collate(samples, indices) if self.collate is None else self.collate(samples)
            except Exception as error:
                if not isinstance(error, ZeromeshError):
                    whole, at = len(samples) == len(indices), indices[len(samples) :][:1]
                    where = f"in a batch of the samples {some(indices, 8)}" if whole else f"in sample {some(at)}"
                    error.add_note(f"{where} of the dataset")
                raise
        if not isinstance(batch, Mapping):
            cure = "it should give a mapping of the model's argument names to tensors"
            raise DataError(f"data_collator gave a {type(batch).__name__} for samples {some(indices, 8)}; {cure}")
        self.check(batch, indices)
        return dict(batch) if self.length_multiple is None else without_padding(batch, self.length_multiple)

    def check(self, batch: Mapping[str, Any], indices: Sequence[int]) -> None:
        """Raise `DataError` for `input_ids`, or labels of a causal model, outside of the vocabulary, and for labels of a classifier
        outside of its classes. `indices` are the dataset indices of the batch's samples."""
        inputs, labels, samples = batch.get("input_ids"), batch.get("labels"), some(indices, 8)
        if self.causal and isinstance(inputs, Tensor) and isinstance(labels, Tensor) and inputs.shape != labels.shape:
            why = f"labels of samples {samples} have shape {list(labels.shape)}, and input_ids {list(inputs.shape)}"
            each = f"a label for every input ({IGNORED_LABEL} where nothing is to be learnt)"
            raise DataError(f"{why}; a causal model has {each}, and shifts them itself")
        sizes = {"input_ids": self.vocab_size, "labels": self.vocab_size if self.causal else self.classes}
        for field, size in sizes.items():
            ids = batch.get(field)
            if size is None or not isinstance(ids, Tensor) or ids.numel() == 0:
                continue
            what, cure = f"vocabulary has {size} tokens (ids", MORE_TOKENS
            needs = "token ids are integers"
            if field == "labels" and not self.causal:
                what, cure = f"head has {size} classes (labels", "number classes from 0, or raise num_labels in model.config"
                needs = "classes are integers, and a model with num_labels 1 takes numbers"
                if ids.is_floating_point() and ids.ndim > 1:
                    continue  # Multi-label targets are floats.
            if ids.is_floating_point():
                raise DataError(f"{field} of samples {samples} are {ids.dtype}; {needs}")
            wrong, ignored = (ids < 0) | (ids >= size), ""
            if field == "labels":
                wrong, ignored = wrong & (ids != IGNORED_LABEL), f", and {IGNORED_LABEL} for no target"
            if bool(wrong.any()):
                where = wrong.nonzero()[0].tolist()
                known = ids.ndim > 0 and ids.shape[0] == len(indices)
                sample = f"sample {indices[where[0]]}" if known else f"one of samples {samples}"
                place = where[1:] if known else where
                why = f"{sample}: {field}{place or ''} is {int(ids[tuple(where)])}"
                raise DataError(f"{why}, but the model's {what} 0 to {size - 1}{ignored}); {cure}")

    def drop_fields(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        named, library, known = self.named, is_library(self.collate), self.fields is not None
        if named is None or self.unused is False:
            return dict(sample)
        if self.unused:
            return {name: value for name, value in sample.items() if name in named or name in _LABELS}
        if not (known or library) or not (named - _LABELS).intersection(sample):
            return dict(sample)

        def passes(name: str, value: Any) -> bool:
            first = value[0] if isinstance(value, list | tuple) and value else value
            # Transformers' collators read labels and this mask.
            taken = name in named or name in (*_LABELS, "special_tokens_mask")
            return taken or not (isinstance(first, str | None) or (library and known))

        return {name: value for name, value in sample.items() if passes(name, value)}

    def accepted(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if self.fields is None or name in self.fields}

    def _collator_fields(self, sample: Any, index: int) -> Any:
        """Return a sample with the fields that the collator gets. Raises `DataError` if none is left, and for text labels."""
        if not isinstance(sample, Mapping):
            return sample
        names = ("labels", *_LABEL_NAMES) if is_library(self.collate) else ()
        labels = {name: sample[name] for name in names if name in sample}
        if labels and all(isinstance(label, str) for label in labels.values()):
            name, label = next(iter(labels.items()))
            why = f"sample {index}: {name} is text ({label!r:.40}), of which no number can be made"
            raise DataError(f"{why}; number classes (dataset.class_encode_column({name!r})), or pass a data_collator that does")
        found = self.drop_fields(sample)
        texts = [name for name, value in found.items() if name in (self.named or ()) and isinstance(value, str | bytes)]
        if texts and self.collate is None:
            raise DataError(f"sample {index}: {texts[0]} is text, which forward takes; pass a data_collator for it")
        if not found and sample:
            why = f"sample {index} has no field that the model's forward takes: {_field_list(sample)}. Name its fields after them"
            raise DataError(f"{why}, or, if the data_collator makes them, set data.remove_unused: false (remove_unused_columns)")
        return found


@contextmanager
def ending_children() -> Iterator[None]:
    """End a process that is forked inside the block at the end of the block, with its exit status, since resources outside of the
    block (process groups, the board, locks, open files) belong to the parent alone."""
    parent, ending = os.getpid(), None
    try:
        yield
    except BaseException as error:
        if os.getpid() == parent:
            raise
        ending = error.code if isinstance(error, SystemExit) else traceback.format_exc().rstrip()
    if os.getpid() != parent:
        if not isinstance(ending, int | None):
            sys.stderr.write(f"{ending}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending if isinstance(ending, int) else int(ending is not None))
