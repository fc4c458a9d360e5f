"""Numbers as people read them, with units, and tables."""

import math
from collections.abc import Collection, Sequence

from zeromesh.errors import printable


def human_bytes(count: float) -> str:
    """A number of bytes in powers of 1024, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def human_count(count: float) -> str:
    """A number in powers of 1000, such as `12.3k` or `1.2M`."""
    for unit in ("", "k", "M", "G", "T"):
        if not abs(count) >= 999.95 or unit == "T":  # `not ... >=` lets NaN through
            break
        count /= 1000
    return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"


def human_seconds(seconds: float) -> str:
    """A duration, such as `12 ms`, `1.25 s`, `3:05` (minutes) or `1:02:03` (hours)."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[str] = ()) -> list[str]:
    """Rows under the names of their columns, as lines; the columns in `right` stand to the right, as numbers do."""
    every = [columns, *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*every, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ).rstrip()
        for row in every
    ]
