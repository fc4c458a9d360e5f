"""The sources of a parameter's initial values, which the engine asks for intervals of parameters while it fills its shards.

[Note: Recomputed initial values] A model built on the meta device has shapes and no values. They are recomputed one module at a
time on CPU, by the initialisers that a normal construction would run: `_init_weights` of its Hugging Face model, or the module's
`reset_parameters`. Then those of every module *around* it run, innermost first, since containers correct their contents (GPT-2
scales the residual projections of each attention, `nn.Transformer` redraws all matrices). All other tensors stay on meta meanwhile,
where writing does nothing. Memory is filled with NaN before, so a value computed only by `__init__` is reported, not invented."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.errors import ConfigError, LayoutError, some, summary
from zeromesh.flat.codec import Codec, EncodedParameter, EncodedPlace
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval, grouped
from zeromesh.rng import seed_of

Table = Literal["_parameters", "_buffers"]

INITIALISER_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)
"""The errors that an initialiser raises when it needs a value that is missing on meta."""


@contextmanager
def seeded_cpu(seed: int, name: str) -> Iterator[None]:
    """Inside the block, create tensors on CPU and draw from torch's CPU generator, seeded by (`seed`, `name`) and then restored.
    `torch.manual_seed` would reseed every accelerator as well."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(seed_of(f"{seed}\0{name}"))
        yield


def is_pretrained_model(module: nn.Module) -> bool:
    """Return True if `module` looks like a Hugging Face `PreTrainedModel`, a library that is not imported here."""
    cls = type(module)
    return hasattr(cls, "_init_weights") and hasattr(cls, "initialize_weights") and hasattr(cls, "tie_weights")


