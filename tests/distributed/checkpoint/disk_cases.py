"""Cases of disks that take their time, run by workers."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.checkpoint_cases import configured
from tests.support.trainer_cases import llama, sentences
from zeromesh import Callback, Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

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


def slow_calls(mesh: Mesh, *, folder: str, calls: list[str], seconds: float, patience: float) -> dict[str, Any]:
    """A run of 3 steps for each call of the system, which once takes so long, with a timeout of 1 second: how it ended."""
    found: dict[str, Any] = {}
    for name in calls:
        real, left = getattr(os, name), [1]

        def slow(*arguments: Any, real: Any = real, left: list[int] = left, **named: Any) -> Any:
            if mesh.rank == 0 and left and "zeromesh-remove" not in threading.current_thread().name:
                left.pop()
                time.sleep(seconds)
            return real(*arguments, **named)

        class Slowed(Callback):
            def on_step_begin(self, trainer: Trainer, step: int) -> None:
                if step == 2:
                    setattr(os, name, slow)  # noqa: B023 - called within this turn

        section = {"every_steps": 1, "keep_last": 2, "timeout_seconds": patience}
        sections = {"checkpoint": section, "parallel": {"timeout_seconds": 1.0}}
        try:
            with Trainer(
                llama(), configured(f"{folder}/{name}", 3, sections), sentences(), callbacks=[Slowed()]
            ) as trainer:
                trainer.fit()
            found[name] = "struck" if mesh.rank or not left else "not struck"
        except ZeromeshError as error:
            found[name] = f"{type(error).__name__}: {error}"
        finally:
            setattr(os, name, real)
        mesh.world.barrier("the next case")
    return found
