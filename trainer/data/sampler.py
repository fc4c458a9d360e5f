"""The samples of each step and their order. A global sample index counts from the start of training. A step takes `global_size`
samples in blocks of `micro_size`, assigned to data ranks round-robin. So a step's blocks do not depend on the number of ranks:

    global 10, micro 2, data-parallel 3     block      0    1    2    3    4    -
                                            samples    01   23   45   67   89   (01, weight 0)
                                            rank       0    1    2    0    1    2
                                            microbatch 0    0    0    1    1    1

With a budget of tokens, the blocks of a step are cut by `blocks_of_tokens` instead, and assigned in the same way. With shares, the
consecutive samples of each round of microbatches, 6 above, are cut into unequal blocks: 012, 3 and 45 by shares 3, 1, 2.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zeromesh.errors import ConfigError, counted

Blocks = tuple[tuple[int, ...], ...]  # The global sample indices of each block of a step.

_MASK_64 = (1 << 64) - 1
# From 12 rounds on, all 720 orders of 6 samples are equally likely; longer orders need only 4 to look random.
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """The global sample indices of one forward and backward pass of one rank. `weight` is 1, or 0 for a microbatch past the end of
    the global batch, which repeats the step's first samples, so that it can be run, and whose loss is multiplied by 0."""

    first_sample: int
    samples: tuple[int, ...]
    weight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The division of a global batch into microbatches of data-parallel ranks. Sizes are in samples; `epoch_size` is None if
    unknown. By `last`, a global batch continues into the next epoch (carry), ends with the epoch (partial), or is dropped if
    smaller (drop). Raises `ConfigError` for a microbatch larger than the global batch, and for epochs without any global batch."""

    global_size: int
    micro_size: int
    data_ranks: int
    epoch_size: int | None = None
    last: Literal["carry", "partial", "drop"] = "carry"
    average: Literal["tokens", "samples"] = "tokens"
    """The unit that the loss is averaged over: targets, or samples, where a microbatch is weighted by its number of samples."""
    tokens: int | None = None
    """The most tokens of a microbatch, with padding; `micro_size` is 1 then, and `accumulation` the most that a step may need."""
    blocks: Callable[[int], Blocks] | None = None
    """Returns the blocks of a step that are cut by `tokens`, the same on all ranks; None: blocks have `micro_size` samples."""
    shares: tuple[int, ...] = ()
    """The samples that each data rank takes of a round of microbatches, which has `round_size`; empty: `micro_size` each."""

    def __post_init__(self) -> None:
        if self.micro_size > self.global_size:
            why = f"batch.micro_size {self.micro_size} is larger than batch.global_size {self.global_size}"
            raise ConfigError(f"{why}; lower the first or raise the second")
        if self.steps_per_epoch == 0:
            why = f"has no whole global batch of {self.global_size} (batch.last: drop)"
            epoch, cure = counted(self.epoch_size or 0, "sample"), "lower batch.global_size, or set batch.last: partial"
            raise ConfigError(f"an epoch of {epoch} {why}; {cure}")

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None if global batches continue into the next one."""
        if self.epoch_size is None or self.last == "carry":
            return None
        whole, rest = divmod(self.epoch_size, self.global_size)
        return whole + int(rest > 0 and self.last == "partial")

    def steps_of(self, epochs: float) -> int:
        """Return the steps of `epochs` passes over the data, rounded up. Raises `ConfigError` for data without a length."""
        if self.epoch_size is None:
            raise ConfigError("run.epochs: the training data has no length; set run.max_steps")
        per_epoch = self.steps_per_epoch or Fraction(self.epoch_size, self.global_size)
        return max(1, math.ceil(Fraction(str(epochs)) * per_epoch))

    def epoch_after(self, step: int) -> float:
        """Return the fractional epochs after `step` steps; 0 for data without a length. A smaller last step counts for
        proportionally less, in rounds of microbatches, as in transformers."""
        if self.epoch_size is None:
            return 0.0
        if (per_epoch := self.steps_per_epoch) is None:
            return step * self.global_size / self.epoch_size
        if self.last == "drop":
            return step / per_epoch
        epochs, rest = divmod(step, per_epoch)
        return epochs + rest * self.global_size / (math.ceil(self.epoch_size / self.round_size) * self.round_size)

    def ends_epoch(self, step: int) -> bool:
        """Return True if an epoch ends in step `step` (from 0)."""
        return int(self.epoch_after(step + 1)) > int(self.epoch_after(step))

    def next_epoch(self, step: int) -> int:
        """Return the first step from `step` on that begins an epoch; for a stream, `step` itself."""
        while step and self.epoch_size is not None and not self.ends_epoch(step - 1):
            step += 1
        return step

    def samples_of(self, step: int) -> range:
        """Return the global indices of the samples of step `step` (from 0)."""
        if self.epoch_size is None or self.steps_per_epoch is None:
            return range(step * self.global_size, (step + 1) * self.global_size)
        epoch, place = divmod(step, self.steps_per_epoch)
        start = epoch * self.epoch_size + place * self.global_size
        return range(start, min(start + self.global_size, (epoch + 1) * self.epoch_size))

    @property
    def round_size(self) -> int:
        """The samples of one microbatch of each data rank."""
        return self.micro_size * self.data_ranks

    @property
    def accumulation(self) -> int:
        return math.ceil(self.global_size / self.round_size)

    def rounds_of(self, step: int) -> int:
        """Return the number of microbatches of each rank in step `step` (from 0), of which the last may have no weight."""
        if self.blocks is not None:
            return math.ceil(len(self.blocks(step)) / self.data_ranks)
        return math.ceil(len(self.samples_of(step)) / self.round_size)

    def equation(self) -> str:
        """Return the batch sizes as one line, such as `global 16 = micro 2 x accumulation 4 x data-parallel 2`."""
        if self.tokens is not None:
            return f"global {self.global_size} in microbatches of {self.tokens} tokens"
        factors = f"micro {self.micro_size} x accumulation {self.accumulation} x data-parallel {self.data_ranks}"
        idle = self.accumulation * self.round_size - self.global_size
        return f"global {self.global_size} = {factors}" + (f" - {counted(idle, 'zero-weight sample')}" if idle else "")

    def microbatches(self, step: int, data_rank: int) -> tuple[Microbatch, ...]:
        return tuple(self.microbatch(step, data_rank, index) for index in range(self.rounds_of(step)))

    def microbatch(self, step: int, data_rank: int, index: int) -> Microbatch:
        """Return microbatch `index` (from 0) of a rank in a step, in constant time without a budget of tokens."""
        if self.blocks is not None:
            blocks, number = self.blocks(step), index * self.data_ranks + data_rank
            own = blocks[min(number, len(blocks) - 1)]  # Without weight, the smallest block is repeated.
            return Microbatch(first_sample=own[0], samples=own, weight=int(number < len(blocks)))
        samples = self.samples_of(step)
        before, size = data_rank * self.micro_size, self.micro_size
        if self.shares:
            before, size = sum(self.shares[:data_rank]), self.shares[data_rank]
        start = index * self.round_size + before
        weight = 1 if start < len(samples) else 0
        block = samples[start * weight :][:size]
        return Microbatch(first_sample=block.start, samples=tuple(block), weight=weight)