class Skeleton:
    """A second module tree with the same attributes and all tensors on meta. Initialisers run on it and never write the model."""

    def __init__(self, model: nn.Module) -> None:
        self.root: nn.Module = self._on_meta(model, {})

    def _on_meta(self, value: Any, made: dict[int, Any]) -> Any:
        """Return what stands for a module or a tensor of the model, which has one copy wherever it is used; None for None."""
        if value is None or id(value) in made:
            return made.get(id(value))
        if isinstance(value, nn.Module):
            clone = made[id(value)] = object.__new__(type(value))
            clone.__dict__.update(value.__dict__)
            for table in ("_parameters", "_buffers", "_modules"):
                clone.__dict__[table] = {name: self._on_meta(each, made) for name, each in getattr(value, table).items()}
        else:
            made[id(value)] = empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, nn.Parameter):
                made[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad)
        return made[id(value)]

    def path(self, fqn: str) -> list[nn.Module]:
        path = [self.root]
        for part in fqn.split(".") if fqn else ():
            path.append(path[-1]._modules[part] or path[-1])
        return path

    def initialise(self, fqn: str, seed: int, *, reset_first: bool = False) -> None:
        """Run the initialisers of the tensors that module `fqn` owns: its own, then those of its ancestors. With `reset_first`, a
        Hugging Face model's module is first reset as its constructor would have done."""
        path = self.path(fqn)
        initialisers: list[Callable[[], object] | None] = [_reset_method(path[-1]) if reset_first else None]
        for depth in range(len(path), 0, -1):
            around: list[Any] = [each for each in path[:depth] if is_pretrained_model(each)]
            module = path[depth - 1]
            initialisers.append(partial(around[-1]._init_weights, module) if around else _reset_method(module))
        with seeded_cpu(seed, fqn):
            for initialiser in filter(None, initialisers):
                initialiser()

    def managed_by_pretrained(self, fqn: str) -> bool:
        """Return True if module `fqn` lies in a Hugging Face model, whose `_init_weights` then initialises it."""
        return any(map(is_pretrained_model, self.path(fqn)))

    def recompute(
        self, fqn: str, table: Table, names: Sequence[str], seed: int
    ) -> tuple[Mapping[str, torch.Tensor], tuple[str, ...], str]:
        """Compute the initial values of the parameters or buffers `names` that module `fqn` owns, on CPU, in their own dtypes, from
        `seed` and `fqn` alone. Returns the values by name, the names that no code set, and why."""
        owner: dict[str, torch.Tensor] = self.path(fqn)[-1].__dict__[table]
        before = {name: owner[name] for name in names}
        values: Mapping[str, torch.Tensor]
        for reset_first in (False, True) if self.managed_by_pretrained(fqn) else (False,):
            runs: list[dict[str, torch.Tensor]] = []
            try:
                # A remaining NaN marks a value that no code set. Integers and booleans have no NaN: they are computed twice
                # over different fillings, and a value that no code set differs.
                for filling in (0,) if all(map(_has_nan, before.values())) else (0, 1):
                    owner.update({name: _filled(tensor, filling) for name, tensor in before.items()})
                    self.initialise(fqn, seed, reset_first=reset_first)
                    runs.append({name: owner[name].detach() for name in names if owner[name] is not None})
                values, reason = runs[0], "nothing set them again"
                lost = tuple(name for name in names if not _was_set(before[name], [run.get(name) for run in runs]))
            except INITIALISER_ERRORS as error:
                values, lost, reason = {}, tuple(names), summary(error)
            finally:
                owner.update(before)
            if not lost:
                break
        return values, lost, reason


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    names = ("reset_parameters", "_reset_parameters", "reset_running_stats")
    return next(filter(callable, (getattr(module, name, None) for name in names)), None)


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _filled(like: torch.Tensor, filling: int) -> torch.Tensor:
    """Return a CPU tensor like `like`, filled with NaN, or for dtypes without NaN with one of two values."""
    highest = torch.nan if _has_nan(like) else 1 if like.dtype is torch.bool else torch.iinfo(like.dtype).max
    tensor = torch.full(like.shape, highest - filling, dtype=like.dtype, device="cpu")
    return nn.Parameter(tensor, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else tensor


def _was_set(like: torch.Tensor, results: Sequence[torch.Tensor | None]) -> bool:
    present = [each for each in results if each is not None and not each.is_meta]
    if len(present) != len(results) or any((each.shape, each.dtype) != (like.shape, like.dtype) for each in present):
        return False
    return not bool(present[0].isnan().any()) if _has_nan(like) else torch.equal(present[0], present[1])


Write = tuple[str, str, int, int]
"""One in-place operation on a meta tensor: its name, its plain arguments, the number of elements written, and their offset."""


class WriteLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the in-place operations on meta storages while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, list[Write]] = {}
        # An address identifies a storage only while that lives. Tensors are not kept, as views would keep parameters alive.
        self._alive: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name in ("aten._to_copy.default", "aten.clone.default") and args[0].is_meta and result.is_meta:
            # A copy, as made by `model.double()`, has the values of its origin.
            self._alive += [args[0].untyped_storage(), result.untyped_storage()]
            self._writes[_address(result)] = list(self._writes.get(_address(args[0]), []))
            return result
        for spec, arg in zip(func._schema.arguments, args, strict=False):
            written = spec.alias_info is not None and spec.alias_info.is_write
            if written and isinstance(arg, torch.Tensor) and arg.is_meta:
                plain = repr([a for a in args if not isinstance(a, torch.Tensor)])
                self._alive.append(arg.untyped_storage())
                self._writes.setdefault(_address(arg), []).append((name, plain, arg.numel(), int(arg.storage_offset())))
        return result

    def writes_to(self, tensor: torch.Tensor) -> tuple[Write, ...]:
        return tuple(self._writes.get(_address(tensor), ()))


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class LostValuesError(LayoutError):
    """The values of `names`, computed only by `__init__`, were lost by building on the meta device."""

    def __init__(self, names: tuple[str, ...], reason: str) -> None:
        why = f"initial values of {some(names, 8)} are not known after building on the meta device ({reason})"
        super().__init__(f"{why}; build the model on CPU, or set them in `reset_parameters` (Hugging Face: `_init_weights`)")


