"""What a rank holds of a tensor, and where the bytes of tensor elements lie in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zeromesh.checkpoint.format.safetensors_layout import DTYPE_NAMES, DTYPES, TensorSpec
from zeromesh.flat.regions import Region, StridedRows
from zeromesh.intervals import Interval
from zeromesh.offload import TieredTensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size in bytes: elements are moved as these, so that no bit of a NaN changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """Elements of a stored tensor that this rank has in memory; engine and checkpoint exchange nothing else.

    `region` selects slices of the tensor `spec`. `values` are the elements `interval` of the flattened selection. `owner` numbers
    the bucket whose update changes them; it is None for what no update changes.
    """

    spec: TensorSpec
    region: Region
    interval: Interval
    values: TieredTensor
    owner: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSlice:
    """Where elements lie in a file, of a tensor that begins at byte `origin` of the file `path` with elements of `dtype`.

    `rows` selects columns of the tensor's rows, and `interval` elements of that selection, which are in the file's order.
    """

    path: str
    origin: int
    dtype: torch.dtype
    rows: StridedRows
    interval: Interval
    hull: Interval = field(init=False, repr=False, compare=False)
    """The bytes of the file from the first to the last element; other elements may lie between them."""

    def __post_init__(self) -> None:
        size = self.dtype.itemsize
        found = self.rows.hull(self.interval) if self.interval.length else Interval(start=0, end=0)
        hull = Interval(start=self.origin + found.start * size, end=self.origin + found.end * size)
        object.__setattr__(self, "hull", hull)

    @classmethod
    def contiguous(cls, path: str, begin: int, dtype: torch.dtype, numel: int) -> FileSlice:
        """`numel` elements that follow one another from byte `begin` on."""
        rows = StridedRows(count=1, width=max(1, numel), columns=(Interval(start=0, end=max(1, numel)),))
        return cls(path=path, origin=begin, dtype=dtype, rows=rows, interval=Interval(start=0, end=numel))

    @property
    def nbytes(self) -> int:
        return self.interval.length * self.dtype.itemsize

    def cut(self, window: Interval) -> FileSlice:
        """The elements that lie in bytes `window` of the file, which must cut no element."""
        size = self.dtype.itemsize
        start, end = (self.rows.before((byte - self.origin) // size) for byte in (window.start, window.end))
        return replace(self, interval=self.interval.intersect(Interval(start=start, end=max(start, end))))

    def gather(self, data: torch.Tensor, begin: int, out: torch.Tensor) -> torch.Tensor:
        """Copy these elements from `data`, the bytes of the file from `begin` on, to the start of `out`; both are 1-D uint8.

        Returns the filled part of `out`.
        """
        words, found = _WORDS[self.dtype.itemsize], out[: self.nbytes]
        start = (begin - self.origin) // self.dtype.itemsize
        self.rows.take(data.view(words), start, self.interval, found.view(words))
        return found

    def to_row(self) -> list[Any]:
        """The slice as JSON values, for other ranks."""
        columns = [[each.start, each.end] for each in self.rows.columns]
        shape = [self.rows.count, self.rows.width, columns, self.interval.start, self.interval.end]
        return [self.path, self.origin, DTYPE_NAMES[self.dtype], *shape]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> FileSlice:
        """The slice of which another rank sent `to_row`."""
        path, origin, dtype, count, width, columns, start, end = row
        rows = StridedRows(count=count, width=width, columns=tuple(Interval(start=a, end=b) for a, b in columns))
        return cls(path=path, origin=origin, dtype=DTYPES[dtype], rows=rows, interval=Interval(start=start, end=end))
