"""Recovery of a run of which ranks are lost: the processes of the others stay, and take a place among the ranks of the next start.

    a rank ends, another one's wait for it fails    CollectiveError out of `fit`
    keep what it knows, leave the mesh and engine   `Recovery.leaves`
    the launcher has a new process for the lost     `Recovery.rest`
    join a mesh, look at the states in memory       `Recovery.join`
    build the model on them, finish the update      `Recovery.restore`, or the newest checkpoint

No rank changes a state before the sums of the step have come to it, and none adds to them before its own gradients are complete. So
either no rank has the sums, and the states of all are those before the step, or some have, and the others can finish the update
by the record of one that has, with gradients that lie in their memory. Nothing that was computed is lost but the present step.

Where data are suspicious in many steps in a row, it may be the weights that are wrong: all ranks go back to an earlier checkpoint
then, and the data of the steps since are passed over (`rewind`)."""

import gc
import json
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from zeromesh.checkpoint.io.format import DTYPE_NAMES
from zeromesh.checkpoint.loader import candidates
from zeromesh.checkpoint.store import FOLDER, CheckpointStore
from zeromesh.environment import COPIES, SNAPSHOTS, STATES, handed_over, number_of_start, read_environment
from zeromesh.errors import CheckpointError, CollectiveError, ConfigError, NonFiniteError, StorageError, counted, some
from zeromesh.launch.line import LauncherLine, line_to_launcher
from zeromesh.launch.signals import hold_signals
from zeromesh.mesh.mesh_shape import EXPERT_SHARD, axes_of
from zeromesh.mesh.process_groups import are_ours, forget_groups
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.run_store import end_waits
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.durable_tier import committed_step
from zeromesh.offload.memory.allocation import hex_digest, tensor_bytes
from zeromesh.offload.memory.state_memory import StateMemory
from zeromesh.optim.journal import Journal
from zeromesh.rng import seed_of
from zeromesh.telemetry.watchdog import Watchdog
from zeromesh.trainer.checkpoints.manager import RunCheckpoints
from zeromesh.trainer.checkpoints.trainer_state import TrainerState
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.loader import Feed
from zeromesh.trainer.loop.context import RunContext, RunProgress
from zeromesh.trainer.loop.snapshots import Snapshots
from zeromesh.trainer.monitoring.step_stats import StepResult
from zeromesh.units.unit import Bucket, all_buckets, set_values
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import extra_states, persistent_buffers

_UNKEPT = "needs a launcher that keeps ranks and memory; start them by `zeromesh train --nproc` or `run`, or leave it out"
_ONE_HOST = "has copies on another host, and all ranks are on one; start them on several (`--nnodes`), or set it to 0"
_UNRELATED = ("run", "checkpoint", "recovery", "tracking", "hub", "profile", "data")
"""The sections of the configuration that have no influence on what the memory of states holds."""
_MOST_BUFFER_BYTES = 1 << 24  # which are read in some milliseconds
_MOST_REWINDS = 3  # in a run, whose next spike that lasts ends it
_memory = cache(StateMemory)  # one object for each descriptor


@dataclass
class Kept:
    """Knowledge of a process that stays about the run that has ended in it."""

    state: TrainerState
    progress: RunProgress
    shared: dict[str, Tensor]
    """The buffers, by bucket, in which all ranks of a host have their master weights."""
    buffers: dict[str, Tensor]  # that are saved, by name, as they were after the step
    plain: bool = True  # The parameters that are trained are those of the start.

    def state_after(self, last: int, ends_again: bool) -> TrainerState:
        """Return the state to go on with after step `last`, with callbacks' states before what they hear of again: all that comes
        after the step, or, if that `ends_again`, its end. In the midst of `last` they have heard what they hear until then."""
        state, begun, (ended, callbacks) = self.state, self.progress.begun, self.progress.concluded
        if state.step == last and ends_again:
            begun = begun if begun.get("step") == last else {}
            begun = begun and {**begun, "log_history": state.log_history[: begun["log_history"]]}
            return replace(state, **begun, eval_loss=None, metric=None, ended="")
        return replace(state, callbacks=callbacks) if state.step == last == ended else state


