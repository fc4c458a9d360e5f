"""torch's own fused optimizers on the flat shards of buckets.

Each bucket has one optimizer, so that buckets can be updated one by one: inside backward, or row by row as a stream
when their state rests elsewhere. Element-wise rules give the same bits however a buffer is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from zeromesh.errors import ConfigError
from zeromesh.intervals import Interval
from zeromesh.offload import Purpose, TierChoice, Tiers
from zeromesh.options import OptimizerSettings
from zeromesh.units.unit import Bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a schedule changes in one step: learning rates are the groups' times `lr_factor`.

    `momentum` is that of SGD and the first of Adam's betas; None: as in the settings.
    """

    lr_factor: float = 1.0
    momentum: float | None = None

    def of(self, settings: OptimizerSettings) -> OptimizerSettings:
        """The settings with this momentum."""
        if self.momentum is None:
            return settings
        return replace(settings, momentum=self.momentum, betas=(self.momentum, settings.betas[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerGroup:
    """Settings of one group of parameters."""

    lr: float
    weight_decay: float


class GroupRules:
    """Which optimizer group a parameter belongs to: 0 is decayed, 1 is not."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._patterns = settings.no_decay
        # There may be many names as they stand.
        self._names = frozenset(self._patterns)
        self._globs = tuple(pattern for pattern in self._patterns if _GLOB.intersection(pattern))
        self.groups = (
            OptimizerGroup(lr=settings.lr, weight_decay=settings.weight_decay),
            OptimizerGroup(lr=settings.lr, weight_decay=0.0),
        )

    def group_of(self, fqn: str) -> int:
        """Group of a parameter."""
        return int(fqn in self._names or any(fnmatchcase(fqn, pattern) for pattern in self._globs))

    def unmatched(self, fqns: Sequence[str]) -> list[str]:
        """Patterns that match no parameter."""
        names = frozenset(fqns)
        return [
            pattern
            for pattern in self._patterns
            if pattern not in names and not any(fnmatchcase(fqn, pattern) for fqn in fqns)
        ]


_GLOB = frozenset("*?[")


MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": (), "adagrad": ("sum",)}
"""torch's names of the moments of each optimizer; SGD has one with momentum."""


def moment_names(settings: OptimizerSettings) -> tuple[str, ...]:
    """torch's names of the moments, each with one element per parameter element."""
    if settings.name not in MOMENTS:
        raise ConfigError(
            f"optimizer.name is {settings.name!r}; element-wise shards take {', '.join(MOMENTS)}. "
            "Muon and Adafactor need whole matrices (granularity: matrix)"
        )
    if settings.name == "sgd" and settings.momentum:
        return ("momentum_buffer",)
    return MOMENTS[settings.name]


class BucketOptimizer:
    """The optimizer of one bucket's shard. `moments` are `[shard]` by torch's name, zero before the first step.

    The update is element by element, so it may be made of any interval at a time, wherever the tensors are then.
    """

    def __init__(
        self,
        bucket: Bucket,
        settings: OptimizerSettings,
        groups: Sequence[OptimizerGroup],
        tiers: Tiers,
        at: TierChoice,
    ) -> None:
        """`at` is where the moments rest."""
        if not bucket.trainable:
            raise ConfigError(f"bucket {bucket.name} is frozen and has no optimizer")
        self.moments = {
            name: tiers.allocate(
                bucket.master.numel, bucket.master.dtype, at, Purpose.MOMENTS, f"{name} of {bucket.name}"
            )
            for name in moment_names(settings)
        }
        self._settings = settings
        self._bucket = bucket
        self._groups = groups
        self.steps = [0] * len(bucket.layout.slots)
        """How many updates each parameter has had. As in torch, one that is frozen for a while goes on from its own count."""
        self.follow()

    def follow(self) -> None:
        """Parameters are trained that were not, or are not any more, or have had other numbers of updates."""
        bucket, kinds = self._bucket, list(zip(self._bucket.training, self.steps, strict=True))
        self._segments = [
            (segment.where, self._groups[segment.group], segment.slot)
            for segment in bucket.layout.segments(bucket.interval, kinds)
            if bucket.training[segment.slot]
        ]

    def begin(self) -> None:
        """Another update of what is trained of the shard begins."""
        self.steps = [count + trained for count, trained in zip(self.steps, self._bucket.training, strict=True)]

    def step(
        self,
        start: int,
        end: int,
        master: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        rates: Rates,
    ) -> None:
        """Update elements [start, end) of the shard: `master`, `grad` and `moments` are `[end - start]`, changed in place."""
        settings = rates.of(self._settings)
        interval = Interval(start=start, end=end)
        for where, group, slot in self._segments:
            common = where.intersect(interval)
            if common.length:
                part = slice(common.start - start, common.end - start)
                states = [moment[part] for moment in moments]
                updates = self.steps[slot] - 1
                fused_update(settings, group, rates.lr_factor, master[part], grad[part], states, updates)


def fused_update(
    settings: OptimizerSettings,
    group: OptimizerGroup,
    lr_factor: float,
    master: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    updates: int,
) -> None:
    """torch's fused kernels, by their functional form. `updates` is how many were made before."""
    lr, weight_decay = group.lr * lr_factor, group.weight_decay
    steps = [torch.full((), float(updates), device=master.device)]  # made there: a copy would make the host wait
    with torch.no_grad():
        if settings.name == "sgd":
            sgd(
                [master],
                [grad],
                list(moments) or [None],
                fused=True,
                weight_decay=weight_decay,
                momentum=settings.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        elif settings.name == "adagrad":
            adagrad(
                [master],
                [grad],
                list(moments),
                steps,
                fused=not master.is_cuda,
                lr=lr,
                weight_decay=weight_decay,
                lr_decay=0.0,
                eps=settings.eps,
                maximize=False,
            )
        else:
            kind = adamw if settings.name == "adamw" else adam
            kind(
                [master],
                [grad],
                [moments[0]],
                [moments[1]],
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                lr=lr,
                weight_decay=weight_decay,
                eps=settings.eps,
                maximize=False,
            )
