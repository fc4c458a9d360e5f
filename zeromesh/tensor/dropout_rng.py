"""Dropout under tensor parallelism: equal random numbers for equal activations, separate ones for divided activations.
For these, global generators get a state of this rank, derived from a number that all draw, so a recomputation draws the same."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeromesh.offload import accelerator
from zeromesh.rng import seed_generators, seed_of
from zeromesh.tensor.autograd_collectives import uncompiled


class ShardedRandomness:
    """Switches the generators to a state of this rank between `enter` and `leave`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._left: tuple[int, torch.Tensor, torch.Tensor | None] | None = None
        """This rank's seed since `enter`, and the states of the CPU's and the device's generator before it, equal on all ranks."""

    @property
    def entered(self) -> bool:
        """True if the generators are in this rank's state: `enter` was called, and nothing (such as recomputation) has reseeded."""
        return self._left is not None and torch.initial_seed() == self._left[0]

    @uncompiled
    def enter(self) -> None:
        """Switch the generators to this rank's state, for divided activations, unless they are in it already."""
        if not self.entered:
            seed = seed_of(f"{int(torch.randint(2**62, (), device='cpu'))}/{self._rank}")
            self._left = seed, torch.get_rng_state(), accelerator.generator_state()
            seed_generators(seed)

    @uncompiled
    def leave(self) -> None:
        """Switch the generators back to the state shared by all ranks, unless they are in it already."""
        if self._left is not None and self.entered:
            (_, host, device), self._left = self._left, None
            torch.set_rng_state(host)
            accelerator.set_generator_state(device)

    @contextmanager
    def sharded(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()
