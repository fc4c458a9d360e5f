"""`Trainer`: the main entry point.

report = Trainer(model, "configs/zero3.yaml", train_dataset=dataset).fit()"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers.trainer_utils import EvalPrediction, PredictionOutput

from zeromesh.checkpoint.store import FOLDER, CheckpointStore
from zeromesh.environment import read_environment
from zeromesh.errors import CollectiveError, ConfigError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.rng import seed_all, seed_of
from zeromesh.trainer.callbacks.callback import RunState
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.checkpoints.manager import load_weights, require_settings
from zeromesh.trainer.config.foreign_names import KEY_BY_NAME
from zeromesh.trainer.config.load import ARGUMENTS_ADVICE, ConfigSource, Consent, load_config, suggestion
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import Collate, MapDataset
from zeromesh.trainer.data.streaming import is_read_once
from zeromesh.trainer.generation.library_loop import generate
from zeromesh.trainer.generation.settings import check_arguments
from zeromesh.trainer.hub.upload import open_repository, push
from zeromesh.trainer.inference.prompt_samples import prompt_samples
from zeromesh.trainer.loop.context import FitReport, RunContext, UserInputs, Values
from zeromesh.trainer.loop.evaluation import evaluate, generation_of, run_dataset
from zeromesh.trainer.loop.prediction import PreprocessLogits
from zeromesh.trainer.loop.recovery import Recovery
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.loop.training_loop import TrainingLoop
from zeromesh.trainer.losses.losses import ComputeLoss
from zeromesh.trainer.model_on_mesh import ModelOnMesh
from zeromesh.trainer.models.adapters import is_adapted
from zeromesh.trainer.models.user_model import source_of
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.plan_check import PlanCheck
from zeromesh.trainer.monitoring.run_directory import RunDirectory
from zeromesh.trainer.monitoring.step_metrics import StartTimes
from zeromesh.trainer.monitoring.step_stats import require_free_names
from zeromesh.trainer.planning.auto import given_keys, plan_config, set_auto
from zeromesh.trainer.planning.planner import Plan
from zeromesh.trainer.setup.build import build_run, connect
from zeromesh.trainer.setup.engine_options import require_trained
from zeromesh.trainer.setup.named_objects import named_inputs
from zeromesh.trainer.torch_lr_scheduler import MakeScheduler
from zeromesh.trainer.weights.safetensors_source import quiet_library
from zeromesh.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from zeromesh.trainer.verification.certificate import Certificate

_DATA_KEYS = frozenset({"data.train", "data.eval", "data.sequence_length"})
"""The keys of the configuration that have no effect where the user passes datasets."""
_TRANSFORMERS_HOOKS = (
    *("compute_loss", "training_step", "prediction_step", "evaluation_loop"),
    *("create_optimizer", "create_scheduler", "get_train_dataloader", "get_eval_dataloader"),
)
"""Methods that subclasses of transformers' Trainer override, and that nothing here would call."""


