"""Initial values from a local Hugging Face model directory. Parameters that are stored unchanged are read by element range; those
that transformers converts are converted whole on CPU, one conversion at a time. Loading is planned on meta tensors, so that names,
shapes and failures are known before anything is read. `models/hub_form.py` has the reverse.

Encoded weights have a cache on disk: one file of bitsandbytes' form for each matrix, which the ranks of a host encode in shares,
<cache>/<key>/<parameter>.safetensors. The key is a digest of the source's files, the codec and the compute dtype."""

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from safetensors.torch import save
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import logging

from zeromesh import errors
from zeromesh.checkpoint.io.format import FileRecord, Manifest, TensorSpec, read_header
from zeromesh.checkpoint.io.reader import TensorFiles
from zeromesh.environment import setting
from zeromesh.errors import CheckpointError, ConfigError, LayoutError, StorageError, counted, library_errors, some
from zeromesh.files import refusals, write_whole
from zeromesh.flat.codec import Codec, EncodedParameter, EncodedPlace
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import ZeroOptions
from zeromesh.telemetry.status_board import Activity
from zeromesh.trainer.config.sections.model import WeightsSection
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.weights.quantized_files import QuantizedFiles, stored_form
from zeromesh.units.plan import encoded_names
from zeromesh.weight_init import weight_sources
from zeromesh.weight_init.weight_sources import BuiltModel, ParameterSource

_SHOWN = 20
_UNFIT = "model.source: the files do not fit the model"
_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
_CACHE_VERSION = 1  # of what is written: files of other versions are ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """File tensors that are converted together. `sources` holds (pattern, name in the file) in the order of the library."""

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
    """The origin of the model's tensors: `direct` has the names in the file of those that are stored unchanged, `new` are in no
    file, such as those of a new head; `unused` are file tensors that the model does not have, such as those of another head."""

    direct: Mapping[str, str]
    converted: Mapping[str, Conversion]
    new: tuple[str, ...]
    unused: tuple[str, ...]

    def provides(self, name: str) -> bool:
        return name in self.direct or name in self.converted


def match(model: Any, entries: Mapping[str, TensorSpec], quantizer: Any = None) -> Matched:
    """Match the tensors of `entries` with the state of the Hugging Face model `model`, which may be on meta. Parameters outside of
    the base model and poolers may be absent (a new head) or unused (another head, or one of other classes). Raises `ConfigError`
    that lists anything else that is missing, unexpected or of another shape."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    direct, groups, unexpected = _rename(model, entries, state, quantizer)
    converted: dict[str, Conversion] = {}
    shapes = {name: entries[source].shape for name, source in direct.items()}
    for conversion in groups:
        for name, value in _run_on_meta(conversion, entries, model).items():
            if name in state:
                converted[name] = conversion
                shapes[name] = tuple(value.shape)
            else:
                unexpected.append(name)
    base = model.base_model_prefix
    has_base = bool(base) and hasattr(model, base)
    files_have_base = bool(base) and any(entry.startswith(f"{base}.") for entry in entries)

    def may_differ(name: str, *, has_base_prefix: bool) -> bool:
        """Return True for a tensor of a task head, which lacks the prefix of the base model where names have it, or of a pooler."""
        return (has_base_prefix and not name.startswith(f"{base}.")) or "pooler" in name.split(".")

    classes = getattr(model.config, "num_labels", None)
    for name in [name for name in direct if may_differ(name, has_base_prefix=has_base)]:
        here, there = tuple(state[name].shape), shapes[name]
        if here[:1] == (classes,) != there[:1] and here[1:] == there[1:]:
            del direct[name], shapes[name]
    # Parameters without a value: a tied one needs a value under one of its names, and buffers are recomputed.
    canonical = weight_sources.canonical_names(model)
    have = {canonical[name] for name in (*direct, *converted) if name in canonical}
    missing = [name for name in state if canonical.get(name) == name and name not in have]
    may_lack = getattr(model, "_keys_to_ignore_on_load_missing", None)
    new = [name for name in missing if _matches(name, may_lack) or may_differ(name, has_base_prefix=has_base)]
    unused = [each for each in unexpected if _ignored(model, each) or may_differ(each, has_base_prefix=files_have_base)]
    # A set, since files may have many extra tensors.
    allowed = {*new, *unused}
    problems = [f"{name} is missing" for name in missing if name not in allowed]
    problems += [f"{name} is not part of {type(model).__name__}" for name in unexpected if name not in allowed]
    for name, shape in shapes.items():
        if shape != tuple(state[name].shape):
            problems.append(f"{name} has shape {list(shape)}, the model has {list(state[name].shape)}")
    if problems:
        raise ConfigError(errors.first_lines(problems, _SHOWN), where=_UNFIT)
    shown = [name for name in unused if not _ignored(model, name)]
    return Matched(direct=direct, converted=converted, new=tuple(new), unused=tuple(shown))


def _rename(
    model: Any, entries: Mapping[str, TensorSpec], state: Mapping[str, torch.Tensor], quantizer: Any
) -> tuple[dict[str, str], list[Conversion], list[str]]:
    """Match names as the library's `convert_and_load_state_dict_in_model`; returns direct, converted and unexpected ones."""
    transforms = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    direct: dict[str, str] = {}
    groups: dict[str, Conversion] = {}
    unexpected: list[str] = []
    general = {source for each in (quantizer.get_weight_conversions() if quantizer else ()) for source in each.source_patterns}
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
    for target, conversion in list(groups.items()):
        pattern, name = conversion.sources[0]
        # A quantizer's conversions of all weights leave those as they are that have no scales.
        if len(conversion.sources) == 1 and pattern in general and target in state:
            direct[target] = name
            del groups[target]
    return direct, list(groups.values()), unexpected


