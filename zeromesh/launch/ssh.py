"""A run on several hosts over ssh: a command on each, watched from here until all of them have ended, and started again on the
hosts that are left when some are lost.

A host counts as *lost* when it sends nothing for a while, or when its connection ends before it has reported how its
processes ended. Whatever fails, the other hosts are ended too; no wait here is without a bound.

A hostfile has a line `NAME slots=N [address=NAME]` for each host. `NAME` is the host for ssh, `slots` the processes to start there,
and `address` the name or address by which the other hosts reach it, where that is another one. What follows a `#` is a comment.
"""

import os
import queue
import random
import re
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import IO

from zeromesh.errors import ConfigError
from zeromesh.launch import messages
from zeromesh.launch.messages import BEGIN, MAX_EXIT_CODE, MAX_MESSAGE, Message, MessageError
from zeromesh.launch.rank_processes import USERS_MISTAKE, RankRange, StopSignals, WorkersFailed, noted_signals

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
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
"""Nobody can type a password here, so BatchMode makes ssh fail at once instead of asking for one."""
START_SECONDS = 120.0
"""How long a host may take until its first message: the connection, and Python's start from a slow disk."""
_LINGER_SECONDS = 5.0  # between a host's last message, or the end of its connection, and the end of its pipes
_MARGIN_SECONDS = 1.0
_TICK_SECONDS = 0.1
_PORTS = range(20000, 30000)
"""Below the ports that systems hand out to connections."""
_LONGEST_LINE = 1 << 16
_MOST_LINES = 100_000
_LAST_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host, its processes, and the name or address that the other hosts find it under."""

    name: str
    slots: int
    address: str


def read_hosts(text: str, *, where: str) -> tuple[Host, ...]:
    """The hosts of a hostfile, in its order, which is the order of ranks. `where` names the file in errors.

    Raises:
        ConfigError: with every mistake and its line.
    """
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
    """How to start a run on `hosts`, and when to start it again.

    `ssh` is called with `HOST COMMAND`; it runs the launcher's `command` in `directory`, and `variables` are sent over its standard
    input. The ranks find each other at `port` of the first host, or at any port. `check` refuses hosts that the run cannot use.
    After a failure of ranks the run starts again at most `max_restarts` times; after a loss of hosts, which count as lost when they
    are silent for `silence_seconds`, it goes on with the others, `least` at least.
    """

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
        """The local command that runs the launcher on `host`."""
        path = ["env", f"PYTHONPATH={self.python_path}"] if self.python_path else []
        return [*self.ssh, host.name, f"cd {shlex.quote(self.directory)} && exec {shlex.join([*path, *self.command])}"]

    def places(self) -> list[RankRange]:
        """The ranks of each host in a start."""
        slots = [host.slots for host in self.hosts]
        first = RankRange(
            first=0,
            processes=slots[0],
            world_size=sum(slots),
            master_address=self.hosts[0].address,
            master_port=self.port or random.choice(_PORTS),
            run_id=uuid.uuid4().hex,
        )
        return [replace(first, first=sum(slots[:index]), processes=count) for index, count in enumerate(slots)]


def supervise(plan: LaunchPlan, notify: Callable[[str], None]) -> WorkersFailed | int:
    """Run until all hosts have ended. `notify` gets lines for a person.

    Returns 0 when all succeed, the first failure when one does not, and 128 plus the signal's number when this process got a
    signal to stop. Nothing is left running then, except on hosts that cannot be reached, which end by themselves.

    Raises:
        ConfigError: when the command `ssh` of the plan cannot be started, or `check` refuses the hosts.
    """
    failures = 0
    with noted_signals() as requests:
        while True:
            plan.check(plan.hosts)
            cause, lost, safe_at = _start(plan, requests)
            code = requests.exit_code()
            if cause is None or code:
                return code
            left = tuple(host for host in plan.hosts if host not in lost)
            failures += not lost
            if cause.exit_code == USERS_MISTAKE or failures > plan.max_restarts or len(left) < plan.least:
                return cause
            processes = sum(host.slots for host in left)
            notify(str(cause))
            notify(
                f"going on from the newest checkpoint with {len(left)} host{'s' * (len(left) != 1)} "
                f"({', '.join(host.name for host in left)}) and {processes} process{'es' * (processes != 1)}"
            )
            plan = replace(plan, hosts=left)
            while time.monotonic() < safe_at and not requests.exit_code():
                time.sleep(_TICK_SECONDS)
            if code := requests.exit_code():
                return code


def _start(plan: LaunchPlan, requests: StopSignals) -> tuple[WorkersFailed | None, set[Host], float]:
    """Start the launchers of all hosts, and `watch` them until all have ended."""
    output = Output()
    lines: list[HostLine] = []
    try:
        for host, place in zip(plan.hosts, plan.places(), strict=True):
            try:
                lines.append(HostLine(host, place, plan, output))
            except OSError as error:
                raise ConfigError(f"--ssh: {plan.ssh[0]!r} cannot be started ({error.strerror or error})") from error
        return watch(lines, requests, plan.silence_seconds)
    finally:
        for line in lines:
            line.close()
        output.close()


class Output:
    """Prints lines to standard output (1) and standard error (2), in a thread, so that a blocked terminal does not block the run.

    What cannot be written is dropped.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[int, str] | None] = queue.Queue(_MOST_LINES)
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def put(self, number: int, text: str) -> None:
        """Write a line, as soon as that is possible."""
        with suppress(queue.Full):
            self._lines.put_nowait((number, text))

    def close(self) -> None:
        """Write what is left, for some seconds at most."""
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


