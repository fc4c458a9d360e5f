"""The one place that registers hooks on a model, and takes them off again.

A unit's module calls back before and after its forward; the tensors it returns call back before its backward; a parameter calls
back when its gradient is complete. What happens then is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zeromesh.zero.unit import Bucket, Unit


class Listener(Protocol):
    """What the hooks tell."""

    def before_forward(self, unit: Unit) -> None: ...

    def after_forward(self, unit: Unit, output: Any) -> None: ...

    def before_part(self, module: nn.Module) -> None: ...

    def after_part(self, module: nn.Module, output: Any) -> None: ...

    def before_backward(self, unit: Unit, place: int) -> None: ...

    def on_gradient(self, unit: Unit, bucket: Bucket, index: int, parameter: nn.Parameter) -> None: ...


class Hooks:
    """All hooks of an engine."""

    def __init__(self, units: Iterable[Unit], listener: Listener) -> None:
        self._handles: list[RemovableHandle] = []
        self._listener = listener
        for unit in units:
            self._on_module(unit, listener)
            for bucket in unit.trainable:
                self.on_gradients(unit, bucket)
            if unit.index == 0:
                self._on_parts(unit, listener)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_module(self, unit: Unit, listener: Listener) -> None:
        def before(_module: nn.Module, _args: Any) -> None:
            listener.before_forward(unit)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            listener.after_forward(unit, output)

        self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(unit.module.register_forward_hook(after))

    def _on_parts(self, root: Unit, listener: Listener) -> None:
        """Modules inside the root that hold its parameters: a caller may run them without running the root."""
        names = {name.rpartition(".")[0] for name in root.names()}

        def before(module: nn.Module, _args: Any) -> None:
            listener.before_part(module)

        def after(module: nn.Module, _args: Any, output: Any) -> None:
            listener.after_part(module, output)

        for module in dict.fromkeys(map(root.module.get_submodule, sorted(names))):
            if module is not root.module:
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
                self._handles.append(module.register_forward_hook(after))

    def on_gradients(self, unit: Unit, bucket: Bucket) -> None:
        """Listen to the gradients of a bucket's parameters, of those too that are trained only later."""
        for index, parameter in enumerate(bucket.parameters):
            hook = partial(self._listener.on_gradient, unit, bucket, index)
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # Else torch takes no hook.
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)


def on_gradient_of(tensors: Any, call: Callable[[], None]) -> bool:
    """Call when autograd has the gradient of any computed tensor in a structure, before it goes on; False if none has one."""

    def hook(_gradient: torch.Tensor) -> None:
        call()

    computed = [t for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    for tensor in computed:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return bool(computed)
