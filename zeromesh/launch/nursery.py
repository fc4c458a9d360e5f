"""The nursery: a process that imports what ranks need once, and forks them from itself.

A fork takes milliseconds, where imports take seconds in each rank, and forks share the pages of what is imported. The launcher
itself imports nothing: meanwhile it answers other hosts and signals. Both ends speak JSON over a pair of connected sockets.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from zeromesh.environment import (
    IMPORTED,
    die_with_launcher,
    export,
    kept_environment,
    launched_by,
    python_arguments,
    setting,
)

_MODULE = "zeromesh.launch.nursery"
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


# The process of the nursery


def _obstacle() -> str | None:
    """Return the reason why this process cannot be forked from: a thread or a device would be missing in a fork."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(names) > 1:
        return f"an imported module has started a thread ({', '.join(sorted(names)[1:])})"
    accelerator = sys.modules.get("zeromesh.offload.accelerator")
    return "an imported module uses a GPU already" if accelerator and accelerator.is_initialized() else None


def _serve(connection: Connection) -> list[str] | None:
    """Fork a process for each request, and report the ends of the forks. Returns its arguments in a fork, None at the end."""
    ended, wake = Pipe(duplex=False)
    os.set_blocking(wake.fileno(), False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # Without a handler the descriptor is not written to.
    running: set[int] = set()
    while True:
        ready = wait([connection, ended])
        if ended in ready:
            os.read(ended.fileno(), 1 << 10)
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                running.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                connection.send_bytes(json.dumps({"ended": pid, "code": code}).encode())
        if connection in ready:
            try:
                request = json.loads(connection.recv_bytes())
            except EOFError:
                return None
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)
                for each in (connection, ended, wake):
                    each.close()
                os.setsid()
                export({**request["variables"], **launched_by(parent)})
                die_with_launcher()
                return list(request["arguments"])
            running.add(pid)
            connection.send_bytes(json.dumps({"forked": pid}).encode())


def _run(arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS`, which begin with `-m MODULE` or a script, in this fork; returns the exit code."""
    words = [
        *arguments[arguments[0] == "-P" :]
    ]  # The module search path is that of the nursery, which has this option too.
    is_module = words[0] == "-m"
    sys.argv[:] = words[is_module:]
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())  # The hook records the error for the launcher.
        return 1
    return 0


def _end(code: int) -> None:
    """End this fork as an interpreter ends, but without taking the modules apart, which takes a second."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def main() -> None:
    """Run the nursery: `python -m zeromesh.launch.nursery DESCRIPTOR MODULE...`."""
    descriptor, *modules = sys.argv[1:]
    die_with_launcher()
    connection, began = Connection(int(descriptor)), time.monotonic()
    # torch asks the driver's management library then, so that a fork can still begin to use a GPU.
    export({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    gc.disable()  # Imports create almost no garbage, and collecting it takes a second.
    try:
        for module in modules:
            import_module(module)
        obstacle = _obstacle()
    except Exception as error:  # noqa: BLE001 - The ranks will meet it too, and report it whole.
        obstacle = f"{type(error).__name__}: {error}"
    gc.freeze()
    gc.enable()
    connection.send_bytes(json.dumps({"obstacle": obstacle}).encode())
    export({IMPORTED: str(time.monotonic() - began)})
    arguments = None if obstacle else _serve(connection)
    if arguments is not None:
        _end(_run(arguments))


if __name__ == "__main__":
    main()
