"""`DurableTier`: slots on files that outlive their processes, in two places each, and records that say which place counts.

    zeromesh-LABEL-KEY.states     slot after slot, each in two places: as it was committed last, and as it is being written
    zeromesh-LABEL-KEY.commit0/1  the records of the latest two commits: digest and length of what follows, and JSON

An update reads a slot in one place and writes the other one, so that it moves no byte more than in place, and what was committed is
whole until the next update. A record that is half written does not have its digest, and does not count."""

import glob
import json
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from zeromesh.errors import StorageError
from zeromesh.offload.io.direct_io import PositionalFile, sync_directory
from zeromesh.offload.io.file_tier import PIECE, FileSlot, FileTier, checksum, open_in
from zeromesh.offload.io.transfer import Transfer

HEAD = struct.Struct("<QQ")  # of a record: the XXH3 digest of what follows, and its length in bytes
Record = dict[str, Any]
"""A commit: `generation`, `number`, `step`, `slots` (label, bytes, place, lengths and digests of parts), and `content`."""


class DurableSlot(FileSlot):
    """A slot in two places of a `DurableTier`; `place` is the number of the one that is read."""

    def __init__(self, tier: "DurableTier", nbytes: int, label: str) -> None:
        self.tier: DurableTier = tier
        self.nbytes, self.label = nbytes, label
        self._places = [FileTier.allocate(tier, nbytes, label) for _ in range(2)]
        self.place, self.moved = 0, False  # `moved`: what is written now is in the other place.
        self.kept = False  # True if it has the bytes of a record

    def read(self, begin: int, out: torch.Tensor) -> Transfer:
        return self._places[self.place].read(begin, out)

    def write(self, begin: int, data: torch.Tensor) -> Transfer:
        apart = self.tier.apart
        slot = self._places[self.place ^ apart]
        if not (apart and self.moved):
            self.moved, slot.digests = apart, {} if apart else None
        return slot.write(begin, data)

    def wait_for_writes(self) -> None:
        self._places[self.place].wait_for_writes()

    def parts(self, lengths: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Return the lengths and digests of the parts in which it was written, after all writes. Where they are not known, they are
        read, of `lengths` bytes each. Raises `StorageError`, also where bytes were not written."""
        slot = self._places[self.place]
        slot.wait_for_writes()
        if slot.digests is None:
            slot.digests, at = {}, 0
            for length in lengths or [PIECE] * (self.nbytes // PIECE) + [self.nbytes % PIECE]:
                slot.read(at, data := torch.empty(length, dtype=torch.uint8)).wait()
                slot.digests[at] = length, checksum(data)
                at += length
        found = [slot.digests[at] for at in sorted(slot.digests)]
        if (written := sum(length for length, _ in found)) != self.nbytes:
            raise StorageError(f"file tier, {self.label}: {written:,} of {self.nbytes:,} bytes were written")
        return found


class DurableTier(FileTier):
    """A file tier whose files stay, with `key` in their names. Other processes are kept out. Raises `StorageError`."""

    unwritten = None
    apart = False  # True while slots are written in the place that is not read
    generation = ""  # a text that the records of these processes have, and of no others
    resumed: Record | None = None  # the record whose states the slots have that are allocated

    def __init__(self, directories: Sequence[Path], label: str, *, key: str, **options: Any) -> None:
        self._name = f"zeromesh-{label}-{key}"
        super().__init__(directories, label, **options)
        names = [f"{self._name}.commit{number}" for number in range(2)]
        self._commits = [self._opened.enter_context(open_in(directories[0], each, direct=False)) for each in names]
        self._commits[0].lock()
        for directory in directories:
            sync_directory(directory)
        self.records = [found for found in map(_read_record, self._commits) if found is not None]
        found = [path for each in directories for path in each.glob(f"zeromesh-{glob.escape(label)}-*")]
        self.others = sorted(path for path in found if not path.name.startswith(self._name))
        """The files of other layouts."""
        self.other_step = max(map(_step_of, self.others), default=-1)
        """The newest step that another layout has committed; -1: none."""
        self.notes: list[str] = []  # on what was found
        self._slots: dict[str, DurableSlot] = {}
        self._number = 0
        self._committer = ThreadPoolExecutor(1, "zeromesh-commit")
        self._pending: Future[None] | None = None

    def _open_file(self, directory: Path, label: str) -> PositionalFile:
        return open_in(directory, f"{self._name}.states")

    def allocate(self, nbytes: int, label: str) -> DurableSlot:
        """Return the slot of that label in `resumed`, else a new one. Raises `StorageError` for a commit that has failed."""
        self.wait()  # The commit under way reads which slots there are.
        found = self._slots[label] = self._slots.get(label) or DurableSlot(self, nbytes, label)
        return found

    def resume(self, record: Record) -> None:
        """Let slots have the states of a record. Raises `StorageError`, naming the slot, for others than were committed."""
        for label, nbytes, place, parts in record["slots"]:
            slot = self.allocate(nbytes, label)
            slot.place, slot.kept = place, True
            if slot.parts([length for length, _ in parts]) != [*map(tuple, parts)]:
                raise StorageError(f"file tier, {label}: not the bytes of step {record['step']} ({', '.join(self.paths)})")
        self._number, self.resumed = record["number"], record

    def clear(self) -> None:
        """Forget all that is in the files."""
        self.forget()
        for file in self._files:
            file.clear()
        self.nbytes, self._reserved, self._slots, self.resumed = 0, [0] * len(self._files), {}, None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Inside the block slots are read as they are, and written apart; from its end on they are read as they were written."""
        self.wait()
        self.apart = True
        try:
            yield
        finally:
            self.apart = False
        for slot in self._slots.values():
            slot.place, slot.moved = slot.place ^ slot.moved, False

    def commit(self, step: int, content: bytes) -> None:
        """Begin to bring slots to the disk as they are after `step`, then a record with `content`."""
        self.wait()
        self._number += 1
        self._pending = self._committer.submit(self._commit, step, content)

    def _commit(self, step: int, content: bytes) -> None:
        slots = [(slot.label, slot.nbytes, slot.place, slot.parts()) for slot in self._slots.values()]
        for file in self._files:
            file.sync(data=True)
        record: Record = {"generation": self.generation, "number": self._number, "step": step, "slots": slots}
        data = sealed({**record, "content": content.decode()})
        file = self._commits[self._number % 2]
        file.write(torch.frombuffer(data, dtype=torch.uint8), 0)
        file.sync(data=True)

    def wait(self) -> None:
        """Wait for the commit that was begun. Raises `StorageError` if it has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def forget(self) -> None:
        """Let no record count any more, before slots are written in place."""
        self.wait()
        for file in self._commits:
            file.clear()
            file.sync()

    def remove(self) -> None:
        """Remove the files, and those of other layouts."""
        self.wait()
        for path in [*map(Path, self.paths), *(Path(each.path) for each in self._commits), *self.others]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._committer.shutdown()
        super().close()


def committed_step(directories: Sequence[Path], label: str) -> int:
    """Return the newest step that tiers with labels of this beginning have committed; -1: none."""
    found = (path for each in directories for path in each.glob(f"zeromesh-{glob.escape(label)}-rank*.commit?"))
    return max(map(_step_of, found), default=-1)


def _step_of(path: Path) -> int:
    if not path.suffix.startswith(".commit"):
        return -1
    with PositionalFile(path, direct=False) as file:
        found = _read_record(file)
    return -1 if found is None else found["step"]


def _read_record(file: PositionalFile) -> Record | None:
    file.read(data := torch.empty(file.size(), dtype=torch.uint8), 0)
    return unsealed(data.numpy().data)


def sealed(record: Record) -> bytearray:
    """Return a record as JSON, after a head by which `unsealed` knows that it is whole."""
    text = json.dumps(record).encode()
    return bytearray(HEAD.pack(xxhash.xxh3_64_intdigest(text), len(text)) + text)


def unsealed(data: memoryview) -> Record | None:
    """Return the record at the beginning of `data`; None if there is none, or it is half written."""
    digest, length = HEAD.unpack_from(data) if len(data) > HEAD.size else (0, 0)
    text = bytes(data[HEAD.size : HEAD.size + length])
    return json.loads(text) if xxhash.xxh3_64_intdigest(text) == digest else None