class ParameterSource(Protocol):
    """Provides the initial values of a model's parameters, interval by interval."""

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of the flattened parameter `fqn`, 1-D, in its stored dtype, on any device. The result may
        share memory with the source: copy it before the next call, and do not write to it."""

    def fill(self, fqn: str, rows: StridedRows, interval: Interval, out: torch.Tensor) -> None:
        """Fill `out`, 1-D, with the non-empty elements `interval` of the columns `rows` of a parameter, converted to its dtype."""
        hull = rows.hull(interval)
        rows.take(self.read(fqn, hull.start, hull.end), hull.start, interval, out)

    def file_position(self, fqn: str, start: int, dtype: torch.dtype) -> tuple[Path, int] | None:
        """Return the file and byte offset at which the parameter's elements from `start` on are stored as `dtype`; None if none."""
        return None

    def origin(self, fqn: str) -> tuple["ParameterSource", str]:
        """Return the source that has the values of a parameter, and its name there. Builders ask it for them."""
        return self, fqn

    def encoded(self, fqn: str, codec: Codec, dtype: torch.dtype) -> EncodedParameter | None:
        """Return the parameter `fqn` as `codec` encodes its values of `dtype`, if it is stored so; None if it must be encoded."""
        return None

    def encoded_place(self, fqn: str, codec: Codec, dtype: torch.dtype) -> EncodedPlace | None:
        """Return the files that have what `encoded` returns; None if none have."""
        return None

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce the elements [start, end) of parameters that will be read, in order, so that they can be read ahead."""
        return

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return the stored value of buffer `name`; None where the model has it or recomputes it."""
        return None

    def release(self, fqn: str) -> None:
        """Free what is held for parameter `fqn`, which will not be read again."""

    def close(self) -> None:
        """Free everything; nothing will be read again."""


def check_interval(fqn: str, start: int, end: int, numel: int) -> None:
    if not 0 <= start <= end <= numel:
        raise LayoutError(f"{fqn}: interval [{start}, {end}) does not lie in its {numel} elements")


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every parameter name, including aliases of tied parameters, to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


class BuiltSource(ParameterSource):
    """The current parameters of `model`, but those `without`. Replacing `param.data` later is harmless, unlike in-place changes."""

    def __init__(self, model: nn.Module, without: Container[str] = ()) -> None:
        self._canonical = canonical_names(model)
        named = [(name, parameter) for name, parameter in model.named_parameters() if name not in without]
        self._values = {name: parameter.detach() for name, parameter in named}
        self._elsewhere: dict[str, Any] = {name: each for name, each in named if hasattr(each, "stored")}
        """The parameters whose values lie in another form, in their attribute `stored` until they are released: it has the
        methods `read(start, end)`, and `encoded_by(codec)`, which returns None where another codec has encoded them."""

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """Return elements of a parameter; see `ParameterSource`. Raises `LayoutError` for an unknown or released name, or interval,
        and `LostValuesError` for values that are on the meta device and cannot be drawn."""
        name = self._canonical.get(fqn, "")
        if (value := self._values.get(name)) is None:
            raise LayoutError(f"{fqn} is not, or no longer, among the {len(self._values)} parameters of this source")
        check_interval(fqn, start, end, value.numel())
        if name in self._elsewhere:
            values: torch.Tensor = self._elsewhere[name].stored.read(start, end)
            return values
        return (self._draw(name) if value.is_meta else value).reshape(-1)[start:end]

    def _draw(self, name: str) -> torch.Tensor:
        raise LostValuesError((name,), "it is on the meta device")

    def encoded(self, fqn: str, codec: Codec, dtype: torch.dtype) -> EncodedParameter | None:
        parameter = self._elsewhere.get(self._canonical[fqn])
        return None if parameter is None else parameter.stored.encoded_by(codec)

    def release(self, fqn: str) -> None:
        name = self._canonical.get(fqn, "")
        self._values.pop(name, None)
        if (parameter := self._elsewhere.pop(name, None)) is not None:
            del parameter.stored

    def close(self) -> None:
        for name in tuple(self._values):
            self.release(name)


