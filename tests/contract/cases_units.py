"""Cases about units: how blocks are written, what they return, who reads whose weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from contract.harness import CLASSES, FEATURES, WIDTH, Case


class Block(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """A stem, equal blocks, a head."""

    def __init__(self, block: type[nn.Module] = Block, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x = self.stem(values)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """How a block is called."""
        return block(x)


CASES = [Case(name="plain stack", build=Stack)]
