"""A source of initial values that tells how far it is: reading a large model takes minutes."""

from __future__ import annotations

import torch

from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.watch import Activity
from zeromesh.trainer.console import RunConsole
from zeromesh.zero.deferred import BuiltModel
from zeromesh.zero.sources import ParameterSource


class WatchedSource:
    """Hands on what the source of `built` gives, and tells the console, and the other ranks, that it goes on."""

    def __init__(self, built: BuiltModel, console: RunConsole, mesh: Mesh) -> None:
        self._source: ParameterSource = built.source
        self._console = console
        self._mesh = mesh
        self._total = sum(1 for _ in built.model.parameters())
        self._done = 0

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """See `ParameterSource`."""
        return self._source.read(fqn, start, end)

    def buffer(self, name: str) -> torch.Tensor | None:
        """See `ParameterSource`."""
        return self._source.buffer(name)

    def release(self, fqn: str) -> None:
        """See `ParameterSource`; one parameter more is done."""
        self._source.release(fqn)
        self._done += 1
        self._console.status(f"setting the weights: {self._done} of {self._total} parameters")
        self._mesh.post(Activity.IDLE)

    def close(self) -> None:
        """See `ParameterSource`."""
        self._source.close()
