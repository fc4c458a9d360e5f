"""Pipeline schedules as data: each rank's actions in order, a proof that they can run, and a simulation of their time. Pure.

Blocks are cut into `ranks x chunks` stages; chunk c of rank r is stage `c x ranks + r`, so activations run around the ring of
ranks, once for each chunk. A schedule lists the actions of every rank; sends and receives follow from them. Four microbatches on
two ranks, one step of each kind of schedule (F forward, B backward, I and W its halves: gradients of inputs, then of weights):

    gpipe        0  F0 F1 F2 F3          B0 B1 B2 B3
                 1     F0 F1 F2 F3 B0 B1 B2 B3
    1f1b         0  F0 F1    B0 F2 B1 F3 B2    B3
                 1     F0 B0 F1 B1 F2 B2 F3 B3
    zero bubble  0  F0 F1    I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
                 1     F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from itertools import chain, product
from operator import attrgetter, itemgetter, sub
from statistics import fmean
from typing import Literal, get_args

from zeromesh.errors import LayoutError, counted
from zeromesh.intervals import balanced
from zeromesh.settings.keys import ScheduleName


class Kind(Enum):
    """The kinds of work on a microbatch in a chunk."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """A backward that computes the gradients of the chunk's inputs, and leaves those of linear weights to `BACKWARD_WEIGHT`."""
    BACKWARD_WEIGHT = "W"

    @property
    def direction(self) -> int:
        """The offset of the stage that receives the action's result: 1 for the next, -1 for the previous stage, 0 for none."""
        return {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: 0}.get(self, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action of a rank: work of a `kind` in one of its chunks for one microbatch."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """The actions of each rank, in order. `validate` checks them, the constructor does not."""

    name: str
    ranks: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...] = field(hash=False)
    """One tuple for each rank, left out of the hash, which would take too long at each lookup of a schedule."""

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def __str__(self) -> str:
        return f"pipeline schedule {self.name} of {counted(self.ranks, 'rank')} x {counted(self.chunks, 'chunk')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message that an action sends to the rank of the next stage (activations) or of the previous stage (gradients)."""

    source: int
    target: int
    stage: int
    microbatch: int
    gradient: bool

    def __str__(self) -> str:
        return f"{'gradients' if self.gradient else 'activations'} of microbatch {self.microbatch} for stage {self.stage}"


def message_of(schedule: PipelineSchedule, rank: int, action: Action, *, received: bool = False) -> Message | None:
    """Return the message that an action sends or awaits (`received`), also of this rank; None at ends and for weight gradients."""
    ranks, step = schedule.ranks, action.kind.direction
    stage = action.chunk * ranks + rank
    source, target = (stage - step, stage) if received else (stage, stage + step)
    if not step or not 0 <= min(source, target) <= max(source, target) < schedule.stages:
        return None
    ends = {"source": source % ranks, "target": target % ranks}
    return Message(**ends, stage=target, microbatch=action.microbatch, gradient=step < 0)


@lru_cache(maxsize=16, typed=True)
def make_schedule(name: ScheduleName | Literal["forward"], *, ranks: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Make the schedule called `name`. gpipe runs all forwards, then all backwards, with all microbatches in flight (Huang et
    al., "GPipe", 2019). 1f1b runs forwards until the last rank can begin backwards, then one of each in turn, with at most
    `ranks - r` microbatches in flight on rank r (Narayanan et al., "PipeDream", 2019, flushed at the end of a step).
    interleaved does the same with several chunks per rank, so that the bubble is `chunks` times smaller (Narayanan et al.,
    "Efficient large-scale language model training on GPU clusters", 2021). zero_bubble runs backward in halves; weight
    gradients, which no other rank waits for, fill the bubble of 1f1b, with at most `ranks` microbatches in flight (ZB-H1 of Qi
    et al., "Zero bubble pipeline parallelism", 2023). forward runs forwards alone, for evaluation or one generated token;
    chunks take turns as in interleaved. Raises `LayoutError` for an unknown name, a number below 1, or chunks it cannot take."""
    if name not in (*get_args(ScheduleName), "forward"):
        raise LayoutError(f"pipeline schedule {name!r}: allowed are {', '.join(get_args(ScheduleName))}")
    if chunks != 1 and name not in ("interleaved", "forward"):
        raise LayoutError(f"pipeline schedule {name} has one chunk per rank, got {chunks}; take interleaved for more")
    for what, number in (("ranks", ranks), ("chunks per rank", chunks), ("microbatches", microbatches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise LayoutError(f"a pipeline schedule has at least 1 of {what}, got {number!r}")
    # Microbatches go through chunks in rounds: none below `ranks`, since a smaller one would wait for itself at each chunk, and
    # larger ones first, so that no later round overtakes them.
    rounds = balanced(microbatches, max(1, microbatches // ranks))
    turns = [(chunk, number) for each in rounds for chunk in range(chunks) for number in range(each.start, each.end)]
    forwards = [Action(kind=Kind.FORWARD, chunk=chunk, microbatch=number) for chunk, number in turns]
    backwards, weights = (
        [Action(kind=kind, chunk=chunks - 1 - chunk, microbatch=number) for chunk, number in turns]
        for kind in (Kind.BACKWARD_INPUT if name == "zero_bubble" else Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    )

    def actions(rank: int) -> Iterator[Action]:
        if name == "forward":
            return iter(forwards)
        if name == "gpipe":
            return chain(forwards, backwards)
        # The last rank begins backward when the first round has reached its last chunk. Then a forward and a backward come in turn.
        ahead = min(len(forwards), (chunks - 1) * rounds[0].length + (2 if chunks > 1 else 1) * (ranks - 1 - rank))
        in_turn = chain(*zip(forwards[ahead:], backwards, strict=False))
        alternating = chain(forwards[:ahead], in_turn, backwards[len(forwards) - ahead :])
        return _with_weights(alternating, weights, rank) if name == "zero_bubble" else alternating

    actions_of_ranks = tuple(tuple(actions(rank)) for rank in range(ranks))
    return PipelineSchedule(name=name, ranks=ranks, chunks=chunks, microbatches=microbatches, actions=actions_of_ranks)


def _with_weights(actions: Iterator[Action], weights: Sequence[Action], rank: int) -> Iterator[Action]:
    """Insert the actions `weights` into zero-bubble `actions`: on rank r each comes as soon as more than r of them have waited."""
    later, due = iter(weights), 0
    for action in actions:
        yield action
        due += action.kind is Kind.BACKWARD_INPUT
        if due > rank:
            due -= 1
            yield next(later)
    yield from later


Times = Callable[[int, Action], float]  # returns the time of an action on a rank, in seconds or any other unit
UNIT_TIMES: Mapping[Kind, float] = dict.fromkeys(Kind, 1.0) | {Kind.BACKWARD: 2.0}
"""Relative times: a backward takes about as long as two forwards, and each of its halves as long as one."""


class ScheduleError(LayoutError):
    """A pipeline schedule that cannot be carried out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A step of a schedule, simulated or measured: each rank's actions, in order, with their starts and ends."""

    actions: Sequence[Sequence[Action]]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]

    @property
    def duration(self) -> float:
        """The time of the step, until the last rank has ended."""
        return max((each[-1] for each in self.ends if each), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The part of the step in which each rank is idle, from 0 to 1."""
        duration = self.duration
        busy = [sum(map(sub, ends, starts)) for starts, ends in zip(self.starts, self.ends, strict=True)]
        return tuple(1 - each / duration if duration else 0.0 for each in busy)

    @property
    def bubble(self) -> float:
        """The part of the step in which ranks are idle, on average."""
        return fmean(self.bubbles)


_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.BACKWARD_INPUT: Kind.FORWARD, Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT}
"""The kind of action (value) that has to precede another kind (key) on the same microbatch in the same chunk."""


def validate(schedule: PipelineSchedule) -> Timeline:
    """Prove that a schedule can be carried out, and return its simulated times: every action of training (of evaluation, without a
    backward) occurs once, and no rank waits for ever, if sends do not block and messages keep order. Raises `ScheduleError`."""
    if len(schedule.actions) != schedule.ranks:
        raise ScheduleError(f"{schedule} has actions of {counted(len(schedule.actions), 'rank')}, not {schedule.ranks}")
    halves = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    kinds = {Kind.FORWARD, *map(attrgetter("kind"), chain(*schedule.actions))}
    if kinds & halves:
        kinds |= halves
        if Kind.BACKWARD in kinds:
            raise ScheduleError(f"{schedule} has backwards both whole and in halves")
    parts = product(kinds, range(schedule.chunks), range(schedule.microbatches))
    wanted = Counter(Action(kind=kind, chunk=chunk, microbatch=number) for kind, chunk, number in parts)
    proven: list[int] = []
    for rank, actions in enumerate(schedule.actions):
        # Most schedules share the same objects on all ranks, and identities compare faster than values.
        objects, proven = proven, sorted(map(id, actions))
        if objects == proven:
            continue
        given = Counter(actions)
        for offenders, what in ((given - wanted, "occurs once too often"), (wanted - given, "is missing")):
            if offenders:
                raise ScheduleError(f"{schedule}: on rank {rank} {min(offenders, key=str)} {what}")
    return simulate(schedule)


def simulate(schedule: PipelineSchedule, times: Times | None = None, *, transfer: float = 0.0) -> Timeline:
    """Simulate a schedule whose actions take `times(rank, action)` and whose messages between ranks take `transfer`. Every rank
    runs its actions as soon as possible. Without `times`, a forward takes 1, a backward 2 and each of its halves 1. Raises
    `ScheduleError` when ranks wait for each other, or for an action that comes later, for ever."""
    starts, ends = ([list[float]() for _ in range(schedule.ranks)] for _ in range(2))
    arrivals: dict[int, float] = {}
    times = times or (lambda _rank, action: UNIT_TIMES[action.kind])
    spans = zip(starts, ends, strict=True)
    runs = [_run_rank(schedule, rank, times, transfer, arrivals, each) for rank, each in enumerate(spans)]
    before = -1
    while before < (before := sum(map(len, ends))):
        for run in runs:
            next(run, None)
    waits = []
    for rank, (actions, ended) in enumerate(zip(schedule.actions, ends, strict=True)):
        if len(ended) < len(actions):
            action = actions[len(ended)]
            earlier = replace(action, kind=_BEFORE.get(action.kind, action.kind))
            lacks = earlier != action and earlier not in actions[: len(ended)]
            needed = earlier if lacks else message_of(schedule, rank, action, received=True)
            waits.append(f"rank {rank} for the {needed} before {action}")
    if waits:
        raise ScheduleError(f"{schedule}: ranks would wait for ever: {'; '.join(waits)}")
    return Timeline(actions=schedule.actions, starts=starts, ends=ends)


def _run_rank(
    schedule: PipelineSchedule,
    rank: int,
    times: Times,
    transfer: float,
    arrivals: dict[int, float],
    spans: tuple[list[float], list[float]],
) -> Iterator[None]:
    """Run a rank's actions, and append starts and ends to `spans`; yields while it waits for a message, and stops at an action that
    can never run. A message in `arrivals` is `stage * microbatches + microbatch` of its receiver, complemented for gradients."""
    ranks, number, last = schedule.ranks, schedule.microbatches, (schedule.stages - 1) * schedule.microbatches
    forward, backward_input, backward_weight = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    (starts, ends), delay, clock, done = spans, transfer if ranks > 1 else 0.0, 0.0, set[int]()
    wanted: int | None
    sent: int | None
    for action in schedule.actions[rank]:
        kind, at = action.kind, (action.chunk * ranks + rank) * number + action.microbatch
        if kind is forward:
            wanted, sent = (at if at >= number else None), (at + number if at < last else None)
            done.add(at)
        elif (~at if kind is backward_weight else at) not in done:
            return
        elif kind is backward_weight:
            wanted = sent = None
        else:
            wanted, sent = (~at if at < last else None), (~(at - number) if at >= number else None)
            if kind is backward_input:
                done.add(~at)
        if wanted is not None:
            while wanted not in arrivals:
                yield
            arrival = arrivals[wanted]
            if arrival > clock:  # `max` would take as long as all else together
                clock = arrival
        starts.append(clock)
        clock += times(rank, action)
        ends.append(clock)
        if sent is not None:
            arrivals[sent] = clock + delay


@lru_cache(maxsize=16)
def message_order(schedule: PipelineSchedule, rank: int) -> tuple[list[tuple[float, Message]], dict[Action, float]]:
    """Return a rank's part of one global order of messages, in which each rank can launch its sends and receives: the messages with
    their simulated send times under `UNIT_TIMES`, and the simulated ends of the rank's actions. A rank has computed each send
    before messages of a later moment can arrive, so no rank waits for ever if all follow the order. Raises as `validate` does."""
    ends = validate(schedule).ends
    messages: list[tuple[float, int, Message]] = []
    for source in {(rank - 1) % schedule.ranks, rank, (rank + 1) % schedule.ranks}:
        for action, end in zip(schedule.actions[source], ends[source], strict=True):
            message = message_of(schedule, source, action)
            if message is not None and source != message.target and rank in (source, message.target):
                messages.append((end, source, message))
    messages.sort(key=itemgetter(0, 1))  # Among messages of one moment, that of the lower rank is first.
    return [(end, message) for end, _, message in messages], dict(zip(schedule.actions[rank], ends[rank], strict=True))
