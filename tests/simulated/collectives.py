"""`simccl`: collectives of the simulated device by NCCL's rules, moved by gloo.

order       a collective runs on the group's own stream, after what the current stream has; whoever waits, waits on a stream
late        what it brings is there once something is told to come after it, and a host that asks hears "not yet"
first use   makes the communicator: the host waits until all ranks of the group have come to the same
timeout     a wait of the host that runs out aborts the communicator
order       what each rank has launched, on which group, is kept: it must be the same on all ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated.device import ops
from tests.simulated.launches import Launch

launched: list[Launch] = []
"""What this process has launched."""
RENDEZVOUS_SECONDS = 10.0
_NUMBERS = count()


def register() -> None:
    if "simccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simccl", SimulatedGroup._create, extended_api=True, devices=["sim"])


class SimulatedWork(dist._Work):
    def __init__(self, group: SimulatedGroup, moved: Any, event: torch.Event, kept: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._group, self._moved, self._event = group, moved, event
        self._kept = list(kept)

    def is_completed(self) -> bool:
        return bool((self._moved is None or self._moved.is_completed()) and self._event.query())

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout.total_seconds() > 0 and self._moved is not None:
            end = time.monotonic() + timeout.total_seconds()
            while not self._moved.is_completed():
                if time.monotonic() > end:
                    self._group.abort()
                    raise dist.DistBackendError(f"simccl: a wait of {timeout} ran out; the communicator is aborted")
                time.sleep(1e-3)
        torch.accelerator.current_stream().wait_event(self._event)
        self._kept = []
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        raise NotImplementedError("simccl has no futures")


class SimulatedGroup(dist.ProcessGroup):
    """A process group of the simulated device; tensors of the host go to gloo as they are."""

    @classmethod
    def _create(cls, options: Any, _backend_options: Any) -> SimulatedGroup:
        return cls(options)

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._own, self._count = options.group_rank, options.group_size
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._store, self._patience = options.store, options.timeout
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", options.store), self._own, self._count, options.timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)  # It keeps the name.
        self._number = next(_NUMBERS)
        self._name = ""
        self._stream: torch.Stream | None = None
        self._aborted = False

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        return "simccl"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:  # Which a group that is made in Python does not keep by itself.
        self._name = name

    def _connect(self) -> torch.Stream:
        if self._stream is None:
            self._store.add("joined", 1)
            end = time.monotonic() + RENDEZVOUS_SECONDS
            while self._store.add("joined", 0) < self._count:
                if time.monotonic() > end:
                    raise dist.DistBackendError(
                        f"simccl: the ranks {self._ranks} did not come to make their communicator within {RENDEZVOUS_SECONDS:g} s"
                    )
                time.sleep(1e-3)
            self._stream = torch.Stream(torch.device("sim", torch.accelerator.current_device_index()))
        return self._stream

    def _launch(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        start: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> Any:
        """`start(ins, outs)` begins with gloo what brings `outs`. A tensor that is read and written is in both as one."""
        if not any(each.device.type == "sim" for each in (*reads, *writes)):
            return start(list(reads), list(writes))
        if self._aborted:
            raise dist.DistBackendError("simccl: the communicator was aborted")
        stream = self._connect()
        message = name in ("send", "recv")
        # Of an exchange each rank has lengths of its own.
        nbytes = 0 if name == "exchange" else sum(each.nbytes for each in reads or writes)
        launched.append((self._ranks, "message" if message else name, nbytes))
        with torch.no_grad():
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                ops.touch(list(reads), list(writes), name)
                copies = {id(each): ops.alias(each).clone() for each in (*reads, *writes)}
                outs = [copies[id(each)] for each in writes]
                moved = start([copies[id(each)] for each in reads], outs)
                ops.arrive(moved.boxed(), outs, list(writes), self._number, not message)
            return SimulatedWork(self, None if message else moved, stream.record_event(), [*reads, *writes])

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        root = options.rootRank if options is not None else 0
        writes = tensors if root != self._own else []
        reads = tensors if root == self._own else []

        def start(ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Any:
            return self._gloo.broadcast(ins or outs, options)

        return self._launch("broadcast", reads, writes, start)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        def start(ins: list[torch.Tensor], _outs: list[torch.Tensor]) -> Any:
            return self._gloo.allreduce(ins, options)

        return self._launch("all_reduce", tensors, tensors, start)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        def start(ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Any:
            return self._gloo.allgather([outs], ins)

        for each in outputs[0]:
            if each.device.type == "sim":  # NCCL gathers into a buffer of its own and copies from there.
                torch._C._increment_version([each])
        return self._launch("all_gather", inputs, outputs[0], start)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> Any:
        parts = list(output.detach().view(-1).chunk(self._count))
        # NCCL leaves a rank's own part alone where that is what it sends.
        in_place = parts[self._own].data_ptr() == own.data_ptr()
        written = [part for rank, part in enumerate(parts) if rank != self._own or not in_place]

        def start(ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Any:
            mine = [torch.empty_like(ins[0]).view(-1)] if in_place else []
            return self._gloo.allgather([[*outs[: self._own], *mine, *outs[self._own :]]], [ins[0].reshape(-1)])

        return self._launch("all_gather", [own.detach()], written, start)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, options: Any = None) -> Any:
        kind = dist.AllreduceOptions()
        kind.reduceOp = options.reduceOp if options is not None else dist.ReduceOp.SUM

        def start(ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Any:
            if output.device.type == "cpu":  # gloo sums in place, and nothing copies what arrives.
                work = self._gloo.allreduce(summed := [whole.clone()], kind)
                work.wait()
                output.copy_(summed[0].reshape(-1).chunk(self._count)[self._own].view(output.shape))
                return work
            work = self._gloo.allreduce(ins, kind)
            outs[0] = outs[0].set_(ins[0].reshape(-1).chunk(self._count)[self._own].view(outs[0].shape))
            return work

        return self._launch("reduce_scatter", [whole], [output], start)

    def alltoall_base(
        self, output: torch.Tensor, sent: torch.Tensor, out_splits: list[int], in_splits: list[int], options: Any = None
    ) -> Any:
        def start(ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Any:
            return self._gloo.alltoall_base(outs[0], ins[0], out_splits, in_splits)

        return self._launch("exchange" if out_splits else "all_to_all", [sent], [output], start)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Any:
        return self._launch("send", tensors, [], lambda ins, _outs: self._gloo.send(ins, target, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        return self._launch("recv", [], tensors, lambda _ins, outs: self._gloo.recv(outs, source, tag))

    def barrier(self, opts: Any = None) -> Any:
        work = self._gloo.barrier()
        work.wait()
        return work

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def abort(self) -> None:
        self._aborted = True
        ops.abort_group(self._number)

    def shutdown(self) -> None:
        self._aborted = True

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()
