"""The plan of a division: the style of each layer, and the features that each rank has of it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn

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


BASE = "base_layer"
_INPUTS = (Style.ROW, Style.ROW_SPLIT)


def base_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name as they were before adapters were added: layers in place of PEFT's layers around them."""
    found = dict[str, nn.Module]()
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(around) for around in inside):
            continue
        if (layers := _wrapped(module)) is not None:
            inside.append(f"{name}.")
            module = layers[0][1]
        found[name] = module
    return found


def _wrapped(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the names and layers inside a layer of PEFT's that are divided alike; None for any other module."""
    parts: Any = module
    if isinstance(getattr(module, BASE, None), nn.Module):
        return [(BASE, parts.base_layer)]
    if isinstance(getattr(module, "original_module", None), nn.Module):
        copies = getattr(module, "modules_to_save", {}).items()
        return [("original_module", parts.original_module), *((f"modules_to_save.{n}", copy) for n, copy in copies)]
    return None


def is_wrapped(module: nn.Module) -> bool:
    """Return True for a layer of PEFT's that computes something beside the layer inside, other than a trained copy of that."""
    return _wrapped(module) is not None and type(module).__name__ != "ModulesToSaveWrapper"


def with_adapters(plan: TensorPlan, model: nn.Module, prefix: str) -> TensorPlan:
    """Return a plan made without adapters as that of the model with them. Raises `LayoutError` for indivisible adapters.

        divided layer       base_layer        lora_A                             lora_B
        by outputs          by outputs        whole, of the whole input          by outputs, as the layer
        by inputs           by inputs         by inputs, as the layer; summed    whole, of the sum

    The gradients of what is whole are equal on all ranks, since column layers sum the gradient of their input."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    layers = [made for layer in plan.layers for made in _divided(layer, modules[layer.module])]
    return replace(
        plan,
        layers=tuple(replace(each, module=f"{prefix}{each.module}") for each in layers),
        patches=tuple((f"{prefix}{name}", attribute, values) for name, attribute, values in plan.patches),
        attentions={f"{prefix}{name}": division for name, division in plan.attentions.items()},
        stacks=tuple(tuple(f"{prefix}{name}" for name in stack) for stack in plan.stacks),
    )


def _divided(layer: LayerPlan, module: Any) -> Iterator[LayerPlan]:
    if (wrapped := _wrapped(module)) is None:
        yield layer
        return
    for name, _ in wrapped:
        yield replace(layer, module=f"{layer.module}.{name}")
    if wrapped[0][0] != BASE:
        return
    known = (Style.COLUMN, Style.COLUMN_GATHERED, Style.SLICED, *_INPUTS)
    if not isinstance(getattr(module, "lora_A", None), nn.ModuleDict) or layer.style not in known:
        kind = f"{type(module).__module__}.{type(module).__name__}"
        why = f"nothing says how a {kind} around a layer of style {layer.style.value} is divided among tensor ranks"
        raise LayoutError(f"{layer.module}: {why}; set parallel.tensor: 1, or choose other targets")
    for adapter in module.lora_A:
        inputs = layer.style in _INPUTS
        yield replace(layer, module=f"{layer.module}.{'lora_A' if inputs else 'lora_B'}.{adapter}")
        if getattr(module, "use_dora", {}).get(adapter):
            name = f"{layer.module}.lora_magnitude_vector.{adapter}"
            yield replace(layer, module=name, style=Style.NORMS if inputs else Style.LOCAL)
