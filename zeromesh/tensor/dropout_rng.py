"""Dropout under tensor parallelism: equal random numbers for equal activations, separate ones for divided activations.

For divided activations, the global generators are set to a state of this rank, derived from a number that all ranks draw. So a
recomputation that starts from the same state draws the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeromesh.offload import accelerator
from zeromesh.rng import seed_generators, seed_of
from zeromesh.tensor.autograd_collectives import uncompiled


class ShardedRandomness:
    """Switches the generators to a state of this rank between `enter` and `leave`, unless `active` is False (no dropout)."""

    def __init__(self, rank: int, *, active: bool = True) -> None:
        self.active = active
        self._rank = rank
        self._seed: int | None = None
        self._states: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """The states of the CPU's and the device's generator that are shared by all ranks, saved by `enter`."""

    @property
    def entered(self) -> bool:
        """True if the generators are in this rank's state: `enter` was called, and nothing (such as recomputation) has reseeded."""
        return self._seed is not None and torch.initial_seed() == self._seed

    @uncompiled
    def enter(self) -> None:
        """Switch the generators to this rank's state, for divided activations, unless they are in it already."""
        if not self.active or self.entered:
            return
        common = int(torch.randint(2**62, (), device="cpu"))
        self._states = torch.get_rng_state(), accelerator.generator_state()
        self._seed = seed_of(f"{common}/{self._rank}")
        seed_generators(self._seed)

    @uncompiled
    def leave(self) -> None:
        """Switch the generators back to the state shared by all ranks, unless they are in it already."""
        if not self.active or not self.entered or self._states is None:
            return
        host, device = self._states
        torch.set_rng_state(host)
        accelerator.set_generator_state(device)
        self._seed = self._states = None

    @contextmanager
    def sharded(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()
