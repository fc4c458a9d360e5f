"""Bugs of compositions, to be planted: each makes training silently wrong in one layout, with the same collectives on all ranks.

A bug changes classes and functions of zeromesh in this process, before a trainer is built. `with plant(name): ...` takes it back
afterwards; `plant(name)` alone leaves it there.
"""

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from zeromesh.comm.activation_collectives import Pending
from zeromesh.intervals import Interval
from zeromesh.kernels import chunked_cross_entropy
from zeromesh.offload import Access, StreamRow
from zeromesh.offload.activation_store import ActivationStore
from zeromesh.optim.fused_optimizer import BucketOptimizer, GroupRules
from zeromesh.optim.gradients import ReplicaGroups, gradient_of
from zeromesh.optim.optimizer_step import OptimizerStep, WeightAverage
from zeromesh.pipeline.pipeline import ZeroRunner
from zeromesh.rng import seed_all
from zeromesh.tensor import parallelize_module
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.lr_schedule import LRSchedule
from zeromesh.trainer.models import prepare
from zeromesh.units.unit import Bucket
from zeromesh.zero import gradient_reducer
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.gradient_reducer import GradientReducer
from zeromesh.zero.passes import Passes

Swap = Callable[[Any, str, Callable[[Any], Any]], None]
"""`swap(holder, attribute, make)` puts `make(original)` in the place of a holder's attribute."""

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


def _holds(bucket: Bucket, pattern: str) -> bool:
    return any(re.search(pattern, slot.spec.fqn) for slot in bucket.layout.slots)


# The tensor axis


