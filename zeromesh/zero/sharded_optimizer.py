"""Optimizers for users' training loops: `ShardedOptimizer` replaces a torch optimizer, and `ChainedOptimizer` joins several."""

import dis
import gc
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import getattr_static
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes, ReferenceType

import torch
from torch.optim import Optimizer

from zeromesh.errors import ConfigError, PhaseError
from zeromesh.optim.class_optimizer import blank_copy_of, classify, own_attributes, take_overrides
from zeromesh.optim.fused_optimizer import OPTIMIZERS
from zeromesh.options import OptimizerSettings
from zeromesh.tensor.autograd_collectives import uncompiled
from zeromesh.zero.autograd_engine import AutogradEngine

_SPLIT = "optimizer states are divided among ranks"
_NAMES, _READS = ("LOAD_GLOBAL", "IMPORT_NAME"), ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


class ShardedOptimizer(Optimizer):
    """Updates a partitioned model, all ranks alike. `param_groups` are the wrapped optimizer's, whose schedulers keep working."""

    def __init__(self, optimizer: Optimizer, engine: AutogradEngine, factor: float) -> None:
        """`factor` scales the sums of gradients over ranks: 1 / data-parallel ranks gives their mean."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        vars(self)["state"] = _PartitionedStates()
        self.engine = engine
        self.skipped = False
        """True if the latest step made no update, because gradients under a loss scale were not finite."""
        self.optimizer = optimizer  # By this name Lightning's LearningRateMonitor treats both as one.
        self._replaced_optimizers = (optimizer, *getattr(optimizer, "optimizers", ()))
        self._factor, self._loss_is_scaled, self._fixed_form = factor, False, self._form()
        vars(_refuse_step)["_wrapped_by_lr_sched"] = True  # Keeps schedulers of the wrapped optimizer from warning.
        for each in self._replaced_optimizers:
            vars(each)["step"] = _refuse_step  # The wrapped optimizer's step would silently do nothing.
        self._own_names = {*dir(Optimizer), *vars(self), "_own_names", "_opt_called"}

    def stands_for(self, optimizer: Optimizer | None) -> bool:
        """Return True if this is `optimizer`, or has replaced it."""
        return any(optimizer is each for each in (self, *self._replaced_optimizers))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times float16's loss scale, for `optimizer.scale(loss).backward()`; the loss itself without a scale."""
        self._loss_is_scaled = True
        return loss * self.engine.loss_scale if self.engine.loss_scale != 1 else loss

    @uncompiled
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients to the norm `max_norm` at most; returns that before, exact, float64. Raises `PhaseError` without any."""
        self._require_scaled()
        return torch.tensor(self.engine.clip(float(max_norm), self._factor), dtype=torch.float64)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure` if given, update, and return its result. Raises `PhaseError` without new gradients, or for new groups."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._form() != self._fixed_form:
            why = "states, the parameters of groups or their decoupled_weight_decay were changed, which are fixed by shard()"
            raise PhaseError(f"{why}; change them before, or call unshard() and shard(), which begins with new states")
        for name in vars(self).keys() - self._own_names:
            if any(hasattr(each, name) for each in self._replaced_optimizers):
                raise PhaseError(f"{name} was set here, but is read from the optimizer given to shard(); set it there")
        self._require_scaled()
        self.skipped = not self.engine.update(self.param_groups, self._factor)
        for each in self._replaced_optimizers:
            each._opt_called = True  # Read by schedulers of the wrapped optimizer.
        return loss

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, so that the next backward begins anew. As in torch, the next step skips parameters without a
        gradient, unless `set_to_none` is False: then their gradients are zeros."""
        self.engine.forget_gradients(zeros=not set_to_none)
        self._loss_is_scaled = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block no backward is the last one of a step; with `accumulation`, each rank accumulates its own sum."""
        return self.engine.no_sync()

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return a whole gradient by the parameter's name, between backward and step; None for a frozen parameter."""
        self._require_scaled()
        return self.engine.gradient(name, self._factor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `PhaseError`: groups are fixed when `shard` is called."""
        if hasattr(self, "engine"):
            raise PhaseError("the model is partitioned already: add groups to the torch optimizer before shard()")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return `param_groups` alone, in torch's form. Reading the divided states, or pickling the result, raises `PhaseError`."""
        return _PartitionedStates(param_groups=super().state_dict()["param_groups"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise `PhaseError`: states are divided among ranks."""
        raise PhaseError(f"{_SPLIT}; read them with zeromesh.load(directory, model, optimizer)")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Raise `PhaseError`, for `copy.copy` and `copy.deepcopy` too: the states belong to the engine."""
        cure = "write it with zeromesh.save(directory, model, optimizer), and have averaged weights by"
        averaged = "shard(..., ema={'decay': 0.999}) and zeromesh.averaged(model)"
        raise PhaseError(f"the optimizer of a partitioned model cannot be copied or pickled; {cure} {averaged}")

    def _form(self) -> list[Any]:
        groups = [[*map(id, each["params"]), each.get("decoupled_weight_decay")] for each in self.param_groups]
        return [id(self.state), *self.state, *groups]

    def _require_scaled(self) -> None:
        if self.engine.options.precision.loss_scale is not None and not self._loss_is_scaled:
            raise PhaseError("float16 gradients need the loss scale: call optimizer.scale(loss).backward()")


class ChainedOptimizer(Optimizer):
    """Several optimizers as one, each over its own parameters, such as Muon for matrices and AdamW for the rest. `param_groups`
    joins the groups of all, as the same objects, so that each one's schedulers keep working."""

    def __init__(self, *optimizers: Optimizer) -> None:
        """`optimizers` must not share parameters; torch raises ValueError otherwise."""
        super().__init__(list(chain.from_iterable(each.param_groups for each in optimizers)), {})
        self.optimizers = optimizers
        self.state.update(chain.from_iterable(each.state.items() for each in optimizers))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure` if given, make one update by each optimizer, and return the closure's result."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for each in self.optimizers:
            blank, own = blank_copy_of(each), [id(group["params"]) for group in each.param_groups]
            blank.param_groups, blank.state = [g for g in self.param_groups if id(g["params"]) in own], self.state
            if blank.param_groups:
                blank.step()
                vars(each).update(own_attributes(blank))
        return loss


class _PartitionedStates(dict[Any, Any]):
    """A mapping for optimizer states that the engine holds. Reading or removing an entry raises `PhaseError`."""

    def __missing__(self, *_: Any) -> Any:
        raise PhaseError(f"{_SPLIT}; zeromesh.save(directory, model, optimizer) saves, unshard() and shard() drop them")

    clear = pop = popitem = __missing__

    def __reduce__(self) -> Any:
        return self["state"]


def _refuse_step(*_: Any, **__: Any) -> None:
    raise PhaseError("the model is partitioned now: call step() of the optimizer that shard() has returned")


def _holds(value: Any, ids: Collection[int]) -> bool:
    """Return True if objects of these ids, or the ids, are reached from a value: by what containers and objects have, by weak
    references, and by what functions see of the functions and files around them, and read of classes and modules."""
    seen, waiting = dict[int, Any](), [value]
    while waiting:
        each = waiting.pop()
        if id(each) in ids or (type(each) is int and each in ids):
            return True
        if id(each) not in seen:
            seen[id(each)] = each
            waiting += _reached_from(each)
    return False


def _reached_from(value: Any) -> Iterable[Any]:
    if isinstance(value, ReferenceType):
        return [value()]
    if type(value) in ProxyTypes:
        return [value.__dict__]
    if isinstance(value, FunctionType):
        codes, seen, owners, known = [value.__code__], list[Any](), list[Any](), value.__globals__
        for code in codes:  # Those of functions inside of it too; the globals of torch have no user's parameters.
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        used = {(each.opname, each.argval) for code in codes for each in dis.get_instructions(code)}
        found = [known.get(name, sys.modules.get(name)) for kind, name in used if kind in _NAMES and not _is_torchs(value)]
        while found:  # Of classes and modules, and those inside of them, what has the name of an attribute that is read.
            new = [each for each in found if isinstance(each, type | ModuleType) and not _is_torchs(each) and each not in owners]
            seen, owners = seen + found, owners + new
            found = [getattr_static(each, name, None) for each in new for kind, name in used if kind in _READS]
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, *seen]
    return () if isinstance(value, type | ModuleType | CodeType) else gc.get_referents(value)


def _step_of(owner: Any) -> Any:
    """Return the function `step` of an optimizer or a class, without what torch wraps around it, as its schedulers do."""
    found = getattr(owner.step, "__func__", owner.step)
    while hasattr(found, "__wrapped__") and _is_torchs(found):
        found = getattr(found.__wrapped__, "__func__", found.__wrapped__)
    return found


def _is_torchs(value: Any) -> bool:
    known = value.__globals__ if isinstance(value, FunctionType) else getattr(value, "__dict__", {})
    return str(known.get("__module__", known.get("__name__"))).partition(".")[0] == "torch"


def settings_of(optimizer: Optimizer, names: Iterable[tuple[str, torch.Tensor]], *, takes_modes: bool = False) -> OptimizerSettings:
    """Return the settings of an optimizer over `names`; if `takes_modes` it may have train() and eval(). Raises `ConfigError`."""
    modes: list[Any] = [getattr(optimizer, mode, None) for mode in ("train", "eval")]
    if has_modes := takes_modes and all(map(callable, modes)):
        modes[0]()
    groups = optimizer.param_groups
    by_id = {id(parameter): name for name, parameter in names}
    if unknown := [p for group in groups for p in group["params"] if id(p) not in by_id]:
        found = f"{len(unknown)} parameters, such as one of shape {tuple(unknown[0].shape)}"
        raise ConfigError(f"optimizer has {found}, that the model has not")
    kind = type(optimizer).__name__
    parts = optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
    # Not all states are traces of updates: APOLLO's constructor gives each parameter a seed, and Adagrad's creates its states.
    states = {by_id[id(each)]: state for each, state in optimizer.state.items() if id(each) in by_id}
    initial = {each: state for each, state in states.items() if set(map(type, state.values())) <= {int, float}}
    name: Any = next((name for name, (kind, _) in OPTIMIZERS.items() if kind is type(optimizer)), None)
    used = [each for each, state in states.items() if each not in initial and (name != "adagrad" or state["step"] > 0)]
    hooked = any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for each in (optimizer, *parts))
    differentiable = any(group.get("differentiable") for group in groups)
    problems = {
        "optimizer has differentiable=True, and no graph goes through an update of shards; leave it out": differentiable,
        "optimizer has step hooks, which would not run; register them on the optimizer that shard() returns": hooked,
        "optimizer has a step() of its own instead of its class's, which would not run; write it in a class that inherits from its "
        "class": any(_step_of(each) not in (_step_of(type(each)), _refuse_step) for each in (optimizer, *parts)),
        f"optimizer {kind} has train() and eval(), which change parameters outside of its steps; take another, and for averaged "
        "weights shard(..., ema={'decay': 0.999}) and zeromesh.averaged(model), or give it to zeromesh.Trainer as optimizer.name": (
            not has_modes and any(callable(getattr(each, mode, None)) for each in parts for mode in ("train", "eval"))
        ),
        "optimizer has bf16_stochastic_round=True, which rounds weights to bfloat16 at random, and those that are updated here "
        "are in float32; leave it out": any(getattr(each, "bf16_stochastic_round", False) for each in parts),
        f"optimizer {kind} has states before its first step under shard(), which are not taken over but for those of an Adagrad "
        "alone: call it before the first update, with initial_accumulator_value 0, or load a checkpoint": bool(used)
        or any(group.get("initial_accumulator_value") for group in groups),
    }
    if wrong := [problem for problem, holds in problems.items() if holds]:
        raise ConfigError(wrong[0])
    values = tuple({name: value for name, value in group.items() if name != "params"} for group in groups)
    members = tuple(tuple(by_id[id(p)] for p in group["params"]) for group in groups)
    decoupled = any(each.get("decoupled_weight_decay", name == "adamw") != (name == "adamw") for each in groups)
    # The class itself computes updates with these: SGD with dampening, for example, starts from a whole gradient.
    by_class = any(group.get(option) for group in groups for option in ("amsgrad", "dampening"))
    by_class |= name is not None and not _is_torchs(_step_of(type(optimizer)))
    if name is None or by_class or decoupled:
        take_overrides(*parts)
        classes = {each for part in parts for each in type(part).__mro__} - {Optimizer, object}
        known_to = (*map(own_attributes, parts), *values, *map(vars, classes))
        if where := [name for each in known_to for name, value in each.items() if _holds(value, by_id)]:
            why = f"optimizer {kind} has parameters, or their id(), in {where[0]}, and its update gets pieces in their place"
            raise ConfigError(f"{why}; set what belongs to a parameter as its attribute, or as a value of its group")
        known = {by_id[id(each)]: each for group in groups for each in group["params"]}
        own_class = replace(classify(*parts, names=by_id), initial=initial, has_modes=has_modes, parameters=known)
        if has_modes and own_class.whole:
            raise ConfigError(f"optimizer {kind} has train() and eval(), and is not elementwise; take another")
        return OptimizerSettings(own_class=own_class, groups=values, members=members)
    momentum = max((group.get("momentum", 0.0) for group in groups), default=0.0)
    return OptimizerSettings(name=name, groups=values, members=members, momentum=momentum)
