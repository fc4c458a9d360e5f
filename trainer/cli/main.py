"""The `zeromesh` command: its parser, and what runs each of its commands.

Exit codes: 0 done, 2 the configuration or the command line is wrong, 1 anything else, 128 plus the signal's
number when stopped by one.

The script of `zeromesh completion SHELL` is shtab's, made from the parser; the keys of the configuration and the words that they
allow are added here. Completing starts no Python.
"""

import argparse
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeromesh import __version__
from zeromesh.environment import LOOPBACK
from zeromesh.errors import ZeromeshError, printable, refused_path
from zeromesh.launch.rank_processes import become_worker
from zeromesh.trainer.cli import train
from zeromesh.trainer.cli.generate import run_generate
from zeromesh.trainer.cli.plan import checks_of, run_plan, run_verify
from zeromesh.trainer.cli.reports import REPORT, examples, run_doctor, run_init, run_report
from zeromesh.trainer.cli.serve import run_serve
from zeromesh.trainer.cli.status import run_status, run_trace
from zeromesh.trainer.cli.train import PASSED, SILENCE_SECONDS
from zeromesh.trainer.config.foreign_names import BY_NAME
from zeromesh.trainer.monitoring.step_metrics import now, process_began

_DTYPES = ("float32", "bfloat16", "float16", "keep")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of zeromesh are one message, all others a traceback."""
    began = process_began() if arguments is None else now()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    options.began = began
    if options.worker:
        become_worker(train.exit_code_of)
    try:
        code = _COMMANDS[options.command](options)
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
        train.say(f"{train.rank_prefix()}{refused}")
        return train.exit_code_of(refused)
    except RuntimeError as error:
        if options.worker or "home directory" not in str(error):
            raise
        named = [word for word in options.words if "~" in word] or ["a path of the configuration begins with ~NAME"]
        train.say(f"{' '.join(named)}: {error} Give a path without ~")
        return 2


def _reader_has_gone() -> bool:
    """Return True if the reader of the output, such as `head`, has seen enough; what is flushed at exit is then thrown away."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):  # It may be no file.
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
        hint += "".join(f"; {word} is here the key {BY_NAME[word]}" for word in words if word in BY_NAME)
        parser.error(printable(f"unknown arguments: {' '.join(unknown)}{hint}"))
    if rest:
        options.overrides += rest
    options.words = tuple(arguments)
    if options.verbose:
        options.overrides.append("run.verbose=true")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line, but for overrides after an option."""
    parser = argparse.ArgumentParser(prog="zeromesh", description="Train models that do not fit, exactly.")
    parser.add_argument("--version", action="version", version=f"zeromesh {__version__}")
    parser.set_defaults(worker=False, attached=None, nproc=None, verbose=False, overrides=None)
    parser.set_defaults(nnodes=(1, 1), node_rank=None, max_restarts=None, rdzv_endpoint=None)
    parser.set_defaults(model=None, data=None, evaluation=None, lora=False, save_config=None, tune=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    config, source = (
        "a YAML or JSON file, DeepSpeed's among them",
        "a run, a checkpoint, a model directory or a configuration",
    )

    command = commands.add_parser("train", help="train what a configuration describes")
    hosts = "hosts that run this command together; with MIN:MAX they may come and go (default 1)"
    _value(command, "--nnodes", "N|MIN:MAX", _nodes, hosts, default=(1, 1))
    number = "this host's number, from 0, when all hosts are there from the start; 0 is the one of --rdzv-endpoint"
    _value(command, "--node-rank", "I", _natural, number)
    _value(command, "--rdzv-endpoint", "HOST:PORT", str, "where they meet: one of the hosts and a free port")
    _value(command, "--rdzv-id", "NAME", str, "the same on all hosts (default zeromesh)", default="zeromesh")
    again = "times that all ranks start again from the newest checkpoint after a failure (default 0; 3 with MIN:MAX)"
    _value(command, "--max-restarts", "N", _natural, again)
    _value(command, "--model", "MODEL", str, "tune this model, a directory or a name on the Hub; needs no CONFIG")
    _value(command, "--data", "FILE", str, "the data to tune it on", action="append")
    eval_help = "evaluate on this, or on several of these by name (default: on a part of --data)"
    _value(command, "--eval", "[NAME=]FILE", str, eval_help, dest="evaluation", action="append")
    _flag(command, "--lora", "train adapters of low rank, not the whole model")
    result = "write the configuration that results, to be changed and trained again"
    _value(command, "--save-config", "FILE", Path, result)
    # Set on the command lines of the workers that this command starts, and of the launchers that `zeromesh launch` starts.
    _flag(command, "--tune", argparse.SUPPRESS)
    _value(command, "--attached", "SECONDS", float, argparse.SUPPRESS)
    _configured(command, "CONFIG", config, nargs="?")

    command = commands.add_parser("launch", help="train on several hosts, over ssh")
    _value(command, "--hostfile", "HOSTS", Path, "a line `NAME slots=N` for each host", required=True)
    _value(command, "--ssh", "COMMAND", str, "how to reach a host, as in 'ssh -p 2222'; it is given HOST and COMMAND")
    variable = f"a variable for all hosts, besides PYTHONPATH, {', '.join(PASSED)}; its value is not shown anywhere"
    _value(command, "--env", "NAME[=VALUE]", str, variable, action="append", default=[])
    _value(command, "--min-hosts", "N", _positive, "go on without hosts that are lost while N are left (default: all)")
    again = "times that all ranks start again after some have failed (default 0; 3 with --min-hosts)"
    _value(command, "--max-restarts", "N", _natural, again)
    silent = f"after which a host that says nothing counts as lost (default {SILENCE_SECONDS:g})"
    _value(command, "--host-timeout", "SECONDS", _silence, silent, default=SILENCE_SECONDS)
    meeting = "of the first host, where all meet (default: one from 20000 to 29999)"
    _value(command, "--port", "PORT", _positive, meeting)
    _flag(command, "--dry-run", "print the command for each host, and start nothing")
    _configured(command, "CONFIG", config)

    command = commands.add_parser("evaluate", help="evaluate a run, a checkpoint or a Hugging Face model directory")
    _configured(command, "SOURCE", source)

    command = commands.add_parser("generate", help="continue prompts with a model, in any layout")
    _served(command, f"the layout: {config}", "prompts")
    _value(command, "--prompts", "FILE", str, "JSON lines with text, messages or input_ids (default -: standard input)")
    _flag(command, "--chat", "hold a conversation on the terminal")
    results = "write results as JSON lines, in the order of the prompts; a killed run goes on"
    _value(command, "--out", "FILE", Path, results)
    _value(command, "--max-new-tokens", "N", _positive, "short for generation.max_new_tokens=N")
    _value(command, "--seed", "N", _natural, "of what sampling draws (default: run.seed)")
    again = "times that all ranks start again for what is missing in --out after one has died (default 3)"
    _value(command, "--max-restarts", "N", _natural, again, default=3)
    _flag(command, "--check", "compare the weights of all ranks that hold the same ones")

    command = commands.add_parser("serve", help="answer OpenAI's completions and chat completions over HTTP")
    _served(command, f"the layout: {config}", "requests")
    where = "where to listen; others than this host need a token"
    _value(command, "--host", "ADDRESS", str, where, default=LOOPBACK)
    _value(command, "--port", "PORT", _port, "where to listen; 0 takes a free one (default 8000)", default=8000)
    _value(command, "--name", "NAME", str, "of the model, as clients give it (default: that of its directory)")
    _value(command, "--queue", "N", _positive, "requests that may be open at a time (default 64)", default=64)
    grace = "seconds that open requests have when the server is to stop (default 10)"
    _value(command, "--grace", "SECONDS", _distance, grace, default=10.0)

    command = commands.add_parser("config", help="print a configuration with every default filled in")
    ranks = "ranks that a DeepSpeed configuration is for, which counts with them (default: those of the launch, or 1)"
    _value(command, "--nproc", "N", _positive, ranks)
    _configured(command, "CONFIG", config)

    text = "train a small copy of a configuration's model beside one plain process; exit code 1 where they differ"
    command = commands.add_parser("verify", help=text)
    where = "the certificate (default: certificate.json in the run's directory)"
    _value(command, "--out", "FILE", Path, where)
    what = "what to check besides: determinism, resume, dropout, with commas between them"
    _value(command, "--check", "NAMES", checks_of, what, default=())
    _configured(command, "CONFIG", config)

    command = commands.add_parser("plan", help="tell what fits and what is fastest, before anything is trained")
    ranks = "ranks to plan for, or to measure on (default: devices or cores found here)"
    _value(command, "--ranks", "N", _positive, ranks)
    _value(command, "--host", "N", _positive, "ranks of a host (default: as the machine file says)")
    machine = "h100, h200, a100, b200, cpu, or a machine file (default: what was measured or is found here)"
    _value(command, "--device", "NAME|FILE", str, machine)
    _value(command, "--top", "N", _positive, "rows to print (default 12)", default=12)
    _flag(command, "--json", "print every row as JSON")
    charts = "write charts of memory over a step and of time by phase, a page of HTML"
    _value(command, "--picture", "FILE", Path, charts)
    _flag(command, "--measure", "measure the machine on its ranks, for about a minute, and write a machine file")
    where = (
        "the machine file that --measure writes (default: machine.yaml in the user's cache directory, where plans look)"
    )
    _value(command, "--out", "FILE", Path, where)
    _value(command, "--directory", "DIR", Path, "where offload would write, for the rates of the disk (default: runs)")
    _flag(command, "--tiny", argparse.SUPPRESS)
    _value(command, "config", "CONFIG", str, config, nargs="?")
    _value(command, "overrides", "section.key=value", str, "keys that layouts are to have, values in YAML", nargs="*")

    command = commands.add_parser("status", help="show what each rank of a running job is doing")
    _value(command, "run", "RUN", Path, "the run's directory")
    _flag(command, "--watch", "show it again and again until the run ends")
    _value(command, "--interval", "SECONDS", _interval, "between two looks with --watch (default 1)", default=1.0)
    _flag(command, "--json", "print JSON, a line for each look")

    command = commands.add_parser("trace", help="write a timeline of the latest steps of all ranks, for Perfetto")
    _value(command, "run", "RUN", Path, "the run's directory; one that goes on is asked for its ranks' events")
    _value(command, "--out", "FILE", Path, "packed where it ends with .gz (default: trace/trace.json.gz in RUN)")
    shown = "the first and the last step to show, counted from 1 (default: all there are)"
    _value(command, "--steps", "A:B", _steps, shown)

    command = commands.add_parser("init", help="write an example configuration here; without a name, list them")
    _value(command, "name", "NAME", str, "the name of an example", nargs="?", choices=sorted(examples()))

    text = "list, inspect, verify, export, merge and compare checkpoints"
    _add_checkpoint(commands.add_parser("checkpoint", help=text))

    command = commands.add_parser("report", help="write a page that shows a run, or several beside each other")
    _value(command, "runs", "RUN", Path, "a run's directory", nargs="+")
    where = f"where to write it, - for standard output (default: {REPORT} in the first RUN)"
    _value(command, "--out", "FILE", Path, where)

    command = commands.add_parser("doctor", help="check this machine and suggest fixes")
    where = "where runs, checkpoints or offload would write; may be given again (default: runs)"
    _value(command, "--directory", "DIR", Path, where, action="append")
    _flag(command, "--json", "print JSON")

    command = commands.add_parser("completion", help="print a script by which a shell completes this command")
    _value(command, "shell", "SHELL", str, ", ".join(SHELLS), choices=SHELLS)
    for name in ("train", "evaluate", "generate", "serve", "verify", "plan"):
        _flag(commands.choices[name], "--worker", argparse.SUPPRESS)
        if name != "plan":
            ranks = "processes to start on this host when no launcher has (default 1)"
            _value(commands.choices[name], "--nproc", "N", _positive, ranks)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    newest = "a checkpoint, or a run: its newest one"

    command = actions.add_parser("list", help="the checkpoints of a run: what each holds, and whether it is whole")
    _value(command, "path", "RUN_OR_DIR", Path, "a run's directory, or one of checkpoints")
    _flag(command, "--json", "print JSON")

    command = actions.add_parser("inspect", help="what one checkpoint holds")
    _value(command, "path", "CHECKPOINT", Path, newest)
    _value(command, "--tensors", "PATTERN", str, "also a line for each tensor of such a name, as in '*norm*'")
    _flag(command, "--json", "print JSON")

    text = "read every byte and name every damaged file; exit code 1 if there is one"
    command = actions.add_parser("verify", help=text)
    _value(command, "path", "CHECKPOINT_OR_RUN", Path, "a checkpoint, or a run: all of them")

    command = actions.add_parser("export", help="write the model as a plain Hugging Face model directory")
    _value(command, "path", "CHECKPOINT", Path, newest)
    _value(command, "out", "OUT", Path, "a directory that does not exist or is empty")
    dtype = "of floating-point weights (default float32)"
    command.add_argument("--dtype", choices=_DTYPES, default="float32", help=dtype)
    _flag(command, "--merge", "merge adapters into the weights of the model, instead of writing the adapter alone")
    _flag(command, "--ema", "write the averaged weights of a run with ema.decay")

    command = actions.add_parser("merge", help="one checkpoint from the parts that hosts without a shared disk wrote")
    _value(command, "parts", "PART", Path, "the part of each host", nargs="+")
    _value(command, "--out", "DIR", Path, "the directory of the whole checkpoint", required=True)

    command = actions.add_parser("diff", help="what differs between two checkpoints; exit code 1 if anything does")
    _value(command, "one", "A", Path, newest)
    _value(command, "two", "B", Path, "another")
    _value(command, "--tolerance", "X", _distance, "ignore differences up to X (default: compare bitwise)")


def _value(
    parser: argparse.ArgumentParser, name: str, metavar: str, kind: Callable[[str], Any], text: str, **more: Any
) -> None:
    parser.add_argument(name, metavar=metavar, type=kind, help=text, **more)


def _flag(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def _configured(parser: argparse.ArgumentParser, metavar: str, text: str, **more: Any) -> None:
    """Add what is trained or evaluated, and keys of its configuration."""
    _value(parser, "config", metavar, str, text, **more)
    _value(parser, "overrides", "section.key=value", str, "keys to change, values in YAML", nargs="*")
    _flag(parser, "--verbose", "short for run.verbose=true: show on a terminal what a log has besides")


def _served(parser: argparse.ArgumentParser, layout: str, what: str) -> None:
    """Add the model that continues prompts, how it is laid out, and how many prompts it runs at a time."""
    _value(parser, "--config", "FILE", str, layout, dest="config_file")
    many = f"{what} that a replica of the model runs at a time (default 16)"
    _value(parser, "--batch", "N", _positive, many, default=16)
    _value(parser, "config", "SOURCE", str, "a model directory, a name on the Hub, a run, or a step of it")
    keys = "keys of the configuration, and fields of transformers' GenerationConfig as generation.temperature=0.7"
    _value(parser, "overrides", "section.key=value", str, keys, nargs="*")


def _number(kind: type[Any], allowed: str, least: float, most: float = sys.float_info.max) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed {allowed}")
        return value

    return parse


_port = _number(int, "is a number from 0 to 65535", 0, 65535)
_natural, _positive = _number(int, "is an integer >= 0", 0), _number(int, "is an integer >= 1", 1)
_interval = _number(float, "are seconds from 0.1 to 86400", 0.1, 86400)
_distance, _silence = _number(float, "is a number >= 0", 0), _number(float, "are seconds from 1 to 86400", 1, 86400)


def _steps(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are the first and the last step, as 10:12")
    return range(int(first), int(last) + 1)


def _nodes(text: str) -> tuple[int, int]:
    """Parse a number of hosts, or MIN:MAX."""
    least, _, most = text.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is a number of hosts, or MIN:MAX")
    return int(least), int(most)


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


def _checkpoint(options: argparse.Namespace) -> int:
    from zeromesh.trainer.cli.checkpoint import run_checkpoint  # It imports torch.

    return run_checkpoint(options)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": train.run_train,
    "launch": train.run_launch,
    "evaluate": train.run_train,
    "generate": run_generate,
    "serve": run_serve,
    "config": train.print_config,
    "plan": run_plan,
    "verify": run_verify,
    "status": run_status,
    "trace": run_trace,
    "init": run_init,
    "checkpoint": _checkpoint,
    "report": run_report,
    "doctor": run_doctor,
    "completion": lambda options: run_completion(options.shell, make_parser()),
}


if __name__ == "__main__":
    sys.exit(main())
