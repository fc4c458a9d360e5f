"""Datasets for training and evaluation, the same on every rank, built from the `data` section of a configuration: text is found,
rendered and tokenized, held out or not, and packed into sequences. Token ids are kept in a cache on disk (`token_cache.py`).

Folders of pictures are those of datasets' `imagefolder`, which decides what pictures are; files are listed, and not copied."""

import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeromesh.environment import available_cores
from zeromesh.errors import DataError, counted, library_errors, some
from zeromesh.trainer.config.sections.formats import format_of
from zeromesh.trainer.config.sections.training import EVAL, DataSection, paths_of
from zeromesh.trainer.data.conversations import Renderer, encode_rows
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.packing import MixedDataset, TokenDataset, byte_pair_entropy
from zeromesh.trainer.data.text_sources import TextSource, files_below, find_text, picture_suffixes, read_text
from zeromesh.trainer.data.token_cache import StoredText, TextAmount, TokenCache, TokenWriter
from zeromesh.trainer.data.tokenizer import ByteTokenizer, PretrainedTokenizer, TokenArray, Tokenizer, load_tokenizer
from zeromesh.trainer.formatting import Detail, human_bytes

_VERSION = 6  # of the tokenization code: cached tokens of other versions are ignored
_LARGE = 16 << 20  # bytes of input files, above which several processes tokenize conversations
_MOST_PROCESSES = 32
Classes = tuple[tuple[str, ...], bool]  # those of a model, as `class_names` returns them
_SEARCHED_ROWS = 64  # for the token that ends an answer


def load_datasets(
    section: DataSection,
    *,
    tokenizer: Tokenizer | None = None,
    cache: TokenCache | None = None,
    tell: Callable[[str], None] = lambda text: None,
    own: Classes = ((), False),
) -> RunData:
    """Read, tokenise and pack the text that `section` names; a `tokenizer` replaces the section's. `tell` gets progress lines.
    Without `data.eval`, `data.eval_fraction` of the documents are held out, chosen by a hash of their names: the same ones for
    every seed and machine. Where that leaves less than a sequence (few documents), the last sequences are held out instead.
    Raises `DataError` for a path, file, row, template or tokenizer that cannot be used, and for text of less than one sequence."""
    tokenizer = load_tokenizer(section.tokenizer) if tokenizer is None else tokenizer
    template = section.chat_template
    if template is not None and "{" not in template and "\n" not in template:
        if (path := Path(template).expanduser()).is_file():
            template = read_text(path, cure="save it as UTF-8")
        elif "/" in template or path.suffix:  # Else it may be a name that the tokenizer knows.
            raise DataError(f"data.chat_template: no file {template!r}; give a file, or the template itself")
    if template is not None and isinstance(tokenizer, PretrainedTokenizer):
        tokenizer, template = tokenizer.with_template(template), None
    return _DatasetLoader(section, tokenizer, tokenizer.digest(), template, cache or TokenCache(None), tell, own).load()


def _classes(found: Sequence[str], own: Classes, where: str) -> Sequence[str]:
    """Return the names of the classes by number: the model's `own`, or of a new head, those that are `found` in training data."""
    names, known = own
    with suppress(DataError):
        if known or (names and _numbers_of(found, names, where)):
            return names
    if len(found) == 1:  # transformers treats one class as a regression.
        raise DataError(f"{where} has no class but {found[0]!r}; labels need two")
    return (*found, *names[len(found) :])


def _numbers_of(labels: Sequence[str], classes: Sequence[str], where: str) -> list[int]:
    """Return the numbers of labels that are names, or numbers unless names are. Raises `DataError` for a label of no class."""
    plain = {} if any(map(str.isdecimal, classes)) else {str(number): number for number in range(len(classes))}
    numbers = plain | {name: number for number, name in enumerate(classes)}
    if unknown := sorted({*labels} - numbers.keys()):
        why = f"{where} has classes that the model does not have: {some(unknown)}; it has {some(classes, 8)}"
        raise DataError(f"{why}. Label with these, or give its classes by number in model.config.id2label")
    return [numbers[each] for each in labels]


def is_held_out(key: str, fraction: float) -> bool:
    """Return True if a hash of the document's name `key` places it in the held-out `fraction`."""
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


