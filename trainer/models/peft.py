"""Models with adapters of PEFT, recognised by their attributes: PEFT itself is imported only where adapters are made (`lora.py`).

Such a model is, or wraps, a Hugging Face model some of whose layers are replaced. What is asked about the task (arguments of
forward, loss, vocabulary) is asked of the model inside. What is trained, and runs, is the wrapper.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zeromesh.weight_init.recompute_init import is_pretrained_model


def wraps_another(model: nn.Module) -> bool:
    """Whether `model` is a `PeftModel`."""
    return callable(getattr(type(model), "get_base_model", None)) and bool(getattr(model, "peft_config", None))


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is a `PeftModel`, or a Hugging Face model that adapters were added to (`model.add_adapter`)."""
    return wraps_another(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def pretrained_of(model: nn.Module) -> Any | None:
    """The Hugging Face model that `model` is, or that its adapters are in; None for any other module."""
    inside: Any = model
    if wraps_another(model):
        inside = inside.get_base_model()
    return inside if is_pretrained_model(inside) else None


def output_layer(model: Any) -> Any:
    """The output embedding of a Hugging Face model; where PEFT trains a copy of it (`modules_to_save`), that copy."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    copies = getattr(head, "modules_to_save", None)
    active: list[str] = list(getattr(head, "active_adapters", ()))
    return copies[active[0]] if isinstance(copies, nn.ModuleDict) and len(active) == 1 and active[0] in copies else head


def learns_prompts(model: Any) -> bool:
    """Whether an adapter of `model` puts tokens before its inputs, or keys and values before theirs."""
    return any(getattr(settings, "is_prompt_learning", False) for settings in model.peft_config.values())


def adapter_names(model: Any) -> frozenset[str]:
    """Names of the parameters and buffers that a saved adapter is made of: its own, and what else is trained."""
    adapters = set(model.peft_config)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return frozenset(name for name, tensor in tensors if tensor.requires_grad or adapters & set(name.split(".")))


def description_of_adapters(model: Any) -> dict[str, Any]:
    """Return what a resumed run must have in common of a model's adapters, by flat keys."""
    passing = {"base_model_name_or_path", "revision", "inference_mode", "peft_version"}
    return {
        f"adapter.{name}.{key}": sorted(value) if isinstance(value, set) else value
        for name, settings in model.peft_config.items()
        for key, value in settings.to_dict().items()
        if key not in passing and value is not None
    }
