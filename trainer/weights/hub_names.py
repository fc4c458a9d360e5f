"""The names and shapes that weights have in files and on the Hub, and those that they have in a model.

transformers renames and converts weights as it loads them (eight expert matrices into one parameter, a fused projection into
three). Loading is planned here on meta tensors, so names, shapes and failures are known before anything is read. For writing,
`revert_weight_conversion` undoes it for a whole state dict; here it is asked for one group of tensors at a time, those that go into
one conversion together.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import logging

from zeromesh.checkpoint.format.safetensors_layout import Entry
from zeromesh.errors import CheckpointError, ConfigError, some, summary
from zeromesh.weight_init.weight_sources import INITIALISER_ERRORS, canonical_names

_SHOWN = 20
_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")

ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Tensors of the file that together become one or several tensors of the model.

    `sources` holds (pattern, name in the file) in the order in which the library combines them.
    """

    target: str
    converter: Any
    sources: list[tuple[str, str]]

    def run(self, read: ReadTensor, model: Any) -> dict[str, torch.Tensor]:
        """The model's tensors by name; `read` gives a whole tensor of the file, in its shape."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        result = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """Where the values of the model's tensors are."""

    direct: Mapping[str, str]
    """Tensors that are in the file unchanged, to their names there."""
    converted: Mapping[str, Conversion]
    new: tuple[str, ...]
    """Parameters of a new head, which are in no file."""
    unused: tuple[str, ...]
    """Tensors of the file for another head."""

    def provides(self, name: str) -> bool:
        """Whether the file has a value for `name`."""
        return name in self.direct or name in self.converted


def match(model: Any, entries: Mapping[str, Entry]) -> Matched:
    """Match the tensors of `entries` with the state of the Hugging Face model `model`, which may be on meta.

    Parameters outside of the base model may be absent (a new head) and present without use (another head), and so may poolers.
    Anything else that is missing, unexpected or of another shape is listed in one `ConfigError`.
    """
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    direct, groups, unexpected = _rename(model, entries, state)
    converted: dict[str, Conversion] = {}
    shapes = {name: entries[source].shape for name, source in direct.items()}
    for conversion in groups:
        for name, value in _planned(conversion, entries, model).items():
            if name in state:
                converted[name] = conversion
                shapes[name] = tuple(value.shape)
            else:
                unexpected.append(name)
    found = {*direct, *converted}
    missing = _missing(model, state, found)
    new = [name for name in missing if _optional(model, name)]
    unused = [name for name in unexpected if _ignored(model, name) or _for_another_head(model, entries, name)]
    problems = [f"{name} is missing" for name in missing if name not in new]
    problems += [f"{name} is not part of {type(model).__name__}" for name in unexpected if name not in unused]
    for name, shape in shapes.items():
        if shape != tuple(state[name].shape):
            problems.append(f"{name} has shape {list(shape)}, the model has {list(state[name].shape)}")
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError(problems[:_SHOWN] + more, where="model.source: the files do not fit the model")
    shown = [name for name in unused if not _ignored(model, name)]
    return Matched(direct=direct, converted=converted, new=tuple(new), unused=tuple(shown))


def _rename(
    model: Any, entries: Mapping[str, Entry], state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], list[Conversion], list[str]]:
    """Match in the library's own order (`convert_and_load_state_dict_in_model`): what is direct, converted and unexpected."""
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


def _planned(conversion: Conversion, entries: Mapping[str, Entry], model: Any) -> dict[str, torch.Tensor]:
    def empty(name: str) -> torch.Tensor:
        return torch.empty(entries[name].shape, dtype=entries[name].dtype, device="meta")

    try:
        return conversion.run(empty, model)
    except INITIALISER_ERRORS as error:
        names = ", ".join(name for _, name in conversion.sources[:4])
        raise ConfigError(
            f"{conversion.target} cannot be made from {names} ({len(conversion.sources)} tensors): {error}",
            where="model.source: the files do not fit the model",
        ) from error


def _missing(model: Any, state: Mapping[str, torch.Tensor], found: set[str]) -> list[str]:
    """Parameters without a value. One of several names of a tied parameter is enough, and buffers can be recomputed."""
    canonical = canonical_names(model)
    have = {canonical[name] for name in found if name in canonical}
    return [name for name in state if canonical.get(name) == name and name not in have]


