"""A trial before training with a context axis: a small copy in float64 on shares of sequences, on the run's own ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from zeromesh.context.shares import Context
from zeromesh.errors import ConfigError, summary
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.attention.packed_attention import PackedAttention
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.losses.losses import Loss
from zeromesh.trainer.losses.trial import packed_batch, require_separate_documents
from zeromesh.trainer.models import small_copy
from zeromesh.trainer.models.adapters import output_layer, pretrained_of


def require_divisible_sequences(model: nn.Module, loss_of: Callable[[nn.Module], Loss], mesh: Mesh, context: Context) -> None:
    """Try a small copy of a whole model on shares of sequences: the loss, which `loss_of` makes, and every gradient must be those
    of whole sequences, ragged ones and, where the model separates them, documents. All ranks call it. Raises `ConfigError` with the
    module that differs, and for a loss that is not of next tokens."""
    inside, ranks, loss = pretrained_of(model), context.exchange.size, loss_of(model)

    def refused(reason: str) -> ConfigError:
        name = type(model if inside is None else inside).__name__
        return ConfigError(f"{name} {reason}; set parallel.context: 1, or take another model", where="parallel.context")

    if loss.kind == "user":
        raise refused("is trained by compute_loss, which would shift the labels of each share by itself")
    if loss.kind != "labels" or not loss.causal or inside is None:
        raise refused("has no loss of next tokens, whose labels could be shifted before sequences are shared out")
    heads = getattr(inside.config.get_text_config(), "num_attention_heads", 0) // mesh.tensor.size
    if context.method == "heads" and heads % ranks:
        why = f"heads: {ranks} ranks (parallel.context) cannot have equally many of {heads} query heads"
        raise ConfigError(f"{why}; set gather or auto", where="parallel.context_method")
    made: list[Loss] = []

    def run(small: nn.Module) -> Tensor:
        small_copy.perturb(small)
        made[:] = [loss_of(small)]
        return _passes(small, made[0], mesh.device, None, 1)[0].gradients[""]

    if isinstance(small := small_copy.small_copy(inside, run), str):
        raise refused(f"cannot be tried on shares of sequences, as no small copy of it runs ({small})")
    small.to(mesh.device)
    try:
        require_separate_documents(model)
        count = 2
    except ConfigError:  # A run with packed documents is refused by itself.
        count = 1
    heads = getattr(small.config.get_text_config(), "num_attention_heads", ranks)
    tried = replace(context, method="auto") if heads % ranks else context  # The whole model has more heads.
    with small_copy.InFloat64():
        wanted = _passes(small, made[0], mesh.device, None, count)
        try:
            found, reason = _passes(small, made[0], mesh.device, tried, count), ""
        except small_copy.ERRORS as error:
            found, reason = [], f"does not run on shares of sequences ({summary(error)})"
    for shares, whole in zip(found, wanted, strict=False):
        reason = reason or _difference(mesh, tried, shares, whole, small)
    if reasons := [each for each in mesh.world.gather_json(reason, "trial of shared sequences") if each]:
        raise refused(reasons[0])


def _passes(small: nn.Module, loss: Loss, on: torch.device, shares: Context | None, most: int) -> list[small_copy.Pass]:
    packed = packed_batch(small)
    ragged = {"input_ids": packed["input_ids"], "attention_mask": torch.ones_like(packed["input_ids"])}
    ragged["attention_mask"][0, -7:] = 0
    found = []
    for batch in (ragged, packed)[:most]:
        padding = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 0
        labels = batch["input_ids"].clamp(max=len(output_layer(small).weight) - 1)  # A head may know fewer tokens.
        batch = {**batch, "labels": labels.masked_fill(padding, IGNORED_LABEL)}
        attention = PackedAttention(batch, small, shares=shares)
        given = {name: each.to(on) for name, each in attention.told().items()}
        call = partial(loss, small, given, seed=1.0, targets=loss.count(batch))
        with attention.in_force():
            found.append(small_copy.run_pass(small, call))
    return found


def _difference(mesh: Mesh, context: Context, found: small_copy.Pass, whole: small_copy.Pass, small: nn.Module) -> str:
    """Return what differs between shares, summed over their ranks, and the whole; empty if nothing does. All ranks call it."""
    sums = {
        name: mesh.context.all_reduce(each.cpu().reshape(-1).clone(), "trial").view_as(each)
        for name, each in found.gradients.items()
    }

    def part_of(whole: Tensor, share: Tensor) -> Tensor | None:
        dims = small_copy.changed_dims(whole, share)
        shared = len(dims) == 1 and whole.shape[dims[0]] == context.exchange.size * share.shape[dims[0]]
        return context.share(whole, dims[0]) if shared else None

    where = small_copy.pass_difference(small, sums, [(found.outputs, part_of)], whole, small_copy.LOSS_TOLERANCE)
    return where and f"computes something else on shares of sequences, {where}, in a trial on a small copy"
