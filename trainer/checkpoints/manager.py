"""`RunCheckpoints`, which saves a run, removes old checkpoints and resumes, by the configuration."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zeromesh import __version__, errors
from zeromesh.checkpoint.io.format import REPLICA, Manifest, TensorSpec
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.loader import candidates, fill_shards, open_checkpoint
from zeromesh.checkpoint.saver import SaveContent, Saved, Saver
from zeromesh.checkpoint.store import FOLDER, CheckpointStore, newest_at
from zeromesh.errors import CheckpointError, ConfigError, LayoutError, StorageError, some
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.checkpoints import trainer_state
from zeromesh.trainer.checkpoints.frozen import FrozenWeights, elements_of, source_directory
from zeromesh.trainer.checkpoints.trainer_state import Best, TrainerState, differences, goal_of, settings_of, state_of
from zeromesh.trainer.config.trainer_config import TrainerConfig, with_length
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.models.adapters import is_adapted, pretrained_of
from zeromesh.trainer.models.save_pretrained import gathered_adapter, save_configuration
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import AVERAGE, OUTER_MOMENTUM, WEIGHTS, require_storable

LOOP = "loop"  # the checkpoint key of a custom loop's groups and state, beside those of callbacks


class RunCheckpoints(AbstractContextManager["RunCheckpoints"]):
    """Saves and resumes a run, on all ranks; `linked` adds transformers' names. Raises `StorageError` and `LayoutError`."""

    def __init__(
        self,
        config: TrainerConfig,
        directory: Path,
        engine: ZeroEngine,
        processing_class: Any,
        note: Callable[[str], None],
        *,
        linked: bool = False,
        goes_on: bool = False,
    ) -> None:
        if config.checkpoint.every_steps:
            require_storable(engine.model, "set checkpoint.every_steps: 0")
        # A run that goes on from elsewhere may get room until it saves, and would lose what it has by an end.
        self._tries, self._goes_on = bool(config.checkpoint.every_steps) and not goes_on, goes_on
        self.store = CheckpointStore(directory / FOLDER)
        self._section, self._mesh, self._engine = config.checkpoint, engine.mesh, engine
        self._processing_class, self._note = processing_class, note
        self._metric_sign = 1.0 if goal_of(config.run.metric, config.run.metric_goal) == "lowest" else -1.0
        self._keep_best = max(int(config.run.load_best), config.checkpoint.keep_best)
        self.saver = Saver(self.store, self._mesh, engine.ledger)
        self._frozen = FrozenWeights(engine, config.checkpoint.frozen, note)
        # Without periodic checkpoints, the directory is made when a callback first asks for one.
        if self.saver.storage.leads if self._section.every_steps else self._mesh.rank == 0:
            self.store.clean()
        self._linked = linked
        self._metrics: dict[int, float] = {}
        self._failures = 0
        self._last_attempts: int | None = None  # remaining attempts of the last step's save; None before the last step
        self.latest: int | None = None  # the step of the newest checkpoint that this process has written or read

    # Resuming

    def resume(self, settings: Mapping[str, Any], most: int | None = None) -> TrainerState | None:
        """Load the newest complete checkpoint; returns None for a new run. With `most`, the run is in its midst, and goes back to
        one of this step or before; None: there is none. Raises `ConfigError` if settings differ, or for old ones
        with `checkpoint.resume: never`; `LayoutError` for another model or optimizer; `CheckpointError` if none is usable."""
        named: Path | None = None  # A checkpoint, or the newest one of a named run.
        if most is None and self._section.resume not in ("auto", "never"):
            named = newest_at(Path(self._section.resume).expanduser())
        self.finish()
        steps, record = candidates(self._mesh, self.store), None
        if most is not None:
            steps = [step for step in steps if step <= most]
        elif (files := self._engine.durable) is not None and (record := files.resumed) is not None:
            steps.insert(0, record["step"])
        if most is None and self._section.resume == "never" and steps and not self._goes_on:  # Else they are the run's own.
            there = f"{self.store.root} holds checkpoints" if record is None else "files hold states"
            why = f"{there} of an earlier run, up to step {steps[0]}, and checkpoint.resume is never"
            raise ConfigError(f"{why}; give this run another run.name, move them away, or set checkpoint.resume: auto")
        if record is not None:
            self._note(f"states of step {record['step']} are on files (offload.durable): no checkpoint is read")
            return self._go_on_from(json.loads(record["content"]), settings)
        reasons: list[str] = []
        for step in steps:
            try:
                state = self._load(self.store.path(step), settings, strict=True)
            except CheckpointError as error:
                reasons.append(str(error))
                self._note(f"checkpoint of step {step} skipped: {error}")
                continue
            self.latest = step
            self._metrics = {each: metric for each, metric in self._metrics.items() if each <= step}
            self._link()
            if most is not None and self._keep_best and state.best.step not in steps:
                state = replace(state, best=Best())  # Later ones were better, and so it has not been kept.
            own = self.store.path(step).resolve()
            if named is not None and (here := named.resolve()) != own and here.parent == own.parent:
                what = f"checkpoint.resume names {here.name}, and this run has gone on since"
                self._note(f"{what}: it goes on from step {step}. To go back, give it another run.name")
            return state
        if reasons:
            why = f"no checkpoint in {self.store.root} can be used, and a new run would replace them"
            raise CheckpointError(f"{why}; move them away, or give this run another run.name. The newest: {reasons[0]}")
        return None if named is None else replace(self._load(named, settings, strict=False), ended="", origin=str(named.resolve()))

    def _go_on_from(self, content: Mapping[str, Any], settings: Mapping[str, Any]) -> TrainerState:
        """Take over the progress of a step of which the engine has weights and moments on files already."""
        self._tries, state = False, TrainerState.from_json(content, f"{self.store.root.parent}, offload.durable")
        self.require_settings(state, settings)
        load_engine(None, self._engine, state)
        self._keep_metric(state)
        self.load_frozen(state.origin)
        return state

    def load_frozen(self, origin: str) -> None:
        """Fill weights that were never trained from the newest checkpoint, or else from `origin`, with which the run has begun:
        they need not be those of the model's source. All ranks call it."""
        engine, state = self._engine, self._engine.checkpoint_state
        frozen, paths = state.frozen(), [self.store.path(step) for step in candidates(self._mesh, self.store)]
        for path in (*paths, *([Path(origin)] if origin else ())) if frozen else ():
            try:
                reader, _ = _open_checkpoint(path, engine)
                known = [each for each in state.tensors(reading=True) if each.kind in WEIGHTS]
                there = {each.name for each in reader.manifest.tensors if not reader.manifest.is_elsewhere(each.path)}
                with engine.loading(finishing=True):
                    shards = [each for each in state.shards_to_read() if each.spec.name in frozen & there]
                    fill_shards(engine.mesh, reader, known, shards)
                return
            except CheckpointError as error:
                self._note(f"frozen weights of {path} skipped: {error}")
        if frozen and origin:
            raise CheckpointError(f"frozen weights of this run are those of {origin}, which cannot be read; put it back")

    def require_settings(self, state: TrainerState, settings: Mapping[str, Any]) -> None:
        """Raise `ConfigError` where `settings` differ from those of a state that is on no checkpoint."""
        if differ := differences(state.settings, settings, state.written):
            raise ConfigError(_of_another_run(self.store.root, differ))

    def _link(self) -> None:
        """Link each checkpoint of a run by transformers' name, and remove dangling links. Waits for all ranks."""
        if not self._linked:
            return
        try:
            wanted = {link_of(path): path for path in self.store.paths()}
            for path in self.store.root.parent.iterdir() if self._mesh.rank == 0 else ():
                if _LINK.fullmatch(path.name) and path.is_symlink() and path not in wanted:
                    path.unlink()
            for link, checkpoint in wanted.items() if self._mesh.rank == 0 else ():
                if not link.is_symlink() and not link.exists():
                    link.symlink_to(checkpoint.relative_to(link.parent), target_is_directory=True)
        except OSError as error:
            problem = f"{error.filename or self.store.root}: {error.strerror or error}"
            self._note(f"WARNING: checkpoints have no transformers' names (checkpoint-STEP): {problem}")
        self._mesh.world.barrier("names of checkpoints")

    def _load(self, path: Path, settings: Mapping[str, Any], *, strict: bool) -> TrainerState:
        step = self.store.step_of(path)
        reader, state = read_state(path, self._engine)
        if not reader.manifest.step == state.step == (step if step is not None else state.step):
            other = f"and of step {state.step} by its {trainer_state.NAME}; give it back its name, or move it away"
            raise CheckpointError(f"{path} is of step {reader.manifest.step} by its manifest, {other}")
        differ = differences(state.settings, settings, state.written)
        if differ and strict:
            raise ConfigError(_of_another_run(path, differ))
        for line in differ:
            self._note(f"resumed with another setting: {line}")
        load_engine(reader, self._engine, state)
        self._keep_metric(state)
        return state

    def _keep_metric(self, state: TrainerState) -> None:
        if state.metric is not None:
            self._metrics[state.step] = state.metric

    # Saving

    def require_room(self) -> None:
        """Raise `StorageError` if the run's first checkpoint would not fit on the disk."""
        if self._tries:
            away = {each.name for each in self._frozen.referenced().tensors}
            self.saver.require_room([each for each in self._engine.checkpoint_state.tensors() if each.name not in away])

    def try_small_files(self, state: Callable[[], TrainerState], *, held: bool = False) -> None:
        """Write the small files of a checkpoint into a temporary folder, and the state of each rank where that is `held`, as
        snapshots do, or files and memory that last. Raises `StorageError` on all ranks if one is refused."""
        engine, found = self._engine, state()  # All ranks call this, as pipeline stages gather parts of the state.

        def write() -> None:
            found.to_json()
            with TemporaryDirectory() as folder:
                model = pretrained_of(engine.model) or engine.model
                save_configuration(model, engine.options.precision.compute, self._processing_class, Path(folder))

        if self._tries:
            self._mesh.world.all_or_raise("trial of a checkpoint", write, StorageError, first=True)
        held = held or engine.durable is not None or engine.optimizer_step.journal is not None
        if held and not self._goes_on:
            self._mesh.world.all_or_raise("trial of the state", lambda: len(found.to_json()), StorageError)

    def save(self, state: TrainerState, *, wait: bool) -> bool:
        """Start saving; `wait` blocks, else `poll` completes it. Returns False for a failure; one too many is a `StorageError`."""
        self.finish()
        self._keep_metric(state)
        content = content_of(self._engine, self._processing_class, state, self._kept_steps, self._frozen.referenced())
        try:
            self.saver.begin(state.step, content)
        except (CheckpointError, StorageError) as error:
            self._count_failure(str(error))
            return False
        number = self._engine.checkpoint_state.bucket_number
        self._engine.optimizer_step.before_change = lambda bucket: self.saver.wait_until_copied(number(bucket))
        if wait or not self._section.asynchronous:
            self.finish()
        return True

    def save_last(self, state: TrainerState) -> None:
        """Save the state after the last step, unless done, and wait. Raises `StorageError` if it fails twice."""
        self.finish()
        for self._last_attempts in (1, 0):
            if self.latest != state.step:
                self.save(state, wait=True)

    def record(self, state: TrainerState) -> None:
        """Write the state anew in its step's checkpoint, if there is one, and remove newer ones, which the run went back from."""
        if self.saver.in_flight == state.step:
            self.finish()
        if self.latest != state.step:
            return
        self._keep_metric(state)
        keep = lambda: {step for step in self._kept_steps() if step <= state.step}  # noqa: E731
        saved = self.saver.amend(state.step, trainer_state.EVALUATED, state.to_json(), keep)
        if saved.failure:
            self._note(f"WARNING: the checkpoint of step {state.step} does not have its latest state: {saved.failure}")
        self._warn_of_old(saved.warning)

    def poll(self) -> None:
        """Complete the save in flight if it is done, between two steps. Raises as `save` does."""
        self._report_save(self.saver.poll())

    def finish(self) -> None:
        """Wait for the save in progress. Raises as `save` does."""
        self._report_save(self.saver.finish())

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Remove an unfinished save after an error in a run that may continue: of a single rank, or after others are lost."""
        if isinstance(error, errors.CollectiveError) or (error is not None and self._mesh.world_size == 1):
            self.saver.give_up()

    def close(self) -> None:
        """Wait for the save in flight and the removal of old checkpoints. Raises as `save` does."""
        self.finish()
        self._warn_of_old(self.saver.remove_old(self._section.timeout_seconds))

    def _warn_of_old(self, problem: str) -> None:
        if problem:
            self._note(f"WARNING: old checkpoints were not removed: {problem}")

    def _report_save(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.failure:
            self._count_failure(f"the checkpoint of step {saved.step} was not written: {saved.failure}")
            return
        self._failures = 0
        self.latest = saved.step
        self._link()
        self._warn_of_old(saved.warning)
        self._note(f"step {saved.step}: checkpoint of {human_bytes(saved.nbytes)} in {self.store.path(saved.step)}")

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        limit = self._section.max_failures
        if limit and self._failures >= limit:
            raise StorageError(f"{why} ({self._failures} saves in a row failed, checkpoint.max_failures is {limit})")
        kept = f"the newest is of step {self.latest}" if self.latest is not None else "there is none yet"
        if self._last_attempts == 0:
            problem = f"{why}; {kept}. It was tried twice, and the run is not over without its last checkpoint"
            raise StorageError(f"{problem}: put that right, and start the run again")
        then = "Training goes on" if self._last_attempts is None else "It is tried once more"
        self._note(f"WARNING: {why}; {kept}. {then}")

    def _kept_steps(self) -> set[int]:
        """Return the steps whose checkpoints `keep_last` and `keep_best` keep; called on rank 0 alone."""
        steps = self.store.steps()
        keep = set(steps[: self._section.keep_last or None])
        for step in steps:
            if self._keep_best and step not in self._metrics:
                if (metric := _metric_of(self.store.path(step))) is None:
                    keep.add(step)
                else:
                    self._metrics[step] = metric
        judged = [step for step in steps if self._metrics.get(step, _NO_METRIC) != _NO_METRIC]
        return keep | set(sorted(judged, key=lambda step: (self._metric_sign * self._metrics[step], step))[: self._keep_best])


def content_of(
    engine: ZeroEngine,
    processing_class: Any,
    state: TrainerState,
    keep: Callable[[], set[int]],
    frozen: Manifest,
    without: Collection[str] = (),
) -> SaveContent:
    """Return the content of an engine's checkpoint: its states, `state`, and the files that `from_pretrained` reads, without the
    weights of `frozen` and those named `without`. All ranks call it. `keep` is that of `SaveContent`."""
    holdings, options, model, mesh = engine.checkpoint_state, engine.options, engine.model, engine.mesh
    compute, master = options.precision.compute, options.precision.master
    adapter = gathered_adapter(model, engine.state, mesh) if is_adapted(model) else None
    away = {each.name for each in frozen.tensors}
    layout = {"zeromesh": __version__, "ranks": mesh.world_size}
    layout |= {name: str(each).removeprefix("torch.") for name, each in (("compute", compute), ("master", master))}

    def is_stored(spec: TensorSpec) -> bool:
        return spec.name not in away and not (spec.kind in WEIGHTS and spec.name in without)

    def documents(directory: Path) -> None:
        save_configuration(model, compute, processing_class, directory, adapter)
        write_whole(directory / trainer_state.NAME, state.to_json(), sync=False)

    return SaveContent(
        tensors=[each for each in holdings.tensors() if is_stored(each)],
        shards=[each for each in holdings.shards_to_write() if is_stored(each.spec)],
        frozen=replace(frozen, tensors=tuple(each for each in frozen.tensors if each.name not in without)),
        order=holdings.update_order(),
        documents=documents,
        aliases=holdings.aliases(),
        layout={**layout, "mesh": asdict(mesh.shape), "stage": options.stage},
        keep=keep,
    )


def require_settings(config: TrainerConfig, directory: Path, mesh: Mesh) -> None:
    """Compare the settings of a run's newest checkpoint, but model and data, on rank 0. Raises `ConfigError` on all ranks."""
    store = CheckpointStore(directory / FOLDER)

    def compare() -> None:
        paths = store.paths()
        if not paths or config.checkpoint.resume == "never":
            return
        # A schedule over epochs is known once the data has been read.
        later = ("model.", "data.", *(["schedule."] if config.run.epochs is not None else []))
        known = config if config.run.epochs is not None else with_length(config, config.run.max_steps)
        now = {key: value for key, value in settings_of(known, model={}, data={}).items() if not key.startswith(later)}
        with suppress(CheckpointError):  # An older checkpoint may be usable.
            state = state_of(CheckpointReader(paths[0], parts=True))
            then = {key: value for key, value in state.settings.items() if key in now} if state is not None else now
            if differ := differences(then, now):
                raise ConfigError(_of_another_run(paths[0], differ))

    mesh.world.all_or_raise("settings of the run's checkpoints", compare, ConfigError, first=True)


