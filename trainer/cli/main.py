"""The `zeromesh` command: its parser, and the dispatch to the functions of its subcommands.
Exit codes: 0 success, 2 invalid configuration or command line, 1 any other error, 128 plus the signal's number after a signal."""

import argparse
import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from string import Template
from typing import Any

from zeromesh import __version__
from zeromesh.environment import LOOPBACK, read_environment
from zeromesh.errors import ConfigError, ZeromeshError, printable, refused_path
from zeromesh.launch.rank_processes import become_worker
from zeromesh.trainer.cli import train
from zeromesh.trainer.cli.reports import REPORT, examples
from zeromesh.trainer.cli.train import FORWARDED, SILENCE_SECONDS
from zeromesh.trainer.config.foreign_names import KEY_BY_NAME
from zeromesh.trainer.monitoring.step_metrics import now, process_began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of zeromesh are one message, all others a traceback."""
    began = process_began() if arguments is None else now()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    options.began = began
    if options.worker:
        become_worker(train.exit_code_of, whole=options.command == "run")
        options.nproc, options.nnodes, options.attached = None, (1, 1), None  # The launcher has followed these.
    try:
        file, _, function = options.function.partition(".")
        # Only the subcommand's module is imported: torch and transformers take seconds.
        code: int = getattr(import_module(f"zeromesh.trainer.cli.{file}"), function)(options)
        _reader_has_gone()
        return code
    except KeyboardInterrupt:
        if not options.worker:
            train.say("interrupted")
        return 128 + int(signal.SIGINT)
    except BrokenPipeError:
        if options.worker or not _reader_has_gone():
            raise
        return 1
    except (ZeromeshError, OSError) as error:
        refused = refused_path(error) if isinstance(error, OSError) else error
        if options.worker or refused is None:
            raise
        prefix = ""
        with suppress(ConfigError):  # Under a launcher, several processes share one terminal.
            environment = read_environment()
            prefix = f"rank {environment.rank}: " if environment.world_size > 1 else ""
        train.say(f"{prefix}{refused}")
        return train.exit_code_of(refused)
    except RuntimeError as error:
        if options.worker or "home directory" not in str(error):
            raise
        named = [word for word in options.words if "~" in word] or ["a path of the configuration begins with ~NAME"]
        train.say(f"{' '.join(named)}: {error} Give a path without ~")
        return 2


def _reader_has_gone() -> bool:
    """Return True if the reader of the output, such as `head`, has closed the pipe; output at exit is then discarded."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):  # The stream may be no file.
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    # argparse takes overrides after an option for unknown arguments.
    options, rest = parser.parse_known_args(list(arguments))
    unknown = [word for word in rest if word.startswith("-") or options.overrides is None]
    if unknown:
        dashed = [word.lstrip("-") for word in unknown if "." in word.partition("=")[0]]
        hint = f"; keys of the configuration have no dashes: {' '.join(dashed)}" if dashed else ""
        words = [word.partition("=")[0].lstrip("-").replace("-", "_").lower() for word in unknown]
        hint += "".join(f"; {word} is here the key {KEY_BY_NAME[word]}" for word in words if word in KEY_BY_NAME)
        parser.error(printable(f"unknown arguments: {' '.join(unknown)}{hint}"))
    if rest:
        options.overrides += rest
    options.words = tuple(arguments)
    if options.verbose:
        options.overrides.append("run.verbose=true")
    return options


