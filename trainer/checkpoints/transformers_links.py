"""Checkpoints by the names that transformers gives them: `checkpoint-STEP` in the directory of a run, a link to the checkpoint.

What looks for them there finds a directory that `from_pretrained` loads: callbacks in `on_save`, `get_last_checkpoint`, and
`resume_from_checkpoint`.
"""

from __future__ import annotations

import re
from pathlib import Path

from zeromesh.checkpoint.store import CheckpointStore

_NAME = re.compile(r"checkpoint-\d+")


def link_of(checkpoint: Path) -> Path:
    """The link to a checkpoint of a run."""
    return checkpoint.parent.parent / f"checkpoint-{CheckpointStore.step_of(checkpoint)}"


def renew_links(store: CheckpointStore) -> str:
    """Make a link for each checkpoint of a run, and remove those to checkpoints that are gone; what is no link stays.

    Returns why that could not be done; empty where it was.
    """
    try:
        wanted = {link_of(store.path(step)): store.path(step) for step in store.steps()}
        for path in store.root.parent.iterdir():
            if _NAME.fullmatch(path.name) and path.is_symlink() and path not in wanted:
                path.unlink()
        for link, checkpoint in wanted.items():
            if not link.is_symlink() and not link.exists():
                link.symlink_to(checkpoint.relative_to(link.parent), target_is_directory=True)
    except OSError as error:
        return f"{error.filename or store.root}: {error.strerror or error}"
    return ""
