"""Plans the division of a model with low-rank adapters of PEFT: that of the model without them, and of the adapters beside it.

    divided layer       base_layer        lora_A                             lora_B
    by outputs          by outputs        whole, of the whole input          by outputs, as the layer
    by inputs           by inputs         by inputs, as the layer; summed    whole, of the sum

The gradients of what is whole are equal on all ranks, since column layers sum the gradient of their input."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from zeromesh.errors import LayoutError
from zeromesh.tensor.plan.layer_plan import LayerPlan, Style, TensorPlan

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
    """Return a plan made without adapters as that of the model with them. Raises `LayoutError` for indivisible adapters."""
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
    wrapped = _wrapped(module)
    if wrapped is None:
        yield layer
        return
    for name, _ in wrapped:
        yield replace(layer, module=f"{layer.module}.{name}")
    if wrapped[0][0] != BASE:
        return
    known = (Style.COLUMN, Style.COLUMN_GATHERED, Style.SLICED, *_INPUTS)
    if not isinstance(getattr(module, "lora_A", None), nn.ModuleDict) or layer.style not in known:
        raise LayoutError(
            f"{layer.module}: nothing says how a {type(module).__module__}.{type(module).__name__} around a layer of style "
            f"{layer.style.value} is divided among tensor ranks; set parallel.tensor: 1, or choose other targets"
        )
    for adapter in module.lora_A:
        inputs = layer.style in _INPUTS
        yield replace(layer, module=f"{layer.module}.{'lora_A' if inputs else 'lora_B'}.{adapter}")
        if getattr(module, "use_dora", {}).get(adapter):
            name = f"{layer.module}.lora_magnitude_vector.{adapter}"
            yield replace(layer, module=name, style=Style.NORMS if inputs else Style.LOCAL)
