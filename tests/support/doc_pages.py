"""Going through a page of the documentation from top to bottom, in a folder of its own, with the files that it names.

`Page` tries every block on workers, each time; `Walk` does what a reader does, by a shell, which takes longer.
"""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.support import input_cases
from tests.support.doc_blocks import ROOT, Block, Script, blocks_of, links, scripts_of
from tests.support.doc_commands import PLACEHOLDER, Reader, commands
from tests.support.programs import Programs
from tests.support.workers import Workers
from zeromesh.checkpoint.io import format as manifest
from zeromesh.environment import kept_environment
from zeromesh.launch.ssh import read_hosts
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.cli.train import check_mesh
from zeromesh.trainer.config.load import Consent, load_config
from zeromesh.trainer.planning.machine import read_machine

TRAINED = {"README.md", "docs/quickstart.md", "docs/howto/finetune.md"}
"""Pages whose `zeromesh train` is carried out each time, on as many ranks as they say. The walk through all pages takes longer."""
_MADE = "train", "configs/quickstart.yaml", "--nproc", "2", "run.max_steps=2"
"""What `make train` runs, but for how long."""
_LONG = {"--model", "configs/quickstart.yaml", "small.yaml"}
_SHORTER = "data.sequence_length=64", "data.eval_samples=8"
"""What a `train` of `_LONG` is given besides: its sequences would take most of the time of all pages."""
_SLOW = {"--measure", "parallel=auto", "data.eval_samples=null"}
"""Words of commands that the walk alone carries out."""
UNDER_TORCHRUN = {"order.py": "two"}
"""Programs that make process groups themselves, and their argument."""
OF_A_SERVER = {"ask.py"}
"""Programs that ask a server."""
NEEDED = {"module.py": "lightning", "sft.py": "trl"}
"""What a program imports that need not be installed; else it is not run."""
ASKED = {
    "mesh.py": [
        *("same", "[after, first]", "numbers", "list(parity.ranks)", "mine_alone", "table"),
        *("whole.unique().tolist()", "[list(rows.shape), list(share.shape)]"),
    ]
}
"""What a program is asked at its end."""


# What a program prints


def _as_in_readme(said: list[str]) -> bool:
    """Losses of a program that README prints: those of another machine, in bfloat16."""
    (shown,) = (block.text for block in blocks_of("README.md") if block.text.startswith("["))
    found, expected = (ast.literal_eval(each.strip()) for each in (said[-1], shown))
    return bool(found == pytest.approx(expected, rel=1e-2))


def _schedules(said: list[str]) -> bool:
    assert "1f1b: 20% of the time ranks stand still" in said
    return any(re.fullmatch(r"zero_bubble: \d+% of the time ranks stand still", line) for line in said)


def _divided(said: list[str]) -> bool:
    rows = [line.split() for line in said]
    return [row[0] for row in rows] == ["0", "1"] and rows[0][1:] == rows[1][1:]


PRINTED: dict[str, Callable[[list[str]], bool]] = {
    "train.py": _as_in_readme,
    "regression.py": lambda said: said[-1] == "True",
    "finetune.py": lambda said: len(re.findall(r"\d+\.\d+", said[-1])) == 10,
    "staged.py": lambda said: len(re.findall(r"\d+\.\d+", said[-1])) == 10,
    "resume.py": lambda said: said[-1] == "2 6",
    "use.py": lambda said: said[-1].split()[1] == "torch.float32",
    "digits.py": lambda said: 0.5 < float(said[-1]) < 3,
    "adapters.py": lambda said: said[-1] == "True",
    "schedules.py": _schedules,
    "divided.py": _divided,
    "regressor.py": lambda said: 0 < float(said[-1]) < 1,
    "loop.py": lambda said: 0.02 < float(said[-1].split()[-1]) < 0.03,
    "module.py": lambda said: 0.01 < float(said[-1]) < 0.1,
    "accelerated.py": lambda said: 0.01 < float(said[-1]) < 0.1,
    "distill.py": lambda said: said[-1] == "torch.Size([1, 8])",
    "text.py": lambda said: 0 < float(said[-1]) < 6,
    "saving.py": lambda said: said[-1].isdecimal(),
    "sampling.py": lambda said: said[-1].split()[1] == "torch.float32",
    "watching.py": lambda said: len(re.findall(r"^step \d: (?:\||loss)", "\n".join(said), re.MULTILINE)) == 4,
}
"""By the name of its file, whether its lines are what the page says."""


