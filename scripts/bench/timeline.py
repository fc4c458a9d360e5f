"""The timeline of the CPU and the disk in one step: recorded by wrapping the few functions in which things happen, and drawn.

computing   forward, backward, optimizer: of the training thread; waiting: it stands still for the file tier or for a peer
disk        pieces that threads read and write, each with its bytes
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from zeromesh.offload import FileTier, Transfer
from zeromesh.offload.io.transfer import StagingPool
from zeromesh.optim.fused_optimizer import BucketOptimizer
from zeromesh.telemetry.watchdog import Watchdog
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.zero.passes import Passes

Event = tuple[str, float, float, int]
"""What, from when to when in seconds, and how many bytes."""
_LANES = {
    "forward": ("training thread", "#5b8fb9"),
    "backward": ("training thread", "#30638e"),
    "optimizer": ("training thread", "#edae49"),
    "waiting for files": ("training thread", "#d1495b"),
    "waiting for a peer": ("training thread", "#b8b8b8"),
    "read": ("disk reads", "#66a182"),
    "write": ("disk writes", "#8d5a97"),
}


class Recorder:
    """Events of the steps that it is `on` for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on = False
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block the functions are wrapped."""
        wrapped = (
            (Stepper, "_loss_of", "forward", False),
            (Passes, "_run_backward", "backward", False),
            (BucketOptimizer, "step", "optimizer", False),
            (Transfer, "wait_for_end", "waiting for files", True),
            (StagingPool, "get", "waiting for files", True),
            (Watchdog, "wait", "waiting for a peer", True),
            (FileTier, "read", "read", False),
            (FileTier, "write", "write", False),
        )
        patches = [
            patch.object(owner, name, self._timed(getattr(owner, name), what, own=own)) for owner, name, what, own in wrapped
        ]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def _timed(self, function: Callable[..., Any], what: str, *, own: bool) -> Callable[..., Any]:
        """`own`: in other threads than the training one it does not count."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                if self.on and not (own and threading.get_ident() != self._thread):
                    nbytes = arguments[1].numel() if what in ("read", "write") else 0
                    self.events.append((what, began, time.perf_counter(), nbytes))

        return call


def totals(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Seconds and bytes by what was done."""
    found: dict[str, dict[str, float]] = {}
    for what, began, ended, nbytes in events:
        sums = found.setdefault(what, {"seconds": 0.0, "bytes": 0})
        sums["seconds"] += ended - began
        sums["bytes"] += nbytes
    return found


def draw(path: Path, steps: Mapping[str, Sequence[Event]]) -> None:
    """A picture of one step of each of several runs, below each other, on one axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, all_axes = pyplot.subplots(
        len(steps), 1, figsize=(11, 1.3 + 1.5 * len(steps)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (title, events) in zip(all_axes[:, 0], steps.items(), strict=True):
        begin = min(began for _, began, _, _ in events)
        lanes = list(dict.fromkeys(lane for lane, _ in _LANES.values()))
        for what, (lane, colour) in _LANES.items():
            spans = [(began - begin, max(1e-4, ended - began)) for name, began, ended, _ in events if name == what]
            shade = 0.45 if what in ("read", "write") else 1.0
            axes.broken_barh(spans, (-lanes.index(lane) - 0.4, 0.8), facecolors=colour, alpha=shade)
        axes.set_yticks([-number for number in range(len(lanes))], lanes)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel("seconds")
    handles = [Patch(color=colour, label=what) for what, (_, colour) in _LANES.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
