"""`Trainer`: what a person touches.

report = Trainer(model, "configs/zero3.yaml", train_dataset=dataset).fit()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError, NonFiniteError, StorageError
from zeromesh.mesh.groups import Mesh
from zeromesh.offload import available_bytes, peak_bytes, return_freed_memory
from zeromesh.trainer import setup
from zeromesh.trainer.batching import BatchPlan
from zeromesh.trainer.callbacks import Callback
from zeromesh.trainer.collate import Collate, MapDataset, check_first_batch
from zeromesh.trainer.config import TrainerConfig
from zeromesh.trainer.config_file import ConfigSource, load_config
from zeromesh.trainer.console import RunConsole, human_bytes, human_count, make_console
from zeromesh.trainer.hf.checkpointing import enable_activation_checkpointing
from zeromesh.trainer.hf.losses import ComputeLoss, make_loss
from zeromesh.trainer.hf.save import save_pretrained
from zeromesh.trainer.metrics import MetricsWriter, StepMetrics
from zeromesh.trainer.schedules import Schedule
from zeromesh.trainer.step import EvaluationResult, Feed, Stepper, StepResult
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.plan import block_modules

_FREED_BLOCK_BYTES = 1 << 20
"""Freed blocks of this size and more go back to the system at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """What a run came to. Losses are means over targets; `losses` has one per step, nan where a step had none."""

    final_step: int
    final_loss: float
    losses: tuple[float, ...]
    eval_loss: float | None
    tokens: int
    tokens_per_second: float
    peak_memory_bytes: int
    """The largest of any rank."""
    skipped_steps: int


