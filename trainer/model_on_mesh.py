"""`ModelOnMesh`: the operations on a model whose parameters are divided over the ranks of a mesh, for training or generation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from zeromesh.errors import ConfigError, PhaseError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import available_bytes
from zeromesh.offload.accelerator import device_memory, is_accelerator
from zeromesh.parallelize import Divided
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.models.hub_form import HubForm
from zeromesh.trainer.models.save_pretrained import save_model
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.weights.handoff import Named, Part, cut_part, send_weights
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import persistent_buffers


class ModelOnMesh(ABC):
    """The operations of `Trainer`, `Generator` and `shard` on a model that is divided over ranks, which all make the same calls."""

    @property
    @abstractmethod
    def placed(self) -> "PlacedModel":
        """This rank's part of the model. Raises `PhaseError` after `close`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, path: str | PathLike[str], *, ema: bool = False) -> None:
        """Write the model as a Hugging Face model directory, one parameter at a time. `ema` writes averaged weights, before and
        after the end of `fit`. Raises `ConfigError` for `ema` without `ema.decay` and `StorageError` if it cannot be written."""
        placed = self.placed
        placed.require_average(ema)
        averaged = ema and placed.engine is None
        with placed.guarded(f"{placed.owner}.save()"), placed.averaged() if averaged else nullcontext():
            state, tokenizer = placed.state(ema), placed.processing_class
            failure = save_model(placed.module, state, Path(path).expanduser(), placed.mesh, processing_class=tokenizer)
        if failure:
            raise StorageError(failure)

    def state_dict(self, *, ema: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)` of whole parameters, with one bucket in memory at a time; all ranks iterate to the end. Values
        are master weights. A tensor may change with the next step: copy it to keep it. `dict(trainer.state_dict())` holds the
        whole model on every rank. `ema` yields averaged weights. Raises `ConfigError` for `ema` in a run without `ema.decay`."""
        placed = self.placed
        placed.require_average(ema)
        return _named(placed, "state_dict", ema=ema)

    def check_weights(self) -> None:
        """Compare the digests of replicated weights between ranks, between steps. Raises `WeightsDifferError` with the tensors
        and the ranks that differ, and `PhaseError` after `fit`, once the model is whole, and between syncs of local steps."""
        placed = self.placed
        placed.require_sound()
        engine = placed.require_engine()
        engine.require_alike("a comparison of weights")
        with placed.mesh.call(f"{placed.owner}.check_weights()"):
            engine.checkpoint_state.require_same_weights()

    def stream_weights(self, part_of: Callable[[str], Part | None] = lambda name: None) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)` of weights in the compute dtype, as `save_pretrained` writes them; all ranks iterate to the end.

        Names and shapes are those of files on the Hub, and adapters are merged. A rank has its shards in memory and one more bucket
        at a time, or the inputs of one conversion or merge. `part_of(name)` returns `(dim, index, parts)` to get a part of a tensor
        only. A tensor may change with the next step: copy it to keep it. Raises `ConfigError` for a part that a tensor does not
        have, and for adapters that cannot be merged."""
        placed = self.placed
        compute: torch.dtype = getattr(torch, placed.config.precision.compute)
        weights = _named(placed, "stream_weights", form=lambda found: placed.hub_form.convert(found, compute))
        return ((name, cut_part(name, tensor, part_of(name))) for name, tensor in weights)

    def send_weights(self, *addresses: str, token: str | None = None, timeout_seconds: float = 30.0) -> int:
        """Send the weights to processes that listen with `zeromesh.receive_weights` at `addresses`, paths of Unix sockets or
        `HOST:PORT`, and have this `token`. Each rank has only its shards and the buffers of `stream_weights` in memory. Returns
        the number of tensors. Raises `TransferError` on all ranks if one is absent, refuses, or is silent for `timeout_seconds`."""
        weights, mesh = self.stream_weights(), self.placed.mesh
        return send_weights(weights, mesh, addresses, token=token, timeout_seconds=timeout_seconds)

    @contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[None]:
        """Inside the block the named parameters are whole on every rank, in the compute dtype, to be read; all ranks enter it.
        The parameters are copies, so an exception in the block leaves the model usable. Raises `StorageError` when the copies
        would not fit in memory and `PhaseError` at the end of the block, if a copy was written; the run's weights stay."""
        placed, names = self.placed, list(names)
        if placed.engine is None:
            yield
            return
        needed = placed.engine.state.nbytes_of(names)
        quoted = ", ".join(map(repr, names))
        shown = quoted[:100] + " ..." if len(quoted) > 100 else quoted
        with placed.mesh.call(f"{placed.owner}.gathered([{shown}])"):
            free = least_free_bytes(placed.mesh)
            if free and needed > free:
                why = f"parameters {', '.join(names[:4])} need {human_bytes(needed)} on every rank"
                raise StorageError(f"{why}, and a rank has {human_bytes(free)} free")
            with placed.engine.gathered(names):
                yield


