"""A plan: which layer is divided how among the ranks of the tensor axis. Values alone; `planner.py` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from zeromesh.errors import LayoutError
from zeromesh.tensor.divide import AttentionDivision, Shares


class Style(Enum):
    """What becomes of a module."""

    COLUMN = "outputs divided"
    COLUMN_GATHERED = "outputs divided, then gathered"
    SLICED = "whole, some outputs computed"
    ROW = "inputs divided"
    ROW_SPLIT = "whole inputs divided"
    EMBEDDING = "tokens divided"
    EMBEDDING_FEATURES = "features divided"
    HEAD = "tokens divided, logits local"
    EXPERTS = "intermediate features divided"
    PARTIAL = "whole, with partial gradients"
    LATENT = "whole, some outputs used by divided heads"
    SINKS = "heads divided"


WHOLE = (Style.PARTIAL, Style.LATENT, Style.SINKS)
"""Styles that leave the matrices of a module whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What becomes of one module. Raises `LayoutError` when a rank would have nothing of it."""

    module: str
    """FQN."""
    style: Style
    shares: Shares = ()
    """Empty for `PARTIAL` and `LATENT`."""

    def __post_init__(self) -> None:
        for rank, intervals in enumerate(self.shares):
            if not sum(interval.length for interval in intervals):
                raise LayoutError(
                    f"{self.module}: too small to be divided among {len(self.shares)} ranks (rank {rank} has nothing)"
                )

    @property
    def parent(self) -> str:
        """FQN of the module around it; column layers with the same one may share an input."""
        return self.module.rpartition(".")[0]

    def holders(self, rank: int) -> tuple[int, ...]:
        """Ranks that have the same as `rank`."""
        return tuple(other for other, share in enumerate(self.shares) if share == self.shares[rank])

    def sizes(self) -> tuple[int, ...]:
        """Features of each rank."""
        return tuple(sum(interval.length for interval in share) for share in self.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A number that a module's code reads, with its value on every rank. `attribute` may begin with `config.`."""

    module: str
    attribute: str
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """How a model is divided among `size` ranks."""

    size: int
    layers: tuple[LayerPlan, ...]
    patches: tuple[Patch, ...]
    attentions: Mapping[str, AttentionDivision]
    """By FQN of the module whose children project queries, keys and values."""
    stacks: tuple[tuple[str, ...], ...]
    """FQNs of repeated blocks, those of one stack together and in order."""
    notes: tuple[str, ...]

    def in_block(self, name: str) -> bool:
        """Whether a module or parameter is inside one of the repeated blocks."""
        return any(name.startswith(f"{block}.") for stack in self.stacks for block in stack)

    def in_experts(self, name: str) -> bool:
        """Whether a module or parameter is inside a block of experts: its router, experts, shared experts."""
        blocks = (layer.parent for layer in self.layers if layer.style is Style.EXPERTS)
        return any(name.startswith(f"{block}.") for block in blocks)

    def readers(self) -> tuple[str, ...]:
        """FQNs of the modules in blocks that need the whole sequence, since code around their column layers reads its length."""
        gathered = (layer.parent for layer in self.layers if layer.style is Style.COLUMN_GATHERED)
        return tuple(name for name in dict.fromkeys((*self.attentions, *gathered)) if self.in_block(name))
