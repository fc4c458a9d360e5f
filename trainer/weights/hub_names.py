"""The names and shapes that a model's weights have on the hub, from those that they have in memory.

transformers renames and converts weights as it loads them (Mixtral's experts become one tensor). `revert_weight_conversion` undoes
that for a whole state dict. Here it is asked for one group of tensors at a time: those that go into one conversion together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from zeromesh.errors import CheckpointError, some, summary
from zeromesh.weight_init.recompute_init import INITIALISER_ERRORS

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
        self._reverse: list[Any] = []
        model = self._build(directory)
        if model is None:
            return
        # What transformers itself reverts for a model that was not loaded from files.
        found = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in found if not isinstance(each, PrefixChange)]
        if found:
            model._weight_conversions = found
            self._model = model
            self._reverse = [each.reverse_transform() for each in reversed(found)]

    def _build(self, directory: Path) -> Any:
        if not (directory / "config.json").is_file():
            self.note = "no config.json: only the weights are written, under the model's own names"
            return None
        cls, config, reason = read_class(directory)
        if cls is None:
            self.note = f"{reason}: names stay as they are"
            return None
        try:
            with torch.device("meta"):
                return cls(config)
        except INITIALISER_ERRORS as error:
            raise CheckpointError(
                f"{cls.__name__} cannot be built from config.json: {summary(error, lines=2)}"
            ) from error

    def groups(self, tensors: Tensors) -> list[Group]:
        """Return every tensor, which is on the meta device, in the group that it is reverted with.

        Raises:
            CheckpointError: where transformers cannot revert a conversion.
        """
        if self._model is None:
            return [Group(names=(name,), converted=False, outputs={name: each}) for name, each in tensors.items()]
        converters = [each for each in self._reverse if isinstance(each, WeightConverter)]
        found: dict[tuple[str, bool], list[str]] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, [], converters)
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
