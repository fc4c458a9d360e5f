"""How long the ranks of a pipeline stand still: predicted, simulated from measured times, and measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.launch import Run
from bench.report import Spread

_COLOURS = {"F": "#5b8fb9", "B": "#d1495b", "I": "#d1495b", "W": "#edae49"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward: inputs", "W": "backward: weights"}


def table(rounds: Mapping[str, Sequence[Run]], unit: Mapping[str, float]) -> str:
    """Markdown. `unit`: the bubble where a forward takes 1 and a backward 2, on all ranks alike."""
    rows = ["| schedule | in units of forward, % | simulated from its own times, % | measured, % |", "|---|---|---|---|"]
    for system, runs in rounds.items():
        pairs = [pair for run in runs for pair in (run.ranks[0]["notes"] or {}).get("bubbles", [])]
        if pairs:
            simulated, measured = (Spread.of(100 * pair[at] for pair in pairs).text(1) for at in (0, 1))
            rows.append(f"| {system} | {100 * unit[system]:.1f} | {simulated} | {measured} |")
    return "\n".join(rows)


def draw(rounds: Mapping[str, Sequence[Run]], path: Path) -> None:
    """One measured step of each schedule, a row for each rank: the median step of the quickest run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    found: dict[str, list[list[list[Any]]]] = {}
    for system, runs in rounds.items():
        best = min(runs, key=lambda run: sorted(run.step_seconds)[len(run.step_seconds) // 2])
        spans = (best.ranks[0]["notes"] or {}).get("spans")
        if spans:
            found[system] = spans
    if not found:
        return
    figure, axes = pyplot.subplots(len(found), 1, figsize=(12, 1.7 * len(found)), sharex=True, squeeze=False)
    for axis, (system, spans) in zip(axes[:, 0], found.items(), strict=True):
        for rank, actions in enumerate(spans):
            for kind, chunk, microbatch, start, end in actions:
                shade = {"facecolor": _COLOURS[kind], "edgecolor": "white", "alpha": 1 - 0.35 * chunk}
                axis.broken_barh([(start, end - start)], (-rank - 0.42, 0.84), linewidth=0.5, **shade)
                axis.text((start + end) / 2, -rank, str(microbatch), ha="center", va="center", fontsize=7)
        axis.set_yticks([-rank for rank in range(len(spans))], [f"rank {rank}" for rank in range(len(spans))])
        axis.set_title(system.removeprefix("zeromesh-"), loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    marks = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in ("F", "B", "W")]
    figure.legend(marks, [_NAMES[kind] for kind in ("F", "B", "W")], ncols=3, frameon=False, loc="upper right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
