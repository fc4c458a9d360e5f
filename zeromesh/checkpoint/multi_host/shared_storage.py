"""Which ranks see the same directory: all of them on a shared file system, those of one host where each host has its own.

Every rank puts a file into the directory, which shows that it can, and looks for those of the ranks before it. The first whose file
it sees leads the directory: it makes checkpoints in it and commits them. On one host, rank 0 leads.

    ranks 0 1 | 2 3 on two hosts, own disks      places [0, 1], [2, 3], led by 0 and 2
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeromesh.errors import StorageError
from zeromesh.files import open_regular
from zeromesh.mesh.process_mesh import Mesh


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
        """Whether this rank makes and commits what is in its directory."""
        return self.ranks[0] == self.rank


def find_sharing(directory: Path, mesh: Mesh) -> SharedStorage:
    """How the ranks of a mesh share a directory, which is made where it is not there; all ranks call it.

    Raises:
        StorageError: on all ranks, where some rank cannot write there.
    """
    token = mesh.world.gather_bytes(secrets.token_hex(8).encode(), "look at the directory")[0].decode()
    marks = [directory / f".seen-{token}-{rank}" for rank in range(mesh.world_size)]
    try:
        failure = _put(marks[mesh.rank]) if mesh.rank == 0 or not mesh.one_host else ""
        answers = mesh.world.gather_bytes(failure.encode(errors="backslashreplace"), "look at the directory")
        found = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(answers) if text]
        if found:
            raise StorageError(found[0])
        leader = 0 if mesh.one_host else next(rank for rank, mark in enumerate(marks) if os.path.exists(mark))
        leaders = [row[0] for row in mesh.world.gather_integers([leader])]
    finally:
        with contextlib.suppress(OSError):
            marks[mesh.rank].unlink(missing_ok=True)
    return SharedStorage(places=_places(leaders), rank=mesh.rank)


def _put(mark: Path) -> str:
    """Make a file; returns why that cannot be done, or an empty text."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_regular(mark, os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        return f"{str(mark.parent)!r} cannot be written: {error.strerror or error}"
    return ""


def _places(leaders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    members: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        members.setdefault(leader, []).append(rank)
    return tuple(tuple(members[leader]) for leader in sorted(members))
