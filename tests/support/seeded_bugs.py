"""Bugs of compositions, to be planted: each makes training silently wrong in one layout, with the same collectives on all ranks.

A bug is a function that stands in the place of one of zeromesh's, which it gets as its first argument; its docstring says what is
wrong. `with plant(name): ...` plants it in this process, before a trainer is built, and takes it back afterwards.
"""

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.support.trainer_cases import LENGTH, LLAMA, settings
from zeromesh.comm.activation_collectives import Pending
from zeromesh.comm.transport import Reduction
from zeromesh.intervals import Interval
from zeromesh.kernels import chunked_head
from zeromesh.offload import Access, StreamRow
from zeromesh.offload.activation_store import ActivationStore
from zeromesh.optim import gradients as gradients_of_buckets
from zeromesh.optim.fused_optimizer import BucketOptimizer, GroupRules
from zeromesh.optim.gradients import GradientReducer, GradientShards, gradient_of
from zeromesh.optim.optimizer_step import OptimizerStep, WeightAverage
from zeromesh.optim.replicas import ReplicaGroups
from zeromesh.pipeline.pipeline import ZeroRunner
from zeromesh.pipeline.schedule import Kind
from zeromesh.rng import Streams, seed_all
from zeromesh.tensor import layers
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.trainer.config.sections.schedule import LRSchedule
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.models import prepare
from zeromesh.units.unit import Bucket, all_buckets, set_values
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.passes import Passes


@dataclass(frozen=True, kw_only=True, slots=True)
class SeededBug:
    """A bug, and where it bites."""

    name: str
    holder: Any
    attribute: str
    """The attribute of `holder` that the bug replaces."""
    layout: Mapping[str, Any]
    """Keys of the configuration under which it bites."""
    named: str
    """A regular expression of the names of modules and parameters that a right diagnosis names; empty: none is to blame."""
    call: Callable[..., Any]
    """Called with the original and its arguments."""
    ranks: int

    def config(self, **keys: Any) -> dict[str, Any]:
        """The configuration of a run in which it bites, with `keys` such as `run__name` on top: of a tiny Llama in float64."""
        llama = {"model_type": "llama", **LLAMA, "tie_word_embeddings": False, "use_cache": False}
        nested = settings(
            "runs",
            model={"config": llama},
            schedule={"name": "constant", "warmup_steps": 0},
            data={"sequence_length": LENGTH},
            run={"max_steps": 3, "eval_at_end": False},
        )
        for key, value in {**self.layout, **{name.replace("__", "."): value for name, value in keys.items()}}.items():
            *path, leaf = key.split(".")
            section = nested
            for name in path:
                section = section.setdefault(name, {})
            section[leaf] = value
        return nested


BUGS: dict[str, SeededBug] = {}
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def plant(name: str) -> AbstractContextManager[Any]:
    """Plant a bug inside a block. Raises `KeyError` for an unknown name."""
    bug = BUGS[name]
    original = getattr(bug.holder, bug.attribute)
    # A function, which a class binds as a method.
    return patch.object(bug.holder, bug.attribute, lambda *args, **kwargs: bug.call(original, *args, **kwargs))


def seeded(holder: Any, attribute: str, layout: Mapping[str, Any], named: str = "", *, ranks: int = 2, name: str = "") -> Decorator:
    """Make a function a bug in the place of `holder.attribute`, which has the function's name."""

    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        known = name or call.__name__.replace("_", "-")
        BUGS[known] = SeededBug(name=known, holder=holder, attribute=attribute, layout=layout, named=named, call=call, ranks=ranks)
        return call

    return register


def _holds(bucket: Bucket, pattern: str) -> bool:
    return any(re.search(pattern, slot.spec.fqn) for slot in bucket.layout.slots)


_in_last_block = partial(_holds, pattern=r"layers\.1\.")
_TENSOR = {"parallel.tensor": 2, "zero.stage": 1}
_PIPELINE = {"parallel.pipeline": 2, "zero.stage": 1}
_DEFERRED = {**_PIPELINE, "parallel.schedule": "zero_bubble"}
_TIED = {**_PIPELINE, "model.config.tie_word_embeddings": True}
_RECOMPUTED = {"zero.stage": 3, "model.activation_checkpointing": "block"}
_DROPS = {"model.config.attention_dropout": 0.2}


