"""Streams a rank's part of a checkpoint from live shards to files through staging buffers, with checksums.

The state is not copied as a whole, except rows exchanged between tensor ranks (`row_exchange`), so a save takes a few staging
buffers of memory. Elements that the next update changes first are written first, and the update waits for elements that are not
copied yet (`release`). A device's elements are copied into pinned memory beside training, on a stream that is ordered after all
work launched before the save.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, checksum
from zeromesh.checkpoint.io.file_slices import GRID
from zeromesh.checkpoint.io.write_plan import WritePiece
from zeromesh.errors import CheckpointError
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import StagingPool, pages

CPU = torch.device("cpu")
STAGING_BUFFERS = 4
_IO_THREADS = 2
_PROGRESS_SECONDS = 0.2


def in_thread(name: str, work: Callable[[], Any], *, daemon: bool = False) -> Future[Any]:
    """Run work in a thread of that name; the future has its result or error."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits has to know
            future.set_exception(error)

    threading.Thread(target=run, name=f"zeromesh-{name}", daemon=daemon).start()
    return future


class ShardWriter:
    """Writes one rank's pieces of a checkpoint in a thread: `start`, then `release` before each update, and `join` at the end."""

    def __init__(self, directory: Path, pieces: Sequence[WritePiece], rank: int, device: torch.device = CPU) -> None:
        """`pieces` are written in this order. `device` is this rank's compute device."""
        self._directory = directory
        self._device = device
        self._pieces = deque(pieces)
        self._rank = rank
        self._left = Counter(owner for piece in pieces for owner in piece.owners)
        """The number of pieces with elements of each owner that are not copied yet."""
        self._changed = threading.Condition()
        self._checksums: list[ChecksumPiece] = []
        self._done = 0
        self._written: Future[Any] = Future()

    def start(self) -> Future[Any]:
        """Begin to write in a thread; the future is done when all writing has ended."""
        work = self._write_all
        if is_accelerator(self._device):
            work = partial(self._write_beside, accelerator.record(accelerator.current_stream(self._device)))
        self._written = in_thread("save", work, daemon=True)
        return self._written

    def release(self, owner: int, on_progress: Callable[[], None]) -> float:
        """Wait until the elements of `owner` may change, because they were copied or the save has failed. `on_progress` is called
        now and then while writing goes on. Returns the seconds waited."""
        if not self._left.get(owner):
            return 0.0
        return self._wait(lambda: not self._left.get(owner), on_progress)

    def join(self, on_progress: Callable[[], None]) -> list[ChecksumPiece]:
        """Wait until everything is on the disk; returns the pieces that this rank has written.

        Raises:
            StorageError, CheckpointError, OSError: for the failure of the thread.
        """
        self._wait(self._written.done, on_progress)
        self._written.result()
        return sorted(self._checksums, key=lambda piece: (piece.path, piece.begin))

    def _wait(self, over: Callable[[], bool], on_progress: Callable[[], None]) -> float:
        began = time.monotonic()
        seen = -1
        while not over():
            if self._done != seen:  # Peers wait for a rank whose disk is at work, not for one whose disk hangs.
                seen = self._done
                on_progress()
            with self._changed:
                self._changed.wait_for(over, timeout=_PROGRESS_SECONDS)
        return time.monotonic() - began

    def _write_beside(self, launched: torch.Event) -> None:
        """Write from a device, on a stream that waits for `launched` and for nothing later."""
        with accelerator.beside(launched):
            self._write_all()

    def _write_all(self) -> None:
        try:
            pool = StagingPool(STAGING_BUFFERS, GRID, accelerator.pinned if is_accelerator(self._device) else pages)
            with ExitStack() as stack, ThreadPoolExecutor(_IO_THREADS) as threads:
                files = {
                    path: stack.enter_context(PositionalFile(self._directory / path, write=True))
                    for path in {piece.path for piece in self._pieces}
                }
                in_flight: deque[Future[None]] = deque()
                while self._pieces:
                    piece = self._pieces.popleft()  # Dropped here with its memory, if that is a copy.
                    buffer = pool.take()
                    data = buffer[: piece.where.length]
                    self._fill(piece, data)
                    in_flight.append(threads.submit(self._store, files[piece.path], piece, data, buffer, pool))
                    while in_flight and (in_flight[0].done() or len(in_flight) > STAGING_BUFFERS):
                        in_flight.popleft().result()
                for future in in_flight:
                    future.result()
                for future in [threads.submit(file.sync) for file in files.values()]:
                    future.result()
        finally:
            with self._changed:
                self._left.clear()
                self._changed.notify_all()

    def _fill(self, piece: WritePiece, data: torch.Tensor) -> None:
        """Copy the bytes of a piece into `data`; afterwards the elements may change."""
        filled = 0
        for source in piece.sources:
            first = source.begin - piece.where.start
            source.fill(data[first : first + source.nbytes])
            filled += source.nbytes
        if filled != piece.where.length:
            raise CheckpointError(
                f"{piece.path}: {filled} of the bytes [{piece.where.start}, {piece.where.end}) belong to some rank; the ranks' "
                "parts do not make whole tensors"
            )
        with self._changed:
            for owner in piece.owners:
                self._left[owner] -= 1
            self._changed.notify_all()

    def _store(
        self, file: PositionalFile, piece: WritePiece, data: torch.Tensor, buffer: torch.Tensor, pool: StagingPool
    ) -> None:
        where = piece.where
        try:
            digest = checksum(data)
            file.write(data, where.start)
        finally:
            pool.give(buffer)
        with self._changed:
            self._checksums.append(
                ChecksumPiece(path=piece.path, begin=where.start, end=where.end, checksum=digest, rank=self._rank)
            )
            self._done += 1
            self._changed.notify_all()
