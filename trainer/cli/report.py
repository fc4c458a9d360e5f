"""`zeromesh report`: its command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zeromesh.errors import StorageError, printable
from zeromesh.files import write_whole

NAME = "report.html"


def add_report_command(commands: Any) -> None:
    """Add `report` to the subparsers of `zeromesh`."""
    parser = commands.add_parser("report", help="write a page that shows a run, or several beside each other")
    parser.set_defaults(worker=False, overrides=[])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"where to write it, - for standard output (default: {NAME} in the first RUN)",
    )


def run_report(options: argparse.Namespace) -> int:
    """Write the page; returns the exit code.

    Raises:
        ConfigError: for what is no run's directory.
        StorageError: where the page cannot be written.
    """
    from zeromesh.trainer.tools.html_report.page import page_of
    from zeromesh.trainer.tools.html_report.runs import read_runs

    runs = read_runs([path.expanduser() for path in options.runs])
    content = page_of(runs).encode()
    if str(options.out) == "-":
        sys.stdout.buffer.write(content)
        return 0
    out = options.out if options.out is not None else runs[0].path / NAME
    _write(out, content)
    for run in runs:
        for remark in run.remarks:
            sys.stderr.write(printable(f"zeromesh: {run.name}: {remark}") + "\n")
    sys.stdout.write(f"{printable(str(out))}\n")
    return 0


def _write(out: Path, content: bytes) -> None:
    """Write a file whole: whoever has the old one open, or reads it meanwhile, sees no half of it."""
    try:
        write_whole(out, content)
    except OSError as error:
        raise StorageError(
            f"{str(out)!r} cannot be written: {error.strerror or error}; give another place with --out"
        ) from error
