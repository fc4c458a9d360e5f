"""Divides a model over the tensor axis of a mesh, in place, before its parameters are partitioned over the data axes.

source = BuiltSource(model)                   # or any other of the whole model
divided = divide(model, mesh, options)        # modules compute this rank's part; divided parameters are on the meta device
engine = ZeroEngine.build(model, mesh, zero_options, source, cuts=divided.cuts)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from zeromesh.mesh.exchange import Exchange
from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.select import TransportName, open_exchange
from zeromesh.tensor.apply import Parallelized, parallelize
from zeromesh.tensor.plan import plan_tensor
from zeromesh.zero.plan import ModelCuts


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelOptions:
    """How a model is divided.

    `rules` are the user's own styles of layers, by pattern of their names; with `sequence`, blocks pass on shares of the sequence.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    sequence: bool = False
    transport: TransportName = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Divided:
    """What `divide` made of a model."""

    cuts: ModelCuts
    exchange: Exchange
    tensor: Parallelized | None
    notes: tuple[str, ...] = ()

    def restore(self) -> None:
        """Give the model its own modules back; parameters that were divided are then whole and on the meta device."""
        if self.tensor is not None:
            self.tensor.restore()


def divide(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> Divided:
    """Make `model` compute this rank's part. All ranks of the mesh call this alike.

    Raises:
        LayoutError: for a model that cannot be divided so, with the reason.
    """
    exchange = open_exchange(mesh.tensor, mesh.device, options.transport)
    if mesh.tensor.size == 1:
        return Divided(cuts=ModelCuts(), exchange=exchange, tensor=None)
    plan = plan_tensor(model, mesh.tensor.size, options.rules or None)
    tensor = parallelize(model, exchange, plan, sequence=options.sequence, device=mesh.device)
    return Divided(cuts=ModelCuts(parts=tensor.parts), exchange=exchange, tensor=tensor, notes=tensor.notes)
