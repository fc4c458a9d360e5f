"""`ProcessSet`: ranks that act together, and their small agreements; `ProcessSets`: named sets, which may be added and removed, as
in Horovod (`hvd.add_process_set`) and MPI (`MPI_Comm_split`)."""

import json
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch.distributed import ReduceOp

from zeromesh.errors import CollectiveError, LayoutError, ZeromeshError, counted, first_lines, ranks_text
from zeromesh.intervals import grouped
from zeromesh.mesh.collectives import COLLECTIVES, CollectiveCall, Launched
from zeromesh.mesh.device_works import DeviceWorks
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_groups import GroupPurpose, MeshGroups, SetGroups
from zeromesh.offload.accelerator import on_accelerator
from zeromesh.rng import seed_of
from zeromesh.telemetry.step_recorder import Collective, CommAccount, StepRecorder
from zeromesh.telemetry.watchdog import Watchdog

_ABSENT = "(absent)"
_SHOWN = 8
_LENGTH = 100  # characters of a value in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSet:
    """The ranks of one group and operations on them, as seen from this rank; all ranks of a set make the same calls in the same
    order. A set of one rank needs no process group. Waits are bounded: a `CollectiveError` names a rank that is gone or late.
    Calls by a rank outside the set, or on a removed set, raise it too."""

    name: str
    ranks: tuple[int, ...]
    index: int
    """This rank's position in `ranks`; -1 when it is not a member."""
    watch: Watchdog
    groups: SetGroups | None
    """The process groups; None for a set of one rank, and on ranks outside the set. A removed set has none."""
    one_host: bool
    works: DeviceWorks | None
    """The supervised collectives of an accelerator, if the groups for parameters and gradients are on one."""
    traffic: CommAccount = field(default_factory=lambda: CommAccount(StepRecorder(), "", 1), compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def member(self) -> bool:
        return self.index >= 0

    @property
    def on_stream(self) -> bool:
        """True if parameters and gradients move on streams of a device."""
        return self.works is not None

    def start(self, kind: Collective, call: CollectiveCall) -> Launched:
        """Start a collective through its row in `COLLECTIVES`; `call` is filled in, and belongs to the collective from then on.
        Raises `CollectiveError` when this rank may not act in the set."""
        groups, size, given = self.require_member(), len(self.ranks), call.given
        on_stream = self.works is not None and call.purpose != "control"
        received = call.received = call.received or (call.out.numel() // size,) * size
        placed = groups is None or (kind is Collective.ALL_GATHER and (not on_stream or len(set(received)) > 1))
        if placed and given is not call.out:
            begin = sum(received[: self.index])
            place = call.out[begin : begin + received[self.index]]
            call.given = place if place.data_ptr() == given.data_ptr() else place.copy_(given)
        if groups is None:
            return Launched(call, (), 0)
        call.sent = call.sent or (given.numel() // size,) * size
        call.ranks, call.index, call.group = self.ranks, self.index, groups[call.purpose]
        counted = call.counts_as or kind
        call.timed = partial(self.traffic.timed, counted)
        wait = self.works.order if self.works is not None and on_stream else self.watch.wait_work
        call.arrive = partial(wait, peers=self.ranks, what=call.what)
        with self.traffic.timed(counted):
            launched = COLLECTIVES[kind, on_stream](call)
        if call.times:
            self.traffic.count(counted, round(call.times * launched.nbytes))
        return launched

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's `values`, in the order of the set; all ranks pass the same number of values."""
        own = torch.tensor(values, dtype=torch.int64)
        return cast("list[list[int]]", self._gather(own, f"exchange over axis {self.name}").tolist())

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Return every rank's `payload`, of any length, in the order of the set."""
        lengths = [row[0] for row in self.gather_integers([len(payload)])]
        own = torch.frombuffer(bytearray(payload.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
        return [row[:length].tobytes() for row, length in zip(self._gather(own, what).numpy(), lengths, strict=True)]

    def gather_json(self, value: Any, what: str) -> list[Any]:
        """Return every rank's `value`, which JSON can express, in the order of the set; tuples become lists."""
        return [json.loads(text) for text in self.gather_bytes(json.dumps(value).encode(), what)]

    def require_same(self, values: Mapping[str, object], error: type[ZeromeshError], *, advice: str) -> None:
        """Compare named values, as text, on all ranks. Raises `error` on each, with what differs, what ranks have, and `advice`."""
        texts = {name: str(value) for name, value in values.items()}
        if len({row[0] for row in self.gather_integers([seed_of(json.dumps(texts))])}) == 1:
            return
        rows = self.gather_json(texts, "values that differ between ranks")
        raise error(f"ranks were given different things: {'; '.join(differences(rows, self.ranks))}. {advice}")

    def all_or_raise(
        self,
        what: str,
        work: Callable[[], Any],
        error: type[ZeromeshError],
        *,
        kept: type[ZeromeshError] | None = None,
        first: bool = False,
    ) -> list[Any]:
        """Return the bytes that `work` returns on each rank, or other values that JSON can express; with `first` only the first
        rank works. No rank continues alone: if the work of one fails, all raise its error, as `kept` if it is one, else `error`."""
        failure: Exception | None = None
        try:
            value = None if first and self.index else work()
            answer = b"+" + value if isinstance(value, bytes) else b"=" + json.dumps(value).encode()
        except Exception as met:  # noqa: BLE001 - it may run foreign code, and all ranks must learn of the error
            failure = met
            mark = b"?" if kept is not None and isinstance(met, kept) else b"-"
            text = str(met) if isinstance(met, ZeromeshError) else f"{what}: {type(met).__name__}: {met}"
            if isinstance(met, OSError):
                text = f"{met.filename or what}: {met.strerror or met}"
            answer = mark + text.encode(errors="backslashreplace")
        answers = [(text[:1], text[1:]) for text in self.gather_bytes(answer, what)]
        failed = {rank: text.decode() for rank, (mark, text) in enumerate(answers) if mark in b"?-"}
        if not failed:
            return [text if mark == b"+" else json.loads(text) for mark, text in answers]
        rank = next((each for each in failed if answers[each][0] == b"?"), min(failed))
        raised = kept if kept is not None and answers[rank][0] == b"?" else error
        more = f" (and {counted(len(failed) - 1, 'more rank')})" if len(failed) > 1 else ""
        same = len(failed) == len(answers) and len(set(failed.values())) == 1
        raise raised(failed[rank] if same or first else f"rank {rank}: {failed[rank]}{more}") from failure

    def all_reduce(self, tensor: torch.Tensor, what: str, op: ReduceOp.RedOpType = ReduceOp.SUM) -> torch.Tensor:
        """Sum a small CPU tensor over the set, in place; bitwise the same on all ranks."""
        counts_as, times = Collective.AGREEMENT, self.size
        call = CollectiveCall(tensor, tensor, what, purpose="control", counts_as=counts_as, times=times, op=op)
        self.start(Collective.ALL_REDUCE, call).wait()
        return tensor

    def all_reduce_max(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Element-wise maximum over the set, in place."""
        return self.all_reduce(tensor, what, ReduceOp.MAX)

    def barrier(self, what: str) -> None:
        """Wait until all ranks of the set have called this; `what` names the wait in errors."""
        self.all_reduce(torch.zeros(1, dtype=torch.int64), what)

    def all_reduce_async(self, tensor: torch.Tensor, what: str) -> Launched:
        """Begin to sum a large tensor over the set, in place, on any device."""
        return self.start(Collective.ALL_REDUCE, CollectiveCall(tensor, tensor, what))

    def broadcast_async(
        self, tensor: torch.Tensor, source: int, what: str, purpose: GroupPurpose = "control"
    ) -> Callable[[], None]:
        """Begin to overwrite a small CPU tensor with that of the rank at position `source`; the returned function waits."""
        flat = tensor.view(-1)
        received = [flat.numel() if index == source else 0 for index in range(self.size)]
        call = CollectiveCall(flat, flat[: received[self.index]], what, received, purpose=purpose)
        return self.start(Collective.BROADCAST, call).wait

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """Overwrite `tensor`, on any device, with that of the rank at position `source`, of equal shape and dtype on all ranks."""
        # A CPU tensor uses the control group where the other groups are an accelerator's.
        purpose: GroupPurpose = "data" if on_accelerator(tensor) or not self.on_stream else "control"
        self.broadcast_async(tensor, source, what, purpose)()
        return tensor

    def require_member(self) -> SetGroups | None:
        """Return the process groups; None for one rank. Raises `CollectiveError` if this rank is not in the set, or it is gone."""
        if self.index < 0 or (self.groups is not None and not self.groups):
            where = f"process set {self.name} (ranks {', '.join(map(str, self.ranks))})"
            outside = f"this rank is not in {where}; only those may act in it"
            raise CollectiveError(outside if self.index < 0 else f"{where} was removed; add it again")
        return self.groups

    def _gather(self, own: torch.Tensor, what: str) -> torch.Tensor:
        everyone = own.new_empty(own.numel() * self.size)
        self.start(Collective.AGREEMENT, CollectiveCall(everyone, own, what, purpose="control")).wait()
        return everyone.view(self.size, own.numel())


def differences(rows: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Return one text for each name whose values differ, such as `run.max_steps is 100 on rank 0, 50 on ranks 1, 2`."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row):
        holders = grouped((row.get(name, _ABSENT), rank) for rank, row in zip(ranks, rows, strict=True))
        if len(holders) > 1:
            short = {value: value if len(value) <= _LENGTH else f"{value[: _LENGTH - 3]}..." for value in holders}
            sides = [f"{short[value]} on {ranks_text(where, _SHOWN)}" for value, where in holders.items()]
            found.append(f"{name} is {', '.join(sides)}")
    return first_lines(found, _SHOWN)


AsSet = Callable[[str, tuple[int, ...], SetGroups | None], ProcessSet]  # of a name, ranks, and their process groups

_AGREEMENT = "process sets"
_RESERVED = {"world", "data", _AGREEMENT, *AXES}


class ProcessSets(Mapping[str, ProcessSet]):
    """The process sets of a mesh, by name. Every rank of the world calls each method with the same arguments in the same order,
    and receives the sets, as a member or not. A name is unique: a second set of that name is refused, even with the same ranks.
    Each set has its own process groups, so different ranks and threads may use overlapping sets in different orders; declarations
    use another group. All methods raise `CollectiveError` when ranks call differently, naming them and what each asked for, or a
    rank is gone or late; and `LayoutError`, on all ranks alike, for names and ranks that cannot be."""

    def __init__(self, world: ProcessSet, links: MeshGroups, recorder: StepRecorder, as_set: AsSet) -> None:
        self._world, self._mesh_groups, self._recorder, self._as_set = world, links, recorder, as_set
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
        """Add several sets at once, such as `{"encoder": [0, 1], "decoder": [2, 3]}`: all of them, or none."""
        declared = {name: _numbers(ranks) for name, ranks in sorted(sets.items())}
        with self._lock:
            listed = ", ".join(f"{name!r} of ranks {ranks}" for name, ranks in declared.items())
            self._require_same_call(f"to declare {listed or 'nothing'}")
            return self._add_checked(declared)

    def add(self, ranks: Sequence[int], *, name: str = "") -> ProcessSet:
        """Add the set of these ranks, in this order; the default name is made from the ranks."""
        numbers = _numbers(ranks)
        name = name or f"ranks {', '.join(map(str, numbers))}"
        return self.declare({name: numbers})[name]

    def split(self, colour: int | None, key: int = 0, *, name: str) -> ProcessSet | None:
        """Add one set per colour, named `name` and the colour, in the order of `key`, then rank. The sets of all colours exist by
        name on all ranks. Returns this rank's set; None on a rank without a colour."""
        with self._lock:
            world = self._require_same_call(f"to split the world as {name!r}")
            rows = world.gather_integers([-1 if colour is None else colour, key])
            wrong = [f"rank {rank} gave {row[0]}" for rank, row in enumerate(rows) if row[0] < -1]
            if wrong:
                raise LayoutError(f"split {name}: a colour is an integer from 0, or None; {'; '.join(wrong)}")
            coloured = sorted((rank for rank, row in enumerate(rows) if row[0] >= 0), key=rows.__getitem__)
            found = grouped((f"{name} {rows[rank][0]}", rank) for rank in coloured)
            return self._add_checked(found).get(f"{name} {colour}")

    def remove(self, removed: ProcessSet | str) -> None:
        """Destroy the groups of a set, on all ranks, when it has nothing in flight. Using the set afterwards is an error."""
        name = removed if isinstance(removed, str) else removed.name
        with self._lock:
            self._require_same_call(f"to remove {name!r}")
            if name not in self._sets:
                there = ", ".join(map(repr, self._sets)) or "no others"
                raise LayoutError(f"process set {name!r} cannot be removed: there is none (there are {there})")
            gone = self._sets.pop(name)
            self._recorder.close_account(name)
            self._mesh_groups.leave_named(name)
            if gone.groups is not None:
                gone.groups.clear()

    def _require_same_call(self, call: str) -> ProcessSet:
        """Compare the calls of all ranks; returns the set over which they were compared."""
        if self._agreement is None:
            self._agreement = self._new_set(_AGREEMENT, self._world.ranks)
        advice = "No process set was changed: every rank of the world makes the same calls in the same order, also outside of a set"
        self._agreement.require_same({"the call": call}, CollectiveError, advice=advice)
        return self._agreement

    def _add_checked(self, declared: Mapping[str, Sequence[int]]) -> dict[str, ProcessSet]:
        world = self._world.size
        for name, ranks in declared.items():
            where = f"process set {name!r} of ranks {list(ranks)}"
            if not name or name in _RESERVED or " x " in name:
                raise LayoutError(f"{where}: the name is one of the mesh's own; choose another")
            if name in self._sets:
                there = f"there is one of that name already (ranks {list(self._sets[name].ranks)})"
                raise LayoutError(f"{where}: {there}; remove it, or choose another name")
            if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= rank < world for rank in ranks):
                raise LayoutError(f"{where}: allowed are ranks 0 to {world - 1}, at least one, each at most once")
        made = {name: self._new_set(name, tuple(ranks)) for name, ranks in declared.items()}
        self._sets |= made
        return made

    def _new_set(self, name: str, ranks: tuple[int, ...]) -> ProcessSet:
        purposes: list[GroupPurpose] = ["data"] if self._mesh_groups.works is not None else []
        return self._as_set(name, ranks, self._mesh_groups.create(ranks, purposes, name=name) if len(ranks) > 1 else None)


def _numbers(ranks: Sequence[int]) -> list[int]:
    """Convert ranks to integers; other values become -1, which all ranks refuse later (an error on one would block the others)."""
    return [-1 if isinstance(rank, bool) or not hasattr(rank, "__index__") else operator.index(rank) for rank in ranks]
