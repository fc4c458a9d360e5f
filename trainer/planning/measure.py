"""Measures the machine of this launch in about a minute, with what a run itself computes and exchanges with.

All ranks call `MachineMeter.machine` together. What one rank measures, the others wait for without computing, except where it is
measured how much they hinder each other. Each figure is the median of several rounds, and `Clock` knows how far these were apart.
"""

from __future__ import annotations

import itertools
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from zeromesh.comm.activation_collectives import Exchange, open_exchange
from zeromesh.comm.point_to_point import Channels
from zeromesh.comm.torch_transport import open_transport
from zeromesh.comm.transport import BufferRequest, RingRequest, Transport, TransportName
from zeromesh.environment import available_cores
from zeromesh.errors import CollectiveError
from zeromesh.kernels.cpu_matmul import linear, linear_grad_weight, linear_grad_x
from zeromesh.mesh.process_mesh import ProcessMesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import TieredTensor, accelerator
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.direct_io import nearest_directory
from zeromesh.offload.memory.ledger import cpu_name, machine_bytes, mapped_file_bytes, resident_bytes
from zeromesh.optim.fused_optimizer import fused_update
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.planning.machine import Machine, torch_dtype
from zeromesh.trainer.planning.tracing.trace import Trace, TraceOptions, forget_gradient, trace_microbatch
from zeromesh.trainer.tools.doctor import hardware
from zeromesh.zero.hooks import hook_before

_ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
_PAGE_FLOATS = 1024
_COLD = 96 << 20
"""Bytes of which a processor's caches keep nothing until it comes round again."""
_MATRICES = 1024
_AMID = 20
"""Exchanges in a row that are timed amid computing."""
_STEPS = 4
"""Steps after which the heap of a process has found its size."""
_ATTENTION_PRODUCTS = 7
"""Of fused attention: two in forward, five in backward, of which one is computed again."""

Shape = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSizes:
    """What is measured, and for how long."""

    dtypes: tuple[str, ...]
    products: tuple[Shape, ...]
    """`(rows, inner, columns)`."""
    attention: tuple[Shape, ...]
    """`(batch x heads, sequence, size of a head)`."""
    moved: tuple[int, ...]
    """Elements of the tensors that other operations read and write."""
    exchanged: tuple[int, ...]
    """Bytes."""
    elements: int
    """Of an update, and of a copy between device and host."""
    round_seconds: float = 0.006
    rounds: int = 5
    disk: bool = True
    model: Mapping[str, int] = field(default_factory=lambda: {"hidden": 512, "layers": 4, "length": 256})
    """A Llama that is trained for a moment, to see what libraries take."""


def _grid(rows: Sequence[int], matrices: Sequence[tuple[int, int]]) -> tuple[Shape, ...]:
    return tuple((count, *matrix) for count in rows for matrix in matrices)


