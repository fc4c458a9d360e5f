"""The nursery: a process that imports what ranks need once, and forks them from itself.

A fork takes milliseconds, where imports take seconds in each rank, and forks share the pages of what is imported. The launcher
itself imports nothing: meanwhile it answers other hosts and signals. Both ends speak JSON over a pair of connected sockets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any

from zeromesh.environment import (
    kept_environment,
    launched_by,
    python_arguments,
    setting,
)

_MODULE = "zeromesh.launch.fork_server"
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_LOST = -int(signal.SIGKILL)
"""The exit code of forks whose nursery has ended: the kernel kills them with it."""


class Fork:
    """A process that the nursery has forked; `returncode` as of `subprocess.Popen`, None while it runs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | Any = None

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        self._nursery.receive()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the process; returns its exit code."""
        while self.returncode is None:
            self._nursery.receive(seconds=None)
        return int(self.returncode)


class Nursery:
    """The launcher's end of a nursery that imports `modules`, with `variables` in its environment. The kernel kills it when this
    process ends, and its forks with it."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], notify: Callable[[str], object]) -> None:
        self._notify = notify
        self._connection, theirs = Pipe()
        words = python_arguments(_MODULE, (str(theirs.fileno()), *modules))
        # NumPy's library would start threads when it is imported; ranks have no use for them.
        alone = {} if setting(_NUMPY_THREADS) else {_NUMPY_THREADS: "1"}
        with theirs, kept_environment({**variables, **alone, **launched_by(os.getpid())}):
            command, kept = [sys.executable, *words], [theirs.fileno()]
            self._process = subprocess.Popen(command, pass_fds=kept, start_new_session=True)
        self._ready = False
        self._refusal: str | None = None
        self._forked: Fork | None = None
        self._forks: dict[int, Fork] = {}

    @property
    def settled(self) -> bool:
        """True once the imports are done, or have failed; `fork` does not wait then."""
        return self._ready or self._refusal is not None

    @property
    def lost(self) -> bool:
        """True if this nursery has forked, and has ended."""
        return self._ready and self._refusal is not None

    def fork(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Fork | None:
        """Fork a process that runs `python ARGUMENTS` with these variables too; None where the nursery cannot."""
        self._forked = None
        with suppress(OSError):
            self._connection.send_bytes(json.dumps({"arguments": arguments, "variables": variables}).encode())
            while self._forked is None and self._refusal is None:
                self.receive(seconds=None)
        return self._forked

    def receive(self, seconds: float | None = 0.0) -> None:
        """Handle the messages that have arrived, after waiting `seconds` for the first; None: until one arrives."""
        try:
            while self._refusal is None and self._connection.poll(seconds):
                seconds = 0.0
                message = json.loads(self._connection.recv_bytes())
                if "obstacle" in message:
                    self._ready, self._refusal = message["obstacle"] is None, message["obstacle"]
                    if self._refusal is not None:
                        self._notify(f"each rank imports for itself: {self._refusal}")
                if "forked" in message:
                    self._forked = self._forks[message["forked"]] = Fork(self, message["forked"])
                if "ended" in message:
                    self._forks.pop(message["ended"]).returncode = message["code"]
        except (EOFError, OSError):
            self._refusal = f"the process that ranks are forked from has ended with exit code {self._process.wait()}"
            while self._forks:
                self._forks.popitem()[1].returncode = _LOST

    def close(self) -> None:
        """Kill the nursery, and all that it has forked."""
        self._process.kill()
        self._process.wait()
        self.receive()
        self._connection.close()
