"""The table of the whole conformance matrix, from pytest's report: `make test-all` writes it to docs/conformance.md.

A cell is a model at a ZeRO stage: how many of its runs agreed with one plain process, and the largest relative difference of any
loss, gradient norm, gradient or parameter in them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_TEST = "test_whole_matrix"
_HEAD = """# The whole matrix, against one plain process

Every model at every stage, on 1 to 4 ranks, with 1 and 4 microbatches, over host-shared memory and gloo; clipping, weight decay
groups, optimizer (AdamW, SGD, Adagrad), budget of gathered parameters and overlap drawn for each. Ten steps in float64. A cell
says how many runs agreed within 1e-9, of how many, and the largest relative difference of any loss, gradient norm, gradient or
parameter in them; [numerics.md](numerics.md) has the measure. `make test-all` writes this table.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the matrix."""

    model: str
    stage: int
    passed: bool
    difference: float


def outcomes(report: Path) -> Iterator[Outcome]:
    """The runs in a JUnit report of pytest."""
    for case in ElementTree.parse(report).iter("testcase"):
        if not str(case.get("name")).startswith(_TEST) or case.find("skipped") is not None:
            continue
        found = {each.get("name"): str(each.get("value")) for each in case.iter("property")}
        row = json.loads(found["row"])
        passed = case.find("failure") is None and case.find("error") is None
        yield Outcome(row["model"], row["stage"], passed, float(found.get("difference", "inf")))


def table(runs: list[Outcome]) -> str:
    """Markdown: a row per model, a column per stage."""
    cells: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for run in runs:
        cells[run.model, run.stage].append(run)
    stages = sorted({run.stage for run in runs})
    lines = [f"| model | {' | '.join(f'stage {stage}' for stage in stages)} |", "|---" * (len(stages) + 1) + "|"]
    for model in dict.fromkeys(run.model for run in runs):
        lines.append(f"| {model} | {' | '.join(_cell(cells[model, stage]) for stage in stages)} |")
    return "\n".join(lines)


def _cell(runs: list[Outcome]) -> str:
    good = [run.difference for run in runs if run.passed]
    return f"{len(good)} of {len(runs)}, {max(good, default=float('nan')):.0e}"


def main() -> int:
    """`matrix_table.py REPORT.xml TABLE.md`; the exit code is 1 when the report has no run of the matrix."""
    report, out = map(Path, sys.argv[1:])
    runs = list(outcomes(report))
    if not runs:
        print(f"{report} has no {_TEST}: run pytest with --junitxml and without -m 'not full'", file=sys.stderr)
        return 1
    out.write_text(f"{_HEAD}\n{table(runs)}\n", encoding="utf-8")
    print(f"{sum(run.passed for run in runs)} of {len(runs)} runs agree; written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
