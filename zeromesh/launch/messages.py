"""Messages between the launchers of a run: JSON objects, each field of which is checked before use.
A follower sends several *beats*, its time, within the seconds after which it counts as lost, and the leader an *echo* of each. The
follower kills its processes when the latest echoed beat is too old, before the leader, which received that beat later, counts it as
lost. So two runs never write into one directory (a lease, as in Gray and Cheriton 1989)."""

import hashlib
import hmac
import json
import os
import re
import reprlib
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, TypeVar

from zeromesh.environment import RankRange
from zeromesh.errors import ZeromeshError
from zeromesh.files import json_object

MAX_MESSAGE = 1 << 20
MAX_EXIT_CODE = 255
MAX_PROCESSES = 1 << 16
HELLO_SECONDS = 10.0  # for the other end of a new connection to send its first message
SILENCE_SECONDS = 15.0  # without a message, after which an end counts as lost
BEATS = 5  # within the seconds after which a follower counts as lost
REACH_SECONDS = 120.0  # for a launcher to reach the leader
TICK_SECONDS = 0.05  # between two looks at the ranks and at other launchers
REST_SECONDS = 300  # for ranks to save and end before a restart
LOOK_SECONDS = 0.5  # between two looks at the endpoint of a former leader, and for an heir to be reached

Message = Mapping[str, Any]
Stream = socket.socket | IO[bytes]
Value = TypeVar("Value", str, bool, int, dict[str, Any])
MISSING = -1
"""The default for a required integer field: it is below the allowed range, so that `field` refuses a message without the field."""
_LONGEST_SHOWN = 160
_MOST = (1 << 53) - 1
_WHOLE_WRITE = 4096  # bytes that a pipe takes in one piece (PIPE_BUF), and a writable socket without waiting
_CLOSE_SECONDS = 1.0  # for the last messages to leave
_ENDPOINT = re.compile(r"[^\s\0]{1,255}:[0-9]{1,5}")
_VARIABLE, _VALUE = re.compile(r"[^=\0\ud800-\udfff]+"), re.compile(r"[^\0\ud800-\udfff]*")


def _shown(value: object) -> str:
    return reprlib.repr(value)[:_LONGEST_SHOWN]


class MessageError(ZeromeshError, ValueError):
    """A message is malformed."""


def parsed(data: bytes) -> Message:
    """Decode a message, a JSON object in UTF-8. Raises `MessageError`."""
    return json_object(data, lambda why: MessageError(f"a message {why}: {_shown(data)}"))


def field(message: Message, name: str, default: Value, *, least: int = 0, most: int = _MOST) -> Value:
    """Return the value under `name`, or `default` if it is missing. Raises `MessageError` for another type than that of `default`,
    and for an integer, the default too, that is not from `least` to `most`."""
    value = message.get(name, default)
    if type(value) is not type(default) or (type(value) is int and not least <= value <= most):
        allowed = {str: "a text", bool: "true or false", dict: "an object", int: f"an integer from {least} to {most}"}
        raise MessageError(f"{name!r} is {_shown(message.get(name))}; allowed is {allowed[type(default)]}")
    return value


def variables(message: Message) -> dict[str, str]:
    """Return the environment variables under `variables`. Raises `MessageError`."""
    found = field(message, "variables", {})
    for name, value in found.items():
        if not (_VARIABLE.fullmatch(name) and isinstance(value, str) and _VALUE.fullmatch(value)):
            raise MessageError(f"'variables' has {_shown(name)}, which cannot be set; its value is not shown")
    return found


def rank_range(message: Message) -> RankRange:
    """Return the ranks of this host under `start`. Raises `MessageError`."""
    content = field(message, "start", {})
    size = field(content, "world_size", MISSING, least=1, most=MAX_PROCESSES**2)
    ranges = {"first": (0, size - 1), "processes": (1, MAX_PROCESSES), "master_port": (1, 65535), "restart": (0, _MOST)}
    ranges["hosts"] = (1, _MOST)
    found: dict[str, Any] = {name: field(content, name, "") for name in ("master_address", "run_id")}
    found |= {name: field(content, name, MISSING, least=ends[0], most=ends[1]) for name, ends in ranges.items()}
    return RankRange(world_size=size, **found)


def heirs(message: Message) -> dict[str, str]:
    """Return the `HOST:PORT` of each launcher that may lead next, in order, by its drawn name. Raises `MessageError`."""
    found = field(message, "heirs", {})
    if not all(isinstance(each, str) and _ENDPOINT.fullmatch(each) for each in found.values()):
        raise MessageError(f"'heirs' is {_shown(found)}; allowed is HOST:PORT for each")
    return found


