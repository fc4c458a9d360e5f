"""The checks that follow forward: entries of backward into units, and parameters that were changed in place.

`UnitCalls` reads autograd's graph. The nodes of a unit's call have sequence numbers between those at its begin and its end, and
an edge from any other node to one of these is an entry. Outputs of calls are hooked. Tensors that a block keeps as attributes,
puts into objects of unknown classes, or makes under `vmap` give entries without a hook, where backward would read parameters that
were not gathered.

`InplaceWrites` accepts in-place changes of parameters that take effect as in a plain loop, and refuses those that would be lost.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from zeromesh.errors import PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.units.unit import Bucket, Phase, Unit

Edge = tuple[Node, int]
"""An output of an autograd node: the node and the output's number."""
_KINDS = 16
"""The most kinds of calls of a unit that are checked; a block whose graph differs every time is trusted afterwards."""
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Returns the sequence number of the next node of autograd's graph."""
_VIEWS = frozenset(
    """
    AliasBackward0 AsStridedBackward0 DetachBackward0 DiagonalBackward0 ExpandBackward0 PermuteBackward0 ReshapeAliasBackward0
    SelectBackward0 SliceBackward0 SplitBackward0 SqueezeBackward0 TBackward0 TransposeBackward0 UnbindBackward0 UnfoldBackward0
    UnsqueezeBackward0 ViewBackward0
    """.split()  # noqa: SIM905 - a table of words
)
_COPIES = frozenset({"CloneBackward0"})


class UnitCall(NamedTuple):
    """A call of a unit in forward: the sequence numbers of its nodes, [first, end), and the edges that have hooks."""

    unit: int
    first: int
    end: int
    hooked: frozenset[Edge]


class BackwardEntry(NamedTuple):
    """An edge without a hook. `parameter` is set where the tensor read there is a view of a parameter, and not a result."""

    unit: int
    parameter: torch.Tensor | None


class UnitCalls:
    """The calls in a microbatch's forward whose kind was not seen before."""

    def __init__(self) -> None:
        self._seen: dict[int, set[tuple[int, int]]] = {}
        self._begun: list[tuple[int, int]] = []
        self._new: list[UnitCall] = []

    def reset(self) -> None:
        """Begin a pass."""
        self._begun = []
        self._new = []

    def begin(self, unit: int) -> None:
        """Begin a call of a unit."""
        self._begun.append((unit, sequence_number()))

    def end(self, unit: int, hooked: Sequence[torch.Tensor]) -> bool:
        """End a call of a unit, whose outputs `hooked` have hooks; returns True if the call is of a new kind."""
        first = end = sequence_number()
        while self._begun:  # Calls inside it may have ended with an exception.
            begun, first = self._begun.pop()
            if begun == unit:
                break
        seen = self._seen.setdefault(unit, set())
        kind = (end - first, len(hooked))
        if end == first or kind in seen or len(seen) >= _KINDS:
            return False
        seen.add(kind)
        edges = frozenset((each.grad_fn, each.output_nr) for each in hooked if each.grad_fn is not None)
        self._new.append(UnitCall(unit=unit, first=first, end=end, hooked=edges))
        return True

    def entrances(self, roots: Iterable[Edge]) -> list[BackwardEntry]:
        """List the entries into the new calls, in the graph behind `roots`, where backward begins."""
        new, self._new = self._new, []
        return find_entrances(roots, new) if new else []


def find_entrances(roots: Iterable[Edge], calls: Sequence[UnitCall]) -> list[BackwardEntry]:
    """List the edges without a hook that lead from outside into the nodes of calls."""
    calls = sorted(calls, key=lambda call: call.first)
    firsts = [call.first for call in calls]
    entries: dict[Edge, BackwardEntry] = {}
    stack: list[tuple[int, Edge]] = [(-1, root) for root in roots]
    visited: set[Node] = set()
    while stack:
        before, edge = stack.pop()
        node: Any = edge[0]
        place = bisect_right(firsts, node._sequence_nr()) - 1
        inside = place if place >= 0 and node._sequence_nr() < calls[place].end else -1
        if inside not in (-1, before) and not _hooked(edge, calls[inside]):
            entries.setdefault(edge, BackwardEntry(unit=calls[inside].unit, parameter=_viewed(node)))
        if node not in visited:
            visited.add(node)
            stack += [(inside, each) for each in node.next_functions if each[0] is not None]
    return list(entries.values())


