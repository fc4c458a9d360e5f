"""Part `divided`: a Llama of 1 billion parameters whose ranks divide its layers or its blocks, beside stage 3 on the same ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.device import sizes, systems
from bench.device.place import Place
from bench.workload import Workload
from zeromesh.offload import accelerator
from zeromesh.trainer import Trainer
from zeromesh.trainer.callbacks.callback import Callback

STAGE3, TENSOR, PIPELINE = "zeromesh, stage 3", "zeromesh, tensor parallel", "zeromesh, pipeline"
_STEPS, _WARMUP = 3, 2
_SHARE = 0.5


def run(place: Place) -> None:
    """Tokens a second of each, all ranks together."""
    place.join()
    workload = replace(sizes.workload(1, dry=place.dry, ranks=place.ranks), device=place.device.type)
    tensor = next((each for each in (8, 4, 2) if place.ranks % each == 0 and workload.heads % each == 0), 1)
    tensor = min(tensor, workload.key_value_heads or workload.heads)
    found: dict[str, float] = {}
    if place.enough(STAGE3, 12):
        with place.trying(STAGE3):
            ours = systems.turn(systems.zeromesh_step, workload, place, _STEPS)
            found[STAGE3] = _rate(workload, place.ranks, ours.seconds)
    if tensor > 1 and place.enough(TENSOR, 12):
        with place.trying(TENSOR):
            # As many tokens as stage 3 has; ranks that divide the model take the same ones.
            shared = replace(workload, micro=workload.micro * tensor, divided=True)
            build = partial(systems.zeromesh_step, parallel={"tensor": tensor, "sequence": True})
            ours = systems.turn(build, shared, place, _STEPS)
            found[TENSOR] = _rate(shared, place.ranks // tensor, ours.seconds)
    if place.enough(PIPELINE, 12):
        with place.trying(PIPELINE):
            found[PIPELINE] = _rate(workload, place.ranks, _pipeline(place, workload))
    for name, rate in found.items():
        place.figure(f"{name}: tokens of all devices", rate, "a second")
    for name in (TENSOR, PIPELINE):
        if name in found and STAGE3 in found:
            share = found[name] / found[STAGE3]
            place.figure(f"{name}: tokens beside stage 3", share, least=_SHARE, than="of stage 3", timing=True)


def _rate(workload: Workload, copies: int, seconds: list[float]) -> float:
    return workload.micro * workload.sequence * copies / statistics.median(seconds)


class Clock(Callback):
    """How long each step takes on this rank, whose device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device, self._began = device, 0.0

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        accelerator.synchronize(self._device)
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        accelerator.synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._began)


class Tokens:
    """Random samples."""

    def __init__(self, workload: Workload, count: int) -> None:
        self._workload, self._count = workload, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self._workload.vocabulary, (self._workload.sequence,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def _pipeline(place: Place, workload: Workload) -> list[float]:
    """Seconds of steps whose blocks the ranks divide, with as many tokens as stage 3 has, a sequence a microbatch."""
    size, clock = workload.micro * place.ranks, Clock(place.device)
    settings: dict[str, Any] = {
        "data": {"shuffle": False},
        "model": {"loss": "native"},
        "parallel": {"pipeline": place.ranks, "schedule": "1f1b"},
        "zero": {"stage": 1},
        "precision": {"compute": str(workload.compute).removeprefix("torch.")},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": size, "micro_size": 1},
        "run": {"name": "pipeline", "output_dir": str(place.folder), "max_steps": _WARMUP + _STEPS, "clip_norm": 0.0},
        "checkpoint": {"every_steps": 0},
    }
    model = systems.built(workload, place, torch.float32)
    with Trainer(model, settings, Tokens(workload, size * (_WARMUP + _STEPS)), callbacks=[clock]) as trainer:
        trainer.fit()
    return clock.seconds[_WARMUP:]
