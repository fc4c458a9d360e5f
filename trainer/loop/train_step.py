"""One optimizer step: fetch all its microbatches, count their targets once over all ranks, then run them.

Backward of a microbatch starts with 1 / the global count, or with 1 where that is known later, and the update divides by it."""

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zeromesh.context.shares import Context
from zeromesh.errors import ConfigError, PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator, read_scalars
from zeromesh.optim.fused_optimizer import Hyperparameters
from zeromesh.optim.optimizer_step import StepOutcome
from zeromesh.overrides import override
from zeromesh.pipeline.pipeline import MicrobatchWork, Pipeline, StepDriver
from zeromesh.rng import Streams
from zeromesh.telemetry.status_board import MEETING, Activity
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.trainer.attention.packed_attention import PackedAttention
from zeromesh.trainer.data.feed import require_same_batches, require_same_blocks
from zeromesh.trainer.data.loader import BatchLoader, Feed
from zeromesh.trainer.data.sampler import BatchPlan, Microbatch
from zeromesh.trainer.loop.judging import Computed, Judge
from zeromesh.trainer.loop.prediction import Collector
from zeromesh.trainer.losses.losses import Loss, checked_count
from zeromesh.trainer.losses.trial import require_separate_documents
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.prepare import in_evaluation_mode
from zeromesh.trainer.monitoring.expert_load import ExpertLoads
from zeromesh.trainer.monitoring.step_stats import StepResult, UserScalars
from zeromesh.zero.engine import ZeroEngine

REGROUP = signal.SIGUSR2
"""Stands for a launcher's request to go on in another mesh after the present step; no such signal is sent."""
_STOPS = (signal.SIGTERM, signal.SIGINT, REGROUP)
_Batches = Sequence[Mapping[str, Any]]
_Computed = tuple[Tensor, int | Tensor, dict[str, Any]]
"""A microbatch's loss, its targets, and scalars to be logged; tensors stay on the device until the end of the step."""


class _Dealt(NamedTuple):
    """A data rank's microbatches of a step, batches, targets (None: forward counts) and weights of losses; `total`: all targets."""

    microbatches: Sequence[Microbatch]
    batches: _Batches
    counts: Sequence[int | None]
    total: int | None
    shares: Sequence[float]

    def only(self, numbers: slice) -> "_Dealt":
        return _Dealt(self[0][numbers], self[1][numbers], self[2][numbers], self.total, self.shares[numbers])


class DeviceBatch(dict[str, Any]):
    """A batch whose tensors are on the device inside `present`. Its masks are made of what the host knows of it before its copy:
    transformers' models would ask the device if attention needs a mask, which synchronizes it in every forward."""

    def __init__(
        self,
        batch: Mapping[str, Any],
        device: torch.device,
        compute: torch.dtype,
        targets: int | None,
        copies: torch.Stream | None,
        attention: PackedAttention | None = None,
    ) -> None:
        """Floating-point inputs become `compute`, except labels. `targets`: their number; None: forward counts them. `copies`: the
        stream of copies from pinned memory; None: the device is the CPU. `attention` is in force inside `present`."""
        super().__init__(batch)
        self.targets = targets
        self.following: DeviceBatch | None = None
        self._device, self._compute, self._copies = device, compute, copies
        self._copied: torch.Event | None = None
        self._attention = attention or PackedAttention({})

    def send(self) -> None:
        """Start the copies of the tensors to the device, once."""
        if self._copies is None or self._copied is not None:
            return
        with accelerator.launching_on(self._copies):
            for name, value in self.items():
                if isinstance(value, Tensor) and not accelerator.on_accelerator(value):
                    self[name] = (value if value.is_pinned() else value.pin_memory()).to(self._device, non_blocking=True)
        self._copied = accelerator.record_event(self._copies)

    @contextmanager
    def present(self, loads: ExpertLoads | None = None) -> Iterator[None]:
        """Inside the block tensors are on the device, masks are the batch's, `loads` counts, and `following` is being copied."""
        self.send()
        if self.following is not None:
            self.following.send()
        if self._copied is not None:
            stream = accelerator.current_stream(self._device)
            stream.wait_event(self._copied)
        for name, value in self.items():
            if not isinstance(value, Tensor):
                continue
            if self._copied is not None:
                value.record_stream(stream)
            dtype = self._compute if value.is_floating_point() and name != "labels" else value.dtype
            self[name] = value.to(self._device, dtype, non_blocking=True)
        counting = nullcontext() if loads is None else override(loads, "real", self._attention.real_tokens())
        with self._attention.in_force(), counting:
            yield

    def work(self, seed: float, streams: Streams, loads: ExpertLoads | None = None) -> MicrobatchWork:
        return MicrobatchWork(batch=self, seed=seed, streams=streams, forward_context=partial(self.present, loads))


