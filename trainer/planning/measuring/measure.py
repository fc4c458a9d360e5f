"""Measures the machine of this launch in about a minute, with what a run itself computes and exchanges with.

All ranks call `MachineMeter.machine` together. What one rank measures, the others wait for without computing, except where it is
measured how much they hinder each other. Each figure is the median of several rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.environment import available_cores
from zeromesh.mesh.process_mesh import ProcessMesh
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.memory.ledger import cpu_name, machine_bytes
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.measuring.clock import Clock, MeasureSizes
from zeromesh.trainer.planning.measuring.device_meter import DeviceMeter
from zeromesh.trainer.planning.measuring.link_meter import LinkMeter, doubled

_AMID = 10
"""Exchanges in a row that are timed amid computing."""
_PRODUCTS = (2, 12, 36)
"""Products of matrices between two of them."""


class MachineMeter:
    """Measures on the ranks of one launch."""

    def __init__(self, mesh: ProcessMesh, sizes: MeasureSizes, directory: Path, say: Callable[[str], None]) -> None:
        self._mesh, self._sizes, self._directory, self._say = mesh, sizes, directory, say
        self.device = mesh.device
        self._on_device = is_accelerator(mesh.device)
        self.clock = Clock(device=mesh.device, round_seconds=sizes.round_seconds, rounds=sizes.rounds)
        self._alone = DeviceMeter(self.clock, sizes)
        hosts: dict[str, list[int]] = {}
        for rank, place in enumerate(mesh.places):
            hosts.setdefault(place.host, []).append(rank)
        self._hosts = tuple(hosts.values())

    def machine(self) -> Machine:
        """Measure everything, on all ranks alike; rank 0 gives the machine to all.

        Raises:
            ConfigError: for a host with other ranks than the first.
            StorageError: when the disk cannot be written.
        """
        library = self._alone.library()
        found = self._one_by_one("products, memory and launches", self._alone.rates)
        update = self._one_by_one("updates and copies", self._alone.updates)
        disk = self._one_by_one("the disk", partial(self._alone.disk, self._directory))
        crowding, waiting, together = self._crowd()
        links = LinkMeter(self._mesh, self._hosts, self.clock, self._sizes, self._tell).links()
        data = None
        if self._mesh.rank == 0:
            device, copies = found
            memory = accelerator.device_memory(self.device).total if self._on_device else machine_bytes()
            data = {
                "name": self._name(),
                "sources": [self._source()],
                "device": {"kind": self.device.type, "memory_bytes": memory, **device, "copies": copies},
                "host": {
                    "devices": len(self._hosts[0]),
                    "cores": available_cores(),
                    "memory_bytes": machine_bytes(),
                    "memory_bandwidth": max(together, device["memory_bandwidth"] if not self._on_device else 0.0),
                    "crowding": crowding,
                    "waiting": waiting or None,
                },
                "links": links,
                "disk": disk,
                "update": update,
                "library": library,
            }
        shared = self._mesh.world.gather_json(data, "measurements")[0]
        return Machine.model_validate(_rounded(shared))

    def _one_by_one(self, what: str, call: Callable[[], Any]) -> Any:
        """Return the result of `call` on rank 0, which runs it while the others wait; None on them."""
        self._tell(what)
        found = call() if self._mesh.rank == 0 else None
        self._mesh.world.barrier(f"measuring {what}")
        return found

    def _tell(self, what: str) -> None:
        if self._mesh.rank == 0:
            self._say(f"measuring {what}")

    def _name(self) -> str:
        ranks = "ranks" if not self._on_device else "devices"
        device = accelerator.device_name(self.device) if self._on_device else cpu_name()
        return f"{device}, {len(self._hosts[0])} {ranks} a host"

    def _source(self) -> str:
        threads = "" if self._on_device else f" of {torch.get_num_threads()} threads"
        date = time.strftime("%Y-%m-%d", time.gmtime())
        return (
            f"zeromesh plan --measure, {date}: {self._mesh.world_size} ranks{threads} on {len(self._hosts)} hosts, torch "
            f"{torch.__version__}"
        )

    # All ranks at once

    def _crowd(self) -> tuple[list[list[float]], list[list[float]], float]:
        """For ever more ranks of the first host `[ranks, factor]` and what `_waiting` gives, and bytes a second of memory that all
        have together."""
        self._tell("how ranks hinder each other")
        step, _ = self._alone.transformer(**self._sizes.model)
        wide = self._alone.random(max(self._sizes.moved))
        found: list[list[float]] = []
        waiting: list[list[float]] = []
        alone = bandwidth = 0.0
        for ranks in doubled(len(self._hosts[0])):
            seconds = self._beside(step, ranks)
            alone = alone or seconds
            found.append([ranks, max(1.0, seconds / alone)])
            waiting += self._waiting(ranks)
            moved = self._beside(lambda: torch.add(wide, wide, out=wide), ranks)
            bandwidth = max(bandwidth, ranks * 3 * wide.nbytes / moved)
        return found, waiting, bandwidth

    def _waiting(self, ranks: int) -> list[list[float]]:
        """`[ranks, seconds, seconds]`: after more and more seconds of computing, those that an exchange of two takes: ranks never
        compute equally fast, and ranks that share a core do so in turns."""
        if ranks == 1 or self._on_device:
            return []
        here = self._hosts[0][:ranks]
        pairs = [here[start : start + 2] for start in range(0, ranks - 1, 2)]
        groups = [self._mesh.process_sets.add(pair, name=f"pair {pair[0]} of {ranks}") for pair in pairs]
        mine = next((group for group, pair in zip(groups, pairs, strict=True) if self._mesh.rank in pair), None)
        matrix, tensor = self._alone.random(256, 256), self._alone.random(1 << 14)
        exchange = open_exchange(mine, self.device, "auto") if mine is not None else None

        def taken(products: int, *, exchanging: bool) -> float:
            def call() -> None:
                for _ in range(products):
                    torch.mm(matrix, matrix)
                if exchanging and exchange is not None:
                    exchange.sum(tensor).wait()

            rounds = []
            for _ in range(self._sizes.rounds):
                self._mesh.world.barrier("the beginning of a round")
                rounds.append(self.clock.take(call, _AMID) / _AMID if mine is not None else 0.0)
            return statistics.median(rounds)

        rows: list[list[float]] = []
        for products in _PRODUCTS:
            computing = taken(products, exchanging=False)
            waited = max(0.0, taken(products, exchanging=True) - computing)
            found = self._mesh.world.gather_json([computing, waited], "seconds of waiting")
            rows.append([ranks, *(statistics.median(found[rank][each] for rank in here) for each in (0, 1))])
        for group in groups:
            self._mesh.process_sets.remove(group)
        return rows

    def _beside(self, call: Callable[[], object], ranks: int) -> float:
        """Seconds of a call while the first `ranks` ranks of the first host make it, the mean over them.

        On a CPU they are those of the processor, times the ranks that share a core: what others do on the machine meanwhile takes
        turns with the ranks as well, and does not count.
        """
        busy, threads = self._mesh.rank in self._hosts[0][:ranks], torch.get_num_threads()
        share = 1.0 if self._on_device else max(1.0, ranks * threads / available_cores()) / threads
        clock = time.perf_counter if self._on_device else time.process_time
        rounds: list[float] = []
        for _ in range(self._sizes.rounds):
            self._mesh.world.barrier("the beginning of a round")
            count, began, end = 0, clock(), time.perf_counter() + 10 * self._sizes.round_seconds
            while busy and (time.perf_counter() < end or count < 3):
                self.clock.take(call, 1)
                count += 1
            rounds.append((clock() - began) / max(1, count))
        mine = statistics.median(rounds) * share if busy else 0.0
        return float(sum(self._mesh.world.gather_json(mine, "seconds of a round"))) / ranks


def _rounded(value: Any) -> Any:
    """The same with four digits of each number that is not whole."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
