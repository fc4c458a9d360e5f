"""Readings of the records of all ranks: their waits for one another with the causes, from `ranks.json` (see `StateMonitor`), and a
trace of their event rings (see `EventRing`) in Chrome's JSON format for https://ui.perfetto.dev.

The last rank to enter a collective waits for no peer, so its communication is the link's time. The least communication of any rank
is therefore attributed to the link, and the excess of the others to waiting for late ranks.

In a trace, a wait names the last rank to arrive, where known, with an arrow from there; in collectives of `_TOGETHER`, begin times
tell it. Clocks of hosts are aligned by the median over steps of a moment that all ranks share once per step."""

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeromesh.errors import StorageError, ranks_text
from zeromesh.files import read_whole
from zeromesh.intervals import grouped
from zeromesh.telemetry import status_board as codes
from zeromesh.telemetry.status_board import DETAIL, STEP_SHIFT, UNIT_BITS, Activity, read_ring

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
STEPS, PHASES, DOING, LAUNCHES = range(1, 5)
_ROWS = {STEPS: "steps", PHASES: "phases, collectives and waits", DOING: "what it does", LAUNCHES: "launches"}
_TOGETHER = ("agreement over ", "all-reduce over ", "all-to-all over ", "broadcast over ")
_ARROW_NS = 200_000  # The least nanoseconds of a wait with an arrow.


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
    waiters = [row["rank"] for row in rows if row.get("waits")]
    waiting = grouped((end, rank) for rank in waiters for end in sorted(_chain_ends(by_rank, rank), key=str))
    found = []
    for end, ranks in sorted(waiting.items(), key=lambda item: -len(item[1])):
        if isinstance(end, str):
            longest = max((by_rank[rank]["waits"] for rank in ranks), key=lambda each: each["seconds"])
            late, cause, doing, seconds = None, end, longest["for"], longest["seconds"]
        elif end in by_rank:
            row = by_rank[end]
            states = {"failed": row["failure"], "stopped": row.get("stopped"), "disk": row.get("disk")}
            cause = next((name for name, holds in states.items() if holds), _CAUSES.get(row.get("activity", ""), "compute"))
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
        axes = (traffic or {}).items()
        kinds = [(row["seconds"], axis, name, row["bytes"]) for axis, found in axes for name, row in found.items()]
        if kinds:
            seconds, axis, name, nbytes = max(kinds)
            text += f", on rank 0 most in {name} over {axis} ({1e3 * seconds:,.0f} ms, {nbytes / 2**20:,.1f} MiB)"
        lines.append(text)
    return lines or [f"no rank is late: a step takes {1e3 * step:,.0f} ms, of which the link has {1e3 * link:,.0f} ms"]


def slowest(busy: Mapping[int, float]) -> tuple[int, float, float]:
    """Return the rank that was at work for the longest, its seconds, and the median of the others' seconds."""
    slow = max(busy, key=busy.__getitem__)
    return slow, busy[slow], statistics.median([seconds for rank, seconds in busy.items() if rank != slow] or [busy[slow]])


@dataclass(kw_only=True, slots=True)
class Slice:
    """An activity of a rank from `begin` to `end`, in nanoseconds of the first rank's clock."""

    row: int
    name: str
    begin: int
    end: int
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRing:
    """The events of one rank, with its mesh coordinates and its clocks."""

    rank: int
    host: str
    axes: Mapping[str, Sequence[int]]
    units: Sequence[str]
    names: Sequence[str]
    clock: int
    wall: int  # The wall clock in nanoseconds when the rank's own clock was at `clock`.
    events: Sequence[tuple[int, int]]


