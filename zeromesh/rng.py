"""The random numbers of forward and of the data, which depend on what is computed, and not on the rank that computes it.

A microbatch has a stream of random numbers for its loss, and one for every call of a unit:

    loss        draws a   draws b                             draws c            one stream: a, b, c
    root                  draws d         draws e                                one stream: d, e
    blocks                        draws f         draws g                        a stream for each call

When a unit's call ends, its caller's stream continues. Streams set the global generators of PyTorch, NumPy and Python."""

import ctypes
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zeromesh.offload import accelerator


def seed_generators(number: int) -> None:
    """Seed the generators of the CPU and of the accelerators in use. `torch.manual_seed` also queues a call for every other kind
    of accelerator, each with the stack as text: deep in a model that takes a millisecond, before every unit."""
    torch.default_generator.manual_seed(number)
    accelerator.seed(number)


def seed_all(number: int) -> None:
    """Seed the generators of PyTorch, NumPy (used by speech models to draw masks) and Python."""
    seed_generators(number)
    random.seed(number)
    _numpy.seed(number & 0xFFFFFFFF)


class _NumpyGenerator:
    """NumPy's global Mersenne Twister, saved fast while nothing draws from it: a copy of its memory takes 1 us, its state 80 us."""

    def __init__(self) -> None:
        self._last_seed = 0
        self._memory_at_seed: bytes | None = None

    def seed(self, number: int) -> None:
        np.random.seed(number)
        self._last_seed, self._memory_at_seed = number, self._memory()

    def state(self) -> Any:
        """Return the last seed if nothing was drawn since, else the whole state."""
        drawn = self._memory_at_seed is None or self._memory() != self._memory_at_seed
        return np.random.get_state() if drawn else self._last_seed

    def restore(self, state: Any) -> None:
        if isinstance(state, int):
            self.seed(state)
        else:
            self._memory_at_seed = None
            np.random.set_state(state)

    def _memory(self) -> bytes | None:
        """Return the generator's numbers and its position in them; None if the user has replaced the generator."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator) is not np.random.MT19937:
            return None
        return ctypes.string_at(int(generator.ctypes.state_address), 625 * 4)


_numpy = _NumpyGenerator()


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorStates:
    """The states of the global generators of NumPy, Python, and unless left out, PyTorch's CPU and the current accelerator."""

    numpy: Any
    python: Any
    cpu: torch.Tensor | None = None
    device: torch.Tensor | None = None

    @classmethod
    def now(cls, *, host_only: bool = False) -> "GeneratorStates":
        """Return the present states. `host_only` leaves out PyTorch's, which `torch.utils.checkpoint` restores itself."""
        of_torch = {} if host_only else {"cpu": torch.get_rng_state(), "device": accelerator.generator_state()}
        return cls(numpy=_numpy.state(), python=random.getstate(), **of_torch)

    def restore(self) -> None:
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        accelerator.set_generator_state(self.device)
        _numpy.restore(self.numpy)
        random.setstate(self.python)


class Streams:
    """The random numbers of one microbatch, in its forward and in recomputations in its backward."""

    def __init__(self, seed: int, step: int | str, first_sample: int, share: int = 0) -> None:
        """Create the streams. `first_sample` is a global index; `step` may name a kind of pass; `share`: this rank's."""
        self._prefix = f"{seed}/{step}/{first_sample}" + (f"/share {share}" if share else "")
        self._calls: Counter[str] = Counter()
        self._by_mark: dict[tuple[str, int], tuple[int, int]] = {}
        """The index of a call and the mark of the caller's stream after it, by unit and mark of the caller's stream before it."""
        self._callers: list[tuple[str, int, GeneratorStates]] = []
        self._first_mark = seed_of(f"{self._prefix}//marks")

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside the block the generators draw from these streams, first from that of the loss; afterwards restore them."""
        with kept_generators():
            self._callers.clear()
            seed_all(seed_of(f"{self._prefix}//loss"))
            yield

    def begin(self, unit: str) -> None:
        """Begin the stream of a unit's first call, for code that runs a part of the unit without calling it."""
        seed_all(seed_of(f"{self._prefix}/{unit}"))

    def enter(self, unit: str, *, again: bool) -> None:
        """Seed the generators for a unit's call and save the caller's states. `again`: backward recomputes the call, which the mark
        on the caller's stream identifies, if `torch.utils.checkpoint` has restored that, else it is taken for the last one."""
        caller, mark = GeneratorStates.now(), torch.initial_seed()
        if (unit, mark) not in self._by_mark:
            self._by_mark[unit, mark] = (self._calls[unit] - again, (self._first_mark + len(self._by_mark)) % 2**63)
            self._calls[unit] += not again
        number, after = self._by_mark[unit, mark]
        self._callers.append((unit, after, caller))
        seed_all(seed_of(f"{self._prefix}/{unit}/{number}" if number else f"{self._prefix}/{unit}"))

    def leave(self, unit: str) -> None:
        """Restore the caller's generator states after a unit's call. Inner calls that an exception ended are dropped."""
        while self._callers:
            name, after, caller = self._callers.pop()
            if name == unit:
                if caller.cpu is not None:
                    # The CPU's state begins with the latest seed, which `torch.initial_seed` returns; draws stay equal.
                    caller.cpu[:8].view(torch.int64).fill_(after)
                caller.restore()
                return


def seed_of(text: str) -> int:
    """Hash a text to 63 bits, for a seed or a key, which are the same in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def data_randomness(seed: int, first_sample: int) -> Iterator[None]:
    """Inside the block datasets and collators draw numbers that belong to the microbatch of this first sample."""
    with kept_generators():
        seed_all(seed_of(f"{seed}/data/{first_sample}"))
        yield


@contextmanager
def kept_generators(*, host_only: bool = False) -> Iterator[None]:
    """Restore the generators after the block, so that its draws do not disturb the user's; `host_only`: NumPy's and Python's."""
    states = GeneratorStates.now(host_only=host_only)
    try:
        yield
    finally:
        states.restore()
