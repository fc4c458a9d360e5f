"""The attention implementation of a transformers model, and the document boundaries that it gets for packed sequences.

Packed documents are recognised by position ids that restart. Their separation costs

    eager, sdpa       a mask of [batch, 1, sequence, sequence], with which sdpa takes a kernel that is slower than flash attention
    flex_attention    a mask of blocks, which transformers derives from the position ids
    flash_attention   nothing, as the kernel takes document boundaries. transformers derives them for a batch of one sequence
                      only, and synchronises the device in every layer; here they come from position ids on the CPU
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from zeromesh.errors import ConfigError, summary
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.trainer.config.sections.model import Attention
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.weights.safetensors_source import quiet_library

_WHERE = "model.attention"
_FLASH = {
    "flash_attention_2": ("flash-attn (pip install flash-attn --no-build-isolation)", is_flash_attn_2_available),
    "flash_attention_3": (
        "flash-attn-3 (pip install flash-attn-3, from PyTorch's index, or built from flash-attention's folder hopper)",
        is_flash_attn_3_available,
    ),
}
"""The package of each implementation, and the function that tells if it is installed."""


def use_attention(model: nn.Module, name: Attention, compute: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Set a transformers model's attention implementation to `name`; returns a function that restores the previous one.

    Raises `ConfigError` if the model, the device, the dtype `compute` or a missing package does not allow it.
    """
    inside = pretrained_of(model)
    if inside is None:
        raise ConfigError(f"{type(model).__name__} is no model of transformers, and computes as it does", where=_WHERE)
    if name in _FLASH:
        package, available = _FLASH[name]
        computes = str(compute).removeprefix("torch.")
        missing = (
            f"{name} needs {package}, or kernels (pip install kernels), with which transformers fetches it from the Hub"
        )
        for refused, reason in (
            (not is_accelerator(device), f"{name} computes on GPUs, and this run on {device.type.upper()}; take sdpa"),
            (not (available() or is_kernels_available()), missing),
            (compute.itemsize != 2, f"{name} computes in bfloat16 and float16, and precision.compute is {computes}"),
        ):
            if refused:
                raise ConfigError(reason, where=_WHERE)
    elif name == "flex_attention" and not is_accelerator(device):
        raise ConfigError("flex_attention has no backward on CPUs; take sdpa", where=_WHERE)
    parts = (inside, *(each for each in inside.modules() if isinstance(each, PreTrainedModel)))
    configs = {id(each.config): each.config for each in parts}
    before = {key: config._attn_implementation for key, config in configs.items()}

    def undo() -> None:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]

    try:
        with quiet_library():
            inside.set_attn_implementation(name)
    except Exception as error:
        undo()
        raise ConfigError(
            f"{type(inside).__name__} cannot compute by {name}: {summary(error)}", where=_WHERE
        ) from error
    taken = inside.config._attn_implementation
    # If the package is missing but `kernels` is installed, transformers loads the same kernel from the Hub under
    # another name.
    if taken != name and not (name in _FLASH and "flash" in str(taken)):
        undo()
        raise ConfigError(f"{type(inside).__name__} computes by {taken}, and takes no other", where=_WHERE)
    return undo


def with_documents(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the document boundaries of packed sequences to a batch, if `model` uses flash attention.

    For `position_ids` `[batch, sequence]` that restart inside a sequence, these are `cu_seq_lens_q` and `cu_seq_lens_k`, the starts
    of documents in the flat batch and its end, int32 `[documents + 1]`, and `max_length_q` and `max_length_k`, the tokens of the
    longest. Other batches are unchanged. Raises `ConfigError` for a model whose forward takes no further keywords.
    """
    inside, positions = pretrained_of(model), batch.get("position_ids")
    if inside is None or "flash" not in str(getattr(inside.config, "_attn_implementation", None)):
        return batch
    if not isinstance(positions, Tensor) or positions.dim() != 2 or "cu_seq_lens_q" in batch:
        return batch
    if batch.get("attention_mask") is not None:
        return batch
    begins = nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    if len(starts) == len(positions):
        return batch
    kinds = {each.kind for each in inspect.signature(type(inside).forward).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"{type(inside).__name__}.forward hands nothing on to flash attention, which would see the documents of a "
            "sequence as one; set data.separate_documents: false, or model.attention: sdpa"
        )
    ends = nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
    longest = int(ends.diff().max())
    return {**batch, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
