"""transformers' own tests of its Trainer, over zeromesh: `scripts/transformers_suite.py CHECKOUT [FILE ...]`.

CHECKOUT is a checkout of transformers at the installed version, whose tests are not part of its package. Its `tests/trainer` runs
on one process, without accelerators: once as it is, and once with `Trainer` and `Seq2SeqTrainer` replaced by those of
`zeromesh.transformers`. Printed are the tests that pass with the original alone, and why; of those that make a trainer, the share
that passes with both has to be 95 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_RECORD = "ZEROMESH_SUITE_RECORD"
_REPLACE = "ZEROMESH_SUITE_REPLACE"
_WANTED = 0.95
_made = False


def pytest_configure() -> None:
    """As a plugin of the runs: replace the classes before a test module imports them, and note who makes a trainer."""
    import transformers
    from transformers import trainer, trainer_seq2seq

    plain = transformers.Trainer.__init__

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        global _made
        _made = True
        plain(self, *arguments, **named)

    transformers.Trainer.__init__ = made
    if os.environ.get(_REPLACE):
        from zeromesh.transformers import Seq2SeqTrainer, Trainer

        # The package has put another module in its place while it was imported.
        for module in (sys.modules["transformers"], trainer):
            module.Trainer = Trainer  # type: ignore[attr-defined]
        for module in (sys.modules["transformers"], trainer_seq2seq):
            module.Seq2SeqTrainer = Seq2SeqTrainer  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note what became of a test."""
    global _made
    report: Any = yield
    if call.when == "call" and os.environ.get(_RECORD):
        error = call.excinfo.value if call.excinfo is not None else None
        reason = f"{type(error).__name__}: {error}".splitlines()[0] if error is not None else ""
        row = {"test": item.nodeid, "outcome": report.outcome, "made": _made, "reason": reason}
        with open(os.environ[_RECORD], "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        _made = False
    return report


def _run(checkout: Path, files: list[str], record: Path, *, replace: bool) -> dict[str, dict[str, Any]]:
    """What became of each test, by its name."""
    here = Path(__file__).resolve().parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        _RECORD: str(record),
        _REPLACE: "1" if replace else "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "transformers_suite", "-p", "no:cacheprovider", *files]
    subprocess.run(command, cwd=checkout, env=environment, check=False)
    return {row["test"]: row for row in map(json.loads, record.read_text(encoding="utf-8").splitlines())}


def main() -> int:
    """Run both and compare them; 1 when fewer pass than should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "file", nargs="*", help="tests to run, from the checkout's root; all of tests/trainer by default"
    )
    options = parser.parse_args()
    found = sorted((options.checkout / "tests/trainer").glob("test_*.py"))
    files = options.file or [str(path.relative_to(options.checkout)) for path in found]
    if not files:
        parser.error(f"there are no tests in {options.checkout / 'tests/trainer'}")
    with tempfile.TemporaryDirectory() as folder:
        plain = _run(options.checkout, files, Path(folder, "plain"), replace=False)
        mine = _run(options.checkout, files, Path(folder, "mine"), replace=True)
    passing = [name for name, row in plain.items() if row["outcome"] == "passed" and row["made"]]
    lost = [name for name in passing if mine.get(name, {}).get("outcome") != "passed"]
    for name in lost:
        print(f"{name}\n    {mine.get(name, {}).get('reason') or 'it did not run'}")
    share = 1 - len(lost) / max(1, len(passing))
    print(
        f"{len(passing)} tests that make a trainer pass with the original, {len(passing) - len(lost)} of them over zeromesh"
    )
    return 0 if share >= _WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
