"""Initial values from a local Hugging Face model directory, streamed so that a rank reads only its part where possible.

Parameters that are stored unchanged are read by element range. One that the library converts (stacked experts,
split projections) is converted whole on CPU, one conversion at a time, and the latest one is cached. Headers are
checked before anything else is read (`checkpoint/format/safetensors_layout.py`), and nothing is executed.

transformers renames and converts weights as it loads them (eight expert matrices into one parameter, a fused projection into
three). Loading is planned here on meta tensors, so names, shapes and failures are known before anything is read. The reverse is
in `models/hub_form.py`.
"""

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import logging

from zeromesh.checkpoint.format.safetensors_layout import INDEX, SINGLE, StoredTensor, parse_json, read_header
from zeromesh.checkpoint.io.reader import manifest_of
from zeromesh.errors import CheckpointError, ConfigError, LayoutError, counted, library_errors, some
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.weight_init.weight_sources import (
    INITIALISER_ERRORS,
    LostValuesError,
    ParameterSource,
    SeededSource,
    Skeleton,
    canonical_names,
    check_interval,
)

_SHOWN = 20
_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A group of file tensors that are converted into tensors of the model.

    `sources` holds (pattern, name in the file) in the order in which the library combines them.
    """

    target: str
    converter: Any
    sources: list[tuple[str, str]]

    def run(self, read: Callable[[str], torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name; `read` returns a whole tensor of the file."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        result = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """The sources of the values of the model's tensors."""

    direct: Mapping[str, str]
    """Names in the file of tensors that are stored unchanged."""
    converted: Mapping[str, Conversion]
    new: tuple[str, ...]
    """Parameters of a new head, which are in no file."""
    unused: tuple[str, ...]
    """File tensors of another head."""

    def provides(self, name: str) -> bool:
        return name in self.direct or name in self.converted


def match(model: Any, entries: Mapping[str, StoredTensor]) -> Matched:
    """Match the tensors of `entries` with the state of the Hugging Face model `model`, which may be on meta.

    Parameters outside of the base model and poolers may be absent (a new head) or unused (another head). A classifier's parameters
    for another number of classes count as those of another head. Anything else that is missing, unexpected or of another shape is
    listed in one `ConfigError`.
    """
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    direct, groups, unexpected = _rename(model, entries, state)
    converted: dict[str, Conversion] = {}
    shapes = {name: entries[source].spec.shape for name, source in direct.items()}
    for conversion in groups:
        for name, value in _planned(conversion, entries, model).items():
            if name in state:
                converted[name] = conversion
                shapes[name] = tuple(value.shape)
            else:
                unexpected.append(name)
    base = model.base_model_prefix
    has_base = bool(base) and hasattr(model, base)
    files_have_base = bool(base) and any(entry.startswith(f"{base}.") for entry in entries)

    def in_head(name: str, *, apart: bool) -> bool:
        """Return True for a tensor outside of the base model, if that is `apart`, or of a pooler, which only some heads use."""
        return (apart and not name.startswith(f"{base}.")) or "pooler" in name.split(".")

    for name in [name for name in direct if in_head(name, apart=has_base) and _counts_classes(model, state[name])]:
        if shapes[name][:1] != state[name].shape[:1] and shapes[name][1:] == state[name].shape[1:]:
            del direct[name], shapes[name]
    # Parameters without a value. One of several names of a tied parameter is enough, and buffers can be recomputed.
    canonical = canonical_names(model)
    have = {canonical[name] for name in (*direct, *converted) if name in canonical}
    missing = [name for name in state if canonical.get(name) == name and name not in have]
    may_lack = getattr(model, "_keys_to_ignore_on_load_missing", None)
    new = [name for name in missing if _fits(name, may_lack) or in_head(name, apart=has_base)]
    unused = [name for name in unexpected if _ignored(model, name) or in_head(name, apart=files_have_base)]
    # Files may have any number of extra tensors, so membership is a set look-up.
    allowed = {*new, *unused}
    problems = [f"{name} is missing" for name in missing if name not in allowed]
    problems += [f"{name} is not part of {type(model).__name__}" for name in unexpected if name not in allowed]
    for name, shape in shapes.items():
        if shape != tuple(state[name].shape):
            problems.append(f"{name} has shape {list(shape)}, the model has {list(state[name].shape)}")
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError(problems[:_SHOWN] + more, where="model.source: the files do not fit the model")
    shown = [name for name in unused if not _ignored(model, name)]
    return Matched(direct=direct, converted=converted, new=tuple(new), unused=tuple(shown))


