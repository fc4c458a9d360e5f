"""The engine for users' training loops: a call of the model begins forward, and autograd begins backward.

    model(...)          with gradients, the first call opens a forward, which later calls join; without, it is an evaluation
    loss.backward()     begins at the first result of a unit, or the first gradient, that autograd reaches, and ends with autograd
    close_backwards()   completes pending sums over ranks, before gradients are measured, read or used

The hooks of a unit's results know the forward that made them. A backward runs through the graph of one forward, and another may
run through the rest of it. Units that are reached through the graph of an earlier forward stay live until backward is over."""

import math
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn
from torch._guards import CompileContext
from torch.autograd import Variable

from zeromesh.errors import PhaseError
from zeromesh.optim.fused_optimizer import Hyperparameters
from zeromesh.optim.gradients import backward_reaches
from zeromesh.overrides import override
from zeromesh.rng import Streams
from zeromesh.units.unit import FLAG, Bucket, ParameterMeta, Phase, Unit, live_class, make_subclass
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.hooks import Hooks, hook_before, on_gradient_of, tensors_in
from zeromesh.zero.passes import Passes, PassMode, PassProgress

_GRAD_DESCRIPTOR: Any = vars(torch._C.TensorBase)["grad"]
_Result = TypeVar("_Result")


class GuardedParameter(nn.Parameter, metaclass=ParameterMeta):
    """The class of the parameters of an `AutogradEngine`. Gradients are divided among ranks, so `grad` raises where ordinary
    code, such as `torch.nn.utils.clip_grad_norm_`, would find None and go on. Copies have the dtype `copied_as`, if set."""

    passes: ClassVar["AutogradPasses"]
    live_type: ClassVar[type[nn.Parameter]]  # the class without the guard

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient inside backward; None without gradients. Raises `PhaseError` between backward and `zero_grad`."""
        gradient: torch.Tensor | None = _GRAD_DESCRIPTOR.__get__(self)
        if gradient is None and CompileContext.try_get() is None:  # Compiling a forward reads it.
            type(self).passes.require_no_gradients("read")
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            type(self).passes.require_no_gradients("set")
        _GRAD_DESCRIPTOR.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD_DESCRIPTOR.__delete__(self)

    @property
    def requires_grad(self) -> bool:
        """The flag as the user sets it. In a model without an optimizer, autograd sees all parameters as frozen."""
        flags = self.passes.users_flags
        return bool(FLAG.__get__(self) if flags is None else flags.get(id(self), False))

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if self.passes.users_flags is None:
            FLAG.__set__(self, flag)
        else:
            self.passes.users_flags[id(self)] = flag

    def requires_grad_(self, mode: bool = True) -> Self:
        self.requires_grad = mode
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        return hook_before(self, hook)

    def share_memory_(self) -> Any:
        raise PhaseError("share_memory() gives parameters other memory, and theirs is the engine's; leave it out")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            values, dtype = self.detach().clone(), vars(self).get("copied_as", self.dtype)
            if values.is_floating_point() and values.dtype != dtype:
                what = f"a copy of a model that computes in {values.dtype} has values that are rounded to it"
                warnings.warn(f"{what}; averages need the section `ema`, which keeps them of the exact ones", stacklevel=2)
                values = values.to(dtype)
            copied = type(self).live_type(values, self.requires_grad)
        memo[id(self)] = copied
        return copied


@dataclass(eq=False)
class _Graph:
    """The graph of one forward, alive as long as one of its hooks."""

    progress: PassProgress
    generation: int  # of the parameters: the number of updates before this forward


@dataclass(kw_only=True, slots=True)
class StepGradients:
    """The state of a step's gradients, from its first backward until they are forgotten."""

    backwards: int = 0
    mixed: bool = False  # True if some gradients were added to gradients that an update had already used
    used: bool = False
    summed: bool = False
    closed: bool = False  # True if the gradients are `summed` over all ranks, which also know what has no gradient
    norm: float | None = None
    clip: float = 1.0  # the clipping factor, by which gradients are multiplied when they are read or used
    clipped: bool = False


