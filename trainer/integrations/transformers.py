"""transformers' own `Trainer`, and trainers that are based on it, over the engine, with `zeromesh.accelerate` as the backend.

from zeromesh.transformers import Trainer

trainer = Trainer(model, TrainingArguments(...), train_dataset=data, zeromesh={"zero": {"stage": 3}})"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial, wraps
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import trainer as library
from transformers.trainer_utils import has_length

from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.kernels.chunked_head import LogitChange, TokenScores, token_scores
from zeromesh.overrides import override, replaced
from zeromesh.tensor.layers import ColumnParallelLinear
from zeromesh.trainer.config.load import ConfigSource
from zeromesh.trainer.integrations.accelerate import Accelerator
from zeromesh.trainer.losses.trial import examine
from zeromesh.trainer.models.adapters import is_adapted, output_layer, pretrained_of
from zeromesh.trainer.models.save_pretrained import gathered_adapter
from zeromesh.trainer.shard import engine_of, is_sharded, load, save

_Trainer = TypeVar("_Trainer", bound=type)
_FOLDER = "zeromesh"
_TENSOR_PARALLEL = ("DPOTrainer", "SFTTrainer")
_TRAINER: Any = object


class _OptimizerPlaceholder:
    """A placeholder for the optimizer while transformers writes or reads optimizer states."""

    read = False

    def state_dict(self) -> dict[str, str]:
        return {"states": f"in the folder {_FOLDER}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state != self.state_dict():
            cure = "to train on from its weights alone, load them with from_pretrained"
            raise CheckpointError(f"the checkpoint's states of the optimizer were not written by zeromesh; {cure}")
        self.read = True


class TrainerOverEngine(_TRAINER):  # type: ignore[misc]  # The class of trainers is known by `on_zeromesh`.
    """The mixin of `on_zeromesh` for transformers' trainers. All ranks make the same calls, `save_model` too."""

    gather_function: Any
    optimizer: Any

    def __init__(self, *arguments: Any, zeromesh: ConfigSource = None, **named: Any) -> None:
        """Create a trainer with transformers' arguments and `zeromesh`, the configuration of `shard`: a YAML or JSON file or a dict
        with sections `zero`, `parallel`, `precision`, `offload`. Raises `ConfigError` for partitioning plugins and pipelines."""
        self._zeromesh = zeromesh
        super().__init__(*arguments, **named)
        if not any(each.__module__.startswith("trl.") for each in type(self).__mro__):
            return
        models = [each for each in (self.model, getattr(self, "ref_model", None)) if each is not None]
        fused = all(_score_by_our_kernel(each) for each in models)
        if self.accelerator.layout.context > 1:
            raise ConfigError(f"{type(self).__name__} scores whole sequences; set parallel.context: 1")
        if self.accelerator.layout.tensor > 1:
            if not (fused and any(each.__name__ in _TENSOR_PARALLEL for each in type(self).__mro__)):
                why = f"{type(self).__name__} is not shown to be exact over tensor ranks"
                raise ConfigError(f"{why}, as {' and '.join(_TENSOR_PARALLEL)} of TRL 1.16 are; set parallel.tensor: 1")
            self._tp_size = 1  # Tokens that tensor ranks have in common are gathered once.

    def create_accelerator_and_postprocess(self) -> None:
        if getattr(self.args, "sync_ref_model", False):  # TRL's; each rank would add to parameters that ranks share.
            raise ConfigError("sync_ref_model writes into a divided reference model; set it to False")
        self.args._n_gpu = min(self.args.n_gpu, 1)  # Each rank uses one.
        # How many backwards a step has is not known: an epoch's rest is added to the next step, and losses may run their own.
        accumulation = sys.maxsize if self.args.gradient_accumulation_steps > 1 else 1
        ours = partial(Accelerator, zeromesh=self._zeromesh, accumulation=accumulation)
        with replaced(library, {"Accelerator": ours}):
            super().create_accelerator_and_postprocess()
        if not isinstance(self.accelerator, Accelerator):
            raise ConfigError(f"{type(self).__name__} makes an accelerator of its own, which zeromesh cannot be under")

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Skip the move: the whole model may be too large for the device, and the engine moves its parts."""

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        # The model may have been evaluated before, or trained with other parameters frozen.
        if is_sharded(self.model) and self.optimizer is None:
            self.accelerator.make_whole(self.model)
        return super()._prepare_for_training(*arguments, **named)

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        """Return the epochs and batches that a resumed run has finished, from `arguments[3]`, its checkpoint. transformers takes
        a stream, whose epochs have no known length, for one epoch: it would skip batches beyond its end. `state.epoch` is right."""
        epochs, batches = super()._init_training_state(*arguments)
        if not batches or has_length(self.train_dataset):
            return epochs, batches
        before = transformers.TrainerState.load_from_json(str(Path(arguments[3]) / library.TRAINER_STATE_NAME))
        epochs, rest = divmod(before.epoch or 0.0, 1)
        return int(epochs), round(rest * before.max_steps * self.args.gradient_accumulation_steps)

    def _update_auto_batch_size(self, batch_size: int) -> None:
        if is_sharded(self.model):
            engine_of(self.model).forget_gradients()  # The step that ran out of memory is over.
        super()._update_auto_batch_size(batch_size)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # The answer would read gradients, which the engine holds.

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate as transformers does, `Seq2SeqTrainer` too, but gather values that are equal on tensor ranks once."""
        if self.gather_function == self.accelerator.gather and self.accelerator.num_processes > 1:
            self.gather_function = self.accelerator.gather_of_data
        return super().evaluation_loop(*arguments, **named)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and is_sharded(self.model):
            if is_adapted(self.model):
                engine = engine_of(self.model)
                state_dict = gathered_adapter(self.model, engine.state, engine.mesh)
            else:
                state_dict = self.accelerator.get_state_dict(self.model)
        with ExitStack() as undone:
            # A library's own `_save` may save the model without passing the weights on.
            if is_sharded(self.model) and hasattr(self.model, "save_pretrained"):
                if not self.args.should_save:
                    return
                given = partial(self.model.save_pretrained, state_dict=state_dict)
                undone.enter_context(override(self.model, "save_pretrained", given))
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._without_states(super()._save_optimizer_and_scheduler, output_dir)
        save(Path(output_dir) / _FOLDER, self.model, self.accelerator.optimizer_of(self.model), alone=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        stored = Path(checkpoint or "") / _FOLDER
        # Before the scheduler is read, whose own errors would not name what differs.
        found = checkpoint and stored.is_dir() and load(stored, self.model, self.accelerator.optimizer_of(self.model))
        if self._without_states(super()._load_optimizer_and_scheduler, checkpoint) and found in (None, False):
            raise CheckpointError(f"there is no checkpoint of zeromesh in {stored}")

    def _without_states(self, call: Callable[[str | None], None], directory: str | None) -> bool:
        """Let transformers write or read its other files of a step; returns True if it tried to read optimizer states."""
        with override(self, "optimizer", _OptimizerPlaceholder()):
            call(directory)
            return bool(self.optimizer.read)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_zeromesh_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_zeromesh_checkpoint(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_zeromesh_checkpoint(self, checkpoint: str | PathLike[str]) -> bool:
        """Load a zeromesh checkpoint's weights into a partitioned model; returns False for another checkpoint or model."""
        stored = Path(checkpoint) / _FOLDER
        return is_sharded(self.model) and stored.is_dir() and load(stored, self.model) is not None


def _score_by_our_kernel(model: nn.Module) -> bool:
    """Have a model whose head TRL has fused score tokens by `token_scores`, inside of the head's own module: its hooks gather its
    weight, which tensor ranks may divide. Returns False for a model that is not fused, or by a version that does it otherwise."""
    inside: Any = pretrained_of(model)
    utils: Any = sys.modules.get("trl.trainer.utils")
    fused = vars(inside or model).get("forward")
    if inside is None or fused is None or not hasattr(utils, "_ChunkedLogProbFunction"):
        return False
    verdict = examine(inside)

    def apply(rows: Tensor, *given: Any) -> tuple[Tensor | None, ...]:
        _, _, targets, temperature, _, cap, scale, outputs = given
        head: Any = output_layer(inside)
        if type(head) not in (nn.Linear, ColumnParallelLinear):
            cure = "leave it out of target_modules"
            raise ConfigError(f"the head is a {type(head).__name__}, and TRL multiplies by its weight alone; {cure}")
        change = LogitChange(scale=scale, cap=cap or 0.0)
        if verdict.change is not None and not change.close_to(verdict.change):
            why = f"TRL reads in the configuration of {type(inside).__name__} that it changes its logits by {change}"
            cure = "TRL's trainers cannot train it right, those of zeromesh and transformers can"
            raise ConfigError(f"{why}, and a trial finds {verdict.change}; {cure}")
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype

        def score(rows: Tensor) -> TokenScores:
            bias = None if head.bias is None else head.bias.to(dtype)
            how: Any = {"temperature": temperature, "change": change}
            if isinstance(head, ColumnParallelLinear):
                how |= {"sizes": head.sizes, "exchange": head.exchange}
            return token_scores(rows.to(dtype), head.weight.to(dtype), bias, targets, **how)

        with override(head, "forward", score):
            found = head(rows)._asdict()
        found["is_top1"] = found["is_top1"].bool()
        return tuple(each if name in ("log_probs", *outputs) else None for name, each in found.items())

    @wraps(fused)
    def forward(*arguments: Any, **named: Any) -> Any:
        ours = {"_ChunkedLogProbFunction": SimpleNamespace(apply=apply), "_use_triton": lambda _: True}
        with replaced(utils, ours):  # As on Triton's devices, TRL then leaves out tokens without a label.
            return fused(*arguments, **named)

    vars(inside)["forward"] = forward
    return True


@cache
def on_zeromesh(trainer: _Trainer) -> _Trainer:
    """Put the engine under a class of trainers: transformers' own, TRL's, or the user's. The result takes the same arguments and
    `zeromesh`, a configuration by file or dict. Raises `ConfigError` for a class that is not built on `transformers.Trainer`."""
    if not issubclass(trainer, transformers.Trainer):
        raise ConfigError(f"{trainer.__name__} is not built on transformers.Trainer")
    names = {"__module__": trainer.__module__, "__qualname__": trainer.__qualname__, "__doc__": trainer.__doc__}
    return cast("_Trainer", type(trainer.__name__, (TrainerOverEngine, trainer), names))


Trainer: Any = on_zeromesh(transformers.Trainer)
Seq2SeqTrainer: Any = on_zeromesh(transformers.Seq2SeqTrainer)
