"""The options of an engine: precision, optimizer, offload and ZeRO, each checked when it is constructed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.comm.wire import BLOCK
from zeromesh.errors import ConfigError
from zeromesh.flat.codec import Codec
from zeromesh.flat.narrow_states import STATE_FORMATS, StateFormat
from zeromesh.intervals import ALIGNMENT
from zeromesh.offload import STAGING_BYTES, FileSettings, TierChoice
from zeromesh.offload.accelerator import device_memory, is_accelerator
from zeromesh.settings import keys

NO_GROUP = -1  # the optimizer group of a parameter that is never updated


class Placement(Enum):
    """The placement of a tensor over the ranks of an axis."""

    REPLICATED = "replicated"  # every rank holds the whole tensor
    PARTIAL = "partial"  # every rank holds a summand of the tensor
    SHARDED = "sharded"  # every rank holds its interval of the flattened tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    """The placements at one ZeRO stage: `accumulating` of gradients between microbatches, `gradients` of those of a whole step."""

    parameters: Placement
    accumulating: Placement
    gradients: Placement
    optimizer: Placement


_WHOLE, _PARTIAL, _SHARDED = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
STAGES: dict[int, Placements] = {
    0: Placements(parameters=_WHOLE, accumulating=_PARTIAL, gradients=_WHOLE, optimizer=_WHOLE),
    1: Placements(parameters=_WHOLE, accumulating=_PARTIAL, gradients=_SHARDED, optimizer=_SHARDED),
    2: Placements(parameters=_WHOLE, accumulating=_SHARDED, gradients=_SHARDED, optimizer=_SHARDED),
    3: Placements(parameters=_SHARDED, accumulating=_SHARDED, gradients=_SHARDED, optimizer=_SHARDED),
}
"""[Note: A stage is a row of data] The placement of states over the shard axis decides which collectives run, not which code.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Stages as placements follow
Megatron-FSDP's experimental rewrite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlan:
    """The optimizer states of a parameter, under the names of the optimizer class, found by a trial step."""

    states: dict[str, Any] = field(repr=False)
    """Examples: meta tensors, numbers, None, and tensor subclasses and objects made of these, such as GaLore's projectors."""
    tensors: dict[str, torch.Tensor]  # the plain tensors in them, by the names under which these are stored
    scalars: dict[str, Any]
    """The numbers in them, which may be 0-dim tensors. Those of a group that updates change are among them."""
    by_size: bool = False  # True if the states depend on a parameter's size, as in 8-bit and low-rank optimizers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimizerClass:
    """An optimizer that is run by its own class's `step`."""

    parts: tuple[tuple[Optimizer, Mapping[str, Any]], ...] = field(repr=False)  # the optimizer of each group, and it
    whole: bool  # True if its update needs whole tensors; otherwise it may update any elements separately
    has_modes: bool = False
    """True if it evaluates other weights than it trains, and its `eval` computes these, as Schedule-Free's does."""
    plans: Mapping[tuple[int, str], StatePlan]
    """The states of a parameter, by the index of its group and its name."""
    initial: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # numbers before updates, as APOLLO's seeds
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)  # Pieces have their attributes.
    sized: dict[tuple[int, tuple[int, ...]], StatePlan] = field(default_factory=dict, repr=False)  # by plan and shape


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(keys.OptimizerKeys):
    """The optimizer and its hyperparameters, with torch's names and, unlike in a configuration, torch's defaults but for `lr`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    own_class: OptimizerClass | None = None
    """The class to run instead of the optimizer of that name."""
    groups: tuple[Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)
    """The hyperparameters of each group, under the names of the optimizer's class; none: two groups, with and without decay."""
    members: tuple[tuple[str, ...], ...] = ()
    """The parameter names of each group, for user-defined groups; a parameter in no group is never updated."""

    @property
    def format(self) -> StateFormat:
        """The form of moments between updates."""
        return STATE_FORMATS[self.states]


