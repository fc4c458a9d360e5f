"""`zeromesh completion SHELL`: a script by which a shell completes commands, options, keys of the configuration and their values.

All that it completes is in the script, taken from the parser and the configuration's models when it is printed: completing starts
no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_MOST_NUMBERS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option: its `names`, what it is for, and whether a value follows, which is one of `choices` if there are any."""

    names: Sequence[str]
    help: str
    takes_value: bool = False
    choices: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command by its words, such as `("checkpoint", "list")`; that of the whole program has none."""

    words: tuple[str, ...]
    help: str
    options: Sequence[Option]
    commands: Mapping[str, str] = field(default_factory=dict)
    """Those below it, and what they do."""
    choices: Sequence[str] = ()
    """Words that its first argument may be; else it is a path."""
    takes_overrides: bool = False
    """Whether `section.key=value` may follow its first argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """A key of the configuration, what it does, and the words that it allows, if they are few."""

    path: str
    help: str
    choices: Sequence[str] = ()


def add_completion_command(commands: Any) -> None:
    """Add `completion` to the subparsers of `zeromesh`."""
    parser = commands.add_parser("completion", help="print a script by which a shell completes this command")
    parser.set_defaults(worker=False, overrides=[])
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run_completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script for a shell; returns the exit code."""
    from zeromesh.trainer.cli.completion_scripts import script_for

    sys.stdout.write(script_for(options.shell, list(commands_of(parser)), list(config_keys())))
    return 0


def commands_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = (), about: str = "") -> Iterator[Command]:
    """The command of a parser and all those below it."""
    below: Mapping[str, argparse.ArgumentParser] = {}
    helps: dict[str, str] = {}
    options = []
    arguments = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            helps = {each.dest: each.help or "" for each in action._choices_actions}
        elif action.option_strings and action.help != argparse.SUPPRESS:
            options.append(_option(parser, action))
        elif not action.option_strings:
            arguments.append(action)
    yield Command(
        words=words,
        help=about,
        options=options,
        commands={name: helps.get(name, "") for name in below},
        choices=[str(each) for each in arguments[0].choices or ()] if arguments else (),
        takes_overrides=any(action.dest == "overrides" for action in arguments),
    )
    for name, each in below.items():
        yield from commands_of(each, (*words, name), helps.get(name, ""))


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    return Option(
        names=action.option_strings,
        help=parser._get_formatter()._expand_help(action) if action.help else "",
        takes_value=action.nargs != 0,
        choices=[str(each) for each in action.choices or ()],
    )


def config_keys() -> Iterator[ConfigKey]:
    """Every key of the configuration that may be given a value by itself."""
    from zeromesh.trainer.config.messages import choices, known_paths, section_of
    from zeromesh.trainer.config.sections.base import Allowed

    for path, info in known_paths().items():
        section = section_of(info)
        if section is not None and not any(isinstance(item, Allowed) for item in info.metadata):
            continue
        # A mapping that may be written as one word is written as its first key's.
        first = info if section is None else next(iter(section.model_fields.values()))
        words = ["true", "false"] if first.annotation is bool else list(map(str, choices(first))) or _few_numbers(first)
        yield ConfigKey(path=path, help=info.description or "", choices=words)


def _few_numbers(info: Any) -> list[str]:
    """The integers that a key allows, where they lie between two that are near each other."""
    low = next((each.ge for each in info.metadata if hasattr(each, "ge")), None)
    high = next((each.le for each in info.metadata if hasattr(each, "le")), None)
    if info.annotation is not int or low is None or high is None or high - low >= _MOST_NUMBERS:
        return []
    return [str(each) for each in range(low, high + 1)]
