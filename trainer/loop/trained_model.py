"""`TrainedModel`: the model of a run, partitioned while it is trained, and whole after the last step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError, PhaseError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import available_bytes
from zeromesh.offload.accelerator import device_memory, is_accelerator
from zeromesh.options import OptimizerSettings
from zeromesh.parallelize import Divided
from zeromesh.rng import number_of, seed_all
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.feed import Feeds
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.losses.losses import Loss
from zeromesh.trainer.models.flops import ModelFlops
from zeromesh.trainer.models.generation import check_arguments, generate
from zeromesh.trainer.models.hub_form import HubForm
from zeromesh.trainer.models.save_pretrained import save_model
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.profiler import explained
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import saved_buffers


@dataclass(kw_only=True)
class TrainedModel:
    """This rank's part of the model of a run, and what all ranks do with the whole of it. `engine` is None once it is whole."""

    config: TrainerConfig
    mesh: Mesh
    console: Console
    steps_made: Callable[[], int]
    """How many steps the run has made."""
    processing_class: Any
    """The tokenizer that is saved with the model."""
    module: nn.Module
    described: Mapping[str, Any]
    """Its class and configuration before its first forward, as `description_of` reads them: a model may write into the latter."""
    hub_form: HubForm
    loss: Loss
    divided: Divided
    put_back: Callable[[], None]
    """Gives modules back the attributes that the run has changed."""
    feeds: Feeds
    flops: ModelFlops | None
    parameters: int
    """How many parameters the whole model has, with embeddings; tied ones count once."""
    counted: int
    """How many of them transformers estimates operations by: no embeddings."""
    optimizer: OptimizerSettings
    engine: ZeroEngine | None
    stepper: Stepper
    _failure: str = ""
    """The error after which the run cannot go on."""
    _gradients_ready: bool = False
    _generations: int = 0
    _averages: dict[str, Tensor] = field(default_factory=dict)
    """Averages of the weights by name, once the model is whole."""

    def require_engine(self) -> ZeroEngine:
        """The engine. Raises `PhaseError` once the model is whole."""
        if self.engine is None:
            raise PhaseError("the model is whole again, and no longer trained")
        return self.engine

    def take_written(self, settings: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        """Describe the model as in `settings`, those of the run's first process, where a model has `written` into its own since."""
        kept = {name: value for name, value in self.described.items() if f"model.{name}" not in written}
        first = {name.removeprefix("model."): settings[name] for name in written if name in settings}
        self.described = kept | first

    # Errors

    def require_sound(self) -> None:
        """Raise `PhaseError` after an error that left the ranks apart, or weights half updated."""
        if self._failure:
            raise PhaseError(
                f"this run ended after {self.steps_made()} whole steps with {self._failure}. It cannot go on; make a new Trainer"
            )

    @contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """A call that all ranks make, such as `trainer.fit()`; "" where a rank may make it alone.

        After an error that leaves something half done that ranks do together the run cannot go on, and the other ranks learn of it.
        A call that is refused before that has changed nothing. A single rank has lost nothing but the step that it was in.
        """
        self.require_sound()
        begun = self.mesh.watch.begun
        try:
            with self.mesh.call(call) if call else nullcontext():
                yield
        except BaseException as error:
            directory = Path(self.config.run.output_dir).expanduser() / self.config.run.name
            shown = explained(error, self.engine, self.mesh, directory, self.steps_made())
            half_done = self.mesh.watch.begun != begun or self.mesh.watch.in_doubt
            if half_done:
                self.mesh.fail(shown)
            if half_done or (self.engine is not None and not self.engine.abandon_pass()):
                self._failure = f"{type(shown).__name__}: {shown}".removesuffix(": ")
            if shown is error:
                raise
            raise shown from error
        finally:
            self.console.close()

    # What users do with the model

    def generate(self, arguments: Mapping[str, Any], seed: int | None) -> Any:
        """Continue prompts as `Trainer.generate` does."""
        partitioned = self.engine is not None
        check_arguments(self.module, arguments, self.mesh if partitioned else None)
        self._generations += 1
        own = number_of(f"{self.config.run.seed}/{self.steps_made()}/{self._generations}/generate")
        set_seed = partial(seed_all, own) if seed is None else partial(torch.manual_seed, seed)
        pipeline = self.divided.pipeline
        with self.guarded("trainer.generate()" if partitioned else ""):
            return generate(self.module, self.mesh, arguments, seed=set_seed, engine=self.engine, pipeline=pipeline)

    def state_dict(self, *, ema: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by name, as `Trainer.state_dict` gives them."""
        self._require_average(ema)
        if self.engine is None:
            averages = self._averages if ema else {}
            yield from ((name, averages.get(name, own.detach())) for name, own in self.module.named_parameters())
            return
        with self.mesh.call("trainer.state_dict()"):
            yield from (self.engine.averaged_state if ema else self.engine.state).parameters()

    def stored(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights in a dtype, made from master weights, in the form of the hub: tied ones once, and persistent buffers."""
        if self.engine is None:
            tensors = {**dict(self.module.named_parameters()), **saved_buffers(self.module)}
            yield from self.hub_form.of(((name, own.detach()) for name, own in tensors.items()), dtype)
            return
        with self.mesh.call("trainer.stream_weights()"):
            yield from self.hub_form.of(self.engine.state.stored(), dtype)

    def _require_average(self, ema: bool) -> None:
        if ema and not self.config.ema.decay:
            raise ConfigError(
                "there are no averaged weights: set ema.decay, such as 0.999, for the run that makes them"
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model has its averaged weights; all ranks enter it."""
        if self.engine is not None:
            with self.engine.averaged():
                yield
            return
        weights = {name: self.module.get_parameter(name).data for name in self._averages}
        try:
            for name, average in self._averages.items():
                self.module.get_parameter(name).data = average
            yield
        finally:
            for name, weight in weights.items():
                self.module.get_parameter(name).data = weight

    def save(self, path: Path, *, ema: bool = False) -> None:
        """Write the model as a Hugging Face directory, as `Trainer.save` does."""
        self._require_average(ema)
        with self.guarded("trainer.save()"), self.averaged() if ema and self.engine is None else nullcontext():
            state = None
            if self.engine is not None:
                state = self.engine.averaged_state if ema else self.engine.state
            failure = save_model(self.module, state, path, self.mesh, processing_class=self.processing_class)
        if failure:
            raise StorageError(failure)

    def replace_save_pretrained(self) -> None:
        """Until the model is whole again, its own `save_pretrained`, which callbacks call, writes all of it as `save` does."""
        own = getattr(self.module, "save_pretrained", None)
        if own is None:
            return

        def save_pretrained(save_directory: Any, *arguments: Any, state_dict: Any = None, **named: Any) -> Any:
            if state_dict is not None:
                return own(save_directory, *arguments, state_dict=state_dict, **named)
            return self.save(Path(save_directory).expanduser())

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

    @contextmanager
    def gathered(self, names: list[str]) -> Iterator[None]:
        """Inside the block the named parameters are whole on every rank, as in `Trainer.gathered`."""
        if self.engine is None:
            yield
            return
        needed = self.engine.state.nbytes_of(names)
        quoted = ", ".join(map(repr, names))
        with self.mesh.call(f"trainer.gathered([{quoted[:100] + ' ...' if len(quoted) > 100 else quoted}])"):
            free = self._least_available()
            if free is not None and needed > free:
                raise StorageError(
                    f"parameters {', '.join(names[:4])} need {human_bytes(needed)} on every rank, and a rank has "
                    f"{human_bytes(free)} free"
                )
            with self.engine.gathered(names):
                yield

    def _least_available(self) -> int | None:
        """Free bytes of the rank that has least, when all ranks of a host take as much as it does; None: not known."""
        mesh = self.mesh
        if is_accelerator(mesh.device):
            free = device_memory(mesh.device).free
        else:
            free = available_bytes() // max(1, mesh.environment.local_world_size)
        return -int(mesh.world.max_(torch.tensor([-free]), "free memory")[0]) or None

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
        free = self._least_available()
        averaged = engine.optimizer_step.averages is not None
        if free is not None and (3 if averaged else 2) * nbytes > free:
            self.console.note("the model does not fit in one rank's memory and stays partitioned; use save()")
            return
        if averaged:
            self._averages = {name: tensor.clone() for name, tensor in engine.averaged_state.parameters()}
        state.make_whole(self.divided.restore)
        engine.close()
        self.engine = None
        self.put_back()
        self.stepper = Stepper(self.module, self.loss, self.mesh, master, None)

    def close(self) -> None:
        """Give back what the run has taken: files, shared memory, hooks of the model."""
        self.put_back()
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.divided.close()
