"""Which samples a step trains on, and in what order: arithmetic, with no process and no tensor in it.

A global sample index counts samples from the start of training. A step takes `global_size` of them, cut into
blocks of `micro_size`; blocks are dealt to data ranks in turn. The blocks of a step, and so what is computed,
do not depend on the number of ranks:

    global 10, micro 2, data-parallel 3     block      0    1    2    3    4    -
                                            samples    01   23   45   67   89   (01, weight 0)
                                            rank       0    1    2    0    1    2
                                            microbatch 0    0    0    1    1    1

A plan that knows the length of an epoch ends a step there: the last global batch of an epoch is smaller, or left out.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zeromesh.errors import ConfigError, counted

_MASK_64 = (1 << 64) - 1
# Of 6 samples all 720 orders are equally likely from 12 rounds on; long orders look random from 4.
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One forward and backward of one rank.

    `samples` are global sample indices: `micro_size` of them, or fewer in the last block of a global batch
    that `micro_size` does not divide. `weight` is 1, or 0 for a microbatch past the end of the global batch:
    it repeats the step's first block, so that it can be run, and its loss is multiplied by 0.
    """

    first_sample: int
    samples: tuple[int, ...]
    weight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How a global batch is cut into microbatches of data-parallel ranks. Sizes are in samples.

    `epoch_size`: samples of an epoch, if that is known. `last`: a global batch goes on from one epoch into the next (carry), or
    ends with the epoch (partial), or is left out where it would be smaller (drop).

    Raises `ConfigError` for a microbatch that is larger than the global batch, and for epochs without any global batch.
    """

    global_size: int
    micro_size: int
    data_ranks: int
    epoch_size: int | None = None
    last: Literal["carry", "partial", "drop"] = "carry"
    average: Literal["tokens", "samples"] = "tokens"
    """The items that a loss is a mean over: targets of a global batch, or samples, where each microbatch counts by its samples."""

    def __post_init__(self) -> None:
        if self.micro_size > self.global_size:
            raise ConfigError(
                f"batch.micro_size {self.micro_size} is larger than batch.global_size {self.global_size}; "
                "lower the first or raise the second"
            )
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"an epoch of {counted(self.epoch_size or 0, 'sample')} has no whole global batch of "
                f"{self.global_size} (batch.last: drop); "
                "lower batch.global_size, or set batch.last: partial"
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None where global batches go on into the next one."""
        if self.epoch_size is None or self.last == "carry":
            return None
        whole, rest = divmod(self.epoch_size, self.global_size)
        return whole + int(rest > 0 and self.last == "partial")

    def steps_of(self, epochs: float) -> int:
        """Steps that pass over the data `epochs` times; the last one is whole. Raises `ConfigError` where no length is known."""
        if self.epoch_size is None:
            raise ConfigError("run.epochs: the training data has no length; set run.max_steps")
        per_epoch = (
            Fraction(self.epoch_size, self.global_size) if self.steps_per_epoch is None else self.steps_per_epoch
        )
        return max(1, math.ceil(Fraction(str(epochs)) * per_epoch))

    def epochs_after(self, step: int) -> int:
        """How many times the data has been passed over to its end after `step` steps; 0 where no length is known."""
        return int(self.epoch_after(step))

    def epoch_after(self, step: int) -> float:
        """How many times the data has been passed over after `step` steps; 0 where no length is known.

        A smaller step at the end of an epoch is that much less of it, in rounds of microbatches, as transformers counts them.
        """
        if self.epoch_size is None:
            return 0.0
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            return step * self.global_size / self.epoch_size
        if self.last == "drop":
            return step / per_epoch
        epochs, rest = divmod(step, per_epoch)
        return epochs + rest * self.global_size / (self.rounds_per_epoch * self.micro_size * self.data_ranks)

    @property
    def rounds_per_epoch(self) -> int:
        """Microbatches of an epoch that the rank with the most of them runs; of a stream, those of a step."""
        if self.epoch_size is None:
            return self.accumulation
        if self.last == "drop":
            return (self.steps_per_epoch or 0) * self.accumulation
        return math.ceil(self.epoch_size / (self.micro_size * self.data_ranks))

    def ends_epoch(self, step: int) -> bool:
        """Return True if an epoch ends in step `step` (from 0)."""
        return self.epochs_after(step + 1) > self.epochs_after(step)

    def next_epoch(self, step: int) -> int:
        """The first step from `step` on that begins in a new epoch; of a stream, whose epochs have no end, `step` itself."""
        while step and self.epoch_size is not None and not self.ends_epoch(step - 1):
            step += 1
        return step

    def samples_of(self, step: int) -> range:
        """Global indices of the samples of step `step` (from 0)."""
        if self.epoch_size is None or self.steps_per_epoch is None:
            return range(step * self.global_size, (step + 1) * self.global_size)
        epoch, place = divmod(step, self.steps_per_epoch)
        start = epoch * self.epoch_size + place * self.global_size
        return range(start, min(start + self.global_size, (epoch + 1) * self.epoch_size))

    @property
    def accumulation(self) -> int:
        """Microbatches that every rank runs in a step."""
        return math.ceil(self.global_size / (self.micro_size * self.data_ranks))

    def rounds_of(self, step: int) -> int:
        """Microbatches of step `step` (from 0) in which some rank has samples that count."""
        return math.ceil(len(self.samples_of(step)) / (self.micro_size * self.data_ranks))

    def equation(self) -> str:
        """Return one line, such as `global 16 = micro 2 x accumulation 4 x data-parallel 2`."""
        line = (
            f"global {self.global_size} = micro {self.micro_size} x accumulation {self.accumulation} "
            f"x data-parallel {self.data_ranks}"
        )
        idle = self.micro_size * self.accumulation * self.data_ranks - self.global_size
        return line + (f" - {counted(idle, 'zero-weight sample')}" if idle else "")

    def microbatches(self, step: int, data_rank: int) -> tuple[Microbatch, ...]:
        """The `accumulation` microbatches of one rank in step `step` (from 0)."""
        return tuple(self.microbatch(step, data_rank, turn) for turn in range(self.accumulation))

    def microbatch(self, step: int, data_rank: int, turn: int) -> Microbatch:
        """Return number `turn` of them, in a time that does not depend on how many there are.

        It is a block of the step's samples, or the first one again with weight 0 where there is no such block.
        """
        samples = self.samples_of(step)
        start = (turn * self.data_ranks + data_rank) * self.micro_size
        weight = 1 if start < len(samples) else 0
        block = samples[start * weight :][: self.micro_size]
        return Microbatch(first_sample=block.start, samples=tuple(block), weight=weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of global samples in the dataset: each sample once per epoch, each epoch in its own order.

    The order is a function of (`length`, `seed`, epoch) alone, computed index by index by a Feistel network
    over [0, length) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So it takes no
    memory, whatever the length, starts anywhere at once, and stays the same across versions of NumPy and
    PyTorch, whose generators may change; a run that resumes years later sees the same data.

    `endless`: the dataset is a stream, dealt by the number of a sample since the start of training, and each `length` of them have
    an order of their own.
    """

    length: int
    seed: int
    shuffle: bool = True
    endless: bool = False

    def dataset_index(self, sample: int) -> int:
        """The dataset index of global sample `sample`, in [0, length) unless endless."""
        epoch, position = divmod(sample, self.length)
        if self.shuffle and self.length > 1:
            position = _permute(position, self.length, _round_keys(self.seed, epoch))
        return epoch * self.length + position if self.endless else position

    def dataset_indices(self, microbatch: Microbatch) -> Iterator[int]:
        """The dataset index of each sample of `microbatch`, in order."""
        return map(self.dataset_index, microbatch.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedOrder:
    """The order of global samples in several datasets, one behind the other, that are mixed by whole `weights`.

    Of W = sum(weights) samples from a multiple of W on, part p has `weights[p]`, spread evenly among the others. The samples of a
    part have an order of their own: each comes once before any comes again, however long the other parts are. All of this is a
    function of the sample's number, so that any number of ranks, and a run that resumes anywhere, sees the same.
    """

    lengths: tuple[int, ...]
    weights: tuple[int, ...]
    seed: int
    shuffle: bool = True

    def dataset_index(self, sample: int) -> int:
        """The index of global sample `sample` in the datasets, one behind the other."""
        cycle, place = divmod(sample, sum(self.weights))
        parts, turns = _dealt(self.weights)
        part = int(parts[place])
        # Another seed for each part: parts of one length would have one order.
        order = SampleOrder(length=self.lengths[part], seed=self.seed + (part << 64), shuffle=self.shuffle)
        return sum(self.lengths[:part]) + order.dataset_index(cycle * self.weights[part] + int(turns[place]))

    def dataset_indices(self, microbatch: Microbatch) -> Iterator[int]:
        """The dataset index of each sample of `microbatch`, in order."""
        return map(self.dataset_index, microbatch.samples)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the same proportions: 0.5 and 0.25 are 2 and 1.

    Raises `ConfigError` where they add up to more than 2^20.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    found = tuple(each // math.gcd(*whole) for each in whole)
    if sum(found) > 1 << 20:
        raise ConfigError(
            f"data.mixture: the weights {', '.join(map(str, weights))} are as {', '.join(map(str, found))} to each other; round "
            f"them, so that these numbers add up to at most {1 << 20:,}"
        )
    return found


@functools.lru_cache(maxsize=4)
def _dealt(weights: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of sum(weights) places: whose it is, and how many of that part lie before it.

    Turn k of a part comes at the time (k + 1/2) / weight; of two at one time, that of the earlier part first.
    """
    parts = np.repeat(np.arange(len(weights)), weights)
    turns = np.concatenate([np.arange(weight) for weight in weights])
    order = np.argsort((turns + 0.5) / np.asarray(weights)[parts], kind="stable")
    return parts[order], turns[order]


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """One 64-bit key per Feistel round. The last few epochs are kept: a step may span two, of each part of a mixture."""
    digest = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


def _permute(index: int, length: int, keys: tuple[int, ...]) -> int:
    """The image of `index` under a permutation of [0, length) chosen by `keys`.

    An index is a pair of digits in [0, rows) x [0, columns). Each round adds a hash of one digit to the
    other, modulo its base, which can be undone, so rounds are a permutation of all pairs. A pair past
    `length` is sent on until it lands inside (cycle walking): there are fewer than 2 sqrt(length) of them.
    """
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(0, len(keys), 2):
            row = (row + _mix(column ^ keys[turn])) % rows
            column = (column + _mix(row ^ keys[turn + 1])) % columns
        index = row * columns + column
        if index < length:
            return index


def _mix(value: int) -> int:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable PRNGs", 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
