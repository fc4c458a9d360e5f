"""`zeromesh completion SHELL`: a script by which a shell completes commands, options, paths, and keys of the configuration.

The script is shtab's, made from the parser; the keys and the words that they allow are added here. Completing starts no Python.
"""

import argparse
import sys
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
_MOST_NUMBERS = 10
_BASH_KEYS = """
_zeromesh_keys() {
  local word=${COMP_LINE:0:COMP_POINT}
  word=${word##*[[:space:]]}
  if [[ $word != *=* ]]; then
    compgen -W "KEYS" -- "$word"
  elif [[ $COMP_WORDBREAKS == *=* ]]; then  # What stands before the = is there already.
    compgen -W "VALUES" -- "$word" | cut -d= -f2-
  else
    compgen -W "VALUES" -- "$word"
  fi
}
"""
_BASH_END = """
_zeromesh() {
  _shtab_zeromesh "$@"
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  return 0
}
complete -o bashdefault -o default -F _zeromesh zeromesh
"""
_ZSH_KEYS = """
_zeromesh_keys() {
  if [[ $PREFIX == *=* ]]; then
    compadd -- VALUES
  else
    compadd -S '' -- KEYS
  fi
}
"""


def run_completion(shell: str, parser: argparse.ArgumentParser) -> int:
    """Print the script by which a shell completes what `parser` takes; returns the exit code."""
    import shtab

    choices = dict(config_keys())
    keys = " ".join(f"{key}=" for key in choices)
    values = " ".join(f"{key}={word}" for key, words in choices.items() for word in words)
    preambles = {"bash": _BASH_KEYS, "zsh": _ZSH_KEYS}
    overrides = {
        "bash": "_zeromesh_keys",
        "zsh": "_zeromesh_keys",
        "fish": f"{keys} {values}",
        "preamble": {shell: text.replace("KEYS", keys).replace("VALUES", values) for shell, text in preambles.items()},
    }
    for action in _actions(parser):
        if action.dest == "overrides":
            action.complete = overrides  # type: ignore[attr-defined]
        elif action.nargs != 0 and not action.choices:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell) + "\n" + (_BASH_END if shell == "bash" else ""))
    return 0


def config_keys() -> Iterator[tuple[str, list[str]]]:
    """Every key of the configuration that may be given a value by itself, and the words that it allows, if they are few."""
    from zeromesh.trainer.config.messages import choices, known_paths, section_of
    from zeromesh.trainer.config.sections.base import Allowed

    for path, info in known_paths().items():
        section = section_of(info)
        if section is not None and not any(isinstance(item, Allowed) for item in info.metadata):
            continue
        # A mapping that may be written as one word allows the words of its first key.
        first = info if section is None else next(iter(section.model_fields.values()))
        low = next((item.ge for item in info.metadata if hasattr(item, "ge")), None)
        high = next((item.le for item in info.metadata if hasattr(item, "le")), None)
        words = ["true", "false"] if first.annotation is bool else list(map(str, choices(first)))
        if info.annotation is int and low is not None and high is not None and high - low < _MOST_NUMBERS:
            words = [str(number) for number in range(low, high + 1)]
        yield path, words


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser and of all parsers below it, but for those that hold parsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield action
