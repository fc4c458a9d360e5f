"""Checkpoints in a directory, each created as `step-N.tmp` and removed as `.trash-...`; and the creation of any model directory."""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io.file_slices import record_of
from zeromesh.checkpoint.io.format import INDEX, SINGLE, FileLayout, FileRecord, Manifest, TensorSpec
from zeromesh.checkpoint.io.reader import manifest_of
from zeromesh.checkpoint.io.writer import in_thread
from zeromesh.errors import ConfigError, StorageError, counted
from zeromesh.files import read_whole, refusals, try_lock, write_whole
from zeromesh.offload import tensor_bytes
from zeromesh.offload.io.direct_io import PositionalFile, sync_directory

FOLDER = "checkpoints"  # in a run's directory
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.tmp|\.trash-.+|\.seen-[0-9a-f]+-\d+")
"""Names of directories being written or removed, and of the files by which ranks find who shares a directory (`Saver.storage`)."""
_SPARE_BYTES = 16 << 20  # kept free for the manifest, other small files, and directory entries
_SYNCED_BYTES = 256 << 20  # between two syncs to the disk, which bounds a single wait
_ROOM_SECONDS = 10.0  # that a save waits for the removal of old checkpoints if the disk has too little space
_MOST_TRASH = 4  # checkpoints that may wait for removal; a slower disk delays retention, and in the end the next save


