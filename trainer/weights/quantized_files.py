"""Tensors that bitsandbytes has quantized, of directories and of layers, as they lie or decoded by element range."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer, HfQuantizer

from zeromesh.checkpoint.io.format import Manifest, TensorSpec
from zeromesh.checkpoint.io.reader import TensorFiles
from zeromesh.errors import ConfigError, StorageError, library_errors
from zeromesh.files import json_object, read_whole
from zeromesh.flat.codec import CODECS, GROUP, Codec, EncodedParameter, EncodedPlace
from zeromesh.intervals import round_up

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_EXPERTS = "*[!t]"
"""The pattern of matrices of experts, whose names do not end in `weight`: bitsandbytes keeps them in 16 bits."""
_STATE_BYTES = 512
"""Bytes of a description in JSON that is written, which ends in spaces, so that its size is known before the values."""
_STEP = 7.874015718698502e-3
"""1 / 127: of the codes of LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339), in parts of a row's largest magnitude."""


class _Encoded(NamedTuple):
    codec: Codec
    mean: torch.Tensor
    """The number that was subtracted from the scales before they were quantized, float32 `[1]`; 0 if they are not."""
    digest: str | None  # xxh3 of codes, scales and tables, where this project wrote them.


class QuantizedTensors(ABC):
    """Tensors as before bitsandbytes quantized them, decoded from those of a subclass; `entries` has their shapes and dtypes."""

    _specs: dict[str, TensorSpec]
    entries: Mapping[str, TensorSpec]

    def describe(self, what: str, where: str = "") -> None:
        """Find what `_specs`, of `what`, stands for. Raises `ConfigError` of the key `where` for no form of bitsandbytes."""
        self._encoded: dict[str, _Encoded] = {}
        self._rows = {f"{name[:-4]}.weight": name for name in self._specs if name.endswith(".SCB")}
        parts = {name[:-4] + end for name in self._rows.values() for end in (".SCB", ".weight_format")}
        found = self._specs | {name: replace(self._specs[name], dtype=torch.float32) for name in self._rows}
        for name in self._specs:
            weight, mark, kind = name.partition(_STATE)
            if mark:
                try:
                    found[weight] = self._describe(weight, name, kind)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    why = f"{what}: {weight} is not quantized as bitsandbytes 0.50 does it ({error})"
                    raise ConfigError(f"{why}; quantize it again with that, or save it in 16 bits", where=where) from None
                parts |= {name, *(weight + end for end in _PARTS)}
        self.entries = {name: spec for name, spec in found.items() if name not in parts}

    def _describe(self, weight: str, name: str, kind: str) -> TensorSpec:
        state: dict[str, Any] = json.loads(self._stored(name).numpy().tobytes())
        nested = f"{weight}.nested_absmax" in self._specs
        codec = Codec(name=state["quant_type"], block=state["blocksize"], nested=nested)
        if state["quant_type"] not in CODECS or (nested and state["nested_blocksize"] != GROUP):
            raise ValueError(f"{kind} with {state['quant_type']!r} and groups of {state.get('nested_blocksize')}")
        mean = torch.tensor([state["nested_offset"] if nested else 0.0])
        self._encoded[weight] = _Encoded(codec=codec, mean=mean, digest=state.get("xxh3"))
        spec = replace(self._specs[weight], dtype=getattr(torch, state["dtype"]), shape=tuple(state["shape"]))
        for part, length in {weight: codec.code_bytes(spec.numel), f"{weight}.absmax": codec.blocks(spec.numel)}.items():
            if (there := prod(self._specs[part].shape)) != length:
                raise ValueError(f"{part} has {there} elements, not {length}")
        return spec

    def elements(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements [start, end) of a flattened tensor, 1-D, on CPU, decoded. Raises as `TensorFiles` does."""
        if name not in self._rows and name not in self._encoded:
            return self._stored(name, start, end)
        entry = self.entries[name]
        last = entry.numel if end is None else end
        block = entry.shape[-1] if name in self._rows else self._encoded[name].codec.block
        begin, stop = start // block * block, min(round_up(last, block), entry.numel)
        if name in self._rows:
            scales = self._stored(self._rows[name], begin // block, stop // block)
            values = (self._stored(name, begin, stop).view(-1, block).float() * scales[:, None] * _STEP).view(-1)
        else:
            codec = self._encoded[name].codec
            codes = self._stored(name, codec.code_bytes(begin), codec.code_bytes(stop))
            scales = self._stored(f"{name}.absmax", codec.blocks(begin), codec.blocks(stop))
            values = torch.empty(stop - begin, dtype=entry.dtype)
            codec.decode(codes, codec.scale_values(scales, self._tables(name), begin // block), values)
        return values[start - begin : last - begin]

    @abstractmethod
    def _stored(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements [start, end) of a tensor as they lie, 1-D, on CPU."""

    def _tables(self, name: str) -> torch.Tensor:
        stored = self._encoded[name]
        if not stored.codec.nested:
            return torch.empty(0)
        return torch.cat([self._stored(f"{name}.nested_absmax"), stored.mean])

    def has_encoded(self, name: str, codec: Codec) -> bool:
        return name in self._encoded and self._encoded[name].codec == codec

    def encoded(self, name: str) -> EncodedParameter:
        """Return a tensor that was encoded as it lies."""
        codes, scales = self._stored(name), self._stored(f"{name}.absmax")
        return EncodedParameter(codes=codes, scales=scales, tables=self._tables(name))

    def section(self) -> dict[str, Any] | None:
        """Return `model.weights` for the form that the matrices in 4 bits have; None without any, or if they have several."""
        codecs = {each.codec for each in self._encoded.values()}
        if len(codecs) != 1:
            return None
        (codec,) = codecs
        whole = [name for name, each in self.entries.items() if len(each.shape) == 2 and name not in self._encoded]
        skip = [f"*{name.removesuffix('weight')}*[w]eight" for name in whole if name.endswith(".weight")]
        return {"codec": codec.name, "block": codec.block, "nested": codec.nested, "skip": (*skip, _EXPERTS)}


class QuantizedFiles(QuantizedTensors, TensorFiles):
    """The tensors of a directory that bitsandbytes has quantized. Raises `ConfigError` for what is none of its forms."""

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        TensorFiles.__init__(self, directory, manifest)
        self.describe(str(self.directory), "model.source")

    def _stored(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        return TensorFiles.elements(self, name, start, end)

    def is_stored_as(self, name: str, dtype: torch.dtype) -> bool:
        return name not in self._encoded and name not in self._rows and super().is_stored_as(name, dtype)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        def codes() -> Iterator[tuple[str, int, int]]:
            for name, start, end in ranges:
                stored = self._encoded.get(name)
                size = 1 if stored is None else stored.codec.codes_in_byte
                yield name, start // size, -(-end // size)

        super().expect(codes())

    def encoded(self, name: str) -> EncodedParameter:
        """Return a tensor that was encoded as it lies. Raises `StorageError` for damaged codes."""
        found = super().encoded(name)
        if self._encoded[name].digest not in (None, _digest(found)):
            path = self.path_of(self._specs[name].path)
            path.unlink(missing_ok=True)
            raise StorageError(f"{str(path)!r} was damaged, and is removed; start again, and it is encoded anew")
        return found

    def place_of(self, name: str) -> EncodedPlace:
        """Return where the codes and the scales of a tensor that was encoded lie."""
        codes, scales = ((self.path_of(spec.path), spec.begin) for spec in (self._specs[name], self._specs[f"{name}.absmax"]))
        return EncodedPlace(codes=codes, scales=scales, tables=self._tables(name))


def _digest(parameter: EncodedParameter) -> str:
    digest = xxhash.xxh3_128()
    for each in (parameter.codes, parameter.scales, parameter.tables):
        digest.update(each.numpy().data)
    return digest.hexdigest()


def stored_form(
    name: str, shape: torch.Size, dtype: torch.dtype, codec: Codec, parameter: EncodedParameter, *, checked: bool
) -> dict[str, torch.Tensor]:
    """Return bitsandbytes' tensors of a parameter; those of 8 bits, or with a checksum (`checked`), only this project reads."""
    state: dict[str, Any] = {"quant_type": codec.name, "blocksize": codec.block}
    state |= {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
    found = {name: parameter.codes.view(-1, 1), f"{name}.absmax": parameter.scales, f"{name}.quant_map": codec.values()}
    if codec.nested:
        found[f"{name}.nested_absmax"] = parameter.tables[:-1].clone()
        found[f"{name}.nested_quant_map"] = Codec(name="int8", block=GROUP).values()
        state |= {"nested_blocksize": GROUP, "nested_dtype": "float32", "nested_offset": parameter.tables[-1].item()}
    state |= {"xxh3": _digest(parameter)} if checked else {}
    text = json.dumps(state).ljust(_STATE_BYTES).encode()
    return {**found, f"{name}{_STATE}{codec.name}": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def quantization_of(directory: Path) -> Mapping[str, Any] | None:
    """Return how a model directory says that it is quantized; None if it is not."""
    path = directory / "config.json"
    stored = json_object(read_whole(path), lambda why: ConfigError(f"{path} {why}", where="model.source"))
    found = stored.get("quantization_config")
    return found if isinstance(found, dict) else None


def open_files(directory: Path) -> tuple[TensorFiles, Any]:
    """Open a model directory's files, with transformers' quantizer if that decodes them. Raises `ConfigError` for other forms."""
    quantization = quantization_of(directory)
    if quantization is None:
        return TensorFiles(directory), None
    method = quantization.get("quant_method")
    if method == "bitsandbytes":
        return QuantizedFiles(directory), None
    quantizer, base = None, HfQuantizer
    if AUTO_QUANTIZER_MAPPING.get(str(method), base).get_load_operations is not base.get_load_operations:
        with library_errors("model.source", f"{directory} is quantized by {method}, whose decoder does not start: "):
            quantizer = AutoHfQuantizer.from_config({**quantization, "dequantize": True}, pre_quantized=True)
            quantizer.validate_environment()
    if quantizer is None or "dequantize" not in quantizer.get_load_operations():
        why = f"{directory} is quantized by {method}, which transformers does not decode while it loads"
        cure = "dequantize it with the library that wrote it and save it first"
        raise ConfigError(f"{why}; {cure}, or give the model in 16 bits with model.weights: nf4", where="model.source")
    return TensorFiles(directory), quantizer
