"""Optimizers of any class: a trial that classifies a class's update, and its execution over the shard group by the class itself.

element by element    each rank updates the pieces of parameters in its shards; states lie as moments do
whole tensors         each parameter has one owner, which holds its whole states: for an update the owner receives the parameter's
                      gradient and weights, and returns the new weights. Owners are balanced by elements, at every stage

A class is element-wise if it asks no tensor for its size, and small ones updated in flat pieces get the values and states of whole
ones. Of states that are tensor subclasses, such as torchao's 8-bit codes, the plain inner tensors are stored; of other objects,
such as GaLore's projectors, the tensors and numbers in them. What depends on sizes is laid out by a step with its shape."""

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from zeromesh.checkpoint.io.format import DTYPE_NAMES
from zeromesh.errors import ConfigError, PhaseError, library_errors
from zeromesh.flat.layout import BucketLayout, ParameterSpec
from zeromesh.flat.redistribute import bucket_placement, redistribute
from zeromesh.intervals import grouped
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Purpose, Tier, TieredTensor, Tiers
from zeromesh.optim.fused_optimizer import BucketOptimizer, Hyperparameters, UnshardedState, state_dtype
from zeromesh.options import NO_GROUP, OptimizerClass, StatePlan, ZeroOptions
from zeromesh.units.unit import Bucket

