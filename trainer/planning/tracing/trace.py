"""The trace of one microbatch: memory and work of each block, from a run of the user's model without values.

Floating-point tensors are on the meta device and have a shape alone; integers are real, so that masks and positions are correct,
and experts are chosen evenly. A dispatch mode sees every operator, and counts live bytes, as PyTorch's allocator would, and work.
Of equal blocks at most two run. Gradients of parameters are freed at once, since the memory model of states counts them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.context.shares import Context
from zeromesh.errors import ConfigError, ZeromeshError, summary
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import ZeroOptions
from zeromesh.overrides import override
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.trainer.attention.packed_attention import PackedAttention
from zeromesh.trainer.losses.losses import Loss
from zeromesh.trainer.models import prepare
from zeromesh.trainer.models.prepare import Mode
from zeromesh.trainer.planning.tracing.meter import AFTER, Meter, Segment, TracedExchange, Work, kernels_of
from zeromesh.units.plan import ModelCuts, UnitPlan, block_modules, plan_model
from zeromesh.zero.hooks import hook_before

Batch = Mapping[str, Any]


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
        return sum((each.forward + each.backward for each in self.segments), Work())


class Tracer:
    """Traces microbatches of one whole model, whose values, if any, are removed until `close`."""

    def __init__(
        self, model: nn.Module, loss: Loss, compute: torch.dtype, *, device: str, rules: Mapping[str, str] | None = None
    ) -> None:
        """`loss` is the whole model's; parameters get the dtype `compute`. `device` is a kind, `rules` are styles by pattern."""
        self.model, self.loss, self._compute, self._device, self._rules = model, loss, compute, device, rules or None
        self._undo = ExitStack()
        self._undo.callback(prepare.keep_attributes(model))
        self._token_wise = cache(partial(prepare.find_token_wise, model))
        _remove_values(model, compute, self._undo)
        self._blocks = _remove_equal_blocks(model, self._undo)

    def close(self) -> None:
        self._undo.close()

    def trace(
        self, batch: Batch, *, tensor: int = 1, sequence: bool = False, recompute: Mode = "none", tiles: int = 0, context: int = 1
    ) -> Trace:
        """Trace a microbatch on one of `tensor` x `context` ranks, in `tiles` of so many tokens, if any. `batch` has real
        integers; of other tensors only shapes matter. Raises `ConfigError` for a model that cannot run without values or in tiles,
        and `LayoutError` for one that is indivisible."""
        exchange = TracedExchange(tensor)
        with ExitStack() as undo:
            undo.callback(prepare.keep_attributes(self.model))
            try:
                self._divide(exchange, sequence, undo)
                if tiles:
                    prepare.use_tiles(self.model, tiles, self._token_wise())
                meter = self._run(batch, exchange, recompute, context, undo)
            except ZeromeshError:
                raise
            except Exception as error:
                why = "cannot be run without values, so its memory and time cannot be predicted"
                raise ConfigError(f"{type(self.model).__name__} {why}: {summary(error)}; give the layout yourself") from error
        return Trace(segments=tuple(self._of_whole_model({each.name: each for each in meter.segments()}, "name")))

    def plan(self, zero: ZeroOptions, tensor: int) -> Sequence[UnitPlan]:
        """Return the units of one tensor rank; equal blocks have the same specs. Raises `LayoutError` for an indivisible model."""
        with ExitStack() as undo:
            divided = self._divide(TracedExchange(tensor), False, undo)
            # A mesh with pipeline chunks is assumed, for which small blocks are separate units.
            cuts = ModelCuts(parts={} if divided is None else divided.parts, chunks=2)
            found = plan_model(self.model, self._compute, GroupRules(zero.optimizer).group_of, cuts, zero.weights)
        return self._of_whole_model({unit.module: unit for unit in found}, "module")

    def _of_whole_model(self, found: Mapping[str, Any], field: str) -> list[Any]:
        """Return what was found by module of the shortened model, that of a block for all that it stands for, with their names as
        `field`. All blocks of a list come where its first one was, since units are prefetched in this order."""
        stands, lists = {stand for _, stand in self._blocks}, dict[str, list[Any]]()
        for name, stand in self._blocks:
            if stand in found:
                lists.setdefault(stand.rpartition(".")[0], []).append(replace(found[stand], **{field: name}))
        order = [lists.pop(name.rpartition(".")[0], []) if name in stands else [each] for name, each in found.items()]
        return list(chain(*order))

    def _divide(self, exchange: TracedExchange, sequence: bool, undo: ExitStack) -> Parallelized | None:
        if exchange.size == 1:
            return None
        divided = Parallelized(self.model, exchange, plan_tensor(self.model, exchange.size, self._rules), sequence=sequence)
        undo.callback(divided.restore)
        return divided

    def _run(self, batch: Batch, exchange: TracedExchange, recompute: Mode, context: int, undo: ExitStack) -> Meter:
        model = self.model.train()
        known = set(block_modules(model))
        blocks = {name: block for name, block in model.named_modules() if block in known}
        if recompute != "none":
            prepare.enable_activation_checkpointing(model, recompute, blocks=block_modules(model))
        meter = exchange.meter = Meter(self._device)
        for name, block in blocks.items():
            undo.callback(override(block, "forward", partial(meter.run, name, block.forward)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                undo.callback(hook_before(parameter, free_gradient).remove)
        for tensor in (*model.parameters(), *model.buffers()):
            meter.register_state(tensor)
        if context > 1:
            among = TracedExchange(context)
            among.meter, on_cpu = meter, self._device == "cpu"
            attention = PackedAttention(batch, model, shares=Context(exchange=among, heads_first=not on_cpu))
            attention.fused_on = ("cpu", "meta") if on_cpu else ()
            batch = attention.told()
            undo.enter_context(attention.in_force())
        with meter, kernels_of(self._device):
            total = self.loss(model, dict(batch), seed=1.0)
            meter.begin(AFTER, backward=True)
            if total.requires_grad:
                total.backward(torch.ones_like(total))  # type: ignore[no-untyped-call]
            del total
        return meter


def trace_microbatch(
    model: nn.Module, batch: Batch, loss: Loss, compute: torch.dtype, *, device: str = "cpu", **options: Any
) -> Trace:
    """Trace one microbatch of a model with the options of `Tracer.trace`, and restore the model."""
    with closing(Tracer(model, loss, compute, device=device)) as tracer:
        return tracer.trace(batch, **options)


def free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _remove_values(model: nn.Module, compute: torch.dtype, undo: ExitStack) -> None:
    """Put the model's floating-point tensors on the meta device, with parameters in the dtype `compute`."""
    made: dict[int, nn.Parameter] = {}
    counts = Counter(each.dtype for each in model.parameters() if each.is_floating_point())
    main = max(counts, key=counts.__getitem__, default=torch.float32)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, dtype=compute if parameter.dtype == main else parameter.dtype, device="meta")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            undo.callback(override(module._parameters, leaf, made[id(parameter)]))
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
                undo.callback(override(module._buffers, leaf, torch.empty_like(buffer, device="meta")))


def _remove_equal_blocks(model: nn.Module, undo: ExitStack) -> list[tuple[str, str]]:
    """Remove all but two of equal blocks from module lists; returns the names of every block, in order, and of its stand-in."""
    blocks = set(block_modules(model))
    found: list[tuple[str, str]] = []
    for path, module in list(model.named_modules()):
        children = list(module.named_children())
        own = [(name, child) for name, child in children if child in blocks]
        if not isinstance(module, nn.ModuleList) or len(own) < len(children) or not own:
            found += [(f"{path}.{name}".strip("."), f"{path}.{name}".strip(".")) for name, _ in own]
            continue
        kept: list[nn.Module] = []
        places: dict[object, list[int]] = {}  # of kept blocks, by kind
        for index, (_, child) in enumerate(own):
            alike = places.setdefault(_block_key(child), [])
            if len(alike) < 2 or index == len(own) - 1:
                alike.append(len(kept))
                kept.append(child)
            found.append((f"{path}.{index}", f"{path}.{alike[-1]}"))
        if len(kept) == len(own):
            continue
        parent_path, _, leaf = path.rpartition(".")
        undo.callback(override(model.get_submodule(parent_path)._modules, leaf, nn.ModuleList(kept)))
        configs = {id(each): each for every in model.modules() if (each := getattr(every, "config", None)) is not None}
        for config in configs.values():
            if getattr(config, "num_hidden_layers", None) == len(own):
                # The class's `attribute_map` maps this name to the configuration's field.
                config.num_hidden_layers = len(kept)
                undo.callback(setattr, config, "num_hidden_layers", len(own))
    return found


_INDEX_ATTRIBUTES = re.compile(r"idx|index|number|layer_id")


def _block_key(block: nn.Module) -> object:
    """Return a key that is equal for equal blocks: their modules, sizes and settings."""
    found = []
    for name, module in block.named_modules():
        sizes = [(leaf, tuple(each.shape), each.dtype, each.requires_grad) for leaf, each in module.named_parameters(recurse=False)]
        plain = [pair for pair in vars(module).items() if isinstance(pair[1], bool | int | float | str)]
        settings = [(key, repr(value)) for key, value in plain if not _INDEX_ATTRIBUTES.search(key)]
        found.append((name, type(module), tuple(sizes), tuple(sorted(settings))))
    return tuple(found)