def _counts_classes(model: Any, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == getattr(model.config, "num_labels", None)


def _rename(
    model: Any, entries: Mapping[str, StoredTensor], state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], list[Conversion], list[str]]:
    """Match names in the order of the library's `convert_and_load_state_dict_in_model`; returns direct, converted and unexpected
    names."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    direct: dict[str, str] = {}
    groups: dict[str, Conversion] = {}
    unexpected: list[str] = []
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if pattern is not None:
            new = Conversion(target=target, converter=by_pattern[pattern], sources=[])
            groups.setdefault(target, new).sources.append((pattern, name))
        elif target in state:
            direct[target] = name
        else:
            unexpected.append(target)
    return direct, list(groups.values()), unexpected


def _planned(conversion: Conversion, entries: Mapping[str, StoredTensor], model: Any) -> dict[str, torch.Tensor]:
    def empty(name: str) -> torch.Tensor:
        return torch.empty(entries[name].spec.shape, dtype=entries[name].spec.dtype, device="meta")

    try:
        return conversion.run(empty, model)
    except INITIALISER_ERRORS as error:
        names = ", ".join(name for _, name in conversion.sources[:4])
        raise ConfigError(
            f"{conversion.target} cannot be made from {names} ({counted(len(conversion.sources), 'tensor')}): {error}",
            where="model.source: the files do not fit the model",
        ) from error


def _ignored(model: Any, name: str) -> bool:
    """Return True for tensors that the library ignores: old buffers, and layers that it does not implement."""
    return _fits(name, getattr(model, "_keys_to_ignore_on_load_unexpected", None)) or _fits(name, _OLD_BUFFERS)


def _fits(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def read_class(directory: Path) -> tuple[Any, Any, str]:
    """Return the class and configuration of the model in a directory; or None twice, and the reason."""
    try:
        with library_errors():
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except ConfigError as error:
        return None, None, f"config.json is of no model that transformers knows ({error})"
    name = next(iter(config.architectures or ()), "")
    cls = getattr(transformers, name, None) if name else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        return None, None, f"{name or 'the model'} is no class of transformers"
    return cls, config, ""


@contextmanager
def quiet_library() -> Iterator[None]:
    """Limit transformers' logs to errors inside the block, without progress bars and Python warnings."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


MAX_INDEX_BYTES = 100_000_000
_READ_AHEAD = 256 << 20
"""Bytes that are prefetched into the page cache."""
_CHUNK = 1 << 22
"""Elements per prefetch."""
_WINDOW = 1 << 20
"""Elements per dtype conversion."""


