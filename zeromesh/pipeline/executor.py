"""The executor carries out a rank's actions, with sends and receives between them, in training, evaluation and generation.

Receives are posted ahead in the order in which the neighbour sends, sends go in the background, so both overlap computing.

On a device a message occupies both ends from its launch until the other end has launched it too, so messages launched in
different orders can deadlock. There all ranks launch their messages in one order (`MessageOrder`), each at the end of the action
during which the simulated schedule sends it.
"""

import time
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zeromesh.comm.point_to_point import Channels, Incoming, MessageSpec
from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.pipeline.schedule import (
    Action,
    Kind,
    Message,
    MessageOrder,
    PipelineSchedule,
    Timeline,
    received_by,
    sent_by,
    simulate,
    validate,
)
from zeromesh.telemetry.event_ring import Activity


class StageRunner:
    """Computes actions. Returned tensors are sent on, and arguments were received; at the ends of the pipeline both are empty."""

    def signature(self, microbatch: int) -> Hashable:
        """Return the inputs of activation shapes (the batch's shapes, gradient mode); equal on all ranks."""
        raise NotImplementedError

    def forward(self, chunk: int, microbatch: int, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a microbatch through a chunk. Received tensors require a gradient if one is to be sent back for them."""
        raise NotImplementedError

    def backward(self, chunk: int, microbatch: int, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run backward from the gradients of the forward's outputs; returns those of its inputs; both in order, of tensors that
        require one."""
        raise NotImplementedError

    def backward_input(self, chunk: int, microbatch: int, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run backward, but leave gradients of linear weights to `backward_weight`."""
        raise NotImplementedError

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` has left."""
        raise NotImplementedError


def compute(runner: StageRunner, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run an action of any kind on a runner."""
    if action.kind is Kind.FORWARD:
        return runner.forward(action.chunk, action.microbatch, received)
    if action.kind is Kind.BACKWARD:
        return runner.backward(action.chunk, action.microbatch, received)
    if action.kind is Kind.BACKWARD_INPUT:
        return runner.backward_input(action.chunk, action.microbatch, received)
    runner.backward_weight(action.chunk, action.microbatch)
    return ()


def signature_of(batch: Mapping[str, Any]) -> Hashable:
    """Return a microbatch's signature: its tensors by name, shape and dtype, and the gradient mode."""
    shapes = [
        (name, tuple(value.shape), str(value.dtype))
        for name, value in sorted(batch.items())
        if isinstance(value, torch.Tensor)
    ]
    return torch.is_grad_enabled(), tuple(shapes)


def take_gradient(received: torch.Tensor) -> torch.Tensor:
    """Take and clear the gradient that backward left on a received tensor; zeros if the loss does not depend on it."""
    gradient, received.grad = received.grad, None
    return torch.zeros_like(received) if gradient is None else gradient


_Moment = float | torch.Event
"""A host time in seconds, or an event on a device's stream, as the host runs ahead of the device."""


def _now(device: torch.device) -> _Moment:
    if not is_accelerator(device):
        return time.perf_counter()
    return accelerator.record(accelerator.current_stream(device), timed=True)


def _seconds(marks: Sequence[_Moment]) -> list[float]:
    """Return the seconds from the first mark to each other one."""
    first, last = marks[0], marks[-1]
    if not isinstance(last, float) and not last.query():
        last.synchronize()
    return [
        mark - first if isinstance(mark, float) else first.elapsed_time(mark) / 1000  # type: ignore[operator, union-attr]
        for mark in marks[1:]
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measured times of one run of a schedule on this rank."""

    schedule: PipelineSchedule
    marks: tuple[_Moment, ...]
    """The beginning of the run, then the start and end of each action, without the waiting before the action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubble:
    """The part of a step in which ranks do not compute, from 0 to 1."""

    predicted: float
    """The bubble that follows from the measured time of each kind of action if ranks wait only for messages."""
    measured: float
    timeline: Timeline
    """The measured step of all ranks, each with a clock that begins with its own step."""


class Executor:
    """Runs one rank's part of any schedule. All ranks of `group` run the same schedules in the same order."""

    def __init__(self, group: ProcessSet, channels: Channels) -> None:
        self.group = group
        self._channels = channels
        self._known: dict[PipelineSchedule, tuple[dict[int, list[Message]], MessageOrder | None]] = {}
        """The messages from each neighbour, and on devices the order of launches, by validated schedule."""

    def run(self, schedule: PipelineSchedule, runner: StageRunner) -> Measured:
        """Carry out this rank's part of a schedule.

        Raises:
            LayoutError: for a schedule of another number of ranks, or one that cannot be carried out.
            CollectiveError: when a neighbour is gone or late, or ranks have microbatches of different shapes.
        """
        if schedule.ranks != self.group.size:
            raise LayoutError(f"the schedule is for {schedule.ranks} ranks, the pipeline has {self.group.size}")
        rank = self.group.index
        if schedule.stages == 1:  # A single stage sends nothing and waits for no rank.
            for action in schedule.actions[rank]:
                self.group.watch.begin_microbatch(action.microbatch)
                compute(runner, action, ())
            return Measured(schedule=schedule, marks=())
        if schedule not in self._known:
            validate(schedule)
            order = MessageOrder.of(schedule, rank) if self.group.on_stream else None
            self._known[schedule] = _incoming(schedule, rank), order
        signatures = [runner.signature(number) for number in range(schedule.microbatches)]
        # Shapes that only some ranks remember would end in an abort.
        passed = {"schedule": f"{schedule.name} {schedule.chunks}", "shapes of microbatches": signatures}
        advice = "Every rank of a pipeline must be given the same data"
        self.group.require_same(passed, CollectiveError, advice=advice)
        run = _Run(schedule, rank, *self._known[schedule], runner, signatures, self._channels)
        marks = [_now(self._channels.device)]
        for action in schedule.actions[rank]:
            marks += run.do(action)
        self._channels.settle()
        return Measured(schedule=schedule, marks=tuple(marks))

    def bubble(self, measured: Measured) -> Bubble:
        """Collect the waiting times of all ranks, which call this together; it waits until a device has computed everything."""
        own = [round(1e9 * seconds) for seconds in _seconds(measured.marks)]
        rows = self.group.gather_json(own, "times of the actions of all stages")
        return bubble(measured.schedule, [[value * 1e-9 for value in row] for row in rows])


def bubble(schedule: PipelineSchedule, times: Sequence[Sequence[float]]) -> Bubble:
    """Compute the bubble, predicted and measured. `times` has start and end of each action of each rank, in seconds."""
    own = [row[: 2 * len(actions)] for actions, row in zip(schedule.actions, times, strict=True)]
    starts, ends = ([row[first::2] for row in own] for first in (0, 1))
    timeline = Timeline(actions=schedule.actions, starts=starts, ends=ends)
    kinds: dict[tuple[int, Kind, int], list[float]] = {}
    for rank, each in enumerate(timeline.spans):
        for span in each:
            kinds.setdefault((rank, span.action.kind, span.action.chunk), []).append(span.end - span.start)

    def mean(rank: int, action: Action) -> float:
        durations = kinds[rank, action.kind, action.chunk]
        return sum(durations) / len(durations)

    return Bubble(predicted=simulate(schedule, mean).bubble, measured=timeline.bubble, timeline=timeline)


def _incoming(schedule: PipelineSchedule, rank: int) -> dict[int, list[Message]]:
    incoming: dict[int, list[Message]] = {}
    for source in schedule.neighbours(rank):
        for action in schedule.actions[source]:
            message = sent_by(schedule, source, action)
            if message is not None and message.target == rank:
                incoming.setdefault(source, []).append(message)
    return incoming


_AHEAD = 2
"""The number of a neighbour's messages that are received ahead of their use, which costs memory."""


@dataclass(slots=True)
class _Run:
    schedule: PipelineSchedule
    rank: int
    incoming: Mapping[int, list[Message]]
    order: MessageOrder | None
    """On devices, the order in which all ranks launch messages."""
    runner: StageRunner
    signatures: Sequence[Hashable]
    channels: Channels
    _due: deque[tuple[float, Message]] = field(init=False)
    """On devices, the messages that this rank has not launched yet."""
    _posted: Counter[int] = field(default_factory=Counter)
    """The number of messages of each neighbour that this rank has begun to receive."""
    _consumed: Counter[int] = field(default_factory=Counter)
    _waiting: dict[Message, Incoming] = field(default_factory=dict)
    _here: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], list[MessageSpec]] = field(default_factory=dict)
    """The specs of gradients that the next stage will send back for activations sent to it, by stage and microbatch."""
    _owed: dict[tuple[int, int], list[MessageSpec]] = field(default_factory=dict)
    """The specs of gradients that this rank is to send back for activations it received, by stage and microbatch."""

    def __post_init__(self) -> None:
        self._due = deque(self.order.messages if self.order is not None else ())

    def do(self, action: Action) -> list[_Moment]:
        """Wait for the action's inputs, compute it, and send its outputs; returns its start and end."""
        wanted = received_by(self.schedule, self.rank, action)
        received: Sequence[torch.Tensor] = () if wanted is None else self._take(wanted)
        if self.order is None:
            self._post_ahead()
        self.channels.group.watch.begin_microbatch(action.microbatch)
        self.channels.group.watch.post(Activity.FORWARD if action.kind is Kind.FORWARD else Activity.BACKWARD, 0)
        start = _now(self.channels.device)
        outputs = compute(self.runner, action, received)
        end = _now(self.channels.device)
        del received
        message = sent_by(self.schedule, self.rank, action)
        if message is not None:
            self._send(message, outputs)
        if self.order is None:
            self.channels.advance()
            self._post_ahead()
        else:
            self._post_made(self.order.ends[action])
        return [start, end]

    def _kind(self, message: Message) -> Hashable:
        return message.gradient, message.stage, self.signatures[message.microbatch]

    def _send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        number = message.microbatch
        if not message.gradient:
            self._gradients[message.stage - 1, number] = _differentiable(tensors)
        # Both sides know the shapes of gradients from the activations.
        specs = self._owed.pop((message.stage + 1, number)) if message.gradient else None
        if message.target == message.source:
            self._here[message] = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        else:
            while self._due and self._due[0][1] != message:
                self._post(self._due[0][1].source)
            if self._due:
                self._due.popleft()
            self.channels.send(message.target, self._kind(message), tensors, str(message), specs)

    def _take(self, message: Message) -> list[torch.Tensor]:
        if message.source == message.target:
            tensors = self._here.pop(message)
            self._gradients.pop((message.stage, message.microbatch), None)
        else:
            while message not in self._waiting:
                self._post(self._due[0][1].source if self._due else message.source)
            self._consumed[message.source] += 1
            tensors, specs = self._waiting.pop(message).wait()
            for tensor, spec in zip(tensors, specs, strict=True):
                tensor.requires_grad_(spec.differentiable and not message.gradient)
        if not message.gradient:
            self._owed[message.stage, message.microbatch] = _differentiable(tensors)
        return tensors

    def _post_ahead(self) -> None:
        for source, messages in self.incoming.items():
            end = min(len(messages), self._consumed[source] + _AHEAD)
            while self._posted[source] < end:
                message = messages[self._posted[source]]
                if message.gradient and (message.stage, message.microbatch) not in self._gradients:
                    break
                self._post(source)

    def _post_made(self, moment: float) -> None:
        """Begin to receive the messages that other ranks have sent up to this simulated moment."""
        while self._due and self._due[0][0] <= moment:
            self._post(self._due[0][1].source)

    def _post(self, source: int) -> None:
        message = self.incoming[source][self._posted[source]]
        if self._due:
            self._due.popleft()
        self._posted[source] += 1
        specs = self._gradients.pop((message.stage, message.microbatch)) if message.gradient else None
        self._waiting[message] = self.channels.receive(source, self._kind(message), str(message), specs)


def _differentiable(tensors: Sequence[torch.Tensor]) -> list[MessageSpec]:
    return [MessageSpec.of(tensor) for tensor in tensors if tensor.requires_grad]
