"""The `zeromesh` command: `train` runs a configuration, `config` prints it resolved.

Exit codes: 0 done, 2 the configuration or the command line is wrong, 1 anything else, 128 plus the signal's
number when stopped by one.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from zeromesh import __version__
from zeromesh.errors import ConfigError, ZeromeshError
from zeromesh.mesh.axes import MeshShape
from zeromesh.mesh.launch import LaunchEnvironment, allocator_environment, begin_again, read_environment
from zeromesh.trainer.config import TrainerConfig
from zeromesh.trainer.config_file import load_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of zeromesh are one message, all others a traceback."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.command == "config":
            sys.stdout.write(load_config(options.config, options.overrides).to_yaml())
            return 0
        if arguments is None:  # This process is the command, so it may begin anew.
            begin_again(allocator_environment())
        return _train(options)
    except KeyboardInterrupt:
        if not options.worker:
            _say("interrupted")
        return 128 + int(signal.SIGINT)
    except ZeromeshError as error:
        if options.worker:
            raise
        _say(f"{_rank_prefix()}{error}")
        return exit_code_of(error)


def exit_code_of(error: BaseException) -> int:
    """2 for what the user gave and can change, else 1."""
    return 2 if isinstance(error, ZeromeshError) and isinstance(error, ValueError) else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zeromesh", description="Train models that do not fit, exactly.")
    parser.add_argument("--version", action="version", version=f"zeromesh {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train what a configuration describes")
    train.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="processes to start on this host when no launcher has (default 1)",
    )
    # Set on the command line of the workers that this command starts.
    train.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    config = commands.add_parser("config", help="print a configuration with every default filled in")
    config.set_defaults(nproc=None, worker=False)
    for command in (train, config):
        command.add_argument("config", metavar="CONFIG", help="a YAML or JSON file")
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys to change, values in YAML")
    # argparse takes overrides after an option for unknown arguments.
    options, rest = parser.parse_known_args(list(arguments))
    if any(word.startswith("-") for word in rest):
        parser.error(f"unknown arguments: {' '.join(word for word in rest if word.startswith('-'))}")
    options.overrides += rest
    return options


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is an integer >= 1")
    return number


def _train(options: argparse.Namespace) -> int:
    if options.worker:
        from zeromesh.mesh.launcher import become_worker

        become_worker(exit_code_of)
    config = load_config(options.config, options.overrides)
    environment = read_environment()
    processes = _processes(options, environment)
    # A mesh that does not fit is an error here, before any process or group exists.
    parallel = config.parallel
    MeshShape.resolve(
        processes,
        pipeline=parallel.pipeline,
        replicate=parallel.replicate,
        shard=parallel.shard,
        tensor=parallel.tensor,
    )
    if processes > environment.world_size:
        return _launch(options, processes)
    if not options.worker and environment.rank == 0:
        _hint("loading torch and transformers")
    return _fit(config)


def _processes(options: argparse.Namespace, environment: LaunchEnvironment) -> int:
    """How many ranks will train: those that a launcher started, else --nproc.

    A scheduler's single task may start workers of its own; several tasks are the ranks themselves.
    """
    wanted: int | None = options.nproc
    if environment.launcher != "torchrun" and environment.world_size == 1:
        return wanted or 1
    if wanted is not None and wanted != environment.local_world_size:
        raise ConfigError(
            f"--nproc {wanted}: {environment.launcher} has started {environment.local_world_size} processes on this "
            "host, which are the ranks; leave --nproc out"
        )
    return environment.world_size


def _launch(options: argparse.Namespace, processes: int) -> int:
    _hint(f"starting {processes} processes")
    from zeromesh.mesh.launcher import WorkersFailed, launch_workers, python_arguments

    command = ("train", "--worker", "--", options.config, *options.overrides)
    result = launch_workers(python_arguments("zeromesh", command), processes=processes)
    if isinstance(result, WorkersFailed):
        _say(str(result))
        return result.exit_code
    if result:
        _say("stopped; all workers have ended")
    return result


def _fit(config: TrainerConfig) -> int:
    from zeromesh.trainer import Trainer

    Trainer(config=config).fit()
    return 0


def _rank_prefix() -> str:
    """`rank 3: ` under a launcher, where several processes write to one terminal."""
    try:
        environment = read_environment()
    except ConfigError:
        return ""
    return f"rank {environment.rank}: " if environment.world_size > 1 else ""


def _hint(message: str) -> None:
    """What the next seconds go to, for a person who waits at a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def _say(message: str) -> None:
    sys.stderr.write(f"zeromesh: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