class TensorFiles:
    """The tensors of a Hugging Face model directory by name; files are opened on first read."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Read and check the headers. Raises `ConfigError` with the damaged file and the reason."""
        self.directory = Path(directory)
        try:
            self.entries: Mapping[str, StoredTensor] = _read_headers(self.directory)
        except CheckpointError as error:  # The error is reported for the setting that names the file.
            raise ConfigError(f"{error}; download or save it again", where="model.source") from None
        self._files: dict[str, PositionalFile] = {}
        self._expected: Iterator[tuple[str, int, int]] = iter(())
        self._ahead = 0
        """Bytes of prefetches in progress."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        """The prefetch thread; its read errors are raised by `fill`, which reads again."""

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Prefetch elements [start, end) of tensors in this order, up to `_READ_AHEAD` bytes ahead of `fill`."""
        self._expected = (
            (name, begin, min(begin + _CHUNK, end))
            for name, start, end in ranges
            for begin in range(start, end, _CHUNK)
        )
        self._advance(0)

    def _advance(self, done: int) -> None:
        """Count `done` bytes as read, and prefetch more."""
        self._ahead -= done
        while self._ahead < _READ_AHEAD and (found := next(self._expected, None)) is not None:
            name, start, end = found
            entry = self.entries[name]
            size = entry.spec.dtype.itemsize
            file, length, offset = self._file(entry.path), (end - start) * size, entry.begin + start * size
            if not file.in_memory(offset + length - 1):
                self._thread.submit(file.read_ahead, offset, length)
            self._ahead += length

    def _file(self, path: str) -> PositionalFile:
        if path not in self._files:
            # The Hub's cache has symbolic links, which are not followed otherwise.
            self._files[path] = PositionalFile((self.directory / path).resolve(), direct=False, constant=True)
        return self._files[path]

    def read(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Read elements [start, end) of the flattened tensor `name`: 1-D, on CPU, in the file's dtype.

        Raises `StorageError` if the file gives fewer bytes than its header promises.
        """
        spec = self.entries[name].spec
        stop = spec.numel if end is None else end
        out = torch.empty(stop - start, dtype=spec.dtype, device="cpu")
        if out.numel():
            self.fill(name, StridedRows.whole(spec.numel), Interval(start=start, end=stop), out)
        return out

    def fill(self, name: str, rows: StridedRows, interval: Interval, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with the non-empty `interval` of elements of the columns `rows`, converted to its dtype.

        Raises as `read` does.
        """
        entry = self.entries[name]
        if out.device.type != "cpu" or out.dtype != entry.spec.dtype:
            for part in rows.windows(interval, _WINDOW):
                hull = rows.hull(part)
                there = out[part.start - interval.start : part.end - interval.start]
                rows.take(self.read(name, hull.start, hull.end), hull.start, part, there)
            return
        size, data = entry.spec.dtype.itemsize, out.view(torch.uint8)
        for row, count, parts in rows.blocks(interval):
            columns = [(start * size, length * size) for start, _, length in parts]
            stride = rows.width * size
            offset = entry.begin + row * stride
            data = data[self._file(entry.path).read_rows(data, offset, rows=count, columns=columns, stride=stride) :]
        self._advance(rows.hull(interval).length * size)

    def read_whole(self, name: str) -> torch.Tensor:
        return self.read(name).reshape(self.entries[name].spec.shape)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        while self._files:
            self._files.popitem()[1].close()


def _read_headers(directory: Path) -> dict[str, StoredTensor]:
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; a model of the Hub is downloaded first: "
            "`hf download NAME --local-dir DIR`",
            where="model.source",
        )
    _refuse_part(directory)
    if (directory / INDEX).is_file():
        return _read_indexed(directory)
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    cure = "save it as safetensors (`model.save_pretrained(DIR)` of transformers does)"
    found = f"{', '.join(pickled[:3])} is pickle, which runs code when it is loaded: {cure}" if pickled else cure
    raise ConfigError(f"{directory} has neither {INDEX} nor {SINGLE}; {found}", where="model.source")


def _refuse_part(directory: Path) -> None:
    """Raise `ConfigError` for one host's part of a checkpoint, as the parts of other hosts would be read as zeros."""
    try:
        index, count = manifest_of(directory)[1].part
    except CheckpointError:
        return  # Other tools write files of the same name.
    if count > 1:
        raise ConfigError(
            f"{directory} is part {index + 1} of {count} of a checkpoint, one of each host; put them together first: "
            "`zeromesh checkpoint merge PART PART ... --out DIR`",
            where="model.source",
        )


def _read_indexed(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    names = parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no `weight_map` of names to files")
    files = sorted(set(names.values()))
    for file in files:
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index} names the file {file!r}, which is not a plain name in the same directory")
    problems = [f"{file} is in {INDEX} and not in {directory}" for file in files if not (directory / file).is_file()]
    if not problems:
        headers = {file: read_header(directory / file) for file in files}
        missing = [name for name, file in names.items() if name not in headers[file]]
        problems = [f"{name} is not in {names[name]}, where {INDEX} says it is" for name in missing[:20]]
    if problems:
        raise ConfigError(problems, where="model.source")
    return {name: headers[file][name] for name, file in names.items()}


_COMPARED_ELEMENTS = 16384


