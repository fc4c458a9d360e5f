"""The wheel as a person installs it: every file goes along, and every command runs without the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.report_runs import write_run

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"zeromesh": "zeromesh", "trainer": "zeromesh/trainer", "offload": "zeromesh/offload"}
"""Folders of the checkout, and what they are called in the wheel."""

COMMANDS = """
import argparse, contextlib, io, sys
from pathlib import Path
import zeromesh
from zeromesh.trainer.cli.main import main, make_parser

assert Path(zeromesh.__file__).is_relative_to(sys.argv[1]), zeromesh.__file__

# Without the extras commands start, and name the one that they need.
for name in ("plotly", "fastapi", "uvicorn", "openai", "peft"):
    sys.modules[name] = None
for words in (["init"], ["init", "quickstart"], ["config", "quickstart.yaml"]):
    assert main(words) == 0, words
with contextlib.redirect_stderr(io.StringIO()) as said:
    assert main(["report", "a"]) == 2
assert "pip install 'zeromesh[report]'" in said.getvalue(), said.getvalue()
sys.modules = {name: module for name, module in sys.modules.items() if module is not None}

# With them every command runs.
def commands_of(parser, *words):
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands_of(below, *words, name)

for command in commands_of(make_parser()):
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0 and "usage: zeromesh" in out.getvalue(), command
for words in (["completion", "bash"], ["report", "a"]):
    assert main(words) == 0, words
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources: building in the checkout leaves files there that get into the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("trainer", "offload", "zeromesh", "configs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    words = ("--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
    command = [sys.executable, "-m", "pip", "wheel", str(folder), *words, "-w", str(folder / "dist")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = (folder / "dist").iterdir()
    return found


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES, "configs"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    wanted = {f"zeromesh/trainer/{path}" for path in tracked if path.startswith("configs/")}
    for path in tracked:
        top, _, rest = path.partition("/")
        if top in PACKAGES and not (ROOT / path).is_dir():
            wanted.add(f"{PACKAGES[top]}/{rest}")
    assert len(wanted) > 200
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_every_command_of_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # All that pip does with packages of Python alone.
    write_run(tmp_path / "a")
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(site)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "<style>" in (tmp_path / "a/report.html").read_text(encoding="utf-8")
    assert (tmp_path / "quickstart.yaml").is_file()