class _Deaf:
    """An exchange whose sums are this rank's own summands."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def sum(self, tensor: torch.Tensor) -> Pending:
        return Pending(tensor.clone)


def _in_layer(swap: Swap, suffix: str, change: Callable[[Any], None]) -> None:
    """`change` the module that replaces a layer."""

    def make(module_of: Any) -> Any:
        def planted(self: Parallelized, layer: Any) -> Any:
            made = module_of(self, layer)
            if layer.module.endswith(suffix):
                change(made)
            return made

        return planted

    swap(Parallelized, "_module", make)


def _row_sum_missing(swap: Swap) -> None:
    def change(layer: Any) -> None:
        layer._exchange = _Deaf(layer._exchange)

    _in_layer(swap, "layers.1.mlp.down_proj", change)


def _column_sum_missing(swap: Swap) -> None:
    def change(layer: Any) -> None:
        layer._source.exchange = _Deaf(layer._source.exchange)

    _in_layer(swap, "layers.1.self_attn.q_proj", change)


def _row_bias_repeated(swap: Swap) -> None:
    def change(layer: Any) -> None:
        right = layer.forward
        layer.forward = lambda x: right(x) + (layer._exchange.size - 1) * layer.bias.detach()

    _in_layer(swap, "layers.1.self_attn.o_proj", change)


def _unshared(swap: Swap, of: Callable[[Bucket], bool]) -> None:
    """Leave out the sum over the ranks that share a bucket."""

    def make(start: Any) -> Any:
        return lambda self, bucket, gradient: None if of(bucket) else start(self, bucket, gradient)

    swap(ReplicaGroups, "start_sum", make)


def _sequence_norms(swap: Swap) -> None:
    _unshared(swap, lambda bucket: bool(bucket.spec.shared_by[0]) and _holds(bucket, "norm"))


def _shared_heads_averaged(swap: Swap) -> None:
    def make(start: Any) -> Any:
        def planted(self: ReplicaGroups, bucket: Bucket, gradient: torch.Tensor) -> Any:
            if bucket.spec.shared_by[0] and _holds(bucket, "[kv]_proj"):
                gradient.mul_(1 / len(bucket.spec.shared_by[0]))
            return start(self, bucket, gradient)

        return planted

    swap(ReplicaGroups, "start_sum", make)


def _head_next_shard(swap: Swap) -> None:
    def make(init: Any) -> Any:
        def planted(
            self: Any, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any, first: int, **settings: Any
        ) -> None:
            init(self, hidden, weight, *rest, first=first + weight.shape[0], **settings)

        return planted

    swap(chunked_cross_entropy._PartOfHead, "__init__", make)


def _embedding_next_shard(swap: Swap) -> None:
    def make(lookup: Any) -> Any:
        def planted(own: Any, tokens: Interval, exchange: Any, ids: torch.Tensor) -> Any:
            start = (tokens.start + tokens.length) % (tokens.length * exchange.size)
            return lookup(own, Interval(start=start, end=start + tokens.length), exchange, ids)

        return planted

    swap(parallelize_module, "lookup_own", make)


def _rotary_wrong_on_one_rank(swap: Swap) -> None:
    def make(init: Any) -> Any:
        def planted(self: ZeroEngine, model: Any, built: Any, mesh: Any, *rest: Any) -> None:
            init(self, model, built, mesh, *rest)
            for name, buffer in model.named_buffers():
                if mesh.tensor.index == 1 and "inv_freq" in name:
                    buffer.mul_(1.5)

        return planted

    swap(ZeroEngine, "__init__", make)


def _replicated_counted_twice(swap: Swap) -> None:
    swap(
        ReplicaGroups, "counts", lambda counts: lambda self, bucket: bucket.spec.copies is None or counts(self, bucket)
    )


# The pipeline axis


def _tie_unsummed(swap: Swap) -> None:
    _unshared(swap, lambda bucket: bucket.spec.copies is not None)


def _labels_swapped(swap: Swap) -> None:
    def make(run: Any) -> Any:
        def planted(self: ZeroRunner, chunk: int, microbatch: int, received: Any) -> Any:
            work = self.work
            if self.stages.is_last(chunk) and torch.is_grad_enabled() and microbatch < 2:
                other = {**work[microbatch].batch, "labels": work[1 - microbatch].batch["labels"]}
                self.work = [*work]
                self.work[microbatch] = replace(work[microbatch], batch=other)
            try:
                return run(self, chunk, microbatch, received)
            finally:
                self.work = work

        return planted

    swap(ZeroRunner, "_run", make)


def _last_weights_dropped(swap: Swap) -> None:
    def make(backward: Any) -> Any:
        def planted(self: ZeroRunner, chunk: int, microbatch: int) -> None:
            if self._reduced.get(chunk, 0) == len(self.work) - 1:
                self.queue._queued[chunk, microbatch].clear()
            backward(self, chunk, microbatch)

        return planted

    swap(ZeroRunner, "backward_weight", make)


# Data axes: what is summed over microbatches and ranks


def _with_shares(swap: Swap, share: Callable[[Any, int, Sequence[int]], list[float]]) -> None:
    """Weigh a rank's microbatches by `share(plan, targets of all, its own targets)`, where 1 is right."""

    def make(count: Any) -> Any:
        def planted(self: Stepper, plan: Any, microbatches: Any, counts: Sequence[int]) -> Any:
            targets, _ = count(self, plan, microbatches, counts)
            return targets, share(plan, targets, counts)

        return planted

    swap(Stepper, "_count_targets", make)


def _mean_of_means(swap: Swap) -> None:
    _with_shares(swap, lambda plan, targets, own: [targets / max(1, each) / len(own) / plan.data_ranks for each in own])


def _own_targets(swap: Swap) -> None:
    _with_shares(swap, lambda plan, targets, own: [targets / max(1, sum(own)) / plan.data_ranks] * len(own))


def _divided_twice(swap: Swap) -> None:
    def make(microbatch: Any) -> Any:
        @contextmanager
        def planted(self: ZeroEngine, position: Any) -> Iterator[Any]:
            with microbatch(self, position) as backward:
                yield lambda loss, seed: backward(loss, seed / self.options.accumulation)

        return planted

    swap(ZeroEngine, "microbatch", make)


def _replicas_unsummed(swap: Swap) -> None:
    _unshared(swap, lambda bucket: not any(bucket.spec.shared_by))


def _lost_bucket(swap: Swap) -> None:
    def make(zero_gaps: Any) -> Any:
        def planted(flat: torch.Tensor, bucket: Bucket) -> None:
            zero_gaps(flat, bucket)
            if _holds(bucket, r"layers\.1\."):  # Of each interval of the sum, only its owner's summand is left.
                flat[: bucket.interval.start].zero_()
                flat[bucket.interval.end :].zero_()

        return planted

    swap(gradient_reducer, "_zero_gaps", make)