def shares_by(seconds: Sequence[float], samples: int, most: int) -> tuple[int, ...]:
    """Deal `samples` out to ranks that take `seconds` for each, 1 to `most` to a rank, so that the last rank ends as early as
    possible: the next sample is always for the rank that would end with it first."""
    shares = [1] * len(seconds)
    for _ in range(samples - len(shares)):
        free = (rank for rank, share in enumerate(shares) if share < most)
        shares[min(free, key=lambda rank: (shares[rank] + 1) * seconds[rank])] += 1
    return tuple(shares)


def blocks_of_tokens(samples: Sequence[int], lengths: Sequence[int], tokens: int) -> Blocks:
    """Cut `samples`, none longer than `tokens`, into blocks of which rows x longest is at most `tokens`: the longest first, so that
    rows of a block are of similar length, and in the order of `samples` within a block."""
    order, blocks, start = sorted(range(len(lengths)), key=lambda index: -lengths[index]), list[tuple[int, ...]](), 0
    while start < len(order):
        end = start + tokens // lengths[order[start]]
        blocks.append(tuple(samples[index] for index in sorted(order[start:end])))
        start = end
    return tuple(blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of global samples in the dataset: each sample once per epoch, each epoch in its own order, a function of (`length`,
    `seed`, epoch) alone, computed index by index by a Feistel network over [0, length) (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002). So it takes no memory, starts anywhere at once, and stays the same across versions of NumPy and PyTorch.
    With `endless`, the dataset is a stream, of which each block of `length` samples has its own order."""

    length: int
    seed: int
    shuffle: bool = True
    endless: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    """The lengths and integer weights of the concatenated datasets of a mixture. Of each sum(weights) samples, a part has as many
    as its weight, spread evenly among the others; each of its samples comes once before any comes again."""

    def dataset_index(self, sample: int) -> int:
        """Return the dataset index of global sample `sample`, in [0, length) unless endless."""
        if self.parts:
            lengths = [length for length, _ in self.parts]
            weights = tuple(weight for _, weight in self.parts)
            cycle, position = divmod(sample, sum(weights))
            parts, numbers = _mixture_table(weights)
            part = int(parts[position])
            # Each part has its own seed: parts of equal length would otherwise be in the same order.
            order = SampleOrder(length=lengths[part], seed=self.seed + (part << 64), shuffle=self.shuffle)
            return sum(lengths[:part]) + order.dataset_index(cycle * weights[part] + int(numbers[position]))
        epoch, position = divmod(sample, self.length)
        if self.shuffle and self.length > 1:
            position = _permute(position, self.length, _round_keys(self.seed, epoch))
        return epoch * self.length + position if self.endless else position


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the same proportions (0.5, 0.25: 2, 1). Raises `ConfigError` for a sum above 2^20."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    found = tuple(each // math.gcd(*whole) for each in whole)
    if sum(found) > 1 << 20:
        given, made = (", ".join(map(str, each)) for each in (weights, found))
        cure = f"round them, so that these numbers add up to at most {1 << 20:,}"
        raise ConfigError(f"data.mixture: the weights {given} are as {made} to each other; {cure}")
    return found


@functools.lru_cache(maxsize=4)
def _mixture_table(weights: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each of sum(weights) consecutive samples, its part and its number k in it, sorted by (k + 1/2) / weight."""
    parts = np.repeat(np.arange(len(weights)), weights)
    numbers = np.concatenate([np.arange(weight) for weight in weights])
    order = np.argsort((numbers + 0.5) / np.asarray(weights)[parts], kind="stable")
    return parts[order], numbers[order]


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Return one 64-bit key per Feistel round. The cache holds a few epochs, as a step may span two for each part."""
    digest = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


def _permute(index: int, length: int, keys: tuple[int, ...]) -> int:
    """Return the image of `index` under a permutation of [0, length). An index is a pair of digits, and each round adds a hash of
    one to the other, which can be undone. The rounds are repeated while the index is `length` or more (cycle walking)."""
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    while True:
        row, column = divmod(index, columns)
        for number in range(0, len(keys), 2):
            row = (row + _mix(column ^ keys[number])) % rows
            column = (column + _mix(row ^ keys[number + 1])) % columns
        if (index := row * columns + column) < length:
            return index


def _mix(value: int) -> int:
    """Apply the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable PRNGs", 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
