"""Draws a pipeline schedule as text: `python scripts/pictures/schedule_picture.py [--ranks 2] [--microbatches 4] [NAME ...]`."""

import argparse
import sys
from typing import get_args

from zeromesh.pipeline.schedule import Action, Kind, ScheduleName, Timeline, make_schedule, simulate, validate

_FILL = {Kind.FORWARD: ">", Kind.BACKWARD: "<", Kind.BACKWARD_INPUT: "<", Kind.BACKWARD_WEIGHT: "w"}


def render(timeline: Timeline, *, columns: int = 100) -> str:
    """A line for each rank, time from left to right, at most `columns` wide.

    An action is its microbatch's number, where there is room, and `>` for forward, `<` for backward, `w` for gradients of
    weights; letters after the number are the chunk, from b. Dots are the bubble.
    """
    margin = len(f"rank {len(timeline.ends) - 1} ")
    room = max(1, columns - margin)
    scale = min(4.0, room / timeline.duration) if timeline.duration and _in_units(timeline) else 0.0
    scale = scale or (room / timeline.duration if timeline.duration else 1.0)
    width = min(room, round(timeline.duration * scale))
    lines = []
    for rank, spans in enumerate(zip(timeline.actions, timeline.starts, timeline.ends, strict=True)):
        row = ["."] * width
        for action, start, end in zip(*spans, strict=True):
            _draw(row, action, round(start * scale), min(width, round(end * scale)))
        lines.append(f"{f'rank {rank}':<{margin}}{''.join(row)}")
    share = ", ".join(f"{100 * part:.0f} %" for part in timeline.bubbles)
    return "\n".join([*lines, *_wrap(f"bubble: {share}; all ranks {100 * timeline.bubble:.1f} %", columns)])


def _in_units(timeline: Timeline) -> bool:
    """Return True if times are small whole numbers, which need no more columns than their labels."""
    return all(end == round(end) for ends in timeline.ends for end in ends) and timeline.duration < 200


def _draw(row: list[str], action: Action, start: int, end: int) -> None:
    chunk = chr(ord("a") + action.chunk % 26) if action.chunk else ""
    label = f"{action.microbatch}{chunk}"
    fill = _FILL[action.kind] * (end - start)
    row[start:end] = label + fill[len(label) :] if len(label) < len(fill) else fill


def _wrap(text: str, columns: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > columns:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def main() -> int:
    """Print each schedule that is named; returns the exit code."""
    names = [name for name in get_args(ScheduleName) if name != "interleaved"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; all of them by default")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    for name in options.names or names:
        schedule = make_schedule(name, ranks=options.ranks, microbatches=options.microbatches)
        validate(schedule)
        print(f"{name}\n{render(simulate(schedule))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
