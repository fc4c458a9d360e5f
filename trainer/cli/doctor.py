"""`zeromesh doctor`: its command line, and what it looks at in which order."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.errors import printable

if TYPE_CHECKING:
    from zeromesh.trainer.tools.doctor.findings import Finding

_RUNS = Path("runs")
"""The default of run.output_dir."""


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
    """Look at every part and print its findings; returns 1 where there is a problem."""
    from zeromesh.trainer.tools.doctor.findings import Level, report_lines

    found: list[tuple[str, Finding]] = []
    for part, findings in _parts(options.directory or [_RUNS]):
        found.extend((part, finding) for finding in findings)
        if not options.json:
            sys.stdout.write("".join(f"{printable(line)}\n" for line in report_lines(part, findings)))
            sys.stdout.flush()
    problems = sum(finding.level is Level.PROBLEM for _, finding in found)
    warnings = sum(finding.level is Level.WARNING for _, finding in found)
    if options.json:
        values = [{"part": part, **asdict(finding)} for part, finding in found]
        sys.stdout.write(json.dumps({"problems": problems, "warnings": warnings, "findings": values}, indent=1) + "\n")
    else:
        sys.stdout.write(f"{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}\n")
    return 1 if problems else 0


def _parts(directories: list[Path]) -> Iterator[tuple[str, list[Finding]]]:
    """The findings of one part after the other, so that they are shown while the next part is looked at."""
    from zeromesh.trainer.tools.doctor import software

    yield "packages", list(software.packages())
    if find_spec("torch") is None:
        return
    from zeromesh.trainer.tools.doctor import hardware

    yield "machine", list(hardware.machine())
    yield "accelerators", list(hardware.accelerators())
    yield "launch", list(software.launch())
    yield "disks", [finding for each in directories for finding in hardware.directory(each)]
    yield "network", list(software.network())


def _counted(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"
