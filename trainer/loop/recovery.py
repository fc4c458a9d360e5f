"""Recovery of a run of which ranks are lost: the processes of the others stay, and take a place among the ranks of the next start.

a rank ends, another one's wait for it fails    CollectiveError out of `fit`
leave the mesh and its part of the model        `Recovery.rests`
the launcher has a new process for the lost     `Line.rest`
`fit` again, from the newest checkpoint
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CollectiveError
from zeromesh.launch.line import Line, line_to_launcher
from zeromesh.mesh.process_groups import are_ours, forget_groups
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.trainer.checkpoints.manager import FOLDER
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.loop.context import RunContext, UserInputs


@dataclass
class Recovery:
    """What a rank does about lost ranks in one `fit`, by its line to the launcher."""

    config: TrainerConfig
    line: Line
    _reason: str = ""
    _step: int = 0

    @classmethod
    def begin(cls, config: TrainerConfig) -> Self | None:
        """Return the recovery of a run; None where no launcher of zeromesh has started the rank, or the configuration forbids it."""
        line = line_to_launcher()
        return None if line is None or config.recovery.survivors == "end" else cls(config, line)

    def watch(self, mesh: Mesh) -> None:
        """Tell the launcher that this rank can go on without others, and heed what it tells, while the mesh is there."""
        stays = self.config.recovery.survivors == "keep" and not is_accelerator(mesh.device) and are_ours()
        patience = self.config.parallel.timeout_seconds if stays else 0.0
        self.line.tell(recovers={"limit": self.config.recovery.limit, "patience": patience})
        if not stays:
            return

        def heed() -> None:
            self.line.listen()
            if self.line.lost and mesh.watch.broken is None:
                mesh.watch.broken = CollectiveError(f"rank {mesh.rank}: the launcher says that {self.line.lost}")

        mesh.watch.on_beat = heed

    def leaves(self, error: CollectiveError, run: RunContext | None, mesh: Mesh | None, inputs: UserInputs) -> bool:
        """Leave the mesh after `error`; returns False where this rank's process has to end, since its weights cannot come from a
        checkpoint."""
        if self.config.recovery.survivors != "keep" or (mesh is not None and is_accelerator(mesh.device)):
            return False
        if isinstance(inputs.model, nn.Module) and not (run is not None and _is_emptied(run, inputs.model)):
            return False
        self._reason, self._step = str(error), 0 if run is None else run.progress.step
        cause: BaseException | None = error
        while cause is not None:  # Their frames refer to the states, which would stay in memory beside the new ones.
            cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
        if run is not None:
            run.model.close()
        if mesh is not None:
            mesh.forget()
        forget_groups()
        return True

    def rest(self) -> None:
        """Wait for a place in the next start. Raises the error again that `leaves` was called for, where there is none."""
        gc.collect()
        if not self.line.rest(self._reason, self._step):
            raise CollectiveError(self._reason)


class _Lost:
    """The values of a parameter that a checkpoint has, in place of those that are lost with a rank; see `BuiltSource`."""

    def __init__(self, parameter: Tensor) -> None:
        self._dtype = parameter.dtype

    def read(self, start: int, end: int) -> Tensor:
        return torch.zeros(end - start, dtype=self._dtype)

    def encoded_by(self, codec: Any) -> None:
        return None


def _is_emptied(run: RunContext, model: nn.Module) -> bool:
    """Give the user's model parameters without values, of which the next start divides and fills the others; False where the run
    has no checkpoint, or has changed the model in ways that it cannot undo."""
    trained, options = run.model, run.model.require_engine().options
    has_checkpoint = bool(
        CheckpointStore(Path(run.config.run.output_dir).expanduser() / run.config.run.name / FOLDER).steps()
    )
    if not has_checkpoint or trained.module is not model or options.weights is not None or run.config.model.lora:
        return False
    trained.divided.restore()
    trained.restore_modules()
    master, made = options.precision.master, dict[int, nn.Parameter]()
    for module in model.modules():
        for name, each in module._parameters.items():
            if each is None:
                continue
            if id(each) not in made:
                dtype = master if each.is_floating_point() else each.dtype
                made[id(each)] = nn.Parameter(torch.empty(each.shape, dtype=dtype, device="meta"), each.requires_grad)
                made[id(each)].stored = _Lost(made[id(each)])  # type: ignore[attr-defined]
            module._parameters[name] = made[id(each)]
    return True