def read_rings(folder: Path) -> tuple[list[RankRing], list[str]]:
    """Read the rings in a folder, by rank, with remarks about those left out. Raises `StorageError` where there is none."""
    rings, remarks = [], []
    for path in folder.glob("rank-*.ring"):
        try:
            header, events = read_ring(path)
            kept = {name: header[name] for name in ("host", "axes", "units", "names")}
            rank, clock, wall = (int(header[name]) for name in ("rank", "clock_ns", "wall_ns"))
            rings.append(RankRing(rank=rank, clock=clock, wall=wall, events=events, **kept))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            remarks.append(f"{path} cannot be read: {error}")
    latest = max((ring.wall for ring in rings), default=0)
    # Rings of other processes, of more ranks or an earlier start, end before all events of the latest ring.
    last = [ring for ring in rings if ring.wall == latest and ring.events]
    began = min((ring.wall - ring.clock + ring.events[0][0] for ring in last), default=0)
    old = [ring.rank for ring in rings if ring.wall < began]
    remarks += [f"rank {rank} has written nothing in the time of the others, and is left out" for rank in sorted(old)]
    latest_rings = sorted((ring for ring in rings if ring.rank not in old and ring.events), key=lambda ring: ring.rank)
    if not latest_rings:
        raise StorageError(f"no trace is in {str(folder)!r}: ranks write one when a run ends, or this command asks")
    return latest_rings, remarks


def trace_content(trace: Mapping[str, Any], *, packed: bool) -> bytes:
    content = json.dumps(trace, separators=(",", ":")).encode()
    return gzip.compress(content, 6, mtime=0) if packed else content


def trace_of(rings: Sequence[RankRing], metrics: Sequence[Row] = (), steps: range | None = None) -> dict[str, Any]:
    """Return the trace of rings, optionally of some `steps` alone. `metrics` are lines of `metrics.jsonl`, for rank 0's memory."""
    made = {ring.rank: _slices(ring, rings[0]) for ring in rings}
    arrows = list(_arrows({ring.rank: ring.axes for ring in rings}, made))
    kept = {rank: [one for one in own if steps is None or one.facts.get("step") in steps] for rank, own in made.items()}
    zero = min((each.begin for slices in kept.values() for each in slices), default=0)
    memory = {line.get("step"): line.get("memory") for line in metrics}
    events: list[dict[str, Any]] = []

    def add(kind: str, at: int, rank: int, row: int, name: str, **more: Any) -> None:
        events.append({"ph": kind, "name": name, "pid": rank, "tid": row, "ts": (at - zero) / 1e3, **more})

    for rank, slices in kept.items():
        for each in slices:
            add("X", each.begin, rank, each.row, each.name, dur=max(0, each.end - each.begin) / 1e3, args=each.facts)
            # Rank 0's peak bytes of each logged step, by tier and purpose, stand at the end of the step.
            tiers = memory.get(each.facts.get("step")) if (rank, each.row) == (0, STEPS) else None
            for tier, purposes in tiers.items() if isinstance(tiers, Mapping) else ():
                if isinstance(purposes, Mapping) and purposes:
                    add("C", each.end, 0, 0, f"peak bytes, {tier}", args=dict(purposes))
    shown = {id(each) for slices in kept.values() for each in slices}
    for number, (rank, at, row, waiter, waits) in enumerate(arrows, start=1):
        if id(waits) in shown and at >= zero:
            add("s", at, rank, row, "waits for", cat="waits", id=number)
            add("f", max(waits.begin, waits.end - 1), waiter, waits.row, "waits for", cat="waits", id=number, bp="e")
    # Of slices with equal begin the longer one is the parent.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    titles = []
    for ring in rings:
        common = {"ph": "M", "ts": 0.0, "pid": ring.rank}
        name = f"rank {ring.rank} on {ring.host.partition(' ')[0]}"
        titles.append({**common, "tid": 0, "name": "process_name", "args": {"name": name}})
        titles.append({**common, "tid": 0, "name": "process_sort_index", "args": {"sort_index": ring.rank}})
        for row, title in _ROWS.items():
            titles.append({**common, "tid": row, "name": "thread_name", "args": {"name": title}})
    return {"traceEvents": [*titles, *events], "displayTimeUnit": "ms"}


