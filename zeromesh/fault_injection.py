"""Faults on demand, at named sites, so that tests and cautious users can see what a run does when things break.

`ZEROMESH_FAULT=KIND@SITE[:RANK][:COUNT]` strikes when rank RANK (default 0) comes to SITE for the COUNT-th time (default 1):

    kind    kill         the process is killed (SIGKILL)
            hang         it stops for ever (SIGSTOP)
            disk-full    the system says that the disk is full
            short-write  the second half of what is written there never reaches the disk
            bit-flip     one bit of the file that is written there changes
            truncate     that file loses its second half
    site    before-tmp, mid-write, before-manifest, before-rename, after-rename, during-retention, forward, reduce, optimizer

Nothing happens unless the variable is set.
"""

import errno
import os
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zeromesh.environment import read_environment, setting
from zeromesh.errors import ConfigError

KINDS = ("kill", "hang", "disk-full", "short-write", "bit-flip", "truncate")
SITES = (
    *("before-tmp", "mid-write", "before-manifest", "before-rename", "after-rename", "during-retention"),
    *("forward", "reduce", "optimizer"),
)
_VARIABLE = "ZEROMESH_FAULT"


@dataclass(kw_only=True, slots=True)
class Fault:
    """A kind of fault, its site, its rank, and the visit of the site at which it strikes; `visits` counts the visits."""

    kind: str
    site: str
    rank: int
    count: int
    visits: int = 0

    def strike(self, path: Path | None, start: int, end: int) -> None:
        """Cause the fault. `path` and its bytes [start, end) are what has just been written at the site, if anything."""
        if self.kind == "disk-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.kind in ("kill", "hang"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        elif path is not None:
            middle = (start + end) // 2
            with path.open("rb+") as file:
                if self.kind == "truncate":
                    file.truncate(middle)
                    return
                file.seek(middle)
                data = bytes([file.read(1)[0] ^ 1]) if self.kind == "bit-flip" else bytes(end - middle)
                file.seek(middle)
                file.write(data)


def visit(site: str, path: Path | None = None, start: int = 0, end: int = 0) -> None:
    """Note that this process is at a site, where it may have just written bytes [start, end) of `path`; a fault may strike.

    Raises:
        OSError: where a full disk was asked for.
    """
    fault = _fault()
    if fault is None or fault.site != site:
        return
    fault.visits += 1
    if fault.visits == fault.count:
        fault.strike(path, start, end)


@cache
def _fault() -> Fault | None:
    """The fault that the environment asks of this process."""
    text = setting(_VARIABLE)
    if not text:
        return None
    fault = parse(text)
    return fault if fault.rank == read_environment().rank else None


def parse(text: str) -> Fault:
    """The fault that a text describes. Raises `ConfigError` for a text that describes none."""
    kind, _, rest = text.partition("@")
    site, *numbers = rest.split(":")
    if kind not in KINDS or site not in SITES or len(numbers) > 2 or not all(word.isdecimal() for word in numbers):
        raise ConfigError(
            f"{_VARIABLE} is {text!r}; give KIND@SITE[:RANK][:COUNT] with a kind of {', '.join(KINDS)} and a site of "
            f"{', '.join(SITES)}"
        )
    rank, count = (int(word) for word in (*numbers, *("0", "1")[len(numbers) :]))
    return Fault(kind=kind, site=site, rank=rank, count=max(1, count))
