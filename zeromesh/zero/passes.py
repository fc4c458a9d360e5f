"""Passes over the model: hooks call `Passes`, which gathers and releases units and reduces their gradients.

    forward     before_forward    gather the unit, unless the recorded order has done so ahead of it, and the next ones
                after_forward     hook its outputs for backward, and release it
    backward    before_backward   leave the units that backward is done with, and gather this one as in forward
                on_gradient       hand a gradient to the reducer, which sums a bucket over ranks once it is complete

Units are gathered at their use at the latest, and ahead of it in the order recorded by an earlier pass of the same kind. A pass
that leaves this order gathers each unit on use, and is recorded anew."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeromesh.errors import PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.optim.optimizer_step import OptimizerStep
from zeromesh.options import ZeroOptions
from zeromesh.rng import Streams, kept_generators
from zeromesh.telemetry.status_board import Activity
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.units.build import BuiltUnits, goes_ahead
from zeromesh.units.unit import Bucket, InplaceWrites, Phase, Unit
from zeromesh.zero.hooks import UnitCalls, on_gradient_of, tensors_in

Tensors = Sequence[torch.Tensor]


class PassMode(Enum):
    """The kind of pass over the model that the engine runs now; IDLE between passes."""

    IDLE = "idle"
    EVALUATION = "evaluation"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(eq=False, slots=True)
class PassProgress:
    """The progress of one microbatch through a chunk of the model on one rank, from its forward to its backward. A unit may be
    called several times: backward reaches the calls in reverse order, and leaves the unit after the first of them."""

    streams: Streams | None = None
    """The microbatch's random number streams; None means that it draws from the global generators."""
    chunk: int = 0
    first: bool = True
    last: bool = True
    """True if this microbatch's backward is the chunk's last in the step; `first` begins the gradient sums."""
    roots: Sequence[GradientEdge] = ()  # the outputs that require a gradient, from which backward starts
    gradients: list[tuple[Bucket, int, torch.Tensor]] = field(default_factory=list)
    """Gradients of parameters that arrived together with those of inputs, and wait for `backward_weight`."""
    outputs: list[GradientEdge] = field(default_factory=list)
    """Those outputs of the latest call of a unit that require a gradient."""
    kept: set[int] = field(default_factory=set)
    """The indices of units that are needed after their calls: they stay live until the pass is over, and during all of backward."""
    reached: set[int] = field(default_factory=set)  # the indices of units whose outputs backward has reached
    in_backward: list[int] = field(default_factory=list)  # the indices of units whose backward is not over
    calls: int = 0
    first_visits: dict[int, int] = field(default_factory=dict)
    """The number of `calls` of units before the first one of each unit."""


