"""Where checkpoints are: what a path on the command line means."""

from __future__ import annotations

from pathlib import Path

from zeromesh.checkpoint.format import manifest
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import ConfigError
from zeromesh.trainer.checkpoints.manager import FOLDER


def store_at(path: Path) -> CheckpointStore:
    """The checkpoints of a run's directory, or in a directory of checkpoints. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    for root in (path / FOLDER, path):
        store = CheckpointStore(root)
        if store.steps() or store.leftovers():
            return store
    hint = "; it is one: `inspect` shows it" if (path / manifest.NAME).exists() else ""
    raise ConfigError(f"{path} holds no checkpoints: neither step-* nor {FOLDER}/step-*{hint}")


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint that a path is, or all of a run, newest first. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if (path / manifest.NAME).exists() or CheckpointStore.is_checkpoint(path):
        return [path]
    store = store_at(path)
    steps = store.steps()
    if not steps:
        left = ", ".join(store.leftovers())
        raise ConfigError(
            f"{store.root} holds no checkpoint, but {left}, which a kill has left behind or a run is writing"
        )
    return [store.path(step) for step in steps]


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path is, or the newest of a run. Raises `ConfigError` where there is none."""
    return checkpoints_at(path)[0]
