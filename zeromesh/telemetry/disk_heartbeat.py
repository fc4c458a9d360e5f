"""`DiskHeartbeat`: tells the other ranks that this one lives while it waits for a disk, and what for."""

from __future__ import annotations

import threading

from zeromesh.disk_calls import longest
from zeromesh.telemetry.status_board import Note, StatusBoard


class DiskHeartbeat:
    """Moves this rank's progress counter while a disk is waited for, for at most `patience_seconds` a call.

    It does so from a thread of its own, which stops with the process: a rank that is stopped or gone has no pulse. What the rank
    waits for stays on the board for as long as the call goes on, so that the error after the patience can name it.
    """

    def __init__(self, board: StatusBoard, period_seconds: float) -> None:
        self.patience_seconds = 600.0
        self._board = board
        self._period = period_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeromesh-pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ended.wait(self._period):
            call = longest()
            if call is None or call.in_all < self._period:
                self._board.write(Note.DISK, 0)
                continue
            number += 1
            late = call.seconds >= self.patience_seconds
            limit = f", longer than checkpoint.timeout_seconds ({self.patience_seconds:g})" if late else ""
            self._board.write(Note.DISK, number, f"{call.what} for {call.seconds:.0f} seconds{limit}")
            if not late:
                self._board.beat()
