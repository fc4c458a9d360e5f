"""Process sets beside the axes: declared up front, split by colour, or added and removed while a run goes on.

As in Horovod (`hvd.add_process_set`) and MPI (`MPI_Comm_split`): every rank of the world makes the same call, in the same order,
and gets the set, whether it is in it or not. What each of them said is compared before anything is made, so that a set which two
ranks declare differently is refused on all of them, by name.

Each set has process groups of its own: what happens in one never waits for another, so sets that overlap may be used in
different orders by different ranks and threads, as far as the program itself would end. Calls on one set are made in one order
by all its ranks. Declarations have a group of their own as well, and go on beside collectives of other threads.
"""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_groups import MeshGroups, SetGroups
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.telemetry.step_recorder import StepRecorder

AsSet = Callable[[str, tuple[int, ...], SetGroups | None], ProcessSet]
"""Makes a set of a name, ranks, and the link between them."""

_RESERVED = {"world", "data", *AXES}


class ProcessSets(Mapping[str, ProcessSet]):
    """The process sets of a mesh, by name. Every rank of the world calls each method, with the same arguments, in the same order.

    A name is used once at a time: another set of that name is refused, even of the same ranks. Equal ranks under another name
    are another set, which shares nothing with the first.

    All methods raise:
        CollectiveError: when ranks call differently, naming them and what each said; or a rank is gone or late.
        LayoutError: on all ranks alike, for names and ranks that cannot be.
    """

    def __init__(self, world: ProcessSet, links: MeshGroups, recorder: StepRecorder, as_set: AsSet) -> None:
        self._world = world
        self._links = links
        self._recorder = recorder
        self._as_set = as_set
        self._sets: dict[str, ProcessSet] = {}
        self._lock = threading.Lock()
        self._agreement: ProcessSet | None = None

    def __getitem__(self, name: str) -> ProcessSet:
        return self._sets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sets))

    def __len__(self) -> int:
        return len(self._sets)

    def declare(self, sets: Mapping[str, Sequence[int]]) -> dict[str, ProcessSet]:
        """Several sets at once, for a start: `{"encoder": [0, 1], "decoder": [2, 3]}`. All of them, or none."""
        declared = {name: _numbers(ranks) for name, ranks in sorted(sets.items())}
        with self._lock:
            self._agree({"declares": [[name, ranks] for name, ranks in declared.items()]})
            for name, ranks in declared.items():
                self._check(name, ranks)
            return {name: self._make(name, tuple(ranks)) for name, ranks in declared.items()}

    def add(self, ranks: Sequence[int], *, name: str = "") -> ProcessSet:
        """A set of these ranks, in this order. Without a name it is called after them."""
        numbers = _numbers(ranks)
        name = name or f"ranks {_listed(numbers)}"
        return self.declare({name: numbers})[name]

    def split(self, colour: int | None, key: int = 0, *, name: str) -> ProcessSet | None:
        """The set of all ranks that give this rank's `colour`, called `name` and the colour; ordered by `key`, then by rank.

        None for a rank that gives no colour; the sets of all colours are there by name on all ranks.
        """
        with self._lock:
            rows = self._agree({"splits": name}, [-1 if colour is None else colour, key])
            wrong = [f"rank {rank} gave {row[0]}" for rank, row in enumerate(rows) if row[0] < -1]
            if wrong:
                raise LayoutError(f"split {name}: a colour is an integer from 0, or None; {'; '.join(wrong)}")
            colours = sorted({row[0] for row in rows if row[0] >= 0})
            found = {
                each: tuple(sorted((r for r, row in enumerate(rows) if row[0] == each), key=lambda r: (rows[r][1], r)))
                for each in colours
            }
            for each, ranks in found.items():
                self._check(f"{name} {each}", ranks)
            made = {each: self._make(f"{name} {each}", ranks) for each, ranks in found.items()}
            return None if colour is None else made[colour]

    def remove(self, removed: ProcessSet | str) -> None:
        """Leave the groups of a set, on all ranks, when nothing is in flight in it. A call on it is an error afterwards."""
        name = removed if isinstance(removed, str) else removed.name
        with self._lock:
            self._agree({"removes": name})
            if name not in self._sets:
                raise LayoutError(f"process set {name!r} cannot be removed: there is none ({self._there()})")
            gone = self._sets.pop(name)
            self._recorder.close_account(name)
            if gone.link is not None:
                self._links.cut(gone.link)

    def _agree(self, call: Mapping[str, Any], numbers: Sequence[int] = ()) -> list[list[int]]:
        """Compare what all ranks call; returns the `numbers` that each gives, which may differ."""
        if self._agreement is None:
            self._agreement = self._apart("process sets", self._world.ranks)
        own = json.dumps([call, list(numbers)])
        calls = [json.loads(text) for text in self._agreement.gather_bytes(own.encode(), "agreement on process sets")]
        if any(call_there != call for call_there, _ in calls):
            raise CollectiveError(_disagreement([call_there for call_there, _ in calls]))
        return [row for _, row in calls]

    def _check(self, name: str, ranks: Sequence[int]) -> None:
        world = self._world.size
        where = f"process set {name!r} of ranks {list(ranks)}"
        if not name or name in _RESERVED or " x " in name:
            raise LayoutError(f"{where}: the name is one of the mesh's own; choose another")
        if name in self._sets:
            there = list(self._sets[name].ranks)
            raise LayoutError(
                f"{where}: there is one of that name already (ranks {there}); remove it, or choose another name"
            )
        if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= rank < world for rank in ranks):
            raise LayoutError(f"{where}: allowed are ranks 0 to {world - 1}, at least one, each at most once")

    def _make(self, name: str, ranks: tuple[int, ...]) -> ProcessSet:
        made = self._sets[name] = self._apart(name, ranks)
        return made

    def _apart(self, name: str, ranks: tuple[int, ...]) -> ProcessSet:
        """A set whose groups nobody else uses."""
        return self._as_set(name, ranks, self._links.apart(ranks) if len(ranks) > 1 else None)

    def _there(self) -> str:
        return "there are " + ", ".join(map(repr, self._sets)) if self._sets else "there are no others"


def _numbers(ranks: Sequence[int]) -> list[int]:
    """Plain integers. What is none becomes -1, to be refused where all ranks see it: an error here would leave them waiting."""
    found = []
    for rank in ranks:
        try:
            found.append(-1 if isinstance(rank, bool) else operator.index(rank))
        except TypeError:
            found.append(-1)
    return found


def _disagreement(calls: Sequence[Mapping[str, Any]]) -> str:
    """The error for calls that differ. Equal ones stand together, the most common first."""
    groups: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        groups.setdefault(_call_phrase(call), []).append(rank)
    parts = sorted(groups.items(), key=lambda each: (-len(each[1]), each[1]))
    lines = [f"{'ranks' if ranks[1:] else 'rank'} {_listed(ranks)} {call}" for call, ranks in parts]
    return (
        f"process sets differ between ranks, and none was changed: {'; '.join(lines)}. Every rank of the world makes the same "
        "calls in the same order, also those that are not in the set"
    )


def _call_phrase(call: Mapping[str, Any]) -> str:
    if "declares" in call:
        return "declared " + (", ".join(f"{name!r} of ranks {ranks}" for name, ranks in call["declares"]) or "nothing")
    return f"split the world as {call['splits']!r}" if "splits" in call else f"removed {call['removes']!r}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