@dataclass(frozen=True, slots=True)
class _DatasetLoader:
    section: DataSection
    tokenizer: Tokenizer
    digest: str | None  # Digest of the tokenizer; None if it has none, and then nothing is cached.
    template: str | None
    cache: TokenCache
    tell: Callable[[str], None]
    own: Classes
    notes: list[str] = field(default_factory=list)
    answer_ends: set[int] = field(default_factory=set)
    classes: list[str] = field(default_factory=list)  # By number, since the first labelled text was loaded.

    def load(self) -> RunData:
        section = self.section
        sources = {
            where: find_text(paths_of(each), where=where, encoding=section.encoding) for where, each in section.eval_sets().items()
        }
        trained, held = dict[str, TokenDataset](), dict[str, TokenDataset]()
        entropy = None
        for name, part in section.parts().items():
            where = "data.train" if section.mixture is None else f"data.mixture.{name}.train"
            trained[name], apart, entropy = self._load_part(part, where, 0.0 if sources else section.eval_fraction)
            held |= {} if apart is None else {name: apart}
        train: Any = trained.get("train")
        evaluation: Any = held.get("train")
        if section.mixture is not None:
            weights = [part.weight for part in section.mixture.values()]
            train, evaluation, entropy = MixedDataset(list(trained.values()), weights), held or None, None
            total = sum(train.weights)
            shares = [f"{name} {weight / total:.1%}" for name, weight in zip(trained, train.weights, strict=True)]
            self.notes.append(f"data.mixture: {', '.join(shares)} of sequences; an epoch has {len(train):,} of them")
        if sources:
            found: dict[str, TokenDataset] = {}
            for where, source in sources.items():
                own, name = self._section_of(source, where), where.removeprefix(EVAL).removeprefix(".")
                text = self._read(own, source, 0.0)
                found[name] = self._pack(own, text, 0, text.kept, f"{where} {source.name!r}")
            evaluation = found.get("", found)
        if entropy is not None:
            self.notes.append(Detail(f"byte-pair entropy of the training text: {entropy:.4f} nats per byte, the loss to beat"))
        facts: dict[str, Any] = {"answer_ends": tuple(self.answer_ends), "classes": tuple(self.classes)}
        facts |= {"notes": tuple(self.notes), "byte_pair_entropy": entropy}
        return RunData(train=train, eval=evaluation, tokenizer=self.tokenizer, **facts)

    def _section_of(self, source: TextSource, where: str) -> DataSection:
        """Return the section for an evaluation set, whose rows may have the columns of another format than `data.format`."""
        columns, section = source.columns(), self.section
        form, needed = format_of(columns), Renderer(self.tokenizer, section, self.template).needed
        classifies = any(each.label for each in section.formats)  # Only the training data's classes can be evaluated.
        if form in ("text", section.format) or columns.issuperset(needed) or classifies:
            return section
        self.notes.append(f"{where} {source.name!r} has rows of format {form}")
        # Rows share a sequence only if the model was found to keep the documents of one sequence apart.
        return section.model_copy(update={"format": form, "mixture": None, "packing": section.packing and section.separates})

    def _load_part(
        self, section: DataSection, where: str, fraction: float
    ) -> tuple[TokenDataset, TokenDataset | None, float | None]:
        """Return the sequences to train on, those held out of them, and the byte-pair entropy of the text."""
        source = find_text(paths_of(section.train), where=where, encoding=section.encoding)
        where = f"{where} {source.name!r}"
        text = self._read(section, source, fraction)
        kept, held, entropy = text.kept, text.held, text.remarks["entropy"]
        joined, length = section.rows.is_joined, section.sequence_length
        apart = all(each.tokens >= length if joined else each.documents > 0 for each in (kept, held))
        if not apart:
            kept = TextAmount(*map(sum, zip(kept, held, strict=True)))
            entropy = text.remarks["entropy of all"]
        names = set(text.remarks["labels"])
        if section.rows.label is not None and not self.classes:
            whole = all(re.fullmatch(r"\d{1,9}", each) for each in names)
            self.classes.extend(_classes(sorted(names, key=int if whole else str), self.own, where))
        if section.rows.is_joined:
            self.answer_ends.add(self.tokenizer.end_of_text)
        elif section.rows.has_answers:
            with suppress(DataError):  # With loss_on: all, the template need not mark answers.
                renderer = Renderer(self.tokenizer, section, self.template)
                ending = renderer.answer_end_token(islice(renderer.rows(source, []), _SEARCHED_ROWS))
                self.answer_ends.update([ending] if ending is not None else [])
        self.notes.extend(source.notes)
        train, evaluation = self._pack(section, text, 0, kept, where), None
        if apart:
            evaluation = self._pack(section, text, kept.tokens, held, f"{where}, held out")
        elif fraction and len(train) < 2:
            self.notes[-1] += "; too little to hold any out for evaluation"
        elif fraction:
            head = len(train) - min(max(1, math.floor(len(train) * fraction)), len(train) - 1)
            train, evaluation = replace(train, cuts=train.cuts[: head + 1]), replace(train, cuts=train.cuts[head:])
            few = f"the last {len(evaluation)} sequences are held out"
            self.notes.append(f"{where}: too few documents to hold out whole ones; {few}")
        if skipped := text.remarks["skipped"]:
            kind, files = "text" if joined else "rows", counted(len(skipped), "file")
            self.notes.append(f"{where}: left out {files} that are not {kind}, such as {skipped[0]!r}")
        return train, evaluation, entropy

    def _read(self, section: DataSection, source: TextSource, fraction: float) -> StoredText:
        form, renderer = section.rows, Renderer(self.tokenizer, section, self.template)
        values: list[Any] = [_VERSION, self.digest, fraction, source.description(), section.format, section.text_field]
        if not form.is_joined:
            values += [renderer.columns, self.template, section.loss_on == "answers", section.sequence_length]
        key = None
        if self.digest is not None:
            key = hashlib.blake2b(json.dumps(values).encode(errors="surrogateescape"), digest_size=16).hexdigest()
        skipped: list[str] = []
        counts: Counter[str] = Counter()
        labels: tuple[list[str], list[str]] = ([], [])

        def write(kept: TokenWriter, held: TokenWriter) -> None:
            began, size = time.monotonic(), sum(file.path.stat().st_size for file in source.files)
            processes = min(available_cores(), _MOST_PROCESSES) if size > _LARGE and form.has_answers else 0
            for row in encode_rows(renderer.rows(source, skipped), renderer, processes):
                counts["rows"] += 1
                ids, targets = row.ids, row.targets
                if form.has_answers:
                    ids, targets = ids[: section.sequence_length], targets[: section.sequence_length]
                    learnt = int(targets[1:].sum())
                    cut = len(row.ids) > section.sequence_length
                    counts.update({"cut": cut, "inside": row.split, "targets": learnt, "without a target": not learnt})
                    ids = ids if learnt else ids[:0]
                if not (row.text_bytes if form.is_joined else ids.size):
                    continue
                apart = is_held_out(row.key, fraction)
                (held if apart else kept).append(ids, text_bytes=row.text_bytes, targets=targets)
                labels[apart].extend([] if row.label is None else [row.label])
                done = kept.amount.text_bytes + held.amount.text_bytes
                speed = human_bytes(done / max(time.monotonic() - began, 1e-3))
                self.tell(f"tokenizing {source.name}: {human_bytes(done)} of {human_bytes(size)}, {speed}/s")

        def remarks(tokens: TokenArray, count: int) -> dict[str, Any]:
            found: dict[str, Any] = {"skipped": skipped, "counts": counts, "labels": [*labels[0], *labels[1]]}
            for name, part in {"entropy": tokens[:count], "entropy of all": tokens}.items():
                counted = form.is_joined and isinstance(self.tokenizer, ByteTokenizer) and part.size > 1
                found[name] = byte_pair_entropy(part) if counted else None
            return found

        return self.cache.get(key, self.tokenizer.vocab_size, write, remarks, marked=not form.is_joined)

    def _pack(self, section: DataSection, text: StoredText, first: int, amount: TextAmount, where: str) -> TokenDataset:
        length = section.sequence_length
        if not section.rows.is_joined:
            return self._pack_rows(section, text, first, amount, where)
        sequences, dropped = divmod(amount.tokens, length)
        if not sequences:
            why = f"{where} holds {amount.tokens} tokens in {amount.documents} documents"
            raise DataError(f"{why}, less than one sequence of {length}; give more text, or lower data.sequence_length")
        what = f"{where}: {amount.text_bytes:,} bytes of text in {amount.documents:,} documents"
        note = f"{what}, {amount.tokens:,} tokens, {sequences:,} sequences of {length}"
        if dropped:
            note += f"; the last {dropped} tokens are no whole sequence and are dropped"
        self.notes.append(Detail(note))
        masked = not all(each.is_joined for each in self.section.formats)  # Rows of the mixture have a mask too.
        keys = {"separate": self.section.separates, "masked": masked, "separator": self.tokenizer.end_of_text}
        return TokenDataset.join(text, first, amount, length, begin=next(iter(self.tokenizer.prefix_ids), None), **keys)

    def _pack_rows(self, part: DataSection, text: StoredText, first: int, held: TextAmount, where: str) -> TokenDataset:
        length, counts, classes = part.sequence_length, Counter(text.remarks["counts"]), None
        if not counts["rows"]:
            raise DataError(f"{where} has no rows")
        if not held.documents:
            why = f"{where} holds {counted(counts['rows'], 'row')}, and none has a target of the loss in its first"
            cure = "look whether the messages have an answer of role assistant, or set data.loss_on: all"
            raise DataError(f"{why} {counted(length, 'token')}; raise data.sequence_length, {cure}")
        if labelled := part.rows.label is not None:
            own = text.remarks["labels"][text.kept.documents if first else 0 :][: held.documents]
            classes = np.asarray(_numbers_of(own, self.classes, where), np.int64)
        packing, separate = part.packing and not labelled, self.section.separates and not labelled
        separator = self.tokenizer.padding if labelled else self.tokenizer.end_of_text
        keys = {"separate": separate, "separator": separator, "labels": classes}
        found = TokenDataset.pack(text, first, held, length, packing=packing, **keys)
        filled = held.tokens / (len(found) * length)
        what = f"{where}: {counted(held.documents, 'row', ',')}, {counted(held.tokens, 'token', ',')}"
        note = f"{what}, in {counted(len(found), 'sequence', ',')} of {length}, which they fill to {filled:.0%}"
        if labelled:
            note += f"; {len(self.classes)} classes: {some(self.classes, 8)}"
        elif not first:  # Counts are of kept and held-out rows together, and are noted once.
            note += f"; targets of the loss are {counts['targets']:,} tokens of all rows"
            note += "".join(f"; {line.format(counts[kind])}" for kind, line in _ROW_NOTES.items() if counts[kind])
        loud = labelled or (not first and any(counts[kind] for kind in _ROW_NOTES))
        self.notes.append(note if loud else Detail(note))
        return found


