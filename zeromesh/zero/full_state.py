"""A model's parameters, gradients and optimizer states as whole tensors by name, independent of how ranks shard them.

`CheckpointState` lists the tensors of a checkpoint, with this rank's part of each, for writing and for loading. `FullState` reads
whole parameters and gradients, gathering one bucket at a time.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import nn

from zeromesh.checkpoint.format.safetensors_layout import TensorSpec
from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.errors import LayoutError, PhaseError
from zeromesh.flat.layout import ParameterSlot, ParameterSpec, Region, share_of
from zeromesh.flat.redistribute import join_regions, of_bucket, on_one_rank, redistribute, replicated
from zeromesh.intervals import ALIGNMENT, Interval
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import TieredTensor
from zeromesh.optim.class_optimizer import WholeOptimizer
from zeromesh.optim.optimizer_step import OptimizerStep
from zeromesh.options import Placement, ZeroOptions
from zeromesh.units.unit import Bucket, Unit, all_buckets, digest, set_values

MODEL, MASTER, AVERAGE = "model", "master", "ema"
WEIGHTS = (MODEL, MASTER, AVERAGE)
"""Kinds of stored tensors from which weights are restored."""


class CheckpointState:
    """An engine's parameters, master weights and moments as whole tensors by name, and this rank's part of each. Parameters are
    stored in the dtype that the model computes with, and beside them master weights where these differ."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], updater: OptimizerStep, mesh: Mesh, options: ZeroOptions
    ) -> None:
        self._model = model
        self._buckets = all_buckets(units)
        self._numbers = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        self._updater = updater
        self._mesh = mesh
        self._options = options

    def tensors(self, *, reading: bool = False) -> list[TensorSpec]:
        """List every stored tensor, alike on all ranks, in the order of buckets, so that neighbours in a shard are neighbours in
        a file. `reading`: only the tensors that a load needs, without parameters that follow from master weights."""
        found = [
            TensorSpec(kind=kind, name=slot.spec.name, dtype=dtype, shape=slot.spec.region.shape)
            for bucket in self._buckets
            for kind, dtype, _ in self._kinds(bucket, reading=reading)
            for slot in bucket.layout.slots
            if _has(bucket, slot.spec, kind, reading=reading)
        ]
        found += [spec for bucket in self._buckets for spec, _ in self._kept(bucket, None)]
        found += [_spec_of(name, buffer) for name, buffer in saved_buffers(self._model).items()]
        return list(chain.from_iterable(of_stages(found, self._mesh.pipeline, "tensors of all stages")))

    def aliases(self) -> dict[str, str]:
        """Map each further name of a tied parameter to the name under which the parameter is stored."""
        specs = [slot.spec for bucket in self._buckets for slot in bucket.layout.slots]
        aliases = {alias: spec.name for spec in specs for alias in spec.other_names}
        rows = self._mesh.pipeline.gather_json(aliases, "names of tied parameters")
        return {alias: name for row in rows for alias, name in row.items()}

    def frozen(self) -> set[str]:
        """Names of the parameters of all stages that were never trained."""
        names = [s.spec.name for bucket in self._buckets for s in bucket.layout.slots if not bucket.learned(s.spec.fqn)]
        return set(chain.from_iterable(self._mesh.pipeline.gather_json(names, "names of frozen parameters")))

    def written(self) -> list[TensorShard]:
        """The parts that this rank writes. Replicated tensors are shared out among their holders, so that every element is
        written once. A buffer is written by the first rank of the first stage that has the buffer."""
        holders, index = self._mesh.replicate.size, self._mesh.replicate.index
        if self._options.placements.optimizer is Placement.REPLICATED:
            holders, index = self._mesh.data.size, self._mesh.data_index
        found: list[TensorShard] = []
        for bucket in self._buckets:
            if self._updater.sharing.counts(bucket):
                found += self._of(bucket, share_of(bucket.interval, holders, index, ALIGNMENT))
        # Forward may change a buffer while it is written.
        buffers, pipeline = saved_buffers(self._model), self._mesh.pipeline
        specs = buffers_of_stages(self._model, pipeline)[pipeline.index]
        first = self._mesh.tensor.index == self._mesh.data_index == 0
        return [*found, *(_of_buffer(spec.name, buffers[spec.name].clone()) for spec in specs if first)]

    def wanted(self) -> list[TensorShard]:
        """The parts that this rank reads: its whole shards, with master weights rather than parameters, and all buffers."""
        found: list[TensorShard] = []
        for bucket in self._buckets:
            found += self._of(bucket, bucket.interval, reading=True)
        return [*found, *(_of_buffer(name, buffer) for name, buffer in saved_buffers(self._model).items())]

    def fill(self, given: Mapping[str, torch.Tensor]) -> None:
        """Overwrite this rank's part of the named parameters from whole tensors, inside `ZeroEngine.loading`."""
        for shard in self.wanted():
            value, region = given.get(shard.spec.name), shard.region
            if value is None or shard.spec.kind not in (MODEL, MASTER):
                continue
            local = value if region.is_whole else value.new_empty(region.local_shape)
            for here, there in () if region.is_whole else region.boxes():
                local[here] = value[there]
            shard.values.write(0, local.reshape(-1)[shard.interval.start : shard.interval.end]).wait()

    def order(self) -> dict[int, int]:
        """The position of each bucket in the next update, predicted from the last update."""
        return {self.owner_of(bucket): place for place, bucket in enumerate(self._updater.last_order)}

    def owner_of(self, bucket: Bucket) -> int:
        """The number of a bucket, by which a saver identifies the owner of a part."""
        return self._numbers[id(bucket)]

    def _kinds(self, bucket: Bucket, *, reading: bool = False) -> list[tuple[str, torch.dtype, TieredTensor]]:
        """Kind, stored dtype and place of each tensor of a bucket's shard."""
        master, optimizer = bucket.master, self._updater.optimizer_of(bucket)
        found = []
        if not (reading and bucket.trainable):
            found.append((MODEL, bucket.dtype, master if reading else bucket.copy or master))
        if bucket.trainable and (reading or master.dtype != bucket.dtype):
            found.append((MASTER, master.dtype, master))
        moments = dict(optimizer.moments) if optimizer is not None else {}
        average = self._updater.averages.of(bucket) if self._updater.averages is not None else None
        moments |= {AVERAGE: average} if average is not None else {}
        return [*found, *((name, moment.dtype, moment) for name, moment in moments.items())]

    def _kept(self, bucket: Bucket, written: Interval | None) -> Iterator[tuple[TensorSpec, TieredTensor | None]]:
        """Yield the optimizer states of a bucket's parameters that are not divided as the parameters are, with the values this
        rank reads. With `written`, an interval of the bucket's elements, yield those that this rank writes, so that one rank
        alone writes each."""
        optimizer = self._updater.optimizer_of(bucket)
        if optimizer is None:
            return
        first = [
            piece.spec.fqn
            for piece in (bucket.layout.pieces(written) if written is not None else ())
            if not piece.in_parameter.start and not next(iter(piece.spec.region.runs(piece.in_parameter))).logical
        ]
        alone = isinstance(optimizer, WholeOptimizer)  # One owner in the shard group, perhaps without a piece.
        for number, slot in enumerate(bucket.layout.slots):
            writes = not self._mesh.replicate.index if alone else slot.spec.fqn in first
            for kind, dtype, shape, values in optimizer.kept(number) if bucket.learned(slot.spec.fqn) else ():
                spec = TensorSpec(kind=kind, name=slot.spec.name, dtype=dtype, shape=shape)
                yield spec, values if written is None or writes else None

    def _of(self, bucket: Bucket, interval: Interval, *, reading: bool = False) -> Iterator[TensorShard]:
        for spec, values in self._kept(bucket, None if reading else interval):
            if values is not None:
                region, everything = Region.whole(spec.shape), Interval(start=0, end=values.numel)
                owner = self.owner_of(bucket)
                yield TensorShard(spec=spec, region=region, interval=everything, values=values, owner=owner)
        offset, pieces = interval.start - bucket.interval.start, bucket.layout.pieces(interval)
        for kind, dtype, tensor in self._kinds(bucket, reading=reading):
            for piece in pieces:
                if _has(bucket, piece.spec, kind, reading=reading):
                    region, where = piece.spec.region, piece.in_shard
                    yield TensorShard(
                        spec=TensorSpec(kind=kind, name=piece.spec.name, dtype=dtype, shape=region.shape),
                        region=region,
                        interval=piece.in_parameter,
                        values=tensor.slice(offset + where.start, offset + where.end),
                        owner=self.owner_of(bucket),
                    )