class Trainer:
    """Trains a model over the ranks of the launch, partitioned as the configuration says.

    Args:
        model: an `nn.Module` (built, or on the meta device), a zero-argument callable that builds one, or None when
            `config.model` names it. A callable is called on the meta device, so no rank ever holds the whole model.
        config: a path of a YAML or JSON file, a dict, a `TrainerConfig`, or None for the defaults.
        train_dataset, eval_dataset: map-style datasets of mappings of arguments of the model; None: `config.data`.
        data_collator: a list of samples to a batch; None stacks them.
        compute_loss: `(model, batch) -> (sum, count)`, for a model whose own loss is not known or not wanted.
        callbacks: called at fixed points of the run.
        processing_class: a tokenizer, used for `config.data` and saved with the model.

    Raises:
        ConfigError: with all problems of the configuration at once, before anything else happens.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        config: ConfigSource = None,
        train_dataset: MapDataset | None = None,
        eval_dataset: MapDataset | None = None,
        data_collator: Collate | None = None,
        compute_loss: ComputeLoss | None = None,
        callbacks: Sequence[Callback] = (),
        processing_class: Any = None,
    ) -> None:
        self.config: TrainerConfig = load_config(config)
        self.callbacks = list(callbacks)
        self.processing_class = processing_class
        self._given_model = model
        self._given_data = (train_dataset, eval_dataset)
        self._collate = data_collator
        self._compute_loss = compute_loss
        self._run: _Run | None = None

    # What a person calls

    def fit(self) -> FitReport:
        """Train for `run.max_steps` steps, evaluating on the way and at the end; all ranks call it.

        Afterwards a model that fits in memory is whole again on every rank, with its master weights.

        Raises:
            DataError: before the first step, for data that cannot be trained on.
            CollectiveError: when a rank is gone, late, or doing something else.
            NonFiniteError: when gradients are not finite and the configuration says to stop.
        """
        run = self._prepare()
        try:
            report = run.fit()
        except BaseException as error:
            run.mesh.fail(error)
            raise
        run.make_whole()
        return report

    train = fit

    def evaluate(self, eval_dataset: MapDataset | None = None) -> EvaluationResult:
        """Mean loss over the evaluation dataset; all ranks call it.

        Raises:
            DataError: when there is none, or it cannot be used.
        """
        return self._prepare().evaluate(eval_dataset)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the model as a Hugging Face model directory, one parameter at a time; all ranks call it.

        Raises:
            StorageError: when it cannot be written.
        """
        run = self._prepare()
        save_pretrained(run.model, self.state_dict(), Path(path), run.mesh, self.processing_class)

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` of whole parameters, one bucket in memory at a time; all ranks iterate over it to its end.

        Values are master weights. A tensor may change with the next step: copy it to keep it. `dict(trainer.state_dict())`
        holds the whole model on every rank.
        """
        run = self._prepare()
        if run.engine is None:
            return ((name, parameter.detach()) for name, parameter in run.model.named_parameters())
        return run.engine.state.parameters()

    def gathered(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Inside the block the named parameters are whole on every rank, in the compute dtype, to be read; all ranks enter it.

        Raises:
            StorageError: when they would not fit in memory.
        """
        return self._prepare().gathered(list(names))

    def gradient(self, name: str) -> Tensor | None:
        """The whole gradient of a parameter, in `on_pre_optimizer_step`; None for a frozen one. All ranks call it."""
        engine = self._prepare().engine
        if engine is None:
            raise ConfigError("gradients exist only during fit()")
        return engine.state.gradient(name)

    @property
    def model(self) -> nn.Module:
        """The model. During `fit` its parameters are partitioned; under no_grad its forward works on all ranks."""
        return self._prepare().model

    @property
    def mesh(self) -> Mesh:
        """The mesh that the run is on."""
        return self._prepare().mesh

    @property
    def engine(self) -> ZeroEngine | None:
        """The engine, while the model is partitioned."""
        return self._prepare().engine

    def close(self) -> None:
        """Leave the process groups and give shared memory back. The trainer is over."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _prepare(self) -> _Run:
        if self._run is None:
            mesh = setup.connect(self.config)
            try:
                self._run = _Run(self, mesh, self._given_model, self._given_data, self._collate, self._compute_loss)
            except BaseException as error:
                mesh.fail(error)
                raise
        return self._run


class _Run:
    """The objects of one run, made when they are first needed."""

    def __init__(
        self,
        trainer: Trainer,
        mesh: Mesh,
        model: nn.Module | Callable[[], nn.Module] | None,
        data: tuple[MapDataset | None, MapDataset | None],
        collate: Collate | None,
        compute_loss: ComputeLoss | None,
    ) -> None:
        config = trainer.config
        self.trainer, self.config, self.mesh, self._collate = trainer, config, mesh, collate
        self.console: RunConsole = make_console(mesh.rank)
        if mesh.device.type == "cpu":
            return_freed_memory(_FREED_BLOCK_BYTES)
        self.plan = BatchPlan(
            global_size=config.batch.global_size, micro_size=config.batch.micro_size, data_ranks=mesh.data.size
        )
        options = setup.engine_options(config, self.plan.accumulation)
        self.data = setup.prepare_data(config, *data, trainer.processing_class)
        built = setup.prepare_model(model, config, self.data.vocab_size)
        self.model = built.model.train()
        setup.place_buffers(built, mesh, config.run.seed)
        blocks = block_modules(self.model)
        enable_activation_checkpointing(self.model, config.model.activation_checkpointing, blocks=blocks or None)
        if config.model.compile:
            for block in blocks:
                block.forward = torch.compile(block.forward)
        self.vocab_size = setup.vocabulary_of(self.model)
        self.loss = make_loss(self.model, mode=config.model.loss, compute_loss=compute_loss)
        if options.optimizer_in_backward and compute_loss is not None:
            raise ConfigError(
                "optimizer.in_backward needs the number of targets before forward, and compute_loss tells it after; "
                "set optimizer.in_backward: false"
            )
        self._check_data()
        self.engine: ZeroEngine | None = ZeroEngine.build(self.model, mesh, options, built.source)
        built.source.close()
        self.stepper = Stepper(self.model, self.loss, mesh, options.precision.compute, self.engine)
        self.step = 0
        self._introduce(built.notes, options.precision.table(config.optimizer.name))

    # Before training

    def _check_data(self) -> None:
        if self.data.train is None:
            return
        feed = self._train_feed()
        check_first_batch(
            feed.dataset,
            feed.order,
            self.plan,
            collate=self._collate,
            vocab_size=self.vocab_size,
            causal=self.loss.causal,
        )

    def _train_feed(self) -> Feed:
        return setup.feed_of(
            setup.require_training_data(self.data),
            self.plan,
            self.config,
            self._collate,
            self.vocab_size,
            causal=self.loss.causal,
            shuffle=self.config.data.shuffle,
        )

    def _introduce(self, notes: Sequence[str], precision: str) -> None:
        """The lines that tell what is about to run."""
        engine = self.engine
        if engine is None:
            return
        count = sum(bucket.layout.numel for unit in engine.units for bucket in unit.buckets)
        lines = [
            f"{type(self.model).__name__}: {human_count(count)} parameters in {len(engine.units)} units, "
            f"stage {self.config.zero.stage} on {self.mesh.shape} over {engine.reduction_name}",
            precision,
            f"batch: {self.plan.equation()}",
            *notes,
            *self.loss.notes,
            *self.data.notes,
        ]
        for line in lines:
            self.console.note(line)

    # Training

    def fit(self) -> FitReport:
        """See `Trainer.fit`."""
        config, feed = self.config, self._train_feed()
        schedule = setup.learning_rate_schedule(config)
        directory = Path(config.run.output_dir) / config.run.name
        writer = self._open_directory(directory)
        progress = _Progress(config.run.max_nonfinite)
        self._call("on_train_begin")
        with self.console:
            self.console.start(total_steps=config.run.max_steps, first_step=self.step)
            while self.step < config.run.max_steps:
                self._train_one(feed, schedule, progress, writer)
            eval_loss = self._final_evaluation(progress)
        if writer is not None:
            writer.close()
        self._call("on_train_end")
        report = progress.report(self.step, eval_loss)
        self.console.note(
            f"done: {report.final_step} steps, loss {report.final_loss:.4f}, "
            f"{human_count(report.tokens_per_second)} tokens/s, peak memory {human_bytes(report.peak_memory_bytes)} a rank"
        )
        return report

    def _train_one(self, feed: Feed, schedule: Schedule, progress: _Progress, writer: MetricsWriter | None) -> None:
        number = self.step + 1
        self._call("on_step_begin", number)
        factor = schedule.factor(self.step)
        result = self.stepper.train_step(feed, self.step, factor, lambda: self._call("on_pre_optimizer_step", number))
        self.step = number
        every = self.config.run.log_every
        logged = bool(every) and (number % every == 0 or number == self.config.run.max_steps)
        peak = self._peak_memory() if logged else 0
        metrics = progress.add(result, number, self.config.optimizer.lr * factor, peak)
        if logged:
            if writer is not None:
                writer.write(metrics)
            self.console.step(metrics)
        else:
            self.console.advance(number)
        self._call("on_step_end", number, metrics.record())
        progress.check(number)
        every = self.config.run.eval_every
        if every and number % every == 0 and number < self.config.run.max_steps and self.data.eval is not None:
            self._evaluate_and_tell(progress)

    def _final_evaluation(self, progress: _Progress) -> float | None:
        return self._evaluate_and_tell(progress) if self.data.eval is not None else None

    def _evaluate_and_tell(self, progress: _Progress) -> float:
        result = self.evaluate(None)
        text = f"step {self.step}: evaluation loss {result.loss:.4f} over {human_count(result.targets)} targets"
        loaded = self.data.loaded
        if loaded is not None and loaded.byte_pair_entropy is not None:
            word = "below" if result.loss < loaded.byte_pair_entropy else "above"
            text += f", {word} the byte-pair entropy {loaded.byte_pair_entropy:.4f}"
        self.console.note(text)
        self._call("on_evaluate", self.step, result.loss)
        return result.loss

    def _open_directory(self, directory: Path) -> MetricsWriter | None:
        """Rank 0 writes the resolved configuration and the metrics."""
        if self.mesh.rank != 0:
            return None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.resolved.yaml").write_text(self.config.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{directory} cannot be written ({error.strerror}); change run.output_dir") from error
        return MetricsWriter(directory / "metrics.jsonl", keep_through=0)

    def _peak_memory(self) -> int:
        """Bytes of the rank that has needed most so far."""
        if self.mesh.device.type == "cuda":
            mine = torch.cuda.max_memory_allocated(self.mesh.device)
        else:
            mine = peak_bytes()
        return int(self.mesh.world.max_(torch.tensor([mine]), "peak memory")[0])

    def _call(self, event: str, *args: Any) -> None:
        for callback in self.trainer.callbacks:
            getattr(callback, event)(self.trainer, *args)

    # Beside and after training

    def evaluate(self, dataset: MapDataset | None) -> EvaluationResult:
        """See `Trainer.evaluate`."""
        chosen = dataset if dataset is not None else self.data.eval
        if chosen is None:
            raise ConfigError("there is no evaluation data; give eval_dataset, or set data.eval or data.eval_fraction")
        micro = min(self.config.batch.micro_size, len(chosen))
        plan = BatchPlan(global_size=len(chosen), micro_size=micro, data_ranks=self.mesh.data.size)
        feed = setup.feed_of(
            chosen, plan, self.config, self._collate, self.vocab_size, causal=self.loss.causal, shuffle=False
        )
        return self.stepper.evaluate(feed)

    def gathered(self, names: list[str]) -> AbstractContextManager[None]:
        """See `Trainer.gathered`."""
        if self.engine is None:
            return nullcontext()
        units = self.engine.state.units_of(names)
        self._require_memory(sum(unit.nbytes for unit in units), f"parameters {', '.join(names[:4])}")
        return self.engine.gathered(names)

    def _require_memory(self, nbytes: int, what: str) -> None:
        free = self._least_available()
        if nbytes > free:
            raise StorageError(
                f"{what} need {human_bytes(nbytes)} on every rank, and a rank has {human_bytes(free)} free"
            )

    def _least_available(self) -> int:
        """Free bytes of the rank that has least, when all ranks of a host take as much as it does."""
        if self.mesh.device.type == "cuda":
            mine = torch.cuda.mem_get_info(self.mesh.device)[0]
        else:
            mine = available_bytes() // max(1, self.mesh.environment.local_world_size)
        return -int(self.mesh.world.max_(torch.tensor([-mine]), "free memory")[0])

    def make_whole(self) -> None:
        """End the engine and leave the model whole, if every rank has memory for it; else it stays partitioned."""
        engine = self.engine
        if engine is None:
            return
        item = engine.options.precision.master.itemsize
        nbytes = sum(bucket.layout.padded * item for unit in engine.units for bucket in unit.buckets)
        if 2 * nbytes > self._least_available():
            self.console.note("the model does not fit in one rank's memory and stays partitioned; use save()")
            return
        engine.state.make_whole()
        engine.close()
        self.engine = None
        self.stepper = Stepper(self.model, self.loss, self.mesh, self.stepper.dtype, None)

    def close(self) -> None:
        """See `Trainer.close`."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.mesh.close()


class _Progress:
    """What the steps of a run add up to."""

    def __init__(self, most_nonfinite: int) -> None:
        self._most_nonfinite = most_nonfinite
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._tokens = 0
        self._peak = 0
        self._skipped = 0
        self._in_a_row = 0

    def add(self, result: StepResult, step: int, lr: float, peak: int) -> StepMetrics:
        """Count a step; returns its line."""
        self._losses.append(result.loss)
        self._seconds.append(result.seconds)
        self._tokens += result.tokens
        self._peak = max(self._peak, peak)
        self._skipped += result.skipped
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        extras: dict[str, Any] = {}
        if result.skipped:
            extras["skipped"] = True
        if result.loss_scale != 1.0:
            extras["loss_scale"] = result.loss_scale
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=self._tokens,
            tokens_per_second=result.tokens / result.seconds,
            step_seconds=result.seconds,
            peak_memory_bytes=self._peak,
            extras=extras,
        )

    def check(self, step: int) -> None:
        """Raise NonFiniteError after too many skipped steps in a row."""
        if self._most_nonfinite and self._in_a_row >= self._most_nonfinite:
            raise NonFiniteError(
                f"gradients were not finite in {self._in_a_row} steps in a row, up to step {step} (run.max_nonfinite); "
                "no update of these steps was made. Lower optimizer.lr, look at the data, or use precision.compute: bfloat16"
            )

    def report(self, final_step: int, eval_loss: float | None) -> FitReport:
        """The run's report; the speed leaves the first step out, which records and allocates."""
        steady = self._seconds[1:] or self._seconds
        per_step = self._tokens / max(1, len(self._seconds))
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return FitReport(
            final_step=final_step,
            final_loss=self._losses[-1] if self._losses else float("nan"),
            losses=tuple(self._losses),
            eval_loss=eval_loss,
            tokens=self._tokens,
            tokens_per_second=per_step * len(steady) / sum(steady) if finite else 0.0,
            peak_memory_bytes=self._peak,
            skipped_steps=self._skipped,
        )
