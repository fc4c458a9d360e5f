"""The findings of `zeromesh doctor` about hardware: cores, memory and limits, accelerators, and the directories of runs."""

import contextlib
import os
import re
import resource
import secrets
import time
from collections.abc import Iterator
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
from zeromesh.trainer.tools.doctor.software import Finding, problem, warning

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
    yield warning(
        "cores",
        f"{cores}, and time of {quota:g} by the control group" if quota < cores else str(cores),
        "Processes take a thread for every core that they see, and all stand still when the time is used up.",
        f"Set OMP_NUM_THREADS to {max(1, int(quota))} divided by --nproc, or allow more time (containers: --cpus).",
        when=quota < cores,
    )
    available, total, allowed = available_bytes(), machine_bytes(), _group_limit("memory.max")
    group = f"{human_bytes(allowed)} by the control group, " if allowed is not None and allowed < total else ""
    yield warning(
        "memory",
        f"{human_bytes(available)} free of {group}{human_bytes(total)}",
        "torch and transformers alone take about half a GiB a process; a process that asks for too much is killed.",
        "End what else runs here, or allow the control group (container, job) more memory.",
        when=available < _LEAST_MEMORY,
    )
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    size = shared.f_frsize * shared.f_blocks if shared is not None else 0
    yield warning(
        "/dev/shm",
        "not there" if shared is None else human_bytes(size),
        "NCCL and workers of data loaders share memory there, and die of SIGBUS when it is full; zeromesh does not use it.",
        "Start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm).",
        when=shared is not None and size < _LEAST_SHARED,
    )
    try:
        os.close(os.memfd_create("zeromesh-doctor"))
    except OSError:
        yield problem(
            "shared memory",
            "memfd_create is refused",
            "Ranks of one host meet in anonymous shared memory.",
            "Allow the system call memfd_create in the container's seccomp profile.",
        )
    yield from _limits()


