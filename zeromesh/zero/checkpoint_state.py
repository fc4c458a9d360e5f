"""The tensors that a checkpoint is made of, and this rank's part of each, to be written or to be filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zeromesh.checkpoint.format.safetensors_layout import TensorSpec
from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.flat.layout import ParameterSpec
from zeromesh.flat.regions import Region, share_of
from zeromesh.intervals import ALIGNMENT, Interval
from zeromesh.mesh.process_mesh import Mesh, ProcessSet
from zeromesh.offload import TieredTensor
from zeromesh.optim.optimizer_step import OptimizerStep
from zeromesh.options import Placement, ZeroOptions
from zeromesh.units.unit import Bucket, Unit, all_buckets

MODEL, MASTER, AVERAGE = "model", "master", "ema"
WEIGHTS = (MODEL, MASTER, AVERAGE)
"""Kinds of tensors that weights are made of again."""


class CheckpointState:
    """Parameters, master weights and moments of an engine as whole tensors by name, and this rank's part of each.

    Parameters are stored in the dtype that the model computes with, and beside them master weights where these differ.
    """

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
        """Every tensor, the same on all ranks, in the order of buckets: neighbours in a shard are neighbours in a file.

        `reading`: only what the engine's states are made of again, without the parameters that follow from master weights.
        """
        found = [
            TensorSpec(kind=kind, name=slot.spec.name, dtype=dtype, shape=slot.spec.region.shape)
            for bucket in self._buckets
            for kind, dtype, _ in self._kinds(bucket, reading=reading)
            for slot in bucket.layout.slots
            if _has(bucket, slot.spec, kind, reading=reading)
        ]
        found += [_spec_of(name, buffer) for name, buffer in saved_buffers(self._model).items()]
        stages = of_stages([(spec, None) for spec in found], self._mesh.pipeline, "tensors of all stages")
        return [spec for stage in stages for spec, _ in stage]

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters, to the name under which they are stored."""
        specs = [slot.spec for bucket in self._buckets for slot in bucket.layout.slots]
        aliases = {alias: spec.name for spec in specs for alias in spec.other_names}
        rows = self._mesh.pipeline.gather_json(aliases, "names of tied parameters")
        return {alias: name for row in rows for alias, name in row.items()}

    def written(self) -> list[TensorShard]:
        """The parts that this rank writes: of what several ranks hold alike a share each, so that every element is written once.

        Of buffers, the first rank of a stage writes those that no earlier stage has.
        """
        holders, index = self._mesh.replicate.size, self._mesh.replicate.index
        if self._options.placements.optimizer is Placement.REPLICATED:
            holders, index = self._mesh.data.size, self._mesh.data_index
        found: list[TensorShard] = []
        for bucket in self._buckets:
            if self._updater.sharing.counts(bucket):
                found += self._of(bucket, share_of(bucket.interval, holders, index, ALIGNMENT))
        # Forward may change a buffer while it is written.
        buffers, here = saved_buffers(self._model), self._mesh.coordinate
        specs = buffers_of_stages(self._model, self._mesh.pipeline)[here.pipeline]
        first = here.tensor == self._mesh.data_index == 0
        return [*found, *(_of_buffer(spec.name, buffers[spec.name].clone()) for spec in specs if first)]

    def wanted(self) -> list[TensorShard]:
        """The parts that this rank reads: its whole shards, with master weights rather than parameters, and all buffers."""
        found: list[TensorShard] = []
        for bucket in self._buckets:
            found += self._of(bucket, bucket.interval, reading=True)
        return [*found, *(_of_buffer(name, buffer) for name, buffer in saved_buffers(self._model).items())]

    def order(self) -> dict[int, int]:
        """The position of each bucket in the next update, as far as the last one tells."""
        return {self.owner_of(bucket): place for place, bucket in enumerate(self._updater.last_order)}

    def owner_of(self, bucket: Bucket) -> int:
        """The number of a bucket, by which a saver knows who owns a part."""
        return self._numbers[id(bucket)]

    def _kinds(self, bucket: Bucket, *, reading: bool = False) -> list[tuple[str, torch.dtype, TieredTensor]]:
        """Kind, stored dtype and place of what a bucket's shard holds."""
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

    def _of(self, bucket: Bucket, interval: Interval, *, reading: bool = False) -> Iterator[TensorShard]:
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
    """Whether a checkpoint has a kind of tensor of a parameter; one that never was trained has weights alone, which become its
    master weights, and averages of them, where others of its bucket are trained."""
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
    """The persistent buffers of each stage that no earlier one has; all ranks of `pipeline` call this."""
    specs = [(_spec_of(name, buffer), None) for name, buffer in saved_buffers(model).items()]
    return [[spec for spec, _ in stage] for stage in of_stages(specs, pipeline, "buffers of all stages")]


def of_stages(
    tensors: Sequence[tuple[TensorSpec, Any]], pipeline: ProcessSet, what: str
) -> list[list[tuple[TensorSpec, Any]]]:
    """Exchange what each stage of a pipeline has: tensors, and JSON values of them.

    Returns those of each stage that no earlier stage has. All ranks of `pipeline` call this.
    """
    rows = [[spec.kind, spec.name, str(spec.dtype).removeprefix("torch."), spec.shape, more] for spec, more in tensors]
    seen: set[tuple[str, str]] = set()
    stages = []
    for stage in pipeline.gather_json(rows, what):
        new = [
            (TensorSpec(kind=kind, name=name, dtype=getattr(torch, dtype), shape=tuple(shape)), more)
            for kind, name, dtype, shape, more in stage
            if (kind, name) not in seen
        ]
        seen.update((spec.kind, spec.name) for spec, _ in new)
        stages.append(new)
    return stages


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers, as `state_dict` has them, each once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{fqn}.{name}" if fqn else name] = buffer
    return found