def _open_checkpoint(path: Path, engine: ZeroEngine) -> tuple[CheckpointReader, dict[str, Any]]:
    reader, found = open_checkpoint(engine.mesh, path, source_directory(engine.model)), list[dict[str, Any]]()
    name = trainer_state.state_file_of(reader.manifest.files)
    what = f"reading {reader.directory / name}"
    engine.mesh.world.all_or_raise(what, lambda: found.append(reader.document(name)), CheckpointError)
    return reader, found[0]


def read_state(path: Path, engine: ZeroEngine) -> tuple[CheckpointReader, TrainerState]:
    """Open a checkpoint, and read its state. All ranks call it; raises `CheckpointError` without one."""
    reader, content = _open_checkpoint(path, engine)
    return reader, TrainerState.from_json(content, str(reader.directory))


def _of_another_run(path: Path, differ: Sequence[str]) -> str:
    lines = "\n".join(f"  - {line}" for line in differ)
    cure = f"or give this run another run.name, and checkpoint.resume: {path} to go on from there all the same"
    return f"{path.parent} is of a run with other settings:\n{lines}\nundo these changes, {cure}"


def load_engine(reader: CheckpointReader | None, engine: ZeroEngine, state: TrainerState) -> None:
    """Load a whole checkpoint into an engine, or progress alone, where it has the tensors, as `fill_shards`; all ranks call it."""
    engine.load_progress(**{name: getattr(state, name) for name in ("updates", "trained", "loss_scale", "good_steps")})
    if reader is not None:
        _fill(reader, engine, state.averages, state.callbacks, whole=True)
    else:
        with engine.loading(averaged_updates=state.averages, finishing=True):
            pass  # Weights that were frozen at first are on files only now, and are gathered anew.


