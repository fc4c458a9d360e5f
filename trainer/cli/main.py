"""The `zeromesh` command: its parser, and the dispatch to the functions of its subcommands.

Exit codes: 0 success, 2 invalid configuration or command line, 1 any other error, 128 plus the signal's number after a signal.

shtab generates the script of `zeromesh completion SHELL` from the parser; the keys of the configuration and their allowed values
are added here. Completing starts no Python.
"""

import argparse
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from zeromesh import __version__
from zeromesh.environment import LOOPBACK, read_environment
from zeromesh.errors import ConfigError, ZeromeshError, printable, refused_path
from zeromesh.launch.rank_processes import become_worker
from zeromesh.trainer.cli import train
from zeromesh.trainer.cli.reports import REPORT, examples
from zeromesh.trainer.cli.train import PASSED, SILENCE_SECONDS
from zeromesh.trainer.config.foreign_names import BY_NAME
from zeromesh.trainer.monitoring.step_metrics import now, process_began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of zeromesh are one message, all others a traceback."""
    began = process_began() if arguments is None else now()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    options.began = began
    if options.worker:
        become_worker(train.exit_code_of)
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
        hint += "".join(f"; {word} is here the key {BY_NAME[word]}" for word in words if word in BY_NAME)
        parser.error(printable(f"unknown arguments: {' '.join(unknown)}{hint}"))
    if rest:
        options.overrides += rest
    options.words = tuple(arguments)
    if options.verbose:
        options.overrides.append("run.verbose=true")
    return options


_KEYS = "overrides section.key=value text *: keys to change, values in YAML"
_CONFIGURED = f"""{_KEYS}
--verbose: short for run.verbose=true: show on a terminal what a log has besides"""
_SHARED = """--worker: -
--nproc N positive: processes to start on this host when no launcher has (default 1)"""
_FILE = "a YAML or JSON file, DeepSpeed's among them"
_SERVED = f"""{_SHARED}
--config FILE text >config_file: the layout: {_FILE}
--batch N positive =16: sequences that a replica of the model runs at a time (default 16)
config SOURCE text: a model directory, a name on the Hub, a run, or a step of it
overrides section.key=value text *: keys of the configuration, and fields of transformers' GenerationConfig as
    generation.temperature=0.7"""
_NEWEST = "a checkpoint, or a run: its newest one"
_CHECKPOINT = f"""
## list: the checkpoints of a run: what each holds, and whether it is whole
path RUN_OR_DIR path: a run's directory, or one of checkpoints
--json: print JSON
## inspect: what one checkpoint holds
path CHECKPOINT path: {_NEWEST}
--tensors PATTERN text: also a line for each tensor of such a name, as in '*norm*'
--json: print JSON
## verify: read every byte and name every damaged file; exit code 1 if there is one
path CHECKPOINT_OR_RUN path: a checkpoint, or a run: all of them
## export: write the model as a plain Hugging Face model directory
path CHECKPOINT path: {_NEWEST}
out OUT path: a directory that does not exist or is empty
--dtype {{float32,bfloat16,float16,keep}} text =float32: of floating-point weights (default float32)
--merge: merge adapters into the weights of the model, instead of writing the adapter alone
--ema: write the averaged weights of a run with ema.decay
## merge: one checkpoint from the parts that hosts without a shared disk wrote
parts PART path +: the part of each host
--out DIR path !: the directory of the whole checkpoint
## diff: what differs between two checkpoints; exit code 1 if anything does
one A path: {_NEWEST}
two B path: another
--tolerance X distance: ignore differences up to X (default: compare bitwise)
"""
SHELLS = ("bash", "zsh", "fish")
_TABLE = f"""
## train train.run_train: train what a configuration describes
{_SHARED}
--nnodes N|MIN:MAX nodes =1: hosts that run this command together; with MIN:MAX they may come and go (default 1)
--node-rank I natural: this host's number, from 0, when all hosts are there from the start; 0 is the one of --rdzv-endpoint
--rdzv-endpoint HOST:PORT text: where they meet: one of the hosts and a free port
--rdzv-id NAME text =zeromesh: the same on all hosts (default zeromesh)
--max-restarts N natural: times that all ranks start again from the newest checkpoint after a failure (default 0; 3 with MIN:MAX)
--model MODEL text: tune this model, a directory or a name on the Hub; needs no CONFIG
--data FILE text &: the data to tune it on
--eval [NAME=]FILE text & >evaluation: evaluate on this, or on several of these by name (default: on a part of --data)
--lora: train adapters of low rank, not the whole model
--save-config FILE path: write the configuration that results, to be changed and trained again
--tune: -
--attached SECONDS seconds: -
config CONFIG text ?: {_FILE}
{_CONFIGURED}
## launch train.run_launch: train on several hosts, over ssh
--hostfile HOSTS path !: a line `NAME slots=N` for each host
--ssh COMMAND text: how to reach a host, as in 'ssh -p 2222'; it is given HOST and COMMAND
--env NAME[=VALUE] text &: a variable for all hosts, besides PYTHONPATH, {", ".join(PASSED)}; its value is not shown anywhere
--min-hosts N positive: go on without hosts that are lost while N are left (default: all)
--max-restarts N natural: times that all ranks start again after some have failed (default 0; 3 with --min-hosts)
--host-timeout SECONDS silence ={SILENCE_SECONDS:g}: after which a host that says nothing counts as lost (default
    {SILENCE_SECONDS:g})
