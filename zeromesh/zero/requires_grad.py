"""Changes of `requires_grad` between steps, which freeze or train parameters from the next step on.

A bucket is allocated for the parameters that are trained when the model is built. A frozen bucket gets master weights, moments
and gradients when the first of its parameters is trained. A bucket that is frozen later keeps them, as a torch optimizer keeps
the state of parameters without a gradient: trained again, it continues with its own moments and count of updates.
"""

from collections.abc import Mapping, Sequence

from zeromesh.comm.shm_transport import open_transport
from zeromesh.comm.transport import RingRequest, Transport
from zeromesh.errors import CheckpointError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.optim.optimizer_step import OptimizerStep
from zeromesh.options import ZeroOptions
from zeromesh.units.build import Built, count_ring, make_trainable, slot_bytes
from zeromesh.units.unit import Bucket, Unit
from zeromesh.zero.gradient_reducer import GradientReducer
from zeromesh.zero.hooks import Hooks


class RequiresGradFlags:
    """Tracks which parameters an engine trains. All ranks call its methods alike."""

    def __init__(
        self,
        built: Built,
        mesh: Mesh,
        options: ZeroOptions,
        updater: OptimizerStep,
        gradients: GradientReducer,
        hooks: Hooks,
    ) -> None:
        self._built = built
        self._mesh = mesh
        self._options = options
        self._updater = updater
        self._gradients = gradients
        self._hooks = hooks
        self._buckets = [(unit, bucket) for unit in built.units for bucket in unit.buckets]
        self._slots = [
            (slot.spec, parameter)
            for _, bucket in self._buckets
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        ]
        self._slot_bytes = self._needed_bytes()
        self._wider: Transport | None = None
        """A transport with larger gradient slots than those allocated at the start."""
        self.followed = 0
        """The number of changes of the set of trained parameters."""

    def follow(self) -> None:
        """Train from now on exactly the parameters with `requires_grad`.

        Raises:
            LayoutError: where ranks set different flags, for parameters that stages of a pipeline share, and for one that is wider
                than its master weights would be.
            StorageError: when there is no memory for what is trained now.
        """
        changed = [(unit, bucket, index) for unit, bucket in self._buckets for index in bucket.changed_flags()]
        if not changed:
            return
        self._require_agreement(changed)
        self.followed += 1
        for unit, bucket, index in changed:
            bucket.parameters[index].grad = None  # Gradients since the change count on no rank.
            if not bucket.trainable:
                make_trainable(bucket, self._options, self._built.tiers)
                self._hooks.on_gradients(unit, bucket)
            unit.follow()
        self._widen()
        self._updater.follow()

    def _require_agreement(self, changed: Sequence[tuple[Unit, Bucket, int]]) -> None:
        flags: dict[str, bool] = {}
        for _, bucket, index in changed:
            spec = bucket.layout.slots[index].spec
            if spec.copies is not None:
                raise LayoutError(
                    f"requires_grad of {spec.name} was changed, which several stages of the pipeline share; set it before training"
                )
            flags[f"requires_grad of {spec.name}, changed"] = bucket.parameters[index].requires_grad
        for group in (self._mesh.data, self._mesh.tensor):
            group.require_same(flags, LayoutError, advice="Change requires_grad on all ranks alike")

    def _needed_bytes(self) -> int:
        trained = [bucket.layout for _, bucket in self._buckets if bucket.trainable]
        return slot_bytes(trained, self._options, self._mesh.device)

    def _widen(self) -> None:
        """Reduce through larger slots if a newly trained bucket does not fit into the present ones."""
        needed, name = self._needed_bytes(), self._built.reduction.name
        if needed <= self._slot_bytes or name == "local":
            return
        ring = RingRequest(slots=self._options.gradient_slots, nbytes=needed)
        wider = open_transport(name, self._mesh.shard, self._mesh.device, (), ring)
        self._gradients.use(wider.reducer)
        self.close()
        self._wider, self._slot_bytes = wider, needed
        count_ring(self._built.tiers.ledger, name, ring)

    def close(self) -> None:
        """Close the transport with larger slots."""
        if self._wider is not None:
            self._wider.close()

    # Over processes

    def changes(self) -> dict[str, tuple[bool, int]]:
        """Return the parameters not trained as in the built model, or not in all updates: `(trained now, number of updates)`."""
        changed = {
            slot.spec.name: (trained, steps)
            for _, bucket in self._buckets
            if (optimizer := self._updater.optimizer_of(bucket)) is not None
            for slot, trained, steps in zip(bucket.layout.slots, bucket.training, optimizer.steps, strict=True)
            if bucket.learned(slot.spec.fqn) and (trained, steps) != (slot.spec.requires_grad, self._updater.updates)
        }
        rows = self._mesh.pipeline.gather_json(changed, "changes of requires_grad")
        return {name: (trained, steps) for row in rows for name, (trained, steps) in row.items()}

    def restore(self, changes: Mapping[str, Sequence[int]], updates: int) -> None:
        """Restore the flags and update counts that `changes` returned after `updates` updates, also on the model.

        Raises:
            CheckpointError: for names of parameters that the model does not have.
        """
        unknown = changes.keys() - {spec.name for spec, _ in self._slots}
        if unknown and self._mesh.pipeline.size == 1:
            raise CheckpointError(f"the checkpoint has trained {min(unknown)}, and the model has no such parameter")
        wanted = [bool(changes.get(spec.name, (spec.requires_grad,))[0]) for spec, _ in self._slots]
        for (spec, parameter), trained in zip(self._slots, wanted, strict=True):
            parameter.requires_grad_(
                trained or spec.name in changes
            )  # Parameters that were ever trained have states to be loaded.
        self.follow()
        for (_, parameter), trained in zip(self._slots, wanted, strict=True):
            parameter.requires_grad_(trained)
        self.follow()
        self._updater.resume(updates, {name: steps for name, (_, steps) in changes.items()})
