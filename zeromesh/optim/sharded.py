"""torch's own fused optimizers on the flat shards of buckets.

Each bucket has one optimizer object over the segments of its shard, so that buckets can be updated one by one: inside backward,
or as a stream when their state rests elsewhere. Element-wise rules give the same bits however a buffer is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from zeromesh.errors import ConfigError
from zeromesh.offload import allocate_lasting
from zeromesh.zero.unit import Bucket

OptimizerName = Literal["adamw", "adam", "sgd", "adagrad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """What `optimizer` in the configuration says."""

    name: OptimizerName = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    no_decay: tuple[str, ...] = ()
    """Patterns of parameter names (as in `fnmatch`) that are not decayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerGroup:
    """Settings of one group of parameters."""

    lr: float
    weight_decay: float


class GroupRules:
    """Which optimizer group a parameter belongs to: 0 is decayed, 1 is not."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._patterns = settings.no_decay
        self.groups = (
            OptimizerGroup(lr=settings.lr, weight_decay=settings.weight_decay),
            OptimizerGroup(lr=settings.lr, weight_decay=0.0),
        )

    def group_of(self, fqn: str) -> int:
        """Group of a parameter."""
        return int(any(fnmatchcase(fqn, pattern) for pattern in self._patterns))

    def unmatched(self, fqns: Sequence[str]) -> list[str]:
        """Patterns that match no parameter."""
        return [pattern for pattern in self._patterns if not any(fnmatchcase(fqn, pattern) for fqn in fqns)]


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
    """The optimizer of one bucket's shard. `moments` are `[shard]` by torch's name, zero before the first step."""

    def __init__(self, bucket: Bucket, settings: OptimizerSettings, groups: Sequence[OptimizerGroup]) -> None:
        if not bucket.trainable:
            raise ConfigError(f"bucket {bucket.name} is frozen and has no optimizer")
        length, dtype, device = bucket.master.numel(), bucket.master.dtype, bucket.master.device
        self.moments = {name: allocate_lasting(length, dtype, device) for name in moment_names(settings)}
        self._bases: list[float] = []
        self._segments: list[tuple[nn.Parameter, slice]] = []
        torch_groups: list[dict[str, Any]] = []
        for segment in bucket.layout.segments(bucket.interval):
            where = slice(segment.where.start, segment.where.end)
            parameter = nn.Parameter(bucket.master[where])
            self._segments.append((parameter, where))
            group = groups[segment.group]
            self._bases.append(group.lr)
            torch_groups.append({"params": [parameter], "lr": group.lr, "weight_decay": group.weight_decay})
        self._optimizer = _make(settings, torch_groups) if torch_groups else None
        self._give_moments()

    def _give_moments(self) -> None:
        """Before the first step torch would allocate them among the activations of that moment."""
        if self._optimizer is None:
            return
        for parameter, where in self._segments:
            state = self._optimizer.state[parameter]
            if "exp_avg" in self.moments and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({name: moment[where] for name, moment in self.moments.items()})

    def set_steps(self, count: int) -> None:
        """The moments are those after `count` updates."""
        if self._optimizer is not None:
            for parameter, _ in self._segments:
                state = self._optimizer.state[parameter]
                if "step" in state:
                    state["step"].fill_(count)

    def step(self, grad: torch.Tensor, lr_factor: float) -> None:
        """Update the master weights from `grad`, `[shard]`; learning rates are the groups' times `lr_factor`."""
        if self._optimizer is None:
            return
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            group["lr"] = base * lr_factor
        for parameter, where in self._segments:
            parameter.grad = grad[where]
        self._optimizer.step()
        for parameter, _ in self._segments:
            parameter.grad = None


def _make(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    lr, weight_decay = settings.lr, settings.weight_decay
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr, momentum=settings.momentum, weight_decay=weight_decay, fused=True)
    if settings.name == "adagrad":
        on_cuda = groups[0]["params"][0].is_cuda
        return torch.optim.Adagrad(groups, lr, eps=settings.eps, weight_decay=weight_decay, fused=not on_cuda)
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(groups, lr, betas=settings.betas, eps=settings.eps, weight_decay=weight_decay, fused=True)
