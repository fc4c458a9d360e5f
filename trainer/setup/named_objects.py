"""Imports and calls Python code that a configuration names (`python: package.module:function`), for which `Consent` was given."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.base import NamedFunction, find_object
from zeromesh.trainer.config.sections.training import EVAL
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.streaming import is_stream
from zeromesh.trainer.loop.context import UserInputs


@dataclass(eq=False)
class _RestartableGenerator:
    """An iterable that calls a generator function anew for each iteration."""

    call: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.call()


def _bind_arguments(named: NamedFunction, where: str, folders: Sequence[str], *, called: bool) -> Any:
    """Return a call without arguments (`called`), or a function or an instance of a class."""
    found, arguments = find_object(named.python, where, folders), dict(named.model_extra or {})
    made = isinstance(found, type)
    if not made and not inspect.isroutine(found) and not isinstance(found, functools.partial):
        if arguments:
            raise ConfigError(f"{named.python} is a {type(found).__name__}, which takes no arguments", where=where)
        return (lambda: found) if called else found
    try:
        signature = inspect.signature(found)
        (signature.bind if made or called else signature.bind_partial)(**arguments)
    except TypeError as error:
        raise ConfigError(f"{named.python}{signature} does not take {arguments}: {error}", where=where) from error
    except ValueError:  # Functions in C may have no signature.
        pass
    call = functools.partial(found, **arguments) if arguments else found
    return call() if made and not called else call


def _dataset(named: Any, where: str, folders: Sequence[str], *, trained: bool) -> Any:
    call = _bind_arguments(named, where, folders, called=True)
    found = call()
    if inspect.isgenerator(found):
        found = _RestartableGenerator(call)
    if isinstance(found, str | bytes) or not (hasattr(found, "__getitem__") or hasattr(found, "__iter__")):
        allowed = "samples (mappings of the model's arguments) as a Dataset, a list, an iterable or a generator"
        raise ConfigError(f"{named.python} gave a {type(found).__name__}; allowed are {allowed}", where=where)
    return found if trained or not is_stream(found) else list(found)


def named_inputs(config: TrainerConfig, inputs: UserInputs) -> tuple[UserInputs, list[Any]]:
    """Return the inputs with the objects that the configuration names where the user gave none, and its callbacks. Without a
    collator, datasets get a padding one if the tokenizer can pad, as in transformers. Raises `ConfigError` for unusable names."""
    data, folders, found = config.data, config.folders, dict[str, Any]()
    if inputs.model is None and config.model.named is not None:
        key, model = "model.python", find_object(config.model.named.python, "model.python", folders)
        own = isinstance(model, nn.Module) and not config.model.config
        found["model"] = model if own else _bind_arguments(config.model.named, key, folders, called=True)
    for name, key, function in (("collate", "data.collator", data.collator), ("compute_loss", "model.loss", config.model.loss)):
        if isinstance(function, NamedFunction) and getattr(inputs, name) is None:
            found[name] = _bind_arguments(function, key, folders, called=False)
            if not callable(found[name]):
                raise ConfigError(f"{function.python} is a {type(found[name]).__name__}; give a function", where=key)
    if inputs.train_dataset is None and inputs.eval_dataset is None and isinstance(data.train, NamedFunction):
        found["train_dataset"] = _dataset(data.train, "data.train", folders, trained=True)
        if sets := {key: _dataset(each, key, folders, trained=False) for key, each in data.eval_sets().items()}:
            named = {key.removeprefix(f"{EVAL}."): each for key, each in sets.items()}
            found["eval_dataset"] = named.get(EVAL, named)
    callbacks = [_bind_arguments(each, "run.callbacks", folders, called=True)() for each in config.run.callbacks]
    inputs, tokenizer = replace(inputs, **found, named=frozenset(found)), inputs.processing_class
    pads = isinstance(tokenizer, PreTrainedTokenizerBase) and "pad_token" in tokenizer.special_tokens_map
    if inputs.collate is None and pads and (inputs.train_dataset is not None or inputs.eval_dataset is not None):
        inputs = replace(inputs, collate=cast("Any", DataCollatorWithPadding(tokenizer)))
    return inputs, callbacks
