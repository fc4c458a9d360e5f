"""Tests in the environment of a person who has set variables of their own: none of it reaches them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "40",
    "FORCE_COLOR": "1",
    "WORLD_SIZE": "8",
    "SLURM_NTASKS": "8",
    "HOME": "/proc/nobody",
    "XDG_CACHE_HOME": "/proc/nobody",
    "LC_ALL": "C",
    "PYTHONWARNINGS": "error",
}
"""What was set when tests of other things failed, and more of its kind."""
INSIDE = """
import os, locale
from pathlib import Path


def test_inside(tmp_path):
    left = {name for name in os.environ if name not in ("HOME", "LC_ALL")} & {NAMES}
    assert not left
    Path.home().joinpath("written").write_text("h\\u00e4", encoding="utf-8")
    assert Path.home().joinpath("written").read_text() == "h\\u00e4"
    assert len(str(tmp_path)) < 100
"""


def test_variables_of_a_person_do_not_reach_tests(tmp_path: Path) -> None:
    folder = tmp_path / ("a long name " * 6).strip()
    folder.mkdir()
    inside = tmp_path / "test_inside.py"
    inside.write_text(INSIDE.replace("{NAMES}", repr(set(OTHERS))), encoding="utf-8")
    shown = ["-c", "pyproject.toml", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *shown, str(inside)],
        cwd=ROOT, env={**os.environ, **OTHERS, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
