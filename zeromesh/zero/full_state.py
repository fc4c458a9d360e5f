"""A model's parameters, gradients and optimizer states as whole tensors by name, independent of how ranks shard them."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.checkpoint.io.format import DTYPE_NAMES, REPLICA, TensorSpec, spec_of
from zeromesh.errors import LayoutError, PhaseError, WeightsDifferError, first_lines, ranks_text
from zeromesh.flat.encoded_shard import EncodedTensor, ReadElements, encoded_part
from zeromesh.flat.layout import ParameterSpec, Region, part_of, share_of
from zeromesh.flat.redistribute import bucket_placement, join_regions, redistribute, replicated
from zeromesh.intervals import ALIGNMENT, Interval, grouped
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import TieredTensor, hex_digest
from zeromesh.optim.optimizer_step import OptimizerStep
from zeromesh.options import Placement, ZeroOptions
from zeromesh.overrides import override
from zeromesh.units.unit import Bucket, Phase, Unit, all_buckets, digest, set_values

MODEL, MASTER, AVERAGE = "model", "master", "ema"
WEIGHTS = (MODEL, MASTER, AVERAGE)  # kinds of stored tensors from which weights are restored
OUTER_MOMENTUM = "outer_momentum"
_MOST_LISTED = 8


class CheckpointState:
    """Lists the tensors of a checkpoint, and this rank's part of each, to write and to load: parameters in the dtype that the model
    computes with, beside them master weights where these differ, and moments."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], updater: OptimizerStep, mesh: Mesh, options: ZeroOptions) -> None:
        self._model, self._buckets, self._mesh = model, all_buckets(units), mesh
        self._updater, self._options = updater, options

    def tensors(self, *, reading: bool = False) -> list[TensorSpec]:
        """List the tensors of a checkpoint, alike on all ranks, in the order of buckets: what is adjacent in a shard is adjacent in
        a file. `reading`: list only what a load needs, without parameters that are cast from master weights."""
        specs = [
            TensorSpec(kind=kind, name=slot.spec.name, dtype=dtype, shape=slot.spec.region.shape)
            for bucket in self._buckets
            for first, dtype, _ in self._sharded_tensors(bucket, reading=reading)
            for kind in self._kinds(first)
            for slot in bucket.layout.slots
            if _is_stored(bucket, slot.spec, kind, reading=reading)
        ]
        specs += [spec for bucket in self._buckets for spec, _ in self._unsharded(bucket, None)]
        specs += [spec_of(name, buffer) for name, buffer in persistent_buffers(self._model).items()]
        return list(chain.from_iterable(tensors_by_stage(specs, self._mesh.pipeline, "tensors of all stages")))

    def aliases(self) -> dict[str, str]:
        """Map each further name of a tied parameter to the name under which the parameter is stored."""
        specs = [slot.spec for bucket in self._buckets for slot in bucket.layout.slots]
        aliases = {alias: spec.name for spec in specs for alias in spec.other_names}
        rows = self._mesh.pipeline.gather_json(aliases, "names of tied parameters")
        return {alias: name for row in rows for alias, name in row.items()}

    def frozen(self) -> set[str]:
        """Return the names of the parameters of all pipeline stages that were never trained."""
        names = [s.spec.name for b in self._buckets for s in b.layout.slots if s.spec.fqn not in b.ever_trained]
        return set(chain.from_iterable(self._mesh.pipeline.gather_json(names, "names of frozen parameters")))

    def encoded(self) -> set[str]:
        """Return the names of this rank's parameters that are kept encoded."""
        return {s.spec.name for each in self._buckets for s in each.layout.slots if s.spec.codec is not None}

    def unlike_encoded(self, names: Container[str], source: ReadElements) -> list[str]:
        """Return those of the encoded parameters `names` of which this rank has other bytes than `source` gives when encoded."""
        if self._options.weights is None:
            return []
        codec = self._options.weights.codec
        return [
            piece.spec.name
            for bucket in self._buckets
            if isinstance(own := bucket.master, EncodedTensor)
            for piece in bucket.layout.pieces(bucket.interval)
            if piece.spec.name in names and own.differs(piece, encoded_part(piece.spec, codec, source))
        ]

    def shards_to_write(self) -> list[TensorShard]:
        """List the shards that this rank writes. Ranks that hold the same tensor write disjoint parts of it, and the first rank of
        the first pipeline stage with a buffer writes the buffer."""
        replicated = self._options.placements.optimizer is Placement.REPLICATED
        shards: list[TensorShard] = []
        for bucket in filter(self._updater.gradients.replicas.counts, self._buckets):
            ranks, replicas = bucket.group.ranks, self._mesh.replicate
            among = (1, 0) if bucket.divided else (replicas.size, replicas.index)
            for own, holders, index in ((False, *among), (True, 1, 0)):
                if replicated:
                    holders, index = holders * ranks.size, index * ranks.size + ranks.index
                share = share_of(bucket.interval, holders, index, ALIGNMENT)
                shards += self._shards_of(bucket, share, writing="own" if own else "common")
        # Forward may change a buffer while it is written.
        buffers, pipeline = persistent_buffers(self._model), self._mesh.pipeline
        specs = buffers_by_stage(self._model, pipeline)[pipeline.index]
        first = self._mesh.tensor.index == self._mesh.peers.index == 0
        return [*shards, *(_buffer_shard(spec.name, buffers[spec.name].clone()) for spec in specs if first)]

    def shards_to_read(self) -> list[TensorShard]:
        """List the shards that this rank reads: all that it holds, with master weights rather than parameters, and all buffers."""
        shards = (self._shards_of(bucket, bucket.interval) for bucket in self._buckets)
        buffers = persistent_buffers(self._model).items()
        return [*chain.from_iterable(shards), *(_buffer_shard(name, buffer) for name, buffer in buffers)]

    def fill(self, given: Mapping[str, torch.Tensor]) -> None:
        """Copy whole tensors, by parameter name, into this rank's shards; called inside `ZeroEngine.loading`."""
        for shard in self.shards_to_read():
            if (value := given.get(shard.spec.name)) is not None and shard.spec.kind in (MODEL, MASTER):
                local = part_of(value, shard.region).reshape(-1)
                shard.values.write(0, local[shard.interval.start : shard.interval.end]).wait()

    def require_same_weights(self) -> None:
        """Raise `WeightsDifferError`, with tensors and ranks, where 64-bit digests (XXH3) of weights differ on ranks that hold the
        same: gathered parameters that are kept, shards at rest, and buffers. All ranks call it between passes."""
        for bucket in self._buckets:
            bucket.buffer.wait()  # An update starts gathers, which write the buffer.
        world = self._mesh.world
        rows = zip(world.ranks, world.gather_json(self._digests(), "digests of weights"), strict=True)
        holders = grouped((what, (rank, value)) for rank, row in rows for what, value in row.items())
        lines = []
        for what, pairs in holders.items():
            alike, *unlike = sorted(grouped((value, rank) for rank, value in pairs).values(), key=len, reverse=True)
            others = sorted(chain(*unlike))
            if 0 < len(others) < len(alike):
                lines.append(f"{what}: {ranks_text(others)} has other values than {ranks_text(alike, 8)}")
            elif others:
                lines.append(f"{what}: {', '.join(f'rank {rank} has {value}' for rank, value in pairs)}")
        if lines:
            listed = "\n".join(first_lines(lines, _MOST_LISTED))
            raise WeightsDifferError(f"ranks hold other values of the same weights:\n{listed}")

    def _digests(self) -> dict[str, str]:
        digests = {}
        for bucket in self._buckets:
            for slot in bucket.layout.slots if bucket.buffer.persistent and bucket.buffer.is_valid else ():
                part = _describe_part(slot.spec.region, Interval(start=0, end=slot.spec.region.numel))
                digests[f"{slot.spec.name}{part}"] = hex_digest(bucket.buffer.full[slot.where.start : slot.where.end])
        held = {piece.spec.name for bucket in self._buckets for piece in bucket.layout.pieces(bucket.interval)}
        for shard in self.shards_to_read():
            part = _describe_part(shard.region, shard.interval)
            name = shard.spec.name if shard.spec.kind == MODEL else f"{shard.spec.name} ({shard.spec.kind})"
            # Only ranks with some elements of a parameter count its steps, as classes of optimizers do.
            if shard.values.numel and (shard.spec.kind == MODEL or shard.spec.name in held):
                digests[f"{name}{part}, at rest"] = hex_digest(shard.values.load(self._mesh.device))
        return digests

    def update_order(self) -> dict[int, int]:
        """Map the number of each bucket to its position in the last update, at which the next one is expected to change it."""
        return {self.bucket_number(bucket): place for place, bucket in enumerate(self._updater.last_order)}

    def bucket_number(self, bucket: Bucket) -> int:
        """Return the index of a bucket among all buckets: the `owner` of its shards."""
        return self._buckets.index(bucket)

    def _sharded_tensors(self, bucket: Bucket, *, reading: bool = False) -> list[tuple[str, torch.dtype, TieredTensor]]:
        master, optimizer = bucket.master, self._updater.optimizer_of(bucket)
        tensors = []
        if not (reading and bucket.trainable):
            # A copy of the same dtype is the master weights, but for what a codec between replicas left out.
            own = master if reading or master.dtype == bucket.dtype else bucket.own_copy or master
            tensors.append((MODEL, bucket.dtype, own))
        states = {MASTER: master} if bucket.trainable and (reading or master.dtype != bucket.dtype) else {}
        states |= optimizer.moments if optimizer is not None else {}
        states |= {AVERAGE: bucket.average} if bucket.average is not None else {}
        states |= {OUTER_MOMENTUM: bucket.outer[1]} if len(bucket.outer) > 1 else {}
        return [*tensors, *((name, state.dtype, state) for name, state in states.items())]

    def _kinds(self, kind: str) -> list[str]:
        """Return the kinds under which the replicas' tensors of a kind are stored: with local steps each has moments of its own."""
        local = self._updater.outer is not None and kind not in (*WEIGHTS, OUTER_MOMENTUM)
        return [kind, *(f"{kind}{REPLICA}{each}" for each in range(1, self._mesh.replicate.size if local else 1))]

    def _unsharded(self, bucket: Bucket, written: Interval | None) -> Iterator[tuple[TensorSpec, TieredTensor | None]]:
        """Yield the optimizer states that are not divided as their parameters are, with the values that this rank reads, or of
        `written`, an interval of the bucket, those that it writes."""
        if (optimizer := self._updater.optimizer_of(bucket)) is None:
            return
        first = [
            piece.spec.fqn
            for piece in (bucket.layout.pieces(written) if written is not None else ())
            if not piece.in_parameter.start and not next(iter(piece.spec.region.runs(piece.in_parameter))).logical
        ]
        for number, slot in enumerate(bucket.layout.slots):
            fqn = slot.spec.fqn
            # One rank of the shard group has all states of a class that updates whole parameters.
            writes = not self._mesh.replicate.index if optimizer.whole else fqn in first
            for kind, dtype, shape, values in optimizer.whole_states(number) if fqn in bucket.ever_trained else ():
                spec = TensorSpec(kind=kind, name=slot.spec.name, dtype=dtype, shape=shape)
                yield spec, values if written is None or writes else None

    def _shards_of(self, bucket: Bucket, interval: Interval, writing: str = "") -> Iterator[TensorShard]:
        """Yield the shards of an interval that are to be read, or written: of what replicas have in `common`, or of their `own`."""
        owner, reading = self.bucket_number(bucket), not writing
        for spec, values in self._unsharded(bucket, None if reading else interval) if writing != "own" else ():
            if values is not None:
                region, everything = Region.whole(spec.shape), Interval(start=0, end=values.numel)
                yield TensorShard(spec=spec, region=region, interval=everything, values=values, owner=owner)
        offset, pieces = interval.start - bucket.interval.start, bucket.layout.pieces(interval)
        for first, dtype, tensor in self._sharded_tensors(bucket, reading=reading):
            kinds = self._kinds(first)
            if writing == ("own" if len(kinds) == 1 else "common"):
                continue
            kind = kinds[self._mesh.replicate.index % len(kinds)]
            for piece in pieces:
                if _is_stored(bucket, piece.spec, kind, reading=reading):
                    region, where = piece.spec.region, piece.in_shard
                    spec = TensorSpec(kind=kind, name=piece.spec.name, dtype=dtype, shape=region.shape)
                    part = tensor.slice(offset + where.start, offset + where.end)
                    yield TensorShard(spec=spec, region=region, interval=piece.in_parameter, values=part, owner=owner)


