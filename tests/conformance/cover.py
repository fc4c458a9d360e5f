"""Pairwise cover: a short list of rows in which every two values of different factors meet at least once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Row, idle: Callable[[Row], set[str]]) -> set[Pair]:
    """All pairs of a row, leaving out factors that have no effect in it."""
    effective = [(name, value) for name, value in row.items() if name not in idle(row)]
    return set(combinations(effective, 2))


def pairwise(factors: Mapping[str, Sequence[Any]], idle: Callable[[Row], set[str]] = lambda row: set()) -> list[Row]:
    """Rows that cover all pairs, greedily and always the same. `idle(row)` names factors without effect in a (partial) row.

    Each row starts from the first pair that is still missing; every further factor takes the value that covers most.
    """
    wanted: dict[Pair, None] = {}
    for (first, values), (second, others) in combinations(factors.items(), 2):
        for value in values:
            for other in others:
                pair = ((first, value), (second, other))
                if not idle(dict(pair)) & {first, second}:
                    wanted[pair] = None
    rows: list[Row] = []
    while wanted:
        row = _complete(dict(next(iter(wanted))), factors, wanted, idle, len(rows))
        rows.append(row)
        for pair in pairs_of(row, idle):
            wanted.pop(pair, None)
    return rows


def _complete(
    row: Row,
    factors: Mapping[str, Sequence[Any]],
    wanted: Mapping[Pair, None],
    idle: Callable[[Row], set[str]],
    turn: int,
) -> Row:
    for name, values in factors.items():
        if name in row:
            continue

        def gain(value: Any, name: str = name) -> int:
            trial = {key: row.get(key, value) for key in factors if key in row or key == name}
            return sum(pair in wanted for pair in pairs_of(trial, idle))

        # Rotated, so that ties do not always fall to the first value.
        rotated = [values[(number + turn) % len(values)] for number in range(len(values))]
        row[name] = max(rotated, key=gain)
    return {name: row[name] for name in factors}
