"""`zeromesh doctor`: its command line, and what it looks at in which order."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.errors import printable

if TYPE_CHECKING:
    from zeromesh.trainer.tools.doctor.findings import MachinePart

_RUNS = Path("runs")
"""Where runs are written that say nothing else: the default of run.output_dir."""


def add_doctor_command(commands: Any) -> None:
    """Add `doctor` to the subparsers of `zeromesh`."""
    parser = commands.add_parser("doctor", help="check this machine and suggest fixes")
    parser.set_defaults(worker=False, overrides=[])
    parser.add_argument(
        "--directory",
        action="append",
        type=Path,
        metavar="DIR",
        help="where runs, checkpoints or offload would write; may be given again (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(options: argparse.Namespace) -> int:
    """Look at everything and say what was found; returns 1 where there is a problem."""
    from zeromesh.trainer.tools.doctor.findings import Level

    parts = []
    for part in _parts(options.directory or [_RUNS]):
        parts.append(part)
        if not options.json:
            sys.stdout.write("".join(f"{printable(line)}\n" for line in part.lines()))
            sys.stdout.flush()
    counts = {level: sum(part.count(level) for part in parts) for level in Level}
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    if options.json:
        findings = [values for part in parts for values in part.values()]
        sys.stdout.write(
            json.dumps({"problems": problems, "warnings": warnings, "findings": findings}, indent=1) + "\n"
        )
    else:
        sys.stdout.write(f"{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}\n")
    return 1 if problems else 0


def _parts(directories: list[Path]) -> Iterator[MachinePart]:
    """One after the other, so that what is known is shown while the next is looked at."""
    from zeromesh.trainer.tools.doctor import packages
    from zeromesh.trainer.tools.doctor.findings import MachinePart

    found = list(packages.look())
    yield MachinePart(name="packages", findings=found)
    if any(finding.what == "torch" and finding.found == "not installed" for finding in found):
        return
    from zeromesh.trainer.tools.doctor import accelerators, disks, launches, machine, network

    cuda = accelerators.look()
    yield MachinePart(name="machine", findings=list(machine.judge(machine.look(has_cuda=bool(cuda.devices)))))
    yield MachinePart(name="accelerators", findings=list(accelerators.judge(cuda)))
    yield MachinePart(name="launch", findings=list(launches.look()))
    yield MachinePart(
        name="disks", findings=[finding for each in directories for finding in disks.judge(disks.look(each))]
    )
    yield MachinePart(name="network", findings=list(network.judge(network.look())))


def _counted(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"
