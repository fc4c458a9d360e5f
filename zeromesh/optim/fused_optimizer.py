"""torch's fused optimizers on the flat shards of buckets, one by one: inside backward, or in parts that are streamed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from zeromesh.errors import ConfigError, PhaseError
from zeromesh.flat.layout import ShardSegment
from zeromesh.flat.narrow_states import LANES, Rounding, bits_of_shard, round_into
from zeromesh.intervals import Interval
from zeromesh.offload import Purpose, TieredTensor, Tiers
from zeromesh.offload.accelerator import on_accelerator
from zeromesh.options import NO_GROUP, OptimizerSettings, ZeroOptions
from zeromesh.units.unit import Bucket

_WIDENED_ELEMENTS = 1 << 16  # the elements that are widened at a time, few enough for a processor's cache
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")  # the moments that are averages of squares
COMPENSATION = "master_compensation"  # the state of weights in bfloat16 that has what was rounded off
Hyperparameters = Mapping[str, Any]
"""The settings of one parameter group, under torch's names: `lr`, `weight_decay`, and the optimizer's further ones."""


class GroupRules:
    """Assigns parameters to optimizer groups by name: the user's groups, or else group 0 with weight decay and 1 without."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._names = frozenset(settings.no_decay)
        self._globs = tuple(pattern for pattern in settings.no_decay if set("*?[").intersection(pattern))
        self._members = {name: number for number, names in enumerate(settings.members) for name in names}

    def group_of(self, fqn: str) -> int:
        """Return the number of a parameter's group, by its name; `NO_GROUP` for a parameter unknown to the user's optimizer."""
        if self._members:
            return self._members.get(fqn, NO_GROUP)
        return int(fqn in self._names or any(fnmatchcase(fqn, pattern) for pattern in self._globs))


OPTIMIZERS: dict[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "adamw": (AdamW, ("exp_avg", "exp_avg_sq")),
    "adam": (Adam, ("exp_avg", "exp_avg_sq")),
    "sgd": (SGD, ()),
    "adagrad": (Adagrad, ("sum",)),
}
"""The optimizers whose updates `fused_update` computes: torch's class, and torch's names of its moments."""


def hyperparameters(settings: OptimizerSettings, lr_factor: float = 1.0, momentum: float | None = None) -> list[dict[str, Any]]:
    """Return the settings of each group, or else of decayed parameters and of the others, for a step whose schedule multiplies the
    learning rate by `lr_factor`. `momentum` replaces that of SGD, or the first of Adam's betas."""
    common = {name: getattr(settings, name) for name in ("lr", "betas", "eps", "momentum")}
    groups = settings.groups or [{**common, "weight_decay": decay} for decay in (settings.weight_decay, 0.0)]
    found = [{**group, "lr": group["lr"] and group["lr"] * lr_factor} for group in groups]  # Adafactor's may be None.
    for group in found if momentum is not None else ():
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        if "momentum" in group:
            group["momentum"] = momentum
    return found


def state_dtype(example: Tensor, wide: torch.dtype) -> torch.dtype:
    """Return the dtype of a class's state for weights updated in `wide`: that of the trial's `example`, but `wide` for float64."""
    return wide if example.dtype == torch.float64 else example.dtype