--port PORT positive: of the first host, where all meet (default: one from 20000 to 29999)
--dry-run: print the command for each host, and start nothing
config CONFIG text: {_FILE}
{_CONFIGURED}
## evaluate train.run_train: evaluate a run, a checkpoint or a Hugging Face model directory
{_SHARED}
config SOURCE text: a run, a checkpoint, a model directory or a configuration
{_CONFIGURED}
## generate generate.run_generate: continue prompts with a model, in any layout
{_SERVED}
--prompts FILE text: JSON lines with text, messages or input_ids (default -: standard input)
--chat: hold a conversation on the terminal
--out FILE path: write results as JSON lines, in the order of the prompts; a killed run goes on
--max-new-tokens N positive: short for generation.max_new_tokens=N
--seed N natural: of what sampling draws (default: run.seed)
--max-restarts N natural =3: times that all ranks start again for what is missing in --out after one has died (default 3)
--check: compare the weights of all ranks that hold the same ones
## serve generate.run_serve: answer OpenAI's completions and chat completions over HTTP
{_SERVED}
--host ADDRESS text ={LOOPBACK}: where to listen; others than this host need a token
--port PORT port =8000: where to listen; 0 takes a free one (default 8000)
--name NAME text: of the model, as clients give it (default: that of its directory)
--queue N positive =64: requests that may be open at a time (default 64)
--grace SECONDS distance =10: seconds that open requests have when the server is to stop (default 10)
## config train.print_config: print a configuration with every default filled in
--nproc N positive: ranks that a DeepSpeed configuration is for, which counts with them (default: those of the launch, or 1)
config CONFIG text: {_FILE}
{_CONFIGURED}
## verify plan.run_verify: train a small copy of a configuration's model beside one plain process; exit code 1 where they differ
{_SHARED}
--out FILE path: the certificate (default: certificate.json in the run's directory)
--check NAMES names =: what to check besides: determinism, resume, dropout, with commas between them
config CONFIG text: {_FILE}
{_CONFIGURED}
## plan plan.run_plan: tell what fits and what is fastest, before anything is trained
--worker: -
--ranks N positive: ranks to plan for, or to measure on (default: devices or cores found here)
--host N positive: ranks of a host (default: as the machine file says)
--device NAME|FILE text: h100, h200, a100, b200, cpu, or a machine file (default: what was measured or is found here)
--top N positive =12: rows to print (default 12)
--json: print every row as JSON
--picture FILE path: write charts of memory over a step and of time by phase, a page of HTML
--measure: measure the machine on its ranks, for about a minute, and write a machine file
--out FILE path: the machine file that --measure writes (default: machine.yaml in the user's cache directory, where plans look)
--directory DIR path =runs: where offload would write, for the rates of the disk (default: runs)
--tiny: -
config CONFIG text ?: {_FILE}
overrides section.key=value text *: keys that layouts are to have, values in YAML
## status status.run_status: show what each rank of a running job is doing
run RUN path: the run's directory
--watch: show it again and again until the run ends
--interval SECONDS interval =1: between two looks with --watch (default 1)
--json: print JSON, a line for each look
## trace status.run_trace: write a timeline of the latest steps of all ranks, for Perfetto
run RUN path: the run's directory; one that goes on is asked for its ranks' events
--out FILE path: packed where it ends with .gz (default: trace/trace.json.gz in RUN)
--steps A:B steps: the first and the last step to show, counted from 1 (default: all there are)
## init reports.run_init: write an example configuration here; without a name, list them
name NAME{{{",".join(sorted(examples()))}}} text ?: the name of an example
## checkpoint checkpoint.run_checkpoint: list, inspect, verify, export, merge and compare checkpoints
## report reports.run_report: write a page that shows a run, or several beside each other
runs RUN path +: a run's directory
--out FILE path: where to write it, - for standard output (default: {REPORT} in the first RUN)
## doctor reports.run_doctor: check this machine and suggest fixes
--directory DIR path &: where runs, checkpoints or offload would write; may be given again (default: runs)
--json: print JSON
## completion main.run_completion: print a script by which a shell completes this command
shell SHELL{{{",".join(SHELLS)}}} text: {", ".join(SHELLS)}
"""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line, without overrides after an option."""
    parser = argparse.ArgumentParser(prog="zeromesh", description="Train models that do not fit, exactly.")
    parser.add_argument("--version", action="version", version=f"zeromesh {__version__}")
    parser.set_defaults(worker=False, attached=None, nproc=None, verbose=False, overrides=None)
    parser.set_defaults(nnodes=(1, 1), node_rank=None, max_restarts=None, rdzv_endpoint=None)
    parser.set_defaults(model=None, data=None, evaluation=None, lora=False, save_config=None, tune=False)
    commands = _add_commands(parser, _TABLE, "command")
    _add_commands(commands["checkpoint"], _CHECKPOINT, "action")
    return parser


def _add_commands(parser: argparse.ArgumentParser, table: str, dest: str) -> dict[str, argparse.ArgumentParser]:
    """Add the commands of a table, and return them by name. Its lines, continued by indented ones, are:

        ## command [file.function]: help          a command; the lines below are its arguments, the function is in this folder
        name: help                                an option without a value
        name METAVAR kind [more]: help            any other; the kinds are those of `_KINDS`

    The marks in `more` are `=DEFAULT`, `>DEST`, `?`, `*` or `+` (nargs), `&` (repeatable), `!` (required). A METAVAR that ends in
    `{a,b}` has choices. The help `-` hides an option that this command passes to workers.
    """
    commands = parser.add_subparsers(dest=dest, required=True, metavar=dest.upper())
    for line in table.strip().replace("\n    ", " ").splitlines():
        head, _, text = line.partition(": ")
        name, *words = head.removeprefix("## ").split()
        if line.startswith("## "):
            command = commands.add_parser(name, help=text)
            if words:
                command.set_defaults(function=words[0])
            continue
        more: dict[str, Any] = {} if words else {"action": "store_true"}
        if words:
            metavar, _, allowed = words[0].partition("{")
            more |= {"metavar": metavar or None, "choices": allowed[:-1].split(",") if allowed else None}
            more["type"] = _KINDS[words[1]]
        for word in words[2:]:
            marks = {"=": "default", ">": "dest", "&": "action", "!": "required"}
            values = {"&": "append", "!": True}
            more[marks.get(word[0], "nargs")] = values.get(word[0], word[1:] if word[0] in marks else word)
        command.add_argument(name, help=argparse.SUPPRESS if text == "-" else text, **more)
    return commands.choices


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


def _pair(text: str, allowed: str, *, alone: bool = False) -> tuple[int, int]:
    first, _, last = text.partition(":")
    last = first if alone and not last else last
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed {allowed}")
    return int(first), int(last)


def _steps(text: str) -> range:
    first, last = _pair(text, "are the first and the last step, as 10:12")
    return range(first, last + 1)


_KINDS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "path": Path,
    "seconds": float,
    "nodes": lambda text: _pair(text, "is a number of hosts, or MIN:MAX", alone=True),
    "steps": _steps,
    "names": lambda text: tuple(filter(None, map(str.strip, text.split(",")))),
    "natural": _number(int, "is an integer >= 0", 0),
    "positive": _number(int, "is an integer >= 1", 1),
    "port": _number(int, "is a number from 0 to 65535", 0, 65535),
    "distance": _number(float, "is a number >= 0", 0),
    "interval": _number(float, "are seconds from 0.1 to 86400", 0.1, 86400),
    "silence": _number(float, "are seconds from 1 to 86400", 1, 86400),
}


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


def run_completion(options: argparse.Namespace) -> int:
    """Print a shell's completion script; returns the exit code."""
    import shtab

    shell, parser = options.shell, make_parser()
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
    parsers = [parser]
    for each in parsers:
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.dest == "overrides":
                action.complete = overrides  # type: ignore[attr-defined]
            elif action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell) + "\n" + (_BASH_END if shell == "bash" else ""))
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


if __name__ == "__main__":
    sys.exit(main())
