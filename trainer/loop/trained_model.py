"""`TrainedModel`: the model of a run, partitioned while it is trained, and whole after the last step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from zeromesh.errors import PhaseError, counted
from zeromesh.options import OptimizerSettings
from zeromesh.trainer.data.feed import Feeds
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.losses.losses import Loss
from zeromesh.trainer.model_on_mesh import PlacedModel, least_free_bytes
from zeromesh.trainer.models.flops import ModelFlops
from zeromesh.trainer.monitoring.profiler import explained


@dataclass(kw_only=True)
class TrainedModel(PlacedModel):
    """This rank's part of the model of a run, and what all ranks do with the whole of it. `engine` is None once it is whole."""

    owner: ClassVar[str] = "trainer"
    steps_made: Callable[[], int]
    """How many steps the run has made."""
    described: Mapping[str, Any]
    """Its class and configuration before its first forward, as `description_of` reads them: a model may write into the latter."""
    loss: Loss
    put_back: Callable[[], None]
    """Gives modules back the attributes that the run has changed."""
    feeds: Feeds
    flops: ModelFlops | None
    parameters: int
    """How many parameters the whole model has, with embeddings; tied ones count once."""
    counted: int
    """How many of them transformers estimates operations by: no embeddings."""
    optimizer: OptimizerSettings
    stepper: Stepper
    generations: int = 0
    """How often the model has generated."""
    _gradients_ready: bool = False

    def take_written(self, settings: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        """Describe the model as in `settings`, those of the run's first process, where a model has `written` into its own since."""
        kept = {name: value for name, value in self.described.items() if f"model.{name}" not in written}
        first = {name.removeprefix("model."): settings[name] for name in written if name in settings}
        self.described = kept | first

    def over(self) -> str:
        steps = counted(self.steps_made(), "whole step")
        return f"this run ended after {steps} with {self.failure}. It cannot go on; make a new Trainer"

    def explain(self, error: BaseException) -> BaseException:
        """The error that says what holds this rank's memory, if it ran out."""
        directory = Path(self.config.run.output_dir).expanduser() / self.config.run.name
        return explained(error, self.engine, self.mesh, directory, self.steps_made())

    def replace_save_pretrained(self) -> None:
        """Until the model is whole again, its own `save_pretrained`, which callbacks call, writes all of it as `save` does."""
        own = getattr(self.module, "save_pretrained", None)
        if own is None:
            return

        def save_pretrained(save_directory: Any, *arguments: Any, state_dict: Any = None, **named: Any) -> Any:
            if state_dict is not None:
                return own(save_directory, *arguments, state_dict=state_dict, **named)
            return self.save(save_directory)

        vars(self.module)["save_pretrained"] = save_pretrained

    @contextmanager
    def gradients_to_read(self) -> Iterator[None]:
        """Inside the block, between the last backward of a step and its update, `gradient` answers."""
        self._gradients_ready = True
        try:
            yield
        finally:
            self._gradients_ready = False

    def gradient(self, name: str) -> Tensor | None:
        """The whole gradient of a parameter, as `Trainer.gradient` gives it."""
        if self.engine is None or not self._gradients_ready:
            raise PhaseError("gradients are there between backward and update: read them in on_pre_optimizer_step")
        # A name that no parameter has is refused before ranks wait for one another.
        self.engine.state.nbytes_of([name])
        with self.mesh.call(f"trainer.gradient({name!r})"):
            gradient = self.engine.state.gradient(name)
        return None if gradient is None else gradient.mul_(self.stepper.gradient_factor)

    def make_whole(self) -> None:
        """End the engine and leave the model whole, if every rank has memory for it; else it stays partitioned."""
        engine = self.engine
        if engine is None:
            return
        if engine.options.offload.parameters.leaves(self.mesh.device):
            self.console.note("parameters rest on another tier, and the model stays partitioned; use save()")
            return
        master = engine.options.precision.master
        state = engine.state
        nbytes = state.numel * master.itemsize
        free = least_free_bytes(self.mesh)
        averaged = engine.optimizer_step.averages is not None
        if free and (3 if averaged else 2) * nbytes > free:
            self.console.note("the model does not fit in one rank's memory and stays partitioned; use save()")
            return
        if averaged:
            self.averages = {name: tensor.clone() for name, tensor in engine.averaged_state.parameters()}
        state.make_whole(self.divided.restore)
        engine.close()
        self.engine = None
        self.put_back()
        self.stepper = Stepper(self.module, self.loss, self.mesh, master, None)

    def close(self) -> None:
        """Give back what the run has taken: files, shared memory, hooks of the model."""
        self.put_back()
        super().close()
        self.engine = None
