"""A run beside its plan, as a person reads it: what `PlanCheck` has recorded. Reports read it where torch is not loaded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zeromesh.trainer.formatting import human_bytes, human_seconds, table_lines

UNCOUNTED = "uncounted"
"""Bytes of the peak that no purpose of the ledger has."""
_WORDS = {UNCOUNTED: "activations and libraries"}
ComparisonRow = tuple[str, str, str, str]
"""The name of a term, predicted, measured, and by how much the plan was off, for a person."""


def comparison_rows(record: Mapping[str, Any]) -> Iterator[ComparisonRow]:
    """The terms of a record: the step and its phases, the highest memory, and bytes by tier and purpose.

    Raises:
        ValueError, LookupError, TypeError: for what no record is.
    """
    yield _row("step", human_seconds, record["seconds"])
    for name, pair in dict(record["phases"]).items():
        yield _row(f"step: {name}", human_seconds, pair)
    yield _row("highest memory", human_bytes, record["peak"])
    for tier, purposes in dict(record["memory"]).items():
        for name, pair in dict(purposes).items():
            yield _row(f"{tier}: {_WORDS.get(name, name.replace('_', ' '))}", human_bytes, pair)


def comparison_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """A record as a table."""
    columns = (f"plan of {record['layout']}", "predicted", "measured", "off")
    yield from table_lines(columns, list(comparison_rows(record)), right=columns[1:])


def _row(name: str, shown: Callable[[float], str], pair: Sequence[float]) -> ComparisonRow:
    predicted, measured = pair
    return name, shown(predicted), shown(measured), f"{predicted / measured - 1:+.0%}" if measured else ""
