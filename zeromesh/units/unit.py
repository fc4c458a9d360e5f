"""Units and their buckets at run time.

[Note: Parameters at rest] A parameter at rest has a subclass of its class, whose `__torch_function__` receives every PyTorch
operation on it. Queries of metadata (shape, dtype, gradient, hooks) are answered. Anything else calls `wake`, which makes the
parameter's unit live or raises, and then runs on the same object with its class and values restored. Operations that ignore
overrides (TorchScript, collectives of torch.distributed) see NaN."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar

import torch
import xxhash
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.utils import _pytree as pytree

from zeromesh.comm.transport import GatherBuffer, Transport
from zeromesh.comm.wire import Wire, gather_parts
from zeromesh.errors import PhaseError
from zeromesh.flat.layout import BucketLayout, ParameterSpec
from zeromesh.intervals import Interval
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Ledger, Purpose, Tier, TieredTensor
from zeromesh.offload.accelerator import on_accelerator

_ATTRIBUTES = (
    "shape dtype device layout ndim requires_grad grad _grad grad_fn is_leaf grad_dtype names name output_nr retains_grad "
    "itemsize nbytes is_cpu is_cuda is_meta is_quantized is_sparse is_sparse_csr is_mkldnn is_mps is_xla is_xpu is_ipu is_mtia "
    "is_maia is_vulkan is_nested _version _base _cdata _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex "
    "is_signed is_inference is_conj is_neg is_same_size get_device register_hook register_post_accumulate_grad_hook "
    "requires_grad_ retain_grad dim_order __len__ __hash__ _is_view"
)
_METADATA = frozenset(
    [getattr(owner, name, None) for name in _METHODS.split() for owner in (torch.Tensor, torch)]
    + [
        getattr(getattr(torch.Tensor, name, None), access, None)
        for name in _ATTRIBUTES.split()
        for access in ("__get__", "__set__", "__delete__")
    ]
) - {None}
"""The functions, as `__torch_function__` receives them, that neither read nor write a tensor's values."""


