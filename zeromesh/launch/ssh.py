"""One start of a run on several hosts: a command on each over ssh, watched from here until all of them have ended.

A host counts as *lost* when it sends nothing for a while, or when its connection ends before it has reported how its
processes ended. Whatever fails, the other hosts are ended too; no wait here is without a bound.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import IO

from zeromesh.launch import messages
from zeromesh.launch.heartbeat import Splitter, line
from zeromesh.launch.hostfile import Host
from zeromesh.launch.log_forwarding import Lines, Output
from zeromesh.launch.messages import MAX_EXIT_CODE, Message, MessageError
from zeromesh.launch.stop_requests import StopSignals

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """How commands get to hosts: `ssh` is called with `HOST COMMAND`, and `variables` are sent over standard input."""

    ssh: tuple[str, ...] = SSH
    directory: str
    python_path: str | None
    variables: Mapping[str, str]
    silence_seconds: float

    def arguments(self, host: Host, command: Sequence[str]) -> list[str]:
        """The local command that runs `command` on `host`, in the same directory."""
        path = [f"PYTHONPATH={self.python_path}"] if self.python_path else []
        words = ["env", *path, *command] if path else list(command)
        return [*self.ssh, host.name, f"cd {shlex.quote(self.directory)} && exec {shlex.join(words)}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFailure:
    """Why a host ended, and the exit code for the command.

    `at` is when it began, in seconds of the monotonic clock; of a lost host, the time of its last message. `noticed`: it followed
    from a failure elsewhere. `apart`: the host and the others did not meet.
    """

    host: Host
    text: str
    exit_code: int
    at: float
    lost: bool = False
    noticed: bool = False
    apart: bool = False

    def __str__(self) -> str:
        return f"host {self.host.name}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a start ended: with the failure that caused the others, or None, and the failures of all hosts.

    From `safe_at` on, in seconds of the monotonic clock, nothing of the start is alive on hosts that were lost.
    """

    cause: HostFailure | None
    failures: tuple[HostFailure, ...]
    safe_at: float


class _State(IntEnum):
    """A host only goes forward through these."""

    STARTING = 1
    RUNNING = 2
    REPORTED = 3  # how its processes ended; the connection is still there
    OVER = 4