_ROW_NOTES = {
    "cut": "{:,} rows are longer than data.sequence_length and are cut",
    "without a target": "{:,} have no target and are left out",
    "inside": "in {:,} an answer begins or ends inside of a token, which is no target then",
}
"""Messages about rows that were cut or left out, by the key of their number in `remarks["counts"]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureDataset:
    files: Sequence[tuple[Path, int]]
    processor: Any
    mode: str  # Pillow's, such as RGB

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `pixel_values`, float `[channels, height, width]`, and `labels`. Raises `DataError` for a broken file."""
        from datasets import Image

        path, label = self.files[index]
        with library_errors(before=f"{str(path)!r} cannot be read as a picture: ", kind=DataError):
            picture = Image().decode_example({"path": str(path), "bytes": None}).convert(self.mode)
        pixels = self.processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": torch.tensor(label)}


def load_pictures(section: DataSection, processor: Any, mode: str, own: Classes = ((), False)) -> RunData:
    """List the pictures that `section` names, of the model's `own` classes or else new ones; without `data.eval`,
    `data.eval_fraction` of them are held out by name. Raises `DataError` for folders without pictures in sub-folders, unknown
    labels, files that are no pictures, and without Pillow."""
    with library_errors(before="data.format: pictures need Pillow: pip install Pillow; ", kind=DataError):
        import PIL.Image  # noqa: F401
    found = {key: _listed(source, key) for key, source in {"data.train": section.train, **section.eval_sets()}.items()}
    listed = found["data.train"]
    classes = _classes(sorted({path.parent.name for path in listed}), own, "data.train")
    sets: dict[str, PictureDataset] = {}
    if len(found) == 1 and section.eval_fraction:
        held = {each for each in listed if is_held_out("/".join(each.parts[-2:]), section.eval_fraction)}
        found = {key: [each for each in listed if (each in held) == (key == EVAL)] for key in ("data.train", EVAL)}
    for key, files in found.items():
        numbered = [*zip(files, _numbers_of([path.parent.name for path in files], classes, key), strict=True)]
        sets[key.removeprefix(f"{EVAL}.")] = PictureDataset(files=numbered, processor=processor, mode=mode)
    train = sets.pop("data.train")
    notes = (f"data.train: {len(train):,} pictures in {len(classes)} classes: {some(classes, 8)}",)
    evaluated: Any = sets.get(EVAL, sets) or None
    return RunData(train=train, eval=evaluated, classes=tuple(classes), processor=processor, notes=notes)


