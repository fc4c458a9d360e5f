"""The findings of `zeromesh doctor` about hardware: cores, memory and limits, accelerators, and the directories of runs."""

import contextlib
import os
import re
import resource
import secrets
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch

from zeromesh.environment import available_cores
from zeromesh.errors import StorageError, summary
from zeromesh.files import try_lock
from zeromesh.offload import accelerator
from zeromesh.offload.io.direct_io import IN_MEMORY, PositionalFile, free_bytes, mount_of, nearest_directory
from zeromesh.offload.io.transfer import allocate_pages
from zeromesh.offload.memory.ledger import available_bytes, group_settings, machine_bytes
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.tools.doctor.software import Finding, judge

_LEAST_MEMORY = 2 << 30  # bytes
_LEAST_SHARED = 1 << 30
_LEAST_LOCKED = 64 << 20
_LEAST_COUNT = 4096  # Open files, and processes.
_BUSY = 0.1  # The fraction of a device's memory in use by other processes.
_LEAST_ROOM = 10 << 30  # bytes that are free on a disk
_LEAST_INODES = 1000
_SLOW_BYTES = 200e6  # Bytes per second; with a slower disk, offload to files is bound by the disk on most machines.
_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p", "fuse.sshfs")
_PIECE = 4 << 20  # bytes of one write or read
_MOST_BYTES = 64 << 20
_MOST_SECONDS = 1.0  # The time limit of writing, and again of reading.
_SYNCS = 5  # small writes with fsync, of which the median counts
_DRIVER = Path("/proc/driver/nvidia/version")  # This file exists in a container without nvidia-smi, too.


def machine() -> Iterator[Finding]:
    cores = available_cores()
    shares = [each.split() for each in group_settings("cpu.max")]
    quota = min((int(used) / int(period) for used, period in shares if used.isdecimal()), default=cores)
    found = f"{cores}, and time of {quota:g} by the control group" if quota < cores else str(cores)
    yield judge("cores", found, when=quota < cores, threads=max(1, int(quota)))
    available, total, allowed = available_bytes(), machine_bytes(), _group_limit("memory.max")
    group = f"{human_bytes(allowed)} by the control group, " if allowed < total else ""
    found = f"{human_bytes(available)} free of {group}{human_bytes(total)}"
    yield judge("memory", found, when=available < _LEAST_MEMORY)
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    size = shared.f_frsize * shared.f_blocks if shared is not None else 0
    found = "not there" if shared is None else human_bytes(size)
    yield judge("/dev/shm", found, when=shared is not None and size < _LEAST_SHARED)
    try:
        os.close(os.memfd_create("zeromesh-doctor"))
    except OSError:
        yield judge("shared memory", "memfd_create is refused")
    locked = _limit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if locked == inf else human_bytes(locked)
    yield judge("locked memory", found, when=accelerator.current_accelerator() is not None and locked < _LEAST_LOCKED)
    processes = min(_limit(resource.RLIMIT_NPROC), _group_limit("pids.max"))
    for name, limit in (("open files", _limit(resource.RLIMIT_NOFILE)), ("processes", processes)):
        yield judge(name, "no limit" if limit == inf else f"up to {limit:,.0f}", when=limit < _LEAST_COUNT)


def _group_limit(name: str) -> float:
    return min((int(each) for each in group_settings(name) if each.isdecimal()), default=inf)


def _limit(number: int) -> float:
    soft, _ = resource.getrlimit(number)
    return inf if soft == resource.RLIM_INFINITY else soft


def accelerators() -> Iterator[Finding]:
    """Judge the compatibility of torch, the driver and the devices. Devices hold some memory until this process ends."""
    driver = ""
    with contextlib.suppress(OSError):
        match = re.search(r"(?:Kernel Module|x86_64|aarch64)\s+([\d.]+)", _DRIVER.read_text(encoding="ascii"))
        driver = match[1] if match else "of an unknown version"
    built, version = accelerator.build_platform(), torch.__version__
    if not built:
        yield judge(
            "torch",
            f"{f'a driver ({driver}), but' if driver else 'no device;'} torch {version} "
            + ("is built for CPUs alone" if driver else "computes on the CPU"),
            when=bool(driver),
        )
        return
    yield Finding("torch", f"{version} for {built}; NVIDIA's driver {driver or 'not found'}")
    devices, error = list[torch.device](), "torch sees none"
    try:
        devices = accelerator.initialize()
    except RuntimeError as failure:
        error = summary(failure)
    if not devices:
        found = f"none can be used: {error}" if driver else "none; torch computes on the CPU"
        yield judge("devices", found, when=bool(driver), built=built)
        return
    yield from map(device, devices)
    yield Finding("collectives", accelerator.collectives_library() or "torch names no library for these devices")


