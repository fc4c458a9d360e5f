"""The findings of a part, row by row: a figure, what it is expected to be, and whether it is.

Ranks print rows as lines of their log as soon as they have them, so that nothing is lost when one hangs or dies afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "out of line", "not run", "not judged", ""]
_ROW, _BEGIN = "ROW ", "BEGIN "


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table. A verdict is empty where nothing is expected of a figure; `not judged` in a dry run, whose times say
    nothing. `reason` says why something was not run, or what went wrong."""

    what: str
    verdict: Verdict
    value: float | None = None
    unit: str = ""
    expected: str = ""
    reason: str = ""


def figure(
    what: str,
    value: float,
    unit: str = "",
    *,
    most: float | None = None,
    least: float | None = None,
    than: str = "",
    judged: bool = True,
    reason: str = "",
) -> Row:
    """A figure that is to be at most `most` and at least `least`, of what `than` names. What is no number never is."""
    limits = [(most, "<="), (least, ">=")]
    expected = " and ".join(f"{sign} {limit:g} {than}".rstrip() for limit, sign in limits if limit is not None)
    verdict: Verdict = ""
    if expected:
        fits = math.isfinite(value) and (most is None or value <= most) and (least is None or value >= least)
        verdict = ("ok" if fits else "out of line") if judged else "not judged"
    return Row(what=what, verdict=verdict, value=value, unit=unit, expected=expected, reason=reason)


def not_run(what: str, reason: str) -> Row:
    """Return the row of something that could not be tried here."""
    return Row(what=what, verdict="not run", reason=reason)


def broken(what: str, reason: str) -> Row:
    """Return the row of something that was tried, and did not come to its end."""
    return Row(what=what, verdict="out of line", expected="runs", reason=reason)


def say(row: Row) -> None:
    """Print a row for the process that collects them."""
    print(_ROW + json.dumps(asdict(row)), flush=True)


def say_begin(what: str) -> None:
    """Print what is tried next: the one to name if nothing comes after it."""
    print(_BEGIN + what, flush=True)


def heard(lines: Iterable[str]) -> tuple[list[Row], str]:
    """All rows of a log, and what was begun after the last of them; empty: nothing. A row of a name that was there replaces it."""
    found: dict[str, Row] = {}
    begun = ""
    for line in lines:
        if line.startswith(_ROW):
            try:
                row = Row(**json.loads(line.removeprefix(_ROW)))
            except ValueError:  # The line of a process that was ended while it wrote.
                continue
            found[row.what], begun = row, ""
        elif line.startswith(_BEGIN):
            begun = line.removeprefix(_BEGIN).strip()
    return list(found.values()), begun


def table(rows: Sequence[Row]) -> str:
    """Plain text in columns; long reasons below their rows."""
    cells = [("", "figure", "expected", "verdict"), *((row.what, _value(row), row.expected, row.verdict) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = []
    for row, (what, value, expected, verdict) in zip((None, *rows), cells, strict=True):
        lines.append(f"{what:<{widths[0]}}  {value:>{widths[1]}}  {expected:<{widths[2]}}  {verdict}".rstrip())
        if row is not None and row.reason:
            lines += [f"    {line}" for line in row.reason.splitlines()]
    return "\n".join(lines)


def _value(row: Row) -> str:
    if row.value is None:
        return ""
    number = f"{row.value:.3g}" if abs(row.value) < 100 else f"{row.value:,.0f}"
    return f"{number} {row.unit}".rstrip()


def summary(rows: Iterable[Row]) -> str:
    """How many rows have which verdict, and the names of those that are out of line."""
    verdicts = [row.verdict for row in rows]
    names = [row.what for row in rows if row.verdict == "out of line"]
    counts = ", ".join(
        f"{verdicts.count(each)} {each}" for each in ("ok", "out of line", "not run", "not judged") if each in verdicts
    )
    return counts + (f"\nout of line: {'; '.join(names)}" if names else "")


def record(parts: dict[str, tuple[list[Row], float]], **more: Any) -> str:
    """Everything as JSON: of each part its rows and its seconds."""
    found = {name: {"seconds": seconds, "rows": [asdict(row) for row in rows]} for name, (rows, seconds) in parts.items()}
    return json.dumps({**more, "parts": found}, indent=1, allow_nan=True) + "\n"