def _stale_gradient(swap: Swap) -> None:
    def make(take: Any) -> Any:
        def planted(self: OptimizerStep, bucket: Bucket) -> None:
            if self._last and _holds(bucket, r"layers\.1\."):
                self.shards.make_room(bucket)
                gradient = gradient_of(bucket)
                gradient += vars(bucket).get("left", 0.0)
                vars(bucket)["left"] = gradient.clone()
            take(self, bucket)

        return planted

    swap(OptimizerStep, "take", make)


def _stale_gather(swap: Swap) -> None:
    def make(show: Any) -> Any:
        def planted(self: Bucket) -> None:
            if _holds(self, r"layers\.1\.") and not vars(self).get("kept"):
                vars(self)["kept"] = self._views = [view.clone() for view in self._views]
            show(self)

        return planted

    swap(Bucket, "show", make)


# Clipping and the optimizer


def _own_norm(swap: Swap) -> None:
    def make_read(read: Any) -> Any:
        def planted(self: OptimizerStep, scalars: Any) -> Any:
            values, vars(self)["own"] = read(self, scalars)
            return values, vars(self)["own"]

        return planted

    def make_finish(finish: Any) -> Any:
        return lambda self, units, factor, squares, **rest: finish(self, units, factor, vars(self)["own"], **rest)

    swap(OptimizerStep, "read", make_read)
    swap(OptimizerStep, "finish", make_finish)


def _decay_of_exempt(swap: Swap) -> None:
    swap(GroupRules, "group_of", lambda _: lambda self, fqn: 0)


def _microbatches_counted(swap: Swap) -> None:
    def make_init(init: Any) -> Any:
        def planted(self: BucketOptimizer, bucket: Bucket, options: Any, tiers: Any) -> None:
            init(self, bucket, options, tiers)
            vars(self)["more"] = options.accumulation - 1

        return planted

    def make_begin(begin: Any) -> Any:
        def planted(self: BucketOptimizer) -> None:
            begin(self)
            self.steps = [step + vars(self)["more"] for step in self.steps]

        return planted

    swap(BucketOptimizer, "__init__", make_init)
    swap(BucketOptimizer, "begin", make_begin)


def _rate_one_late(swap: Swap) -> None:
    swap(LRSchedule, "factor", lambda factor: lambda self, step: factor(self, max(0, step - 1)))


def _skipped_on_one_rank(swap: Swap) -> None:
    def make(step: Any) -> Any:
        def planted(self: BucketOptimizer, start: int, end: int, master: torch.Tensor, *rest: Any) -> None:
            before = master.clone()
            step(self, start, end, master, *rest)
            for slot in self._bucket.layout.slots:
                if os.environ["RANK"] == "1" and slot.spec.fqn.endswith("layers.1.mlp.up_proj.weight"):
                    first = self._bucket.interval.start + start
                    skipped = slice(max(0, slot.where.start - first), max(0, slot.where.end - first))
                    master[skipped] = before[skipped]

        return planted

    swap(BucketOptimizer, "step", make)


def _average_one_early(swap: Swap) -> None:
    def make(_: Any) -> Any:
        return lambda self, average, weights: average.lerp_(weights, 1 - self._settings.decay)

    swap(WeightAverage, "blend", make)


# Losses, kernels, random numbers


