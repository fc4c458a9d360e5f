"""A finding of `zeromesh doctor`: what was looked at, how it is, and what to do about it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """A `PROBLEM` keeps runs from working; a `WARNING` keeps some runs from it, or from working well."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` was looked at and `found`. A finding that is not ok also says what that `means` and what to `do`."""

    what: str
    found: str
    level: Level = Level.OK
    means: str = ""
    do: str = ""


def problem(what: str, found: str, means: str, do: str, *, when: bool = True, level: Level = Level.PROBLEM) -> Finding:
    """Return a finding that is a problem where `when` is true, and ok otherwise."""
    return Finding(what, found, level, means, do) if when else Finding(what, found)


def warning(what: str, found: str, means: str, do: str, *, when: bool = True) -> Finding:
    """Return a finding that is a warning where `when` is true, and ok otherwise."""
    return problem(what, found, means, do, when=when, level=Level.WARNING)


def report_lines(part: str, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings of one part of the machine as lines of plain text."""
    width = max((len(finding.what) for finding in findings), default=0)
    yield part
    for finding in findings:
        mark = finding.level.value if finding.level is Level.OK else finding.level.value.upper()
        yield f"  {mark:<8} {finding.what:<{width}}  {finding.found}"
        if finding.level is not Level.OK:
            indent = " " * (width + 13)
            yield f"{indent}{finding.means}"
            yield f"{indent}-> {finding.do}"
