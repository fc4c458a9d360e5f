"""Weights and moments in fewer bits than they are updated in: bfloat16 and 8-bit blocks, rounded at random after an update.

A value between two that the format has becomes the upper one with the probability of its distance from the lower one, so that
changes which are too small for the format are kept on average (Gupta et al., "Deep Learning with Limited Numerical Precision",
2015). The random bits are a hash of a key and of the element's position in its parameter (SplitMix64: Steele et al., "Fast
Splittable Pseudorandom Number Generators", 2014), so they are the same in every layout.

In 8 bits a flat tensor rests as codes with a float32 scale for each block: elements are divided by the largest magnitude of their
block and rounded to the levels of a dynamic type, seven decades, each divided evenly, a higher one more finely (Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization", 2022). Here levels are the same on both sides of zero, so that a block has the same
codes when it is decoded and encoded again: a checkpoint has decoded moments, and is exact in every layout. Of squares, whose range
is twice as wide, the roots are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import xxhash
from torch import Tensor

from zeromesh.flat.layout import BucketLayout
from zeromesh.intervals import Interval, round_up
from zeromesh.offload import DONE, Purpose, TierChoice, TieredTensor, Tiers, Transfer

BLOCK = 256
"""Elements that share a scale. Parameters and shards begin at whole blocks, so blocks are the same for every number of ranks."""
_CHUNK = 1 << 16  # elements that are decoded or encoded at a time
LANES = 4  # the tensors that one hash of 64 bits rounds, each by 16 of them
_INCREMENT, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""SplitMix64's constants, as signed integers, whose products wrap as those of unsigned ones do."""


def random_bits(positions: Tensor, seed: int, name: str, update: int) -> Tensor:
    """Return 64 random bits, as int64, for each position in the flattened parameter `name` in its update number `update`."""
    key = xxhash.xxh3_64_intdigest(f"{seed} {update} {name}".encode()) - (1 << 63)
    mixed = positions * _INCREMENT + key
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed ^ _shifted(mixed, 31)


def bits_of_shard(
    layout: BucketLayout, shard: Interval, where: Interval, updates: Sequence[int], seed: int, device: torch.device
) -> Tensor:
    """Return 64 random bits for each element `where` of a `shard`; 0 between parameters. `updates` counts those of each."""
    bits = torch.zeros(where.length, dtype=torch.int64, device=device)
    counts = {slot.spec.fqn: count for slot, count in zip(layout.slots, updates, strict=True)}
    for piece in layout.pieces(shard):
        if (here := piece.in_shard.intersect(where)).length:
            moved = piece.in_parameter.start - piece.in_shard.start
            runs = piece.spec.region.runs(here.after(-moved))
            positions = torch.cat([torch.arange(run.logical, run.logical + run.length, device=device) for run in runs])
            drawn = random_bits(positions, seed, piece.spec.name, counts[piece.spec.fqn])
            bits[here.start - where.start : here.end - where.start] = drawn
    return bits


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def round_into(target: Tensor, values: Tensor, bits: Tensor, lane: int) -> None:
    """Round `values`, float32 or float64, into `target`, bfloat16, by a lane's 16 random bits; exact and non-finite ones stay."""
    whole = values.float()
    noise = _shifted(bits, 16 * lane).bitwise_and_(0xFFFF).int()
    raised = ((whole.view(torch.int32) + noise) & -65536).view(torch.float32)
    target.copy_(torch.where(whole.isfinite(), raised, whole))


@cache
def _levels(squares: bool, device: torch.device) -> Tensor:
    """Return the ascending levels of codes, float32: 256 from 0 to 1 for roots of squares, 255 from -1 to 1 for others."""
    means = list[float]()
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (decade + squares) + 1, dtype=torch.float64)
        means += (10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2).tolist()
    found = [0.0, *means, 1.0] if squares else [0.0, *means[1:], 1.0]
    return torch.tensor(found if squares else [-each for each in found[:0:-1]] + found, device=device)


@cache
def _first_levels(squares: bool, device: torch.device) -> Tensor:
    """Return the number of levels below all float32 numbers with the same upper 16 bits, from those of -32768 on."""
    upper = torch.arange(-32768, 32768, dtype=torch.int32, device=device)
    least = ((upper << 16) | (upper < 0).int() * 0xFFFF).view(torch.float32)
    levels = _levels(squares, device)
    return torch.searchsorted(levels, least).clamp_(max=levels.numel() - 1).int()


def _look_up(table: Tensor, places: Tensor) -> Tensor:
    """Return `table[places]`, of int32 `places` of any shape, in less time."""
    return table.index_select(0, places.flatten()).view_as(places)


