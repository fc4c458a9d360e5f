"""The machine below a run: cores, memory and limits, CUDA devices, and the directories that a run writes to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from zeromesh.environment import available_cores
from zeromesh.errors import StorageError
from zeromesh.files import try_lock
from zeromesh.offload.io.direct_io import IN_MEMORY, PositionalFile, file_system_of, free_bytes, nearest_directory
from zeromesh.offload.io.transfer import pages
from zeromesh.offload.memory.ledger import available_bytes, group_settings, machine_bytes, swap_bytes
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.tools.doctor.findings import Finding

_LEAST_MEMORY = 2 << 30
_LEAST_SHARED = 1 << 30
_LEAST_LOCKED = 64 << 20
_LEAST_COUNT = 4096  # Of open files and of processes.
_BUSY = 0.1  # The part of a device's memory that is in use although no run has begun.
_LEAST_ROOM = 10 << 30
_LEAST_INODES = 1000
_SLOW_SYNC_SECONDS = 0.1
_SLOW_BYTES = 200e6  # Bytes a second; below, offload to files waits more than it computes on most machines.
_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p", "fuse.sshfs")
_PIECE = 4 << 20
_MOST_BYTES = 64 << 20
_MOST_SECONDS = 1.0  # The time of writing, and again of reading.
_SYNCS = 5


def machine() -> Iterator[Finding]:
    """Cores, memory, shared memory and the limits of a process."""
    has_cuda = torch.cuda.is_available()
    shares = [each.split() for each in group_settings("cpu.max")]
    quota = min((int(used) / int(period) for used, period in shares if used.isdecimal()), default=None)
    yield from cores(available_cores(), quota=quota, architecture=platform.machine(), has_cuda=has_cuda)
    overcommit = ""
    with contextlib.suppress(OSError):
        overcommit = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    yield from memory(available_bytes(), machine_bytes(), _group_limit("memory.max"), swap_bytes(), overcommit)
    shared, memfd = None, True
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        shared = found.f_frsize * found.f_blocks
    try:
        os.close(os.memfd_create("zeromesh-doctor"))
    except (OSError, AttributeError):
        memfd = False
    yield from shared_memory(shared, memfd=memfd, has_cuda=has_cuda)
    locked, files, threads = map(_limit, (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    processes = min((each for each in (threads, _group_limit("pids.max")) if each is not None), default=None)
    yield from limits(locked=locked, files=files, processes=processes, has_cuda=has_cuda)


def _group_limit(name: str) -> int | None:
    """The least number that control groups allow; None where there is no limit."""
    return min((int(each) for each in group_settings(name) if each.isdecimal()), default=None)


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def cores(count: int, *, quota: float | None, architecture: str, has_cuda: bool) -> Iterator[Finding]:
    """Judge the cores; `quota` is how many cores' worth of time control groups allow, None where there is no limit."""
    short = quota is not None and quota < count
    yield Finding.warning(
        "cores",
        f"{count}, and time of {quota:g} by the control group" if short else str(count),
        "Processes take a thread for every core that they see, and all stand still when the time is used up.",
        f"Set OMP_NUM_THREADS to {max(1, int(quota or 0))} divided by --nproc, or allow more time (containers: --cpus).",
        when=short,
    )
    yield Finding.warning(
        "architecture",
        architecture,
        "Host-shared memory, the fast transport of CPU ranks, needs x86-64.",
        "Nothing has to be done: gloo is taken, which is slower.",
        when=architecture not in ("x86_64", "AMD64") and not has_cuda,
    )


