"""`Saver` writes one checkpoint at a time by all ranks while training continues, and commits it between two steps. Background
threads never take part in collectives: ranks agree between steps, in their main thread."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io import writer as writers
from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.checkpoint.io.format import ChecksumPiece, FileLayout, FileRecord, Manifest, TensorSpec
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, StorageError
from zeromesh.files import disk_call, open_regular, refusals, write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Ledger, Purpose, Tier
from zeromesh.telemetry.status_board import Activity


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveContent:
    """The content of a checkpoint: all `tensors`, alike on all ranks, of which the `shards` of all ranks cover every element once.
    `order` has the position of each bucket (`owner`) in the next update. `documents` writes the small files into a directory.
    `keep`, called on rank 0 after the commit, returns the steps of the checkpoints to keep; a failure to remove others is only a
    warning. `frozen` has weights that the checkpoint only refers to, and the files of their source."""

    tensors: Sequence[TensorSpec]
    shards: Sequence[TensorShard]
    order: Mapping[int, int]
    documents: Callable[[Path], None]
    keep: Callable[[], set[int]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    frozen: Manifest = field(default_factory=lambda: Manifest(step=0, files={}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The result of a save, alike on all ranks: why it failed, if so, and a `warning` if old ones could not be removed."""

    step: int
    nbytes: int
    failure: str = ""
    warning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStorage:
    """The number of `parts` of a checkpoint, one for each directory that some ranks share, and the `ranks` that share this rank's
    and write `part` there; the first of them (`leads` is True) creates and commits the files."""

    parts: int
    part: int
    ranks: tuple[int, ...]
    leads: bool


_Stages = Generator[None, None, Saved]


