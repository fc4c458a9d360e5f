"""The directory of a run: its resolved configuration, its metrics, the starts of its processes, and the activity of ranks."""

import errno
import io
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from zeromesh import __version__
from zeromesh.environment import is_earlier_start, number_of_start, secret_values, starts_of_run
from zeromesh.errors import CollectiveError, ConfigError, StorageError, counted
from zeromesh.files import open_regular, read_whole, refusals, remove_unfinished, try_lock, write_whole
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.accelerator import device_name, is_accelerator
from zeromesh.offload.memory.ledger import cpu_name
from zeromesh.telemetry.state_monitor import StateMonitor
from zeromesh.telemetry.status_board import TRACE_FOLDER
from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.monitoring import step_metrics
from zeromesh.trainer.monitoring.step_metrics import ENDED, MetricsWriter

_APPENDED = (step_metrics.METRICS, step_metrics.EVALUATIONS, step_metrics.SAMPLES)
"""Files that are replaced when the lock is taken from a process which may wake, and has them open."""
_KEPT: dict[Path, io.FileIO] = {}  # locks that this process has between two starts of its run
_ELSEWHERE = "; change run.output_dir"
_UNLOCKED = "; another run could not be kept out. Change that, or set run.output_dir to another file system"


class RunDirectory:
    """The directory into which rank 0 writes a run's files. Raises `StorageError` at construction if it cannot be written."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self._writes, self._goes_on = path, rank == 0, False
        if self._writes:
            with refusals(path, "written", _ELSEWHERE):
                path.mkdir(parents=True, exist_ok=True)
                if not os.access(path, os.W_OK | os.X_OK):
                    number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
                    raise OSError(number, os.strerror(number))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory in the block, and remove killed processes' files. Raises `ConfigError` when another run has it. The
        rank 0 of an earlier start of this run loses the lock: its host is stopped or cut off. Where ranks are lost, one that stays
        keeps other runs out until the next start takes the lock from it."""
        path = self.path / step_metrics.LOCK
        try:
            with self._locked(path) if self._writes else nullcontext():
                yield
        except CollectiveError as error:
            with suppress(OSError):
                if starts_of_run():
                    _KEPT[path] = file = io.FileIO(open_regular(path, os.O_RDWR), "r+")
                    if try_lock(file.fileno()):
                        _note(file, f"{ENDED} by {type(error).__name__}")
            raise

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        with ExitStack() as stack:
            with refusals(path, "opened and locked", _UNLOCKED):
                file = stack.enter_context(io.FileIO(open_regular(path, os.O_RDWR | os.O_CREAT), "r+"))
                free = try_lock(file.fileno())
                holder, _, start = file.read(200).decode(errors="replace").strip().partition("\n")
                self._goes_on = is_earlier_start(start) if holder else number_of_start() > 0
                if not free:
                    if start not in starts_of_run()[:-1]:
                        why = f"belongs to a run that is going on ({holder or 'another process'})"
                        raise ConfigError(f"{str(self.path)!r} {why}; wait for it, or give another run.name")
                    path.unlink()
                    file = stack.enter_context(io.FileIO(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+"))
                    try_lock(file.fileno())
                    open_files = () if holder.startswith(ENDED) else map(self.path.joinpath, _APPENDED)
                    for each in filter(os.path.lexists, open_files):
                        write_whole(each, read_whole(each))
                _note(file, f"pid {os.getpid()} on {socket.gethostname()}")
                remove_unfinished(self.path)
            try:
                yield
            except BaseException as error:
                _note(file, f"{ENDED} by {type(error).__name__}")
                raise
            _note(file, ENDED)

    def goes_on(self, mesh: Mesh) -> bool:
        """Return whether an earlier start of this run had the directory. All ranks call it, while the directory is locked."""
        return bool(mesh.world.all_or_raise("an earlier start", lambda: self._goes_on, StorageError, first=True)[0])

    def last_step(self, mesh: Mesh) -> int:
        """Return the latest step of which rank 0 has a line of metrics, or 0. All ranks call it."""
        path = self.path / step_metrics.METRICS
        look = lambda: max([0, *map(step_metrics.step_of, step_metrics.read_metrics(path))])  # noqa: E731
        return int(mesh.world.all_or_raise(f"reading {path}", look, StorageError, first=True)[0])

    @contextmanager
    def open(self, config: TrainerConfig, step: int, facts: Mapping[str, Any], mesh: Mesh) -> Iterator[MetricsWriter | None]:
        """Write the configuration, without secrets, and a line about this start, with `facts` about the model, and yield the writer
        of metrics, which continues after `step`. Inside, a file has all ranks' activity; they write events when asked."""
        axes = {name: mesh.group(name).ranks for name in ("world", "data", *AXES)}
        header = {"rank": mesh.rank, "host": mesh.locations[mesh.rank].host, "one_host": mesh.one_host, "axes": axes}
        header["units"] = [name.removeprefix("unit ") for name in mesh.watch.unit_names.get(mesh.rank, ())]

        def write_ring() -> None:
            with suppress(OSError):  # Nothing depends on this file, and later writes report a full disk.
                mesh.watch.ring.write(self.path / TRACE_FOLDER / f"rank-{mesh.rank}.ring", header)

        mesh.watch.on_request = write_ring
        try:
            if not self._writes:
                yield None
                return
            redaction = Redaction(secret_values())
            name = device_name(mesh.device) if is_accelerator(mesh.device) else cpu_name()
            versions = {"zeromesh": __version__, "python": platform.python_version()}
            versions |= {package: metadata.version(package) for package in ("torch", "transformers")}
            machine = {"hardware": f"{counted(mesh.shape.world_size, 'rank')} on {name}", "versions": versions}
            with suppress(*[StorageError] * bool(number_of_start())):  # A run that goes on does not end by these.
                with refusals(self.path, "written", _ELSEWHERE):
                    write_whole(self.path / step_metrics.CONFIG, config.to_yaml(redaction.values).encode())
                with MetricsWriter(self.path / step_metrics.STARTS) as starts:
                    starts.write({"step": step, "host": socket.gethostname(), **facts, **machine})
            with (
                MetricsWriter(self.path / step_metrics.METRICS) as writer,
                StateMonitor(mesh.watch, mesh.world.ranks, self.path / step_metrics.RANKS, clean=redaction.text),
            ):
                writer.keep_through(step, step_metrics.EVALUATIONS, step_metrics.SAMPLES)
                yield writer
        finally:
            mesh.watch.on_request = lambda: None
            write_ring()


def _note(file: io.FileIO, text: str) -> None:
    """Write a line and this start to the lock file; errors of a full disk are ignored, as later writes report them."""
    content = "".join(f"{line}\n" for line in (text, *starts_of_run()[-1:])).encode()
    with suppress(OSError):
        os.pwrite(file.fileno(), content, 0)
        file.truncate(len(content))
