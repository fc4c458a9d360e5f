"""Bugs of compositions, to be planted: each makes training silently wrong in one layout, with the same collectives on all ranks.

A bug changes classes and functions of zeromesh in this process, before a trainer is built. `with plant(name): ...` takes it back
afterwards; `plant(name)` alone leaves it there.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.support import seeded_patches
from tests.support.seeded_patches import Swap

BASE: Mapping[str, Any] = {
    "model.config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
    "precision.compute": "float64",
    "precision.master": "float64",
    "precision.reduce": "float64",
    "optimizer.lr": 1e-2,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
    "data.sequence_length": 12,
    "batch.global_size": 8,
    "batch.micro_size": 2,
    "run.max_steps": 3,
    "run.clip_norm": 0.5,
    "run.seed": 5,
    "run.eval_at_end": False,
    "parallel.timeout_seconds": 10,
    "checkpoint.every_steps": 0,
}
"""The run that bugs are planted in, by keys of the configuration: a tiny Llama in float64, on samples with unequal targets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeededBug:
    """A bug, and where it bites."""

    name: str
    text: str
    """What is wrong, in a sentence."""
    layout: Mapping[str, Any]
    """Keys of the configuration under which it bites, beside those of `BASE`."""
    named: str
    """A regular expression of the names of modules and parameters that a right diagnosis names; empty: none is to blame."""
    plant: Callable[[Swap], None]
    ranks: int = 2

    def config(self, **keys: Any) -> dict[str, Any]:
        """The configuration of a run in which it bites: nested sections, with `keys` such as `run__name` on top."""
        nested: dict[str, Any] = {}
        dotted = {name.replace("__", "."): value for name, value in keys.items()}
        for key, value in {**BASE, **self.layout, **dotted}.items():
            *path, leaf = key.split(".")
            section = nested
            for name in path:
                section = section.setdefault(name, {})
            section[leaf] = copy.deepcopy(value)
        return nested


