"""Part `divided`: a Llama of 1 billion parameters whose ranks divide its layers or its blocks, beside stage 3 on the same ranks."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import torch

from bench.device import sizes, systems
from bench.device.place import Place
from bench.workload import Workload

STAGE3, TENSOR, PIPELINE = "zeromesh, stage 3", "zeromesh, tensor parallel", "zeromesh, pipeline"
_STEPS = 3
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


def _pipeline(place: Place, workload: Workload) -> list[float]:
    """Seconds of steps whose blocks the ranks divide, with as many tokens as stage 3 has, a sequence a microbatch."""
    sections = {"parallel": {"pipeline": place.ranks, "schedule": "1f1b"}, "zero": {"stage": 1}}
    model = systems.built(workload, place, torch.float32)
    return systems.fitted(model, workload, place, _STEPS, sections, size=workload.micro * place.ranks, micro=1).seconds
