"""Events of a run: calls its callbacks, and keeps what they ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl

from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.callback import Callback, Trainer
from zeromesh.trainer.callbacks.transformers_callbacks import TransformersCallbacks, naming
from zeromesh.trainer.data.collate import ending_children


class CallbackDispatcher:
    """Calls the callbacks of one trainer. Those of transformers are adapted together, since they share their state and control.

    Raises:
        ConfigError: at construction, for what is no callback.
    """

    def __init__(self, trainer: Trainer, callbacks: Sequence[Any]) -> None:
        self._trainer = trainer
        self._callbacks: list[Callback | TransformersCallbacks] = []
        self.of_transformers: TransformersCallbacks | None = None
        """The callbacks of transformers; None where there are none."""
        self.control = TrainerControl()
        """What this rank asks for after the present step; all ranks do what any of them asks for. `should_training_stop` stays for
        later steps, and ends the run with a checkpoint, as if the step were its last one."""
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add a callback: an object, or a class of transformers, which is then made without arguments."""
        if isinstance(callback, Callback):
            self._callbacks.append(callback)
            return
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            shown = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise ConfigError(
                f"callbacks holds {shown}; give objects of subclasses of zeromesh.trainer.callbacks.callback.Callback or "
                "transformers.TrainerCallback"
            )
        if self.of_transformers is None:
            self.of_transformers = TransformersCallbacks(self._trainer)
            self._callbacks.append(self.of_transformers)
        self.of_transformers.callbacks.append(callback() if isinstance(callback, type) else callback)

    def call(self, event: str, *arguments: Any) -> None:
        """Run the method of that name of all callbacks that have one. Its errors are raised with a note that names the callback."""
        for callback in self._callbacks:
            if isinstance(callback, TransformersCallbacks):
                with ending_children():
                    callback.call(event, *arguments)
            elif self._overrides(callback, event):
                with naming(callback, event), ending_children():
                    getattr(callback, event)(self._trainer, *arguments)

    def listens(self, event: str) -> bool:
        """Whether some callback does something at an event."""
        return any(isinstance(each, TransformersCallbacks) or self._overrides(each, event) for each in self._callbacks)

    @staticmethod
    def _overrides(callback: Callback, event: str) -> bool:
        return getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)

    def request(self, *, log: bool = False, evaluate: bool = False, save: bool = False, stop: bool = False) -> None:
        """Ask for more after the present step; what was asked for before stays."""
        asked = {"should_log": log, "should_evaluate": evaluate, "should_save": save, "should_training_stop": stop}
        self.control = replace(self.control, **{name: True for name, wanted in asked.items() if wanted})

    def forget_requests(self, *, stop_epoch: bool = False) -> None:
        """Begin with no requests for the next step but one to stop the run, which stays."""
        stop = self.control.should_training_stop
        self.control = TrainerControl(should_training_stop=stop, should_epoch_stop=stop_epoch)

    def agree(self, mesh: Mesh) -> None:
        """Do on all ranks what the callbacks of any rank request; without callbacks there is nothing to agree on."""
        if self._callbacks and mesh.world_size > 1:
            own = torch.tensor([int(bool(flag)) for flag in astuple(self.control)])
            self.control = TrainerControl(*map(bool, mesh.world.max_(own, "requests of callbacks").tolist()))

    def __bool__(self) -> bool:
        """Whether there are callbacks."""
        return bool(self._callbacks)

    def states(self) -> dict[str, Any]:
        """The states of callbacks that a checkpoint keeps, by their class; of two of one class, the first."""
        found: dict[str, Any] = {}
        for callback in self._callbacks:
            with naming(callback, "state_dict"):
                state = callback.state_dict()
            if state:
                found.setdefault(type(callback).__name__, state)
        return found

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give callbacks the states that a checkpoint of an earlier process has kept."""
        for callback in self._callbacks:
            state = states.get(type(callback).__name__)
            if state:
                callback.load_state_dict(state)