def memory(available: int, total: int, limit: int | None, swap: int, overcommit: str) -> Iterator[Finding]:
    """Judge the memory in bytes; `limit` is what control groups allow, None where they set no limit."""
    of = f"{human_bytes(limit)} by the control group, " if limit is not None and limit < total else ""
    yield Finding.warning(
        "memory",
        f"{human_bytes(available)} free of {of}{human_bytes(total)}",
        "torch and transformers alone take about half a GiB a process; a process that asks for too much is killed.",
        "End what else runs here, or allow the control group (container, job) more memory.",
        when=available < _LEAST_MEMORY,
    )
    yield Finding("swap", f"{human_bytes(swap)} free" if swap else "none")
    if overcommit == "2":
        yield Finding.warning(
            "overcommit",
            "never (vm.overcommit_memory is 2)",
            "Reserved memory counts as if it were used, and CUDA and allocators reserve far more than they use.",
            "As root: sysctl vm.overcommit_memory=0",
        )


def shared_memory(size: int | None, *, memfd: bool, has_cuda: bool) -> Iterator[Finding]:
    """Judge the size of /dev/shm in bytes (None: it is not there), and whether memfd_create works."""
    users = "NCCL and workers" if has_cuda else "Workers"
    yield Finding.warning(
        "/dev/shm",
        "not there" if size is None else human_bytes(size),
        f"{users} of data loaders share memory there, and die of SIGBUS when it is full; zeromesh does not use it.",
        "Start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm).",
        when=size is not None and size < _LEAST_SHARED,
    )
    if not memfd:
        yield Finding.problem(
            "shared memory",
            "memfd_create is refused",
            "Ranks of one host meet in anonymous shared memory.",
            "Allow the system call memfd_create in the container's seccomp profile.",
        )


def limits(*, locked: int | None, files: int | None, processes: int | None, has_cuda: bool) -> Iterator[Finding]:
    """Judge the limits of a process: bytes of locked memory, open files, processes; None stands for no limit."""
    yield Finding.warning(
        "locked memory",
        "no limit" if locked is None else human_bytes(locked),
        "No more than this is pinned for copies between device and host, and InfiniBand cannot register its buffers.",
        "Set ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK).",
        when=has_cuda and locked is not None and locked < _LEAST_LOCKED,
    )
    connections = "Ranks hold a connection for each peer and group, and a file for each shard that they read."
    threads = "Each rank has tens of threads, which count as processes here."
    for what, limit, means, do in (
        ("open files", files, connections, "Set ulimit -n 65536 (containers: --ulimit nofile=65536)."),
        ("processes", processes, threads, "Set ulimit -u unlimited, or allow the container more (--pids-limit=-1)."),
    ):
        found = "no limit" if limit is None else f"up to {limit:,}"
        yield Finding.warning(what, found, means, do, when=limit is not None and limit < _LEAST_COUNT)


def accelerators() -> Iterator[Finding]:
    """Whether torch, the driver and the CUDA devices fit together. Devices hold some memory until this process ends."""
    module = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(
            encoding="ascii"
        )  # Also in a container without nvidia-smi.
        match = re.search(r"(?:Kernel Module|x86_64|aarch64)\s+([\d.]+)", text)
        module = match[1] if match else "of an unknown version"
    devices, apart, error = [], [], "torch sees none"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            devices.append(device(index, name, capability, free, total, torch.cuda.get_arch_list()))
        pairs = list(combinations(range(len(devices)), 2))
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    except (RuntimeError, AssertionError) as failure:
        devices, error = [], (str(failure).splitlines() or [error])[0]
    yield from cuda(torch.version.cuda, _driver_cuda(), module, has_devices=bool(devices), error=error)
    yield from devices
    if devices:
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    if len(devices) > 1:
        yield peer_access(apart, len(pairs))


