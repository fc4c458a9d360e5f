"""The process of a `nursery`, `python -m zeromesh.launch.fork_server DESCRIPTOR MODULE...`: imports, then forks at each request."""

import atexit
import ctypes
import gc
import json
import mmap
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path

import psutil

from zeromesh.environment import IMPORTED, RECOVERS, die_with_parent, export, launched_by
from zeromesh.files import flush_files
from zeromesh.launch.signals import STOP_SIGNALS, handled_signals, hold_signals


def _obstacle() -> str | None:
    """Return the reason why this process cannot be forked from: a thread or a device would be missing in a fork."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(names) > 1:
        return f"an imported module has started a thread ({', '.join(sorted(names)[1:])})"
    accelerator = sys.modules.get("zeromesh.offload.accelerator")
    return "an imported module uses a GPU already" if accelerator and accelerator.is_initialized() else None


def _let_go_of_code() -> None:
    """Unmap the code and constants of libraries that imports have read: forks map what they need, and this process needs little."""
    unmap = ctypes.CDLL(None).madvise
    for area in psutil.Process().memory_maps(grouped=False):
        if area.path.startswith("/") and "w" not in area.perms and not area.anonymous:
            start, end = (int(each, 16) for each in area.addr.split("-"))
            unmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _serve(connection: Connection) -> list[str] | None:
    """Fork a process for each request, and report the ends of the forks. Returns its arguments in a fork, None at the end."""
    ended, wake = Pipe(duplex=False)
    os.set_blocking(wake.fileno(), False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: set[int] = set()
    while True:
        ready = wait([connection, ended])
        if ended in ready:
            os.read(ended.fileno(), 1 << 10)
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                running.remove(pid)
                connection.send_bytes(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
        if connection in ready:
            try:
                request = json.loads(connection.recv_bytes())
                handles = {name: recv_handle(connection) for name in request["handles"]}
            except EOFError:
                return None
            leads, not_yet = Pipe(duplex=False)
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                hold_signals(RECOVERS in request["variables"])
                os.setsid()
                for each in (connection, ended, wake, leads, not_yet):
                    each.close()
                numbers = {name: f"{os.getpid()}:{number}" for name, number in handles.items()}
                export({**request["variables"], **launched_by(parent), **numbers})
                die_with_parent()
                if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by a fork.
                    sys.modules["numpy.random"].seed()
                return list(request["arguments"])
            running.add(pid)
            for number in handles.values():
                os.close(number)
            not_yet.close()
            wait([leads])  # Until the fork leads a group of its own, signals to that would reach nobody.
            leads.close()
            connection.send_bytes(json.dumps({"forked": pid}).encode())


def _run(arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS`, which begin with `-m MODULE` or a script, in this fork; returns the exit code."""
    # The module search path is that of the nursery, which has this option too.
    words = [*arguments[arguments[0] == "-P" :]]
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
        flush_files()  # An exit function may hide files from the collector, where they are found.
        atexit._run_exitfuncs()
    flush_files()
    os._exit(code)


# Of ended forks the descriptor in `_serve` learns by a handler alone. A stop that comes to all processes of a run is for the ranks,
# which save: they would end with this one. Forks have the handlers that were there before.
@handled_signals((*STOP_SIGNALS, signal.SIGCHLD), lambda *_: None)
def main() -> None:
    descriptor, *modules = sys.argv[1:]
    die_with_parent()
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
    _let_go_of_code()
    connection.send_bytes(json.dumps({"obstacle": obstacle if modules else None}).encode())
    export({IMPORTED: str(time.monotonic() - began)})
    arguments = None if obstacle and modules else _serve(connection)
    if arguments is not None and obstacle:  # It is there before any import, as by a `sitecustomize`.
        os.execv(sys.executable, [sys.executable, *arguments])
    if arguments is not None:
        _end(_run(arguments))


if __name__ == "__main__":
    main()