class SeededSource(BuiltSource):
    """Draws the parameters of a model on the meta device, one module at a time, from `seed` and the module's name alone. A tied
    parameter has the value of its first name. Parameters that are not on meta keep their values."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model)
        self.skeleton = Skeleton(model)
        self._seed = seed
        drawn = (name for name, value in self._values.items() if value.is_meta and name not in self._elsewhere)
        self._owned = grouped((owner, leaf) for owner, _, leaf in (name.rpartition(".") for name in drawn))
        """The names of each module's own parameters on meta."""
        self._drawn: dict[str, Mapping[str, torch.Tensor]] = {}

    def _draw(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        if owner not in self._drawn:
            self._drawn.clear()
            values, lost, reason = self.skeleton.recompute(owner, "_parameters", self._owned[owner], self._seed)
            if lost:
                raise LostValuesError(tuple(_full_name(owner, leaf) for leaf in lost), reason)
            self._drawn[owner] = values
        return self._drawn[owner][leaf]

    def close(self) -> None:
        super().close()
        self._drawn.clear()

    def unset_parameters(self) -> tuple[str, ...]:
        """Return the parameters that no initialiser would set, found before any read by a dry run on meta, which costs no memory.
        Modules of equal classes and shapes are tried once. `read` checks the values themselves."""
        verdicts: dict[object, tuple[str, ...]] = {}
        names: list[str] = []
        for owner, leaves in self._owned.items():
            kinds = tuple(type(module) for module in self.skeleton.path(owner))
            key = (kinds, tuple((leaf, self._values[_full_name(owner, leaf)].shape) for leaf in leaves))
            if key not in verdicts:
                verdicts[key] = self._unset_in(owner, leaves)
            names += [_full_name(owner, leaf) for leaf in verdicts[key]]
        return tuple(names)

    def _unset_in(self, owner: str, leaves: list[str]) -> tuple[str, ...]:
        parameters = self.skeleton.path(owner)[-1]._parameters
        owned = [p for leaf in leaves if (p := parameters[leaf]) is not None]
        for reset_first in (False, True):
            try:
                with WriteLog() as log:
                    self.skeleton.initialise(owner, self._seed, reset_first=reset_first)
            except INITIALISER_ERRORS:
                break  # It may fail only since tensors on meta have no values.
            if any(log.writes_to(p) for p in self._values.values() if p.is_meta):
                return tuple(leaves)  # it writes to the model and not the skeleton: unsafe to run later
            if all(not p.numel() or any(numel >= p.numel() for _, _, numel, _ in log.writes_to(p)) for p in owned):
                return ()
            if not self.skeleton.managed_by_pretrained(owner):
                break
        # Some initialisers fail on meta, or do nothing (torch's `trunc_normal_`): they are judged by a real computation.
        return self.skeleton.recompute(owner, "_parameters", leaves, self._seed)[1]


def _full_name(fqn: str, leaf: str) -> str:
    return f"{fqn}.{leaf}" if fqn else leaf


def materialize_buffers(
    model: nn.Module, device: torch.device | str, seed: int, *, source: ParameterSource | None = None
) -> tuple[str, ...]:
    """Give every buffer of `model` memory on `device`, in its own dtype, and its value: of a buffer on meta that stored in
    `source`, else that of its initialiser. Returns the names of buffers, and of unregistered tensor attributes on meta, with
    unknown values: such buffers hold NaN or arbitrary integers, and the model must be built on CPU instead."""
    target = torch.device(device)
    skeleton = Skeleton(model) if any(buffer.is_meta for buffer in model.buffers()) else None
    moved: dict[int, torch.Tensor] = {}  # one buffer may be registered twice
    lost: list[str] = []
    for fqn, module in model.named_modules():
        for name, attribute in vars(module).items():
            listed = attribute if isinstance(attribute, list | tuple) else (attribute,)
            tensors = (each for each in listed if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter))
            lost += [_full_name(fqn, name)] if any(each.is_meta for each in tensors) else []
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        todo = [name for name, buffer in buffers.items() if buffer.is_meta and id(buffer) not in moved]
        values, unset, _ = skeleton.recompute(fqn, "_buffers", todo, seed) if skeleton and todo else ({}, (), "")
        for name, buffer in buffers.items():
            if id(buffer) not in moved:
                stored = source.buffer(_full_name(fqn, name)) if source is not None and name in todo else None
                value = buffer if stored is None else stored
                if name in todo and stored is None:
                    unknown = float("nan") if buffer.is_floating_point() else -1
                    value = values[name] if name in values else torch.full(buffer.shape, unknown)
                    lost += [_full_name(fqn, name)] if name in unset else []
                moved[id(buffer)] = value.detach().to(device=target, dtype=buffer.dtype)
            module._buffers[name] = moved[id(buffer)]
    return tuple(lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """A model, the source of its values, and notes for the user, such as why it was built so."""

    model: nn.Module
    source: ParameterSource
    notes: tuple[str, ...] = ()
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """The function by which the user has compiled the whole model; None if it is not compiled."""


def build_deferred(
    build: Callable[[], nn.Module], seed: int, *, stored: Callable[[nn.Module], frozenset[str]] | None = None
) -> BuiltModel:
    """Call `build` on the meta device and return a model without memory, whose values a `SeededSource` draws later. If that would
    lose or change values, `build` is called on CPU, with torch's generator seeded by `seed`: ranks hold it whole for a while."""
    log = WriteLog()
    try:
        with log, torch.device("meta"):
            model = build()
    except ConfigError:
        raise
    except INITIALISER_ERRORS as error:
        return _build_on_cpu(build, seed, f"it cannot be built on the meta device ({type(error).__name__}: {error})")
    if hooked := hooked_parameters(model):
        # Rebuilt parameters would lose the hooks, and tensors that hooks use, such as a mask, have no values on meta.
        return _build_on_cpu(build, seed, f"it registers hooks on the gradients of {some(hooked)}")
    source = SeededSource(model, seed)
    kept = frozenset[str]() if stored is None else stored(model)

    def lost_buffers() -> tuple[str, ...]:
        before = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        names = materialize_buffers(model, "cpu", seed)
        for table, buffers in before:
            table.update(buffers)
        return names

    lost = "building on the meta device loses the values of {}"
    differing = partial(_initialised_otherwise, model, source.skeleton, log, seed)
    otherwise = "it initialises {} otherwise than `reset_parameters` does"
    for find, reason in ((source.unset_parameters, lost), (differing, otherwise), (lost_buffers, lost)):
        if names := tuple(name for name in find() if name not in kept):
            return _build_on_cpu(build, seed, reason.format(some(names)))
    return BuiltModel(model=model, source=source)


def wrap_passed_model(model: nn.Module, seed: int) -> BuiltModel:
    """Wrap a model that the user has passed: built, or on the meta device (partly or wholly), with a note that says how its weights
    are redrawn. Raises `LostValuesError` if no initialiser would compute some of the parameters on meta; `LayoutError` if such
    parameters have hooks on their gradients, which may refer to tensors without values."""
    drawn = [name for name, p in model.named_parameters() if p.is_meta and not hasattr(p, "stored")]
    if not (owners := dict.fromkeys(name.rpartition(".")[0] for name in drawn)):
        return BuiltModel(model=model, source=BuiltSource(model))
    if hooked := [name for name in hooked_parameters(model) if name in drawn]:
        why = f"{some(hooked)}: the model was passed on the meta device with hooks on gradients, which cannot be kept"
        raise LayoutError(f"{why}; pass it built, or pass a callable that builds it")
    source = SeededSource(model, seed)
    if lost := source.unset_parameters():
        raise LostValuesError(lost, "nothing sets them again")
    reset = tuple(owner or type(model).__name__ for owner in owners if not source.skeleton.managed_by_pretrained(owner))
    note = (
        f"the model was passed on the meta device: weights of {some(reset)} are drawn by `reset_parameters`, and what "
        "`__init__` may have set otherwise is lost; a callable that builds the model keeps it"
        if reset
        else "the model was passed on the meta device, where it has no values: its weights are drawn anew, and a model that was "
        "loaded before it was moved there has lost its own; pass that as it was loaded"
    )
    return BuiltModel(model=model, source=source, notes=(note,))


def hooked_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of parameters with gradient hooks, on one parameter or on several together."""
    return tuple(
        name
        for name, parameter in model.named_parameters()
        # A hook on several parameters keeps their gradient accumulators, each of which refers to its parameter.
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or parameter._use_count() > 1  # type: ignore[attr-defined]
    )


def _build_on_cpu(build: Callable[[], nn.Module], seed: int, reason: str) -> BuiltModel:
    with seeded_cpu(seed, "model"), torch.enable_grad():
        model = build()
    note = f"the model is built whole on CPU by every rank, because {reason}"
    return BuiltModel(model=model, source=BuiltSource(model), notes=(note,))


def _initialised_otherwise(model: nn.Module, skeleton: Skeleton, construction: WriteLog, seed: int) -> tuple[str, ...]:
    """Return parameters, not of Hugging Face models, written otherwise than by initialisers, as a subclass's `__init__` may."""
    replays: dict[str, WriteLog] = {}

    def differs(name: str, parameter: nn.Parameter) -> bool:
        owner, _, leaf = name.rpartition(".")
        if not parameter.is_meta or skeleton.managed_by_pretrained(owner):
            return False
        if owner not in replays:
            with WriteLog() as replays[owner]:
                skeleton.initialise(owner, seed)
        copy = skeleton.path(owner)[-1]._parameters[leaf]
        return copy is not None and construction.writes_to(parameter) != replays[owner].writes_to(copy)

    return tuple(name for name, parameter in model.named_parameters() if differs(name, parameter))
