"""The names by which users of `transformers.Trainer` know what a trainer does, so that a changed import is all that they change."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from typing import Any, cast

from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import (
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainerState,
    TrainingArguments,
    trainer_pt_utils,
)

from zeromesh.errors import ConfigError, StorageError
from zeromesh.trainer.callbacks.transformers_callbacks import arguments_of, bring_up_to_date
from zeromesh.trainer.data.collate import Collate, count_targets
from zeromesh.trainer.hub.upload import open_repository, push, write_model_card
from zeromesh.trainer.loop.context import FitReport
from zeromesh.trainer.losses.losses import ComputeLoss
from zeromesh.trainer.monitoring.step_stats import require_free_names


class TransformersNames:
    """The part of `Trainer` that has the names of transformers."""

    training_arguments: TrainingArguments | None = None
    """The arguments that were passed to the trainer in place of a configuration."""
    hub_model_id: str | None = None
    """The full name of the repository on the Hub, once it is known to be there."""

    @property
    def args(self) -> TrainingArguments:
        """The `TrainingArguments` that were passed to the trainer, else such as say what its configuration says."""
        run = self._self._run
        return self.training_arguments or arguments_of(self._self.config if run is None else run.config)

    @property
    def train_dataset(self) -> Any:
        """The training data as it was passed to the trainer."""
        return self._self.inputs.train_dataset

    @property
    def eval_dataset(self) -> Any:
        """The evaluation data as it was passed to the trainer."""
        return self._self.inputs.eval_dataset

    @property
    def _self(self) -> Any:
        """This object as the `Trainer` that it is part of."""
        return self

    def train(
        self,
        resume_from_checkpoint: str | PathLike[str] | bool | None = None,
        *,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> FitReport:
        """Call `Trainer.fit`."""
        report: FitReport = self._self.fit(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)
        return report

    def add_callback(self, callback: Any) -> None:
        """Add a callback: an object, or a class of transformers. Raises `ConfigError` for what is none."""
        self._self.events.add(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return bool(self._self.mesh.rank == 0)

    # What is written

    def save_model(self, output_dir: str | PathLike[str] | None = None) -> None:
        """`Trainer.save`, by default into the run's directory. With `hub.push` the model is uploaded too."""
        self._self.save(output_dir if output_dir is not None else self._self.run_directory)
        if self._self.config.hub.push:
            self.try_to_push("Model save")

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository on the Hub if there is none; all ranks call it. `fit` does with `hub.push`, `push_to_hub` always.

        Raises:
            ConfigError: where it cannot be reached.
        """
        with self._self.mesh.call("trainer.init_hf_repo()"):
            self.hub_model_id = open_repository(self._self, token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Upload what `save` writes, and a draft of a model card; all ranks call it, and wait until it is there.

        Args:
            commit_message: that of the commit.
            blocking: False: what is returned is a future, which is done.
            token: in place of that of `TrainingArguments`, of `HF_TOKEN`, or of `hf auth login`. It is written nowhere.
            revision: the branch, in place of `hub.revision`.
            private: whether a repository that is made is, in place of `hub.private`.
            card: what else is known of the model, as in `create_model_card`.

        Returns the commit on rank 0, and None on the others.

        Raises:
            ConfigError: where the repository cannot be reached.
            StorageError: where the model cannot be saved or uploaded; what was saved is in `hub-upload` of the run's directory.
        """
        self._self.events.call("on_push_begin")
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        with self._self.mesh.call("trainer.push_to_hub()"):
            commit = push(self._self, commit_message, token=token, revision=revision, card=card)
        if blocking or commit is None:
            return commit
        done: Future[CommitInfo] = Future()
        done.set_result(commit)
        return done

    def try_to_push(self, message: str) -> None:
        """`push_to_hub`, where nothing else is to be lost if that fails: a warning says so."""
        try:
            self.push_to_hub(message)
        except (ConfigError, StorageError) as error:
            self._self.run.console.note(f"WARNING: {error}")

    def save_state(self) -> None:
        """Write `trainer_state.json` into the run's directory, as transformers has it; rank 0 does. It is for people: a run that
        goes on reads that of its checkpoints."""
        if self.is_world_process_zero():
            state = TrainerState()
            bring_up_to_date(state, self._self, self.training_arguments)
            state.save_to_json(str(self._directory() / "trainer_state.json"))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print values, one a line; rank 0 does."""
        trainer_pt_utils.log_metrics(self, split, dict(metrics))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write values to `SPLIT_results.json` in the run's directory, and to `all_results.json`; rank 0 does."""
        self._directory()
        trainer_pt_utils.save_metrics(self, split, dict(metrics), combined)

    def create_model_card(self, **values: Any) -> None:
        """Write `README.md` into the run's directory: a draft of a model card, as transformers makes it; rank 0 does.

        Args:
            values: what else is known, by transformers' names: `language`, `license`, `tags`, `model_name`, `finetuned_from`,
                `tasks`, `dataset_tags`, `dataset`, `dataset_args`.

        Raises:
            ConfigError: for a model that is none of transformers'.
        """
        if not isinstance(getattr(self._self.model, "config", None), PreTrainedConfig):
            raise ConfigError(
                "create_model_card describes models of transformers, and this one has no configuration of transformers"
            )
        if self.is_world_process_zero():
            write_model_card(self._self, self._directory(), values)

    def log(self, logs: Mapping[str, Any] | None = None, start_time: float | None = None, **named: Any) -> None:
        """Log scalars of one's own, as a mapping or as `log(name=value)`, at any time during `fit` and on any rank.

        The next line of `metrics.jsonl` and of the trackers has the mean of all values that any rank has logged by a name since the
        line before. A mapping also becomes a line of `state.log_history`, which callbacks see in `on_log`, as in transformers.

        Raises:
            ConfigError: for names that a step's line has already.
        """
        run, values = self._self.run, {**(logs or {}), **named}
        require_free_names(values, "trainer.log")
        run.model.stepper.scalars.add(values)
        if logs:
            run.log_values(logs)

    def _directory(self) -> Path:
        directory: Path = self._self.run_directory
        directory.mkdir(parents=True, exist_ok=True)
        return directory


def collator_of(collate: Collate | None, processing_class: Any, *, datasets: bool) -> Collate | None:
    """The data collator: the user's own, or as in transformers one that pads the samples of datasets by a tokenizer that can."""
    pads = isinstance(processing_class, PreTrainedTokenizerBase) and "pad_token" in processing_class.special_tokens_map
    if collate is None and datasets and pads:
        return cast("Collate", DataCollatorWithPadding(processing_class))
    return collate


def loss_of(
    trainer: TransformersNames, compute_loss: ComputeLoss | None, mean: Callable[..., Tensor] | None
) -> ComputeLoss | None:
    """The loss that a user has written: `compute_loss`, transformers' `compute_loss_func`, or `compute_loss` of a subclass, as
    transformers calls it. The latter two give the mean over a microbatch's targets."""
    if compute_loss is not None:
        return compute_loss
    own: Any = getattr(trainer, "compute_loss", None)
    if mean is None and own is None:
        return None

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        count, inputs = _targets(batch), dict(batch)
        if mean is None:
            return own(model, inputs, return_outputs=False, num_items_in_batch=count) * count, count
        labels = inputs.pop("labels", None)
        return mean(model(**inputs), labels, num_items_in_batch=count) * count, count

    return loss


def _targets(batch: Mapping[str, Any]) -> int:
    """Labels that are not -100; samples where there are none."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor):
        return count_targets(labels, causal=False)
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
