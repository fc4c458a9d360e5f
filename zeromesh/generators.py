"""The global generators that a forward draws from: PyTorch's, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def seed_generators(number: int) -> None:
    """Seed the CPU's generator and those of CUDA, as `torch.manual_seed` does, if CUDA is in use.

    `torch.manual_seed` also keeps a call for every other kind of accelerator that PyTorch knows, each with the stack as text: deep
    in a model that is a millisecond, before every unit.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def seed_all(number: int) -> None:
    """Seed the generators of PyTorch, NumPy and Python. Models of speech draw from NumPy's what they mask."""
    seed_generators(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostState:
    """The states of NumPy's and Python's global generators, which `torch.utils.checkpoint` does not restore."""

    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> HostState:
        """Of both generators as they are."""
        return cls(numpy=np.random.get_state(), python=random.getstate())

    def restore(self) -> None:
        """Put both generators into this state."""
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside the block both generators go on from this state; afterwards they are as they were before it."""
        before = HostState.now()
        self.restore()
        try:
            yield
        finally:
            before.restore()


@dataclass(frozen=True, kw_only=True, slots=True)
class AllStates:
    """The states of all global generators that `seed_all` seeds; of CUDA's, that of the current device."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    host: HostState

    @classmethod
    def now(cls) -> AllStates:
        """Of all generators as they are."""
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(cpu=torch.get_rng_state(), cuda=torch.cuda.get_rng_state() if in_use else None, host=HostState.now())

    def restore(self) -> None:
        """Put all generators into this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        self.host.restore()

    def mark(self, number: int) -> None:
        """Make `torch.initial_seed()` return `number` where this state is in force; what is drawn stays the same.

        The state of the CPU's generator begins with the seed that it was last given, which it does not draw from.
        """
        self.cpu[:8].view(torch.int64).fill_(number)