def _run_on_meta(conversion: Conversion, entries: Mapping[str, TensorSpec], model: Any) -> dict[str, torch.Tensor]:
    def empty(name: str) -> torch.Tensor:
        return torch.empty(entries[name].shape, dtype=entries[name].dtype, device="meta")

    names, count = ", ".join(name for _, name in conversion.sources[:4]), counted(len(conversion.sources), "tensor")
    with library_errors(_UNFIT, f"{conversion.target} cannot be made from {names} ({count}): "):
        return conversion.run(empty, model)


def _ignored(model: Any, name: str) -> bool:
    """Return True for tensors that the library ignores: old buffers, and layers that it does not implement."""
    return _matches(name, getattr(model, "_keys_to_ignore_on_load_unexpected", None)) or _matches(name, _OLD_BUFFERS)


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
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
    with ExitStack() as undone, warnings.catch_warnings(action="ignore"):
        undone.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            undone.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield


_COMPARED_ELEMENTS = 16384


class SafetensorsSource(ParameterSource):
    """The parameters and buffers of a Hugging Face model, on meta or not, from the `files` of a directory, closed with the source;
    `fallback` has those that no file has (a new head), `quantizer` is transformers', where it has to decode. `notes` are lines for
    the run to print. Raises `ConfigError` that lists every tensor that is missing, unexpected or of another shape."""

    def __init__(self, files: TensorFiles, model: Any, fallback: ParameterSource, quantizer: Any = None) -> None:
        self._files = files
        self._matched = matched = match(model, files.entries, quantizer)
        self.drawn = [each for each in matched.new if not _matches(each, getattr(model, "_keys_to_ignore_on_load_missing", None))]
        self._skeleton = weight_sources.Skeleton(model)
        self._fallback = fallback
        canonical = weight_sources.canonical_names(model)
        stored: dict[str, str] = {}
        for name, first in canonical.items():
            if matched.provides(name) and not matched.provides(first):
                stored.setdefault(first, name)
        self._origin = {name: stored.get(first, first) for name, first in canonical.items()}
        """The name that the files have, by each of the names of a (possibly tied) parameter."""
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        self._compare_tied()
        self.kept: QuantizedFiles | None = None  # read instead, under the names here, where its form is asked for
        self._converted: dict[str, dict[str, torch.Tensor]] = {}
        """The converted tensors by name, of the latest conversion alone, under the conversion's target."""
        remarks = {
            f"not in {files.directory}, or there for other classes, so newly initialised": matched.new,
            f"in {files.directory} and not used by this model": matched.unused,
        }
        self.notes = tuple(f"{text}: {some(names, 6)}" for text, names in remarks.items() if names)

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a parameter in the file's dtype. Raises `StorageError` for a truncated file."""
        found = self._stored(self._name_in_files(fqn, start, end), start, end)
        return self._fallback.read(fqn, start, end) if found is None else found

    def _stored(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor | None:
        """Return elements [start, end) of a flattened tensor of the model; None if the files do not have it."""
        if name in self._matched.direct:
            return self._files.elements(self._matched.direct[name], start, end)
        conversion = self._matched.converted.get(name)
        if conversion is None:
            return None
        if conversion.target not in self._converted:
            self._converted.clear()
            self._converted[conversion.target] = conversion.run(self._files.whole, self._skeleton.root)
        return self._converted[conversion.target][name].reshape(-1)[start:end]

    def fill(self, fqn: str, rows: StridedRows, interval: Interval, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with the non-empty `interval` of the columns `rows` of a parameter, converted. Raises as `read`."""
        hull = rows.hull(interval)
        name = self._matched.direct.get(self._name_in_files(fqn, hull.start, hull.end))
        if name is not None:
            self._files.fill(name, rows, interval, out)
        else:
            super().fill(fqn, rows, interval, out)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Prefetch elements [start, end) of parameters, and all inputs of their conversions."""
        kept, ranges = self.kept, list(ranges)
        if kept is not None:
            kept.expect(each for each in ranges if each[0] in kept.entries)
            ranges = [each for each in ranges if each[0] not in kept.entries]

        def stored_ranges() -> Iterator[tuple[str, int, int]]:
            begun = set()
            for fqn, start, end in ranges:
                name = self._origin[fqn]
                conversion = self._matched.converted.get(name)
                if name in self._matched.direct:
                    yield self._matched.direct[name], start, end
                elif conversion is not None and conversion.target not in begun:
                    begun.add(conversion.target)
                    for _, source in conversion.sources:
                        yield source, 0, self._files.entries[source].numel

        self._files.expect(stored_ranges())

    def file_position(self, fqn: str, start: int, dtype: torch.dtype) -> tuple[Path, int] | None:
        """Return the file and byte offset of a parameter's elements; None if they need conversion."""
        entry = self._files.entries.get(self._matched.direct.get(self._name_in_files(fqn, start, start), ""))
        if entry is None or not self._files.is_stored_as(entry.name, dtype) or entry.begin % dtype.itemsize:
            return None
        return self._files.path_of(entry.path), entry.begin + start * dtype.itemsize

    def encoded_in(self, fqn: str, codec: Codec, dtype: torch.dtype) -> tuple[QuantizedFiles, str] | None:
        """Return the files that have a parameter encoded by `codec`, and its name there; None without such."""
        name = self._matched.direct.get(self._origin[fqn], "")
        if isinstance(self._files, QuantizedFiles) and self._files.has_encoded(name, codec):
            return self._files, name
        if self.kept is None or not self.kept.has_encoded(fqn, codec) or self.kept.entries[fqn].dtype != dtype:
            return None
        return self.kept, fqn

    def encoded(self, fqn: str, codec: Codec, dtype: torch.dtype) -> EncodedParameter | None:
        """Return a parameter as the files have it, if they have it encoded by `codec`; None otherwise."""
        found = self.encoded_in(fqn, codec, dtype)
        return None if found is None else found[0].encoded(found[1])

    def encoded_place(self, fqn: str, codec: Codec, dtype: torch.dtype) -> EncodedPlace | None:
        found = self.encoded_in(fqn, codec, dtype)
        return None if found is None else found[0].place_of(found[1])

    def identity(self) -> tuple[Any, ...]:
        """Return what changes with the files: their paths, sizes and times of change."""
        paths = [self._files.path_of(path) for path in self._files.manifest.files]
        return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)

    def _name_in_files(self, fqn: str, start: int, end: int) -> str:
        """Return a parameter's name in the files. Raises `LayoutError` for an interval out of range."""
        if fqn not in self.shapes:
            raise LayoutError(f"{fqn} is not among the {len(self.shapes)} parameters of this source")
        weight_sources.check_interval(fqn, start, end, self.shapes[fqn].numel())
        return self._origin[fqn]

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return the stored value of a persistent buffer in the file's dtype, or None."""
        found = self._stored(name)
        return None if found is None else found.view(self._skeleton.root.get_buffer(name).shape)

    def release(self, fqn: str) -> None:
        self._fallback.release(fqn)

    def close(self) -> None:
        for files in filter(None, (self._files, self.kept)):
            files.close()
        self._converted.clear()
        self._fallback.close()

    def _compare_tied(self) -> None:
        """Raise `ConfigError` if the names of a tied parameter have different values in the files, as one would be lost."""
        problems = []
        for name, origin in self._origin.items():
            first, second = self._matched.direct.get(name), self._matched.direct.get(origin)
            if name == origin or first is None or second is None or first == second:
                continue
            count = self.shapes[name].numel()
            for start in {0, count // 2, max(0, count - _COMPARED_ELEMENTS)}:
                end = min(count, start + _COMPARED_ELEMENTS)
                if not torch.equal(*(self._files.elements(each, start, end) for each in (first, second))):
                    problems.append(f"{name} and {origin} are one parameter in the model and differ in the files")
                    break
        if problems:
            problems.append("set model.config.tie_word_embeddings: false to train them apart")
            raise ConfigError(problems, where="model.source")


def keep_encoded(
    built: BuiltModel, options: ZeroOptions, section: WeightsSection | None, mesh: Mesh, say: Callable[[str], object]
) -> list[str]:
    """Encode the frozen matrices of an undivided model whose source is files, unless the cache has them, and let the source read
    them there; all ranks call it. `say` gets progress. Returns notes. Raises `StorageError` if the cache cannot be written."""
    if options.weights is None or section is None:
        return []
    codec, dtype = options.weights.codec, options.precision.compute
    origins = [built.source.origin(name) for name in sorted(encoded_names(built.model, options.weights))]
    sources = {id(source): source for source, _ in origins if isinstance(source, SafetensorsSource)}
    if not sources:
        return []
    (source,) = sources.values()
    names = [name for origin, name in origins if origin is source and source.encoded_in(name, codec, dtype) is None]
    top = Path(section.cache or Path(setting("XDG_CACHE_HOME") or "~/.cache") / "zeromesh" / "weights").expanduser()
    parts = (_CACHE_VERSION, codec, dtype, *source.identity())
    folder = top / xxhash.xxh3_128_hexdigest("\n".join(map(repr, parts)).encode())
    environment, encoded = mesh.environment, 0
    # Shares do not depend on the files that are there, which other ranks write meanwhile.
    share = names[environment.local_rank :: environment.local_world_size]
    with refusals(folder, "filled with encoded weights", "; set model.weights.cache"):
        for number, name in enumerate(share):
            with suppress(OSError, CheckpointError):
                if read_header(folder / _cache_file(name)):
                    continue
            say(f"encoding the weights: {number} of {len(share)} matrices")
            shape, read = source.shapes[name], partial(_read, source, name, dtype)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            form = stored_form(name, shape, dtype, codec, codec.encode(read, shape.numel()), checked=True)
            write_whole(folder / _cache_file(name), save(form))
            encoded += 1
            mesh.post(Activity.IDLE)
    mesh.wait_for_all_ranks("encoding of weights")
    if not names:
        return []
    headers = {_cache_file(name): read_header(folder / _cache_file(name)) for name in names}
    records = {file: FileRecord(nbytes=(folder / file).stat().st_size, pieces=()) for file in headers}
    tensors = tuple(spec for header in headers.values() for spec in header.values())
    damaged = f"{str(folder)!r} is damaged; remove it, and the weights are encoded anew: "
    with errors.errors_as(StorageError, damaged, ConfigError):
        source.kept = QuantizedFiles(folder, Manifest(step=0, files=records, tensors=tensors))
    size, what = human_bytes(sum(each.nbytes for each in records.values())), f"{len(names)} matrices in {codec.name}"
    return [f"{what}, {size}: {'encoded now and kept' if encoded else 'read'} in {folder}"]


def _read(source: SafetensorsSource, name: str, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
    return source.read(name, start, end).to("cpu", dtype)


def _cache_file(name: str) -> str:
    return f"{name if len(name) < 200 else xxhash.xxh3_128_hexdigest(name.encode())}.safetensors"
