"""Going through a page of the documentation from top to bottom, in a folder of its own, with the files that it names."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.doc_blocks import ROOT, Block, Script, blocks_of, scripts_of
from tests.support.doc_commands import PLACEHOLDER, Command, Reader, commands
from tests.support.workers import Workers
from zeromesh.checkpoint.format import manifest
from zeromesh.launch.ssh import read_hosts
from zeromesh.trainer.cli.train import check_mesh
from zeromesh.trainer.config.consent import Consent
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.planning.machine import read_machine

TRAINED = {"README.md", "docs/quickstart.md", "docs/howto/finetune.md"}
"""Pages whose `zeromesh train` is carried out each time, on as many ranks as they say, and whose programs on one rank and then on
two. The walk through all pages (doc_walk.py) takes longer."""
_MADE = "train", "configs/quickstart.yaml", "--nproc", "2", "run.max_steps=2"
"""What `make train` runs, but for how long."""
_LONG = {"--model", "configs/quickstart.yaml"}
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


# What a program prints, by the name of its file


def _losses(said: list[str], count: int) -> None:
    losses = [float(each) for each in re.findall(r"\d+\.\d+", said[-1])]
    assert len(losses) == count


def _as_in_readme(said: list[str]) -> None:
    """Losses of a program that README prints: those of another machine, in bfloat16."""
    (shown,) = (block.text for block in blocks_of("README.md") if block.text.startswith("["))
    found, expected = (ast.literal_eval(each.strip()) for each in (said[-1], shown))
    assert found == pytest.approx(expected, rel=1e-2)


def _ten_losses(said: list[str]) -> None:
    _losses(said, 10)


def _within(low: float, high: float) -> Callable[[list[str]], None]:
    def check(said: list[str]) -> None:
        assert low < float(said[-1]) < high

    return check


def _is(text: str) -> Callable[[list[str]], None]:
    def check(said: list[str]) -> None:
        assert said[-1] == text

    return check


def _schedules(said: list[str]) -> None:
    assert "1f1b: 20% of the time ranks stand still" in said
    assert [line for line in said if re.fullmatch(r"zero_bubble: \d+% of the time ranks stand still", line)]


def _divided(said: list[str]) -> None:
    rows = [line.split() for line in said]
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][1:] == rows[1][1:]


PRINTED: dict[str, Callable[[list[str]], None]] = {
    "train.py": _as_in_readme,
    "regression.py": _is("True"),
    "finetune.py": _ten_losses,
    "staged.py": _ten_losses,
    "resume.py": _is("2 6"),
    "use.py": lambda said: _is("torch.float32")([said[-1].split()[1]]),
    "digits.py": _within(0.5, 3),
    "adapters.py": _is("True"),
    "schedules.py": _schedules,
    "divided.py": _divided,
    "regressor.py": _within(0, 1),
    "loop.py": lambda said: _within(0.02, 0.03)([said[-1].split()[-1]]),
    "module.py": _within(0.01, 0.1),
    "accelerated.py": _within(0.01, 0.1),
    "distill.py": _is("torch.Size([1, 8])"),
    "text.py": _within(0, 6),
    "saving.py": lambda said: int(said[-1]),
    "sampling.py": lambda said: _is("torch.float32")([said[-1].split()[1]]),
    "watching.py": lambda said: _is("4")(
        [str(len(re.findall(r"^step \d: (?:\||loss)", "\n".join(said), re.MULTILINE)))]
    ),
}


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
        assert shapes == [[4, 8], [2, 4]]


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
        """Try every block, in order."""
        for block in blocks_of(self.name):
            try:
                getattr(self, f"_{block.language}")(block)
            except Exception as error:
                raise AssertionError(f"{block.where}: {type(error).__name__}: {error}") from error

    def _python(self, block: Block) -> None:
        script = self._scripts.get(block.line)
        if (
            script is None
            or script.name in {*UNDER_TORCHRUN, *OF_A_SERVER}
            or not find_spec(NEEDED.get(script.name, "zeromesh"))
        ):
            return
        for size in [1, 2] if script.ranks == 1 and self.name in TRAINED else [script.ranks]:
            found = self._workers.run(
                size,
                "doc_cases:printed",
                code=script.code,
                folder=str(self.folder),
                name=script.name,
                asked=ASKED.get(script.name),
            )
            # Rank 0 prints what the page says, and others print it too where a program does not say that they do not.
            said = [line for each in found[: script.ranks] for line in each["said"].splitlines()]
            PRINTED.get(script.name, lambda said: None)(said)
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
                self._provide(command)
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
        wrong = re.search(
            r"^(\$ |zeromesh \w+ |python |torchrun |make |import |from \w+ import )", block.text, re.MULTILINE
        )
        assert not wrong, f"{wrong[0] if wrong else ''!r}: this is a program or a command, and has a language"
        if block.name == "hosts":
            assert read_hosts(block.text, where=block.name)

    def _provide(self, command: Command) -> None:
        """Runs that the page looks at are there."""
        for word in command.words:
            if re.fullmatch(r"runs/[\w-]+", word) and not (self.folder / word).exists():
                shutil.copytree(self._run, self.folder / word)

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
            found = [
                f"{word}=x" if before == "--env" else word for before, word in zip(["", *found], found, strict=False)
            ]
            found.append("--dry-run")
        assert not [word for word in found if PLACEHOLDER.fullmatch(word)], f"{found}: what stands for these?"
        return found

    def _commanded(self, words: list[str]) -> dict[str, Any]:
        trains = words[0] in ("train", "evaluate") and "--nproc" in words
        words = [*words, *_SHORTER] if words[0] == "train" and _LONG & {*words} else words
        size = int(words[words.index("--nproc") + 1]) if trains else 1
        found: dict[str, Any] = self._workers.run(size, "doc_cases:commanded", words=words, folder=str(self.folder))[0]
        assert "Traceback" not in found["err"], found["err"]
        assert "nothing was trained" not in found["out"], f"{words}: this run is of a line above"
        return found