class Saver:
    """Saves checkpoints to a store while training goes on. All ranks make one, and make the same calls of its methods."""

    def __init__(self, store: CheckpointStore, mesh: Mesh, ledger: Ledger | None = None) -> None:
        """`ledger` counts the copies in host memory that a save of tensor ranks holds (`columns_to_rows`) until it ends."""
        self.store, self._mesh = store, mesh
        self._ledger = ledger or Ledger()
        self._copied = 0
        self.in_flight: int | None = None  # the step whose checkpoint is being written
        self._writer: writers.ShardWriter | None = None
        self._remaining: _Stages | None = None
        self._task: Future[Any] = Future()

    @cached_property
    def storage(self) -> SharedStorage:
        """The groups of ranks that share the store's directory, which is created if absent: every rank creates a file there, and
        the lowest rank whose file it sees leads its group. All ranks call it; raises `StorageError` on all."""
        directory, world, rank, what = self.store.root, self._mesh.world, self._mesh.rank, "look at the directory"
        token = world.gather_json(secrets.token_hex(8), what)[0]
        marks = [directory / f".seen-{token}-{each}" for each in range(world.size)]

        def put() -> None:
            with refusals(directory, "written"):
                directory.mkdir(parents=True, exist_ok=True)
                os.close(open_regular(marks[rank], os.O_WRONLY | os.O_CREAT))

        try:
            world.all_or_raise(what, put, StorageError)
            leader = next(other for other, mark in enumerate(marks) if os.path.exists(mark))
            leaders = [row[0] for row in world.gather_integers([leader])]
        finally:
            with contextlib.suppress(OSError):
                marks[rank].unlink(missing_ok=True)
        firsts = sorted(set(leaders))
        ranks = tuple(each for each, found in enumerate(leaders) if found == leader)
        return SharedStorage(parts=len(firsts), part=firsts.index(leader), ranks=ranks, leads=leader == rank)

    def require_room(self, tensors: Sequence[TensorSpec]) -> None:
        """Raise `StorageError` on all ranks if a checkpoint of these tensors would not fit on some disk, by its share of ranks."""
        nbytes = sum([spec.nbytes for spec in tensors]) * len(self.storage.ranks) // self._mesh.world_size
        require = partial(self.store.require_room, nbytes) if self.storage.leads else lambda: None
        self._mesh.world.all_or_raise("look for room", require, StorageError)

    def begin(self, step: int, content: SaveContent) -> None:
        """Plan the files on all ranks, exchange the bytes of disk blocks that they share, and begin to write; no save may be in
        flight. Raises `CheckpointError` on all ranks, and removes the files then."""
        if self.in_flight is not None:
            raise CheckpointError(f"the checkpoint of step {self.in_flight} is still being written")
        mesh, shards = self._mesh, list[TensorShard]()
        files = formats.plan_files(content.tensors, mesh.world_size)
        storage, store, part_nbytes = self.storage, self.store, None

        def create() -> None:
            with disk_call("creation", store.temporary(step)):
                directory = store.create(step, files, part_nbytes)
                if mesh.rank == 0:
                    content.documents(directory)
                    for path, text in formats.index_files(files).items():
                        write_whole(directory / path, text, sync=False)

        try:
            self._on_all_ranks(lambda: shards.extend(writers.columns_to_rows(content.shards, mesh.tensor, mesh.device)))
            own = {id(shard.values) for shard in content.shards}
            copies = [each.values for each in shards if each.owner is None and id(each.values) not in own]
            self._copied = sum(copy.nbytes for copy in copies)
            self._ledger.add(Tier.HOST, Purpose.STAGING, self._copied)
            runs = writers.plan_runs(files, shards, mesh.rank)
            pieces = writers.plan_pieces(files, runs, self._exchange(writers.bytes_for_others(runs)), content.order)
            if storage.parts > 1:
                written = mesh.world.gather_integers([sum(piece.where.length for piece in pieces)])
                part_nbytes = sum(written[rank][0] for rank in storage.ranks)
                # A name of the save, so that parts of two saves do not match.
                save = mesh.world.gather_json(secrets.token_hex(8), "the name of the save")[0]
                content = replace(content, layout={**content.layout, "save": save})
            self._on_all_ranks(create if storage.leads else lambda: None)
        except CheckpointError as error:
            self._end()
            if storage.leads:
                store.abandon(step)
            raise CheckpointError(f"the checkpoint of step {step} was not written: {error}") from error
        writer = writers.ShardWriter(store.temporary(step), pieces, mesh.rank, mesh.device)
        stages = self._stages(step, files, writer, content)
        next(stages)
        self.in_flight, self._writer, self._remaining = step, writer, stages

    def _exchange(self, own: Sequence[tuple[str, int, bytes]]) -> list[tuple[str, int, bytes]]:
        """Send this rank's bytes (file, first byte, data) of other ranks' blocks; returns those received for its own blocks."""
        heads = json.dumps([[path, begin, len(data)] for path, begin, data in own]).encode()
        sent = b"".join([heads, b"\n", *(data for _, _, data in own)])
        received: list[tuple[str, int, bytes]] = []
        for rank, found in enumerate(self._mesh.world.gather_bytes(sent, "exchange of shared blocks")):
            stream = BytesIO(found)
            rows = json.loads(stream.readline()) if rank != self._mesh.rank else ()
            received += [(path, begin, stream.read(length)) for path, begin, length in rows]
        return received

    def _stages(self, step: int, files: Sequence[FileLayout], out: writers.ShardWriter, given: SaveContent) -> _Stages:
        """Run a save in stages: yields after the start of each background task; resumed, all ranks wait for the task together."""
        store, storage, directory = self.store, self.storage, self.store.temporary(step)
        saved = Saved(step=step, nbytes=sum(file.nbytes for file in files))
        committing = False
        try:
            self._task = out.start()
            yield
            what = "checksums of the checkpoint"
            rows = self._on_all_ranks(lambda: list(map(asdict, out.join(self._post_progress))), what)
            committing = True
            pieces: dict[str, list[ChecksumPiece]] = {file.path: [] for file in files}
            for row in sorted(chain(*(rows[rank] for rank in storage.ranks)), key=lambda row: row["begin"]):
                pieces[row["path"]].append(ChecksumPiece(**row))
            records = {each.path: FileRecord(nbytes=each.nbytes, pieces=tuple(pieces[each.path])) for each in files}
            away = given.frozen  # In a checkpoint of parts, the first part lists the source's pieces.
            others = away.files if not storage.part else {p: replace(r, pieces=()) for p, r in away.files.items()}
            manifest = Manifest(
                step=step,
                files={**records, **others},
                tensors=(*(tensor for file in files for tensor in file.tensors), *away.tensors),
                aliases=given.aliases,
                layout=given.layout,
                part=(storage.part, storage.parts),
                source=away.source,
            )
            commit = self._start("committing", directory, partial(store.commit, step, manifest), here=storage.leads)
            yield
            self._on_all_ranks(commit)
        except CheckpointError as error:
            if storage.leads:
                store.abandon(step)
                if committing and storage.parts > 1:
                    store.remove(step)  # A part is of no use without the others.
            return replace(saved, failure=str(error))
        return (yield from self._retire(saved, given.keep))

    def _retire(self, saved: Saved, keep: Callable[[], set[int]]) -> _Stages:
        try:
            kept = self._on_all_ranks(lambda: sorted({saved.step, *keep()}) if self._mesh.rank == 0 else [])[0]
            task = self._start("retiring", self.store.root, partial(self.store.retire, kept), here=self.storage.leads)
            yield
            self._on_all_ranks(task)
            return replace(saved, warning=self._not_removed())
        except CheckpointError as error:
            return replace(saved, warning=str(error))

    def _start(self, name: str, path: Path, work: Callable[[], Any], *, here: bool) -> Callable[[], Any]:
        """Run `work` in a background thread, or nothing if not `here`; the returned function waits for its result or error."""
        self._task = writers.in_thread(name, disk_call(name, path)(work) if here else lambda: None)
        return self._task.result

    def wait_until_copied(self, owner: int) -> None:
        if self._writer is not None:
            self._writer.wait_until_copied(owner, self._post_progress)

    def _post_progress(self) -> None:
        self._mesh.post(Activity.SAVE)

    def poll(self) -> Saved | None:
        """Go to the next stage of the save in flight if all ranks' tasks are done; returns its result once it has ended."""
        if self._remaining is None:
            return None
        busy = torch.tensor([int(not self._task.done())])
        busy_anywhere = self._mesh.world.all_reduce_max(busy, "progress of the checkpoint")
        return None if int(busy_anywhere[0]) else self.finish(whole=False)

    def finish(self, *, whole: bool = True) -> Saved | None:
        """Wait for the save in flight, or without `whole` for its present stage; returns the result of a save that has ended."""
        while self._remaining is not None:
            try:
                next(self._remaining)
            except StopIteration as end:
                self._end()
                saved: Saved = end.value
                return saved
            if not whole:
                break
        return None

    def _end(self) -> None:
        self.in_flight = self._writer = self._remaining = None
        self._ledger.add(Tier.HOST, Purpose.STAGING, -self._copied)
        self._copied = 0

    def give_up(self) -> None:
        """Abandon the save in flight without a collective call; returns when no thread works on it any more."""
        step, writer = self.in_flight, self._writer
        if step is None:
            return
        if writer is not None:
            writer.stop()
        self._end()
        wait([self._task])
        if self.storage.leads:
            self.store.abandon(step)
            self.store.trash.wait()

    def amend(self, step: int, name: str, data: bytes, keep: Callable[[], set[int]]) -> Saved:
        """Add a small file to a committed checkpoint while no save is in flight, then remove the checkpoints that `keep` omits."""
        path, here, saved = self.store.path(step), self._mesh.rank == 0, Saved(step=step, nbytes=0)
        try:
            self._on_all_ranks(self._start("amending", path, lambda: self.store.amend(step, name, data), here=here))
        except CheckpointError as error:
            return replace(saved, failure=str(error))
        self._remaining = self._retire(saved, keep)
        return self.finish() or saved

    def remove_old(self, seconds: float) -> str:
        """Wait at most `seconds` for the removal of old checkpoints; returns the failures of all ranks, alike on all."""
        deadline = time.monotonic() + seconds
        while not self.store.trash.wait(seconds=1.0) and time.monotonic() < deadline:
            self._post_progress()
        return self._not_removed()

    def _not_removed(self) -> str:
        """Return the removal error of the lowest rank that could not remove old checkpoints; empty if all could."""
        problems = [(rank, text) for rank, text in enumerate(self._on_all_ranks(self.store.trash.problems)) if text]
        return "".join(f"rank {rank}: {text}" if self._mesh.world_size > 1 else text for rank, text in problems[:1])

    def _on_all_ranks(self, work: Callable[[], Any], what: str = "end of saving") -> list[Any]:
        """Run `work` on all ranks and gather its results; raises `CheckpointError` on all ranks if it fails on one."""
        return self._mesh.world.all_or_raise(what, work, CheckpointError)
