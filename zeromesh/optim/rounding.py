"""Stochastic rounding of float32 to bfloat16, for weights and moments that are held in 16 bits between updates.

A value between two numbers of bfloat16 becomes the upper one with the probability of its distance from the lower one, so that
changes which are too small for the format are kept on average (Gupta et al., "Deep Learning with Limited Numerical Precision",
2015). The random bits are a hash of a key and of the element's position in its parameter (SplitMix64: Steele et al., "Fast
Splittable Pseudorandom Number Generators", 2014), so they are the same in every layout.
"""

from collections.abc import Sequence

import torch
import xxhash

from zeromesh.intervals import Interval
from zeromesh.units.unit import Bucket

LANES = 4
"""The tensors that one hash of 64 bits rounds, each by 16 of them."""
_INCREMENT, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""SplitMix64's constants, as signed integers, whose products wrap as those of unsigned ones do."""


def random_bits(positions: torch.Tensor, seed: int, name: str, update: int) -> torch.Tensor:
    """Return 64 random bits, as int64, for each position in the flattened parameter `name` in its update number `update`."""
    key = xxhash.xxh3_64_intdigest(f"{seed} {update} {name}".encode()) - (1 << 63)
    mixed = positions * _INCREMENT + key
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed ^ _shifted(mixed, 31)


def bits_of_shard(
    bucket: Bucket, where: Interval, updates: Sequence[int], seed: int, device: torch.device
) -> torch.Tensor:
    """Return 64 random bits for each element `where` of a bucket's shard; 0 between parameters. `updates` counts those of each."""
    bits = torch.zeros(where.length, dtype=torch.int64, device=device)
    counts = {slot.spec.fqn: count for slot, count in zip(bucket.layout.slots, updates, strict=True)}
    for piece in bucket.layout.pieces(bucket.interval):
        if (here := piece.in_shard.intersect(where)).length:
            moved = piece.in_parameter.start - piece.in_shard.start
            runs = piece.spec.region.runs(here.after(-moved))
            positions = torch.cat([torch.arange(run.logical, run.logical + run.length, device=device) for run in runs])
            drawn = random_bits(positions, seed, piece.spec.name, counts[piece.spec.fqn])
            bits[here.start - where.start : here.end - where.start] = drawn
    return bits


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as unsigned integers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def round_into(target: torch.Tensor, values: torch.Tensor, bits: torch.Tensor, lane: int) -> None:
    """Round `values`, float32 or float64, into `target`, bfloat16, by the 16 random bits of a lane. What bfloat16 holds exactly,
    and what is not finite, is copied."""
    whole = values.float()
    noise = _shifted(bits, 16 * lane).bitwise_and_(0xFFFF).int()
    raised = ((whole.view(torch.int32) + noise) & -65536).view(torch.float32)
    target.copy_(torch.where(whole.isfinite(), raised, whole))
