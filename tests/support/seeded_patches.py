"""What seeded bugs put in the place of functions of zeromesh; `seeded_bugs.py` says what each one is."""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from zeromesh.comm.activation_collectives import Pending
from zeromesh.intervals import Interval
from zeromesh.kernels import chunked_cross_entropy
from zeromesh.offload import Access, StreamRow
from zeromesh.offload.activation_store import ActivationStore
from zeromesh.optim import gradients as gradients_of_buckets
from zeromesh.optim.fused_optimizer import BucketOptimizer, GroupRules
from zeromesh.optim.gradients import GradientReducer, GradientShards, ReplicaGroups, gradient_of
from zeromesh.optim.optimizer_step import OptimizerStep, WeightAverage
from zeromesh.pipeline.pipeline import ZeroRunner
from zeromesh.pipeline.schedule import Action, Kind
from zeromesh.rng import Streams, seed_all
from zeromesh.tensor import parallelize_module
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.trainer.config.sections.schedule import LRSchedule
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.models import prepare
from zeromesh.units.unit import Bucket, Unit, all_buckets, set_values
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.passes import Passes, PassProgress

Swap = Callable[[Any, str, Callable[[Any], Any]], None]
"""`swap(holder, attribute, make)` puts `make(original)` in the place of a holder's attribute."""


def _same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape


def _holds(bucket: Bucket, pattern: str) -> bool:
    return any(re.search(pattern, slot.spec.fqn) for slot in bucket.layout.slots)


# The tensor axis


class _Wrapped:
    """An exchange that does what another one does."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)


class _Deaf(_Wrapped):
    """Its sums are this rank's own summands."""

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        return Pending(tensor.clone)


class _Turned(_Wrapped):
    """What it gathers begins with another rank's share."""

    def all_gather_async(self, tensor: torch.Tensor, dim: int) -> Pending:
        whole = self._exchange.all_gather_async(tensor, dim)
        return Pending(lambda: whole.wait().roll(tensor.shape[dim], dim))


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


def row_sum_missing(swap: Swap) -> None:
    def change(layer: Any) -> None:
        layer._exchange = _Deaf(layer._exchange)

    _in_layer(swap, "layers.1.mlp.down_proj", change)


def column_sum_missing(swap: Swap) -> None:
    def change(layer: Any) -> None:
        layer._source.exchange = _Deaf(layer._source.exchange)

    _in_layer(swap, "layers.1.self_attn.q_proj", change)


def row_bias_repeated(swap: Swap) -> None:
    def change(layer: Any) -> None:
        right = layer.forward
        layer.forward = lambda x: right(x) + (layer._exchange.size - 1) * layer.bias.detach()

    _in_layer(swap, "layers.1.self_attn.o_proj", change)


