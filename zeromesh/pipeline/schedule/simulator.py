"""Checks and times schedules: whether one can run at all, how long it takes, how many activations it keeps. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeromesh.errors import LayoutError
from zeromesh.pipeline.schedule.actions import Action, Kind, Message, PipelineSchedule, received_by, sent_by

Times = Callable[[int, Action], float]
"""Seconds, or any other unit, that an action takes on a rank."""

UNIT_TIMES: Mapping[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
"""A backward takes about as long as two forwards, each of its halves as long as one."""


class ScheduleError(LayoutError):
    """A schedule that cannot be carried out."""


@dataclass(frozen=True, slots=True)
class ActionTime:
    """When an action runs, from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A step of a schedule, simulated or measured. `spans` has one tuple for each rank, in order."""

    spans: tuple[tuple[ActionTime, ...], ...]

    @property
    def duration(self) -> float:
        """How long the step takes, until the last rank has ended."""
        return max((each[-1].end for each in self.spans if each), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(span.end - span.start for span in each) for each in self.spans)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The part of the step that each rank does not compute in, from 0 to 1."""
        return tuple(1 - busy / self.duration if self.duration else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The part of the step that ranks do not compute in, on average."""
        return sum(self.bubbles) / len(self.bubbles)


def peak_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return the most activations that each rank keeps: microbatches of its chunks between forward and the end of backward."""
    peaks = []
    for actions in schedule.actions:
        split = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        last = Kind.BACKWARD_WEIGHT if split else Kind.BACKWARD
        changes = ((action.kind is Kind.FORWARD) - (action.kind is last) for action in actions)
        peaks.append(max(accumulate(changes), default=0))
    return tuple(peaks)


def validate(schedule: PipelineSchedule, *, most_in_flight: int | None = None) -> None:
    """Prove that a schedule can be carried out.

    Every action of training (or, without any backward, of evaluation) occurs once; each comes after what it needs on its own
    rank; no rank waits for ever for another's message, where sends do not block and each rank receives what another sends in the
    order in which that one sends it; with `most_in_flight`, no rank keeps more activations.

    Raises:
        ScheduleError: naming rank and action.
    """
    if len(schedule.actions) != schedule.ranks:
        raise ScheduleError(
            f"{_title(schedule)} has actions for {len(schedule.actions)} ranks instead of {schedule.ranks}"
        )
    for rank, (actions, flying) in enumerate(zip(schedule.actions, peak_in_flight(schedule), strict=True)):
        _check_once(schedule, rank, actions)
        _check_own_order(schedule, rank, actions)
        if most_in_flight is not None and flying > most_in_flight:
            raise ScheduleError(
                f"{_title(schedule)}: rank {rank} keeps activations of {flying} microbatches at once, allowed are {most_in_flight}"
            )
    _run(schedule, lambda _rank, _action: 1.0, 0.0)


def _check_once(schedule: PipelineSchedule, rank: int, actions: Sequence[Action]) -> None:
    """Every action occurs once, and none that does not belong there."""
    kinds = {action.kind for each in schedule.actions for action in each}
    if {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} & kinds:
        kinds |= {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
        if Kind.BACKWARD in kinds:
            raise ScheduleError(f"{_title(schedule)} has backwards both whole and in halves")
    kinds.add(Kind.FORWARD)
    wanted = {
        Action(kind=kind, chunk=chunk, microbatch=number)
        for kind in kinds
        for chunk in range(schedule.chunks)
        for number in range(schedule.microbatches)
    }
    found = Counter(actions)
    strange = [action for action in actions if action not in wanted]
    twice = [action for action in actions if found[action] > 1]
    missing = [action for action in sorted(wanted, key=str) if not found[action]]
    for what, offenders in (("does not exist", strange), ("occurs more than once", twice), ("is missing", missing)):
        if offenders:
            raise ScheduleError(f"{_title(schedule)}: on rank {rank} {offenders[0]} {what}")


_BEFORE = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.BACKWARD_INPUT: Kind.FORWARD,
    Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
}


def _check_own_order(schedule: PipelineSchedule, rank: int, actions: Sequence[Action]) -> None:
    """A microbatch's actions in a chunk come in their order."""
    done: set[Action] = set()
    for action in actions:
        before = _BEFORE.get(action.kind)
        if before is not None:
            needed = Action(kind=before, chunk=action.chunk, microbatch=action.microbatch)
            if needed not in done:
                raise ScheduleError(f"{_title(schedule)}: on rank {rank} {action} comes before {needed}")
        done.add(action)


def simulate(schedule: PipelineSchedule, times: Times | None = None, *, transfer: float = 0.0) -> Timeline:
    """When each action runs, if it takes `times(rank, action)` and a message between ranks `transfer`.

    Without `times` a forward takes 1, a backward 2 and each of its halves 1.

    Raises:
        ScheduleError: when ranks wait for each other for ever.
    """
    return _run(schedule, times or (lambda _rank, action: UNIT_TIMES[action.kind]), transfer)


def _run(schedule: PipelineSchedule, times: Times, transfer: float) -> Timeline:
    """Every rank goes through its actions as soon as it can."""
    arrivals: dict[Message, float] = {}
    """When messages are there; early ones are kept until they are wanted."""
    clocks = [0.0] * schedule.ranks
    spans: list[list[ActionTime]] = [[] for _ in range(schedule.ranks)]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            for action in actions[len(spans[rank]) :]:
                wanted = received_by(schedule, rank, action)
                arrival = 0.0 if wanted is None else arrivals.get(wanted)
                if arrival is None:
                    break
                start = max(clocks[rank], arrival)
                clocks[rank] = start + times(rank, action)
                spans[rank].append(ActionTime(action=action, start=start, end=clocks[rank]))
                message = sent_by(schedule, rank, action)
                if message is not None:
                    arrivals[message] = clocks[rank] + (transfer if message.target != rank else 0.0)
                moved = True
    waits = []
    for rank, (actions, done) in enumerate(zip(schedule.actions, spans, strict=True)):
        if len(done) < len(actions):
            action = actions[len(done)]
            wanted = received_by(schedule, rank, action)
            waits.append(f"rank {rank} for the {wanted} before {action}" if wanted else f"rank {rank} before {action}")
    if waits:
        raise ScheduleError(f"{_title(schedule)}: ranks would wait for ever: {'; '.join(waits)}")
    return Timeline(spans=tuple(map(tuple, spans)))


def _title(schedule: PipelineSchedule) -> str:
    return f"pipeline schedule {schedule.name} of {schedule.ranks} ranks x {schedule.chunks} chunks"
