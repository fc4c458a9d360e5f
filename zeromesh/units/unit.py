"""A unit and its buckets at run time.

Who owns which memory, for a bucket of P elements over W ranks:

    buffer.full   [P]     compute dtype   the transport's; parameters are views of it while the unit is live
    master        [P/W]   master dtype    this rank's interval; a view of buffer.full where that is persistent and of equal dtype
    copy          [P/W]   compute dtype   of the master weights, where these are not what is gathered: in buffer.full where that
                                          is persistent, or at rest where master weights are out of reach
    grad          [P/W]   reduce dtype    sums of gradients over ranks and microbatches; kept from step to step, or else
    grad_rest     [P/W]                   where they rest between reduction and update
    partial       [P]     reduce dtype    this rank's own sums, where a stage reduces only once per step

The life of a unit as a table of legal transitions; anything else raises with the unit's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from zeromesh.comm.transport import GatherBuffer
from zeromesh.errors import PhaseError
from zeromesh.flat.layout import BucketLayout
from zeromesh.intervals import Interval
from zeromesh.offload import Ledger, Purpose, Tier, TieredTensor
from zeromesh.units.parameters_at_rest import resting_class, set_values


class Phase(Enum):
    """Where a unit is in its life."""

    RESTING = "resting"
    """Parameters are not usable: sharded away, or out of date."""
    GATHERING = "gathering"
    """A gather is in flight."""
    LIVE = "live"
    """Parameters are whole and current."""
    REDUCING = "reducing"
    """Backward has passed; gradients are being summed."""


_LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.RESTING: frozenset({Phase.GATHERING}),
    Phase.GATHERING: frozenset({Phase.LIVE}),
    # A unit that stays live through its reduction (replicated parameters) goes back from REDUCING to LIVE.
    Phase.LIVE: frozenset({Phase.RESTING, Phase.REDUCING}),
    Phase.REDUCING: frozenset({Phase.RESTING, Phase.LIVE}),
}


def advance(unit: str, old: Phase, new: Phase) -> Phase:
    """The new phase.

    Raises:
        PhaseError: when the table does not allow it.
    """
    if new not in _LEGAL[old]:
        allowed = ", ".join(sorted(phase.value for phase in _LEGAL[old]))
        raise PhaseError(f"unit {unit} is {old.value} and cannot become {new.value}; it can become {allowed}")
    return new


_DIGEST_WORDS = 1 << 18
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a parameter's elements."""


class Bucket:
    """Parameters of a unit in one flat buffer: of one dtype, and trained or frozen together when the model was built."""

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        buffer: GatherBuffer,
        interval: Interval,
        master: TieredTensor,
        copy: TieredTensor | None,
    ) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self.buffer = buffer
        self.interval = interval
        self.master = master
        self.copy = copy
        self.training = [slot.spec.requires_grad for slot in layout.slots]
        """Whether each parameter is trained in the present step."""
        self.trainable = any(self.training)
        """Whether there are master weights, moments and gradients: some parameter is trained, or was."""
        self._learned = {slot.spec.fqn for slot in layout.slots if slot.spec.requires_grad}
        self.grad: torch.Tensor | None = None
        self.grad_rest: TieredTensor | None = None
        self.partial: torch.Tensor | None = None
        dtype = layout.first.dtype
        poison = torch.full((), float("nan"), dtype=dtype) if dtype.is_floating_point else torch.zeros((), dtype=dtype)
        poison = poison.to(buffer.full.device)
        flat = buffer.carve([slot.where for slot in layout.slots])
        self._views = [view.view(slot.spec.shape) for view, slot in zip(flat, layout.slots, strict=True)]
        self._rest = [poison.expand(slot.spec.shape) for slot in layout.slots]
        self.on_use: Callable[[str], None] = no_engine
        """Called with the name of a parameter at rest that is used."""
        kinds = {kind: resting_class(kind, self._used) for kind in set(map(type, self.parameters))}
        self._resting = [kinds[type(parameter)] for parameter in self.parameters]
        self._versions: list[int] = []
        self._digests: list[int] = []

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.first.dtype

    def learned(self, fqn: str) -> bool:
        """Whether a parameter has master weights and moments of its own."""
        return fqn in self._learned

    def follow(self) -> None:
        """Train from now on those parameters that `requires_grad` says."""
        self.training = [parameter.requires_grad for parameter in self.parameters]
        named = zip(self.layout.slots, self.training, strict=True)
        self._learned.update(slot.spec.fqn for slot, trained in named if trained)

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameters."""
        return self.layout.nbytes

    def show(self) -> None:
        """Parameters become views of the gathered buffer."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            set_values(parameter, view)
        self._versions = [parameter._version for parameter in self.parameters]

    def hide(self) -> None:
        """Parameters become NaN of their own shape, of a class that calls `on_use` before it is read or written."""
        for parameter, rest, kind in zip(self.parameters, self._rest, self._resting, strict=True):
            set_values(parameter, rest)
            parameter.__class__ = kind

    def _used(self, used: nn.Parameter) -> None:
        fqns = [slot.spec.fqn for slot in self.layout.slots]
        self.on_use(next(fqn for fqn, each in zip(fqns, self.parameters, strict=True) if each is used))

    def note_values(self) -> None:
        """Remember what the parameters are, which are live, so that `written` notices writes that leave no trace elsewhere."""
        self._digests = [_digest(view) for view in self._views]

    def written(self) -> str | None:
        """The name of a parameter that was changed in place since it was shown, or since this was asked."""
        versions = [parameter._version for parameter in self.parameters]
        if versions == self._versions and not self._digests:
            return None
        changed = [old != new for old, new in zip(self._versions, versions, strict=True)]
        if self._digests:
            changed = [
                each or old != _digest(view)
                for each, old, view in zip(changed, self._digests, self._views, strict=True)
            ]
        self._versions, self._digests = versions, []
        found = (slot.spec.fqn for slot, each in zip(self.layout.slots, changed, strict=True) if each)
        return next(found, None)

    def publish(self) -> None:
        """The master weights, all of them, are new: so is what the others gather."""
        if self.copy is not None:
            self.copy.copy_from(self.master)
        self.buffer.end_write()