class HostLine:
    """This end of the connection to one host: the local process, the host's output, and whether the host is alive.

    Raises:
        OSError: when the local command cannot be started.
    """

    def __init__(self, host: Host, arguments: Sequence[str], reach: Reach, output: Output) -> None:
        self.host = host
        self.failure: HostFailure | None = None
        self.safe_at = 0.0
        """The time from which on nothing of the run is alive on the host, if it was lost; see `Outcome`."""
        self._program = arguments[0]
        self._silence = reach.silence_seconds
        self._state = _State.STARTING
        self._last_message = self._since = time.monotonic()
        self._ended_at: float | None = None
        self._killed_at: float | None = None
        self._splitter = Splitter()
        self._lines = {number: Lines(output, number, host.name) for number in (1, 2)}
        # A session of its own, so that the terminal's Ctrl-C does not cut the line that it is to be passed on over.
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        for pipe in self._pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self.send({"variables": dict(reach.variables)})

    @property
    def _pipes(self) -> dict[int, IO[bytes]]:
        pipes = enumerate((self._process.stdin, self._process.stdout, self._process.stderr))
        return {number: pipe for number, pipe in pipes if pipe is not None}

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self._state is _State.OVER

    def _go(self, state: _State) -> None:
        if state <= self._state:
            raise RuntimeError(f"host {self.host.name}: {self._state.name} is not followed by {state.name}")
        self._state, self._since = state, time.monotonic()

    def send(self, message: Message) -> None:
        """Send a message to the host. A full pipe loses it: then the host is silent, and will count as lost."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipes[0].fileno(), line(message))

    def kill(self) -> None:
        """Tell the host to end its processes at once."""
        if self._state <= _State.RUNNING and self._killed_at is None:
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
            if number == 1:
                self._lines[number].feed(self._splitter.flush())
            self._lines[number].flush()
            return False
        if number == 1:
            data, found = self._splitter.feed(data)
            try:
                for message in found:
                    self._take(message)
            except MessageError as error:
                self.kill()
                self._lose(f"what it has sent makes no sense: {error}")
        self._lines[number].feed(data)
        return True

    def _take(self, message: Message) -> None:
        if self._state >= _State.REPORTED:
            return
        self._last_message = time.monotonic()
        if "beat" in message:
            if self._state is _State.STARTING:
                self._go(_State.RUNNING)
            self.send({"echo": messages.number(message, "beat")})
        elif "end" in message:
            code = messages.number(message, "end", most=MAX_EXIT_CODE)
            failure = HostFailure(
                host=self.host,
                text=messages.text(message, "text") or f"ended with exit code {code}",
                exit_code=code,
                at=self._last_message,
                noticed=messages.truth(message, "noticed"),
                apart=messages.truth(message, "apart"),
            )
            self._go(_State.REPORTED)
            if code and self._killed_at is None:
                self.failure = failure
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
        beating = self._state is _State.RUNNING
        quiet = now - max(self._last_message, self._killed_at or 0.0)
        if self._state is _State.REPORTED:
            if closed or now - self._since > _LINGER_SECONDS:
                self._go(_State.OVER)
        elif closed:
            last_line = f": {self._lines[2].last}" if self._lines[2].last else ""
            code = self._process.returncode
            self._lose(
                f"{self._program!r} ended with exit code {code} before the host had said how its part ended{last_line}"
            )
        elif quiet > (self._silence if beating or self._killed_at is not None else START_SECONDS):
            gone = "; the host, its network or its connection is gone" if beating else " since it was to start"
            self._lose(f"nothing has been heard for {now - self._last_message:.0f} s{gone}")

    def _lose(self, text: str) -> None:
        known = self._last_message if self._state is _State.RUNNING else time.monotonic()
        self.safe_at = known + self._silence + _MARGIN_SECONDS
        self._go(_State.OVER)
        self.failure = HostFailure(host=self.host, text=text, exit_code=1, at=self._last_message, lost=True)

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


def watch(lines: Sequence[HostLine], requests: StopSignals, silence_seconds: float) -> Outcome:
    """Print what hosts print and pass signals on until all have ended; when one fails, end all. Closes the lines."""
    failed_at: float | None = None
    with selectors.DefaultSelector() as selector:
        try:
            for each in lines:
                each.register(selector)
            while not all(each.over for each in lines):
                _read(selector)
                reading = {id(key.data[0]) for key in selector.get_map().values()}
                for each in lines:
                    each.check(id(each) in reading)
                _pass_on(lines, requests)
                failures = [each.failure for each in lines if each.failure]
                now = time.monotonic()
                failed_at = now if failures and failed_at is None else failed_at
                # A host that only noticed another's failure waits until the other one has reported it, or is lost.
                known = any(not failure.noticed for failure in failures)
                late = failed_at is not None and now > failed_at + silence_seconds + _MARGIN_SECONDS
                if (known or late) and not requests.passed_on:
                    for each in lines:
                        each.kill()
        finally:
            for each in lines:
                each.close()
    found = tuple(each.failure for each in lines if each.failure)
    cause = min(found, key=lambda failure: (failure.noticed, failure.at), default=None)
    return Outcome(cause=cause, failures=found, safe_at=max(each.safe_at for each in lines))


def _read(selector: selectors.BaseSelector) -> None:
    if not selector.get_map():
        time.sleep(_TICK_SECONDS)
        return
    for key, _ in selector.select(_TICK_SECONDS):
        host_line, number = key.data
        if not host_line.read(number):
            selector.unregister(key.fileobj)


def _pass_on(lines: Sequence[HostLine], requests: StopSignals) -> None:
    """Pass signals on: the first one lets hosts end in order, a second one ends them at once."""
    while requests.pending:
        number = requests.pending.pop(0)
        for each in lines:
            if requests.passed_on:
                each.kill()
            else:
                each.send({"signal": number})
        requests.passed_on = True
