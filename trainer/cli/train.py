"""`zeromesh train`, `evaluate` and `run`, which start ranks or run as one, `launch`, over ssh on several hosts, and `config`."""

import argparse
import ast
import atexit
import gc
import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from zipfile import is_zipfile

from zeromesh import environment, errors
from zeromesh.errors import ConfigError, DataError, LayoutError, ZeromeshError, counted, errors_as
from zeromesh.files import flush_files, json_object, write_whole
from zeromesh.launch.rank_processes import WorkersFailed
from zeromesh.launch.ssh import SSH, LaunchPlan, read_hosts, run_attached, supervise
from zeromesh.mesh.mesh_shape import SIZES, MeshShape
from zeromesh.trainer.config.load import Consent, foreign_code, load_config
from zeromesh.trainer.config.sections.formats import format_of
from zeromesh.trainer.config.sections.model import AUTO_CLASSES
from zeromesh.trainer.config.sections.outputs import name_of_file
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.text_sources import find_text, picture_suffixes
from zeromesh.trainer.formatting import print_lines, wrapped
from zeromesh.trainer.monitoring.step_metrics import CONFIG, STARTS, StartTimes, read_metrics

FORWARDED = (
    *("OMP_NUM_THREADS", environment.INTERFACE),
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_DEBUG"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE"),
)
"""The environment variables that `zeromesh launch` passes to hosts if set. None is secret: secret ones must be named by `--env`."""
SILENCE_SECONDS = 15.0


def _forwarded(names: tuple[str, ...] = FORWARDED) -> dict[str, str]:
    return {name: value for name in names if (value := environment.setting(name)) is not None}


