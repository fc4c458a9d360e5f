"""Events of a run: calls its callbacks, and keeps what they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.callbacks.control import TrainerControl
from zeromesh.trainer.callbacks.transformers_adapter import TransformersCallbacks
from zeromesh.trainer.callbacks.transformers_views import ObservedTrainer
from zeromesh.trainer.data.forked_children import ending_children


class CallbackDispatcher:
    """Calls the callbacks of one trainer. Those of transformers are adapted together, since they share their state and control.

    Raises:
        ConfigError: at construction, for what is no callback.
    """

    def __init__(self, trainer: ObservedTrainer, callbacks: Sequence[Any]) -> None:
        self._trainer = trainer
        self._callbacks: list[Callback | TransformersCallbacks] = []
        self.control = TrainerControl()
        """What is to be done after the present step; callbacks may change it."""
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add a callback: an object, or a class of transformers, which is then made without arguments."""
        if isinstance(callback, Callback):
            self._callbacks.append(callback)
            return
        adapted = self._transformers
        if not TransformersCallbacks.accepts(callback):
            shown = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise ConfigError(
                f"callbacks holds {shown}; give objects of subclasses of zeromesh.trainer.callbacks.callback.Callback or "
                "transformers.TrainerCallback"
            )
        if adapted is None:
            adapted = TransformersCallbacks()
            self._callbacks.append(adapted)
        adapted.add(callback)

    @property
    def _transformers(self) -> TransformersCallbacks | None:
        return next((each for each in self._callbacks if isinstance(each, TransformersCallbacks)), None)

    @property
    def has_transformers_callbacks(self) -> bool:
        """Whether there are callbacks of transformers."""
        return self._transformers is not None

    @property
    def read_checkpoints(self) -> bool:
        """Whether some callbacks may look for a checkpoint in `on_save`, so that it has to be whole by then."""
        adapted = self._transformers
        return adapted is not None and adapted.read_checkpoints

    def remove(self, callback: Any) -> Any:
        """Remove a callback, named by itself or by its class; returns it, or None where there is none."""
        for each in self._callbacks:
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                self._callbacks.remove(each)
                return each
            if isinstance(each, TransformersCallbacks):
                found = each.remove(callback)
                if found is not None:
                    return found
        return None

    def call(self, event: str, *arguments: Any) -> None:
        """Run the method of that name of all callbacks. What one raises is raised, with a note that names it."""
        for callback in self._callbacks:
            try:
                with ending_children():
                    if isinstance(callback, TransformersCallbacks):
                        callback.call(event, self._trainer, *arguments)
                    else:
                        getattr(callback, event)(self._trainer, *arguments)
            except Exception as error:
                if isinstance(callback, Callback):
                    error.add_note(f"raised by callback {type(callback).__name__}.{event}")
                raise

    def agree(self, mesh: Mesh) -> None:
        """Do on all ranks what the callbacks of any rank request; without callbacks there is nothing to agree on."""
        if self._callbacks and mesh.world_size > 1:
            self.control = self.control.agreed(mesh)

    def __bool__(self) -> bool:
        """Whether there are callbacks."""
        return bool(self._callbacks)

    def states(self) -> dict[str, Any]:
        """The states of callbacks that a checkpoint keeps, by their class; of two of one class, the first."""
        found: dict[str, Any] = {}
        for callback in self._callbacks:
            try:
                state = callback.state_dict()
            except Exception as error:
                error.add_note(f"raised by callback {type(callback).__name__}.state_dict")
                raise
            if state:
                found.setdefault(type(callback).__name__, state)
        return found

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give callbacks the states that a checkpoint of an earlier process has kept."""
        for callback in self._callbacks:
            state = states.get(type(callback).__name__)
            if state:
                callback.load_state_dict(state)
