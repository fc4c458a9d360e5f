"""Checkpoints written in one process, by ranks one after the other, and read again by any number of others."""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from zeromesh.checkpoint.io import file_slices
from zeromesh.checkpoint.io import format as safetensors_layout
from zeromesh.checkpoint.io.file_slices import PlacedValues, TensorShard
from zeromesh.checkpoint.io.format import (
    DTYPES,
    ChecksumPiece,
    FileLayout,
    FileRecord,
    Manifest,
    TensorSpec,
    index_files,
    plan_files,
)
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.io.writer import Runs, ShardWriter, bytes_for_others, columns_to_rows, plan_pieces, plan_runs
from zeromesh.checkpoint.loader import places_of
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.flat.layout import Region
from zeromesh.intervals import Interval
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.offload import TieredTensor, tensor_bytes
from zeromesh.offload.io.direct_io import BLOCK

Values = Mapping[TensorSpec, torch.Tensor]
"""Whole tensors."""
KINDS = ("model", "master", "exp_avg")


@contextmanager
def small_units() -> Iterator[None]:
    """Files of a few KB are already worth more than one, their pieces are of two blocks, and nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(safetensors_layout, "_LEAST_FILE", 64)
        patch.setattr(file_slices, "GRID", 2 * BLOCK)
        yield


def tell() -> None:
    """Nobody has to be told that writing goes on."""


def spec(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, kind: str = "model") -> TensorSpec:
    return TensorSpec(kind=kind, name=name, dtype=dtype, shape=shape)


SOME = [spec("embed", (300, 7)), spec("norm", (300,), torch.bfloat16), spec("scale", ()), spec("embed", (300, 7), kind="exp_avg")]


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """A few small tensors of several kinds and dtypes, some without dims or elements."""
    found: dict[tuple[str, str], TensorSpec] = {}
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(KINDS))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 40]), max_size=3)))
        dtype = DTYPES[draw(st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "I16", "U8", "BOOL"]))]
        found[kind, f"layers.{number}"] = TensorSpec(kind=kind, name=f"layers.{number}", dtype=dtype, shape=shape)
    return list(found.values())


def values_of(specs: Sequence[TensorSpec], seed: int) -> dict[TensorSpec, torch.Tensor]:
    """Any bits, NaNs of all sorts among them."""
    generator = torch.Generator().manual_seed(seed)
    return {spec: _random(spec, generator) for spec in specs}


def _random(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    most = 2 if spec.dtype is torch.bool else 256
    bits = torch.randint(0, most, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return bits.view(spec.dtype).reshape(spec.shape)


def bits(value: torch.Tensor) -> bytes:
    """What two tensors have in common when they are equal bit by bit."""
    return tensor_bytes(value).numpy().tobytes()


def split(values: Values, ranks: int, rng: random.Random) -> list[list[TensorShard]]:
    """Deal tensors to ranks: slices of one dim first, in any order, then intervals of what these make. Memory is a copy."""
    dealt: list[list[TensorShard]] = [[] for _ in range(ranks)]
    for spec, value in values.items():
        for region in _regions(spec.shape, rng):
            local = _local(value, region).reshape(-1)
            cuts = sorted(rng.choices(range(region.numel + 1), k=rng.randrange(5)))
            for start, end in pairwise([0, *cuts, region.numel]):
                interval = Interval(start=start, end=end)
                memory = local[start:end].clone()
                holding = TensorShard(
                    spec=spec, region=region, interval=interval, values=TieredTensor.of(memory), owner=rng.randrange(3)
                )
                rng.choice(dealt).append(holding)
    return dealt


def _regions(shape: tuple[int, ...], rng: random.Random) -> list[Region]:
    if not shape or rng.random() < 0.3:
        return [Region.whole(shape)]
    dim = rng.randrange(len(shape))
    cuts = sorted(rng.choices(range(shape[dim] + 1), k=rng.randrange(5)))
    slices = [Interval(start=a, end=b) for a, b in pairwise([0, *cuts, shape[dim]])]
    rng.shuffle(slices)
    ranks = rng.randrange(1, 4)
    whole = Region.whole(shape).dims
    return [Region(shape=shape, dims=(*whole[:dim], tuple(slices[rank::ranks]), *whole[dim + 1 :])) for rank in range(ranks)]


def _local(value: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, slices in enumerate(region.dims):
        indices = [index for slice_ in slices for index in range(slice_.start, slice_.end)]
        value = value.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return value


@dataclass(frozen=True, slots=True)
class Axis:
    """One of `size` ranks that are threads of this process, as a process set; `started` has the collectives that it has begun."""

    index: int
    size: int
    given: dict[int, Any]
    met: Barrier
    started: list[object] = field(default_factory=list)
    on_stream: bool = False

    def _all(self, value: Any, use: Callable[[list[Any]], None]) -> None:
        self.given[self.index] = value
        self.met.wait(20)
        use([self.given[rank] for rank in range(self.size)])
        self.met.wait(20)

    def gather_json(self, value: Any, what: str) -> list[Any]:
        found: list[Any] = []
        self._all(json.dumps(value), lambda given: found.extend(map(json.loads, given)))
        return found

    def start(self, kind: object, call: CollectiveCall) -> Any:
        def take(everyone: list[Any]) -> None:
            parts = [torch.split(values, sent)[self.index] if sent else values for values, sent in everyone]
            there = [part for part, length in zip(parts, call.received, strict=True) if length]
            call.out.copy_(torch.cat(there or [call.out]))

        self.started.append(kind)
        self._all((call.given.clone(), list(call.sent)), take)
        return SimpleNamespace(wait=lambda: None)


def in_threads(size: int, work: Callable[[Any], Any]) -> tuple[list[Any], list[Axis]]:
    """The results of `work` on all ranks, and the ranks."""
    given, met = dict[int, Any](), Barrier(size)
    axes = [Axis(index, size, given, met) for index in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, axes)), axes


def exchanged(dealt: Sequence[Sequence[TensorShard]], size: int) -> list[list[TensorShard]]:
    """What ranks hold after the exchange over tensor axes of so many neighbours."""
    found: list[list[TensorShard]] = []
    for first in range(0, len(dealt), size):
        own, cpu = dealt[first : first + size], torch.device("cpu")
        found += in_threads(size, lambda axis: columns_to_rows(own[axis.index], axis, cpu))[0]  # noqa: B023
    return found


def runs_of(files: Sequence[FileLayout], dealt: Sequence[Sequence[TensorShard]], tensor: int = 1) -> list[Runs]:
    """What each rank has, of which so many neighbours are on a tensor axis; rank 0 has the headers."""
    return [plan_runs(files, shards, rank) for rank, shards in enumerate(exchanged(dealt, tensor))]


def written(
    directory: Path, files: Sequence[FileLayout], dealt: Sequence[Sequence[TensorShard]], tensor: int = 1
) -> list[ChecksumPiece]:
    """Let ranks write one after the other, each of which has got the others' bytes of its blocks."""
    runs = runs_of(files, dealt, tensor)
    sent = [bytes_for_others(each) for each in runs]
    found: list[ChecksumPiece] = []
    for rank, own in enumerate(runs):
        received = [each for other, rows in enumerate(sent) if other != rank for each in rows]
        found += joined(ShardWriter(directory, plan_pieces(files, own, received, {2: 0, 0: 1, 1: 2}), rank))
    return found


