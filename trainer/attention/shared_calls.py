"""Calls of a model in a loop of one's own, whose context ranks share the sequences of a call."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeromesh.context.shares import Context
from zeromesh.errors import ConfigError
from zeromesh.overrides import override
from zeromesh.tensor.autograd_collectives import all_reduce_output, apply_collective
from zeromesh.trainer.attention.shared_batch import SharedAttention
from zeromesh.trainer.data.collate import count_targets
from zeromesh.trainer.models.adapters import pretrained_of


def share_calls(model: nn.Module, context: Context) -> Callable[[], None]:
    """Let calls of a Hugging Face `model` that record gradients compute this rank's share of their sequences, which ranks of the
    context axis pass whole. The loss is that of the whole; its backward gives each rank its share of the gradients. With labels
    there are no logits, as they would be of the share alone; without them logits are gathered. Returns a call that undoes it."""
    inside = pretrained_of(model) or model
    forward, names, within = model.forward, [*signature(type(inside).forward).parameters][1:], False

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal within
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        batch = {**dict(zip(names, arguments, strict=False)), **named}
        items, device = batch.pop("num_items_in_batch", None), next(inside.parameters()).device
        whole = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in batch.items()}
        attention = SharedAttention(model, whole, context)
        shared = tree_map_only(Tensor, lambda each: each.to(device), dict(attention.told(model, whole)))
        if (labels := whole.get("labels")) is not None:
            shared["num_items_in_batch"] = max(1, count_targets(labels, causal=True)) if items is None else items
        within = True
        try:
            with attention.in_force():
                out = forward(**{**shared, "return_dict": True})
        finally:
            within = False
        if labels is not None:
            out.loss, out.logits = all_reduce_output(out.loss, None, context.exchange), None
        else:  # The loss of logits is the same on all ranks, of whose gradient each has its share.
            gather, share = (lambda x: context.gather(x, 1)), (lambda grad: context.share(grad, 1))
            logits = apply_collective(out.logits, None, gather, share)
            out.logits = logits[:, : next(each.shape[1] for each in whole.values() if isinstance(each, Tensor))]
        return out

    def part(own: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and not within:
            raise ConfigError(
                f"{type(model).__name__} was called by a part of it, and ranks share the sequences of whole calls alone; call the "
                "model itself, or set it to 1",
                where="parallel.context",
            )
        return own(*arguments, **named)

    undone = ExitStack()
    undone.callback(override(model, "forward", call))
    if (base := getattr(inside, "base_model", inside)) is not inside:
        undone.callback(override(base, "forward", partial(part, base.forward)))
    return undone.close
