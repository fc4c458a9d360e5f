"""`Saver`: one checkpoint at a time, written by all ranks while training goes on, and committed between two steps.

    begin    all ranks plan the files, exchange the bytes of disk blocks that they share, and begin to write
    release  before an update: waits until the elements that the update changes have been copied
    poll     between steps: goes to the save's next stage once all ranks are done with the present one (`_stages`)
    finish   goes through all stages, waiting

Where each host has a directory of its own, each gets a part: the same files, with what the host's ranks have written in them.
Background threads never take part in collectives: ranks agree between steps, in their main thread.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, FileRecord, Manifest, StoredTensor
from zeromesh.checkpoint.format.safetensors_layout import FileLayout, TensorSpec, index_files, plan_files
from zeromesh.checkpoint.io.interleaved import check_interleaved, collect_digests
from zeromesh.checkpoint.io.tensor_shard import TensorShard
from zeromesh.checkpoint.io.write_plan import WritePlan, WritePlanner
from zeromesh.checkpoint.io.writer import ShardWriter
from zeromesh.checkpoint.multi_host.shared_storage import find_sharing
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.disk_calls import disk_call
from zeromesh.errors import CheckpointError, StorageError, ZeromeshError
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.watchdog import Activity


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveContent:
    """What goes into a checkpoint.

    `tensors` is the same on all ranks. `shards` is what this rank writes; those of all ranks make up every tensor exactly once.
    `order` has each owner's position in the next update. `documents` writes the small files into a directory. `keep` is called on
    rank 0 once the checkpoint is there, and returns the steps of the checkpoints that stay beside it; where others cannot be
    removed, the save has succeeded all the same.
    """

    tensors: Sequence[TensorSpec]
    shards: Sequence[TensorShard]
    order: Mapping[int, int]
    documents: Callable[[Path], None]
    keep: Callable[[], set[int]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """How a save ended, the same on all ranks: `failure` is empty where the checkpoint is there, `warning` where old ones could
    be removed too."""

    step: int
    nbytes: int
    failure: str = ""
    warning: str = ""


class _Task:
    """Work of this rank in a background thread."""

    def __init__(self, name: str, path: Path, work: Callable[[], object]) -> None:
        self.problem = ""
        """Why the work could not be done."""

        def run() -> None:
            with disk_call(name, path):
                self.problem = _attempt(work)

        self.thread = threading.Thread(target=run, name=f"zeromesh-{name}")
        self.thread.start()


_Stages = Generator[None, None, Saved]


@dataclass(kw_only=True, slots=True)
class _Save:
    """A save in flight: its writer, then its tasks one after the other."""

    step: int
    plan: WritePlan
    writer: ShardWriter
    task: _Task | None = None
    stages: _Stages | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank still works on the present stage."""
        return self.task.thread.is_alive() if self.task is not None else self.writer.running

    def start(self, name: str, path: Path, work: Callable[[], object], *, here: bool = True) -> _Task:
        """Begin a task, which is empty where there is no work `here`."""
        self.task = _Task(name, path, work if here else lambda: None)
        return self.task


