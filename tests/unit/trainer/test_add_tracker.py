"""A tracker is one class and one row of one file: a copy of the project gets one, and trains a step with it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import zeromesh

ROOT = Path(zeromesh.__file__).resolve().parents[1]
CLASS = '''
class DummyTracker(Tracker):
    """Writes rows into a file."""

    def start(self) -> None:
        self.sent, _ = self._noted()

    def log(self, row: TrackedRow) -> None:
        self._note(row.place)
        with open(self.run.folder("dummy.jsonl"), "a") as file:
            file.write(json.dumps([row.place.step, row.values["train/loss"]]) + "\\n")

    def finish(self) -> None:
        """Nothing is left."""


TRACKERS["dummy"] = TrackerKind(make=DummyTracker, modules=("json",))
'''
PROGRAM = """
import sys
import zeromesh
from zeromesh import Trainer
assert zeromesh.__file__.startswith(sys.argv[1])
sizes = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 256}
with Trainer(config={
    "model": {"config": {**sizes, "eos_token_id": 255, "bos_token_id": None}},
    "data": {"train": "text.txt", "tokenizer": "bytes", "sequence_length": 16, "cache": "cache", "eval_fraction": 0.0},
    "run": {"output_dir": ".", "name": "run", "max_steps": 1},
    "tracking": {"backends": ["dummy"]},
}) as trainer:
    trainer.fit()
"""


def test_a_tracker_is_added_in_one_file(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("zeromesh", "trainer", "offload"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "trainer" / "trackers" / "backends.py").open("a", encoding="utf-8") as file:
        file.write(CLASS)
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(100)))
    command = [sys.executable, "-c", PROGRAM, str(copy)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(copy), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout
    ((step, loss),) = [json.loads(line) for line in (tmp_path / "run" / "dummy.jsonl").read_text().splitlines()]
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (step, loss) == (1, line["loss"])
