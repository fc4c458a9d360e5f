"""Layers of bitsandbytes in a model that the user passes: they become torch's own, and what they hold the source of its values.

Neither bitsandbytes nor PEFT is imported: their classes are known by name, and are there where a model has them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeromesh.checkpoint.io.format import spec_of
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.flat.codec import Codec, EncodedParameter
from zeromesh.options import EncodedWeights
from zeromesh.trainer.weights.quantized_files import QuantizedTensors
from zeromesh.units.plan import encoded_names, main_dtype

_MARKS = ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")
"""Attributes by which libraries know a quantized model."""
_CODES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


class QuantizedLayer(QuantizedTensors):
    """The weight of a layer of bitsandbytes, as `BuiltSource` reads it from the attribute `stored` of a parameter."""

    def __init__(self, module: nn.Module, name: str) -> None:
        """Raises `LayoutError` for a layer without codes, and `ConfigError` for a form that bitsandbytes 0.50 does not have."""
        prefix = f"{name or 'model'}."
        self._weight = weight = f"{prefix}weight"
        # A state dict has the codes in their order also where a CPU has packed them for its products.
        state: dict[str, torch.Tensor] = module.state_dict(prefix=prefix)
        self._parts = {key: each.detach() for key, each in state.items() if key != f"{prefix}bias"}
        if len(self._parts) == 1:
            why = f"{weight} has no codes, which bitsandbytes makes when a layer is moved to its device"
            load = "from_pretrained(quantization_config=BitsAndBytesConfig(...))"
            raise LayoutError(f"{why}; move the model first, such as by model.to('cpu'), or load it by {load}")
        if f"{prefix}SCB" not in state:
            self._parts[weight] = self._parts[weight].reshape(-1).view(torch.uint8)  # It may be stored as floats.
        self._specs = {key: spec_of(key, each) for key, each in self._parts.items()}
        self.describe("the model")
        self.entries = {weight: replace(self.entries[weight], dtype=torch.float32)}
        self.shape = self.entries[weight].shape
        self.codec = self._encoded[weight].codec if weight in self._encoded else None
        """The codec of a weight in 4 bits; None for one that is read decoded."""

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.elements(self._weight, start, end)

    def encoded_by(self, codec: Codec) -> EncodedParameter | None:
        return self.encoded(self._weight) if self.has_encoded(self._weight, codec) else None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        found = {key: each for key, each in self._parts.items() if key.endswith(("weight", "absmax", "SCB"))}
        return found | {f"{key}.mean": each.mean for key, each in self._encoded.items()}

    def _stored(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        return self._parts[name].reshape(-1)[start:end].cpu()


def make_plain(model: nn.Module) -> None:
    """Turn the linear layers of bitsandbytes, and PEFT's layers around them, into plain ones, in place. Their weights stay the same
    objects, on the meta device, with a `QuantizedLayer` as `stored`. The model then says that its frozen weights have 16 or 32
    bits. Raises `ConfigError` if others have quantized it, and `LayoutError` for layers without codes, before any change."""
    linear = [row for row in model.named_modules() if isinstance(row[1], nn.Linear)]
    # Reading the weight of others could compute it, and advance the power iteration of a spectral norm.
    linear = [(name, each) for name, each in linear if type(each).__module__.startswith("bitsandbytes.")]
    layers = {name: each for name, each in linear if type(each.weight).__name__ in ("Params4bit", "Int8Params")}
    for name, module in model.named_modules():
        if name not in layers and (kind := _form_of_codes(module)) is not None:
            why = f"{name or type(model).__name__} is quantized as {kind}, which is not decoded here"
            cure = "give the model in 16 bits (model.weights keeps frozen weights in 4 or 8), or in 4 bits of bitsandbytes"
            raise ConfigError(f"{why}; {cure} (BitsAndBytesConfig(load_in_4bit=True)); a table of integers is to be a buffer")
    if not layers:
        return
    stored = {name: QuantizedLayer(module, name) for name, module in layers.items()}
    quantized = {id(module.weight) for module in layers.values()}
    others = [each for each in model.parameters() if id(each) not in quantized]
    dtype = main_dtype([each for each in others if not each.requires_grad] or others)
    for name, module in layers.items():
        stand_for(stored[name], module.weight, dtype)
        module.__class__ = nn.Linear
        for part in ("quant_state", "state"):  # Both keep codes.
            vars(module).pop(part, None)
    for each in model.modules():
        _forget_quantization(each)


def stand_for(values: QuantizedLayer, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> None:
    """Make a parameter, which other code may refer to, one on the meta device whose values are elsewhere."""
    plain: Any = nn.Parameter(torch.empty(values.shape, dtype=dtype or parameter.dtype, device="meta"), requires_grad=False)
    plain.stored = values
    torch.utils.swap_tensors(parameter, plain)  # type: ignore[no-untyped-call]


def codec_of_layers(model: nn.Module) -> EncodedWeights | None:
    """Return the codec that most layers of `make_plain` have, for these alone, as others are decoded; None without 4 bits."""
    codecs = {name: each.codec for name, each in codes_of(model).items() if each.codec is not None}
    if not codecs:
        return None
    codec = Counter(codecs.values()).most_common(1)[0][0]
    others = [name for name in encoded_names(model, EncodedWeights(codec=codec)) if codecs.get(name) != codec]
    return EncodedWeights(codec=codec, skip=tuple(sorted(others)))


def codes_of(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return what the layers held that `make_plain` has changed, by the names of their weights."""
    stored = {name: getattr(each, "stored", None) for name, each in model.named_parameters()}
    return {name: each for name, each in stored.items() if isinstance(each, QuantizedLayer)}


def _form_of_codes(module: nn.Module) -> str | None:
    """Return the class that keeps codes in place of values: of a tensor, or of a module with a matrix of them."""
    own: list[Any] = [*module.parameters(recurse=False)]
    own += [*module.buffers(recurse=False)] if hasattr(module, "in_features") else []
    for each in own:
        if is_traceable_wrapper_subclass(each) and type(each).__name__ != "DTensor":
            return f"{type(each).__module__}.{type(each).__name__}"
        if each.dtype in _CODES and each.ndim > 1:
            return f"{type(module).__module__}.{type(module).__name__}"
    return None


def _forget_quantization(module: nn.Module) -> None:
    """Take the marks of a quantized model off a module, and give one of PEFT the class that it has around a plain layer."""
    attributes: dict[str, Any] = vars(module)
    config: Any = attributes.get("config")
    for mark in _MARKS:
        attributes.pop(mark, None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if conversions := attributes.get("_weight_conversions"):  # Of the names in the files that it was loaded from.
        attributes["_weight_conversions"] = [
            each
            for each in conversions
            if not any("bitsandbytes" in type(operation).__module__ for operation in getattr(each, "operations", ()))
        ]
    package, _, last = type(module).__module__.rpartition(".")
    if package.startswith("peft.") and last == "bnb":
        name = type(module).__name__.removesuffix("4bit").removesuffix("8bitLt")
        module.__class__ = getattr(import_module(f"{package}.layer"), name)
        attributes.setdefault("fan_in_fan_out", False)
