"""Tells how much memory this process and this machine use and have."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Bytes of this process in memory; pages that processes share count in full."""
    return _status_bytes(Path("/proc/self/smaps_rollup"), "Rss:")


def proportional_bytes() -> int:
    """Bytes of this process in memory; a page that n processes share counts as its nth part."""
    return _status_bytes(Path("/proc/self/smaps_rollup"), "Pss:")


def peak_bytes() -> int:
    """The most bytes of this process that were ever in memory; pages that processes share count in full."""
    return _status_bytes(Path("/proc/self/status"), "VmHWM:")


def available_bytes() -> int:
    """Bytes that could still be taken: the system's, or the control group's where that is less. 0 when not known."""
    available = _status_bytes(Path("/proc/meminfo"), "MemAvailable:")
    limit, used = _read_integer(_CGROUP / "memory.max"), _read_integer(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _file_cache_bytes()))
    return available


def swap_bytes() -> int:
    """Bytes of free swap space."""
    return _status_bytes(Path("/proc/meminfo"), "SwapFree:")


def machine_bytes() -> int:
    """Bytes of memory of the machine."""
    return _status_bytes(Path("/proc/meminfo"), "MemTotal:")


def group_settings(name: str) -> list[str]:
    """What the file `name`, such as `memory.max`, says in each control group (version 2) of this process, outermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    found = []
    inner = _CGROUP / own.lstrip("/")
    for group in [*reversed(inner.parents), inner]:
        if not group.is_relative_to(_CGROUP):
            continue
        with contextlib.suppress(OSError):
            found.append((group / name).read_text(encoding="ascii").strip())
    return found


def _file_cache_bytes() -> int:
    """Bytes of files that the control group holds in memory and would give up."""
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def cpu_name() -> str:
    """The model of this machine's processor; its architecture where the system does not name the model."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _status_bytes(path: Path, field: str) -> int:
    try:
        with path.open(encoding="ascii") as file:
            for line in file:
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _read_integer(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
