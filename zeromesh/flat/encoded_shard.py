"""Shards of frozen parameters that rest, are offloaded and travel as a codec's bytes, and are decoded where they are read.

    shard       | codes of all elements         | scales of all blocks    |  and `tables`, which every rank has whole

Parameters begin at whole blocks of a bucket, and shards are cut there, so no block has elements on two ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import torch

from zeromesh.errors import LayoutError
from zeromesh.flat.codec import Codec, EncodedParameter, in_own_dtypes
from zeromesh.flat.layout import BucketLayout, ParameterSpec, Region, ShardPiece, StridedRows
from zeromesh.intervals import ALIGNMENT, Interval, round_up
from zeromesh.offload import DONE, TieredTensor, Transfer

_LEAST_BLOCK = 8
"""The fewest elements of a block of a part, whose scale is a float32: a part with smaller ones would take as much as in 16 bits."""
_CPU = torch.device("cpu")
ReadElements = Callable[[str, int, int], torch.Tensor]
"""Returns elements [start, end) of a flattened parameter by its name, 1-D."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedShard:
    """The bytes of a shard of `length` elements, and how they are decoded. Elements of no parameter are zero."""

    codec: Codec
    length: int
    pieces: Sequence[tuple[Interval, int, torch.Tensor]]
    """The elements of each parameter's part, the number of its first block in the parameter, and the parameter's tables."""

    @classmethod
    def of(cls, layout: BucketLayout, interval: Interval, tables: Sequence[torch.Tensor]) -> "EncodedShard":
        """Describe elements `interval` of a bucket; `tables` are those of its parameters."""
        codec, numbers = codec_of(layout), {slot.spec.fqn: number for number, slot in enumerate(layout.slots)}
        pieces = [
            (piece.in_shard, piece.in_parameter.start // codec.block, tables[numbers[piece.spec.fqn]])
            for piece in layout.pieces(interval)
        ]
        return cls(codec=codec, length=interval.length, pieces=pieces)

    @property
    def nbytes(self) -> int:
        return round_up(self.codec.nbytes(self.length), ALIGNMENT)

    @in_own_dtypes()
    def decode(self, encoded: TieredTensor | torch.Tensor, out: torch.Tensor, start: int = 0) -> None:
        """Fill `out`, 1-D, with the elements from `start` on, from the bytes of the shard, uint8."""
        rest = TieredTensor.of(encoded) if isinstance(encoded, torch.Tensor) else encoded
        wanted, block = Interval(start=start, end=start + out.numel()), self.codec.block
        if sum(where.intersect(wanted).length for where, *_ in self.pieces) < out.numel():
            out.zero_()
        for where, first_block, tables in self.pieces:
            part = where.intersect(wanted)
            if not part.length:
                continue
            begin = part.start // block * block
            end = min(round_up(part.end, block), where.end)
            target = out[part.start - start : part.end - start]
            whole = target if (begin, end) == (part.start, part.end) else out.new_empty(end - begin)
            places = self._places(Interval(start=begin, end=end), self.codec.code_bytes(self.length))
            codes, scales = (rest.slice(place.start, place.end).load(out.device) for place in places)
            first = first_block + (begin - where.start) // block
            scales = self.codec.scale_values(scales.view(self.codec.scale_dtype), tables, first)
            self.codec.decode(codes, scales, whole)
            if whole is not target:
                target.copy_(whole[part.start - begin : part.end - begin])

    def _places(self, elements: Interval, scales_at: int = 0) -> tuple[Interval, Interval]:
        """Return the bytes of the codes and of the scales, which begin at `scales_at`, of elements that begin at a block."""
        codec, size = self.codec, self.codec.scale_dtype.itemsize
        first, last = (scales_at + codec.blocks(end) * size for end in (elements.start, elements.end))
        codes = Interval(start=codec.code_bytes(elements.start), end=codec.code_bytes(elements.end))
        return codes, Interval(start=first, end=last)

    def ranges(self, piece: ShardPiece) -> list[tuple[int, Interval]]:
        """Return where the codes and the scales of a part of a parameter begin in the shard, and their bytes in the parameter's."""
        here = self._places(piece.in_shard, self.codec.code_bytes(self.length))
        return [(at.start, part) for at, part in zip(here, self._places(piece.in_parameter), strict=True)]

    def stored(self, piece: ShardPiece, parameter: EncodedParameter) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the bytes of a part of a parameter, codes and scales, and where they begin in the shard."""
        for (begin, part), data in zip(self.ranges(piece), (parameter.codes, parameter.scales), strict=True):
            yield begin, data.view(torch.uint8)[part.start : part.end]


class EncodedTensor(TieredTensor):
    """A flat tensor, `[numel]` of `dtype`, that rests as a shard's bytes and is decoded by reads. It takes its own values alone."""

    def __init__(self, dtype: torch.dtype, shard: EncodedShard, encoded: TieredTensor) -> None:
        """The tensor is the elements of a shard whose bytes are `encoded`, uint8."""
        super().__init__(dtype, ())
        self.numel, self.encoded, self._shard = shard.length, encoded, shard

    @property
    def nbytes(self) -> int:
        return self.encoded.nbytes

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        target = out if out.dtype == self.dtype else torch.empty(out.numel(), dtype=self.dtype, device=out.device)
        self._shard.decode(self.encoded, target, self._at + start)
        if target is not out:
            out.copy_(target)
        return DONE

    def differs(self, piece: ShardPiece, parameter: EncodedParameter) -> bool:
        """Return True if a part of a parameter has other bytes here than `parameter`, which was encoded from other values."""
        stored = self._shard.stored(piece, parameter)
        pairs = [(self.encoded.slice(begin, begin + data.numel()).load(_CPU), data) for begin, data in stored]
        return not all(torch.equal(own, other) for own, other in pairs)

    def write(self, start: int, data: torch.Tensor) -> Transfer:
        own = torch.empty_like(data)
        self.read(start, own)
        if not torch.equal(own, data):
            cure = "start from the model whose weights these are, or with model.weights null"
            raise LayoutError(f"frozen weights that are kept encoded differ from those to load; {cure}")
        return DONE


def codec_of(layout: BucketLayout) -> Codec:
    if (codec := layout.first.codec) is None:
        raise LayoutError(f"bucket {layout.name} has no codec")
    return codec


def codec_of_part(codec: Codec, region: Region, name: str) -> Codec:
    """Return the codec of a rank's part of a parameter: where cuts fall inside blocks, with smaller blocks and float32 scales."""
    if region.is_whole:
        return codec
    rows, block = region.rows(), codec.block
    if rows is not None:
        ends = [end for column in rows.columns for end in (column.start, column.end) if end < rows.width]
        block = gcd(block, *ends, *([rows.width] if rows.count > 1 else []))
    if rows is None or block < _LEAST_BLOCK:
        why = f"{name} of {list(region.shape)} is cut inside blocks of {codec.block} elements"
        cure = "choose another parallel.tensor, or exclude it by model.weights.skip"
        raise LayoutError(f"{why}, of which parts of at least {_LEAST_BLOCK} must be on one rank; {cure}")
    return replace(codec, block=block, nested=False)


@in_own_dtypes()
def encoded_part(
    spec: ParameterSpec, codec: Codec, source: ReadElements, stored: EncodedParameter | None = None
) -> EncodedParameter:
    """Encode a parameter whole, if it is not `stored` so, and return what of it this rank holds, in the blocks of its own codec."""
    region, part, rows = spec.region, spec.codec, spec.region.rows()
    whole = stored or codec.encode(
        lambda start, end: source(spec.name, start, end).to(device=_CPU, dtype=spec.dtype), prod(region.shape)
    )
    if part is None or rows is None:
        return whole
    numel, block = rows.count * rows.width, part.block
    scales = codec.scale_values(whole.scales, whole.tables).repeat_interleave(codec.block // block)
    found = torch.zeros(round_up(region.numel, codec.codes_in_byte), dtype=torch.uint8)
    rows.take(codec.unpacked(whole.codes, numel), 0, Interval(start=0, end=region.numel), found[: region.numel])
    columns = tuple(Interval(start=each.start // block, end=-(-each.end // block)) for each in rows.columns)
    coarse = StridedRows(count=rows.count, width=-(-rows.width // block), columns=columns)
    kept = torch.empty(part.blocks(region.numel))
    coarse.take(scales, 0, Interval(start=0, end=kept.numel()), kept)
    return EncodedParameter(codes=codec.packed(found), scales=kept, tables=torch.empty(0))