def run_launch(options: argparse.Namespace) -> int:
    path = options.hostfile
    with errors_as(ConfigError, f"--hostfile {str(path)!r} cannot be read: ", OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
    hosts = read_hosts(text, where=str(path))
    slots = sum(host.slots for host in hosts)
    config = load_config(options.config, options.overrides, ranks=slots, consent=Consent.GIVEN)
    if options.min_hosts is not None and options.min_hosts > len(hosts):
        raise ConfigError(f"--min-hosts {options.min_hosts}: {path} has {len(hosts)}")
    with errors_as(ConfigError, f"--ssh {options.ssh!r} cannot be read: ", ValueError):
        ssh = SSH if options.ssh is None else tuple(shlex.split(options.ssh))
    if not ssh:
        raise ConfigError("--ssh is empty; give a command such as 'ssh -p 2222', or leave it out")
    variables = _forwarded()
    problems = []
    for entry in options.env or ():
        name, given, value = entry.partition("=")
        here = value if given else environment.setting(name)
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            problems.append(f"--env {name!r} is no variable's name; allowed is NAME or NAME=VALUE")
        elif here is None:
            problems.append(f"--env {name}: the variable is not set here; set it, or give {name}=VALUE")
        else:
            variables[name] = here
    if problems:
        raise ConfigError(problems)
    words = ("train", "--attached", f"{options.host_timeout:g}", "--", options.config, *options.overrides)
    plan = LaunchPlan(
        hosts=hosts,
        # `zeromesh train` parses the arguments of a host's launcher.
        command=(sys.executable, *environment.python_arguments("zeromesh", words)),
        ssh=ssh,
        directory=os.getcwd(),
        python_path=environment.setting("PYTHONPATH"),
        variables=variables,
        silence_seconds=options.host_timeout,
        port=options.port,
        least=options.min_hosts or len(hosts),
        max_restarts=options.max_restarts if options.max_restarts is not None else 3 * (options.min_hosts is not None),
        check=lambda left: check_mesh(config, sum(host.slots for host in left)),
    )
    if not options.dry_run:
        return report(supervise(plan, say))
    (address, port), first = plan.meeting_address(hosts), 0
    for host in hosts:
        ranks = f"ranks {first} to {first + host.slots - 1} of {slots}, which meet at {address}:{port}"
        sys.stdout.write(f"{shlex.join(plan.arguments(host))}    # {ranks}\n")
        first += host.slots
    names = ", ".join(sorted(plan.variables)) or "none"
    sys.stdout.write(f"# variables set on every host, whose values are sent over standard input: {names}\n")
    return 0


def check_mesh(config: TrainerConfig, processes: int) -> None:
    """Refuse a mesh that does not fit the number of processes, before any of them starts. A plan finds one that fits."""
    if "parallel" not in config.parallel.auto:
        MeshShape.resolve(processes, **{axis: getattr(config.parallel, axis) for axis in SIZES})


def _fits(config: TrainerConfig, processes: int) -> bool:
    with suppress(LayoutError):
        check_mesh(config, processes)
        return True
    return False


EVALUATED = "evaluated.jsonl"  # The file in a run's directory with a line per `zeromesh evaluate`.
_DEFAULTS = "-"  # The source that stands for a configuration of defaults and the keys of the command line.


def _convert_start_arguments(options: argparse.Namespace) -> None:
    """Convert arguments without a configuration, such as `--model DIR --data FILE`, to keys, which the user's keys override."""
    if options.config is not None and "=" in options.config and not Path(options.config).exists():
        options.overrides.insert(0, options.config)
        options.config = None
    if options.config is not None and not (options.model or options.data or options.evaluation or options.lora):
        return
    if options.config is not None or not (options.model and options.data):
        either = "give either a configuration, or --model DIR --data FILE [--lora] [--eval FILE]"
        raise ConfigError(f"{either}; `zeromesh init` lists configurations to begin with")
    model, first = Path(options.model).expanduser(), Path(options.data[0]).expanduser()
    sizes: Any = {}
    for name in ("tokenizer_config.json", "config.json"):
        with suppress(OSError, DataError), (model / name).open("rb") as file:
            sizes |= json_object(file.read(1 << 24), DataError)
    beginning = islice(first.glob("*/*"), 1000) if first.is_dir() else ()
    if any(each.name.lower().endswith(picture_suffixes()) for each in beginning):
        kind, head = "pictures", "image_classification"
    else:
        columns = frozenset[str]()
        with suppress(DataError):  # Loading the configuration reports invalid paths with all other problems.
            columns = find_text(options.data, where="data.train").columns()
        ends = {head: f"{of.removeprefix('AutoModel')}']" for head, of in AUTO_CLASSES.items() if head != "base"}
        head = next((head for head, end in ends.items() if str(sizes.get("architectures")).endswith(end)), "causal_lm")
        labelled = "label" in columns and head in ("sequence_classification", "masked_lm")
        if "label" in columns and not labelled:
            why = "the column label is not read"
            _hint(f"{why}: {model} is no classifier (for one: data.format=labels model.head=sequence_classification)")
        kind, head = ("labels", "sequence_classification") if labelled else (format_of(columns), head)
    # The tokenizer of a model that begins to count positions at 2 says how many it has for tokens.
    limits = (sizes.get(name) for name in ("max_position_embeddings", "n_positions", "model_max_length"))
    keys: dict[str, Any] = {
        "model.source": options.model,
        "data.train": options.data if len(options.data) > 1 else options.data[0],
        "data.format": kind,
        "model.head": head,
        "data.sequence_length": min([1024, *(limit for limit in limits if type(limit) is int)]),
        "run.name": name_of_file(f"{model.resolve().name}-{'lora' if options.lora else 'tuned'}.yaml"),
    }
    # A number of steps that is asked for is not cut short by a default.
    own = dict(each.partition("=")[::2] for each in options.overrides)
    keys |= {"run.epochs": 3} if own.get("run.max_steps", "null") == "null" else {}
    if given := options.evaluation:
        # One path, or several by the names before `=` or those of the files.
        sets = {name or name_of_file(path): path for name, _, path in (each.rpartition("=") for each in given)}
        if len(sets) < len(given):
            raise ConfigError(f"--eval: two of {', '.join(given)} have one name; give NAME=FILE")
        keys["data.eval"] = given[0] if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()) else sets
    keys |= {"model.lora": {"rank": 16, "targets": "all-linear"}} if options.lora else {}
    options.overrides[:0] = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    options.config, options.tune = _DEFAULTS, True


