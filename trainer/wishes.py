"""What is to be done after a step: by the configuration, and by callbacks, which may ask for more or for less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from zeromesh.mesh.groups import Mesh


@dataclass(slots=True)
class Wishes:
    """One rank's; `agreed` has those of all. They are for the present step, except that `stop` stays."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False
    """End the run after this step, with a checkpoint, as if it were the last one."""
    stop_epoch: bool = False
    """Leave the rest of the epoch's data out."""

    def __or__(self, other: Wishes) -> Wishes:
        """What either wishes."""
        return Wishes(*(mine or theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def agreed(self, mesh: Mesh) -> Wishes:
        """What any rank wishes; all ranks call this together."""
        mine = torch.tensor([int(each) for each in astuple(self)], dtype=torch.int64)
        said: Sequence[int] = mesh.world.max_(mine, "wishes of callbacks").tolist()
        return Wishes(**{field.name: bool(value) for field, value in zip(fields(self), said, strict=True)})
