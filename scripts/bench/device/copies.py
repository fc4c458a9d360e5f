"""Part `copies`: bandwidth between the device and the host, as torch has it and as zeromesh's tiers have it, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from bench.device import rows
from bench.device.place import Place
from zeromesh.offload import Ledger, Purpose, TierChoice, Tiers
from zeromesh.offload.accelerator import is_accelerator

_BYTES = {True: 8 << 20, False: 1 << 30}
_ROUNDS = 5
_SHARE = 0.9


def run(place: Place) -> None:
    """All ways, several rounds of them."""
    if not is_accelerator(place.device):
        place.say(rows.not_run("copies", "the processor stands in for the device"))
        return
    count = _BYTES[place.dry] // 4
    with place.trying("copies"):
        ways = _ways(place, count)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(_ROUNDS + 1):
            for name, (times, work) in ways.items():
                seconds = place.seconds(work)
                if turn:  # The first one allocates.
                    found[name].append(times * count * 4 / seconds / 1e9)
        for name, rates in found.items():
            place.figure(name, statistics.median(rates), "GB/s")
        for way in ("in", "out", "both ways at once"):
            pairs = zip(found[f"zeromesh's host tier, {way}"], found[f"pinned, {way}"], strict=True)
            share = statistics.median(ours / raw for ours, raw in pairs)
            place.figure(f"zeromesh's copies, {way}", share, least=_SHARE, than="of torch's pinned ones", timing=True)


def _ways(place: Place, count: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """By name: how many times `count` float32 go over, and what has them do so."""
    device = place.device
    there = [torch.ones(count, device=device) for _ in range(2)]
    pinned = [torch.ones(count).pin_memory() for _ in range(2)]
    pageable = torch.ones(count)
    streams = [torch.Stream(device) for _ in range(2)]
    tiers = Tiers(device=device, ledger=Ledger())
    rest = [tiers.allocate(count, torch.float32, TierChoice(tier="host"), Purpose.MOMENTS, "copies") for _ in range(2)]
    lies = [part.memory is not None and part.memory.is_pinned() for tensor in rest for part in tensor.parts]
    place.figure("part of the host tier that is pinned", sum(lies) / len(lies), least=1)

    def both() -> None:
        with streams[0]:
            there[0].copy_(pinned[0], non_blocking=True)
        with streams[1]:
            pinned[1].copy_(there[1], non_blocking=True)

    def tiers_both() -> None:
        moves = [rest[0].read(0, there[0]), rest[1].write(0, there[1])]
        for move in moves:
            move.wait()

    return {
        "pinned, in": (1, lambda: there[0].copy_(pinned[0], non_blocking=True)),
        "pinned, out": (1, lambda: pinned[1].copy_(there[1], non_blocking=True)),
        "pinned, both ways at once": (2, both),
        "pageable, in": (1, lambda: there[0].copy_(pageable)),
        "pageable, out": (1, lambda: pageable.copy_(there[1])),
        "zeromesh's host tier, in": (1, lambda: rest[0].read(0, there[0]).wait()),
        "zeromesh's host tier, out": (1, lambda: rest[1].write(0, there[1]).wait()),
        "zeromesh's host tier, both ways at once": (2, tiers_both),
    }