def _optional(model: Any, name: str) -> bool:
    """Whether a parameter may be absent: a head, or the pooler that only some heads use."""
    prefix = model.base_model_prefix
    outside = bool(prefix) and hasattr(model, prefix) and not name.startswith(f"{prefix}.")
    return (
        _fits(name, getattr(model, "_keys_to_ignore_on_load_missing", None)) or outside or "pooler" in name.split(".")
    )


def _ignored(model: Any, name: str) -> bool:
    """Whether the library itself passes over a tensor of this name: old buffers, and layers that it does not implement."""
    return _fits(name, getattr(model, "_keys_to_ignore_on_load_unexpected", None)) or _fits(name, _OLD_BUFFERS)


def _for_another_head(model: Any, entries: Mapping[str, Entry], name: str) -> bool:
    prefix = f"{model.base_model_prefix}."
    has_base = model.base_model_prefix != "" and any(entry.startswith(prefix) for entry in entries)
    return (has_base and not name.startswith(prefix)) or "pooler" in name.split(".")


def _fits(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tensors of a model that together become other ones."""

    names: tuple[str, ...]
    converted: bool
    outputs: Tensors
    """What they become, by name, on the meta device."""


class HubNames:
    """The names that tensors of a model have on the hub. `note` says why names stay as they are, where nothing is known."""

    def __init__(self, directory: Path) -> None:
        """`directory` holds a `config.json`, or none. Raises `CheckpointError` for one that no model can be built of."""
        self.note = ""
        self._model: Any = None
        self._converters: list[Any] = []
        if not (directory / "config.json").is_file():
            self.note = "no config.json: only the weights are written, under the model's own names"
            return
        cls, config, reason = read_class(directory)
        if cls is None:
            self.note = f"{reason}: names stay as they are"
            return
        try:
            with torch.device("meta"):
                model = cls(config)
        except INITIALISER_ERRORS as error:
            raise CheckpointError(
                f"{cls.__name__} cannot be built from config.json: {summary(error, lines=2)}"
            ) from error
        # What transformers itself reverts for a model that was not loaded from files.
        found = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in found if not isinstance(each, PrefixChange)]
        if found:
            model._weight_conversions = found
            self._model = model
            reverse = [each.reverse_transform() for each in reversed(found)]
            self._converters = [each for each in reverse if isinstance(each, WeightConverter)]

    def groups(self, tensors: Tensors) -> list[Group]:
        """Return every tensor, which is on the meta device, in the group that it is reverted with.

        Raises:
            CheckpointError: where transformers cannot revert a conversion.
        """
        found: dict[tuple[str, bool], list[str]] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, [], self._converters)
            found.setdefault((target, pattern is not None), []).append(name)
        return [
            Group(names=tuple(names), converted=converted, outputs=self.revert({name: tensors[name] for name in names}))
            for (_, converted), names in found.items()
        ]

    def revert(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors of one group as the hub has them. Raises `CheckpointError` where transformers cannot revert them."""
        if self._model is None:
            return dict(tensors)
        try:
            reverted: dict[str, torch.Tensor] = revert_weight_conversion(self._model, dict(tensors))
        except (*INITIALISER_ERRORS, NotImplementedError) as error:
            raise CheckpointError(
                f"{some(tensors)} cannot be brought into the form of the hub: {summary(error, lines=2)}; the checkpoint itself can "
                "be loaded with from_pretrained"
            ) from error
        return reverted


def read_class(directory: Path) -> tuple[Any, Any, str]:
    """Return the class of the model in a directory and its configuration; or None twice, and the reason why there is none."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (*INITIALISER_ERRORS, OSError) as error:
        return None, None, f"config.json is of no model that transformers knows ({summary(error, lines=2)})"
    name = next(iter(config.architectures or ()), "")
    cls = getattr(transformers, name, None) if name else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        return None, None, f"{name or 'the model'} is no class of transformers"
    return cls, config, ""


@contextmanager
def quiet_library() -> Iterator[None]:
    """Inside the block transformers logs nothing but errors, and draws no progress bars, and Python warns of nothing."""
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
