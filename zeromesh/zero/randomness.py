"""What forward and the data draw depends on what is computed, and not on who computes it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from zeromesh.generators import seed_generators


def seed_forward(seed: int, step: int, first_sample: int, unit: str) -> None:
    """Seed the generators before a unit's forward on the microbatch whose first sample has the global index `first_sample`.

    NumPy's is among them: models of speech draw from it what they mask.
    """
    number = _number(f"{seed}/{step}/{first_sample}/{unit}")
    seed_generators(number)
    np.random.seed(number & 0xFFFFFFFF)


def _number(text: str) -> int:
    """63 bits that look random."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def data_randomness(seed: int, first_sample: int) -> Iterator[None]:
    """Inside the block datasets and collators draw numbers that belong to the microbatch whose first sample has this index.

    That holds for the global generators of PyTorch, NumPy and Python, which are afterwards as they were.
    """
    python = random.getstate()
    number = _number(f"{seed}/data/{first_sample}")
    with own_randomness():
        seed_generators(number)
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(python)


@contextmanager
def own_randomness() -> Iterator[None]:
    """What is drawn inside the block does not disturb what the user draws elsewhere."""
    state, numpy = torch.get_rng_state(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        np.random.set_state(numpy)
