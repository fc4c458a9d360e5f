"""The store in which the ranks of a run find each other. On a single host, other users of the machine cannot reach it.

Ranks of one host keep it in anonymous memory, whose descriptor rank 0 passes over a Unix socket to processes of the same user.
Ranks of several hosts use torch's `TCPStore`, without authentication, so they belong on a closed network. Nothing is unpickled."""

import hashlib
import itertools
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from zeromesh.environment import AGENT_STORE, LaunchEnvironment, launch_identity, setting
from zeromesh.errors import CollectiveError, ConfigError
from zeromesh.mesh.network_interfaces import address_for_others, is_this_host, listen

START_SECONDS = 300  # for a start, more than for a step: processes import and read models at different speeds
_STORES: dict[LaunchEnvironment, Store] = {}
_DESCRIPTORS: dict[LaunchEnvironment, tuple[int, int]] = {}
_former: list[tuple[int, int]] = []  # descriptors of the start before, whose numbers those of this start take
_listeners: list[socket.socket] = []
_meshes = itertools.count()
_reasons: list[str] = []  # why waits for ranks of this start end
_LOOK_SECONDS = 0.05
_Found = TypeVar("_Found")
_RANK_SECONDS = 10.0  # for a connected rank to send its number
_RANK_BYTES = 16
_USER = struct.Struct("3i")  # struct ucred of unix(7): process, user, group
_ROW_BYTES, _CHECKSUM_BYTES = 1 << 15, 8  # of a row of the board in the file, and of its checksum


class LocalRowStore:
    """The rows of a `StoreBoard` for ranks of one host without shared memory: one file with a row per rank, overwritten in place;
    a `FileStore` is a log, which would grow with every published row. `mesh` is the number of the mesh in this process. Several
    threads may use one object, since it keeps no state between calls."""

    def __init__(self, descriptor: int, mesh: int, world_size: int) -> None:
        self._descriptor, self._first = descriptor, mesh * world_size

    def set(self, key: str, value: str) -> None:
        text = value.encode()[: _ROW_BYTES - _CHECKSUM_BYTES]
        row = zlib.crc32(text).to_bytes(_CHECKSUM_BYTES) + text
        os.pwrite(self._descriptor, row.ljust(_ROW_BYTES, b"\0"), self._offset(key))

    def get(self, key: str) -> bytes:
        """Return the row once it is complete. Raises `RuntimeError`, as torch's stores do, when there is none in time."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            row = os.pread(self._descriptor, _ROW_BYTES, self._offset(key)).rstrip(b"\0")
            text = row[_CHECKSUM_BYTES:]
            if text and zlib.crc32(text) == int.from_bytes(row[:_CHECKSUM_BYTES]):  # Else it is being written.
                return text
            time.sleep(0.001)
        raise RuntimeError(f"nothing was stored under {key} within {START_SECONDS} seconds")

    def _offset(self, key: str) -> int:
        return (self._first + int(key.rpartition("/")[2])) * _ROW_BYTES


def run_store(environment: LaunchEnvironment, seconds: float = START_SECONDS) -> Store:
    """Return the store of the launch, created once per process. All ranks call this, and wait at most `seconds` for rank 0. Raises
    `ConfigError` when rank 0's address is none of its host that others could reach, `CollectiveError` when they do not meet."""
    # With a store per group, a fast rank would join its next group in the previous store, which is about to be deleted.
    if environment in _STORES:
        return _STORES[environment]
    store: Store
    if environment.local_world_size == environment.world_size:
        store = FileStore(f"/proc/self/fd/{_descriptors(environment, seconds)[0]}", -1)
    else:
        host, port, listener = environment.master_address, environment.master_port, None
        served = setting(AGENT_STORE) == "True"  # by the launcher
        if environment.rank == 0 and not served:
            listening = listen(host, port)
            host, port = listening.getsockname()[:2]
            listener = listening.detach()
        elif not served and is_this_host(host):
            host = address_for_others(host)  # where alone rank 0 listens; here its name may lead elsewhere
        patience, serves = timedelta(seconds=seconds), listener is not None
        store = TCPStore(host, port, None, serves, timeout=patience, wait_for_workers=False, master_listen_fd=listener)
    store.set_timeout(timedelta(seconds=START_SECONDS))
    return _STORES.setdefault(environment, store)


