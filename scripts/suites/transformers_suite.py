"""transformers' own tests of its Trainer, over zeromesh: `scripts/suites/transformers_suite.py CHECKOUT [FILE ...]`.

CHECKOUT is a checkout of transformers near the installed version, whose tests are not part of its package. Its `tests/trainer` runs
on one process, without accelerators: once as it is, and once with `Trainer` and `Seq2SeqTrainer` replaced by those of
`zeromesh.transformers`. Printed are the tests that pass with the original alone, and why they do not over zeromesh; of those that
make a trainer, the share that passes with both has to be 95 %. More of them run where the packages that they ask for are installed,
with RUN_SLOW=1, and with ZEROMESH_SUITE_ANY_DEVICE=1, which runs on the CPU what asks for an accelerator.
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
_ANY_DEVICE = "ZEROMESH_SUITE_ANY_DEVICE"
_WANTED = 0.95
_MISSING = {"GlueDataset", "GlueDataTrainingArguments", "DataCollatorForWholeWordMask"}
"""Names that tests of other versions import, and use in a few tests, which cannot pass then."""
_made = False


def pytest_configure() -> None:
    """As a plugin of the runs: replace the classes before a test module imports them, and note who makes a trainer."""
    import transformers
    from transformers import testing_utils, trainer, trainer_seq2seq

    if os.environ.get(_ANY_DEVICE):
        testing_utils.require_torch_accelerator = lambda test: test
    testing_utils.skipIfRocm = lambda *named, **_: named[0] if named else lambda test: test
    for name in _MISSING - set(dir(transformers)):
        setattr(sys.modules["transformers"], name, None)  # The package has put another module in its place.
    plain = transformers.Trainer.__init__

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        global _made
        _made = True
        plain(self, *arguments, **named)

    transformers.Trainer.__init__ = made
    if os.environ.get(_REPLACE):
        from zeromesh.transformers import Seq2SeqTrainer, Trainer

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


def _run(checkout: Path, file: str, record: Path, *, replace: bool) -> dict[str, dict[str, Any]]:
    """Return the outcome of each test of a file, by its name; read from `record` where that exists."""
    here = Path(__file__).resolve().parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "PYTEST_PLUGINS": "transformers_suite",  # Some tests start pytest themselves.
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        _RECORD: f"{record}.new",
        _REPLACE: "1" if replace else "",
    }
    if not record.exists():
        Path(environment[_RECORD]).write_text("", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", file]
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        Path(environment[_RECORD]).replace(record)
    rows: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
        row["made"] |= rows.get(row["test"], row)["made"]
        rows[row["test"]] = row
    return rows


def main() -> int:
    """Run both and compare them; 1 when fewer pass than should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("file", nargs="*", help="files of tests, from the checkout's root; by default, all of tests/trainer")
    parser.add_argument("--keep", type=Path, help="a directory for the results of the original, which are taken from there again")
    options = parser.parse_args()
    found = sorted((options.checkout / "tests/trainer").glob("test_*.py"))
    files = options.file or [str(path.relative_to(options.checkout)) for path in found]
    if not files:
        parser.error(f"there are no tests in {options.checkout / 'tests/trainer'}")
    plain: dict[str, dict[str, Any]] = {}
    mine: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        keep = options.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        for file in files:
            name = Path(file).stem
            plain |= _run(options.checkout, file, keep / f"{name}.original", replace=False)
            mine |= _run(options.checkout, file, Path(folder, f"{name}.zeromesh"), replace=True)
    passing = [name for name, row in plain.items() if row["outcome"] == "passed" and row["made"]]
    lost = [name for name in passing if mine.get(name, {}).get("outcome") != "passed"]
    for name in lost:
        print(f"{name}\n    {mine.get(name, {}).get('reason') or 'it did not run'}")
    share = 1 - len(lost) / max(1, len(passing))
    print(f"{len(passing)} tests that make a trainer pass with the original, {len(passing) - len(lost)} of them over zeromesh")
    return 0 if share >= _WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
