"""Dropout under tensor parallelism: the same numbers where all ranks have the same activations, others where each has a part.

Numbers are drawn from the global generators, which are seeded alike on all ranks. Where activations are divided, the generators
are put to a state of this rank's own, made from a number that all ranks draw, and afterwards back to where they were. So a
recomputation that starts from the same state draws the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeromesh.offload import accelerator
from zeromesh.rng import number_of, seed_generators
from zeromesh.tensor.autograd_collectives import uncompiled


class ShardedRandomness:
    """Makes what is drawn between `enter` and `leave` this rank's own. `active` is false for a model that draws nothing."""

    def __init__(self, rank: int, *, active: bool = True) -> None:
        self.active = active
        self._rank = rank
        self._seed: int | None = None
        self._states: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """Those of the CPU's generator and of the device's, before they were this rank's own."""

    @property
    def entered(self) -> bool:
        """True if the generators are in this rank's own state: a recomputation that was cut short may have put them back."""
        return self._seed is not None and torch.initial_seed() == self._seed

    @uncompiled
    def enter(self) -> None:
        """Draw this rank's own numbers from here on, for activations that are divided. Does nothing where that is so already."""
        if not self.active or self.entered:
            return
        common = int(torch.randint(2**62, (), device="cpu"))
        self._states = torch.get_rng_state(), accelerator.generator_state()
        self._seed = number_of(f"{common}/{self._rank}")
        seed_generators(self._seed)

    @uncompiled
    def leave(self) -> None:
        """Draw the same numbers on all ranks again, for equal activations. Does nothing where that is so already."""
        if not self.active or not self.entered or self._states is None:
            return
        host, device = self._states
        torch.set_rng_state(host)
        accelerator.set_generator_state(device)
        self._seed = self._states = None

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Draw this rank's own numbers inside the block, for activations that are divided."""
        self.enter()
        try:
            yield
        finally:
            self.leave()