@dataclass(frozen=True, kw_only=True)
class Precision(keys.PrecisionKeys):
    """The dtype of each role. `loss_scale` applies to float16 gradients only. Gradients are summed in `reduce`. Where it is
    bfloat16 and `master` fp32, they travel in bfloat16, summed in fp32. Raises `ConfigError` if either is less than `compute`."""

    compute: torch.dtype = torch.float32  # type: ignore[assignment]  # a configuration has its name
    master: torch.dtype = torch.float32  # type: ignore[assignment]
    reduce: torch.dtype = torch.float32  # type: ignore[assignment]
    compensated: bool = False
    """True if weights without a wider copy have a state with what was rounded off, which the next update adds (Kahan, "Further
    remarks on reducing truncation errors", 1965)."""
    loss_scale: keys.ScalerSettings | None = None

    def __post_init__(self) -> None:
        if self.masterless and (self.compute, self.reduce) != (torch.bfloat16, torch.float32):
            why = "precision.master none or kahan goes with precision.compute bfloat16 and precision.reduce float32"
            raise ConfigError(f"{why}, not with {self.compute} and {self.reduce}")
        problems = [
            f"precision.{role} is {dtype}, less than precision.compute {self.compute}"
            for role, dtype in (("master", self.master), ("reduce", self.sums))
            if dtype.itemsize < self.compute.itemsize
        ]
        if self.master.itemsize != self.sums.itemsize and not self.masterless:
            why = f"precision.master {self.master} and precision.reduce {self.reduce} differ: an update needs equal ones, or"
            problems.append(f"{why} gradients that travel in bfloat16 to master weights in float32")
        if problems:
            raise ConfigError(problems)

    @property
    def masterless(self) -> bool:
        """True if weights have no wider copy: they are widened for an update, and rounded after it."""
        return self.master is torch.bfloat16

    @property
    def sums(self) -> torch.dtype:
        """The dtype in which gradients are summed."""
        travels = self.reduce is torch.bfloat16 and self.compute in (torch.bfloat16, torch.float32)
        return self.master if travels and self.master is torch.float32 else self.reduce

    def table(self, optimizer: str, states: str = "float32") -> str:
        """Return one line naming the dtype of every role; `states` is `optimizer.states`."""
        dtypes = (self.compute, self.reduce, self.sums, self.master)
        compute, reduce, sums, master = (str(each).removeprefix("torch.") for each in dtypes)
        reduce = sums if sums == reduce else f"{sums} of what travels in {reduce}"
        scale = "dynamic loss scale" if self.loss_scale else "no loss scale"
        moments = sums if states == "float32" else states
        weights = "no master weights" if self.masterless else f"master weights {master}"
        weights += " but Kahan's compensation" if self.compensated else ""
        return f"precision: parameters and gradients {compute}, sums {reduce}, {weights}, {optimizer} moments {moments}, {scale}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeights:
    """The codec of frozen matrices, and patterns of the names of those that are not encoded."""

    codec: Codec
    skip: tuple[str, ...] = ()