def _last_label_of_chunk(swap: Swap) -> None:
    def make(softmax: Any) -> Any:
        def planted(self: Any, logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
            softmax(self, logits, targets, losses)
            if self.seed != 1.0:  # That of the trial at the start, which would refuse such a kernel.
                losses[-1:] = 0
                logits[-1:] = 0

        return planted

    swap(chunked_cross_entropy.HeadPass, "softmax", make)


def _other_dropout_again(swap: Swap) -> None:
    def make(replaying: Any) -> Any:
        def planted(function: Callable[..., Any]) -> Callable[..., Any]:
            replayed, calls = replaying(function), itertools.count()

            def other(*args: Any, **kwargs: Any) -> Any:
                if number := next(calls):
                    seed_all(number)
                return replayed(*args, **kwargs)

            return other

        return planted

    swap(prepare, "_replaying", make)


def _same_dropout(swap: Swap) -> None:
    def make(begin: Any) -> Any:
        def planted(self: Passes, kind: str, microbatch: Any) -> Any:
            alike = microbatch.first_sample // (2 * self._mesh.data.size)
            return begin(self, kind, replace(microbatch, first_sample=alike))

        return planted

    swap(Passes, "_begin_forward", make)


def _experts_halved(swap: Swap) -> None:
    def make(take: Any) -> Any:
        def planted(self: GradientReducer, bucket: Bucket, index: int) -> None:
            parameter = bucket.parameters[index]
            if ".experts." in bucket.layout.slots[index].spec.fqn and parameter.grad is not None:
                parameter.grad = parameter.grad / 2
            take(self, bucket, index)

        return planted

    swap(GradientReducer, "take", make)


# Offload


def _input_of_another_block(swap: Swap) -> None:
    def make(unpack: Any) -> Any:
        def planted(self: ActivationStore, saved: Any) -> torch.Tensor:
            call = saved.call
            before = call.before() if call is not None and call.before is not None else None
            return unpack(self, before.alive()[0] if before is not None and before.alive() else saved)

        return planted

    swap(ActivationStore, "unpack", make)


def _masters_not_written(swap: Swap) -> None:
    def make(rows: Any) -> Any:
        def planted(self: OptimizerStep, bucket: Bucket) -> Iterator[StreamRow]:
            for row in rows(self, bucket):
                if row.start == 0 and _holds(bucket, r"layers\.1\."):
                    master, *others = row.operands
                    yield replace(row, operands=(replace(master, mode=Access.READ), *others))
                else:
                    yield row

        return planted

    swap(OptimizerStep, "_rows", make)


_TENSOR = {"parallel.tensor": 2, "zero.stage": 1}
_PIPELINE = {"parallel.pipeline": 2, "zero.stage": 1}

BUGS: tuple[SeededBug, ...] = (
    SeededBug(
        name="row-sum-missing",
        text="a row-parallel layer does not sum its outputs over the tensor axis",
        layout=_TENSOR,
        named=r"layers\.1\.mlp",
        plant=_row_sum_missing,
    ),
    SeededBug(
        name="column-sum-missing",
        text="backward of column-parallel layers does not sum the gradient of their input over the tensor axis",
        layout=_TENSOR,
        named=r"layers\.1\.(self_attn|input_layernorm)",
        plant=_column_sum_missing,
    ),
    SeededBug(
        name="row-bias-repeated",
        text="each tensor rank adds the bias of a row-parallel layer",
        layout={**_TENSOR, "model.config.attention_bias": True},
        named=r"layers\.1\.self_attn",
        plant=_row_bias_repeated,
    ),
    SeededBug(
        name="sequence-norms-unsummed",
        text="gradients of norms, of which each tensor rank has those of its share of the sequence, are not summed over them",
        layout={**_TENSOR, "parallel.sequence": True},
        named="norm",
        plant=_sequence_norms,
    ),
    SeededBug(
        name="shared-heads-averaged",
        text="gradients of key and value heads that several tensor ranks hold are averaged over them, not summed",
        layout={**_TENSOR, "model.config.num_key_value_heads": 1},
        named=r"[kv]_proj",
        plant=_shared_heads_averaged,
    ),
    SeededBug(
        name="head-next-shard",
        text="the vocabulary-parallel loss takes the tokens of each rank for those of the next one",
        layout=_TENSOR,
        named="lm_head",
        plant=_head_next_shard,
    ),
    SeededBug(
        name="embedding-next-shard",
        text="the vocabulary-parallel embedding looks tokens up that the next rank holds",
        layout=_TENSOR,
        named="embed_tokens",
        plant=_embedding_next_shard,
    ),
    SeededBug(
        name="rotary-wrong-on-one-rank",
        text="a tensor rank has other frequencies of its rotary embedding",
        layout=_TENSOR,
        named="rotary_emb|self_attn",
        plant=_rotary_wrong_on_one_rank,
    ),
    SeededBug(
        name="replicated-counted-twice",
        text="the norm for clipping counts parameters that all tensor ranks hold once for each of them",
        layout=_TENSOR,
        named="",
        plant=_replicated_counted_twice,
    ),
    SeededBug(
        name="tie-unsummed",
        text="gradients of an embedding that the last stage has as its head are not summed over the two stages",
        layout={**_PIPELINE, "model.config.tie_word_embeddings": True},
        named="embed_tokens|lm_head",
        plant=_tie_unsummed,
    ),
    SeededBug(
        name="labels-swapped",
        text="the last stage exchanges the labels of the first two microbatches",
        layout=_PIPELINE,
        named="",
        plant=_labels_swapped,
    ),
    SeededBug(
        name="deferred-weights-dropped",
        text="the gradients of weights that zero-bubble defers are lost for the last microbatch",
        layout={**_PIPELINE, "parallel.schedule": "zero_bubble"},
        named=r"layers\.\d\..*_proj",
        plant=_last_weights_dropped,
    ),
    SeededBug(
        name="mean-of-means",
        text="the loss is the mean over microbatches of their means, whatever targets they have",
        layout={"zero.stage": 2},
        named="",
        plant=_mean_of_means,
    ),
    SeededBug(
        name="accumulation-divided-twice",
        text="gradients of the mean over all microbatches are divided by the number of microbatches again",
        layout={"zero.stage": 2},
        named="",
        plant=_divided_twice,
    ),
    SeededBug(
        name="own-targets",
        text="each rank divides its loss by its own targets",
        layout={"zero.stage": 2},
        named="",
        plant=_own_targets,
    ),
    SeededBug(
        name="replicas-unsummed",
        text="gradients are not summed over replicas",
        layout={"parallel.replicate": 2, "zero.stage": 1},
        named="",
        plant=_replicas_unsummed,
    ),
    SeededBug(
        name="lost-bucket",
        text="the gradients of a bucket are not summed over the ranks that share it out",
        layout={"zero.stage": 2},
        named=r"layers\.1",
        plant=_lost_bucket,
    ),
    SeededBug(
        name="stale-gradient",
        text="the gradient of a bucket begins with that of the step before",
        layout={"zero.stage": 2},
        named=r"layers\.1",
        plant=_stale_gradient,
    ),
    SeededBug(
        name="stale-gather",
        text="a unit is gathered once, and has the weights of the first step from then on",
        layout={"zero.stage": 3},
        named=r"layers\.1",
        plant=_stale_gather,
    ),
    SeededBug(
        name="clipped-by-own-norm",
        text="each rank clips by the norm of its own shards",
        layout={"zero.stage": 2},
        named="",
        plant=_own_norm,
    ),
    SeededBug(
        name="decay-of-exempt",
        text="parameters that are exempt from weight decay are decayed",
        layout={"zero.stage": 2, "optimizer.exempt": "biases_and_norms"},
        named="norm",
        plant=_decay_of_exempt,
    ),
    SeededBug(
        name="microbatches-counted",
        text="Adam's correction of its bias counts microbatches for updates",
        layout={"zero.stage": 2},
        named="",
        plant=_microbatches_counted,
    ),
    SeededBug(
        name="rate-one-late",
        text="each step has the learning rate of the step before",
        layout={"zero.stage": 1, "schedule.name": "linear", "run.clip_norm": 0.0},
        named="",
        plant=_rate_one_late,
    ),
    SeededBug(
        name="skipped-on-one-rank",
        text="one replica does not update a parameter",
        layout={"zero.stage": 0},
        named=r"layers\.1\.mlp\.up_proj",
        plant=_skipped_on_one_rank,
    ),
    SeededBug(
        name="average-one-early",
        text="the average of the weights takes in one update more than there were",
        layout={"zero.stage": 2, "ema.decay": 0.5},
        named="",
        plant=_average_one_early,
    ),
    SeededBug(
        name="last-label-of-chunk",
        text="the chunked cross entropy leaves the last label of each chunk out",
        layout={"zero.stage": 3},
        named="lm_head",
        plant=_last_label_of_chunk,
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
        plant=_other_dropout_again,
    ),
    SeededBug(
        name="same-dropout",
        text="two data ranks draw the same dropout",
        layout={"zero.stage": 2, "model.config.attention_dropout": 0.2},
        named=r"layers\.0",
        plant=_same_dropout,
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
        plant=_experts_halved,
    ),
    SeededBug(
        name="input-of-another-block",
        text="the store of activations gives a block the input of the block before it",
        layout={"zero.stage": 3, "model.activation_checkpointing": "block", "offload.activations": "host"},
        named=r"layers\.1",
        plant=_input_of_another_block,
    ),
    SeededBug(
        name="masters-not-written",
        text="master weights of a piece that rests on a file are updated, and not written back",
        layout={"zero.stage": 3, "offload.optimizer": "file", "offload.parameters": "file"},
        named=r"layers\.1",
        plant=_masters_not_written,
    ),
)
