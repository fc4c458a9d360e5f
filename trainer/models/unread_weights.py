"""Stand-ins for the weights of a base model while PEFT makes adapters: they are read only where an initialisation asks for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_PASSED: frozenset[Any] = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.requires_grad_, Tensor.is_floating_point}
    | {Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__len__}
)
"""Functions that need no values."""
_VALUES = tuple(vars(torch._C.TensorBase)[name] for name in ("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes that need values; all others are of a tensor's form."""


class UnreadWeight(nn.Parameter):
    """A parameter in the place of `origin`, with its shape and dtype, on the CPU and without memory. An operation of PyTorch on it
    computes with what `read` returns, a tensor of its own; what is written there, or assigned to `data`, is kept in `changed`."""

    origin: nn.Parameter
    read: Callable[[], Tensor]
    _held: Tensor | None
    _assigned: bool

    @staticmethod
    def of(origin: nn.Parameter, read: Callable[[], Tensor]) -> "UnreadWeight":
        place = torch.zeros((), dtype=origin.dtype, device="cpu").expand(origin.shape)
        made: UnreadWeight = Tensor._make_subclass(UnreadWeight, place, origin.requires_grad)
        made.origin, made.read, made._held, made._assigned = origin, read, None, False
        return made

    @property
    def changed(self) -> Tensor | None:
        """The values that PEFT has put in place of those that were read; None if it has changed none."""
        return self._held if self._assigned or (self._held is not None and self._held._version) else None

    def _get_values(self) -> Tensor:
        if self._held is None:
            self._held = self.read()
        return self._held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name, descriptor = getattr(func, "__name__", ""), getattr(func, "__self__", None)
            if name == "__set__" and descriptor is _VALUES[0]:
                args[0]._held, args[0]._assigned = args[1], True
                return None
            if func in _PASSED or (name in ("__get__", "__set__") and descriptor not in _VALUES):
                return func(*args, **(kwargs or {}))
            if name == "__get__" and descriptor is _VALUES[0]:
                return args[0]._get_values()
            given, named = tree_map_only(cls, cls._get_values, (args, kwargs or {}))
            return func(*given, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy of the parameter in whose place this one is, which knows its origin, and may be on the meta device too."""
        made = nn.Parameter(self.origin.detach().clone(), requires_grad=self.requires_grad)
        vars(made)["copied_from"] = self.origin
        memo[id(self)] = made
        return made


@contextmanager
def unread_weights(model: nn.Module, read: Callable[[str], Tensor]) -> Iterator[Mapping[str, UnreadWeight]]:
    """Put stand-ins in place of all parameters inside the block, of which `read` returns the values by name; yields them by name.
    Afterwards the parameters are back, changed ones as new ones. What was read and not changed is freed at the next read."""
    made: dict[str, UnreadWeight] = {}
    last: list[UnreadWeight] = []

    def read_alone(name: str) -> Tensor:
        for each in last:  # Free what was read, unless it was changed.
            each._held = each.changed
        last[:] = [made[name]]
        return read(name)

    modules = [*model.modules()]
    for name, parameter in model.named_parameters():
        made[name] = UnreadWeight.of(parameter, partial(read_alone, name))
    _exchange(modules, {id(each.origin): each for each in made.values()})
    try:
        yield made
    finally:
        back: dict[int, nn.Parameter] = {}
        for each in made.values():
            values = each.changed
            back[id(each)] = each.origin if values is None else nn.Parameter(values)
            back[id(each)].requires_grad_(each.requires_grad)
        _exchange(modules, back)


def _exchange(modules: Iterable[nn.Module], others: Mapping[int, nn.Parameter]) -> None:
    for module in modules:
        for name, parameter in module._parameters.items():
            if id(parameter) in others:
                module._parameters[name] = others[id(parameter)]
