"""`TorchSchedule`: any scheduler of `torch.optim.lr_scheduler` as a function of the step, so that a run can resume at any step."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zeromesh.errors import ConfigError, errors_as
from zeromesh.trainer.config.sections.optimizer import OptimizerSection, make_optimizer

MakeScheduler = Callable[[Optimizer], LRScheduler]
"""Creates a scheduler of an optimizer, such as `lambda optimizer: StepLR(optimizer, 30)`."""


class TorchSchedule:
    """The learning rate of a torch scheduler in each step, and the momentum, which `OneCycleLR` and `CyclicLR` change too. It acts
    on an optimizer of a tiny model, of the run's class and settings. Raises `ConfigError` if the factory returns no
    scheduler, one that needs a metric, or one that sets a momentum of an SGD without it."""

    def __init__(self, make: MakeScheduler, settings: OptimizerSection, folders: Sequence[str] = ()) -> None:
        optimizer = make_optimizer(settings, None, folders=folders)
        self._own = _momentum_of(optimizer.param_groups[0])
        with errors_as(ConfigError, f"lr_scheduler, with optimizer.name {settings.name}: ", ValueError):
            scheduler = make(optimizer) if callable(make) else make
        if not callable(make) or isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            cure = "give a function of the optimizer, such as lambda it: StepLR(it, 30), with a rate by the step alone"
            raise ConfigError(f"lr_scheduler gave a {type(scheduler).__name__}; {cure}")
        self._settings, self._optimizer, self._scheduler = settings, optimizer, scheduler
        self._rates = [self._current_values()]

    def _current_values(self) -> tuple[float, float | None]:
        settings, group = self._settings, self._optimizer.param_groups[0]
        momentum = _momentum_of(group)
        if settings.name == "sgd" and momentum and not settings.momentum:
            why = f"lr_scheduler changes the momentum to {momentum}, and optimizer.momentum is 0, so that the optimizer keeps none"
            raise ConfigError(f"{why}; set optimizer.momentum, or give the scheduler cycle_momentum=False")
        return float(group["lr"]) / settings.lr if settings.lr else 0.0, momentum

    def factor(self, step: int) -> float:
        """Return the factor of the base learning rate in step `step` (from 0)."""
        return self._values_at(step)[0]

    def momentum(self, step: int) -> float | None:
        """Return the momentum of SGD, or Adam's first beta, in step `step`; None where it is the optimizer's own."""
        momentum = self._values_at(step)[1]
        return None if momentum == self._own else momentum

    def _values_at(self, step: int) -> tuple[float, float | None]:
        with warnings.catch_warnings():
            # torch expects optimizer.step() before scheduler.step(); the dummy optimizer has nothing to update.
            warnings.simplefilter("ignore", UserWarning)
            while len(self._rates) <= step:
                self._scheduler.step()
                self._rates.append(self._current_values())
        return self._rates[step]


def _momentum_of(group: Mapping[str, Any]) -> float | None:
    value: float | None = group["betas"][0] if "betas" in group else group.get("momentum")
    return value
