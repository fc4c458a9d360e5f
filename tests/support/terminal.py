"""Commands on a pseudo-terminal of a chosen width, and what a person sees there."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Sequence
from pathlib import Path

_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    words: Sequence[str], folder: Path, *, columns: int = 80, answers: Sequence[tuple[bytes, bytes]] = (), seconds: float = 120
) -> bytes:
    """All bytes that a command writes to its terminal. Each answer is typed when its first part is written."""
    child, descriptor = pty.fork()
    if child == 0:
        os.chdir(folder)
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            os.environ.pop(name, None)
        os.environ |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        # The size is there before the program looks.
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.execvp(words[0], list(words))
    written, typed, since = b"", 0, 0
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if not select.select([descriptor], [], [], 1.0)[0]:
                continue
            try:
                more = os.read(descriptor, 1 << 16)
            except OSError:  # The program has closed the terminal.
                more = b""
            if not more:
                return written
            written += more
            if typed < len(answers) and answers[typed][0] in written[since:]:
                os.write(descriptor, answers[typed][1])
                typed, since = typed + 1, len(written)
        raise AssertionError(f"{words} did not end within {seconds:g} seconds: {written[-2000:]!r}")
    finally:
        os.close(descriptor)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def seen(written: bytes, columns: int = 80) -> list[str]:
    """The lines that stand on the terminal in the end; the terminal itself breaks what is longer than it is wide.

    Of what moves the cursor, this knows what rich writes: carriage return, line feed, one line up, and to clear a line.
    """
    lines, row, column = [""], 0, 0
    for part in re.findall(rb"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == b"\r":
            column = 0
        elif part == b"\n":
            row += 1
        elif part == b"\x1b[1A":
            row -= 1
        elif part == b"\x1b[2K":
            lines[row] = ""
        elif not _ESCAPE.fullmatch(part):
            for letter in part.decode(errors="replace"):
                if column == columns:
                    row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = f"{lines[row][:column]:{column}}{letter}{lines[row][column + 1 :]}"
                column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]
