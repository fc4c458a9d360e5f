"""`Saver`: one checkpoint at a time, written by all ranks while training goes on, and committed between two steps.

    begin    all ranks: the files are made, edges exchanged; each rank begins to write its shards
    release  before an update: what it changes is written
    poll     between steps: once every rank has written, bands are read back, then the checksums are collected and the checkpoint
             is committed; once it is there, old ones are removed
    finish   the same, waiting

Where each host has a directory of its own, each gets a part: the same files, with what the host's ranks have written in them.
Threads never take part in collectives: ranks agree between steps, in their own thread.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, FileRecord, Manifest, StoredTensor
from zeromesh.checkpoint.format.safetensors_layout import FileLayout, TensorSpec, index_files, plan_files
from zeromesh.checkpoint.io.interleaved import check_bands, digests_of
from zeromesh.checkpoint.io.tensor_shard import TensorShard
from zeromesh.checkpoint.io.write_planner import WritePlan, WritePlanner
from zeromesh.checkpoint.io.writer import ShardWriter, SharedBlock, edges_of
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

    `tensors` is the same on all ranks. `holdings` is what this rank writes; together the ranks' make every tensor once.
    `order` has each owner's position in the next update. `documents` writes the small files into a directory. `keep` says on
    rank 0, once the checkpoint is there, the steps of those that stay beside it; what cannot be removed does not undo the save.
    """

    tensors: Sequence[TensorSpec]
    holdings: Sequence[TensorShard]
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


class _Stage(Enum):
    WRITING = "writing"
    CHECKING = "checking"
    COMMITTING = "committing"
    RETIRING = "retiring"


