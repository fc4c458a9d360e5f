"""What a tensor rank holds of each parameter, from the plan alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zeromesh.checkpoint.regions import Region
from zeromesh.errors import LayoutError
from zeromesh.flat.part import ParameterPart
from zeromesh.flat.split import Interval
from zeromesh.tensor.divide import experts_form, linear_form
from zeromesh.tensor.plan import LayerPlan, Style, TensorPlan


def parts_of(model: nn.Module, plan: TensorPlan, rank: int, *, sequence: bool) -> Mapping[str, ParameterPart]:
    """The part of every parameter of the whole `model` that is divided, or whole with partial gradients; by its first FQN.

    All others are whole on every rank, with the same gradient on each. `sequence`: blocks pass on shares of the sequence.

    Raises:
        LayoutError: when modules divide a parameter that they share in different ways.
    """
    everyone = tuple(range(plan.size))
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
        whole = ParameterPart(region=Region.whole(shape), holders=everyone, partial=True)
        if part is None and (_partial(plan, full) or (sequence and _on_shares(plan, full))):
            part = whole
        if part is None:
            continue
        if found.setdefault(name, part) != part:
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