@dataclass
class Recovery:
    """The answers of a rank to lost ranks in one `fit`, by its line to the launcher."""

    config: TrainerConfig
    line: LauncherLine
    stays: bool
    """True if this process can go on in another mesh."""
    memory: StateMemory | None = None
    model: nn.Module | None = None  # that the user has given, which the run trains in place
    cause: dict[str, Any] = field(default_factory=dict)
    """Why a rank has left the mesh before this one, when, and after which `step`; empty in a first start."""
    source: str = "checkpoint"
    """The source of the states that the run goes on with: `memory`, a `snapshot`, `files` that stay, or a `checkpoint`."""
    snapshots: Snapshots | None = None
    present: Callable[[], TrainerState] | None = None
    """Returns the present state of this rank, once it trains."""
    _is_empty: bool = False  # The model has lost its values.
    _given: dict[str, tuple[torch.dtype, bool]] = field(default_factory=dict)
    """The dtype and `requires_grad` of each parameter as the user has given the model."""
    _left: dict[str, Any] = field(default_factory=dict)  # as `cause`, of this process
    _kept: Kept | None = None
    _record: dict[str, Any] | None = None
    """The record of the latest update, where states in memory are gone on from."""
    _at: tuple[int, int] = (0, 0)  # the position of this rank's memory
    _key: int = 0
    _ends_again: bool = False  # True if the step that is gone on from ends once more.
    _states: list[TrainerState | None] = field(default_factory=list)

    @classmethod
    def begin(cls, config: TrainerConfig, model: Any, *, stays: bool) -> Self | None:
        """Return the recovery of a run; None where no launcher of zeromesh has started the rank, or `survivors` is end. Without
        `stays` all ranks start again: a new process would do first with others what this one has done, such as an evaluation."""
        line, states, section = line_to_launcher(), handed_over(STATES), config.recovery
        if line is None or states is None or section.survivors == "end":
            given = section.model_fields_set  # all of them in the resolved configuration of another run
            asked = {"memory": "snapshots", "copies": 1} | ({"survivors": "keep"} if given < {*vars(section)} else {})
            named = [f"recovery.{name}: {asked[name]}" for name in asked if name in given and getattr(section, name) == asked[name]]
            if named and line is None and read_environment().world_size > 1:
                raise ConfigError(f"{' and '.join(named)} {_UNKEPT}")
            return None
        stays = stays and section.survivors == "keep"
        # Replicas that take local steps are at one step in a checkpoint alone.
        journals = stays and config.recovery.memory == "auto" and config.parallel.sync_every == 1
        return cls(config, line, stays, _memory(states) if journals else None, model if isinstance(model, nn.Module) else None)

    def join(self, mesh: Mesh) -> None:
        """Agree with the others if the states in memory are whole, and tell the launcher that this rank can go on without them."""
        self.stays = self.stays and not is_accelerator(mesh.device) and are_ours()
        sections = self.config.model_dump(mode="json", exclude=set(_UNRELATED))
        self._key, section, self.snapshots = seed_of(f"{sections} {mesh.shape} {mesh.rank}"), self.config.recovery, None
        # The last host that is left goes on from the copies that it has, and has snapshots without them.
        copied = section.copies > 0 and (len({each.host for each in mesh.locations}) > 1 or number_of_start() > 0)
        on_device = section.memory == "auto" and is_accelerator(mesh.device) and self.config.parallel.sync_every == 1
        own, others = handed_over(SNAPSHOTS), handed_over(COPIES)
        if section.copies > 0 and others is None:
            raise ConfigError(f"recovery.copies: {section.copies} {_ONE_HOST}")
        if own is not None and (section.memory == "snapshots" or on_device or copied):
            # Another run of these processes may have left some, of the same model: only those of this very run count.
            of_others = _memory(others) if copied and others is not None else None
            key = seed_of(self.config.to_yaml())
            self.snapshots = Snapshots(_memory(own), of_others, mesh, key, section.every_steps, frozen=self.model is not None)
        if not self.stays:
            self.memory = None
            self._tell(0.0)
            return
        self.line.on_lost = partial(_end_waits, mesh.rank, mesh.watch)
        self._look_around(mesh)
        self._tell(self.config.parallel.patience)

    def _tell(self, patience: float) -> None:
        """Tell the launcher after which seconds this rank has noticed that others are lost, and rests; 0: it ends."""
        self.line.tell(recovers={"limit": self.config.recovery.limit, "patience": patience})

    def end(self) -> None:
        """Give the memory back after the last step, if the model is whole; when others are lost now, this process has to end."""
        self._tell(0.0)
        self.line.tell(trains=False)
        self.present = None
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.memory is not None:
            self.memory.forget()
            if not self.memory.free:
                gc.collect()
            if self.memory.free:
                self.memory.clear()

    def _look_around(self, mesh: Mesh) -> None:
        """Find out, on all ranks alike, who has stayed, and if the states in memory are those of this layout, around one update."""
        rows = mesh.world.gather_json([self._left, self.memory is None], "ranks that have stayed")
        left = [each for each, _ in rows if each]
        self.cause, self.source = min(left, key=lambda each: each["time"], default={}), "checkpoint"
        if self.model is not None and not self._left:
            named = self.model.named_parameters(remove_duplicate=False)
            self._given = {name: (each.dtype, each.requires_grad) for name, each in named}
            if left:
                self._empty(self.model)  # As those who have stayed have done.
        if any(lacks for _, lacks in rows):  # An earlier start has given it up, which new processes do not know.
            self.memory = None
        if self.memory is not None:
            self._look_at(self.memory, mesh)

    def _look_at(self, memory: StateMemory, mesh: Mesh) -> None:
        at, kept = memory.position(self._key), self._kept
        records = [memory.record(at[0] + later) for later in (1, 0)] if at is not None else []
        own: dict[str, Any] = {"at": at, "record": next(filter(None, records), None), "free": memory.free}
        if kept is not None:
            own.update(
                shares=bool(kept.shared),
                buffers=bool(kept.buffers),
                step=kept.state.step,
                plain=kept.plain,
                ends=bool(kept.progress.unfinished),
            )
        rows = mesh.world.gather_json(own, "states in memory")
        self._record, memory.warm = None, False
        found = [row["record"] or {"step": 0} for row in rows]
        last = max(each["step"] for each in found)
        # A rank 0 that is lost may not have written the step's line.
        self._ends_again = "step" not in rows[0] or any(row.get("ends") or row.get("step", last) < last for row in rows)
        state = kept and json.loads(kept.state_after(last, self._ends_again).to_json())
        contents = mesh.world.gather_json(state, "states of the trainer")
        self._states = [each and TrainerState.from_json(each, "memory") for each in contents]
        if last and all(row["at"] and row.get("plain", True) and last - 1 <= row["at"][0] <= last for row in rows):
            stages = [mesh.shape.coordinate(rank)["pipeline"] for rank in range(len(rows))]
            # What a record says of single parameters is known to the ranks of the same stage.
            latest = {stage: each for stage, each in zip(stages, found, strict=True) if each["step"] == last}
            some = next(iter(latest.values()))
            alike = not any(each["missing"] or each["steps"] for each in latest.values())
            known = [each for each in self._states if each is not None]
            shared = any(row.get("shares") for row in rows)
            # One of the ranks that shared buffers has to be there still: those that share all states, or the same experts.
            groups = (mesh.shape.groups(*axes) for axes in (axes_of("states"), (EXPERT_SHARD,)))
            together = [each for each in chain(*groups) if len(each) > 1] if shared else [mesh.world.ranks]
            if any(row.get("buffers") for row in rows):  # as one of each stage
                together += [tuple(rank for rank in mesh.world.ranks if stages[rank] == each) for each in {*stages}]
            memory.warm = (
                (alike or latest.keys() == {*stages})
                and len({each.passed_over for each in known}) == 1  # Some may know of data that others judge still.
                and not any(each.stream and each.step < last for each in known)
                and all(any(self._states[rank] is not None for rank in group) for group in together)
            )
            if memory.warm and at is not None:
                self._record, self._at = latest.get(stages[mesh.rank], some), at
        if not memory.warm and not all(row["free"] for row in rows):  # Another model of this process has states there.
            self.memory = None

    def _keep(self, run: RunContext, present: Callable[[], TrainerState]) -> None:
        """Keep what this process knows of a run that ends in it; nothing where its model is whole already."""
        engine, self._kept = run.model.engine, None
        journal = None if engine is None else engine.optimizer_step.journal
        if engine is not None and journal is not None and journal.has_all:
            buckets, buffers = all_buckets(engine.units), _copied_buffers(engine)
            plain = all(each.training == [slot.spec.requires_grad for slot in each.layout.slots] for each in buckets)
            self._kept = Kept(present(), run.progress, _shared_buffers(engine), buffers, plain)

    def leaves(self, error: CollectiveError, run: RunContext | None, mesh: Mesh | None) -> bool:
        """Leave the mesh after `error`; returns False where this process has to end, since it cannot build its model anew."""
        step = self._kept.progress.step if self._kept is not None else run.progress.step if run is not None else 0
        self.line.tell(step=step)  # Also of a process that ends: the launcher tells by it what comes back.
        if not self.stays:
            return False
        present, self.present = self.present, None
        if present is not None and run is not None:
            self._keep(run, present)
        if self.model is not None and not (bool(self._left) if run is None else self._empties(run, self.model)):
            return False
        hold_signals()
        self.line.leave()
        self._left = {"cause": str(error), "time": time.time(), "step": step}
        cause: BaseException | None = error
        while cause is not None:  # Their frames refer to the states, which would stay in memory beside the new ones.
            cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
        if run is not None:
            run.model.close()
        if mesh is not None:
            mesh.forget()
        forget_groups()
        return True

    def rest(self) -> None:
        """Wait for a place in the next start. Raises the error again that `leaves` was called for, where there is none."""
        gc.collect()
        if not self.line.rest(self._left["cause"]):
            hold_signals(False)
            raise CollectiveError(self._left["cause"])

    def restore(self, run: RunContext) -> TrainerState | None:
        """Journal the updates of a new engine from now on, if all of its states are in memory that outlives this process, and
        finish the latest one there; all ranks call it. Returns the state after it; None where a checkpoint is to be loaded."""
        record, kept, self._record = self._record, self._kept, None
        engine, world, progress = run.model.require_engine(), run.mesh.world, run.progress
        step = engine.optimizer_step
        # Nobody but a rank itself has the states of its modules, and buffers that passes or the end of a step change.
        others = extra_states(engine.model) or run.config.optimizer.expert_bias_rate
        if self.memory is not None and step.can_be_finished_by_others and not others and _are_comparable(engine.model):
            step.journal = Journal(self.memory, self._key, partial(_digests, engine.model))
        if record is None:
            self._kept = None
            return self._restore_snapshot(run)
        with engine.loading(finishing=True):
            # Nobody goes on before all know that the new buffers count in place of the old ones, where a rank is lost now.
            _bring_shared(engine, kept)
            _bring_buffers(engine, {} if kept is None else kept.buffers)
            world.barrier("weights of lost ranks")
            if kept is not None:
                kept.shared = _shared_buffers(engine)
            world.barrier("end of the recovery's copies")
            outcome = step.finish_recorded(record, *self._at)
        if kept is not None and (state := self._states[world.index]) is not None:
            for each in fields(RunProgress):
                setattr(progress, each.name, copy(getattr(kept.progress, each.name)))
            progress.ended = state.ended
            # What the run was resumed from counts in its figures; where it goes on now is in the state.
            progress.resumed = replace(progress.resumed, **{name: getattr(state, name) for name in ("stream", "tracker", "paces")})
        else:
            state = max(filter(None, self._states), key=lambda each: each.step)
            progress.resume(state)
        result = StepResult(**record["note"], outcome=outcome)
        if progress.step < record["step"]:
            progress.add(result)
        if self._ends_again:
            progress.unfinished = progress.unfinished or result
        progress.concluded = (state.step, dict(state.callbacks))
        buffers = _copied_buffers(engine)
        self._kept, self.source = Kept(state, progress, _shared_buffers(engine), buffers), "memory"
        return state

    def lost_steps(self, step: int) -> int | None:
        """Return how many steps are made again from `step` on; None where no process has stayed."""
        return (max(0, self.cause["step"] - step) if self.source != "memory" else 0) if self.cause else None

    def _restore_snapshot(self, run: RunContext) -> TrainerState | None:
        """Go on from the latest snapshot, unless a checkpoint is as new, or the states are on files."""
        if self.snapshots is None or (state := self.snapshots.state) is None:
            return None
        saved, engine = candidates(run.mesh, self._store(run)), run.model.require_engine()
        if engine.durable is not None and engine.durable.resumed is not None:
            saved.append(engine.durable.resumed["step"])
        if state.step <= max(saved, default=-1) or not self.snapshots.load(engine, state):
            return None
        run.progress.resume(state)
        self.source = "snapshot"
        return state

    def begin_training(self, run: RunContext) -> None:
        """Let states in memory count from now on."""
        engine = run.model.require_engine()
        if engine.optimizer_step.journal is not None:
            engine.optimizer_step.journal.begin(run.progress.step)
        self.line.tell(trains=True)
        if self.snapshots is not None and not self.snapshots.begin(engine, run.progress.step):
            run.console.note("no snapshots of the states: two copies need more than half of the memory that a host has available")

    def forget_steps(self) -> None:
        """Let no states in memory count, before those of an earlier step are loaded; `begin_training` is called then."""
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.memory is not None:
            self.memory.drop_records()

    def after_step(self, run: RunContext) -> None:
        """Take a snapshot where one is due."""
        if self.snapshots is not None and self.present is not None:
            self.snapshots.after_step(run.progress.step, run.model.require_engine(), self.present)

    def require_values(self) -> None:
        """Raise `CollectiveError` where nothing has the values of the user's model: all ranks have to start again, and make it."""
        if self._is_empty:
            raise CollectiveError("a rank was lost, and with it weights of the model that no checkpoint has")

    def _empties(self, run: RunContext, model: nn.Module) -> bool:
        """Give the user's model parameters without values, for the next start to divide and fill; False where the values are
        nowhere else, or the run has changed the model in ways that it cannot undo."""
        trained, engine = run.model, run.model.engine
        taken, durable = self.snapshots is not None and self.snapshots.number > 0, run.config.offload.durable
        on_files = durable or (engine is not None and engine.options.offload.parameters.tier == "file")
        if on_files and not all(trained for _, trained in self._given.values()):
            return False  # Files that last have no frozen weights, and others end with the engine.
        elsewhere = self._kept is not None or taken or durable or bool(self._store(run).steps())
        fits = engine is not None and engine.options.weights is None and trained.module is model
        if not (fits and elsewhere) or run.config.model.lora:
            return False
        trained.divided.restore()
        trained.restore_modules()
        self._empty(model)
        return True

    def _store(self, run: RunContext) -> CheckpointStore:
        return CheckpointStore(run.config.run.directory / FOLDER)

    def _empty(self, model: nn.Module) -> None:
        """Make a model's parameters as they were given, but without values, which come from memory or from a checkpoint. They stay
        the same objects, whose hooks count, and to which the user's code may refer."""
        self._is_empty = True
        for name, each in model.named_parameters():
            dtype, trained = self._given[name]
            each.grad = None
            set_values(each, torch.zeros((), dtype=dtype, device=each.device).expand(each.shape))
            each.requires_grad_(trained).stored = _elsewhere(dtype)  # type: ignore[attr-defined]