def _driver_cuda() -> tuple[int, int] | None:
    """The highest version of CUDA that the driver knows; None where there is no driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def cuda(
    built: str | None, driver: tuple[int, int] | None, module: str, *, has_devices: bool, error: str = ""
) -> Iterator[Finding]:
    """Judge how torch and the driver fit together.

    `built` is the version of CUDA that torch was built with (None: without CUDA), `driver` the highest that the driver
    knows, `module` the driver's own version (empty: none), and `error` why no device can be used.
    """
    highest = ".".join(map(str, driver or ()))
    there = bool(module or driver)
    if built is None:
        found = f"a driver ({module or highest}), but torch {torch.__version__} is built without CUDA"
        yield Finding.problem(
            "CUDA",
            found if there else f"no device; torch {torch.__version__} computes on the CPU",
            "Runs would compute on the CPU, beside devices that stand still.",
            "Install a build of torch with CUDA: the selector on pytorch.org gives the command.",
            when=there,
        )
        return
    yield Finding.problem(
        "CUDA",
        f"torch {torch.__version__} for CUDA {built}; driver {module or 'not found'}"
        + (f", up to CUDA {highest}" if driver else ""),
        "The driver is too old for this build of torch.",
        f"Update the driver, or install torch for CUDA {highest.split('.')[0]}.",
        when=driver is not None and driver[0] < int(built.split(".")[0]),  # A driver runs every minor version.
    )
    if not has_devices:
        yield Finding.problem(
            "devices",
            f"none can be used: {error}" if there else "none; torch computes on the CPU",
            "There is a driver, but no device for this process: runs would compute on the CPU.",
            "Look at CUDA_VISIBLE_DEVICES, at what nvidia-smi says, and whether the container was started with --gpus all.",
            when=there,
        )


def device(index: int, name: str, capability: tuple[int, int], free: int, total: int, built: Sequence[str]) -> Finding:
    """Judge one device: its memory in bytes, and whether torch has kernels for it (`built`: the architectures of torch)."""
    architecture = "sm_{}{}".format(*capability)
    what, found = f"device {index}", f"{name}, {human_bytes(free)} free of {human_bytes(total)}, {architecture}"
    if not has_kernels(built, *capability):
        return Finding.problem(
            what,
            found,
            f"This build of torch has no kernels for {architecture}.",
            "Install a build of torch for it, or leave it out with CUDA_VISIBLE_DEVICES.",
        )
    return Finding.warning(
        what,
        found,
        "Another process computes there: a run has less memory, and waits.",
        "Look at nvidia-smi, end what should not be there, or choose other devices with CUDA_VISIBLE_DEVICES.",
        when=free < (1 - _BUSY) * total,
    )


def has_kernels(built: Sequence[str], major: int, minor: int) -> bool:
    """Whether code for `built`, such as `sm_90` and `compute_90`, runs on a device of this compute capability."""
    versions = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built))
    return any(
        (int(first), int(second)) <= (major, minor) and (kind == "compute" or int(first) == major)
        for kind, first, second in versions
    )


def peer_access(apart: Sequence[tuple[int, int]], pairs: int) -> Finding:
    """Judge how many of all `pairs` of devices are `apart`: they do not reach each other's memory."""
    some = ", ".join(f"{one}-{two}" for one, two in apart[:4]) + (" ..." if len(apart) > 4 else "")
    return Finding.warning(
        "peer access",
        f"{len(apart)} of {pairs} pairs do not reach each other ({some})" if apart else f"all {pairs} pairs of devices",
        "What they send each other goes through the host's memory, which is slower than NVLink or one PCIe switch.",
        "Keep parallel.tensor within devices that do (nvidia-smi topo -m); in a virtual machine, ask for peer access.",
        when=bool(apart),
    )


class DiskTimes(NamedTuple):
    """What writing and reading a small file has shown: bytes a second, and the seconds until a small write is on the disk."""

    written: float
    read: float
    sync_seconds: float
    direct: bool
    locks: bool