SHELLS = ("bash", "zsh", "fish")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the commands of `commands.txt`, without overrides after an option."""
    parser = argparse.ArgumentParser(prog="zeromesh", description="Train models that do not fit, exactly.")
    parser.add_argument("--version", action="version", version=f"zeromesh {__version__}")
    parser.set_defaults(worker=False, attached=None, nproc=None, verbose=False, overrides=None)
    parser.set_defaults(nnodes=(1, 1), node_rank=None, max_restarts=None, rdzv_endpoint=None, on=None)
    parser.set_defaults(model=None, data=None, evaluation=None, lora=False, save_config=None, tune=False)
    words = {"passed": ", ".join(FORWARDED), "silence": f"{SILENCE_SECONDS:g}", "loopback": LOOPBACK, "report": REPORT}
    words |= {"examples": ",".join(sorted(examples())), "shells": ",".join(SHELLS)}
    table = Path(__file__).with_name("commands.txt").read_text(encoding="utf-8").replace("\n    ", " ")
    blocks = re.findall(r"^(##.*)\n((?:[^#].*\n)*)", Template(table).substitute(words), re.MULTILINE)
    groups = {head.removeprefix("## "): lines for head, lines in blocks if head.startswith("## (")}
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    actions: Any = None
    for head, lines in blocks[len(groups) :]:
        title, _, text = head.partition(": ")
        level, name, *function = title.split()
        if level == "##":
            command = parsed = commands.add_parser(name, help=text)
            command.set_defaults(function=function[0])
            actions = None
        else:
            actions = actions or command.add_subparsers(dest="action", required=True, metavar="ACTION")
            parsed = actions.add_parser(name, help=text)
        while lines.startswith("(") or "\n(" in lines:
            lines = re.sub(r"^(\(\w+\))\n", lambda group: groups[group[1]], lines, flags=re.MULTILINE)
        for line in lines.splitlines():
            _add_argument(parsed, line)
    return parser


def _add_argument(command: argparse.ArgumentParser, line: str) -> None:
    head, _, text = line.partition(": ")
    name, *words = head.split()
    more: dict[str, Any] = {} if words else {"action": "store_true"}
    if words:
        metavar, _, allowed = words[0].partition("{")
        more |= {"metavar": metavar or None, "choices": allowed[:-1].split(",") if allowed else None}
        more["type"] = _ARGUMENT_PARSERS[words[1]]
    for word in words[2:]:
        marks = {"=": "default", ">": "dest", "&": "action", "!": "required"}
        values = {"&": "append", "!": True}
        more[marks.get(word[0], "nargs")] = values.get(word[0], word[1:] if word[0] in marks else word)
    command.add_argument(name, help=argparse.SUPPRESS if text == "-" else text, **more)


def _number_in(kind: type[Any], allowed: str, least: float, most: float = sys.float_info.max) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed {allowed}")
        return value

    return parse


def _parse_range(text: str, allowed: str, *, alone: bool = False) -> tuple[int, int]:
    first, _, last = text.partition(":")
    last = first if alone and not last else last
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed {allowed}")
    return int(first), int(last)


_ARGUMENT_PARSERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "path": Path,
    "seconds": float,
    "nodes": lambda text: _parse_range(text, "is a number of hosts, or MIN:MAX", alone=True),
    "steps": lambda text: _parse_range(text, "are the first and the last step, as 10:12"),
    "names": lambda text: tuple(filter(None, map(str.strip, text.split(",")))),
    "natural": _number_in(int, "is an integer >= 0", 0),
    "positive": _number_in(int, "is an integer >= 1", 1),
    "port": _number_in(int, "is a number from 0 to 65535", 0, 65535),
    "distance": _number_in(float, "is a number >= 0", 0),
    "interval": _number_in(float, "are seconds from 0.1 to 86400", 0.1, 86400),
    "silence": _number_in(float, "are seconds from 1 to 86400", 1, 86400),
}
_MOST_NUMBERS = 10  # that a range of integers may have, to be completed one by one


def run_completion(options: argparse.Namespace) -> int:
    """Print a shell's completion script, which starts no Python: shtab's of the parser, and here the keys and their values."""
    import shtab

    shell, parser = options.shell, make_parser()
    choices = dict(config_keys())
    keys = " ".join(f"{key}=" for key in choices)
    values = " ".join(f"{key}={word}" for key, words in choices.items() for word in words)
    begin = end = ""
    if (functions := Path(__file__).with_name(f"completion.{shell}")).exists():
        text = functions.read_text(encoding="utf-8").replace("KEYS", keys).replace("VALUES", values)
        # What replaces a function of shtab's stands at the end of the script.
        begin, _, end = text.partition("# ---\n")
    words = {**dict.fromkeys(("bash", "zsh"), "_zeromesh_keys"), "fish": f"{keys} {values}", "preamble": {shell: begin}}
    parsers = [parser]
    for each in parsers:
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.dest == "overrides":
                action.complete = words  # type: ignore[attr-defined]
            elif action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(f"{shtab.complete(parser, shell)}\n{end}")
    return 0


def config_keys() -> Iterator[tuple[str, list[str]]]:
    """Yield every key of the configuration that can be set alone, and its allowed values, if they are few."""
    from zeromesh.settings.keys import Allowed
    from zeromesh.trainer.config.messages import choices, known_paths, section_of

    for path, info in known_paths().items():
        section = section_of(info)
        if section is not None and not any(isinstance(item, Allowed) for item in info.metadata):
            continue
        # A mapping that may be abbreviated to one word allows the values of its first key.
        first = info if section is None else next(iter(section.model_fields.values()))
        low = next((item.ge for item in info.metadata if hasattr(item, "ge")), None)
        high = next((item.le for item in info.metadata if hasattr(item, "le")), None)
        words = ["true", "false"] if first.annotation is bool else list(map(str, choices(first)))
        if info.annotation is int and low is not None and high is not None and high - low < _MOST_NUMBERS:
            words = [str(number) for number in range(low, high + 1)]
        yield path, words