def load_weights(path: Path, engine: ZeroEngine) -> tuple[int, int]:
    """Load the weights of a checkpoint into the engine; returns its step and the number of data steps passed over until then. All
    ranks call it. Raises `CheckpointError` or `LayoutError` as `open_checkpoint` and `fill_shards` do."""
    reader, state = _open_checkpoint(path, engine)
    _fill(reader, engine, state.get("averages", 0), state.get("callbacks", {}), whole=False)
    return reader.manifest.step, state.get("passed_over", 0)


def _fill(reader: CheckpointReader, engine: ZeroEngine, count: int, calls: Mapping[str, Any], *, whole: bool) -> None:
    """Load tensors, but those that a custom loop has left out. `count` is the number of updates in the weight average, if any.
    Raises as `fill_shards`, and `LayoutError` for states of another optimizer, and for other weights than those encoded here."""
    stored = {each.kind.partition(REPLICA)[0] for each in reader.manifest.tensors}
    absent = calls.get(LOOP, {}).get("without", ())

    def loads(spec: TensorSpec) -> bool:
        kept = spec.name not in absent if spec.kind in WEIGHTS else whole
        # What a run has begun to keep since then begins anew: averages at the weights, an outer momentum at zero.
        return kept and (spec.kind in stored or spec.kind not in (AVERAGE, OUTER_MOMENTUM))

    tensors = list(filter(loads, engine.checkpoint_state.tensors(reading=True)))
    # A replica that is no more leaves nothing behind: the first one is always there. Nor do syncs that there are no more.
    unread = stored.difference(WEIGHTS, [OUTER_MOMENTUM], (each.kind for each in tensors))
    if whole and unread:
        problem = f"has {some(sorted(unread))}, which would be lost; go on with the optimizer and precision that it had"
        raise LayoutError(f"{reader.directory} {problem}")
    with engine.loading(averaged_updates=count if AVERAGE in stored else 0):
        shards = [each for each in engine.checkpoint_state.shards_to_read() if loads(each.spec)]
        away = {each.name for each in reader.manifest.tensors if reader.manifest.is_elsewhere(each.path)}
        encoded = engine.checkpoint_state.encoded() & away
        fill_shards(engine.mesh, reader, tensors, [each for each in shards if each.spec.name not in encoded])

        def compare() -> None:
            if encoded and (unlike := engine.checkpoint_state.unlike_encoded(encoded, elements_of(reader))):
                why = f"{reader.source} has other values of {some(unlike)} than the model that is kept encoded here"
                raise LayoutError(f"{why}; give the model whose adapters these are")

        engine.mesh.world.all_or_raise("comparison of encoded weights", compare, CheckpointError, kept=LayoutError)


_NO_METRIC = float("inf")  # of a checkpoint whose state has none, and which is not kept as one of the best


def _metric_of(path: Path) -> float | None:
    """Return the metric of an earlier process's checkpoint; None if another part of it holds the state."""
    try:
        reader = CheckpointReader(path, parts=True)
        state = state_of(reader)
    except errors.ZeromeshError:
        return _NO_METRIC
    if state is None and reader.manifest.part[1] > 1:
        return None
    return _NO_METRIC if state is None or state.metric is None else state.metric


_LINK = re.compile(r"checkpoint-\d+")


def link_of(checkpoint: Path) -> Path:
    return checkpoint.parent.parent / f"checkpoint-{CheckpointStore.step_of(checkpoint)}"
