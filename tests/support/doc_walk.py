"""Walking through a page as a reader does: its files, its programs and its commands, in order, in one folder that was empty."""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from tests.support.doc_blocks import ROOT, Block, blocks_of, links, scripts_of
from tests.support.doc_commands import PLACEHOLDER, commands
from tests.support.doc_pages import NEEDED, UNDER_TORCHRUN
from tests.support.programs import Programs

SKIPPED = {
    r"^make (?!train)|^pip install": "it installs packages, which needs the network, or is this test",
    r"\blaunch\b|--nnodes|--rdzv|^(srun|sbatch|mpirun|kubectl) ": "it needs a cluster",
    r"check_device\.py(?!.*--dry-run)|gpus\.yaml": "it needs a GPU",
    r"(--nproc|--nproc-per-node|--ranks) [48]\b(?!.*--device)": "it needs more cores than two",
    r" /(mnt|data)/|--host 0\.0\.0\.0": "it names a disk or a network of the reader's",
    r"^python scripts/|^torchrun .* scripts/|^pytest ": "it is a program of the repository, with tests of its own",
    **({} if find_spec("trl") else {r"/dpo\.yaml": "it needs trl, which is not installed"}),
}
"""Commands that are not run, by a pattern, and why."""
_SERVED = "http://127.0.0.1:8000/health"
_LONGEST = 600.0
"""Seconds of a command."""


def why_skipped(line: str) -> str:
    """The reason why a line of a page is not run; empty where it is."""
    words = [word for command in commands(line) for word in command.words]
    if any(PLACEHOLDER.fullmatch(word.rpartition("=")[2]) and not word.isdigit() for word in words):
        return "a word stands for something of the reader's"
    return next((reason for pattern, reason in SKIPPED.items() if re.search(pattern, line)), "")


class Walk:
    """A page in its folder. `run` is a small run, which stands for those that other pages make.

    Its programs come from `programs`. `skipped` has the lines that were not run, with their reasons.
    """

    def __init__(self, page: str, folder: Path, run: Path, programs: Programs) -> None:
        self._page, self._folder, self._run = page, folder, run
        self.skipped: dict[str, str] = {}
        self._server: subprocess.Popen[bytes] | None = None
        for name in ("configs", "scripts", "README.md"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "home").mkdir()
        path = os.pathsep.join([str(programs.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
        }
        # Programs of pages that this one names are there, as for a reader who has followed the link.
        for _, link, _ in links(page):
            linked = (ROOT / page).parent.joinpath(link).resolve()
            if link.endswith(".md") and linked.is_relative_to(ROOT / "docs"):
                self._write(linked.relative_to(ROOT).as_posix())
        self._write("README.md")
        self._write(page)

    def _write(self, page: str) -> None:
        for script in scripts_of(page):
            if script.name:
                (self._folder / script.name).write_text(script.code, encoding="utf-8")
        for block in blocks_of(page):
            if block.name and block.language != "python":
                (self._folder / block.name).write_text(block.text, encoding="utf-8")

    def go(self) -> None:
        """Do all that the page says. Raises `AssertionError` for what does not work, with its place."""
        scripts = {min(script.lines): script for script in scripts_of(self._page)}
        try:
            for block in blocks_of(self._page):
                if block.language in ("sh", "console"):
                    self._commands(block)
                elif block.line in scripts and (script := scripts[block.line]).name:
                    if find_spec(package := NEEDED.get(script.name, "zeromesh")) is None:
                        self.skipped[script.name] = f"it needs {package}, which is not installed"
                        continue
                    alone = [] if script.ranks > 1 else [f"python {script.name}"]
                    own = re.search(r"if __name__|init_process_group|OpenAI\(", script.code)
                    beside = [] if own else [f"torchrun --nproc-per-node {max(2, script.ranks)} {script.name}"]
                    if script.name in UNDER_TORCHRUN:
                        alone, beside = [], [f"torchrun --nproc-per-node 2 {script.name} {UNDER_TORCHRUN[script.name]}"]
                    for line in [*alone, *beside]:
                        self._run_line(block.where, line, 0)
        finally:
            self._stop()

    def _commands(self, block: Block) -> None:
        text = block.text
        if block.language == "console":
            text = "".join(f"{line[2:]}\n" for line in text.splitlines() if line.startswith("$ "))
        for line in text.replace("\\\n", " ").splitlines():
            found = list(commands(line))
            if found:
                self._run_line(block.where, line.partition("  #")[0].strip(), found[-1].code)

    def _run_line(self, where: str, line: str, code: int) -> None:
        if line == "make train":
            (line,) = re.findall(r"^train:.*\n\t\$\(BIN\)/(.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            line = line.replace("$(RANKS)", "2")
        if reason := why_skipped(line):
            self.skipped[line] = reason
            return
        for run in re.findall(r"\bruns/[\w-]+", line):
            if not (self._folder / run).exists() and "--out" not in line:
                shutil.copytree(self._run, self._folder / run)
        if line.startswith("zeromesh serve"):
            self._serve(where, line)
            return
        done = subprocess.run(
            ["bash", "-c", line], cwd=self._folder, env=self._environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=_LONGEST, check=False,
        )  # fmt: skip
        allowed = {0, 1} if re.search(r"checkpoint diff|zeromesh (status|doctor)", line) else {code}
        said = (done.stdout + done.stderr)[-3000:]
        assert done.returncode in allowed, f"{where}: {line}: exit code {done.returncode}\n{said}"
        assert "Traceback" not in done.stderr, f"{where}: {line}\n{said}"
        if line.startswith("zeromesh"):  # A program on a page about resuming is run twice.
            assert "nothing was trained" not in done.stdout, f"{where}: {line}: this run is of a line above\n{said}"

    def _serve(self, where: str, line: str) -> None:
        """Serve until the next server, or the end of the page."""
        self._stop()
        self._server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=self._folder, env=self._environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        port = re.search(r"--port (\d+)", line)
        address = _SERVED.replace("8000", port[1]) if port else _SERVED
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            ended = self._server.poll()
            assert ended is None, f"{where}: {line}: {self._server.communicate()[1].decode()[-3000:]}"
            try:
                with urllib.request.urlopen(address, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"{where}: {line}: it does not answer")

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.terminate()
            server.communicate(timeout=60)
