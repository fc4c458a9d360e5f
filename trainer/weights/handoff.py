"""Transfer of weights to other processes, by name, whole or in parts, one tensor at a time. The transport is a connection of
`multiprocessing`, with its challenge by HMAC, which carries only bytes: JSON, and raw pieces of tensors.

    receiver    {"format", "parts"}                the requested parts, after the challenge
    sender      {"name", "dtype", "shape", "xxh3"} bytes    for each tensor
    sender      {"count"}
    receiver    {"received"}
"""

import errno
import json
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.io.format import DTYPES, are_valid_sizes
from zeromesh.errors import ConfigError, TransferError, errors_as, printable
from zeromesh.files import json_object
from zeromesh.mesh.network_interfaces import is_loopback
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import hex_digest, tensor_bytes

Named = Iterator[tuple[str, torch.Tensor]]
Part = tuple[int, int, int]  # `(dim, index, parts)`, a part of a tensor as `torch.tensor_split` cuts along `dim`
_FORMAT = "zeromesh-weights-2"
_HEADER_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def cut_part(name: str, tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Return the requested part of a tensor. Raises `ConfigError` for a part that it does not have."""
    if part is None:
        return tensor
    dim, index, parts = part
    if not (0 <= dim < tensor.dim() and 0 <= index < parts <= max(1, tensor.shape[dim])):
        why = f"{name} of shape {list(tensor.shape)} has no part {index} of {parts} along dim {dim}"
        raise ConfigError(f"{why}; parts are counted from 0")
    return tensor.tensor_split(parts, dim)[index]


class _WeightConnection(AbstractContextManager["_WeightConnection"]):
    """One end of a connection to `peer`, whose system calls time out; `beat` is called after each sent piece of a tensor."""

    def __init__(
        self, connection: socket.socket, peer: str, timeout_seconds: float, beat: Callable[[], object] = lambda: None
    ) -> None:
        connection.setblocking(True)
        limit = struct.pack("ll", *divmod(max(1, int(1e6 * timeout_seconds)), 1_000_000))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        self.connection, self.peer, self._moved = Connection(connection.detach()), peer, beat

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, header: Mapping[str, Any], content: memoryview | bytes = b"") -> None:
        with self.naming_peer():
            self.connection.send_bytes(json.dumps(header).encode())
            for begin in range(0, len(content), _PIECE_BYTES):
                self.connection.send_bytes(content[begin : begin + _PIECE_BYTES])
                self._moved()

    def header(self) -> dict[str, Any]:
        with self.naming_peer():
            text = self.connection.recv_bytes(_HEADER_BYTES)
        return json_object(text, lambda why: TransferError(f"{self.peer} sends no weights: a header {why}"))

    def fill(self, buffer: memoryview) -> None:
        while buffer:
            with self.naming_peer():
                piece = self.connection.recv_bytes(min(_PIECE_BYTES, len(buffer)))
            if not piece:
                raise TransferError(f"{self.peer} sends no weights: a piece without bytes")
            buffer[: len(piece)] = piece
            buffer = buffer[len(piece) :]

    def authenticate(self, challenge: Callable[[Connection, bytes], None], token: str | None) -> None:
        """Authenticate with the token; `challenge` sends or answers the challenge of `multiprocessing`."""
        try:
            with self.naming_peer():
                # A token from the environment may not be valid UTF-8.
                challenge(self.connection, (token or "").encode(errors="surrogatepass"))
        except (AuthenticationError, AssertionError) as error:
            raise TransferError(f"{self.peer} has another token, or is no process of zeromesh") from error

    @contextmanager
    def naming_peer(self) -> Iterator[None]:
        """Convert connection errors inside the block to `TransferError` with the peer's name."""
        try:
            yield
        except BlockingIOError as error:
            raise TransferError(f"{self.peer} was silent for too long") from error
        except EOFError as error:
            raise TransferError(f"{self.peer} is gone before all weights were there") from error
        except OSError as error:
            raise TransferError(f"{self.peer} is gone: {error.strerror or error}") from error


def send_weights(
    weights: Named, mesh: Mesh, addresses: Sequence[str], *, token: str | None = None, timeout_seconds: float = 30.0
) -> int:
    """Send `weights` from rank 0 to all receivers; all ranks call it. Returns their number. Raises `TransferError` on all ranks."""
    receivers: list[tuple[_WeightConnection, dict[str, Part]]] = []
    sent = 0
    with ExitStack() as stack:

        def connect() -> None:
            for address in addresses:
                receiver = stack.enter_context(_connect(address, timeout_seconds, mesh.watch.board.beat))
                receivers.append((receiver, _handshake(receiver, token)))

        def send(name: str, tensor: torch.Tensor) -> None:
            for receiver, parts in receivers:
                part = next((each for pattern, each in parts.items() if fnmatchcase(name, pattern)), None)
                given = cut_part(name, tensor, part)
                flat, dtype = tensor_bytes(given), str(given.dtype).removeprefix("torch.")
                header = {"name": name, "dtype": dtype, "shape": list(given.shape)}
                receiver.send({**header, "xxh3": hex_digest(flat)}, flat.numpy().data)

        def end() -> None:
            for receiver, _ in receivers:
                receiver.send({"count": sent})
                if receiver.header().get("received") != sent:
                    raise TransferError(f"{receiver.peer} has not received all of {sent} tensors")

        on_first_rank = partial(mesh.world.all_or_raise, "weights for other processes", error=TransferError, first=True)
        # The other ranks wait while rank 0 waits for a receiver, so their timeout must be longer.
        stack.enter_context(mesh.watch.patience(2 * timeout_seconds))
        with errors_as(TransferError, "weights were not handed over: ", TransferError):
            on_first_rank(connect)
            for name, tensor in weights:
                on_first_rank(partial(send, name, tensor))
                sent += 1
            on_first_rank(end)
    return sent


def _handshake(receiver: _WeightConnection, token: str | None) -> dict[str, Part]:
    """Authenticate to a receiver, and return the parts that it requests, by name patterns."""
    receiver.authenticate(answer_challenge, token)
    hello = receiver.header()
    if hello.get("format") != _FORMAT:
        raise TransferError(f"{receiver.peer} does not receive weights of this version")
    try:
        return {name: (int(dim), int(index), int(parts)) for name, (dim, index, parts) in hello["parts"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise TransferError(f"{receiver.peer} asks for parts that are not (dim, index, parts) by patterns of names") from error


def _connect(address: str, timeout_seconds: float, beat: Callable[[], object]) -> _WeightConnection:
    host, port = _host_of(address)
    with errors_as(TransferError, f"nobody receives weights at {address}: ", OSError, UnicodeError):
        if port is not None:
            connection = socket.create_connection((host, port), timeout=timeout_seconds)
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout_seconds)
            connection.connect(address)
    return _WeightConnection(connection, f"the receiver at {address}", timeout_seconds, beat)


def _host_of(address: str) -> tuple[str, int | None]:
    """Split an address into host and port; the port is None for a socket path. Raises `ConfigError`."""
    host, found, port = address.rpartition(":")
    if address and "\0" not in address and ("/" in address or not found):
        return address, None
    if "\0" in address or not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{address!r} is no address: give a socket's path, such as /tmp/weights.sock, or HOST:PORT")
    return host.strip("[]"), int(port)


def receive_weights(
    address: str, *, parts: Mapping[str, Part] | None = None, token: str | None = None, timeout_seconds: float = 60.0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Listen at `address`, the path of a Unix socket or `HOST:PORT`, and yield `(name, tensor)` of each weight that a trainer
    sends, on the CPU, until all have arrived. `parts` has the requested part `(dim, index, parts)` by name pattern, as in
    `fnmatch`; other tensors come whole. `token` is the secret shared with the sender, required if other hosts can reach the
    address. The sender is waited for, and each tensor, `timeout_seconds` at most. Raises `ConfigError` for an invalid address,
    or for one that others can reach without a token, `TransferError` if nobody sends whole bytes in time, with that token."""
    host, port = _host_of(address)
    if port is not None and not token and not is_loopback(host):
        raise ConfigError(f"{address} can be reached by other hosts: give a token, the same to both ends")
    with _listening(address, host, port) as listener:
        listener.settimeout(timeout_seconds)
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise TransferError(f"nobody sent weights to {address} within {timeout_seconds:g} seconds") from error
    with _WeightConnection(connection, "the sender of weights", timeout_seconds) as sender:
        sender.authenticate(deliver_challenge, token)
        sender.send({"format": _FORMAT, "parts": {name: list(part) for name, part in (parts or {}).items()}})
        count = 0
        while "count" not in (header := sender.header()):
            yield str(header.get("name")), _read_tensor(sender, header)
            count += 1
        if header["count"] != count:
            raise TransferError(f"{count} of {header['count']} tensors were received")
        sender.send({"received": count})


def _read_tensor(sender: _WeightConnection, header: Mapping[str, Any]) -> torch.Tensor:
    name, shape, dtype = header.get("name"), header.get("shape"), _DTYPES.get(str(header.get("dtype")))
    if not (isinstance(name, str) and isinstance(shape, list) and are_valid_sizes(*shape)) or dtype is None:
        raise TransferError(f"{sender.peer} sends no weights: {printable(json.dumps(header)[:200])}")
    try:
        content = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
    except (RuntimeError, TypeError) as error:  # Memory is short, or the size exceeds 63 bits.
        raise TransferError(f"{printable(name)} of shape {shape} does not fit into memory") from error
    sender.fill(content.numpy().data)
    if hex_digest(content) != header.get("xxh3"):
        raise TransferError(f"{printable(name)} was damaged on the way")
    return content.view(dtype).view(shape)


@contextmanager
def _listening(address: str, host: str, port: int | None) -> Iterator[socket.socket]:
    with errors_as(ConfigError, f"cannot listen at {address}: ", OSError, UnicodeError):
        if port is not None:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        else:
            path = Path(address)
            if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
                # A live listener rejects a datagram with EPROTOTYPE, undisturbed; a dead receiver's socket refuses all.
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                    if probe.connect_ex(address) != errno.EPROTOTYPE:
                        path.unlink()
            if path.exists():
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            listener = socket.socket(socket.AF_UNIX)
            # The socket is renamed to its path only once it listens, with permissions for this user alone.
            beginning = path.with_name(f"{path.name}~")
            beginning.unlink(missing_ok=True)
            listener.bind(str(beginning))
            beginning.chmod(0o600)
            listener.listen(1)
            beginning.rename(path)
    with listener:
        try:
            yield listener
        finally:
            if port is None:
                Path(address).unlink(missing_ok=True)