def run_train(options: argparse.Namespace) -> int:
    _convert_start_arguments(options)
    if options.attached is not None:
        # One host of a `zeromesh launch`: messages go to that command, and this process ends when it is gone.
        with environment.kept_environment({environment.BEGAN: str(options.began)}):
            ended = run_attached(_worker_arguments(options), options.attached, say)
        return ended if isinstance(ended, int) else ended.exit_code
    processes, starts = ranks_of(options)
    evaluates = options.command == "evaluate"
    path, keys, checkpoint = resolve_source(options.config) if evaluates else (options.config, (), None)
    path = None if path == _DEFAULTS else path
    ranks, tunes = processes * options.nnodes[1], "whole" if options.tune else None
    consent = Consent.COMMAND_LINE if evaluates else Consent.GIVEN
    config = load_config(path, [*keys, *options.overrides], ranks=ranks, consent=consent, tunes=tunes)
    if options.save_config is not None and not options.worker:
        saved, text = options.save_config.expanduser(), config.to_yaml().encode()
        if saved.is_file() and saved.read_bytes() != text:
            raise ConfigError(f"--save-config {saved}: another file is there; name a new one, or remove it")
        write_whole(saved, text)
    if options.nnodes[1] == 1:
        check_mesh(config, processes)
    if starts or (not options.worker and (options.nnodes[1] > 1 or options.max_restarts or options.on)):
        silence = min(SILENCE_SECONDS, config.parallel.patience)
        comes_and_goes = options.on or options.nnodes[0] < options.nnodes[1]
        found: dict[str, Any] = {"fits": partial(_fits, config)} if comes_and_goes else {}
        # In DeepSpeed's settings they follow from the number of ranks, and hosts may have other ones. Messages are short.
        skipped, shared = ("batch.", "parallel.") if config.notes else (), config.shared_settings().items()
        found["settings"] = {key: it for key, it in shared if len(str(it)) < 4000 and not key.startswith(skipped)}
        return report(_launch(options, processes, {}, silence_seconds=silence, grows=config.recovery.grow, **found))
    if not options.worker and environment.read_environment().rank == 0:
        _hint("loading torch and transformers")
    return _evaluate(config, checkpoint) if evaluates else _fit(config, options.began)


def _worker_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    # The keys of --model and --data are found once: files and the Hub may say other things to ranks that start later.
    words = ("--tune", "--", _DEFAULTS, *options.overrides) if options.tune else options.words[1:]
    return environment.python_arguments("zeromesh", (options.words[0], "--worker", *words))


def launch_this_command(options: argparse.Namespace, processes: int, **keywords: Any) -> WorkersFailed | int:
    from zeromesh.launch.rendezvous import launch_workers

    with environment.kept_environment({environment.BEGAN: str(options.began)}):
        return launch_workers(_worker_arguments(options), processes=processes, notify=say, **keywords)


class _Script(SourceFileLoader):
    """Loads a script as the launcher has read it, and makes modules beside it load as the first ranks have read them."""

    def get_code(self, fullname: str) -> CodeType:
        folder = str(Path(self.path).resolve().parent)
        loaders = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (_Script, SOURCE_SUFFIXES))
        sys.path_importer_cache[folder] = FileFinder(folder, *loaders)
        return self.source_to_code(environment.file_as_launched(Path(self.path)), self.path)


_READ_BY_IMPORTS = re.compile(r"(HF|HUGGINGFACE|TRANSFORMERS|TORCH|OMP|MKL|KMP|OPENBLAS|USE|XDG)_\w+")


def set_in_text(script: bytes) -> list[str]:
    """Return the environment variables that a script sets by its text, and that libraries read when they are imported."""
    found = set[str]()
    with suppress(SyntaxError, ValueError):  # Ranks report it.
        for node in ast.walk(ast.parse(script)):
            sets = isinstance(node, ast.AugAssign) or isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            if sets or getattr(getattr(node, "func", None), "attr", "") in ("setdefault", "update", "pop", "putenv"):
                words = (getattr(each, name, None) for each in ast.walk(node) for name in ("value", "arg"))
                found |= {each for each in words if isinstance(each, str) and _READ_BY_IMPORTS.fullmatch(each)}
    return sorted(found)


def run_script(options: argparse.Namespace) -> int:
    """Run a script as `python SCRIPT ARGUMENTS` does, on this process or on ranks that it starts; returns the exit code."""
    processes, starts = ranks_of(options)
    with errors_as(ConfigError, f"zeromesh run {options.script}: this is no file that can be read (", OSError, after=")"):
        script = environment.file_as_launched(Path(options.script))
    if starts or (not options.worker and (options.nnodes[1] > 1 or options.max_restarts or options.on)):
        # Ranks that start together compare what arguments make of a run.
        words = shlex.join(options.arguments) if options.nnodes[0] < options.nnodes[1] else ""
        told = {"script": script, "command line of the script": words.encode()}
        settings = {key: f"text of digest {hashlib.blake2b(it, digest_size=6).hexdigest()}" for key, it in told.items()}
        if own := set_in_text(script):
            say(f"each rank imports for itself: the script sets {', '.join(own)}, which libraries read when they are imported")
        return report(_launch(options, processes, {"modules": ()} if own else {}, settings=settings))
    sys.argv[:] = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    try:
        if is_zipfile(options.script):
            _names = runpy.run_path(options.script, run_name="__main__")  # Kept, and with them the files that are open.
        else:
            sys.modules["__main__"] = module = ModuleType("__main__")
            module.__file__ = os.path.abspath(options.script)
            _Script("__main__", options.script).exec_module(module)
    except Exception as error:  # noqa: BLE001 - `python SCRIPT` shows any error of the script from its first line on.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != options.script:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    finally:
        flush_files()
    return 0