def _scaled(values: Tensor, *, squares: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the largest magnitude of each block of values or their roots, these divided by it, `[blocks, BLOCK]`, the numbers of
    the lowest levels that are not below them, but 1 for the lowest of all, and the levels before and at these numbers. Levels are
    so far from each other that the upper 16 bits of a value leave two."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).float().view(-1, BLOCK)
    blocks, levels = padded.sqrt() if squares else padded, _levels(squares, values.device)
    most = blocks.abs().amax(1)
    scaled = blocks / torch.where(most == 0, 1, most)[:, None]
    first = _look_up(_first_levels(squares, values.device), (scaled.view(torch.int32) >> 16) + 32768)
    above = (first + (_look_up(levels, first) < scaled)).clamp_(min=1)
    return most, scaled, above, _look_up(levels, above - 1), _look_up(levels, above)


def _values(codes: Tensor, scales: Tensor, *, squares: bool) -> Tensor:
    """Return the float32 values of codes `[blocks, BLOCK]`, flattened."""
    found = _look_up(_levels(squares, codes.device), codes.int()) * scales[:, None]
    return (found.square() if squares else found).view(-1)


def round_to_levels(target: Tensor, values: Tensor, bits: Tensor, lane: int, *, squares: bool) -> None:
    """Round `values` into `target`, both 1-D from the beginning of a block on, to the level below or above, with the probability of
    the distance to the other, by a lane's 16 random bits of `bits`, int64: changes smaller than a step are kept on average."""
    most, scaled, above, low, high = _scaled(values, squares=squares)
    chance = torch.nn.functional.pad(((bits >> (16 * lane)) & 0xFFFF).float(), (0, -values.numel() % BLOCK))
    codes = above - ((scaled - low) / (high - low) * 65536 <= chance.view(-1, BLOCK)).int()
    target.copy_(_values(codes, most, squares=squares)[: values.numel()])


class BlockTensor(TieredTensor):
    """A flat tensor, `[numel]` of `dtype`, that rests on its tiers as uint8 `codes` and a float32 scale for each block. It is
    decoded into what it is read into, and encoded from what is written. A block of which a part is written keeps its values as they
    were given until it is read, so that a tensor which is written in parts is encoded once."""

    def __init__(self, dtype: torch.dtype, codes: TieredTensor, scales: TieredTensor, *, squares: bool) -> None:
        super().__init__(dtype, ())
        self.numel, self.squares, self._codes, self._scales = codes.numel, squares, codes, scales
        self._open: dict[int, Tensor] = {}  # the values of blocks that are not yet encoded

    @property
    def nbytes(self) -> int:
        return self.numel + -(-self.numel // BLOCK) * 4

    def read(self, start: int, out: Tensor) -> Transfer:
        for block in list(self._open):
            self._encode(block * BLOCK, self._open.pop(block)[: self._codes.numel - block * BLOCK])
        begin = self._at + start
        for first in range(0, out.numel(), _CHUNK):
            part = out[first : first + _CHUNK]
            skipped = (begin + first) % BLOCK
            part.copy_(self._decode(begin + first - skipped, skipped + part.numel(), out.device)[skipped:])
        return DONE

    def write(self, start: int, data: Tensor) -> Transfer:
        begin, end = self._at + start, self._at + start + data.numel()
        first = min(round_up(begin, BLOCK), end)
        last = max(first, end if end == self._codes.numel else end // BLOCK * BLOCK)
        for at in range(first, last, _CHUNK):
            upto = min(at + _CHUNK, last)
            for block in [each for each in self._open if at <= each * BLOCK < upto]:
                del self._open[block]
            self._encode(at, data[at - begin : upto - begin])
        for at, upto in ((begin, first), (last, end)):
            block = at // BLOCK
            if at < upto and block not in self._open:
                self._open[block] = self._decode(block * BLOCK, BLOCK, torch.device("cpu"))
            if at < upto:
                self._open[block][at - block * BLOCK : upto - block * BLOCK] = data[at - begin : upto - begin]
        return DONE

    def wait_for_writes(self) -> None:
        self.read(0, torch.empty(0))  # Encodes the blocks of which a part was written.
        self._codes.wait_for_writes()
        self._scales.wait_for_writes()

    def _decode(self, start: int, count: int, device: torch.device) -> Tensor:
        """Return `count` elements from `start` on, the first of a block, or as many as there are."""
        end = min(start + count, self._codes.numel)
        codes = self._codes.slice(start, end).load(device)
        scales = self._scales.slice(start // BLOCK, -(-end // BLOCK)).load(device)
        blocks = torch.nn.functional.pad(codes, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
        return _values(blocks, scales, squares=self.squares)[:count]

    def _encode(self, start: int, values: Tensor) -> None:
        most, scaled, above, low, high = _scaled(values, squares=self.squares)
        codes = (above - (scaled <= (low + high) / 2).int()).to(torch.uint8)
        self._codes.write(start, codes.view(-1)[: values.numel()]).wait()
        self._scales.write(start // BLOCK, most).wait()


Rounding = Callable[[Tensor, Tensor, Tensor, int], None]
"""Rounds values into a target by random bits, as `round_into` does."""


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """The form of moments between updates, which compute them in a wide dtype."""

    dtype: torch.dtype | None = None  # that of elements at rest; None: that of updates
    block: int = 0  # elements that share a float32 scale; 0: none has one

    def lengths(self, numel: int, wide: torch.dtype) -> dict[torch.dtype, int]:
        """Return the elements of each dtype that a moment of `numel` elements has at rest."""
        if self.dtype is None or not wide.is_floating_point:
            return {wide: numel}
        return {self.dtype: numel} | ({torch.float32: -(-numel // self.block)} if self.block else {})

    def allocate(
        self, numel: int, wide: torch.dtype, tiers: Tiers, at: TierChoice, label: str, *, squares: bool
    ) -> tuple[TieredTensor, Rounding | None]:
        """Allocate zeros, of averages of `squares` or others; returns how updates round, if they do. Raises `StorageError`."""
        (dtype, _), *scaled = self.lengths(numel, wide).items()
        rest = tiers.allocate(numel, dtype, at, Purpose.MOMENTS, label)
        if not scaled:
            return rest, None if dtype == wide else round_into
        scales = tiers.allocate(scaled[0][1], torch.float32, at, Purpose.MOMENTS, f"scales of {label}")
        return BlockTensor(wide, rest, scales, squares=squares), partial(round_to_levels, squares=squares)


STATE_FORMATS = {
    "float32": StateFormat(),
    "bfloat16": StateFormat(dtype=torch.bfloat16),
    "int8": StateFormat(dtype=torch.uint8, block=BLOCK),
}
"""The formats that `optimizer.states` names. float32 stands for the dtype of master weights."""
