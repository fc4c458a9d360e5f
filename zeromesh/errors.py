"""The error classes of the project, and helpers for messages. A mistake that the user can correct is a `ValueError`, a broken
invariant a `RuntimeError`. Every message says what was given, what is allowed, where, and what to do next."""

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice


def printable(text: str) -> str:
    r"""Return the text in one line, with control characters and the like as escapes, such as `\x1b`."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def some(names: Collection[object], shown: int = 3) -> str:
    """Join the first `shown` names for a message, and say how many more there are."""
    text = ", ".join(str(name) for name in islice(names, shown))
    return text + (f" and {len(names) - shown} more" if len(names) > shown else "")


def first_lines(lines: Sequence[str], shown: int) -> list[str]:
    """Return the first `shown` lines of a message, and a line that says how many more there are."""
    return [*lines[:shown], *([f"and {len(lines) - shown:,} more"] if len(lines) > shown else [])]


def plural(count: int, noun: str) -> str:
    """Return a noun in the number that goes with `count`: `step`, `steps`; `batch`, `batches`; `directory`, `directories`."""
    if count == 1:
        return noun
    if noun.endswith("ry"):
        return noun.removesuffix("y") + "ies"
    return noun + ("es" if noun.endswith(("ch", "s", "x")) else "s")


def counted(count: int, noun: str, spec: str = "") -> str:
    """Return `1 step` or `2 steps`; `spec` is the format of the number."""
    return f"{count:{spec}} {plural(count, noun)}"


def ranks_text(ranks: Collection[int], shown: int = 1 << 16) -> str:
    """Return `rank 3` or `ranks 1, 2, 5` for a message, with at most `shown` numbers."""
    return f"{plural(len(ranks), 'rank')} {some(ranks, shown)}"


def summary(error: BaseException, lines: int = 1) -> str:
    """Return the class of an error and the first `lines` of its text that are not empty."""
    text = " ".join(islice(filter(None, map(str.strip, str(error).splitlines())), lines))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ZeromeshError(Exception):
    """The base of every error that zeromesh raises on purpose. Names in a message may be untrusted: they are made `printable`."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigError(ZeromeshError, ValueError):
    """The configuration is wrong. `problems` holds one line per mistake; all of them are reported at once."""

    def __init__(self, problems: str | Sequence[str], *, where: str = "") -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        self.where = where
        heading = [] if len(self.problems) == 1 else [f"{len(self.problems)} problems"]
        text = "\n  - ".join([*heading, *self.problems])
        super().__init__(f"{where}: {text}" if where else text)


_PATH_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.ENOENT})
_DISK_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOSPC, errno.EDQUOT})


def refused_path(error: OSError) -> ZeromeshError | None:
    """Return the error for a path refused by the system or a failed disk; None for another error of the system."""
    named = isinstance(error.filename, str | bytes)
    if not named and error.errno not in _DISK_ERRNOS:
        return None
    where = repr(os.fsdecode(error.filename)) if named else ""
    reason = error.strerror or str(error)
    if error.errno in _PATH_ERRNOS:
        return ConfigError(reason, where=where)
    return StorageError(f"{where}: {reason}".lstrip(": "))


@contextmanager
def library_errors(where: str = "", before: str = "", kind: type[ZeromeshError] | None = None) -> Iterator[None]:
    """Raise a library's errors about user input as a `ConfigError` of the key `where`, or as `kind`; its text follows `before`."""
    try:
        yield
    except (ZeromeshError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # A panic of a Rust library is no `Exception`.
        text = before + summary(error, lines=2)
        raise (ConfigError(text, where=where) if kind is None else kind(text)) from error


@contextmanager
def errors_as(kind: type[Exception], before: str, *caught: type[BaseException], after: str = "") -> Iterator[None]:
    """Raise errors of the `caught` classes as `kind`, with their text, or the system's reason, between `before` and `after`."""
    try:
        yield
    except caught as error:
        raise kind(f"{before}{getattr(error, 'strerror', None) or error}{after}") from error


class DataError(ZeromeshError, ValueError):
    """A dataset, tokenizer or batch cannot be trained on."""


class QueueFullError(ZeromeshError, RuntimeError):
    """The number of open requests to a model has reached its limit."""


class LayoutError(ZeromeshError, ValueError):
    """A mesh, a bucket or a model does not fit the requested layout."""


class PhaseError(ZeromeshError, RuntimeError):
    """An operation is not allowed in the current phase of a unit."""


class CheckpointError(ZeromeshError, RuntimeError):
    """A checkpoint cannot be written or read."""


class StorageError(ZeromeshError, RuntimeError):
    """Memory or a file could not be allocated, read or written."""


class CollectiveError(ZeromeshError, RuntimeError):
    """Ranks that should act together do not: one is gone, late, or runs another operation."""


class MachineError(ZeromeshError, RuntimeError):
    """A rank computes other results than the others do."""

    left_out = False  # True if its run goes on without the rank.


class WeightsDifferError(ZeromeshError, RuntimeError):
    """Ranks hold different values of the same weights."""


class TransferError(ZeromeshError, RuntimeError):
    """A transfer of weights to or from another process failed."""


class NonFiniteError(ZeromeshError, RuntimeError):
    """A gradient or a loss is NaN or infinite, and the run must stop then."""
