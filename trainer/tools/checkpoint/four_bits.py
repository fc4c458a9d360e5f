"""Models in 4 bits as bitsandbytes writes them: directories that it and transformers read, and zeromesh as they lie."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.safetensors_layout import parse_json
from zeromesh.errors import ConfigError
from zeromesh.files import read_whole, write_whole
from zeromesh.flat.codec import CODECS, GROUP, Codec
from zeromesh.options import EncodedWeights
from zeromesh.settings.keys import CodecName
from zeromesh.trainer.models.hub_form import Named
from zeromesh.trainer.weights.quantized_files import STATE_BYTES, stored_form
from zeromesh.trainer.weights.safetensors_source import read_class
from zeromesh.units.plan import encoded_names

FOUR_BITS: Mapping[str, CodecName] = {"nf4": "nf4", "fp4": "fp4"}
"""The codecs of 4 bits, by name."""


def in_four_bits(
    name: CodecName, folder: Path, tensors: Mapping[str, torch.Tensor], values: Named
) -> tuple[Mapping[str, torch.Tensor], Named]:
    """Return the meta tensors, and names and values, of a model in `folder` with its linear layers in 4 bits, scales nested, and
    mark its configuration. Raises `ConfigError` for a model that transformers cannot build."""
    codec = Codec(name=name, block=CODECS[name].block, nested=True)
    cls, config, reason = read_class(folder)
    if cls is None:
        raise ConfigError(f"{reason}; export the model in 16 bits", where="--dtype")
    with torch.device("meta"):
        model: Any = cls(config).requires_grad_(False)
    chosen = encoded_names(model, EncodedWeights(codec=codec)) & tensors.keys()
    path = folder / "config.json"
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": name}
    settings |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": str(config.dtype).removeprefix("torch.")}
    content = {**parse_json(path, read_whole(path)), "quantization_config": settings}
    write_whole(path, json.dumps(content, indent=2).encode() + b"\n")
    made = dict[str, torch.Tensor]()
    for key, each in tensors.items():
        made |= _described(key, each, codec) if key in chosen else {key: each}

    def encoded() -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in values:
            if key not in chosen:
                yield key, value
                continue
            found = codec.encode_whole(value)
            yield from stored_form(key, value.shape, value.dtype, codec, found).items()

    return made, encoded()


def _described(name: str, tensor: torch.Tensor, codec: Codec) -> dict[str, torch.Tensor]:
    """Return the meta tensors by which one is stored."""
    blocks = codec.blocks(tensor.numel())
    with torch.device("meta"):
        return {
            name: torch.empty(codec.code_bytes(tensor.numel()), 1, dtype=torch.uint8),
            f"{name}.absmax": torch.empty(blocks, dtype=torch.uint8),
            f"{name}.quant_map": torch.empty(16),
            f"{name}.nested_absmax": torch.empty(-(-blocks // GROUP)),
            f"{name}.nested_quant_map": torch.empty(256),
            f"{name}.quant_state.bitsandbytes__{codec.name}": torch.empty(STATE_BYTES, dtype=torch.uint8),
        }