def check_values(script: Script, values: list[dict[str, Any]]) -> None:
    if script.name != "mesh.py":
        return
    for rank, each in enumerate(values):
        same, after, numbers, parity, alone, table, tensors, shapes = (each[name] for name in ASKED["mesh.py"])
        assert same
        assert after == [rank + 2 if rank < 2 else None, (rank + 2) % 4]
        assert numbers == [[rank // 2 * 2], [rank // 2 * 2 + 1]]
        assert parity == [rank % 2 + 2, rank % 2]
        part = "encoder" if rank < 2 else "decoder"
        assert alone == [f"{part}.weight", f"{part}.bias"]
        assert {"axis", "world", "tensor"} <= {line.split()[0] for line in table.splitlines()}
        assert tensors == [3.0]
        assert shapes == [[4, 8], [2, 3 if rank % 2 == 0 else 5]]


# Going through a page


def write_files(page: str, folder: Path) -> None:
    """The files of a page, and README's `train.py`, which stands for a reader's own program."""
    for script in [*scripts_of("README.md"), *scripts_of(page)]:
        (folder / script.name).write_text(script.code, encoding="utf-8")
    for block in blocks_of(page):
        if block.name and block.language != "python":
            (folder / block.name).write_text(block.text, encoding="utf-8")


class Page:
    """A page in its folder. `run` is the directory of a small run, which stands for those that the page looks at."""

    def __init__(self, page: str, folder: Path, workers: Workers, run: Path) -> None:
        self.name = page
        self.folder = folder
        self._workers = workers
        self._run = run
        self._scripts = {min(script.lines): script for script in scripts_of(page)}
        self._reader = Reader(folder)
        for name in ("configs", "scripts"):
            (folder / name).symlink_to(ROOT / name)
        write_files(page, folder)

    def go_through(self) -> None:
        for block in blocks_of(self.name):
            try:
                getattr(self, f"_{block.language}")(block)
            except Exception as error:
                raise AssertionError(f"{block.where}: {type(error).__name__}: {error}") from error

    def _python(self, block: Block) -> None:
        script = self._scripts.get(block.line)
        if script is None or script.name in {*UNDER_TORCHRUN, *OF_A_SERVER} or not find_spec(NEEDED.get(script.name, "zeromesh")):
            return
        for size in [1, 2] if script.ranks == 1 and self.name == "README.md" else [script.ranks]:
            found = self._workers.run(
                size, "doc_pages:printed", code=script.code, folder=str(self.folder), name=script.name, asked=ASKED.get(script.name)
            )
            # Rank 0 prints what the page says, and others print it too where a program does not say that they do not.
            said = [line for each in found[: script.ranks] for line in each["said"].splitlines()]
            assert PRINTED.get(script.name, lambda said: True)(said), said
            check_values(script, [each["values"] for each in found])

    def _yaml(self, block: Block) -> None:
        values = yaml.safe_load(block.text)
        if block.name == "machine.yaml":
            read_machine(Path(block.name))
            return
        backends = values.get("tracking", {}).get("backends", [])
        if "tensorboard" in backends and find_spec("tensorboard") is None:
            backends.remove("tensorboard")
        config = load_config(block.name if block.name and not backends else values, consent=Consent.GIVEN)
        if block.ranks > 1:
            check_mesh(config, block.ranks)

    def _json(self, block: Block) -> None:
        values = json.loads(block.text)
        if values.get("format") == manifest.FORMAT:
            written = json.loads(next(self._run.glob("checkpoints/*/manifest.json")).read_text(encoding="utf-8"))
            assert set(values) == set(written)
        else:
            load_config(block.name or values, ranks=2)

    def _sh(self, block: Block) -> None:
        for command in commands(block.text):
            if command.code == 0:
                # Runs that the page looks at are there.
                for word in command.words:
                    if re.fullmatch(r"runs/[\w-]+", word) and not (self.folder / word).exists():
                        shutil.copytree(self._run, self.folder / word)
                self._reader.read(command.words)
            made = command.words == ("make", "train") and self.name in TRAINED
            words = list(_MADE) if made else self._filled(command.words)
            if words is not None:
                found = self._commanded(words)
                code = found["code"]
                allowed = {0, 1} if words[:2] == ["checkpoint", "diff"] or words[0] == "status" else {command.code}
                assert code in allowed, f"{' '.join(words)}: exit code {code}\n{found['err'][-600:]}"

    def _console(self, block: Block) -> None:
        said: list[str] = []
        for line in block.text.splitlines():
            if line.startswith("$ "):
                (command,) = commands(line.removeprefix("$ "))
                self._reader.read(command.words)
                said = self._commanded(list(command.words[1:]))["out"].splitlines()
            elif line == "...":
                said = []
            else:
                assert said.pop(0) == line

    def _text(self, block: Block) -> None:
        wrong = re.search(r"^(\$ |zeromesh \w+ |python |torchrun |make |import |from \w+ import )", block.text, re.MULTILINE)
        assert not wrong, f"{wrong[0] if wrong else ''!r}: this is a program or a command, and has a language"
        if block.name == "hosts":
            assert read_hosts(block.text, where=block.name)

    def _filled(self, words: tuple[str, ...]) -> list[str] | None:
        """What is run of a command of zeromesh, with something for its placeholders; None: nothing."""
        slow = words[1] in ("doctor", "verify", "generate", "serve") or _SLOW & {*words}
        if words[0] != "zeromesh" or slow or words[1:3] == ("checkpoint", "merge"):
            return None
        if words[1] in ("train", "evaluate") and self.name not in TRAINED:
            return None
        steps = sorted(self._run.glob("checkpoints/step-*"))
        places = {"STEP_DIR": str(steps[-1]), "OTHER": str(steps[0]), "OUT": "out", "CONFIG": "configs/quickstart.yaml"}
        found = [places.get(word, word) for word in words[1:]]
        if words[1] == "launch":
            found = [f"{word}=x" if before == "--env" else word for before, word in zip(["", *found], found, strict=False)]
            found.append("--dry-run")
        assert not [word for word in found if PLACEHOLDER.fullmatch(word)], f"{found}: what stands for these?"
        return found

    def _commanded(self, words: list[str]) -> dict[str, Any]:
        trains = words[0] in ("train", "evaluate") and "--nproc" in words
        words = [*words, *_SHORTER] if words[0] == "train" and _LONG & {*words} else words
        size = int(words[words.index("--nproc") + 1]) if trains else 1
        found: dict[str, Any] = self._workers.run(size, "doc_pages:commanded", words=words, folder=str(self.folder))[0]
        assert "Traceback" not in found["err"], found["err"]
        assert "nothing was trained" not in found["out"], f"{words}: this run is of a line above"
        return found


# On workers


def printed(mesh: Mesh, code: str, folder: str, name: str = "<documentation>", asked: list[str] | None = None) -> dict[str, Any]:
    """Run the text of a program in a folder: what it prints, and the values of the expressions that are `asked` for at its end.

    The program may open a mesh of its own; one called `mesh` that it leaves open is closed.
    """
    out, there = io.StringIO(), {"__name__": "__main__"}
    values: dict[str, Any] = {}
    # The program of this process, after which runs are called.
    program = mock.patch.object(sys.modules["__main__"], "__file__", str(Path(folder, name)), create=True)
    with contextlib.redirect_stdout(out), contextlib.chdir(folder), program, kept_environment():
        exec(compile(code, name, "exec"), there)
        exec("".join(f"values[{each!r}] = {each}\n" for each in asked or []), there, {"values": values})
    own: Any = there.get("mesh")
    if isinstance(own, Mesh) and not own.watch.closed.is_set():
        for each in list(own.process_sets):
            own.process_sets.remove(each)
        own.world.barrier("the end")
        own.close()
    mesh.world.barrier("the end of a program")
    return {"said": out.getvalue(), "values": values}


def commanded(mesh: Mesh, words: list[str], folder: str) -> dict[str, Any]:
    """What `zeromesh WORDS` prints in a folder, and its exit code."""
    with contextlib.chdir(folder):
        return input_cases.command(mesh, words)


# Walking through a page as a reader does


SKIPPED = {
    r"^make (?!train)|^pip install": "it installs packages, which needs the network, or is this test",
    r"\blaunch\b|--nnodes|--rdzv|--on ray|^(srun|sbatch|mpirun|kubectl) ": "it needs a cluster",
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
                write_files(linked.relative_to(ROOT).as_posix(), folder)
        write_files(page, folder)

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