def _has(bucket: Bucket, spec: ParameterSpec, kind: str, *, reading: bool) -> bool:
    """Return True if a checkpoint stores this kind of tensor for a parameter. A never-trained parameter has weights alone, from
    which its master weights and averages are restored where others of its bucket are trained."""
    return kind == MODEL or (reading and kind in (MASTER, AVERAGE)) or bucket.learned(spec.fqn)


def _spec_of(name: str, buffer: torch.Tensor) -> TensorSpec:
    return TensorSpec(kind=MODEL, name=name, dtype=buffer.dtype, shape=tuple(buffer.shape))


def _of_buffer(name: str, buffer: torch.Tensor) -> TensorShard:
    spec = _spec_of(name, buffer)
    if not buffer.is_contiguous():
        buffer.data = buffer.data.contiguous()
    return TensorShard(
        spec=spec,
        region=Region.whole(spec.shape),
        interval=Interval(start=0, end=buffer.numel()),
        values=TieredTensor.of(buffer.detach().reshape(-1)),
    )


def buffers_of_stages(model: nn.Module, pipeline: ProcessSet) -> list[list[TensorSpec]]:
    """List the persistent buffers of each stage that no earlier stage has; all ranks of `pipeline` call this."""
    specs = [_spec_of(name, buffer) for name, buffer in saved_buffers(model).items()]
    return of_stages(specs, pipeline, "buffers of all stages")


