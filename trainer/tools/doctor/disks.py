"""The directories that a run, its checkpoints and offload would write to."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zeromesh.errors import StorageError
from zeromesh.files import try_lock
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.swap_file import IN_MEMORY, file_system_of, free_bytes, nearest_directory
from zeromesh.offload.io.transfer import pages
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.tools.doctor.findings import Finding, Level

_PIECE = 4 << 20
_MOST_BYTES = 64 << 20
_MOST_SECONDS = 1.0
"""Of writing, and of reading."""
_SYNCS = 5
_LITTLE = 10 << 30
_SLOW_SYNC_SECONDS = 0.1
_SLOW_BYTES = 200e6
"""A second. Below that, offload to files waits more than it computes on most machines."""
_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p", "fuse.sshfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """What was found in a directory, or the nearest one above it. Speeds are in bytes, `sync_seconds` in seconds."""

    directory: Path
    used: Path
    """The directory that is there."""
    kind: str
    free: int
    inodes: int
    """Files that can still be made; -1 where there is no bound."""
    error: str = ""
    """Why nothing can be written there."""
    direct: bool = False
    locks: bool = True
    written: float = 0.0
    read: float = 0.0
    sync_seconds: float = 0.0


def look(directory: Path) -> Disk:
    """Write and read a small file for at most a few seconds, and remove it."""
    absolute = directory.expanduser().absolute()
    used = nearest_directory(absolute)
    status = os.statvfs(used)
    inodes = status.f_favail if status.f_files else -1
    found = Disk(directory=directory, used=used, kind=file_system_of(used), free=free_bytes(used), inodes=inodes)
    path = used / f".zeromesh-doctor-{secrets.token_hex(8)}.tmp"
    try:
        with PositionalFile(path, write=True) as file:
            locks = _locks(path)
            written, nbytes = _moved(file, write=True)
            sync_seconds = _synced(file)
            file.forget(0, nbytes)
            read, _ = _moved(file, write=False, nbytes=nbytes)
            direct = file.direct
    except StorageError as error:
        return replace(found, error=str(error))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return replace(found, direct=direct, locks=locks, written=written, read=read, sync_seconds=sync_seconds)


def judge(disk: Disk) -> Iterator[Finding]:
    """What that means for runs."""
    where = str(disk.directory)
    if disk.error:
        yield Finding(
            what=where,
            found=f"cannot be written: {disk.error}",
            level=Level.PROBLEM,
            means="A run that is to write there ends before it begins.",
            do="Give another directory (run.output_dir, offload.directory), or mend its owner, mode or mount.",
        )
        return
    there = "" if disk.used == disk.directory.expanduser().absolute() else f" (not there yet; {disk.used} is)"
    yield _kind(disk, f"{disk.kind or 'an unknown file system'}{there}")
    yield _room(disk)
    yield _speed(disk)
    yield _sync(disk)
    if not disk.locks:
        yield Finding(
            what="  locks",
            found="flock and fcntl are refused",
            level=Level.PROBLEM,
            means="Runs lock their directory, so that no two of them write into one.",
            do="Mount it with locks (NFS: without nolock, and with a lock daemon), or take another directory.",
        )


def _kind(disk: Disk, found: str) -> Finding:
    where = str(disk.directory)
    if disk.kind in IN_MEMORY:
        return Finding(
            what=where,
            found=found,
            level=Level.WARNING,
            means="That is memory and no disk: checkpoints there are lost with the machine, and offload to it frees nothing.",
            do="Give a directory on a disk.",
        )
    if disk.kind in _NETWORKS:
        return Finding(
            what=where,
            found=found,
            level=Level.WARNING,
            means="A network file system is good for checkpoints of several hosts, and bad for swap files of offload.",
            do="Set offload.directory to a local disk, if parameters or states rest on files.",
        )
    return Finding(what=where, found=found)


def _room(disk: Disk) -> Finding:
    few = 0 <= disk.inodes < 1000
    found = f"{human_bytes(disk.free)} free" + (f", {disk.inodes:,} files" if few else "")
    if disk.free < _LITTLE or few:
        return Finding(
            what="  room",
            found=found,
            level=Level.WARNING,
            means="A checkpoint has up to 14 bytes a parameter (AdamW in float32, weights in bfloat16), and several are kept.",
            do="Make room, lower checkpoint.keep_last, or give a larger disk.",
        )
    return Finding(what="  room", found=found)


def _speed(disk: Disk) -> Finding:
    past = "past the page cache" if disk.direct else "through the page cache (no O_DIRECT)"
    found = f"{_rate(disk.written)} written, {_rate(disk.read)} read, {past}"
    if not disk.direct:
        return Finding(
            what="  speed",
            found=found,
            level=Level.WARNING,
            means="Swap files of offload would fill memory with copies of themselves; the speed above is partly that of memory.",
            do="Set offload.directory to a disk with ext4 or xfs, if parameters or states rest on files.",
        )
    if min(disk.written, disk.read) < _SLOW_BYTES:
        return Finding(
            what="  speed",
            found=found,
            level=Level.WARNING,
            means="One thread moves little here: offload to files and checkpoints wait for the disk.",
            do="Set offload.directory to a local NVMe disk, if parameters or states rest on files.",
        )
    return Finding(what="  speed", found=found)


def _sync(disk: Disk) -> Finding:
    found = f"{1000 * disk.sync_seconds:.2g} ms until 4 KiB are on the disk"
    if disk.sync_seconds < _SLOW_SYNC_SECONDS:
        return Finding(what="  fsync", found=found)
    return Finding(
        what="  fsync",
        found=found,
        level=Level.WARNING,
        means="A checkpoint is over only when all its files are on the disk; each takes at least as long.",
        do="Look for who else writes there now; write to a local disk and copy, if it stays so.",
    )


def _rate(speed: float) -> str:
    return f"{speed / 1e6:,.0f} MB/s"


# From the system


def _moved(file: PositionalFile, *, write: bool, nbytes: int = _MOST_BYTES) -> tuple[float, int]:
    """Write or read up to `nbytes`, piece by piece; returns bytes a second, and how many there were."""
    piece = pages(_PIECE)
    piece.random_()  # Some disks compress.
    done, began = 0, time.perf_counter()
    while done < nbytes and (not done or time.perf_counter() - began < _MOST_SECONDS):
        (file.write if write else file.read)(piece, done)
        done += _PIECE
    if write:
        file.sync()
    return done / max(1e-9, time.perf_counter() - began), done


def _synced(file: PositionalFile) -> float:
    """The median of a few small writes that are on the disk."""
    piece = pages(4096)
    seconds = []
    for number in range(_SYNCS):
        began = time.perf_counter()
        file.write(piece, 4096 * number)
        file.sync()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[_SYNCS // 2]


def _locks(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return try_lock(file.fileno())
        except OSError:
            return False