def heads_turned(swap: Swap) -> None:
    def change(layer: Any) -> None:
        right = layer.forward
        layer.forward = lambda x: right(x.roll(x.shape[-1] // 2, -1))

    _in_layer(swap, "layers.1.self_attn.o_proj", change)


def shares_turned(swap: Swap) -> None:
    def change(layer: Any) -> None:
        layer._source.exchange = _Turned(layer._source.exchange)

    _in_layer(swap, "layers.1.mlp.gate_proj", change)


def _unshared(swap: Swap, of: Callable[[Bucket], bool]) -> None:
    """Leave out the sum over the ranks that share a bucket."""

    def make(start: Any) -> Any:
        return lambda self, bucket, gradient: None if of(bucket) else start(self, bucket, gradient)

    swap(ReplicaGroups, "all_reduce_async", make)


def sequence_norms(swap: Swap) -> None:
    _unshared(swap, lambda bucket: "tensor" in dict(bucket.spec.shared_by) and _holds(bucket, "norm"))


def shared_heads_averaged(swap: Swap) -> None:
    def make(start: Any) -> Any:
        def planted(self: ReplicaGroups, bucket: Bucket, gradient: torch.Tensor) -> Any:
            holders = dict(bucket.spec.shared_by).get("tensor")
            if holders and _holds(bucket, "[kv]_proj"):
                gradient.mul_(1 / len(holders))
            return start(self, bucket, gradient)

        return planted

    swap(ReplicaGroups, "all_reduce_async", make)


def head_next_shard(swap: Swap) -> None:
    def make(init: Any) -> Any:
        def planted(
            self: Any, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any, first: int, **settings: Any
        ) -> None:
            init(self, hidden, weight, *rest, first=first + weight.shape[0], **settings)

        return planted

    swap(chunked_cross_entropy.HeadPass, "__init__", make)


def embedding_next_shard(swap: Swap) -> None:
    def make(lookup: Any) -> Any:
        def planted(own: Any, tokens: Interval, exchange: Any, ids: torch.Tensor) -> Any:
            start = (tokens.start + tokens.length) % (tokens.length * exchange.size)
            return lookup(own, Interval(start=start, end=start + tokens.length), exchange, ids)

        return planted

    swap(parallelize_module, "lookup_own", make)


def rotary_wrong_on_one_rank(swap: Swap) -> None:
    def make(init: Any) -> Any:
        def planted(self: ZeroEngine, model: Any, built: Any, mesh: Any, *rest: Any) -> None:
            init(self, model, built, mesh, *rest)
            for name, buffer in model.named_buffers():
                if mesh.tensor.index == 1 and "inv_freq" in name:
                    buffer.mul_(1.5)

        return planted

    swap(ZeroEngine, "__init__", make)


def other_beginning(swap: Swap) -> None:
    def make(init: Any) -> Any:
        def planted(self: ZeroEngine, model: Any, built: Any, mesh: Any, *rest: Any) -> None:
            init(self, model, built, mesh, *rest)
            for bucket in all_buckets(built.units):
                for slot in bucket.layout.slots:
                    if mesh.tensor.index == 1 and slot.spec.fqn == "model.norm.weight":
                        values = bucket.master.load(mesh.device)
                        values[slot.where.start : slot.where.end] *= 1.5
                        bucket.master.write(0, values).wait()

        return planted

    swap(ZeroEngine, "__init__", make)


def replicated_counted_twice(swap: Swap) -> None:
    swap(
        ReplicaGroups, "counts", lambda counts: lambda self, bucket: bucket.spec.copies is None or counts(self, bucket)
    )


# The pipeline axis


def tie_unsummed(swap: Swap) -> None:
    _unshared(swap, lambda bucket: bucket.spec.copies is not None)


def tie_not_updated(swap: Swap) -> None:
    def make(step: Any) -> Any:
        def planted(self: BucketOptimizer, *given: Any) -> None:
            if self._bucket.spec.copies is None or os.environ["RANK"] == "0":
                step(self, *given)

        return planted

    swap(BucketOptimizer, "step", make)


def gradients_one_late(swap: Swap) -> None:
    def make(start: Any) -> Any:
        def planted(self: ZeroRunner, chunk: int, microbatch: int, forward: Any, gradients: Any) -> Any:
            late, vars(self)["late"] = vars(self).get("late", gradients), [each.clone() for each in gradients]
            alike = all(map(_same_shape, late, gradients))  # The last microbatch may have fewer samples.
            return start(self, chunk, microbatch, forward, late if alike else gradients)

        return planted

    swap(ZeroRunner, "_start", make)


def held_twice(swap: Swap) -> None:
    def make(backward: Any) -> Any:
        def planted(self: Passes, forward: PassProgress, run: Any) -> None:
            forward.gradients = [
                (bucket, index, gradient * (2 if "norm" in bucket.layout.slots[index].spec.fqn else 1))
                for bucket, index, gradient in forward.gradients
            ]
            backward(self, forward, run)

        return planted

    swap(Passes, "backward_weight", make)


def labels_swapped(swap: Swap) -> None:
    def make(run: Any) -> Any:
        def planted(self: ZeroRunner, chunk: int, microbatch: int, *rest: Any) -> Any:
            work = self.work
            if self.stages.is_last(chunk) and torch.is_grad_enabled() and microbatch < 2:
                other = {**work[microbatch].batch, "labels": work[1 - microbatch].batch["labels"]}
                self.work = [*work]
                self.work[microbatch] = replace(work[microbatch], batch=other)
            try:
                return run(self, chunk, microbatch, *rest)
            finally:
                self.work = work

        return planted

    swap(ZeroRunner, "_forward", make)


def last_weights_dropped(swap: Swap) -> None:
    def make(run: Any) -> Any:
        def planted(self: ZeroRunner, action: Action, received: Any) -> Any:
            last = self._reduced.get(action.chunk, 0) == len(self.work) - 1
            if action.kind is Kind.BACKWARD_WEIGHT and last:
                self.queue._queued[action.chunk, action.microbatch].clear()
            return run(self, action, received)

        return planted

    swap(ZeroRunner, "run", make)


# Data axes: what is summed over microbatches and ranks


def _with_shares(swap: Swap, share: Callable[[Any, int, Sequence[int]], list[float]]) -> None:
    """Weigh a rank's microbatches by `share(plan, targets of all, its own targets)`, where 1 is right."""

    def make(count: Any) -> Any:
        def planted(self: Stepper, plan: Any, microbatches: Any, counts: Sequence[int]) -> Any:
            targets, _ = count(self, plan, microbatches, counts)
            return targets, share(plan, targets, counts)

        return planted

    swap(Stepper, "_count_targets", make)


def mean_of_means(swap: Swap) -> None:
    _with_shares(swap, lambda plan, targets, own: [targets / max(1, each) / len(own) / plan.data_ranks for each in own])


def own_targets(swap: Swap) -> None:
    _with_shares(swap, lambda plan, targets, own: [targets / max(1, sum(own)) / plan.data_ranks] * len(own))


def divided_twice(swap: Swap) -> None:
    def make(start: Any) -> Any:
        def planted(self: ZeroRunner, *given: Any) -> Any:
            return [each / len(self.work) for each in start(self, *given)]

        return planted

    swap(ZeroRunner, "_start", make)


def replicas_unsummed(swap: Swap) -> None:
    _unshared(swap, lambda bucket: not any(bucket.spec.shared_by))


def one_tensor_rank_unsummed(swap: Swap) -> None:
    _unshared(swap, lambda bucket: not any(bucket.spec.shared_by) and int(os.environ["RANK"]) % 2 == 1)


def earlier_microbatches_lost(swap: Swap) -> None:
    def make(launch: Any) -> Any:
        def planted(self: GradientReducer) -> None:
            bucket = self._queue[0].bucket
            if bucket.partial is not None and _holds(bucket, r"layers\.1\."):
                bucket.partial.zero_()
            launch(self)

        return planted

    swap(GradientReducer, "_launch_next", make)


def padding_summed(swap: Swap) -> None:
    def make(zero_gaps: Any) -> Any:
        def planted(flat: torch.Tensor, bucket: Bucket) -> None:
            for gap in bucket.gaps:
                flat[gap].fill_(0.1)

        return planted

    swap(gradients_of_buckets, "_zero_gaps", make)


def lost_bucket(swap: Swap) -> None:
    def make(zero_gaps: Any) -> Any:
        def planted(flat: torch.Tensor, bucket: Bucket) -> None:
            zero_gaps(flat, bucket)
            if _holds(bucket, r"layers\.1\."):  # Of each interval of the sum, only its owner's summand is left.
                flat[: bucket.interval.start].zero_()
                flat[bucket.interval.end :].zero_()

        return planted

    swap(gradients_of_buckets, "_zero_gaps", make)


def stale_gradient(swap: Swap) -> None:
    def make(take: Any) -> Any:
        def planted(self: GradientReducer, bucket: Bucket) -> None:
            if self._last and _holds(bucket, r"layers\.1\."):
                self.shards.allocate(bucket)
                gradient = gradient_of(bucket)
                gradient += vars(bucket).get("left", 0.0)
                vars(bucket)["left"] = gradient.clone()
            take(self, bucket)

        return planted

    swap(GradientReducer, "_hand_over", make)


def stale_gather(swap: Swap) -> None:
    def make(show: Any) -> Any:
        def planted(self: Bucket) -> None:
            if _holds(self, r"layers\.1\.") and not vars(self).get("kept"):
                vars(self)["kept"] = self._views = [view.clone() for view in self._views]
            show(self)

        return planted

    swap(Bucket, "show", make)


def stale_in_backward(swap: Swap) -> None:
    def make(need: Any) -> Any:
        def planted(self: Passes, unit: Unit) -> None:
            need(self, unit)
            for bucket in unit.buckets:
                if not _holds(bucket, r"layers\.1\."):
                    continue
                seen, update = vars(bucket).setdefault("seen", {}), self._updater.updates
                seen.setdefault(update, [view.clone() for view in bucket._views])
                for parameter, values in zip(bucket.parameters, seen.get(update - 1, ()), strict=False):
                    set_values(parameter, values)

        return planted

    swap(Passes, "_need_in_backward", make)


# Clipping and the optimizer


def own_norm(swap: Swap) -> None:
    def make_read(read: Any) -> Any:
        def planted(self: OptimizerStep, scalars: Any) -> Any:
            values, vars(self)["own"] = read(self, scalars)
            return values, vars(self)["own"]

        return planted

    def make_finish(finish: Any) -> Any:
        return lambda self, units, factor, squares, **rest: finish(self, units, factor, vars(self)["own"], **rest)

    swap(OptimizerStep, "read", make_read)
    swap(OptimizerStep, "finish", make_finish)


def decay_of_exempt(swap: Swap) -> None:
    swap(GroupRules, "group_of", lambda _: lambda self, fqn: 0)


def microbatches_counted(swap: Swap) -> None:
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


def rate_one_late(swap: Swap) -> None:
    swap(LRSchedule, "factor", lambda factor: lambda self, step: factor(self, max(0, step - 1)))


def skipped_on_one_rank(swap: Swap) -> None:
    def make(step: Any) -> Any:
        def planted(self: BucketOptimizer, start: int, tensors: Sequence[torch.Tensor], groups: Any) -> None:
            master, before = tensors[0], tensors[0].clone()
            step(self, start, tensors, groups)
            for slot in self._bucket.layout.slots:
                if os.environ["RANK"] == "1" and slot.spec.fqn.endswith("layers.1.mlp.up_proj.weight"):
                    first = self._bucket.interval.start + start
                    skipped = slice(max(0, slot.where.start - first), max(0, slot.where.end - first))
                    master[skipped] = before[skipped]

        return planted

    swap(BucketOptimizer, "step", make)


def average_one_early(swap: Swap) -> None:
    def make(_: Any) -> Any:
        return lambda self, average, weights: average.lerp_(weights, 1 - self._settings.decay)

    swap(WeightAverage, "blend", make)


# Losses, kernels, random numbers


def last_label_of_chunk(swap: Swap) -> None:
    def make(softmax: Any) -> Any:
        def planted(self: Any, logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
            softmax(self, logits, targets, losses)
            if self.seed != 1.0:  # That of the trial at the start, which would refuse such a kernel.
                losses[-1:] = 0
                logits[-1:] = 0

        return planted

    swap(chunked_cross_entropy.HeadPass, "softmax", make)


def other_dropout_again(swap: Swap) -> None:
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


def same_dropout(swap: Swap) -> None:
    def make(begin: Any) -> Any:
        def planted(self: Streams, seed: int, step: int | str, first_sample: int) -> None:
            begin(self, seed, step, first_sample // (2 * int(os.environ["WORLD_SIZE"])))

        return planted

    swap(Streams, "__init__", make)


def same_dropout_of_heads(swap: Swap) -> None:
    swap(ShardedRandomness, "enter", lambda _: lambda self: None)


def experts_halved(swap: Swap) -> None:
    def make(take: Any) -> Any:
        def planted(self: GradientReducer, bucket: Bucket, index: int) -> None:
            parameter = bucket.parameters[index]
            if ".experts." in bucket.layout.slots[index].spec.fqn and parameter.grad is not None:
                parameter.grad = parameter.grad / 2
            take(self, bucket, index)

        return planted

    swap(GradientReducer, "take", make)


# Offload


def input_of_another_block(swap: Swap) -> None:
    def make(unpack: Any) -> Any:
        def planted(self: ActivationStore, saved: Any) -> torch.Tensor:
            call = saved.call
            before = call.before() if call is not None and call.before is not None else None
            return unpack(self, before.alive()[0] if before is not None and before.alive() else saved)

        return planted

    swap(ActivationStore, "unpack", make)


def masters_not_written(swap: Swap) -> None:
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


def moments_of_neighbour(swap: Swap) -> None:
    def make(uses: Any) -> Any:
        def planted(self: OptimizerStep, bucket: Bucket, **rest: Any) -> Any:
            if _holds(bucket, r"layers\.1\."):
                before = next(each for each in self._buckets if _holds(each, r"layers\.0\."))
                own, others = (self._optimizers[id(each)].moments for each in (bucket, before))
                own["exp_avg"] = others["exp_avg"]
            return uses(self, bucket, **rest)

        return planted

    swap(OptimizerStep, "_uses", make)


def sum_not_read_back(swap: Swap) -> None:
    def make(allocate: Any) -> Any:
        def planted(self: GradientShards, bucket: Bucket) -> None:
            rests = bucket.grad is None and bucket.grad_rest is not None and not self.first
            allocate(self, bucket)
            if rests and bucket.grad is not None and _holds(bucket, r"layers\.1\."):
                bucket.grad.zero_()

        return planted

    swap(GradientShards, "allocate", make)
