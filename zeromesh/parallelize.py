"""Divides a model in place over the axes of a mesh that divide models, before its parameters are sharded over the data axes.
Layers are divided before other ranks' stages are removed: the cut into stages does not depend on how layers are divided."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.context.shares import Context
from zeromesh.experts.dispatch import spread_experts
from zeromesh.flat.layout import StageCopies
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.pipeline.pipeline import Pipeline
from zeromesh.pipeline.stages.build import Stages, block_costs, copies_outside, plan_cut
from zeromesh.pipeline.stages.model_anatomy import examine
from zeromesh.settings.keys import ParallelOptions
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.units.plan import ModelCuts

Example = Callable[[], Mapping[str, Any] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Divided:
    cuts: ModelCuts = field(default_factory=ModelCuts)
    tensor: Parallelized | None = None
    pipeline: Pipeline | None = None
    notes: tuple[str, ...] = ()
    context: Context | None = None  # The shares of sequences on the context axis; None: this rank has whole ones.
    undo: ExitStack = field(default_factory=ExitStack)

    def restore(self) -> None:
        """Restore the model's own modules; divided parameters are then whole and on the meta device."""
        self.undo.close()

    def close(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()


def divide(model: nn.Module, mesh: Mesh, options: ParallelOptions, example: Example = lambda: None) -> Divided:
    """Make `model` compute this rank's part; all ranks of the mesh call this alike. `example` returns a batch like those of the run
    for a trial without values; None: token ids alone. Raises `LayoutError`, with the reason, for a model that cannot be divided."""
    anatomy = examine(model, example()) if mesh.shape.divides("blocks") else None
    costs = block_costs(model, anatomy, options.balance) if anatomy is not None else None
    cut = plan_cut(costs, mesh.pipeline.size * options.chunks, options.stages or ()) if costs is not None else None
    outside = copies_outside(model, anatomy) if anatomy is not None else None
    exchange = partial(open_exchange, device=mesh.device, kind=options.transport)
    tensor, context, undo = None, None, ExitStack()
    if mesh.shape.divides("layers"):
        plan = plan_tensor(model, mesh.tensor.size, options.plan)
        tensor = Parallelized(model, exchange(mesh.tensor), plan, sequence=options.sequence)
        undo.callback(tensor.restore)
    if mesh.context.size > 1:
        pieces = mesh.tensor.size if options.sequence else 1
        method, fused = options.context_method, mesh.device.type != "cpu"
        context = Context(exchange=exchange(mesh.context), method=method, heads_first=fused, sequence=pieces)
    parts, notes = (tensor.parts, tensor.plan.notes) if tensor is not None else ({}, ())
    if mesh.shape.divides("experts"):
        parts = spread_experts(model, exchange(mesh.experts), parts, undo, mesh.tensor.size)
    if anatomy is None or cut is None:
        return Divided(cuts=ModelCuts(parts=parts), tensor=tensor, notes=notes, context=context, undo=undo)
    ranks = mesh.pipeline.size
    own = [chunk * ranks + mesh.pipeline.index for chunk in range(options.chunks)]
    stages = Stages(model, anatomy, cut, own, outside, tensor.shares if tensor is not None else None)
    blocks = [model.get_submodule(f"{anatomy.blocks}.{index}") for stage in own for index in stages.ranges[stage]]
    copies: dict[str, StageCopies] = {}
    for names, held in stages.ties.items():  # Tied parameters of this rank and another one, by their name on this rank.
        holders = tuple(sorted({stage % ranks for stage in held}))
        here = [name for stage, name in held.items() if stage in own]
        if here and len(holders) > 1:
            copies[here[0]] = StageCopies(name=names[0], aliases=names[1:], ranks=holders)
    cuts = ModelCuts(parts=parts, copies=copies, chunks=options.chunks, chunk_of=lambda name: own.index(stages.stage_of(name)))
    pipeline = Pipeline(mesh, stages, options.schedule, blocks)
    undo.callback(pipeline.restore)
    notes = (*notes, f"pipeline: stages of {' + '.join(map(str, cut))} blocks")
    return Divided(cuts=cuts, tensor=tensor, pipeline=pipeline, notes=notes, context=context, undo=undo)
