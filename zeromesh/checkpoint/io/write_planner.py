"""Who writes what: a rank's holdings as runs of bytes in blocks of its own, and as shares of bands."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from zeromesh.checkpoint.format.safetensors_layout import FileLayout
from zeromesh.checkpoint.io.blocks import minus
from zeromesh.checkpoint.io.interleaved import InterleavedBlock, InterleavedShard, is_interleaved, plan_bands
from zeromesh.checkpoint.io.tensor_shard import TensorShard
from zeromesh.checkpoint.io.writer import FileShare, WriteSource, as_values
from zeromesh.intervals import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    """What a rank writes: `sources` and `shares` are its own, `bands` those of its host. `woven`: any host has some."""

    sources: Sequence[WriteSource]
    shares: Sequence[FileShare] = ()
    bands: Sequence[InterleavedBlock] = ()
    woven: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the files that this rank has."""
        return sum(source.nbytes for source in self.sources) + sum(share.nbytes for share in self.shares)


@dataclass(kw_only=True, slots=True)
class WritePlanner:
    """Divides what one rank holds, in two steps: every rank gets every other's `said` between them."""

    files: Sequence[FileLayout]
    holdings: Sequence[TensorShard]
    rank: int
    _placed: list[tuple[TensorShard, int, int, InterleavedShard | None]] = field(init=False)

    def __post_init__(self) -> None:
        places = {
            (spec.kind, spec.name): (number, at) for number, file in enumerate(self.files) for spec, at in file.places
        }
        self._placed = []
        for holding in self.holdings:
            file, at = places[holding.spec.kind, holding.spec.name]
            self._placed.append((holding, file, at, InterleavedShard.of(holding, file, at, self.rank)))

    def said(self) -> bytes:
        """What the others have to know: strands, and tensors that cannot have bands."""
        strands = [strand.to_row() for *_, strand in self._placed if strand is not None]
        barred = [
            [file, at]
            for holding, file, at, strand in self._placed
            if strand is None and holding.interval.length and is_interleaved(holding)
        ]
        return json.dumps([strands, barred]).encode()

    def divide(self, every: Sequence[bytes], hosts: Sequence[Hashable]) -> WritePlan:
        """What this rank writes, of what each rank has said; `hosts` has for each what tells its host."""
        heard = [json.loads(text) for text in every]
        strands = [InterleavedShard.from_row(rank, row) for rank, (rows, _) in enumerate(heard) for row in rows]
        barred = [(file, at) for _, rows in heard for file, at in rows]
        bands = plan_bands(strands, barred, hosts, self.rank)
        by_tensor: dict[tuple[int, int], list[InterleavedBlock]] = {}
        for band in bands:
            by_tensor.setdefault(band.strands[0].tensor, []).append(band)
        sources, shares = self._headers(), []
        for holding, file, at, strand in self._placed:
            own = by_tensor.get((file, at), []) if strand is not None else []
            stretches = [holding.interval]
            if strand is not None and own:
                shares += [
                    _share(holding, strand, band, place)
                    for band in own
                    for place, each in enumerate(band.strands)
                    if each == strand
                ]
                stretches = [strand.within(each) for each in minus([strand.hull], [band.where for band in own])]
            sources += [source for stretch in stretches for source in _sources(holding, stretch, file, at)]
        return WritePlan(sources=sources, shares=shares, bands=bands, woven=bool(strands))

    def _headers(self) -> list[WriteSource]:
        """Those of files are rank 0's."""
        headers = [as_values(file.header) for file in self.files] if self.rank == 0 else []
        return [WriteSource(file=n, begin=0, values=header, dtype=torch.uint8) for n, header in enumerate(headers)]


def _share(holding: TensorShard, strand: InterleavedShard, band: InterleavedBlock, place: int) -> FileShare:
    local = strand.within(band.where)
    first = local.start - holding.interval.start
    return FileShare(
        band=band,
        place=place,
        values=holding.values.slice(first, first + local.length),
        dtype=holding.spec.dtype,
        owner=holding.owner,
    )


def _sources(holding: TensorShard, interval: Interval, file: int, at: int) -> list[WriteSource]:
    """A source for each run of local elements."""
    found = []
    for run in holding.region.runs(interval):
        first = run.local - holding.interval.start
        source = WriteSource(
            file=file,
            begin=at + run.logical * holding.spec.dtype.itemsize,
            values=holding.values.slice(first, first + run.length),
            dtype=holding.spec.dtype,
            owner=holding.owner,
        )
        found.append(source)
    return found