def of_stages(specs: Sequence[TensorSpec], pipeline: ProcessSet, what: str) -> list[list[TensorSpec]]:
    """List the tensors of each pipeline stage that no earlier stage has; all ranks of `pipeline` call this."""
    rows = [[spec.kind, spec.name, str(spec.dtype).removeprefix("torch."), spec.shape] for spec in specs]
    seen: set[tuple[str, str]] = set()
    stages = []
    for stage in pipeline.gather_json(rows, what):
        new = [
            TensorSpec(kind=kind, name=name, dtype=getattr(torch, dtype), shape=tuple(shape))
            for kind, name, dtype, shape in stage
            if (kind, name) not in seen
        ]
        seen.update((spec.kind, spec.name) for spec in new)
        stages.append(new)
    return stages


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers as in `state_dict`, shared ones once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{fqn}.{name}" if fqn else name] = buffer
    return found


class _StandIn(nn.Parameter):
    """A placeholder parameter on the meta device that keeps the values copied into it."""

    taken: torch.Tensor | None = None

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        self.taken = source.expand(self.shape)
        return self


class FullState:
    """Whole tensors of the full model's parameters, in the master dtype, by the full model's names. Its methods are collective:
    all ranks call them alike."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: Mesh,
        gradient_dtype: torch.dtype,
        weights_of: Callable[[Bucket], TieredTensor] = lambda bucket: bucket.master,
    ) -> None:
        """`weights_of` returns the shard from which a bucket's whole parameters are gathered."""
        self._weights_of = weights_of
        self._model = model
        self._units = units
        self._mesh = mesh
        self._gradient_dtype = gradient_dtype
        self._stages: list[list[TensorSpec]] = []
        """Each stage's parameters in the dtype of their master weights; shared parameters are in the first of their stages."""
        self._names: dict[str, tuple[str, ...]] = {}
        """All names of each parameter, its canonical name first."""
        self._trained: dict[str, bool] = {}
        self._specs: dict[str, TensorSpec] = {}
        own, slots = [], []
        for bucket in all_buckets(units):
            dtype = str(bucket.master.dtype).removeprefix("torch.")
            for slot, trained in zip(bucket.layout.slots, bucket.training, strict=True):
                spec = slot.spec
                slots.append(slot)
                own.append([spec.name, spec.other_names, trained, dtype, spec.region.shape])
        for stage in mesh.pipeline.gather_json(own, "parameters of all stages"):
            new = [row for row in stage if row[0] not in self._names]
            self._names |= {name: (name, *others) for name, others, *_ in new}
            self._trained |= {name: trained for name, _, trained, *_ in new}
            specs = [
                TensorSpec(kind=MODEL, name=name, dtype=getattr(torch, dtype), shape=tuple(shape))
                for name, _, _, dtype, shape in new
            ]
            self._stages.append(specs)
            self._specs = {name: spec for spec in specs for name in self._names[spec.name]} | self._specs
        divided = {
            slot.spec.name: [[(each.start, each.end) for each in dim] for dim in slot.spec.region.dims]
            for slot in slots
            if slot.spec.part is not None and not slot.spec.region.is_whole
        }
        self._regions: dict[str, list[Region]] = {}
        """The regions that the ranks of the tensor axis have of each divided parameter of this stage."""
        for row in mesh.tensor.gather_json(divided, "parts of tensor ranks"):
            for name, dims in row.items():
                intervals = tuple(tuple(Interval(start=start, end=end) for start, end in dim) for dim in dims)
                self._regions.setdefault(name, []).append(Region(shape=self._specs[name].shape, dims=intervals))

    @property
    def numel(self) -> int:
        """The number of elements of the whole model."""
        return sum(spec.numel for spec in chain.from_iterable(self._stages))

    def names(self) -> list[str]:
        """Canonical names, with tied parameters once, in the order in which `parameters` yields them."""
        return [spec.name for spec in chain.from_iterable(self._stages)]

    def parameters(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of every parameter: master weights in fp32 whatever the model computes in, on CPU or the device. With
        `names`, only these: buckets without them are not gathered. A tensor may be a view of this rank's own weights, which the
        next step changes: copy it to keep it."""
        return self._of_all_stages(self._specs if names is None else names, self._weights, None)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` of every persistent buffer of the whole model; of a shared buffer that of the first stage."""
        buffers, pipeline = saved_buffers(self._model), self._mesh.pipeline
        for stage, specs in enumerate(buffers_of_stages(self._model, pipeline)):
            for spec in specs:
                yield (
                    spec.name,
                    self._from(stage, spec, buffers[spec.name].detach() if stage == pipeline.index else None),
                )

    def stored_specs(self) -> list[TensorSpec]:
        """The tensors that `stored` yields: parameters in the dtype of their master weights; frozen ones in that of the model."""
        return list(chain.from_iterable([*self._stages, *buffers_of_stages(self._model, self._mesh.pipeline)]))

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` of everything that a saved model has: parameters, tied ones once, and persistent buffers."""
        yield from self.parameters()
        yield from self.buffers()

    def parameter(self, fqn: str) -> torch.Tensor:
        """One whole parameter, a copy in the dtype of its master weights."""
        return next(self.parameters([self._find(fqn).name]))[1].clone()

    def gradient(self, fqn: str) -> torch.Tensor | None:
        """One whole gradient, in the reduction dtype, between backward and update; None for a frozen parameter.

        The gradient is scaled as the last backward left it: with the loss scale, without clipping.

        Raises:
            PhaseError: when the optimizer has used the gradient inside backward.
        """
        name = self._find(fqn).name
        if not self._trained[name]:
            return None
        found = next(self._of_all_stages([name], self._gradients, self._gradient_dtype), None)
        if found is None:
            raise PhaseError(f"the gradient of {fqn} was used inside backward (optimizer.in_backward)")
        return found[1].clone()

    def nbytes_of(self, fqns: Iterable[str]) -> int:
        """Bytes that `whole` needs on a rank for these parameters. Raises `LayoutError` for names that no stage has."""
        return sum(spec.nbytes for spec in set(map(self._find, fqns)))

    @contextmanager
    def whole(self, fqns: Iterable[str], dtype: torch.dtype) -> Iterator[None]:
        """Inside the block the named parameters hold whole copies of their values, for reading; no pass over the model may be
        open.

        A parameter of whole shape on this rank holds the copy itself; any other one, such as a tensor-parallel one, is replaced
        in the model by a parameter in `dtype`.

        Raises:
            LayoutError: for names that no stage has.
            PhaseError: at the end of the block, for a parameter that was written inside it; the trained weights are unchanged.
        """
        wanted = {self._find(fqn).name for fqn in fqns}
        restore: list[Callable[[], object]] = []
        before: dict[str, tuple[nn.Parameter, tuple[int, int]]] = {}
        try:
            for name, value in self.parameters(wanted):
                shown = self._show(name, value, dtype, restore)
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
        self, name: str, value: torch.Tensor, dtype: torch.dtype, restore: list[Callable[[], object]]
    ) -> nn.Parameter:
        """Let the model's parameter, or a stand-in for it, hold a copy of `value`; a call that undoes this goes into
        `restore`."""
        places, trained = self._places(name), self._trained[name]
        here, *others = [table.get(leaf) for table, leaf in places]
        # Other stages' parameters are on meta here, perhaps under only one of several names.
        if here is not None and all(each is here for each in others) and not here.is_meta and here.shape == value.shape:
            set_values(here, value.to(here.dtype, copy=True))
            return here
        made = nn.Parameter(value.to(dtype if trained else value.dtype, copy=True), requires_grad=trained)
        for table, leaf in places:
            # A new entry of the table stands for a module of another stage.
            restore.append(partial(table.__setitem__, leaf, table[leaf]) if leaf in table else partial(table.pop, leaf))
            table[leaf] = made
        return made

    def _places(self, name: str) -> list[tuple[dict[str, nn.Parameter | None], str]]:
        """The parameter tables of all modules that hold a parameter, with its key in each table."""
        parts = [each.rpartition(".") for each in self._names[name]]
        return [(self._model.get_submodule(owner)._parameters, leaf) for owner, _, leaf in parts]

    @contextmanager
    def taking(self) -> Iterator[dict[str, torch.Tensor]]:
        """Inside the block the model holds whole parameters without memory; no pass over the model may be open. What is copied
        into them or put in their place, as `load_state_dict` does, is in the mapping afterwards, by name."""
        given: dict[str, torch.Tensor] = {}
        before: list[tuple[dict[str, Any], dict[str, Any]]]
        before = [(module._parameters, dict(module._parameters)) for module in self._model.modules()]
        stood = {n: _StandIn(torch.empty(self._specs[n].shape, device="meta"), self._trained[n]) for n in self.names()}
        try:
            for name, made in stood.items():
                for table, leaf in self._places(name):
                    table[leaf] = made
            yield given
            for name, made in stood.items():
                for each in (made.taken, *(table.get(leaf) for table, leaf in self._places(name))):
                    if each is not None and not each.is_meta:
                        given[name] = each.detach()
        finally:
            for table, old in before:
                table.clear()
                table.update(old)

    def make_whole(self, restore: Callable[[], None]) -> None:
        """Give the model ordinary whole parameters in the master dtype; the engine cannot be used afterwards. `restore` gives the
        model back the modules that it had, whatever has replaced them."""
        values = {name: tensor.clone() for name, tensor in self.parameters()}
        buffers = (
            {name: tensor.clone() for name, tensor in self.buffers()} if self._mesh.shape.divides("blocks") else {}
        )
        restore()
        for name, value in buffers.items():
            self._model.get_buffer(name).copy_(value)
        for name, value in values.items():
            made = nn.Parameter(value, requires_grad=self._trained[name])
            for table, leaf in self._places(name):
                parameter = table[leaf]
                if parameter is None or parameter.is_meta:
                    table[leaf] = made
                else:  # The model's own object, which other code may reference.
                    set_values(parameter, value)
                    parameter.grad = None

    def _of_all_stages(
        self, names: Container[str], whole: Callable[[Bucket], torch.Tensor | None], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensors of the named parameters on all ranks, cut from the bucket that `whole(bucket)` gathers, without
        those for which it returns None. `dtype` None means the dtype of the master weights."""
        pipeline = self._mesh.pipeline
        for stage, specs in enumerate(self._stages):
            chosen = [spec for spec in specs if spec.name in names]
            own = self._of_this_stage({spec.name for spec in chosen}, whole) if stage == pipeline.index else None
            for spec in chosen:
                found = next(own) if own is not None else None
                if pipeline.gather_integers([int(found is not None)])[stage][0]:
                    yield spec.name, self._from(stage, spec, found, dtype)

    def _from(
        self, stage: int, spec: TensorSpec, value: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Broadcast a tensor from the ranks of a stage, which give `value`, to all ranks of the pipeline."""
        pipeline, numel = self._mesh.pipeline, prod(spec.shape)
        if value is None:
            value = torch.empty(0, dtype=dtype or spec.dtype, device=self._mesh.device)
        held, everywhere = on_one_rank(numel, pipeline.size, stage), replicated(numel, pipeline.size)
        flat = value.contiguous().view(-1)
        return redistribute(flat, held, everywhere, pipeline, f"reading of {spec.name}").view(spec.shape)

    def _of_this_stage(
        self, names: set[str], whole: Callable[[Bucket], torch.Tensor | None]
    ) -> Iterator[torch.Tensor | None]:
        """Yield the named tensors in the order of buckets, or None where `whole(bucket)` is None."""
        for bucket in all_buckets(self._units):
            slots = [slot for slot in bucket.layout.slots if slot.spec.name in names]
            full = whole(bucket) if slots else None
            for slot in slots:
                yield None if full is None else self._joined(slot, full[slot.where.start : slot.where.end])

    def _joined(self, slot: ParameterSlot, local: torch.Tensor) -> torch.Tensor:
        regions = self._regions.get(slot.spec.name)
        if regions is None:
            return local.view(slot.spec.shape)
        return join_regions(local, regions, self._mesh.tensor, f"reading of {slot.spec.name}")

    def _weights(self, bucket: Bucket) -> torch.Tensor:
        return self._whole(bucket, self._weights_of(bucket).load(self._mesh.device))

    def _gradients(self, bucket: Bucket) -> torch.Tensor | None:
        shard = bucket.grad
        if shard is None and bucket.grad_rest is not None:
            shard = bucket.grad_rest.load(self._mesh.device)
        return None if shard is None or not bucket.trainable else self._whole(bucket, shard)

    def _whole(self, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
        layout, ranks = bucket.layout, self._mesh.shard
        held = of_bucket(layout, ranks.size, whole=shard.numel() == layout.padded)
        whole = replicated(layout.padded, ranks.size)
        return redistribute(shard.detach(), held, whole, ranks, f"reading of {bucket.name}")

    def _find(self, fqn: str) -> TensorSpec:
        if fqn not in self._specs:
            raise LayoutError(f"the model has no parameter {fqn!r}; names are as in model.named_parameters()")
        return self._specs[fqn]


def _fingerprint(parameter: nn.Parameter) -> tuple[int, int]:
    """Return values that a write changes: the version counter, and a sum over the bits, as the counter misses `.data`."""
    return parameter._version, int(digest(parameter.detach()))