def joined(writer: ShardWriter) -> list[ChecksumPiece]:
    """Start a writer, and wait for its end."""
    writer.start()
    return writer.join(tell)


def manifest_of(step: int, files: Sequence[FileLayout], written: Sequence[ChecksumPiece]) -> Manifest:
    """The manifest of tensor files that ranks have written."""
    ordered = sorted(written, key=lambda piece: piece.begin)
    records = {
        file.path: FileRecord(nbytes=file.nbytes, pieces=tuple(piece for piece in ordered if piece.path == file.path))
        for file in files
    }
    tensors = [tensor for file in files for tensor in file.tensors]
    return Manifest(
        step=step,
        files=records,
        tensors=tuple(tensors),
        aliases={"tied.weight": tensors[0].name},
        layout={"ranks": len({piece.rank for piece in written}), "eps": 1e-20, "who": "é"},
    )


def write(
    root: Path,
    step: int,
    dealt: Sequence[Sequence[TensorShard]],
    documents: Mapping[str, bytes] | None = None,
    alter: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    tensor: int = 1,
) -> CheckpointReader:
    """A committed checkpoint of what the ranks hold, of which so many neighbours are on a tensor axis."""
    store = CheckpointStore(root)
    files = plan_files(dict.fromkeys(holding.spec for holdings in dealt for holding in holdings), len(dealt))
    directory = store.create(step, files)
    for path, text in {**index_files(files), **(documents or {})}.items():
        (directory / path).write_bytes(text)
    store.commit(step, alter(manifest_of(step, files, written(directory, files, dealt, tensor))))
    assert store.trash.wait(seconds=20)  # An older checkpoint of the step is removed in a thread.
    return CheckpointReader(store.path(step))


def targets_of(reader: CheckpointReader, holdings: Sequence[TensorShard]) -> list[PlacedValues]:
    return list(places_of(reader, holdings))


def verify(reader: CheckpointReader) -> None:
    """Read and verify all that a checkpoint holds."""
    reader.stream(reader.pieces(), lambda piece, data: None)


def read(reader: CheckpointReader, name: str, first: int, memory: torch.Tensor) -> torch.Tensor:
    """Read elements of a model's tensor from `first` on into `memory`, and return that."""
    tensor = reader.tensor("model", name)
    assert tensor is not None
    reader.read([PlacedValues.stored(tensor, first, TieredTensor.of(memory))], tell)
    return memory
