"""Commands about runs and this machine: `zeromesh report` and `doctor`; and `init`, which writes example configurations."""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from zeromesh.errors import StorageError, errors_as, plural
from zeromesh.files import refusals, write_whole
from zeromesh.trainer.cli import train
from zeromesh.trainer.formatting import print_lines

REPORT = "report.html"
_EXAMPLES = Path(__file__).resolve().parent.parent / "configs"
_DATA_FILE = re.compile(r"\bscripts/examples/\S+")


def run_report(options: argparse.Namespace) -> int:
    from zeromesh.trainer.tools.html_report.page import page_of
    from zeromesh.trainer.tools.html_report.runs import read_runs

    runs = read_runs([path.expanduser() for path in options.runs])
    content = page_of(runs).encode()
    if str(options.out) == "-":
        sys.stdout.buffer.write(content)
        return 0
    out = options.out if options.out is not None else runs[0].path / REPORT
    with refusals(out, "written", "; give another place with --out"):
        write_whole(out, content)
    for run in runs:
        for remark in run.remarks:
            train.say(f"{run.name}: {remark}")
    print_lines([str(out)])
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Check every part of this machine and print the findings; returns 1 where there is a problem."""
    from zeromesh.trainer.tools.doctor import software

    all_findings: list[tuple[str, software.Finding]] = []

    def check(part: str, findings: Iterable[software.Finding]) -> None:
        """Show the findings of one part before the next part is checked."""
        of_part = list(findings)
        all_findings.extend((part, finding) for finding in of_part)
        if not options.json:
            print_lines(software.report_lines(part, of_part))

    check("packages", software.packages())
    if find_spec("torch") is not None:
        from zeromesh.trainer.tools.doctor import hardware

        check("machine", hardware.machine())
        check("accelerators", hardware.accelerators())
        check("launch", software.launch())
        check("disks", chain.from_iterable(map(hardware.directory, options.directory or [Path("runs")])))
        check("network", software.network())
    levels = (software.Level.PROBLEM, software.Level.WARNING)
    counts = {f"{level.value}s": sum(each.level is level for _, each in all_findings) for level in levels}
    if options.json:
        values = [{"part": part, **asdict(finding)} for part, finding in all_findings]
        sys.stdout.write(json.dumps({**counts, "findings": values}, indent=1) + "\n")
    else:
        print_lines([", ".join(f"{count or 'no'} {plural(count, name.removesuffix('s'))}" for name, count in counts.items())])
    return 1 if counts["problems"] else 0


def run_init(options: argparse.Namespace) -> int:
    paths = examples()
    if options.name is None:
        width = max(map(len, paths))
        for name, path in sorted(paths.items()):
            # The first line of an example is a comment about it, except in JSON, which has no comments.
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            about = first.removeprefix("# ") if first.startswith("# ") else f"in JSON: {path.name}"
            print_lines([f"{name:{width}}  {about}"])
        print_lines(["zeromesh init NAME writes one of them here"])
        return 0
    path = Path(paths[options.name].name)
    text = paths[options.name].read_text(encoding="utf-8").replace("configs/", "")
    refused = errors_as(StorageError, f"{str(path)!r} was not written: ", OSError, after="; move it away first")
    with refused, path.open("x", encoding="utf-8") as file:
        file.write(text)
    absent = [each for each in _DATA_FILE.findall(text) if not Path(each).exists()]
    first = f"name your own data in place of {' and '.join(absent)}, and " if absent else ""
    print_lines([f"wrote {path}; {first}train it with: zeromesh train {path}"])
    return 0


def examples() -> dict[str, Path]:
    return {path.stem: path for path in _EXAMPLES.iterdir()}