def plant(name: str) -> ExitStack:
    """Plant a bug in this process; leaving what is returned, a context, takes it back. Raises `KeyError` for an unknown name."""
    planted = ExitStack()

    def swap(holder: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        planted.enter_context(patch.object(holder, attribute, make(getattr(holder, attribute))))

    {bug.name: bug for bug in BUGS}[name].plant(swap)
    return planted


_TENSOR = {"parallel.tensor": 2, "zero.stage": 1}
_PIPELINE = {"parallel.pipeline": 2, "zero.stage": 1}

BUGS: tuple[SeededBug, ...] = (
    SeededBug(
        name="row-sum-missing",
        text="a row-parallel layer does not sum its outputs over the tensor axis",
        layout=_TENSOR,
        named=r"layers\.1\.mlp",
        plant=seeded_patches.row_sum_missing,
    ),
    SeededBug(
        name="column-sum-missing",
        text="backward of column-parallel layers does not sum the gradient of their input over the tensor axis",
        layout=_TENSOR,
        named=r"layers\.1\.(self_attn|input_layernorm)",
        plant=seeded_patches.column_sum_missing,
    ),
    SeededBug(
        name="row-bias-repeated",
        text="each tensor rank adds the bias of a row-parallel layer",
        layout={**_TENSOR, "model.config.attention_bias": True},
        named=r"layers\.1\.self_attn",
        plant=seeded_patches.row_bias_repeated,
    ),
    SeededBug(
        name="heads-turned",
        text="a row-parallel layer takes heads in another order than the column-parallel ones make them",
        layout=_TENSOR,
        named=r"layers\.1\.self_attn",
        plant=seeded_patches.heads_turned,
    ),
    SeededBug(
        name="shares-turned",
        text="the shares of the sequence are put together in another order than that of the ranks",
        layout={**_TENSOR, "parallel.sequence": True},
        named=r"layers\.1\.mlp",
        plant=seeded_patches.shares_turned,
    ),
    SeededBug(
        name="sequence-norms-unsummed",
        text="gradients of norms, of which each tensor rank has those of its share of the sequence, are not summed over them",
        layout={**_TENSOR, "parallel.sequence": True},
        named="norm",
        plant=seeded_patches.sequence_norms,
    ),
    SeededBug(
        name="shared-heads-averaged",
        text="gradients of key and value heads that several tensor ranks hold are averaged over them, not summed",
        layout={**_TENSOR, "model.config.num_key_value_heads": 1},
        named=r"[kv]_proj",
        plant=seeded_patches.shared_heads_averaged,
    ),
    SeededBug(
        name="head-next-shard",
        text="the vocabulary-parallel loss takes the tokens of each rank for those of the next one",
        layout=_TENSOR,
        named="lm_head",
        plant=seeded_patches.head_next_shard,
    ),
    SeededBug(
        name="embedding-next-shard",
        text="the vocabulary-parallel embedding looks tokens up that the next rank holds",
        layout=_TENSOR,
        named="embed_tokens",
        plant=seeded_patches.embedding_next_shard,
    ),
    SeededBug(
        name="rotary-wrong-on-one-rank",
        text="a tensor rank has other frequencies of its rotary embedding",
        layout=_TENSOR,
        named="rotary_emb|self_attn",
        plant=seeded_patches.rotary_wrong_on_one_rank,
    ),
    SeededBug(
        name="other-beginning",
        text="a tensor rank begins with other values of a norm that all tensor ranks hold",
        layout=_TENSOR,
        named=r"model\.norm",
        plant=seeded_patches.other_beginning,
    ),
    SeededBug(
        name="replicated-counted-twice",
        text="the norm for clipping counts parameters that all tensor ranks hold once for each of them",
        layout=_TENSOR,
        named="",
        plant=seeded_patches.replicated_counted_twice,
    ),
    SeededBug(
        name="tie-unsummed",
        text="gradients of an embedding that the last stage has as its head are not summed over the two stages",
        layout={**_PIPELINE, "model.config.tie_word_embeddings": True},
        named="embed_tokens|lm_head",
        plant=seeded_patches.tie_unsummed,
    ),
    SeededBug(
        name="tie-not-updated",
        text="the last stage does not update its copy of an embedding that is its head",
        layout={**_PIPELINE, "model.config.tie_word_embeddings": True},
        named="embed_tokens|lm_head",
        plant=seeded_patches.tie_not_updated,
    ),
    SeededBug(
        name="gradients-one-late",
        text="a stage starts the backward of a microbatch from the gradients of the one before",
        layout=_PIPELINE,
        named=r"layers\.0|embed_tokens",
        plant=seeded_patches.gradients_one_late,
    ),
    SeededBug(
        name="labels-swapped",
        text="the last stage exchanges the labels of the first two microbatches",
        layout=_PIPELINE,
        named="",
        plant=seeded_patches.labels_swapped,
    ),
    SeededBug(
        name="deferred-weights-dropped",
        text="the gradients of weights that zero-bubble defers are lost for the last microbatch",
        layout={**_PIPELINE, "parallel.schedule": "zero_bubble"},
        named=r"layers\.\d\..*_proj",
        plant=seeded_patches.last_weights_dropped,
    ),
    SeededBug(
        name="held-twice",
        text="where weights are deferred, gradients of norms, which come with those of the inputs, count twice",
        layout={**_PIPELINE, "parallel.schedule": "zero_bubble"},
        named="norm",
        plant=seeded_patches.held_twice,
    ),
    SeededBug(
        name="mean-of-means",
        text="the loss is the mean over microbatches of their means, whatever targets they have",
        layout={"zero.stage": 2},
        named="",
        plant=seeded_patches.mean_of_means,
    ),
    SeededBug(
        name="accumulation-divided-twice",
        text="gradients of the mean over all microbatches are divided by the number of microbatches again",
        layout={"zero.stage": 2},
        named="",
        plant=seeded_patches.divided_twice,
    ),
    SeededBug(
        name="own-targets",
        text="each rank divides its loss by its own targets",
        layout={"zero.stage": 2},
        named="",
        plant=seeded_patches.own_targets,
    ),
    SeededBug(
        name="replicas-unsummed",
        text="gradients are not summed over replicas",
        layout={"parallel.replicate": 2, "zero.stage": 1},
        named="",
        plant=seeded_patches.replicas_unsummed,
    ),
    SeededBug(
        name="one-tensor-rank-unsummed",
        text="of two tensor ranks one does not sum its gradients over replicas",
        layout={**_TENSOR, "parallel.replicate": 2},
        named="",
        plant=seeded_patches.one_tensor_rank_unsummed,
        ranks=4,
    ),
    SeededBug(
        name="earlier-microbatches-lost",
        text="the sum of a bucket has the last microbatch alone",
        layout={"zero.stage": 1},
        named=r"layers\.1",
        plant=seeded_patches.earlier_microbatches_lost,
    ),
    SeededBug(
        name="padding-summed",
        text="what fills a bucket up to equal shards is not zero, and counts for the norm",
        layout={"zero.stage": 2},
        named="",
        plant=seeded_patches.padding_summed,
    ),
    SeededBug(
        name="lost-bucket",
        text="the gradients of a bucket are not summed over the ranks that share it out",
        layout={"zero.stage": 2},
        named=r"layers\.1",
        plant=seeded_patches.lost_bucket,
    ),
    SeededBug(
        name="stale-gradient",
        text="the gradient of a bucket begins with that of the step before",
        layout={"zero.stage": 2},
        named=r"layers\.1",
        plant=seeded_patches.stale_gradient,
    ),
    SeededBug(
        name="stale-gather",
        text="a unit is gathered once, and has the weights of the first step from then on",
        layout={"zero.stage": 3},
        named=r"layers\.1",
        plant=seeded_patches.stale_gather,
    ),
    SeededBug(
        name="stale-in-backward",
        text="a block is recomputed with the weights of the step before",
        layout={"zero.stage": 3, "model.activation_checkpointing": "block"},
        named=r"layers\.1",
        plant=seeded_patches.stale_in_backward,
    ),
    SeededBug(
        name="clipped-by-own-norm",
        text="each rank clips by the norm of its own shards",
        layout={"zero.stage": 2},
        named="",
        plant=seeded_patches.own_norm,
    ),
    SeededBug(
        name="decay-of-exempt",
        text="parameters that are exempt from weight decay are decayed",
        layout={"zero.stage": 2, "optimizer.exempt": "biases_and_norms"},
        named="norm",
        plant=seeded_patches.decay_of_exempt,
    ),
    SeededBug(
        name="microbatches-counted",
        text="Adam's correction of its bias counts microbatches for updates",
        layout={"zero.stage": 2},
        named="",
        plant=seeded_patches.microbatches_counted,
    ),
    SeededBug(
        name="rate-one-late",
        text="each step has the learning rate of the step before",
        layout={"zero.stage": 1, "schedule.name": "linear", "run.clip_norm": 0.0},
        named="",
        plant=seeded_patches.rate_one_late,
    ),
    SeededBug(
        name="skipped-on-one-rank",
        text="one replica does not update a parameter",
        layout={"zero.stage": 0},
        named=r"layers\.1\.mlp\.up_proj",
        plant=seeded_patches.skipped_on_one_rank,
    ),
    SeededBug(
        name="average-one-early",
        text="the average of the weights takes in one update more than there were",
        layout={"zero.stage": 2, "ema.decay": 0.5},
        named="",
        plant=seeded_patches.average_one_early,
    ),
    SeededBug(
        name="last-label-of-chunk",
        text="the chunked cross entropy leaves the last label of each chunk out",
        layout={"zero.stage": 3},
        named="lm_head",
        plant=seeded_patches.last_label_of_chunk,
    ),
    SeededBug(
        name="other-dropout-again",
        text="a recomputed block draws other dropout than it drew in forward",
        layout={
            "zero.stage": 3,
            "model.activation_checkpointing": "block",
            "model.config.attention_dropout": 0.2,
        },
        named=r"layers\.\d",
        plant=seeded_patches.other_dropout_again,
    ),
    SeededBug(
        name="same-dropout",
        text="two data ranks draw the same dropout",
        layout={"zero.stage": 2, "model.config.attention_dropout": 0.2},
        named=r"layers\.0",
        plant=seeded_patches.same_dropout,
    ),
    SeededBug(
        name="same-dropout-of-heads",
        text="two tensor ranks draw the same dropout for their heads",
        layout={**_TENSOR, "model.config.attention_dropout": 0.2},
        named=r"layers\.0\.self_attn",
        plant=seeded_patches.same_dropout_of_heads,
    ),
    SeededBug(
        name="experts-halved",
        text="gradients of experts are half of what they are",
        layout={
            **_TENSOR,
            "model.config.model_type": "mixtral",
            "model.config.num_local_experts": 4,
            "model.config.experts_implementation": "eager",  # Fused experts have no float64.
        },
        named="experts",
        plant=seeded_patches.experts_halved,
    ),
    SeededBug(
        name="input-of-another-block",
        text="the store of activations gives a block the input of the block before it",
        layout={"zero.stage": 3, "model.activation_checkpointing": "block", "offload.activations": "host"},
        named=r"layers\.1",
        plant=seeded_patches.input_of_another_block,
    ),
    SeededBug(
        name="moments-of-neighbour",
        text="the first moments of a piece are read from and written to the file of its neighbour",
        layout={"zero.stage": 2, "offload.optimizer": "file"},
        named=r"layers\.[01]",
        plant=seeded_patches.moments_of_neighbour,
    ),
    SeededBug(
        name="sum-not-read-back",
        text="the sum of earlier microbatches, which rests on a file, is not read before the next one is added",
        layout={"zero.stage": 2, "offload.gradients": "file"},
        named=r"layers\.1",
        plant=seeded_patches.sum_not_read_back,
    ),
    SeededBug(
        name="masters-not-written",
        text="master weights of a piece that rests on a file are updated, and not written back",
        layout={"zero.stage": 3, "offload.optimizer": "file", "offload.parameters": "file"},
        named=r"layers\.1",
        plant=seeded_patches.masters_not_written,
    ),
)
