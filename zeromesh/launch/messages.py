"""Messages between the launchers of a run: objects of JSON, each field of which is checked before it is used.

A message that makes no sense raises `MessageError`, which says what is wrong with it; the caller adds where it came from.

Launchers that meet by themselves send them over a `LauncherConnection`. Between `zeromesh launch` and the launcher that it starts
on a host, the line is the standard input and output of the remote command, and the host's end of it a `Lifeline`. The host sends a
*beat* a few times within the time after which it counts as silent, the launching side an *echo* of each. A beat's number stands for
the time at which it was sent: the host ends its own processes when that time lies back too far, so it has always ended before the
other side, which received the beat later, counts it as lost. Two runs never write into one directory, whatever the network does (a
lease, as in Gray and Cheriton 1989). Messages are lines. Those of the host begin with `BEGIN`, since they stand among what its
processes print.
"""

import hashlib
import hmac
import json
import os
import re
import reprlib
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Self, TypeVar

from zeromesh.environment import export
from zeromesh.errors import ZeromeshError
from zeromesh.launch.rank_processes import RankRange

MAX_MESSAGE = 1 << 20
MAX_EXIT_CODE = 255
MAX_PROCESSES = 1 << 16
HELLO_SECONDS = 10.0
"""How long an end of a new connection may take until its first message."""
_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 15.0
BEGIN = b"\x1ezeromesh:"
BEATS = 5
"""Beats within the time after which a host counts as silent."""
_LAST_MESSAGE_SECONDS = 1.0
_MOST_SIGNAL = 64
_KILLED = 128 + int(signal.SIGKILL)

Message = Mapping[str, Any]
Value = TypeVar("Value", str, bool)
_LONGEST_SHOWN = 160
_VARIABLE, _VALUE = re.compile(r"[^=\0\ud800-\udfff]+"), re.compile(r"[^\0\ud800-\udfff]*")


def _shown(value: object) -> str:
    """The beginning of a wrong value."""
    return reprlib.repr(value)[:_LONGEST_SHOWN]


class MessageError(ZeromeshError, ValueError):
    """A message makes no sense."""


def line(message: Message) -> bytes:
    """A message as it is sent: a line of ASCII."""
    return json.dumps(message).encode("ascii") + b"\n"


def parsed(data: bytes) -> Message:
    """The message that `data` is. Raises `MessageError`."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a message is no JSON: {_shown(data)}") from error
    if not isinstance(message, dict):
        raise MessageError(f"a message is no object of JSON: {_shown(data)}")
    return message


def number(message: Message, name: str, *, least: int = 0, most: int = (1 << 53) - 1) -> int:
    """The integer under `name`. Raises `MessageError`."""
    value = message.get(name)
    if type(value) is not int or not least <= value <= most:
        raise MessageError(f"{name!r} is {_shown(value)}; allowed is an integer from {least} to {most}")
    return value


def optional(message: Message, name: str, default: Value) -> Value:
    """The text or the truth value under `name`, `default` where there is none. Raises `MessageError`."""
    value = message.get(name, default)
    if not isinstance(value, type(default)):
        allowed = "a text" if isinstance(default, str) else "true or false"
        raise MessageError(f"{name!r} is {_shown(value)}; allowed is {allowed}")
    return value


def variables(message: Message) -> dict[str, str]:
    """The environment variables under `variables`. Raises `MessageError`."""
    found = message.get("variables", {})
    if not isinstance(found, dict):
        raise MessageError(f"'variables' is {_shown(found)}; allowed is an object")
    for name, value in found.items():
        if not (_VARIABLE.fullmatch(name) and isinstance(value, str) and _VALUE.fullmatch(value)):
            raise MessageError(f"'variables' has {_shown(name)}, which cannot be set; its value is not shown")
    return found


def rank_range(message: Message) -> RankRange:
    """The ranks of this host under `start`. Raises `MessageError`."""
    content = message.get("start")
    if not isinstance(content, dict):
        raise MessageError(f"'start' is {_shown(content)}; allowed is an object")
    size = number(content, "world_size", least=1, most=MAX_PROCESSES**2)
    return RankRange(
        first=number(content, "first", most=size - 1),
        processes=number(content, "processes", least=1, most=MAX_PROCESSES),
        world_size=size,
        master_address=optional(content, "master_address", ""),
        master_port=number(content, "master_port", least=1, most=65535),
        run_id=optional(content, "run_id", ""),
        restart=number(content, "restart"),
    )


class LauncherConnection:
    """One end of a connection between two launchers: lines of JSON, each with a digest that only who knows the secret can make.

    The digest covers the direction, words that both ends have drawn at random for this connection, and the number of the line, so
    that no line can be sent again. With an empty `secret` it keeps out what comes by mistake, and nobody else. Both ends send
    signs of life, which `receive` hides.
    """

    def __init__(self, connection: socket.socket, secret: str, *, serves: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.drawn = secrets.token_hex(16)
        self._key = secret.encode()
        self._serves = serves
        self._agreed = b""
        self._numbers = {True: 0, False: 0}
        self._partial = b""
        self._unsent = b""
        self._last_received = time.monotonic()
        self._last_beat = 0.0
        if serves:
            self.send({"zeromesh": 1, "drawn": self.drawn})

    def agree(self, *drawn: str) -> None:
        """Make digests hold for this connection alone, given the words that the serving end and the other one have drawn."""
        self._agreed = "\n".join(drawn).encode()

    def send(self, message: Message) -> None:
        """Send a message, now or with a later call of `flush`."""
        data = line(message)
        self._unsent += self._digest(data[:-1], self._serves) + b" " + data
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes now. A connection that is gone loses it, which `read` notices."""
        with suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def receive(self) -> list[Message]:
        """The messages that have come, without waiting.

        Raises:
            MessageError: when one makes no sense, or was not made with the secret.
            ConnectionError: when the connection has ended, or nothing was received for some seconds.
        """
        now = time.monotonic()
        if self._agreed and now > self._last_beat + _BEAT_SECONDS:
            self._last_beat = now
            self.send({"beat": True})
        self.flush()
        lines = self.read()
        found = [self.opened(line) for line in lines or ()]
        if found:
            self._last_received = now
        patience = _SILENCE_SECONDS if self._agreed else HELLO_SECONDS
        if lines is None or now > self._last_received + patience:
            raise ConnectionError("the connection is gone")
        return [message for message in found if "beat" not in message]

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
        first = not self._numbers[not self._serves]
        if first and self._serves:
            # The first line of the other end has what that end has drawn, which the line's digest covers already.
            self.agree(self.drawn, optional(parsed(data), "drawn", ""))
        if not hmac.compare_digest(digest, self._digest(data, not self._serves)):
            raise MessageError(
                "a message has not the digest that this run's secret gives (ZEROMESH_SECRET on every host)"
            )
        message = parsed(data)
        if first and not self._serves:
            self.agree(optional(message, "drawn", ""), self.drawn)
        return message

    def _digest(self, data: bytes, by_server: bool) -> bytes:
        count = self._numbers[by_server] = self._numbers[by_server] + 1
        covered = b"%d %d %s\n" % (by_server, count, self._agreed) + data
        return hmac.new(self._key, covered, hashlib.sha256).hexdigest().encode()

    def close(self) -> None:
        """Hang up, so that the other end can still read what was sent."""
        self.read()  # A connection that is closed before all was read is reset, and what was sent may be lost.
        self.connection.close()


