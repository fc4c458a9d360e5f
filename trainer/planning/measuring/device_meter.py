"""The measurements that one rank makes alone: products, memory, launches, updates, copies, the disk, what libraries take."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from zeromesh.kernels.cpu_matmul import linear, linear_grad_weight, linear_grad_x
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.direct_io import nearest_directory
from zeromesh.offload.memory.ledger import mapped_file_bytes, resident_bytes
from zeromesh.optim.fused_optimizer import fused_update
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.planning.machine import torch_dtype
from zeromesh.trainer.planning.measuring.clock import Clock, MeasureSizes
from zeromesh.trainer.planning.tracing.trace import Trace, TraceOptions, forget_gradient, trace_microbatch
from zeromesh.trainer.tools.doctor import hardware
from zeromesh.zero.hooks import hook_before

_ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
_COLD = 96 << 20
"""Bytes of which a processor's caches keep nothing until it comes round again."""
_MATRICES = 1024
_STEPS = 4
"""Steps after which the heap of a process has found its size."""
_ATTENTION_PRODUCTS = 7
"""The number of products of fused attention: two in forward, five in backward, of which one is computed again."""


class DeviceMeter:
    """Measures the device of a clock, by one rank alone."""

    def __init__(self, clock: Clock, sizes: MeasureSizes) -> None:
        self.clock, self._sizes, self.device = clock, sizes, clock.device
        self._on_device = is_accelerator(clock.device)

    def rates(self) -> tuple[dict[str, Any], dict[str, float] | None]:
        """Rates of products, of memory and of what is no product, as in a machine file, and those of copies on an accelerator."""
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

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random values of that shape and dtype on the device."""
        return torch.randn(shape, device=self.device).to(dtype)

    def _bandwidth(self) -> float:
        """Bytes a second of an addition of large tensors: two are read, one is written."""
        one, other = (self.random(max(self._sizes.moved)) for _ in range(2))
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
        left, turned = self.random(rows, inner, dtype=dtype), self.random(inner, rows, dtype=dtype)
        copies = 1 if self._on_device else max(1, min(_MATRICES, _COLD // (inner * columns * dtype.itemsize)))
        many = self.random(inner * columns, dtype=dtype).repeat(copies).view(copies, inner, columns)
        matrices, others = itertools.cycle(many.unbind()), itertools.cycle(many.view(copies, columns, inner).unbind())
        return [
            lambda: linear(left, next(others), None),
            lambda: linear_grad_x(left, next(matrices)),
            lambda: linear_grad_weight(turned, next(matrices)),
        ]

    def _attention(self, batch: int, length: int, depth: int, dtype: torch.dtype) -> float:
        """Operations a second of causal attention, forward and backward, of all of which are counted, skipped ones too."""
        query, key, value = (self.random(1, batch, length, depth, dtype=dtype).requires_grad_() for _ in range(3))

        def step() -> None:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, (query, key, value), out.detach())

        return _ATTENTION_PRODUCTS * 2.0 * batch * length * length * depth / self.clock.seconds(step)

    def _elementwise(self, dtype: torch.dtype) -> list[list[float]]:
        """`[bytes, bytes a second]` of operations of a transformer that are no products, without their launches."""
        rows = []
        tiny = [self.clock.seconds(call) for call, _ in _mixture(self.random(8, 8, dtype=dtype))]
        for elements in self._sizes.moved:
            width = min(1024, max(16, elements // 64))
            moved = seconds = 0.0
            calls = list(_mixture(self.random(elements // width, width, dtype=dtype)))
            for (call, tensors), launch in zip(calls, tiny, strict=True):
                taken = self.clock.seconds(call)
                moved += tensors * elements * dtype.itemsize
                seconds += taken if self._on_device else max(taken - launch, taken / 5)
            rows.append([round(moved / len(calls)), moved / seconds])
        return rows

    def _launch_seconds(self) -> float:
        """Seconds of an operation of a transformer so small that they are all that its step takes."""
        step, trace = self.transformer(hidden=16, layers=4, length=4)
        return self.clock.seconds(step) / max(1, trace.work.operations)

    def transformer(self, *, hidden: int, layers: int, length: int) -> tuple[Callable[[], None], Trace]:
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
        host, there = accelerator.pinned(4 * self._sizes.elements), self.random(self._sizes.elements)
        host = host.view(torch.float32)
        small, small_there = host[:1], there[:1]
        nbytes = float(there.nbytes)
        return {
            "to_device": nbytes / self.clock.seconds(lambda: there.copy_(host, non_blocking=True)),
            "to_host": nbytes / self.clock.seconds(lambda: host.copy_(there, non_blocking=True)),
            "latency_seconds": self.clock.seconds(lambda: small.copy_(small_there)),
        }

    def updates(self) -> dict[str, float]:
        """Seconds of an element of AdamW."""
        here = self._update(self.device)
        return {"device": here, "host": self._update(torch.device("cpu")) if self._on_device else here}

    def _update(self, device: torch.device) -> float:
        count = self._sizes.elements if device == self.device else min(self._sizes.elements, 1 << 22)
        master, grad, first, second = (torch.full((count,), 1e-3, device=device) for _ in range(4))
        step = self.clock.seconds(lambda: fused_update("adamw", _ADAMW, master, grad, (first, second), 1))
        return step / count

    def disk(self, directory: Path) -> dict[str, float] | None:
        """Bytes a second of the disk below a directory, and seconds until it has kept something; None where none is measured.

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
        """Bytes of this process that are no model's, once one was trained for a moment."""
        used = 0
        fresh = resident_bytes() - mapped_file_bytes()
        self._launch_seconds()  # Tracing loads modules that training does not.
        before = resident_bytes() - mapped_file_bytes()
        step, trace = self.transformer(**self._sizes.model)
        for _ in range(_STEPS):
            step()
        files = mapped_file_bytes()
        grown = resident_bytes() - files - before - trace.peak - _parameter_bytes(**self._sizes.model)
        if self._on_device:
            memory = accelerator.device_memory(self.device)
            used = max(0, memory.total - memory.free - memory.reserved)
        return {"device": used, "host": fresh + (0 if self._on_device else max(0, grown)), "shared": files}


def _parameter_bytes(*, hidden: int, layers: int, length: int) -> int:
    """Bytes of the float32 parameters of `DeviceMeter.transformer`, but for its norms."""
    return 4 * (13 * hidden * hidden * layers + 512 * hidden)


def _mixture(x: torch.Tensor) -> Iterator[tuple[Callable[[], object], int]]:
    """Yield a transformer's operations on `[rows, width]` beside products, with how many such tensors each reads and writes."""
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
