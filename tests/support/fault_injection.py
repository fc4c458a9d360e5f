"""Faults on demand, at named sites of this process, so that tests see what a run does when things break.

`install("KIND@SITE[:RANK][:COUNT]", rank)` strikes when rank RANK (default 0) comes to SITE for the COUNT-th time (default 1):

    kind    kill         the process is killed (SIGKILL)
            hang         it stops for ever (SIGSTOP)
            disk-full    the system says that the disk is full
            short-write  the second half of what is written there never reaches the disk
            bit-flip     one bit of the file that is written there changes
            truncate     that file loses its second half
    site    before-tmp, mid-write, before-manifest, before-rename, after-rename, during-retention, forward, reduce, optimizer
"""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zeromesh.checkpoint import store as stores
from zeromesh.checkpoint.io.reader import manifest_of
from zeromesh.checkpoint.io.writer import ShardWriter
from zeromesh.checkpoint.store import CheckpointStore, Remover
from zeromesh.optim.gradients import GradientReducer
from zeromesh.optim.optimizer_step import OptimizerStep
from zeromesh.zero.passes import Passes, PassMode

KINDS = ("kill", "hang", "disk-full", "short-write", "bit-flip", "truncate")
SITES = (
    *("before-tmp", "mid-write", "before-manifest", "before-rename", "after-rename", "during-retention"),
    *("forward", "reduce", "optimizer"),
)
_UNDO: list[Callable[[], None]] = []
"""Puts back the methods that the latest fault has replaced."""


@dataclass(kw_only=True, slots=True)
class Fault:
    """A kind of fault, its site, its rank, and the visit of the site at which it strikes; `visits` counts the visits."""

    kind: str
    site: str
    rank: int
    count: int
    visits: int = 0

    def visit(self, site: str, path: Path | None = None, start: int = 0, end: int = 0) -> None:
        """Note that this process is at a site, where it may have just written bytes [start, end) of `path`."""
        if site == self.site:
            self.visits += 1
            if self.visits == self.count:
                self.strike(path, start, end)

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


def parse(text: str) -> Fault:
    kind, _, rest = text.partition("@")
    site, *numbers = rest.split(":")
    assert kind in KINDS, text
    assert site in SITES, text
    rank, count = (int(word) for word in (*numbers, *("0", "1")[len(numbers) :]))
    return Fault(kind=kind, site=site, rank=rank, count=count)


_BEGINS = {
    (CheckpointStore, "create"): "before-tmp",
    (CheckpointStore, "put_manifest"): "before-manifest",
    (stores, "publish"): "before-rename",
    (Remover, "remove"): "during-retention",
    (Passes, "before_forward"): "forward",
    (GradientReducer, "_post_reduction"): "reduce",
    (OptimizerStep, "_update"): "optimizer",
}
"""The sites that are where a method begins."""
_OF_COMMIT = ("before-manifest", "before-rename")
"""Sites of a commit; their methods are called elsewhere too."""


def install(text: str, rank: int) -> None:
    """Have the fault that a text describes strike in this process, if it is that of its rank, in place of an earlier one."""
    while _UNDO:
        _UNDO.pop()()
    fault = parse(text)
    if fault.rank != rank:
        return
    commits: list[int] = []
    """The step of the running commit."""

    def beginning(site: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Where nothing is replaced, there is nothing to remove.
        elsewhere = (site in _OF_COMMIT and not commits) or (site == "during-retention" and args[1] is None)
        if not elsewhere and not (site == "forward" and args[0].mode is PassMode.BACKWARD):
            fault.visit(site)
        return original(*args, **kwargs)

    def commit(original: Callable[..., Any], store: CheckpointStore, step: int, manifest: Any) -> None:
        commits.append(step)
        try:
            original(store, step, manifest)
        finally:
            commits.clear()
        _, whole = manifest_of(store.path(step))
        path, record = max(whole.files.items(), key=lambda item: item[1].nbytes)
        fault.visit("after-rename", store.path(step) / path, 0, record.nbytes)

    def store(original: Callable[..., Any], writer: ShardWriter, file: Any, piece: Any, buffer: Any, pool: Any) -> None:
        original(writer, file, piece, buffer, _PoolAfterWrite(fault.visit, file, piece, pool))

    _replace(CheckpointStore, "commit", commit)
    _replace(ShardWriter, "_store", store)
    for (owner, name), site in _BEGINS.items():
        _replace(owner, name, partial(beginning, site))


def _replace(owner: Any, name: str, site: Callable[..., Any]) -> None:
    """Have `site(original, ...)` called in place of a method."""
    original = owner.__dict__[name]
    _UNDO.append(partial(setattr, owner, name, original))
    function = original.__func__ if isinstance(original, staticmethod) else original

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return site(function, *args, **kwargs)

    setattr(owner, name, replaced if function is original else staticmethod(replaced))


@dataclass(frozen=True, slots=True)
class _PoolAfterWrite:
    """A pool that a buffer comes back to once its bytes are written."""

    visit: Callable[..., None]
    file: Any
    piece: Any
    pool: Any

    def put(self, buffer: Any) -> None:
        try:
            self.visit("mid-write", Path(self.file.path), self.piece.where.start, self.piece.where.end)
        finally:
            self.pool.put(buffer)
