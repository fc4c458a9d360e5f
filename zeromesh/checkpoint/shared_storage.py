"""Determines which ranks see the same directory.

All ranks see one directory on a shared file system; if each host has its own, only the ranks of a host do. Every rank creates a
file in the directory, which proves write access, and looks for the files of lower ranks. The lowest rank whose file it sees leads
the directory: the leader creates and commits checkpoints in it. On one host, rank 0 leads.

    ranks 0 1 | 2 3 on two hosts, own disks      places [0, 1], [2, 3], led by 0 and 2
"""

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from zeromesh.errors import StorageError
from zeromesh.files import open_regular, refusals
from zeromesh.mesh.process_mesh import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStorage:
    """`places` lists the ranks that see one directory, each place in rank order, led by its first rank."""

    places: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def place(self) -> int:
        """The number of this rank's place, and of its part of a checkpoint."""
        return next(number for number, ranks in enumerate(self.places) if self.rank in ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that see the same directory as this rank."""
        return self.places[self.place]

    @property
    def leads(self) -> bool:
        """True if this rank creates and commits the content of its directory."""
        return self.ranks[0] == self.rank


def find_sharing(directory: Path, mesh: Mesh) -> SharedStorage:
    """Find how the ranks of a mesh share a directory, which is created if absent; all ranks call it.

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
        world.all_or_raise(what, put, StorageError)
        leader = 0 if mesh.one_host else next(other for other, mark in enumerate(marks) if os.path.exists(mark))
        leaders = [row[0] for row in world.gather_integers([leader])]
    finally:
        with contextlib.suppress(OSError):
            marks[rank].unlink(missing_ok=True)
    places = (tuple(each for each, found in enumerate(leaders) if found == first) for first in sorted(set(leaders)))
    return SharedStorage(places=tuple(places), rank=rank)
