"""The only module that registers hooks on a model and removes them. They call `Passes` around a unit's forward, before backward of
the tensors it returns, when a parameter's gradient is complete, and when a released parameter is used."""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree

from zeromesh.units.unit import Bucket, Unit, all_buckets, refuse_closed

_MOST_DEPTH = 4  # Levels of objects inside objects in which tensors are searched.
Edge = tuple[Node, int]  # an output of an autograd node: the node and the output's number
_MOST_KINDS = 16
"""The most kinds of calls of a unit that are checked; a block whose graph differs every time is trusted afterwards."""
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Returns the sequence number of the next node of autograd's graph."""
_VIEWS = frozenset(
    """
    AliasBackward0 AsStridedBackward0 DetachBackward0 DiagonalBackward0 ExpandBackward0 PermuteBackward0 ReshapeAliasBackward0
    SelectBackward0 SliceBackward0 SplitBackward0 SqueezeBackward0 TBackward0 TransposeBackward0 UnbindBackward0 UnfoldBackward0
    UnsqueezeBackward0 ViewBackward0
    """.split()  # noqa: SIM905 - a list of names
)
_COPIES = frozenset({"CloneBackward0"})


class _ModuleHook:
    """A hook that skips the first values that torch tells it. Copies of it do nothing: a copied module belongs to no engine."""

    def __init__(self, call: Callable[..., None] | None = None, skipped: int = 2) -> None:
        self._call, self._skipped = call, skipped

    def __call__(self, *told: Any) -> None:
        if self._call is not None:
            _outside_transforms(self._call, *told[self._skipped :])

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, ()


# The compiled module calls the hooks, but torch.compile must neither trace nor guard them.
vars(_ModuleHook.__call__)["_torchdynamo_disable"] = True
_dynamo: Any = torch._C._dynamo.eval_frame
_skipped = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)
_dynamo.set_code_exec_strategy(_ModuleHook.__call__.__code__, _skipped)


def _outside_transforms(call: Callable[..., None], *arguments: Any) -> None:
    """Call outside any `torch.func` transform, since the engine's operations are no part of a user's function."""
    with temporarily_clear_interpreter_stack():
        call(*arguments)


