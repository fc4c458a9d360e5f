"""A run on several hosts over ssh: one launcher per host, led from here, and restarted on the remaining hosts when some are lost.

The connection to a host is the standard input and output of the remote command; messages begin with `BEGIN`, to be told from the
output of its processes. A host is *lost* when it is silent for a while, or ends the connection before it has reported how its
processes ended. A hostfile has a line `NAME slots=N [address=NAME]` for each host: its name for ssh, its number of processes, and
the name or address by which other hosts reach it, if that differs. A `#` begins a comment."""

import os
import queue
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zeromesh.errors import ConfigError, errors_as
from zeromesh.launch.leader import ALONE, MARGIN_SECONDS, Leader, Member, Nodes, Result
from zeromesh.launch.messages import BEATS, MAX_MESSAGE, LauncherConnection, MessageError, parsed, read_available
from zeromesh.launch.rank_processes import WorkersFailed
from zeromesh.launch.rendezvous import TRAINER, Follower, run_starts
from zeromesh.launch.signals import noted_signals

BEGIN = b"\x1ezeromesh:"
MAX_SLOTS = 1024
_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
# A name never begins with `-`, which ssh would take for an option.
_LINE = re.compile(
    rf"(?!.* address=.* address=)((?:[A-Za-z0-9_][\w.-]*@)?({_NAME}))"
    rf"(?: address=({_NAME}))? slots=([0-9]{{1,6}})(?: address=({_NAME}))?"
)
_FORM = (
    f"allowed is `NAME slots=N [address=NAME]`, N from 1 to {MAX_SLOTS}; names have letters, digits, '.', '-' and '_', begin "
    "with none of '.' and '-', and a USER@ may stand before the first one"
)
SSH = (*("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"), *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"))
"""The ssh command. BatchMode makes ssh fail instead of asking for a password, which nobody could type here."""
START_SECONDS = 120.0  # for a host to send its first message, after connecting and starting Python from a slow disk
_LINGER_SECONDS = 5.0  # the longest wait for the output of hosts at the end of a run
PORTS = range(20000, 30000)  # to draw from, below those that systems assign to outgoing connections
_LONGEST_LINE = 1 << 16  # bytes after which an unfinished line of a host is printed
_MOST_LINES = 100_000  # that wait to be printed
_LAST_SECONDS = 5.0  # for printing them at the end


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host, its number of processes, and the name or address by which other hosts reach it."""

    name: str
    slots: int
    address: str


def read_hosts(text: str, *, where: str) -> tuple[Host, ...]:
    """Read the hosts of the hostfile `where`, in the order of ranks. Raises `ConfigError` with every mistake and its line."""
    hosts: dict[str, tuple[int, Host]] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        text = " ".join(line.partition("#")[0].split())
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None or not 1 <= int(match[4]) <= MAX_SLOTS:
            problems.append(f"line {number}: {text!r}; {_FORM}")
            continue
        host = Host(name=match[1], slots=int(match[4]), address=match[3] or match[5] or match[2])
        # One host under two names may be meant (two of its addresses); one name twice is a slip.
        before, _ = hosts.setdefault(host.name, (number, host))
        if before != number:
            problems.append(f"line {number}: host {host.name!r} is on line {before} already; add up its slots")
    if not hosts and not problems:
        problems.append(f"no host in it; each has a line, {_FORM}")
    if problems:
        raise ConfigError(problems, where=where)
    return tuple(host for _, host in hosts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """The plan of a run on `hosts`. `ssh` is called with `HOST COMMAND`, and runs the launcher's `command` in `directory` with
    `variables`, sent over its standard input. Ranks meet at `port` of the first host, or at any. `check` refuses unusable hosts.
    After failure the run restarts at most `max_restarts` times, without hosts silent for `silence_seconds`, on `least` or more."""

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    ssh: tuple[str, ...]
    directory: str
    python_path: str | None
    variables: Mapping[str, str]
    silence_seconds: float
    port: int | None
    least: int
    max_restarts: int
    check: Callable[[Sequence[Host]], None]

    def arguments(self, host: Host) -> list[str]:
        path = ["env", f"PYTHONPATH={self.python_path}"] if self.python_path else []
        return [*self.ssh, host.name, f"cd {shlex.quote(self.directory)} && exec {shlex.join([*path, *self.command])}"]

    def meeting_address(self, hosts: Sequence[Host]) -> tuple[str, int]:
        """Check the hosts, and return the address and the port at which their ranks reach rank 0."""
        self.check(hosts)
        return hosts[0].address, self.port or random.choice(PORTS)


def supervise(plan: LaunchPlan, notify: Callable[[str], None]) -> WorkersFailed | int:
    """Run until all hosts have ended. `notify` receives lines for the user. Returns 0 when all succeed, the first failure when one
    fails, and 128 plus the signal's number after a signal to stop; processes on unreachable hosts then end by themselves. Raises
    `ConfigError` when the command `ssh` of the plan cannot be started, or `check` refuses the hosts."""
    plan.check(plan.hosts)
    hosts = {host.name: host for host in plan.hosts}
    output, started, members = Output(), list[HostProcess](), list[Member]()

    def stopped() -> bool:
        """Pass received signals on to the hosts; returns True if a signal has come and the ranks of all hosts have ended."""
        requests.pass_on(lambda number: leader.send({"signal": number}), lambda: leader.send({"stop": 0}))
        leader.ending = requests.passed_on > 0
        return bool(requests.first) and not leader.running

    with noted_signals() as requests:
        try:
            for rank, host in enumerate(plan.hosts):
                ssh = HostProcess(host, plan, output)
                started.append(ssh)
                greeting = {"variables": dict(plan.variables)}
                members.append(Member(connection=ssh, name=host.name, rank=rank, slots=host.slots, greeting=greeting))
            nodes = Nodes(
                least=1 + plan.least,
                most=1 + len(hosts),
                max_restarts=plan.max_restarts,
                rest_seconds=0,  # Any failure kills all ranks at once.
                cause_seconds=plan.silence_seconds + MARGIN_SECONDS,
            )
            address_of = lambda left: plan.meeting_address([hosts[each.name] for each in left])  # noqa: E731
            leader = Leader(nodes, 0, notify, stopped, members=members, address_of=address_of)
            return run_starts((), leader, requests)
        finally:
            for each in started:  # Nobody else does where not all could be started.
                each.close()
            # An orphaned process may keep the pipes of a host open forever.
            drain([each for each in started if not each.lost], time.monotonic() + _LINGER_SECONDS)
            for each in started:
                each.finish()
            output.close()


class Output:
    """Prints lines to standard output (1) and error (2) in a thread, or drops them: a blocked terminal does not block the run."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[int, str] | None] = queue.Queue(_MOST_LINES)
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def put(self, number: int, text: str) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait((number, text))

    def close(self) -> None:
        """Write the queued lines, for some seconds at most."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=_LAST_SECONDS)
            self._thread.join(_LAST_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            stream = sys.stdout if line[0] == 1 else sys.stderr
            with suppress(OSError, ValueError):
                stream.write(f"{line[1]}\n")
                if self._lines.empty():
                    stream.flush()


@dataclass(eq=False, slots=True)
class HostStream:
    """One output stream of a host, read in arbitrary pieces: printed lines and, in standard output, messages between them."""

    output: Output
    is_stdout: bool
    host: str
    last: str = ""
    partial: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Print the lines of a piece that are complete, or too long to wait for their end; returns the messages among them."""
        found: list[bytes] = []
        *whole, rest = (self.partial + data).split(b"\n")
        printed = b""
        for line in whole:
            # A message may interrupt a printed line, which goes on after it.
            begin, mark, content = line.partition(BEGIN) if self.is_stdout else (line, b"", b"")
            printed += begin
            try:
                if mark:
                    parsed(content.partition(b" ")[2])
                    found.append(content)
                    continue
            except MessageError:  # The line is printed text that contains `BEGIN`.
                printed += mark + content
            self._put(printed)
            printed = b""
        self.partial = printed + rest
        if len(self.partial) > (MAX_MESSAGE if BEGIN in self.partial else _LONGEST_LINE):
            self.flush()
        return found

    def flush(self) -> None:
        if self.partial:
            self._put(self.partial)
        self.partial = b""

    def _put(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self.last = text.strip() or self.last
        self.output.put(1 if self.is_stdout else 2, f"[{self.host}] {text}")


class HostProcess(LauncherConnection):
    """The connection to one host: the local ssh process, which prints what the host prints and passes the messages between it.
    Raises `ConfigError` when the local command cannot be started."""

    def __init__(self, host: Host, plan: LaunchPlan, output: Output) -> None:
        self.host, self.lost = host, False
        pipe, self._program = subprocess.PIPE, plan.ssh[0]
        with errors_as(ConfigError, f"--ssh: {self._program!r} cannot be started (", OSError, after=")"):
            # A session of its own, so that the terminal's Ctrl-C does not end ssh, over which the signal is passed on.
            self._process = subprocess.Popen(
                plan.arguments(host), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        self.pid = self._process.pid
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        stdin, self._stdout, stderr = (each for each in pipes if each is not None)
        silence = plan.silence_seconds
        super().__init__(self._stdout, stdin, "", serves=True, hello_seconds=START_SECONDS, silence_seconds=silence)
        self._patience = silence / BEATS
        self._printed = {pipe: HostStream(output, pipe is self._stdout, host.name) for pipe in (self._stdout, stderr)}
        self.readers = list(self._printed)

    def read(self) -> Sequence[bytes] | None:
        """Print what the host has printed, and return its messages; None when the host has closed its output."""
        found: list[bytes] = []
        for pipe, stream in self._printed.items():
            data = read_available(pipe) if pipe in self.readers else None
            if data:
                found += stream.feed(data)
            elif data is not None:
                stream.flush()
                self.readers = [each for each in self.readers if each is not pipe]
        return found if found or self._stdout in self.readers else None

    def loss(self, error: Exception) -> tuple[str, float]:
        self.lost, there, now = True, bool(self._drawn_by_both), time.monotonic()
        gone = "; the host, its network or its connection is gone" if there else " since it was to start"
        reason = f"nothing has been heard for {now - self.alive_at:.0f} s{gone}"
        if isinstance(error, MessageError):
            reason = f"what it has sent makes no sense: {error}"
        else:
            with suppress(subprocess.TimeoutExpired):  # The local command may still run.
                code = self._process.wait(0.0 if self._stdout in self.readers else self._patience)
                drain([self], time.monotonic() + self._patience)
                last = "".join(f": {each.last}" for each in self._printed.values() if not each.is_stdout and each.last)
                reason = f"{self._program!r} ended with exit code {code} before the host had said how its part ended{last}"
        return f": {reason}", (self.alive_at if there else now) + self._silence_seconds + MARGIN_SECONDS

    def close(self) -> None:
        """Cut the connection, whereupon the host ends its processes by itself. Its output can still be read."""
        self._writer.close()

    def finish(self) -> None:
        self.close()
        for harder in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, harder)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=2.0)
        for pipe in self._printed:
            pipe.close()


def drain(processes: Sequence[HostProcess], until: float) -> None:
    """Print the remaining output of hosts until all have closed it, or until the monotonic time `until`, in seconds."""
    while readers := [pipe for each in processes for pipe in each.readers]:
        seconds = until - time.monotonic()
        if seconds <= 0 or not select.select(readers, [], [], seconds)[0]:
            return
        for each in processes:
            each.read()


def run_attached(
    arguments: Sequence[str], silence_seconds: float, notify: Callable[[str], None], modules: Sequence[str] = TRAINER
) -> Result:
    """Run `python ARGUMENTS` as the ranks requested by the `zeromesh launch` at the other end of standard input and output. They
    are killed when that end is silent for `silence_seconds`, or has closed the connection."""

    def attach() -> LauncherConnection:
        """Connect over standard input and output. The ranks get an empty standard input, and share standard output."""
        reader, writer = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        how = {"hello_seconds": START_SECONDS, "silence_seconds": silence_seconds}
        return LauncherConnection(reader, writer, "", serves=False, mark=BEGIN, **how)

    with noted_signals() as requests:
        return run_starts(arguments, Follower(ALONE, 0, notify, lambda: bool(requests.first), attach), requests, modules)