@dataclass(kw_only=True, slots=True)
class _Save:
    """A save in flight."""

    step: int
    directory: Path
    content: SaveContent
    files: Sequence[FileLayout]
    writer: ShardWriter
    division: WritePlan
    layout: Mapping[str, Any]
    stage: _Stage = _Stage.WRITING
    task: threading.Thread | None = None
    problem: str = ""
    """Why the task could not do its work."""
    pieces: list[ChecksumPiece] = field(default_factory=list)
    """What this rank has written, and what it has read back."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def busy(self) -> bool:
        """Whether this rank still works on the present stage."""
        if self.stage is _Stage.WRITING:
            return self.writer.running
        return self.task is not None and self.task.is_alive()

    def run(self, stage: _Stage, task: Callable[[], object] | None) -> None:
        """Enter a stage, whose task on this rank, if it has one, runs in a thread."""
        self.stage, self.task, self.problem = stage, None, ""
        if task is None:
            return

        def work() -> None:
            with disk_call(stage.value, self.directory):
                self.problem = _problem(task)

        self.task = threading.Thread(target=work, name=f"zeromesh-{stage.value}")
        self.task.start()


class Saver:
    """Saves to a store; all ranks make one and call every method alike. The first rank that sees a directory makes and commits
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
        nbytes, ranks = sum(spec.nbytes for spec in tensors), self._mesh.world_size
        problem = ""
        if self.sharing.leads:
            try:
                self.store.require_room(nbytes * len(self.sharing.ranks) // ranks)
            except StorageError as error:
                problem = str(error)
        said = self._said(problem)
        if said:
            raise StorageError(said)

    @property
    def in_flight(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._save.step if self._save else None

    def begin(self, step: int, content: SaveContent) -> None:
        """Begin to write a checkpoint; none may be in flight.

        Raises:
            CheckpointError: on all ranks, with what some rank could not do; nothing of it is left then.
        """
        if self._save is not None:
            raise CheckpointError(f"the checkpoint of step {self._save.step} is still being written")
        files = plan_files(content.tensors, self._mesh.world_size)
        division = self._divide(files, content.holdings)
        share = None
        if len(self.sharing.places) > 1:
            written = self._mesh.world.gather_integers([division.nbytes])
            share = sum(written[rank][0] for rank in self.sharing.ranks)
        self._agree(step, self._create(step, content, files, share) if self.sharing.leads else "")
        received = self._exchange(edges_of(division.sources))
        directory, layout = self.store.temporary(step), self._layout(content)
        writer = ShardWriter(
            directory, files, division.sources, received, content.order, self._mesh.rank, division.shares
        )
        self._save = _Save(
            step=step,
            directory=directory,
            content=content,
            files=files,
            writer=writer,
            division=division,
            layout=layout,
        )
        writer.start()

    def _divide(self, files: Sequence[FileLayout], holdings: Sequence[TensorShard]) -> WritePlan:
        """What this rank writes. Ranks may write a block together where they see one directory from one host."""
        mesh, places = self._mesh, self.sharing.places
        divider = WritePlanner(files=files, holdings=holdings, rank=mesh.rank)
        every = mesh.world.gather_bytes(divider.said(), "who has what of divided tensors")
        names = [place.host for place in mesh.places]
        alone = (
            len(set(names)) == 1 and not mesh.one_host
        )  # One name, and no memory in common: who knows what is one host?
        place_of = {rank: number for number, ranks in enumerate(places) for rank in ranks}
        hosts = [(place_of[rank], str(rank) if alone else name) for rank, name in enumerate(names)]
        return divider.divide(every, hosts)

    def _layout(self, content: SaveContent) -> Mapping[str, Any]:
        """The layout to note. That of parts says of which save they are: two of one step are not parts of one checkpoint."""
        if len(self.sharing.places) == 1:
            return content.layout
        token = self._mesh.world.gather_bytes(secrets.token_hex(8).encode(), "the name of the save")[0].decode()
        return {**content.layout, "save": token}

    def _create(self, step: int, content: SaveContent, files: Sequence[FileLayout], share: int | None) -> str:
        try:
            with disk_call("creation", self.store.temporary(step)):
                directory = self.store.create(step, files, share)
                if self._mesh.rank == 0:
                    content.documents(directory)
                    for path, text in index_files(files).items():
                        write_whole(directory / path, text, sync=False)
        except ZeromeshError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - other people's `save_pretrained` among them; all ranks have to know
            return f"{str(self.store.temporary(step))!r} cannot be written: {type(error).__name__}: {error}"
        return ""

    def _agree(self, step: int, failure: str) -> None:
        """Raise `CheckpointError` on all ranks when one has a failure."""
        said = self._said(failure)
        if said:
            if self.sharing.leads:
                self.store.abandon(step)
            raise CheckpointError(f"the checkpoint of step {step} was not written: {said}")

    def _said(self, failure: str) -> str:
        """What ranks could not do, the same on all of them; empty where each could."""
        every = [
            text.decode()
            for text in self._mesh.world.gather_bytes(failure.encode(errors="backslashreplace"), "end of saving")
        ]
        found = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text]
        return found[0] + (f" (and {len(found) - 1} more ranks)" if len(found) > 1 else "") if found else ""

    def _exchange(self, edges: Sequence[SharedBlock]) -> list[SharedBlock]:
        """Give every rank's edges to all; returns the others'."""
        head = json.dumps([[edge.file, edge.begin, len(edge.data)] for edge in edges]).encode()
        payload = len(head).to_bytes(8, "little") + head + b"".join(edge.data for edge in edges)
        received = []
        for rank, theirs in enumerate(self._mesh.world.gather_bytes(payload, "exchange of edges")):
            if rank == self._mesh.rank:
                continue
            at = 8 + int.from_bytes(theirs[:8], "little")
            for file, begin, length in json.loads(theirs[8:at]):
                received.append(SharedBlock(file=file, begin=begin, data=theirs[at : at + length]))
                at += length
        return received

    # While it is written

    def release(self, owner: int) -> float:
        """Return when bucket `owner` may be updated; the seconds that this took."""
        return self._save.writer.release(owner, self._tell) if self._save else 0.0

    def _tell(self) -> None:
        self._mesh.post(Activity.SAVE)

    def poll(self) -> Saved | None:
        """Between two steps: go on with the save in flight if all ranks can; how it ended, once it has."""
        save = self._save
        if save is None:
            return None
        busy = self._mesh.world.max_(torch.tensor([int(save.busy)]), "progress of the checkpoint")
        return None if int(busy[0]) else self._advance(save)

    def finish(self) -> Saved | None:
        """Wait until the save in flight has ended, if there is one; how it did."""
        saved: Saved | None = None
        while self._save is not None:
            saved = self._advance(self._save)
        return saved

    def give_up(self) -> None:
        """Forget the save in flight, without a word to others; returns when no thread works on it any more."""
        save, self._save = self._save, None
        if save is None:
            return
        save.writer.end()
        if save.task is not None:
            save.task.join()
        if self.sharing.leads:
            self.store.abandon(save.step)
            self.store.trash.wait()

    def remove_old(self, seconds: float) -> str:
        """Wait until what has been set aside is removed, for at most `seconds`; what ranks could not remove, the same on all."""
        deadline = time.monotonic() + seconds
        while not self.store.trash.wait(seconds=1.0) and time.monotonic() < deadline:
            self._tell()
        return self._said(self.store.trash.problems())

    def _advance(self, save: _Save) -> Saved | None:
        """Complete the present stage, with all ranks; how the save ended, if it has."""
        if save.stage is _Stage.WRITING:
            return self._written(save)
        if save.task is not None:
            save.task.join()
        if save.stage is _Stage.CHECKING:
            return self._commit(save, save.problem)
        retiring = save.stage is _Stage.RETIRING
        said = self._said(save.problem or (self.store.trash.problems() if retiring else ""))
        if retiring:
            return self._end(save, warning=said)
        if said:
            return self._end(save, failure=said)
        problem, keep = self._kept(save.step, save.content.keep)
        if problem:
            return self._end(save, warning=problem)
        save.run(_Stage.RETIRING, partial(self.store.retire, keep) if self.sharing.leads else None)
        return None

    def amend(self, step: int, name: str, data: bytes, keep: Callable[[], set[int]]) -> Saved:
        """Put a small file into a checkpoint that is there, then remove those that `keep`, as in `SaveContent`, no longer names."""
        saved = Saved(step=step, nbytes=0)
        problem = ""
        if self._mesh.rank == 0:
            with disk_call("amending", self.store.path(step)):
                problem = _problem(partial(self.store.amend, step, name, data))
        said = self._said(problem)
        if said:
            return replace(saved, failure=said)
        problem, kept = self._kept(step, keep)
        if not problem:
            with disk_call("retiring", self.store.root):
                problem = _problem(partial(self.store.retire, kept)) if self.sharing.leads else ""
            problem = self._said(problem)
        return replace(saved, warning=problem)

    def _kept(self, step: int, keep: Callable[[], set[int]]) -> tuple[str, list[int]]:
        """The steps whose checkpoints stay, as rank 0 has it; or why it cannot say."""
        mine: tuple[str, list[int]] = ("", [])
        if self._mesh.rank == 0:
            try:
                mine = ("", sorted({step, *keep()}))
            except (ZeromeshError, OSError) as error:
                mine = (str(error), [])
        problem, steps = json.loads(
            self._mesh.world.gather_bytes(json.dumps(mine).encode(), "the checkpoints that stay")[0]
        )
        return problem, steps

    def _written(self, save: _Save) -> Saved | None:
        """This rank has written: go on to reading back what several ranks have written, or else to the end."""
        failure = ""
        try:
            save.pieces += save.writer.join(self._tell)
        except ZeromeshError as error:
            failure = str(error)
        if not save.division.woven:
            return self._commit(save, failure)
        answers = self._answers(failure, save.writer.digests, "checksums of bands")
        if isinstance(answers, str):
            return self._end(save, failure=answers)
        bands = save.division.bands
        digests = digests_of(bands, answers)
        directory, rank = self.store.temporary(save.step), self._mesh.rank

        def check() -> None:
            save.pieces += check_bands(directory, save.files, bands, digests, rank)

        save.run(_Stage.CHECKING, check)
        return None

    def _commit(self, save: _Save, failure: str) -> Saved | None:
        """Collect the pieces that ranks have, and commit; the end of a save of which some rank has a failure."""
        numbers = {file.path: number for number, file in enumerate(save.files)}
        rows = [[numbers[piece.path], *piece.row()] for piece in save.pieces]
        answers = self._answers(failure, rows, "checksums of the checkpoint")
        if isinstance(answers, str):
            return self._end(save, failure=answers)
        sharing = self.sharing
        here = [row for rank in sharing.ranks for row in answers[rank]]
        manifest = _manifest(save, here, (sharing.place, len(sharing.places)))
        save.run(_Stage.COMMITTING, partial(self.store.commit, save.step, manifest) if sharing.leads else None)
        return None

    def _answers(self, failure: str, rows: Sequence[Sequence[Any]], what: str) -> list[list[Any]] | str:
        """Every rank's rows; or what ranks could not do, the same on all of them."""
        every = self._mesh.world.gather_bytes(json.dumps([failure, rows]).encode(), what)
        answers = [json.loads(text) for text in every]
        failed = [f"rank {rank}: {answer[0]}" for rank, answer in enumerate(answers) if answer[0]]
        if failed:
            return failed[0] + (f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else "")
        return [answer[1] for answer in answers]

    def _end(self, save: _Save, *, failure: str = "", warning: str = "") -> Saved:
        if failure and self.sharing.leads:
            self.store.abandon(save.step)
            if save.stage is _Stage.COMMITTING and len(self.sharing.places) > 1:
                self.store.remove(save.step)  # A part whose siblings are not there.
        self._save = None
        return Saved(step=save.step, nbytes=save.nbytes, failure=failure, warning=warning)


def _problem(task: Callable[[], object]) -> str:
    """Run a task; why it could not be done, empty where it was."""
    try:
        task()
    except ZeromeshError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - all ranks have to know
        return f"{type(error).__name__}: {error}"
    return ""


def _manifest(save: _Save, rows: Sequence[Sequence[Any]], part: tuple[int, int]) -> Manifest:
    pieces: dict[int, list[ChecksumPiece]] = {}
    for number, begin, end, checksum, rank in sorted(rows, key=lambda row: (row[0], row[1])):
        path = save.files[number].path
        pieces.setdefault(number, []).append(
            ChecksumPiece(path=path, begin=begin, end=end, checksum=checksum, rank=rank)
        )
    return Manifest(
        step=save.step,
        files={
            file.path: FileRecord(nbytes=file.nbytes, pieces=tuple(pieces.get(number, ())))
            for number, file in enumerate(save.files)
        },
        tensors=tuple(
            StoredTensor(spec=spec, path=file.path, begin=at) for file in save.files for spec, at in file.places
        ),
        aliases=save.content.aliases,
        layout=save.layout,
        part=part,
    )
