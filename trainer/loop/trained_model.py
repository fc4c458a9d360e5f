"""`TrainedModel`: the model of a run, partitioned while it is trained, and whole after the last step."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from zeromesh.environment import secret_values
from zeromesh.errors import PhaseError, StorageError, ZeromeshError, counted, summary
from zeromesh.files import write_whole
from zeromesh.offload import Tier, available_bytes, peak_bytes, resident_bytes
from zeromesh.offload.accelerator import device_memory, is_accelerator, write_allocations
from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.data.feed import Feeds
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.model_on_mesh import PlacedModel, least_free_bytes

_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|not enough memory", re.IGNORECASE)
"""Messages of out-of-memory errors, which have no common class."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    of_zeromesh = isinstance(error, ZeromeshError) and not isinstance(error, StorageError)
    return isinstance(error, RuntimeError) and not of_zeromesh and bool(_OUT_OF_MEMORY.search(str(error)))


_CURES = "lower batch.micro_size or data.sequence_length, raise zero.stage, set model.activation_checkpointing, or offload more"


@dataclass(kw_only=True)
class TrainedModel(PlacedModel):
    """This rank's part of a run's model, and the collective operations on the whole. `engine` is None once the model is whole."""

    owner: ClassVar[str] = "trainer"
    steps_made: Callable[[], int]
    description: Mapping[str, Any]
    """The model's class and configuration, by `description_of`, before a forward has written into it."""
    restore_modules: Callable[[], None]
    """Restores the attributes of modules that the run has changed."""
    feeds: Feeds
    parameters: int
    """The number of parameters of the whole model, embeddings included; tied ones count once."""
    flop_parameters: int
    """The number of parameters in transformers' estimate of operations, without embeddings."""
    stepper: Stepper
    generations: int = 0

    def unusable_reason(self) -> str:
        steps = counted(self.steps_made(), "whole step")
        return f"this run ended after {steps} with {self.failure}. It cannot go on; make a new Trainer"

    def explain(self, error: BaseException) -> BaseException:
        """Write this rank's bytes after an out-of-memory error, of the process and by tier and purpose, and return an error that
        names the file; return any other error as it is. `uncounted` are bytes outside the ledger, as of libraries."""
        if not is_out_of_memory(error):
            return error
        mesh, engine, step = self.mesh, self.engine, self.steps_made()
        directory, what, purposes = self.config.run.directory, summary(error), {}
        path = directory / f"memory-rank-{mesh.rank}.json"
        process = {"resident": resident_bytes(), "resident_peak": peak_bytes(), "available": available_bytes()}
        on_device = is_accelerator(mesh.device)
        if on_device:
            process |= {f"device_{what}": nbytes for what, nbytes in asdict(device_memory(mesh.device)).items()}
        found: dict[str, Any] = {"rank": mesh.rank, "process": process}
        if engine is not None:
            ledger = engine.ledger
            for tier in filter(ledger.by_purpose, Tier):
                purposes[tier.value] = {purpose.value: nbytes for purpose, nbytes in ledger.by_purpose(tier).items()}
            covered = ledger.total(Tier.DEVICE) if on_device else ledger.total()
            beside = max(0, (process.get("device_allocated") or process["resident"]) - covered)
            found |= {"counted": covered, "counted_peak": ledger.peak(), "uncounted": beside}
        found["purposes"] = purposes
        text = f"rank {mesh.rank} ran out of memory after {counted(step, 'whole step')} ({what})"
        if largest := sorted(purposes.get("device", {}).items(), key=lambda item: -item[1])[:3]:
            text += f"; it holds {', '.join(f'{human_bytes(nbytes)} {purpose}' for purpose, nbytes in largest)}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            error_text = Redaction(secret_values()).text(what)
            write_whole(path, json.dumps({"error": error_text, "step": step, **found}, indent=1).encode())
            if write_allocations(mesh.device, blocks := path.with_suffix(".pickle")):
                text += f". {blocks} has every block of the device, for https://pytorch.org/memory_viz"
                text += "; profile.allocations: true adds where each was allocated"
        except OSError as why:
            return StorageError(f"{text}. What holds the rest could not be written to {path}: {why.strerror}; {_CURES}")
        return StorageError(f"{text}. {path} says what holds the rest; {_CURES}")

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
        factor = self.stepper.gradient_factor
        if self.engine is None or factor is None:
            raise PhaseError("gradients are there between backward and update: read them in on_pre_optimizer_step")
        # Unknown names are refused before any collective.
        self.engine.state.nbytes_of([name])
        with self.mesh.call(f"trainer.gradient({name!r})"):
            gradient = self.engine.state.gradient(name)
        return None if gradient is None else gradient.mul_(factor)

    def make_whole(self) -> None:
        """Close the engine and gather the model on every rank, if all have memory for it; otherwise it stays partitioned."""
        engine = self.engine
        if engine is None:
            return
        if engine.options.offload.parameters.leaves_device(self.mesh.device):
            self.console.note("parameters rest on another tier, and the model stays partitioned; use save()")
            return
        master = engine.options.precision.master
        state = self.state()
        free = least_free_bytes(self.mesh)
        averaged = engine.optimizer_step.averages is not None and not self.saves_average
        if free and (3 if averaged else 2) * state.numel * master.itemsize > free:
            self.console.note("the model does not fit in one rank's memory and stays partitioned; use save()")
            return
        if averaged:
            self.averages = {name: tensor.clone() for name, tensor in engine.full_state(averaged=True).parameters()}
        state.make_whole(self.divided.restore)
        engine.close()
        self.engine = None
        self.restore_modules()
        self.stepper = Stepper(self.module, self.stepper.loss, self.mesh, master, None)

    def close(self) -> None:
        self.restore_modules()
        super().close()
        self.engine = None
