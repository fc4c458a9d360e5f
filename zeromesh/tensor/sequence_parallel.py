"""Sequence parallelism: blocks pass on shares of the sequence, which are gathered where a module needs all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.errors import LayoutError
from zeromesh.overrides import override
from zeromesh.tensor import autograd_collectives
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.tensor.plan.tensor_plan import WHOLE, TensorPlan
from zeromesh.tensor.shared_input import SequenceShares, SharedInput

Undo = list[Callable[[], None]]
_HIDDEN = "hidden_states"


def check_blocks(model: nn.Module, plan: TensorPlan) -> None:
    """Check that whatever could mix tokens will have the whole sequence.

    Raises:
        LayoutError: when blocks are not known, have no divided attention, or hold a matrix that the plan does not know.
    """
    off = "set parallel.sequence: false"
    if not plan.stacks:
        raise LayoutError(
            f"{type(model).__name__} has no repeated blocks in which a sequence could be shared out; {off}"
        )
    known = (*plan.readers(), *(layer.module for layer in plan.layers if layer.style not in WHOLE))
    for block in (name for stack in plan.stacks for name in stack):
        if not any(reader.startswith(f"{block}.") for reader in plan.readers()):
            raise LayoutError(
                f"{block} has no attention that is divided among ranks, so it needs the whole sequence; {off}"
            )
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            inside = plan.in_experts(name) or any(f"{name}.".startswith(f"{one}.") for one in known)
            if not inside and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                raise LayoutError(
                    f"{name} ({type(module).__name__}) may need the whole sequence, as the plan does not know it; {off}"
                )


def share_sequence(
    model: nn.Module,
    stacks: Sequence[Sequence[str]],
    readers: Mapping[str, SharedInput],
    experts: Sequence[str],
    shares: SequenceShares,
    randomness: ShardedRandomness,
) -> Undo:
    """Set the forwards of blocks, of `readers` (attentions) and of blocks of experts; returns what undoes it.

    The first block of a stack takes the whole sequence and the last one returns it. Readers run on all of it, since their code
    reads its length, and so do blocks of experts. Every one of them takes hidden states [batch, sequence, hidden] as its first
    argument, or as `hidden_states`.
    """
    undo: Undo = []
    for stack in stacks:
        for name in stack:
            block = model.get_submodule(name)
            ends = {"first": name == stack[0], "last": name == stack[-1]}
            undo.append(override(block, "forward", partial(_run, block, block.forward, shares, randomness, **ends)))
    for name, source in readers.items():
        reader = model.get_submodule(name)
        undo.append(override(reader, "forward", partial(_read, reader.forward, source, shares)))
    for name in experts:
        module = model.get_submodule(name)
        if float(getattr(module, "jitter_noise", 0.0) or 0.0) > 0:
            raise LayoutError(
                f"{name}: noise of a router cannot be drawn where the sequence is divided; set parallel.sequence: false"
            )
        undo.append(override(module, "forward", partial(_route, module.forward, shares)))
    return undo


def _run(
    block: nn.Module,
    forward: Callable[..., Any],
    shares: SequenceShares,
    randomness: ShardedRandomness,
    *args: Any,
    first: bool,
    last: bool,
    **kwargs: Any,
) -> Any:
    """The forward of a block, the `first` or `last` of its stack or neither. What is drawn in it is this rank's own."""
    if first and shares.enter(_hidden(args, kwargs).shape[1]):
        args, kwargs = _with_hidden(args, kwargs, lambda x: autograd_collectives.split(x, 1, shares.exchange))
    if not shares.active:
        return forward(*args, **kwargs)
    # Where nothing is dropped nothing is drawn: sampling goes on with the numbers of one process.
    with randomness.sharded() if block.training else nullcontext():
        output = forward(*args, **kwargs)
    return _with_first(output, lambda x: autograd_collectives.gather(x, 1, shares.exchange)) if last else output


def _read(forward: Callable[..., Any], source: SharedInput, shares: SequenceShares, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention, of the whole sequence."""
    if not shares.active:
        return forward(*args, **kwargs)

    def join(share: torch.Tensor) -> torch.Tensor:
        whole = autograd_collectives.gather(share, 1, shares.exchange)
        source.joined(whole, share)
        return whole

    args, kwargs = _with_hidden(args, kwargs, join)
    try:
        return forward(*args, **kwargs)
    finally:
        source.forget()


def _route(forward: Callable[..., Any], shares: SequenceShares, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block of experts, of the whole sequence, with a share of what it gives: tokens may be in one row."""
    if not shares.active:
        return forward(*args, **kwargs)
    args, kwargs = _with_hidden(args, kwargs, lambda x: autograd_collectives.gather(x, 1, shares.exchange))
    shape = _hidden(args, kwargs).shape

    def share(out: torch.Tensor) -> torch.Tensor:
        own = autograd_collectives.split(out.view(shape), 1, shares.exchange)
        return own if out.dim() == len(shape) else own.flatten(0, 1)

    return _with_first(forward(*args, **kwargs), share)


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden states among arguments. Raises `LayoutError` where there are none."""
    value = args[0] if args else kwargs.get(_HIDDEN)
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        raise LayoutError(
            "the first argument of a block is not hidden states [batch, sequence, hidden], so the sequence cannot be shared out; "
            "set parallel.sequence: false"
        )
    return value


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    changed = change(_hidden(args, kwargs))
    return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, _HIDDEN: changed})


def _with_first(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor, or a tuple or list that begins with one."""
    if isinstance(output, torch.Tensor):
        return change(output)
    first, *rest = output
    return type(output)((change(first), *rest))
