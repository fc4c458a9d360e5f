"""The only module that registers hooks on a model and removes them.

A unit's module calls back before and after its forward, the tensors it returns before its backward, and a parameter when its
gradient is complete and when it is used while released. `Passes` has the methods that are called.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zeromesh.units.unit import Bucket, Unit, all_buckets, no_engine

if TYPE_CHECKING:
    from zeromesh.zero.passes import Passes

_DEPTH = 4


class _OfModule:
    """A hook on a module. Copies of the hook do nothing, so that a copied or pickled module belongs to no engine."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, _module: nn.Module, _args: Any, *output: Any) -> None:
        if self._call is None:
            return
        if peek_interpreter_stack() is None:
            self._call(*output)
        else:
            _outside_transforms(self._call, *output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfModule, ()


# The compiled module calls the hooks, but torch.compile must neither trace nor guard them.
vars(_OfModule.__call__)["_torchdynamo_disable"] = True
_dynamo: Any = torch._C._dynamo.eval_frame
_skipped = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)
_dynamo.set_code_exec_strategy(_OfModule.__call__.__code__, _skipped)


def _outside_transforms(call: Callable[..., None], *arguments: Any) -> None:
    """Call outside any `torch.func` transform, since the engine's operations are no part of a user's function."""
    with temporarily_clear_interpreter_stack() if peek_interpreter_stack() is not None else nullcontext():
        call(*arguments)


class Hooks:
    """All hooks of one engine on its model."""

    def __init__(self, units: Sequence[Unit], passes: "Passes") -> None:
        self._handles: list[RemovableHandle] = []
        self._on_gradients: list[Callable[[nn.Parameter], None]] = []
        """References are held here, because garbage collection does not see what a parameter's gradient hook holds."""
        self._passes = passes
        self._buckets = all_buckets(units)
        for unit in units:
            self._around(unit.module, partial(passes.before_forward, unit), partial(passes.after_forward, unit))
            for bucket in unit.buckets:
                bucket.uses.on_use = partial(_outside_transforms, partial(passes.on_use, unit))
            for bucket in unit.trainable:
                self.on_gradients(unit, bucket)
        # A caller may run modules inside the root that hold its parameters without running the root.
        root = units[0]
        parts = sorted({name.rpartition(".")[0] for name in root.names()} - {""})
        self.parts = tuple(dict.fromkeys(map(root.module.get_submodule, parts)))
        for module in self.parts:
            self._around(module, partial(passes.before_part, module), partial(passes.after_part, module))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for bucket in self._buckets:
            bucket.uses.on_use = no_engine
        self._handles, self._on_gradients = [], []

    def _around(self, module: nn.Module, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._handles.append(module.register_forward_pre_hook(_OfModule(before), prepend=True))
        self._handles.append(module.register_forward_hook(_OfModule(after)))

    def after(self, module: nn.Module, call: Callable[[Any], None]) -> None:
        """Have `call(output)` run after a module's forward, before all other hooks of the module."""
        self._handles.append(module.register_forward_hook(_OfModule(call), prepend=True))

    def on_gradients(self, unit: Unit, bucket: Bucket) -> None:
        """Register gradient hooks on a bucket's parameters, including those that may be trained only later."""
        for index, parameter in enumerate(bucket.parameters):
            call = partial(self._passes.on_gradient, unit, bucket, index)
            self._on_gradients.append(call)
            hook = weakref.proxy(call)
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # Else torch takes no hook.
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)


def watch_outputs(modules: Iterable[tuple[str, nn.Module]], call: Callable[[str, Any], None]) -> Callable[[], None]:
    """Have `call(name, output)` run after each forward of these modules, after all other hooks; returns a call that ends this."""
    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: call(name, output))
        for name, module in modules
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


@contextmanager
def parameters_made(call: Callable[[nn.Parameter | None], None]) -> Iterator[None]:
    """Inside the block, `call` receives each parameter that is registered on any module."""
    handle = register_module_parameter_registration_hook(lambda _module, _name, parameter: call(parameter))
    try:
        yield
    finally:
        handle.remove()


def hook_before(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a user's gradient hook on a parameter such that it runs before the engine's hook, which takes the gradient."""
    handle: Any = torch.Tensor.register_post_accumulate_grad_hook(parameter, hook)  # type: ignore[no-untyped-call]
    hooks: Any = parameter._post_accumulate_grad_hooks
    for key in [key for key, each in hooks.items() if type(each) is weakref.CallableProxyType]:
        hooks[key] = hooks.pop(key)  # Autograd goes by the order of insertion.
    return handle


def on_gradient_of(tensors: Iterable[torch.Tensor], call: Callable[[], None]) -> list[torch.Tensor]:
    """Have `call` run when autograd has computed the gradient of any of these tensors, before backward goes on. Returns the
    hooked tensors: those that require a gradient and are no leaves."""

    def hook(_gradient: torch.Tensor) -> None:
        _outside_transforms(call)

    computed = [tensor for tensor in tensors if tensor.grad_fn is not None]
    for tensor in computed:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return computed


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield all tensors in a structure: in PyTorch's pytrees, in fields of dataclasses, and in attributes of other objects."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and is_dataclass(leaf) and not isinstance(leaf, type):
            for each in fields(leaf):
                yield from tensors_in(getattr(leaf, each.name, None), depth - 1)
        elif depth and not isinstance(leaf, type | nn.Module | FunctionType | ModuleType):
            for each in getattr(leaf, "__dict__", {}).values():
                yield from tensors_in(each, depth - 1)


def tensors_on(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module and its submodules have as plain attributes."""
    for each in module.modules():
        yield from (value for value in vars(each).values() if isinstance(value, torch.Tensor))
