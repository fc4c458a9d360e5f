"""`ShardedOptimizer`: what a loop of the user's own calls in place of its torch optimizer; `ChainedOptimizer`: of several."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.errors import ConfigError, PhaseError
from zeromesh.optim.class_optimizer import OptimizerDriver, try_class
from zeromesh.optim.fused_optimizer import OPTIMIZERS
from zeromesh.options import OptimizerSettings
from zeromesh.zero.autograd_engine import AutogradEngine

_NUMBER = "optimizer"
"""The key of a group that says which optimizer updates it."""


class ShardedOptimizer(Optimizer):
    """Updates a partitioned model. `param_groups` are those of the optimizer that it stands for, whose schedulers go on working.

    All ranks call its methods alike. Gradients are used up by `step`; `zero_grad` begins the next one.
    """

    def __init__(self, optimizer: Optimizer, engine: AutogradEngine, factor: float) -> None:
        """`factor` makes sums of gradients over ranks what they stand for: one over the data-parallel ranks for their mean."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        vars(self)["state"] = _PartitionedStates()
        self.engine = engine
        self.skipped = False
        """True if the latest step made no update, because gradients under a loss scale were not finite."""
        self.optimizer = optimizer
        """The one that it stands for, under the name by which Lightning's LearningRateMonitor knows both for one."""
        self._stands_for = (optimizer, *getattr(optimizer, "optimizers", ()))
        self._factor = factor
        self._scaled = False
        refuse: Any = partial(_refuse_step)
        refuse._wrapped_by_lr_sched = True  # So schedulers that were made of it do not warn.
        for each in self._stands_for:
            vars(each)["step"] = refuse  # It would silently do nothing.

    def stands_for(self, optimizer: Optimizer | None) -> bool:
        """Return True if this was made of `optimizer`, or is it."""
        return any(optimizer is each for each in (self, *self._stands_for))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale of float16, for `optimizer.scale(loss).backward()`; the loss itself without one."""
        self._scaled = True
        return loss * self.engine.loss_scale if self.engine.loss_scale != 1 else loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down to `max_norm`; returns their norm before, a scalar in float64, exact over all ranks.

        Raises:
            PhaseError: when there are no gradients.
        """
        self._require_scaled()
        return torch.tensor(self.engine.clip(float(max_norm), self._factor), dtype=torch.float64)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; returns what `closure` returns, which is called before.

        Raises:
            PhaseError: when there are no gradients, or a step has used them up.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_scaled()
        self.skipped = not self.engine.update(self.param_groups, self._factor)
        for each in self._stands_for:
            each._opt_called = True  # For schedulers that were made of it.
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, so that the next backward begins anew. As in torch, parameters without a gradient are passed over by
        the next step, unless `set_to_none` is False: then theirs are zeros."""
        self.engine.forget_gradients(zeros=not set_to_none)
        self._scaled = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block no backward is the last one of a step: with `accumulation`, ranks sum on their own meanwhile."""
        return self.engine.no_sync()

    def gradient(self, name: str) -> torch.Tensor | None:
        """The whole gradient of a parameter, by its name in the model, between backward and step; None for one that is frozen."""
        self._require_scaled()
        return self.engine.gradient(name, self._factor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are those at the time of `shard`. Raises `PhaseError` afterwards."""
        if hasattr(self, "engine"):
            raise PhaseError("the model is partitioned already: add groups to the torch optimizer before shard()")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """`param_groups` alone, as torch gives them. What asks for states, which are divided among ranks, or pickles the
        whole, raises `PhaseError`."""
        return _PartitionedStates(param_groups=super().state_dict()["param_groups"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """States are divided among ranks. Raises `PhaseError`."""
        raise PhaseError(
            "optimizer states are divided among ranks; read them with zeromesh.load(directory, model, optimizer)"
        )

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Its states are the engine's. Raises `PhaseError`, for `copy.copy` and `copy.deepcopy` too."""
        raise PhaseError(
            "the optimizer of a partitioned model cannot be copied or pickled; write it with zeromesh.save(directory, model, "
            "optimizer), and have averaged weights by shard(..., ema={'decay': 0.999}) and zeromesh.averaged(model)"
        )

    def _require_scaled(self) -> None:
        if self.engine.options.precision.loss_scale is not None and not self._scaled:
            raise PhaseError("float16 gradients need the loss scale: call optimizer.scale(loss).backward()")


class ChainedOptimizer(Optimizer):
    """Several optimizers as one, each over its own parameters, such as Muon for matrices and AdamW for the rest.

    `param_groups` are the groups of all, the same objects, so that schedulers of each go on working. Their steps begin anew: states
    that they have are not taken over.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        """`optimizers` have no parameter in common; torch raises ValueError otherwise."""
        groups = list(chain.from_iterable(each.param_groups for each in optimizers))
        for number, each in enumerate(optimizers):
            for group in each.param_groups:
                group[_NUMBER] = number
        super().__init__(groups, {})
        self.optimizers = optimizers
        self.state.update(chain.from_iterable(each.state.items() for each in optimizers))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update by each of them; returns what `closure` returns, which is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, each in enumerate(self.optimizers):
            twin = OptimizerDriver(each).twin
            twin.param_groups = [group for group in self.param_groups if group[_NUMBER] == number]
            twin.state = self.state
            if twin.param_groups:
                twin.step()
        return loss


class _PartitionedStates(dict[Any, Any]):
    """States of an optimizer, or what `state_dict` gives of them, where the engine has them. Asking for one raises `PhaseError`."""

    def __missing__(self, key: Any) -> Any:
        raise PhaseError(
            "optimizer states are divided among ranks; write them with zeromesh.save(directory, model, optimizer)"
        )

    def __reduce__(self) -> Any:
        return self["state"]


def _refuse_step(*_: Any, **__: Any) -> None:
    raise PhaseError("the model is partitioned now: call step() of the optimizer that shard() has returned")


def settings_of(optimizer: Optimizer, names: Iterable[tuple[str, torch.Tensor]]) -> OptimizerSettings:
    """Return the `OptimizerSettings` of a torch optimizer over parameters of these names.

    Raises:
        ConfigError: for an optimizer that cannot be run over parts of a model, with the reason.
    """
    groups = optimizer.param_groups
    by_id = {id(parameter): name for name, parameter in names}
    unknown = [p for group in groups for p in group["params"] if id(p) not in by_id]
    if unknown:
        raise ConfigError(
            f"optimizer has {len(unknown)} parameters, such as one of shape {tuple(unknown[0].shape)}, that the model has not"
        )
    if any(group.get("differentiable") for group in groups):
        raise ConfigError(
            "optimizer has differentiable=True, and no graph goes through an update of shards; leave it out"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            "optimizer has step hooks, which would not run; register them on the optimizer that shard() returns"
        )
    if any(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} has train() and eval(), which change parameters outside of its steps; take "
            "another, and for averaged weights shard(..., ema={'decay': 0.999}) and zeromesh.averaged(model)"
        )
    if any(
        getattr(each, "bf16_stochastic_round", False) for each in (optimizer, *getattr(optimizer, "optimizers", ()))
    ):
        raise ConfigError(
            "optimizer has bf16_stochastic_round=True, which rounds weights to bfloat16 at random, and those that are updated "
            "here are in float32; leave it out"
        )
    used = [
        state for state in optimizer.state.values() if type(optimizer) is not torch.optim.Adagrad or state["step"] > 0
    ]
    if used or any(group.get("initial_accumulator_value") for group in groups):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} has states before its first step under shard(), which are not taken over: call "
            "it before the first update, with initial_accumulator_value 0, or go on from a checkpoint by zeromesh.load"
        )
    members = tuple(tuple(by_id[id(p)] for p in group["params"]) for group in groups)
    name = next((name for name, row in OPTIMIZERS.items() if row.kind is type(optimizer)), None)
    decoupled = name == "adam" and any(group.get("decoupled_weight_decay") for group in groups)
    if name is None or any(group.get(option) for group in groups for option in _NOT_FUSED) or decoupled:
        return OptimizerSettings(own_class=try_class(optimizer), members=members)
    momentum = max((group.get("momentum", 0.0) for group in groups), default=0.0)
    return OptimizerSettings(name=name, members=members, momentum=momentum)


_NOT_FUSED = ("amsgrad", "dampening")
"""Options with which an update is that of the own class. SGD with dampening begins with a whole gradient, for one."""