def _listed(source: Any, where: str) -> list[Path]:
    """Return the paths of the pictures, sorted in each folder, after checking the file headers."""
    import PIL.Image

    kinds, broken, found = picture_suffixes(), list[str](), list[Path]()
    for root in map(Path, paths_of(source)):
        if not (folder := root.expanduser()).is_dir():
            raise DataError(f"{where}: {str(root)!r} is no folder; give one whose sub-folders of pictures are labels")
        names = [name for name in files_below(folder) if name.lower().endswith(kinds)]
        if wrong := [name for name in names if name.count("/") != 1]:
            why = f"{where}: {str(folder / wrong[0])!r} does not lie in a sub-folder of {str(root)!r} that is its label"
            raise DataError(f"{why}; a folder of splits is given split by split (data.train, data.eval)")
        found += [folder / name for name in names]
    for path in found:
        try:
            with PIL.Image.open(path):
                pass
        except (OSError, ValueError, PIL.Image.DecompressionBombError):
            broken.append(str(path))
    if broken:
        raise DataError(f"{where}: {len(broken)} of {counted(len(found), 'file')} are no pictures: {some(broken, 8)}")
    if not found:
        raise DataError(f"{where}: no picture in sub-folders of {', '.join(map(str, paths_of(source)))}")
    return found
