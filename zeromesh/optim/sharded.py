"""torch's own fused optimizers on the flat shards of buckets.

Each bucket has one optimizer object over the segments of its shard, so that buckets can be updated one by one: inside backward,
or as a stream when their state rests elsewhere. Element-wise rules give the same bits however a buffer is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from zeromesh.errors import ConfigError
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
    extra: dict[str, Any] = field(default_factory=dict)


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


class BucketOptimizer:
    """The optimizer of one bucket's shard."""

    def __init__(self, bucket: Bucket, settings: OptimizerSettings, groups: Sequence[OptimizerGroup]) -> None:
        if bucket.grad is None:
            raise ConfigError(f"bucket {bucket.name} is frozen and has no optimizer")
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

    def state_bytes(self) -> int:
        """Bytes of the moments now."""
        if self._optimizer is None:
            return 0
        return sum(
            value.numel() * value.element_size()
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )

    def moments(self) -> dict[str, list[tuple[slice, torch.Tensor]]]:
        """Moments by torch's name (`exp_avg`, ...), each as pieces of the shard."""
        found: dict[str, list[tuple[slice, torch.Tensor]]] = {}
        if self._optimizer is None:
            return found
        for parameter, where in self._segments:
            for name, value in self._optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    found.setdefault(name, []).append((where, value))
        return found


def _make(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    common = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True, **settings.extra}
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, **common)
    if settings.name == "adam":
        return torch.optim.Adam(groups, betas=settings.betas, eps=settings.eps, **common)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, **common)
    if settings.name == "adagrad":
        on_cuda = groups[0]["params"][0].is_cuda
        return torch.optim.Adagrad(groups, eps=settings.eps, **{**common, "fused": not on_cuda})
    raise ConfigError(
        f"optimizer.name is {settings.name!r}; element-wise shards take adamw, adam, sgd or adagrad. "
        "Muon and Adafactor need whole matrices (granularity: matrix)"
    )


MOMENTS_PER_ELEMENT = {"adamw": 2, "adam": 2, "sgd": 0, "adagrad": 1}
"""Moment tensors by optimizer; SGD has one with momentum."""


def moments_per_element(settings: OptimizerSettings) -> int:
    """How many moment elements each parameter element has."""
    return MOMENTS_PER_ELEMENT[settings.name] + int(settings.name == "sgd" and settings.momentum != 0)
