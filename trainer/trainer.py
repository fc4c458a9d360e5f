"""`Trainer`: what a person touches.

report = Trainer(model, "configs/zero3.yaml", train_dataset=dataset).fit()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.mesh.groups import Mesh
from zeromesh.trainer import setup
from zeromesh.trainer.callbacks import Callback
from zeromesh.trainer.collate import Collate, MapDataset
from zeromesh.trainer.config import TrainerConfig
from zeromesh.trainer.config_file import load_config
from zeromesh.trainer.config_sources import ConfigSource
from zeromesh.trainer.directory import RunDirectory
from zeromesh.trainer.feeds import Given
from zeromesh.trainer.hf.losses import ComputeLoss
from zeromesh.trainer.hf.quiet import said_once
from zeromesh.trainer.report import FitReport
from zeromesh.trainer.run import Run
from zeromesh.trainer.step import EvaluationResult
from zeromesh.zero.engine import ZeroEngine

_STOOD_IN_FOR = frozenset({"data.train", "data.eval", "data.sequence_length"})
"""Keys that datasets given to the trainer make idle."""


class Trainer:
    """Trains a model over the ranks of the launch, partitioned as the configuration says.

    In a plain script or a notebook that is one rank; `torchrun --nproc-per-node N script.py` or `zeromesh train` start more,
    and every rank then runs the same calls.

    Args:
        model: an `nn.Module` (built, or on the meta device), a zero-argument callable that builds one, or None when
            `config.model` names it. A callable is called on the meta device, so no rank ever holds the whole model.
        config: a path of a YAML or JSON file, a dict such as `{"run": {"max_steps": 50}}`, a `TrainerConfig`, or None for
            the defaults. `docs/configuration.md` lists all keys, and `zeromesh config FILE` prints those of a file.
            transformers' `TrainingArguments` and DeepSpeed configurations are taken too (`docs/from-hf-trainer.md`,
            `docs/from-deepspeed.md`); notes at the start say what became of each setting.
        train_dataset, eval_dataset: map-style datasets of mappings of arguments of the model, such as `input_ids` and
            `labels`; None: text that `config.data` names. Fields that the model does not take are left out.
        data_collator: a list of samples to a batch, a mapping of tensors; None stacks them.
        compute_loss: `(model, batch) -> (sum, count)`, for a model whose own loss is not known or not wanted.
        callbacks: called at fixed points of the run.
        processing_class: a tokenizer, used for `config.data` and saved with the model.
        args: `TrainingArguments`, by the name that transformers has for them; `config` then changes single keys on top of them.

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
        args: Any = None,
    ) -> None:
        given = train_dataset is not None or eval_dataset is not None
        self.config: TrainerConfig = load_config(
            config,
            unused=_STOOD_IN_FOR if given else frozenset(),
            arguments=args,
            samples=_length_of(train_dataset),
        )
        self.callbacks = _checked(callbacks)
        self._given = Given(
            model=model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            collate=data_collator,
            compute_loss=compute_loss,
            processing_class=processing_class,
        )
        self._mesh: Mesh | None = None
        self._run: Run | None = None

    # What a person calls

    def fit(self) -> FitReport:
        """Train for `run.max_steps` steps, evaluating on the way and at the end; all ranks call it.

        Afterwards a model that fits in memory is whole again on every rank, with its master weights. On a single rank, a
        run that was interrupted (Ctrl-C, an exception of a callback) goes on where it was when `fit` is called again.

        Raises:
            DataError: before the first step, for data that cannot be trained on.
            StorageError: for a directory that cannot be written, or where memory is short.
            CollectiveError: when a rank is gone, late, or doing something else.
            NonFiniteError: when gradients are not finite and the configuration says to stop.
        """
        mesh = self._connect()
        with self._beginning(mesh):
            directory = RunDirectory(Path(self.config.run.output_dir).expanduser() / self.config.run.name, mesh.rank)
        return self._prepare().fit(directory)

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
        self._prepare().save(Path(path).expanduser())

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, seed: int | None = None, **arguments: Any
    ) -> Any:
        """Continue prompts with the model's own `generate`, in evaluation mode, before, during and after `fit`; all ranks call it.

        Ranks of one tensor and pipeline group give the same prompts and get the same tokens. Along data axes prompts may differ in
        number, content and length; a rank that is done waits for the others.

        Args:
            input_ids: [prompts, length], padded on the left to one length.
            attention_mask: of the same shape, 0 where there is padding.
            seed: of what sampling draws, as `torch.manual_seed`; None: of `run.seed`, the step and how often this was called. Ranks
                with equal prompts and seeds get equal samples.
            arguments: whatever the model's `generate` takes. Under pipelines these are greedy search and sampling, with all that
                changes their scores.

        Returns what the model's `generate` returns, on the mesh's device: tokens [prompts, length + new], unless asked for more.

        Raises:
            ConfigError: for a model that does not generate, or for arguments that the layout does not allow.
            DataError: for prompts padded on the right, and where ranks of one group give other prompts.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **arguments}
        return self._prepare().generate({name: value for name, value in given.items() if value is not None}, seed)

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` of whole parameters, one bucket in memory at a time; all ranks iterate over it to its end.

        Values are master weights. A tensor may change with the next step: copy it to keep it. `dict(trainer.state_dict())`
        holds the whole model on every rank.
        """
        return self._prepare().state_dict()

    def gathered(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Inside the block the named parameters are whole on every rank, in the compute dtype, to be read; all ranks enter it.

        Raises:
            StorageError: when they would not fit in memory.
        """
        return self._prepare().gathered(list(names))

    def gradient(self, name: str) -> Tensor | None:
        """The whole gradient of a parameter; None for a frozen one. All ranks call it, in `on_pre_optimizer_step`.

        It is the gradient of the mean loss of the global batch, before clipping, in the dtype of `precision.reduce`.

        Raises:
            PhaseError: at other times, and when it was used up inside backward (`optimizer.in_backward`).
        """
        return self._prepare().gradient(name)

    @property
    def model(self) -> nn.Module:
        """The model. During `fit` its parameters are partitioned; under no_grad its forward works on all ranks."""
        return self._prepare().model

    @property
    def mesh(self) -> Mesh:
        """The mesh that the run is on."""
        return self._connect()

    @property
    def engine(self) -> ZeroEngine | None:
        """The engine, while the model is partitioned."""
        return self._prepare().engine

    def close(self) -> None:
        """Leave the process groups and give shared memory back. The trainer is over."""
        if self._run is not None:
            self._run.close()
            self._run = None
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> Mesh:
        if self._mesh is None:
            self._mesh = setup.connect(self.config)
        return self._mesh

    def _prepare(self) -> Run:
        if self._run is None:
            mesh = self._connect()
            with self._beginning(mesh), said_once(mesh.rank):
                self._run = Run(self.config, mesh, self._given, self._call)
        self._run.require_sound()
        return self._run

    @contextmanager
    def _beginning(self, mesh: Mesh) -> Iterator[None]:
        """An error of this rank is told to the others, which wait for it; the mesh is of no use afterwards."""
        try:
            yield
        except BaseException as error:
            self._mesh = self._run = None
            mesh.refuse(error)
            raise

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)


def _length_of(dataset: Any) -> int | None:
    """Samples of a dataset; None where it does not say."""
    try:
        return len(dataset)
    except TypeError:
        return None


def _checked(callbacks: Sequence[Any]) -> list[Callback]:
    """Raise `ConfigError` for what is no callback, such as a class instead of an object of it."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            given = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise ConfigError(
                f"callbacks holds {given}; give objects of subclasses of zeromesh.trainer.callbacks.Callback"
            )
    return list(callbacks)
