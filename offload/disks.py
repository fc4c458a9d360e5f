"""Directories and the file systems that they lie on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems that are memory and no disk."""


def nearest_directory(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written into a directory that is there."""
    return shutil.disk_usage(directory).free


def file_system_of(directory: Path) -> str:
    """The kind of file system that a directory lies on, or will, such as `ext4`; empty where the system does not tell."""
    path, best, kind = os.path.realpath(nearest_directory(directory)), "", ""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, name, *_ = line.split(" ")
        # Of several at one place the last one mounted is seen.
        if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = point, name
    return kind