class CheckpointStore:
    """Checkpoints in `root`. Only the process that holds the run's lock may change them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trash = Remover()

    def steps(self) -> list[int]:
        """List the steps of the checkpoints in the directory, newest first, intact or not."""
        paths = self.root.iterdir() if self.root.is_dir() else ()
        found = [self.step_of(path) for path in paths if path.is_dir()]
        return sorted((step for step in found if step is not None), reverse=True)

    def paths(self) -> list[Path]:
        """List the directories of the checkpoints, newest first, intact or not."""
        return [*map(self.path, self.steps())]

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        return self.root / f"step-{step:08d}.tmp"

    @staticmethod
    def step_of(path: Path) -> int | None:
        return int(match[1]) if (match := _STEP.fullmatch(path.name)) else None

    def leftovers(self) -> list[str]:
        """List directories and files that are being written or removed, or were when a run was killed."""
        names = [path.name for path in self.root.iterdir()] if self.root.is_dir() else []
        return sorted(filter(_LEFTOVER.fullmatch, names))

    def clean(self) -> None:
        """Remove the directories and files of saves and removals that a killed run has left."""
        for path in (self.root / name for name in self.leftovers()):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def create(self, step: int, files: Sequence[FileLayout], part_nbytes: int | None = None) -> Path:
        """Create the temporary directory of a checkpoint, with its files at their full sizes; `part_nbytes` are the bytes that will
        be written here of a part, whose files are sparse. Raises `StorageError` without space, or if it cannot be written."""
        directory = self.temporary(step)
        with refusals(directory, "written"):
            self.trash.remove(self._rename_to_trash(step, directory))  # Left-over files may have other sizes.
            for folder in {directory, *((directory / file.path).parent for file in files)}:
                folder.mkdir(parents=True, exist_ok=True)
        self.require_room(sum(file.nbytes for file in files) if part_nbytes is None else part_nbytes)
        for file in files:
            PositionalFile(directory / file.path, write=True, size=file.nbytes, sparse=part_nbytes is not None).close()
        return directory

    def require_room(self, nbytes: int) -> None:
        """Raise `StorageError` if a checkpoint of `nbytes` bytes would not fit."""
        with refusals(self.root, "read"):
            if shutil.disk_usage(self.root).free < nbytes + _SPARE_BYTES:
                self.trash.wait(seconds=_ROOM_SECONDS)
            cure = "make room, lower checkpoint.keep_last, or set run.output_dir to a larger disk"
            _require_free(self.root, nbytes, f"{str(self.root)!r}: a checkpoint", cure)

    def commit(self, step: int, manifest: Manifest) -> None:
        """Turn the temporary directory into the checkpoint: write the manifest last, sync everything, then rename. `manifest` has
        the tensor files; all others are added. Raises `StorageError` or `CheckpointError` before the name appears."""
        directory, final = self.temporary(step), self.path(step)
        with refusals(directory, "written"):
            files = dict(manifest.files)
            for path in sorted(path for path in directory.rglob("*") if path.is_file()):
                name = path.relative_to(directory).as_posix()
                if name not in files and name != formats.MANIFEST:
                    # A new copy, since some libraries make files that only their owner may read.
                    files[name] = _write_small(directory, name, read_whole(path))
            self.put_manifest(directory, replace(manifest, step=step, files=files))
            replaced = publish(directory, final, partial(self._rename_to_trash, step, final))
            self.trash.remove(replaced)  # The old checkpoint is removed only after the new one's rename is on the disk.

    def amend(self, step: int, name: str, data: bytes) -> None:
        """Add the small file `name` to a committed checkpoint: first the file, then, atomically, a manifest that lists it. A kill
        leaves the checkpoint as it was, or at worst without `name`. Raises `StorageError` or `CheckpointError`."""
        directory = self.path(step)
        _, manifest = manifest_of(directory)
        others = {path: record for path, record in manifest.files.items() if path != name}
        with refusals(directory, "written"):
            if name in manifest.files:
                self.put_manifest(directory, replace(manifest, files=others))
            self.put_manifest(directory, replace(manifest, files={**others, name: _write_small(directory, name, data)}))

    @staticmethod
    def put_manifest(directory: Path, manifest: Manifest) -> None:
        """Write a manifest atomically, synced to disk, if readers accept it."""
        text = manifest.to_json()
        formats.parse_manifest(directory / formats.MANIFEST, text)
        write_whole(directory / formats.MANIFEST, text)
        sync_directory(directory)

    def abandon(self, step: int) -> None:
        """Remove the files of a failed save in a thread; those that remain are removed at the next start."""
        with suppress(OSError):
            self.trash.remove(self._rename_to_trash(step, self.temporary(step)))

    def retire(self, keep: Container[int]) -> None:
        """Remove all checkpoints but those of these steps, in the threads of `trash`."""
        self.trash.wait(left=_MOST_TRASH)
        for step in self.steps():
            if step not in keep:
                self.remove(step)

    def remove(self, step: int) -> None:
        self.trash.remove(self._rename_to_trash(step, self.path(step)))

    def _rename_to_trash(self, step: int, path: Path) -> Path | None:
        """Rename a directory, if it exists, to a `.trash-` name, so that it is not read while being removed; returns that path."""
        trash = self.root / f".trash-{step:08d}-{os.getpid()}-{time.monotonic_ns()}"
        return path.rename(trash) if path.exists() else None


def stores_at(path: Path) -> tuple[CheckpointStore, CheckpointStore]:
    """Return the stores in which checkpoints may lie for the path of a run or of its checkpoints."""
    return CheckpointStore(path / FOLDER), CheckpointStore(path)


def newest_at(path: Path) -> Path:
    """Return the newest checkpoint of a run or of its checkpoints, or `path` itself where there is none."""
    return next((found for store in stores_at(path) for found in store.paths()), path)


def _write_small(directory: Path, name: str, data: bytes) -> FileRecord:
    write_whole(directory / name, data)
    return record_of(name, BytesIO(data), len(data))


def _require_free(directory: Path, nbytes: int, what: str, cure: str) -> None:
    if (free := shutil.disk_usage(directory).free) < nbytes + _SPARE_BYTES:
        raise StorageError(f"{what} takes {nbytes:,} bytes, and {_SPARE_BYTES:,} stay free; {free:,} are free; {cure}")


def publish(temporary: Path, final: Path, set_aside: Callable[[], Path | None] = lambda: None) -> Path | None:
    """Rename the directory `temporary` to `final`, after syncing its entries to the disk, and return what `set_aside` does, which
    first renames whatever is at `final`. Raises `StorageError` or `OSError`."""
    for folder in {temporary, *(path for path in temporary.rglob("*") if path.is_dir())}:
        sync_directory(folder)
    replaced = set_aside()
    temporary.rename(final)
    sync_directory(final.parent)
    return replaced


@contextmanager
def write_directory(out: Path, nbytes: int, *, update: bool = False) -> Iterator[Path]:
    """Inside the block, fill a new directory with about `nbytes` bytes; it becomes `out` when the block ends without an error, and
    is removed after one. With `update`, the new files replace those of a directory `out`, weights last, and its other files stay.
    Raises `ConfigError` where there is something at `out` that is not updated; `StorageError` where it cannot be written."""
    out = Path(os.path.realpath(out))
    # Short, since `out` may have the longest allowed name. An update takes what a kill has left of the one before; else the name is
    # random, as the first of two new directories stays.
    token = hashlib.sha256(os.fsencode(out.name)).hexdigest()[:16] if update else secrets.token_hex(8)
    temporary = out.with_name(f".zeromesh-{token}.tmp")
    try:
        if out.exists() and not out.is_dir() and update:
            raise StorageError(f"{str(out)!r} cannot be written (there is a file of this name; give a directory)")
        if not update and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not an empty directory; give another one, or remove it first")
        with _only_writer(temporary, out):
            if not update:  # A model's last weights are worth a try wherever they may fit.
                _require_free(temporary, nbytes, repr(str(out)), "make room")
            yield temporary
            for file in (path for path in temporary.rglob("*") if path.is_file() and not path.is_symlink()):
                with PositionalFile(file, direct=False) as opened:
                    opened.sync()
            if not (update and out.exists()):
                publish(temporary, out)  # Only where there is nothing yet, or an empty directory.
                return
            for path in sorted(temporary.iterdir(), key=lambda path: path.name.endswith((".safetensors", INDEX))):
                if (out / path.name).is_dir():
                    shutil.rmtree(out / path.name)
                path.replace(out / path.name)
            temporary.rmdir()
            sync_directory(out)
    except OSError as error:
        if str(error.filename2) == str(out) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            problem = "something else has been written there meanwhile"
            raise ConfigError(f"{out} cannot be written: {problem}; give another directory, or try again") from error
        where = str(error.filename or out).replace(str(temporary), str(out))
        raise StorageError(f"{where!r} cannot be written: {error.strerror or error}") from error


@contextmanager
def _only_writer(temporary: Path, out: Path) -> Iterator[None]:
    """Make an empty directory, which an error in the block removes. Raises `StorageError` where another process has it."""
    temporary.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # What a link names is not emptied.
    try:
        locked = True
        with suppress(OSError):  # Not every file system locks directories.
            locked = try_lock(descriptor)
        if not locked or not temporary.exists():
            raise StorageError(f"{str(out)!r} cannot be written (it is being written already; wait for that to end)")
        try:
            for left in temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def write_weights(
    folder: Path, specs: Sequence[TensorSpec], values: Iterable[tuple[str, torch.Tensor]], moved: Callable[[], None]
) -> list[str]:
    """Write the safetensors files of a model, with an index if there are several, synced to disk; returns their names. `values`
    yields the tensors of `specs` by name, in any order; one is held at a time. `moved` is called while data is written.
    Raises `StorageError` on failed writes, and for a tensor that differs from its spec."""
    layouts = formats.plan_files(specs, 1)
    if len(layouts) == 1:
        layouts = (replace(layouts[0], path=SINGLE),)
    places: dict[str, tuple[PositionalFile, TensorSpec]] = {}
    with ExitStack() as opened:
        for layout in layouts:
            file = opened.enter_context(PositionalFile(folder / layout.path, write=True, size=layout.nbytes))
            file.write(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8), 0)
            places |= {each.name: (file, each) for each in layout.tensors}
        unsynced = 0
        for name, tensor in values:
            file, spec = places[name]
            if tuple(tensor.shape) != spec.shape:
                raise StorageError(f"{name} has shape {list(tensor.shape)}, {list(spec.shape)} was announced")
            data = tensor_bytes(tensor.to("cpu", spec.dtype))
            for start in range(0, data.numel(), _SYNCED_BYTES):
                part = data[start : start + _SYNCED_BYTES]
                file.write(part, spec.begin + start)
                unsynced += part.numel()
                if unsynced >= _SYNCED_BYTES:
                    file.sync()
                    unsynced = 0
                moved()
        for file in {file for file, _ in places.values()}:
            file.sync()
    indices = formats.index_files(layouts) if len(layouts) > 1 else {}
    for path, text in indices.items():
        write_whole(folder / path, text)
    return [*(layout.path for layout in layouts), *indices]


class Remover:
    """Removes directories in threads, which do not keep a process from ending. A failure is retried at the next removal."""

    def __init__(self) -> None:
        self._tasks: dict[Path, Future[Any]] = {}
        """The removal task of each directory, which returns a failure's reason; replaced as a whole, for other threads."""
        self._reported: set[Path] = set()

    def remove(self, path: Path | None) -> None:
        if path is None:
            return
        tasks = {each: task for each, task in self._tasks.items() if not task.done()}
        for each in (*self._refused(), path):
            tasks[each] = in_thread("remove", partial(_remove, each), daemon=True)
        self._tasks = tasks

    def wait(self, *, left: int = 0, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until all but the newest `left` removals have ended; returns True if they have."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        return not wait(tasks[: max(0, len(tasks) - left)], seconds).not_done

    def problems(self) -> str:
        """Report directories that could not be removed and were not reported before; empty without any."""
        new = {path: why for path, why in self._refused().items() if path not in self._reported}
        self._reported.update(new)
        first = next(iter(new.values()), "")
        return first + (f" (and {counted(len(new) - 1, 'more directory')})" if len(new) > 1 else "")

    def _refused(self) -> dict[Path, str]:
        return {path: task.result() for path, task in self._tasks.items() if task.done() and task.result()}


def _remove(path: Path) -> str:
    """Remove a directory, as far as possible; returns the reason if it still exists."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        name = Path(error.filename if error.filename is not None else path).name
        return f"{str(path)!r} is still there: {name!r} cannot be removed: {error.strerror or error}"
    return ""
