"""Cases that write down when things happen: what is called asynchronous must not wait, what is prefetched must come early."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeromesh.comm.transport import Reduction
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.units.unit import Bucket, Phase, Unit
from zeromesh.zero.engine import ZeroEngine

from .cases import Run
from .models import Detached, Stack, lora, stack
from .recipe import Layout, Problem

PROBLEM = Problem(model="stack", decay=False, steps=3, samples=12)
Entry = tuple[float, str]


class Timeline:
    """What happened on this rank, and when, on the clock that all processes share."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, text: str) -> None:
        self.entries.append((time.monotonic(), text))

    def wrap(self, owner: object, name: str, text: str, before: Callable[[], None] = lambda: None) -> None:
        """Write down each call of a method, after `before` has run."""
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            before()
            self.add(text)
            return original(*args, **kwargs)

        setattr(owner, name, spy)


def watched_run(mesh: Mesh, layout: Layout, timeline: Timeline, layers: int = 4) -> Run:
    """A stack whose gathers, forward computations, gradients and reductions are written down."""
    torch.manual_seed(2)
    model = stack(layers)
    for number, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, n=number: timeline.add(f"forward {n}"))
    engine = ZeroEngine.build(model, mesh, layout.options(PROBLEM))
    for number, block in enumerate(model.blocks):
        block.up.weight.register_post_accumulate_grad_hook(lambda _, n=number: timeline.add(f"gradient {n}"))
    for unit in engine.units:
        timeline.wrap(unit, "gather", f"gather {unit.name}")
    timeline.wrap(engine._passes.gradients, "flush", "flush")
    _watch_reductions(engine, timeline)
    return Run(mesh=mesh, problem=PROBLEM, layout=layout, model=model, engine=engine)


def _watch_reductions(engine: ZeroEngine, timeline: Timeline) -> None:
    gradients = engine._passes.gradients
    original = gradients._reducer.launch
    names = {id(bucket): unit.name for unit in engine.units for bucket in unit.buckets}
    current: list[Bucket] = []
    announce = gradients._announce

    def remember(bucket: Bucket) -> None:
        current[:] = [bucket]
        announce(bucket)

    def launch(*args: Any, **kwargs: Any) -> Reduction:
        name = names[id(current[0])]
        timeline.add(f"launch {name}")
        reduction = original(*args, **kwargs)
        timeline.wrap(reduction, "finish", f"finish {name}")
        return reduction

    gradients._announce = remember  # type: ignore[method-assign]
    gradients._reducer.launch = launch  # type: ignore[method-assign]


def reductions(mesh: Mesh, transport: str, stage: int, overlap: bool) -> list[Entry]:
    """Backward waits at its second block until the peers have got as far as the first reduction."""
    timeline = Timeline()
    run = watched_run(mesh, Layout(stage=stage, transport=transport, overlap=overlap), timeline)
    flying = run.engine._passes.gradients._flying

    def wait_for_peers(_gradient: torch.Tensor) -> None:
        deadline = time.monotonic() + 10
        while overlap and time.monotonic() < deadline:
            if any(text == "finish blocks.3" for _, text in timeline.entries) or (flying and flying[0][1].ready()):
                return
            time.sleep(1e-4)

    run.model.blocks[1].register_forward_hook(
        lambda _module, _args, output: output.register_hook(wait_for_peers) and None
    )
    run.step(0)
    run.close()
    return timeline.entries


def delayed_peer(mesh: Mesh, transport: str, stage: int, slots: int, seconds: float) -> dict[str, Any]:
    """The last rank sleeps before it begins backward. What both have learnt in two steps is told too."""
    timeline = Timeline()
    run = watched_run(mesh, Layout(stage=stage, transport=transport, slots=slots), timeline)

    def sleep(_gradient: torch.Tensor) -> None:
        if mesh.rank == mesh.world_size - 1:
            time.sleep(seconds)

    run.model.head.register_forward_hook(lambda _module, _args, output: output.register_hook(sleep) and None)
    run.step(0)
    entries = list(timeline.entries)
    run.step(1)
    return {"entries": entries, "digest": _end(run)}


def _end(run: Run) -> str:
    found = run.digest()
    run.close()
    return found


def gathers(mesh: Mesh, transport: str, prefetch: int, delay: str) -> dict[str, Any]:
    """The second step, whose order is known from the first. The last rank sleeps before it gathers the unit called `delay`."""
    timeline = Timeline()
    layout = Layout(transport=transport, budget=0, prefetch=prefetch)
    run = watched_run(mesh, layout, timeline)
    run.step(0)
    late = mesh.rank == mesh.world_size - 1
    for unit in run.engine.units:
        if unit.name == delay and late:
            timeline.wrap(unit, "gather", "delayed", before=lambda: time.sleep(0.4))
    timeline.entries.clear()
    run.step(1)
    return {"entries": timeline.entries, "digest": _end(run)}


def late_reader(mesh: Mesh, stage: int, transport: str, budget: int | None, in_backward: bool, seconds: float) -> str:
    """The last rank sleeps in backward of each block, after its weights have their gradients and before it reads them again."""
    torch.manual_seed(2)
    model = Stack([Detached(32) for _ in range(3)], [0, 1, 2], 32)

    def sleep(_gradient: torch.Tensor) -> None:
        if mesh.rank == mesh.world_size - 1:
            time.sleep(seconds)

    for block in model.blocks:
        block.on_way_back = sleep  # type: ignore[assignment]
    layout = Layout(stage=stage, transport=transport, budget=budget, in_backward=in_backward)
    engine = ZeroEngine.build(model, mesh, layout.options(PROBLEM))
    run = Run(mesh=mesh, problem=PROBLEM, layout=layout, model=model, engine=engine)
    for step in range(2):
        run.step(step)
    return _end(run)


def live_units(mesh: Mesh, model: str, prefetch: int, checkpointing: str) -> dict[str, int]:
    """How many units are not at rest at once, the root not counted, during forward and backward of the second step."""
    torch.manual_seed(2)
    built: nn.Module = lora(layers=6) if model == "lora" else stack(6)
    if checkpointing == "call":
        built.recompute = True  # type: ignore[assignment]
    elif checkpointing:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    layout = Layout(transport="gloo", budget=0, prefetch=prefetch)
    engine = ZeroEngine.build(built, mesh, layout.options(PROBLEM))
    run = Run(mesh=mesh, problem=PROBLEM, layout=layout, model=built, engine=engine)
    most = {"live": 0}

    def count(unit: Unit, original: Callable[[], None]) -> None:
        original()
        busy = sum(each.phase is not Phase.RESTING for each in engine.units[1:])
        most["live"] = max(most["live"], busy)

    for unit in engine.units:
        unit.gather = lambda u=unit, g=unit.gather: count(u, g)  # type: ignore[method-assign]
    run.step(0)
    run.step(1)
    run.close()
    return most
