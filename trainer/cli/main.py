"""The `zeromesh` command: `train` runs a configuration, `launch` does so on several hosts, `evaluate` evaluates what was trained,
`config` prints a configuration resolved, `init` writes an example of one, `checkpoint` looks after what runs saved, `status` shows
where a run is, `report` writes a page about it, `doctor` looks at the machine, `completion` is for shells.

Exit codes: 0 done, 2 the configuration or the command line is wrong, 1 anything else, 128 plus the signal's
number when stopped by one.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh import __version__
from zeromesh.environment import (
    BEGAN,
    LaunchEnvironment,
    command_began,
    die_with_launcher,
    kept_environment,
    python_arguments,
    read_environment,
)
from zeromesh.errors import ConfigError, StorageError, ZeromeshError, printable, printable_lines
from zeromesh.trainer.cli.checkpoint import add_checkpoint_command, run_checkpoint
from zeromesh.trainer.cli.completion import add_completion_command, run_completion
from zeromesh.trainer.cli.doctor import add_doctor_command, run_doctor
from zeromesh.trainer.cli.evaluate import Subject, add_evaluate_command, evaluate, find_subject
from zeromesh.trainer.cli.launch import add_launch_command, check_mesh, natural, nodes, positive, run_launch
from zeromesh.trainer.cli.report import add_report_command, run_report
from zeromesh.trainer.config.loading.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.monitoring.start_times import StartTimes, now, process_began

if TYPE_CHECKING:
    from zeromesh.launch.local import WorkersFailed
    from zeromesh.launch.ssh import HostFailure


_EXAMPLES = Path(__file__).resolve().parent.parent / "configs"


def add_init_command(commands: Any) -> None:
    """Add `init` to the subparsers of `zeromesh`."""
    parser = commands.add_parser("init", help="write an example configuration here; without a name, list them")
    parser.set_defaults(worker=False)
    parser.add_argument("name", nargs="?", choices=sorted(_examples()), metavar="NAME", help="the name of an example")


def run_init(options: argparse.Namespace) -> int:
    """List the examples, or write one; returns the exit code.

    Raises:
        StorageError: when the file exists or cannot be written; an existing file is never replaced.
    """
    examples = _examples()
    if options.name is None:
        width = max(map(len, examples))
        sys.stdout.writelines(f"{name:{width}}  {_about(path)}\n" for name, path in sorted(examples.items()))
        sys.stdout.write("zeromesh init NAME writes one of them here\n")
        return 0
    path = Path(examples[options.name].name)
    text = examples[options.name].read_text(encoding="utf-8").replace("configs/", "")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{str(path)!r} was not written: {error.strerror or error}; move it away first") from error
    sys.stdout.write(f"wrote {path}; train it with: zeromesh train {path}\n")
    return 0


def _examples() -> dict[str, Path]:
    """The example files by their names without the suffix."""
    return {path.stem: path for path in _EXAMPLES.iterdir()}


def _about(path: Path) -> str:
    """The comment in the first line of an example. JSON has no comments."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# ") else f"in JSON: {path.name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of zeromesh are one message, all others a traceback."""
    began = process_began() if arguments is None else now()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    options.began = began
    try:
        if options.command == "config":
            return _print_config(options)
        if options.command in _BESIDE:
            return _BESIDE[options.command](options)
        if options.command == "launch":
            return _report(run_launch(options, _say))
        return _attached(options) if options.attached is not None else _train(options)
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


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, but for overrides after an option."""
    parser = argparse.ArgumentParser(prog="zeromesh", description="Train models that do not fit, exactly.")
    parser.add_argument("--version", action="version", version=f"zeromesh {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train what a configuration describes")
    train.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="processes to start on this host when no launcher has (default 1)",
    )
    train.add_argument(
        "--nnodes",
        type=nodes,
        default=(1, 1),
        metavar="N|MIN:MAX",
        help="hosts that run this command together; with MIN:MAX they may come and go (default 1)",
    )
    train.add_argument(
        "--node-rank",
        type=natural,
        metavar="I",
        help="this host's number, from 0, when all hosts are there from the start; 0 is the one of --rdzv-endpoint",
    )
    train.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: one of the hosts and a free port")
    train.add_argument("--rdzv-id", default="zeromesh", metavar="NAME", help="the same on all hosts (default zeromesh)")
    train.add_argument(
        "--max-restarts",
        type=natural,
        metavar="N",
        help="times that all ranks start again from the newest checkpoint after a failure (default 0; 3 with MIN:MAX)",
    )
    # Set on the command lines of the workers that this command starts, and of the launchers that `zeromesh launch` starts.
    train.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    train.add_argument("--attached", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    launch = add_launch_command(commands)
    evaluate = add_evaluate_command(commands)
    evaluate.add_argument("--nproc", type=positive, metavar="N", help="processes to start on this host (default 1)")
    evaluate.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    config = commands.add_parser("config", help="print a configuration with every default filled in")
    config.set_defaults(worker=False)
    config.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks that a DeepSpeed configuration is for, which counts with them (default: those of the launch, or 1)",
    )
    evaluate.add_argument("config", metavar="SOURCE", help="a run, a checkpoint, a model directory or a configuration")
    for command in (train, launch, config):
        command.add_argument("config", metavar="CONFIG", help="a YAML or JSON file, DeepSpeed's among them")
    for command in (train, launch, config, evaluate):
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys to change, values in YAML")
    status = commands.add_parser("status", help="show what each rank of a running job is doing")
    status.add_argument("run", metavar="RUN", help="the run's directory")
    status.set_defaults(worker=False)
    add_init_command(commands)
    add_checkpoint_command(commands)
    add_report_command(commands)
    add_doctor_command(commands)
    add_completion_command(commands)
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    # argparse takes overrides after an option for unknown arguments.
    options, rest = parser.parse_known_args(list(arguments))
    unknown = [word for word in rest if word.startswith("-") or options.command in _BESIDE]
    if unknown:
        dashed = [word.lstrip("-") for word in unknown if "." in word.partition("=")[0]]
        hint = f"; keys of the configuration have no dashes: {' '.join(dashed)}" if dashed else ""
        parser.error(printable(f"unknown arguments: {' '.join(unknown)}{hint}"))
    if rest:
        options.overrides += rest
    return options


def _attached(options: argparse.Namespace) -> int:
    """Run as the part of a `zeromesh launch` on one host: what is to be said goes there, and ends when that is gone."""
    from zeromesh.launch.heartbeat import Lifeline

    line = Lifeline(options.attached)
    line.read_variables()
    with line:
        try:
            result = _launch(options, _processes(options, read_environment()))
        except ZeromeshError as error:
            line.end(exit_code_of(error), text=str(error))
            return exit_code_of(error)
        if isinstance(result, int):
            line.end(result)
            return result
        line.end(result.exit_code, text=str(result), noticed=result.noticed, apart=result.apart)
        return result.exit_code


def _train(options: argparse.Namespace) -> int:
    if options.worker:
        die_with_launcher()
        from zeromesh.launch.rank_processes import become_worker

        become_worker(exit_code_of)
    environment = read_environment()
    processes = _processes(options, environment)
    subject = find_subject(options.config) if options.command == "evaluate" else Subject(config=options.config)
    overrides = [*subject.keys, *options.overrides]
    config = load_config(subject.config, overrides, ranks=processes * options.nnodes[1])
    if options.nnodes[1] == 1:
        check_mesh(config, processes)
    if not options.worker and (processes > environment.world_size or options.nnodes[1] > 1 or options.max_restarts):
        return _report(_launch(options, processes))
    if not options.worker and environment.rank == 0:
        _hint("loading torch and transformers")
    return evaluate(config, subject.checkpoint) if options.command == "evaluate" else _fit(config, options.began)


def _print_config(options: argparse.Namespace) -> int:
    """Every key, below lines that say how settings of another trainer became keys."""
    config = load_config(options.config, options.overrides, ranks=options.nproc)
    from zeromesh.trainer.models.build import check_model

    check_model(config.model)
    sys.stdout.writelines(f"# {printable(note)}\n" for note in config.notes)
    sys.stdout.write(config.to_yaml())
    return 0


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


def _launch(options: argparse.Namespace, processes: int) -> WorkersFailed | int:
    least, most = options.nnodes
    if most > 1 and not options.rdzv_endpoint:
        raise ConfigError("--nnodes of several hosts needs --rdzv-endpoint HOST:PORT, the same on all of them")
    if options.node_rank is not None and not (options.rdzv_endpoint and least == most > options.node_rank):
        raise ConfigError(
            f"--node-rank {options.node_rank} is for --nnodes N with N above it (not MIN:MAX), and --rdzv-endpoint HOST:PORT"
        )
    if options.node_rank is not None and options.max_restarts:
        raise ConfigError(f"--max-restarts {options.max_restarts}: hosts that have a --node-rank start once")
    _hint(f"starting {processes} processes")
    from zeromesh.launch.local import Nodes, launch_workers

    restarts = options.max_restarts if options.max_restarts is not None else 3 * (most > least)
    meeting = {"endpoint": options.rdzv_endpoint, "run_id": options.rdzv_id} if options.rdzv_endpoint else {}
    where = Nodes(least=least, most=most, max_restarts=restarts, rank=options.node_rank, **meeting)
    command = (options.command, "--worker", "--", options.config, *options.overrides)
    with kept_environment({BEGAN: str(options.began)}):
        return launch_workers(python_arguments("zeromesh", command), processes=processes, nodes=where, notify=_say)


def _report(result: WorkersFailed | HostFailure | int) -> int:
    """Say how what was launched has ended; returns the exit code."""
    if not isinstance(result, int):
        _say(str(result))
        return result.exit_code
    if result:
        _say("stopped; all workers have ended")
    return result


def _fit(config: TrainerConfig, began: float) -> int:
    launched = command_began()
    times = StartTimes(began if launched is None else launched)
    if launched is not None:
        times.end("launch", at=began)
    with without_collection():
        from zeromesh.trainer import Trainer
    times.end("imports")
    # Python looks through all objects again when it ends, which takes seconds after torch and transformers were loaded.
    atexit.register(gc.freeze)
    with Trainer(config=config) as trainer:
        trainer.start_times = times
        trainer.fit()
    return 0


@contextmanager
def without_collection() -> Iterator[None]:
    """Python looks for garbage again and again among what is imported inside the block, where next to none is: not here.

    Afterwards what was imported is not looked at any more.
    """
    if "torch" in sys.modules or not gc.isenabled():  # There is nothing to save, or not for us.
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _rank_prefix() -> str:
    """`rank 3: ` under a launcher, where several processes write to one terminal."""
    try:
        environment = read_environment()
    except ConfigError:
        return ""
    return f"rank {environment.rank}: " if environment.world_size > 1 else ""


def _status(options: argparse.Namespace) -> int:
    from pathlib import Path

    from zeromesh.trainer.cli.status import show_status

    return show_status(Path(options.run))


def _completion(options: argparse.Namespace) -> int:
    return run_completion(options, make_parser())


_BESIDE: dict[str, Callable[[argparse.Namespace], int]] = {
    "checkpoint": run_checkpoint,
    "init": run_init,
    "status": _status,
    "report": run_report,
    "doctor": run_doctor,
    "completion": _completion,
}
"""Commands that train nothing and take no overrides."""


def _hint(message: str) -> None:
    """What the next seconds go to, for a person who waits at a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def _say(message: str) -> None:
    sys.stderr.write(f"zeromesh: {printable_lines(message)}\n")


if __name__ == "__main__":
    sys.exit(main())
