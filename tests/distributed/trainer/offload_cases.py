"""Cases of runs whose states rest on files, to which something happens."""

import errno
import os
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.support.checkpoint_cases import trained
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import TieredTensor
from zeromesh.offload.io.file_tier import THREADS


class Vandal(Callback):
    """Does something to this rank's swap file when a step begins, or between its backward and its update."""

    def __init__(self, how: str, step: int) -> None:
        self._how = how
        self._step = step

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == self._step and not self._how.endswith("inside"):
            self._strike(trainer)

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        if step == self._step and self._how.endswith("inside"):
            self._strike(trainer)

    def _strike(self, trainer: Trainer) -> None:
        engine = trainer.engine
        assert engine is not None
        tier = engine._tiers.file()
        # A write that came later would make the file whole again, with zeros inside.
        written = threading.Barrier(THREADS)
        list(tier._threads.map(lambda _: written.wait(), range(THREADS)))
        if self._how.startswith("short"):
            os.ftruncate(tier._files[0]._buffered, 4096)
        else:
            for at in range(0, tier.nbytes, 4096):
                byte = torch.zeros(1, dtype=torch.uint8)
                tier.read(byte, at)
                tier.write(byte ^ 64, at)


def vandalised(mesh: Mesh, *, how: str, step: int, rank: int, **arguments: Any) -> dict[str, Any]:
    """As `trained`, while something happens to a rank's swap file."""
    return trained(mesh, callbacks=[Vandal(how, step) if mesh.rank == rank else Callback()], **arguments)


def full_disk(mesh: Mesh, *, room: int, **arguments: Any) -> dict[str, Any]:
    """As `trained`; on rank 1 the disk has so many bytes for swap files, whatever was found before."""

    def limited(descriptor: int, offset: int, length: int) -> None:
        if mesh.rank == 1 and offset + length > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, offset, length)

    with patch("zeromesh.offload.io.direct_io.os", SimpleNamespace(**{**vars(os), "posix_fallocate": limited})):
        return trained(mesh, **arguments)


def pieces(mesh: Mesh, **arguments: Any) -> dict[str, Any]:
    """As `trained`; with the most bytes of what rests on files that were asked for at once outside of training's own threads."""
    largest = [0]
    read = TieredTensor.read

    def watched(tensor: TieredTensor, start: int, out: Any) -> Any:
        if threading.current_thread().name == "zeromesh-save":
            largest[0] = max(largest[0], out.nbytes)
        return read(tensor, start, out)

    with patch.object(TieredTensor, "read", watched):
        return {**trained(mesh, **arguments), "largest": largest[0]}