def _describe_part(region: Region, interval: Interval) -> str:
    """Return text for the elements `interval` of a tensor's region; empty for the whole tensor."""
    boxes = " x ".join("+".join(f"{each.start}:{each.end}" for each in dim) for dim in region.dims)
    cut = "" if region == Region.whole(region.shape) else f"[{boxes}]"
    return cut if interval.length == region.numel else f"{cut} elements {interval.start}:{interval.end}"


def _is_stored(bucket: Bucket, spec: ParameterSpec, kind: str, *, reading: bool) -> bool:
    """Return True if a checkpoint stores this kind of tensor for a parameter; all of a never-trained one come from its weights."""
    return kind == MODEL or (reading and kind in (MASTER, AVERAGE)) or spec.fqn in bucket.ever_trained


def _buffer_shard(name: str, buffer: torch.Tensor) -> TensorShard:
    # A view, since the buffer's memory may be that of another one, which loading has to change with it.
    spec, values = spec_of(name, buffer), TieredTensor.of(buffer.detach())
    return TensorShard(spec=spec, region=Region.whole(spec.shape), interval=Interval(start=0, end=buffer.numel()), values=values)


def require_storable(model: nn.Module, cure: str, without: Collection[str] = ()) -> None:
    """Raise `LayoutError`, with a `cure`, for tensors and states of modules, but those in `without`, that no checkpoint holds."""
    found = dict(model.named_parameters()) | persistent_buffers(model)
    for name, each in ((name, each) for name, each in found.items() if name not in without):
        if each.layout is not torch.strided or each.dtype not in DTYPE_NAMES:
            why = f"{name} is a tensor of {each.dtype} and {each.layout}, which files of safetensors do not hold"
            raise LayoutError(f"{why}; register a buffer that can be made again with persistent=False, or {cure}")
    for name, module in extra_states(model).items():
        if name not in without:
            why = f"{name} of a {type(module).__name__} (get_extra_state) is no tensor of the model, and checkpoints do not hold it"
            raise LayoutError(f"{why}; keep what it has in persistent buffers, or {cure}")


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have states beside tensors, by the names of these."""
    modules = model.named_modules()
    own = nn.Module.get_extra_state
    return {f"{name}._extra_state".lstrip("."): each for name, each in modules if type(each).get_extra_state is not own}


def buffers_by_stage(model: nn.Module, pipeline: ProcessSet) -> list[list[TensorSpec]]:
    specs = [spec_of(name, buffer) for name, buffer in persistent_buffers(model).items()]
    return tensors_by_stage(specs, pipeline, "buffers of all stages")


def tensors_by_stage(specs: Sequence[TensorSpec], pipeline: ProcessSet, what: str) -> list[list[TensorSpec]]:
    """List the tensors of each pipeline stage that no earlier stage has; all ranks of `pipeline` call this."""
    own = [[spec.kind, spec.name, str(spec.dtype).removeprefix("torch."), spec.shape] for spec in specs]
    stages = pipeline.gather_json(own, what)
    found: dict[tuple[str, str], tuple[int, TensorSpec]] = {}
    for stage, rows in enumerate(stages):
        for kind, name, dtype, shape in rows:
            spec = TensorSpec(kind=kind, name=name, dtype=getattr(torch, dtype), shape=tuple(shape))
            found.setdefault((kind, name), (stage, spec))
    return [[spec for first, spec in found.values() if first == stage] for stage in range(len(stages))]


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name, as in `state_dict`; a buffer with several names has only the first."""
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers.setdefault(id(buffer), (f"{fqn}.{name}" if fqn else name, buffer))
    return dict(buffers.values())


