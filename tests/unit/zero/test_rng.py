"""Seeding before every unit gives the numbers of `torch.manual_seed`, without its price."""

import hashlib
import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch

from zeromesh.rng import GeneratorStates, Streams, data_randomness, kept_generators, seed_all, seed_generators


def test_seeds_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    try:
        torch.manual_seed(2**62 + 5)
        expected = torch.rand(8)

        def formatted(*_: Any) -> None:
            raise AssertionError("a stack was formatted")

        monkeypatch.setattr(traceback, "format_stack", formatted)
        seed_generators(2**62 + 5)
        assert torch.equal(torch.rand(8), expected)
        assert torch.initial_seed() == 2**62 + 5
    finally:
        torch.set_rng_state(before)


def _drawn(count: int) -> list[float]:
    """From NumPy and from Python, with normal numbers, of which both make two at a time and keep one."""
    numpy = [*np.random.random(count), *np.random.standard_normal(3)]
    return [*numpy, *(random.random() for _ in range(count)), *(random.gauss() for _ in range(3))]


@pytest.mark.parametrize("before", [0, 1, 312, 1000])
def test_generators_of_the_host_go_on_where_they_were(before: int) -> None:
    """A state that is kept as a seed, before anything was drawn, is as good as a whole one; 312 doubles are one round of it."""
    with kept_generators():
        seed_all(2**40 + 2**20 + 7)
        assert np.random.random() == np.random.RandomState(2**20 + 7).random_sample()  # Its seeds have 32 bits.
        assert GeneratorStates.now(host_only=True).cpu is None
        seed_all(2**40 + 7)
        expected = _drawn(before) + _drawn(2) if before else _drawn(2)
        seed_all(2**40 + 7)
        found = _drawn(before) if before else []
        state = GeneratorStates.now()
        seed_all(5)
        _drawn(1)
        state.restore()
        assert found + _drawn(2) == expected
        state.restore()
        assert _drawn(2) == expected[-10:]


def test_a_unit_does_not_disturb_what_its_caller_draws_from_the_host() -> None:
    def microbatch(caller_first: bool) -> dict[str, list[float]]:
        streams = Streams(3, 1, 8)
        found: dict[str, list[float]] = {"loss": [], "block": []}
        with streams.drawing():
            for _ in range(2):
                found["loss"] += _drawn(1) if caller_first else []
                streams.enter("block", again=False)
                found["block"] += _drawn(4)
                streams.leave("block")
            found["loss"] += [] if caller_first else _drawn(1) + _drawn(1)
        return found

    assert microbatch(True) == microbatch(False)


def test_the_host_is_put_back_whatever_seeded_it() -> None:
    with kept_generators():
        seed_all(3)
        np.random.seed(4)
        random.seed(4)
        state = GeneratorStates.now()
        expected = _drawn(2)
        seed_all(3)
        state.restore()
        assert _drawn(2) == expected


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") // 2


def test_every_call_of_a_microbatch_has_its_seed_alike_on_all_ranks() -> None:
    """An inner call that an exception has ended leaves nothing, and a call that backward repeats is taken for the last one."""
    streams, found, before = Streams(3, "eval", 8), [], torch.get_rng_state()
    with streams.drawing():
        found.append(torch.initial_seed())
        for again in (False, False, True, False):
            for name in ("block", "inner"):
                streams.enter(name, again=again)
                found.append(torch.initial_seed())
            streams.leave("block")
        streams.begin("root")
        assert torch.initial_seed() == _seed("3/eval/8/root")
        streams.enter("lost", again=False)
    calls = ["/loss", "block", "inner", "block/1", "inner/1", "block/1", "inner/1", "block/2", "inner/2"]
    assert found == [_seed(f"3/eval/8/{call}") for call in calls]
    assert torch.equal(torch.get_rng_state(), before)
    with streams.drawing():
        streams.leave("lost")
        assert torch.initial_seed() == _seed("3/eval/8//loss")
    with data_randomness(3, 8):
        assert torch.initial_seed() == _seed("3/data/8")


def test_a_call_that_backward_repeats_is_known_by_where_its_caller_was() -> None:
    """`torch.utils.checkpoint` restores the CPU's generator as it was before the call, and calls again in any order."""
    streams, before = Streams(3, 0, 8), list[torch.Tensor]()
    with streams.drawing():
        for _ in range(3):
            before.append(torch.get_rng_state())
            streams.enter("block", again=False)
            torch.rand(2)
            streams.leave("block")
        drawn = torch.rand(4)
        for number in (1, 2, 0):
            torch.set_rng_state(before[number])
            streams.enter("block", again=True)
            assert torch.initial_seed() == _seed(f"3/0/8/block/{number}" if number else "3/0/8/block")
            streams.leave("block")
    with streams.drawing():
        assert torch.equal(torch.rand(4), drawn), "calls of units draw nothing from the caller"


def test_the_host_alone_is_kept_where_the_library_keeps_the_rest() -> None:
    with kept_generators():
        seed_all(3)
        expected = [np.random.random(), random.random()]
        seed_all(3)
        with kept_generators(host_only=True):
            seed_all(9)
            wanted = torch.rand(2)
            seed_all(9)
        assert [np.random.random(), random.random()] == expected
        assert torch.equal(torch.rand(2), wanted)
