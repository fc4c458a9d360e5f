"""What a process does that user code has forked while it was called: it ends, and leaves the run to its parent."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_children() -> Iterator[None]:
    """A process that is forked inside the block ends where it would leave it, with the exit status that it would have had.

    All that is around the block belongs to its parent: process groups, the board, locks, files that are written.
    """
    parent = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != parent:
            _end(error)
        raise
    if os.getpid() != parent:
        _end(None)


def _end(error: BaseException | None) -> None:
    code = error.code if isinstance(error, SystemExit) else error
    if isinstance(code, BaseException):
        traceback.print_exception(code)
    elif not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
