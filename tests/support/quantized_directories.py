"""Model directories as bitsandbytes and transformers write them, without a download."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Values = dict[str, torch.Tensor]


def quantize(source: Path, target: Path, kind: str) -> Values:
    """Write the directory `source` with its projections in nf4, nested nf4 ("nested"), fp4 or int8; what bitsandbytes decodes."""
    import bitsandbytes.functional as functional

    target.mkdir()
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    decoded, stored = load_file(source / "model.safetensors"), dict[str, torch.Tensor]()
    for name, value in decoded.items():
        if "_proj.weight" not in name:
            stored[name] = value
        elif kind == "int8":
            codes, scales, _ = functional.int8_vectorwise_quant(value.half())
            stored |= {name: codes, name.replace(".weight", ".SCB"): scales}
            stored[name.replace(".weight", ".weight_format")] = torch.tensor(0, dtype=torch.uint8)
            decoded[name] = functional.int8_vectorwise_dequant(codes, scales)
        else:
            how = {"quant_type": "fp4" if kind == "fp4" else "nf4", "compress_statistics": kind == "nested"}
            codes, state = functional.quantize_4bit(value, blocksize=64, **how)
            stored[name] = codes
            stored |= {f"{name}.{part}": each.clone() for part, each in state.as_dict(packed=True).items()}
            # On CPU, bitsandbytes 0.50 decodes rows right only where they are whole blocks; one row of all elements is.
            state.shape = torch.Size([value.numel()])
            decoded[name] = functional.dequantize_4bit(codes, state).view(value.shape)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    mark(target, {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"})
    return decoded


def mark(directory: Path, quantization: Mapping[str, Any]) -> None:
    """Say in a directory's configuration how it is quantized."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(quantization)}))
