"""Whether ranks were given the same: each sends one number, and what that stands for only where numbers differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from zeromesh.errors import ZeromeshError, some
from zeromesh.mesh.process_set import ProcessSet

_ABSENT = "(absent)"
_SHOWN = 8
_LENGTH = 100


def require_same(group: ProcessSet, values: Mapping[str, object], error: type[ZeromeshError], *, advice: str) -> None:
    """Compare named values, as text, with the other ranks of `group`; all of them call this.

    Raises:
        error: on every rank, with the names that differ, what each rank has, and `advice`.
    """
    content = json.dumps({name: str(value) for name, value in values.items()}).encode()
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
    if len({row[0] for row in group.gather_integers([digest])}) == 1:
        return
    rows = [json.loads(row) for row in group.gather_bytes(content, "values that differ between ranks")]
    raise error(f"ranks were given different things: {'; '.join(differences(rows, group.ranks))}. {advice}")


def differences(rows: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """One text for each name whose values differ, such as `run.max_steps is 100 on rank 0, 50 on ranks 1, 2`."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row):
        holders: dict[str, list[int]] = {}
        for rank, row in zip(ranks, rows, strict=True):
            holders.setdefault(row.get(name, _ABSENT), []).append(rank)
        if len(holders) > 1:
            sides = [f"{_short(value)} on {_ranks(where)}" for value, where in holders.items()]
            found.append(f"{name} is {', '.join(sides)}")
    more = len(found) - _SHOWN
    return [*found[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some(ranks, _SHOWN)}"


def _short(value: str) -> str:
    return value if len(value) <= _LENGTH else f"{value[: _LENGTH - 3]}..."
