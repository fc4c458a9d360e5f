"""The plan of a division: the style of each layer, and the features that each rank has of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from zeromesh.errors import LayoutError
from zeromesh.tensor.plan.attention_split import AttentionDivision, Shares


class Style(Enum):
    """The division of one module, by transformers' name where it has one."""

    COLUMN = "colwise"  # Outputs are divided: by heads in an attention, by features elsewhere.
    COLUMN_GATHERED = "colwise_gather_output"  # As COLUMN, then outputs are gathered.
    SLICED = "colwise_sliced"  # Whole, and each rank computes some outputs. No rule names it.
    ROW = "rowwise"  # Inputs are divided, outputs summed.
    ROW_SPLIT = "rowwise_split_input"  # As ROW, of an input that is whole on every rank.
    EMBEDDING = "embedding_rowwise"  # An embedding, by tokens.
    EMBEDDING_FEATURES = "embedding_heads"  # An embedding of which each feature belongs to a head.
    HEAD = "head"  # The output embedding, by tokens. No rule names it.
    EXPERTS = "moe_tp_experts"  # Experts, each divided along its intermediate features.
    PARTIAL = "replicated_with_grad_allreduce"  # Whole, used on divided activations, so that gradients are partial.
    LATENT = "mla_kv_a_proj"  # Whole; divided heads use its last outputs (rotary keys) directly.
    LOCAL = "local_params"  # Parameters with an element per head (attention sinks), or per output of a column layer.
    NORMS = "norms"  # PEFT's magnitudes (DoRA) of a row layer, whose norms are over the inputs of all ranks. No rule names it.


WHOLE = (Style.PARTIAL, Style.LATENT, Style.LOCAL, Style.NORMS)  # the styles that leave the matrices of a module whole


def inside(name: str, modules: Iterable[str]) -> bool:
    """Return True if a module or parameter lies inside one of `modules`, whose names may end with a dot."""
    return any(name.startswith(f"{module}.") for module in modules)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """The division of one module. Raises `LayoutError` when a rank would have none of it."""

    module: str
    style: Style
    shares: Shares = ()  # the intervals of features that each rank has; empty for `PARTIAL` and `LATENT`

    def __post_init__(self) -> None:
        if 0 in self.sizes:
            empty = f"rank {self.sizes.index(0)} has nothing"
            raise LayoutError(f"{self.module}: too small to be divided among {len(self.shares)} ranks ({empty})")

    @property
    def parent(self) -> str:
        """The FQN of the module around it, other than a layer of PEFT's; column layers with the same one may share an input."""
        return self.module.removesuffix(".base_layer").rpartition(".")[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(interval.length for interval in share) for share in self.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """The division of a model among `size` ranks."""

    size: int
    layers: tuple[LayerPlan, ...]
    patches: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Attributes that a module's code reads: FQN, attribute, which may begin with `config.`, and its value on each rank."""
    attentions: Mapping[str, AttentionDivision]
    """The divided heads, by the FQN of the module whose children project queries, keys and values."""
    stacks: tuple[tuple[str, ...], ...]  # the FQNs of repeated blocks, grouped by stack, in order
    notes: tuple[str, ...]

    def in_block(self, name: str) -> bool:
        return any(inside(name, stack) for stack in self.stacks)

    def in_experts(self, name: str) -> bool:
        """Return True if a module or parameter is inside a block of experts: router, experts, shared experts."""
        return inside(name, (layer.parent for layer in self.layers if layer.style is Style.EXPERTS))

    def whole_sequence_modules(self) -> tuple[str, ...]:
        """Return the FQNs of modules in blocks that need the whole sequence, since code around column layers reads its length."""
        gathered = (layer.parent for layer in self.layers if layer.style is Style.COLUMN_GATHERED)
        return tuple(name for name in dict.fromkeys((*self.attentions, *gathered)) if self.in_block(name))
