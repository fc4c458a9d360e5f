"""Pictures of a schedule's timeline: as text, and as rectangles for whoever draws."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.pipeline.schedule.actions import Action, Kind
from zeromesh.pipeline.schedule.simulator import ActionTime, Timeline

_FILL = {Kind.FORWARD: ">", Kind.BACKWARD: "<", Kind.BACKWARD_INPUT: "<", Kind.BACKWARD_WEIGHT: "w"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A rectangle: `rank` is its row, `start` and `width` are in the timeline's unit of time."""

    rank: int
    start: float
    width: float
    action: Action


def bars(timeline: Timeline) -> tuple[Bar, ...]:
    """Rectangles of a timeline, rank by rank: what `matplotlib`'s `broken_barh` takes."""
    return tuple(
        Bar(rank=rank, start=span.start, width=span.end - span.start, action=span.action)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
    )


def render(timeline: Timeline, *, columns: int = 100) -> str:
    """A line for each rank, time from left to right, at most `columns` wide.

    An action is its microbatch's number, where there is room, and `>` for forward, `<` for backward, `w` for gradients of
    weights; letters after the number are the chunk, from b. Dots are the bubble.
    """
    margin = len(f"rank {len(timeline.spans) - 1} ")
    room = max(1, columns - margin)
    scale = min(4.0, room / timeline.duration) if timeline.duration and _in_units(timeline) else 0.0
    scale = scale or (room / timeline.duration if timeline.duration else 1.0)
    width = min(room, round(timeline.duration * scale))
    lines = []
    for rank, spans in enumerate(timeline.spans):
        row = ["."] * width
        for span in spans:
            _draw(row, span, scale)
        lines.append(f"{f'rank {rank}':<{margin}}{''.join(row)}")
    share = ", ".join(f"{100 * part:.0f} %" for part in timeline.bubbles)
    return "\n".join([*lines, *_wrap(f"bubble: {share}; all ranks {100 * timeline.bubble:.1f} %", columns)])


def _in_units(timeline: Timeline) -> bool:
    """Whether times are small whole numbers, which need no more columns than their labels."""
    return all(span.end == round(span.end) for spans in timeline.spans for span in spans) and timeline.duration < 200


def _draw(row: list[str], span: ActionTime, scale: float) -> None:
    start, end = round(span.start * scale), min(len(row), round(span.end * scale))
    chunk = chr(ord("a") + span.action.chunk % 26) if span.action.chunk else ""
    label = f"{span.action.microbatch}{chunk}"
    fill = _FILL[span.action.kind] * (end - start)
    text = label + fill[len(label) :] if len(label) < len(fill) else fill
    row[start:end] = text


def _wrap(text: str, columns: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > columns:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines
