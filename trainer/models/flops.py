"""Model FLOPs utilisation: the model FLOPs of a step over the peak FLOPs of its ranks in the same time, without recomputation, as
in "PaLM: Scaling Language Modeling with Pathways" (arXiv 2204.02311, appendix B): for a token

    6 for each trained weight of a matrix, 4 for each frozen one      forward 2, gradients of inputs 2, of weights 2
    12 x layers x heads x head size x length                          attention, a causal one not halved

Embeddings that are only looked up do not count, nor experts that a token does not reach.
"""

import inspect
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from zeromesh.offload.accelerator import device_name, is_accelerator, time_call
from zeromesh.trainer.machines.cards import peak_of
from zeromesh.trainer.models.user_model import positive, text_part
from zeromesh.units.plan import embedding_of

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
"""The names that configurations give to the number of experts that a token chooses."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_NO_ATTENTION = ("linear", "mamba", "conv", "recurrent")
_TRIES = 3
_LEAST_SECONDS = 1e-3  # of a timed product on an accelerator, in which launch and synchronisation are negligible


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Floating-point operations of a whole model's forward and backward passes."""

    dense: float  # per token, without attention
    attention: float = 0.0  # per token, attended token and layer
    windows: tuple[float, ...] = ()  # in tokens, of each attention layer

    @classmethod
    def of(cls, model: nn.Module) -> "ModelFlops | None":
        """Count the FLOPs of an undivided language model; None if samples are not tokens, or for encoder-decoders."""
        config: Any = getattr(model, "config", None)
        two_kinds = getattr(config, "is_encoder_decoder", False)
        if two_kinds or "input_ids" not in inspect.signature(model.forward).parameters:
            return None
        config = text_part(config)
        count = positive(config, *_EXPERTS)
        chosen = positive(config, *CHOSEN)
        # The fraction of a layer's experts that process one token.
        reached = chosen / count if count and chosen else 1.0
        dense = 0.0
        head = embedding_of(model, "output")
        multiplied = {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        looked_up = {id(parameter) for table in tables for parameter in table.parameters()} - multiplied
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and id(parameter) not in looked_up:
                each = 6 if parameter.requires_grad else 4
                dense += each * parameter.numel() * (reached if "experts" in name.split(".") else 1.0)
        heads = positive(config, "num_attention_heads", "n_head")
        width = positive(config, "hidden_size", "n_embd")
        size = positive(config, "head_dim") or (width // heads if heads else 0)
        layers = positive(config, "num_hidden_layers", "n_layer") if heads else 0
        window = positive(config, "sliding_window") or math.inf
        kinds = getattr(config, "layer_types", None) or ["attention" if window == math.inf else "sliding"] * layers
        attending = [kind for kind in kinds if heads and not any(word in kind for word in _NO_ATTENTION)]
        windows = tuple(float(window) if "sliding" in kind else math.inf for kind in attending)
        return cls(dense=dense, attention=12.0 * heads * size, windows=windows)

    def of_step(self, tokens: int, length: float) -> float:
        return tokens * (self.dense + self.attention * sum(min(window, length) for window in self.windows))


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of this rank and the source of the number, a data sheet or a timed product (once per process)."""
    known = peak_of(device_name(device), str(dtype).removeprefix("torch.")) if is_accelerator(device) else None
    if known is not None and dtype.itemsize == 2:
        return known[0], f"by the data sheet of {known[1]}"
    # Many CPUs multiply 16-bit numbers slower than fp32, so the peak is that of the faster dtype.
    dtypes = [dtype] if dtype.itemsize > 2 or is_accelerator(device) else [dtype, torch.float32]
    return max(_timed(device, each, torch.get_num_threads()) for each in dtypes), "measured by a product of matrices"


@cache
def _timed(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    def seconds(size: int) -> float:
        left = torch.ones(size, size, dtype=dtype, device=device)
        out = torch.empty_like(left)
        return time_call(lambda: torch.mm(left, left, out=out), device, rounds=_TRIES, fill=0.0)

    if not is_accelerator(device):
        size = 512 * max(1, math.isqrt(threads // 2))
        return 2.0 * size**3 / seconds(size)
    size = 1024
    while (took := seconds(size)) < _LEAST_SECONDS and size < 16384:
        size *= 2
    return 2.0 * size**3 / took
