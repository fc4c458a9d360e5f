"""Parts `train-1b` and `train-8b`: a Llama at 8k tokens a step, by zeromesh's stage 3 beside FSDP2 and beside no system."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from bench.device import rows, sizes, systems
from bench.device.place import Place
from bench.device.systems import Build, Turn
from bench.workload import Workload
from zeromesh.trainer.models.flops import ModelFlops, peak_flops

OURS, FSDP2 = "zeromesh, stage 3", "FSDP2"
_TIME, _MEMORY, _LOSS = 1.05, 1.05, 0.02
_LEFT_MEBIBYTES = 64


def run(place: Place) -> None:
    """All systems that the part compares."""
    place.join()
    billions = 1 if place.part == "train-1b" else 8
    workload = replace(sizes.workload(billions, dry=place.dry, ranks=place.ranks), device=place.device.type)
    if billions == 8 and not place.dry:
        workload = sizes.on_device(workload, place.free(), place.ranks)
        if not workload.layers:
            place.say(rows.not_run(sizes.title(workload), f"{place.free() / 2**30:.0f} GiB of the device are free"))
            return
    chosen: dict[str, Build] = {
        OURS: partial(systems.zeromesh_step, gathered_budget=0),
        FSDP2: systems.fsdp2_step,
        "no system, bf16 alone": systems.plain_step,
    }
    if place.ranks > 1:
        chosen["DDP, bf16 alone"] = systems.ddp_step
    steps = 4 if billions == 1 else 3
    systems.rounds(chosen, workload, place, steps=steps, most=3, each=12, report=report)


def report(place: Place, workload: Workload, turns: Mapping[str, Sequence[Turn]]) -> None:
    """A system's own figures, then zeromesh's as parts of the others'."""
    peak, source = peak_flops(place.device, workload.compute)
    place.figure("products of matrices at their fastest", peak / 1e12, "TFLOP/s", reason=source)
    flops = flops_of(workload)
    tokens = workload.micro * workload.sequence
    for name, each in turns.items():
        seconds = statistics.median(second for turn in each for second in turn.seconds)
        place.figure(f"{name}: step", 1e3 * seconds, "ms")
        place.figure(f"{name}: tokens of a device", tokens / seconds, "a second")
        place.figure(f"{name}: MFU", 100 * flops / seconds / peak, "%")
        if each[0].peak:
            place.figure(f"{name}: peak memory", max(turn.peak for turn in each) / 2**30, "GiB")
            if name == OURS:
                left = max(turn.left for turn in each) / 2**20
                place.figure("memory that zeromesh does not give back", left, "MiB", most=_LEFT_MEBIBYTES)
    if OURS not in turns:
        return
    for name, each in turns.items():
        if name != OURS:
            limit = _TIME if name == FSDP2 else None
            place.figure(f"step time beside {name}", ratio(turns[OURS], each), most=limit, than=f"of {name}", timing=True)
    if FSDP2 in turns:
        theirs, ours = turns[FSDP2][0], turns[OURS][0]
        if theirs.peak:
            share = ours.peak / theirs.peak
            place.figure("peak memory beside FSDP2", share, most=_MEMORY, than="of FSDP2", timing=True)
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))
        place.figure("losses beside FSDP2's differ by", apart, most=_LOSS)


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> float:
    """Our step time as a part of theirs: the median of the rounds' own ratios."""
    pairs = zip(ours, theirs, strict=False)
    return statistics.median(statistics.median(a.seconds) / statistics.median(b.seconds) for a, b in pairs)


@cache
def flops_of(workload: Workload) -> float:
    """Operations that one rank's step needs."""
    with torch.device("meta"):
        counted = ModelFlops.of(workload.build_model())
    if counted is None:
        raise ValueError("operations of this model cannot be counted")
    return counted.of_step(workload.micro * workload.sequence, workload.sequence)
