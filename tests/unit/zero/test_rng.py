"""Seeding before every unit gives the numbers of `torch.manual_seed`, without its price."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from zeromesh.rng import seed_generators


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
