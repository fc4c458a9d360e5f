"""Keeping the library's own remarks off the terminal where they say nothing to the person who trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_library() -> Iterator[None]:
    """Inside the block transformers logs nothing but errors, and draws no progress bars."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def only_rank_0_logs(rank: int) -> Iterator[None]:
    """Inside the block rank 0 alone logs and warns what all ranks would."""
    if rank == 0:
        yield
        return
    with quiet_library(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