class Saver:
    """Saves to a store. All ranks make one and call every method alike. The first rank that sees a directory makes and commits
    what is in it."""

    def __init__(self, store: CheckpointStore, mesh: Mesh) -> None:
        """Raises `StorageError` where some rank cannot write to the store."""
        self.store = store
        self.sharing = find_sharing(store.root, mesh)
        self._mesh = mesh
        self._save: _Save | None = None

    def require_room(self, tensors: Sequence[TensorSpec]) -> None:
        """Raise `StorageError` on all ranks where a checkpoint of these tensors would not fit on some disk.

        Of several disks, each gets about as much as it has ranks.
        """
        nbytes = sum(spec.nbytes for spec in tensors) * len(self.sharing.ranks) // self._mesh.world_size
        problem = _attempt(partial(self.store.require_room, nbytes)) if self.sharing.leads else ""
        failure = self._failure_of_any(problem)
        if failure:
            raise StorageError(failure)

    @property
    def in_flight(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._save.step if self._save else None

    def begin(self, step: int, content: SaveContent) -> None:
        """Begin to write a checkpoint; none may be in flight.

        Raises:
            CheckpointError: on all ranks, with what some rank could not do; nothing of the checkpoint is left then.
        """
        if self._save is not None:
            raise CheckpointError(f"the checkpoint of step {self._save.step} is still being written")
        files = plan_files(content.tensors, self._mesh.world_size)
        plan = self._plan(files, content.shards)
        part_nbytes = None
        if len(self.sharing.places) > 1:
            written = self._mesh.world.gather_integers([plan.nbytes])
            part_nbytes = sum(written[rank][0] for rank in self.sharing.ranks)
        failure = self._failure_of_any(self._create(step, content, files, part_nbytes) if self.sharing.leads else "")
        if failure:
            if self.sharing.leads:
                self.store.abandon(step)
            raise CheckpointError(f"the checkpoint of step {step} was not written: {failure}")
        pieces = plan.pieces(self._exchange(plan.bytes_for_others()), content.order)
        layout = self._layout(content)
        writer = ShardWriter(self.store.temporary(step), pieces, self._mesh.rank)
        save = _Save(step=step, plan=plan, writer=writer)
        save.stages = self._stages(save, content, layout)
        self._save = save
        next(save.stages)

    def _plan(self, files: Sequence[FileLayout], shards: Sequence[TensorShard]) -> WritePlan:
        """What this rank writes. Ranks may write a block together where they see one directory from one host."""
        mesh, places = self._mesh, self.sharing.places
        planner = WritePlanner(files, shards, mesh.rank)
        descriptions = mesh.world.gather_bytes(planner.describe(), "who has what of divided tensors")
        names = [place.host for place in mesh.places]
        # Where all hosts have one name but no memory in common, a name does not tell which ranks share a page cache.
        unknown = len(set(names)) == 1 and not mesh.one_host
        place_of = {rank: number for number, ranks in enumerate(places) for rank in ranks}
        hosts = [(place_of[rank], str(rank) if unknown else name) for rank, name in enumerate(names)]
        return planner.plan(descriptions, hosts)

    def _create(self, step: int, content: SaveContent, files: Sequence[FileLayout], part_nbytes: int | None) -> str:
        """Make the directory with its small files; returns why that cannot be done, or an empty text."""
        try:
            with disk_call("creation", self.store.temporary(step)):
                directory = self.store.create(step, files, part_nbytes)
                if self._mesh.rank == 0:
                    content.documents(directory)
                    for path, text in index_files(files).items():
                        write_whole(directory / path, text, sync=False)
        except ZeromeshError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - other people's `save_pretrained` among them; all ranks have to know
            return f"{str(self.store.temporary(step))!r} cannot be written: {type(error).__name__}: {error}"
        return ""

    def _exchange(self, own: Sequence[tuple[str, int, bytes]]) -> list[tuple[str, int, bytes]]:
        """Send all ranks the bytes (file, first byte, data) that this rank has of others' blocks; returns what others sent."""
        head = json.dumps([[path, begin, len(data)] for path, begin, data in own]).encode()
        message = len(head).to_bytes(8, "little") + head + b"".join(data for _, _, data in own)
        received = []
        for rank, text in enumerate(self._mesh.world.gather_bytes(message, "exchange of shared blocks")):
            if rank == self._mesh.rank:
                continue
            at = 8 + int.from_bytes(text[:8], "little")
            for path, begin, length in json.loads(text[8:at]):
                received.append((path, begin, text[at : at + length]))
                at += length
        return received

    def _layout(self, content: SaveContent) -> Mapping[str, Any]:
        """The layout to note. In parts it names the save, since parts of two saves of one step are not one checkpoint."""
        if len(self.sharing.places) == 1:
            return content.layout
        token = self._mesh.world.gather_bytes(secrets.token_hex(8).encode(), "the name of the save")[0].decode()
        return {**content.layout, "save": token}

    def _stages(self, save: _Save, content: SaveContent, layout: Mapping[str, Any]) -> _Stages:
        """All stages of a save. Each `yield` ends when every rank has done its work of the stage, and all ranks go on together."""
        plan, store, sharing, directory = save.plan, self.store, self.sharing, self.store.temporary(save.step)
        nbytes = sum(file.nbytes for file in plan.files)
        committing = False
        try:
            save.writer.start()
            yield
            pieces: list[ChecksumPiece] = []
            problem = _attempt(lambda: pieces.extend(save.writer.join(self._post_progress)))

            if plan.any_interleaved:
                rows = self._collect(problem, save.writer.digests, "checksums of interleaved blocks")
                digests = collect_digests(plan.blocks, rows)

                def check() -> None:
                    pieces.extend(check_interleaved(directory, plan.blocks, digests, self._mesh.rank))

                checking = save.start("checking", directory, check)
                yield
                checking.thread.join()
                problem = checking.problem

            rows = self._collect(problem, _rows_by_file(pieces), "checksums of the checkpoint")
            committing = True
            manifest = Manifest(
                step=save.step,
                files=_records(plan.files, [rows[rank] for rank in sharing.ranks]),
                tensors=tuple(
                    StoredTensor(spec=spec, path=file.path, begin=at) for file in plan.files for spec, at in file.places
                ),
                aliases=content.aliases,
                layout=layout,
                part=(sharing.place, len(sharing.places)),
            )
            commit = save.start("committing", directory, partial(store.commit, save.step, manifest), here=sharing.leads)
            yield
            commit.thread.join()
            self._collect(commit.problem, None, "end of saving")
        except CheckpointError as error:
            if sharing.leads:
                store.abandon(save.step)
                if committing and len(sharing.places) > 1:
                    store.remove(save.step)  # A part is of no use without the others.
            return Saved(step=save.step, nbytes=nbytes, failure=str(error))
        try:
            keep = self._steps_to_keep(save.step, content.keep)
            retire = save.start("retiring", store.root, partial(store.retire, keep), here=sharing.leads)
            yield
            retire.thread.join()
            self._collect(retire.problem or store.trash.problems(), None, "end of saving")
        except CheckpointError as error:
            return Saved(step=save.step, nbytes=nbytes, warning=str(error))
        return Saved(step=save.step, nbytes=nbytes)

    def release(self, owner: int) -> float:
        """Return when bucket `owner` may be updated; the seconds that were waited."""
        return self._save.writer.release(owner, self._post_progress) if self._save else 0.0

    def _post_progress(self) -> None:
        self._mesh.post(Activity.SAVE)

    def poll(self) -> Saved | None:
        """Between two steps: go on with the save in flight if all ranks can; returns how it ended, once it has."""
        if self._save is None:
            return None
        busy = self._mesh.world.max_(torch.tensor([int(self._save.busy)]), "progress of the checkpoint")
        return None if int(busy[0]) else self._advance(self._save)

    def finish(self) -> Saved | None:
        """Wait until the save in flight has ended, if there is one; returns how it ended."""
        saved: Saved | None = None
        while self._save is not None:
            saved = self._advance(self._save)
        return saved

    def _advance(self, save: _Save) -> Saved | None:
        """Go to the next stage, with all ranks; returns how the save ended, if it has."""
        if save.stages is not None:
            try:
                next(save.stages)
            except StopIteration as end:
                self._save = None
                saved: Saved | None = end.value
                return saved
        return None

    def give_up(self) -> None:
        """Forget the save in flight without a collective call; returns when no thread works on it any more."""
        save, self._save = self._save, None
        if save is None:
            return
        save.writer.end()
        if save.task is not None:
            save.task.thread.join()
        if self.sharing.leads:
            self.store.abandon(save.step)
            self.store.trash.wait()

    def amend(self, step: int, name: str, data: bytes, keep: Callable[[], set[int]]) -> Saved:
        """Put a small file into a checkpoint that is there, then remove those that `keep`, as in `SaveContent`, no longer names."""
        problem = ""
        if self._mesh.rank == 0:
            with disk_call("amending", self.store.path(step)):
                problem = _attempt(partial(self.store.amend, step, name, data))
        failure = self._failure_of_any(problem)
        if failure:
            return Saved(step=step, nbytes=0, failure=failure)
        try:
            steps = self._steps_to_keep(step, keep)
            with disk_call("retiring", self.store.root):
                problem = _attempt(partial(self.store.retire, steps)) if self.sharing.leads else ""
            self._collect(problem, None, "end of saving")
        except CheckpointError as error:
            return Saved(step=step, nbytes=0, warning=str(error))
        return Saved(step=step, nbytes=0)

    def remove_old(self, seconds: float) -> str:
        """Wait at most `seconds` until old checkpoints are removed; returns what ranks could not remove, the same on all."""
        deadline = time.monotonic() + seconds
        while not self.store.trash.wait(seconds=1.0) and time.monotonic() < deadline:
            self._post_progress()
        return self._failure_of_any(self.store.trash.problems())

    def _steps_to_keep(self, step: int, keep: Callable[[], set[int]]) -> list[int]:
        """The steps whose checkpoints stay, which rank 0 decides. Raises `CheckpointError` on all ranks where it cannot."""
        steps: list[int] = []
        problem = _attempt(lambda: steps.extend(sorted({step, *keep()}))) if self._mesh.rank == 0 else ""
        found: list[int] = self._collect(problem, steps, "the checkpoints that stay")[0]
        return found

    def _collect(self, problem: str, rows: Any, what: str) -> list[Any]:
        """Every rank's JSON value `rows`. Raises `CheckpointError` on all ranks where some rank has a problem."""
        text = json.dumps([problem.encode(errors="backslashreplace").decode(), rows])
        answers = [json.loads(answer) for answer in self._mesh.world.gather_bytes(text.encode(), what)]
        failed = [f"rank {rank}: {answer[0]}" for rank, answer in enumerate(answers) if answer[0]]
        if failed:
            raise CheckpointError(failed[0] + (f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""))
        return [answer[1] for answer in answers]

    def _failure_of_any(self, problem: str) -> str:
        """What ranks could not do, the same on all of them; empty where no rank has a problem."""
        try:
            self._collect(problem, None, "end of saving")
        except CheckpointError as error:
            return str(error)
        return ""


def _attempt(task: Callable[[], object]) -> str:
    """Run a task; returns why it failed, or an empty text."""
    try:
        task()
    except ZeromeshError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - all ranks have to know
        return f"{type(error).__name__}: {error}"
    return ""


def _rows_by_file(pieces: Sequence[ChecksumPiece]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for piece in pieces:
        found.setdefault(piece.path, []).append(piece.row())
    return found


def _records(files: Sequence[FileLayout], rows_of_ranks: Sequence[Mapping[str, list[Any]]]) -> dict[str, FileRecord]:
    """The records of files, from the rows that each rank has of their pieces."""
    found = {}
    for file in files:
        rows = sorted(row for each in rows_of_ranks for row in each.get(file.path, []))
        pieces = [
            ChecksumPiece(path=file.path, begin=begin, end=end, checksum=digest, rank=rank)
            for begin, end, digest, rank in rows
        ]
        found[file.path] = FileRecord(nbytes=file.nbytes, pieces=tuple(pieces))
    return found
