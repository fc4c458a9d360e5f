"""Part `offload`: all of a model is trained whose states are too large for the device, beside others that do so."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.device import rows, sizes, systems
from bench.device.place import Place
from bench.device.systems import Build, Turn
from bench.device.training import ratio
from bench.workload import Workload
from zeromesh.offload import available_bytes

HOST, FILE, FSDP2, DEEPSPEED = "zeromesh, host", "zeromesh, files", "FSDP2, CPU offload", "DeepSpeed, CPU offload"
IN_BACKWARD = "zeromesh, host, updates inside backward"
_ALL_BYTES, _OWN_BYTES, _FILE_BYTES = 30, 12.5, 17
"""The bytes per parameter: on the host, of whoever needs most (float32 weights, gradients and moments, and what building them
takes); of zeromesh alone, whose gradients stay on the device; and on files."""
_SPARE = 0.85
_GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, in float32, where gradients stay on the device."""
_FASTER = 1.5
_PAGES_A_SECOND = 2.5e9
"""Bytes of new host memory, pinned: what bounds the depth where time does."""


def run(place: Place) -> None:
    """zeromesh on the host and on files, FSDP2 and DeepSpeed at the same depth; then zeromesh at full depth where memory allows."""
    place.join()
    whole = replace(sizes.workload(8, dry=place.dry, ranks=1), device=place.device.type, offload="host")
    host, disk = available_bytes() * _SPARE, shutil.disk_usage(place.folder).free * _SPARE
    workload = whole
    if not place.dry:
        in_time = place.seconds_left / 6 * _PAGES_A_SECOND
        workload = sizes.on_host(whole, int(min(host, in_time)), place.free(), _ALL_BYTES)
    place.figure("free memory of the host", available_bytes() / 2**30, "GiB")
    if not workload.layers:
        place.say(rows.not_run(sizes.title(whole), f"{host / 2**30:.0f} GiB of the host can be used"))
        return
    chosen: dict[str, Build] = {HOST: partial(_ours, tier="host"), FSDP2: systems.fsdp2_offload_step}
    chosen[DEEPSPEED] = systems.deepspeed_step
    if sizes.parameters(workload) * _FILE_BYTES < disk:
        chosen[FILE] = partial(_ours, tier="file")
    else:
        place.say(rows.not_run(FILE, f"{disk / 2**30:.0f} GiB of {place.folder} can be used"))
    each = place.seconds_left / 7
    turns = systems.rounds(chosen, workload, place, steps=2, most=2 if place.dry else 1, each=each, report=report)
    if HOST in turns and place.enough(IN_BACKWARD, each):
        with place.trying(IN_BACKWARD):
            turns[IN_BACKWARD] = [_in_backward(workload, place)]
            report(place, workload, turns)
    if workload.layers < whole.layers and not place.dry:
        _whole(place, whole, available_bytes() * _SPARE)


def _whole(place: Place, whole: Workload, host: float) -> None:
    """The model of 8 billion parameters itself, by zeromesh alone."""
    what = f"{HOST}: {sizes.title(whole)}"
    needed = sizes.parameters(whole) * _OWN_BYTES
    if needed > host:
        place.say(rows.not_run(what, f"it needs about {needed / 2**30:.0f} GiB, and {host / 2**30:.0f} can be used"))
    elif place.enough(what, needed / _PAGES_A_SECOND + 30):
        with place.trying(what):
            found = systems.turn(partial(_ours, tier="host"), whole, place, 1)
            seconds = statistics.median(found.seconds)
            place.figure(f"{what}: tokens", whole.micro * whole.sequence / seconds, "a second")
            place.figure(f"{what}: peak memory of the device", found.peak / 2**30, "GiB")


def _in_backward(workload: Workload, place: Place) -> Turn:
    """The Trainer, whose states cross to the device and back while backward computes."""
    sections = {
        "zero": {"stage": 3},
        "offload": {"optimizer": "host"},
        "optimizer": {"in_backward": True, "lr": workload.learning_rate, "weight_decay": workload.weight_decay},
        "run": {"on_nonfinite": "stop"},
    }
    model = systems.built(workload, place, workload.compute)
    return systems.fitted(model, workload, place, 2, sections, size=workload.micro, micro=workload.micro)


def _ours(workload: Workload, place: Place, *, tier: str) -> systems.Step:
    """Weights are drawn in bf16, so that the device holds them; master weights begin with their values.

    Gradients stay on the device where that has room for them: they cross neither way then.
    """
    here = sizes.parameters(workload) * (2 + _GRADIENT_BYTES) + sizes.ACTIVATIONS < place.free()
    offload: dict[str, Any] = {"optimizer": tier, "gradients": "none" if here else "auto"}
    if tier == "file":
        swap = Path(place.folder, "swap")
        swap.mkdir(exist_ok=True)
        offload["directory"] = str(swap)
    dtype = torch.bfloat16 if not place.dry else torch.float32
    return systems.zeromesh_step(workload, place, dtype=dtype, offload=offload)


def report(place: Place, workload: Workload, turns: Mapping[str, Sequence[Turn]]) -> None:
    """Times, and how many times as fast as others."""
    tokens = workload.micro * workload.sequence
    for name, each in turns.items():
        seconds = statistics.median(second for turn in each for second in turn.seconds)
        place.figure(f"{name}: {sizes.title(workload)}, step", seconds, "s")
        place.figure(f"{name}: tokens", tokens / seconds, "a second")
        if each[0].peak:
            place.figure(f"{name}: peak memory of the device", each[0].peak / 2**30, "GiB")
    for other in (FSDP2, DEEPSPEED):
        for ours in (HOST, IN_BACKWARD):
            if ours in turns and other in turns:
                place.figure(
                    f"{ours}: tokens a second beside {other}",
                    1 / ratio(turns[ours], turns[other]),
                    "times",
                    least=_FASTER,
                    than=f"times {other}",
                    timing=True,
                )
    if HOST in turns and FILE in turns:
        place.figure("files: step time beside the host", ratio(turns[FILE], turns[HOST]), "times")
        pairs = zip(turns[HOST][0].losses, turns[FILE][0].losses, strict=True)
        place.figure("losses of host and files differ by", max(abs(a - b) for a, b in pairs), most=0)
