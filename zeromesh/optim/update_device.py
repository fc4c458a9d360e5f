"""Where updates are computed when their states are not in the device's memory: on the CPU, or on the device.

The CPU saves the transfer to the device and back, and the device computes faster. Both are tried, as the link decides too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Access, StreamOperand, StreamRow, Tier, TieredTensor, Tiers, UpdateStream, WaitTime
from zeromesh.optim.fused_optimizer import OptimizerGroup, fused_update, moment_names
from zeromesh.options import UpdateOn, ZeroOptions

_CPU = torch.device("cpu")
_ELEMENTS = 1 << 23
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateDevice:
    """`host` and `device` are the seconds that a billion elements took where that was measured, on average over ranks."""

    device: torch.device
    host_seconds: float | None = None
    device_seconds: float | None = None

    def note(self) -> str | None:
        """A line that says where updates are computed and why; None where there was nothing to choose."""
        if self.host_seconds is None or self.device_seconds is None:
            return None
        chosen = "the CPU" if self.device.type == "cpu" else "the device"
        return (
            f"offload: updates are computed on {chosen} (tried: {self.host_seconds:.2f} s for a billion elements on the CPU, "
            f"{self.device_seconds:.2f} s on the device with the way there and back); offload.update says otherwise"
        )


def place_updates(
    wanted: UpdateOn, mesh: Mesh, try_on: Callable[[torch.device], float], *, in_reach: bool
) -> UpdateDevice:
    """Choose where to compute updates, alike on all ranks, which all call this.

    `in_reach`: all states are in the device's memory. `try_on(device)` gives the seconds of a billion elements there.
    """
    device = mesh.device
    if device.type == "cpu" or in_reach or wanted == "device":
        return UpdateDevice(device=device)
    if wanted == "host":
        return UpdateDevice(device=_CPU)
    rows = mesh.world.gather_integers([int(1e9 * try_on(each)) for each in (_CPU, device)])
    host, there = (sum(row[number] for row in rows) / len(rows) / 1e9 for number in range(2))
    return UpdateDevice(device=_CPU if host <= there else device, host_seconds=host, device_seconds=there)


def try_update(device: torch.device, tiers: Tiers, options: ZeroOptions) -> float:
    """Seconds for a billion elements of an update computed on `device`, states and gradients being in the host's memory."""
    pinned, settings, dtype = tiers.pinned.used, options.optimizer, options.precision.master
    names = ("master", "gradient", *moment_names(settings))
    memory = [tiers.buffer(_ELEMENTS * dtype.itemsize, _CPU).view(dtype) for _ in names]
    uses = [StreamOperand(tensor=TieredTensor.of(each, Tier.HOST), mode=Access.UPDATE) for each in memory]
    stream = UpdateStream(
        device,
        width=0 if device.type == "cpu" else len(uses),
        longest=memory[0].nbytes,
        nbytes=options.offload.staging_bytes,
        waits=WaitTime(),
        memory=partial(tiers.buffer, device=device),
    )
    group = OptimizerGroup(lr=0.0, weight_decay=0.0)

    def compute(_row: StreamRow, tensors: list[torch.Tensor]) -> None:
        master, gradient, *moments = tensors
        fused_update(settings, group, 1.0, master, gradient, moments, 1)

    rows = list(stream.rows(0, _ELEMENTS, uses))
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        stream.run(rows, compute)
        stream.settle()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    tiers.pinned.give(tiers.pinned.used - pinned)
    return min(seconds) * 1e9 / _ELEMENTS
