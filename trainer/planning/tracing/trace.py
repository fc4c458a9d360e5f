"""The trace of one microbatch: memory and work of each block, from a run of the user's model without values.

Floating-point tensors are on the meta device and have a shape alone; integers are real, so that masks and positions are correct,
and experts are chosen evenly. A dispatch mode sees every operator, and counts live bytes, as PyTorch's allocator would, and work:

    live ^        ____/\\__/\\__                      before | block 0 | block 1 | after      forward
         |    ___/            \\____               after | block 1 | block 0 | before      backward
         |___/                     \\____

Of equal blocks at most two run, so that tracing takes about a second at any depth. Gradients of parameters are freed at once, since
the memory model of states counts them (`zero/memory_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError, ZeromeshError, summary
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import ZeroOptions
from zeromesh.overrides import override
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.trainer.losses.losses import Loss
from zeromesh.trainer.models.prepare import Mode, enable_activation_checkpointing, keep_attributes
from zeromesh.trainer.planning.tracing.meter import Meter, Segment, TracedExchange
from zeromesh.trainer.planning.tracing.operations import kernels_of
from zeromesh.trainer.planning.tracing.short_model import expand, shorten, without_values
from zeromesh.trainer.planning.tracing.work import Work
from zeromesh.units.plan import ModelCuts, ModelPlan, UnitPlan, block_modules, plan_model
from zeromesh.zero.hooks import hook_before


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The segments of a microbatch, in the order of forward: before, every block, after."""

    segments: tuple[Segment, ...]

    @property
    def peak(self) -> int:
        """The peak bytes of activations and gradients, where one rank runs all segments."""
        found = base = 0
        for segment in self.segments:
            found = max(found, base + segment.forward_peak, base + segment.backward_peak)
            base += segment.kept
        return found

    @property
    def work(self) -> Work:
        """The total work, forward and backward."""
        return sum((each.forward + each.backward for each in self.segments), Work())


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """Options of a traced run: the compute dtype, the kind of device, the number of tensor ranks, and the mode of recomputation."""

    compute: torch.dtype = torch.bfloat16
    device: str = "cpu"
    tensor: int = 1
    rules: tuple[tuple[str, str], ...] = ()
    """The user's tensor-parallel styles of layers, by name pattern."""
    sequence: bool = False
    recompute: Mode = "none"


class Tracer:
    """Traces microbatches of one whole model, whose values, if any, are removed until `close`."""

    def __init__(self, model: nn.Module, loss: Loss, compute: torch.dtype) -> None:
        """`loss` is that of the whole model; parameters get the dtype `compute`."""
        self.model, self.loss = model, loss
        self._undo = ExitStack()
        self._undo.callback(keep_attributes(model))
        self._undo.enter_context(without_values(model, compute))
        self._blocks = shorten(model, self._undo)

    def close(self) -> None:
        """Restore the values of the model."""
        self._undo.close()

    def trace(self, batch: Mapping[str, Any], options: TraceOptions) -> Trace:
        """Trace a microbatch. `batch` holds real integers; of other tensors only shapes matter.

        Raises:
            ConfigError: for a model that cannot be run without values, with the operator or the reason.
            LayoutError: for a model that cannot be divided so.
        """
        put_back = keep_attributes(self.model)
        try:
            meter = _run(self.model, batch, self.loss, options)
        except ZeromeshError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self.model).__name__} cannot be run without values, so its memory and time cannot be predicted: "
                f"{summary(error)}; give the layout yourself"
            ) from error
        finally:
            put_back()
        return Trace(segments=tuple(expand(meter.segments(), self._blocks)))

    def plan(self, zero: ZeroOptions, options: TraceOptions) -> ModelPlan:
        """Divide the model of one tensor rank into units. Equal blocks have the same specs.

        Raises:
            LayoutError: for a model that cannot be divided so.
        """
        divided = _divide(self.model, TracedExchange(options.tensor), options)
        try:
            # Pipeline chunks keep small blocks as separate units, which is needed here.
            cuts = ModelCuts(parts={} if divided is None else divided.parts, chunks=2)
            found = plan_model(self.model, options.compute, GroupRules(zero.optimizer).group_of, cuts)
        finally:
            if divided is not None:
                divided.restore()
        units = {unit.module: unit for unit in found.units}
        stands = {stand for _, stand in self._blocks}
        lists: dict[str, list[UnitPlan]] = {}
        for name, stand in self._blocks:
            if stand in units:
                lists.setdefault(stand.rpartition(".")[0], []).append(replace(units[stand], module=name))
        # The blocks of a list follow each other at the place of the first: prefetching follows the order of units.
        order = [lists.pop(name.rpartition(".")[0], []) if name in stands else [unit] for name, unit in units.items()]
        return ModelPlan(units=tuple(chain(*order)))


def trace_microbatch(model: nn.Module, batch: Mapping[str, Any], loss: Loss, options: TraceOptions) -> Trace:
    """Trace one microbatch of a model, and restore the model. Raises as `Tracer.trace` does."""
    tracer = Tracer(model, loss, options.compute)
    try:
        return tracer.trace(batch, options)
    finally:
        tracer.close()


def _run(model: nn.Module, batch: Mapping[str, Any], loss: Loss, options: TraceOptions) -> Meter:
    exchange = TracedExchange(options.tensor)
    divided = _divide(model, exchange, options)
    undo: list[Callable[[], object]] = []
    try:
        model.train()
        known = set(block_modules(model))
        blocks = {name: block for name, block in model.named_modules() if block in known}
        if options.recompute != "none":
            enable_activation_checkpointing(model, options.recompute, blocks=block_modules(model))
        meter = exchange.meter = Meter()
        for name, block in blocks.items():
            undo.append(override(block, "forward", partial(meter.run, name, block.forward)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                undo.append(hook_before(parameter, forget_gradient).remove)
        for tensor in (*model.parameters(), *model.buffers()):
            meter.know(tensor)
        with meter, kernels_of(options.device):
            total = loss(model, dict(batch), seed=1.0)
            meter.turn()
            if total.requires_grad:
                total.backward(torch.ones_like(total))  # type: ignore[no-untyped-call]
            del total
            meter.close()
        return meter
    finally:
        while undo:
            undo.pop()()
        if divided is not None:
            divided.restore()


def _divide(model: nn.Module, exchange: TracedExchange, options: TraceOptions) -> Parallelized | None:
    if options.tensor == 1:
        return None
    plan = plan_tensor(model, options.tensor, dict(options.rules) or None)
    return Parallelized(model, exchange, plan, sequence=options.sequence)


def forget_gradient(parameter: Tensor) -> None:
    """Free a gradient as soon as it is computed, as the engine does."""
    parameter.grad = None
