"""Persistent worker processes: a pool per layout of ranks, started once in a session, that run named cases together.

A case is a function `case(mesh, **arguments)` of an importable module. Arguments and results are JSON; tensors go through
files. A case that fails, hangs or kills a worker takes its pool with it, and the next case gets a fresh one.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from tests.simulated.launches import launch_differences
from zeromesh.launch.nursery import Nursery

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_LAST_LINES = 60
_START_SECONDS = 60.0
_FIRST_PORT, _PORTS = 10_000, 20_000
_TRIED = itertools.count(os.getpid() * 251)
"""Processes that test at the same time begin at different ones."""
_KEPT_POOLS = 6
"""They take memory, and a fresh one imports and prepares much at its first case."""
_MOST_THREADS = 60  # of a worker: groups with a collective that did not end are never left, and their threads poll


class CaseError(AssertionError):
    """A case did not end well on some rank; the text holds what every worker said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a case on one rank."""

    rank: int
    result: Any = None
    error: str = ""
    """Name of the exception's class; `died` when the process is gone."""
    message: str = ""
    traceback: str = ""
    at: float = 0.0
    """`time.monotonic()` at the error; one clock for all processes of a machine."""
    launched: Sequence[Any] = ()
    """On the simulated device: the collectives that the case has launched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """A layout of ranks. `hosts`: so many ranks are told that they share a host; 0: as it is; -n: they are dealt out to n hosts.
    `device`: `cpu`, or `sim` for the simulated one."""

    size: int
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    timeout_seconds: float = 20.0
    hosts: int = 0
    device: str = "cpu"


class Source:
    """The process that workers and programs are forked from."""

    def __init__(self, folder: Path) -> None:
        variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        variables["XDG_CACHE_HOME"] = str(folder / "cache")
        variables["PYTHONPATH"] = os.pathsep.join([*_folders(), os.environ.get("PYTHONPATH", "")])
        self.folder = folder
        self._nursery = Nursery(["tests.support.imports"], variables, print)
        self._count = 0

    def fork_worker(self, environment: Mapping[str, str], address: str, options: Mapping[str, Any]) -> tuple[int, Path]:
        """Start a worker; returns its process id and the file with what it prints."""
        self._count += 1
        log = self.folder / f"worker-{self._count}.log"
        return self.fork("worker", address, json.dumps(options), str(log), **environment), log

    def fork(self, module: str, *words: str, **environment: str) -> int:
        """Have a process forked that runs a module of this folder; returns its id."""
        return self._nursery.fork(["-m", f"tests.support.{module}", *words], environment, {}).pid

    def close(self) -> None:
        """End it, and with it all workers."""
        self._nursery.close()


@dataclass(slots=True)
class _Worker:
    pid: int
    log: Path
    connection: Connection | None = field(default=None)


class Pool:
    """The workers of one layout. After a case that ended badly it is closed.

    With `rests` they are stopped between cases: threads of their process groups poll, and twenty take an eighth of a core.
    """

    def __init__(self, source: Source, options: PoolOptions, *, rests: bool = False) -> None:
        self.options = options
        self._rests = rests
        self.open = True
        self._workers: list[_Worker] = []
        port = str(_free_port())
        plain = asdict(options)
        address = source.folder / f"socket-{port}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(options.size)
            listener.settimeout(_START_SECONDS)
            for rank in range(options.size):
                pid, log = source.fork_worker(_launch_variables(rank, options, port), str(address), plain)
                self._workers.append(_Worker(pid=pid, log=log))
            self._accept(listener)
        address.unlink()

    def _accept(self, listener: socket.socket) -> None:
        for _ in self._workers:
            try:
                accepted, _address = listener.accept()
            except TimeoutError as error:
                raise self._hung("the start of workers", _START_SECONDS, range(len(self._workers))) from error
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            self._workers[json.loads(connection.recv_bytes())["rank"]].connection = connection

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def run(self, case: str, *, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Run a case on all ranks and return their results.

        Raises:
            CaseError: when it failed or hung on any rank; the pool is then closed.
        """
        outcomes = self.outcomes(case, timeout=timeout, **arguments)
        if parted := launch_differences([outcome.launched for outcome in outcomes]):
            self.close()
            parted += [_report(outcome) for outcome in outcomes if outcome.error]
            raise CaseError(f"{case}: collectives were launched in different orders\n" + "\n".join(parted))
        if any(outcome.error for outcome in outcomes):
            self.close()
            raise CaseError(f"{case} failed\n" + "\n".join(_report(outcome) for outcome in outcomes))
        return [outcome.result for outcome in outcomes]

    def outcomes(self, case: str, *, timeout: float = 60.0, stuck: Sequence[int] = (), **arguments: Any) -> list[Outcome]:
        """Run a case that may fail and say what became of it on each rank but those expected to be `stuck`.

        Raises:
            CaseError: when it did not end in time; the pool is then closed.
        """
        for worker in self._workers:
            _signal(worker.pid, signal.SIGCONT)
            if worker.connection is not None:
                worker.connection.send_bytes(json.dumps({"case": case, "arguments": arguments}).encode())
        waited = {worker.connection: rank for rank, worker in enumerate(self._workers) if rank not in stuck}
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(found) < len(waited):
            left = [connection for connection, rank in waited.items() if rank not in found and connection is not None]
            ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._hung(case, timeout, [rank for rank in waited.values() if rank not in found], found)
            for connection in ready:
                rank = waited[connection]  # type: ignore[index]
                try:
                    found[rank] = Outcome(rank=rank, **json.loads(connection.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    found[rank] = Outcome(rank=rank, error="died", traceback=self._tail(rank))
        for worker in self._workers if self._rests else ():
            _signal(worker.pid, signal.SIGSTOP)
        return [found[rank] for rank in sorted(found)]

    def _hung(self, case: str, timeout: float, ranks: Sequence[int], found: Mapping[int, Outcome] | None = None) -> CaseError:
        for rank in ranks:
            _signal(self._workers[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        lines = [_report(each) for each in (found or {}).values()]
        lines += [f"rank {rank} is at\n{self._tail(rank)}" for rank in ranks]
        self.close()
        return CaseError("\n".join([f"{case} did not end within {timeout:g} seconds on ranks {list(ranks)}", *lines]))

    def _tail(self, rank: int) -> str:
        log = self._workers[rank].log
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-_LAST_LINES:])

    def close(self) -> None:
        self.open = False
        for worker in self._workers:
            _signal(worker.pid, signal.SIGKILL)
            if worker.connection is not None:
                worker.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _folders() -> list[str]:
    """The folders of the repository that pytest imports from, which workers import cases from too."""
    return [entry for entry in sys.path if Path(entry) == ROOT or Path(entry).is_relative_to(ROOT / "scripts")]


class Workers:
    """All pools of a session."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """`device`: of pools that do not say."""
        self.folder = folder
        self._device = device
        self._source = Source(folder)
        self._pools: dict[PoolOptions, Pool] = {}

    def pool(self, size: int, *, device: str = "", **axes: int) -> Pool:
        """The kept pool of a layout, started when there is none. `axes`: ranks along the axes other than shard."""
        options = PoolOptions(size=size, device=device or self._device, **axes)
        pool = self._pools.pop(options, None)
        if pool is not None and len([*Path(f"/proc/{pool.pids[0]}/task").glob("*")]) > _MOST_THREADS:
            pool.close()
        if pool is None or not pool.open:
            pool = Pool(self._source, options, rests=not options.hosts)  # Hosts tell by their clocks who is gone.
        self._pools[options] = pool  # The latest is last.
        while len(self._pools) > _KEPT_POOLS:
            self._pools.pop(next(iter(self._pools))).close()
        return pool

    def run(self, size: int, case: str, *, timeout: float = 60.0, device: str = "", **arguments: Any) -> list[Any]:
        """Run a case in the kept pool of a layout, whose axes are among the arguments."""
        axes = {name: arguments.pop(name) for name in ("replicate", "tensor", "pipeline") if name in arguments}
        return self.pool(size, device=device, **axes).run(case, timeout=timeout, **arguments)

    def fresh(self, options: PoolOptions) -> Pool:
        """A pool for one test, which closes it."""
        return Pool(self._source, options if options.device != "cpu" else replace(options, device=self._device))

    def fork_programs(self, address: str, folder: str) -> int:
        """Start the process that programs of `folder` are forked from (programs.py); returns its id."""
        return self._source.fork("programs", address, folder)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._source.close()


def _launch_variables(rank: int, options: PoolOptions, port: str) -> dict[str, str]:
    hosts = [host_of(each, options.hosts) for each in range(options.size)]
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": hosts[:rank].count(hosts[rank]),
        "WORLD_SIZE": options.size,
        "LOCAL_WORLD_SIZE": hosts.count(hosts[rank]),
    }
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def host_of(rank: int, hosts: int) -> int:
    """Which host a rank takes itself to be on; see `PoolOptions.hosts`."""
    if not hosts:
        return 0
    return rank // hosts if hosts > 0 else rank % -hosts


def _free_port() -> int:
    """One of those that the kernel gives nobody who does not ask for it: it is still free when rank 0 listens."""
    while True:
        port = _FIRST_PORT + next(_TRIED) % _PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _report(outcome: Outcome) -> str:
    if not outcome.error:
        return f"--- rank {outcome.rank}: ended well"
    return f"--- rank {outcome.rank}: {outcome.error}\n{outcome.traceback}"
