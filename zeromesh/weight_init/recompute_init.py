"""How the first values of one module's tensors are computed, without the rest of the model.

A model built on the meta device has shapes and no values. The values are made again one module at a time on CPU, by the code that a
normal construction would have run: for a module of a Hugging Face model `_init_weights` of the model that it belongs to, for any
other module its `reset_parameters`. Both are then run for every module *around* it, innermost first, because containers correct
what they contain (GPT-2 scales the residual projections of each attention, `nn.Transformer` redraws all matrices). Everything else
stays on meta meanwhile, where writing does nothing.

Memory is NaN before (integers are computed twice over different fillings), so a value that only `__init__` knew, and that building
on meta has lost, is found and reported instead of being invented.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.errors import summary
from zeromesh.rng import number_of

Table = Literal["_parameters", "_buffers"]
Initialiser = Callable[[], object]

INITIALISER_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)
"""What an initialiser raises when it needs a value that is not there."""


@contextmanager
def seeded_cpu(seed: int, name: str) -> Iterator[None]:
    """Inside the block tensors are made on CPU and drawn from torch's CPU generator, seeded by (`seed`, `name`).

    The generator is put back afterwards. `torch.manual_seed` would reseed every accelerator as well.
    """
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(number_of(f"{seed}\0{name}"))
    try:
        with torch.no_grad(), torch.device("cpu"):
            yield
    finally:
        torch.default_generator.set_state(state)


def is_pretrained_model(module: nn.Module) -> bool:
    """Whether `module` looks like a Hugging Face `PreTrainedModel`; that library is not imported here."""
    cls = type(module)
    return all(callable(getattr(cls, name, None)) for name in ("_init_weights", "initialize_weights", "tie_weights"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """The tensors of one module: `values` on CPU by name, and the names that nothing set (`lost`, with `reason`)."""

    values: Mapping[str, torch.Tensor]
    lost: tuple[str, ...]
    reason: str


class Skeleton:
    """A second module tree over the same attributes whose parameters and buffers are all on meta.

    Initialisers run on it, so the model's own tensors, which may already be in use, are never written.
    """

    def __init__(self, model: nn.Module) -> None:
        self._clones: dict[int, nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self.root = self._clone(model)

    def _clone(self, module: nn.Module) -> nn.Module:
        if id(module) in self._clones:
            return self._clones[id(module)]
        clone: nn.Module = object.__new__(type(module))
        clone.__dict__.update(module.__dict__)
        self._clones[id(module)] = clone
        tables: dict[str, Callable[[Any], Any]] = {
            "_parameters": self._on_meta,
            "_buffers": self._on_meta,
            "_modules": self._clone,
        }
        for table, copied in tables.items():
            values = getattr(module, table).items()
            clone.__dict__[table] = {name: None if value is None else copied(value) for name, value in values}
        return clone

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            self._tensors[id(tensor)] = empty
        return self._tensors[id(tensor)]

    def path(self, fqn: str) -> list[nn.Module]:
        """The root, ..., the module called `fqn`."""
        module, path = self.root, [self.root]
        for part in fqn.split(".") if fqn else ():
            module = module._modules[part] or module
            path.append(module)
        return path

    def initialise(self, fqn: str, seed: int, *, reset_first: bool = False) -> None:
        """Run what initialises the tensors that module `fqn` owns: its own initialiser, then those of its ancestors.

        With `reset_first` a Hugging Face model's module is first reset as its constructor would have done.
        """
        path = self.path(fqn)
        found = [_initialiser(path[: depth + 1]) for depth in reversed(range(len(path)))]
        with seeded_cpu(seed, fqn):
            for initialiser in [_reset(path[-1]) if reset_first else None, *found]:
                if initialiser is not None:
                    initialiser()

    def managed_by_pretrained(self, fqn: str) -> bool:
        """Whether module `fqn` lies in a Hugging Face model, whose `_init_weights` then initialises it."""
        return any(is_pretrained_model(module) for module in self.path(fqn))

    def recompute(self, fqn: str, table: Table, names: Sequence[str], seed: int) -> Recomputed:
        """The first values of the parameters or buffers `names` that module `fqn` owns, on CPU, in their own dtypes.

        They depend on `seed` and on `fqn` alone. The global random state is left as it was.
        """
        result = self._attempt(fqn, table, names, seed, reset_first=False)
        if result.lost and self.managed_by_pretrained(fqn):
            result = self._attempt(fqn, table, names, seed, reset_first=True)
        return result

    def _attempt(self, fqn: str, table: Table, names: Sequence[str], seed: int, *, reset_first: bool) -> Recomputed:
        owner: dict[str, torch.Tensor] = self.path(fqn)[-1].__dict__[table]
        before = {name: owner[name] for name in names}
        runs: list[dict[str, torch.Tensor]] = []
        try:
            # A NaN left over marks a value that nothing set. Integers and booleans have no NaN: what nothing set still differs
            # after two identical computations over two different fillings.
            for filling in (0,) if all(map(_has_nan, before.values())) else (0, 1):
                owner.update({name: _filled(tensor, filling) for name, tensor in before.items()})
                self.initialise(fqn, seed, reset_first=reset_first)
                runs.append({name: owner[name].detach() for name in names if owner[name] is not None})
        except INITIALISER_ERRORS as error:
            return Recomputed(values={}, lost=tuple(names), reason=summary(error))
        finally:
            owner.update(before)
        lost = tuple(name for name in names if not _was_set(before[name], [run.get(name) for run in runs]))
        return Recomputed(values=runs[0], lost=lost, reason="nothing set them again")


def _initialiser(path: Sequence[nn.Module]) -> Initialiser | None:
    """The initialiser of the last module of `path` (root first)."""
    for ancestor in reversed(path):
        if is_pretrained_model(ancestor):
            initialise: Any = ancestor._init_weights
            return partial(initialise, path[-1])
    return _reset(path[-1])


def _reset(module: nn.Module) -> Initialiser | None:
    resets = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters", "reset_running_stats"))
    return next(filter(callable, resets), None)


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _filled(like: torch.Tensor, filling: int) -> torch.Tensor:
    """Memory of `like`'s shape and dtype on CPU that holds NaN, or for dtypes without NaN one of two other values."""
    if _has_nan(like):
        value: float | int | bool = float("nan")
    elif like.dtype is torch.bool:
        value = bool(filling)
    else:
        value = torch.iinfo(like.dtype).max - filling
    tensor = torch.full(like.shape, value, dtype=like.dtype, device="cpu")
    return nn.Parameter(tensor, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else tensor


def _was_set(like: torch.Tensor, results: Sequence[torch.Tensor | None]) -> bool:
    present = [each for each in results if each is not None and not each.is_meta]
    if len(present) != len(results) or any((each.shape, each.dtype) != (like.shape, like.dtype) for each in present):
        return False
    return not bool(present[0].isnan().any()) if _has_nan(like) else torch.equal(present[0], present[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """One in-place operation on a meta tensor: its name, its plain arguments, and which elements it wrote."""

    operation: str
    arguments: str
    numel: int
    offset: int


class WriteLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, while it is active, which operations wrote into which meta storages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, list[Write]] = {}
        # An address is only a name while its storage lives. Tensors are not kept: views refer to the parameters that they show.
        self._alive: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name in ("aten._to_copy.default", "aten.clone.default") and args[0].is_meta and result.is_meta:
            # `model.double()` and the like: the copy has the values of its origin.
            self._alive += [args[0].untyped_storage(), result.untyped_storage()]
            self._writes[_address(result)] = list(self._writes.get(_address(args[0]), []))
            return result
        for spec, arg in zip(func._schema.arguments, args, strict=False):
            written = spec.alias_info is not None and spec.alias_info.is_write
            if written and isinstance(arg, torch.Tensor) and arg.is_meta:
                plain = repr([a for a in args if not isinstance(a, torch.Tensor)])
                entry = Write(operation=name, arguments=plain, numel=arg.numel(), offset=int(arg.storage_offset()))
                self._alive.append(arg.untyped_storage())
                self._writes.setdefault(_address(arg), []).append(entry)
        return result

    def of(self, tensor: torch.Tensor) -> tuple[Write, ...]:
        """The operations that wrote into the storage of `tensor`, in order."""
        return tuple(self._writes.get(_address(tensor), ()))


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
