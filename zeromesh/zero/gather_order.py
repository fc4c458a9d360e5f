"""The order in which units are gathered: the progress of a pass over the model, and the numbers of the units that are next.

`PassProgress` follows one microbatch through the units in forward and back again:

    forward     visits      0  1  2  1  3      call 0, 1, ...; a unit may be called several times
    backward    reaches the calls in reverse order, and leaves a unit after the first of its calls

`Prefetcher` gathers units ahead of their use, in the order recorded by an earlier pass of the same kind. A pass that leaves this
order gathers each unit on use, and is recorded anew. The watchdog reports ranks whose orders differ.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
from torch.autograd.graph import GradientEdge

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.rng import Streams
from zeromesh.telemetry.event_ring import Activity
from zeromesh.telemetry.step_recorder import NOTHING
from zeromesh.units.unit import Bucket, Phase, Unit


class PassMode(Enum):
    """The kind of the engine's running pass."""

    IDLE = "idle"
    EVALUATION = "evaluation"
    FORWARD = "forward"
    BACKWARD = "backward"


class PassProgress:
    """The progress of one microbatch through a chunk of the model on one rank, from its forward to its backward."""

    def __init__(self, streams: Streams | None = None, chunk: int = 0) -> None:
        self.chunk = chunk
        self.first = self.last = True
        """True if this microbatch's backward is the chunk's first in the step, which begins the gradient sums, or the last."""
        self.roots: Sequence[GradientEdge] = ()
        """The outputs that require a gradient, from which backward starts."""
        self.gradients: list[tuple[Bucket, int, torch.Tensor]] = []
        """Gradients of parameters that arrived together with those of inputs, and wait for `backward_weight`."""
        self.streams = streams
        """The microbatch's random number streams; None means that it draws from the global generators."""
        self.outputs: list[GradientEdge] = []
        """Those outputs of the latest call of a unit that require a gradient."""
        self.held: set[int] = set()
        """Units that are needed beyond their calls: they stay live until the pass is over, and during all of backward."""
        self.reached: set[int] = set()
        """Units whose outputs backward has reached."""
        self.calls = 0
        """The number of calls of units in forward."""
        self._first_visits: dict[int, int] = {}
        self._inside: list[int] = []

    def visit(self, unit: int) -> None:
        """Record a call of a unit in forward."""
        self._first_visits.setdefault(unit, self.calls)
        self.calls += 1

    def reduction_order(self, units: Iterable[int]) -> list[int]:
        """List the units in the reverse order of their first visits, with those that forward did not touch last."""
        return [*reversed(self._first_visits), *(unit for unit in units if unit not in self._first_visits)]

    def restart_backward(self) -> None:
        """Forget an earlier backward, which ran through another part of the graph or retained the graph."""
        self.reached, self._inside = set(), []

    def enter(self, unit: int) -> bool:
        """Note that backward needs a unit's parameters; returns True the first time."""
        new = unit not in self._inside
        if new:
            self._inside.append(unit)
        return new

    def leave_passed(self, call: int, owes: Callable[[int], bool]) -> list[int]:
        """Leave the units whose backward is complete, now that call number `call` is reached, and return them. `owes(unit)` tells
        if gradients of a unit are yet to come.

        Autograd runs ready nodes in the reverse order of their creation, so units that forward used only later will not be read
        again. A complete gradient would not prove this: a parameter may be frozen, or be read through `detach`.
        """
        passed: list[int] = []
        inside, self._inside = self._inside, []
        for unit in inside:
            done = self._first_visits.get(unit, 0) > call and not owes(unit) and unit not in self.held
            (passed if done else self._inside).append(unit)
        return passed


class Prefetcher:
    """Gathers units: each at its use at the latest, and the next ones of the recorded order ahead of their use."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, prefetch: int) -> None:
        """`prefetch` is the number of units that are gathered ahead."""
        self._units = units
        self._mesh = mesh
        self._prefetch = prefetch
        self._orders: dict[str, list[int]] = {}
        self._lasting: dict[str, set[int]] = {}
        self.begin("")

    def begin(self, kind: str) -> None:
        """Begin a pass of a kind, such as training or evaluation; each kind has its own recorded order."""
        self._kind, self._recorded, self._now = kind, self._orders.get(kind, []), list[int]()
        self._on_record = bool(self._recorded)

    def end(self) -> None:
        """End the pass, whose order becomes the record of its kind."""
        if not self._on_record or len(self._now) != len(self._recorded):
            self._orders[self._kind] = self._now

    def need(self, unit: Unit) -> None:
        """Make a unit live, and start to gather the units that are next in the recorded order."""
        place = len(self._now)
        self._now.append(unit.index)
        self._on_record = self._on_record and self._recorded[place : place + 1] == [unit.index]
        if unit.phase is Phase.RESTING:
            self.start(unit, settled=self._on_record)
        # Started before the wait, so that the transfer of the next unit follows without a pause.
        for index in self._recorded[place + 1 : place + 1 + self._prefetch] if self._on_record else ():
            if self._units[index].phase is Phase.RESTING:
                self.start(self._units[index], settled=True)
        if unit.phase is Phase.GATHERING:
            recorder = self._mesh.recorder
            with recorder.range("wait for", unit.name) if recorder.profiling else NOTHING:
                unit.wait()

    def start(self, unit: Unit, *, settled: bool) -> None:
        """Begin to gather a unit; `settled` is True where the order of gathers is a recorded one."""
        # All data-parallel ranks compare the order: replicas sum over one another in the order of reductions.
        if self._mesh.data.size > 1:
            self._mesh.watch.event(Activity.GATHER, unit.index, self._mesh.data.ranks, settled=settled)
        recorder = self._mesh.recorder
        with recorder.range("gather", unit.name) if recorder.profiling else NOTHING:
            unit.gather()

    def keep(self, unit: Unit) -> None:
        """Note that passes of this kind need a unit beyond its calls."""
        self._lasting.setdefault(self._kind, set()).add(unit.index)

    def keeps(self, unit: Unit) -> bool:
        """Return True if an earlier pass of this kind has needed a unit beyond its calls."""
        return unit.index in self._lasting.get(self._kind, ())