class Hooks:
    def __init__(self, units: Sequence[Unit], passes: Any) -> None:
        self._handles = ExitStack()
        self._on_gradients: list[Callable[[nn.Parameter], None]] = []
        """The gradient hooks, to which parameters have weak proxies: garbage collection does not see what such a hook refers to."""
        self._passes = passes
        self._buckets = all_buckets(units)
        for unit in units:
            before, after = partial(passes.before_forward, unit), partial(passes.after_forward, unit)
            if not unit.is_fetched:
                self._hook_forward(unit.module, before, after)
            for bucket in unit.buckets:
                bucket.use_callback.on_use = partial(_outside_transforms, partial(passes.on_use, unit))
            for bucket in unit.trainable:
                self.on_gradients(unit, bucket)
        # A caller may run modules inside the root that hold its parameters without running the root.
        root = units[0]
        parts = sorted({name.rpartition(".")[0] for name in root.names()} - {""})
        self.parts = tuple(dict.fromkeys(map(root.module.get_submodule, parts)))
        for module in self.parts:
            self._hook_forward(module, partial(passes.before_part, module), partial(passes.after_part, module))

    def remove(self) -> None:
        self._handles.close()
        for bucket in self._buckets:
            bucket.use_callback.on_use = refuse_closed
        self._on_gradients = []

    def _hook_forward(self, module: nn.Module, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._handles.callback(module.register_forward_pre_hook(_ModuleHook(before), prepend=True).remove)
        self._handles.callback(module.register_forward_hook(_ModuleHook(after)).remove)

    def after(self, module: nn.Module, call: Callable[[Any], None]) -> None:
        """Have `call(output)` run after a module's forward, before all other hooks of the module."""
        self._handles.callback(module.register_forward_hook(_ModuleHook(call), prepend=True).remove)

    def on_gradients(self, unit: Unit, bucket: Bucket) -> None:
        """Register gradient hooks on a bucket's parameters, including those that may be trained only later."""
        for index, parameter in enumerate(bucket.parameters):
            call = partial(self._passes.on_gradient, unit, bucket, index)
            self._on_gradients.append(call)
            hook = weakref.proxy(call)
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # Otherwise torch would refuse the hook.
            self._handles.enter_context(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)


def _in_own_dtype(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    dtype = next(each.dtype for each in module.parameters(recurse=False) if each.is_floating_point())
    return pytree.tree_map_only(torch.Tensor, lambda each: cast(each, dtype), (arguments, named))


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_inputs(root: nn.Module) -> None:
    """Have torch's layers take arguments in their weights' dtype, also in copies; others get exact ones, cast by autocast."""
    for module in root.modules():
        of_torch = any(each.__module__.startswith("torch.nn.") for each in type(module).__mro__ if each is not nn.Module)
        own = any(each.is_floating_point() for each in module.parameters(recurse=False))
        if of_torch and own and _in_own_dtype not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_in_own_dtype, with_kwargs=True)


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks of others than the engine, which may keep what they see of a call."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(type(hook) is not _ModuleHook and hook is not _in_own_dtype for hooks in kinds for hook in hooks.values())


def watch_outputs(modules: Iterable[tuple[str, nn.Module]], call: Callable[[str, Any], None]) -> Callable[[], None]:
    """Have `call(name, output)` run after each forward of these modules, after all other hooks; returns a call that ends this."""
    handles = ExitStack()
    for name, module in modules:
        handles.enter_context(module.register_forward_hook(_ModuleHook(partial(call, name))))
    return handles.close


def watch_inputs(modules: Iterable[tuple[str, nn.Module]], call: Callable[..., None]) -> Callable[[], None]:
    """Have `call(name, args, kwargs)` run before each forward of these modules; returns a call that ends this."""
    handles = ExitStack()
    for name, module in modules:
        handles.enter_context(module.register_forward_pre_hook(_ModuleHook(partial(call, name), 1), with_kwargs=True))
    return handles.close


def on_registration(call: Callable[[nn.Parameter | None], None]) -> AbstractContextManager[object]:
    """Return a context inside which `call` receives each parameter that is registered on any module."""
    return register_module_parameter_registration_hook(lambda _module, _name, parameter: call(parameter))


def hook_before(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a user's gradient hook on a parameter such that it runs before the engine's hook, which takes the gradient."""
    handle: Any = torch.Tensor.register_post_accumulate_grad_hook(parameter, hook)  # type: ignore[no-untyped-call]
    hooks: Any = parameter._post_accumulate_grad_hooks
    for key in [key for key, each in hooks.items() if type(each) is weakref.CallableProxyType]:
        hooks[key] = hooks.pop(key)  # Autograd calls hooks in the order of insertion.
    return handle


def on_gradient_of(tensors: Iterable[torch.Tensor], call: Callable[[], None]) -> list[torch.Tensor]:
    """Have `call` run when autograd has computed the gradient of any of these tensors. Returns the hooked ones: no leaves."""
    computed = [tensor for tensor in tensors if tensor.grad_fn is not None]
    for tensor in computed:
        tensor.register_hook(lambda _gradient: _outside_transforms(call))  # type: ignore[no-untyped-call]
    return computed


def tensors_in(value: Any, depth: int = _MOST_DEPTH) -> Iterator[torch.Tensor]:
    """Yield all tensors in a structure: in PyTorch's pytrees, in fields of dataclasses, and in attributes of other objects."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and is_dataclass(leaf) and not isinstance(leaf, type):
            for each in fields(leaf):
                yield from tensors_in(getattr(leaf, each.name, None), depth - 1)
        elif depth and not isinstance(leaf, type | nn.Module | FunctionType | ModuleType):
            for each in getattr(leaf, "__dict__", {}).values():
                yield from tensors_in(each, depth - 1)


class UnitCall(NamedTuple):
    """A call of a unit in forward: the sequence numbers of its nodes, [first, end), and the edges that have hooks."""

    unit_index: int
    first: int
    end: int
    hooked: frozenset[Edge]


class UnitCalls:
    """Records the calls of units in a forward, and finds where backward would enter them without a hook, and read parameters that
    were not gathered: through tensors that a block keeps as attributes, in objects of unknown classes, or makes under `vmap`. The
    nodes of a call have sequence numbers between those at its begin and its end; edges from other nodes to these are entries."""

    def __init__(self) -> None:
        self._seen_kinds: dict[int, set[tuple[int, int]]] = {}
        self._open_calls: list[tuple[int, int]] = []
        self._new_calls: list[UnitCall] = []

    def reset(self) -> None:
        self._open_calls, self._new_calls = [], []

    def begin(self, unit: int) -> None:
        self._open_calls.append((unit, sequence_number()))

    def end(self, unit: int, hooked: Sequence[torch.Tensor]) -> bool:
        """End a call of a unit, whose outputs `hooked` have hooks; returns True if the call is of a new kind."""
        first = end = sequence_number()
        while self._open_calls:  # Inner calls that an exception ended are dropped.
            begun, first = self._open_calls.pop()
            if begun == unit:
                break
        seen = self._seen_kinds.setdefault(unit, set())
        kind = (end - first, len(hooked))
        if end == first or kind in seen or len(seen) >= _MOST_KINDS:
            return False
        seen.add(kind)
        edges = frozenset((each.grad_fn, each.output_nr) for each in hooked if each.grad_fn is not None)
        self._new_calls.append(UnitCall(unit_index=unit, first=first, end=end, hooked=edges))
        return True

    def unhooked_entries(self, roots: Iterable[Edge]) -> list[tuple[int, torch.Tensor | None]]:
        """List the entries without a hook behind `roots`, into calls of new kinds: unit, and parameter if a view of one is read."""
        calls, self._new_calls = sorted(self._new_calls, key=lambda call: call.first), []
        firsts = [call.first for call in calls]
        entries: dict[Edge, tuple[int, torch.Tensor | None]] = {}
        stack: list[tuple[int, Edge]] = [(-1, root) for root in roots] if calls else []
        visited: set[Node] = set()
        while stack:
            before, edge = stack.pop()
            node: Any = edge[0]
            place = bisect_right(firsts, node._sequence_nr()) - 1
            inside = place if place >= 0 and node._sequence_nr() < calls[place].end else -1
            # A hook on the edge, or on that of a viewed or copied tensor, runs before backward reads a parameter.
            if inside not in (-1, before) and calls[inside].hooked.isdisjoint(_origins(edge, _VIEWS | _COPIES)):
                *_, (viewed, _) = _origins(edge, _VIEWS)
                entries.setdefault(edge, (calls[inside].unit_index, getattr(viewed, "variable", None)))
            if node not in visited:
                visited.add(node)
                stack += [(inside, each) for each in node.next_functions if each[0] is not None]
        return list(entries.values())


def _origins(edge: Any, kinds: frozenset[str]) -> Iterator[Edge]:
    """Yield an edge, and while it is that of an operation of these kinds on one tensor, the edge of the tensor."""
    yield edge
    while edge[0].name() in kinds and len(edge[0].next_functions) == 1 and edge[0].next_functions[0][0] is not None:
        (edge,) = edge[0].next_functions
        yield edge