def frame(message: Message) -> bytes:
    """A message of the host, as it stands in its output."""
    return BEGIN + line(message)


class Lifeline:
    """The host's end: as a context, it beats from entering to leaving, and reports an error that the block ends with.

    The process becomes the leader of its own group, which is killed as a whole when the other side is silent for
    `silence_seconds`, has closed the line, or asks for it; its workers die with it. It takes over standard input.
    """

    def __init__(self, silence_seconds: float) -> None:
        self._silence = silence_seconds
        self._sent: deque[tuple[int, float]] = deque()
        self._answered_at = time.monotonic()
        self._write = threading.Lock()
        self._input = os.dup(0)
        self._partial = b""
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def __enter__(self) -> Self:
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        for run in (self._beat, self._listen):
            threading.Thread(target=run, name=f"lifeline{run.__name__}", daemon=True).start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            self.end(1, text=f"{type(error).__name__}: {error}")

    def read_start(self) -> RankRange:
        """Set the environment variables that the first message has, and return the ranks that it has for this host.

        Call this before entering the context.
        """
        while b"\n" not in self._partial:
            self._read()  # The other side waits longer for a first beat than for the next ones.
        first, _, self._partial = self._partial.partition(b"\n")
        try:
            message = parsed(first)
            export(variables(message))
            place = rank_range(message)
        except MessageError as error:
            self._refuse(error)
        self._answered_at = time.monotonic()
        return place

    def end(self, exit_code: int, *, text: str = "", noticed: bool = False) -> None:
        """Report that the processes here have ended, and why."""
        self._send({"end": exit_code, "text": text, "noticed": noticed})

    def _send(self, message: Message) -> None:
        sys.stdout.flush()
        data = memoryview(frame(message))
        with self._write:
            while data:
                data = data[os.write(1, data) :]

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            self._sent.append((number, time.monotonic()))
            try:
                # One piece of at most PIPE_BUF bytes, so that nothing of the workers can come in between.
                self._send({"beat": number})
            except OSError:
                _end_all()
            time.sleep(self._silence / BEATS)

    def _listen(self) -> None:
        while True:
            *whole, self._partial = self._partial.split(b"\n")
            try:
                for each in whole:
                    self._take(parsed(each))
            except MessageError as error:
                self._refuse(error)
            left = self._answered_at + self._silence - time.monotonic()
            if left <= 0:
                _end_all()
            if not select.select([self._input], [], [], min(left, self._silence / BEATS))[0]:
                continue
            self._read()

    def _read(self) -> None:
        piece = os.read(self._input, 65536)
        self._partial += piece
        if not piece or len(self._partial) > MAX_MESSAGE:
            _end_all()

    def _take(self, message: Message) -> None:
        if "echo" in message:
            echo = number(message, "echo")
            while self._sent and self._sent[0][0] <= echo:
                self._answered_at = self._sent.popleft()[1]
        elif "signal" in message:
            os.kill(os.getpid(), number(message, "signal", least=1, most=_MOST_SIGNAL))
        elif "kill" in message:
            self._end_with(_KILLED, "")

    def _refuse(self, error: MessageError) -> NoReturn:
        """End all: the launching side has sent a message that makes no sense, so none of its messages can be relied on."""
        self._end_with(1, f"what the launching side has sent makes no sense: {error}")

    def _end_with(self, exit_code: int, text: str) -> NoReturn:
        """End all here, and report it, which may have to wait for a full pipe."""
        last = threading.Thread(target=self.end, args=(exit_code,), kwargs={"text": text}, daemon=True)
        last.start()
        last.join(_LAST_MESSAGE_SECONDS)
        _end_all()


def _end_all() -> NoReturn:
    """End all that this process has started, and itself, now."""
    os.killpg(0, signal.SIGKILL)
    # The first process of a container is not killed by a signal of its own.
    os._exit(_KILLED)
