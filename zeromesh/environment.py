"""The launcher and rank of this process; the only file that reads or sets environment variables. It understands torchrun (and all
that set its variables, as accelerate and Kubernetes do), Slurm, Open MPI, MPICH and Intel MPI. Without one there is one rank."""

import ctypes
import json
import os
import re
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from zeromesh.errors import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
# Names of variables, with what their values are:
INTERFACE = "GLOO_SOCKET_IFNAME"  # the interface for gloo to use
SECRET = "ZEROMESH_SECRET"  # the secret by which launchers of several hosts authenticate each other
# A worker's process id, and the descriptor that its launcher has handed to it, as `PID:DESCRIPTOR`:
LINE = "ZEROMESH_LINE"  # of its line to the launcher
STATES = "ZEROMESH_STATES"  # of the memory for its states
SNAPSHOTS = "ZEROMESH_SNAPSHOTS"  # of the memory for copies of them
COPIES = "ZEROMESH_COPIES"  # of the memory for copies of those of another host
MEMORIES = (STATES, SNAPSHOTS, COPIES)
RECOVERS = "ZEROMESH_RECOVERS"  # for a worker that takes the place of a lost one
FILES = "ZEROMESH_FILES"  # for workers, the file in which the launcher has what it has read
BEGAN = "ZEROMESH_BEGAN"  # for workers, the start time of their command, in seconds since boot
IMPORTED = "ZEROMESH_IMPORT_SECONDS"  # for a forked worker, how long the imports took in the process it was forked from
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # True if torchrun serves the store in which ranks of several hosts meet
_LAUNCHER_PID = "ZEROMESH_LAUNCHER_PID"
_RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

