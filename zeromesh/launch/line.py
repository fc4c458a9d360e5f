"""The line between a rank and its launcher: a pair of connected sockets that the rank inherits, so that nobody else can connect.

A rank tells the error that ends it, and in `Trainer.fit` that it can do without the others of its start (`recovers`). Where some
are `lost`, or it is `asked` to (after its present step, since more have come), it leaves the mesh, tells so (`rests`), and gets a
place among the ranks of the next start (`place`), or the line's end."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from zeromesh.environment import LINE, export, handed_over


class LauncherLine:
    """A rank's end of the line. Its methods do nothing where the launcher has ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.lost = ""  # What the launcher has told of ranks that are lost; empty: nothing.
        self.asked = ""  # Why it has asked this rank to rest after its present step; empty: it has not.

    def tell(self, **message: Any) -> None:
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def listen(self, seconds: float | None = 0.0) -> Mapping[str, str] | None:
        """Handle the messages that have come, after at most `seconds` (None: any time) for each; returns the variables of a place
        in the next start, or None without one."""
        with suppress(EOFError, OSError):
            while self._connection.poll(seconds):
                message = json.loads(self._connection.recv_bytes())
                self.lost, self.asked = message.get("lost", self.lost), message.get("asked", self.asked)
                if "place" in message:
                    return dict(message["place"])
        return None

    def rest(self, reason: str) -> bool:
        """Wait for a place in the next start, with this process's part in no mesh; its variables are then set. Returns False where
        there is no next start. `reason` says why this rank has left its mesh."""
        self.tell(rests=reason)
        place = self.listen(None)
        if place is None:
            return False
        export(place)
        self.lost = self.asked = ""
        return True


@cache
def line_to_launcher() -> LauncherLine | None:
    """Return this rank's end of the line; None where no launcher of zeromesh has started this process."""
    descriptor = handed_over(LINE)
    return None if descriptor is None else LauncherLine(Connection(os.dup(descriptor)))
