"""What forward draws depends on what is computed, and not on who computes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_forward(seed: int, step: int, first_sample: int, unit: str) -> None:
    """Seed the generators before a unit's forward on the microbatch whose first sample has the global index `first_sample`."""
    text = f"{seed}/{step}/{first_sample}/{unit}"
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1)


@contextmanager
def own_randomness() -> Iterator[None]:
    """What is drawn inside the block does not disturb what the user draws elsewhere."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
