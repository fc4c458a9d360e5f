"""The output of a memory report: as tables, as JSON and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.account import Growth, Line
from zeromesh.offload import Purpose

MEBIBYTE = 1 << 20
_COLOURS = {
    Purpose.PARAMETERS: "#30638e",
    Purpose.MASTER: "#5b8fb9",
    Purpose.MOMENTS: "#94bcd9",
    Purpose.GRADIENTS: "#edae49",
    Purpose.PARTIAL_GRADIENTS: "#c98f2e",
    Purpose.GRADIENT_BUCKETS: "#8f6420",
}
_PASSING, _ACTIVATIONS, _CONSTANT, _SYSTEM = "#6a994e", "#d1495b", "#b8b8b8", "#202020"


def purposes(lines: Sequence[Line]) -> str:
    """Markdown: bytes by purpose, of the formula and of the ledger."""
    names = [each.name for each in Purpose if any(each.name in _purposes_of(line) for line in lines)]
    head = " | ".join(Purpose[name].value for name in names)
    rows = [f"| configuration | {head} | comes and goes, at most |", "|---|" + "---|" * (len(names) + 1)]
    for line in lines:
        formula, ledger = line.predicted.staying, line.measured.ledger
        cells = [f"{_mib(formula.get(name, 0))} / {_mib(ledger.get(name, 0))}" for name in names]
        cells.append(f"{_mib(line.predicted.passing)} / {_mib(line.measured.passing)}")
        rows.append(f"| {_name(line)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def peaks(lines: Sequence[Line]) -> str:
    """Markdown: what is predicted of the peak, term by term, and what the system saw."""
    rows = [
        "| configuration | states that stay | that come and go | activations | constant | sum | system | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        predicted = line.predicted
        terms = [sum(predicted.staying.values()), predicted.passing, predicted.activations, line.constant]
        numbers = " | ".join(_mib(nbytes) for nbytes in (*terms, line.total, line.measured.peak))
        rows.append(f"| {_name(line)} | {numbers} | {_difference(line)} |")
    return "\n".join(rows)


def growth(found: Sequence[Growth]) -> str:
    """Markdown: by how much the peak grows with more layers, and what grows."""
    rows = ["| configuration | states | activations | sum | system | of states | difference |", "|---|" + "---|" * 6]
    for each in found:
        case = each.many.case
        name = f"{case.dtype}, {case.transport}, stage {case.stage}, {each.few.case.layers} to {case.layers} layers"
        terms = (each.states, each.activations, each.states + each.activations, each.peak)
        numbers = " | ".join(_mib(nbytes) for nbytes in terms)
        rows.append(f"| {name} | {numbers} | {each.peak / each.states:.2f} | {_difference(each)} |")
    return "\n".join(rows)


def _name(line: Line) -> str:
    case = line.case
    return f"stage {case.stage}, {case.layers} layers, width x{case.width}"


def _difference(found: Line | Growth) -> str:
    return "; ".join([f"{found.difference:+.1%}", *found.problems])


def _purposes_of(line: Line) -> set[str]:
    return {*line.predicted.staying, *line.measured.ledger}


def _mib(nbytes: float) -> str:
    return f"{nbytes / MEBIBYTE:.1f}"


def record(line: Line) -> dict[str, Any]:
    """One configuration as JSON, in bytes."""
    return {**asdict(line), "total": line.total, "difference": line.difference}


def draw(groups: Mapping[str, Sequence[Line]], path: Path) -> None:
    """A panel per group: a bar per configuration, stacked by purpose, and the system's figure as a mark."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(7 * columns, 4.5 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis, (title, lines) in zip(axes.flat, groups.items(), strict=False):
        names = [f"{line.case.stage}\n{line.case.layers} x{line.case.width}" for line in lines]
        bottoms = [0.0] * len(lines)
        for label, colour, values in _stack(lines):
            heights = [value / MEBIBYTE for value in values]
            axis.bar(range(len(lines)), heights, 0.7, bottom=bottoms, color=colour, label=label)
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
        seen = [line.measured.peak / MEBIBYTE for line in lines]
        axis.plot(range(len(lines)), seen, "_", color=_SYSTEM, markersize=18, markeredgewidth=2, label="system")
        axis.set_xticks(range(len(lines)), names, fontsize=8)
        axis.set_title(f"{title}: MiB a rank at the peak, by stage, layers and width")
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _stack(lines: Sequence[Line]) -> list[tuple[str, str, list[int]]]:
    """Label, colour and bytes of each part of the bars, from the bottom."""
    parts = []
    for purpose, colour in _COLOURS.items():
        values = [line.predicted.staying.get(purpose.name, 0) for line in lines]
        if any(values):
            parts.append((purpose.value, colour, values))
    parts.append(("states that come and go", _PASSING, [line.predicted.passing for line in lines]))
    parts.append(("activations", _ACTIVATIONS, [line.predicted.activations for line in lines]))
    parts.append(("constant", _CONSTANT, [line.constant for line in lines]))
    return parts
