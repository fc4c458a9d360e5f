"""A tensor-parallel plan: which layer is divided how among the ranks of the tensor axis, and so what each holds of a parameter.

Values alone; `planner.py` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from torch import nn

from zeromesh.errors import LayoutError
from zeromesh.flat.layout import ParameterPart
from zeromesh.flat.regions import Region
from zeromesh.intervals import Interval
from zeromesh.tensor.plan.attention_split import AttentionDivision, Shares, experts_form, linear_form


class Style(Enum):
    """The ways in which a module may be divided."""

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
    """How one module is divided. Raises `LayoutError` when a rank would have nothing of it."""

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


def parts_of(model: nn.Module, plan: TensorPlan, rank: int, *, sequence: bool) -> Mapping[str, ParameterPart]:
    """Find the part of every parameter of the whole `model` that is divided, or whole with partial gradients, by its first FQN.

    All others are whole on every rank, with the same gradient on each. `sequence`: blocks pass on shares of the sequence.

    Raises:
        LayoutError: when modules divide a parameter that they share in different ways.
    """
    layers = {layer.module: layer for layer in plan.layers}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, ParameterPart] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        module, _, leaf = full.rpartition(".")
        name, shape = first[id(parameter)], tuple(parameter.shape)
        part = None
        layer = layers.get(module)
        if layer is not None:
            part = _part(layer, model.get_submodule(module), leaf, shape, rank)
        if part is None and (_partial(plan, full) or (sequence and _on_shares(plan, full))):
            part = ParameterPart(region=Region.whole(shape), holders=tuple(range(plan.size)), partial=True)
        if part is not None and found.setdefault(name, part) != part:
            raise LayoutError(f"{name} and {full} are one parameter, which two modules divide differently")
    return found


def _part(layer: LayerPlan, module: nn.Module, leaf: str, shape: tuple[int, ...], rank: int) -> ParameterPart | None:
    """None for a parameter of the layer that stays whole."""
    if layer.style in (Style.PARTIAL, Style.LATENT, Style.SLICED):
        return None
    dim = _dim(layer, module, leaf)
    if dim is None:
        return None
    intervals = layer.shares[rank]
    if layer.style is Style.EXPERTS and leaf == "gate_up_proj":
        (own,), half = intervals, shape[dim] // 2
        intervals = (own, Interval(start=own.start + half, end=own.end + half))
    dims = tuple(intervals if number == dim else (Interval(start=0, end=size),) for number, size in enumerate(shape))
    holders = layer.holders(rank)
    return ParameterPart(region=Region(shape=shape, dims=dims), holders=holders, partial=len(holders) > 1)


def _dim(layer: LayerPlan, module: nn.Module, leaf: str) -> int | None:
    """The dim that is divided."""
    if layer.style is Style.EXPERTS:
        return (experts_form({name: tuple(held.shape) for name, held in module.named_parameters()}) or {})[leaf]
    if layer.style in (Style.EMBEDDING, Style.SINKS):
        return 0
    if layer.style is Style.EMBEDDING_FEATURES:
        return 1
    transposed = bool(linear_form(module))
    if layer.style in (Style.ROW, Style.ROW_SPLIT):
        return None if leaf == "bias" else (0 if transposed else 1)
    return 0 if leaf == "bias" or not transposed else 1


def _partial(plan: TensorPlan, full: str) -> bool:
    """Whether a whole parameter is used on divided activations under any plan."""
    return any(
        layer.style in (Style.PARTIAL, Style.SLICED) and full.startswith(f"{layer.module}.") for layer in plan.layers
    )


def _on_shares(plan: TensorPlan, full: str) -> bool:
    """Whether a whole parameter is used on shares of the sequence."""
    if not plan.in_block(full) or plan.in_experts(full):
        return False
    if any(full.startswith(f"{layer.module}.") for layer in plan.layers if layer.style in (Style.ROW, Style.ROW_SPLIT)):
        return True
    return not any(full.startswith(f"{module}.") for module in plan.readers())
