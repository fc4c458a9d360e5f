"""The executor carries out a rank's actions. Sends go in the background, and a receive begins where the simulated schedule sends
the message, so both overlap computing. All ranks launch their messages in one order (`message_order`): on a device a message
occupies both ends until both have launched it, so messages launched in different orders could deadlock."""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

import torch

from zeromesh.comm.point_to_point import Channels, Incoming, MessageSpec
from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.offload.accelerator import Moment, now, seconds_between
from zeromesh.pipeline import schedule as schedules
from zeromesh.pipeline.schedule import Action, Kind, Message, PipelineSchedule, Timeline, message_of
from zeromesh.telemetry.status_board import Activity


class StageRunner(Protocol):
    """Computes the actions of a schedule for this rank, such as forwards and backwards of its stages."""

    def signature(self, microbatch: int) -> Hashable:
        """Return all that activation shapes depend on (shapes of the batch, gradient mode); it is equal on all ranks."""

    def run(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run an action on the tensors that its rank received for it; returns those to send on. Both may be empty. A forward
        runs a microbatch through a chunk; received tensors require a gradient if one is to be sent back for them. A backward
        starts from the gradients of the forward's outputs and returns those of its inputs, both in order, of tensors that
        require one; that of inputs alone leaves gradients of linear weights to the action for weights."""


def signature_of(batch: Mapping[str, Any]) -> Hashable:
    """Return a microbatch's signature: its tensors by name, shape and dtype, and the gradient mode."""
    tensors = [(name, value) for name, value in sorted(batch.items()) if isinstance(value, torch.Tensor)]
    return torch.is_grad_enabled(), tuple((name, tuple(value.shape), str(value.dtype)) for name, value in tensors)


def take_gradient(received: torch.Tensor) -> torch.Tensor:
    """Take and clear the gradient that backward left on a received tensor; zeros if the loss does not depend on it."""
    gradient, received.grad = received.grad, None
    return torch.zeros_like(received) if gradient is None else gradient


class Executor:
    """Runs one rank's part of any schedule. All ranks of the channels' group run the same schedules in the same order."""

    def __init__(self, channels: Channels) -> None:
        self.group, self._channels = channels.group, channels

    def run(self, schedule: PipelineSchedule, runner: StageRunner) -> list[Moment]:
        """Carry out this rank's part of a schedule. Returns the beginning of the run, then the start and end of each action,
        without the waiting before it. Raises `LayoutError` for a schedule that cannot be carried out here, and `CollectiveError`
        when a neighbour is gone or late, or ranks have microbatches of different shapes."""
        if schedule.ranks != self.group.size:
            raise LayoutError(f"the schedule is for {schedule.ranks} ranks, the pipeline has {self.group.size}")
        rank = self.group.index
        messages, ends = schedules.message_order(schedule, rank)
        signatures = [runner.signature(number) for number in range(schedule.microbatches)]
        # If only some ranks knew the shapes from an earlier step, the others would wait for specs that nobody sends.
        passed = {"schedule": f"{schedule.name} {schedule.chunks}", "shapes of microbatches": signatures}
        self.group.require_same(passed, CollectiveError, advice="Every rank of a pipeline must be given the same data")
        run = _Run(schedule, rank, deque(messages), ends, runner, signatures, self._channels)
        marks = [now(self._channels.device)]
        for action in schedule.actions[rank]:
            marks += run.do(action)
        self._channels.wait_for_sends()
        return marks

    def timelines(self, schedule: PipelineSchedule, marks: Sequence[Moment]) -> tuple[Timeline, Timeline]:
        """Return the predicted and measured timeline of a run, from the `marks` that `run` has returned here. All ranks call this
        together; it waits until the device has computed all actions."""
        first, *others = marks
        if not isinstance(others[-1], float) and not others[-1].query():
            others[-1].synchronize()
        own = [seconds_between(mark, first) for mark in others]
        return timelines(schedule, self.group.gather_json(own, "times of the actions of all stages"))


def timelines(schedule: PipelineSchedule, times: Sequence[Sequence[float]]) -> tuple[Timeline, Timeline]:
    """Return the predicted and measured timeline of a step. `times` has start and end of each action of each rank, in seconds since
    the rank began. Predicted is a simulation in which each kind of action takes its measured mean time, and messages take none."""
    starts, ends = ([row[first::2] for row in times] for first in (0, 1))
    kinds: dict[tuple[int, Kind, int], list[float]] = {}
    for rank, spans in enumerate(zip(schedule.actions, starts, ends, strict=True)):
        for action, start, end in zip(*spans, strict=True):
            kinds.setdefault((rank, action.kind, action.chunk), []).append(end - start)
    predicted = schedules.simulate(schedule, lambda rank, action: fmean(kinds[rank, action.kind, action.chunk]))
    return predicted, Timeline(actions=schedule.actions, starts=starts, ends=ends)


@dataclass(slots=True)
class _Run:
    schedule: PipelineSchedule
    rank: int
    unlaunched: deque[tuple[float, Message]]
    """The messages that this rank has not launched yet, each with its simulated send time, in the order of launches."""
    ends: Mapping[Action, float]
    runner: StageRunner
    signatures: Sequence[Hashable]
    channels: Channels
    _waiting: dict[Message, Incoming] = field(default_factory=dict)
    _to_self: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], list[MessageSpec]] = field(default_factory=dict)
    """The specs of the gradient messages that will follow, by receiving stage and microbatch, from the activations' specs."""

    def do(self, action: Action) -> list[Moment]:
        """Wait for the action's inputs, compute it, and send its outputs; returns its start and end."""
        device, watch = self.channels.device, self.channels.group.watch
        awaited = message_of(self.schedule, self.rank, action, received=True)
        received: list[torch.Tensor] = []
        if awaited is not None:
            if awaited.source == self.rank == awaited.target:
                received = self._to_self.pop(awaited)
            else:
                while awaited not in self._waiting:
                    self._receive_next()
                # No name but `received` refers to a tensor: its memory is free before the outputs are sent.
                received = [
                    tensor.requires_grad_(spec.differentiable and not awaited.gradient)
                    for tensor, spec in zip(*self._waiting.pop(awaited).wait(), strict=True)
                ]
            if not awaited.gradient:
                self._specs(awaited, received)
        if not self.channels.group.on_stream:  # There a receive would hold up the send of this action.
            self._receive(self.ends[action])
        watch.begin_microbatch(action.microbatch)
        watch.post(Activity.FORWARD if action.kind is Kind.FORWARD else Activity.BACKWARD, 0)
        start = now(device)
        outputs = self.runner.run(action, received)
        end = now(device)
        del received
        if (message := message_of(self.schedule, self.rank, action)) is not None:
            known = self._specs(message, outputs)
            if message.target == message.source:
                self._to_self[message] = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
            else:
                while self.unlaunched[0][1] != message:
                    self._receive_next()
                self.unlaunched.popleft()
                self.channels.send(message.target, self._kind(message), outputs, str(message), known)
        self._receive(self.ends[action])
        self.channels.advance()
        return [start, end]

    def _kind(self, message: Message) -> Hashable:
        return message.gradient, message.stage, self.signatures[message.microbatch]

    def _specs(self, message: Message, activations: Sequence[torch.Tensor] = ()) -> list[MessageSpec] | None:
        """Return the specs recorded for a gradient message, None if there are none. For a message of `activations`, record the
        specs of the gradients that will be sent back for them, and return None."""
        if message.gradient:
            return self._gradients.pop((message.stage, message.microbatch), None)
        specs = [MessageSpec.of(tensor) for tensor in activations if tensor.requires_grad]
        self._gradients[message.stage - 1, message.microbatch] = specs
        return None

    def _receive(self, moment: float) -> None:
        """Launch the receives of all messages whose simulated send time is at most `moment`."""
        while self.unlaunched and self.unlaunched[0][0] <= moment and self.unlaunched[0][1].source != self.rank:
            self._receive_next()

    def _receive_next(self) -> None:
        _, message = self.unlaunched.popleft()
        kind, specs = self._kind(message), self._specs(message) if message.gradient else None
        self._waiting[message] = self.channels.receive(message.source, kind, str(message), specs)
