"""`zeromesh launch`: trains on several hosts, over ssh."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zeromesh.environment import INTERFACE, python_arguments, setting
from zeromesh.errors import ConfigError
from zeromesh.launch.rank_processes import WorkersFailed
from zeromesh.launch.ssh import SSH, Host, LaunchPlan, read_hosts, supervise
from zeromesh.mesh.mesh_shape import AXES, MeshShape
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig

PASSED = (
    "OMP_NUM_THREADS",
    INTERFACE,
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_DEBUG"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE"),
)
"""Variables that go to the hosts when they are set here. None of them is secret; those have to be named with `--env`."""
SILENCE_SECONDS = 15.0


def run_launch(options: argparse.Namespace, tell: Callable[[str], None]) -> WorkersFailed | int:
    """Do what the command line asks for; returns an exit code, or why the run failed.

    Raises:
        ConfigError: for a hostfile, a configuration or an option that cannot be used.
    """
    hosts = _hosts(options.hostfile)
    config = load_config(options.config, options.overrides, ranks=sum(host.slots for host in hosts))
    plan = _plan(options, config, hosts)
    if not options.dry_run:
        return supervise(plan, tell)
    plan.check(plan.hosts)
    for host, place in zip(plan.hosts, plan.places(), strict=True):
        last = place.first + place.processes - 1
        ranks = f"ranks {place.first} to {last} of {place.world_size}, which meet at {place.master_address}:{place.master_port}"
        sys.stdout.write(f"{shlex.join(plan.arguments(host))}    # {ranks}\n")
    names = ", ".join(sorted(plan.variables)) or "none"
    sys.stdout.write(f"# variables set on every host, whose values are sent over standard input: {names}\n")
    return 0


def check_mesh(config: TrainerConfig, processes: int) -> None:
    """A mesh that does not fit is an error here, before any process or group exists."""
    MeshShape.resolve(processes, **{axis: getattr(config.parallel, axis) for axis in AXES})


def _plan(options: argparse.Namespace, config: TrainerConfig, hosts: tuple[Host, ...]) -> LaunchPlan:
    if options.min_hosts is not None and options.min_hosts > len(hosts):
        raise ConfigError(f"--min-hosts {options.min_hosts}: {options.hostfile} has {len(hosts)}")
    restarts = options.max_restarts if options.max_restarts is not None else 3 * (options.min_hosts is not None)
    return LaunchPlan(
        hosts=hosts,
        command=_command(options),
        ssh=tuple(_words(options.ssh)) if options.ssh is not None else SSH,
        directory=os.getcwd(),
        python_path=setting("PYTHONPATH"),
        variables=_variables(options.env),
        silence_seconds=options.host_timeout,
        port=options.port,
        least=options.min_hosts or len(hosts),
        max_restarts=restarts,
        check=lambda left: check_mesh(config, sum(host.slots for host in left)),
    )


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    """The command of a host's launcher, whose arguments `zeromesh train` understands."""
    words = ("train", "--attached", f"{options.host_timeout:g}", "--", options.config, *options.overrides)
    return (sys.executable, *python_arguments("zeromesh", words))


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
