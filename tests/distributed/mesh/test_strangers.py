"""What goes on between the processes of a run is closed to other users of the machine, and listens at no other address of it."""

import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.programs import Programs
from tests.support.waiting import wait_for
from zeromesh.mesh.network_interfaces import by_address, is_loopback

NOBODY = 65534
LISTEN = "0A"
ACCEPTS = 0x10000
WORKER = """\
import os, sys, time, torch
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.environment import read_environment
environment = read_environment()
mesh = Mesh(MeshShape(shard=2), environment, device=torch.device("cpu"), timeout_seconds=20.0)
folder, total = sys.argv[1], torch.zeros(4, dtype=torch.float64)
os.symlink(str(os.getpid()), f"{folder}/there-{environment.rank}")
while not os.path.exists(f"{folder}/enough"):
    time.sleep(0.05)
for step in range(50):
    part = torch.full((4,), float(step * (environment.rank + 1)), dtype=torch.float64)
    mesh.world.all_reduce(part, "sum")
    total += part
assert total.tolist() == [3.0 * sum(range(50))] * 4, total
mesh.close()
"""
DRIVER = """\
import os, sys
from zeromesh.launch.rendezvous import WorkersFailed, launch_workers
os.symlink(str(os.getpid()), f"{sys.argv[2]}/there-launcher")
found = launch_workers(sys.argv[1:], processes=2)
sys.exit(str(found) if isinstance(found, WorkersFailed) else found)
"""


class Planted:
    """Runs a command as whoever unpickles it: it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mknod, (str(self.path),)


PROCESSES = ("there-0", "there-1", "there-launcher")


@dataclass(frozen=True)
class Run:
    """A run of two ranks that waits until it is told to go on."""

    process: subprocess.Popen[str]
    folder: Path
    pids: list[int]
    tcp: list[tuple[str, int]]
    """The addresses and ports at which its processes listen."""
    unix: list[str]
    """The names of their Unix sockets that take connections."""
    stores: list[tuple[str, int]]
    """Those of `tcp` that answer as a store of torch does."""

    def end(self) -> None:
        """Let it go on to its end, which has to be a good one."""
        (self.folder / "enough").touch()
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors


@pytest.fixture(scope="module")
def run(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    for name, text in (("worker.py", WORKER), ("driver.py", DRIVER)):
        (folder / name).write_text(text)
    command = [str(programs.bin / "python"), str(folder / "driver.py"), str(folder / "worker.py"), str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)})
    wait_for(lambda: process.poll() is not None or all((folder / each).is_symlink() for each in PROCESSES), 60)
    assert process.poll() is None, process.communicate()[1]
    pids = [int((folder / each).readlink().name) for each in PROCESSES]
    tcp, unix = listening(pids)
    yield Run(process, folder, pids, tcp, unix, stores(tcp))
    process.kill()
    process.wait()


def listening(pids: Sequence[int]) -> tuple[list[tuple[str, int]], list[str]]:
    """The addresses and ports at which processes listen, and the names of their Unix sockets."""
    links = [os.readlink(each) for pid in pids for each in _descriptors(pid)]
    mine = {link.partition("[")[2].rstrip("]") for link in links if link.startswith("socket:")}
    tcp: list[tuple[str, int]] = []
    unix = []
    for name, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for words in map(str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:]):
            if words[3] == LISTEN and words[9] in mine:
                address, _, port = words[1].partition(":")
                raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                tcp.append((socket.inet_ntop(kind, raw), int(port, 16)))
    for words in map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:]):
        if words[6] in mine and len(words) > 7 and words[5] == "01" and int(words[3], 16) & ACCEPTS:
            unix.append(words[7])
    return tcp, unix


def _descriptors(pid: int) -> Iterator[Path]:
    for each in Path(f"/proc/{pid}/fd").iterdir():
        if each.is_symlink():
            yield each


def as_nobody(act: Callable[[], object]) -> str:
    """What `act` returns, or the error that it ends in, as text, in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = f"{act()}"
        except BaseException as error:  # noqa: BLE001 - the parent is told
            said = type(error).__name__
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def plant(address: str, port: int, planted: bytes) -> str:
    """Put a pickle into what listens there, as into a store of torch, under the keys of its rendezvous."""
    store = dist.TCPStore(address, port, None, False, timedelta(seconds=2), wait_for_workers=False)
    for key in ("torch.rendezvous.none", "torchelastic/role_info/0", "zeromesh/mesh-0/place/0"):
        store.set(key, planted)
    return f"stored; {store.num_keys()} keys"


def stores(listeners: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that answer as a store of torch does. Each is asked by a process of its own, since asking may wait for ever."""
    probes = {}
    for where in listeners:
        probe = os.fork()
        if probe == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(2)
            dist.TCPStore(*where, None, False, timedelta(seconds=2), wait_for_workers=False)
            os._exit(7)
        probes[probe] = where
    return [where for probe, where in probes.items() if os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]) == 7]


def second_addresses() -> list[str]:
    """Addresses of this machine besides 127.0.0.1."""
    mine = list(by_address())
    return ["127.0.0.2", *(each for each in mine if not is_loopback(each) and not each.startswith("fe80:"))]


def test_no_store_of_one_host_listens_on_a_network(run: Run) -> None:
    assert run.tcp, "gloo listens, so the search has found nothing"
    assert {address for address, _ in run.tcp} == {"127.0.0.1"}
    assert not run.stores


def test_another_address_of_the_machine_leads_nowhere(run: Run) -> None:
    reached = []
    for address in second_addresses():
        for _, port in run.tcp:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.settimeout(2.0)
                if probe.connect_ex((address, port)) == 0:
                    reached.append((address, port))
    assert not reached


def test_another_user_can_neither_read_nor_write_the_store(run: Run) -> None:
    """That no code of it was run is seen at the end, when the files in the folder are listed."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    planted = pickle.dumps(Planted(run.folder / "code-of-a-stranger-was-run"))

    def attack() -> list[str]:
        said = [plant(address, port, planted) for address, port in run.stores]
        for name in run.unix:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(name.replace("@", "\0", 1))
                probe.sendall(b"1")
                if socket.recv_fds(probe, 1, 2)[1]:
                    said.append(f"was given files by {name}")
        for pid in run.pids:
            try:
                said += [f"opened {os.readlink(each)}" for each in _descriptors(pid)]
            except PermissionError:
                continue
        return said

    assert as_nobody(attack) == "[]"


def test_garbage_in_the_sockets_of_gloo_changes_nothing(run: Run) -> None:
    """What gloo itself listens on asks nobody who it is; it is at the loopback alone, and drops what is not of its groups."""
    held = []
    for address, port in run.tcp:
        for garbage in (b"", b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
            probe = socket.create_connection((address, port), timeout=2.0)
            probe.sendall(garbage)
            held.append(probe)
    run.end()
    for probe in held:
        probe.close()
    assert sorted(each.name for each in run.folder.iterdir()) == ["driver.py", "enough", *PROCESSES, "worker.py"]
