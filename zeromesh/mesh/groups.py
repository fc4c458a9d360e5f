"""`ProcessSet` and `Mesh`: the ranks of an axis, their small agreements, and the process groups behind them."""

from __future__ import annotations

import os
import platform
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from zeromesh.errors import CollectiveError, ConfigError, StorageError, ZeromeshError
from zeromesh.mesh.axes import Axis, MeshShape
from zeromesh.mesh.board import SharedBoard, Store, StoreBoard
from zeromesh.mesh.launch import LaunchEnvironment
from zeromesh.mesh.links import START_SECONDS, Link, Links
from zeromesh.mesh.segments import Segment
from zeromesh.mesh.watch import Activity, Watch


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSet:
    """The ranks of one group, seen from one of them. A set of one rank needs no process group."""

    name: str
    ranks: tuple[int, ...]
    index: int
    """This rank's position in `ranks`."""
    watch: Watch | None
    link: Link | None
    """The process groups; None for a set of one rank."""
    one_host: bool
    on_stream: bool
    """Whether the groups that move parameters and gradients do so on streams of a device."""

    @property
    def size(self) -> int:
        return len(self.ranks)

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
        if self.link is None or self.watch is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in self.ranks]
        work = dist.all_gather(everyone, mine, group=self.link.control, async_op=True)
        self.watch.wait_work(work, self.ranks, f"exchange over axis {self.name}")
        return [tensor.tolist() for tensor in everyone]

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's `payload`, of any length, in the order of the set. All ranks hold all of them."""
        if self.link is None or self.watch is None:
            return [payload]
        lengths = [row[0] for row in self.gather_integers([len(payload)])]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        everyone = [torch.empty_like(mine) for _ in self.ranks]
        work = dist.all_gather(everyone, mine, group=self.link.control, async_op=True)
        self.watch.wait_work(work, self.ranks, what)
        return [tensor[:length].numpy().tobytes() for tensor, length in zip(everyone, lengths, strict=True)]

    def sum_(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a small CPU tensor over the set, in place; bitwise the same on all ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, what)

    def max_(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Element-wise maximum over the set, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, what)

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.sum_(torch.zeros(1, dtype=torch.int64), what)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, what: str) -> torch.Tensor:
        if self.link is not None and self.watch is not None:
            work = dist.all_reduce(tensor, op=op, group=self.link.control, async_op=True)
            self.watch.wait_work(work, self.ranks, what)
        return tensor

    def start_sum(self, tensor: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to sum a large tensor over the set, in place, on whatever device; the returned call waits for it."""
        if self.link is None or self.watch is None:
            return lambda: None
        work = dist.all_reduce(tensor, group=self.link.data, async_op=True)
        if tensor.is_cuda:
            return lambda: _wait_on_stream(work)
        watch, ranks = self.watch, self.ranks
        return lambda: watch.wait_work(work, ranks, what)

    def all_gather_flat(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        """Concatenate the ranks' flat `shard`s into `full`, on whatever device they lie."""
        if self.link is None or self.watch is None:
            full.copy_(shard)
            return
        work = dist.all_gather(list(full.chunk(self.size)), shard, group=self.link.data, async_op=True)
        self.watch.wait_work(work, self.ranks, what)


class Mesh:
    """Process sets of the axes `pipeline, replicate, shard, tensor`, and what all ranks share: board, watch, device.

    `data` spans replicate and shard: the ranks that see different samples.
    """

    def __init__(
        self,
        shape: MeshShape,
        environment: LaunchEnvironment,
        *,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        if shape.world_size != environment.world_size:
            raise ConfigError(f"the mesh has {shape.world_size} ranks, the launch {environment.world_size}")
        self.shape = shape
        self.environment = environment
        self.device = device
        self.rank = environment.rank
        self.world_size = environment.world_size
        self._one_host = True
        self._links = Links(environment, device)
        # A mesh that is forgotten without having been closed leaves its own groups too, at the latest when the process ends.
        weakref.finalize(self, self._links.leave)
        try:
            if self.world_size > 1:
                self._connect(timeout_seconds)
            self.world = self._process_set("world", ("pipeline", "replicate", "shard", "tensor"))
            self.data = self._process_set("data", ("replicate", "shard"))
            self.shard = self._process_set("shard", ("shard",))
            self.replicate = self._process_set("replicate", ("replicate",))
        except ZeromeshError:
            self._links.leave()
            raise
        except RuntimeError as error:  # torch has no narrower kind for what gloo and the store meet
            raise CollectiveError(
                f"rank {self.rank} could not join the others at {environment.master_address}:{environment.master_port} "
                f"({str(error).splitlines()[0]}); a rank has ended meanwhile, or cannot be reached"
            ) from error
        self.data_index = shape.data_index(self.rank)

    def _connect(self, timeout_seconds: float) -> None:
        self._links.join()
        identity = _host_identity()
        store = cast(Store, self._links.store())
        store.set(f"host/{self.rank}", identity)
        self._hosts = [store.get(f"host/{rank}").decode() for rank in range(self.world_size)]
        self._one_host = len(set(self._hosts)) == 1
        self._links.watch = self._make_watch(store, timeout_seconds)

    def _make_watch(self, store: Store, timeout_seconds: float) -> Watch:
        if self._one_host:
            segment = self._shared_board(store)
            if segment is not None:
                return Watch(SharedBoard(segment, self.rank), self.rank, timeout_seconds, compare_events=True)
            self._one_host = False
        board = StoreBoard(store, store.clone(), self.rank, stale_seconds=timeout_seconds)
        dist.barrier()
        return Watch(board, self.rank, timeout_seconds, compare_events=False)

    def _shared_board(self, store: Store) -> Segment | None:
        """Rank 0's board segment, or None when some rank cannot map it."""
        segment: Segment | None = None
        nbytes = SharedBoard.nbytes(self.world_size)
        if self.rank == 0:
            segment = Segment.create("board", nbytes)
            store.set("board-at", f"{os.getpid()} {segment.descriptor}")
        pid, descriptor = (int(part) for part in store.get("board-at").split())
        try:
            if segment is None:
                segment = Segment.attach(pid, descriptor, nbytes, "board")
        except StorageError:
            segment = None
        mapped = torch.tensor([0 if segment is None else 1])
        dist.all_reduce(mapped, op=dist.ReduceOp.MIN)
        return segment if mapped.item() else None

    def _process_set(self, name: str, axes: tuple[Axis, ...]) -> ProcessSet:
        mine: tuple[int, ...] = (self.rank,)
        link: Link | None = None
        for ranks in self.shape.groups(*axes):
            if len(ranks) > 1:
                made = self._links.between(ranks)
                if made is not None:
                    mine, link = ranks, made
        one_host = len({self._hosts[rank] for rank in mine}) == 1 if len(mine) > 1 else True
        return ProcessSet(
            name=name,
            ranks=mine,
            index=mine.index(self.rank),
            watch=self.watch if len(mine) > 1 else None,
            link=link,
            one_host=one_host and self._one_host,
            on_stream=self.device.type == "cuda",
        )

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host, and share its memory."""
        return self._one_host

    def post(self, activity: Activity, unit: int = -1, *, step: int | None = None) -> None:
        """Say on the board what this rank does now; `step` counts from 0."""
        if self.watch is not None:
            self.watch.post(activity, unit, step=step)

    def meet(self, what: str) -> None:
        """Wait for all ranks, longer than within a step: until here they read and build at speeds of their own."""
        if self.watch is not None:
            with self.watch.patience(START_SECONDS):
                self.world.barrier(what)

    @property
    def watch(self) -> Watch | None:
        """Bounds waits for the others; None on a single rank, and once the mesh is closed."""
        return self._links.watch

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one stops amid what they do together."""
        if self.watch is not None:
            self.watch.in_doubt = True
            self.watch.fail(error)

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks why this one does not begin, and leave; the mesh is over."""
        if self.watch is not None:
            self.watch.fail(error)
        self._links.leave()

    def close(self) -> None:
        """Leave the process groups, on all ranks alike, when no collective is in flight. The mesh is over."""
        self._links.leave(default=True)


def _wait_on_stream(work: dist.Work) -> None:
    work.wait()


def _host_identity() -> str:
    """Equal for processes that can share memory: same boot of the same kernel, same process namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {platform.machine()} {os.getpid()}"


def pick_device(local_rank: int) -> torch.device:
    """The accelerator of this process's local rank, made current, if there is one; else the CPU.

    Raises:
        ConfigError: when the host has fewer accelerators than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no CUDA device: this host has {torch.cuda.device_count()}; start as many ranks"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


__all__ = ["CollectiveError", "Mesh", "ProcessSet", "pick_device"]
