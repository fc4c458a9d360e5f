"""`DeviceWorks`: collectives in flight on an accelerator; the only module that waits for or queries torch's handles of them.

The host waits for a device without a timeout; torch's wait with one aborts the communicator. So a thread supervises the collectives
in flight: when a peer is gone, has failed or is late, it aborts the communicators, so that the host's wait returns and this rank's
next use of others raises the error that names the peer. If the host does not return, its process is ended."""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zeromesh.environment import set_default
from zeromesh.errors import CollectiveError
from zeromesh.files import write_whole
from zeromesh.mesh.run_store import START_SECONDS
from zeromesh.offload import accelerator
from zeromesh.overrides import override
from zeromesh.telemetry.watchdog import AsyncWork, Watchdog

_LOGGER = logging.getLogger(__name__)
_POLL_SECONDS = 1e-3
_TRACE = "collectives_rank_"  # the prefix of the name of a rank's file of latest collectives


def record_collectives(traces: Path | None) -> None:
    """Make torch's flight recorder keep the latest collectives of this process, and dump them into `traces` when torch aborts the
    process. Call it before groups are made; variables that the user has set are left alone."""
    # As many as newer versions keep by default; older ones kept none. The second name is an older one, of which torch warns.
    set_default("TORCH_FR_BUFFER_SIZE", "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if traces is not None:
        set_default("TORCH_FR_DUMP_TEMP_FILE", str(traces / _TRACE), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class _Pending(NamedTuple):
    """A communication with the ranks `peers` that the host or the device waits for; `what` names it in errors."""

    done: Callable[[], bool]
    peers: Sequence[int]
    what: str


class DeviceWorks:
    """The collectives in flight of one mesh on an accelerator. All threads of the process may use it."""

    GRACE_SECONDS = 20.0
    """Seconds that the host may take to return after communicators were aborted."""

    def __init__(self, device: torch.device, watch: Watchdog, *, traces: Path | None) -> None:
        """Start supervision. `traces` is the folder for the latest collectives of a rank that finds an error; None: no files."""
        self.device, self.watch, self._traces = device, watch, traces
        self._pending: deque[_Pending] = deque()
        self._computing: deque[Callable[[], bool]] = deque()
        """Queries in launch order, each of which returns True once the device has computed all that was launched before it."""
        self._blocking_host: _Pending | None = None  # It blocks the host itself, in a call without a timeout.
        self._patience: tuple[_Pending, Iterator[None]] | None = None
        self.groups: list[dist.ProcessGroup] = []
        """The connected groups, which are supervised until they are destroyed."""
        self.nbytes = 0
        """Device bytes used by communicators as the driver counts them; torch's allocators do not see them."""
        watch.on_beat, watch.on_post = self._check_pending, lambda: self._computing.append(self._event())

    def order(self, work: AsyncWork, peers: Sequence[int], what: str) -> None:
        """Make device work that this thread launches from now on wait for the collective `work`; the host does not wait. Raises
        `CollectiveError` when an earlier collective cannot complete."""
        self.watch.raise_if_broken()
        self.watch.operations_begun += 1
        work.wait()
        # An event is kept instead of the collective's handle, which would keep its tensors alive.
        self._pending.append(_Pending(done=self._event(), peers=peers, what=what))

    def _event(self) -> Callable[[], bool]:
        return accelerator.record_event(accelerator.current_stream(self.device)).query

    def connect(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Connect the communicator of a group at once. Made at its first use instead, ranks could wait for one another in different
        groups. All its ranks call this, and connect the groups that they share in the same order. Raises `CollectiveError`."""

        def bytes_of_others() -> int:  # In use outside of torch's allocator in this process.
            memory = accelerator.device_memory(self.device)
            return memory.total - memory.free - memory.reserved

        what = f"connection of the devices of ranks {', '.join(map(str, ranks))}"
        self.groups.append(group)
        count = torch.ones(1, device=self.device)
        before = bytes_of_others()
        blocking = _Pending(done=lambda: False, peers=ranks, what=what)
        with override(self, "_blocking_host", blocking), self.watch.patience(START_SECONDS):
            work = dist.all_reduce(count, group=group, async_op=True)
            self.watch.wait(work.is_completed, ranks, what, lambda _seconds: time.sleep(_POLL_SECONDS))
            try:
                work.wait()
            except RuntimeError as error:
                raise self.watch.broken_transport(error, ranks, what) from error
        if int(count) != len(ranks):
            raise CollectiveError(f"{what}: a sum of one for each of {len(ranks)} ranks gave {int(count)}")
        self.nbytes += max(0, bytes_of_others() - before)

    def _check_pending(self) -> None:
        """Check the oldest communication in flight; called a few times a second by the heartbeat thread. Work that the device
        finishes counts as progress of this rank, whose host may be blocked far ahead of the device."""
        moved = False
        try:
            while self._pending and self._pending[0].done():
                self._pending.popleft()
                moved = True
            while self._computing and self._computing[0]():
                self._computing.popleft()
                moved = True
        except RuntimeError:  # The device has failed; its next use raises the error.
            self._pending.clear()
            self._computing.clear()
        if moved:
            self.watch.board.beat()
        first = self._blocking_host or (self._pending[0] if self._pending else None)
        if first is None or self.watch.broken is not None:
            return
        if moved or self._patience is None or self._patience[0] is not first:
            self._patience = first, self.watch.patience_with(first.peers, first.what)
            return
        try:
            next(self._patience[1])
        except CollectiveError as error:
            self._abort_communicators(error)

    def _abort_communicators(self, error: CollectiveError) -> None:
        """Abort the communicators so that the host returns from its wait and raises `error`; if it does not, end the process. The
        flight recorder's latest collectives of this rank are written before, and named in the error."""
        where, dump = "", getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is not None and self._traces is not None:
            path = self._traces / f"{_TRACE}{dist.get_rank()}"
            tool = f"torchfrtrace --prefix {_TRACE} {self._traces}"
            where = f". The latest collectives of this rank are in {path}; {tool} compares those of all"
            try:
                self._traces.mkdir(parents=True, exist_ok=True)
                write_whole(path, dump(), sync=False)
            except (OSError, RuntimeError) as failure:
                where = f". The latest collectives could not be written to {path}: {failure}"
        found = CollectiveError(f"{error}{where}")
        self.watch.broken, self.watch.may_hang = found, True
        self.watch.fail(found)
        _LOGGER.error("%s", found)

        def abort(group: dist.ProcessGroup) -> None:
            with suppress(RuntimeError):  # A group that cannot be aborted ends with the process.
                group.abort()

        # All at once, each in a thread: an abort waits until the device has left the group's collectives, which may be
        # queued behind those of another group, or never does if the device is lost.
        for group in self.groups:
            threading.Thread(target=abort, args=(group,), name="zeromesh-abort", daemon=True).start()
        if not self.watch.error_raised.wait(self.GRACE_SECONDS) and not self.watch.closed.is_set():
            sys.excepthook(CollectiveError, found, None)  # `become_worker` records errors there for the launcher.
            sys.stderr.flush()
            os._exit(1)
