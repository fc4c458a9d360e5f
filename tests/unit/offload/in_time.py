"""A bound on what may hang when it is wrong."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

SECONDS = 30.0
"""After which something hangs."""


def in_time(call: Callable[[], object]) -> None:
    """Do what may hang: raises what `call` raises, or `TimeoutError`."""
    found: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is the test's
            found.set_exception(error)
        else:
            found.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    found.result(SECONDS)