_EXCHANGE = "exchange of tensors with their owners"
_RESERVED_NAMES = {"model", "master", "ema"}
_TRIAL_SIZES = (7, 11, 5, 3, 2)  # all different, so that a dimension of a state is recognized as the parameter's
_TRIAL_STEPS = 24
_LARGE_ELEMENTS = 1 << 13  # of a tensor large enough for 8-bit optimizers to keep its states in quantized blocks
_LARGE_STEPS = 3
_LEAST_RATE = 0.01  # the trial's lowest learning rate: a schedule may begin at 0, where an update changes nothing
_GROUP = "group_"  # the prefix of the names of states that stand for a number in the group of their parameter
_NOT_COPIED = ("param_groups", "state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SIZES = {*map(attrgetter("__get__"), (Tensor.shape, Tensor.ndim)), Tensor.numel, Tensor.nelement, Tensor.size, Tensor.dim}
_SIZES |= {torch.numel, Tensor.ndimension, Tensor.__len__}
_DEPENDS = (
    "depends on others, on groups beside its own, on its place, or on chance, and ranks update parameters on their own; use one "
    "that updates each tensor by itself, set what belongs to a parameter as its attribute, or as a value of its group, or give "
    "shard() a list of optimizers with a group each"
)
_Named = Mapping[str, Any]
_Row = tuple[Tensor, Tensor | None, _Named]  # values, gradient and states of a parameter


class ClassStates:
    """State of the optimizers of all buckets: the shard group with the elements of whole tensors that each rank owns, and numbers
    of parameter groups that a class changes. As in torch these move once in an update, whichever parameters have a gradient."""

    def __init__(self, own_class: OptimizerClass | None, group: ProcessSet) -> None:
        self.group, self.loads, self._class = group, [0] * group.size, cast(OptimizerClass, own_class)
        self.kept: dict[int, dict[str, tuple[Any, Tensor]]] = {}
        """An example of each number by group and name, and the number, float64 `[1]`: NaN before the first update has made it."""
        self.moved: dict[int, Mapping[str, Any]] = {}  # by group, what the present update has made of them on this rank
        for (number, _), plan in own_class.plans.items() if own_class is not None else ():
            examples = [(name, each) for name, each in plan.scalars.items() if name.startswith(_GROUP)]
            self.kept[number] = {name: (each, torch.tensor([math.nan]).double()) for name, each in examples}

    def of(self, group: int) -> dict[str, Any]:
        """Return the numbers of a group before the present update."""
        return {name: _to_type(example, value.item()) for name, (example, value) in self.kept[group].items() if not value.isnan()}

    def end_update(self, groups: Sequence[Hyperparameters]) -> None:
        """Move the numbers of all groups; of those without an updated parameter here, by a step of one that has no gradient."""
        for group, kept in self.kept.items():
            if kept and group not in self.moved:
                blank, inputs = blank_copy_of(self._class.parts[group][0]), [(torch.zeros(1), None, self.of(group))]
                (self.moved[group],) = _run_step(blank, groups[group], inputs, {}, kept)
            for name, (_, value) in kept.items():
                value.fill_(self.moved[group].get(name, math.nan))
        self.moved.clear()


def make_optimizers(buckets: Sequence[Bucket], options: ZeroOptions, tiers: Tiers, shared: ClassStates) -> list[BucketOptimizer]:
    """Make optimizers for the buckets. To `shared.loads`, the elements that the new optimizers own are added. Raises `ConfigError`
    for parameters that are not whole on a rank, if the class needs that."""
    own_class = options.optimizer.own_class
    if own_class is None:
        return [BucketOptimizer(bucket, options, tiers) for bucket in buckets]
    if not own_class.whole:
        return [PieceOptimizer(bucket, options, tiers, shared) for bucket in buckets]
    owners = _owners_of([bucket.layout for bucket in buckets], own_class, shared.loads)
    return [WholeOptimizer(bucket, options, tiers, shared, each) for bucket, each in zip(buckets, owners, strict=True)]


def _owners_of(layouts: Sequence[BucketLayout], own_class: OptimizerClass, loads: list[int]) -> list[dict[int, int]]:
    """Return, for each layout, the rank that owns each parameter, by its number. See `make_optimizers`."""
    owners: list[dict[int, int]] = [{} for _ in layouts]
    slots = [(slot.spec, at, n) for at, layout in enumerate(layouts) for n, slot in enumerate(layout.slots)]
    for spec, at, number in sorted(slots, key=lambda each: -each[0].numel):
        if not spec.region.is_whole:
            axis = "expert" if spec.in_experts else "tensor"
            names = " with ".join(dict.fromkeys(type(each).__name__ for each, _ in own_class.parts))
            why = f"optimizer {names} needs whole tensors, and {axis} parallelism divides {spec.name}"
            raise ConfigError(f"{why}; set parallel.{axis} to 1, or use one that works element by element, and asks for no sizes")
        if spec.group != NO_GROUP:
            owners[at][number] = loads.index(min(loads))
            loads[owners[at][number]] += spec.numel
    return owners


def most_owned_nbytes(layouts: Sequence[BucketLayout], own_class: OptimizerClass, ranks: int, wide: torch.dtype) -> int:
    """Return the most bytes of states that one of `ranks` ranks owns, for weights that are updated in dtype `wide`."""
    held = [0] * ranks
    for layout, owners in zip(layouts, _owners_of(layouts, own_class, [0] * ranks), strict=True):
        for number, rank in owners.items():
            plan = _plan_of(own_class, layout.slots[number].spec, wide)
            held[rank] += sum(each.nbytes for each in plan.tensors.values())
    return max(held)


class PieceOptimizer(BucketOptimizer):
    """The optimizer of one bucket's shard for a class whose update is element by element. Numbers that it keeps for each parameter,
    such as a step count, are float64 or int64 tensors `[parameters of the bucket]` on the CPU of each rank."""

    def __init__(self, bucket: Bucket, options: ZeroOptions, tiers: Tiers, shared: ClassStates) -> None:
        self._class = own_class = cast(OptimizerClass, options.optimizer.own_class)
        self._shared, count = shared, len(bucket.layout.slots)
        scalars = {name: each for plan in own_class.plans.values() for name, each in sorted(plan.scalars.items())}
        # Seeds are integers that a float64 does not hold.
        integers = {name: not torch.as_tensor(each).is_floating_point() for name, each in scalars.items()}
        self._scalars = {n: torch.zeros(count, dtype=torch.int64 if integers[n] else torch.float64) for n in scalars}
        self._scalars_before = self._scalars
        self._plans = [_tried_plan(own_class, slot.spec) for slot in bucket.layout.slots]
        super().__init__(bucket, options, tiers)

    def begin(self) -> None:
        super().begin()
        self._scalars_before = {name: values.clone() for name, values in self._scalars.items()}

    def whole_states(self, number: int) -> Iterator[UnshardedState]:
        of_group = self._shared.kept.get(self._bucket.layout.slots[number].spec.group, {})
        for name, values in self._scalars.items():
            value = of_group[name][1] if name in of_group else values[number : number + 1]
            yield name, value.dtype, (), TieredTensor.of(value)

    def evaluated(self, start: int, weights: Tensor, moments: Sequence[Tensor], groups: Sequence[Hyperparameters]) -> Tensor:
        if not self._class.has_modes:
            return weights
        found = weights.clone()
        for segment, (part, *given) in self._parts(start, [found, *moments]):
            if self.steps[number := segment.number]:
                state = self._state_of(number, dict(zip(self.moments, given, strict=True)), self._scalars)
                state |= self._shared.moved.get(segment.group) or self._shared.of(segment.group)
                own = self._class.parts[segment.group][0]
                known = vars(self._class.parameters[self._bucket.layout.slots[number].spec.name])
                _run_step(own, groups[segment.group], [(part, part, state)], known, call="eval")
        return found

    def _state_of(self, number: int, states: Mapping[str, Tensor], scalars: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the states of a parameter, as its class has them, from the tensors and numbers that are kept."""
        plan = self._plans[number]
        parts = dict(states) | {name: scalars[name][number].item() for name in plan.scalars}
        return {name: _rebuilt(name, example, parts) for name, example in plan.states.items()}

    def _update_part(self, number: int, group: Hyperparameters, tensors: Sequence[Tensor]) -> None:
        master, grad, *given = tensors
        plan, spec = self._plans[number], self._bucket.layout.slots[number].spec
        own, known = self._class.parts[spec.group][0], vars(self._class.parameters[spec.name])
        states = dict(zip(plan.tensors if self.whole else self._dtypes, given, strict=True))
        kept = {name: states[name] for name in plan.tensors}
        begun = self.steps[number] > 1  # In the first update the class creates the states.
        before = self._state_of(number, states, self._scalars_before) if begun else self._class.initial.get(spec.name, {})
        (state,) = _run_step(own, group, [(master, grad, {**before, **self._shared.of(spec.group)})], known, plan.scalars)
        after = _parts_of(state)
        shapes = {name: tuple(each.shape) if isinstance(each, Tensor) else () for name, each in after.items()}
        expected = {name: tuple(each.shape) for name, each in kept.items()} | dict.fromkeys(plan.scalars, ())
        if shapes != expected:
            why = f"optimizer {type(own).__name__} keeps {shapes} of {spec.name}, and {expected} by its trial: what it keeps must"
            raise PhaseError(f"{why} not depend on sizes, attributes of parameters, or what is changed after shard()")
        for name, each in kept.items():
            if after[name].data_ptr() != each.data_ptr():
                each.copy_(after[name])
        self._shared.moved[spec.group] = {name: after[name] for name in plan.scalars if name.startswith(_GROUP)}
        for name in plan.scalars:
            self._scalars[name][number] = after[name]


class WholeOptimizer(PieceOptimizer):
    """The optimizer of one bucket's parameters for a class that needs whole tensors. All ranks of the shard group call it."""

    whole = True

    def __init__(self, bucket: Bucket, options: ZeroOptions, tiers: Tiers, shared: ClassStates, owners: Mapping[int, int]) -> None:
        """`owners` maps the number of each parameter to the position of its owner in the shard group."""
        super().__init__(bucket, options, tiers, shared)
        self._group, self._owners, self._ledger = shared.group, owners, tiers.ledger
        self._states: dict[tuple[int, str], TieredTensor] = {}
        for number, owner in owners.items():
            spec = bucket.layout.slots[number].spec
            plan = self._plans[number] = _plan_of(self._class, spec, bucket.master.dtype)
            for name, each in plan.tensors.items() if owner == shared.group.index else ():
                what, at = f"{name} of {spec.name}", options.offload.optimizer
                self._states[number, name] = tiers.allocate(each.numel(), each.dtype, at, Purpose.MOMENTS, what)

    def whole_states(self, number: int) -> Iterator[UnshardedState]:
        owned = self._owners.get(number) == self._group.index
        for name, dtype, shape, values in super().whole_states(number):
            yield name, dtype, shape, values if owned else None
        for name, each in self._plans[number].tensors.items():
            yield name, each.dtype, tuple(each.shape), self._states.get((number, name))

    def step(self, start: int, tensors: Sequence[Tensor], groups: Sequence[Hyperparameters]) -> None:
        master, grad = tensors
        layout, ranks = self._bucket.layout, self._group.size
        numbers = [n for n in sorted(self._owners) if self._updated[n]]
        where = {n: layout.slots[n].where for n in numbers}
        owned = [[n for n in numbers if self._owners[n] == rank] for rank in range(ranks)]
        local = owned[self._group.index]
        lengths = [where[n].length for n in local]
        nbytes = 2 * sum(lengths) * grad.element_size()
        self._ledger.add(Tier.DEVICE, Purpose.STAGING, nbytes)
        held = bucket_placement(layout, ranks, whole=self._bucket.length == layout.padded)
        with_owners = tuple(tuple(where[n] for n in each) for each in owned)
        values, gradients = (redistribute(flat, held, with_owners, self._group, _EXCHANGE) for flat in (master, grad))
        parts = zip(local, torch.split(values, lengths), torch.split(gradients, lengths), strict=True)
        for number, value, gradient in parts:
            spec = layout.slots[number].spec
            shape = spec.shape or (1,)
            at_rest = [(self._states[number, name], each.shape) for name, each in self._plans[number].tensors.items()]
            states = [rest.load(master.device).view(own_shape) for rest, own_shape in at_rest]
            self._update_part(number, groups[spec.group], [value.view(shape), gradient.view(shape), *states])
            for (rest, _), each in zip(at_rest, states, strict=True):
                rest.write(0, each.view(-1)).wait()
        # Elements are listed owner by owner: a rank that needs all of them then gets them by one all-gather.
        back = tuple(
            tuple(common for each in owned for n in each if (common := where[n].intersect(interval)).length) for (interval,) in held
        )
        flat, places = redistribute(values, with_owners, back, self._group, _EXCHANGE), back[self._group.index]
        for at, part in zip(places, torch.split(flat, [at.length for at in places]), strict=True):
            place = at.after(self._bucket.interval.start)
            master[place.start : place.end] = part
        self._ledger.add(Tier.DEVICE, Purpose.STAGING, -nbytes)


def _tried_plan(own_class: OptimizerClass, spec: ParameterSpec) -> StatePlan:
    return own_class.plans.get((spec.group, spec.name), StatePlan(states={}, tensors={}, scalars={}))


def _plan_of(own_class: OptimizerClass, spec: ParameterSpec, dtype: torch.dtype) -> StatePlan:
    """Return the states that a class keeps for a whole parameter. Raises `ConfigError` if they depend on its elements."""
    tried, shape = _tried_plan(own_class, spec), spec.shape or (1,)  # A scalar is updated as a vector of one.
    if not tried.by_size:
        sizes = dict(zip(_TRIAL_SIZES, shape, strict=False))
        tensors = {
            name: each.new_empty([sizes.get(size, size) for size in each.shape], dtype=state_dtype(each, dtype))
            for name, each in tried.tensors.items()
        }
        return replace(tried, tensors=tensors)
    key = id(tried), shape
    if key not in own_class.sized:
        own, group = own_class.parts[spec.group]
        name, given = type(own).__name__, vars(own_class.parameters[spec.name])
        # The codes of subclasses are planned without memory; other classes may compute in ways that meta tensors do not have.
        codes = any(hasattr(each, "__tensor_flatten__") for each in tried.states.values())
        value = torch.empty(shape, dtype=dtype, device="meta") if codes else torch.zeros(shape, dtype=dtype)
        gradient = value if codes else torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        unknown = f"optimizer {name} keeps states that depend on sizes, and which it keeps of {spec.name} is not known"
        inputs, failed = [(value, gradient, own_class.initial.get(spec.name, {}))], "a step with its shape failed: "
        with library_errors(before=f"{unknown}: {failed}"), torch.compiler.set_stance("force_eager"):
            (state,) = _run_step(blank_copy_of(own), group, inputs, given, tried.scalars)
        own_class.sized[key] = _state_plan(name, state)
    return own_class.sized[key]


def _to_type(example: Any, number: Any) -> Any:
    return torch.as_tensor(number, dtype=example.dtype) if isinstance(example, Tensor) else type(example)(number)


def _parts_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """Split states into plain tensors and numbers by their stored names, 8-bit floats as uint8. Raises `ValueError` for others."""
    parts: dict[str, Any] = {}
    for name, state in states.items():
        if _is_number(state):
            parts[name] = state
        elif inner := _inner_parts(name, state):
            parts |= _parts_of({f"{name}.{each}": value for each, value in inner.items()})
        elif isinstance(state, Tensor):
            bits = state.is_floating_point() and state.dtype.itemsize == 1
            parts[name] = state.view(torch.uint8) if bits else state
        elif state is not None and not hasattr(state, "__dict__"):
            raise ValueError(f"it keeps a {type(state).__name__} as {name!r}")
    return parts


def _inner_parts(name: str, state: Any) -> dict[str, Any]:
    """Return the inner tensors of a tensor subclass, or the tensors and numbers among the attributes of another object."""
    if hasattr(state, "__tensor_flatten__"):
        return {each: getattr(state, each) for each in state.__tensor_flatten__()[0]}
    if isinstance(state, Tensor) or not hasattr(state, "__dict__"):
        return {}
    kept = {each: value for each, value in vars(state).items() if not isinstance(value, bool | str | None)}
    for each, value in kept.items():
        if not isinstance(value, Tensor) and type(value) not in (int, float):
            raise ValueError(f"it keeps a {type(value).__name__} as {name}.{each}")
    return kept


def _rebuilt(name: str, example: Any, parts: Mapping[str, Any]) -> Any:
    """Make a state like `example` from its parts, as `_parts_of` names them."""
    if _is_number(example):
        return _to_type(example, parts[name])
    inner = {each: _rebuilt(f"{name}.{each}", value, parts) for each, value in _inner_parts(name, example).items()}
    if hasattr(example, "__tensor_flatten__"):
        context, kind = example.__tensor_flatten__()[1], type(example)
        return kind.__tensor_unflatten__(inner, context, example.shape, example.stride())
    if isinstance(example, Tensor):
        return parts[name].view(example.dtype) if example.dtype.itemsize == 1 else parts[name]
    made = copy.copy(example)
    if inner:
        vars(made).update(inner)
    return made


def blank_copy_of(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer with the attributes of another one, but neither its groups and states nor its hooks."""
    blank = type(optimizer).__new__(type(optimizer))
    vars(blank).update(own_attributes(optimizer))
    blank._optimizer_step_pre_hooks, blank._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return blank


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that an optimizer's class and users have given it."""
    return {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}


def _run_step(
    own: Optimizer,
    group: _Named,
    rows: Iterable[_Row],
    given: _Named,
    kept: Iterable[str] = (),
    call: str = "step",
    within: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it has no state
) -> list[dict[str, Any]]:
    """Update values in place, by the method `call`; `rows` are of parameters, and `given` the attributes of each. Returns the
    states after the update, and among them the numbers of the group that are in a given state, in `kept`, or changed."""
    blank, marks = blank_copy_of(own), _mark(given)
    values, gradients, states = zip(*rows, strict=True)
    parameters = [nn.Parameter(value) for value in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
        vars(parameter).update(given)
    moved = {name.removeprefix(_GROUP): value for name, value in states[0].items() if name.startswith(_GROUP)}
    own_states = [{name: value for name, value in each.items() if not name.startswith(_GROUP)} for each in states]
    _fill(blank, [{"params": parameters, **plain_group(group), **moved}], zip(parameters, own_states, strict=True))
    with within:
        getattr(blank, call)()
    vars(own).update(own_attributes(blank))
    for parameter, value in zip(parameters, values, strict=True):
        now = {name: each for name, each in vars(parameter).items() if name in given or not name.startswith("_dynamo")}
        if _mark(now) != marks:
            raise ValueError("it sets attributes of parameters")
        if parameter.data_ptr() != value.data_ptr():  # The class has replaced the parameter's memory.
            value.copy_(parameter.detach())
    if strange := [key for key in blank.state if all(key is not each for each in parameters)]:
        raise ValueError(f"it keeps a state under {strange[0]!r:.60}, which is no parameter")
    was, now = plain_group(group), plain_group(blank.param_groups[0])
    numbers = {
        f"{_GROUP}{name}": value
        for name, value in now.items()
        if name in moved or f"{_GROUP}{name}" in kept or name not in was or (value is not was[name] and value != was[name])
    }
    found = [blank.state[parameter] for parameter in parameters]
    if wrong := [name for name in chain.from_iterable(found) if str(name).startswith(_GROUP)]:
        raise ValueError(f"it has a state {wrong[0]!r}, which is no name of its own")
    return [state | numbers for state in found]


def _fill(blank: Optimizer, groups: list[dict[str, Any]], states: Iterable[tuple[Tensor, _Named]]) -> None:
    blank.param_groups, blank.state = groups, defaultdict(dict, states)
    if hasattr(blank, "check_overrides"):  # See `take_overrides`.
        parameters = chain.from_iterable(group["params"] for group in groups)
        vars(blank)["mng"].pid2config = {id(each): vars(each).get("optim_overrides", {}) for each in parameters}


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters for a step on any device, without parameters, their names in lists of any name, and options
    that choose kernels of a device. Tensors are copied, so that a change by the class is detected."""
    count = len(group.get("params", ()))
    lists = {name: each for name, each in group.items() if isinstance(each, list) and len(each) == count > 1}
    names = {name for name, each in lists.items() if isinstance(each[0], str)}
    plain = {name: value for name, value in group.items() if name not in {"params", "param_names", *names}}
    plain |= {name: value.to("cpu", copy=True) for name, value in plain.items() if _is_scalar(value)}
    return plain | {name: False for name in ("foreach", "fused", "capturable") if name in plain}


def take_overrides(*optimizers: Any) -> None:
    """Set what the manager of bitsandbytes overrides for parameters, which it knows by identity, as their attributes, which pieces
    have too: as `{"optim_bits": 32}` for embeddings. Its optimizers get managers of their own."""
    for own in [each for each in optimizers if hasattr(each, "check_overrides")]:
        own.check_overrides()
        for each in chain.from_iterable(group["params"] for group in own.param_groups):
            if config := own.mng.pid2config.get(id(each)):
                each.optim_overrides = dict(config)
        own.mng = copy.copy(own.mng)
        own.mng.initialize()


def classify(*optimizers: Optimizer, names: Mapping[int, str]) -> OptimizerClass:
    """Find out if optimizers update elements or tensors, else raise `ConfigError`, and what they keep; `names` are by id."""
    plans, trials, whole = dict[tuple[int, str], StatePlan](), dict[int, _Trial](), False
    parts = tuple((each, group) for each in optimizers for group in each.param_groups)
    for number, (own, group) in enumerate(parts):
        # A class may read what users have set on a parameter.
        alike = grouped(((max(1, each.dim()), repr(vars(each))), each) for each in group["params"])
        for (dims, _), those in sorted(alike.items(), key=itemgetter(0)):
            if dims > len(_TRIAL_SIZES):
                why = f"has a parameter of {dims} dimensions; allowed are {len(_TRIAL_SIZES)}"
                raise ConfigError(f"optimizer {type(own).__name__} {why}")
            trial = _Trial(own, group, those[0], _TRIAL_SIZES[:dims], _TRIAL_STEPS)
            shape = (_LARGE_ELEMENTS,) if dims == 1 else (*[2] * (dims - 2), 64, _LARGE_ELEMENTS >> (dims + 4))
            trials |= dict.fromkeys(map(id, those), trial)
            small, large = trial.plan, _Trial(own, group, those[0], shape, _LARGE_STEPS).plan
            kinds = [{name: each.dtype for name, each in plan.tensors.items()} for plan in (small, large)]
            plain = all(s is None or _is_number(s) or type(s) is Tensor for s in large.states.values())
            by_size = not plain or kinds[0] != kinds[1] or (trial.element_wise and trial.sizes.asked)
            plan = replace(small, states=small.states | large.states, scalars=small.scalars | large.scalars, by_size=by_size)
            plans.update(((number, names[id(each)]), plan) for each in those)
            whole = whole or by_size or not trial.element_wise
    for own in optimizers:
        failed = f"optimizer {(name := type(own).__name__)}: a trial of its step on all parameters failed: "
        with library_errors(before=failed), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            try:
                same = _in_places(own, trials, 0.25)
            except Exception:  # noqa: BLE001 - a class may want the same values in all groups
                same = _in_places(own, trials, 0.0)
        if not same:
            raise ConfigError(f"optimizer {name}: its update of one parameter {_DEPENDS}")
    return OptimizerClass(parts=parts, whole=whole, plans=plans)


def _in_places(own: Optimizer, trials: Mapping[int, "_Trial"], spread: float) -> bool:
    """Return True if an optimizer that has a tensor of a trial in the place of each parameter updates them as it does each alone.
    Values of its groups differ by up to a part of `spread`."""
    rows, groups = list[tuple[nn.Parameter, _Trial, Tensor]](), list[dict[str, Any]]()
    for number, group in enumerate(own.param_groups):
        tried, factor = [trials[id(each)] for each in group["params"]], 1 - spread * number / len(own.param_groups)
        values = plain_group(tried[0].group if tried else group)
        values |= {name: value * factor for name, value in values.items() if type(value) is float}
        alone = {each: each.run(itemgetter(slice(0, 1)), values, _LARGE_STEPS)[0][0] for each in tried}
        here = [(nn.Parameter(each.values[0].clone()), each, alone[each]) for each in tried]
        groups.append({**values, "params": [parameter for parameter, *_ in here]})
        rows += here
    for parameter, trial, _ in rows:
        vars(parameter).update(trial.given)
    _fill(blank := blank_copy_of(own), groups, [(each, dict(trial.initial)) for each, trial, _ in rows if trial.initial])
    for step in range(_LARGE_STEPS):
        for parameter, trial, _ in rows:
            parameter.grad = trial.gradients[step][0].clone()
        blank.step()
    return all(torch.allclose(each.detach(), alone, rtol=1e-9, atol=1e-12) for each, _, alone in rows)


class _SizeMode(TorchFunctionMode):
    """Notes in `asked` if code asks for the size of a tensor of a trial, or of a state in its place."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked |= func in _SIZES and (not args or args[0].numel() > 1)
        return func(*args, **(kwargs or {}))


class _Trial:
    """Runs a class's updates on two tensors, the first of `shape`: `plan` has its states, `element_wise` if pieces suffice."""

    def __init__(self, own: Optimizer, group: Hyperparameters, like: Tensor, shape: Sequence[int], steps: int) -> None:
        self._blank, self.given = blank_copy_of(own), vars(like)
        """It runs all updates, so that what one of them leaves in it would change the others."""
        self._name, self.group, self.sizes = type(own).__name__, plain_group(group), _SizeMode()
        self.initial = next((dict(own.state[each]) for each in group["params"] if each in own.state), {})
        if isinstance(rate := self.group.get("lr"), float | int | Tensor):
            self.group["lr"] = _to_type(rate if isinstance(rate, Tensor) else 0.0, max(float(rate), _LEAST_RATE))
        random, shapes = torch.Generator().manual_seed(0), (shape, shape[::-1] if len(shape) > 1 else _TRIAL_SIZES[1:2])
        self.values, *self.gradients = [
            [10.0 ** ((step + 1) % 4 - 2) * torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]
            for step in range(1, steps + 2)
        ]
        each = slice(0, 1), slice(1, 2)  # Of the two tensors.
        failed = f"optimizer {self._name}: a trial of its step on tensors of {len(shape)} dimensions failed: "
        # A class may compile its step for each shape, which takes longer than the trial.
        with library_errors(before=failed), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            values, states = self.run(list)
            alone = [self.run(itemgetter(one)) for one in each]
        self.plan = _state_plan(self._name, states[0])
        if not all(self._equal(run, (values[one], states[one])) for run, one in zip(alone, each, strict=True)):
            raise ConfigError(f"optimizer {self._name}: its update of one parameter {_DEPENDS}")
        self._updated_alone = alone[0]

    @property
    def element_wise(self) -> bool:
        if any(each.shape != self.values[0].shape for each in self.plan.tensors.values()):
            return False
        try:
            with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
                cut = self.run(lambda tensors: tensors[0].view(-1).tensor_split([tensors[0].numel() // 3]))
                return self._equal(cut, self._updated_alone)
        except Exception:  # noqa: BLE001 - any error shows that the class cannot update pieces
            return False

    def run(
        self, parts: Callable[[list[Tensor]], Iterable[Tensor]], group: _Named | None = None, steps: int | None = None
    ) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Return values and states after all steps of an optimizer of these parts of the tensors."""
        values = [each.clone() for each in parts(self.values)]
        states = [dict(self.initial) for _ in values]
        for step, gradients in enumerate(self.gradients[:steps]):
            inputs = zip(values, [each.clone() for each in parts(gradients)], states, strict=True)
            states = _run_step(self._blank, group or self.group, inputs, self.given, within=self.sizes)
            names = [{name for name in _parts_of(state) if not name.startswith(_GROUP)} for state in states]
            marks = {name: _mark(each) for name, each in own_attributes(self._blank).items()}
            if not step:  # A class may prepare itself in its first update.
                first, before = names, marks
            if names != first:
                raise ValueError("it keeps other states after the first update")
            for name in states[0]:
                if name == f"{_GROUP}lr" or (name.startswith(_GROUP) and not _is_number(states[0][name])):
                    raise ValueError(f"it changes {name.removeprefix(_GROUP)} of its groups")
        if changed := [name for name, mark in marks.items() if before.get(name) != mark]:
            raise ValueError(f"it keeps {', '.join(changed)} outside of the states of parameters")
        return values, states

    def _equal(self, *runs: tuple[list[Tensor], list[dict[str, Any]]]) -> bool:
        flat, scalars = [], []
        for values, states in runs:
            parts = [_parts_of(state) for state in states]
            names = dict.fromkeys(name for each in parts for name, value in each.items() if not _is_number(value))
            tensors = [each[name] for name in names for each in parts if name in each]
            flat.append(torch.cat([each.flatten().double() for each in (*values, *tensors)]))
            rows = [[float(each.get(name, math.nan)) for name in self.plan.scalars] for each in parts]
            scalars.append(torch.tensor(rows, dtype=torch.float64))
        same = flat[0].shape == flat[1].shape and torch.allclose(flat[0], flat[1], rtol=1e-9, atol=1e-12)
        return same and torch.allclose(scalars[0], scalars[1].expand_as(scalars[0]), rtol=1e-9, atol=1e-12)


def _state_plan(optimizer: str, state: Mapping[str, Any]) -> StatePlan:
    """Plan the states that a class keeps of a parameter. Raises `ConfigError` for what no checkpoint can store."""
    plan = StatePlan(states={}, tensors={}, scalars={})
    for name, value in state.items():
        if not str(name).isidentifier() or name in _RESERVED_NAMES:
            raise ConfigError(f"optimizer {optimizer} has a state {name!r}, which is no name for a checkpoint's files")
        parts = _parts_of({name: value})
        numbers = {part: each for part, each in parts.items() if _is_number(each)}
        tensors = {part: torch.empty_like(each, device="meta") for part, each in parts.items() if part not in numbers}
        divided = hasattr(value, "__tensor_flatten__") and numbers
        if divided or any(each.dtype not in DTYPE_NAMES for each in tensors.values()):
            kind = value.dtype if type(value) is Tensor else type(value).__name__
            why = f"optimizer {optimizer} keeps {kind} as {name!r}; allowed are tensors, subclasses of them and objects"
            cure = 'take torch.optim.AdamW with offload={"optimizer": "host"} or {"optimizer": "file"}'
            raise ConfigError(f"{why} made of plain tensors, and numbers. Where memory is short, {cure}")
        plan.states[name] = _rebuilt(name, value, tensors | numbers)
        plan.tensors.update(tensors)
        plan.scalars.update(numbers)
    return plan


def _mark(value: Any) -> Any:
    """Return a mark of a value that changes when the value does, also in place."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return [(id(key), _mark(each)) for key, each in value.items()]
    return list(map(_mark, value)) if isinstance(value, list | tuple | set) else id(value)


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float) or _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim()