# The tensor axis


def _in_layer(suffix: str, layout: Mapping[str, Any], named: str) -> Decorator:
    """Make a function a bug that changes the module in the place of a layer, which it gets alone."""

    def register(change: Callable[..., Any]) -> Callable[..., Any]:
        def planted(module_of: Any, self: Parallelized, layer: Any) -> Any:
            made = module_of(self, layer)
            if layer.module.endswith(suffix):
                change(made)
            return made

        return seeded(Parallelized, "_replacement_of", layout, named, name=change.__name__.replace("_", "-"))(planted)

    return register


class _Wrong:
    """An exchange of which one collective is another function."""

    def __init__(self, exchange: Any, **collectives: Callable[..., Any]) -> None:
        self._exchange = exchange
        vars(self).update(collectives)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)


def _deaf(exchange: Any) -> _Wrong:
    """Its sums are this rank's own summands."""
    return _Wrong(exchange, all_reduce_async=lambda tensor: Pending(tensor.clone))


@_in_layer("layers.1.mlp.down_proj", _TENSOR, r"layers\.1\.mlp")
def row_sum_missing(layer: Any) -> None:
    """A row-parallel layer does not sum its outputs over the tensor axis."""
    layer._exchange = _deaf(layer._exchange)


@_in_layer("layers.1.self_attn.q_proj", _TENSOR, r"layers\.1\.(self_attn|input_layernorm)")
def column_sum_missing(layer: Any) -> None:
    """Backward of column-parallel layers does not sum the gradient of their input over the tensor axis."""
    layer._source.exchange = _deaf(layer._source.exchange)


@_in_layer("layers.1.self_attn.o_proj", {**_TENSOR, "model.config.attention_bias": True}, r"layers\.1\.self_attn")
def row_bias_repeated(layer: Any) -> None:
    """Each tensor rank adds the bias of a row-parallel layer."""
    right = layer.forward
    layer.forward = lambda x: right(x) + (layer._exchange.size - 1) * layer.bias.detach()