def _end_waits(rank: int, watch: Watchdog, reason: str) -> None:
    """End this rank's waits for others by an error, also those to join a mesh after that of `watch`."""
    end_waits(reason := f"rank {rank}: the launcher says that {reason}")
    watch.broken = watch.broken or CollectiveError(reason)


def note_act(run: RunContext, feed: Feed, act: Mapping[str, Any], positions: range) -> None:
    """Show and log what was done about suspicious steps on the data of the steps `positions`."""
    if not act:
        return
    done = act["act"].replace("_", " ")
    numbers = range(feed.plan.samples_of(positions[0]).start, feed.plan.samples_of(positions[-1]).stop)
    samples = sorted(map(feed.order.dataset_index, numbers))
    text = f"{act['cause']}, in samples {some(list(map(str, samples)), 16)} of the dataset"
    if "bits" in act:
        text += f"; computed again, its bits {act['bits']}"
    if done == "stop":
        raise NonFiniteError(f"{text}; no parameter was changed (recovery.on_spike: stop)")
    run.progress.acts.append({**act, "data_step": positions[0], "samples": samples})
    run.console.note(f"{text}: {done} (now after step {run.progress.step})")


def rewind(
    run: RunContext, checkpoints: RunCheckpoints, recovery: Recovery | None, feed: Feed
) -> tuple[TrainerState, dict[str, Any]] | None:
    """Go back to an earlier checkpoint if a spike lasts: every update until then was judged to be usual. All ranks call it. Returns
    its state and a line of `recoveries.jsonl`; None without one. Raises as `require_updates` where the run cannot go back."""
    progress, steps, began = run.progress, run.config.recovery.rewind_steps, time.perf_counter()
    if not (steps and progress.too_many_skipped):
        require_updates(run)
        return None
    if progress.rewinds == _MOST_REWINDS:
        require_updates(run, f"; the run has gone back {_MOST_REWINDS} times already (recovery.rewind_steps)")
    if recovery is not None:
        recovery.forget_steps()
    before, position = progress.step, progress.position
    state = checkpoints.resume(run.settings, before - steps)
    if state is None:
        require_updates(run, f"; no checkpoint is old enough to go back {steps} steps (recovery.rewind_steps)")
        return None
    cause = f"suspicious data in {counted(progress.skipped_in_a_row, 'step')} in a row ({progress.cause})"
    progress.rewind(state)
    if recovery is not None:
        recovery.begin_training(run)
    act = {"act": "rewind", "cause": f"{cause}: back from step {before} to {state.step}"}
    note_act(run, feed, act, range(state.step + state.passed_over, position))
    line = {"cause": cause, "step": before, "seconds": time.perf_counter() - began, "lost_steps": before - state.step}
    return state, {**line, "parts": {}, "source": f"checkpoint of step {state.step}"}


