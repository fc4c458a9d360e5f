"""The measurements that ranks make together of their links: exchanges of tensors and of flat buckets, and messages."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zeromesh.comm.activation_collectives import Exchange, open_exchange
from zeromesh.comm.point_to_point import Channels
from zeromesh.comm.torch_transport import open_transport
from zeromesh.comm.transport import BufferRequest, RingRequest, Transport, TransportName
from zeromesh.errors import CollectiveError
from zeromesh.mesh.process_mesh import ProcessMesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import TieredTensor
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.trainer.planning.measuring.clock import Clock, MeasureSizes

_PAGE_FLOATS = 1024


class LinkMeter:
    """Measures links between ranks of the first host, and between the first ranks of `hosts`. All ranks call it together."""

    def __init__(
        self,
        mesh: ProcessMesh,
        hosts: Sequence[Sequence[int]],
        clock: Clock,
        sizes: MeasureSizes,
        tell: Callable[[str], None],
    ) -> None:
        """`hosts` are the ranks of each; `tell` is told what is measured."""
        self._mesh, self._hosts, self.clock, self._sizes, self._tell = mesh, hosts, clock, sizes, tell
        self.device = mesh.device
        self._on_device = is_accelerator(mesh.device)

    def links(self) -> dict[str, Any]:
        """Links between ranks of the first host, and between the first ranks of the hosts, by transport."""
        here, firsts = self._hosts[0], [ranks[0] for ranks in self._hosts]
        found: dict[str, Any] = {"inside": {}, "between": {}}
        for where, ranks in (("inside", here), ("between", firsts)):
            if len(ranks) < 2:
                continue
            messages = self._messages(where)
            for name in self._transports(where):
                measured = [row for size in doubled(len(ranks))[1:] for row in self._link(ranks[:size], name)]
                share = 1 if where == "inside" or self._on_device else len(here)
                if self._mesh.rank == 0:
                    found[where][name] = _link_rates([*measured, *messages], share)
        return found

    def _transports(self, where: str) -> tuple[TransportName, ...]:
        if self._on_device:
            return ("nccl",)
        return ("shared", "gloo") if where == "inside" and self._mesh.one_host else ("gloo",)

    def _link(self, ranks: Sequence[int], name: TransportName) -> list[list[Any]]:
        """`[kind, ranks, bytes, seconds]` of what these ranks exchange, while the others wait. All ranks of the world call this."""
        self._tell(f"{name} between {len(ranks)} ranks")
        group = self._mesh.process_sets.add(ranks, name=f"{name} {len(ranks)} {ranks[-1]}")
        rows: list[list[Any]] = []
        if self._mesh.rank in ranks:
            size = len(ranks)
            exchange = open_exchange(group, self.device, name)
            ways: list[tuple[Collective, Callable[[int], Callable[[], object]]]] = [
                (Collective.ALL_REDUCE, lambda nbytes: _sum(exchange, nbytes, self.device)),
                (Collective.AGREEMENT, lambda nbytes: _agree(group)),
            ]
            for kind, way in ways:
                sizes = self._sizes.exchanged if kind is not Collective.AGREEMENT else (16,)
                rows += [[kind.value, size, nbytes, self._together(group, way(nbytes), nbytes)] for nbytes in sizes]
            for nbytes in self._sizes.exchanged:
                rows += [[kind, size, nbytes, seconds] for kind, seconds in self._flat(group, name, nbytes)]
        self._mesh.world.barrier("measuring a link")
        self._mesh.process_sets.remove(group)
        return rows

    def _flat(self, group: ProcessSet, name: TransportName, nbytes: int) -> Iterator[tuple[str, float]]:
        """Seconds of a gather of flat parameters, and of a reduction of a bucket of gradients."""
        padded = nbytes // (4 * group.size) * group.size
        request = BufferRequest(name="measured", padded=padded, dtype=torch.float32, persistent=False)
        transport = open_transport(name, group, self.device, [request], RingRequest(slots=2, nbytes=4 * padded))
        try:
            gather = _gather(transport, torch.zeros(padded // group.size, device=self.device))
            yield Collective.ALL_GATHER.value, self._together(group, gather, nbytes)
            reduce = _reduce(transport, torch.zeros(padded // group.size, device=self.device), group.size)
            yield Collective.REDUCE_SCATTER.value, self._together(group, reduce, nbytes)
        finally:
            group.barrier("the end of a transport")
            transport.close()

    def _messages(self, where: str) -> list[list[Any]]:
        """`[kind, ranks, bytes, seconds]` of messages between two ranks, of one host or of two. All ranks call this."""
        mesh, first = self._mesh, 0 if where == "inside" else self._hosts[0][-1]
        rows: list[list[Any]] = []
        self._tell(f"messages {where} hosts" if where == "between" else "messages inside a host")
        channels = Channels(mesh.world_of_tensors(), self.device, ring=False)
        for nbytes in self._sizes.exchanged:
            count, tensor = _calls_of(nbytes), torch.zeros(nbytes // 4, device=self.device)
            rounds = []
            for _ in range(self._sizes.rounds):
                mesh.world.barrier("the beginning of a round")
                if mesh.rank in (first, first + 1):
                    turn = _ping(channels, first + 1, tensor) if mesh.rank == first else _pong(channels, first, tensor)
                    rounds.append(self.clock.take(turn, count) / count / 2)
            if rounds:
                # The first round also sends the shapes.
                rows.append([Collective.POINT_TO_POINT.value, 2, nbytes, statistics.median(rounds[1:])])
        found = mesh.world.gather_json(rows, "seconds of messages")
        channels.close()
        return next(each for each in found if each)

    def _together(self, group: ProcessSet, call: Callable[[], object], nbytes: int) -> float:
        """Seconds of a call that all ranks of a group make, the slowest's median: of as many calls as all make alike."""
        count = _calls_of(nbytes)
        rounds = []
        call()
        for _ in range(self._sizes.rounds):
            group.barrier("the beginning of a round")
            rounds.append(self.clock.take(call, count) / count)
        return float(max(group.gather_json(statistics.median(rounds), "seconds of an exchange")))