class ParameterMeta(type(nn.Parameter)):  # type: ignore[misc]  # torch gives the metaclass no types.
    """The metaclass of parameter classes: instances of their `live_type` count as theirs, as `torch.testing.assert_close` asks."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = vars(cls).get("live_type")
        return bool(super().__instancecheck__(instance) if kind is None else isinstance(instance, kind))


def make_subclass(base: Any, kind: type[nn.Parameter], name: str, **attributes: Any) -> Any:
    return type(name, (base,) if kind is nn.Parameter else (base, kind), {"live_type": kind, **attributes})


class AtRest(nn.Parameter, metaclass=ParameterMeta):
    """A parameter at rest; its first use calls `on_use` with it. See [Note: Parameters at rest]."""

    on_use: ClassVar[Callable[[nn.Parameter], None]]
    live_type: ClassVar[type[nn.Parameter]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for each in pytree.tree_leaves((args, kwargs)):
            if isinstance(each, AtRest):
                each.wake()
        return func(*args, **kwargs)

    def wake(self) -> None:
        """Make the values usable, which restores the parameter's class. Raises `PhaseError` if they cannot be gathered."""
        type(self).on_use(self)
        if isinstance(self, AtRest) and not isinstance(self, Watched):
            raise PhaseError(f"a parameter of shape {tuple(self.shape)} was to be made usable, and still rests")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.wake()
        return self.__deepcopy__(memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            self.wake()
        except PhaseError as error:
            return f"Parameter at rest, {tuple(self.shape)}, {self.dtype}: {error}"
        return repr(self)


class Watched(AtRest):  # type: ignore[metaclass]  # torch gives it no types.
    """A parameter with values that no module runs with. Computing with gradients from it calls `on_use`, which raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        used = [(each, type(each)) for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Watched)]
        result = super().__torch_function__(func, types, args, kwargs)
        for parameter, kind in used:
            if any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in pytree.tree_leaves(result)):
                kind.on_use(parameter)
            parameter.__class__ = kind
        return result

    def wake(self) -> None:
        self.__class__ = type(self).live_type  # type: ignore[assignment]


def set_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Replace the values of a parameter, which may be at rest."""
    if issubclass(kind := type(parameter), AtRest):  # `isinstance` would call the slower metaclass of parameters.
        parameter.__class__ = kind.live_type
    parameter.data = values


def live_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    kind = type(parameter)
    return kind.live_type if issubclass(kind, AtRest) else kind


class Phase(Enum):
    RESTING = "resting"  # Parameters are not usable: sharded, or out of date.
    GATHERING = "gathering"
    LIVE = "live"  # Parameters are whole and current.


_NEXT_PHASE = {Phase.RESTING: Phase.GATHERING, Phase.GATHERING: Phase.LIVE, Phase.LIVE: Phase.RESTING}
_version_of = attrgetter("_version")
FLAG: Any = vars(torch._C.TensorBase)["requires_grad"]  # as autograd sees it
_FIRST_FORWARDS = 2
_DIGEST_WORDS = 1 << 22  # summed at a time
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UseCallback:
    """Calls `on_use` with the name of a parameter used at rest. Parameter classes that refer to the bucket would keep it alive."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: BucketLayout) -> None:
        self._names = {id(parameter): slot.spec.fqn for parameter, slot in zip(parameters, layout.slots, strict=True)}
        self.on_use: Callable[[str], None] = refuse_closed

    def __call__(self, used: nn.Parameter) -> None:
        self.on_use(self._names[id(used)])

    def refuse(self, used: nn.Parameter) -> None:
        what = f"parameter {self._names[id(used)]} was used outside of the model's modules, as by a penalty in the loss"
        why = "ranks divide more than samples (parallel.tensor, expert or context): it would count otherwise than in one process"
        cure = "Use optimizer.weight_decay, compute it in a module, or train without these axes; read it under torch.no_grad()"
        raise PhaseError(f"{what}, while {why}. {cure}")


@dataclass(eq=False, slots=True)
class StateGroup:
    """The ranks that share the states of some buckets. `transport` moves their parameters, and `reduction` their gradients, in
    slots of `slot_bytes`; they are one object if both are sharded. `replicas` are the ranks with the same shards as this one."""

    ranks: ProcessSet
    replicas: ProcessSet
    transport: Transport
    reduction: Transport
    slot_bytes: int
    sequence: int = 0  # the number of the next reduction


@dataclass(eq=False, repr=False)
class Bucket:
    """The parameters of a unit in one flat buffer: of one dtype, and all trained or all frozen when the model was built."""

    layout: BucketLayout
    group: StateGroup
    parameters: Sequence[nn.Parameter]
    buffer: GatherBuffer
    held: Interval
    """The elements whose parameters, and gradients in sum over the ranks of the group, this rank has: its shard, or all of them."""
    master: TieredTensor
    copy: TieredTensor | None
    """The copy of the elements that are `held` which is gathered, in place of the master weights; None: it is they themselves."""

    def __post_init__(self) -> None:
        layout = self.layout
        self.name = layout.name
        self.unit_index = 0  # `Unit` sets it.
        self.spec = layout.first
        self.dtype = self.spec.dtype
        self.shared_by, self.counted_at = self.spec.shared_by, self.spec.counted_at
        self.gaps = [slice(gap.start, gap.end) for gap in layout.gaps()]
        self.training = [slot.spec.requires_grad for slot in layout.slots]
        """True for each parameter that is trained in the current step."""
        self.watched = [slot.spec.part is not None for slot in layout.slots]
        """True for each parameter of which this rank has or sees a part, so that only modules can compute with it."""
        self.missing: frozenset[int] = frozenset()
        """The indices of parameters without a gradient on any rank in the current step, which keep their values."""
        self.set_trainable(any(self.training))
        self.ever_trained = {slot.spec.fqn for slot in layout.slots if slot.spec.requires_grad}
        self.average: TieredTensor | None = None
        """The moving average of the master weights; None if nothing of the bucket was ever trained, or none is kept."""
        self.outer: Sequence[TieredTensor] = ()
        """With local steps the weights of the last sync and the outer momentum, as far as the outer optimizer needs them."""
        self.grad: torch.Tensor | None = None
        self.grad_rest: TieredTensor | None = None
        self.partial: torch.Tensor | None = None
        poison = torch.full((), float("nan") if self.dtype.is_floating_point else 0, dtype=self.dtype)
        poison = poison.to(self.buffer.full.device)
        flat = self.buffer.make_views([slot.where for slot in layout.slots])
        self._views = [view.view(slot.spec.shape) for view, slot in zip(flat, layout.slots, strict=True)]
        self._placeholders = [poison.expand(slot.spec.shape) for slot in layout.slots]
        self.use_callback = UseCallback(self.parameters, layout)
        self.set_live_classes(list(map(type, self.parameters)))
        self._versions: list[int] = []
        self._digests: list[torch.Tensor] = []
        self._versions_unreliable = False
        """True if version counters rise without changes of values, as under parametrizations, and cannot be used."""
        self.first_changed: torch.Tensor | None = None
        """On a device, the unread index of the first parameter changed through `.data`; the number of parameters if none was."""

    def rows(self) -> Iterator[tuple[ParameterSpec, nn.Parameter, bool]]:
        """Return each parameter's spec, the parameter, and whether it is trained in the current step."""
        return zip((slot.spec for slot in self.layout.slots), self.parameters, self.training, strict=True)

    def set_trainable(self, trainable: bool) -> None:
        self.trainable, self.divided = trainable, trainable and self.layout.dividers > 1
        """True if it has memory for moments and gradients, as a parameter of it is or was trained; and if replicas divide it."""
        self.interval = self.layout.part(self.held, self.group.replicas.index) if self.divided else self.held
        """The elements whose states this rank has and updates: those that are `held`, or a part of them."""
        self.length = self.interval.length

    def summed_gradient(self, *, in_memory: bool = False) -> TieredTensor | None:
        """The sum of a whole step. Of a shard that replicas divide, this rank's part is at the beginning of the shard's memory.
        `in_memory`, where backward updates by it: None for one that is not, as what rests is of earlier microbatches."""
        rest = None if in_memory else self.grad_rest
        summed = rest if self.grad is None else TieredTensor.of(self.grad)
        return summed.slice(0, self.length) if summed is not None and self.divided else summed

    @property
    def own_copy(self) -> TieredTensor | None:
        """The part of the copy whose master weights this rank has."""
        if self.copy is None or not self.divided:
            return self.copy
        own = self.interval.after(self.held.start)
        return self.copy.slice(own.start, own.end)

    def share_copy(self, wire: Wire = None, encoded: torch.Tensor | None = None) -> Callable[[], None]:
        """Start to gather a shard that replicas divide, of which each has written its part, or with a codec has `encoded` what it
        differs by; returns a call that waits for it. One that rests elsewhere is there at once, as all would not fit in memory."""
        copy, device = self.copy, self.buffer.full.device
        if copy is None or not self.divided:
            return lambda: None
        whole = copy.load(device)  # Only here is a copy needed that rests elsewhere.
        wait = gather_parts(self.group.replicas, whole, self.interval.after(self.held.start), wire, encoded)
        if copy.whole(device) is not None:
            return wait
        wait()
        copy.write(0, whole).wait()
        return lambda: None

    def set_live_classes(self, kinds: Sequence[type[nn.Parameter]]) -> None:
        on_use = staticmethod(self.use_callback)
        resting = {each: make_subclass(AtRest, each, f"{each.__name__}AtRest", on_use=on_use) for each in set(kinds)}
        self._resting_classes: list[type[AtRest]] = [resting[kind] for kind in kinds]
        refuse = staticmethod(self.use_callback.refuse)
        watched = {each: make_subclass(Watched, each, f"{each.__name__}Watched", on_use=refuse) for each in set(kinds)}
        self._watched_classes: list[type[Watched]] = [watched[kind] for kind in kinds]
        for parameter, kind in zip(self.parameters, kinds, strict=True):
            parameter.__class__ = resting[kind] if issubclass(type(parameter), AtRest) else kind

    def changed_flags(self) -> list[int]:
        """Return the indices of parameters whose `requires_grad` has changed since `training` was recorded."""
        with torch._C.DisableTorchFunctionSubclass():  # This skips the slow overrides of parameters at rest.
            flags = list(map(FLAG.__get__, self.parameters))
        return [] if flags == self.training else [n for n, flag in enumerate(flags) if flag != self.training[n]]

    def adopt_requires_grad(self, *, within_step: bool = False) -> None:
        was = self.training if within_step else [False] * len(self.parameters)
        self.training = [each.requires_grad or before for each, before in zip(self.parameters, was, strict=True)]
        self.ever_trained.update(spec.fqn for spec, _, trained in self.rows() if trained)

    def show_values(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            set_values(parameter, view)
        self._versions = list(map(_version_of, self.parameters))
        if self._versions_unreliable:
            self.record_digests()

    def watch(self, watching: bool) -> None:
        """Refuse, or no longer, that other code than modules computes with gradients from live parameters that are `watched`."""
        for parameter, kind, watched in zip(self.parameters, self._watched_classes, self.watched, strict=True):
            if watched and type(parameter) in (kind, kind.live_type):
                parameter.__class__ = kind if watching else kind.live_type

    def hide_values(self) -> None:
        """Replace the parameters by NaN of equal shape, in the class that calls `on_use` at their first use."""
        for parameter, rest, kind in zip(self.parameters, self._placeholders, self._resting_classes, strict=True):
            if type(parameter) is not kind:
                set_values(parameter, rest)
                parameter.__class__ = kind

    def record_digests(self) -> None:
        """Record the values of the live parameters, so that `changed_parameter` finds writes that leave no other trace."""
        self._digests = [digest(view) for view in self._views]

    def changed_parameter(self) -> str | None:
        """Return the name of a parameter changed in place since it was shown, or since the last call; None if there is none."""
        replaced = self._outside_buffer(cast=False)  # Parameters with replaced memory, as by `parameter.data = values`.
        for number in replaced:
            self._views[number].copy_(self.parameters[number].detach())
            set_values(self.parameters[number], self._views[number])
        versions = list(map(_version_of, self.parameters))
        if versions == self._versions and not (self._digests or replaced):
            return None
        counted = [number for number, old in enumerate(self._versions) if old != versions[number]]
        noted, self._versions, self._digests = self._digests, versions, []
        changed = replaced if noted else replaced + counted
        if noted and on_accelerator(noted[0]):
            same = torch.stack(noted) == torch.stack([digest(view) for view in self._views])
            first, before = same.to(torch.float32).cumprod(0).sum(), self.first_changed
            self.first_changed = first if before is None else torch.minimum(before, first)
        else:
            changed += [number for number, old in enumerate(noted) if old != digest(self._views[number])]
        self._versions_unreliable = self._versions_unreliable or bool(noted and counted)
        if self._versions_unreliable:
            self.record_digests()
        return self.layout.slots[min(changed)].spec.fqn if changed else None

    def drop_casts(self) -> None:
        """Undo `module.to(dtype)` on live parameters, for evaluation."""
        for number in self._outside_buffer(cast=True):
            set_values(self.parameters[number], self._views[number])

    def _outside_buffer(self, *, cast: bool) -> list[int]:
        """Return the indices of live parameters outside the gathered buffer: with `cast` those of another dtype."""
        here, there = (list(map(torch.Tensor.data_ptr, each)) for each in (self.parameters, self._views))
        outside = [] if here == there else [number for number, place in enumerate(here) if place != there[number]]
        return [number for number in outside if (self.parameters[number].dtype != self._views[number].dtype) is cast]


class Unit:
    """A module whose parameters are gathered and released together; `phase` says if they are usable now. One that `is_fetched` has
    experts, which are brought as tokens choose them (`experts/fetch.py`): it is gathered only if others read its parameters."""

    is_fetched = False

    def __init__(self, index: int, name: str, module: nn.Module, buckets: Sequence[Bucket], ledger: Ledger) -> None:
        self.index, self.name, self.module = index, name, module
        self.buckets = tuple(buckets)
        self.phase = Phase.RESTING
        for bucket in self.buckets:
            bucket.unit_index = index
        self._ledger = ledger
        self._transient = sum(bucket.buffer.transient_nbytes(bucket.group.transport.share) for bucket in self.buckets)
        self._decoded = sum(bucket.buffer.decoded_nbytes for bucket in self.buckets)
        self.adopt_requires_grad()

    def adopt_requires_grad(self, *, within_step: bool = False) -> None:
        """Train the parameters with `requires_grad`; `within_step` those that were trained before in it, too."""
        for bucket in self.buckets:
            bucket.adopt_requires_grad(within_step=within_step)
        self.trainable = tuple(bucket for bucket in self.buckets if any(bucket.training))
        """The buckets that receive gradients in the current step."""
        self.writes_persist = all(
            bucket.buffer.persistent and bucket.copy is None and bucket.length == bucket.layout.padded for bucket in self.buckets
        )
        """True if in-place changes of parameters persist, since the gathered memory is that of all master weights."""

    def names(self) -> list[str]:
        specs = [slot.spec for bucket in self.buckets for slot in bucket.layout.slots]
        return [name for spec in specs for name in (spec.fqn, *spec.aliases)]

    def name_of(self, parameter: torch.Tensor) -> str:
        found = (spec.fqn for bucket in self.buckets for spec, each, _ in bucket.rows() if each is parameter)
        return next(found, f"a parameter of {self.name}")

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or is_wrapped(tensor):
            return False
        near = [bucket for bucket in self.buckets if bucket.buffer.full.device == tensor.device]
        return any(0 <= tensor.data_ptr() - bucket.buffer.full.data_ptr() < bucket.layout.nbytes for bucket in near)

    def record_digests(self) -> None:
        for bucket in self.buckets:
            bucket.record_digests()

    def enter(self, phase: Phase) -> None:
        if phase is not _NEXT_PHASE[self.phase]:
            cure = f"it can become {_NEXT_PHASE[self.phase].value}"
            raise PhaseError(f"unit {self.name} is {self.phase.value} and cannot become {phase.value}; {cure}")
        self.phase = phase

    def _count(self, nbytes: int) -> None:
        if nbytes:
            self._ledger.add(Tier.DEVICE, Purpose.PARAMETERS, nbytes)

    def gather(self) -> None:
        self._count(self._transient)
        self.enter(Phase.GATHERING)
        for bucket in self.buckets:
            bucket.buffer.gather(bucket.copy or bucket.master)

    def wait(self) -> None:
        """Wait until the gather is complete, and make the parameters views of the gathered values."""
        self._count(self._decoded)
        for bucket in self.buckets:
            bucket.buffer.wait()
        self.enter(Phase.LIVE)
        for bucket in self.buckets:
            bucket.show_values()

    def leave(self) -> None:
        """Release the unit's parameters if they are gathered, after waiting for a gather in flight."""
        if self.phase is Phase.GATHERING:
            self.wait()
        if self.phase is Phase.LIVE:
            self.rest()

    def rest(self) -> None:
        """Hide the parameters, and release the memory that the transport does not keep."""
        self._count(-self._transient - self._decoded)
        for bucket in self.buckets:
            bucket.hide_values()
            bucket.buffer.release()
        self.enter(Phase.RESTING)


class InplaceWrites:
    """Detects parameters that were changed in place. Version counters are compared in every pass. Digests of values, which show
    writes through `.data` too, are compared in the `_FIRST_FORWARDS` of each unit, then of one unit a forward, of parameters that
    were read between steps, and from then on of those whose counters rise without a change."""

    def __init__(self, *, alone: bool) -> None:
        self._is_alone = alone  # True if no other rank has copies or shards of the parameters
        self.training_forwards = 0
        self._calls: Counter[int] = Counter()

    def record(self, unit: Unit, units: int) -> None:
        """Record digests of a unit that is about to run forward: in its first forwards, then in one of every `units` forwards."""
        self._calls[unit.index] += 1
        if self._calls[unit.index] <= _FIRST_FORWARDS or self.training_forwards % units == unit.index:
            self.require_unchanged_in_pass([unit])  # Compare the values noted before the unit's earlier call.
            unit.record_digests()

    def require_unchanged_in_pass(self, units: Iterable[Unit]) -> None:
        """Raise `PhaseError` if forward has changed a parameter, since ranks would train different weights."""
        for unit, name in _changed_parameters(units):
            self._raise_changed(unit, name)

    def unread_comparisons(self, units: Iterable[Unit]) -> list[tuple[Unit, Bucket, torch.Tensor]]:
        """List the comparisons of digests whose result is on a device and not yet read by the host, for `require_unchanged`."""
        buckets = ((unit, bucket) for unit in units for bucket in unit.buckets)
        return [(unit, bucket, bucket.first_changed) for unit, bucket in buckets if bucket.first_changed is not None]

    def require_unchanged(self, unit: Unit, bucket: Bucket, first: int) -> None:
        """Raise `PhaseError` if `first`, the index of a bucket's first changed parameter, is that of one: else none was changed."""
        bucket.first_changed = None
        if first < len(bucket.parameters):
            self._raise_changed(unit, bucket.layout.slots[first].spec.fqn)

    def _raise_changed(self, unit: Unit, name: str) -> None:
        if not (self._is_alone and unit.writes_persist):
            how = "as by Embedding(max_norm=), averaged codebooks, clamped or rescaled weights"
            what = f"parameter {name} of unit {unit.name} was changed in place during a pass over the model, {how}"
            cure = "Compute a changed copy in forward, or keep these values in a buffer"
            raise PhaseError(f"{what}; ranks would then have different weights, or the change would be lost. {cure}")

    def refuse_between_passes(self, units: Iterable[Unit]) -> None:
        """Raise `PhaseError` when a parameter was changed since the last update in a way that the next update would lose."""
        for unit, name in _changed_parameters(units):
            if not unit.writes_persist:
                why = f"parameter {name} was changed in place between steps, and the change would be lost"
                copies = "the optimizer updates master weights, of which the model's parameters are copies"
                raise PhaseError(f"{why}: {copies}. Change it before training")


def _changed_parameters(units: Iterable[Unit]) -> list[tuple[Unit, str]]:
    live = [unit for unit in units if unit.phase is Phase.LIVE]
    # This also records the present values of each bucket.
    found = [(unit, bucket.changed_parameter()) for unit in live for bucket in unit.buckets]
    return [(unit, name) for unit, name in found if name is not None]


def digest(values: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the values in order: on a device, a position-weighted sum of their bits, computed in chunks."""
    flat = values.detach().reshape(-1)
    if not on_accelerator(flat):
        # numpy is not used: after it, torch does not free the memory of a storage.
        memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
        return torch.tensor((xxhash.xxh3_64_intdigest(memory) if flat.numel() else 0) >> 1)
    words = flat.view(_INTEGER_DTYPES[flat.element_size()]) if flat.numel() else flat.to(torch.int8)
    places = 2 * torch.arange(min(_DIGEST_WORDS, words.numel()), device=words.device) + 1  # Odd factors are invertible.
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(torch.split(words, _DIGEST_WORDS)):
        bits = part.to(torch.int64)
        # An even number of words with a changed highest bit would cancel; the shift mixes it into lower bits.
        total += ((bits ^ (bits >> 32)) * (places[: part.numel()] + 2 * number * _DIGEST_WORDS)).sum()
    return total


def refuse_closed(name: str) -> None:
    why = f"parameter {name} was read or written after the trainer was closed, while the model was still divided among ranks"
    raise PhaseError(f"{why}; its values are gone. Take them before, from trainer.state_dict(), or train to the end")


def all_buckets(units: Iterable[Unit]) -> list[Bucket]:
    return [bucket for unit in units for bucket in unit.buckets]
