"""Files of strict JSON lines, each on disk at the end of its step, such as `metrics.jsonl`; and the seconds of startup."""

import io
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from zeromesh.errors import StorageError, errors_as
from zeromesh.files import json_object, open_regular, read_whole, refusals, write_whole
from zeromesh.trainer.config.yaml_reader import MAX_DEPTH

METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"
STARTS, RANKS, LOCK, CONFIG = "starts.jsonl", "ranks.json", "run.lock", "config.resolved.yaml"
RECOVERIES = "recoveries.jsonl"
"""Files of a run's directory, which docs/guide.md describes. A line of `STARTS` has `step` before the start, `host` of rank 0,
`hardware`, `parameters` of the model, arguments that a script has `given`, and `versions`. `LOCK` names rank 0's process while it
runs and after a kill; after any other end it has the outcome of the run, which begins with `ENDED`. A line of `RECOVERIES` has the
`cause`, when and after which `step` a rank has left the mesh or the run has gone back, `seconds` from then to the end of the next
step, `parts` of these, the `source` of the states, and `lost_steps`, which are done again."""
ENDED = "ended"
STEP_FIELDS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "peak_memory_bytes"),
    *("unit", "time"),
)
"""The names of the fields that a line of `METRICS` always has, except `unit`, which only models without tokens have."""


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends lines to a file of JSON lines, each passed to the operating system at once. An incomplete last line is removed when
    the file is opened, and lines of steps after `keep_through`, which a run that resumes there writes anew; None keeps all. Raises
    `StorageError`, which names the file, where it cannot be opened or written."""

    def __init__(self, path: str | os.PathLike[str], *, keep_through: int | None = None) -> None:
        self.path = Path(path)
        self._open(keep_through)

    def keep_through(self, step: int, *others: str) -> None:
        """Leave out the lines of later steps, here and in `others` of the same folder."""
        self.close()
        self._open(step)
        for path in filter(os.path.lexists, map(self.path.with_name, others)):
            MetricsWriter(path, keep_through=step).close()

    def _open(self, through: int | None) -> None:
        self._unwritten = b""
        with refusals(self.path, "opened"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with io.FileIO(open_regular(self.path, os.O_RDWR | os.O_CREAT), "r+") as file:
                content = file.read()
                kept = content[: content.rfind(b"\n") + 1]
                if through is not None:
                    lines = enumerate(kept.splitlines(keepends=True), 1)
                    kept = b"".join(line for at, line in lines if step_of(_parse(line, self.path, at)) <= through)
                if content.startswith(kept):
                    file.truncate(len(kept))  # A full disk has no room for a copy.
                else:
                    write_whole(self.path, kept)
            descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = io.FileIO(descriptor, "ab")  # A kill must lose no buffered line.

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, with `time` (seconds since 1970); numbers that are not finite become "nan", "inf" and "-inf". What could
        not be written is kept, and written before the next line. Raises `StorageError`, also where the file was closed."""
        self._unwritten += json.dumps(strict({**record, "time": round(time.time(), 3)}), allow_nan=False).encode("ascii") + b"\n"
        with errors_as(StorageError, f"{str(self.path)!r} cannot be written: ", OSError, ValueError):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str], broken: list[str] | None = None) -> list[dict[str, Any]]:
    """Return a metrics file's whole lines, none if it is missing. Raises `StorageError`, also for bad lines without `broken`."""
    content = b""
    with refusals(path, "read"), suppress(FileNotFoundError, NotADirectoryError):
        content = read_whole(path)
    found = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            found.append(_parse(line, path, number))
        except StorageError as error:
            if broken is None:
                raise
            broken.append(str(error))
    return found


def step_of(record: Mapping[str, Any]) -> float:
    """Return the step of a line; a line without one counts as before all steps, and is kept."""
    step = record.get("step")
    return step if isinstance(step, int) else -math.inf


def _parse(line: bytes, path: str | os.PathLike[str], number: int) -> dict[str, Any]:
    return json_object(line, lambda why: StorageError(f"{os.fspath(path)!r} line {number} {why}; move the file away"))


def strict(value: Any) -> Any:
    """Convert `value` to types of strict JSON: NumPy's and PyTorch's numbers to numbers, non-finite ones to strings."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if callable(getattr(value, "tolist", None)):  # A tensor or an array of any shape.
        return strict(value.tolist())
    return str(value)


def unstrict(value: Any) -> Any:
    """Invert `strict` for the non-finite numbers of a value."""
    if isinstance(value, Mapping):
        return {name: unstrict(item) for name, item in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf of nested mappings with its path of keys; empty and very deep mappings are leaves too."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value and len(above) < MAX_DEPTH:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def now() -> float:
    """Seconds since boot, on a clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_began() -> float:
    """Return the start time of this process on the clock of `now`; the present where it is unknown."""
    with suppress(OSError, ValueError, IndexError):
        words = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return min(now(), int(words[19]) / os.sysconf("SC_CLK_TCK"))
    return now()


class StartTimes:
    """Seconds of startup by part, in order, from `began` (on the clock of `now`) to the end of this process's first step."""

    def __init__(self, began: float | None = None) -> None:
        self._last = now() if began is None else began
        self.parts: dict[str, float] = {}
        self.over = False  # True after the first step.

    def begin(self) -> None:
        """Begin a part of startup now; the time since the last part ended, which the caller's own code took, counts nowhere."""
        self._last = now()

    def end(self, part: str, at: float | None = None) -> None:
        """Add the seconds since the end of the last part, up to `at` (default: the present), to `part`."""
        if not self.over:
            at = now() if at is None else at
            self.parts[part] = self.parts.get(part, 0.0) + max(0.0, at - self._last)
            self._last = at


def sentence(parts: Mapping[str, float]) -> str:
    """Return the total and its parts: `5.8 s (imports 3.6, data 1.1, first step 1.1)`."""
    shown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= 0.05)
    return f"{sum(parts.values()):.1f} s" + (f" ({shown})" if shown else "")
