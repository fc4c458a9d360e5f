"""The line between a rank and its launcher: a pair of connected sockets that the rank inherits, so that nobody else can connect.

A rank tells the error that ends it, and in `Trainer.fit` that it can do without the others of its start (`recovers`). Where some
are `lost`, or it is `asked` to (after its present step, since more have come), it leaves the mesh, tells so (`rests`), and gets a
place among the ranks of the next start (`place`), or the line's end."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from zeromesh.environment import LINE, export, handed_over


class LauncherLine:
    """A rank's end of the line. Its methods do nothing where the launcher has ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.asked = ""  # Why the launcher has asked this rank to rest after its present step; empty: it has not.
        self.on_lost: Callable[[str], object] = lambda reason: None
        """Called by a thread with what the launcher tells of lost ranks of this start, until `leave`."""
        self._has_left, self._lock = False, Lock()
        self._places: SimpleQueue[Mapping[str, str] | None] = SimpleQueue()
        Thread(target=self._listen, name="zeromesh-line", daemon=True).start()

    def tell(self, **message: Any) -> None:
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while message := json.loads(self._connection.recv_bytes()):
                with self._lock:
                    self.asked = message.get("asked", self.asked)
                    if "place" in message:
                        self._has_left, self.asked = False, ""
                        self._places.put(message["place"])
                    elif "lost" in message and not self._has_left:
                        self.on_lost(message["lost"])
        self._places.put(None)

    def leave(self) -> None:
        """Heed no more what is told of this start, before this process leaves its mesh."""
        with self._lock:
            self._has_left = True

    def rest(self, reason: str) -> bool:
        """Wait for a place in the next start, with this process's part in no mesh; its variables are then set. Returns False where
        there is no next start. `reason` says why this rank has left its mesh."""
        self.tell(rests=reason)
        place = self._places.get()
        export(place or {})
        return place is not None


@cache
def line_to_launcher() -> LauncherLine | None:
    """Return this rank's end of the line; None where no launcher of zeromesh has started this process."""
    descriptor = handed_over(LINE)
    return None if descriptor is None else LauncherLine(Connection(os.dup(descriptor)))
