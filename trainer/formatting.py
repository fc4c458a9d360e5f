"""Formatting of numbers with units, of tables and of wrapped lines."""

import math
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from zeromesh.errors import printable

_INDENT, _LEAST_WIDTH = "  ", 14


class Detail(str):
    """A line that logs always show, and terminals only with `run.verbose`."""

    __slots__ = ()


def human_bytes(count: float) -> str:
    """Format a number of bytes in powers of 1024, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < (1024 if unit == "B" else 1023.95) or unit == "TiB":  # Else it would read 1024.0.
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def human_count(count: float) -> str:
    """Format a number in powers of 1000, such as `12.3k` or `1.2M`."""
    for unit in ("", "k", "M", "G", "T"):
        if not abs(count) >= 999.95 or unit == "T":  # Unlike `<`, `not ... >=` is true for NaN, too
            break
        count /= 1000
    return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"


def human_seconds(seconds: float) -> str:
    """Format a duration in seconds, such as `12 ms`, `1.25 s`, `3:05` (minutes) or `1:02:03` (hours)."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[str] = (), *, width: int | None = None
) -> list[str]:
    """Return a table's lines; columns in `right` are right-aligned, and others are wrapped, the widest first, to fit `width`."""
    cells = [list(columns), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    indents = ["" if name in right else _INDENT for name in columns]
    least = []
    for name, *column in zip(*cells, strict=True):
        whole = map(len, column) if name in right else [_LEAST_WIDTH]
        least.append(max([*map(len, name.split()), *whole], default=0))

    def room(at: int) -> tuple[bool, int]:
        # Names of columns of numbers are narrowed first.
        spare = widths[at] - least[at]
        return columns[at] in right and spare > 0, spare

    while width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        at = max(range(len(widths)), key=room)
        if room(at)[1] <= 0:
            break
        widths[at] -= 1
    lines = []
    for row in cells:
        parts = [[cell] for cell in row]
        if width is not None:
            wraps = zip(row, widths, indents, strict=True)
            parts = [textwrap.wrap(cell, most, subsequent_indent=indent) for cell, most, indent in wraps]
        for line in zip_longest(*parts, fillvalue=""):
            named = zip(columns, line, widths, strict=True)
            justified = (cell.rjust(most) if name in right else cell.ljust(most) for name, cell, most in named)
            lines.append("  ".join(justified).rstrip())
    return lines


def wrapped(lines: Iterable[str], width: int | None) -> Iterator[str]:
    """Yield lines wrapped at word boundaries to `width`; continuation lines are indented further."""
    for line in lines:
        indent = _INDENT + " " * (len(line) - len(line.lstrip()))
        keys: Any = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        yield from [line] if width is None else textwrap.wrap(line, width, **keys) or [""]


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to standard output and flush; control characters are shown as text."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stdout.flush()
