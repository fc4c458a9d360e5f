"""How ranks act together on directories: what fails on one is raised by all, and who sees the same directory.

All ranks see one directory on a shared file system; where each host has its own, only the ranks of a host do. Every rank puts a
file into the directory, which shows that it can, and looks for those of the ranks before it. The first whose file it sees leads the
directory: it makes checkpoints in it and commits them. On one host, rank 0 leads.

    ranks 0 1 | 2 3 on two hosts, own disks      places [0, 1], [2, 3], led by 0 and 2
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.errors import CheckpointError, LayoutError, StorageError, ZeromeshError
from zeromesh.files import open_regular, refusals
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet


def together_bytes(
    world: ProcessSet, what: str, work: Callable[[], bytes], error_class: type[ZeromeshError] | None = None
) -> list[bytes]:
    """Return the results of `work` on all ranks. No rank may go on alone, so where it fails on one, all raise that rank's error.

    Raises:
        LayoutError: where some rank's work raises it, unless there is an `error_class`.
        CheckpointError: for every other error; or else an error of `error_class`.
    """
    failure: Exception | None = None
    try:
        answer = b"+" + work()
    except Exception as error:  # noqa: BLE001 - other people's `save_pretrained` among them; all ranks have to know
        failure = error
        kind = b"?" if isinstance(error, LayoutError) else b"-"
        answer = kind + _reason(error, what).encode(errors="backslashreplace")
    answers = world.gather_bytes(answer, what)
    failed = [(rank, text[1:].decode()) for rank, text in enumerate(answers) if text[:1] != b"+"]
    if not failed:
        return [text[1:] for text in answers]
    misfits = [(rank, reason) for rank, reason in failed if answers[rank][:1] == b"?"]
    rank, reason = (misfits or failed)[0]
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    same = len(failed) == len(answers) and len({reason for _, reason in failed}) == 1
    raised = error_class or (LayoutError if misfits else CheckpointError)
    raise raised(reason if same else f"rank {rank}: {reason}{more}") from failure


def together(
    world: ProcessSet, what: str, work: Callable[[], Any], error_class: type[ZeromeshError] | None = None
) -> list[Any]:
    """As `together_bytes`, of work that returns what JSON can express."""
    return [json.loads(text) for text in together_bytes(world, what, lambda: json.dumps(work()).encode(), error_class)]


def _reason(error: Exception, what: str) -> str:
    if isinstance(error, ZeromeshError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or what}: {error.strerror or error}"
    return f"{what}: {type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStorage:
    """`places` has the ranks that see one directory, each place in rank order, led by its first rank."""

    places: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def place(self) -> int:
        """The number of this rank's place, and of its part of a checkpoint."""
        return next(number for number, ranks in enumerate(self.places) if self.rank in ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that see the same directory as this one."""
        return self.places[self.place]

    @property
    def leads(self) -> bool:
        """True if this rank makes and commits the content of its directory."""
        return self.ranks[0] == self.rank


def find_sharing(directory: Path, mesh: Mesh) -> SharedStorage:
    """How the ranks of a mesh share a directory, which is made where it is not there; all ranks call it.

    Raises:
        StorageError: on all ranks, where some rank cannot write there.
    """
    world, rank, what = mesh.world, mesh.rank, "look at the directory"
    token = world.gather_json(secrets.token_hex(8), what)[0]
    marks = [directory / f".seen-{token}-{each}" for each in range(mesh.world_size)]

    def put() -> None:
        if rank == 0 or not mesh.one_host:
            with refusals(directory, "written"):
                directory.mkdir(parents=True, exist_ok=True)
                os.close(open_regular(marks[rank], os.O_WRONLY | os.O_CREAT))

    try:
        together(world, what, put, StorageError)
        leader = 0 if mesh.one_host else next(other for other, mark in enumerate(marks) if os.path.exists(mark))
        leaders = [row[0] for row in world.gather_integers([leader])]
    finally:
        with contextlib.suppress(OSError):
            marks[rank].unlink(missing_ok=True)
    places = (tuple(each for each, found in enumerate(leaders) if found == first) for first in sorted(set(leaders)))
    return SharedStorage(places=tuple(places), rank=rank)