class Trainer(ModelOnMesh):
    """Trains a model on the ranks of the launch, partitioned by the configuration.

    A script or notebook is one rank; `torchrun --nproc-per-node N script.py` or `zeromesh train` start more, with equal calls.

    Args:
        model: an `nn.Module` (built, or on the meta device), a zero-argument callable that builds one, or None when
            `config.model` names it. A callable is called on the meta device, so no rank ever holds the whole model.
            A pretrained model gets the defaults for fine-tuning, with a note at the start.
        config: a path of a YAML or JSON file, a dict such as `{"run": {"max_steps": 50}}`, a `TrainerConfig`, or None for
            the defaults. `docs/configuration.md` lists all keys, and `zeromesh config FILE` prints those of a file.
            A DeepSpeed configuration is converted (`docs/coming-from.md`), with notes about each setting at the start.
        train_dataset: mappings of arguments of the model, such as `input_ids` and `labels`, by index or as a stream; None: text
            that `config.data` names. Fields that are no arguments of the model are dropped.
        eval_dataset: samples to evaluate, by index, or a mapping of names to several such datasets.
        data_collator: makes a batch, a mapping of tensors, of a list of samples; None: they are padded or stacked.
        compute_loss: `(model, batch) -> (sum, count)`, to replace the model's own loss.
        compute_metrics: metrics of all samples of an evaluation, `EvalPrediction -> mapping of names to numbers`, on all ranks.
        preprocess_logits_for_metrics: `(logits, labels) -> tensors`, which are gathered instead of all logits.
        callbacks: callbacks, ours or transformers' `TrainerCallback`s.
        processing_class: a tokenizer, used for `config.data` and saved with the model.
        lr_scheduler: makes a `torch.optim.lr_scheduler`, such as `lambda o: StepLR(o, 30)`, which replaces `config.schedule`.
        args: refused, since `TrainingArguments` are for `zeromesh.transformers.Trainer`.

    Raises `ConfigError` with all problems of the configuration at once, before anything else happens; for `args`, and for a
    subclass with hooks of transformers' Trainer, such as `training_step`, which nothing would call.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        config: ConfigSource = None,
        train_dataset: MapDataset | None = None,
        eval_dataset: MapDataset | Mapping[str, MapDataset] | None = None,
        data_collator: Collate | None = None,
        compute_loss: ComputeLoss | None = None,
        compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        processing_class: Any = None,
        *,
        args: Any = None,
        preprocess_logits_for_metrics: PreprocessLogits | None = None,
        lr_scheduler: MakeScheduler | None = None,
        **unknown: Any,
    ) -> None:
        if args is not None:
            raise ConfigError(ARGUMENTS_ADVICE)
        if unknown:
            raise ConfigError([f"Trainer takes no argument {name}; {_unknown_argument_hint(name)}" for name in unknown])
        if hooks := [name for name in _TRANSFORMERS_HOOKS if hasattr(self, name)]:
            why = f"{type(self).__name__} overrides {', '.join(hooks)}, which transformers' Trainer calls and this one does not"
            raise ConfigError(f"{why}; subclass zeromesh.transformers.Trainer, or give compute_loss=(model, batch) -> (sum, count)")
        unused = frozenset[str]() if train_dataset is None and eval_dataset is None else _DATA_KEYS
        loaded = model if isinstance(model, nn.Module) and source_of(model) is not None else None
        tunes = None if loaded is None else "adapters" if is_adapted(loaded) else "whole"
        self.config: TrainerConfig = load_config(config, unused=unused, consent=Consent.GIVEN, tunes=tunes)
        if (method := self.config.train.method) != "sft":
            raise ConfigError(f"train.method: {method} is for `zeromesh train`, which hands the run to TRL")
        inputs = UserInputs(
            model=model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            collate=data_collator,
            compute_loss=compute_loss,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            lr_scheduler=lr_scheduler,
            processing_class=processing_class,
        )
        self.inputs, named_callbacks = named_inputs(self.config, inputs)
        self.events = CallbackDispatcher(self, [*(callbacks or ()), *named_callbacks])
        self.hub_model_id: str | None = None
        """The full name of the repository on the Hub, once its existence is known."""
        self.start_times = StartTimes()
        """The seconds of startup by phase, until the end of the first step."""
        self._recovery: Recovery | None = None
        self._planned: PlanCheck | None = None
        self._mesh: Mesh | None = None
        self._unplanned: TrainerConfig | None = None  # without what `parallel.auto` chose for the mesh
        self._run: RunContext | None = None
        if self.events.of_transformers and read_environment().world_size > 1:
            # Else transformers would join a process group of its own, which another process cannot join when a rank is lost.
            self._mesh = self.mesh
        self.events.call("on_init_end")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Trainer has no {name}; {_unknown_argument_hint(name)}", name=name, obj=self)

    def fit(self, resume: str | PathLike[str] | bool | None = None) -> FitReport:
        """Train for `run.max_steps` steps, evaluating on the way and at the end; all ranks call it.

        `resume` replaces `checkpoint.resume`: a path of a checkpoint or run, True for auto, False for never. With `hub.push` the
        model is uploaded at the end; a failed upload is a warning. Afterwards a model that fits in memory is whole again on every
        rank, with its master weights. On a single rank, a run that was interrupted (Ctrl-C, an exception of a callback) continues
        when `fit` is called again. Raises `DataError` before the first step, for data that cannot be trained on, `StorageError`
        for a directory that cannot be written, or where memory is short, `CollectiveError` when another rank has ended, is late,
        or makes another call, and `NonFiniteError` for such gradients, if it is to stop, or if most steps made no update."""
        if resume is not None:
            named = {True: "auto", False: "never"}[resume] if isinstance(resume, bool) else str(resume)
            self.config = self.config.changed(checkpoint={"resume": named})
            if self._run is not None:
                self._run.config = self._run.config.changed(checkpoint={"resume": named})
        config = self.config if self._unplanned is None else self._unplanned.changed(checkpoint=vars(self.config.checkpoint))
        first = self._mesh is None or self._mesh.watch.operations_begun == self._joined_at
        stays = first and not is_read_once(self.inputs.train_dataset)
        recovery = Recovery.begin(config, self.inputs.model, stays=stays)
        while True:
            try:
                report = self._fit(recovery)
                if recovery is not None:
                    recovery.end()
                return report
            except RuntimeError as error:
                cause = error if self._mesh is None else self._mesh.watch.cause_of(error)
                if recovery is None or not (isinstance(cause, CollectiveError) and recovery.leaves(cause, self._run, self._mesh)):
                    if cause is not error:
                        raise cause from error
                    raise
                self._run = self._mesh = None
            recovery.rest()
            self.config, self.start_times = config, StartTimes()

    def _fit(self, recovery: Recovery | None) -> FitReport:
        mesh = self.mesh
        if recovery is not None:
            recovery.join(mesh)
        self._recovery = recovery
        self.start_times.begin()
        with ExitStack() as stack:
            with self._reporting_errors(mesh):
                # Checks without data or a model come first.
                require_trained(self.config.model, given=self.inputs.model is not None)
                directory = RunDirectory(self.run_directory, mesh.rank)
                stack.enter_context(directory.locked())
                if self._run is None:
                    with mesh.call("trainer.fit()"):
                        require_settings(self.config, directory.path, mesh)
                if self.config.hub.push:
                    self._open_repository()
            self.start_times.end("directory")
            run = self.run
            report = TrainingLoop(run=run, directory=directory, samples=prompt_samples(run), recovery=recovery).fit()
        if self.config.hub.push:
            try:
                self.push_to_hub()
            except (ConfigError, StorageError) as error:
                run.console.note(f"WARNING: {error}")
        return report

    def plan(self, ranks: int | None = None, *, device: str | None = None) -> Plan:
        """Plan the layouts that fit on `ranks` ranks, by default those of this launch, the fastest first; nothing is allocated.
        `device` is the name of a machine or a machine file, as for `zeromesh plan`; None: this machine. The plan chooses the
        keys of the configuration that are `auto`, or the whole layout where none is. Raises `ConfigError` or `LayoutError` for
        a model, a machine or ranks that cannot be planned."""
        given, ranks = given_keys(self.config), ranks or read_environment().world_size
        return plan_config(self.config, given, inputs=self.inputs, ranks=ranks, device=device)[0]

    def evaluate(
        self,
        eval_dataset: MapDataset | Mapping[str, MapDataset] | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        predict_with_generate: bool | None = None,
        **generation: Any,
    ) -> Values:
        """Return `eval_loss`, the mean over all targets, those of `compute_metrics`, the duration and `epoch`. All ranks call it.

        Args:
            eval_dataset: replaces the trainer's; several by name have values called `eval_NAME_loss`.
            ignore_keys: outputs of the model not gathered for `compute_metrics`; None: its `config.keys_to_ignore_at_inference`.
            predict_with_generate: pass generated tokens to `compute_metrics`, as `predict` does; None: the run's key.
            generation: fields of transformers' `GenerationConfig`, on top of `run.generation` and the model's own.

        Raises `ConfigError` when there is no evaluation dataset, and for fields that do not exist or that the layout does not
        allow, and `DataError` when the dataset cannot be used, or a sample has no prompt to generate from.
        """
        run = self.run
        with run.model.guarded("trainer.evaluate()"):
            how = generation_of(run, predict_with_generate, generation, metrics=True)
            values = cast(Values, evaluate(run, eval_dataset, metric_key_prefix, ignore_keys, generation=how))
        run.log_evaluation(values)
        return {**values, "epoch": run.epoch}

    def predict(
        self,
        test_dataset: MapDataset,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        predict_with_generate: bool | None = None,
        **generation: Any,
    ) -> PredictionOutput:
        """Run the model on every sample of a dataset, and return its outputs in that order on all ranks; all ranks call it.

        `predictions` are arrays [samples, ...], padded with -100 to the longest, `label_ids` likewise, if there are labels,
        `metrics` the loss and the values of `compute_metrics`. With `predict_with_generate` (None: `run.predict_with_generate`)
        predictions are generated tokens [samples, longest], padded with the pad token. A decoder-only model continues the tokens
        before the first label that is not -100, and predictions are its new tokens. `generation` are fields of
        `GenerationConfig`, as for `evaluate`. Raises `ConfigError` for fields that do not exist or that the layout does not allow
        and `DataError` when the dataset cannot be used, or a sample has no prompt to generate from."""
        run = self.run
        with run.model.guarded("trainer.predict()"):
            how = generation_of(run, predict_with_generate, generation, metrics=False)
            found = run_dataset(run, test_dataset, metric_key_prefix, ignore_keys, generation=how, predicts=True)
        _, metrics, outputs = cast(tuple[int, Values, EvalPrediction], found)  # Nothing is to end it early.
        run.events.call("on_predict", metrics)
        return PredictionOutput(predictions=outputs.predictions, label_ids=outputs.label_ids, metrics=metrics)

    def verify(self, *, checks: Collection[str] = (), out: str | PathLike[str] | None = None) -> Certificate:
        """Train a small copy of the model for a few steps in this layout and in one plain PyTorch process, and compare every
        value, first in float64 and then in the configured precision. All ranks call it. The trainer and its model do not change.

        A model of transformers with over two million parameters is made smaller. `docs/howto/verify.md` lists the compared values.
        Further `checks` are `determinism`, `resume` and `dropout`. Rank 0 writes the certificate in JSON to the path `out`; None:
        `certificate.json` in the run's directory. Raises `ConfigError` for a model that is too large and cannot be made smaller."""
        from zeromesh.trainer.verification.verify import verify  # Most runs do not need this import.

        path = self.run_directory / "certificate.json" if out is None else Path(out).expanduser()
        return verify(Trainer, self.config, self.inputs, self.mesh, checks=checks, out=path)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        *,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> CommitInfo | None:
        """Upload the files of `save`, and a draft of a model card; all ranks call it, and wait for the upload.

        Args:
            commit_message: the message of the commit.
            token: replaces that of `HF_TOKEN`, or of `hf auth login`. No file or log contains the token.
            revision: the branch; replaces `hub.revision`.
            private: makes a new repository private; replaces `hub.private`.
            card: further fields of the model card, by transformers' names: `language`, `license`, `tags`, `model_name`,
                `finetuned_from`, `tasks`, `dataset_tags`, `dataset`, `dataset_args`.

        Returns the commit on rank 0, and None on the others. Raises `ConfigError` where the repository cannot be reached and
        `StorageError` where the model cannot be saved or uploaded; saved files stay in `hub-upload` of the run's directory.
        """
        self.events.call("on_push_begin")
        self._open_repository(token, private)
        with self.mesh.call("trainer.push_to_hub()"):
            return push(self, commit_message, token=token, revision=revision, card=card)

    def load_weights(self, checkpoint: str | PathLike[str]) -> None:
        """Load the weights of a checkpoint, to evaluate or save them before `fit`; all ranks call it. Raises `CheckpointError`
        when it is not there, or damaged, and `LayoutError` when it is of another model."""
        run = self.run
        with run.model.guarded("trainer.load_weights()"):
            run.progress.step, passed_over = load_weights(Path(checkpoint).expanduser(), run.model.require_engine())
            run.progress.reached = run.progress.step + passed_over

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, seed: int | None = None, **arguments: Any
    ) -> Any:
        """Continue prompts with the model's own `generate`, in evaluation mode, before, during and after `fit`; all ranks call it.

        Ranks of one tensor and pipeline group give the same prompts and get the same tokens. Along data axes prompts may differ in
        number, content and length; a rank that has finished waits for the others.

        Args:
            input_ids: [prompts, length], padded on the left to one length.
            attention_mask: of the same shape, 0 where there is padding.
            seed: the seed of sampling, as `torch.manual_seed`; None: derived from `run.seed`, the step and the number of calls.
                Ranks with equal prompts and seeds get equal samples.
            arguments: those of the model's `generate`. Pipelines support greedy search and sampling, with all logits processors.

        Returns the result of the model's `generate`, on the mesh's device: by default tokens [prompts, length + new]. Raises
        `ConfigError` for a model that does not generate, or for arguments that the layout does not allow, and `DataError` for
        prompts padded on the right, and where ranks of one group give other prompts.
        """
        named = {"input_ids": input_ids, "attention_mask": attention_mask, **arguments}
        named = {name: value for name, value in named.items() if value is not None}
        model = self.run.model
        check_arguments(model.module, named, model.mesh if model.engine is not None else None)
        model.generations += 1
        own = seed_of(f"{self.config.run.seed}/{self.run.progress.step}/{model.generations}/generate")
        set_seed = partial(seed_all, own) if seed is None else partial(torch.manual_seed, seed)
        with model.guarded("trainer.generate()" if model.engine is not None else ""):
            return generate(model, named, seed=set_seed)

    def gradient(self, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter; None for a frozen one. All ranks call it, in `on_pre_optimizer_step`. The
        gradient is that of the mean loss of the global batch, before clipping, in the dtype of `precision.reduce`. Raises
        `PhaseError` at other times, and when the update inside backward has consumed it (`optimizer.in_backward`)."""
        return self.run.model.gradient(name)

    @property
    def placed(self) -> TrainedModel:
        return self.run.model

    @property
    def model(self) -> nn.Module:
        """The model. During `fit` its parameters are partitioned; under no_grad its forward works on all ranks."""
        module: nn.Module = self.run.model.module
        return module

    @property
    def state(self) -> RunState:
        """The present state of the run."""
        run, section, progress = self.run, self.run.config.run, self.run.progress
        best = progress.best
        checkpoint = CheckpointStore(self.run_directory / FOLDER).path(best.step) if best.value is not None else None
        return RunState(
            step=progress.step,
            max_steps=section.max_steps,
            epoch=run.epoch,
            epochs=run.plan.epoch_after(section.max_steps) if section.epochs is None else section.epochs,
            tokens=progress.tokens,
            best_metric=best.value,
            best_step=best.step,
            best_checkpoint=str(checkpoint) if checkpoint is not None and checkpoint.exists() else None,
            is_world_process_zero=run.mesh.rank == 0,
            total_flos=run.total_flos,
            log_history=progress.log,
        )

    def log(self, values: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Log the user's scalars, as a mapping or as `log(name=value)`, at any time during `fit` and on any rank. The next line
        of `metrics.jsonl` and of the trackers has the mean of all values that any rank has logged by a name since the line
        before. A mapping is a line of `state.log_history` too, seen in `on_log`. Raises `ConfigError` for its own names."""
        all_values = {**(values or {}), **named}
        require_free_names(all_values, "trainer.log")
        self.run.model.stepper.scalars.add(all_values)
        if values:
            self.run.log_values(values)

    def request(self, *, log: bool = False, evaluate: bool = False, save: bool = False, stop: bool = False) -> None:
        """Request to log, evaluate, save or stop after the current step, from callbacks. A request of any rank applies to all."""
        self.events.request(log=log, evaluate=evaluate, save=save, stop=stop)

    @property
    def processing_class(self) -> Any:
        """The tokenizer that is saved with the model."""
        return self.run.model.processing_class

    @property
    def run_directory(self) -> Path:
        """The directory that the run writes to."""
        return self.config.run.directory

    @property
    def engine(self) -> ZeroEngine | None:
        """The engine, while the model is partitioned."""
        return self.run.model.engine

    def close(self) -> None:
        """Leave the process groups and release shared memory. The trainer cannot be used afterwards."""
        if self._run is not None:
            self._run.model.close()
            self._run = None
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the run, joined at the first access; all ranks access it together."""
        if self._mesh is None:
            self.start_times.begin()
            if self.config.parallel.auto:
                self._unplanned = self.config
                self.config, planned = set_auto(self.config, self.inputs, read_environment())
                self._planned = planned.check()
            self._mesh = connect(self.config)
            self._joined_at = self._mesh.watch.operations_begun
            self.start_times.end("rendezvous")
        return self._mesh

    def _open_repository(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository on the Hub if there is none. Raises `ConfigError` where it cannot be reached."""
        if self.hub_model_id is None:
            with self.mesh.call("trainer.push_to_hub()"):
                self.hub_model_id = open_repository(self, token, private)

    @property
    def run(self) -> RunContext:
        """The parts of the run, built at the first access; all ranks access them together."""
        if self._run is None:
            mesh = self.mesh
            self.start_times.begin()
            with (
                self._reporting_errors(mesh),
                quiet_library() if mesh.rank else nullcontext(),
                mesh.call("the first method of the trainer that needs a run"),
                Console(shown=mesh.rank == 0, verbose=self.config.run.verbose) as console,
            ):
                run = build_run(self.config, mesh, self.inputs, self.events, console, self.start_times, self._recovery)
                run.planned, self._run = self._planned, run
        self._run.model.require_sound()
        return self._run

    @contextmanager
    def _reporting_errors(self, mesh: Mesh) -> Iterator[None]:
        """Report an error of the block to the other ranks, which wait for this one; the mesh is unusable afterwards."""
        try:
            yield
        except BaseException as error:
            self._mesh = self._run = None
            mesh.publish_failed_start(error)
            raise


def _unknown_argument_hint(name: str) -> str:
    if name in KEY_BY_NAME:
        return f"it is {KEY_BY_NAME[name]} here"
    near = suggestion(name) or ""
    return f"config has the key {near}" if near.endswith(f".{name}") else "docs/api/trainer.md has what there is"
