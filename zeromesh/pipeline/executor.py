"""The executor: carries out a rank's actions, with sends and receives between them, in training, evaluation and generation.

Receives are posted ahead in the order in which the neighbour sends, sends go in the background, so both overlap computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

import torch

from zeromesh.comm.point_to_point import Channels, Incoming, MessageSpec
from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.pipeline.schedule.actions import Action, Kind, Message, PipelineSchedule, received_by, sent_by
from zeromesh.pipeline.schedule.simulator import ActionTime, Timeline, simulate, validate
from zeromesh.telemetry.watchdog import Activity, Watchdog


class StageRunner(Protocol):
    """What computes. Tensors that it returns are sent, those that it is given have been received; at the ends there are none."""

    def signature(self, microbatch: int) -> Hashable:
        """What the shapes of activations depend on; equal on all ranks (the shapes of the batch, and whether it trains)."""
        ...

    def forward(self, chunk: int, microbatch: int, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a microbatch through a chunk. Of what is received, tensors that need a gradient require one."""
        ...

    def backward(self, chunk: int, microbatch: int, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """`gradients`: of what forward returned and requires one, in order. Returns those of what it received and requires one."""
        ...

    def backward_input(self, chunk: int, microbatch: int, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The same, with gradients of linear weights left to `backward_weight`."""
        ...

    def backward_weight(self, chunk: int, microbatch: int) -> None: ...


def signature_of(batch: Mapping[str, Any]) -> Hashable:
    """`StageRunner.signature` of a microbatch: its tensors by name, shape and dtype, and whether gradients are wanted."""
    shapes = [
        (name, tuple(value.shape), str(value.dtype))
        for name, value in sorted(batch.items())
        if isinstance(value, torch.Tensor)
    ]
    return torch.is_grad_enabled(), tuple(shapes)


def take_gradient(received: torch.Tensor) -> torch.Tensor:
    """The gradient that backward left at what a stage received, and leaves there no longer; zeros where nothing depends on it."""
    gradient, received.grad = received.grad, None
    return torch.zeros_like(received) if gradient is None else gradient


class _Clock:
    """Marks moments: on the host, or on a device's stream, where the host is ahead of what is computed."""

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda"

    def mark(self) -> float | torch.cuda.Event:
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run of a schedule on this rank. On a device, asking for seconds waits until it has been computed."""

    schedule: PipelineSchedule
    rank: int
    marks: tuple[float | torch.cuda.Event, ...]
    """The beginning, start and end of each action, the end."""

    @property
    def spans(self) -> tuple[ActionTime, ...]:
        """The actions' own time, in seconds since the beginning: not what was waited for before them."""
        began, *inner = self.marks[:-1]
        moments = [_seconds(began, mark) for mark in inner]
        return tuple(
            ActionTime(action=action, start=moments[2 * n], end=moments[2 * n + 1])
            for n, action in enumerate(self.schedule.actions[self.rank])
        )

    @property
    def total(self) -> float:
        """Seconds from beginning to end, when all that was sent is gone."""
        return _seconds(self.marks[0], self.marks[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubble:
    """The part of a step in which ranks do not compute, from 0 to 1."""

    predicted: float
    """From the measured time of each kind of action, if ranks only waited for what they need."""
    measured: float
    timeline: Timeline
    """As measured, of all ranks; each rank's clock begins with its own step."""
    simulated: Timeline


class Executor:
    """Of one rank of a pipeline, for any schedule. All ranks of `group` run the same ones in the same order."""

    AHEAD = 2
    """Messages of a neighbour that are received before they are needed; they take memory."""

    def __init__(self, group: ProcessSet, channels: Channels) -> None:
        self.group = group
        self._channels = channels
        self._plans: dict[PipelineSchedule, _Plan] = {}

    def run(self, schedule: PipelineSchedule, runner: StageRunner) -> Measured:
        """Carry out this rank's part of a schedule.

        Raises:
            LayoutError: for a schedule of another number of ranks, or one that cannot be carried out.
            CollectiveError: when a neighbour is gone or late, or ranks have microbatches of different shapes.
        """
        if schedule.ranks != self.group.size:
            raise LayoutError(f"the schedule is for {schedule.ranks} ranks, the pipeline has {self.group.size}")
        plan = self._plans.get(schedule)
        if plan is None:
            validate(schedule)
            plan = self._plans[schedule] = _Plan(schedule, self.group.index)
        signatures = [runner.signature(number) for number in range(schedule.microbatches)]
        self._agree(schedule, signatures)
        run = _Run(plan, runner, signatures, self._channels, self.AHEAD)
        marks = [run.clock.mark()]
        for action in plan.actions:
            marks += run.do(action, self.group.watch)
        self._channels.settle()
        return Measured(schedule=schedule, rank=self.group.index, marks=(*marks, run.clock.mark()))

    def _agree(self, schedule: PipelineSchedule, shapes: Sequence[Hashable]) -> None:
        """Shapes that one rank remembers and another does not would end in an abort."""
        mine = [schedule.microbatches, crc32(repr((schedule.name, schedule.chunks, shapes)).encode())]
        everyone = self.group.gather_integers(mine)
        if any(each != mine for each in everyone):
            counts = ", ".join(str(each[0]) for each in everyone)
            raise CollectiveError(
                f"ranks {', '.join(map(str, self.group.ranks))} of the pipeline do not run the same microbatches: they have "
                f"{counts} of them, or of other shapes; here {shapes}. Every rank of a pipeline must be given the same data"
            )

    def share(self, sums: torch.Tensor, what: str = "the loss of the last stage") -> torch.Tensor:
        """Sum a small CPU tensor over the pipeline, in place: the losses, which are zero but on the last stage."""
        return self.group.sum_(sums, what)

    def bubble(self, measured: Measured) -> Bubble:
        """What the pipeline has waited, from all ranks' measurements; all ranks call this together."""
        mine = [round(1e9 * value) for span in measured.spans for value in (span.start, span.end)]
        longest = max(row[0] for row in self.group.gather_integers([len(mine)]))
        rows = self.group.gather_integers(mine + [0] * (longest - len(mine)))
        return bubble(measured.schedule, [[value * 1e-9 for value in row] for row in rows])


def bubble(schedule: PipelineSchedule, times: Sequence[Sequence[float]]) -> Bubble:
    """Predicted and measured. `times` has start and end of each action of each rank, in seconds."""
    spans = tuple(
        tuple(ActionTime(action=action, start=row[2 * n], end=row[2 * n + 1]) for n, action in enumerate(actions))
        for actions, row in zip(schedule.actions, times, strict=True)
    )
    timeline = Timeline(spans=spans)
    kinds: dict[tuple[int, Kind, int], list[float]] = {}
    for rank, each in enumerate(spans):
        for span in each:
            kinds.setdefault((rank, span.action.kind, span.action.chunk), []).append(span.end - span.start)

    def mean(rank: int, action: Action) -> float:
        found = kinds[rank, action.kind, action.chunk]
        return sum(found) / len(found)

    simulated = simulate(schedule, mean)
    return Bubble(predicted=simulated.bubble, measured=timeline.bubble, timeline=timeline, simulated=simulated)


class _Plan:
    """A rank's part of a schedule: its actions, and what each neighbour sends it, in order."""

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self.actions = schedule.actions[rank]
        self.incoming: dict[int, list[Message]] = {}
        for source, actions in enumerate(schedule.actions):
            sent = (sent_by(schedule, source, action) for action in actions)
            mine = [message for message in sent if message is not None and message.target == rank != source]
            if mine:
                self.incoming[source] = mine


class _Run:
    """One run of a plan."""

    def __init__(
        self, plan: _Plan, runner: StageRunner, signatures: Sequence[Hashable], channels: Channels, ahead: int
    ) -> None:
        self._plan = plan
        self._runner = runner
        self._signatures = signatures
        self._channels = channels
        self._ahead = ahead
        self.clock = _Clock(channels.device)
        self._posted: dict[int, int] = dict.fromkeys(plan.incoming, 0)
        self._consumed: dict[int, int] = dict.fromkeys(plan.incoming, 0)
        self._waiting: dict[Message, Incoming] = {}
        self._here: dict[Message, list[torch.Tensor]] = {}
        """What this rank sends itself."""
        self._gradients: dict[tuple[int, int], list[MessageSpec]] = {}
        """By stage and microbatch: the gradients that are to come back for what it has sent."""
        self._owed: dict[tuple[int, int], list[MessageSpec]] = {}
        """The same for what it has received."""

    def do(self, action: Action, watch: Watchdog | None) -> list[float | torch.cuda.Event]:
        """Wait for what the action needs, carry it out, send what it makes; returns its start and end."""
        schedule, rank = self._plan.schedule, self._plan.rank
        received: Sequence[torch.Tensor] = ()
        wanted = received_by(schedule, rank, action)
        if wanted is not None:
            received = self._take(wanted)
        self._post_ahead()
        if watch is not None:
            watch.post(Activity.FORWARD if action.kind is Kind.FORWARD else Activity.BACKWARD, 0)
        start = self.clock.mark()
        made = self._compute(action, received)
        end = self.clock.mark()
        del received
        message = sent_by(schedule, rank, action)
        if message is not None:
            self._send(message, made)
        self._channels.advance()
        self._post_ahead()
        return [start, end]

    def _compute(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        runner, chunk, number = self._runner, action.chunk, action.microbatch
        if action.kind is Kind.BACKWARD_WEIGHT:
            runner.backward_weight(chunk, number)
            return ()
        calls: Mapping[Kind, Callable[[int, int, Sequence[torch.Tensor]], Sequence[torch.Tensor]]] = {
            Kind.FORWARD: runner.forward,
            Kind.BACKWARD: runner.backward,
            Kind.BACKWARD_INPUT: runner.backward_input,
        }
        return calls[action.kind](chunk, number, received)

    def _kind(self, message: Message) -> Hashable:
        return message.gradient, message.stage, self._signatures[message.microbatch]

    def _send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        number = message.microbatch
        if not message.gradient:
            self._gradients[message.stage - 1, number] = _differentiable(tensors)
        # Of gradients both sides know the shapes, from what they are the gradients of.
        specs = self._owed.pop((message.stage + 1, number)) if message.gradient else None
        if message.target == message.source:
            self._here[message] = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        else:
            self._channels.send(message.target, self._kind(message), tensors, str(message), specs)

    def _take(self, message: Message) -> list[torch.Tensor]:
        """The tensors of a message, as soon as they are there."""
        if message.source == message.target:
            tensors = self._here.pop(message)
            self._gradients.pop((message.stage, message.microbatch), None)
        else:
            while message not in self._waiting:
                self._post(message.source)
            self._consumed[message.source] += 1
            tensors, specs = self._waiting.pop(message).wait()
            for tensor, spec in zip(tensors, specs, strict=True):
                tensor.requires_grad_(spec.differentiable and not message.gradient)
        if not message.gradient:
            self._owed[message.stage, message.microbatch] = _differentiable(tensors)
        return tensors

    def _post_ahead(self) -> None:
        for source, messages in self._plan.incoming.items():
            end = min(len(messages), self._consumed[source] + self._ahead)
            while self._posted[source] < end and self._can_post(messages[self._posted[source]]):
                self._post(source)

    def _can_post(self, message: Message) -> bool:
        return not message.gradient or (message.stage, message.microbatch) in self._gradients

    def _post(self, source: int) -> None:
        """Begin to receive the next message of a rank."""
        message = self._plan.incoming[source][self._posted[source]]
        self._posted[source] += 1
        specs = self._gradients.pop((message.stage, message.microbatch)) if message.gradient else None
        self._waiting[message] = self._channels.receive(source, self._kind(message), str(message), specs)


def _differentiable(tensors: Sequence[torch.Tensor]) -> list[MessageSpec]:
    return [MessageSpec.of(tensor) for tensor in tensors if tensor.requires_grad]