@dataclass
class Stepper:
    """Runs training steps of an engine, and evaluations of the model with or without one (None: the model is whole on this rank).
    With `pipeline`, this rank has some stages of the model."""

    model: nn.Module
    loss: Loss
    mesh: Mesh
    compute: torch.dtype
    engine: ZeroEngine | None
    pipeline: InitVar[Pipeline | None] = None
    context: Context | None = None  # What this rank has of sequences that ranks share.
    judge: Judge | None = None
    loads: ExpertLoads | None = None  # The tokens that choose each expert.
    scalars: UserScalars = field(default_factory=UserScalars)  # Values of losses and users to be logged.
    gradient_factor: float | None = None
    """The factor that turns accumulated gradients into those of the mean loss, inside `before_update`; else None."""
    _computed: list[_Computed] = field(default_factory=list)
    _own_inputs: float = 0.0  # Inputs of this replica since the last sync of local steps,
    _shown_inputs: float = 0.0  # and those that results have shown for all replicas.

    def __post_init__(self, pipeline: Pipeline | None) -> None:
        self._driver: StepDriver = pipeline or StepDriver(self.mesh)
        self._modules = list(self.model.modules())
        self._training_flags = [module.training for module in self._modules]
        # Copies to the device overlap with computing.
        self._copies = torch.Stream(self.mesh.device) if is_accelerator(self.mesh.device) else None
        inside = pretrained_of(self.model)
        self._takes_positions = (
            inside is None or self.loss.kind == "user" or "position_ids" in signature(type(inside).forward).parameters
        )

    def train_step(
        self,
        loader: BatchLoader,
        data_step: int,
        step: int,
        groups: Sequence[Hyperparameters],
        *,
        substep_end: Callable[[], None],
        before_update: Callable[[], None] | None,
        stop_signal: int = 0,
        syncs: bool = True,
    ) -> StepResult | Mapping[str, Any] | None:
        """Run step `step` (from 0) on the data of step `data_step`, with the update's hyperparameters; None for data without a
        target on any rank, which makes no update, and what was judged of data that are passed over. `substep_end` is called
        after each microbatch before the last one with samples, and `before_update`, which may be None on some ranks, between
        the last backward and the update. `stop_signal` asked this rank to stop after the step; 0: none. Without `syncs` it is a
        local step, which meets no other replica, and no signal ends it. Raises `DataError` for a batch that cannot be trained
        on, and `CollectiveError` when a peer is gone, late or in another collective."""
        engine, mesh = self.engine, self.mesh
        if engine is None:
            raise PhaseError("the model is whole again, and no longer trained")
        local, ranks = engine.options.outer is not None, engine.ranks
        began, waited = time.perf_counter(), mesh.watch.waited_seconds
        mesh.recorder.take_traffic()  # Traffic since the last step is not counted.
        mesh.recorder.begin_step(engine.waits)
        mesh.post(Activity.DATA, step=step)

        # Fetch the batches of all microbatches, and count their targets over all ranks.
        feed = loader.feed
        with mesh.recorder.span(StepPhase.DATA):
            batches = loader.step(data_step)
        mesh.post(Activity.AGREE)
        require_same_blocks(feed.plan, data_step, ranks)
        if mesh.model_size > 1:
            require_same_batches(batches, ranks)
        dealt = self._deal(feed, data_step, mesh.data_index, batches)
        count = dealt.total
        if count == 0 and not local:  # Replicas count steps alike.
            mesh.recorder.take_seconds()
            mesh.post(Activity.IDLE)
            return None

        def again(source: int, numbers: slice) -> Computed:
            mesh.post(Activity.DATA)
            other = self._deal(feed, data_step, source).only(numbers)
            engine.begin_step(step, groups)
            return self._compute(engine, other, lambda: None)

        if self.judge is not None:
            self.judge.begin(step, len(batches), again)
        engine.begin_step(step, groups, syncs=syncs)
        if self.loads is not None:
            self.loads.begin_step()
        own, losses = self._compute(engine, dealt, substep_end, self.scalars)
        loads = {} if self.loads is None else self.loads.of_step()
        loss_finite = math.isfinite(own[0])
        asked = [*(stop_signal == each for each in _STOPS), before_update is not None]
        everything = torch.cat([own, torch.tensor(asked, dtype=torch.float64)])
        ranks.world.all_reduce(everything, "sums of the step")
        sums, had = everything[: len(own)], bool(everything[-1])
        if syncs:
            mesh.watch.ring.add(MEETING | (step + 1))
        judged: Mapping[str, Any] = {}
        if self.judge is not None and sums[1]:
            sums, judged = self.judge.judge(sums, losses, count)
        *_, targets, _, squares, lacking = sums.tolist()

        if (not targets and not local) or judged.get("act") in ("pass_over", "stop"):
            engine.end_without_update()
            mesh.recorder.take_seconds()
            mesh.post(Activity.IDLE)
            return judged if targets else None
        everything[: len(own)] = sums
        shown = self._over_replicas(engine, everything, syncs=syncs) if local else everything
        loss_sum, counted, inputs, *_ = shown.tolist()
        loss, unit = loss_sum / counted if counted else math.nan, _count_inputs(batches[0])[0]
        note: dict[str, Any] = {"loss": loss, "tokens": int(inputs), "unit": unit}
        engine.optimizer_step.step_note = {**note, "seconds": time.perf_counter() - began}
        if targets:
            factor = 1.0 if count is not None else 1.0 / targets
            if before_update is not None:
                with override(self, "gradient_factor", factor / engine.optimizer_step.scaler.scale):
                    before_update()
            outcome = engine.finish_step(factor, squares=None if had else squares, loss_finite=loss_finite, lacking=bool(lacking))
            if self.loads is not None and not outcome.skipped:
                self.loads.update_biases(loads)
        else:
            engine.end_without_update()
            outcome = StepOutcome(grad_norm=0.0, skipped=False, loss_scale=1.0, cause="it had no target")
        timelines = self._driver.timelines()
        phases = mesh.recorder.take_seconds()
        mesh.watch.count_step(phases)
        mesh.post(Activity.IDLE)
        return StepResult(
            **note,
            stop_signal=next((int(each) for each, asked in zip(_STOPS, shown[len(own) : -1], strict=True) if asked), 0),
            outcome=outcome,
            communication=mesh.recorder.take_traffic(),
            phases=phases,
            bubble={} if timelines is None else {"predicted": timelines[0].bubble, "measured": timelines[1].bubble},
            seconds=time.perf_counter() - began,
            idle=mesh.watch.waited_seconds - waited,
            judged=judged,
            loads=loads,
        )

    def _over_replicas(self, engine: ZeroEngine, sums: Tensor, *, syncs: bool) -> Tensor:
        """Return the sums that the result of a step shows, of which `sums` has those of this replica. At a sync they are of all,
        with the inputs since the last sync that no result has shown. Before, others count as many inputs each, and nobody stops."""
        shown = sums.clone()
        self._own_inputs += float(sums[2])
        if syncs:
            shown[2] = self._own_inputs
            shown = shown if engine.ranks.world.index == 0 else torch.zeros_like(shown)
            self.mesh.world.all_reduce(shown, "sums of the replicas")
            shown[2] -= self._shown_inputs
            self._own_inputs = self._shown_inputs = 0.0
        else:
            shown[2] *= self.mesh.replicate.size
            shown[-1 - len(_STOPS) :] = 0
            self._shown_inputs += float(shown[2])
        return shown

    def _deal(self, feed: Feed, data_step: int, source: int, batches: _Batches | None = None) -> _Dealt:
        """Return what a data rank has in a step; all ranks call it. Without `batches` they are made here."""
        microbatches = feed.plan.microbatches(data_step, source)
        batches = list(map(feed.fetch, microbatches)) if batches is None else batches
        counts = [self.loss.count(batch) for batch in batches]
        return _Dealt(microbatches, batches, counts, *self._count_targets(feed.plan, microbatches, counts))

    def _compute(
        self, engine: ZeroEngine, dealt: _Dealt, substep_end: Callable[[], None], scalars: UserScalars | None = None
    ) -> Computed:
        """Run forward and backward of each microbatch, seeded with its weight in the mean. Returns this rank's part of the step's
        sums, float64 `[5]`: losses, targets, inputs, squares of gradients, if it lacks any; and its losses. Logs to `scalars`."""
        self._restore_training_flags()
        self._computed = []
        moved = self._to_device(dealt.batches, dealt.counts)

        def end(number: int) -> None:
            moved[number].clear()
            if number + 1 < len(moved):
                substep_end()
                self._restore_training_flags()

        share, seed = self.mesh.context.index, 1.0 if dealt.total is None else 1.0 / max(1, dealt.total)
        seeded = engine.options.seed, engine.optimizer_step.step
        streams = [Streams(*seeded, each.first_sample, share) for each in dealt.microbatches]
        seeds = [seed * part * each.weight for part, each in zip(dealt.shares, dealt.microbatches, strict=True)]
        # A microbatch that only keeps ranks in step has the weight 0, and no token of its own.
        loads = [self.loads if each.weight else None for each in dealt.microbatches]
        work = [moved[at].work(seeds[at], streams[at], loads[at]) for at in range(len(moved))]
        self._driver.train(engine, work, self._loss_of, end)

        counted = [number for number, each in enumerate(dealt.microbatches) if each.weight and self._counts_loss]
        computed = [self._computed[number] for number in counted]
        values, squares = engine.read_step(_tensors_in(computed))
        sums = torch.tensor([0, 0, 0, squares, engine.lacks_gradients], dtype=torch.float64)
        losses: dict[int, float] = {}
        for number, (loss, targets, logged) in zip(counted, _with_values(computed, values), strict=True):
            own = [loss * dealt.shares[number], 0, 0]
            if share == 0:  # Losses are of shares of sequences, and what is counted is of all.
                own[1:] = checked_count(targets), _count_inputs(dealt.batches[number])[1]
            sums[:3] += torch.tensor(own, dtype=torch.float64)
            losses[number] = float(loss)
            if scalars is not None:
                scalars.add(logged)
        return sums, losses

    def evaluate(
        self, loader: BatchLoader, should_continue: Callable[[int, int], bool], collector: Collector | None = None
    ) -> tuple[float, int] | None:
        """Return the mean loss over a feed's dataset, as if it were one batch (NaN without targets), and the number of targets;
        None once `should_continue(done, total)`, called after each of this rank's microbatches, returns False, alike on all ranks.
        `collector` gathers the model's outputs, or the tokens that it generates."""
        feed = loader.feed
        rounds = feed.plan.rounds_of(0)
        require_same_blocks(feed.plan, 0, self.mesh)
        at_once = self._driver.evaluation_microbatches
        computed: list[tuple[Tensor, int | Tensor]] = []
        share, whole = self.mesh.context.index, collector is not None or self.engine is None
        with in_evaluation_mode(self.model):
            for start in range(0, rounds, at_once):
                done = min(start + at_once, rounds)
                group = [feed.plan.microbatch(0, self.mesh.data_index, turn) for turn in range(start, done)]
                fetched = [loader.batch(0, turn) for turn in range(start, done)]
                if self.mesh.model_size > 1:
                    require_same_batches(fetched, self.mesh)
                # Collecting outputs synchronizes the host anyway, so counting in forward costs nothing.
                counts = [None if collector is not None else self.loss.count(batch) for batch in fetched]
                batches = self._to_device(fetched, counts, whole=whole)
                parts: list[Any] = []
                streams = [Streams(feed.order.seed, "evaluation", each.first_sample) for each in group]
                generation = collector.generation if collector is not None else None
                results: list[tuple[Tensor, int | Tensor, Any]] = [(torch.zeros(()), 0, None)] * len(batches)
                # With generation, forward is needed for the loss alone.
                if generation is None or self.loss.kind != "labels" or all("labels" in each for each in fetched):
                    results = self._forwards(batches, streams, outputs=collector is not None and generation is None)
                if generation is not None:
                    numbers = [list(map(feed.order.dataset_index, each.samples)) for each in group]
                    tokens = [generation.tokens(*each, self.compute) for each in zip(fetched, numbers, strict=True)]
                    results = [(loss, count, new) for (loss, count, _), new in zip(results, tokens, strict=True)]
                for each, batch, (loss, count, outputs) in zip(group, batches, results, strict=True):
                    counted = bool(each.weight) and self._counts_loss and not (whole and share)
                    if counted:
                        computed.append((loss, 0 if share else count))
                    parts.append(collector.part_of(outputs, batch) if collector is not None and counted else None)
                if collector is not None:
                    collector.add(parts)
                if not should_continue(done, rounds):
                    return None
        sums = torch.zeros(2, dtype=torch.float64)
        for values in _with_values(computed, read_scalars(_tensors_in(computed))):
            sums += torch.tensor(values, dtype=torch.float64)
        self.mesh.world.all_reduce(sums, "sum of the evaluation loss")
        targets = int(sums[1])
        return float(sums[0]) / targets if targets else float("nan"), targets

    def _restore_training_flags(self) -> None:
        """Undo a `model.eval()` that the user did not revert; a module that alone is in that mode (statistics) stays in it."""
        if self._modules[0].training:
            self._training_flags = [module.training for module in self._modules]
            return
        for module, mode in zip(self._modules, self._training_flags, strict=True):
            module.training = mode

    @property
    def _counts_loss(self) -> bool:
        """True if this rank counts the loss: one tensor rank of the stage with the loss."""
        last = self.mesh.pipeline.index == 0 if self.engine is None else self._driver.is_last
        return self.mesh.tensor.index == 0 and last

    def _forwards(
        self, batches: Sequence[DeviceBatch], streams: Sequence[Streams], *, outputs: bool
    ) -> list[tuple[Tensor, int | Tensor, Any]]:
        results: list[tuple[Tensor, int | Tensor, Any]] = []

        def loss_of(batch: Any, seed: float) -> Tensor:
            loss, found, count, _ = self.loss.run(self.model, batch, seed=None if outputs else seed, targets=batch.targets)
            results.append((loss, count, found if outputs else None))
            return loss

        if self.engine is not None:
            work = [batch.work(0.0, drawn) for batch, drawn in zip(batches, streams, strict=True)]
            losses = self._driver.evaluate(self.engine, work, loss_of)
            return results or [(loss, 0, None) for loss in losses]
        for batch, drawn in zip(batches, streams, strict=True):
            with torch.no_grad(), drawn.drawing(), batch.present():
                loss_of(batch, 0.0)
        return results

    def _loss_of(self, batch: Any, seed: float) -> Tensor:
        """Return the summed loss of a microbatch, on the device; its backward starts with `seed`."""
        loss, _, count, scalars = self.loss.run(self.model, batch, seed=seed, targets=batch.targets)
        numbers = {name: each for name, each in scalars.items() if not isinstance(each, Tensor) or each.numel() == 1}
        self._computed.append((loss.detach(), count, pytree.tree_map_only(Tensor, Tensor.detach, numbers)))
        if not loss.requires_grad and count:
            how = "it was computed under no_grad, detached, or made into a number and back"
            raise ConfigError(f"the loss does not depend on any trained parameter: {how}")
        return loss

    def _count_targets(
        self, plan: BatchPlan, microbatches: tuple[Microbatch, ...], counts: Sequence[int | None]
    ) -> tuple[int | None, list[float]]:
        """Return the targets of the global batch, and the weight of each microbatch's summed loss: 1 for a mean over targets.
        `counts` are those of this rank's microbatches, or None where only forward counts."""
        if any(count is None for count in counts):
            return None, [1.0] * len(counts)
        known = [count or 0 for count in counts]
        own = [sum(count * each.weight for count, each in zip(known, microbatches, strict=True))]
        own += [sum(len(each.samples) * each.weight for each in microbatches)]
        data = self.mesh.data if self.engine is None else self.engine.ranks.data
        targets, samples = data.all_reduce(torch.tensor(own), "count of targets").tolist()
        if plan.average == "tokens":
            return int(targets), [1.0] * len(counts)
        # A microbatch mean is weighted by its samples: sum of losses / count * samples / all samples, in units of 1 / targets.
        shares = [len(each.samples) / samples * targets / max(1, count) for count, each in zip(known, microbatches, strict=True)]
        return int(targets), shares

    def _to_device(self, batches: _Batches, counts: Sequence[int | None], *, whole: bool = False) -> list[DeviceBatch]:
        """Return batches that go to the device, of this rank's shares of their sequences or `whole` ones."""
        coming: list[DeviceBatch] = []
        on_device = self._copies is not None
        for batch, targets in zip(batches, counts, strict=True):
            attention = PackedAttention(batch, self.model, on_device=on_device, shares=None if whole else self.context)
            if attention.documents is not None and attention.documents.packed:
                require_separate_documents(self.model)
            batch = attention.told()
            # They told the documents. Those of a share are needed, and the trial of shares has shown that the model reads them.
            if not self._takes_positions and (whole or self.context is None):
                batch = {name: each for name, each in batch.items() if name != "position_ids"}
            coming.append(DeviceBatch(batch, self.mesh.device, self.compute, targets, self._copies, attention))
        for each, following in pairwise(coming):
            each.following = following
        return coming


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _with_values(tree: Any, values: Iterable[float]) -> Any:
    found = iter(values)
    return pytree.tree_map_only(Tensor, lambda _: next(found), tree)


def _count_inputs(batch: Mapping[str, Any]) -> tuple[str, int]:
    """Return the unit of throughput, `tokens` for a batch with `input_ids` and otherwise samples, and their number in the batch."""
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        return "tokens", ids.numel()
    return "samples", next((value.shape[0] for value in batch.values() if isinstance(value, Tensor)), 0)
