"""Optimizers of any class over the ranks of the shard group, run by the class itself.

element by element    each rank updates the pieces of parameters in its shards; states lie as moments do
whole tensors         each parameter has one owner, on which its states lie whole: for an update its gradient and its weights go
                      there, and the new weights come back. Owners are chosen so that all ranks have about as many elements,
                      at every stage
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from zeromesh.errors import ConfigError, PhaseError
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Purpose, Tier, TieredTensor, Tiers
from zeromesh.optim.fused_optimizer import BucketOptimizer, Hyperparameters, KeptState
from zeromesh.optim.optimizer_trial import OptimizerDriver, shape_of
from zeromesh.options import NO_GROUP, OptimizerClass, StatePlan, ZeroOptions
from zeromesh.units.unit import Bucket

_WHAT = "exchange of tensors with their owners"


def make_optimizers(
    buckets: Sequence[Bucket], options: ZeroOptions, tiers: Tiers, group: ProcessSet, loads: list[int]
) -> list[BucketOptimizer]:
    """The optimizers of buckets that have none yet. `loads` has the elements that each rank of the shard group `group` owns, and
    gets those that are added, alike on all ranks.

    Raises:
        ConfigError: for parameters that are not whole on a rank, where the class needs them so.
    """
    own_class = options.optimizer.own_class
    if own_class is None:
        return [BucketOptimizer(bucket, options, tiers) for bucket in buckets]
    if not own_class.whole:
        return [PieceOptimizer(bucket, options, tiers, own_class) for bucket in buckets]
    owners: list[dict[int, int]] = [{} for _ in buckets]
    slots = [(slot.spec, at, n) for at, each in enumerate(buckets) for n, slot in enumerate(each.layout.slots)]
    for spec, at, number in sorted(slots, key=lambda each: -each[0].numel):
        if not spec.region.is_whole:
            raise ConfigError(
                f"optimizer {type(own_class.optimizer).__name__} needs whole tensors, and tensor parallelism divides "
                f"{spec.name}; set parallel.tensor to 1, or use an optimizer that works element by element"
            )
        if spec.group != NO_GROUP:
            owners[at][number] = loads.index(min(loads))
            loads[owners[at][number]] += spec.numel
    made = zip(buckets, owners, strict=True)
    return [WholeOptimizer(bucket, options, tiers, own_class, group, each) for bucket, each in made]


class PieceOptimizer(BucketOptimizer):
    """The optimizer of one bucket's shard by a class that works element by element.

    What the class keeps beside tensors, such as a count of its steps, is `[slots]`, float64, on the CPU of each rank.
    """

    def __init__(self, bucket: Bucket, options: ZeroOptions, tiers: Tiers, own_class: OptimizerClass) -> None:
        self._class = own_class
        self._driver = OptimizerDriver(own_class.optimizer)
        count, names = len(bucket.layout.slots), {name for each in own_class.plans.values() for name in each.scalars}
        self._scalars = {name: torch.zeros(count, dtype=torch.float64) for name in sorted(names)}
        self._before = self._scalars
        specs = [slot.spec for slot in bucket.layout.slots]
        nothing = StatePlan(tensors={}, scalars={})
        self._plans = [own_class.plans.get((spec.group, max(1, len(spec.shape))), nothing) for spec in specs]
        super().__init__(bucket, options, tiers)

    def follow(self) -> None:
        super().follow()
        numbers = {slot.spec.fqn: number for number, slot in enumerate(self._bucket.layout.slots)}
        pieces = [(each.in_shard, numbers[each.spec.fqn]) for each in self._bucket.layout.pieces(self._bucket.interval)]
        groups, updated = [slot.spec.group for slot in self._bucket.layout.slots], self._updated()
        # Each has counts of its own, so that no two are updated at once.
        self._segments = [(at.start, at.end, groups[n], n) for at, n in pieces if updated[n] and groups[n] != NO_GROUP]

    def begin(self) -> None:
        super().begin()
        self._before = {name: values.clone() for name, values in self._scalars.items()}

    def kept(self, number: int) -> Iterator[KeptState]:
        for name, values in self._scalars.items():
            yield name, values.dtype, (), TieredTensor.of(values[number : number + 1])

    def _update_part(
        self,
        slot: int,
        group: Hyperparameters,
        master: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
    ) -> None:
        self._run(slot, group, master, grad, dict(zip(self.moments, moments, strict=True)))

    def _run(
        self,
        slot: int,
        group: Hyperparameters,
        value: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        """Update elements of a parameter, and their `states`, in place."""
        plan, state = self._plans[slot], dict[str, Any]()
        if self.steps[slot] > 1:  # Before its first update the class makes them.
            state |= {name: states[name] for name in plan.tensors}
            state |= {name: _like(each, float(self._before[name][slot])) for name, each in plan.scalars.items()}
        (after,) = self._driver.step(group, [value], [gradient], [state])
        found = {name: tuple(each.shape) if isinstance(each, torch.Tensor) else () for name, each in after.items()}
        expected = {name: tuple(states[name].shape) for name in plan.tensors} | dict.fromkeys(plan.scalars, ())
        if found != expected:
            raise PhaseError(
                f"optimizer {type(self._class.optimizer).__name__} keeps {found} of {self._bucket.layout.slots[slot].spec.fqn}, "
                f"and {expected} by its trial: what it keeps must not depend on sizes, nor on what is changed after shard()"
            )
        for name in plan.tensors:
            if after[name] is not states[name]:
                states[name].copy_(after[name])
        for name in plan.scalars:
            self._scalars[name][slot] = float(after[name])


class WholeOptimizer(PieceOptimizer):
    """The optimizer of the parameters of one bucket by a class that needs whole tensors. All ranks of the shard group call it."""

    def __init__(
        self,
        bucket: Bucket,
        options: ZeroOptions,
        tiers: Tiers,
        own_class: OptimizerClass,
        group: ProcessSet,
        owners: Mapping[int, int],
    ) -> None:
        """`owners` has the position in `group` of the owner of each parameter, by the parameter's number."""
        super().__init__(bucket, options, tiers, own_class)
        self._group, self._owners, self._ledger = group, owners, tiers.ledger
        self._shapes = {
            (number, name): shape_of(pattern, bucket.layout.slots[number].spec.shape)
            for number in owners
            for name, pattern in self._plans[number].tensors.items()
        }
        self._states: dict[tuple[int, str], TieredTensor] = {}
        for (number, name), shape in self._shapes.items():
            if owners[number] == group.index:
                what, at = f"{name} of {bucket.layout.slots[number].spec.fqn}", options.offload.optimizer
                made = tiers.allocate(prod(shape), bucket.master.dtype, at, Purpose.MOMENTS, what)
                self._states[number, name] = made

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._states.values())

    def kept(self, number: int) -> Iterator[KeptState]:
        mine = self._owners.get(number) == self._group.index
        for name, dtype, shape, values in super().kept(number):
            yield name, dtype, shape, values if mine else None
        for (each, name), shape in self._shapes.items():
            if each == number:
                yield name, self._bucket.master.dtype, shape, self._states.get((number, name))

    def update(self, master: torch.Tensor, grad: torch.Tensor, groups: Sequence[Hyperparameters]) -> None:
        """Update `master`, the weights that this rank has of the bucket, in place with their gradients `grad`, `[length]` both."""
        layout, updated, here = self._bucket.layout, self._updated(), self._group.index
        numbers = {layout.slots[n].spec.fqn: n for n in self._owners if updated[n]}
        everywhere = self._bucket.length == layout.padded
        intervals = [self._bucket.interval if everywhere else layout.shard(rank) for rank in range(self._group.size)]
        held = [
            [(numbers[each.spec.fqn], each) for each in layout.pieces(interval) if each.spec.fqn in numbers]
            for interval in intervals
        ]
        own = [n for n in numbers.values() if self._owners[n] == here]
        values, gradients = ({n: grad.new_empty(layout.slots[n].where.length) for n in own} for _ in range(2))
        nbytes = 2 * sum(each.nbytes for each in values.values())
        self._ledger.add(Tier.DEVICE, Purpose.STAGING, nbytes)

        def of_owners(whole: Mapping[int, torch.Tensor]) -> list[list[torch.Tensor]]:
            """By rank, what it holds of the tensors that this rank owns."""
            return [
                [whole[n][p.in_parameter.start : p.in_parameter.end] for n, p in each if n in whole] for each in held
            ]

        def of_holders(flat: torch.Tensor) -> list[list[torch.Tensor]]:
            """By rank, what this rank holds of the tensors that it owns."""
            pieces = [(self._owners[n], flat[p.in_shard.start : p.in_shard.end]) for n, p in held[here]]
            return [[part for owner, part in pieces if owner == rank] for rank in range(self._group.size)]

        for flat, whole in ((master, values), (grad, gradients)):
            if everywhere:
                for part, there in zip(of_owners(whole)[here], of_holders(flat)[here], strict=True):
                    part.copy_(there)
            else:
                self._group.exchange(of_holders(flat), of_owners(whole), flat, _WHAT)
        for number in own:
            spec, names = layout.slots[number].spec, [name for each, name in self._shapes if each == number]
            shape = spec.shape or (1,)
            states = {
                name: self._states[number, name].load(master.device).view(self._shapes[number, name]) for name in names
            }
            self._run(number, groups[spec.group], values[number].view(shape), gradients[number].view(shape), states)
            for name in names:
                self._states[number, name].write(0, states[name].view(-1)).wait()
        self._group.exchange(of_owners(values), of_holders(master), master, _WHAT)
        self._ledger.add(Tier.DEVICE, Purpose.STAGING, -nbytes)


def _like(example: Any, number: float) -> Any:
    """A number as a class keeps it, which keeps `example`."""
    return torch.tensor(number, dtype=example.dtype) if isinstance(example, torch.Tensor) else type(example)(number)
