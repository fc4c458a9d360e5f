"""Models without memory: built on the meta device where that loses nothing, else whole on CPU; or passed on meta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.errors import LayoutError, some
from zeromesh.weight_init.recompute_init import INITIALISER_ERRORS, Skeleton, WriteLog, is_pretrained_model, seeded_cpu
from zeromesh.weight_init.weight_sources import (
    BuiltSource,
    ParameterSource,
    SeededSource,
    materialize_buffers,
    source_for,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """A model, where its values come from, and lines that the run prints (why it was built as it was)."""

    model: nn.Module
    source: ParameterSource
    notes: tuple[str, ...] = ()
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """How the user has compiled it as a whole before; None: not at all."""


def build_deferred(
    build: Callable[[], nn.Module],
    seed: int,
    *,
    stored: Callable[[nn.Module], frozenset[str]] | None = None,
) -> BuiltModel:
    """Call `build` on the meta device and return a model without memory, whose values a `SeededSource` draws later.

    Where that would lose or change values, `build` is called again on CPU with torch's generator seeded by `seed`: every rank then
    holds the whole model for a while, and a note says so. That is the case if it raises on meta, if it registers hooks on gradients
    of parameters, if parameters or buffers get values that no initialiser would set again, or if it initialises a plain module's
    parameters otherwise than their `reset_parameters` does (which is found by comparing the operations).
    """
    log = WriteLog()
    try:
        with log, torch.device("meta"):
            model = build()
    except INITIALISER_ERRORS as error:
        return _build_on_cpu(build, seed, f"it cannot be built on the meta device ({type(error).__name__}: {error})")
    hooked = hooked_parameters(model)
    if hooked:
        # Copies in memory would not have the hooks, and what these refer to, such as a mask, has no values on meta.
        return _build_on_cpu(build, seed, f"it registers hooks on the gradients of {some(hooked)}")
    source = SeededSource(model, seed)
    kept = frozenset[str]() if stored is None else stored(model)
    for find, reason in (
        (source.lost, "building on the meta device loses the values of {}"),
        (partial(_initialised_otherwise, model, log, seed), "it initialises {} otherwise than `reset_parameters` does"),
        (partial(lost_buffers, model, seed), "building on the meta device loses the values of {}"),
    ):
        names = tuple(name for name in find() if name not in kept)
        if names:
            return _build_on_cpu(build, seed, reason.format(some(names)))
    return BuiltModel(model=model, source=source)


def wrap_passed_model(model: nn.Module, seed: int) -> BuiltModel:
    """Wrap a model that the user has passed: built, or on the meta device (partly or wholly).

    What construction did to weights on meta cannot be seen any more: a note names the modules that are drawn again by
    `reset_parameters`, unless Hugging Face's `_init_weights`, which decides alone, draws them.

    Raises:
        LostValuesError: if nothing would compute some of the parameters on meta.
        LayoutError: if such parameters have hooks on their gradients, which may refer to tensors without values.
    """
    hooked = [name for name in hooked_parameters(model) if model.get_parameter(name).is_meta]
    if hooked:
        raise LayoutError(
            f"{some(tuple(hooked))}: the model was passed on the meta device with hooks on gradients, which cannot be kept; "
            "pass it built, or pass a callable that builds it"
        )
    source = source_for(model, seed)
    skeleton = Skeleton(model)
    owners = dict.fromkeys(name.rpartition(".")[0] for name, p in model.named_parameters() if p.is_meta)
    drawn = tuple(owner or type(model).__name__ for owner in owners if not skeleton.managed_by_pretrained(owner))
    notes = (
        f"the model was passed on the meta device: weights of {some(drawn)} are drawn by `reset_parameters`, and what "
        "`__init__` may have set otherwise is lost; a callable that builds the model keeps it",
    )
    return BuiltModel(model=model, source=source, notes=notes if drawn else ())


def hooked_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters with hooks on their gradients, of one parameter or of several together."""
    return tuple(
        name
        for name, parameter in model.named_parameters()
        # A hook on several parameters holds on to what accumulates their gradients, which refers to them once more.
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or parameter._use_count() > 1  # type: ignore[attr-defined]
    )


def lost_buffers(model: nn.Module, seed: int) -> tuple[str, ...]:
    """The buffers on meta whose values nothing would compute again; `model` is left as it was."""
    before = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    lost = materialize_buffers(model, "cpu", seed)
    for table, buffers in before:
        table.update(buffers)
    return lost


def _build_on_cpu(build: Callable[[], nn.Module], seed: int, reason: str) -> BuiltModel:
    with seeded_cpu(seed, "model"), torch.enable_grad():
        model = build()
    note = f"the model is built whole on CPU by every rank, because {reason}"
    return BuiltModel(model=model, source=BuiltSource(model), notes=(note,))


def _initialised_otherwise(model: nn.Module, construction: WriteLog, seed: int) -> tuple[str, ...]:
    """Parameters outside of Hugging Face models that construction wrote with other operations than initialisers do.

    A subclass that redraws its layers in `__init__` (`self.apply(self._init_weights)`) is found here; a Hugging Face model does so
    by `_init_weights`, which a build on meta skips and `SeededSource` calls.
    """
    if is_pretrained_model(model):
        return ()
    skeleton = Skeleton(model)
    replays: dict[str, WriteLog] = {}

    def differs(name: str, parameter: nn.Parameter) -> bool:
        owner, _, leaf = name.rpartition(".")
        if not parameter.is_meta or skeleton.managed_by_pretrained(owner):
            return False
        if owner not in replays:
            with WriteLog() as replays[owner], seeded_cpu(seed, owner):
                for initialiser in skeleton.initialisers(owner):
                    initialiser()
        copy = skeleton.path(owner)[-1]._parameters[leaf]
        return copy is not None and construction.of(parameter) != replays[owner].of(copy)

    return tuple(name for name, parameter in model.named_parameters() if differs(name, parameter))
