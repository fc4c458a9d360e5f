"""The summary of several rounds: medians and ratios, as a table, as JSON and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.launch import Run

MEBIBYTE = 1 << 20
OURS = "zeromesh-"
_OURS_COLOUR, _CEILING_COLOUR = "#d1495b", "#b8b8b8"
_PEER_COLOURS = ("#30638e", "#5b8fb9", "#94bcd9", "#edae49", "#c98f2e", "#8f6420")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median of some rounds' numbers, and the lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one number."""
        numbers = sorted(values)
        return cls(median=statistics.median(numbers), low=numbers[0], high=numbers[-1])

    def text(self, digits: int) -> str:
        """`median (low, high)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}, {self.high:.{digits}f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One system over all its rounds: milliseconds and processor seconds a step, MiB a rank."""

    system: str
    milliseconds: Spread
    cpu_seconds: Spread
    mebibytes: Spread
    first_loss: float
    last_loss: float
    difference: float
    """Largest difference of any step's loss from zeromesh's, as a part of it."""


Rounds = Mapping[str, Sequence[Run]]
"""The runs of each system, one a round; round n of all systems ran one after the other."""


def summarise(rounds: Rounds) -> list[Summary]:
    """One line per system, in the order in which they ran."""
    ours = next((runs[0].losses for system, runs in rounds.items() if system.startswith(OURS)), ())
    found = []
    for system, runs in rounds.items():
        losses = runs[0].losses
        found.append(
            Summary(
                system=system,
                milliseconds=Spread.of(1e3 * statistics.median(run.step_seconds) for run in runs),
                cpu_seconds=Spread.of(statistics.median(run.cpu_seconds) for run in runs),
                mebibytes=Spread.of(run.peak_bytes / MEBIBYTE for run in runs),
                first_loss=losses[0],
                last_loss=losses[-1],
                difference=max((abs(a - b) / b for a, b in zip(losses, ours, strict=True)), default=0.0) if ours else 0.0,
            )
        )
    return found


def ratios(rounds: Rounds) -> dict[str, dict[str, tuple[Spread, Spread]]]:
    """For each stage of zeromesh and each peer, zeromesh's time and memory as parts of the peer's, round by round."""
    found: dict[str, dict[str, tuple[Spread, Spread]]] = {}
    for system, ours in rounds.items():
        if not system.startswith(OURS):
            continue
        for peer, theirs in rounds.items():
            if peer.startswith(OURS):
                continue
            pairs = list(zip(ours, theirs, strict=False))
            times = [statistics.median(a.step_seconds) / statistics.median(b.step_seconds) for a, b in pairs]
            memory = [a.peak_bytes / b.peak_bytes for a, b in pairs]
            found.setdefault(system, {})[peer] = (Spread.of(times), Spread.of(memory))
    return found


def table(rounds: Rounds) -> str:
    """Markdown: what each system took, then zeromesh as a part of each peer."""
    lines = [
        "| system | ms a step | processor s a step | peak MiB a rank | loss, first and last | loss differs by |",
        "|---|---|---|---|---|---|",
    ]
    for each in summarise(rounds):
        lines.append(
            f"| {each.system} | {each.milliseconds.text(0)} | {each.cpu_seconds.text(2)} | {each.mebibytes.text(0)} "
            f"| {each.first_loss:.4f}, {each.last_loss:.4f} | {each.difference:.1e} |"
        )
    for system, peers in ratios(rounds).items():
        lines += ["", f"| {system} as a part of | time | memory |", "|---|---|---|"]
        lines += [f"| {peer} | {time.text(2)} | {memory.text(2)} |" for peer, (time, memory) in peers.items()]
    return "\n".join(lines)


def record(rounds: Rounds) -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        "summaries": [asdict(each) for each in summarise(rounds)],
        "ratios": {
            system: {peer: {"time": asdict(time), "memory": asdict(memory)} for peer, (time, memory) in peers.items()}
            for system, peers in ratios(rounds).items()
        },
        "rounds": {system: [asdict(run) for run in runs] for system, runs in rounds.items()},
    }


def draw(groups: Mapping[str, Rounds], path: Path) -> None:
    """Bars of step time and of peak memory, a group per dtype; whiskers go from the lowest to the highest round."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    summaries = {name: summarise(rounds) for name, rounds in groups.items()}
    systems = list(dict.fromkeys(each.system for found in summaries.values() for each in found))
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axis, (field, label) in zip(axes, (("milliseconds", "ms a step"), ("mebibytes", "peak MiB a rank")), strict=True):
        width = 0.85 / len(systems)
        for number, system in enumerate(systems):
            for place, found in enumerate(summaries.values()):
                spread = next((getattr(each, field) for each in found if each.system == system), None)
                if spread is None:
                    continue
                where = place + (number - (len(systems) - 1) / 2) * width
                error = [[spread.median - spread.low], [spread.high - spread.median]]
                style = {"color": _colour(system, systems), "label": system if place == 0 else None}
                bars = axis.bar(where, spread.median, width * 0.92, yerr=error, error_kw={"elinewidth": 1}, **style)
                axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
        axis.set_xticks(range(len(summaries)), list(summaries))
        axis.set_title(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _colour(system: str, systems: Sequence[str]) -> str:
    if system.startswith(OURS):
        return _OURS_COLOUR
    if system == "local":
        return _CEILING_COLOUR
    peers = [each for each in systems if not each.startswith(OURS) and each != "local"]
    return _PEER_COLOURS[peers.index(system) % len(_PEER_COLOURS)]
