"""`ProcessSet`: some ranks that act together, and their small agreements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.errors import CollectiveError
from zeromesh.mesh.process_groups import SetGroups
from zeromesh.telemetry.step_recorder import Collective, CommAccount, StepRecorder
from zeromesh.telemetry.watchdog import AsyncWork, Watchdog


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSet:
    """The ranks of one group, seen from one of them. A set of one rank needs no process group.

    All ranks of a set call the same in the same order. What they wait for is bounded: a rank that is gone, or late, is named by a
    `CollectiveError`. So is a call by a rank that is not in the set, or on a set that was removed.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    """This rank's position in `ranks`; -1 when it is not one of them."""
    watch: Watchdog | None
    link: SetGroups | None
    """The process groups; None for a set of one rank, and outside of the set."""
    one_host: bool
    on_stream: bool
    """Whether the groups that move parameters and gradients do so on streams of a device."""
    traffic: CommAccount = field(default_factory=lambda: CommAccount(StepRecorder(), "", 1), compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def member(self) -> bool:
        """Whether this rank is in the set."""
        return self.index >= 0

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Group that gathers parameters."""
        return self.link.data if self.link else None

    @property
    def reduce_group(self) -> dist.ProcessGroup | None:
        """Group that reduces gradients."""
        return self.link.reduce if self.link else None

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's `values`, in the order of the set; all give equally many."""
        joined = self._joined()
        if joined is None:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.int64)
        return [tensor.tolist() for tensor in self._gather(joined, own, f"exchange over axis {self.name}")]

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's `payload`, of any length, in the order of the set. All ranks hold all of them."""
        joined = self._joined()
        if joined is None:
            return [payload]
        lengths = [row[0] for row in self.gather_integers([len(payload)])]
        own = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        own[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        everyone = self._gather(joined, own, what)
        return [tensor[:length].numpy().tobytes() for tensor, length in zip(everyone, lengths, strict=True)]

    def gather_json(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, which JSON can express, in the order of the set; tuples become lists."""
        return [json.loads(text) for text in self.gather_bytes(json.dumps(value).encode(), what)]

    def sum_(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a small CPU tensor over the set, in place; bitwise the same on all ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, what)

    def max_(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Element-wise maximum over the set, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, what)

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.sum_(torch.zeros(1, dtype=torch.int64), what)

    def start_sum(self, tensor: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to sum a large tensor over the set, in place, on whatever device; the returned call waits for it."""
        joined = self._joined()
        if joined is None:
            return lambda: None
        with self.traffic.timed(Collective.ALL_REDUCE, tensor.nbytes):
            work = dist.all_reduce(tensor, group=joined[0].data, async_op=True)

        def finish() -> None:
            with self.traffic.timed(Collective.ALL_REDUCE):
                self.wait(work, what)

        return finish

    def wait(self, work: AsyncWork, what: str) -> None:
        """Wait for a collective that moves data: watched until it is done; on a device only the compute stream waits."""
        if self.on_stream or self.watch is None:
            work.wait()
        else:
            self.watch.wait_work(work, self.ranks, what)

    def all_gather_flat(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        """Concatenate the ranks' flat `shard`s into `full`, on whatever device they lie."""
        joined = self._joined()
        if joined is None:
            full.copy_(shard)
            return
        link, watch = joined
        with self.traffic.timed(Collective.ALL_GATHER, full.nbytes):
            work = dist.all_gather(list(full.chunk(self.size)), shard, group=link.data, async_op=True)
            watch.wait_work(work, self.ranks, what)

    def broadcast_(self, tensor: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """Become what the rank at position `source` has, in place, on whatever device; all ranks give one shape and dtype."""
        joined = self._joined()
        if joined is not None:
            link, watch = joined
            with self.traffic.timed(Collective.BROADCAST, tensor.nbytes):
                work = dist.broadcast(tensor, src=self.ranks[source], group=link.data, async_op=True)
                watch.wait_work(work, self.ranks, what)
        return tensor

    def require_member(self) -> None:
        """Raises `CollectiveError` when this rank may not act in the set: it is not in it, or the set was removed."""
        if self.index < 0:
            raise CollectiveError(
                f"this rank is not in process set {self.name} (ranks {_listed(self.ranks)}); only those may act in it"
            )
        if self.link is not None and self.link.left:
            raise CollectiveError(f"process set {self.name} (ranks {_listed(self.ranks)}) was removed; add it again")

    def _joined(self) -> tuple[SetGroups, Watchdog] | None:
        """The link to the others; None for a set of one rank."""
        self.require_member()
        return None if self.link is None or self.watch is None else (self.link, self.watch)

    def _gather(self, joined: tuple[SetGroups, Watchdog], own: torch.Tensor, what: str) -> list[torch.Tensor]:
        link, watch = joined
        everyone = [torch.empty_like(own) for _ in self.ranks]
        with self.traffic.timed(Collective.AGREEMENT, own.nbytes * len(self.ranks)):
            watch.wait_work(dist.all_gather(everyone, own, group=link.control, async_op=True), self.ranks, what)
        return everyone

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, what: str) -> torch.Tensor:
        joined = self._joined()
        if joined is not None:
            link, watch = joined
            with self.traffic.timed(Collective.AGREEMENT, tensor.nbytes * len(self.ranks)):
                watch.wait_work(dist.all_reduce(tensor, op=op, group=link.control, async_op=True), self.ranks, what)
        return tensor


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
