"""Prints the output of hosts, each line with its host before it, in a thread, so that a blocked terminal does not block the run."""

from __future__ import annotations

import queue
import sys
import threading

_LONGEST_LINE = 1 << 16
_MOST_LINES = 100_000
_LAST_SECONDS = 5.0

_Line = tuple[int, str]


class Output:
    """Standard output (1) and standard error (2) for all hosts. What cannot be written is dropped."""

    def __init__(self) -> None:
        self._lines: queue.Queue[_Line | None] = queue.Queue(maxsize=_MOST_LINES)
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def put(self, number: int, text: str) -> None:
        """Write a line, as soon as that is possible."""
        try:
            self._lines.put_nowait((number, text))
        except queue.Full:
            return

    def close(self) -> None:
        """Write what is left, for some seconds at most."""
        try:
            self._lines.put(None, timeout=_LAST_SECONDS)
        except queue.Full:
            return
        self._thread.join(_LAST_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            stream = sys.stdout if line[0] == 1 else sys.stderr
            try:
                stream.write(f"{line[1]}\n")
                if self._lines.empty():
                    stream.flush()
            except (OSError, ValueError):
                continue


class Lines:
    """The lines of one stream of one host, from pieces that are cut anywhere."""

    def __init__(self, output: Output, number: int, host: str) -> None:
        self.last = ""
        """The last line that was not empty."""
        self._output = output
        self._number = number
        self._prefix = f"[{host}] "
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Take a piece; a line goes out when it is complete, or too long to wait for its end."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        for line in whole:
            self._put(line)
        if len(self._partial) > _LONGEST_LINE:
            self.flush()

    def flush(self) -> None:
        """Put out the unfinished line, since nothing more comes."""
        if self._partial:
            self._put(self._partial)
        self._partial = b""

    def _put(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self.last = text.strip() or self.last
        self._output.put(self._number, self._prefix + text)