STAGING_SHARE = 64
"""The fraction 1/64 of an accelerator's memory for the buffers of the update stream: 1.25 GiB of 80 GiB."""


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(keys.OffloadKeys):
    """The tiers of states between uses: master weights and moments (`optimizer`), gradient shards, and parameters at stage 3. The
    caller offloads `activations`, the block inputs that recomputation keeps for backward. `gradients` None follows the optimizer.
    `update` is the processor of offloaded states, `staging_bytes` bounds the buffers on the way to it; None: see `staging_on`."""

    optimizer: TierChoice = field(default_factory=TierChoice)
    gradients: TierChoice | None = None
    parameters: TierChoice = field(default_factory=TierChoice)
    activations: TierChoice = field(default_factory=TierChoice)
    files: FileSettings = field(default_factory=FileSettings, repr=False)  # Hosts may have paths of their own.
    in_place: bool = False
    """True if frozen parameters offloaded to files stay in the source's files, if these have the same bytes; neither is written."""
    staging_bytes: int | None = None

    def staging_on(self, device: torch.device) -> int:
        """Return the bytes of the buffers that bring offloaded states to `device` for their update: `staging_bytes`, or a default,
        which is larger for an accelerator: launching many short copies would take longer than the copies."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        return max(STAGING_BYTES, device_memory(device).total // STAGING_SHARE if is_accelerator(device) else 0)

    @property
    def gradients_at(self) -> TierChoice:
        """The tier where gradient shards rest."""
        return self.optimizer if self.gradients is None else self.gradients


@dataclass(frozen=True, kw_only=True)
class ZeroOptions(keys.ZeroKeys, keys.StepKeys, keys.TransportKeys):
    """The partitioning and overlap of an engine. Raises `ConfigError` for impossible combinations."""

    precision: Precision = field(default_factory=Precision)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    average: keys.AverageSettings | None = None
    outer: keys.OuterSettings | None = None
    """Brings replicas together after local steps; None: replicas sum the gradients of every step."""
    weights: EncodedWeights | None = None
    accumulation: int = 1
    clip_norm: float = 0.0
    optimizer_in_backward: bool = False
    gradient_slots: int = 2
    gradients_outlive: bool = False
    """True if gradient shards have memory of their own, so that another process can finish the update."""
    in_loop: bool = False  # True for a user's own loop, where an `accumulation` of 1 stands for any number of backwards.

    def __post_init__(self) -> None:
        budget: object = self.gathered_budget
        parameters, states, masterless = self.offload.parameters, self.optimizer.states, self.precision.masterless
        own, inside, key = self.optimizer.own_class, self.optimizer_in_backward, "optimizer.in_backward"
        whole = own is not None and own.whole
        narrow = "precision.master none or kahan" if masterless else f"optimizer.states {states}"
        durable = self.offload.durable
        partly = self.offload.optimizer != TierChoice(tier="file")
        wrong_budget = budget not in ("auto", None) and not (isinstance(budget, int) and budget >= 0)
        twice = self.evaluates_average and self.average is not None and self.average.decay
        narrowed, rounded = whole and (masterless or states != "float32"), masterless and self.average is not None
        narrow_average = self.evaluates_average and states != "float32"
        divided = self.replicas == "divided"
        problems = {
            "offload.durable needs states that are all on files; set offload.optimizer to file": durable and partly,
            f"offload.durable cannot run with {key}, which changes states early": durable and inside,
            "offload.durable cannot run with an optimizer of its own class": durable and own is not None,
            f"zero.stage is {self.stage}; it must be one of {sorted(STAGES)}": self.stage not in STAGES,
            f"zero.prefetch is {self.prefetch}; it must be 0 or more units": self.prefetch < 0,
            f"zero.gathered_budget is {budget!r}; it must be 0 or more bytes, or auto, as is None": wrong_budget,
            f"offload.parameters is {parameters.tier} at stage {self.stage}: only stage 3 gathers parameters around their use; "
            "set zero.stage to 3, or offload.parameters to none": parameters.uses_tier and self.stage != 3,
            "zero.replicas is divided, and zero.stage 0 divides nothing; set that to 1, 2 or 3": divided and not self.stage,
            "zero.replicas divided cannot run with an optimizer that needs whole tensors": divided and whole,
            f"{key} cannot run with zero.replicas divided, which updates after a step": divided and inside,
            f"{key} needs run.clip_norm 0: the norm is known only after backward": inside and self.clip_norm,
            f"{key} cannot run with a loss scale, which may take a step back": inside and self.precision.loss_scale,
            f"{key} cannot run with an optimizer that needs whole tensors": inside and whole,
            f"{key} needs run.on_nonfinite: stop: no step is left to skip": inside and self.on_nonfinite != "stop",
            "ema.decay averages weights, and so does the optimizer itself; set it to 0, or take another optimizer": twice,
            f"{narrow} is for optimizers that work element by element, and this one needs whole tensors": narrowed,
            "precision.master none or kahan does not go with averaged weights, which bfloat16 would round": rounded,
            "parallel.sync_every above 1 is for the optimizers adamw, adam, adagrad and sgd": self.outer and own is not None,
            "optimizer.states has to be float32 for an optimizer whose states are weights that it evaluates": narrow_average,
        }
        if found := [problem for problem, holds in problems.items() if holds]:
            raise ConfigError(found)

    @property
    def alignment(self) -> int:
        """The elements of which parameters and shards begin at a multiple: whole blocks of moments that rest in blocks, and of what
        replicas may encode, so that rows that end where a tier does begin at whole blocks of the codec, too."""
        encodes = self.replicas == "divided" and self.wire != "exact"
        return max(self.optimizer.format.block or ALIGNMENT, BLOCK if encodes else ALIGNMENT)

    def dividing(self, replicas: int) -> int:
        """Return the number of ranks, of `replicas` that hold one shard, which divide its states among them."""
        return replicas if self.replicas == "divided" else 1

    @property
    def evaluates_average(self) -> bool:
        """True if the optimizer's class evaluates and saves other weights than it trains, which are kept as averages."""
        return self.optimizer.own_class is not None and self.optimizer.own_class.has_modes

    @property
    def placements(self) -> Placements:
        """The placements of the stage, adjusted for gradients that are reduced once per step."""
        row = STAGES[self.stage]
        return replace(row, accumulating=Placement.PARTIAL) if self.reduce_once else row

    @property
    def gradients_pass_through(self) -> bool:
        """True if a gradient shard exists only from its reduction to its update, within one backward."""
        return self.optimizer_in_backward and self.accumulation == 1

    def gradients_keep_memory(self, device: torch.device) -> bool:
        """Return True if gradient shards have memory of their own from step to step, on any tier, in a process that computes on
        `device`: sums over several microbatches, and offloaded shards. Otherwise they use memory just freed by activations."""
        resting = not self.optimizer_in_backward and self.offload.gradients_at.leaves_device(device)
        return self.accumulation > 1 or resting or self.gradients_outlive

    def resting_gradients(self, part: int, shard: int, device: torch.device) -> int:
        """Return the elements of a gradient shard's lasting memory: of the `part` that this rank updates where only that rests
        there, on another tier; else of the whole `shard`, which is reduced into it or rests between microbatches."""
        once = self.accumulation == 1 and not self.in_loop
        return part if once and self.offload.gradients_at.leaves_device(device) else shard

    @property
    def sums_before_reducing(self) -> bool:
        """True if each rank sums the gradients of its own microbatches before they are reduced, once per step."""
        return self.accumulation > 1 and self.placements.accumulating is Placement.PARTIAL

    def wire_dtype(self, own: torch.dtype, *, on_device: bool) -> torch.dtype:
        """Return the dtype in which gradients of parameters of dtype `own` travel: `own` where ranks add the received tensors, that
        of the sum where it holds earlier microbatches or a device's collective adds; but nothing wider than `precision.reduce`."""
        reduce = self.precision.reduce
        found = self.precision.sums if on_device or self.sums_before_reducing else own
        return reduce if reduce.itemsize < found.itemsize else found
