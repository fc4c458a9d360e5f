"""The tables of the conformance matrices, from pytest's report: `make test-all` writes them to docs/conformance.md.

A cell says how many of its runs agreed with one plain process, and the largest relative difference of any loss, gradient norm,
gradient or parameter in them.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_HEAD = """# The whole matrix, against one plain process

Ten steps in float64, five of the architectures. A cell says how many runs agreed within 1e-9, of how many, and the largest
relative difference of any loss, gradient norm, gradient or parameter in them; [numerics.md](numerics.md) has the measure.
`make test-all` writes these tables.
"""
_TABLES = {
    "test_whole_matrix": """## ZeRO

Every model at every stage, on 1 to 4 ranks, with 1 and 4 microbatches, over host-shared memory and gloo; clipping, weight decay
groups, optimizer (AdamW, SGD, Adagrad), budget of gathered parameters and overlap drawn for each.
""",
    "test_an_architecture_trains_as_in_one_process": """## Architectures

Tiny models of transformers on two ranks with the loss of their task, against the model's own loss of the global batch in one
process: samples with different numbers of targets, a global batch that microbatches and ranks do not divide, clipping.
""",
    "test_a_divided_model_trains_as_one_process": """## Tensor parallelism

Stages 1 to 3, 1 and 4 microbatches, with clipping.
""",
    "test_a_model_in_stages_trains_as_one_process": """## Pipeline parallelism

GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedule, stages 1 to 3, 1 and 4 microbatches, with clipping; beside tensor
parallelism the sequence is shared, except under GPipe.
""",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a matrix."""

    model: str
    column: str
    passed: bool
    difference: float


def outcomes(report: Path) -> dict[str, list[Outcome]]:
    """The runs in a JUnit report of pytest, by test."""
    found: dict[str, list[Outcome]] = {}
    for test, case in _cases(report):
        said = {each.get("name"): str(each.get("value")) for each in case.iter("property")}
        row = json.loads(said["row"])
        passed = case.find("failure") is None and case.find("error") is None
        outcome = Outcome(row["model"], row["column"], passed, float(said.get("difference", "inf")))
        found.setdefault(test, []).append(outcome)
    return found


def _cases(report: Path) -> Iterator[tuple[str, ElementTree.Element]]:
    for case in ElementTree.parse(report).iter("testcase"):
        test = str(case.get("name")).partition("[")[0]
        if test in _TABLES and case.find("skipped") is None:
            yield test, case


def table(runs: list[Outcome]) -> str:
    """Markdown: a row per model."""
    cells: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for run in runs:
        cells[run.model, run.column].append(run)
    columns = list(dict.fromkeys(run.column for run in runs))
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for model in dict.fromkeys(run.model for run in runs):
        lines.append(f"| {model} | {' | '.join(_cell(cells[model, column]) for column in columns)} |")
    return "\n".join(lines)


def _cell(runs: list[Outcome]) -> str:
    good = [run.difference for run in runs if run.passed]
    return f"{len(good)} of {len(runs)}, {max(good, default=float('nan')):.0e}"


def main() -> int:
    """`matrix_table.py REPORT.xml... TABLE.md`; the exit code is 1 when a matrix is in none of the reports."""
    *reports, out = map(Path, sys.argv[1:])
    found: dict[str, list[Outcome]] = {}
    for report in reports:
        found.update(outcomes(report))
    missing = _TABLES.keys() - found.keys()
    if missing:
        print(f"no report has {', '.join(sorted(missing))}: run pytest with --junitxml and without -m 'not full'", file=sys.stderr)
        return 1
    parts = [f"{text}\n{table(found[test])}\n" for test, text in _TABLES.items()]
    out.write_text("\n".join([_HEAD, *parts]), encoding="utf-8")
    runs = [run for each in found.values() for run in each]
    print(f"{sum(run.passed for run in runs)} of {len(runs)} runs agree; written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
