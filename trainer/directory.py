"""The directory of a run: its resolved configuration and its metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeromesh.errors import StorageError
from zeromesh.trainer.config import TrainerConfig
from zeromesh.trainer.metrics import MetricsWriter


class RunDirectory:
    """Where a run writes; rank 0 does so.

    Raises:
        StorageError: at birth, if it cannot be written; what was in it is still there then.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self._writes = rank == 0
        if not self._writes:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise self._unwritable("permission denied")

    def _unwritable(self, reason: str) -> StorageError:
        return StorageError(f"{str(self.path)!r} cannot be written ({reason}); change run.output_dir")

    @contextmanager
    def open(self, config: TrainerConfig, step: int) -> Iterator[MetricsWriter | None]:
        """Write the resolved configuration, and hand out the writer of metrics, which continues after `step`."""
        if not self._writes:
            yield None
            return
        try:
            (self.path / "config.resolved.yaml").write_text(config.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        with MetricsWriter(self.path / "metrics.jsonl", keep_through=step) as writer:
            yield writer