class Unit:
    """A module whose parameters are gathered together, and where it is in its life."""

    def __init__(
        self, index: int, name: str, module: nn.Module, buckets: Sequence[Bucket], ledger: Ledger, share: float
    ) -> None:
        """`share` is the part of gathered memory that counts for this process."""
        self.index = index
        self.name = name
        self.module = module
        self.buckets = tuple(buckets)
        self.phase = Phase.RESTING
        self._ledger = ledger
        self._transient = int(share * sum(bucket.nbytes for bucket in self.buckets if not bucket.buffer.persistent))

    @property
    def trainable(self) -> tuple[Bucket, ...]:
        """Buckets that get gradients in the present step."""
        return tuple(bucket for bucket in self.buckets if any(bucket.training))

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def names(self) -> list[str]:
        """Names of its parameters, those of tied ones included."""
        specs = [slot.spec for bucket in self.buckets for slot in bucket.layout.slots]
        return [name for spec in specs for name in (spec.fqn, *spec.aliases)]

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of one of its parameters."""
        for bucket in self.buckets:
            for slot, each in zip(bucket.layout.slots, bucket.parameters, strict=True):
                if each is parameter:
                    return slot.spec.fqn
        return f"a parameter of {self.name}"

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of the gathered parameters."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or is_wrapped(tensor):
            return False
        spans = [(bucket.buffer.full, bucket.nbytes) for bucket in self.buckets]
        return any(
            full.device == tensor.device and 0 <= tensor.data_ptr() - full.data_ptr() < nbytes for full, nbytes in spans
        )

    @property
    def keeps_writes(self) -> bool:
        """Whether a parameter that is changed in place stays so: the gathered memory is the master weights, all of them."""
        return all(
            bucket.buffer.persistent and bucket.copy is None and bucket.interval.length == bucket.layout.padded
            for bucket in self.buckets
        )

    def note_values(self) -> None:
        """Remember the values of all parameters, which are live; see `Bucket.note_values`."""
        for bucket in self.buckets:
            bucket.note_values()

    def written(self) -> str | None:
        """The name of a parameter that was changed in place; see `Bucket.written`."""
        found = [bucket.written() for bucket in self.buckets]
        return next(filter(None, found), None)

    def enter(self, phase: Phase) -> None:
        """Go to the next phase; raises PhaseError when the table does not allow it."""
        self.phase = advance(self.name, self.phase, phase)

    def gather(self) -> None:
        """Start to gather."""
        self._ledger.add(Tier.DEVICE, Purpose.PARAMETERS, self._transient)
        self.enter(Phase.GATHERING)
        for bucket in self.buckets:
            bucket.buffer.gather(bucket.copy or bucket.master)

    def wait(self) -> None:
        """Finish gathering; parameters are usable afterwards."""
        for bucket in self.buckets:
            bucket.buffer.wait()
        self.enter(Phase.LIVE)
        self.point()

    def point(self) -> None:
        """Let the parameters look at what they have in this phase, whatever has replaced their data."""
        live = self.phase in (Phase.LIVE, Phase.REDUCING)
        for bucket in self.buckets:
            if live:
                bucket.show()
            else:
                bucket.hide()

    def release(self) -> None:
        """Hide the parameters and give back what the transport does not keep. The caller changes the phase."""
        self._ledger.add(Tier.DEVICE, Purpose.PARAMETERS, -self._transient)
        for bucket in self.buckets:
            bucket.hide()
            bucket.buffer.release()


def _digest(values: torch.Tensor) -> int:
    """A number that changes with the values: the sum of their bits, in parts, as a sum of integers makes a wide copy."""
    flat = values.reshape(-1)
    words = flat.view(_WORDS[flat.element_size()]) if flat.numel() else flat
    return int(sum(part.sum() for part in torch.split(words, _DIGEST_WORDS)))


def no_engine(name: str) -> None:
    """The use of a parameter that belongs to no engine any more."""
    raise PhaseError(
        f"parameter {name} was read or written after the trainer was closed, while the model was still divided among ranks; its "
        "values are gone. Take them before, from trainer.state_dict(), or train to the end"
    )


def all_buckets(units: Iterable[Unit]) -> list[Bucket]:
    """Buckets of all units, in order."""
    return [bucket for unit in units for bucket in unit.buckets]