def moment_dtypes(settings: OptimizerSettings, wide: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of the moments in an update in dtype `wide`, by torch's names. Each has one element per weight."""
    if settings.own_class is not None:
        plans = [] if settings.own_class.whole else settings.own_class.plans.values()
        return {name: state_dtype(each, wide) for plan in plans for name, each in plan.tensors.items()}
    if settings.name not in OPTIMIZERS:
        raise ConfigError(f"optimizer.name is {settings.name!r}, and not {' or '.join(OPTIMIZERS)}; give own_class")
    momentum = ("momentum_buffer",) if settings.name == "sgd" and settings.momentum else ()
    return dict.fromkeys((*OPTIMIZERS[settings.name][1], *momentum), wide)


UnshardedState = tuple[str, torch.dtype, tuple[int, ...], TieredTensor | None]
"""A state that is not divided as its parameter is: name, dtype, shape, and the elements where a rank has them."""


class BucketOptimizer:
    """The optimizer of one bucket's shard. `moments`, by torch's names, are `[shard]` each, and zero before the first step. An
    update is element by element, so any interval may be updated at a time, on any device that holds its tensors."""

    whole: ClassVar[bool] = False  # True if `step` takes all elements at once, on all ranks of the shard group

    def __init__(self, bucket: Bucket, options: ZeroOptions, tiers: Tiers) -> None:
        self._settings, self._wide, self._seed = options.optimizer, options.precision.sums, options.seed
        self._bucket, self._compensated = bucket, options.precision.compensated
        self._dtypes = moment_dtypes(self._settings, self._wide)
        self.moments = dict[str, TieredTensor]()
        at_random = options.precision.masterless and not self._compensated
        self._rounding: dict[int, Rounding] = {0: round_into} if at_random else {}
        """The random rounding of the tensors of an update, by their numbers, to what they are at rest."""
        numel, at, form = bucket.master.numel, options.offload.optimizer, self._settings.format
        for number, (name, wide) in enumerate(self._dtypes.items(), 2):
            label, squares = f"{name} of {bucket.name}", name in _SQUARES
            self.moments[name], rounding = form.allocate(numel, wide, tiers, at, label, squares=squares)
            self._rounding |= {number: rounding} if rounding is not None else {}
        if self._compensated:
            label = f"compensation of {bucket.name}"
            self.moments[COMPENSATION] = tiers.allocate(numel, options.precision.master, at, Purpose.MOMENTS, label)
        self.steps = [0] * len(bucket.layout.slots)
        """The number of updates of each parameter. As in torch, a parameter frozen for a while continues its own count."""
        self.update_segments()

    def whole_states(self, number: int) -> Iterable[UnshardedState]:
        """Return the states of parameter `number` of the bucket that are not divided as its elements are; none here."""
        return ()

    def update_segments(self) -> None:
        """Find out again which parameters an update changes, and the segments of the shard that are updated at once."""
        bucket = self._bucket
        self._missing = bucket.missing
        self._updated = [trained and n not in bucket.missing for n, trained in enumerate(bucket.training)]
        # Neighbours are updated at once; but a class counts the steps of each parameter, and updates it by a call of its own.
        apart = self._settings.own_class is not None
        keys = [n if apart else key for n, key in enumerate(zip(self._updated, self.steps, strict=True))]
        self._segments = [each for each in bucket.layout.segments(bucket.interval, keys) if each.group != NO_GROUP]

    def begin(self) -> None:
        """Count one more update for each parameter that it will change."""
        if self._bucket.missing != self._missing:
            self.update_segments()
        self.steps = [count + updated for count, updated in zip(self.steps, self._updated, strict=True)]

    def step(self, start: int, tensors: Sequence[Tensor], groups: Sequence[Hyperparameters]) -> None:
        """Update elements of the shard from `start` on: `tensors` are master weights, gradients and moments, each `[elements]`.
        Those in fewer bits are updated as gradients' sums are, and rounded at random, or weights to the nearest, compensated."""
        if not (self._rounding or self._compensated):
            self._step(start, tensors, groups)
            return
        dtypes = [self._wide, tensors[1].dtype, *self._dtypes.values(), *[self._wide] * self._compensated]
        for first in range(0, len(tensors[0]), _WIDENED_ELEMENTS):
            parts = [each[first : first + _WIDENED_ELEMENTS] for each in tensors]
            wide = [each.to(dtype) for each, dtype in zip(parts, dtypes, strict=True)]
            if self._compensated:
                wide[0] += wide.pop()
            self._step(start + first, wide, groups)
            if self._compensated:
                for segment, (weight, rest, exact) in self._parts(start + first, [parts[0], parts[-1], wide[0]]):
                    if self._updated[segment.number]:
                        rest.copy_(exact - weight.copy_(exact))
            if self._rounding:
                where, bucket = Interval(start=start + first, end=start + first + len(parts[0])), self._bucket
                bits = bits_of_shard(bucket.layout, bucket.interval, where, self.steps, self._seed, parts[0].device)
                for number, round_at_random in self._rounding.items():
                    round_at_random(parts[number], wide[number], bits, number % LANES)

    def _step(self, start: int, tensors: Sequence[Tensor], groups: Sequence[Hyperparameters]) -> None:
        for segment, parts in self._parts(start, tensors):
            if self._updated[segment.number]:
                self._update_part(segment.number, groups[segment.group], parts)

    def _parts(self, start: int, tensors: Sequence[Tensor]) -> Iterator[tuple[ShardSegment, list[Tensor]]]:
        """Cut tensors, whose elements are those of the shard from `start` on, into the parts of its segments."""
        for segment in self._segments:
            first, last = max(start, segment.where.start), min(start + len(tensors[0]), segment.where.end)
            if first < last:
                yield segment, [each[first - start : last - start] for each in tensors]

    def evaluated(self, start: int, weights: Tensor, moments: Sequence[Tensor], groups: Sequence[Hyperparameters]) -> Tensor:
        """Return the weights to evaluate with, of elements of the shard from `start` on: those that are trained, here."""
        return weights

    def _update_part(self, number: int, group: Hyperparameters, tensors: Sequence[Tensor]) -> None:
        """Update in place elements of parameters that all have the group and the step count of parameter `number`."""
        master, grad, *moments = tensors
        fused_update(self._settings.name, group, master, grad, moments, self.steps[number] - 1)


def fused_update(name: str, group: Hyperparameters, master: Tensor, grad: Tensor, moments: Sequence[Tensor], updates: int) -> None:
    """Update `master` and `moments`, `[elements]` like `grad`, in place by torch's fused kernels, after `updates` earlier ones."""
    common = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "maximize": group.get("maximize", False)}
    fused = name != "adagrad" or not on_accelerator(master)  # Not every device has a fused kernel for adagrad.
    # Created on the device that reads it: a copy would make the host wait for the device.
    steps = [torch.full((), float(updates), device=master.device if fused else torch.device("cpu"))]
    with torch.no_grad():
        if name == "sgd":
            if group.get("momentum") and not moments:
                raise PhaseError("SGD has momentum now and had none when its states were made; begin with momentum")
            common |= {each: group.get(each, 0.0) for each in ("momentum", "dampening")}
            common["nesterov"] = group.get("nesterov", False)
            sgd([master], [grad], list(moments) or [None], fused=True, **common)
        elif name == "adagrad":
            common |= {"lr_decay": group.get("lr_decay", 0.0), "eps": group["eps"]}
            adagrad([master], [grad], list(moments), steps, fused=fused, **common)
        else:
            kind = adamw if name == "adamw" else adam
            first, second = moments
            common |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"], "amsgrad": False}
            kind([master], [grad], [first], [second], [], steps, fused=True, **common)
