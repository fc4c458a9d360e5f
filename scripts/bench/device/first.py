"""Part `first`: what a first run on several devices may hang in, each a few steps of a tiny model beside plain PyTorch.

waits       a rank that is late by seconds, where the others wait with a timeout: the communicator must live on
order       ranks whose hosts run at different speeds launch their collectives in one order all the same
tensor      tensor parallelism, with and without sequence parallelism
pipelines   the first step of every schedule, where the ranks first meet in sends and receives
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.device import rows
from bench.device.parity import Way, compare, model_of
from bench.device.place import Place
from zeromesh.trainer import Trainer

_LATE_SECONDS = 2.0
_JITTER_SECONDS = 0.004
_STEPS, _LENGTH, _VOCABULARY = 2, 16, 96
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
_LOSS = 1e-4


def run(place: Place) -> None:
    """One check after the other; one that hangs is named by whoever ends this process."""
    here = (place.device,)
    waits = "a rank that comes late"
    with place.trying(waits):
        way = Way(name=waits, options={"stage": 3})
        late = time.sleep if place.rank == place.ranks - 1 else (lambda seconds: None)
        model = model_of("llama", torch.float32)
        compare(place, waits, model, way, devices=here, before_last=lambda: late(_LATE_SECONDS))
    for stage in (2, 3):
        order = f"hosts of different speeds, stage {stage}"
        with place.trying(order):
            model = _with_jitter(model_of("llama", torch.float32, layers=8), place.rank)
            compare(place, order, model, Way(name=order, options={"stage": stage}, accumulation=2), devices=here)
    tensor = next((each for each in (8, 4, 2) if place.ranks % each == 0), 1)
    for sequence in (False, True):
        name = f"tensor parallel over {tensor}" + (", sequence parallel" if sequence else "")
        if tensor == 1:
            place.say(rows.not_run(name, f"{place.ranks} ranks cannot divide eight heads"))
            continue
        with place.trying(name):
            way = Way(name=name, options={"stage": 3, "parallel": {"tensor": tensor, "sequence": sequence}})
            compare(place, name, model_of("llama", torch.float32), way, devices=here, tensor=tensor)
    for schedule in _SCHEDULES:
        with place.trying(f"pipeline, {schedule}"):
            _pipeline(place, schedule)


def _with_jitter(model: nn.Module, rank: int) -> nn.Module:
    """The model, whose blocks begin at another moment on each rank."""
    chosen = random.Random(rank)
    for block in model.model.layers:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda *_: time.sleep(chosen.uniform(0, _JITTER_SECONDS)))
    return model


class Tokens:
    """The samples of all steps."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, _VOCABULARY, (count, _LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def _pipeline(place: Place, schedule: str) -> None:
    """All ranks are stages of one pipeline."""
    microbatches = 2 * place.ranks
    data = Tokens(microbatches * _STEPS)
    model = model_of("llama", torch.float32, layers=2 * place.ranks)
    reference = _plain_losses(model_of("llama", torch.float32, layers=2 * place.ranks), data, place.device, microbatches)
    settings: dict[str, Any] = {
        "data": {"shuffle": False},
        "model": {"loss": "native"},
        "parallel": {"pipeline": place.ranks, "schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1},
        "zero": {"stage": 1},
        "precision": {"compute": "float32"},
        "optimizer": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-4, "weight_decay": 0.1},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": microbatches, "micro_size": 1},
        "run": {"name": schedule, "output_dir": str(Path(place.folder)), "max_steps": _STEPS, "clip_norm": 0.0},
        "checkpoint": {"every_steps": 0},
    }
    with Trainer(model, settings, data) as trainer:
        losses = trainer.fit().losses
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
    place.figure(f"pipeline, {schedule}: losses beside plain PyTorch's", apart, most=_LOSS)


def _plain_losses(model: nn.Module, data: Tokens, device: torch.device, size: int) -> list[float]:
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    losses = []
    for batch in data.ids.split(size):
        tokens = batch.to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses
