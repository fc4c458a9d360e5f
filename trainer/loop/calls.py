"""Calls of a partitioned model in a user's loop: packed documents stay apart, and ranks of the context axis share sequences."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeromesh.context.shares import Context
from zeromesh.errors import ConfigError
from zeromesh.parallelize import Divided
from zeromesh.tensor.autograd_collectives import all_reduce_output, apply_collective
from zeromesh.trainer.attention.packed_attention import PackedAttention
from zeromesh.trainer.data.collate import count_targets
from zeromesh.trainer.losses.trial import require_separate_documents
from zeromesh.trainer.models.adapters import pretrained_of

_DividedOf = Callable[[nn.Module], Divided | None]
_SHARING: WeakSet[nn.Module] = WeakSet()
"""Models of which a call on shares of sequences is under way."""


def attend_in_calls(model: nn.Module, divided_of: _DividedOf) -> None:
    """Let documents not see each other in calls of a Hugging Face `model`, where `position_ids` restart. Calls that record
    gradients compute this rank's share of their sequences, which ranks of a context axis pass whole. The loss is that of the
    whole; its backward gives each rank its share of the gradients. With labels there are no logits, as they would be of the
    share alone; without them logits are gathered. `divided_of` tells how a model is divided, or None for one that is not
    partitioned, as copies of `model` are: its calls are as before. Calls raise `ConfigError` for a model that mixes documents,
    and for a call of a part of a model whose ranks share."""
    if (inside := pretrained_of(model)) is None:
        return
    if not hasattr(model.forward, "in_documents"):
        names = [*signature(type(inside).forward).parameters][1:]
        vars(model)["forward"] = MethodType(_in_documents(model.forward, names, divided_of), model)
    divided, base = divided_of(model), getattr(inside, "base_model", inside)
    shares = divided is not None and divided.context is not None
    if shares and base is not inside and getattr(base.forward, "func", None) is not _part:
        vars(base)["forward"] = partial(_part, base.forward, model, divided_of)


def _in_documents(method: Any, names: Sequence[str], divided_of: _DividedOf) -> Callable[..., Any]:
    function = getattr(method, "__func__", None) or (lambda _, *arguments, **named: method(*arguments, **named))

    @wraps(function)
    def forward(model: Any, /, *arguments: Any, **named: Any) -> Any:
        if (divided := divided_of(model)) is None:
            return function(model, *arguments, **named)
        batch = {**dict(zip(names, arguments, strict=False)), **named}
        attention = PackedAttention(batch, model)
        if attention.documents is not None:
            require_separate_documents(model)
        if divided.context is not None and torch.is_grad_enabled():
            return _shared(partial(function, model), model, divided.context, batch)
        if attention.documents is None:
            return function(model, *arguments, **named)
        with attention.in_force():
            return function(model, **attention.told())

    vars(forward)["in_documents"] = True
    return forward


def _shared(forward: Callable[..., Any], model: nn.Module, context: Context, given: Mapping[str, Any]) -> Any:
    device, items = next(model.parameters()).device, given.get("num_items_in_batch")
    whole = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in given.items()}
    whole.pop("num_items_in_batch", None)
    attention = PackedAttention(whole, model, shares=context)
    shared = tree_map_only(Tensor, lambda each: each.to(device), dict(attention.told()))
    if (labels := whole.get("labels")) is not None:
        shared["num_items_in_batch"] = max(1, count_targets(labels, causal=True)) if items is None else items
    _SHARING.add(model)
    try:
        with attention.in_force():
            out = forward(**{**shared, "return_dict": True})
    finally:
        _SHARING.discard(model)
    if labels is not None:
        out.loss, out.logits = all_reduce_output(out.loss, None, context.exchange), None
    else:  # The loss of logits is the same on all ranks, of whose gradient each has its share.
        logits = apply_collective(out.logits, None, partial(context.gather, dim=1), partial(context.share, dim=1))
        out.logits = logits[:, : next(each.shape[1] for each in whole.values() if isinstance(each, Tensor))]
    return out


def _part(own: Callable[..., Any], model: nn.Module, divided_of: _DividedOf, /, *arguments: Any, **named: Any) -> Any:
    if torch.is_grad_enabled() and divided_of(model) is not None and model not in _SHARING:
        why = f"{type(model).__name__} was called by a part of it, and ranks share the sequences of whole calls alone"
        raise ConfigError(f"{why}; call the model itself, or set it to 1", where="parallel.context")
    return own(*arguments, **named)
