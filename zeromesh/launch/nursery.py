"""The nursery: a process that imports what ranks need once, and forks them from itself.
A fork takes milliseconds, where imports take seconds in each rank, and forks share the pages of what is imported. The launcher
itself imports nothing: meanwhile it answers other hosts and signals. Both ends speak JSON over a pair of connected sockets."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle

from zeromesh.environment import kept_environment, launched_by, python_arguments, setting
from zeromesh.errors import CollectiveError

_MODULE = "zeromesh.launch.fork_server"
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_LOST = -int(signal.SIGKILL)  # the exit code of forks whose nursery has ended: the kernel kills them with it


class Fork:
    """A process that the nursery has forked; `returncode` as of `subprocess.Popen`, None while it runs."""

    def __init__(self, nursery: "Nursery", pid: int, returncode: int | None = None) -> None:
        self._nursery, self.pid, self.returncode = nursery, pid, returncode

    def poll(self) -> int | None:
        self._nursery.receive()
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self._nursery.receive(seconds=None)
        return self.returncode


class Nursery:
    """The launcher's end of a nursery that imports `modules`, with `variables` set. It and its forks end when this process does."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], notify: Callable[[str], object]) -> None:
        self._variables, self._notify = variables, notify
        self._start(modules)

    def _start(self, modules: Sequence[str]) -> None:
        self._imports = bool(modules)
        self._connection, theirs = Pipe()
        # NumPy's library would start threads when it is imported; ranks have no use for them.
        alone = {} if setting(_NUMPY_THREADS) else {_NUMPY_THREADS: "1"}
        with theirs, kept_environment({**self._variables, **alone, **launched_by(os.getpid())}):
            command = [sys.executable, *python_arguments(_MODULE, (str(theirs.fileno()), *modules))]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self.ready = self.lost = False
        """`ready`: imports are done, so that `fork` does not wait. `lost`: the process has ended after that."""
        self._forked: Fork | None = None
        self._forks: dict[int, Fork] = {}

    def fork(self, arguments: Sequence[str], variables: Mapping[str, str], handles: Mapping[str, int]) -> Fork:
        """Fork a process that runs `python ARGUMENTS` with these variables too, and with descriptors `handles`, whose numbers there
        are variables; where the nursery is lost, one that is."""
        self._forked, request = None, {"arguments": arguments, "variables": variables, "handles": list(handles)}
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(request).encode())
            for descriptor in handles.values():
                send_handle(self._connection, descriptor, self._process.pid)
            while self._forked is None and not self.lost:
                self.receive(seconds=None)
        return self._forked or Fork(self, 0, _LOST)

    def receive(self, seconds: float | None = 0.0) -> None:
        """Handle the messages that have arrived, after waiting `seconds` for the first; None: until one arrives."""
        try:
            while not self.lost and self._connection.poll(seconds):
                seconds = 0.0
                message = json.loads(self._connection.recv_bytes())
                if "obstacle" in message:
                    self.ready = message["obstacle"] is None
                    if not self.ready:
                        self._import_nothing(message["obstacle"])
                if "forked" in message:
                    self._forked = self._forks[message["forked"]] = Fork(self, message["forked"])
                if "ended" in message:
                    self._forks.pop(message["ended"]).returncode = message["code"]
        except (EOFError, OSError):
            if not self.ready:
                self._import_nothing(f"the process that imports for all ended with exit code {self._process.wait()}")
                return
            self.lost = True
            while self._forks:
                self._forks.popitem()[1].returncode = _LOST

    def _import_nothing(self, reason: str) -> None:
        """Start anew without modules, so that each fork imports for itself. Raises `CollectiveError` if it was started so."""
        if not self._imports:
            raise CollectiveError(f"{reason}, before it imported anything; look at what Python itself runs (sitecustomize.py)")
        self._notify(f"each rank imports for itself: {reason}")
        self.close()
        self._start(())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self.ready:
            self.receive()
        self._connection.close()