def require_updates(run: RunContext, why: str = "") -> None:
    """Raise `NonFiniteError` if too many steps in a row have made no update; `why` says what was not done about it."""
    progress = run.progress
    if progress.too_many_skipped:
        what = "data were suspicious" if run.config.recovery.spike_factor else "gradients were not finite"
        steps = f"{counted(progress.skipped_in_a_row, 'step')} in a row, up to step {progress.step}"
        last = f"(run.max_nonfinite; in the last, {progress.cause}); no update of these steps was made{why}"
        raise NonFiniteError(f"{what} in {steps} {last}. Lower optimizer.lr, look at the data, or use precision.compute: bfloat16")


def _elsewhere(dtype: torch.dtype) -> SimpleNamespace:
    """Return the source of a parameter's values that come from a checkpoint or from memory later; see `BuiltSource`."""
    return SimpleNamespace(read=lambda start, end: torch.zeros(end - start, dtype=dtype), encoded_by=lambda codec: None)


def _are_comparable(model: nn.Module) -> bool:
    """Return True if the buffers that are saved are small enough to be read before and after each step, and plain."""
    buffers = persistent_buffers(model).values()
    plain = all(each.layout is torch.strided and each.dtype in DTYPE_NAMES for each in buffers)
    return plain and sum(each.nbytes for each in buffers) <= _MOST_BUFFER_BYTES


