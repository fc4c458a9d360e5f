"""The waits of ranks for one another, and their causes, from the rows of `ranks.json` (see `StateMonitor`).

The last rank to enter a collective waits for no peer, so its communication is the link's time. The least communication of any rank
is therefore attributed to the link, and the excess of the others to waiting for late ranks.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.errors import StorageError, ranks_text
from zeromesh.files import read_whole

Row = Mapping[str, Any]
BUSY = ("data", "compute", "offload", "between")
_LEAST_FRACTION, _LEAST_SECONDS = 0.15, 1e-3  # The fraction of a step, and the seconds, above which a wait is reported.
_PHASE_TEXTS = {
    "data": "data",
    "compute": "computation",
    "offload": "waiting for bytes of another tier",
    "between": "what is between steps (callbacks, evaluation, saving)",
}
_CAUSES = {"data": "data", "load": "disk", "save": "disk", "idle": "between steps"}
"""The causes of waits for a rank by its activity; others are computation."""
_ROW_DEFAULTS: dict[str, Any] = dict.fromkeys(("rank", "pid", "step", "seconds", "seconds_without_progress"), 0)
_ROW_DEFAULTS |= {"doing": "", "failure": ""}


def read_ranks(path: Path) -> list[dict[str, Any]]:
    """Return the rows of `ranks.json`, by rank. Raises `OSError`, or `StorageError` if it is not as `StateMonitor` writes it."""
    try:
        rows = [{**_ROW_DEFAULTS, **row, "rank": int(row["rank"])} for row in json.loads(read_whole(path))["ranks"]]
        for row in rows:
            waits = row.get("waits") or {"for": "", "ranks": ()}
            _ = waits["for"], ranks_text(waits["ranks"]), float(row["seconds"] + row["seconds_without_progress"])
        sentences(blames(rows)), verdicts(rows)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: it is not as zeromesh writes it ({error!r})") from error
    return sorted(rows, key=lambda row: row["rank"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """A late rank, or the link if all ranks have arrived; `rank` is None then."""

    rank: int | None
    cause: str
    """The cause: `data`, `compute`, `disk`, `between steps`, `failed`, `stopped`, `link`, or `each other` for a cycle of waits."""
    doing: str
    seconds: float  # Seconds of the rank's present activity; for a link or a cycle, seconds of the wait.
    waiting: tuple[int, ...]  # The ranks that wait for it, directly or indirectly.


def blames(rows: Sequence[Row]) -> list[Blame]:
    """Return the ranks that others wait for, those with the most waiting ranks first."""
    by_rank = {row["rank"]: row for row in rows}
    waiting: dict[int | str, list[int]] = {}
    for row in rows:
        if row.get("waits"):
            for end in sorted(_chain_ends(by_rank, row["rank"]), key=str):
                waiting.setdefault(end, []).append(row["rank"])
    found = []
    for end, ranks in sorted(waiting.items(), key=lambda item: -len(item[1])):
        if isinstance(end, str):
            longest = max((by_rank[rank]["waits"] for rank in ranks), key=lambda each: each["seconds"])
            late, cause, doing, seconds = None, end, longest["for"], longest["seconds"]
        elif end in by_rank:
            row = by_rank[end]
            states = {"failed": row["failure"], "stopped": row.get("stopped"), "disk": row.get("disk")}
            usual = _CAUSES.get(row.get("activity", ""), "compute")
            cause = next((name for name, holds in states.items() if holds), usual)
            late, doing, seconds = end, row["failure"] or row["doing"], row.get("seconds", 0.0)
        else:
            continue
        found.append(Blame(rank=late, cause=cause, doing=doing, seconds=seconds, waiting=tuple(sorted(ranks))))
    return found


def _chain_ends(by_rank: Mapping[int, Row], rank: int) -> set[int | str]:
    """Return the ranks at the ends of the chains of waits from a rank; `link` if all ranks have arrived."""
    ends: set[int | str] = set()
    seen, following = {rank}, [rank]
    while following:
        waits = by_rank.get(following.pop(), {}).get("waits") or {"ranks": ()}
        if not waits["ranks"]:
            ends.add("link")
        for each in waits["ranks"]:
            if by_rank.get(each, {}).get("waits"):
                following += [] if each in seen else [each]
                seen.add(each)
            else:
                ends.add(each)
    # If some chain ends at a late rank, that rank is the cause, and ends at the link are left out.
    return {each for each in ends if each != "link"} or ends or {"each other"}


def sentences(found: Sequence[Blame]) -> list[str]:
    lines = []
    for each in found:
        who, wait = ranks_text(each.waiting, 8), "wait" if len(each.waiting) > 1 else "waits"
        doing = f"{each.doing}, for {each.seconds:.1f} s"
        if each.rank is not None:
            lines.append(f"{who} {wait} for rank {each.rank}: {each.cause} (rank {each.rank} is {doing})")
        elif each.cause == "link":
            lines.append(f"{who}: link (all ranks have come to {doing})")
        else:
            lines.append(f"{who} {wait} for each other (in {doing})")
    return lines


def recent(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    """Return the seconds per step of each rank by phase, with `communication` split into `link` and `waiting`."""
    known = {row["rank"]: row["recent"] for row in rows if row.get("recent")}
    link = min((each["communication"] for each in known.values()), default=0.0)
    return {
        rank: {part: each[part] for part in BUSY} | {"waiting": each["communication"] - link, "link": link}
        for rank, each in known.items()
    }


def verdicts(rows: Sequence[Row], traffic: Mapping[str, Any] | None = None) -> list[str]:
    """Return sentences about the latest steps; none before the first. `traffic` is as `communication` in `metrics.jsonl`."""
    parts = recent(rows)
    if len(parts) < 2:
        return []
    step = max(sum(each.values()) for each in parts.values())
    least = max(_LEAST_FRACTION * step, _LEAST_SECONDS)
    slow, most, usual = slowest({rank: sum(each[part] for part in BUSY) for rank, each in parts.items()})

    def median_of_others(part: str) -> float:
        return statistics.median(each[part] for rank, each in parts.items() if rank != slow)

    lines = []
    if most - usual >= least:
        cause = max(BUSY, key=lambda part: parts[slow][part] - median_of_others(part))
        own, others = 1e3 * parts[slow][cause], 1e3 * median_of_others(cause)
        what = f"the others wait for rank {slow} {1e3 * (most - usual):,.0f} ms a step"
        lines.append(f"{what}, because of {_PHASE_TEXTS[cause]}: {own:,.0f} ms there, {others:,.0f} ms elsewhere")
    link = next(iter(parts.values()))["link"]
    if link >= least:
        text = f"the link takes {1e3 * link:,.0f} ms of a step of {1e3 * step:,.0f} ms, when all ranks communicate"
        rows_of_traffic = [
            (row["seconds"], axis, name, row["bytes"])
            for axis, found in (traffic or {}).items()
            for name, row in found.items()
        ]
        if rows_of_traffic:
            seconds, axis, name, nbytes = max(rows_of_traffic)
            text += f", on rank 0 most in {name} over {axis} ({1e3 * seconds:,.0f} ms, {nbytes / 2**20:,.1f} MiB)"
        lines.append(text)
    return lines or [f"no rank is late: a step takes {1e3 * step:,.0f} ms, of which the link has {1e3 * link:,.0f} ms"]


def slowest(busy: Mapping[int, float]) -> tuple[int, float, float]:
    """Return the rank that was at work for the longest, its seconds, and the median of the others' seconds."""
    slow = max(busy, key=busy.__getitem__)
    others = [seconds for rank, seconds in busy.items() if rank != slow]
    return slow, busy[slow], statistics.median(others or [busy[slow]])