def device(each: torch.device) -> Finding:
    name, architecture = accelerator.device_name(each), accelerator.architecture(each) or each.type
    try:
        memory = accelerator.device_memory(each)
        torch.ones(2, device=each).sum().item()
    except RuntimeError as error:
        return judge("device failure", f"{name}, {architecture}: {summary(error)}", index=each.index, architecture=architecture)
    found = f"{name}, {human_bytes(memory.free)} free of {human_bytes(memory.total)}, {architecture}"
    return judge("device memory", found, when=memory.free < (1 - _BUSY) * memory.total, index=each.index)


class DiskTimes(NamedTuple):
    """The results of writing and reading a small file: bytes per second, and the seconds of a small write with fsync."""

    written: float
    read: float
    sync_seconds: float
    direct: bool
    locks: bool


def directory(path: Path) -> Iterator[Finding]:
    """Write and read a small file in a directory, or its nearest existing parent, for a few seconds at most; remove the file."""
    absolute = path.expanduser().absolute()
    used = nearest_directory(absolute)
    try:
        times = measure(used)
    except StorageError as error:
        yield judge("directory", f"cannot be written: {error}", path=path)
        return
    kind = mount_of(used)[1]
    memory = kind in IN_MEMORY
    yield judge(
        "file system in memory" if memory else "network file system",
        (kind or "an unknown file system") + ("" if used == absolute else f" (not there yet; {used} is)"),
        when=memory or kind in _NETWORKS,
        path=path,
    )
    free, status = free_bytes(used), os.statvfs(used)
    few = status.f_files > 0 and status.f_favail < _LEAST_INODES
    found = f"{human_bytes(free)} free" + (f", {status.f_favail:,} files" if few else "")
    yield judge("room", found, when=free < _LEAST_ROOM or few)
    cache = "past the page cache" if times.direct else "through the page cache (no O_DIRECT)"
    yield judge(
        "speed" if times.direct else "page cache",
        f"{times.written / 1e6:,.0f} MB/s written, {times.read / 1e6:,.0f} MB/s read, {cache}; "
        f"{1000 * times.sync_seconds:.2g} ms until 4 KiB are on the disk",
        when=not times.direct or min(times.written, times.read) < _SLOW_BYTES,
    )
    if not times.locks:
        yield judge("locks", "flock and fcntl are refused")


def measure(directory: Path) -> DiskTimes:
    """Measure the disk of a directory by a new file, which is removed. Raises `StorageError` where it cannot be written."""
    path = directory / f".zeromesh-disk-{secrets.token_hex(8)}.tmp"
    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        file = stack.enter_context(PositionalFile(path, write=True))
        locks = False
        with path.open("rb") as opened, contextlib.suppress(OSError):
            locks = try_lock(opened.fileno())
        piece, small = allocate_pages(_PIECE), allocate_pages(4096)
        piece.random_()  # Some disks compress zeros.
        nbytes, began = 0, time.perf_counter()
        while nbytes < _MOST_BYTES and time.perf_counter() - began < _MOST_SECONDS:
            file.write(piece, nbytes)
            nbytes += _PIECE
        file.sync()
        written = nbytes / (time.perf_counter() - began)
        syncs = []
        for number in range(_SYNCS):
            began = time.perf_counter()
            file.write(small, 4096 * number)
            file.sync()
            syncs.append(time.perf_counter() - began)
        file.drop_from_cache(0, nbytes)
        done, began = 0, time.perf_counter()
        while done < nbytes and time.perf_counter() - began < _MOST_SECONDS:
            file.read(piece, done)
            done += _PIECE
        return DiskTimes(written, done / (time.perf_counter() - began), sorted(syncs)[_SYNCS // 2], file.direct, locks)