def _digests(model: nn.Module) -> list[str]:
    """Return the digests of buffers that are saved: versions of torch do not tell a change by way of `data`."""
    return [hex_digest(each) for each in persistent_buffers(model).values()]


def _copied_buffers(engine: ZeroEngine) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in persistent_buffers(engine.model).items()}


def _bring_buffers(engine: ZeroEngine, kept: Mapping[str, Tensor]) -> None:
    """Give all ranks the buffers that are saved as a rank has `kept` them that was there: passes have not changed them."""
    world, own = engine.mesh.world, persistent_buffers(engine.model)
    rows = world.gather_json({name: each.nbytes for name, each in kept.items() if each.nbytes}, "buffers of lost ranks")
    for name in sorted(set().union(*rows)):
        giver = next(index for index, row in enumerate(rows) if name in row)
        there = tensor_bytes(kept[name].contiguous()).clone() if name in kept else None
        found = torch.empty(rows[giver][name], dtype=torch.uint8) if there is None else there
        world.broadcast(found, giver, "buffers of lost ranks")
        if (buffer := own.get(name)) is not None:
            buffer.copy_(found.view(buffer.dtype).view(buffer.shape))


def _shared_buckets(engine: ZeroEngine) -> list[Bucket]:
    """Return the buckets whose master weights are a part of a buffer that the ranks of a host share."""
    shared = (bucket for bucket in all_buckets(engine.units) if bucket.group.transport.name == "shared")
    return [bucket for bucket in shared if bucket.buffer.persistent and bucket.copy is None]