_SMALL = ((64, 64), (64, 256), (128, 512), (256, 256), (512, 128), (1024, 1024), (512, 2048), (2048, 512), (256, 8192))
CPU_SIZES = MeasureSizes(
    dtypes=("float32", "bfloat16", "float64"),
    products=_grid((64, 256, 1024), _SMALL),
    attention=((16, 64, 32), (16, 256, 64), (8, 1024, 64)),
    moved=(1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22),
    exchanged=(1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24),
    elements=1 << 22,
)
_LARGE = (
    (512, 512),
    (1024, 1024),
    (1024, 4096),
    (4096, 1024),
    (4096, 4096),
    (4096, 16384),
    (8192, 8192),
    (2048, 32768),
)
ACCELERATOR_SIZES = MeasureSizes(
    dtypes=("bfloat16", "float16", "float32"),
    products=_grid((256, 1024, 4096, 16384), _LARGE),
    attention=((64, 512, 64), (32, 2048, 128), (16, 8192, 128)),
    moved=(1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26),
    exchanged=(1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    elements=1 << 25,
    round_seconds=0.004,
)
TINY_SIZES = MeasureSizes(
    dtypes=("float32",),
    products=((16, 16, 16), (64, 64, 64)),
    attention=((2, 16, 8),),
    moved=(1 << 8, 1 << 12),
    exchanged=(1 << 10, 1 << 14),
    elements=1 << 10,
    round_seconds=1e-4,
    rounds=3,
    disk=False,
    model={"hidden": 16, "layers": 1, "length": 8},
)
"""For tests, and to see that it works at all."""


def sizes_for(device: torch.device, *, tiny: bool = False) -> MeasureSizes:
    """What is measured on a device."""
    return TINY_SIZES if tiny else ACCELERATOR_SIZES if is_accelerator(device) else CPU_SIZES


@dataclass(kw_only=True, eq=False)
class Clock:
    """Times calls on one device, and remembers how far rounds were apart."""

    device: torch.device
    round_seconds: float
    rounds: int
    spreads: list[float] = field(default_factory=list)
    """For each figure, the part of it by which the middle half of its rounds differ."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call: the median of rounds, each of as many calls as fill it."""
        call()
        count = 1
        while (taken := self.take(call, count)) < self.round_seconds / 2 and count < 1 << 20:
            count = max(count + 1, min(16 * count, math.ceil(count * self.round_seconds / max(taken, 1e-7))))
        return self.median([self.take(call, count) / count for _ in range(self.rounds)])

    def take(self, call: Callable[[], object], count: int) -> float:
        """Seconds of `count` calls in a row, until the device has done them."""
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if is_accelerator(self.device):
            accelerator.synchronize(self.device)

    def median(self, found: Sequence[float]) -> float:
        """The median, whose spread is remembered."""
        middle = statistics.median(found)
        if len(found) > 2 and middle > 0:
            low, _, high = statistics.quantiles(found, n=4)
            self.spreads.append((high - low) / middle)
        return middle


class MachineMeter:
    """Measures on the ranks of one launch."""

    def __init__(self, mesh: ProcessMesh, sizes: MeasureSizes, directory: Path, say: Callable[[str], None]) -> None:
        self._mesh, self._sizes, self._directory, self._say = mesh, sizes, directory, say
        self.device = mesh.device
        self._on_device = is_accelerator(mesh.device)
        self.clock = Clock(device=mesh.device, round_seconds=sizes.round_seconds, rounds=sizes.rounds)
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
        library = self._library()
        found = self._one_by_one("products, memory and launches", self._device_rates)
        update = self._one_by_one("updates and copies", self._updates)
        disk = self._one_by_one("the disk", self._disk)
        crowding, together = self._crowd()
        links = self._links()
        data = None
        if self._mesh.rank == 0:
            device, copies = found
            memory = self._device_bytes()
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
                },
                "links": links,
                "disk": disk,
                "update": update,
                "library": library,
            }
        shared = self._mesh.world.gather_json(data, "measurements")[0]
        return Machine.model_validate(_rounded(shared))

    def _one_by_one(self, what: str, call: Callable[[], Any]) -> Any:
        """What rank 0 finds while the others wait; None on them."""
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

    def _device_bytes(self) -> int:
        return accelerator.device_memory(self.device).total if self._on_device else machine_bytes()

    # One rank alone

    def _device_rates(self) -> tuple[dict[str, Any], dict[str, float] | None]:
        bandwidth = self._bandwidth()
        products = {name: self._products(torch_dtype(name)) for name in self._sizes.dtypes}
        elementwise = {name: self._elementwise(torch_dtype(name)) for name in self._sizes.dtypes}
        rates = {
            "memory_bandwidth": bandwidth,
            "launch_seconds": self._launch_seconds(),
            "products": products,
            "elementwise": elementwise,
        }
        return rates, self._copies() if self._on_device else None

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def _bandwidth(self) -> float:
        """Bytes a second of an addition of large tensors: two are read, one is written."""
        one, other = (self._random(max(self._sizes.moved)) for _ in range(2))
        out = torch.empty_like(one)
        return 3 * one.nbytes / self.clock.seconds(lambda: torch.add(one, other, out=out))

    def _products(self, dtype: torch.dtype) -> dict[str, Any]:
        """Rates of products as linear layers make them, forward and for both gradients, and of fused attention."""
        rows: list[list[float]] = []
        bare = self._calls(1, 1, 1, dtype)
        launches = [0.0 if self._on_device else self.clock.seconds(call) for call in bare]
        for count, inner, columns in self._sizes.products:
            if dtype == torch.float64 and count * inner * columns > 1 << 26:
                continue
            seconds = 0.0
            for call, launch in zip(self._calls(count, inner, columns, dtype), launches, strict=True):
                taken = self.clock.seconds(call)
                seconds += max(taken - launch, taken / 5)
            rows.append([1, count, inner, columns, 6.0 * count * inner * columns / seconds])
        if dtype != torch.float64:
            for batch, length, depth in self._sizes.attention:
                rate = self._attention(batch, length, depth, dtype)
                rows += [[batch, length, depth, length, rate], [batch, length, length, depth, rate]]
        return {"peak": max(row[-1] for row in rows), "measured": rows}

    def _calls(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> list[Callable[[], object]]:
        """Products of one shape in the three layouts of a linear layer.

        Matrices of weights take turns, so many of them that a processor's caches hold none when it comes round again: in training
        each layer has its own.
        """
        left, turned = self._random(rows, inner, dtype=dtype), self._random(inner, rows, dtype=dtype)
        copies = 1 if self._on_device else max(1, min(_MATRICES, _COLD // (inner * columns * dtype.itemsize)))
        many = self._random(inner * columns, dtype=dtype).repeat(copies).view(copies, inner, columns)
        matrices, others = itertools.cycle(many.unbind()), itertools.cycle(many.view(copies, columns, inner).unbind())
        return [
            lambda: linear(left, next(others), None),
            lambda: linear_grad_x(left, next(matrices)),
            lambda: linear_grad_weight(turned, next(matrices)),
        ]

    def _attention(self, batch: int, length: int, depth: int, dtype: torch.dtype) -> float:
        """Operations a second of causal attention, forward and backward, of all of which are counted, skipped ones too."""
        query, key, value = (self._random(1, batch, length, depth, dtype=dtype).requires_grad_() for _ in range(3))

        def step() -> None:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, (query, key, value), out.detach())

        return _ATTENTION_PRODUCTS * 2.0 * batch * length * length * depth / self.clock.seconds(step)

    def _elementwise(self, dtype: torch.dtype) -> list[list[float]]:
        """`[bytes, bytes a second]` of operations of a transformer that are no products, without their launches."""
        rows = []
        tiny = [self.clock.seconds(call) for call, _ in _mixture(self._random(8, 8, dtype=dtype))]
        for elements in self._sizes.moved:
            width = min(1024, max(16, elements // 64))
            moved = seconds = 0.0
            calls = list(_mixture(self._random(elements // width, width, dtype=dtype)))
            for (call, tensors), launch in zip(calls, tiny, strict=True):
                taken = self.clock.seconds(call)
                moved += tensors * elements * dtype.itemsize
                seconds += taken if self._on_device else max(taken - launch, taken / 5)
            rows.append([round(moved / len(calls)), moved / seconds])
        return rows

    def _launch_seconds(self) -> float:
        """Seconds of an operation of a transformer so small that they are all that its step takes."""
        step, trace = self._transformer(hidden=16, layers=4, length=4)
        return self.clock.seconds(step) / max(1, trace.work.operations)

    def _transformer(self, *, hidden: int, layers: int, length: int) -> tuple[Callable[[], None], Trace]:
        """Forward and backward of a small Llama, and what they need and do."""
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            use_cache=False,
        )
        model = LlamaForCausalLM(config).to(self.device).train()
        loss, tokens = make_loss(model), torch.zeros(1, length, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens}
        options = TraceOptions(compute=torch.float32, device=self.device.type)
        trace = trace_microbatch(model, batch, loss, options)
        there = {name: tensor.to(self.device) for name, tensor in batch.items()}

        for parameter in model.parameters():
            hook_before(parameter, forget_gradient)

        def step() -> None:
            loss(model, there, seed=1.0).backward()  # type: ignore[no-untyped-call]

        return step, trace

    def _copies(self) -> dict[str, float]:
        host, there = accelerator.pinned(4 * self._sizes.elements), self._random(self._sizes.elements)
        host = host.view(torch.float32)
        small, small_there = host[:1], there[:1]
        nbytes = float(there.nbytes)
        return {
            "to_device": nbytes / self.clock.seconds(lambda: there.copy_(host, non_blocking=True)),
            "to_host": nbytes / self.clock.seconds(lambda: host.copy_(there, non_blocking=True)),
            "latency_seconds": self.clock.seconds(lambda: small.copy_(small_there)),
        }

    def _updates(self) -> dict[str, float]:
        """Seconds of an element of AdamW."""
        here = self._update(self.device)
        return {"device": here, "host": self._update(torch.device("cpu")) if self._on_device else here}

    def _update(self, device: torch.device) -> float:
        count = self._sizes.elements if device == self.device else min(self._sizes.elements, 1 << 22)
        master, grad, first, second = (torch.full((count,), 1e-3, device=device) for _ in range(4))
        step = self.clock.seconds(lambda: fused_update("adamw", _ADAMW, master, grad, (first, second), 1))
        return step / count

    def _disk(self) -> dict[str, float] | None:
        if not self._sizes.disk:
            return None
        file = nearest_directory(self._directory.expanduser().absolute()) / f".zeromesh-plan-{secrets.token_hex(8)}.tmp"
        try:
            times = hardware.measure(file)
        finally:
            file.unlink(missing_ok=True)
        return {"read": times.read, "written": times.written, "latency_seconds": times.sync_seconds}

    def _library(self) -> dict[str, int]:
        """Bytes of this process that are no model's, once one was trained for a moment."""
        used = 0
        fresh = resident_bytes() - mapped_file_bytes()
        self._launch_seconds()  # Tracing loads modules that training does not.
        before = resident_bytes() - mapped_file_bytes()
        step, trace = self._transformer(**self._sizes.model)
        for _ in range(_STEPS):
            step()
        files = mapped_file_bytes()
        grown = resident_bytes() - files - before - trace.peak - _parameter_bytes(**self._sizes.model)
        if self._on_device:
            memory = accelerator.device_memory(self.device)
            used = max(0, memory.total - memory.free - memory.reserved)
        return {"device": used, "host": fresh + (0 if self._on_device else max(0, grown)), "shared": files}

    # All ranks at once

    def _crowd(self) -> tuple[list[list[float]], float]:
        """`[ranks, factor, seconds]` for ever more ranks of the first host, and bytes a second of memory that all have together."""
        self._tell("how ranks hinder each other")
        step, _ = self._transformer(**self._sizes.model)
        wide = self._random(max(self._sizes.moved))
        found: list[list[float]] = []
        alone = bandwidth = 0.0
        for ranks in _doubled(len(self._hosts[0])):
            seconds = self._beside(step, ranks)
            alone = alone or seconds
            found.append([ranks, max(1.0, seconds / alone), self._waiting(ranks)])
            moved = self._beside(lambda: torch.add(wide, wide, out=wide), ranks)
            bandwidth = max(bandwidth, ranks * 3 * wide.nbytes / moved)
        return found, bandwidth

    def _waiting(self, ranks: int) -> float:
        """Seconds that an exchange of two takes amid computing, beside what it takes to move: ranks never compute equally fast."""
        if ranks == 1 or self._on_device:
            return 0.0
        here = self._hosts[0][:ranks]
        pairs = [here[start : start + 2] for start in range(0, ranks - 1, 2)]
        groups = [self._mesh.process_sets.add(pair, name=f"pair {pair[0]} of {ranks}") for pair in pairs]
        mine = next((group for group, pair in zip(groups, pairs, strict=True) if self._mesh.rank in pair), None)
        matrix, tensor = self._random(256, 256), self._random(1 << 14)
        exchange = open_exchange(mine, self.device, "auto") if mine is not None else None

        def compute() -> None:
            torch.mm(torch.mm(matrix, matrix), matrix)

        def both() -> None:
            compute()
            if exchange is not None:
                exchange.sum(tensor).wait()

        taken = []
        for call in (compute, both):
            rounds = []
            for _ in range(2 * self._sizes.rounds):
                self._mesh.world.barrier("the beginning of a round")
                rounds.append(self.clock.take(call, _AMID) / _AMID if mine is not None else 0.0)
            taken.append(self.clock.median(rounds))
        found = self._mesh.world.gather_json(max(0.0, taken[1] - taken[0]), "seconds of waiting")
        for group in groups:
            self._mesh.process_sets.remove(group)
        return float(statistics.median(found[rank] for rank in here))

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
        mine = self.clock.median(rounds) * share if busy else 0.0
        return float(sum(self._mesh.world.gather_json(mine, "seconds of a round"))) / ranks

    # Links

    def _links(self) -> dict[str, Any]:
        """Links between ranks of the first host, and between the first ranks of the hosts, by transport."""
        here, firsts = self._hosts[0], [ranks[0] for ranks in self._hosts]
        found: dict[str, Any] = {"inside": {}, "between": {}}
        for where, ranks in (("inside", here), ("between", firsts)):
            if len(ranks) < 2:
                continue
            messages = self._messages(where)
            for name in self._transports(where):
                measured = [row for size in _doubled(len(ranks))[1:] for row in self._link(ranks[:size], name)]
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
                rows.append([Collective.POINT_TO_POINT.value, 2, nbytes, self.clock.median(rounds[1:])])
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
        return float(max(group.gather_json(self.clock.median(rounds), "seconds of an exchange")))


def _parameter_bytes(*, hidden: int, layers: int, length: int) -> int:
    """Bytes of the float32 parameters of `MachineMeter._transformer`, but for its norms."""
    return 4 * (13 * hidden * hidden * layers + 512 * hidden)


def _mixture(x: torch.Tensor) -> Iterator[tuple[Callable[[], object], int]]:
    """What a transformer does with `[rows, width]` beside products, with how many such tensors each reads and writes."""
    other, ones = torch.ones_like(x), torch.ones_like(x[0])
    mean, deviation = torch.zeros_like(x[:, :1], dtype=torch.float32), torch.ones_like(x[:, :1], dtype=torch.float32)
    norm, shape = torch.ops.aten, [x.shape[-1]]
    if not is_accelerator(x.device):
        mean, deviation = mean.to(x.dtype), deviation.to(x.dtype)
    yield lambda: x + other, 3
    yield lambda: x * other, 3
    yield lambda: functional.gelu(x), 2
    yield lambda: norm.gelu_backward(other, x), 3
    yield lambda: functional.layer_norm(x, shape, ones), 2
    yield lambda: norm.native_layer_norm_backward(other, x, shape, mean, deviation, ones, None, [True, True, False]), 3
    yield lambda: x.t().contiguous(), 2


def _doubled(most: int) -> list[int]:
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


def _rounded(value: Any) -> Any:
    """The same with four digits of each number that is not whole."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
