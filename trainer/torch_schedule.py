"""`TorchSchedule`: any scheduler of `torch.optim.lr_scheduler` as a function of the step, so that a run can go on anywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zeromesh.errors import ConfigError

MakeScheduler = Callable[[Optimizer], LRScheduler]
"""Makes a scheduler of an optimizer, such as `lambda optimizer: StepLR(optimizer, 30)`."""


class TorchSchedule:
    """The factor by which a scheduler multiplies the learning rate. It acts on an optimizer of one number, of no use otherwise.

    Raises:
        ConfigError: for what makes no scheduler, or one that waits for a metric.
    """

    def __init__(self, make: MakeScheduler, lr: float) -> None:
        self._make = make
        self._lr = lr
        self._optimizer, self._scheduler = self._start()
        self._factors = [self._factor()]

    def _start(self) -> tuple[Optimizer, LRScheduler]:
        optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=self._lr, momentum=0.9)
        scheduler = self._make(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"lr_scheduler gave a {type(scheduler).__name__}; give a callable that makes a scheduler of torch.optim, "
                "whose rate depends on the step alone"
            )
        return optimizer, scheduler

    def _factor(self) -> float:
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate / self._lr if self._lr else 0.0

    def factor(self, step: int) -> float:
        """What the rate of step `step` (from 0) is multiplied by."""
        with warnings.catch_warnings():
            # torch wants optimizer.step() before scheduler.step(); this optimizer has nothing to update.
            warnings.simplefilter("ignore", UserWarning)
            while len(self._factors) <= step:
                self._scheduler.step()
                self._factors.append(self._factor())
        return self._factors[step]