class LauncherConnection:
    """One end of a connection between two launchers, a socket or the pipes of an ssh command: lines of JSON, each with a digest
    that needs the secret and covers the direction, random words drawn by both ends, and the number of the line, so that no line can
    be replayed. An empty `secret` only guards against accidents. The end that `serves` is the leader's. Both ends send signs of
    life, which `receive` hides. Nothing here waits for the other end."""

    def __init__(
        self,
        reader: Stream,
        writer: Stream,
        secret: str,
        *,
        serves: bool,
        hello_seconds: float = HELLO_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        mark: bytes = b"",
    ) -> None:
        """Connect by both streams, one socket or two pipes. The first message must come within `hello_seconds`, then a sign of
        life every `silence_seconds`. Each line that is sent begins with `mark`."""
        self.readers: Sequence[Stream] = [reader]  # the streams to select from while waiting for messages
        self.drawn = secrets.token_hex(16)
        self.alive_at = time.monotonic()
        """The time the other end was last known alive: the leader's last receipt, or the sending time of the last beat echoed."""
        self.was_closed = False
        """True if the other end's kernel has closed the connection while that end was known to be alive: its process has ended."""
        self._writer = writer
        self._hello_seconds, self._silence_seconds, self._mark = hello_seconds, silence_seconds, mark
        self._key, self._is_server = secret.encode(), serves
        self._drawn_by_both = self._partial = self._unsent = b""
        self._numbers = {True: 0, False: 0}
        self._beat_at = self.alive_at
        if serves:
            self.send({"zeromesh": 1, "drawn": self.drawn})

    def agree(self, *drawn: str) -> None:
        """Bind the digests to this connection by the random words that the serving end and the other end have drawn."""
        self._drawn_by_both = "\n".join(drawn).encode()
        self.alive_at = time.monotonic()

    def send(self, message: Message) -> None:
        data = json.dumps(message).encode("ascii")
        self._unsent += self._mark + self._digest(data, self._is_server) + b" " + data + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Send as much as the connection takes now. A closed connection drops it, which `read` reports."""
        with suppress(OSError, ValueError):
            while self._unsent and select.select([], [self._writer], [], 0)[1]:
                # A line of one piece, as a beat is, cannot be interleaved with what others write to the same pipe.
                end = min(self._unsent.index(b"\n") + 1, _WHOLE_WRITE)
                self._unsent = self._unsent[os.write(self._writer.fileno(), self._unsent[:end]) :]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting. Raises `MessageError` for a malformed one, or one without a valid
        digest, and `ConnectionError` when the connection has ended, or nothing was received for some seconds."""
        now = time.monotonic()
        if self._drawn_by_both and not self._is_server and now > self._beat_at + self._silence_seconds / BEATS:
            self._beat_at = now
            self.send({"beat": int(now * 1e6)})
        self._flush()
        lines, messages = self.read(), []
        for line in lines or ():
            message = self.verified_message(line)
            if "beat" in message and self._is_server:
                self.send({"echo": field(message, "beat", MISSING)})
            elif "echo" in message and not self._is_server:
                self.alive_at = max(self.alive_at, min(field(message, "echo", MISSING) / 1e6, self._beat_at))
            elif not {"beat", "echo"} & message.keys():
                messages.append(message)
        if lines and self._is_server:
            self.alive_at = now
        patience = self._silence_seconds if self._drawn_by_both else self._hello_seconds
        if lines is None or now > self.alive_at + patience:
            self.was_closed = now <= self.alive_at + patience
            raise ConnectionError("the connection is gone")
        return messages

    def read(self) -> Sequence[bytes] | None:
        """Return the complete lines that have arrived, with their digests; None when the connection has ended."""
        data = read_available(self.readers[0])
        if data is None:
            return ()
        *whole, self._partial = (self._partial + data).split(b"\n")
        return None if not data or len(self._partial) > MAX_MESSAGE else whole

    def verified_message(self, line: bytes) -> Message:
        """Check the digest of a line and return its message. Raises `MessageError`."""
        digest, _, data = line.partition(b" ")
        first = not self._numbers[not self._is_server]
        if first and self._is_server:
            # The first line carries the random word of its sender, which its digest covers already.
            self.agree(self.drawn, field(parsed(data), "drawn", ""))
        if not hmac.compare_digest(digest, self._digest(data, not self._is_server)):
            raise MessageError("a message has not the digest of this run's secret (ZEROMESH_SECRET on every host)")
        message = parsed(data)
        if first and not self._is_server:
            self.agree(field(message, "drawn", ""), self.drawn)
        return message

    def loss(self, error: Exception) -> tuple[str, float]:
        """Return what became of the other host, for `host NAME...`, and from which monotonic second none of its processes lives."""
        return " is gone", 0.0

    def _digest(self, data: bytes, by_server: bool) -> bytes:
        count = self._numbers[by_server] = self._numbers[by_server] + 1
        covered = b"%d %d %s\n" % (by_server, count, self._drawn_by_both) + data
        return hmac.new(self._key, covered, hashlib.sha256).hexdigest().encode()

    def close(self) -> None:
        """Close the connection so that the other end can still read what was sent."""
        if self._unsent and select.select([], [self._writer], [], _CLOSE_SECONDS)[1]:
            self._flush()
        self.read()  # Closing with unread input resets the connection, and sent messages may be lost.
        for stream in (*self.readers, self._writer):
            stream.close()


def read_available(stream: Stream) -> bytes | None:
    """Return the bytes that can be read from a stream without waiting, empty at its end; None if there are none now."""
    try:
        return os.read(stream.fileno(), 1 << 16) if select.select([stream], [], [], 0)[0] else None
    except (BlockingIOError, InterruptedError):
        return None
    except (OSError, ValueError):  # It is lost, or closed here.
        return b""
