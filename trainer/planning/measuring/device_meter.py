"""The measurements of a single rank: products, memory, launches, updates, copies, the disk, and bytes of libraries."""

from __future__ import annotations

import itertools
import secrets
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from zeromesh.kernels.cpu_matmul import linear, linear_grad_weight, linear_grad_x
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator, seconds_of
from zeromesh.offload.io.direct_io import nearest_directory
from zeromesh.offload.memory.ledger import mapped_file_bytes, resident_bytes
from zeromesh.optim.fused_optimizer import fused_update
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.planning.machine import torch_dtype
from zeromesh.trainer.planning.tracing.trace import Trace, TraceOptions, forget_gradient, trace_microbatch
from zeromesh.trainer.tools.doctor import hardware
from zeromesh.zero.hooks import hook_before

_ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
_CACHE_BYTES = 96 << 20
"""Bytes that are larger than a processor's caches."""
_WARMUP_STEPS = 4
"""The number of steps until a process's heap has reached its final size."""
_WIDTH, _PASSED = 1024, 16
"""The width of a tensor, and the tensors that a norm (2), GELU (2) and an addition (3) read and write forward, and 3 each
backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSizes:
    """The sizes of the measured operations."""

    dtypes: tuple[str, ...]
    products: tuple[tuple[int, int, int], ...]
    """The shapes `(rows, inner, columns)` of matrix products."""
    elements: int
    """The number of elements of an update, and of a copy between device and host; other operators have a quarter."""
    exchanged: tuple[int, int]
    """Bytes of a small and of a large exchange."""
    disk: bool = True
    model: dict[str, int] = field(default_factory=lambda: {"hidden": 512, "layers": 4, "length": 256})
    """The sizes of a Llama that is trained briefly to measure the memory of libraries."""


CPU_SIZES = MeasureSizes(
    dtypes=("float32", "bfloat16", "float64"),
    products=tuple((rows, *each) for rows in (64, 256, 1024) for each in ((256, 256), (512, 2048), (2048, 512))),
    elements=1 << 22,
    exchanged=(1 << 10, 1 << 22),
)
ACCELERATOR_SIZES = MeasureSizes(
    dtypes=("bfloat16", "float16", "float32"),
    products=((1024, 4096, 4096), (4096, 1024, 4096), (4096, 4096, 4096), (4096, 4096, 16384), (16384, 8192, 8192)),
    elements=1 << 26,
    exchanged=(1 << 12, 1 << 28),
)
TINY_SIZES = MeasureSizes(
    dtypes=("float32",),
    products=((16, 16, 16), (64, 64, 64)),
    elements=1 << 12,
    exchanged=(1 << 10, 1 << 14),
    disk=False,
    model={"hidden": 16, "layers": 1, "length": 8},
)
"""Sizes for tests, and for a quick check."""


def sizes_for(device: torch.device, *, tiny: bool = False) -> MeasureSizes:
    """Return the default sizes for a device."""
    return TINY_SIZES if tiny else ACCELERATOR_SIZES if is_accelerator(device) else CPU_SIZES


class DeviceMeter:
    """Measures a device from a single rank."""

    def __init__(self, device: torch.device, sizes: MeasureSizes) -> None:
        self.device, self._sizes = device, sizes
        self._on_device = is_accelerator(device)

    def rates(self) -> dict[str, Any]:
        """Return the rates in the section `device` of a machine file."""
        return {
            "memory_bandwidth": self.bandwidth(),
            "launch_seconds": self._launch_seconds(),
            "products": {name: self._products(torch_dtype(name)) for name in self._sizes.dtypes},
            "copies": self._copies() if self._on_device else None,
        }

    def bandwidth(self) -> float:
        """Return the bytes per second that a transformer's operators other than products read and write, forward and backward."""
        tensor = self._random(self._sizes.elements // _WIDTH // 4, _WIDTH).requires_grad_()
        scale = torch.ones(_WIDTH, device=self.device, requires_grad=True)

        def step() -> None:
            out = functional.gelu(functional.layer_norm(tensor, [_WIDTH], scale)) + tensor
            torch.autograd.grad(out, (tensor, scale), out.detach())

        return _PASSED * tensor.nbytes / self._seconds(step)

    def _seconds(self, call: Callable[[], object]) -> float:
        return seconds_of(call, self.device)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def _products(self, dtype: torch.dtype) -> float:
        return statistics.median(self._product(*shape, dtype) for shape in self._sizes.products)

    def _product(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
        """Return the operations per second of a linear layer's products, forward and for both gradients.

        On a CPU several weight matrices alternate, so that none is cached at its next use, as with the layers of a model.
        """
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
        step, trace = self._transformer(hidden=16, layers=4, length=4)
        return self._seconds(step) / max(1, trace.work.operations)

    def _transformer(self, *, hidden: int, layers: int, length: int) -> tuple[Callable[[], None], Trace]:
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
            "to_device": nbytes / self._seconds(lambda: there.copy_(host, non_blocking=True)),
            "to_host": nbytes / self._seconds(lambda: host.copy_(there, non_blocking=True)),
            "latency_seconds": self._seconds(lambda: small.copy_(small_there)),
        }

    def updates(self) -> dict[str, float]:
        """Return the seconds per element of AdamW."""
        here = self._update(self.device)
        return {"device": here, "host": self._update(torch.device("cpu")) if self._on_device else here}

    def _update(self, device: torch.device) -> float:
        count = min(self._sizes.elements, 1 << 22) if device.type == "cpu" else self._sizes.elements
        master, grad, first, second = (torch.full((count,), 1e-3, device=device) for _ in range(4))
        step = seconds_of(lambda: fused_update("adamw", _ADAMW, master, grad, (first, second), 1), device)
        return step / count

    def disk(self, directory: Path) -> dict[str, float] | None:
        """Return the disk's bytes per second below a directory, and the seconds of an fsync; None where no disk is measured.

        Raises `StorageError` when it cannot be written.
        """
        if not self._sizes.disk:
            return None
        file = nearest_directory(directory.expanduser().absolute()) / f".zeromesh-plan-{secrets.token_hex(8)}.tmp"
        try:
            times = hardware.measure(file)
        finally:
            file.unlink(missing_ok=True)
        return {"read": times.read, "written": times.written, "latency_seconds": times.sync_seconds}

    def library(self) -> dict[str, int]:
        """Return the bytes of this process that belong to no model, after one was trained briefly."""
        used = 0
        fresh = resident_bytes() - mapped_file_bytes()
        self._launch_seconds()  # Tracing loads modules that training does not.
        before = resident_bytes() - mapped_file_bytes()
        step, trace = self._transformer(**self._sizes.model)
        for _ in range(_WARMUP_STEPS):
            step()
        files = mapped_file_bytes()
        grown = resident_bytes() - files - before - trace.peak - _parameter_bytes(**self._sizes.model)
        if self._on_device:
            memory = accelerator.device_memory(self.device)
            used = max(0, memory.total - memory.free - memory.reserved)
        return {"device": used, "host": fresh + (0 if self._on_device else max(0, grown)), "shared": files}


def _parameter_bytes(*, hidden: int, layers: int, length: int) -> int:
    """Return the bytes of the float32 parameters of `DeviceMeter._transformer`, without its norms."""
    return 4 * (13 * hidden * hidden * layers + 512 * hidden)