def _shared_buffers(engine: ZeroEngine) -> dict[str, Tensor]:
    return {bucket.name: bucket.buffer.full for bucket in _shared_buckets(engine)}


def _bring_shared(engine: ZeroEngine, kept: Kept | None) -> None:
    """Copy master weights from the buffers that the ranks of a host shared before: ranks that were there bring those of others."""
    rows = {each.ranks.name: each.ranks.gather_integers([int(kept is not None)]) for each in engine.groups}
    for bucket in _shared_buckets(engine):
        group = bucket.group.ranks
        stays, length, own = [row[0] for row in rows[group.name]], bucket.length, bucket.buffer.own()
        giver, shared = stays.index(1), None if kept is None else kept.shared[bucket.name]
        if shared is not None:
            own.copy_(shared.narrow(0, group.index * length, length))
        for index in [index for index, stayed in enumerate(stays) if not stayed]:
            found = torch.empty_like(own)
            if shared is not None and group.index == giver:
                found = shared.narrow(0, index * length, length)
            group.broadcast(found, giver, "weights of a lost rank")
            if index == group.index:
                own.copy_(found)


def look_for_files(run: RunContext, state: TrainerState | None) -> None:
    """Tell of files that last and are newer than `state`. Raises `CheckpointError` where the run would begin anew over them."""
    mesh, files = run.mesh, run.model.require_engine().options.offload.files
    look = partial(committed_step, files.directories, files.label)
    step = max(map(int, mesh.world.all_or_raise("states on files", look, StorageError)))
    if step > (-1 if state is None else state.step):
        text = f"{files.directories[0]}: files of this run have its states of step {step}, and without offload.durable they are"
        text += " not read: to keep these, start the run as it was, and save a checkpoint"
        if state is None:
            raise CheckpointError(f"{text}. There is none now; remove the files to begin the run anew")
        run.console.note(f"WARNING: {text}; that of step {state.step} is used")
