"""Cases of disks that take their time, run by workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from checkpoint_cases import configured
from trainer_cases import llama, sentences

from zeromesh import Callback, Trainer
from zeromesh.mesh.groups import Mesh

LAST = 5


def removed_late(mesh: Mesh, *, folder: str) -> dict[str, Any]:
    """A checkpoint a step, of which one is kept; no file is removed before the last step is over, or long after."""
    trained, held = threading.Event(), []
    unlink = os.unlink

    class Watching(Callback):
        def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
            if step == LAST:
                trained.set()

    def slow(path: Any, *arguments: Any, **named: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and str(path).endswith(".safetensors"):
            held.append(not trained.wait(8))
        unlink(path, *arguments, **named)

    section = {"every_steps": 1, "keep_last": 1}
    with (
        patch.object(os, "unlink", slow),
        Trainer(
            llama(), configured(folder, LAST, {"checkpoint": section}), sentences(), callbacks=[Watching()]
        ) as trainer,
    ):
        trainer.fit()
    mesh.world.barrier("the end of the run")
    return {"held": any(held), "left": sorted(path.name for path in (Path(folder) / "run" / "checkpoints").iterdir())}