class SafetensorsSource:
    """The parameters and buffers of `model` from the safetensors files of `directory`.

    Args:
        directory: with `model.safetensors`, or `model.safetensors.index.json` and its files.
        model: a Hugging Face model of the same architecture, which may be on the meta device.
        fallback: the source of parameters that no file has (a new classification head).

    `notes` are lines for the run to print. Raises `ConfigError` that lists every tensor that is missing, unexpected or of another
    shape, and for files that are broken; `LostValuesError` for values that neither the files nor `fallback` have.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: Any,
        fallback: ParameterSource,
    ) -> None:
        self._files = TensorFiles(directory)
        self._matched = match(model, self._files.entries)
        self._skeleton = Skeleton(model)
        self._fallback = fallback
        self._origin = _origins(model, self._matched)
        self._numel = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
        lost = fallback.lost() if isinstance(fallback, SeededSource) else ()
        if unknown := tuple(name for name in lost if not self._matched.provides(self._origin.get(name, name))):
            raise LostValuesError(unknown, "they are in no file either")
        self._compare_tied()
        self._made: dict[str, dict[str, torch.Tensor]] = {}
        """The tensors of the latest conversion, by its target."""
        remarks = {
            "not in {}, or there for other classes, so newly initialised": self._matched.new,
            "in {} and not used by this model": self._matched.unused,
        }
        where = self._files.directory
        self.notes = tuple(f"{text.format(where)}: {some(names, 6)}" for text, names in remarks.items() if names)

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a parameter in the file's dtype. Raises `StorageError` for a truncated file."""
        name = self._checked(fqn, start, end)
        if name in self._matched.direct:
            return self._files.read(self._matched.direct[name], start, end)
        if name in self._matched.converted:
            return self._converted(self._matched.converted[name])[name].reshape(-1)[start:end]
        return self._fallback.read(fqn, start, end)

    def fill(self, fqn: str, rows: StridedRows, interval: Interval, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with the non-empty `interval` of elements of the columns `rows` of a parameter, converted to its
        dtype; equal dtypes are read directly from the file. Raises as `read` does."""
        hull = rows.hull(interval)
        name = self._matched.direct.get(self._checked(fqn, hull.start, hull.end), "")
        if name:
            self._files.fill(name, rows, interval, out)
        else:
            rows.take(self.read(fqn, hull.start, hull.end), hull.start, interval, out)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Prefetch elements [start, end) of parameters, and all inputs of their conversions."""
        self._files.expect(self._stored_ranges(ranges))

    def _stored_ranges(self, ranges: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
        """Map element ranges of parameters to ranges of file tensors."""
        begun = set()
        for fqn, start, end in ranges:
            name = self._origin[fqn]
            conversion = self._matched.converted.get(name)
            if name in self._matched.direct:
                yield self._matched.direct[name], start, end
            elif conversion is not None and conversion.target not in begun:
                begun.add(conversion.target)
                for _, source in conversion.sources:
                    yield source, 0, self._files.entries[source].spec.numel

    def place(self, fqn: str, start: int, dtype: torch.dtype) -> tuple[Path, int] | None:
        """Return the file and byte offset of a parameter's elements; None if they need conversion."""
        name = self._matched.direct.get(self._checked(fqn, start, start), "")
        if not name or self._files.entries[name].spec.dtype != dtype:
            return None
        entry = self._files.entries[name]
        begin = entry.begin + start * dtype.itemsize
        # The Hub's cache has symbolic links, which are not followed otherwise.
        return None if begin % dtype.itemsize else ((self._files.directory / entry.path).resolve(), begin)

    def _checked(self, fqn: str, start: int, end: int) -> str:
        """Return a parameter's name in the files. Raises `LayoutError` for an interval out of range."""
        if fqn not in self._numel:
            raise LayoutError(f"{fqn} is not among the {len(self._numel)} parameters of this source")
        check_interval(fqn, start, end, self._numel[fqn])
        return self._origin[fqn]

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return the stored value of a persistent buffer in the file's dtype, or None."""
        if name in self._matched.direct:
            return self._files.read_whole(self._matched.direct[name])
        if name in self._matched.converted:
            return self._converted(self._matched.converted[name])[name]
        return None

    def release(self, fqn: str) -> None:
        self._fallback.release(fqn)

    def close(self) -> None:
        self._files.close()
        self._made.clear()
        self._fallback.close()

    def _converted(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        if conversion.target not in self._made:
            self._made.clear()
            self._made[conversion.target] = conversion.run(self._files.read_whole, self._skeleton.root)
        return self._made[conversion.target]

    def _compare_tied(self) -> None:
        """Raise `ConfigError` if the names of a tied parameter have different values in the files, as one would be lost."""
        problems = []
        for name, origin in self._origin.items():
            first, second = self._matched.direct.get(name), self._matched.direct.get(origin)
            if name == origin or first is None or second is None or first == second:
                continue
            count = self._numel[name]
            starts = {0, count // 2, max(0, count - _COMPARED_ELEMENTS)}
            ranges = [(start, min(count, start + _COMPARED_ELEMENTS)) for start in starts]
            if not all(torch.equal(self._files.read(first, *each), self._files.read(second, *each)) for each in ranges):
                problems.append(f"{name} and {origin} are one parameter in the model and differ in the files")
        if problems:
            problems.append("set model.config.tie_word_embeddings: false to train them apart")
            raise ConfigError(problems, where="model.source")


def _origins(model: Any, matched: Matched) -> dict[str, str]:
    """Map each parameter name to the name of the same parameter that the files have."""
    canonical = canonical_names(model)
    stored: dict[str, str] = {}
    for name, first in canonical.items():
        if matched.provides(name) and not matched.provides(first):
            stored.setdefault(first, name)
    return {name: stored.get(first, first) for name, first in canonical.items()}
