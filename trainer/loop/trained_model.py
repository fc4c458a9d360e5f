"""`TrainedModel`: the model of a run, partitioned while it is trained, and whole after the last step."""

from collections.abc import Callable, Mapping
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
    """This rank's part of a run's model, and the collective operations on the whole. `engine` is None once the model is whole."""

    owner: ClassVar[str] = "trainer"
    steps_made: Callable[[], int]
    described: Mapping[str, Any]
    """The model's class and configuration before its first forward, by `description_of`: a forward may write into its
    configuration."""
    loss: Loss
    put_back: Callable[[], None]
    """Restores the attributes of modules that the run has changed."""
    feeds: Feeds
    flops: ModelFlops | None
    parameters: int
    """The number of parameters of the whole model, embeddings included; tied ones count once."""
    counted: int
    """The number of parameters in transformers' estimate of operations, without embeddings."""
    optimizer: OptimizerSettings
    stepper: Stepper
    generations: int = 0
    gradients_ready: bool = False
    """True between the last backward of a step and its update, when `gradient` may be called."""

    def over(self) -> str:
        steps = counted(self.steps_made(), "whole step")
        return f"this run ended after {steps} with {self.failure}. It cannot go on; make a new Trainer"

    def explain(self, error: BaseException) -> BaseException:
        """Return an out-of-memory error that says what holds this rank's memory; other errors are returned as they are."""
        directory = Path(self.config.run.output_dir).expanduser() / self.config.run.name
        return explained(error, self.engine, self.mesh, directory, self.steps_made())

    def replace_save_pretrained(self) -> None:
        """Redirect the model's own `save_pretrained`, which callbacks call, to `save` until the model is whole."""
        own = getattr(self.module, "save_pretrained", None)
        if own is None:
            return

        def save_pretrained(save_directory: Any, *arguments: Any, state_dict: Any = None, **named: Any) -> Any:
            if state_dict is not None:
                return own(save_directory, *arguments, state_dict=state_dict, **named)
            return self.save(save_directory)

        vars(self.module)["save_pretrained"] = save_pretrained

    def gradient(self, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter; see `Trainer.gradient`."""
        if self.engine is None or not self.gradients_ready:
            raise PhaseError("gradients are there between backward and update: read them in on_pre_optimizer_step")
        # Unknown names are refused before any collective.
        self.engine.state.nbytes_of([name])
        with self.mesh.call(f"trainer.gradient({name!r})"):
            gradient = self.engine.state.gradient(name)
        return None if gradient is None else gradient.mul_(self.stepper.gradient_factor)

    def make_whole(self) -> None:
        """Close the engine and gather the model on every rank, if all have memory for it; otherwise it stays partitioned."""
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
        """Release the run's files, shared memory and hooks."""
        self.put_back()
        super().close()
        self.engine = None
