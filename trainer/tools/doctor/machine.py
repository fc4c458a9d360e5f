"""Cores, memory and limits of this machine."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeromesh.environment import available_cores
from zeromesh.offload.memory.memory_usage import available_bytes, group_settings, machine_bytes, swap_bytes
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.tools.doctor.findings import Finding, Level

_LEAST_MEMORY = 2 << 30
_LEAST_SHARED = 1 << 30
_LEAST_FILES = 4096
_LEAST_PROCESSES = 4096
_LEAST_LOCKED = 64 << 20
_NEVER_OVERCOMMIT = "2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the system says. None stands for no limit, or for what it does not say. Sizes are in bytes."""

    architecture: str
    cores: int
    quota: float | None
    """Cores' worth of time that control groups allow."""
    memory: int
    available: int
    limit: int | None
    """Memory that control groups allow."""
    swap: int
    shared: int | None
    """Size of /dev/shm."""
    locked: int | None
    files: int | None
    processes: int | None
    overcommit: str
    memfd: bool
    """Whether anonymous files in memory can be made, which ranks of a host share."""
    has_cuda: bool


def look(*, has_cuda: bool) -> Machine:
    """What this machine says."""
    return Machine(
        architecture=platform.machine(),
        cores=available_cores(),
        quota=_quota(),
        memory=machine_bytes(),
        available=available_bytes(),
        limit=_least_of_groups("memory.max"),
        swap=swap_bytes(),
        shared=_size("/dev/shm"),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        processes=min(
            (each for each in (_limit(resource.RLIMIT_NPROC), _least_of_groups("pids.max")) if each is not None),
            default=None,
        ),
        overcommit=_text("/proc/sys/vm/overcommit_memory"),
        memfd=_makes_memfd(),
        has_cuda=has_cuda,
    )


def judge(machine: Machine) -> Iterator[Finding]:
    """What that means for runs."""
    yield _cores(machine)
    yield _architecture(machine)
    yield from _memory(machine)
    yield from _shared(machine)
    yield from _limits(machine)


def _cores(machine: Machine) -> Finding:
    quota = machine.quota
    if quota is not None and quota < machine.cores:
        return Finding(
            what="cores",
            found=f"{machine.cores}, and time of {quota:g} by the control group",
            level=Level.WARNING,
            means="Processes take a thread for every core that they see, and all stand still when the time is used up.",
            do=f"Set OMP_NUM_THREADS to {max(1, int(quota))} divided by --nproc, or allow more time (containers: --cpus).",
        )
    return Finding(what="cores", found=str(machine.cores))


def _architecture(machine: Machine) -> Finding:
    if machine.architecture in ("x86_64", "AMD64") or machine.has_cuda:
        return Finding(what="architecture", found=machine.architecture)
    return Finding(
        what="architecture",
        found=machine.architecture,
        level=Level.WARNING,
        means="Host-shared memory, the fast transport of CPU ranks, needs x86-64.",
        do="Nothing has to be done: gloo is taken, which is slower.",
    )


def _memory(machine: Machine) -> Iterator[Finding]:
    limited = machine.limit is not None and machine.limit < machine.memory
    of = f"{human_bytes(machine.limit or 0)} by the control group, " if limited else ""
    found = f"{human_bytes(machine.available)} free of {of}{human_bytes(machine.memory)}"
    if machine.available < _LEAST_MEMORY:
        yield Finding(
            what="memory",
            found=found,
            level=Level.WARNING,
            means="torch and transformers alone take about half a GiB a process; what asks for too much is killed.",
            do="End what else runs here, or allow the control group (container, job) more memory.",
        )
    else:
        yield Finding(what="memory", found=found)
    yield Finding(what="swap", found=f"{human_bytes(machine.swap)} free" if machine.swap else "none")
    if machine.overcommit == _NEVER_OVERCOMMIT:
        yield Finding(
            what="overcommit",
            found="never (vm.overcommit_memory is 2)",
            level=Level.WARNING,
            means="What is reserved counts as if it were used, and CUDA and allocators reserve far more than they use.",
            do="As root: sysctl vm.overcommit_memory=0",
        )


def _shared(machine: Machine) -> Iterator[Finding]:
    if machine.shared is not None and machine.shared < _LEAST_SHARED:
        needed = "NCCL and workers" if machine.has_cuda else "Workers"
        yield Finding(
            what="/dev/shm",
            found=human_bytes(machine.shared),
            level=Level.WARNING,
            means=f"{needed} of data loaders share memory there, and die of SIGBUS when it is full; zeromesh does not use it.",
            do="Start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm).",
        )
    else:
        yield Finding(what="/dev/shm", found="not there" if machine.shared is None else human_bytes(machine.shared))
    if not machine.memfd:
        yield Finding(
            what="shared memory",
            found="memfd_create is refused",
            level=Level.PROBLEM,
            means="Ranks of one host meet in anonymous shared memory.",
            do="Allow the system call memfd_create in the container's seccomp profile.",
        )


def _limits(machine: Machine) -> Iterator[Finding]:
    if machine.has_cuda and machine.locked is not None and machine.locked < _LEAST_LOCKED:
        yield Finding(
            what="locked memory",
            found=human_bytes(machine.locked),
            level=Level.WARNING,
            means="No more than this is pinned for copies between device and host, and InfiniBand cannot register its buffers.",
            do="Set ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK).",
        )
    else:
        yield Finding(what="locked memory", found="no limit" if machine.locked is None else human_bytes(machine.locked))
    yield _count(
        "open files",
        machine.files,
        _LEAST_FILES,
        "Ranks hold a connection for each peer and group, and a file for each shard that they read.",
        "Set ulimit -n 65536 (containers: --ulimit nofile=65536).",
    )
    yield _count(
        "processes",
        machine.processes,
        _LEAST_PROCESSES,
        "Each rank has tens of threads, which count as processes here.",
        "Set ulimit -u unlimited, or allow the container more (--pids-limit=-1).",
    )


def _count(what: str, limit: int | None, least: int, means: str, do: str) -> Finding:
    if limit is None or limit >= least:
        return Finding(what=what, found="no limit" if limit is None else f"up to {limit:,}")
    return Finding(what=what, found=f"up to {limit:,}", level=Level.WARNING, means=means, do=do)


# From the system


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _least_of_groups(name: str) -> int | None:
    return min((int(each) for each in group_settings(name) if each.isdecimal()), default=None)


def _quota() -> float | None:
    shares = [each.split() for each in group_settings("cpu.max")]
    return min((int(one) / int(other) for one, other in shares if one.isdecimal()), default=None)


def _size(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _makes_memfd() -> bool:
    try:
        os.close(os.memfd_create("zeromesh-doctor"))
    except (OSError, AttributeError):
        return False
    return True
