"""`Saver`: one checkpoint at a time, written by all ranks while training goes on, and committed between two steps.

    begin    all ranks: the files are made, edges exchanged; each rank begins to write its shards
    release  before an update: what it changes is written
    poll     between steps: once every rank has written, the checksums are collected and the checkpoint is committed
    finish   the same, waiting

Threads never take part in collectives: ranks agree between steps, in their own thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.holding import Holding
from zeromesh.checkpoint.manifest import FileRecord, Manifest, Piece, StoredTensor
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.checkpoint.tensor_files import FileLayout, TensorSpec, index_files, plan_files
from zeromesh.checkpoint.writer import Edge, ShardWriter, Source, edges_of
from zeromesh.errors import CheckpointError, ZeromeshError
from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.watch import Activity


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What goes into a checkpoint.

    `tensors` is the same on all ranks. `holdings` is what this rank writes; together the ranks' make every tensor once.
    `order` has each owner's position in the next update. `documents` writes the small files into a directory. `after` is called
    on rank 0 once the checkpoint is there; what it cannot do does not undo the save.
    """

    tensors: Sequence[TensorSpec]
    holdings: Sequence[Holding]
    order: Mapping[int, int]
    documents: Callable[[Path], None]
    after: Callable[[], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """How a save ended. `failure` is empty where the checkpoint is there; all ranks get the same.

    `warning` says on rank 0 what went wrong afterwards.
    """

    step: int
    nbytes: int
    failure: str = ""
    warning: str = ""


class _Stage(Enum):
    WRITING = "writing"
    COMMITTING = "committing"


@dataclass(kw_only=True, slots=True)
class _Save:
    """A save in flight."""

    step: int
    content: Content
    files: Sequence[FileLayout]
    writer: ShardWriter
    stage: _Stage = _Stage.WRITING
    commit: threading.Thread | None = None
    failure: str = ""
    warning: str = ""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def busy(self) -> bool:
        """Whether this rank still works on the present stage."""
        if self.stage is _Stage.WRITING:
            return self.writer.running
        return self.commit is not None and self.commit.is_alive()


class Saver:
    """Saves to a store. Rank 0 makes directories and commits; all ranks call every method alike."""

    def __init__(self, store: CheckpointStore, mesh: Mesh) -> None:
        self.store = store
        self._mesh = mesh
        self._save: _Save | None = None

    @property
    def in_flight(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._save.step if self._save else None

    def begin(self, step: int, content: Content) -> None:
        """Begin to write a checkpoint; none may be in flight.

        Raises:
            CheckpointError: on all ranks, with what some rank could not do; nothing of it is left then.
        """
        if self._save is not None:
            raise CheckpointError(f"the checkpoint of step {self._save.step} is still being written")
        files = plan_files(content.tensors, self._mesh.world_size)
        failure = self._create(step, content, files) if self._mesh.rank == 0 else ""
        self._agree(step, failure)
        sources = self._sources(files, content.holdings)
        received = self._exchange(edges_of(sources))
        directory = self.store.temporary(step)
        writer = ShardWriter(directory, files, sources, received, content.order, self._mesh.rank)
        self._save = _Save(step=step, content=content, files=files, writer=writer)
        writer.start()

    def _create(self, step: int, content: Content, files: Sequence[FileLayout]) -> str:
        try:
            directory = self.store.create(step, files)
            content.documents(directory)
            for path, text in index_files(files).items():
                (directory / path).write_bytes(text)
        except ZeromeshError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - other people's `save_pretrained` among them; all ranks have to know
            return f"{str(self.store.temporary(step))!r} cannot be written: {type(error).__name__}: {error}"
        return ""

    def _agree(self, step: int, failure: str) -> None:
        """Raise `CheckpointError` on all ranks when one has a failure."""
        said = self._failures(failure)
        if said:
            if self._mesh.rank == 0:
                self.store.abandon(step)
            raise CheckpointError(f"the checkpoint of step {step} was not written: {said}")

    def _failures(self, failure: str) -> str:
        every = [
            text.decode()
            for text in self._mesh.world.gather_bytes(failure.encode(errors="backslashreplace"), "end of saving")
        ]
        found = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text]
        return found[0] + (f" (and {len(found) - 1} more ranks)" if len(found) > 1 else "") if found else ""

    def _sources(self, files: Sequence[FileLayout], holdings: Sequence[Holding]) -> list[Source]:
        places = {(spec.kind, spec.name): (number, at) for number, file in enumerate(files) for spec, at in file.places}
        found = []
        for holding in holdings:
            spec = holding.spec
            number, at = places[spec.kind, spec.name]
            for run in holding.region.runs(holding.interval):
                first = run.local - holding.interval.start
                source = Source(
                    file=number,
                    begin=at + run.logical * spec.dtype.itemsize,
                    memory=holding.memory[first : first + run.length],
                    dtype=spec.dtype,
                    owner=holding.owner,
                )
                found.append(source)
        if self._mesh.rank == 0:
            headers = [torch.frombuffer(bytearray(file.header), dtype=torch.uint8) for file in files]
            found += [Source(file=n, begin=0, memory=header, dtype=torch.uint8) for n, header in enumerate(headers)]
        return found

    def _exchange(self, edges: Sequence[Edge]) -> list[Edge]:
        """Give every rank's edges to all; returns the others'."""
        head = json.dumps([[edge.file, edge.begin, len(edge.data)] for edge in edges]).encode()
        payload = len(head).to_bytes(8, "little") + head + b"".join(edge.data for edge in edges)
        received = []
        for rank, theirs in enumerate(self._mesh.world.gather_bytes(payload, "exchange of edges")):
            if rank == self._mesh.rank:
                continue
            at = 8 + int.from_bytes(theirs[:8], "little")
            for file, begin, length in json.loads(theirs[8:at]):
                received.append(Edge(file=file, begin=begin, data=theirs[at : at + length]))
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

    def _advance(self, save: _Save) -> Saved | None:
        """Complete the present stage, with all ranks; how the save ended, if it has."""
        if save.stage is _Stage.WRITING:
            manifest = self._collect(save)
            if isinstance(manifest, Saved):
                return manifest
            save.stage = _Stage.COMMITTING
            if self._mesh.rank == 0:
                save.commit = threading.Thread(target=self._commit, args=(save, manifest), name="zeromesh-commit")
                save.commit.start()
            return None
        while save.commit is not None and save.commit.is_alive():
            save.commit.join(timeout=1.0)
            self._tell()
        return self._end(save, self._failures(save.failure))

    def _collect(self, save: _Save) -> Manifest | Saved:
        """The pieces that all ranks have written, as a manifest; or the end of a save that failed."""
        failure, rows = "", []
        try:
            numbers = {file.path: number for number, file in enumerate(save.files)}
            rows = [[numbers[piece.path], *piece.row()] for piece in save.writer.join(self._tell)]
        except ZeromeshError as error:
            failure = str(error)
        every = self._mesh.world.gather_bytes(json.dumps([failure, rows]).encode(), "checksums of the checkpoint")
        answers = [json.loads(text) for text in every]
        failed = [f"rank {rank}: {answer[0]}" for rank, answer in enumerate(answers) if answer[0]]
        if failed:
            return self._end(save, failed[0] + (f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""))
        return _manifest(save, [row for _, rows in answers for row in rows])

    def _commit(self, save: _Save, manifest: Manifest) -> None:
        try:
            self.store.commit(save.step, manifest)
        except ZeromeshError as error:
            save.failure = str(error)
        except Exception as error:  # noqa: BLE001 - the training thread has to see it
            save.failure = f"{type(error).__name__}: {error}"
        if save.failure:
            return
        try:
            save.content.after()
        except Exception as error:  # noqa: BLE001 - as above
            save.warning = f"{type(error).__name__}: {error}"

    def _end(self, save: _Save, failure: str) -> Saved:
        if failure and self._mesh.rank == 0:
            self.store.abandon(save.step)
        self._save = None
        return Saved(step=save.step, nbytes=save.nbytes, failure=failure, warning=save.warning)


def _manifest(save: _Save, rows: Sequence[Sequence[Any]]) -> Manifest:
    pieces: dict[int, list[Piece]] = {}
    for number, begin, end, checksum, rank in sorted(rows, key=lambda row: (row[0], row[1])):
        path = save.files[number].path
        pieces.setdefault(number, []).append(Piece(path=path, begin=begin, end=end, checksum=checksum, rank=rank))
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
        layout=save.content.layout,
    )