def _hooked(edge: Edge, call: UnitCall) -> bool:
    """Return True if a hook runs before backward reads a parameter: on the edge, or on that of a viewed or copied tensor."""
    while edge not in call.hooked:
        node = edge[0]
        if node.name() not in _VIEWS | _COPIES or len(node.next_functions) != 1 or node.next_functions[0][0] is None:
            return False
        edge = (node.next_functions[0][0], node.next_functions[0][1])
    return True


def _viewed(node: Any) -> torch.Tensor | None:
    """The leaf that a node's output is a view of, if all nodes up to the leaf are views."""
    while node.name() in _VIEWS and len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    variable: torch.Tensor | None = getattr(node, "variable", None)
    return variable


_FIRST = 2
"""The number of first forwards of each unit in which parameter values are compared."""


class InplaceWrites:
    """Detects parameters that were changed in place. Version counters are compared in every pass. Digests of values, which show
    writes through `.data` too, are compared in the first two forwards of each unit, then of one unit in turn. Parameters that are
    read between steps are compared too, and from then on those whose counters have risen without a change."""

    def __init__(self, mesh: Mesh) -> None:
        self._alone = mesh.data.size == 1
        self._forwards = 0
        self._calls: Counter[int] = Counter()

    def look_at(self, unit: Unit, units: int) -> None:
        """Record the values of a unit that is about to run forward, if it is the unit's turn among `units` units."""
        self._calls[unit.index] += 1
        if self._calls[unit.index] <= _FIRST or self._forwards % units == unit.index:
            self.refuse_in_pass([unit])  # Compare the values noted before the unit's earlier call.
            unit.note_values()

    def refuse_in_pass(self, units: Iterable[Unit]) -> None:
        """Raise `PhaseError` if forward has changed a parameter, since ranks would train different weights."""
        for unit, name in _written(units):
            self._refuse(unit, name)

    def unread(self, units: Iterable[Unit]) -> list[tuple[Unit, Bucket, torch.Tensor]]:
        """List the comparisons on a device that the host has not read yet, as scalars to be passed to `refuse_changed`."""
        buckets = ((unit, bucket) for unit in units for bucket in unit.buckets)
        return [(unit, bucket, bucket.first_changed) for unit, bucket in buckets if bucket.first_changed is not None]

    def refuse_changed(self, unit: Unit, bucket: Bucket, first: int) -> None:
        """Raise as `refuse_in_pass` when a comparison has shown a changed parameter; `first` is its number in its bucket."""
        bucket.first_changed = None
        if first < len(bucket.parameters):
            self._refuse(unit, bucket.layout.slots[first].spec.fqn)

    def _refuse(self, unit: Unit, name: str) -> None:
        if not (self._alone and unit.keeps_writes):
            raise PhaseError(
                f"parameter {name} of unit {unit.name} was changed in place during a pass over the model, as by "
                "Embedding(max_norm=), averaged codebooks, clamped or rescaled weights; ranks would then have different weights, "
                "or the change would be lost. Compute a changed copy in forward, or keep these values in a buffer"
            )

    def end_forward(self, units: Iterable[Unit]) -> None:
        """End a training forward; raises as `refuse_in_pass`."""
        self._forwards += 1
        self.refuse_in_pass(units)

    def refuse_between_passes(self, units: Iterable[Unit]) -> None:
        """Raise `PhaseError` when a parameter was changed since the last update in a way that the next update would lose."""
        for unit, name in _written(units):
            if not unit.keeps_writes:
                raise PhaseError(
                    f"parameter {name} was changed in place between steps, and the change would be lost: the optimizer updates "
                    "master weights, of which the model's parameters are copies. Change it before training"
                )


def _written(units: Iterable[Unit]) -> list[tuple[Unit, str]]:
    # All buckets are asked, since each records its finding.
    names = [(unit, bucket.written()) for unit in units if unit.phase is Phase.LIVE for bucket in unit.buckets]
    return [(unit, name) for unit, name in names if name is not None]