_SECRET_NAME = re.compile(
    r"(?i)(?:KEYS?|TOKENS?|SECRETS?|PASS(?:WORDS?|WD|PHRASE)|CREDENTIALS?)(?:$|_)|_(?:PASS|PWD|PAT|DSN)$|^(?:PASS|PAT)$"
)
_LEAST_SECRET = 8

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = {
    "openmpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Launchers and their variables: the rank, the number of ranks, and both within the host. torchrun and Slurm set more variables."""
_LAUNCH_VARIABLES = (
    *(*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    *(name for names in _LAUNCHERS.values() for name in names),
)


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """The position of this process among the processes of one launch. `local_rank` and `local_world_size` count the processes
    of one host. `master_port` 0 means any free port, for a single process. Raises `ConfigError` for contradictory numbers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    launcher: str
    """A name of `_LAUNCHERS`, `torchrun` (or who sets its variables), `slurm`, or `single` for a process without a launcher."""

    def __post_init__(self) -> None:
        world, local = self.world_size, self.local_world_size
        valid = {
            f"rank {self.rank} is not below the world size {world}": 0 <= self.rank < world,
            f"local rank {self.local_rank} is not below {local}, the host's processes": 0 <= self.local_rank < local,
            f"{local} processes on this host, but {world} in the world": local <= world,
            "the address of rank 0 is empty": bool(self.master_address),
            f"port {self.master_port} is not between 0 and 65535": 0 <= self.master_port < 65536,
        }
        if wrong := [problem for problem, holds in valid.items() if not holds]:
            raise ConfigError(wrong, where=f"launch environment ({self.launcher})")


def read_environment(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Read this process's position from `environ`. Raises `ConfigError` that names what is missing of a launcher's variables."""
    if environ.get("RANK"):  # torchrun's variables come before those of others.
        return _read_torchrun(environ)
    # A batch script's body has SLURM_PROCID=0 too, but is no step that `srun` has started.
    in_step = any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"))
    of_slurm = environ.get("SLURM_PROCID") and (in_step or not environ.get("SLURM_TASK_PID"))
    for launcher, names in _LAUNCHERS.items():
        # `mpirun` inside a Slurm job leaves its own daemon's SLURM_PROCID in every rank, so others come before Slurm; but
        # `srun --mpi=pmi2` sets PMI_RANK beside good Slurm variables, so MPICH does only where its own mpiexec has been.
        by_srun = of_slurm and launcher == "mpich" and not environ.get(names[2])
        if environ.get(names[0]) and not by_srun:
            return _read_mpi(environ, names, launcher)
    if of_slurm:
        return _read_slurm(environ)
    # A world size without a rank is refused: such a process would train alone by mistake.
    for rank, *others in (_TORCHRUN, *(names[:2] for names in _LAUNCHERS.values())):
        if any(environ.get(name) for name in others):
            raise ConfigError(_missing([rank], environ))
    return LaunchEnvironment(0, 1, 0, 1, LOOPBACK, 0, "single")


def worker_environment(processes: int, *, alone: bool, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to set for `processes` workers on this host, without those that are already set: their share of the
    cores, and for a host `alone` the loopback interface, which works without a resolvable host name."""
    wanted = {"OMP_NUM_THREADS": str(max(1, available_cores() // max(1, processes)))}
    wanted |= {INTERFACE: "lo"} if alone else {}
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def set_default(name: str, value: str, *aliases: str) -> None:
    """Set a variable for a library that reads it later, unless it or one of its `aliases` has a non-empty value."""
    if value and not any(os.environ.get(each) for each in (name, *aliases)):
        os.environ[name] = value


@contextmanager
def kept_environment(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set variables for the block, and restore all variables at its end, even those changed by foreign code."""
    before = dict(os.environ)
    os.environ.update(variables or {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def secret_values(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the values of variables whose names mark them as secrets, such as `HF_TOKEN`, without short ones."""
    found = (value.strip() for name, value in environ.items() if _SECRET_NAME.search(name))
    return tuple(value for value in found if len(value) >= _LEAST_SECRET)


def export(variables: Mapping[str, str]) -> None:
    """Set variables for the rest of this process's life, and for its child processes."""
    os.environ.update(variables)


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel end this process when its parent ends, by default the launcher in the environment; exit if it has ended."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if (parent or int(setting(_LAUNCHER_PID) or os.getppid())) != os.getppid():
        raise SystemExit(128 + int(signal.SIGKILL))


def process_state(pid: int) -> str:
    """Return the letter of proc(5) for the state of a process of this host, such as `T` for a stopped one; empty: it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # The name in parentheses may hold anything; the state follows the last one.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    return ""


def handed_over(name: str) -> int | None:
    """Return the descriptor that a launcher has handed to this very process, by the name of its variable; None without one."""
    pid, _, descriptor = (setting(name) or "").partition(":")
    return int(descriptor) if pid == str(os.getpid()) else None


READ: dict[str, str] = {}  # what this process has read by `file_as_launched`, for the ranks that it launches
_READINGS: Counter[str] = Counter()


def file_as_launched(path: Path, most: int = -1) -> bytes:
    """Return a file that the command or its script names, up to `most` bytes: in a worker as its launcher has read it, since it may
    have been edited while others train, and in one that starts later as the first ones have. Raises `OSError`."""
    key = name = os.path.abspath(path)
    kept, handed = _handed_files() if handed_over(LINE) is not None else (None, {})
    for line in kept or ():  # What others have added.
        with suppress(ValueError):  # A rank was killed while it wrote.
            handed.update({**json.loads(line), **handed})
    if kept is not None and name not in handed:
        _READINGS[name] += 1  # A script may write a file anew, and read it again.
        key = f"{name} {_READINGS[name]}"
    if key in handed and (key == name or setting(RECOVERS) or number_of_start()):
        return handed[key].encode("latin-1")
    with path.open("rb") as file:
        content = file.read(most)
    if kept is None:
        READ[name] = content.decode("latin-1")
    elif key not in handed:
        os.write(kept.fileno(), b"\n" + json.dumps({key: content.decode("latin-1")}).encode())
    return content


def files_handed_on() -> dict[str, str]:
    """Return the variable by which workers find what is `READ` here, and add to it what they read."""
    os.write(descriptor := os.memfd_create("files"), json.dumps(READ).encode())
    return {FILES: f"/proc/{os.getpid()}/fd/{descriptor}"}


@cache
def _handed_files() -> tuple[IO[bytes] | None, dict[str, str]]:
    with suppress(OSError):  # There are none in another container, or where a program starts ranks by itself.
        return open(os.open(setting(FILES) or "", os.O_RDWR | os.O_APPEND), "rb"), {}
    return None, {}


def launched_by(pid: int) -> dict[str, str]:
    """Return the variable that tells a process which one has launched it; see `die_with_parent`."""
    return {_LAUNCHER_PID: str(pid)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRange:
    """The ranks of one start on this host, `processes` from `first` on of `world_size`, and rank 0's address; `hosts`: at most."""

    first: int
    processes: int
    world_size: int
    master_address: str
    master_port: int
    run_id: str
    restart: int = 0
    hosts: int = 1

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables that tell a process its rank, under torchrun's names, which other libraries read too."""
        names = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT", *_RUN_VARIABLES, AGENT_STORE)
        ranks = (self.first + local_rank, self.world_size, local_rank, self.processes)
        values = (*ranks, self.master_address, self.master_port, self.run_id, self.restart, False)
        return dict(zip(names, map(str, values), strict=True))


def command_start_time() -> float | None:
    """Return the start, in seconds since boot, of this worker's command; None for other processes and restarted workers."""
    began = setting(BEGAN)
    return float(began) if began is not None and not number_of_start() else None


def number_of_start() -> int:
    """Return how often the launcher has started the ranks of this run before."""
    return int(setting(_RUN_VARIABLES[1]) or 0)


def starts_of_run() -> list[str]:
    """Return names of the run's starts, of which the last is this one; none if no launcher of zeromesh has started this process."""
    names = [f"start {each} of run {setting(_RUN_VARIABLES[0])}" for each in range(number_of_start() + 1)]
    return names if handed_over(LINE) is not None else []


def is_earlier_start(name: str) -> bool:
    """Return whether `name` is an earlier start of this run; where starts have no names, whether there was one at all."""
    return name in starts_of_run()[:-1] if starts_of_run() else number_of_start() > 0


def launch_identity(environment: LaunchEnvironment) -> str:
    """Return a text that is equal in all ranks of one start, and differs between simultaneous starts on a host."""
    started = (os.environ.get(name, "") for name in _RUN_VARIABLES)
    return " ".join((environment.master_address, str(environment.master_port), *started))


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def python_arguments(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that run `module` in a new Python with the module search path of this one. `python -m` searches the
    working directory first, an installed command does not: a `datasets.py` in it must not shadow the library then."""
    searched = {os.path.realpath(entry or os.getcwd()) for entry in sys.path[:1]}
    isolated = () if os.path.realpath(os.getcwd()) in searched else ("-P",)
    return (*isolated, "-m", module, *arguments)


def setting(name: str) -> str | None:
    """Return the value of one environment variable; None if it is unset or empty."""
    return os.environ.get(name) or None


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `node01` of `node[01-03,7],gpu1`. Raises `ConfigError`."""
    match = re.match(r"(?:[^,\[\]\s]|\[[^\[\]\s]+\])+(?=,|$)", nodelist.strip())
    host = re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", match.group()) if match else ""
    if not host or "[" in host:
        raise ConfigError(f"Slurm's node list {nodelist!r} cannot be read; set MASTER_ADDR to the host of rank 0")
    return host


def _tasks_on_node(counts: str, node: int) -> int:
    """Return the number of tasks that Slurm started on the node of index `node`, from a list such as `2(x3),1`."""
    tasks: list[int] = []
    for item in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ConfigError(f"Slurm's tasks per node {counts!r} cannot be read; set SLURM_NTASKS_PER_NODE")
        # Nodes after this one are not expanded, so a huge repeat count costs nothing.
        tasks.extend([int(match[1])] * min(int(match[2] or 1), node + 1))
    if node >= len(tasks):
        raise ConfigError(f"SLURM_NODEID is {node}, but Slurm's tasks per node are {counts!r}")
    return tasks[node]


def _read_torchrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    # Operators that start one process per host often set neither local variable; a single one is a mistake.
    names = _TORCHRUN[2:] if any(environ.get(name) for name in _TORCHRUN[2:]) else ()
    rank, world, port, *local = _integers(environ, [*_TORCHRUN[:2], "MASTER_PORT", *names], also=("MASTER_ADDR",))
    local_rank, local_world_size = local or (0, 1)
    return LaunchEnvironment(rank, world, local_rank, local_world_size, environ["MASTER_ADDR"], port, "torchrun")


def _read_slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    # A step may be smaller than its job, and the interactive step of `salloc` has one task: the step's count is used.
    total = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, world_size, local_rank = _integers(environ, ["SLURM_PROCID", total, "SLURM_LOCALID"])
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if counts and environ.get("SLURM_NODEID"):
        local_world_size = _tasks_on_node(counts, _integers(environ, ["SLURM_NODEID"])[0])
    elif environ.get("SLURM_NTASKS_PER_NODE"):
        # --ntasks-per-node sets this, as an upper limit: a small step may hold fewer tasks.
        local_world_size = min(world_size, _integers(environ, ["SLURM_NTASKS_PER_NODE"])[0])
    elif world_size == 1 or environ.get(_first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")) == "1":
        local_world_size = world_size
    else:
        raise ConfigError(_missing(["SLURM_NTASKS_PER_NODE (or SLURM_STEP_TASKS_PER_NODE and SLURM_NODEID)"], environ))
    master = environ.get("MASTER_ADDR")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not master and not nodes and world_size > 1:
        raise ConfigError(_missing(["SLURM_STEP_NODELIST (or SLURM_JOB_NODELIST, or MASTER_ADDR)"], environ))
    master = master or (first_host(nodes) if nodes else LOOPBACK)
    return LaunchEnvironment(rank, world_size, local_rank, local_world_size, master, _job_port(environ), "slurm")


def _read_mpi(environ: Mapping[str, str], names: Sequence[str], launcher: str) -> LaunchEnvironment:
    rank, world_size, local_rank, local_world_size = _integers(environ, names)
    address = environ.get("MASTER_ADDR") or (LOOPBACK if local_world_size == world_size else "")
    if not address:  # These launchers do not tell ranks the host of rank 0.
        raise ConfigError(_missing(["MASTER_ADDR (the host of rank 0)"], environ))
    return LaunchEnvironment(rank, world_size, local_rank, local_world_size, address, _job_port(environ), launcher)


def _job_port(environ: Mapping[str, str]) -> int:
    """Return a port on which all ranks of a job agree: MASTER_PORT, or one derived from the job's identity, below the ephemeral
    ports (32768 and up on Linux), which any connection may hold."""
    if environ.get("MASTER_PORT"):
        return _integers(environ, ["MASTER_PORT"])[0]
    identity = "/".join(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"))
    return 10000 + zlib.crc32(identity.encode()) % 20000 if identity.strip("/") else DEFAULT_PORT


def _integers(environ: Mapping[str, str], names: Sequence[str], also: tuple[str, ...] = ()) -> list[int]:
    """Return the values of `names` as integers; `also` must be set too. Raises `ConfigError` naming missing or invalid ones."""
    missing = [name for name in (*names, *also) if not environ.get(name)]
    if missing:
        raise ConfigError(_missing(missing, environ))
    wrong = [name for name in names if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", environ[name])]
    if wrong:
        raise ConfigError([f"environment variable {name}: got {environ[name]!r}, not an integer" for name in wrong])
    return [int(environ[name]) for name in names]


def _missing(names: list[str], environ: Mapping[str, str]) -> str:
    there = [name for name in _LAUNCH_VARIABLES if environ.get(name)]
    what = f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set, but not {', '.join(names)}"
    return f"the launch environment is incomplete: {what}; set all of them, or none for a single process"


def _first_set(environ: Mapping[str, str], *names: str) -> str:
    return next((name for name in names if environ.get(name)), names[-1])