def _limits() -> Iterator[Finding]:
    locked, files, threads = map(_limit, (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    yield warning(
        "locked memory",
        "no limit" if locked is None else human_bytes(locked),
        "InfiniBand cannot register its buffers.",
        "Set ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK).",
        when=accelerator.current_accelerator() is not None and locked is not None and locked < _LEAST_LOCKED,
    )
    processes = min((each for each in (threads, _group_limit("pids.max")) if each is not None), default=None)
    connections = "Ranks hold a connection for each peer and group, and a file for each shard that they read."
    counted = "Each rank has tens of threads, which count as processes here."
    for what, limit, means, do in (
        ("open files", files, connections, "Set ulimit -n 65536 (containers: --ulimit nofile=65536)."),
        ("processes", processes, counted, "Set ulimit -u unlimited, or allow the container more (--pids-limit=-1)."),
    ):
        found = "no limit" if limit is None else f"up to {limit:,}"
        yield warning(what, found, means, do, when=limit is not None and limit < _LEAST_COUNT)


def _group_limit(name: str) -> int | None:
    return min((int(each) for each in group_settings(name) if each.isdecimal()), default=None)


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def accelerators() -> Iterator[Finding]:
    """Judge the compatibility of torch, the driver and the devices. Devices hold some memory until this process ends."""
    driver = ""
    with contextlib.suppress(OSError):
        match = re.search(r"(?:Kernel Module|x86_64|aarch64)\s+([\d.]+)", _DRIVER.read_text(encoding="ascii"))
        driver = match[1] if match else "of an unknown version"
    built, version = accelerator.build_platform(), torch.__version__
    if not built:
        yield problem(
            "torch",
            f"{f'a driver ({driver}), but' if driver else 'no device;'} torch {version} "
            + ("is built for CPUs alone" if driver else "computes on the CPU"),
            "Runs would compute on the CPU, beside devices that stand still.",
            "Install a build of torch with CUDA: the selector on pytorch.org gives the command.",
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
        yield problem(
            "devices",
            f"none can be used: {error}" if driver else "none; torch computes on the CPU",
            "There is a driver, but no device for this process: runs would compute on the CPU.",
            f"Update a driver that is too old for {built}; look at CUDA_VISIBLE_DEVICES, at what nvidia-smi says, and "
            "whether the container was started with --gpus all.",
            when=bool(driver),
        )
        return
    yield from map(device, devices)
    yield Finding("collectives", accelerator.collectives_library() or "torch names no library for these devices")


def device(each: torch.device) -> Finding:
    what, name = f"device {each.index}", accelerator.device_name(each)
    architecture = accelerator.architecture(each) or each.type
    try:
        memory = accelerator.device_memory(each)
        torch.ones(2, device=each).sum().item()
    except RuntimeError as error:
        return problem(
            what,
            f"{name}, {architecture}: {summary(error)}",
            "torch cannot compute there: the device is broken or taken, or this build has no kernels for it.",
            f"Install a build of torch with kernels for {architecture}, or leave it out with CUDA_VISIBLE_DEVICES.",
        )
    return warning(
        what,
        f"{name}, {human_bytes(memory.free)} free of {human_bytes(memory.total)}, {architecture}",
        "Another process computes there: a run has less memory, and waits.",
        "Look at nvidia-smi, end what should not be there, or choose other devices with CUDA_VISIBLE_DEVICES.",
        when=memory.free < (1 - _BUSY) * memory.total,
    )


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
    file = used / f".zeromesh-doctor-{secrets.token_hex(8)}.tmp"
    try:
        times = measure(file)
    except StorageError as error:
        yield problem(
            str(path),
            f"cannot be written: {error}",
            "A run that is to write there ends before it begins.",
            "Give another directory (run.output_dir, offload.directory), or mend its owner, mode or mount.",
        )
        return
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    kind = mount_of(used)[1]
    memory = kind in IN_MEMORY
    local = "Set offload.directory to a local disk, if parameters or states rest on files."
    yield warning(
        str(path),
        (kind or "an unknown file system") + ("" if used == absolute else f" (not there yet; {used} is)"),
        "That is memory and no disk: checkpoints there are lost with the machine, and offload to it frees nothing."
        if memory
        else "A network file system is good for checkpoints of several hosts, and bad for swap files of offload.",
        "Give a directory on a disk." if memory else local,
        when=memory or kind in _NETWORKS,
    )
    free, status = free_bytes(used), os.statvfs(used)
    few = status.f_files > 0 and status.f_favail < _LEAST_INODES
    yield warning(
        "  room",
        f"{human_bytes(free)} free" + (f", {status.f_favail:,} files" if few else ""),
        "A checkpoint has up to 14 bytes a parameter (AdamW in float32, weights in bfloat16), and several are kept.",
        "Make room, lower checkpoint.keep_last, or give a larger disk.",
        when=free < _LEAST_ROOM or few,
    )
    cache = "past the page cache" if times.direct else "through the page cache (no O_DIRECT)"
    yield warning(
        "  speed",
        f"{times.written / 1e6:,.0f} MB/s written, {times.read / 1e6:,.0f} MB/s read, {cache}; "
        f"{1000 * times.sync_seconds:.2g} ms until 4 KiB are on the disk",
        "One thread moves little here: offload to files and checkpoints wait for the disk."
        if times.direct
        else "Swap files of offload would fill memory with copies of themselves; the speed is partly that of memory.",
        local if times.direct else local.replace("local disk", "disk with ext4 or xfs"),
        when=not times.direct or min(times.written, times.read) < _SLOW_BYTES,
    )
    if not times.locks:
        yield problem(
            "  locks",
            "flock and fcntl are refused",
            "Runs lock their directory, so that no two of them write into one.",
            "Mount it with locks (NFS: without nolock, and with a lock daemon), or take another directory.",
        )


def measure(path: Path) -> DiskTimes:
    """Measure the disk of a new file `path`. Raises `StorageError` where it cannot be written."""
    with PositionalFile(path, write=True) as file:
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
        read = done / (time.perf_counter() - began)
        return DiskTimes(written, read, sorted(syncs)[_SYNCS // 2], file.direct, locks)