@dataclass(kw_only=True)
class PlacedModel(ModelOnMesh):
    """This rank's part of a model, and the collective operations on the whole. `engine` is None once the model is whole."""

    owner: ClassVar[str] = "generator"  # The first word of collective calls in error messages, as in `trainer.fit()`.
    config: TrainerConfig
    mesh: Mesh
    console: Console
    module: Any
    hub_form: HubForm
    divided: Divided
    engine: ZeroEngine | None
    processing_class: Any  # The tokenizer that is saved with the model.
    failure: str = ""  # The error after which the model is unusable.
    averages: dict[str, Tensor] = field(default_factory=dict)  # The averaged weights by name, once the model is whole.

    @property
    def placed(self) -> "PlacedModel":
        return self

    def require_engine(self) -> ZeroEngine:
        """Return the engine. Raises `PhaseError` once the model is whole."""
        if self.engine is None:
            raise PhaseError("the model is whole again, and no longer trained")
        return self.engine

    def require_average(self, ema: bool) -> None:
        """Raise `ConfigError` where averaged weights (`ema`) are requested and the run has none."""
        if ema and not self.config.ema.decay:
            raise ConfigError("there are no averaged weights: set ema.decay, such as 0.999, in the run that makes them")

    def state(self, ema: bool = False) -> Any:
        """Return the engine's access to weights, or to their averages (`ema`); None once the model is whole. All ranks call it."""
        return self.engine and self.engine.full_state(averaged=ema or self.saves_average)

    @property
    def saves_average(self) -> bool:
        """True if the model that is saved has the averaged weights, because the optimizer makes them."""
        return self.engine is not None and self.engine.options.evaluates_average

    @property
    def evaluates_average(self) -> bool:
        """True if the averaged weights are evaluated: the optimizer's own, or by `ema.evaluate`."""
        return self.config.ema.evaluate or self.saves_average

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model has its averaged weights; all ranks enter it."""
        if self.engine is not None:
            with self.engine.averaged():
                yield
            return
        with ExitStack() as undone:
            for name, average in self.averages.items():
                parameter = self.module.get_parameter(name)
                undone.callback(setattr, parameter, "data", parameter.data)
                parameter.data = average
            yield

    def require_sound(self) -> None:
        """Raise `PhaseError` if an earlier error has left the ranks in different states, or weights partly updated."""
        if self.failure:
            raise PhaseError(self.unusable_reason())

    def unusable_reason(self) -> str:
        return f"this {self.owner} ended with {self.failure}; make a new one"

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise in place of `error`: by default `error` itself; a subclass may return a more helpful one."""
        return error

    @contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """Guard the collective call that `call` names, such as `trainer.fit()`; the block of an empty name is not collective. An
        error during a collective operation makes the model unusable, and is reported to the other ranks; one before any has no
        effect. On a single rank only the current step is lost."""
        self.require_sound()
        watch = self.mesh.watch
        begun = watch.operations_begun
        try:
            with self.mesh.call(call) if call else nullcontext():
                yield
        except BaseException as error:
            shown = self.explain(error)
            half_done = watch.operations_begun != begun or watch.may_hang
            if half_done:
                self.mesh.fail(shown)
            if half_done or (self.engine is not None and not self.engine.abandon_pass()):
                self.failure = f"{type(shown).__name__}: {shown}".removesuffix(": ")
            if shown is error:
                raise
            raise shown from error
        finally:
            self.console.close()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.divided.close()


def _named(placed: PlacedModel, call: str, *, ema: bool = False, form: Callable[[Named], Named] | None = None) -> Named:
    """Yield `(name, tensor)` of whole parameters; with `form`, its result for the tensors of a file: the parameters, tied ones
    once, and the persistent buffers. An error of `form` is reported to the other ranks as one of the call."""
    found: Named
    with nullcontext() if placed.engine is None else placed.mesh.call(f"{placed.owner}.{call}()"):
        if placed.engine is not None:
            state = placed.state(ema)
            found = state.parameters() if form is None else state.stored()
        else:
            buffers = {} if form is None else persistent_buffers(placed.module)
            tensors = {**dict(placed.module.named_parameters()), **buffers}
            found = ((name, (placed.averages if ema else {}).get(name, own.detach())) for name, own in tensors.items())
        yield from found if form is None else form(found)


def least_free_bytes(mesh: Mesh) -> int:
    """Return the least free bytes of any rank, on its accelerator or as its share of the host; 0: unknown. All ranks call it."""
    if is_accelerator(mesh.device):
        free = device_memory(mesh.device).free
    else:
        free = available_bytes() // max(1, mesh.environment.local_world_size)
    return -int(mesh.world.all_reduce_max(torch.tensor([-free]), "free memory")[0])
