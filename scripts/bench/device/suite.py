"""Part `tests`: the repository's tests that need an accelerator, while torch's sanitizer looks for races between streams."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.device import rows
from bench.device.place import Place
from bench.processes import SCRIPTS

ROOT = SCRIPTS.parent
_MARK = "@accelerated"


def files() -> list[str]:
    """Those that hold a test which needs an accelerator, but no workers: these divide the devices among ranks."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if _MARK in path.read_text(encoding="utf-8")]


def run(place: Place) -> None:
    """Run them by pytest."""
    what = "tests that need an accelerator"
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        place.say(rows.not_run(what, "pytest or hypothesis is not installed: pip install pytest hypothesis"))
        return
    if place.device.type == "cpu":
        place.say(rows.not_run(what, "the processor stands in for the device"))
        return
    rows.say_begin(what)
    report = Path(place.folder, "tests.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=10", f"--junitxml={report}"]
    command += ["--device", "sim" if place.simulated else "accelerator"]
    variables = {**os.environ, **({"TORCH_CUDA_SANITIZER": "1"} if place.device.type == "cuda" else {})}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    try:
        done = subprocess.run(
            [*command, *files()],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=place.seconds_left - 2,
            check=False,
        )
    except subprocess.TimeoutExpired:
        place.say(rows.broken(what, f"not done within {place.seconds_left:.0f} s"))
        return
    if not report.exists():
        place.say(rows.broken(what, (done.stdout + done.stderr)[-1500:]))
        return
    for row in outcome(report):
        place.say(row)


def outcome(report: Path) -> list[rows.Row]:
    """Return the rows of pytest's report: how many tests passed, and each that did not."""
    suite = ElementTree.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    failed = [(case, problem) for case in cases for problem in (*case.findall("failure"), *case.findall("error"))]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len({id(case) for case, _ in failed})
    found = [
        rows.figure("tests that passed", passed, least=1, reason=f"{skipped} skipped" if skipped else ""),
        rows.figure("tests that failed, or had a race", len(failed), most=0),
    ]
    for case, problem in failed:
        found.append(rows.broken(str(case.get("name")), str(problem.get("message", ""))[:400]))
    return found
