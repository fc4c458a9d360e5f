"""Calls of a model in a loop of one's own, whose context ranks share the sequences of a call."""

from collections.abc import Callable
from contextlib import ExitStack
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

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
    forward, names, within = model.forward, signature(type(pretrained_of(model)).forward), False

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal within
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        batch = {**dict(zip(list(names.parameters)[1:], arguments, strict=False)), **named}
        items = batch.pop("num_items_in_batch", None)
        whole = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in batch.items()}
        attention = SharedAttention(model, whole, context, on_device=False, separates=True)
        device = next(each.device for each in batch.values() if isinstance(each, Tensor))
        shared = {
            name: each.to(device) if isinstance(each, Tensor) else each
            for name, each in attention.told(model, whole).items()
        }
        labelled = isinstance(labels := whole.get("labels"), Tensor)
        if labelled and isinstance(labels, Tensor):
            shared["num_items_in_batch"] = max(1, count_targets(labels, causal=True)) if items is None else items
        within = True
        try:
            with attention.in_force():
                out = forward(**{**shared, "return_dict": True})
        finally:
            within = False
        if labelled:
            out.loss, out.logits = all_reduce_output(out.loss, None, context.exchange), None
        else:
            length = next(each.shape[1] for each in whole.values() if isinstance(each, Tensor))
            gather, share = context.gather, context.share
            whole_logits = apply_collective(out.logits, None, lambda x: gather(x, 1), lambda grad: share(grad, 1))
            out.logits = whole_logits[:, :length]
        return out

    def inner(own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and not within:
            raise ConfigError(
                f"{type(model).__name__} was called by a part of it, and ranks share the sequences of whole calls alone; call the "
                "model itself, or set it to 1",
                where="parallel.context",
            )
        return own(*arguments, **named)

    undone = ExitStack()
    undone.callback(override(model, "forward", call))
    base = pretrained_of(model).base_model
    if base is not pretrained_of(model):
        own = base.forward
        undone.callback(override(base, "forward", lambda *arguments, **named: inner(own, *arguments, **named)))
    return undone.close
