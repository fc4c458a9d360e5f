"""Dispatch of a run's events to its callbacks, and their requests.

Callbacks of transformers get transformers' objects, in the order and with the arguments of its Trainer. The flags of the
`TrainerControl` are the run's next actions; no other change affects the run. The optimizer and the scheduler are stand-ins that
have the learning rate alone, as the real ones are partitioned, or do not exist."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import astuple
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.callback import Callback, Trainer
from zeromesh.trainer.checkpoints.manager import link_of
from zeromesh.trainer.checkpoints.trainer_state import goal_of
from zeromesh.trainer.config.foreign_names import training_arguments
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import ending_children

_EXPORTED = "TransformersCallbacks"  # The key of the states of transformers' callbacks in a checkpoint.


@contextmanager
def naming(callback: Any, event: str) -> Iterator[None]:
    """Add a note with the callback's class and method to errors of the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by callback {type(callback).__name__}.{event}")
        raise


class CallbackDispatcher:
    """Caller of a trainer's callbacks. Raises `ConfigError` at construction for an object that is no callback."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Any]) -> None:
        self._trainer = trainer
        self._callbacks: list[Callback | TrainerCallback] = []
        self.control = TrainerControl()
        """The requests of this rank after the present step. `should_training_stop` persists, and ends the run with a checkpoint."""
        self._state = TrainerState()
        self._arguments: TrainingArguments | None = None
        self._first: dict[int, Any] = {}  # the states of callbacks, by number, with which this process has begun
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add a callback: an object, or a class of transformers, which is instantiated without arguments."""
        is_class = isinstance(callback, type)
        given = callback() if is_class and issubclass(callback, TrainerCallback) else callback
        if not isinstance(given, Callback | TrainerCallback):
            shown = f"the class {callback.__name__}" if is_class else f"a {type(callback).__name__}"
            allowed = "subclasses of zeromesh.trainer.callbacks.callback.Callback or transformers.TrainerCallback"
            raise ConfigError(f"callbacks holds {shown}; give objects of {allowed}")
        self._callbacks.append(given)

    @property
    def of_transformers(self) -> list[TrainerCallback]:
        return [each for each in self._callbacks if not isinstance(each, Callback)]

    @property
    def reads_checkpoints(self) -> bool:
        """True if a callback of transformers overrides `on_save`, which may read the checkpoint, which then has to be complete."""
        return any(type(each).on_save is not TrainerCallback.on_save for each in self.of_transformers)

    def listeners(self, event: str) -> list[Callback | TrainerCallback]:
        """Return the callbacks that handle an event: those of ours that override it, and all of transformers."""
        base = getattr(Callback, event)
        return [each for each in self._callbacks if getattr(getattr(each, event), "__func__", None) is not base]

    def call(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of all listeners, and apply the flags that those of transformers change."""
        named: dict[str, Any] = {}
        known: frozenset[str] = frozenset()
        for callback in self.listeners(event):
            ours = isinstance(callback, Callback)
            if not (ours or named):
                named = self._event_arguments(event, *arguments)
                known = frozenset(named.get("logs", ()))
            with naming(callback, event), ending_children():
                method = getattr(callback, event)
                if ours:
                    method(self._trainer, *arguments)
                else:
                    self.control = method(self._arguments, self._state, self.control, **named) or self.control
        if logs := named.get("logs"):
            self._trainer.run.model.stepper.scalars.add({name: logs[name] for name in logs if name not in known})

    def _event_arguments(self, event: str, *arguments: Any) -> dict[str, Any]:
        trainer, named = self._trainer, {}
        if event == "on_init_end":
            inputs = trainer.inputs
            self._arguments = made = arguments_of(trainer.config)
            first = read_environment().rank == 0
            self._state.is_world_process_zero = self._state.is_local_process_zero = first
            if first:
                # transformers' Trainer has made the folder by now; `fit` reports errors.
                with suppress(OSError):
                    Path(made.output_dir).mkdir(parents=True, exist_ok=True)
            return {"model": inputs.model, "processing_class": inputs.processing_class, "optimizer": None, "lr_scheduler": None}
        if event == "on_train_begin":
            self._arguments = arguments_of(trainer.run.config)  # The steps of an epoch are known now.
        elif event == "on_save":
            self._state.stateful_callbacks = self._transformers_states()
        elif event in ("on_log", "on_evaluate"):
            latest = trainer.run.progress.log[-1].items()
            named["logs" if event == "on_log" else "metrics"] = {name: each for name, each in latest if name != "step"}
        elif event == "on_predict":
            named["metrics"] = dict(arguments[0])
        if event != "on_optimizer_step":  # The step counts only when it has ended.
            state, now = self._state, trainer.state
            state.global_step, state.max_steps, state.epoch = now.step, now.max_steps, now.epoch
            state.num_train_epochs = max(1, math.ceil(now.epochs))
            state.num_input_tokens_seen, state.total_flos = now.tokens, now.total_flos
            state.is_world_process_zero = state.is_local_process_zero = now.is_world_process_zero
            state.train_batch_size = trainer.run.config.batch.micro_size
            state.log_history = now.log_history
            state.compute_steps(self._arguments, now.max_steps)
            state.best_metric, state.best_global_step = now.best_metric, now.best_step or None
            state.best_model_checkpoint = (best := now.best_checkpoint) and str(link_of(Path(best)))
        steps = self._state.global_step
        rate = trainer.run.learning_rate_of(steps)
        optimizer = SimpleNamespace(param_groups=(MappingProxyType({"lr": rate}),))
        scheduler = SimpleNamespace(get_last_lr=lambda: [rate], last_epoch=steps)
        given = {"model": trainer.model, "processing_class": trainer.processing_class}
        return {**given, "optimizer": optimizer, "lr_scheduler": scheduler, **named}

    def request(self, *, log: bool = False, evaluate: bool = False, save: bool = False, stop: bool = False) -> None:
        """Request actions after the present step, in addition to earlier requests."""
        self.control.should_log |= log
        self.control.should_evaluate |= evaluate
        self.control.should_save |= save
        self.control.should_training_stop |= stop

    def forget_requests(self, *, stop_epoch: bool = False) -> None:
        """Clear the requests for the next step, except one to stop the run."""
        self.control = TrainerControl(self.control.should_training_stop, should_epoch_stop=stop_epoch)

    def agree(self, mesh: Mesh) -> None:
        """Combine the callbacks' requests of all ranks; a run without callbacks skips it."""
        if self._callbacks and mesh.world_size > 1:
            own = torch.tensor([int(bool(flag)) for flag in astuple(self.control)])
            self.control = TrainerControl(*map(bool, mesh.world.all_reduce_max(own, "requests of callbacks").tolist()))

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def _transformers_states(self) -> dict[str, Any]:
        exporting = [each for each in reversed(self.of_transformers) if isinstance(each, ExportableState)]
        return {type(each).__name__: each.state() for each in exporting}

    def states(self) -> dict[str, Any]:
        """Return copies of the callbacks' states for a checkpoint by class name; of several callbacks of one class, the first."""
        found: dict[str, Any] = {}
        for callback in self._callbacks:
            with naming(callback, "state_dict"):
                if isinstance(callback, Callback) and getattr(callback.state_dict, "__func__", None) is not Callback.state_dict:
                    found[type(callback).__name__] = found.get(type(callback).__name__) or callback.state_dict()
        exported = self._transformers_states()
        # A record may be made of them in another thread, while callbacks hear of the next step.
        return deepcopy({**found, _EXPORTED: exported} if exported else found)

    def note_first(self) -> None:
        """Note the states with which callbacks begin in this process, for `restore`."""
        for number, each in enumerate(() if self._first else self._callbacks):
            if isinstance(each, Callback | ExportableState):
                self._first[number] = deepcopy(each.state_dict() if isinstance(each, Callback) else each.state())

    def restore(self, states: Mapping[str, Any], *, lost: int | None = None) -> None:
        """Give callbacks their `states`. If the process may have trained until now, and so many steps are `lost`, those of which
        nothing is known get the one with which they began. What they have requested in steps that are lost is forgotten."""
        exported, first = states.get(_EXPORTED, {}), {} if lost is None else deepcopy(self._first)
        if lost:
            self.control = TrainerControl()
        for number, callback in enumerate(self._callbacks):
            name = type(callback).__name__
            if isinstance(callback, Callback):
                if (state := states.get(name, first.get(number, {}))) or (lost is not None and callback.state_dict()):
                    callback.load_state_dict(state)
            elif isinstance(callback, ExportableState) and (name in exported or number in first):
                self._callbacks[number] = type(callback).from_state(exported.get(name, first.get(number)))


def arguments_of(config: TrainerConfig) -> TrainingArguments:
    """Return the `TrainingArguments` that correspond to a configuration."""
    own = ("batch", "optimizer", "run", "checkpoint")
    keys = {f"{name}.{key}": value for name in own for key, value in getattr(config, name).model_dump().items()}
    named = training_arguments(keys)
    del named["load_best_model_at_end"], named["eval_on_start"]
    ranks = max(1, read_environment().world_size // config.parallel.model_size)
    known = config.schedule.name in transformers.SchedulerType._value2member_map_
    run, batch, hub = config.run, config.batch, config.hub
    named |= {"output_dir": f"{run.output_dir}/{run.name}", "run_name": run.name, "metric_for_best_model": run.metric}
    named |= {"max_steps": run.max_steps, "num_train_epochs": run.epochs or 1, "seed": run.seed % 2**32}
    named["gradient_accumulation_steps"] = max(1, math.ceil(batch.global_size / (batch.micro_size * ranks)))
    named["per_device_eval_batch_size"] = batch.eval_micro_size or batch.micro_size
    named["lr_scheduler_type"] = config.schedule.name if known else "cosine"
    named |= {"warmup_steps": config.schedule.warmup_of(run.max_steps), "label_smoothing_factor": run.label_smoothing}
    named["greater_is_better"] = goal_of(run.metric, run.metric_goal) == "highest"
    named |= {"push_to_hub": hub.push, "hub_model_id": hub.repository, "hub_private_repo": hub.private}
    named |= {"hub_revision": hub.revision, "hub_strategy": "end"}
    arguments = TrainingArguments(**named, report_to=[], use_cpu=True, disable_tqdm=False)
    # The strategies are not checked, as the run judges every evaluation and saves the best.
    arguments.load_best_model_at_end = run.load_best
    return arguments
