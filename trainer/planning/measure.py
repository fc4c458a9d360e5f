"""Measures the machine of this launch in about a minute, with the kernels and collectives of a training run."""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.environment import available_cores
from zeromesh.errors import counted
from zeromesh.intervals import grouped
from zeromesh.kernels.cpu_matmul import linear, linear_grad_weight, linear_grad_x
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator, time_call
from zeromesh.offload.io.direct_io import nearest_directory
from zeromesh.offload.memory.ledger import cpu_name, machine_bytes, mapped_file_bytes, resident_bytes
from zeromesh.optim.fused_optimizer import fused_update
from zeromesh.settings.keys import TransportName
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.tracing.trace import Trace, free_gradient, trace_microbatch
from zeromesh.trainer.tools.doctor import hardware
from zeromesh.zero.hooks import hook_before

_ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
_CACHE_BYTES = 96 << 20  # Bytes that are larger than a processor's caches.
_WARMUP_STEPS = 4  # The number of steps until a process's heap has reached its final size.
_WIDTH, _TENSORS_MOVED = 1024, 16
"""The width of the tensors of `bandwidth`; its norm, GELU and addition read and write 7 in forward, and 9 in backward."""
_ROUNDS, _COUNT = 15, 4
"""The rounds of a collective, and its repetitions in each. The minimum of the rounds counts, as other load slows some down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSizes:
    """The sizes of what is measured, of which `measure.yaml` has a row for each kind of machine."""

    dtypes: Sequence[str]
    products: Sequence[tuple[int, int, int]]  # The shapes `(rows, inner, columns)` of matrix products.
    elements: int
    """The number of elements of an update, and of a copy between device and host; other operators have a quarter."""
    exchanged: tuple[int, int]  # Bytes of a small and of a large exchange.
    disk: bool = True
    model: dict[str, int] = field(default_factory=lambda: {"hidden": 512, "layers": 4, "length": 256})
    """The sizes of a Llama that is trained briefly to measure the memory of libraries."""


_SIZES = {kind: MeasureSizes(**row) for kind, row in read_texts(Path(__file__).with_suffix(".yaml")).items()}
TINY_SIZES = _SIZES["tiny"]


def measure_machine(mesh: Mesh, directory: Path, say: Callable[[str], None], sizes: MeasureSizes | None = None) -> Machine:
    """Measure everything; all ranks call it, and get the machine. Rank 0 passes progress to `say`. While one rank measures, the
    others wait without computing. `directory` is on the measured disk. Raises `StorageError` when that cannot be written."""
    by_host = grouped((location.host, rank) for rank, location in enumerate(mesh.locations))
    hosts, on_device = list(by_host.values()), is_accelerator(mesh.device)
    sizes = sizes or _SIZES["accelerator" if on_device else "cpu"]

    def measured(what: str, call: Callable[[], Any], ranks: Sequence[int] = (0,)) -> Any:
        """Return the result of `call` on these ranks, which run it while the others wait; None on the others."""
        if mesh.rank == 0:
            say(f"measuring {what}")
        mesh.world.barrier(f"the beginning of {what}")
        found = call() if mesh.rank in ranks else None
        mesh.world.barrier(f"measuring {what}")
        return found

    alone = _DeviceMeter(mesh.device, sizes)
    library = alone.library()
    device = measured("products, memory and launches", alone.rates)
    update = measured("updates", alone.updates)
    # Rank 0 alone looks for the folder, which other hosts may not have.
    folder = directory.expanduser().absolute()
    disk = measured("the disk", lambda: hardware.measure(nearest_directory(folder))) if sizes.disk else None
    # Ranks that share a core would measure scheduling.
    busy = hosts[0] if on_device else hosts[0][: max(2, available_cores())]
    part = measured("the host's memory", _DeviceMeter(torch.device("cpu"), sizes).bandwidth, (0,) if on_device else busy)
    parts = mesh.world.gather_json(part, "bytes a second of memory")
    links = {"inside": _links(mesh, "inside", busy, sizes, measured)}
    links["between"] = _links(mesh, "between", [ranks[0] for ranks in hosts], sizes, measured)
    for link in links["between"].values():
        if mesh.rank == 0:
            link["bandwidth"] /= 1 if on_device else len(hosts[0])  # Ranks of a host share its network.
    host = {"devices": len(hosts[0]), "cores": available_cores(), "memory_bytes": machine_bytes()}
    host["memory_bandwidth"] = sum(filter(None, parts))
    memory = accelerator.device_memory(mesh.device).total if on_device else machine_bytes()
    name = accelerator.device_name(mesh.device) if on_device else cpu_name()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    threads = "" if on_device else f" of {torch.get_num_threads()} threads"
    ranks = f"{counted(mesh.world_size, 'rank')}{threads} on {counted(len(hosts), 'host')}"
    data = {
        "name": f"{name}, {len(hosts[0])} {'devices' if on_device else 'ranks'} a host",
        "sources": [f"zeromesh plan --measure, {date}: {ranks}, torch {torch.__version__}"],
        "device": {"kind": mesh.device.type, "memory_bytes": memory, **(device or {})},
        "host": host,
        "links": links,
        "disk": disk and {"read": disk.read, "written": disk.written, "latency_seconds": disk.sync_seconds},
        "update": update,
        "library": library,
    }
    found = json.dumps(mesh.world.gather_json(data if mesh.rank == 0 else None, "measurements")[0])
    return Machine.model_validate(json.loads(found, parse_float=lambda number: float(f"{float(number):.4g}")))


def _links(mesh: Mesh, where: str, ranks: Sequence[int], sizes: MeasureSizes, measured: Callable[..., Any]) -> dict[str, Any]:
    """Return the figures of the links between these ranks by transport, as in a machine file. All ranks of the world call it."""
    names: tuple[TransportName, ...] = ("nccl",) if is_accelerator(mesh.device) else ("shared", "gloo")
    found: dict[str, Any] = {}
    for name in names if where == "inside" and mesh.one_host else names[-1:]:
        if len(ranks) > 1:
            group = mesh.process_sets.add(ranks, name=f"{name} {where}")
            found[name] = measured(f"{name} {where}", partial(_link, group, mesh.device, name, sizes.exchanged), ranks)
            mesh.process_sets.remove(group)
    return found


def _link(group: ProcessSet, device: torch.device, name: TransportName, sizes: tuple[int, int]) -> dict[str, float]:
    exchange, times = open_exchange(group, device, name), []
    for nbytes in sizes:
        tensor, rounds = torch.zeros(nbytes // 4, device=device), []
        for _ in range(_ROUNDS):
            group.barrier("the beginning of a round")
            began = time.perf_counter()
            for _ in range(_COUNT):
                exchange.all_reduce_async(tensor).wait()
            accelerator.synchronize(device)
            rounds.append((time.perf_counter() - began) / _COUNT)
        times.append(max(group.gather_json(min(rounds), "seconds of an exchange")))
    (latency, seconds), messages = times, 2 * (group.size - 1)
    # A message of a ring collective carries 1/ranks of the tensor.
    moved = messages / group.size * sizes[-1]
    return {"latency_seconds": latency / messages, "bandwidth": moved / max(seconds - latency, seconds / 2)}


class _DeviceMeter:
    def __init__(self, device: torch.device, sizes: MeasureSizes) -> None:
        self.device, self._sizes = device, sizes
        self._on_device = is_accelerator(device)
        self._seconds = partial(time_call, device=device)

    def rates(self) -> dict[str, Any]:
        products = {
            name: statistics.median(self._product(*shape, getattr(torch, name)) for shape in self._sizes.products)
            for name in self._sizes.dtypes
        }
        return {
            "memory_bandwidth": self.bandwidth(),
            "launch_seconds": self._launch_seconds(),
            "products": products,
            "copies": self._copies() if self._on_device else None,
        }

    def bandwidth(self) -> float:
        """Return the bytes per second that a transformer's operators other than products read and write, forward and backward."""
        tensor = self._random(self._sizes.elements // _WIDTH // 4, _WIDTH).requires_grad_()
        scale = torch.ones(_WIDTH, device=self.device, requires_grad=True)

        def step() -> None:
            out = functional.gelu(functional.layer_norm(tensor, [_WIDTH], scale)) + tensor
            torch.autograd.grad(out, (tensor, scale), out.detach())

        return _TENSORS_MOVED * tensor.nbytes / self._seconds(step)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def _product(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
        """Return the operations per second of a linear layer's products. On a CPU weights alternate, so that none is cached."""
        given, grad = self._random(rows, inner, dtype=dtype), self._random(rows, columns, dtype=dtype)
        copies = 1 if self._on_device else max(1, _CACHE_BYTES // (inner * columns * dtype.itemsize))
        weights = itertools.cycle(self._random(columns, inner, dtype=dtype).repeat(copies, 1, 1).unbind())

        def step() -> None:
            linear(given, next(weights), None)
            linear_grad_x(grad, next(weights))
            linear_grad_weight(grad, given)

        return 6.0 * rows * inner * columns / self._seconds(step)

    def _launch_seconds(self) -> float:
        """Return the seconds per operator of a transformer so small that launches take all of its time."""
        step, trace, _ = self._transformer(hidden=16, layers=4, length=4)
        return self._seconds(step) / max(1, trace.work.operations)

    def _transformer(self, *, hidden: int, layers: int, length: int) -> tuple[Callable[[], None], Trace, int]:
        """Return a training step without update, its trace, and the bytes of the parameters."""
        sizes = {"vocab_size": 256, "hidden_size": hidden, "intermediate_size": 3 * hidden}
        config = LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=4, use_cache=False)
        model = LlamaForCausalLM(config).to(self.device).train()
        loss, tokens = make_loss(model), torch.zeros(1, length, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens}
        trace = trace_microbatch(model, batch, loss, torch.float32, device=self.device.type)
        there = {name: tensor.to(self.device) for name, tensor in batch.items()}
        for parameter in model.parameters():
            hook_before(parameter, free_gradient)

        def step() -> None:
            loss(model, there, seed=1.0).backward()  # type: ignore[no-untyped-call]

        return step, trace, sum(parameter.nbytes for parameter in model.parameters())

    def _copies(self) -> dict[str, float]:
        there = self._random(self._sizes.elements)
        host = accelerator.allocate_pinned(there.nbytes).view(torch.float32)
        small, small_there = host[:1], there[:1]
        return {
            "to_device": there.nbytes / self._seconds(lambda: there.copy_(host, non_blocking=True)),
            "to_host": there.nbytes / self._seconds(lambda: host.copy_(there, non_blocking=True)),
            "latency_seconds": self._seconds(lambda: small.copy_(small_there)),
        }

    def updates(self) -> dict[str, float]:

        def seconds_on(device: torch.device) -> float:
            count = min(self._sizes.elements, 1 << 22) if device.type == "cpu" else self._sizes.elements
            master, grad, *moments = (torch.full((count,), 1e-3, device=device) for _ in range(4))
            return time_call(partial(fused_update, "adamw", _ADAMW, master, grad, tuple(moments), 1), device) / count

        here = seconds_on(self.device)
        return {"device": here, "host": seconds_on(torch.device("cpu")) if self._on_device else here}

    def library(self) -> dict[str, int]:
        """Return the bytes of this process that belong to no model, after one was trained briefly."""
        used = 0
        fresh = resident_bytes() - mapped_file_bytes()
        self._launch_seconds()  # Tracing imports modules that training does not, so it comes first.
        before = resident_bytes() - mapped_file_bytes()
        step, trace, parameters = self._transformer(**self._sizes.model)
        for _ in range(_WARMUP_STEPS):
            step()
        files = mapped_file_bytes()
        grown = resident_bytes() - files - before - trace.peak - parameters
        if self._on_device:
            memory = accelerator.device_memory(self.device)
            used = max(0, memory.total - memory.free - memory.reserved)
        return {"device": used, "host": fresh + (0 if self._on_device else max(0, grown)), "shared": files}
