"""Reads whole parameters and gradients of a model by name, whatever ranks have of them: one bucket is gathered at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import nn

from zeromesh.checkpoint.format.safetensors_layout import TensorSpec
from zeromesh.errors import LayoutError, PhaseError
from zeromesh.flat.layout import ParameterSlot
from zeromesh.flat.regions import Region
from zeromesh.intervals import Interval
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import TieredTensor
from zeromesh.units.unit import Bucket, Unit, all_buckets, digest, set_values
from zeromesh.zero.checkpoint_state import MODEL, buffers_of_stages, saved_buffers

_Whole = Callable[[Bucket], torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What all ranks know of a whole parameter, from the stage of the pipeline that has it."""

    name: str
    other_names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    def empty(self, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
        """Memory for the whole parameter."""
        return torch.empty(self.shape, dtype=dtype or getattr(torch, self.dtype), device=device)


class FullState:
    """Logical tensors of the whole model's parameters, in the master dtype, by the names of the whole model.

    Its methods are collective: all ranks call them alike.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: Mesh,
        gradient_dtype: torch.dtype,
        weights_of: Callable[[Bucket], TieredTensor] = lambda bucket: bucket.master,
    ) -> None:
        """`weights_of` gives the shard that stands for a bucket's parameters."""
        self._weights_of = weights_of
        self._model = model
        self._units = units
        self._mesh = mesh
        self._gradient_dtype = gradient_dtype
        self._slots = [(bucket, slot) for bucket in all_buckets(units) for slot in bucket.layout.slots]
        self._stages = self._known_by_stages()
        self._canonical: dict[str, tuple[int, _Known]] = {}
        for stage, known in enumerate(self._stages):
            for each in known:
                for name in (each.name, *each.other_names):
                    self._canonical.setdefault(name, (stage, each))
        self._regions = self._regions_of_ranks()

    def _known_by_stages(self) -> list[list[_Known]]:
        """The parameters of each stage of a pipeline; one that several stages have counts for the first of them alone."""
        own = [
            [
                slot.spec.name,
                slot.spec.other_names,
                slot.spec.region.shape,
                str(bucket.master.dtype).removeprefix("torch."),
                trained,
            ]
            for bucket in all_buckets(self._units)
            for slot, trained in zip(bucket.layout.slots, bucket.training, strict=True)
        ]
        rows = self._mesh.pipeline.gather_json(own, "parameters of all stages")
        seen: set[str] = set()
        stages = []
        for row in rows:
            known = [
                _Known(name=name, other_names=tuple(others), shape=tuple(shape), dtype=dtype, trainable=trainable)
                for name, others, shape, dtype, trainable in row
                if name not in seen
            ]
            seen.update(each.name for each in known)
            stages.append(known)
        return stages

    def _regions_of_ranks(self) -> dict[str, list[Region]]:
        """The regions that each rank of the tensor axis has of the divided parameters of this stage, by name."""
        divided = {
            slot.spec.name: [[(each.start, each.end) for each in dim] for dim in slot.spec.region.dims]
            for _, slot in self._slots
            if slot.spec.part is not None and not slot.spec.region.is_whole
        }
        rows = self._mesh.tensor.gather_json(divided, "parts of tensor ranks")
        found: dict[str, list[Region]] = {}
        for row in rows:
            for name, dims in row.items():
                intervals = tuple(tuple(Interval(start=start, end=end) for start, end in dim) for dim in dims)
                found.setdefault(name, []).append(Region(shape=self._canonical[name][1].shape, dims=intervals))
        return found

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(prod(each.shape) for known in self._stages for each in known)

    def names(self) -> list[str]:
        """Canonical names, tied parameters once, in the order in which `parameters` yields them."""
        return [each.name for known in self._stages for each in known]

    def parameters(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of every parameter: master weights in fp32 whatever the model computes in, on CPU or the device.

        With `names`, only these: buckets without them are not gathered. A tensor may be a view of this rank's own
        weights, which the next step changes: copy it to keep it.
        """
        return self._of_all_stages(lambda known: names is None or known.name in names, self._weights, None)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of every persistent buffer of the whole model; one that several stages have is the first one's."""
        buffers, pipeline = saved_buffers(self._model), self._mesh.pipeline
        for stage, specs in enumerate(buffers_of_stages(self._model, pipeline)):
            for spec in specs:
                here = buffers[spec.name].detach() if stage == pipeline.index else None
                value = torch.empty(spec.shape, dtype=spec.dtype, device=self._mesh.device) if here is None else here
                yield spec.name, pipeline.broadcast_(value.contiguous(), stage, f"reading of {spec.name}")

    def stored_specs(self) -> list[TensorSpec]:
        """The tensors that `stored` yields: parameters in the dtype of their master weights; frozen ones in that of the model."""
        found = [
            TensorSpec(kind=MODEL, name=each.name, dtype=getattr(torch, each.dtype), shape=each.shape)
            for known in self._stages
            for each in known
        ]
        return [*found, *(spec for specs in buffers_of_stages(self._model, self._mesh.pipeline) for spec in specs)]

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of all that a saved model has: parameters, tied ones once, and persistent buffers."""
        yield from self.parameters()
        yield from self.buffers()

    def parameter(self, fqn: str) -> torch.Tensor:
        """One whole parameter, a copy in the dtype of its master weights."""
        known = self._find(fqn)[1]
        return next(self._of_all_stages(lambda each: each is known, self._weights, None))[1].clone()

    def gradient(self, fqn: str) -> torch.Tensor | None:
        """One whole gradient, in the dtype of the sum, between backward and update; None for a frozen parameter.

        It is scaled as the last backward left it: a loss scale is still in it, clipping is not.

        Raises:
            PhaseError: when the optimizer has used it up inside backward.
        """
        known = self._find(fqn)[1]
        if not known.trainable:
            return None
        found = next(self._of_all_stages(lambda each: each is known, self._gradients, self._gradient_dtype), None)
        if found is None:
            raise PhaseError(f"the gradient of {fqn} was used inside backward (optimizer_in_backward)")
        return found[1].clone()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of every trainable parameter's gradient."""
        return self._of_all_stages(lambda known: known.trainable, self._gradients, self._gradient_dtype)

    def nbytes_of(self, fqns: Iterable[str]) -> int:
        """Bytes that `whole` needs on a rank for these parameters. Raises `LayoutError` for names that no stage has."""
        found = {each.name: each for each in (self._find(fqn)[1] for fqn in fqns)}
        return sum(prod(each.shape) * getattr(torch, each.dtype).itemsize for each in found.values())

    @contextmanager
    def whole(self, fqns: Iterable[str], dtype: torch.dtype) -> Iterator[None]:
        """Inside the block these parameters hold whole copies of their values, to be read; no pass over the model is open.

        A parameter whose shape is whole on this rank holds the copy itself; for any other one, such as one that tensor
        parallelism has divided, a parameter in `dtype` stands in the model.

        Raises:
            LayoutError: for names that no stage has.
            PhaseError: at the end of the block, for a parameter that was written inside it; what is trained has not changed.
        """
        wanted = {self._find(fqn)[1].name for fqn in fqns}
        restore: list[Callable[[], None]] = []
        before: dict[str, tuple[nn.Parameter, tuple[int, int]]] = {}
        try:
            for name, value in self._of_all_stages(lambda each: each.name in wanted, self._weights, None):
                shown = self._show(self._find(name)[1], value, dtype, restore)
                before[name] = (shown, _fingerprint(shown))
            yield
            written = [name for name, (shown, was) in before.items() if _fingerprint(shown) != was]
            if written:
                raise PhaseError(
                    f"{', '.join(written)}: written inside gathered(), where parameters are copies to be read. No weight of the "
                    "run has changed; change weights before training, in the model that is given to the trainer"
                )
        finally:
            for put_back in reversed(restore):
                put_back()
            for unit in self._units:
                unit.point()

    def _show(
        self, known: _Known, value: torch.Tensor, dtype: torch.dtype, restore: list[Callable[[], None]]
    ) -> nn.Parameter:
        """Let the model's parameter, or a stand-in, hold a copy of `value`; a call that undoes that is added to `restore`."""
        names = (known.name, *known.other_names)
        modules = [(self._model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        here, *others = [module._parameters.get(leaf) for module, leaf in modules]
        # What other stages have is on meta here, perhaps under one of several names alone.
        alone = all(each is here for each in others)
        if here is not None and alone and not here.is_meta and here.shape == value.shape:
            set_values(here, value.to(here.dtype, copy=True))
            return here
        made = nn.Parameter(
            value.to(dtype if known.trainable else value.dtype, copy=True), requires_grad=known.trainable
        )
        for module, leaf in modules:
            restore.append(partial(_put_back, module, leaf, module._parameters.get(leaf)))
            module._parameters[leaf] = made
        return made

    def make_whole(self, restore: Callable[[], None]) -> None:
        """Give the model ordinary parameters of its own, in the master dtype; the engine is over afterwards.

        `restore` gives the model back the modules that it had, whatever has replaced them.
        """
        values = {name: tensor.clone() for name, tensor in self.parameters()}
        buffers = {name: tensor.clone() for name, tensor in self.buffers()} if self._mesh.pipeline.size > 1 else {}
        restore()
        for name, value in buffers.items():
            self._model.get_buffer(name).copy_(value)
        for name, value in values.items():
            known = self._canonical[name][1]
            made = nn.Parameter(value, requires_grad=known.trainable)
            for each in (name, *known.other_names):
                owner, _, leaf = each.rpartition(".")
                module = self._model.get_submodule(owner)
                parameter = module._parameters[leaf]
                if parameter is None or parameter.is_meta:
                    module._parameters[leaf] = made
                else:  # The model's own object, which others may hold.
                    set_values(parameter, value)
                    parameter.grad = None

    def _of_all_stages(
        self, wanted: Callable[[_Known], bool], whole: _Whole, dtype: torch.dtype | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of the wanted parameters, on all ranks, cut from what `whole(bucket)` gathers.

        `dtype` None is the dtype of the master weights.
        """
        pipeline = self._mesh.pipeline
        for stage, known in enumerate(self._stages):
            chosen = [each for each in known if wanted(each)]
            own = self._of_this_stage({each.name for each in chosen}, whole) if stage == pipeline.index else None
            if pipeline.size == 1 and own is not None:
                yield from own
                continue
            for each in chosen:
                found = next(own, None) if own is not None else None
                if not pipeline.gather_integers([int(found is not None)])[stage][0]:
                    return
                value = each.empty(dtype, self._mesh.device) if found is None else found[1].contiguous()
                yield each.name, pipeline.broadcast_(value, stage, f"reading of {each.name}")

    def _of_this_stage(self, names: set[str], whole: _Whole) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in all_buckets(self._units):
            slots = [slot for slot in bucket.layout.slots if slot.spec.name in names]
            full = whole(bucket) if slots else None
            if full is not None:
                for slot in slots:
                    yield slot.spec.name, self._joined(slot, full[slot.where.start : slot.where.end])

    def _joined(self, slot: ParameterSlot, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, joined from the parts that the ranks of the tensor axis have."""
        regions = self._regions.get(slot.spec.name)
        if regions is None:
            return local.view(slot.spec.shape)
        tensor = self._mesh.tensor
        longest = max(region.numel for region in regions)
        own = torch.zeros(longest, dtype=local.dtype, device=local.device)
        own[: local.numel()] = local
        everyone = torch.empty(tensor.size * longest, dtype=local.dtype, device=local.device)
        tensor.all_gather_flat(everyone, own, f"reading of {slot.spec.name}")
        made = torch.empty(slot.spec.region.shape, dtype=local.dtype, device=local.device)
        for region, flat in zip(regions, everyone.chunk(tensor.size), strict=True):
            part = flat[: region.numel].view(region.local_shape)
            for here, there in region.boxes():
                made[there] = part[here]
        return made

    def _weights(self, bucket: Bucket) -> torch.Tensor:
        return self._whole(bucket, self._weights_of(bucket).load(self._mesh.device))

    def _gradients(self, bucket: Bucket) -> torch.Tensor | None:
        shard = bucket.grad
        if shard is None and bucket.grad_rest is not None:
            shard = bucket.grad_rest.load(self._mesh.device)
        return None if shard is None or not bucket.trainable else self._whole(bucket, shard)

    def _whole(self, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
        if shard.numel() == bucket.layout.padded:
            return shard.detach()
        full = torch.empty(bucket.layout.padded, dtype=shard.dtype, device=shard.device)
        self._mesh.shard.all_gather_flat(full, shard.detach(), f"reading of {bucket.name}")
        return full

    def _find(self, fqn: str) -> tuple[int, _Known]:
        if fqn not in self._canonical:
            raise LayoutError(f"the model has no parameter {fqn!r}; names are as in model.named_parameters()")
        return self._canonical[fqn]


def _put_back(module: nn.Module, leaf: str, original: nn.Parameter | None) -> None:
    if original is None:  # What stood here stood for a module of another stage.
        del module._parameters[leaf]
    else:
        module._parameters[leaf] = original


def _fingerprint(parameter: nn.Parameter) -> tuple[int, int]:
    """What a write changes: the count of in-place operations, and a sum over the bits, since `.data` is not counted."""
    return parameter._version, digest(parameter.detach())
