"""`Homes`: on which process set each part of a model lives. Pure: it says where, and moves nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zeromesh.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """Patterns of fully qualified names, and the process set that each belongs to.

    A pattern is that of a module, with `*` for whatever, and covers everything inside it: `encoder` covers `encoder.layers.0`, and
    `layers.*.mlp` the `up` in every layer's. The first that covers a name counts. Names are those of modules or of parameters.

    Raises:
        LayoutError: at construction, for a pattern that is there twice, or that names no process set.
    """

    patterns: tuple[tuple[str, str], ...] = ()
    """`(pattern, name of a process set)`, the most particular first."""
    default: str = "world"
    """The set of what no pattern covers."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for pattern, name in (*self.patterns, ("", self.default)):
            if pattern in seen:
                raise LayoutError(f"homes of modules: pattern {pattern!r} is there twice; the second would never count")
            if not name:
                raise LayoutError(f"homes of modules: pattern {pattern!r} names no process set")
            seen.add(pattern)

    @property
    def names(self) -> tuple[str, ...]:
        """The process sets that are named, each once."""
        return tuple(dict.fromkeys((*(name for _, name in self.patterns), self.default)))

    def of(self, fqn: str) -> str:
        """The name of the process set on which the module or parameter `fqn` lives."""
        return next((name for pattern, name in self.patterns if _covers(pattern, fqn)), self.default)

    def unused(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """The patterns that cover none of these names: most likely mistyped."""
        known = list(fqns)
        return tuple(pattern for pattern, _ in self.patterns if not any(_covers(pattern, fqn) for fqn in known))


def _covers(pattern: str, fqn: str) -> bool:
    return fnmatchcase(fqn, pattern) or fnmatchcase(fqn, f"{pattern}.*")