class Passes:
    """The passes of one engine, one at a time, called by `Hooks`."""

    readers: ClassVar[tuple[str, str, str]] = "trainer.gathered([{!r}])", "trainer.state_dict()", "trainer.save()"
    """The calls that give a user one whole parameter, all of them, and files with them."""

    def __init__(
        self, built: BuiltUnits, mesh: Mesh, options: ZeroOptions, updater: OptimizerStep, chunks: Sequence[list[Unit]]
    ) -> None:
        self.units, self._chunks, self.mode = built.units, chunks, PassMode.IDLE
        self._mesh, self._recorder, self._options, self._updater = mesh, mesh.recorder, options, updater
        self._in_stages = mesh.shape.divides("blocks")
        """True if pipeline parallelism leaves this rank only some blocks of the model."""
        self._watched_ranks = mesh.peers.ranks if mesh.peers.size > 1 else ()
        self._groups, self._releases = built.groups, built.releases
        self._goes_ahead = [goes_ahead([bucket.layout for bucket in unit.buckets], options) for unit in built.units]
        self._orders: dict[str, list[int]] = {}
        """The order of gathers of the latest pass of each kind, such as training or evaluation."""
        self._kept_units: dict[str, set[int]] = {}  # the units that passes of each kind need beyond their calls
        self._kind, self._recorded, self._gathered = "", list[int](), list[int]()
        self._in_recorded_order = False
        self._direct_call: nn.Module | None = None
        self._calls = UnitCalls()
        self._watched = [bucket for unit in self.units for bucket in unit.buckets if any(bucket.watched)]
        self._watching = False  # True where no module runs that may compute with these
        self.writes = InplaceWrites(alone=mesh.peers.size == 1)
        self._progress = PassProgress()
        self._defers_weights = False
        """True if gradients of parameters are held back until gradients of inputs were sent."""
        self._reads_no_weights = False
        """True if the running backward computes weight gradients from saved tensors, and reads no parameter."""
        self._last_reduce_order: dict[int, list[int]] = {}
        self.on_end: Callable[[], object] = lambda: None  # called when a pass is over
        self.gradients = updater.gradients

    # Training

    def forward(
        self, chunk: int, run: Callable[[], Tensors], streams: Streams | None, *, backward_follows: bool
    ) -> tuple[Tensors, PassProgress]:
        """Run forward of a microbatch through a chunk by `run()`, and return its result. Random numbers come from `streams`; None:
        the global generators. `backward_follows`: its backward follows directly, in the same pass."""
        kind = f"chunk {chunk}" if backward_follows else f"forward of chunk {chunk}"
        self._begin(PassMode.FORWARD, kind, PassProgress(streams, chunk))
        self._watch()
        with self.drawing(streams), torch.enable_grad(), self._recorder.span(StepPhase.FORWARD):
            outputs = run()
            self._end_forward(outputs)
        # Only the edges are kept: activations that were sent need not stay until backward.
        self._progress.roots = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        if not backward_follows:
            self.end()
        return outputs, self._progress

    def _watch(self, *, watching: bool = True) -> None:
        if watching or self._watching:
            self._watching = watching
            for bucket in self._watched:
                bucket.watch(watching)

    def backward(self, forward: PassProgress, gradients: Tensors, *, inputs_only: bool = False) -> None:
        """Run backward of a microbatch from the gradients of its roots. `inputs_only`: run the half that other stages wait for, the
        gradients of inputs, and hold back those of parameters for `backward_weight`."""
        self._enter_backward(forward)
        self._defers_weights = inputs_only
        with kept_generators(), self._recorder.span(StepPhase.BACKWARD):
            (self._make_kept_units_live if inputs_only else self._begin_reducing)()
            self._run_backward(gradients)
            if not inputs_only:
                self._end_reducing()
        self.end()

    def _enter_backward(self, forward: PassProgress) -> None:
        if self.mode is not PassMode.FORWARD or self._progress is not forward:
            self._begin(PassMode.BACKWARD, f"backward of chunk {forward.chunk}", forward)
        self.mode = PassMode.BACKWARD
        self._watch(watching=False)

    def backward_weight(self, forward: PassProgress, run: Callable[[], None]) -> None:
        """Run the other half of backward: `run()` computes the gradients of parameters that are still missing."""
        self._begin(PassMode.BACKWARD, f"weights of chunk {forward.chunk}", forward)
        self._reads_no_weights = True
        with self._recorder.span(StepPhase.BACKWARD):
            self._begin_reducing()
            for bucket, index, gradient in forward.gradients:
                bucket.parameters[index].grad = gradient
                self.gradients.take(bucket, index)
            forward.gradients.clear()
            run()
            self._end_reducing()
        self.end()

    def _run_backward(self, gradients: Tensors) -> None:
        roots, outputs = self._progress.roots, self._progress.outputs
        # The rest of the graph would keep the engine alive through its hooks.
        self._progress.roots, self._progress.outputs = (), []
        if roots:
            torch.autograd.backward(roots, gradients)
            return
        # The loss is a constant, as of a microbatch without targets. This rank gathers and reduces units in the order of its peers:
        # its gradients are zeros, which come from what the model has returned last.
        like = [edge.node._input_metadata[edge.output_nr] for edge in outputs]
        zeros = [torch.zeros(tuple(each.shape), dtype=each.dtype, device=each.device) for each in like]
        torch.autograd.backward(outputs, zeros)

    def _begin_reducing(self) -> None:
        progress, chunk = self._progress, self._progress.chunk
        units, visited = {unit.index for unit in self._chunks[chunk]}, progress.first_visits
        # The reverse order of first visits, with the units that forward did not touch last.
        order = [index for index in (*reversed(visited), *sorted(units - visited.keys())) if index in units]
        known = order == self._last_reduce_order.get(chunk)
        self._last_reduce_order[chunk] = order
        buckets = [bucket for index in order for bucket in self.units[index].trainable]
        reduce = progress.last or not self._options.sums_before_reducing
        self.gradients.begin(buckets, reduce=reduce, first=progress.first, last=progress.last, known_order=known)
        self._make_kept_units_live()

    def _end_reducing(self) -> None:
        self._recorder.next_range(None)
        self.gradients.flush()
        self._updater.finish_units(self._chunks[self._progress.chunk])

    # Methods of every kind of pass

    @contextmanager
    def evaluation(self) -> Iterator["Passes"]:
        with torch.no_grad():
            self._begin(PassMode.EVALUATION, "eval")
            begun = self._mesh.watch.operations_begun
            try:
                yield self
                self.writes.require_unchanged_in_pass(self.units)
                self.end()
            except BaseException as error:
                if self._mesh.watch.operations_begun != begun:
                    self._mesh.fail(error)
                raise

    @contextmanager
    def drawing(self, streams: Streams | None) -> Iterator[None]:
        """Inside the block, forward of one microbatch, random numbers come from `streams`; None: the global generators."""
        before, self._progress.streams = self._progress.streams, streams
        with streams.drawing() if streams is not None else nullcontext():
            yield
        self._progress.streams = before

    def begin_without_root(self) -> None:
        """Prepare the root unit, and keep it live, for a pipeline stage that runs its blocks without calling the root."""
        self._keep_live(self.units[0])
        if self._progress.streams is not None:
            self._progress.streams.begin(self.units[0].name)

    def _begin(self, mode: PassMode, kind: str, progress: PassProgress | None = None) -> None:
        if self._direct_call is not None:
            self.end()  # A user's direct call of the model has raised an error.
        self.require_idle()
        self.mode = mode
        self._progress = progress or PassProgress()
        if mode is not PassMode.BACKWARD:
            self.writes.refuse_between_passes(self.units)
        self._kind, self._recorded, self._gathered = kind, self._orders.get(kind, []), []
        self._in_recorded_order = bool(self._recorded)

    def require_idle(self) -> None:
        """Raise `PhaseError` while a pass is open, other than a user's direct call of the model."""
        if self.mode is not PassMode.IDLE and self._direct_call is None:
            raise PhaseError(f"a pass cannot begin during {self.mode.value}")

    def end(self) -> None:
        """End the running pass, even after an error: release units and keep the order of gathers."""
        self._recorder.end_ranges()
        for unit in self.units if self._releases else ():
            unit.leave()
        self.on_end()
        self._orders[self._kind] = self._gathered
        self._calls.reset()
        self.mode = PassMode.IDLE
        self._direct_call, self._defers_weights, self._reads_no_weights = None, False, False
        for group in self._groups:
            group.transport.poll()

    def close(self) -> None:
        """Forget a pass that an error has ended: hooks in its graph refer to this object, a cycle that would keep memory alive."""
        self._progress = PassProgress()

    def make_live(self, unit: Unit) -> None:
        """Make a unit live, and start to gather the units that are next in the recorded order."""
        place = len(self._gathered)
        self._gathered.append(unit.index)
        self._in_recorded_order = self._in_recorded_order and self._recorded[place : place + 1] == [unit.index]
        if unit.phase is Phase.RESTING:
            self.start(unit, known_order=self._in_recorded_order)
        # The next units are started before the wait, so that the transfer of the next unit follows without a pause.
        for index in self._recorded[place + 1 : place + 1 + self._options.prefetch] if self._in_recorded_order else ():
            if self.units[index].phase is Phase.RESTING and self._goes_ahead[index]:
                self.start(self.units[index], known_order=True)
        if unit.phase is Phase.GATHERING:
            with self._recorder.range("wait for", unit.name):
                unit.wait()

    def start(self, unit: Unit, *, known_order: bool) -> None:
        """Begin to gather a unit; `known_order` is True where the order of gathers is a recorded one."""
        # The watchdog compares the order over all data-parallel ranks, since replicas communicate in this order too.
        if self._watched_ranks:
            self._mesh.watch.event(Activity.GATHER, unit.index, self._watched_ranks, known_order=known_order)
        with self._recorder.range("gather", unit.name):
            unit.gather()

    # Called by hooks. `call` is the number of a call in forward, `index` that of a parameter in its bucket

    def before_forward(self, unit: Unit) -> None:
        """Prepare a unit that is about to run: in a pass, in recomputation during backward, or in a user's call of the model."""
        self._watch(watching=False)
        if self.mode is PassMode.BACKWARD:
            self._make_live_in_backward(unit)
            if self._progress.streams is not None:
                self._progress.streams.enter(unit.name, again=True)
            return
        if self.mode is PassMode.IDLE:
            self._begin_users_pass(unit.module)
        # An evaluation gathers nothing where units stay live.
        if self._releases or self.mode is not PassMode.EVALUATION or unit.phase is not Phase.LIVE:
            self._progress.first_visits.setdefault(unit.index, self._progress.calls)
            self._progress.calls += 1
            # Backward enters a pipeline stage at the output of its last block, not at that of the root.
            if unit.index in self._kept_units.get(self._kind, ()) or (unit.index == 0 and self._in_stages):
                self._progress.kept.add(unit.index)
            self.make_live(unit)
        self.writes.record(unit, len(self.units))
        if self.mode is PassMode.FORWARD and self._releases and unit.index != 0:
            self._calls.begin(unit.index)
        self._mesh.post(Activity.FORWARD, unit.index)
        if self._progress.streams is not None:
            self._progress.streams.enter(unit.name, again=False)
        self._recorder.begin_range("forward of", unit.name)

    def before_part(self, module: nn.Module) -> None:
        """Prepare for a module that has parameters of the root and may run without it."""
        self._watch(watching=False)
        if self.mode is PassMode.IDLE:
            self._begin_users_pass(module)

    def after_part(self, module: nn.Module, _output: Any) -> None:
        if self._direct_call is module and self.mode is PassMode.EVALUATION:
            self.end()

    def on_use(self, unit: Unit, name: str) -> None:
        """Make a unit live for as long as needed, because one of its parameters is read or written at rest. Raises `PhaseError`
        outside of a pass, when other ranks have parts of the values."""
        if self.mode is not PassMode.IDLE:
            self._keep_live(unit)
            self._watch(watching=self._watching)
            return
        if self._releases and self._mesh.shard.size > 1:
            one, everything, files = self.readers
            why = f"parameter {name} was read or written outside of a pass over the model"
            when = f"while stage 3 has divided it among {self._mesh.shard.size} ranks"
            cure = f"Read it inside `with {one.format(name)}:` on all ranks, take whole tensors of all parameters"
            load = "the whole model's load_state_dict, under its names, with strict=False where they are those of a part of it"
            raise PhaseError(f"{why}, {when}. {cure} from `{everything}`, or write the model with `{files}`. Load values by {load}")
        if unit.phase is Phase.RESTING:
            unit.gather()  # This needs no other rank, as checked above.
        unit.wait()
        unit.record_digests()

    def _keep_live(self, unit: Unit) -> None:
        """Keep a unit live until the pass is over and in backward; later passes of this kind keep it from its first call on."""
        self._kept_units.setdefault(self._kind, set()).add(unit.index)
        self._progress.kept.add(unit.index)
        if self.mode is PassMode.BACKWARD:
            self._make_live_in_backward(unit)
        else:
            self.make_live(unit)
            if unit.is_fetched:  # No hook on its module has done it.
                unit.record_digests()

    def _make_kept_units_live(self) -> None:
        for index in sorted(self._progress.kept):
            self._make_live_in_backward(self.units[index])

    def _begin_users_pass(self, module: nn.Module) -> None:
        if self._in_stages:
            cure = "use trainer.evaluate(), or call it when fit has made it whole"
            raise PhaseError(f"the model was called by itself, and this rank has but some stages of it; {cure}")
        if torch.is_grad_enabled():
            cure = "call it under torch.no_grad(), or train through the trainer"
            raise PhaseError(f"the model was called outside a training step with gradients enabled; {cure}")
        self._begin(PassMode.EVALUATION, "user")
        self._direct_call = module

    def after_forward(self, unit: Unit, output: Any) -> None:
        """Hook the outputs of a unit for backward after its forward, and release it."""
        if self._progress.streams is not None:
            self._progress.streams.leave(unit.name)
        if self.mode is PassMode.BACKWARD:
            return
        self._recorder.end_range()
        ends = self._direct_call is unit.module
        if self._releases or ends:
            self.writes.require_unchanged_in_pass(self.units if ends else [unit])
        if self._releases or self.mode is PassMode.FORWARD or torch.is_grad_enabled():
            tensors = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
            for each in (self.units if ends else [unit]) if self._releases else ():
                if each.phase is Phase.LIVE and any(map(each.has_memory_of, tensors)):
                    if ends:
                        why = f"the call returned a view of parameters of unit {each.name}, which are released after it"
                        raise PhaseError(f"{why}; return a clone")
                    self._keep_live(each)
            hooked = on_gradient_of(tensors, self._on_reached(unit, self._progress.calls - 1))
            # Only microbatches of a training step always have a backward.
            if hooked and self._progress.streams is not None:
                self._progress.outputs = list(map(get_gradient_edge, hooked))
            recorded = self.mode is PassMode.FORWARD and self._releases and unit.index != 0
            if recorded and self._calls.end(unit.index, hooked):
                # A module may keep a view of parameters as a plain attribute.
                values = (value for each in unit.module.modules() for value in vars(each).values())
                if any(isinstance(value, torch.Tensor) and unit.has_memory_of(value) for value in values):
                    self._keep_live(unit)
        if self._releases and unit.index not in (0, *self._progress.kept) and unit.phase is Phase.LIVE:
            unit.rest()
        if ends:
            self.end()
        elif unit.index == 0 and self.mode is PassMode.FORWARD:
            self._watch()

    def _on_reached(self, unit: Unit, call: int) -> Callable[[], None]:
        return partial(self.before_backward, unit, call)

    def _end_forward(self, outputs: Tensors) -> None:
        """End forward, whose results are `outputs`, and hold the units that backward will enter without a hook."""
        self.writes.training_forwards += 1
        self.writes.require_unchanged_in_pass(self.units)
        roots = [(tensor.grad_fn, tensor.output_nr) for tensor in outputs if tensor.grad_fn is not None]
        for index, parameter in self._calls.unhooked_entries(roots):
            unit = self.units[index]
            if unit.index in self._progress.kept:
                continue
            if parameter is not None:
                why = f"a view of {unit.name_of(parameter)} that unit {unit.name} made in its forward was used after it"
                raise PhaseError(f"{why}, when the parameters were released; have forward return it, or clone it")
            self._keep_live(unit)

    def before_backward(self, unit: Unit, call: int) -> None:
        """Gather a unit when backward reaches the outputs of call number `call` in forward, and release units of later calls."""
        if self.mode is PassMode.IDLE:
            raise PhaseError(f"backward reached unit {unit.name} outside a training step; let the trainer call it")
        if self.mode is not PassMode.BACKWARD:
            self._keep_live(unit)  # A user's `autograd.grad`, whose graph may be part of the loss.
            return
        progress, needed = self._progress, []
        for index in progress.in_backward:
            # Autograd runs ready nodes in the reverse order of their creation, so units that forward used only later will not be
            # read again. A complete gradient would not prove this: a parameter may be frozen, or be read through `detach`.
            later = progress.first_visits.get(index, 0) > call
            for bucket in self.units[index].trainable if later and self.gradients.incomplete[index] else ():
                self.gradients.give_up_missing(bucket)
            if not later or index in progress.kept or self.gradients.incomplete[index]:
                needed.append(index)
            elif (left := self.units[index]).phase is Phase.LIVE:
                if self._releases:
                    left.rest()
                if not self._defers_weights:
                    self._updater.finish_units([left])
        progress.in_backward = needed
        if unit.index in progress.reached:
            return
        progress.reached.add(unit.index)
        self._make_live_in_backward(unit)
        self._recorder.next_range(unit.name)
        if self._options.overlap:
            self.gradients.launch_ready(wait=True)
        self._mesh.post(Activity.BACKWARD, unit.index)

    def _make_live_in_backward(self, unit: Unit) -> None:
        if unit.index not in self._progress.in_backward:
            self._progress.in_backward.append(unit.index)
            for bucket in unit.trainable:
                self.gradients.shards.prefetch(bucket)
            self.make_live(unit)

    def on_gradient(self, unit: Unit, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient, which autograd has finished accumulating."""
        if parameter.grad is None:  # A function had the parameter as an input, and no gradient for it, or not yet.
            return
        if parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()
        if self._defers_weights:
            self._progress.gradients.append((bucket, index, parameter.grad))
            parameter.grad = None
            return
        if self.mode is not PassMode.BACKWARD:
            why = f"{unit.name_of(parameter)} got a gradient outside the backward of a training step"
            cure = "use torch.autograd.grad for gradients that are part of a loss"
            raise PhaseError(f"{why}; let the trainer call backward, and {cure}")
        if unit.phase is not Phase.LIVE and not self._reads_no_weights:
            what = f"unit {unit.name} got a gradient of {unit.name_of(parameter)} while it was {unit.phase.value}"
            why = "backward has entered it unseen, as by torch.func.jvp, and has read released parameters"
            cure = "Use the block's results as its forward returns them, checkpoint activations with use_reentrant=False"
            raise PhaseError(f"{what}: {why}. {cure}, or train at stage 2")
        self.gradients.take(bucket, index)
