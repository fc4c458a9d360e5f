"""Commands of the documentation: read as the shell and the programs would, without running them."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml
from torch.distributed.run import get_args_parser

from tests.support.doc_blocks import ROOT
from zeromesh.trainer.cli.main import _parse, make_parser
from zeromesh.trainer.cli.train import check_mesh
from zeromesh.trainer.config.load import Consent, load_config

PLACEHOLDER = re.compile(r"[A-Z_]+")
"""What a reader puts in: CONFIG, STEP_DIR."""
_FILLED = {"HOST:PORT": "host:29500", "I": "0", "N": "2", "MIN:MAX": "1:2"}
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_HARMLESS = {"source", "ls", "mkdir", "export", "cd", "echo"}


_parser = cache(make_parser)


class CommandError(AssertionError):
    """A command that cannot be what the page means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of a line: its words, and the exit code that the comment behind it tells of."""

    words: tuple[str, ...]
    code: int = 0


def commands(text: str) -> Iterator[Command]:
    """The commands of a shell block. What goes into a file, or to another program, is not looked at."""
    for line in text.replace("\\\n", " ").splitlines():
        told = re.search(r"#.*exit code (\d+)", line)
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in (";", "&&", "|"):
                words.append(word)
            elif words:
                yield Command(words=tuple(_without_redirection(words)), code=int(told[1]) if told else 0)
                words = []


def _without_redirection(words: list[str]) -> Iterator[str]:
    skip = False
    for word in words:
        if skip or word in (">", ">>", "<"):
            skip = not skip
        else:
            yield word


class Reader:
    """Reads commands as they stand in a folder, whose files they name; the repository's are there too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs: dict[str, Callable[[list[str]], None]] = {
            "zeromesh": self._zeromesh,
            "make": self._make,
            "python": self._python,
            ".venv/bin/python": self._python,
            "torchrun": self._torchrun,
            "srun": self._after_options,
            "mpirun": self._after_options,
            "sbatch": self._sbatch,
            "kubectl": self._kubectl,
            "pytest": self._pytest,
            "pip": self._pip,
        }

    def knows(self, program: str) -> bool:
        return program in self._programs

    def read(self, words: tuple[str, ...]) -> None:
        """Raises `CommandError`, or what a configuration is refused with, where the command would not do what the page says."""
        rest = [_FILLED.get(word, word) for word in words]
        while rest and _ASSIGNMENT.fullmatch(rest[0]):
            rest.pop(0)
        program = rest.pop(0) if rest else ""
        if self.knows(program):
            self._programs[program](rest)
        elif program not in _HARMLESS:
            raise CommandError(f"{shlex.join(words)}: no rule for {program or 'nothing'}")

    def mention(self, text: str) -> None:
        """Read a command that the text speaks of, or a part of one; what is none is passed over."""
        try:
            words = [word.strip("[]") for word in shlex.split(text) if word.strip("[]") not in ("", "...")]
        except ValueError:
            return
        if len(words) < 2 or not self.knows(words[0]):
            return
        if words[0] == "zeromesh":
            self._options(words[1:])
        else:
            self.read(tuple(words))

    def _options(self, words: list[str]) -> None:
        """The command is there, and knows the options that are named."""
        parser = _parser()
        known = set(parser._option_string_actions)
        for word in words:
            below = next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None)
            if below is not None and not word.startswith("-"):
                if word not in below.choices:
                    raise CommandError(f"there is no command {word}; there are {', '.join(below.choices)}")
                parser = below.choices[word]
                known |= set(parser._option_string_actions)
            elif word.startswith("--") and word.partition("=")[0] not in known:
                raise CommandError(f"{parser.prog} has no option {word}")

    def place(self, name: str) -> Path:
        for folder in (self.folder, ROOT):
            if (folder / name).exists():
                return folder / name
        raise CommandError(f"there is no file {name}")

    def _zeromesh(self, words: list[str]) -> None:
        try:
            options = _parse(words)
        except SystemExit as error:
            raise CommandError(f"zeromesh {shlex.join(words)} is not understood") from error
        if options.command not in ("train", "launch", "config"):
            return
        if options.command == "train" and options.model is not None:
            return  # That may be one that a line above makes.
        if not PLACEHOLDER.fullmatch(options.config):
            processes = (options.nproc or 1) * (options.nnodes[1] if options.command == "train" else 1)
            config = load_config(self.place(options.config), options.overrides, ranks=processes, consent=Consent.GIVEN)
            if options.command == "train":
                check_mesh(config, processes)
        elif bad := [each for each in options.overrides if "=" not in each]:
            raise CommandError(f"{bad} are no keys")

    def _make(self, words: list[str]) -> None:
        made = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in words:
            if "=" in word:
                found = re.search(rf"^{word.partition('=')[0]} \?=", made, re.MULTILINE)
            else:
                found = re.search(rf"^{re.escape(word)}:", made, re.MULTILINE)
            if not found:
                raise CommandError(f"the Makefile has no {word}")

    def _python(self, words: list[str]) -> None:
        if words[:1] == ["-m"]:
            if find_spec(words[1]) is None:
                raise CommandError(f"there is no module {words[1]}")
            if self.knows(words[1]):
                self.read(tuple(words[1:]))
        elif not PLACEHOLDER.fullmatch(words[0].removesuffix(".py")):
            self._options_of(self.place(words[0]), words[1:])

    def _options_of(self, path: Path, words: list[str]) -> None:
        """A script of the repository knows its options: they stand in it, or in what it is made of."""
        sources = [path, *path.parent.glob("bench/*.py")] if path.parent.name == "scripts" else [path]
        text = "\n".join(each.read_text(encoding="utf-8") for each in sources)
        for word in words:
            if word.startswith("--") and f'"{word}"' not in text:
                raise CommandError(f"{path.name} has no option {word}")

    def _torchrun(self, words: list[str]) -> None:
        try:
            options = get_args_parser().parse_args([re.sub(r"\b[NI]\b", "2", word) for word in words])
        except SystemExit as error:
            raise CommandError(f"torchrun {shlex.join(words)} is not understood") from error
        flag = ["-m"] if options.module else []
        self._python([*flag, options.training_script, *options.training_script_args])

    def _after_options(self, words: list[str]) -> None:
        """Of a launcher that is not here: the command that it starts."""
        at = next((index for index, word in enumerate(words) if self.knows(word)), None)
        if at is None:
            raise CommandError(f"{shlex.join(words)} starts nothing that is known")
        self.read(tuple(words[at:]))

    def _sbatch(self, words: list[str]) -> None:
        if "zeromesh train" not in self.place(words[0]).read_text(encoding="utf-8"):
            raise CommandError(f"{words[0]} trains nothing")
        self._zeromesh(["train", *words[1:]])

    def _kubectl(self, words: list[str]) -> None:
        list(yaml.safe_load_all(self.place(words[words.index("-f") + 1]).read_text(encoding="utf-8")))

    def _pytest(self, words: list[str]) -> None:
        paths = [word for word in words if word.startswith("tests")]
        texts = []
        for word in paths or ["tests"]:
            path, _, name = word.partition("::")
            if "NAME" in path:
                continue
            place = self.place(path)
            text = "\n".join(each.read_text(encoding="utf-8") for each in ([place] if place.is_file() else place.rglob("*.py")))
            if name and f"def {name.partition('[')[0]}" not in text:
                raise CommandError(f"{path} has no {name}")
            texts.append(text)
        chosen = words[words.index("-k") + 1] if "-k" in words else ""
        for word in chosen.split():
            if word not in ("and", "or", "not", "NAME") and word.lower() not in "\n".join(texts).lower():
                raise CommandError(f"no test of {paths} is chosen by {word}")

    def _pip(self, words: list[str]) -> None:
        made = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            for extra in extras.split(","):
                if not re.search(rf"^{extra} = \[", made, re.MULTILINE):
                    raise CommandError(f"pyproject.toml has no extra {extra}")
