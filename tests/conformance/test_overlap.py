"""What is called asynchronous is: a delayed peer shows it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.devices import DEVICE
from tests.support.workers import Workers
from zeromesh.comm.transport import Reduction
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.units.unit import Bucket, Phase, Unit
from zeromesh.zero.engine import ZeroEngine

from .cases import Run
from .checks import whole_product
from .models import Detached, Stack, lora, stack
from .recipe import Layout, Problem

PROBLEM = Problem(model="stack", decay=False, steps=3, samples=12)
Entry = tuple[float, str]


class Timeline:
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
    run = Run.of(mesh, PROBLEM, layout, model)
    engine = run.engine
    for number, block in enumerate(model.blocks):
        block.up.weight.register_post_accumulate_grad_hook(lambda _, n=number: timeline.add(f"gradient {n}"))
    for unit in engine.units:
        timeline.wrap(unit, "gather", f"gather {unit.name}")
    timeline.wrap(engine._passes.gradients, "flush", "flush")
    _watch_reductions(engine, timeline)
    return run


def _watch_reductions(engine: ZeroEngine, timeline: Timeline) -> None:
    gradients = engine._passes.gradients
    reducer = engine.groups[0].reduction.reducer
    original = reducer.launch
    names = {id(bucket): unit.name for unit in engine.units for bucket in unit.buckets}
    current: list[Bucket] = []
    announce = gradients._post_reduction

    def remember(bucket: Bucket) -> None:
        current[:] = [bucket]
        announce(bucket)

    def launch(*args: Any, **kwargs: Any) -> Reduction:
        name = names[id(current[0])]
        timeline.add(f"launch {name}")
        reduction = original(*args, **kwargs)

        def finish() -> None:
            timeline.add(f"finish {name}")
            reduction.finish()

        return reduction._replace(finish=finish)

    gradients._post_reduction = remember  # type: ignore[method-assign]
    reducer.launch = launch  # type: ignore[method-assign]


def reductions(mesh: Mesh, transport: str, stage: int, overlap: bool) -> list[Entry]:
    """Backward waits at its second block until the peers have got as far as the first reduction."""
    timeline = Timeline()
    run = watched_run(mesh, Layout(stage=stage, transport=transport, overlap=overlap), timeline)
    flying = run.engine._passes.gradients._in_flight

    def wait_for_peers(_gradient: torch.Tensor) -> None:
        deadline = time.monotonic() + 10
        while overlap and time.monotonic() < deadline:
            if any(text == "finish blocks.3" for _, text in timeline.entries) or (flying and flying[0][1].ready()):
                return
            time.sleep(1e-4)

    run.model.blocks[1].register_forward_hook(lambda _module, _args, output: output.register_hook(wait_for_peers) and None)
    run.step(0)
    run.close()
    return timeline.entries


def last_sleeps(mesh: Mesh, seconds: float) -> Callable[[torch.Tensor], None]:
    return lambda _gradient: time.sleep(seconds if mesh.rank == mesh.world_size - 1 else 0)


def delayed_peer(mesh: Mesh, transport: str, stage: int, slots: int, seconds: float) -> dict[str, Any]:
    """The last rank sleeps before it begins backward. What both have learnt in two steps is told too."""
    timeline = Timeline()
    run = watched_run(mesh, Layout(stage=stage, transport=transport, slots=slots), timeline)

    sleep = last_sleeps(mesh, seconds)
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


def shorter_evaluations(mesh: Mesh) -> list[list[str]]:
    """The blocks that three evaluations gather, of which the last two end after the second block."""
    timeline, found = Timeline(), list[list[str]]()
    run = watched_run(mesh, Layout(transport="gloo", budget=0, prefetch=1), timeline)
    for order in ([0, 1, 2, 3], [0, 1], [0, 1]):
        timeline.entries.clear()
        run.model.order = order
        with run.engine.evaluation():
            run.model(torch.zeros(1, 4, dtype=torch.long, device=mesh.device))
        found.append([name for _, name in timeline.entries if name.startswith("gather blocks")])
    run.close()
    return found


def late_reader(mesh: Mesh, stage: int, transport: str, budget: int | None, in_backward: bool, seconds: float) -> str:
    """The last rank sleeps in backward of each block, after its weights have their gradients and before it reads them again."""
    torch.manual_seed(2)
    model = Stack([Detached(32) for _ in range(3)], [0, 1, 2], 32)
    for block in model.blocks:
        block.on_way_back = last_sleeps(mesh, seconds)  # type: ignore[assignment]
    layout = Layout(stage=stage, transport=transport, budget=budget, in_backward=in_backward)
    run = Run.of(mesh, PROBLEM, layout, model)
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
    run = Run.of(mesh, PROBLEM, layout, built)
    most = {"live": 0}

    def count(unit: Unit, original: Callable[[], None]) -> None:
        original()
        busy = sum(each.phase is not Phase.RESTING for each in run.engine.units[1:])
        most["live"] = max(most["live"], busy)

    for unit in run.engine.units:
        unit.gather = lambda u=unit, g=unit.gather: count(u, g)  # type: ignore[method-assign]
    run.step(0)
    run.step(1)
    run.close()
    return most


def place(entries: list[Entry], text: str) -> int:
    return [name for _, name in entries].index(text)


def when(entries: list[Entry], text: str) -> float:
    return entries[place(entries, text)][0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_reductions_start_and_end_while_backward_goes_on(workers: Workers, transport: str, stage: int) -> None:
    for entries in workers.run(2, "test_overlap:reductions", transport=transport, stage=stage, overlap=True):
        assert place(entries, "launch blocks.3") < place(entries, "gradient 2")
        assert place(entries, "finish blocks.3") < place(entries, "gradient 0")


def test_without_overlap_reductions_wait_for_the_end_of_backward(workers: Workers) -> None:
    for entries in workers.run(2, "test_overlap:reductions", transport="shared", stage=2, overlap=False):
        names = [name for _, name in entries]
        assert all(not name.startswith("launch") for name in names[: names.index("flush")])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device waits where the host does not")
@pytest.mark.parametrize(("way", "slots"), whole_product(3, [("shared", 2), ("gloo", 2), ("shared", 3), ("shared", 0)], [1, 2]))
def test_a_delayed_peer_blocks_backward_when_it_holds_the_slots(workers: Workers, way: tuple[str, int], slots: int) -> None:
    """The gradients of one more unit stay where autograd put them; a rank that went on would end with all of them in memory."""
    arguments = {"transport": way[0], "stage": way[1], "slots": slots}
    delayed = workers.run(2, "test_overlap:delayed_peer", **arguments, seconds=0.5)
    undelayed = workers.run(2, "test_overlap:delayed_peer", **arguments, seconds=0.0)
    assert [rank["digest"] for rank in delayed] == [rank["digest"] for rank in undelayed]
    quick, slow = (rank["entries"] for rank in delayed)
    began = when(slow, "gradient 3")
    assert when(quick, f"gradient {3 - slots}") < began
    assert when(quick, f"gradient {2 - slots}") > began
    launched = [name for time, name in quick if name.startswith("launch") and time < began]
    assert len(launched) == slots
    finished = [name for time, name in quick if name.startswith("finish blocks") and time < began]
    # Each finish is written down as it begins: the one that waits for the peer is there.
    assert len(finished) <= 1


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_the_next_unit_is_gathered_before_the_present_one_computes(workers: Workers, transport: str) -> None:
    for found in workers.run(2, "test_overlap:gathers", transport=transport, prefetch=1, delay=""):
        entries = found["entries"]
        backward = entries[place(entries, "forward 3") :]
        for number in range(3):
            assert place(entries, f"gather blocks.{number + 1}") < place(entries, f"forward {number}")
        for number in (1, 2):
            assert place(backward, f"gather blocks.{number - 1}") < place(backward, f"gradient {number}")


def test_without_prefetch_a_unit_is_gathered_when_it_is_needed(workers: Workers) -> None:
    for found in workers.run(2, "test_overlap:gathers", transport="gloo", prefetch=0, delay=""):
        entries = found["entries"]
        for number in range(3):
            assert place(entries, f"gather blocks.{number + 1}") > place(entries, f"forward {number}")


def test_what_a_pass_has_left_out_at_its_end_is_not_gathered_ahead_in_the_next_one(workers: Workers) -> None:
    for found in workers.run(2, "test_overlap:shorter_evaluations"):
        whole = [f"gather blocks.{number}" for number in range(4)]
        assert found == [whole, whole[:3], whole[:2]]


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_prefetch_does_not_wait_for_a_delayed_peer(workers: Workers, transport: str) -> None:
    delayed = workers.run(2, "test_overlap:gathers", transport=transport, prefetch=1, delay="blocks.2")
    undelayed = workers.run(2, "test_overlap:gathers", transport=transport, prefetch=1, delay="")
    assert [rank["digest"] for rank in delayed] == [rank["digest"] for rank in undelayed]
    quick, slow = (rank["entries"] for rank in delayed)
    late = when(slow, "delayed")
    assert when(quick, "gather blocks.2") < when(quick, "forward 1") < late
    assert when(quick, "forward 2") > late


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("model", "checkpointing"), [("stack", ""), ("stack", "call"), ("lora", ""), ("lora", "hf")])
def test_at_most_one_unit_and_the_prefetched_are_live(workers: Workers, model: str, checkpointing: str, prefetch: int) -> None:
    for found in workers.run(2, "test_overlap:live_units", model=model, prefetch=prefetch, checkpointing=checkpointing):
        assert found["live"] == 1 + prefetch


@pytest.mark.parametrize(
    ("stage", "transport", "budget", "in_backward"),
    [(2, "shared", None, True), (3, "shared", None, True), (3, "shared", 0, True), (3, "gloo", 0, True), (3, "shared", 0, False)],
)
def test_nobody_writes_what_a_delayed_peer_still_reads(
    workers: Workers, stage: int, transport: str, budget: int | None, in_backward: bool
) -> None:
    """On shared memory an update, or giving pages back, waits until all have read."""
    arguments = {"stage": stage, "transport": transport, "budget": budget, "in_backward": in_backward}
    assert workers.run(2, "test_overlap:late_reader", **arguments, seconds=0.05) == workers.run(
        2, "test_overlap:late_reader", **arguments, seconds=0.0
    )
