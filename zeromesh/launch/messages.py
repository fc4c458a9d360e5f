"""Messages between the launchers of a run: objects of JSON, each field of which is checked before it is used.

A message that makes no sense raises `MessageError`, which says what is wrong with it; who reads it says where it came from.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from zeromesh.errors import ZeromeshError

MAX_MESSAGE = 1 << 20
_SHOWN = 60
_LEAST_SIGNAL, _MOST_SIGNAL = 1, 64
MAX_EXIT_CODE = 255

Message = Mapping[str, Any]


class MessageError(ZeromeshError, ValueError):
    """A message makes no sense."""


def dumped(message: Message) -> bytes:
    """A message as it is sent: ASCII, without the end of a line."""
    return json.dumps(message).encode("ascii")


def parsed(data: bytes) -> Message:
    """The message that `data` is. Raises `MessageError`."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a message is no JSON: {_shown(data)}") from error
    if not isinstance(message, dict):
        raise MessageError(f"a message is no object of JSON: {_shown(data)}")
    return message


def number(
    message: Message, name: str, *, least: int = 0, most: int = (1 << 53) - 1, default: int | None = None
) -> int:
    """The integer under `name`. Raises `MessageError`."""
    value = message.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise MessageError(f"{name!r} is {_shown(value)}; allowed is an integer from {least} to {most}")
    return value


def text(message: Message, name: str, default: str | None = "") -> str:
    """The text under `name`. Raises `MessageError`."""
    value = message.get(name, default)
    if not isinstance(value, str):
        raise MessageError(f"{name!r} is {_shown(value)}; allowed is a text")
    return value


def truth(message: Message, name: str) -> bool:
    """The truth value under `name`, false where there is none. Raises `MessageError`."""
    value = message.get(name, False)
    if not isinstance(value, bool):
        raise MessageError(f"{name!r} is {_shown(value)}; allowed is true or false")
    return value


def variables(message: Message) -> dict[str, str]:
    """The environment variables under `variables`. Raises `MessageError`."""
    found = message.get("variables", {})
    if not isinstance(found, dict):
        raise MessageError(f"'variables' is {_shown(found)}; allowed is an object")
    for name, value in found.items():
        if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
            raise MessageError(f"'variables' has {_shown(name)}, which cannot be set; its value is not shown")
        with suppress(UnicodeEncodeError):
            value.encode()
            name.encode()
            continue
        raise MessageError(f"'variables' has {_shown(name)}, which is no text of UTF-8")
    return found


def signal_number(message: Message, name: str) -> int:
    """The number of a signal. Raises `MessageError`."""
    return number(message, name, least=_LEAST_SIGNAL, most=_MOST_SIGNAL)


def _shown(value: object) -> str:
    """At most so much of a value that is wrong; a huge number is not even written out."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    whole = repr(value[: 4 * _SHOWN] if isinstance(value, str | bytes) else value)
    return whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}..."


class LauncherConnection:
    """One end of a connection between two launchers: lines of JSON, each with a digest that only who knows the secret can make.

    The digest covers the direction, what both ends have drawn at random for this connection, and the number of the line, so no
    line can be sent again. With an empty `secret` it keeps out what comes by mistake, and nobody else.
    """

    def __init__(self, connection: socket.socket, secret: str, *, serves: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._key = secret.encode()
        self._serves = serves
        self._drawn = b""
        self._numbers = {True: 0, False: 0}
        self._partial = b""
        self._unsent = b""

    @property
    def peer(self) -> str:
        """The address at the other end."""
        try:
            return str(self.connection.getpeername()[0])
        except OSError:
            return "a host that is gone"

    def agree(self, *drawn: str) -> None:
        """Both ends have drawn these words: from now on digests hold for this connection alone."""
        self._drawn = "\n".join(drawn).encode()

    def send(self, message: Message) -> None:
        """Send a message, now or with a later call of `flush`."""
        data = dumped(message)
        self._unsent += self._digest(data, self._serves) + b" " + data + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes now. A connection that is gone loses it; `read` will say so."""
        with suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def read(self) -> Sequence[bytes] | None:
        """The lines that have come whole, still with their digests; None when the connection has ended."""
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return ()
        except OSError:
            return None
        *whole, self._partial = (self._partial + data).split(b"\n")
        return None if not data or len(self._partial) > MAX_MESSAGE else whole

    def opened(self, line: bytes) -> Message:
        """The message of a line. Raises `MessageError`, also when its digest is not that of the secret."""
        digest, _, data = line.partition(b" ")
        if not hmac.compare_digest(digest, self._digest(data, not self._serves)):
            raise MessageError(
                "a message has not the digest that this run's secret gives (ZEROMESH_SECRET on every host)"
            )
        return parsed(data)

    def _digest(self, data: bytes, by_server: bool) -> bytes:
        count = self._numbers[by_server] = self._numbers[by_server] + 1
        covered = b"%d %d %s\n" % (by_server, count, self._drawn) + data
        return hmac.new(self._key, covered, hashlib.sha256).hexdigest().encode()
