"""A plan as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeromesh.errors import counted
from zeromesh.intervals import grouped
from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds, table_lines, wrapped
from zeromesh.trainer.planning.estimate import Estimate
from zeromesh.trainer.planning.planner import Plan

SHOWN = 12  # The number of rows shown.
_REFUSALS = 6  # layouts that do not fit, shown with the reason


def plan_lines(plan: Plan, *, shown: int = SHOWN, more: Plan | None = None, width: int | None = None) -> list[str]:
    """Return the lines of a plan: a table, why other layouts do not fit, and what `more`, a plan for more ranks, would gain."""
    ranks = counted(plan.ranks, "rank")
    fitting = [row for row in plan.rows if row.fits]
    rest = [row for row in plan.rows if not row.fits]
    lines = [f"{plan.subject}, {human_count(plan.parameters)} parameters, on {ranks} of {plan.machine}", ""]
    # A plan is not accurate enough to tell rows apart that have equal milliseconds and equal first two digits.
    alike = list(grouped((f"{round(row.seconds, 3):.2g}", row) for row in fitting).values())
    table = _table(plan, alike[:shown], width) if fitting else []
    if left := sum(map(len, alike[shown:])):
        table.append(f"... and {left:,} more that fit")
    if fitting and plan.least not in [rows[0] for rows in alike[:shown]]:
        table += ["", *_table(plan, [[plan.least]], width, title="the least memory")]
    after = [""]
    if rest:
        after += [f"{counted(len(rest), 'layout', ',')} do not fit; those that need least:"]
        after += [f"  {row.layout}: {row.why_not}" for row in rest[:_REFUSALS]]
    after += [f"  {layout}: not possible: {reason}" for reason, layout in plan.refused.items()]
    after += [*([""] if len(after) > 1 else []), *_advice(plan, more)]
    return [*wrapped(lines, width), *table, *wrapped(after, width)]


def _table(plan: Plan, rows: Sequence[Sequence[Estimate]], width: int | None, title: str = "layout") -> list[str]:
    columns = (title, "step", "memory", "of", "host", "disk", "longest", "as fast")
    cells = []
    for estimate, *others in rows:
        longest = max(estimate.phases, key=lambda phase: estimate.phases[phase])
        least = min((each.device_bytes for each in others), default=0)
        row = (
            *(str(estimate.layout), human_seconds(estimate.seconds), human_bytes(estimate.device_bytes)),
            f"{estimate.device_bytes / plan.room.critical:.0%}",
            *(human_bytes(each) if each else "" for each in (estimate.host_bytes, estimate.disk)),
            f"{longest.replace('_', ' ')} {estimate.phases[longest] / estimate.seconds:.0%}",
            f"{len(others):,} more, from {human_bytes(least)}" if others else "",
        )
        cells.append(row)
    used = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    return table_lines([columns[at] for at in used], [[row[at] for at in used] for row in cells], right=columns[1:6], width=width)


def _advice(plan: Plan, more: Plan | None) -> Iterator[str]:
    best = plan.best
    if best is None:
        least = plan.least
        yield f"nothing fits; the least is {human_bytes(least.device_bytes)} a rank: {least.layout}"
    else:
        settings = " ".join(f"{key}={_plain(value)}" for key, value in best.layout.values_by_key().items())
        yield f"the keys of the first row: {settings}"
    if more is not None and more.best is not None:
        after = more.best
        gain = float("inf") if best is None else best.seconds / after.seconds
        took = "" if best is None else f", {gain:.2f} times as fast"
        if gain > 1.03:  # A smaller gain is within the error of a plan.
            yield f"{counted(more.ranks, 'rank')}: {human_seconds(after.seconds)} a step{took}: {after.layout}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "'{" + ", ".join(f"{key}: {each}" for key, each in value.items()) + "}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan_json(plan: Plan) -> list[dict[str, Any]]:
    """Return the rows as JSON values, `bytes` by tier and purpose."""
    return [
        {
            "layout": {**each.layout.values_by_key(), "accumulation": each.layout.accumulation},
            "bytes": {"device": dict(each.device), "host": dict(each.host), "file": each.disk},
            "phases": {str(phase): seconds for phase, seconds in each.phases.items()},
            **{name: getattr(each, name) for name in ("device_bytes", "seconds", "bubble", "fits", "why_not")},
        }
        for each in plan.rows
    ]