def doubled(most: int) -> list[int]:
    """1, 2, 4 ... and `most`."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def _calls_of(nbytes: int) -> int:
    """How many exchanges of so many bytes are timed in a row, by all ranks alike."""
    return max(2, min(40, (1 << 23) // max(nbytes, 1)))


def _sum(exchange: Exchange, nbytes: int, device: torch.device) -> Callable[[], object]:
    tensor = torch.zeros(nbytes // 4, device=device)
    return lambda: exchange.sum(tensor).wait()


def _agree(group: ProcessSet) -> Callable[[], object]:
    value = torch.zeros(2, dtype=torch.float64)
    return lambda: group.sum_(value, "an agreement")


def _gather(transport: Transport, shard: torch.Tensor) -> Callable[[], object]:
    (buffer,) = transport.buffers
    own, paged = TieredTensor.of(shard), transport.name == "shared"

    def gather() -> None:
        buffer.gather(own)
        buffer.wait()
        if paged:
            buffer.full[::_PAGE_FLOATS].sum()  # The pages of other ranks are mapped where they are first read.
        buffer.release()

    return gather


def _reduce(transport: Transport, out: torch.Tensor, size: int) -> Callable[[], object]:
    reducer, numbers = transport.reducer, itertools.count()

    def reduce() -> None:
        number = next(numbers)
        slot = reducer.acquire(number, block=True)
        if slot is None:
            raise CollectiveError(f"gradient slot {number} is not free")
        reducer.launch(number, slot.view(torch.float32)[: size * out.numel()], out, add=False).finish()

    return reduce


def _ping(channels: Channels, other: int, tensor: torch.Tensor) -> Callable[[], object]:
    def turn() -> None:
        channels.send(other, tensor.numel(), [tensor], "a message")
        channels.receive(other, tensor.numel(), "an answer").wait()

    return turn


def _pong(channels: Channels, other: int, tensor: torch.Tensor) -> Callable[[], object]:
    def turn() -> None:
        channels.receive(other, tensor.numel(), "a message").wait()
        channels.send(other, tensor.numel(), [tensor], "an answer")

    return turn


def _link_rates(measured: list[list[Any]], share: int) -> dict[str, Any]:
    """The figures of a link: latency and bandwidth from the smallest and the largest all-gather of the fewest ranks; a host's
    network has `share` ranks."""
    gathers = sorted(row[1:] for row in measured if row[0] == Collective.ALL_GATHER.value)
    fewest = [row for row in gathers if row[0] == gathers[0][0]]
    (ranks, _, latency), (_, nbytes, seconds) = fewest[0], fewest[-1]
    # A rank sends 1/ranks of the bytes to each of the others.
    rate = nbytes * (ranks - 1) / ranks / max(seconds - latency, seconds / 2)
    return {"latency_seconds": latency / (ranks - 1), "bandwidth": rate / share, "measured": measured}
