"""Part `parity`: tiny models trained a few steps by zeromesh, beside plain PyTorch on the same device and on the CPU.

A difference is the largest one of any parameter, as a part of the most that training has moved any of them. All ranks together
train on the same samples as the one process that is the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import zeromesh
from bench.device.place import Place

_STEPS = 3
_VOCABULARY, _LENGTH = 96, 16
_LIMITS = {torch.float64: (1e-6, 1e-3), torch.float32: (1e-3, 2e-2)}
"""By dtype: the largest difference on one device, where only the order of sums differs, and between a device and the CPU. Models
compute rotary positions and norms in float32 whatever their dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train, and what the plain loop has to do as well."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip: float = 0.0


def ways(folder: str) -> list[Way]:
    """All that are tried; `folder` is for the file tier."""
    stages = [Way(name=f"stage {stage}", options={"stage": stage}) for stage in range(4)]
    host = {"optimizer": "host", "parameters": "host"}
    file = {"optimizer": "file", "parameters": "file", "directory": folder}
    return [
        *stages,
        Way(name="stage 2, accumulation", options={"stage": 2}, accumulation=2),
        Way(name="stage 3, accumulation and clipping", options={"stage": 3}, accumulation=2, clip=0.5),
        Way(name="stage 3, states on the host", options={"stage": 3, "offload": host}, accumulation=2),
        Way(name="stage 3, states on files", options={"stage": 3, "offload": file}, clip=0.5),
        Way(name="stage 3, updates on the device", options={"stage": 3, "offload": {**host, "update": "device"}}),
    ]


def model_of(kind: str, dtype: torch.dtype, *, layers: int = 3) -> nn.Module:
    """A tiny model on the CPU, always the same, with eight heads for as many ranks to divide."""
    torch.manual_seed(0)
    if kind == "gpt2":
        small: Any = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=_VOCABULARY, n_positions=_LENGTH)
        small.resid_pdrop = small.embd_pdrop = small.attn_pdrop = 0.0
        made: nn.Module = GPT2LMHeadModel(small)
    else:
        made = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=176,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=8,
                vocab_size=_VOCABULARY,
                max_position_embeddings=_LENGTH,
                use_cache=False,
            )
        )
    return made.to(dtype)


def batches(ranks: int, accumulation: int) -> Tensor:
    """`[steps, accumulation, ranks, 2, length]` token ids."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, _VOCABULARY, (_STEPS, accumulation, ranks, 2, _LENGTH), generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With an eps that keeps gradients of nothing but rounding from making whole steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


def plain(model: nn.Module, device: torch.device, way: Way, ranks: int) -> dict[str, Tensor]:
    """Parameters after training on one process, on the CPU in float64."""
    model.to(device)
    optimizer = optimizer_of(model)
    for step in batches(ranks, way.accumulation).to(device):
        for microbatch in step:
            (_loss(model, microbatch.flatten(0, 1)) / way.accumulation).backward()  # type: ignore[no-untyped-call]
        if way.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach().cpu().double() for name, each in model.named_parameters()}


def ours(
    model: nn.Module, device: torch.device, way: Way, rank: int, ranks: int, *, before_last: Callable[[], object] = lambda: None
) -> dict[str, Tensor]:
    """The same by zeromesh, this rank on its samples. `before_last` is called between the last two steps."""
    model.to(device)
    net, optimizer = zeromesh.shard(model, optimizer_of(model), accumulation=way.accumulation, **way.options)
    assert optimizer is not None
    for number, step in enumerate(batches(ranks, way.accumulation).to(device)):
        if number == _STEPS - 1:
            before_last()
        for microbatch in step:
            (_loss(net, microbatch[rank]) / way.accumulation).backward()  # type: ignore[no-untyped-call]
        if way.clip:
            optimizer.clip_grad_norm_(way.clip)
        optimizer.step()
        optimizer.zero_grad()
    names = dict(net.named_parameters())
    found = {name: each.detach().cpu().double() for name, each in zeromesh.state_dict(net) if name in names}
    zeromesh.unshard(net)
    return found


def _loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def difference(found: Mapping[str, Tensor], reference: Mapping[str, Tensor], begun: Mapping[str, Tensor]) -> float:
    """The largest of any parameter, as a part of the largest movement. NaN where anything is missing or no number."""
    if set(found) != set(reference):
        return float("nan")
    moved = max(float((reference[name] - begun[name]).abs().max()) for name in reference)
    return float(torch.stack([(found[name] - reference[name]).abs().max() for name in reference]).max()) / moved


def run(place: Place) -> None:
    """Every model, dtype and way, until the time is spent."""
    cpu = torch.device("cpu")
    everything = ways(str(place.folder))
    few = [way for way in everything if way.name in ("stage 0", "stage 3, accumulation and clipping")]
    place.join()
    problems = [("llama", torch.float64, everything), ("gpt2", torch.float64, few), ("llama", torch.float32, few)]
    for kind, dtype, chosen in problems:
        for way in chosen:
            what = f"{kind}, {str(dtype).removeprefix('torch.')}, {way.name}"
            if not place.enough(what, 5):
                continue
            with place.trying(what):
                compare(place, what, model_of(kind, dtype), way, devices=(place.device, cpu))


def compare(
    place: Place,
    what: str,
    model: nn.Module,
    way: Way,
    *,
    devices: Sequence[torch.device],
    tensor: int = 1,
    before_last: Callable[[], object] = lambda: None,
) -> None:
    """Train a model on the CPU both ways, plainly on each of `devices`, and say how far apart they end. So many ranks (`tensor`)
    divide it, and take the same samples."""
    begun = {name: each.detach().double() for name, each in model.named_parameters()}
    index, count = place.rank // tensor, place.ranks // tensor
    references = [plain(copy.deepcopy(model), device, way, count) for device in devices]
    found = ours(model, place.device, way, index, count, before_last=before_last)
    limits = _LIMITS[next(iter(model.parameters())).dtype]
    for device, reference in zip(devices, references, strict=True):
        here = device == place.device and device is devices[0]
        name = "here" if here else "on the CPU"
        apart = difference(found, reference, begun)
        place.figure(f"{what}: beside plain PyTorch {name}", apart, most=limits[0] if here else limits[1])
