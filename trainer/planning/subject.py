"""The subject of a plan: a model, its loss and its data, and cached results of traces and arithmetic about them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise, product
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zeromesh.errors import ConfigError, DataError, LayoutError, counted, some
from zeromesh.flat.layout import BucketLayout, ParameterPart, ParameterSpec, Region, UnitLayouts
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.pipeline.stages.build import block_costs, plan_cut
from zeromesh.pipeline.stages.model_anatomy import examine
from zeromesh.tensor.plan.layer_plan import inside
from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements
from zeromesh.trainer.data.tokenizer import BYTES
from zeromesh.trainer.losses.losses import Loss
from zeromesh.trainer.models.flops import CHOSEN
from zeromesh.trainer.models.prepare import Mode
from zeromesh.trainer.models.tensor_trial import require_equal_when_divided, require_equal_when_spread
from zeromesh.trainer.models.user_model import positive, require_layout_fits, text_part
from zeromesh.trainer.planning.layouts import Layout, with_layout
from zeromesh.trainer.planning.tracing.meter import Segment, Work
from zeromesh.trainer.planning.tracing.trace import Trace, Tracer
from zeromesh.trainer.setup.engine_options import engine_options, options_for_model
from zeromesh.trainer.setup.model import check_sequence_shards
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import ROOT, UnitPlan, experts_of

_TRACED_SAMPLES = (1, 2)
"""The sizes of traced microbatches, in samples; other sizes are extrapolated, since memory and work are linear in the size."""
T = TypeVar("T")
Batches = Callable[[int], Mapping[str, Any]]  # Makes a microbatch of the given number of samples.


class Subject:
    """A model that is planned. `close` restores the model."""

    def __init__(self, model: nn.Module, loss: Loss, config: TrainerConfig, batches: Batches, *, device: str = "cpu") -> None:
        """`model` is whole, with or without values; `device` is the kind of device of the run."""
        self.config = config
        self.model_name = type(model).__name__
        self.parameters = sum(each.numel() for each in model.parameters())
        self.zero = options_for_model(engine_options(config, accumulation=1), config, model)
        meshes = [MeshShape(tensor=tensor, shard=shard) for tensor, shard in product((1, 2), (1, 2))]
        fits = partial(require_layout_fits, model, trains=True)
        self._refused_meshes = {mesh: _refusal_of(partial(fits, mesh))[0] for mesh in meshes}
        """The reason why the model cannot be trained (or empty), by mesh, where 2 ranks of an axis stand for 2 or more."""
        self._refusals: dict[Layout, str] = {}
        self.rows = 1
        """The samples in one of a layout's `micro`: with `batch.tokens` those that fill it, each as long as the first sample."""
        if config.batch.tokens is not None and "input_ids" in (first := batches(1)):
            self.rows = max(1, config.batch.tokens // first["input_ids"].shape[-1])
        self._batches: Batches = lambda micro: batches(micro * self.rows)
        self._cut_refusal, self._anatomy = _refusal_of(lambda: examine(model, batches(1)))
        self._costs = None if self._anatomy is None else block_costs(model, self._anatomy, config.parallel.balance)
        rules = config.parallel.plan or {}
        self._experts = experts_of(model)
        inputs, config = batches(1).get("input_ids"), text_part(getattr(model, "config", None))
        chosen, hidden = (positive(config, *names) if self._experts else 0 for names in (CHOSEN, ("hidden_size",)))
        self.expert_layers, self.expert_bytes = len(self._experts), 0
        """The modules of experts, and the bytes of the rows of one of a layout's `micro` that a rank sends to experts of one."""
        if inputs is not None and self._experts:
            self.expert_bytes = self.rows * inputs.shape[-1] * chosen * hidden * self.zero.precision.compute.itemsize
        self.needs_whole = self.zero.optimizer.own_class is not None and self.zero.optimizer.own_class.whole
        self._tracer = tracer = Tracer(model, loss, self.zero.precision.compute, device=device, rules=rules)
        self._traces: Callable[..., tuple[str, Trace | None]] = cache(partial(_refusal_of, self._trace))
        self.cut = cache(self._cut)  # Cuts of the blocks, by number of stages.
        self.units = cache(lambda tensor: tracer.plan(self.zero, tensor))
        """All units of a tensor rank; raises `LayoutError` for a model that cannot be divided over tensor ranks."""
        self.stage_units = cache(self._stage_units)
        self._shared_layouts: dict[tuple[int, ...], UnitLayouts] = {}
        self._layouts = cache(partial(_layouts_of, alignment=self.zero.alignment))

    def close(self) -> None:
        self._tracer.close()

    @property
    def blocks(self) -> int:
        return 0 if self._anatomy is None else self._anatomy.count

    def mesh_refusal(self, *, tensor: int = 1, pipeline: int = 1, data: int = 1) -> str:
        """Return the reason why a run refuses the model on a mesh, from the run's own checks; empty if it is accepted."""
        mesh = MeshShape(tensor=min(2, tensor * pipeline), shard=min(2, data))
        refused = self._refused_meshes[mesh] or (pipeline > 1 and self._cut_refusal) or (tensor > 1 and self._unequal)
        if tensor > 1 and self.needs_whole:
            refused = refused or f"{self.config.optimizer.name} needs whole tensors"
        return refused or _refusal_of(lambda: self.units(tensor))[0]

    def refusal(self, layout: Layout) -> str:
        """Return the reason why a run refuses a layout, for its mesh or for keys that conflict; empty if it is accepted."""
        # No check of the configuration depends on the sizes of data axes, but for whether there are several replicas.
        key = replace(layout, replicate=min(2, layout.replicate), shard=1, accumulation=1)
        if key not in self._refusals:
            config = with_layout(self.config, layout)
            shares = _refusal_of(lambda: check_sequence_shards(config, self._batches(1)))[0]
            self._refusals[key] = shares or "; ".join(disagreements(config))
        refused = self.mesh_refusal(tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data)
        balance, audits = self.config.batch.balance, self.config.recovery.audit_steps
        if not isinstance(balance, str) and len(balance) != layout.data:
            refused = refused or f"batch.balance has {counted(len(balance), 'number')}, one for each data rank"
        if audits and (layout.data == 1 or layout.expert > 1):
            refused = refused or "recovery.audit_steps compares data ranks that have the same experts"
        if layout.expert > 1 and self.needs_whole:
            refused = refused or f"{self.config.optimizer.name} needs whole tensors"
        if layout.expert not in self.expert_sizes(layout.expert):
            which = some(self._experts) if self._experts else "no experts"
            refused = refused or self._unequal_experts or f"{layout.expert} ranks cannot have equally many of {which}"
        return refused or self._refusals[key]

    def expert_sizes(self, ranks: int) -> list[int]:
        """Return the numbers of ranks, up to `ranks`, over which experts can be spread."""
        sizes = [each for each in range(2, ranks + 1) if not any(count % each for count in self._experts.values())]
        return [1, *sizes] if self._experts and sizes and not self._unequal_experts else [1]

    @cached_property
    def _unequal_experts(self) -> str:
        return _refusal_of(lambda: require_equal_when_spread(self._tracer.model))[0]

    @cached_property
    def _unequal(self) -> str:
        rules = self.config.parallel.plan or {}
        return _refusal_of(lambda: require_equal_when_divided(self._tracer.model, rules, sequence=False))[0]

    def can_trace(self, tensor: int, *, sequence: bool = False, recompute: Mode = "none", context: int = 1) -> bool:
        """True if blocks support sequence or context parallelism or activation checkpointing, as the options of a trace say."""
        return not self._traces(tensor, 1, sequence, recompute, context)[0]

    def trace(self, tensor: int, micro: int, sequence: bool, recompute: Mode, context: int = 1) -> Trace:
        """Return the trace of a microbatch of `micro` samples on one of `tensor` x `context` ranks. Raises `LayoutError`."""
        reason, found = self._traces(tensor, micro, sequence, recompute, context)
        if found is None:
            raise LayoutError(reason)
        return found

    def _trace(self, tensor: int, micro: int, sequence: bool, recompute: Mode, context: int) -> Trace:
        if micro in _TRACED_SAMPLES:
            how: dict[str, Any] = {"tensor": tensor, "sequence": sequence, "recompute": recompute, "context": context}
            return self._tracer.trace(self._batches(micro), tiles=self.config.model.tile_tokens or 0, **how)
        one, two = (self.trace(tensor, size, sequence, recompute, context) for size in _TRACED_SAMPLES)
        return _extrapolated(one, two, micro)

    def _cut(self, stages: int) -> tuple[range, ...]:
        given = self.config.parallel.stages or ()
        if stages == 1:
            counts: Sequence[int] = (len(self.trace(1, 1, False, "none", 1).segments) - 2,)
        elif self._costs is None:
            raise LayoutError(self._cut_refusal)
        else:
            counts = plan_cut(self._costs, stages, given if len(given) == stages else ())
        return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))

    def segments(self, trace: Trace, stage: int, cut: Sequence[range]) -> list[Segment]:
        before, *blocks, after = trace.segments
        own = [blocks[index] for index in cut[stage]]
        return [*([before] if stage == 0 else []), *own, *([after] if stage == len(cut) - 1 else [])]

    def _stage_units(
        self, tensor: int, stages: Sequence[int], cut: Sequence[range], parts: int, expert: int = 1, dividers: int = 1
    ) -> UnitLayouts:
        """Return the layouts of the units of a rank with these stages, for `parts` ranks that share states, over `expert` of which
        experts are spread, and of which each shares its shard with `dividers`; equal ones are one object."""
        units: Sequence[UnitPlan] = self.units(tensor)
        if len(cut) > 1 and (anatomy := self._anatomy) is not None:
            blocks, last = f"{anatomy.blocks}.", len(cut) - 1
            own = {f"{blocks}{index}" for stage in stages for index in cut[stage]}
            ends = (*(anatomy.before if 0 in stages else ()), *(anatomy.after if last in stages else ()))
            every, units = units, []
            for unit in every:
                specs = [each for each in unit.specs if any(inside(name, ends) for name in (each.fqn, *each.aliases))]
                if unit.module in own:
                    units.append(unit)
                elif not unit.module.startswith(blocks) and (specs or unit.module == ROOT):
                    units.append(replace(unit, specs=tuple(specs)))
        # Equal blocks share one tuple of specs, and so one cached list of layouts.
        layouts = [self._layouts(unit.specs, parts, expert, dividers, frozenset(self._experts)) for unit in units]
        return self._shared_layouts.setdefault(tuple(map(id, layouts)), layouts)


