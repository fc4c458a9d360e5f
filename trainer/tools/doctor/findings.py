"""What a look at one thing has found: a verdict, and words for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """A `PROBLEM` keeps runs from working, a `WARNING` keeps some runs from it, or from working well."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`what` was looked at and `found`. What is not ok says what that `means`, and what to `do`."""

    what: str
    found: str
    level: Level = Level.OK
    means: str = ""
    do: str = ""

    def __post_init__(self) -> None:
        if self.level is not Level.OK and not (self.means and self.do):
            raise ValueError(f"{self.what} is a {self.level} without what it means and what to do")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePart:
    """The findings of one part of the machine."""

    name: str
    findings: Sequence[Finding]

    def count(self, level: Level) -> int:
        """How many findings are of this level."""
        return sum(finding.level is level for finding in self.findings)

    def lines(self) -> Iterator[str]:
        """The findings in plain text."""
        width = max((len(finding.what) for finding in self.findings), default=0)
        yield self.name
        for finding in self.findings:
            mark = {Level.OK: "ok", Level.WARNING: "WARNING", Level.PROBLEM: "PROBLEM"}[finding.level]
            yield f"  {mark:<8} {finding.what:<{width}}  {finding.found}"
            if finding.level is not Level.OK:
                indent = " " * (width + 13)
                yield f"{indent}{finding.means}"
                yield f"{indent}-> {finding.do}"

    def values(self) -> list[dict[str, Any]]:
        """The same for JSON."""
        return [{"part": self.name, **asdict(finding), "level": finding.level.value} for finding in self.findings]
