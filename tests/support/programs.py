"""Programs that start at once: each is forked from a process that has imported the heavy libraries.

`Programs` writes a folder with `python`, `torchrun` and `zeromesh`, to be the first of PATH. Each of them hands its words, its
folder, its variables and its streams over, passes signals on, and ends as the forked process ends. Ranks that a launcher starts as
`sys.executable` come the same way, so that a command with ranks imports nothing either. What is printed is the same.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from tests.support.waiting import wait_for
from tests.support.workers import Workers

_CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
kept = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
there = socket.socket(socket.AF_UNIX)
def tell(number, _):
    there.send(bytes([number]))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, tell)
there.connect({address!r})
asked = dict(words=sys.argv[1:], name={name!r}, folder=os.getcwd(), environment=dict(os.environ), parent=os.getppid())
said = json.dumps(dict(asked, kept=kept)).encode()
socket.send_fds(there, [len(said).to_bytes(8, "big")], kept)
there.sendall(said)
code = int(there.recv(100) or b"-9")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_MODULES = {"zeromesh": "zeromesh", "torchrun": "torch.distributed.run"}
"""Commands by the module that they run."""


class Programs:
    """The process that programs are forked from, which is forked from that of the workers, and `bin`, the folder of their names."""

    def __init__(self, folder: Path, workers: Workers) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        address = str(folder / "programs")
        for name in ("python", *_MODULES):
            text = _CLIENT.format(python=sys.executable, address=address, name=name)
            (self.bin / name).write_text(text, encoding="utf-8")
            (self.bin / name).chmod(0o755)
        self._pid = workers.fork_programs(address, str(self.bin))
        wait_for(Path(f"{address}.ready").exists, 120.0)

    def close(self) -> None:
        """End the process that programs are forked from, and with it all programs."""
        os.kill(self._pid, signal.SIGKILL)


# In the process that programs are forked from


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _receive(connection: socket.socket) -> dict[str, Any]:
    size, streams, _, _ = socket.recv_fds(connection, 8, 64)
    said = b""
    while len(said) < int.from_bytes(size, "big"):
        said += connection.recv(1 << 16)
    return {**json.loads(said), "streams": streams}


def _become(asked: dict[str, Any], executable: str) -> list[str]:
    """In the child: its folder, its streams, its variables; returns the words as `python` would be given them."""
    die_with_parent()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    free = max([*asked["kept"], *asked["streams"]]) + 1
    copies = [fcntl.fcntl(stream, fcntl.F_DUPFD, free) for stream in asked["streams"]]
    for stream in asked["streams"]:
        os.close(stream)
    for number, copy in zip(asked["kept"], copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    # The objects stay, as modules that are imported have them.
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    constants.HF_HUB_OFFLINE = "HF_HUB_OFFLINE" in os.environ  # which the library has read when it was imported
    sys.executable = executable
    own, parent = os.getpid(), os.getppid
    # Whom this program, and no fork of it, takes for its launcher.
    os.getppid = lambda: asked["parent"] if os.getpid() == own else parent()
    module = _MODULES.get(asked["name"])
    return ["-P", "-m", module, *asked["words"]] if module else asked["words"]


def _run(words: list[str]) -> None:
    isolated = False
    while words[0] in ("-P", "-u"):
        isolated, words = isolated or words[0] == "-P", words[1:]
    sys.path[:] = [entry for entry in sys.path if not Path(entry).is_relative_to(Path(__file__).parents[1])]
    if words[0] in ("-m", "-c"):
        sys.path[:0] = [] if isolated else [os.getcwd()]
        sys.argv = ["-c" if words[0] == "-c" else words[1], *words[2:]]
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.path[:0] = [] if isolated else [str(Path(words[0]).resolve().parent)]
    sys.argv = words
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__file__, main.__builtins__ = words[0], __builtins__  # type: ignore[attr-defined]
    exec(compile(Path(words[0]).read_text(encoding="utf-8"), words[0], "exec"), vars(main))


def serve(address: str, folder: str) -> None:
    """Fork a program for each that connects; tells each how its program has ended. In a program it returns, and its interpreter
    ends as one that has run the program."""
    executable = str(Path(folder, "python"))
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    chosen = selectors.DefaultSelector()
    for each in (reader, listener):
        chosen.register(each, selectors.EVENT_READ)
    programs: dict[socket.socket, int] = {}
    Path(f"{address}.ready").touch()
    while True:
        for key, _ in chosen.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                asked = _receive(connection)
                pid = os.fork()
                if pid == 0:
                    for each in (reader, writer, listener, connection, *programs):
                        each.close()
                    chosen.close()
                    _run(_become(asked, executable))
                    return
                for stream in asked["streams"]:
                    os.close(stream)
                programs[connection] = pid
                chosen.register(connection, selectors.EVENT_READ)
            elif key.fileobj is reader:
                reader.recv(1 << 10)
                _tell_ends(programs, chosen)
            elif key.fileobj in programs:
                connection, pid = key.fileobj, programs[key.fileobj]
                for number in connection.recv(100) or [signal.SIGKILL]:
                    os.kill(pid, number)
                    if number == signal.SIGKILL:
                        chosen.unregister(connection)


def _tell_ends(programs: dict[socket.socket, int], chosen: selectors.BaseSelector) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            (connection,) = (each for each, pid in programs.items() if pid == ended[0])
            with contextlib.suppress(OSError, KeyError):
                chosen.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
            connection.close()
            del programs[connection]


if __name__ == "__main__":
    serve(*sys.argv[1:])
