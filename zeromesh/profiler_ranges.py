"""Named ranges of what a rank does, which torch's profiler shows beside its operators.

    with ranges.named("gather", unit.name):      a block
    ranges.enter("forward of", unit.name)        from one call to another, innermost first out
    ranges.turn_to("backward of", unit.name)     from one call to the next of its kind

Nobody looks at them unless a block of `recording()` is open; until then each costs a look at a flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

IN_TURN = "backward of "
"""How names of ranges begin that last until the next of their kind begins: they end amid an operator of autograd's."""

_NOTHING: AbstractContextManager[None] = nullcontext()


class _Open:
    """Ranges that are open now."""

    def __init__(self) -> None:
        self.nested: list[record_function] = []
        self.turn: record_function | None = None


_open: _Open | None = None


@contextmanager
def recording() -> Iterator[None]:
    """Inside the block ranges are recorded. One at a time, as torch's profiler is."""
    global _open
    _open = _Open()
    try:
        yield
    finally:
        unwind()
        _open = None


def named(what: str, of: str = "") -> AbstractContextManager[object]:
    """A block, named by what is done and to what."""
    return _NOTHING if _open is None else record_function(f"{what} {of}".rstrip())


def enter(what: str, of: str) -> None:
    """Begin a range that `leave` ends."""
    if _open is not None:
        _open.nested.append(_begun(f"{what} {of}"))


def leave() -> None:
    """End the latest range that `enter` began, if any is left."""
    if _open is not None and _open.nested:
        _end(_open.nested.pop())


def turn_to(of: str | None) -> None:
    """Backward has reached `of`: the range of what it had reached before ends. None: backward is over."""
    if _open is None:
        return
    if _open.turn is not None:
        _end(_open.turn)
    _open.turn = None if of is None else _begun(f"{IN_TURN}{of}")


def unwind() -> None:
    """End all that is open: what was begun is over, well or not."""
    turn_to(None)
    while _open is not None and _open.nested:
        leave()


def _begun(name: str) -> record_function:
    made = record_function(name)
    made.__enter__()  # type: ignore[no-untyped-call]
    return made


def _end(opened: record_function) -> None:
    opened.__exit__(None, None, None)