def rows(environment: LaunchEnvironment) -> LocalRowStore | None:
    """Return the store for the board's rows of the next mesh; None for ranks on several hosts, whose rows are in `run_store`."""
    if environment.local_world_size != environment.world_size:
        return None
    return LocalRowStore(_descriptors(environment)[1], next(_meshes), environment.world_size)


def _descriptors(environment: LaunchEnvironment, seconds: float = START_SECONDS) -> tuple[int, int]:
    """Open two files in memory shared by all ranks of the host: one for the store, one for `LocalRowStore`."""
    if environment in _DESCRIPTORS:
        return _DESCRIPTORS[environment]
    identity = hashlib.sha256(f"{os.geteuid()} {launch_identity(environment)}".encode()).hexdigest()
    name = b"\0zeromesh-" + identity.encode()
    if environment.rank:
        return _DESCRIPTORS.setdefault(environment, _with_former_numbers(_receive_descriptors(name, environment.rank, seconds)))
    made = _with_former_numbers((os.memfd_create("zeromesh-store"), os.memfd_create("zeromesh-rows")))
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name)
    except OSError as error:
        listener.close()
        why = f"port {environment.master_port}: another run on this host uses this MASTER_PORT"
        raise ConfigError(f"{why}; give this run another one") from error
    listener.listen(environment.world_size)
    _listeners.append(listener)
    others = set(range(1, environment.world_size))
    threading.Thread(target=_send_fds, args=(listener, made, others), name="zeromesh-store", daemon=True).start()
    return _DESCRIPTORS.setdefault(environment, made)


def end_waits(reason: str) -> None:
    """Make `wait_for_ranks` raise a `CollectiveError` with the `reason`, in another thread, until `forget_run`."""
    _reasons.append(reason)


def wait_for_ranks(call: Callable[[], _Found]) -> _Found:
    """Return the result of `call()`, a function of a library that may wait for ranks, unless `end_waits` says that some are lost:
    the thread which waits is left alone then. Later starts are no concern of it, since they have other keys in the store."""
    found: Future[_Found] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001 - The caller meets it.
            found.set_exception(error)

    threading.Thread(target=run, name="zeromesh-meeting", daemon=True).start()
    while not wait([found], _LOOK_SECONDS).done:
        if _reasons:
            _DESCRIPTORS.clear()  # So that later starts do not take the number of the file that the thread reads, and locks.
            raise CollectiveError(_reasons[0])
    return found.result()


def forget_run() -> None:
    """Forget the store of the launch, so that this process can meet the ranks of the next start."""
    global _meshes
    _reasons.clear()
    _STORES.clear()
    _former.extend(_DESCRIPTORS.values())
    _DESCRIPTORS.clear()
    _meshes = itertools.count()
    while _listeners:
        with suppress(OSError):
            _listeners.pop().shutdown(socket.SHUT_RDWR)  # Ends a thread that waits for ranks which have not come.


def _with_former_numbers(found: tuple[int, int]) -> tuple[int, int]:
    """Give descriptors the numbers of those of the start before. Torch's `FileStore` opens its file by the number even when it is
    destroyed, at a time that is not known: by then that number must not stand for something else."""
    if not _former:
        return found
    numbers = _former.pop()
    for descriptor, number in zip(found, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=False)
        os.close(descriptor)
    return numbers


def _send_fds(listener: socket.socket, descriptors: tuple[int, int], others: set[int]) -> None:
    """Send the two file descriptors to each of the ranks `others` that connects, but to no process of another user."""
    with listener, suppress(OSError):
        while others:
            connection, _ = listener.accept()
            with connection, suppress(OSError, ValueError):
                if _user_at(connection) == os.geteuid():
                    connection.settimeout(_RANK_SECONDS)
                    rank = int(connection.recv(_RANK_BYTES))
                    socket.send_fds(connection, [b"."], descriptors)
                    others.discard(rank)


def _receive_descriptors(name: bytes, rank: int, seconds: float) -> tuple[int, int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionError):
            connection.connect(name)
            if (user := _user_at(connection)) != os.geteuid():
                raise ConfigError(f"user {user} has taken the name of this run's store; set another MASTER_PORT")
            connection.sendall(str(rank).encode())
            found = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)[1]
            if len(found) == 2:
                return found[0], found[1]
        time.sleep(0.02)
    raise CollectiveError(f"rank {rank} has not heard of rank 0 within {seconds:g} seconds; it has ended or not begun")


def _user_at(connection: socket.socket) -> int:
    return int(_USER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))[1])
