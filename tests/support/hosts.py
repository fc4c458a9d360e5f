"""Hosts on one machine: network namespaces with addresses of their own, joined by a bridge, whose cables can be pulled.

A host also has a name and process ids of its own, so that its ranks share no memory with those of another. As on many systems,
its own name leads to its loopback there.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SHELL = Path(__file__).parent / "remote_shell.py"
PORT = 7022


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Namespaces `PREFIX-NAME`, and one without name where the bridge is, which reaches them all."""

    prefix: str
    names: tuple[str, ...]
    folder: Path

    def address(self, name: str) -> str:
        return f"10.77.7.{2 + self.names.index(name)}"

    @property
    def middle(self) -> tuple[str, ...]:
        """Before a command: run it where the bridge is."""
        return ("ip", "netns", "exec", self.prefix)

    @property
    def ssh(self) -> str:
        addresses = ",".join(f"{name}={self.address(name)}" for name in self.names)
        return f"{sys.executable} -S {SHELL} {PORT} {addresses}"

    def hostfile(self, path: Path, slots: int = 1) -> Path:
        path.write_text("".join(f"{name} slots={slots}\n" for name in self.names))
        return path

    def pull(self, name: str) -> None:
        _ip("-n", self.prefix, "link", "set", f"to-{name}", "down")

    def listening(self, name: str) -> set[str]:
        """The addresses at which anything listens on a host."""
        table = _ip("netns", "exec", f"{self.prefix}-{name}", "ss", "-Hltn").splitlines()
        return {line.split()[3].rpartition(":")[0] for line in table}

    def processes(self, name: str) -> list[str]:
        """The commands that run on a host, besides what makes it one."""
        found = []
        for pid in _ip("netns", "pids", f"{self.prefix}-{name}").split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command and "remote_shell.py serve" not in command:
                found.append(command)
        return found


@contextmanager
def hosts(folder: Path, *names: str) -> Iterator[Hosts]:
    """Such hosts, for a while, with files in `folder`; skips the test where they are not permitted."""
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"hosts as network namespaces need root, ip and unshare{'; missing: ' * bool(missing)}{', '.join(missing)}")
    made = Hosts(prefix=f"zm{os.getpid()}", names=names, folder=folder)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        try:
            _connect(made)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        servers += [_serve(made, name) for name in names]
        yield made
    finally:
        for server in servers:
            server.send_signal(signal.SIGKILL)  # `unshare --kill-child` takes all the host's processes along
            server.wait()
        for namespace in (made.prefix, *(f"{made.prefix}-{name}" for name in names)):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False, timeout=30)


def _connect(made: Hosts) -> None:
    middle = made.prefix
    _ip("netns", "add", middle)
    _ip("-n", middle, "link", "set", "lo", "up")
    _ip("-n", middle, "link", "add", "bridge0", "type", "bridge")
    _ip("-n", middle, "address", "add", "10.77.7.1/24", "dev", "bridge0")
    _ip("-n", middle, "link", "set", "bridge0", "up")
    for name in made.names:
        host, cable = f"{made.prefix}-{name}", f"to-{name}"
        _ip("netns", "add", host)
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", middle, "link", "add", cable, "type", "veth", "peer", "name", "wire0", "netns", host)
        _ip("-n", middle, "link", "set", cable, "master", "bridge0", "up")
        _ip("-n", host, "address", "add", f"{made.address(name)}/24", "dev", "wire0")
        _ip("-n", host, "link", "set", "wire0", "up")


def _serve(made: Hosts, name: str) -> subprocess.Popen[bytes]:
    table = made.folder / f"hosts-of-{name}"
    others = "".join(f"{made.address(other)} {other}\n" for other in made.names if other != name)
    table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
    server = f"{sys.executable} -S {SHELL} serve {made.address(name)} {PORT}"
    inside = f"hostname {name} && mount --bind {table} /etc/hosts && exec {server}"
    own = ("unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", inside)
    process = subprocess.Popen(["ip", "netns", "exec", f"{made.prefix}-{name}", *own])
    probe = [*made.middle, *made.ssh.split(), name, "true"]
    deadline = time.monotonic() + 20
    while subprocess.run(probe, capture_output=True, check=False, timeout=20).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.skip("no process and name spaces here")
        time.sleep(0.1)
    return process


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=30).stdout
