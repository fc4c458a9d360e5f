"""`zeromesh launch`: its command line, and what it makes of it. Also the values that it shares with `zeromesh train`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.environment import INTERFACE, python_arguments, setting
from zeromesh.errors import ConfigError
from zeromesh.launch.hostfile import Host, read_hosts
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.trainer.config.loading.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from zeromesh.launch.ssh import HostFailure, LaunchPlan, Start

PASSED = (
    "OMP_NUM_THREADS",
    INTERFACE,
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_DEBUG"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE"),
)
"""Variables that go to the hosts when they are set here. None of them is secret; those have to be named with `--env`."""
SILENCE_SECONDS = 15.0
_LEAST_SILENCE_SECONDS = 1.0


def add_launch_command(commands: Any) -> argparse.ArgumentParser:
    """Add `launch` to the subparsers of `zeromesh`, without the configuration, which other commands take too."""
    launch: argparse.ArgumentParser = commands.add_parser("launch", help="train on several hosts, over ssh")
    launch.set_defaults(nproc=None, worker=False)
    launch.add_argument(
        "--hostfile", required=True, type=Path, metavar="HOSTS", help="a line `NAME slots=N` for each host"
    )
    launch.add_argument(
        "--ssh", metavar="COMMAND", help="how to reach a host, as in 'ssh -p 2222'; it is given HOST and COMMAND"
    )
    launch.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"a variable for all hosts, besides PYTHONPATH, {', '.join(PASSED)}; its value is not shown anywhere",
    )
    launch.add_argument(
        "--min-hosts",
        type=positive,
        metavar="N",
        help="go on without hosts that are lost while N are left (default: all)",
    )
    launch.add_argument(
        "--max-restarts",
        type=natural,
        metavar="N",
        help="times that all ranks start again after some have failed (default 0; 3 with --min-hosts)",
    )
    launch.add_argument(
        "--host-timeout",
        type=_silence,
        default=SILENCE_SECONDS,
        metavar="SECONDS",
        help=f"after which a host that says nothing counts as lost (default {SILENCE_SECONDS:g})",
    )
    launch.add_argument(
        "--port",
        type=positive,
        metavar="PORT",
        help="of the first host, where all meet (default: one from 20000 to 29999)",
    )
    launch.add_argument("--dry-run", action="store_true", help="print the command for each host, and start nothing")
    return launch


def run_launch(options: argparse.Namespace, tell: Callable[[str], None]) -> HostFailure | int:
    """Do what the command line asks for; returns an exit code, or why the run failed.

    Raises:
        ConfigError: for a hostfile, a configuration or an option that cannot be used.
    """
    from zeromesh.launch.ssh import supervise

    hosts = _hosts(options.hostfile)
    config = load_config(options.config, options.overrides, ranks=sum(host.slots for host in hosts))
    plan = _plan(options, config, hosts)
    if not options.dry_run:
        return supervise(plan, tell)
    plan.check(plan.hosts)
    for arguments in plan.arguments():
        sys.stdout.write(f"{shlex.join(arguments)}\n")
    names = ", ".join(sorted(plan.reach.variables)) or "none"
    sys.stdout.write(f"# variables set on every host, whose values are sent over standard input: {names}\n")
    return 0


def check_mesh(config: TrainerConfig, processes: int) -> None:
    """A mesh that does not fit is an error here, before any process or group exists."""
    parallel = config.parallel
    MeshShape.resolve(
        processes,
        pipeline=parallel.pipeline,
        replicate=parallel.replicate,
        shard=parallel.shard,
        tensor=parallel.tensor,
    )


def _plan(options: argparse.Namespace, config: TrainerConfig, hosts: tuple[Host, ...]) -> LaunchPlan:
    from zeromesh.launch.ssh import SSH, LaunchPlan, Reach

    if options.min_hosts is not None and options.min_hosts > len(hosts):
        raise ConfigError(f"--min-hosts {options.min_hosts}: {options.hostfile} has {len(hosts)}")
    restarts = options.max_restarts if options.max_restarts is not None else 3 * (options.min_hosts is not None)
    return LaunchPlan(
        hosts=hosts,
        reach=Reach(
            ssh=tuple(_words(options.ssh)) if options.ssh is not None else SSH,
            directory=os.getcwd(),
            python_path=setting("PYTHONPATH"),
            variables=_variables(options.env),
            silence_seconds=options.host_timeout,
        ),
        port=options.port,
        least=options.min_hosts or len(hosts),
        max_restarts=restarts,
        command=lambda start: _command(options, start),
        check=lambda left: check_mesh(config, sum(host.slots for host in left)),
    )


def _command(options: argparse.Namespace, start: Start) -> Sequence[str]:
    """The command of a host's launcher, whose arguments `zeromesh train` understands."""
    words = (
        *("train", "--attached", f"{options.host_timeout:g}", "--nproc", str(start.host.slots)),
        *("--nnodes", str(start.hosts), "--node-rank", str(start.index), "--rdzv-endpoint", start.endpoint),
        *("--", options.config, *options.overrides),
    )
    return [sys.executable, *python_arguments("zeromesh", words)]


def _hosts(path: Path) -> tuple[Host, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"--hostfile {str(path)!r} cannot be read: {reason}") from error
    return read_hosts(text, where=str(path))


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--ssh {command!r} cannot be read: {error}") from error
    if not words:
        raise ConfigError("--ssh is empty; give a command such as 'ssh -p 2222', or leave it out")
    return words


def _variables(asked: Sequence[str]) -> dict[str, str]:
    """What goes to every host: those of `PASSED` that are set, and those asked for."""
    found = {name: value for name in PASSED if (value := setting(name)) is not None}
    problems = []
    for entry in asked:
        name, given, value = entry.partition("=")
        here = value if given else setting(name)
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            problems.append(f"--env {name!r} is no variable's name; allowed is NAME or NAME=VALUE")
        elif here is None:
            problems.append(f"--env {name}: the variable is not set here; set it, or give {name}=VALUE")
        else:
            found[name] = here
    if problems:
        raise ConfigError(problems)
    return found


def nodes(text: str) -> tuple[int, int]:
    """A number of hosts, or MIN:MAX."""
    least, _, most = text.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is a number of hosts, or MIN:MAX")
    return int(least), int(most)


def natural(text: str) -> int:
    """An integer from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is an integer >= 0")
    return int(text)


def positive(text: str) -> int:
    """An integer from 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is an integer >= 1")
    return number


def _silence(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _LEAST_SILENCE_SECONDS <= seconds <= 86400.0:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are seconds from {_LEAST_SILENCE_SECONDS:g} to 86400")
    return seconds