@_in_layer("layers.1.self_attn.o_proj", _TENSOR, r"layers\.1\.self_attn")
def heads_turned(layer: Any) -> None:
    """A row-parallel layer takes heads in another order than the column-parallel ones make them."""
    right = layer.forward
    layer.forward = lambda x: right(x.roll(x.shape[-1] // 2, -1))


@_in_layer("layers.1.mlp.gate_proj", {**_TENSOR, "parallel.sequence": True}, r"layers\.1\.mlp")
def shares_turned(layer: Any) -> None:
    """The shares of the sequence are put together in another order than that of the ranks."""
    right = layer._source.exchange

    def turned(tensor: torch.Tensor, dim: int) -> Pending:
        whole = right.all_gather_async(tensor, dim)
        return Pending(lambda: whole.wait().roll(tensor.shape[dim], dim))

    layer._source.exchange = _Wrong(right, all_gather_async=turned)


def _unshared(layout: Mapping[str, Any], named: str = "", *, ranks: int = 2) -> Decorator:
    """Make a condition a bug: buckets that meet it are not summed over the ranks that share them."""

    def register(of: Callable[..., Any]) -> Callable[..., Any]:
        def planted(start: Any, self: ReplicaGroups, bucket: Bucket, gradient: torch.Tensor) -> Any:
            return Reduction(lambda: True, lambda: None) if of(bucket) else start(self, bucket, gradient)

        name = of.__name__.replace("_", "-")
        return seeded(ReplicaGroups, "sum_async", layout, named, ranks=ranks, name=name)(planted)

    return register


@_unshared({**_TENSOR, "parallel.sequence": True}, "norm")
def sequence_norms_unsummed(bucket: Bucket) -> bool:
    """Gradients of norms, of which each tensor rank has those of its share of the sequence, are not summed over them."""
    return "tensor" in dict(bucket.spec.shared_by) and _holds(bucket, "norm")


@seeded(ReplicaGroups, "sum_async", {**_TENSOR, "model.config.num_key_value_heads": 1}, r"[kv]_proj")
def shared_heads_averaged(start: Any, self: ReplicaGroups, bucket: Bucket, gradient: torch.Tensor) -> Any:
    """Gradients of key and value heads that several tensor ranks hold are averaged over them, not summed."""
    holders = dict(bucket.spec.shared_by).get("tensor")
    if holders and _holds(bucket, "[kv]_proj"):
        gradient.mul_(1 / len(holders))
    return start(self, bucket, gradient)


@seeded(chunked_head.HeadPass, "__init__", _TENSOR, "lm_head")
def head_next_shard(init: Any, self: Any, hidden: Any, weight: Any, *rest: Any, first: int, **settings: Any) -> None:
    """The vocabulary-parallel loss takes the tokens of each rank for those of the next one."""
    init(self, hidden, weight, *rest, first=first + weight.shape[0], **settings)


@seeded(layers, "lookup_sharded_embedding", _TENSOR, "embed_tokens")
def embedding_next_shard(lookup: Any, own: Any, tokens: Interval, exchange: Any, ids: torch.Tensor) -> Any:
    """The vocabulary-parallel embedding looks tokens up that the next rank holds."""
    start = (tokens.start + tokens.length) % (tokens.length * exchange.size)
    return lookup(own, Interval(start=start, end=start + tokens.length), exchange, ids)


@seeded(ZeroEngine, "__init__", _TENSOR, "rotary_emb|self_attn")
def rotary_wrong_on_one_rank(init: Any, self: ZeroEngine, model: Any, built: Any, mesh: Any, *rest: Any) -> None:
    """A tensor rank has other frequencies of its rotary embedding."""
    init(self, model, built, mesh, *rest)
    for name, buffer in model.named_buffers():
        if mesh.tensor.index == 1 and "inv_freq" in name:
            buffer.mul_(1.5)


@seeded(ZeroEngine, "__init__", _TENSOR, r"model\.norm")
def other_beginning(init: Any, self: ZeroEngine, model: Any, built: Any, mesh: Any, *rest: Any) -> None:
    """A tensor rank begins with other values of a norm that all tensor ranks hold."""
    init(self, model, built, mesh, *rest)
    for bucket in all_buckets(built.units):
        for slot in bucket.layout.slots:
            if mesh.tensor.index == 1 and slot.spec.fqn == "model.norm.weight":
                values = bucket.master.load(mesh.device)
                values[slot.where.start : slot.where.end] *= 1.5
                bucket.master.write(0, values).wait()


@seeded(ReplicaGroups, "counts", _TENSOR)
def replicated_counted_twice(counts: Any, self: ReplicaGroups, bucket: Bucket) -> bool:
    """The norm for clipping counts parameters that all tensor ranks hold once for each of them."""
    return bucket.spec.copies is None or counts(self, bucket)


# The pipeline axis


@_unshared(_TIED, "embed_tokens|lm_head")
def tie_unsummed(bucket: Bucket) -> bool:
    """Gradients of an embedding that the last stage has as its head are not summed over the two stages."""
    return bucket.spec.copies is not None


@seeded(BucketOptimizer, "step", _TIED, "embed_tokens|lm_head")
def tie_not_updated(step: Any, self: BucketOptimizer, *given: Any) -> None:
    """The last stage does not update its copy of an embedding that is its head."""
    if self._bucket.spec.copies is None or os.environ["RANK"] == "0":
        step(self, *given)


@seeded(ZeroRunner, "run", _PIPELINE, r"layers\.0|embed_tokens")
def gradients_one_late(run: Any, self: ZeroRunner, action: Any, received: Any) -> Any:
    """A stage starts the backward of a microbatch from the gradients of the one before."""
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and not self.stages.is_last(action.chunk):
        late, vars(self)["late"] = vars(self).get("late", received), [each.clone() for each in received]
        # The last microbatch may have fewer samples.
        received = late if all(one.shape == other.shape for one, other in zip(late, received, strict=False)) else received
    return run(self, action, received)


@seeded(Passes, "backward_weight", _DEFERRED, "norm")
def held_twice(backward: Any, self: Passes, forward: Any, run: Any) -> None:
    """Where weights are deferred, gradients of norms, which come with those of the inputs, count twice."""
    forward.gradients = [
        (bucket, index, gradient * (2 if "norm" in bucket.layout.slots[index].spec.fqn else 1))
        for bucket, index, gradient in forward.gradients
    ]
    backward(self, forward, run)


@seeded(ZeroRunner, "_forward", _PIPELINE)
def labels_swapped(run: Any, self: ZeroRunner, chunk: int, microbatch: int, *rest: Any) -> Any:
    """The last stage exchanges the labels of the first two microbatches."""
    work = self.work
    if self.stages.is_last(chunk) and torch.is_grad_enabled() and microbatch < 2:
        batch, other = (copy.copy(work[number].batch) for number in (microbatch, 1 - microbatch))
        batch["labels"], batch.targets = other["labels"], other.targets
        self.work = [*work]
        self.work[microbatch] = replace(work[microbatch], batch=batch)
    try:
        return run(self, chunk, microbatch, *rest)
    finally:
        self.work = work


@seeded(ZeroRunner, "run", _DEFERRED, r"layers\.\d\..*_proj")
def deferred_weights_dropped(run: Any, self: ZeroRunner, action: Any, received: Any) -> Any:
    """The gradients of weights that zero-bubble defers are lost for the last microbatch."""
    last = self._reduced.get(action.chunk, 0) == len(self.work) - 1
    if action.kind is Kind.BACKWARD_WEIGHT and last:
        self.queue._queued[action.chunk, action.microbatch].clear()
    return run(self, action, received)


# Data axes: what is summed over microbatches and ranks


@seeded(Stepper, "_count_targets", {"zero.stage": 2})
def mean_of_means(count: Any, self: Stepper, plan: Any, microbatches: Any, own: Any) -> Any:
    """The loss is the mean over microbatches of their means, whatever targets they have."""
    targets, _ = count(self, plan, microbatches, own)
    return targets, [targets / max(1, each) / len(own) / plan.data_ranks for each in own]


@seeded(Stepper, "_count_targets", {"zero.stage": 2})
def own_targets(count: Any, self: Stepper, plan: Any, microbatches: Any, own: Any) -> Any:
    """Each rank divides its loss by its own targets."""
    targets, _ = count(self, plan, microbatches, own)
    return targets, [targets / max(1, sum(own)) / plan.data_ranks] * len(own)


@seeded(ZeroRunner, "run", {"zero.stage": 2})
def accumulation_divided_twice(run: Any, self: ZeroRunner, action: Any, received: Any) -> Any:
    """Gradients of the mean over all microbatches are divided by the number of microbatches again."""
    with patch.object(self, "scale", self.scale / (1 if action.kind is Kind.FORWARD else len(self.work))):
        return run(self, action, received)


@_unshared({"parallel.replicate": 2, "zero.stage": 1})
def replicas_unsummed(bucket: Bucket) -> bool:
    """Gradients are not summed over replicas."""
    return not any(bucket.spec.shared_by)


@_unshared({**_TENSOR, "parallel.replicate": 2}, ranks=4)
def one_tensor_rank_unsummed(bucket: Bucket) -> bool:
    """Of two tensor ranks one does not sum its gradients over replicas."""
    return not any(bucket.spec.shared_by) and int(os.environ["RANK"]) % 2 == 1


@seeded(GradientReducer, "_launch_next", {"zero.stage": 1}, r"layers\.1")
def earlier_microbatches_lost(launch: Any, self: GradientReducer) -> None:
    """The sum of a bucket has the last microbatch alone."""
    bucket = self._queue[0].bucket
    if bucket.partial is not None and _in_last_block(bucket):
        bucket.partial.zero_()
    launch(self)


@seeded(gradients_of_buckets, "_zero_gaps", {"zero.stage": 2})
def padding_summed(zero_gaps: Any, flat: torch.Tensor, bucket: Bucket) -> None:
    """The padding of a bucket to equal shards is not zero, and counts for the norm."""
    for gap in bucket.gaps:
        flat[gap].fill_(0.1)


@seeded(gradients_of_buckets, "_zero_gaps", {"zero.stage": 2}, r"layers\.1")
def lost_bucket(zero_gaps: Any, flat: torch.Tensor, bucket: Bucket) -> None:
    """The gradients of a bucket are not summed over the ranks that share it out."""
    zero_gaps(flat, bucket)
    if _in_last_block(bucket):  # Of each interval of the sum, only its owner's summand is left.
        flat[: bucket.interval.start].zero_()
        flat[bucket.interval.end :].zero_()


@seeded(GradientReducer, "_after_reduction", {"zero.stage": 2}, r"layers\.1")
def stale_gradient(take: Any, self: GradientReducer, bucket: Bucket) -> None:
    """The gradient of a bucket begins with that of the step before."""
    if self._last_microbatch and _in_last_block(bucket):
        self.shards.allocate(bucket)
        gradient = gradient_of(bucket)
        gradient += vars(bucket).get("left", 0.0)
        vars(bucket)["left"] = gradient.clone()
    take(self, bucket)


@seeded(Bucket, "show_values", {"zero.stage": 3}, r"layers\.1")
def stale_gather(show: Any, self: Bucket) -> None:
    """A unit is gathered once, and has the weights of the first step from then on."""
    if _in_last_block(self) and not vars(self).get("kept"):
        vars(self)["kept"] = self._views = [view.clone() for view in self._views]
    show(self)


@seeded(Passes, "_make_live_in_backward", _RECOMPUTED, r"layers\.1")
def stale_in_backward(need: Any, self: Passes, unit: Any) -> None:
    """A block is recomputed with the weights of the step before."""
    need(self, unit)
    for bucket in filter(_in_last_block, unit.buckets):
        seen, update = vars(bucket).setdefault("seen", {}), self._updater.updates
        seen.setdefault(update, [view.clone() for view in bucket._views])
        for parameter, values in zip(bucket.parameters, seen.get(update - 1, ()), strict=False):
            set_values(parameter, values)


# Clipping and the optimizer


@seeded(OptimizerStep, "finish", {"zero.stage": 2})
def clipped_by_own_norm(finish: Any, self: OptimizerStep, units: Any, factor: float, _: float, **rest: Any) -> Any:
    """Each rank clips by the norm of its own shards."""
    return finish(self, units, factor, self.read(())[1], **rest)


@seeded(GroupRules, "group_of", {"zero.stage": 2, "optimizer.exempt": "biases_and_norms"}, "norm")
def decay_of_exempt(group_of: Any, self: GroupRules, fqn: str) -> int:
    """Parameters that are exempt from weight decay are decayed."""
    return 0


@seeded(BucketOptimizer, "begin", {"zero.stage": 2})
def microbatches_counted(begin: Any, self: BucketOptimizer) -> None:
    """Adam's correction of its bias counts microbatches, of which a step has two, for updates."""
    begin(self)
    self.steps = [step + 1 for step in self.steps]


@seeded(LRSchedule, "factor", {"zero.stage": 1, "schedule.name": "linear", "run.clip_norm": 0.0})
def rate_one_late(factor: Any, self: LRSchedule, step: int) -> Any:
    """Each step has the learning rate of the step before."""
    return factor(self, max(0, step - 1))


@seeded(BucketOptimizer, "step", {"zero.stage": 0}, r"layers\.1\.mlp\.up_proj")
def skipped_on_one_rank(step: Any, self: BucketOptimizer, start: int, tensors: Any, groups: Any) -> None:
    """One replica does not update a parameter."""
    master, before = tensors[0], tensors[0].clone()
    step(self, start, tensors, groups)
    for slot in self._bucket.layout.slots:
        if os.environ["RANK"] == "1" and slot.spec.fqn.endswith("layers.1.mlp.up_proj.weight"):
            first = self._bucket.interval.start + start
            skipped = slice(max(0, slot.where.start - first), max(0, slot.where.end - first))
            master[skipped] = before[skipped]


@seeded(WeightAverage, "blend", {"zero.stage": 2, "ema.decay": 0.5})
def average_one_early(blend: Any, self: WeightAverage, average: torch.Tensor, weights: torch.Tensor) -> Any:
    """The average of the weights takes in one update more than there were."""
    return average.lerp_(weights, 1 - self._settings.decay)


# Losses, kernels, random numbers


@seeded(chunked_head.HeadPass, "softmax", {"zero.stage": 3}, "lm_head")
def last_label_of_chunk(softmax: Any, self: Any, logits: torch.Tensor, targets: Any, losses: torch.Tensor) -> None:
    """The chunked cross entropy leaves the last label of each chunk out."""
    softmax(self, logits, targets, losses)
    if self.seed != 1.0:  # That of the trial at the start, which would refuse such a kernel.
        losses[-1:] = 0
        logits[-1:] = 0


@seeded(prepare, "_run_replayed", {**_RECOMPUTED, **_DROPS}, r"layers\.\d")
def other_dropout_again(replayed: Any, run: Any, block: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A recomputed block draws other dropout than it drew in forward."""
    calls = itertools.count()

    def other(*args: Any, **kwargs: Any) -> Any:
        if number := next(calls):
            seed_all(number)
        return function(*args, **kwargs)

    return replayed(run, block, other, *args, **kwargs)


@seeded(Streams, "__init__", {"zero.stage": 2, **_DROPS}, r"layers\.0")
def same_dropout(begin: Any, self: Streams, seed: int, step: Any, first_sample: int) -> None:
    """Two data ranks draw the same dropout."""
    begin(self, seed, step, first_sample // (2 * int(os.environ["WORLD_SIZE"])))


@seeded(ShardedRandomness, "enter", {**_TENSOR, **_DROPS}, r"layers\.0\.self_attn")
def same_dropout_of_heads(enter: Any, self: ShardedRandomness) -> None:
    """Two tensor ranks draw the same dropout for their heads."""


_EXPERTS = {
    "model.config.model_type": "mixtral",
    "model.config.num_local_experts": 4,
    "model.config.experts_implementation": "eager",  # Fused experts have no float64.
}


@seeded(GradientReducer, "take", {**_TENSOR, **_EXPERTS}, "experts")
def experts_halved(take: Any, self: GradientReducer, bucket: Bucket, index: int) -> None:
    """Gradients of experts are half of what they are."""
    parameter = bucket.parameters[index]
    if ".experts." in bucket.layout.slots[index].spec.fqn and parameter.grad is not None:
        parameter.grad = parameter.grad / 2
    take(self, bucket, index)


# Offload


@seeded(ActivationStore, "unpack", {**_RECOMPUTED, "offload.activations": "host"}, r"layers\.1")
def input_of_another_block(unpack: Any, self: ActivationStore, saved: Any) -> torch.Tensor:
    """The store of activations gives a block the input of the block before it."""
    before = saved.call.before() if saved.call is not None and saved.call.before is not None else None
    return unpack(self, before.alive_tensors()[0] if before is not None and before.alive_tensors() else saved)


@seeded(OptimizerStep, "_rows", {"zero.stage": 3, "offload.optimizer": "file", "offload.parameters": "file"}, r"layers\.1")
def masters_not_written(rows: Any, self: OptimizerStep, bucket: Bucket) -> Iterator[StreamRow]:
    """Master weights of a piece that rests on a file are updated, and not written back."""
    for row in rows(self, bucket):
        if row.start == 0 and _in_last_block(bucket):
            master, *others = row.operands
            yield replace(row, operands=(replace(master, mode=Access.READ), *others))
        else:
            yield row


@seeded(OptimizerStep, "_operands", {"zero.stage": 2, "offload.optimizer": "file"}, r"layers\.[01]")
def moments_of_neighbour(uses: Any, self: OptimizerStep, bucket: Bucket, **rest: Any) -> Any:
    """The first moments of a piece are read from and written to the file of its neighbour."""
    if _in_last_block(bucket):
        before = next(each for each in self._buckets if _holds(each, r"layers\.0\."))
        own, others = (self._optimizers[id(each)].moments for each in (bucket, before))
        own["exp_avg"] = others["exp_avg"]
    return uses(self, bucket, **rest)


@seeded(GradientShards, "allocate", {"zero.stage": 2, "offload.gradients": "file"}, r"layers\.1")
def sum_not_read_back(allocate: Any, self: GradientShards, bucket: Bucket) -> None:
    """The sum of earlier microbatches, which rests on a file, is not read before the next one is added."""
    rests = bucket.grad is None and bucket.grad_rest is not None and not self.first_microbatch
    allocate(self, bucket)
    if rests and bucket.grad is not None and _in_last_block(bucket):
        bucket.grad.zero_()