def _slices(ring: RankRing, base: RankRing) -> list[Slice]:
    """Return all activities of a rank as slices by the clock of `base`; unfinished ones end at the time of writing."""
    offset = 0
    if ring.host != base.host:
        own, others = ({code & DETAIL: at for at, code in each.events if code & ~DETAIL == codes.MEETING} for each in (ring, base))
        differences = [others[step] - own[step] for step in own.keys() & others.keys()]
        # Without a moment that all ranks share, clocks are aligned by the wall clocks of the hosts.
        walls = (base.clock - base.wall) - (ring.clock - ring.wall)
        offset = int(statistics.median(differences)) if differences else walls
    facts: dict[str, Any] = {}
    made: list[Slice] = []
    nested: list[Slice] = []
    single: dict[int, Slice] = {}  # The open slice of each row except that of the phases.

    def begin(row: int, name: str, at: int) -> Slice:
        made.append(Slice(row=row, name=name, begin=at, end=ring.clock + offset, facts=dict(facts)))
        return made[-1]

    def end(row: int, at: int) -> None:
        if row in single:
            single.pop(row).end = at

    for moment, code in ring.events:
        at, detail = moment + offset, code & DETAIL
        end(LAUNCHES, at)
        if code >> UNIT_BITS & codes.NO_ACTIVITY:
            mark, name = code & ~DETAIL, ring.names[detail] if detail < len(ring.names) else ""
            if mark == codes.BEGIN or mark == codes.WAIT:
                nested.append(begin(PHASES, (name if mark == codes.BEGIN else f"wait: {name}") or "?", at))
            elif mark == codes.END:
                depth = next((back for back, each in enumerate(reversed(nested), 1) if each.name == name), 0)
                for _ in range(depth):
                    nested.pop().end = at
            elif mark == codes.WAITED:
                if nested and nested[-1].name.startswith("wait: "):
                    nested[-1].facts |= {"waited for rank": detail - 1} if detail else {}
                    nested.pop().end = at
            elif mark == codes.NEW_MICROBATCH:
                facts["microbatch"] = detail
            continue
        step, kind = code >> STEP_SHIFT, Activity(code >> UNIT_BITS & (1 << codes.ACTIVITY_BITS) - 1)
        if step != facts.get("step", 0):
            facts = {"step": step}
            end(STEPS, at)
            single[STEPS] = begin(STEPS, f"step {step}", at)
        row = LAUNCHES if kind in (Activity.GATHER, Activity.REDUCE) else DOING
        end(row, at)
        if kind is Activity.IDLE:
            end(STEPS, at)
        single[row] = begin(row, codes.phrase_of(kind, detail - 1, ring.units).removeprefix("in "), at)
    return made


def _arrows(
    axes: Mapping[int, Mapping[str, Sequence[int]]], sliced: Mapping[int, Sequence[Slice]]
) -> Iterator[tuple[int, int, int, int, Slice]]:
    """Yield an arrow's source rank, time and row, target rank and slice: by begins in `_TOGETHER`, and waits that name a rank."""
    found: dict[tuple[Any, ...], dict[int, Slice]] = defaultdict(dict)
    for rank, slices in sliced.items():
        counts: dict[tuple[Any, ...], int] = defaultdict(int)
        first = min((each.facts.get("step", 0) for each in slices), default=0)
        for each in sorted(slices, key=lambda each: each.begin):
            step = each.facts.get("step", 0)
            members = axes[rank].get(each.name.rpartition(" over ")[2], ()) if each.name.startswith(_TOGETHER) else ()
            if len(members) > 1 and step > first:  # The ring may have overwritten events of the first step.
                place = (each.name, step, tuple(members))
                counts[place] += 1
                found[*place, counts[place]][rank] = each
    for (_, _, members, _), slices_of in found.items():
        if len(slices_of) < len(members):
            continue
        last = max(slices_of, key=lambda rank: slices_of[rank].begin)
        came = slices_of[last].begin
        for rank, each in slices_of.items():
            waited = max(0, min(each.end, came) - each.begin)
            link = max(0, each.end - max(came, each.begin))
            each.facts |= {"last to come": last, "waited ms": waited / 1e6, "link ms": link / 1e6}
            if rank != last and waited >= _ARROW_NS:
                yield last, came, PHASES, rank, each
    for rank, slices in sliced.items():
        for each in slices:
            late = each.facts.get("waited for rank", -1)
            if late in sliced and each.end - each.begin >= _ARROW_NS:
                yield late, each.end - 1, DOING, rank, each
