"""The place where a part computes: its device, its rank among others, the time that it has, and how it says what it has found."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.device import rows
from bench.device.budget import Settings
from zeromesh.offload import accelerator

_COLLECTIONS, _PAUSE_SECONDS = 3, 0.05
"""One collection does not always find all: other threads let go of graphs a moment later."""
_ROOT = Path(__file__).resolve().parents[3]


class Place:
    """One rank of a part."""

    def __init__(self, part: str, settings: Settings) -> None:
        self.part, self.dry, self.folder = part, settings.dry, Path(settings.folder)
        self.rank, self.ranks = int(os.environ["RANK"]), settings.ranks
        self._end = time.monotonic() + settings.seconds
        self.simulated = settings.device == "sim"
        self._races: list[str] = []
        if self.simulated:
            sys.path.insert(0, str(_ROOT))
            from tests.simulated import collectives, device

            device.load()
            collectives.register()
        if settings.device != "auto":
            torch.set_num_threads(1)
        self.device = torch.device("cpu") if settings.device == "cpu" else accelerator.pick_device(self.rank)

    @property
    def seconds_left(self) -> float:
        """Seconds until the part is ended."""
        return self._end - time.monotonic()

    @property
    def name(self) -> str:
        """The name of the device."""
        return accelerator.device_name(self.device) if accelerator.is_accelerator(self.device) else "CPU"

    def join(self) -> None:
        """Join the other ranks in torch's process group, for systems that do not do it themselves."""
        if dist.is_initialized():
            return
        backend = "gloo"
        if accelerator.is_accelerator(self.device):
            backend = f"cpu:gloo,{self.device.type}:{dist.get_default_backend_for_device(self.device)}"
        dist.init_process_group(backend)

    def leave(self) -> None:
        """Leave the process group at the end, and say what the simulated device has seen."""
        if self.simulated:
            self._judge(own=True)
            found = list(dict.fromkeys(self._races))
            self.say(rows.figure("races on the simulated device", len(found), most=0, reason="\n".join(found[:5])))
        if dist.is_initialized():
            dist.destroy_process_group()

    # What is found

    def say(self, row: rows.Row) -> None:
        """Add a row to the table; that of rank 0 counts."""
        rows.say(row)

    def figure(self, what: str, value: float, unit: str = "", *, timing: bool = False, **limits: Any) -> None:
        """Add a figure. `timing`: it says nothing in a dry run."""
        self.say(rows.figure(what, value, unit, judged=not (timing and self.dry), **limits))

    @contextmanager
    def trying(self, what: str, *, own: bool = True) -> Iterator[None]:
        """Around something that may fail: then that is what is said, and the next is tried. On several ranks a failure ends the
        part, since others may wait for this one. `own`: it is zeromesh's, whose races count."""
        rows.say_begin(what)
        try:
            yield
        except SkippedError as skipped:
            self.say(rows.not_run(what, str(skipped)))
        except Exception as error:
            if self.ranks > 1:
                raise
            lines = traceback.format_exception(error)
            self.say(rows.broken(what, "".join(lines).strip()[-1500:]))
        self.clean()
        self._judge(own=own)

    def _judge(self, *, own: bool) -> None:
        """Take what the simulated device has seen."""
        if self.simulated:
            from tests.simulated import device

            torch.accelerator.synchronize()
            self._races += device.races() if own else []
            device.clear()

    # Time and memory

    def enough(self, what: str, seconds: float) -> bool:
        """Return True if `seconds` are left; else say that `what` is not run. All ranks call it, and hear the same."""
        left = self._left()
        if left < seconds:
            self.say(rows.not_run(what, f"{left:.0f} s are left of the part's time, and it needs about {seconds:.0f}"))
        return left >= seconds

    def has(self, seconds: float) -> bool:
        """Return True if `seconds` are left. All ranks call it, and hear the same."""
        return self._left() >= seconds

    def _left(self) -> float:
        left = torch.tensor(self.seconds_left)
        if self.ranks > 1 and dist.is_initialized():
            dist.all_reduce(left, op=dist.ReduceOp.MIN)
        return float(left)

    def synchronize(self) -> None:
        """Wait for the device, and for the other ranks."""
        accelerator.synchronize(self.device)
        if self.ranks > 1 and dist.is_initialized():
            dist.barrier()

    def seconds(self, work: Callable[[], object]) -> float:
        """How long it takes, on all ranks."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def clean(self) -> None:
        """Give back memory that is not used any more."""
        for _ in range(_COLLECTIONS):
            gc.collect()
            time.sleep(_PAUSE_SECONDS)
        if accelerator.is_accelerator(self.device):
            accelerator.synchronize(self.device)
            torch.accelerator.empty_cache()
            # Pinned memory, which torch would keep for the next who asks: it has no public name for this.
            getattr(torch._C, "_host_emptyCache", lambda: None)()

    def watch_peak(self) -> None:
        """Begin to watch for the highest memory."""
        if accelerator.is_accelerator(self.device):
            torch.accelerator.reset_peak_memory_stats(self.device)

    def held(self) -> int:
        """Bytes of the device that tensors have now; 0 on a CPU."""
        return accelerator.device_memory(self.device).allocated if accelerator.is_accelerator(self.device) else 0

    def peak(self) -> int:
        """The most of them since `watch_peak`."""
        return accelerator.device_memory(self.device).peak if accelerator.is_accelerator(self.device) else 0

    def free(self) -> int:
        """Free bytes of the device's memory; in a dry run as many as tiny models need."""
        if self.dry or not accelerator.is_accelerator(self.device):
            return 1 << 34
        return accelerator.device_memory(self.device).free


class SkippedError(Exception):
    """Raised inside `trying` for what cannot be tried here; the text says why."""