def directory(path: Path) -> Iterator[Finding]:
    """Write and read a small file in a directory, or the nearest one above it, for a few seconds at most; remove it."""
    absolute = path.expanduser().absolute()
    used = nearest_directory(absolute)
    status = os.statvfs(used)
    file = used / f".zeromesh-doctor-{secrets.token_hex(8)}.tmp"
    try:
        times = _measure(file)
    except StorageError as error:
        yield Finding.problem(
            str(path),
            f"cannot be written: {error}",
            "A run that is to write there ends before it begins.",
            "Give another directory (run.output_dir, offload.directory), or mend its owner, mode or mount.",
        )
        return
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    there = "" if used == absolute else f" (not there yet; {used} is)"
    yield file_system(str(path), file_system_of(used), there)
    yield room(free_bytes(used), status.f_favail if status.f_files else None)
    yield from disk(times)


def _measure(path: Path) -> DiskTimes:
    with PositionalFile(path, write=True) as file:
        locks = False
        with path.open("rb") as opened, contextlib.suppress(OSError):
            locks = try_lock(opened.fileno())
        piece, small = pages(_PIECE), pages(4096)
        piece.random_()  # Some disks compress.
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
        file.forget(0, nbytes)
        done, began = 0, time.perf_counter()
        while done < nbytes and time.perf_counter() - began < _MOST_SECONDS:
            file.read(piece, done)
            done += _PIECE
        read = done / (time.perf_counter() - began)
        return DiskTimes(written, read, sorted(syncs)[_SYNCS // 2], file.direct, locks)


def file_system(where: str, kind: str, there: str = "") -> Finding:
    """Judge the kind of a directory's file system; `there` says which directory is there in its place."""
    means = "A network file system is good for checkpoints of several hosts, and bad for swap files of offload."
    do = "Set offload.directory to a local disk, if parameters or states rest on files."
    if kind in IN_MEMORY:
        means = (
            "That is memory and no disk: checkpoints there are lost with the machine, and offload to it frees nothing."
        )
        do = "Give a directory on a disk."
    bad = kind in IN_MEMORY or kind in _NETWORKS
    return Finding.warning(where, f"{kind or 'an unknown file system'}{there}", means, do, when=bad)


def room(free: int, inodes: int | None) -> Finding:
    """Judge the free bytes of a file system, and how many files can still be made there (None: no bound)."""
    few = inodes is not None and inodes < _LEAST_INODES
    return Finding.warning(
        "  room",
        f"{human_bytes(free)} free" + (f", {inodes:,} files" if few else ""),
        "A checkpoint has up to 14 bytes a parameter (AdamW in float32, weights in bfloat16), and several are kept.",
        "Make room, lower checkpoint.keep_last, or give a larger disk.",
        when=free < _LEAST_ROOM or few,
    )


def disk(times: DiskTimes) -> Iterator[Finding]:
    """Judge the speed of a disk, the time of a sync, and whether files can be locked."""
    cache = "past the page cache" if times.direct else "through the page cache (no O_DIRECT)"
    slow = "One thread moves little here: offload to files and checkpoints wait for the disk."
    cached = "Swap files of offload would fill memory with copies of themselves; the speed is partly that of memory."
    kind = "local NVMe disk" if times.direct else "disk with ext4 or xfs"
    yield Finding.warning(
        "  speed",
        f"{times.written / 1e6:,.0f} MB/s written, {times.read / 1e6:,.0f} MB/s read, {cache}",
        slow if times.direct else cached,
        f"Set offload.directory to a {kind}, if parameters or states rest on files.",
        when=not times.direct or min(times.written, times.read) < _SLOW_BYTES,
    )
    yield Finding.warning(
        "  fsync",
        f"{1000 * times.sync_seconds:.2g} ms until 4 KiB are on the disk",
        "A checkpoint is over only when all its files are on the disk; each takes at least as long.",
        "Look for who else writes there now; write to a local disk and copy, if it stays so.",
        when=times.sync_seconds >= _SLOW_SYNC_SECONDS,
    )
    if not times.locks:
        yield Finding.problem(
            "  locks",
            "flock and fcntl are refused",
            "Runs lock their directory, so that no two of them write into one.",
            "Mount it with locks (NFS: without nolock, and with a lock daemon), or take another directory.",
        )