def _layouts_of(
    specs: tuple[ParameterSpec, ...], parts: int, expert: int, dividers: int, experts: Collection[str], alignment: int
) -> list[BucketLayout]:
    def spread(spec: ParameterSpec) -> ParameterSpec:
        if expert == 1 or spec.fqn.rpartition(".")[0] not in experts:
            return spec
        shape = (spec.shape[0] // expert, *spec.shape[1:])
        return replace(spec, shape=shape, part=ParameterPart(region=Region.whole(shape), holders=(0,), experts=True))

    plan = [UnitPlan(module=ROOT, specs=tuple(map(spread, specs)))]
    return plan_layouts(plan, parts, alignment, experts=expert, dividers=dividers)[0]


def _refusal_of(call: Callable[..., T], *args: Any) -> tuple[str, T | None]:
    try:
        return "", call(*args)
    except (ConfigError, DataError, LayoutError) as error:
        return str(error), None


def _extrapolated(one: Trace, other: Trace, micro: int) -> Trace:
    """Extrapolate linearly from the traces of one and two samples to `micro` samples."""

    def line(first: Any, second: Any) -> Any:
        if isinstance(first, Work):  # Equal blocks share one `Work` object, and so one result.
            return works.get(id(first)) or works.setdefault(id(first), work(first, second))
        return first if isinstance(first, str) else first + (micro - 1) * (second - first)

    def work(first: Work, second: Work) -> Work:
        if len(first.products) != len(second.products):
            # The number of products differs if the model loops over tokens, as the chunked loss does.
            return sum([second] * (micro // 2), Work())
        pairs = {each.name: (getattr(first, each.name), getattr(second, each.name)) for each in fields(Work)}
        return Work(**{name: pytree.tree_map(line, *pair) for name, pair in pairs.items()})

    works: dict[int, Work] = {}
    pairs = zip(one.segments, other.segments, strict=True)
    names = [each.name for each in fields(Segment)]
    values = ({name: line(getattr(a, name), getattr(b, name)) for name in names} for a, b in pairs)
    return Trace(segments=tuple(Segment(**each) for each in values))


def token_batches(config: TrainerConfig) -> Batches:
    """Return a factory of token microbatches for the configuration's task. Raises `ConfigError` for a task without text data."""
    head, length = config.model.head, config.data.sequence_length
    single = head in ("sequence_classification", "question_answering")
    if not single and head not in ("causal_lm", "masked_lm", "seq2seq_lm", "token_classification"):
        why = f"{head}: what its data look like is not known from the configuration alone; plan it through the trainer"
        raise ConfigError(f"{why}, which has them: Trainer(..., train_dataset=...).plan()", where="model.head")

    def batches(micro: int) -> dict[str, Any]:
        # Token 1, as no architecture treats it as padding against the mask.
        tokens = torch.ones(micro, length, dtype=torch.long)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if config.data.tokenizer in (None, BYTES) and head == "causal_lm":
            batch.pop("attention_mask")
        targets = ("start_positions", "end_positions") if head == "question_answering" else ("labels",)
        batch |= dict.fromkeys(targets, torch.zeros(micro, dtype=torch.long) if single else torch.zeros_like(tokens))
        if config.data.separates:
            batch["position_ids"] = torch.arange(length).expand(micro, length).contiguous()
        return batch

    return batches
