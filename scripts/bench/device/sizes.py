"""Models that are trained, and how deep one may be where memory is bounded: arithmetic only."""

from __future__ import annotations

from dataclasses import replace

from bench.workload import Workload

TOKENS = 8192
_LENGTH = 2048
_ONE_BILLION = Workload(hidden=2048, intermediate=8192, layers=16, heads=32, key_value_heads=8, vocabulary=32000)
_EIGHT_BILLION = Workload(hidden=4096, intermediate=14336, layers=32, heads=32, key_value_heads=8, vocabulary=128256)
_TINY = Workload(hidden=64, intermediate=176, layers=4, heads=4, key_value_heads=2, vocabulary=256)
ACTIVATIONS = 14 << 30
"""Bytes of the device that activations and logits of 8k tokens take, blocks recomputed."""
_AT_WORK = 2
"""Bytes of a parameter that a step takes beside the states, in gathered parameters and gradients on their way."""


def workload(billions: int, *, dry: bool, ranks: int) -> Workload:
    """A Llama of about so many billion parameters; a tiny one in a dry run."""
    if dry:
        return replace(_TINY, sequence=32, micro=2, ranks=ranks)
    chosen = _ONE_BILLION if billions == 1 else replace(_EIGHT_BILLION, checkpointing=True)
    return replace(chosen, sequence=_LENGTH, micro=TOKENS // _LENGTH, ranks=ranks)


def parameters(model: Workload) -> int:
    """Count the elements of a Llama."""
    size = model.hidden // model.heads
    attention = 2 * model.hidden * model.hidden + 2 * model.hidden * size * (model.key_value_heads or model.heads)
    block = attention + 3 * model.hidden * model.intermediate + 2 * model.hidden
    return model.layers * block + 2 * model.vocabulary * model.hidden + model.hidden


def fitted(model: Workload, nbytes: int, each: float) -> Workload:
    """The same with as many layers as `nbytes` hold at `each` bytes a parameter, and no more than it has; 0 if none does."""
    without = parameters(replace(model, layers=0))
    one = parameters(replace(model, layers=1)) - without
    layers = int((nbytes / each - without) // one)
    return replace(model, layers=max(0, min(model.layers, layers)))


def on_device(model: Workload, free: int, ranks: int) -> Workload:
    """As deep as can be trained with AdamW in a device's memory: 16 bytes a parameter over all ranks, and what a step takes."""
    return fitted(model, free - ACTIVATIONS, 16 / ranks + _AT_WORK)


def on_host(model: Workload, free_host: int, free_device: int, each: float) -> Workload:
    """As deep as can be trained with `each` bytes a parameter on the host and its 16-bit parameters on the device."""
    return min(
        (fitted(model, free_host, each), fitted(model, free_device - ACTIVATIONS, 2 + _AT_WORK)), key=lambda found: found.layers
    )


def title(model: Workload) -> str:
    """Such as `8B wide, 14 layers, 4.1 billion parameters`."""
    return f"hidden {model.hidden}, {model.layers} layers, {parameters(model) / 1e9:.3g} billion parameters"