def ranks_of(options: argparse.Namespace) -> tuple[int, bool]:
    """Return the number of ranks, by the launcher or --nproc, and True if this process starts them, as one task may."""
    launch, nproc, cores = environment.read_environment(), options.nproc, environment.available_cores()
    if nproc is not None and nproc > (most := max(64, 8 * cores)):
        raise ConfigError(f"--nproc {nproc}: this host has {cores} cores; allowed are up to {most} ranks")
    if launch.launcher != "torchrun" and launch.world_size == 1:
        return nproc or 1, not options.worker and (nproc or 1) > 1
    if nproc and launch.launcher == "slurm" and launch.local_world_size == 1 and options.command in ("train", "run"):
        # The task of each host is the launcher of the host's ranks, and Slurm's numbers are those of hosts.
        if options.nnodes == (1, 1):
            options.nnodes, options.node_rank = (launch.world_size, launch.world_size), launch.rank
        options.rdzv_endpoint = options.rdzv_endpoint or f"{launch.master_address}:{launch.master_port}"
        return nproc, not options.worker
    if nproc is not None and nproc != launch.local_world_size:
        started = f"{launch.launcher} has started {counted(launch.local_world_size, 'process')} on this host"
        raise ConfigError(f"--nproc {nproc}: {started}, which are the ranks; leave --nproc out")
    return launch.world_size, False


def _launch(options: argparse.Namespace, processes: int, imported: dict[str, Any], **nodes: Any) -> WorkersFailed | int:
    least, most = options.nnodes
    if options.on and (options.node_rank is not None or options.rdzv_endpoint):
        raise ConfigError(f"--on {options.on} numbers the nodes and meets by itself; leave --node-rank and --rdzv-endpoint out")
    if most > 1 and not options.on and not options.rdzv_endpoint:
        raise ConfigError("--nnodes of several hosts needs --rdzv-endpoint HOST:PORT, the same on all of them")
    if options.node_rank is not None and not (options.rdzv_endpoint and least == most > options.node_rank):
        why = f"--node-rank {options.node_rank} is for --nnodes N with N above it (not MIN:MAX)"
        raise ConfigError(f"{why}, and --rdzv-endpoint HOST:PORT")
    _hint(f"starting {counted(processes, 'process')}")
    from zeromesh.launch.leader import Nodes

    restarts = options.max_restarts if options.max_restarts is not None else 3 * (most > least or bool(options.on))
    meeting = {"endpoint": options.rdzv_endpoint, "run_id": options.rdzv_id} if options.rdzv_endpoint else {}
    where = Nodes(least=least, most=most, max_restarts=restarts, rank=options.node_rank, **meeting, **nodes)
    if options.on:
        from zeromesh.trainer.cli.on_ray import launch_on_ray

        variables = _forwarded(("PYTHONPATH", *FORWARDED))
        return launch_on_ray(_worker_arguments(options), processes, where, variables, say, **imported)
    return launch_this_command(options, processes, nodes=where, **imported)


def report(result: WorkersFailed | int) -> int:
    """Print the outcome of launched workers; returns the exit code."""
    if not isinstance(result, int):
        say(str(result))
        return result.exit_code
    if result:
        say("stopped; all workers have ended")
    return result


def _fit(config: TrainerConfig, began: float) -> int:
    launched, imported = environment.command_start_time(), float(environment.setting(environment.IMPORTED) or 0)
    times = StartTimes(began if launched is None else launched)
    if launched is not None:
        times.end("launch", at=began - imported)
        times.end("imports", at=began)
    fresh = "torch" not in sys.modules
    if fresh:
        gc.disable()  # Imports create almost no garbage, and collecting it takes a second.
    from zeromesh.trainer import Trainer

    if fresh:
        gc.freeze()
        gc.enable()
    if config.train.method != "sft":
        from zeromesh.trainer.integrations.trl import train

        train(config)
        return 0
    times.end("imports")
    # The final collection of garbage takes seconds once torch and transformers are loaded.
    atexit.register(gc.freeze)
    atexit.register(flush_files)  # Runs before that, which would pass over files that callbacks leave open.
    with Trainer(config=config) as trainer:
        trainer.start_times = times
        trainer.fit()
    return 0


