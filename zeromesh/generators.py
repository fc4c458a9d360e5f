"""Seeding of the generators that a forward draws from."""

from __future__ import annotations

import torch


def seed_generators(number: int) -> None:
    """Seed the CPU's generator and those of CUDA, as `torch.manual_seed` does, if CUDA is in use.

    `torch.manual_seed` also keeps a call for every other kind of accelerator that PyTorch knows, each with the stack as text: deep
    in a model that is a millisecond, before every unit.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