class AutogradPasses(Passes):
    """Passes that a user's training loop begins by calls of the model and by autograd, alike on all ranks."""

    readers = "zeromesh.gathered(model, [{!r}])", "zeromesh.state_dict(model)", "zeromesh.save(directory, model)"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self._mesh.shape.context > 1:  # The ranks of a sequence sum the gradients of what its model returns as the loss.
            self._watched = [bucket for unit in self.units for bucket in unit.buckets]
            for bucket in self._watched:
                bucket.watched = [True] * len(bucket.parameters)
        self.step = StepGradients()
        self.synced = True
        self.users_flags: dict[int, bool] | None = None if self._options.optimizer.members else {}  # by ids
        self.generation = 0  # the number of times that parameter values have changed
        self._latest_graph: Callable[[], _Graph | None] = lambda: None  # weak
        self._open_graph: _Graph | None = None
        """The graph of a forward that has not returned yet, which may have no hooks so far."""
        self.before_step: Callable[[], None] = lambda: None  # called before the first forward of a step
        self.follow_flags: Callable[[], None] = lambda: None  # called before each backward
        self._inner: list[list[tuple[nn.Module, int]]] = []
        """For each unit, the modules inside it without user hooks so far, with the number of the engine's forward hooks on each."""
        self._hook_after: Callable[[nn.Module, Callable[[Any], None]], None]

    def watch_user_hooks(self, hooks: Hooks) -> None:
        """Prepare to hook outputs of modules inside units that get user hooks, which may keep one: backward then enters there."""
        self._hook_after = hooks.after
        modules = {unit.module for unit in self.units}
        for unit in self.units if self._releases else ():
            inner = [module for _, module in unit.module.named_modules(memo=modules - {unit.module})][1:]
            self._inner.append([(module, int(module in hooks.parts)) for module in inner])

    def _follow_new_hooks(self, unit: Unit) -> None:
        def after(output: Any) -> None:
            if self.mode is PassMode.FORWARD:
                on_gradient_of(tensors_in(output), self._on_reached(unit, self._progress.calls - 1))

        followed = self._inner[unit.index] if self._releases and self.mode is PassMode.FORWARD else ()
        for each in [each for each in followed if len(each[0]._forward_hooks) > each[1]]:
            self._inner[unit.index].remove(each)
            self._hook_after(each[0], after)

    # Forward

    def _begin_users_pass(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled() or self._in_stages:
            super()._begin_users_pass(module)
            return
        if not self.step.backwards or self.step.used:
            self.before_step()
        # Tensor-parallel ranks need equal random numbers, from a stream; other ranks draw from the global generators.
        shared = self._mesh.shape.divides("layers")
        where = self.generation << 20 | self.step.backwards
        streams = Streams(self._options.seed, where, self._mesh.peers.index) if shared else None
        self._begin(PassMode.FORWARD, "train", PassProgress(streams))
        self._open_graph = _Graph(self._progress, self.generation)
        self._latest_graph = weakref.ref(self._open_graph)

    def before_forward(self, unit: Unit) -> None:
        if unit.index == 0:
            unheld = self.mode is PassMode.FORWARD and self._open_graph is None and self._latest_graph() is None
            if unheld or self._direct_call is not None:
                self.end()  # The open forward's results were dropped, or an evaluation has failed.
        self.require_no_failure()
        super().before_forward(unit)
        self._follow_new_hooks(unit)

    def before_part(self, module: nn.Module) -> None:
        super().before_part(module)
        self._follow_new_hooks(self.units[0])

    def after_forward(self, unit: Unit, output: Any) -> None:
        super().after_forward(unit, output)
        if unit.index == 0 and self.mode is PassMode.FORWARD:
            self._open_graph = None
            if torch.is_grad_enabled():
                self._end_forward(list(tensors_in(output)))

    def require_idle(self) -> None:
        """End an open forward, whose backward may still come later. Raises `PhaseError` during any other pass."""
        if self.mode is PassMode.FORWARD:
            self.end()
        super().require_idle()

    def end(self) -> None:
        super().end()
        self._open_graph = None

    # Backward

    def _on_reached(self, unit: Unit, call: int) -> Callable[[], None]:
        return partial(self._enter_unit, unit, call, self._latest_graph() or _Graph(self._progress, self.generation))

    def _enter_unit(self, unit: Unit, call: int, graph: _Graph) -> None:
        if self.mode is not PassMode.BACKWARD:
            if not self._sets_gradients():  # This is `autograd.grad`, whose results may be part of a loss.
                self._require_current(graph)
                if self.mode is PassMode.IDLE:
                    self._begin(PassMode.FORWARD, "train", graph.progress)
                    self._latest_graph = weakref.ref(graph)
                    self.make_live(self.units[0])
                self._keep_live(unit)
                return
            self._begin_backward(graph)
            # Modules of the root that were called without the root have no hook for backward.
            self._make_live_in_backward(self.units[0])
        if graph.progress is self._progress:
            self.before_backward(unit, call)
        else:
            self._require_current(graph)
            self._keep_live(unit)

    def on_gradient(self, unit: Unit, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        if self.mode is not PassMode.BACKWARD:
            was_live = self.units[0].phase is Phase.LIVE
            self._begin_backward(self._latest_graph() or _Graph(PassProgress(), self.generation))
            if was_live:  # Backward may have read the root, and may go on to.
                self._make_live_in_backward(self.units[0])
        super().on_gradient(unit, bucket, index, parameter)

    def _sets_gradients(self) -> bool:
        trained = (each for unit in self.units for bucket in unit.trainable for each in bucket.parameters)
        try:
            return any(map(backward_reaches, trained))
        except RuntimeError:  # `autograd.grad` of a parameter: the call returns its gradient.
            return False

    def require_no_gradients(self, done: str) -> None:
        """Raise `PhaseError` when a user has read or set gradients that only this engine can give."""
        if self.step.backwards and self.mode is not PassMode.BACKWARD:
            if any(frame.f_code.co_qualname == "AdafactorSchedule.get_lr" for frame, _ in traceback.walk_stack(None)):
                return  # It asks if there was a step, to log the rate that Adafactor has computed, and logs its first one.
            why = f"the gradient of a parameter was {done}, and gradients are divided among ranks"
            cure = "clip with optimizer.clip_grad_norm_(max_norm), read whole ones with optimizer.gradient(name)"
            scaled = "precision={'compute': 'float16'} and optimizer.scale(loss)"
            raise PhaseError(f"{why}: {cure}, and in place of a GradScaler use {scaled}")

    def _require_current(self, graph: _Graph) -> None:
        if graph.generation != self.generation:
            why = "backward reached results of a forward before the latest update or load, when parameters had other values"
            raise PhaseError(f"{why}; run forward again, or call backward before optimizer.step()")

    def _begin_backward(self, graph: _Graph) -> None:
        self._require_current(graph)
        # A backward may come before `zero_grad`, as through a discriminator to a generator.
        if self.step.used:
            self.step = StepGradients(mixed=True)
        step = self.step
        if step.clipped or (step.closed and any(ranks.size > 1 for ranks in self.gradients.replicas.sets.values())):
            done, do = ("clipped", "clip") if step.clipped else ("summed over all ranks to be read", "read them")
            why = f"the gradients of this step have been {done}, and another backward would add to them"
            raise PhaseError(f"{why}; {do} after the last backward of a step, or call optimizer.zero_grad() before the next one")
        accumulation = self._options.accumulation
        if step.backwards >= accumulation > 1:
            cure = "call optimizer.step() and zero_grad(), or give shard() or Accelerator() another accumulation"
            raise PhaseError(f"the step has had its {accumulation} backwards (accumulation={accumulation}); {cure}")
        last = self.synced and step.backwards + 1 == accumulation > 1
        graph.progress.first, graph.progress.last = not step.backwards, last
        self._enter_backward(graph.progress)
        # An earlier backward of this graph, through another part of it or with retain_graph, may have set these.
        graph.progress.reached, graph.progress.in_backward = set(), []
        step.closed, step.summed, step.norm = False, False, None
        self.follow_flags()
        self._begin_reducing()
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        try:
            self._end_reducing()
        except BaseException as error:
            self._mesh.fail(error)
            raise
        self.step.backwards += 1
        self.step.summed = self._progress.last
        self.end()

    @property
    def failed(self) -> bool:
        return self.mode is PassMode.BACKWARD and torch._C._current_graph_task_id() == -1

    def require_no_failure(self) -> None:
        if self.failed:
            why = "the latest backward ended with an error, and this rank's gradients are incomplete"
            raise PhaseError(f"{why}; call optimizer.zero_grad() on a single rank, or start again from a checkpoint")

    # Between backward and update

    def close_backwards(self) -> None:
        """Sum the gradients that are not summed over all ranks yet, so that they are those of the step. All ranks call it."""
        self.require_no_failure()
        self.require_idle()
        if not self.synced:
            raise PhaseError("ranks update together, from all gradients: leave no_sync() before optimizer.step()")
        self.writes.refuse_between_passes(self.units)
        if self.step.mixed or self.step.used:
            cure = "call optimizer.zero_grad() after it and before the next backward"
            raise PhaseError(f"optimizer.step() has used the gradients up; {cure}")
        if not self.step.backwards:
            raise PhaseError("there are no gradients: call loss.backward() before, with a loss that the model computed")
        if self.step.closed:
            return
        self.step.closed = True
        buckets = [bucket for unit in reversed(self.units) for bucket in unit.trainable]
        if not self.step.summed:
            self.gradients.begin(buckets, reduce=self._options.sums_before_reducing, first=False, last=True, known_order=False)
            self.gradients.flush()
            self._updater.finish_units(self.units)
        self.gradients.find_missing(buckets)


def _ids_of_contents(modules: Iterable[nn.Module]) -> list[int]:
    tables = (table for module in modules for table in (module._modules, module._parameters))
    return [id(each) for table in tables for each in table.values()]


class AutogradEngine(ZeroEngine):
    """An engine without a trainer, driven by `loss.backward()` and the calls of an optimizer."""

    passes_class: ClassVar[type[Passes]] = AutogradPasses
    _passes: AutogradPasses

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._passes.before_step = self._before_step
        self._passes.follow_flags = partial(self._apply_flags, within_step=True)
        self._passes.watch_user_hooks(self._hooks)
        self._is_loading = False
        guarded: dict[type[nn.Parameter], type[GuardedParameter]] = {}
        for bucket in self._buckets:
            for kind in map(live_class, bucket.parameters):
                fields = {"passes": self._passes, "__module__": kind.__module__}
                guarded[kind] = guarded.get(kind) or make_subclass(GuardedParameter, kind, kind.__name__, **fields)
            bucket.set_live_classes([guarded[live_class(each)] for each in bucket.parameters])
        self._sharded = dict(self.model.named_parameters())
        self._modules, self._ids_of_contents = list[nn.Module](), [0]
        """The modules at the latest comparison, and the ids of their submodules and parameters."""

    def close(self) -> None:
        super().close()
        for bucket in self._buckets:
            bucket.set_live_classes([getattr(each, "live_type", nn.Parameter) for each in map(live_class, bucket.parameters)])

    def require_same_parameters(self) -> None:
        """Raise `PhaseError` when the model's parameters are not those that were partitioned."""
        if _ids_of_contents(self._modules) == self._ids_of_contents:  # Listing all parameters takes ten times as long.
            return
        present = dict(self.model.named_parameters())
        for one, other in ((present, self._sharded), (self._sharded, present)):
            others = set(map(id, other.values()))
            changed = [name for name, each in one.items() if id(each) not in others or other.get(name, each) is not each]
            if changed:
                why = f"{changed[0]} was added, removed, replaced or moved after shard()"
                cure = "put back what was there, or call zeromesh.unshard(model), change it, and call shard() again"
                raise PhaseError(f"{why}, which trains and saves the model as it was; {cure}")
        self._modules = list(self.model.modules())
        self._ids_of_contents = _ids_of_contents(self._modules)

    def _before_step(self) -> None:
        self.begin_step(self.optimizer_step.updates)
        for bucket in (each for unit in self._passes.units if unit.phase is Phase.LIVE for each in unit.buckets):
            bucket.drop_casts()

    def load_whole(self, load: Callable[[], _Result]) -> _Result:
        """Call `load()`, which copies whole values into the model's parameters, and shard the values. All ranks call it alike."""
        if self._is_loading:  # A nested call: the outer one shards the values.
            return load()
        self._passes.require_idle()
        # torch warns that parameters on meta get no values.
        quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
        with override(self, "_is_loading", True), self.state.receiving_values() as given, quiet:
            result = load()
        with self.loading(averaged_updates=0):
            self.checkpoint_state.fill(given)
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block no backward is the last one of a step; see `shard`."""
        with override(self._passes, "synced", False):
            yield

    def gradient(self, name: str, factor: float) -> torch.Tensor | None:
        """Return a whole gradient times `factor`, clipped, without loss scale; see `FullState.gradient`. All ranks call it."""
        self._passes.close_backwards()
        if (gradient := self.state.gradient(name)) is not None:
            gradient.mul_(factor * self._passes.step.clip / self.loss_scale)
        return gradient

    def gradient_norm(self, factor: float) -> float:
        """Return the norm of all gradients times `factor`, after any clipping, without the loss scale. All ranks call it."""
        self._passes.close_backwards()
        step = self._passes.step
        if step.norm is None:
            step.norm = math.sqrt(self._sum_squares())
        return step.norm * abs(factor) * step.clip / self.loss_scale

    def clip(self, limit: float, factor: float) -> float:
        """Scale gradients down to the norm `limit`; returns the norm before clipping. All ranks call it."""
        norm, step = self.gradient_norm(factor), self._passes.step
        step.clip, step.clipped = step.clip * min(limit / (norm + 1e-6), 1.0), True
        return norm

    def update(self, groups: Sequence[Hyperparameters], factor: float) -> bool:
        """Update with the gradients times `factor`, under a loss scale if they are finite; returns True then. All ranks call it."""
        self.require_trained("an update")
        self.require_same_parameters()
        self._passes.close_backwards()
        if self._passes.writes.unread_comparisons(self.units):
            self.read_step()
        scale = self.loss_scale
        skip = self.options.precision.loss_scale is not None and not math.isfinite(self.gradient_norm(factor))
        self.optimizer_step.begin_step(self.optimizer_step.updates, groups)
        with self._updating():
            self.optimizer_step.scaler.update(overflow=skip)
            self.optimizer_step.update(self.units, factor * self._passes.step.clip / scale, skip=skip)
        self._passes.step.used = True
        return not skip

    def forget_gradients(self, *, zeros: bool = False) -> None:
        """Forget gradients, so that the next backward is the first of its step; a single rank may do so after a failed one.
        `zeros`: parameters without a gradient count as having zero gradients in the next step."""
        if self._passes.failed and self.mesh.world_size == 1:
            self.abandon_pass()
        self._passes.require_no_failure()
        self.optimizer_step.drop_gradients()
        self._passes.step = StepGradients()
        self._passes.gradients.keep_zeros = zeros

    def _next_generation(self) -> None:
        super()._next_generation()
        self._passes.generation += 1
