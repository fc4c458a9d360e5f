"""Frozen experts that rest encoded, on the host or in files: those that a token of the microbatch chose are brought.

    rows by expert    e0 e0 e3 | e4 e7 e7         groups of at most `GROUP_BYTES` of experts
    forward           read and decode a group's experts [chosen, ., .], add its adapters | the module's own forward | drop them
    backward          what autograd has saved of them is brought again, once for each group

The values are those of a gather of all experts, so that results are too. Recomputed activations bring a group before its backward,
which then finds it in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from zeromesh.experts.dispatch import adapters_of, run_rows
from zeromesh.flat.codec import in_own_dtypes
from zeromesh.flat.layout import BucketLayout
from zeromesh.offload import Ledger, Purpose, Tier
from zeromesh.overrides import override
from zeromesh.tensor.autograd_collectives import uncompiled
from zeromesh.units.plan import COUNT
from zeromesh.units.unit import Unit

GROUP_BYTES = 512 << 20
"""Bytes of the experts that are in memory at a time, in the dtype of computing; at least one expert is."""


def group_bytes(layouts: Sequence[BucketLayout]) -> int:
    """Return the most bytes that are in memory at a time of the experts of a module, which has these buckets."""
    one = sum(map(_expert_nbytes, layouts))
    return one * min(layouts[0].first.shape[0], _most_of(one)) if layouts else 0


def _expert_nbytes(layout: BucketLayout) -> int:
    return sum(prod(slot.spec.shape[1:]) for slot in layout.slots) * layout.first.dtype.itemsize


def _most_of(one: int) -> int:
    return max(GROUP_BYTES // one, 1)


@dataclass
class _Held:
    """The experts in memory: those of one group, whose `key` says which they are."""

    ledger: Ledger
    key: object = None
    matrices: dict[str, Tensor] = field(default_factory=dict)

    def replace(self, key: object = None, load: Callable[[], dict[str, Tensor]] = dict) -> None:
        if key is None or key != self.key:
            self._count(-1)
            self.key, self.matrices = None, {}
            self.key, self.matrices = key, load()
            self._count(1)

    def _count(self, sign: int) -> None:
        if nbytes := sum(each.nbytes for each in self.matrices.values()):
            self.ledger.add(Tier.DEVICE, Purpose.PARAMETERS, sign * nbytes)


class FetchedExperts:
    """Has the modules of experts of the units that are fetched bring them. `drop` frees those in memory, at the end of a pass."""

    def __init__(self, model: nn.Module, units: Iterable[Unit], ledger: Ledger) -> None:
        self._held, self._undo = _Held(ledger), ExitStack()
        self.drop = self._held.replace
        for unit in units:
            if unit.is_fetched:
                _Module(model, unit, self._held, self._undo)

    def close(self) -> None:
        """Give the modules their own forward again."""
        self.drop()
        self._undo.close()


class _Saved(NamedTuple):
    """A view of a matrix of experts that autograd has saved."""

    leaf: str
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class _Module:
    """Runs a module of experts with those that tokens chose. PEFT's adapters of its parameters are added to these alone."""

    def __init__(self, model: nn.Module, unit: Unit, held: _Held, undo: ExitStack) -> None:
        self.module, self.held, self._buckets = unit.module, held, unit.buckets
        self.count = getattr(unit.module, COUNT)
        self.slots = {
            slot.spec.fqn.rpartition(".")[2]: (bucket, slot) for bucket in unit.buckets for slot in bucket.layout.slots
        }
        self.active: list[tuple[Any, str]] = []  # PEFT's adapters and their names
        self._most = _most_of(sum(_expert_nbytes(bucket.layout) for bucket in unit.buckets))
        self._names = list(signature(type(self.module).forward).parameters)[1:]
        undo.callback(override(self.module, "forward", _around_own(self.module.forward, self._forward)))
        for _, adapter in adapters_of(model, self.module):
            undo.callback(override(adapter, "_activate_lora", partial(self._activate, adapter)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Module":
        return self  # A copied model has all of its experts, and runs them as ever.

    @contextmanager
    def _activate(self, adapter: Any, names: Sequence[str]) -> Iterator[None]:
        before = self.active
        self.active = [*before, *((adapter, name) for name in names if name in adapter.lora_A)]
        try:
            yield
        finally:  # A recomputation ends by an exception.
            self.active = before

    @uncompiled
    def _forward(self, own: Callable[..., Tensor], /, *args: Tensor, **kwargs: Tensor) -> Tensor:
        copied = getattr(own, "__self__", self.module) is not self.module
        trained = any(any(bucket.training) for bucket in self._buckets)
        if copied or trained or any(adapter._param_ndim != 3 for adapter, _ in self.active):
            with ExitStack() as adapted:
                for adapter in dict.fromkeys(adapter for adapter, _ in self.active):
                    names = [name for each, name in self.active if each is adapter]
                    adapted.enter_context(type(adapter)._activate_lora(adapter, names))
                return own(*args, **kwargs)
        return run_rows(own, self._run, self.count, self._names, *args, **kwargs)

    def _run(
        self, call: Callable[[Tensor, Tensor], Tensor], first: Callable[[int], Tensor], counts: Tensor
    ) -> Tensor:
        sizes: list[int] = counts.tolist()
        chosen, rows = [number for number, size in enumerate(sizes) if size], first(sum(sizes))
        found, at = [], 0
        for begin in range(0, len(chosen), self._most):
            group = _Group(self, chosen[begin : begin + self._most])
            length = sum(sizes[number] for number in group.chosen)
            numbers = torch.arange(len(group.chosen), device=rows.device).repeat_interleave(counts[group.chosen])
            found.append(group.run(partial(call, rows[at : at + length], numbers)))
            at += length
        return torch.cat(found) if found else rows


class _Group:
    """Some of the experts of a module, with the adapters that are active."""

    def __init__(self, owner: _Module, chosen: Sequence[int]) -> None:
        self.chosen, self._owner, self._adapters = chosen, owner, tuple(owner.active)

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """Run `call` while the module has these experts alone."""
        module = self._owner.module
        with ExitStack() as undo:
            matrices = self.bring()
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                factors = self._factors(leaf)
                if leaf in matrices:
                    given = [each for lhs, rhs, _ in factors for each in (lhs, rhs)]
                    value = _Brought.apply(self, leaf, *given) if given else matrices[leaf]  # type: ignore[no-untyped-call]
                else:
                    value = self._rows_of(parameter)
                    for lhs, rhs, scaling in factors:
                        value = torch.baddbmm(value, lhs, rhs, alpha=scaling)
                undo.callback(override(module, leaf, value))
            undo.callback(override(module, COUNT, len(self.chosen)))
            with saved_tensors_hooks(*self._hooks(matrices)):
                result = call()
        if torch._C._current_graph_task_id() == -1:  # A recomputation's are needed at once.
            self._owner.held.replace()
        return result

    def bring(self) -> dict[str, Tensor]:
        """Return the matrices by name, with what active adapters add; they are read unless they are in memory."""
        held = self._owner.held
        held.replace((self._owner, tuple(self.chosen), self._adapters), self._load)
        return held.matrices

    def _load(self) -> dict[str, Tensor]:
        found = {}
        with in_own_dtypes(), _disable_current_modes(), torch.no_grad():
            for leaf, (bucket, slot) in self._owner.slots.items():
                _, *shape = slot.spec.shape
                device, size, source = bucket.buffer.full.device, prod(shape), bucket.copy or bucket.master
                out = torch.empty(len(self.chosen), *shape, dtype=bucket.dtype, device=device)
                for place, first, count in _runs(self.chosen):
                    start = slot.where.start + first * size
                    source.read(start, out[place : place + count].view(-1)).wait()
                with torch.autocast(device.type, enabled=False):
                    for lhs, rhs, scaling in self._factors(leaf):
                        out.baddbmm_(lhs, rhs, alpha=scaling)
                found[leaf] = out
        return found

    def _factors(self, leaf: str) -> list[tuple[Tensor, Tensor, float]]:
        """Return the factors `[chosen, ., rank]` and `[chosen, rank, .]` of each active adapter, and their product's."""
        rows = self._rows_of
        found = (each.get_delta_factors(name) for each, name in self._adapters if each.parameter_name == leaf)
        return [(rows(lhs), rows(rhs), scaling) for lhs, rhs, scaling in found]

    def _rows_of(self, values: Tensor) -> Tensor:
        return values if len(self.chosen) == self._owner.count else values[self.chosen]

    def gradients(self, leaf: str, grad: Tensor) -> Iterator[Tensor]:
        """Yield the gradients of the factors of a matrix from that of the matrix."""
        for lhs, rhs, scaling in self._factors(leaf):
            yield (grad @ rhs.mT).mul_(scaling)
            yield (lhs.mT @ grad).mul_(scaling)

    def _hooks(self, matrices: dict[str, Tensor]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return hooks that have autograd save places in matrices, which are brought again. Others go to the hooks around."""
        places = {each.untyped_storage().data_ptr(): leaf for leaf, each in matrices.items()}
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack_other, unpack_other = around or (lambda tensor: tensor, lambda tensor: tensor)

        def pack(tensor: Tensor) -> Any:
            if (leaf := places.get(tensor.untyped_storage().data_ptr())) is None:
                return pack_other(tensor)
            return _Saved(leaf, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _Saved):
                return unpack_other(saved)
            return self.bring()[saved.leaf].as_strided(saved.size, saved.stride, saved.offset)

        return pack, unpack


class _Brought(torch.autograd.Function):
    """Experts with adapters, of which nothing is kept: the gradients of the factors need only these."""

    @staticmethod
    def forward(ctx: Any, group: _Group, leaf: str, *factors: Tensor) -> Tensor:
        ctx.group, ctx.leaf = group, leaf
        return group.bring()[leaf].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *ctx.group.gradients(ctx.leaf, grad)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of successive numbers: the place of the first one, itself, and how many there are."""
    begin = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield begin, numbers[begin], place - begin
            begin = place


def _around_own(forward: Callable[..., Tensor], run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a module's forward with `run(own, ...)` in place of its own, inside of what divides or spreads it."""
    if isinstance(forward, partial) and forward.func.__module__.startswith("zeromesh."):
        return partial(forward.func, _around_own(forward.args[0], run), *forward.args[1:])
    return partial(run, forward)
