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

    decoded, stored = _begin(source, target), dict[str, torch.Tensor]()
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


def _begin(source: Path, target: Path) -> Values:
    """Make the directory `target` with what describes the model of `source`; the values of that."""
    target.mkdir()
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    return load_file(source / "model.safetensors")


def mark(directory: Path, quantization: Mapping[str, Any]) -> None:
    """Say in a directory's configuration how it is quantized."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(quantization)}))


def quantize_fp8(source: Path, target: Path, block: int) -> Values:
    """Write the directory `source` with its projections in FP8 and a scale for each square block; the values that it stands for."""
    decoded, stored = _begin(source, target), dict[str, torch.Tensor]()
    for name, value in decoded.items():
        stored[name] = value
        if "_proj.weight" in name:
            rows, columns = value.shape
            blocks = value.float().view(rows // block, block, columns // block, block)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            codes = (blocks / scales).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = codes.reshape(rows, columns), scales[:, 0, :, 0].contiguous()
            decoded[name] = (codes.float() * scales).reshape(rows, columns)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    mark(target, {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"})
    return decoded


def quantize_packed(source: Path, target: Path) -> Values:
    """Write the directory `source` with projections as compressed-tensors packs 4 bits; the values that it stands for."""
    decoded, stored = _begin(source, target), dict[str, torch.Tensor]()
    for name, value in decoded.items():
        if "_proj.weight" not in name:
            stored[name] = value
            continue
        rows, columns = value.shape
        groups = value.float().view(rows, columns // 16, 16)
        scales = (groups.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16)
        codes = (groups / scales.float()).round().clamp(-8, 7).to(torch.int32)
        shifted = (codes + 8).view(rows, columns // 8, 8) << torch.arange(0, 32, 4, dtype=torch.int32)
        stored[f"{name}_packed"] = shifted.sum(-1).to(torch.int32)
        stored |= {f"{name}_scale": scales[..., 0].contiguous(), f"{name}_shape": torch.tensor([rows, columns])}
        decoded[name] = (codes.to(torch.bfloat16) * scales).view(rows, columns)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "group_size": 16, "strategy": "group", "symmetric": True}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    mark(target, {**how, "ignore": ["lm_head"], "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}})
    return decoded


def random_mxfp4(directory: Path) -> None:
    """Write a tiny gpt-oss whose experts are random MXFP4."""
    import transformers as tf

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    tf.GptOssForCausalLM(tf.GptOssConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    for name in [each for each in stored if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, height = stored.pop(name).shape
        stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, height, width // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(118, 122, (experts, height, width // 32), dtype=torch.uint8)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    mark(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
