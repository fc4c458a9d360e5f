"""The messages between `zeromesh launch` and the launcher that it starts on a host, and the host's end of the line.

The line is the standard input and output of the remote command. The host sends a *beat* a few times within the time after which it
counts as silent, the launching side an *echo* of each. A beat's number stands for the time at which it was sent: the host ends its
own processes when that time lies back too far, so it has always ended before the other side, which received the beat later,
counts it as lost. Two runs never write into one directory, whatever the network does (a lease, as in Gray and Cheriton 1989).

Messages are lines. Those of the host begin with `BEGIN`, since they stand among what its processes print.
"""

import os
import select
import signal
import sys
import threading
import time
from collections import deque
from typing import NoReturn, Self

from zeromesh.environment import export
from zeromesh.launch.messages import (
    MAX_MESSAGE,
    Message,
    MessageError,
    line,
    number,
    parsed,
    rank_range,
    variables,
)
from zeromesh.launch.rank_processes import RankRange

BEGIN = b"\x1ezeromesh:"
BEATS = 5
"""Beats within the time after which a host counts as silent."""
_LAST_MESSAGE_SECONDS = 1.0
_MOST_SIGNAL = 64
_KILLED = 128 + int(signal.SIGKILL)


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
