"""Frozen experts that rest encoded, on the host or in files: those that a token of the microbatch chose are brought.

    rows by expert    e0 e0 e3 | e4 e7 e7         groups of at most `GROUP_BYTES` of experts
    forward           read and decode a group's experts [chosen, ., .], add its adapters | the module's own forward | drop them
    backward          what autograd would have saved of them is brought again, once for each group

The values are those that a gather has. Recomputed activations bring a group before its backward, which finds it in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import is_parametrized
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
"""Bytes of the experts that are in memory at a time, in the dtype of computing; one expert always is."""
_Matrices = dict[str, Tensor]


def group_of(layouts: Iterable[BucketLayout]) -> tuple[int, int]:
    """Return the most experts of a module with these buckets that are in memory at a time, and their bytes."""
    pairs = [(each.first.dtype.itemsize, slot.spec.shape) for each in layouts for slot in each.slots]
    one = sum(size * prod(shape[1:]) for size, shape in pairs)
    count = min(max(GROUP_BYTES // one, 1), pairs[0][1][0]) if one else 0
    return count, count * one


class FetchedExperts:
    """Has modules of experts, of units that are fetched, bring these. The experts of one group are in memory at a time."""

    def __init__(self, model: nn.Module, units: Iterable[Unit], ledger: Ledger) -> None:
        self._undo, self._count = ExitStack(), partial(ledger.add, Tier.DEVICE, Purpose.PARAMETERS)
        self._key, self._matrices = None, _Matrices()
        for unit in units:
            if unit.is_fetched:
                _Module(model, unit, self.hold, self._undo)

    def hold(self, key: Any = None, load: Callable[[], _Matrices] = _Matrices) -> _Matrices:
        """Return the matrices of the group `key` by name, which `load` reads unless they are in memory, in place of another's. With
        no key, as at the end of a pass, none are in memory afterwards."""
        if key is None or key != self._key:
            self._count(-sum(each.nbytes for each in self._matrices.values()))
            self._key, self._matrices = None, _Matrices()
            self._key, self._matrices = key, load()
            self._count(sum(each.nbytes for each in self._matrices.values()))
        return self._matrices

    def close(self) -> None:
        """Give the modules their own forward again."""
        self.hold()
        self._undo.close()


class _Module:
    """Runs a module of experts with those that tokens chose. PEFT's adapters of its parameters are added to these alone."""

    def __init__(self, model: nn.Module, unit: Unit, hold: Callable[..., _Matrices], undo: ExitStack) -> None:
        self.module, self.hold, self._buckets = unit.module, hold, unit.buckets
        self.count = getattr(unit.module, COUNT)
        slots = ((bucket, slot) for bucket in unit.buckets for slot in bucket.layout.slots)
        self.slots = {slot.spec.fqn.rpartition(".")[2]: (bucket, slot) for bucket, slot in slots}
        self.active: list[tuple[Any, str]] = []  # PEFT's adapters and their names
        self._most, _ = group_of(bucket.layout for bucket in unit.buckets)
        self._names = list(signature(type(self.module).forward).parameters)[1:]
        undo.callback(override(self.module, "forward", _around_own(self.module.forward, self._forward)))
        for _, adapter in adapters_of(model, self.module):
            undo.callback(override(adapter, "_activate_lora", partial(self._activate, adapter)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Module":
        return self  # A copied model has all of its experts, and runs them as ever.

    @contextmanager
    def _activate(self, adapter: Any, names: Sequence[str]) -> Iterator[None]:
        with override(self, "active", [*self.active, *((adapter, name) for name in names if name in adapter.lora_A)]):
            yield  # A recomputation ends by an exception.

    @uncompiled
    def _forward(self, own: Callable[..., Tensor], /, *args: Tensor, **kwargs: Tensor) -> Tensor:
        others_way = getattr(own, "__self__", self.module) is not self.module or is_parametrized(self.module)
        trained = any(any(bucket.training) for bucket in self._buckets)
        unlike = [each for each, _ in self.active if each._param_ndim != 3 or each.parameter_name not in self.slots]
        if not (others_way or trained or unlike):
            return run_rows(own, self._run, self.count, self._names, *args, **kwargs)
        with ExitStack() as adapted:
            for adapter in dict.fromkeys(adapter for adapter, _ in self.active):
                names = [name for each, name in self.active if each is adapter]
                adapted.enter_context(type(adapter)._activate_lora(adapter, names))
            return own(*args, **kwargs)

    def _run(self, call: Callable[..., Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        sizes: list[int] = counts.tolist()
        chosen, found, at = [number for number, size in enumerate(sizes) if size], [], 0
        for begin in range(0, len(chosen), self._most):
            group = _Group(self, chosen[begin : begin + self._most])
            end = at + sum(sizes[number] for number in group.chosen)
            numbers = torch.arange(len(group.chosen), device=rows.device).repeat_interleave(counts[group.chosen])
            found.append(group.run(partial(call, rows[at:end], numbers)))
            at = end
        return torch.cat(found) if found else rows[:0]


class _Group:
    """Some of the experts of a module, with the adapters that are active."""

    def __init__(self, owner: _Module, chosen: Sequence[int]) -> None:
        self.chosen, self._owner, self._adapters = chosen, owner, tuple(owner.active)

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """Run `call` while the module has these experts alone."""
        module, matrices = self._owner.module, self.bring()
        with ExitStack() as undo:
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                value = matrices[leaf] if leaf in matrices else self._rows_of(parameter)
                if factors := [each for pair in self.factors(leaf) for each in pair[:2]]:
                    value = _Brought.apply(self, leaf, *factors)  # type: ignore[no-untyped-call]
                undo.callback(override(module, leaf, value))
            undo.callback(override(module, COUNT, len(self.chosen)))
            with saved_tensors_hooks(self._saver(matrices), lambda restore: restore()):
                result = call()
        if torch._C._current_graph_task_id() == -1:  # A recomputation's are needed at once.
            self._owner.hold()
        return result

    def bring(self) -> _Matrices:
        """Return the matrices by name, with what active adapters add."""
        return self._owner.hold((self._owner, tuple(self.chosen), self._adapters), self._load)

    @in_own_dtypes()
    @torch.no_grad()
    def _load(self) -> _Matrices:
        found = {}
        for leaf, (bucket, slot) in self._owner.slots.items():
            shape, device, source = slot.spec.shape[1:], bucket.buffer.full.device, bucket.copy or bucket.master
            found[leaf] = out = torch.empty(len(self.chosen), *shape, dtype=bucket.dtype, device=device)
            with _disable_current_modes(), torch.autocast(device.type, enabled=False):
                # Experts that follow one another are one read.
                for _, run in groupby(enumerate(self.chosen), lambda pair: pair[1] - pair[0]):
                    (place, first), *more = run
                    part = out[place : place + 1 + len(more)].view(-1)
                    source.read(slot.where.start + first * prod(shape), part).wait()
                for lhs, rhs, scaling in self.factors(leaf):
                    out.baddbmm_(lhs, rhs, alpha=scaling)
        return found

    def factors(self, leaf: str) -> list[tuple[Tensor, Tensor, float]]:
        """Return the factors `[chosen, ., rank]` and `[chosen, rank, .]` of each active adapter, and their product's."""
        found = (each.get_delta_factors(name) for each, name in self._adapters if each.parameter_name == leaf)
        return [(self._rows_of(lhs), self._rows_of(rhs), scaling) for lhs, rhs, scaling in found]

    def _rows_of(self, values: Tensor) -> Tensor:
        return values if len(self.chosen) == self._owner.count else values[self.chosen]

    def _saver(self, matrices: _Matrices) -> Callable[[Tensor], Callable[[], Tensor]]:
        """Return a hook that has autograd save places in matrices, which are brought again. Others go to the hooks around."""
        places = {each.untyped_storage().data_ptr(): leaf for leaf, each in matrices.items()}
        around = torch._C._autograd._top_saved_tensors_default_hooks(True) or (lambda value: value,) * 2  # type: ignore[unreachable]

        def save(tensor: Tensor) -> Callable[[], Tensor]:
            if (leaf := places.get(tensor.untyped_storage().data_ptr())) is None:
                return partial(around[1], around[0](tensor))
            place = tensor.size(), tensor.stride(), tensor.storage_offset()
            return lambda: self.bring()[leaf].as_strided(*place)

        return save


class _Brought(torch.autograd.Function):
    """Experts with adapters, of which nothing is kept: the gradients of the factors need only these."""

    @staticmethod
    def forward(ctx: Any, group: _Group, leaf: str, *factors: Tensor) -> Tensor:
        ctx.group, ctx.leaf = group, leaf
        return group.bring()[leaf].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        factors = ctx.group.factors(ctx.leaf)
        pairs = [((grad @ rhs.mT).mul_(scaling), (lhs.mT @ grad).mul_(scaling)) for lhs, rhs, scaling in factors]
        return None, None, *(each for pair in pairs for each in pair)


def _around_own(forward: Callable[..., Tensor], run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a module's forward with `run(own, ...)` in place of its own, inside of what divides or spreads it."""
    if isinstance(forward, partial) and forward.func.__module__.startswith("zeromesh."):
        return partial(forward.func, _around_own(forward.args[0], run), *forward.args[1:])
    return partial(run, forward)