class _StandIn(nn.Parameter):
    """A placeholder parameter on the meta device that keeps the values copied into it."""

    received: torch.Tensor | None = None

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        self.received = source.expand(self.shape)
        return self


class FullState:
    """Whole tensors of the full model's parameters, in the master dtype, by the full model's names. All ranks call it alike."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: Mesh,
        options: ZeroOptions,
        weights_of: Callable[[Bucket], TieredTensor] = lambda bucket: bucket.master,
    ) -> None:
        """`weights_of` returns the shard from which a bucket's whole parameters are gathered."""
        self._model, self._units, self._mesh = model, units, mesh
        self._weights_of, self._gradient_dtype = weights_of, options.precision.sums
        self._summed = lambda bucket: bucket.summed_gradient(in_memory=options.optimizer_in_backward)
        slots = [(spec, each.master.dtype, trained) for each in all_buckets(units) for spec, _, trained in each.rows()]
        specs = [TensorSpec(kind=MODEL, name=one.name, dtype=dtype, shape=one.region.shape) for one, dtype, _ in slots]
        self._stages = tensors_by_stage(specs, mesh.pipeline, "parameters of all stages")
        """Each stage's parameters in the dtype of their master weights; shared parameters are in the first of their stages."""
        self._names: dict[str, tuple[str, ...]] = {}  # all names of each parameter, its canonical name first
        self._trained: dict[str, bool] = {}
        flags = {spec.name: (spec.other_names, trained) for spec, _, trained in slots}
        for row in mesh.pipeline.gather_json(flags, "names and flags of all stages"):
            for name, (others, trained) in row.items():
                self._names.setdefault(name, (name, *others))
                self._trained.setdefault(name, trained)
        everything = reversed([*chain.from_iterable(self._stages)])
        self._specs = {name: spec for spec in everything for name in self._names[spec.name]}
        self._regions: dict[str, tuple[ProcessSet, list[Region]]] = {}
        """The ranks that have parts of each divided parameter of this stage, and their regions."""
        for ranks, of_experts in ((mesh.tensor, False), (mesh.experts_and_layers, True)):
            divided = {
                spec.name: [[(each.start, each.end) for each in dim] for dim in spec.region.dims]
                for spec, _, _ in slots
                if not spec.region.is_whole and spec.in_experts == of_experts
            }
            for row in ranks.gather_json(divided, "parts of parameters") if ranks.size > 1 else ():
                for name, dims in row.items():
                    intervals = tuple(tuple(Interval(start=start, end=end) for start, end in dim) for dim in dims)
                    region = Region(shape=self._specs[name].shape, dims=intervals)
                    self._regions.setdefault(name, (ranks, []))[1].append(region)

    @property
    def numel(self) -> int:
        """The number of elements of the whole model."""
        return sum(spec.numel for spec in chain.from_iterable(self._stages))

    def names(self) -> list[str]:
        """Canonical names, with tied parameters once, in the order in which `parameters` yields them."""
        return [spec.name for spec in chain.from_iterable(self._stages)]

    def parameters(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` of every parameter, or of `names` alone: whole master weights, in their dtype. A tensor may be a
        view of this rank's own weights, which the next step changes: copy it to keep it."""
        return self._gather_all_stages(self._specs if names is None else names, self._weights_of, None)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` of every persistent buffer of the whole model; of a shared buffer that of the first stage."""
        buffers, pipeline = persistent_buffers(self._model), self._mesh.pipeline
        for stage, specs in enumerate(buffers_by_stage(self._model, pipeline)):
            for spec in specs:
                held = buffers[spec.name].detach() if stage == pipeline.index else None
                yield spec.name, self._broadcast(stage, spec, held, spec.dtype)

    def stored_specs(self) -> list[TensorSpec]:
        """List the tensors that `stored` yields: parameters in the dtype of their master weights, frozen ones in the model's."""
        return list(chain.from_iterable([*self._stages, *buffers_by_stage(self._model, self._mesh.pipeline)]))

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` of everything that a saved model has: parameters, tied ones once, and persistent buffers."""
        yield from self.parameters()
        yield from self.buffers()

    def parameter(self, fqn: str) -> torch.Tensor:
        """Return a copy of one whole parameter, in the dtype of its master weights."""
        return next(self.parameters([self._spec_of(fqn).name]))[1].clone()

    def gradient(self, fqn: str) -> torch.Tensor | None:
        """Return one whole gradient, in the reduction dtype, between backward and update, with the loss scale and without clipping;
        None for a frozen parameter. Raises `PhaseError` when the optimizer has used the gradient inside backward."""
        name = self._spec_of(fqn).name
        if not self._trained[name]:
            return None
        named = next(self._gather_all_stages([name], self._summed, self._gradient_dtype), None)
        if named is None:
            raise PhaseError(f"the gradient of {fqn} was used inside backward (optimizer.in_backward)")
        return named[1].clone()

    def nbytes_of(self, fqns: Iterable[str]) -> int:
        """Return the bytes of whole copies of these parameters on a rank. Raises `LayoutError` for names that no stage has."""
        return sum(spec.nbytes for spec in set(map(self._spec_of, fqns)))

    @contextmanager
    def whole(self, fqns: Iterable[str], dtype: torch.dtype) -> Iterator[None]:
        """Inside the block, between passes, the named parameters hold whole copies of their values, for reading. One that is not
        whole on this rank, such as a tensor-parallel one, is replaced in the model by one in `dtype`. Raises `LayoutError` for
        names that no stage has. Raises `PhaseError` at the end of the block, for a parameter that was written inside it."""
        names = {self._spec_of(fqn).name for fqn in fqns}
        before: dict[str, tuple[nn.Parameter, tuple[int, int]]] = {}
        with ExitStack() as restore:
            restore.callback(self._restore_phases)
            for name, value in self.parameters(names):
                places, trained = self._parameter_dicts(name), self._trained[name]
                shown, *others = [table.get(leaf) for table, leaf in places]
                # A parameter of another pipeline stage is on meta here, perhaps under only one of its names.
                known = shown is not None and all(each is shown for each in others) and not shown.is_meta
                if known and shown is not None and shown.shape == value.shape:
                    set_values(shown, value.to(shown.dtype, copy=True))
                else:
                    shown = nn.Parameter(value.to(dtype if trained else value.dtype, copy=True), requires_grad=trained)
                    self._replace(name, shown, restore)
                before[name] = (shown, _fingerprint(shown))
            yield
            if written := [name for name, (shown, was) in before.items() if _fingerprint(shown) != was]:
                why = f"{', '.join(written)}: written inside gathered(), where parameters are copies to be read"
                cure = "change weights before training, in the model that is given to the trainer"
                raise PhaseError(f"{why}. No weight of the run has changed; {cure}")

    def _restore_phases(self) -> None:
        for unit in self._units:
            for bucket in unit.buckets:
                (bucket.show_values if unit.phase is Phase.LIVE else bucket.hide_values)()

    def _replace(self, name: str, replacement: nn.Parameter, restore: ExitStack) -> None:
        for table, leaf in self._parameter_dicts(name):
            restore.callback(override(table, leaf, replacement))  # A pipeline stage may have had no such parameter.

    def _parameter_dicts(self, name: str) -> list[tuple[dict[str, nn.Parameter | None], str]]:
        parts = [each.rpartition(".") for each in self._names[name]]
        return [(self._model.get_submodule(owner)._parameters, leaf) for owner, _, leaf in parts]

    @contextmanager
    def receiving_values(self) -> Iterator[dict[str, torch.Tensor]]:
        """Inside the block, between passes, placeholders of whole shape on the meta device replace the model's parameters. The
        yielded mapping has, after the block, the values that `load_state_dict` or others gave them, by name."""
        given: dict[str, torch.Tensor] = {}
        stood = {n: _StandIn(torch.empty(self._specs[n].shape, device="meta"), self._trained[n]) for n in self.names()}
        with ExitStack() as restore:
            for name, placeholder in stood.items():
                self._replace(name, placeholder, restore)
            yield given
            for name, placeholder in stood.items():
                for each in (placeholder.received, *(table.get(leaf) for table, leaf in self._parameter_dicts(name))):
                    if each is not None and not each.is_meta:
                        given[name] = each.detach()

    def make_whole(self, restore: Callable[[], None], without: Collection[str] = ()) -> None:
        """Give the model ordinary whole parameters in the master dtype, but those `without`; the engine cannot be used afterwards.
        `restore` puts the modules that were replaced back into the model."""
        values = {name: tensor.clone() for name, tensor in self.parameters(set(self._specs) - set(without))}
        foreign = self.buffers() if self._mesh.shape.divides("blocks") else ()
        buffers = {name: tensor.clone() for name, tensor in foreign}
        restore()
        for name, value in buffers.items():
            self._model.get_buffer(name).copy_(value)
        for name, value in values.items():
            whole = nn.Parameter(value, requires_grad=self._trained[name])
            for table, leaf in self._parameter_dicts(name):
                parameter = table[leaf]
                if parameter is None or parameter.is_meta:
                    table[leaf] = whole
                else:  # Other code may refer to this object, so that it is kept.
                    set_values(parameter, value)
                    parameter.grad = None

    def _gather_all_stages(
        self, names: Container[str], shard_of: Callable[[Bucket], TieredTensor | None], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensors of the named parameters on all ranks, gathered from `shard_of(bucket)`, without those for which
        that is None. `dtype` None means the dtype of the master weights."""
        pipeline = self._mesh.pipeline
        for stage, specs in enumerate(self._stages):
            chosen = [spec for spec in specs if spec.name in names]
            here = {spec.name for spec in chosen} if stage == pipeline.index else set()
            tensors = self._gather_this_stage(here, shard_of)
            for spec in chosen:
                tensor = next(tensors, None)
                if pipeline.gather_integers([int(tensor is not None)])[stage][0]:
                    yield spec.name, self._broadcast(stage, spec, tensor, dtype or spec.dtype)

    def _broadcast(self, stage: int, spec: TensorSpec, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(spec.shape, dtype=dtype, device=self._mesh.device) if value is None else value.contiguous()
        return self._mesh.pipeline.broadcast(whole, stage, f"reading of {spec.name}")

    def _gather_this_stage(
        self, names: set[str], shard_of: Callable[[Bucket], TieredTensor | None]
    ) -> Iterator[torch.Tensor | None]:
        """Yield the named tensors in the order of buckets, or None where `shard_of(bucket)` is None."""
        for bucket in all_buckets(self._units):
            slots = [slot for slot in bucket.layout.slots if slot.spec.name in names]
            full = None
            if slots and (shard := shard_of(bucket)) is not None:
                layout, ranks = bucket.layout, bucket.group.ranks
                held = bucket_placement(layout, ranks.size, whole=bucket.held.length == layout.padded)
                whole, own = replicated(layout.padded, ranks.size), shard.load(self._mesh.device).detach()
                what, replicas = f"reading of {bucket.name}", bucket.group.replicas
                if bucket.divided:
                    parts = tuple((layout.part(bucket.held, index),) for index in range(replicas.size))
                    own = redistribute(own, parts, ((bucket.held,),) * replicas.size, replicas, what)
                full = redistribute(own, held, whole, ranks, what)
            for slot in slots:
                name, local = slot.spec.name, None if full is None else full[slot.where.start : slot.where.end]
                if local is not None and name in self._regions:
                    holders, regions = self._regions[name]
                    local = join_regions(local, regions, holders, f"reading of {name}")
                yield None if local is None else local.view(self._specs[name].shape)

    def _spec_of(self, fqn: str) -> TensorSpec:
        if fqn not in self._specs:
            raise LayoutError(f"the model has no parameter {fqn!r}; names are as in model.named_parameters()")
        return self._specs[fqn]


def _fingerprint(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, int(digest(parameter.detach()))  # The version counter misses writes to `.data`.