class HostStream:
    """One stream of a host, from pieces that are cut anywhere: printed lines, and in standard output (1) messages between them."""

    def __init__(self, output: Output, number: int, host: str) -> None:
        self.last = ""
        """The last line that was not empty."""
        self._output = output
        self._number = number
        self._prefix = f"[{host}] "
        self._partial = b""

    def feed(self, data: bytes) -> list[Message]:
        """Take a piece: print the lines that are complete, or too long to wait for their end; returns the complete messages."""
        found: list[Message] = []
        *whole, rest = (self._partial + data).split(b"\n")
        printed = b""
        for line in whole:
            # A message may stand behind the beginning of a printed line, which then goes on after it.
            begin, mark, content = line.partition(BEGIN) if self._number == 1 else (line, b"", b"")
            printed += begin
            try:
                if mark:
                    found.append(messages.parsed(content))
                    continue
            except MessageError:  # It only looks like a message.
                printed += mark + content
            self._put(printed)
            printed = b""
        self._partial = printed + rest
        if len(self._partial) > (MAX_MESSAGE if BEGIN in self._partial else _LONGEST_LINE):
            self.flush()
        return found

    def flush(self) -> None:
        """Print the unfinished line, since nothing more comes."""
        if self._partial:
            self._put(self._partial)
        self._partial = b""

    def _put(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self.last = text.strip() or self.last
        self._output.put(self._number, self._prefix + text)


class HostLine:
    """This end of the connection to one host: the local process, the host's output, and whether the host is alive.

    Raises:
        OSError: when the local command cannot be started.
    """

    def __init__(self, host: Host, place: RankRange, plan: LaunchPlan, output: Output) -> None:
        self.host = host
        self.failure: WorkersFailed | None = None
        self.last_message = time.monotonic()
        """When the host sent its last message; of a failure, when it began."""
        self.lost = False
        self.over = False
        """True if nothing more is to come."""
        self.safe_at = 0.0
        """The time from which on nothing of the run is alive on the host, if it was lost, in seconds of the monotonic clock."""
        self._program = plan.ssh[0]
        self._silence = plan.silence_seconds
        self._beating = False
        self._reported_at: float | None = None
        self._ended_at: float | None = None
        self._killed_at: float | None = None
        self._streams = {number: HostStream(output, number, host.name) for number in (1, 2)}
        # A session of its own, so that the terminal's Ctrl-C does not cut the line that it is to be passed on over.
        self._process = subprocess.Popen(
            plan.arguments(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for pipe in self._pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self.send({"variables": dict(plan.variables), "start": asdict(place)})

    @property
    def _pipes(self) -> dict[int, IO[bytes]]:
        pipes = enumerate((self._process.stdin, self._process.stdout, self._process.stderr))
        return {number: pipe for number, pipe in pipes if pipe is not None}

    def send(self, message: Message) -> None:
        """Send a message to the host. A full pipe loses it: then the host is silent, and will count as lost."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipes[0].fileno(), messages.line(message))

    def kill(self) -> None:
        """Tell the host to end its processes at once."""
        if not self.over and self._reported_at is None and self._killed_at is None:
            self._killed_at = time.monotonic()
            self.send({"kill": True})

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` tell when there is something to read."""
        for number in (1, 2):
            selector.register(self._pipes[number], selectors.EVENT_READ, (self, number))

    def read(self, number: int) -> bool:
        """Read what has come on standard output (1) or standard error (2); False at its end."""
        try:
            data = os.read(self._pipes[number].fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self._streams[number].flush()
            return False
        try:
            for message in self._streams[number].feed(data):
                self._take(message)
        except MessageError as error:
            self.kill()
            self._lose(f"what it has sent makes no sense: {error}")
        return True

    def _take(self, message: Message) -> None:
        if self.over or self._reported_at is not None:
            return
        self.last_message = time.monotonic()
        if "beat" in message:
            self._beating = True
            self.send({"echo": messages.number(message, "beat")})
        elif "end" in message:
            code = messages.number(message, "end", most=MAX_EXIT_CODE)
            text = messages.optional(message, "text", "") or f"ended with exit code {code}"
            noticed = messages.optional(message, "noticed", False)
            self._reported_at = self.last_message
            if code and self._killed_at is None:
                self._fail(text, code, noticed=noticed)
        else:
            raise MessageError(f"a message has neither 'beat' nor 'end': {', '.join(map(repr, message)) or 'nothing'}")

    def check(self, reading: bool) -> None:
        """Find out whether the host has ended or is lost. `reading`: its pipes are still open."""
        if self.over:
            return
        now = time.monotonic()
        if self._ended_at is None and self._process.poll() is not None:
            self._ended_at = now
        # A process that somebody left behind may keep the pipes for ever.
        closed = self._ended_at is not None and (not reading or now - self._ended_at > _LINGER_SECONDS)
        quiet = now - max(self.last_message, self._killed_at or 0.0)
        if self._reported_at is not None:
            self.over = closed or now - self._reported_at > _LINGER_SECONDS
        elif closed:
            last_line = f": {self._streams[2].last}" if self._streams[2].last else ""
            code = self._process.returncode
            self._lose(
                f"{self._program!r} ended with exit code {code} before the host had said how its part ended{last_line}"
            )
        elif quiet > (self._silence if self._beating or self._killed_at is not None else START_SECONDS):
            gone = "; the host, its network or its connection is gone" if self._beating else " since it was to start"
            self._lose(f"nothing has been heard for {now - self.last_message:.0f} s{gone}")

    def _lose(self, text: str) -> None:
        known = self.last_message if self._beating else time.monotonic()
        self.safe_at = known + self._silence + _MARGIN_SECONDS
        self.over = self.lost = True
        self._fail(text, 1)

    def _fail(self, text: str, exit_code: int, *, noticed: bool = False) -> None:
        self.failure = WorkersFailed(message=f"host {self.host.name}: {text}", exit_code=exit_code, noticed=noticed)

    def close(self) -> None:
        """End the local process of the connection; the host ends its own when the connection is gone."""
        with suppress(BrokenPipeError):
            self._pipes[0].close()
        for harder in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, harder)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2.0)
        for number in (1, 2):
            self._pipes[number].close()


def watch(
    lines: Sequence[HostLine], requests: StopSignals, silence_seconds: float
) -> tuple[WorkersFailed | None, set[Host], float]:
    """Print what hosts print and pass signals on until all have ended; when one fails, end all.

    Returns the failure that caused the others, the lost hosts, and the time from which on nothing is alive on them.
    """

    def signal_all(number: int) -> None:
        for each in lines:
            each.send({"signal": number})

    def kill_all() -> None:
        for each in lines:
            each.kill()

    failed_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for each in lines:
            each.register(selector)
        while not all(each.over for each in lines):
            if not selector.get_map():
                time.sleep(_TICK_SECONDS)
            for key, _ in selector.select(_TICK_SECONDS) if selector.get_map() else ():
                host_line, number = key.data
                if not host_line.read(number):
                    selector.unregister(key.fileobj)
            reading = {id(key.data[0]) for key in selector.get_map().values()}
            for each in lines:
                each.check(id(each) in reading)
            requests.pass_on(signal_all, kill_all)
            failures = [each.failure for each in lines if each.failure]
            now = time.monotonic()
            failed_at = now if failures and failed_at is None else failed_at
            # A host that only noticed another's failure waits until the other one has reported it, or is lost.
            known = any(not failure.noticed for failure in failures)
            late = failed_at is not None and now > failed_at + silence_seconds + _MARGIN_SECONDS
            if (known or late) and not requests.passed_on:
                kill_all()
    found = [(each.failure.noticed, each.last_message, index) for index, each in enumerate(lines) if each.failure]
    cause = lines[min(found)[2]].failure if found else None
    return cause, {each.host for each in lines if each.lost}, max(each.safe_at for each in lines)