def resolve_source(source: str) -> tuple[Path | None, tuple[str, ...], Path | None]:
    """Return the configuration that `source` names, its overrides, and the checkpoint with the weights to evaluate, if any.
    `source` is a run (its newest checkpoint), a checkpoint, a Hugging Face model directory, or a configuration."""
    path = Path(source).expanduser()
    if not path.is_dir():
        if path.name == CONFIG:
            _require_no_script(path.parent)
        return path, (), None
    run = path.parent.parent if (path / "manifest.json").is_file() else path
    if (run / CONFIG).is_file():
        _require_no_script(run)
        from zeromesh.trainer.tools.checkpoint.reading import checkpoint_at

        # The run may have started from a checkpoint that no longer exists.
        return run / CONFIG, ("checkpoint.resume=auto",), checkpoint_at(path)
    if (path / "adapter_config.json").is_file():
        from zeromesh.trainer.models.adapters import saved_with_base

        keys = [f"model.{name}={json.dumps(each)}" for name, each in saved_with_base(path).items()]
        return None, (f"run.name={json.dumps(path.resolve().name)}", *keys), None
    if not (path / "config.json").is_file():
        why = f"a directory without {CONFIG} or config.json; give a configuration, a run, a checkpoint of a run, an adapter"
        raise ConfigError(f"{why}, or a model directory (a run of TRL has one: model)", where=source)
    return None, (f"model.source={path}", f"run.name={path.resolve().name}", 'model.train=["!*"]'), None


_UNUSED_IN_EVALUATION = {"lr_scheduler", "compute_metrics", "preprocess_logits_for_metrics"}


def _require_no_script(run: Path) -> None:
    """Raise `ConfigError` for a run whose script has passed objects that the configuration lacks."""
    starts = read_metrics(run / STARTS) or [{}]
    if given := [name for name in starts[-1].get("given") or () if name not in _UNUSED_IN_EVALUATION]:
        why = f"a script made this run, and gave the trainer {', '.join(map(str, given))}, which no configuration holds"
        raise ConfigError(f"{why}; only that script can evaluate it: call trainer.evaluate() there", where=str(run))


def _evaluate(config: Any, checkpoint: Path | None) -> int:
    """Evaluate a checkpoint, by default the newest of the run or else initial weights, and print and store the values."""
    from zeromesh.checkpoint.store import FOLDER, CheckpointStore
    from zeromesh.trainer import Trainer
    from zeromesh.trainer.loop.evaluation import evaluation_line
    from zeromesh.trainer.monitoring.step_metrics import MetricsWriter

    with Trainer(config=config.changed(batch={"balance": "even"})) as trainer:  # Shares are for the ranks that train.
        checkpoint = checkpoint or next(iter(CheckpointStore(trainer.run_directory / FOLDER).paths()), None)
        if checkpoint is not None:
            trainer.load_weights(checkpoint)
        trainer.run.console.note(f"evaluating {checkpoint or 'the weights that the run would begin with'}")
        values = trainer.evaluate()
        trainer.run.console.note(evaluation_line(trainer.run, values))
        if trainer.mesh.rank == 0:
            line = {"time": time.time(), "step": trainer.state.step, "checkpoint": checkpoint and str(checkpoint)}
            with MetricsWriter(trainer.run_directory / EVALUATED) as writer:
                writer.write({**line, **values})
    return 0


def print_config(options: argparse.Namespace) -> int:
    """Print every key, below lines about the conversion of another trainer's settings; returns the exit code."""
    config = load_config(options.config, options.overrides, ranks=options.nproc, consent=Consent.GIVEN)
    if not any(foreign_code(config.model_dump(include={"model"}))):  # Models from remote code are not inspected.
        from zeromesh.trainer.models.build import check_model

        check_model(config.model)
    sys.stdout.writelines(f"# {errors.printable(note)}\n" for note in config.notes)
    sys.stdout.write(config.to_yaml())
    return 0


def exit_code_of(error: BaseException) -> int:
    recurs = isinstance(error, ValueError) or getattr(error, "left_out", True) is False
    return 2 if isinstance(error, ZeromeshError) and recurs else 1


def say(message: str) -> None:
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    sys.stderr.writelines(f"{line}\n" for line in wrapped(f"zeromesh: {errors.printable_lines(message)}".split("\n"), width))


def _hint(message: str) -> None:
    if sys.stdout.isatty():
        print_lines([message])
