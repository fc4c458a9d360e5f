"""`redistribute`: moves a flat tensor from one placement over the ranks of an axis to another.

A placement has, for each rank, the intervals of the tensor that the rank holds, consecutively in its memory.

    from              to                 by
    anything          the same           nothing
    sharded           replicated         all-gather
    on one rank       replicated         broadcast
    anything          anything           all-to-all of what a rank does not hold itself"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zeromesh.errors import LayoutError
from zeromesh.flat.layout import BucketLayout, Region
from zeromesh.intervals import Interval
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.mesh.process_groups import GroupPurpose
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload.accelerator import on_accelerator
from zeromesh.telemetry.step_recorder import Collective

Spans = tuple[Interval, ...]
FlatPlacement = tuple[Spans, ...]


def replicated(numel: int, ranks: int) -> FlatPlacement:
    return ((Interval(start=0, end=numel),),) * ranks


def one_after_another(lengths: Sequence[int]) -> FlatPlacement:
    """Return the placement in which each rank holds `lengths[rank]` elements after those of the ranks before it."""
    return tuple((Interval(start=start, end=end),) for start, end in pairwise(accumulate(lengths, initial=0)))


def bucket_placement(layout: BucketLayout, ranks: int, *, whole: bool) -> FlatPlacement:
    """Return the placement of a bucket: its shards, or with `whole` all of it on every rank."""
    return replicated(layout.padded, ranks) if whole else tuple((layout.shard(index),) for index in range(ranks))


def redistribute(flat: Tensor, before: FlatPlacement, after: FlatPlacement, group: ProcessSet, what: str) -> Tensor:
    """Return this rank's elements of a tensor in the placement `after`, 1-D; all ranks of `group` call this alike. `flat`, 1-D,
    holds this rank's elements in `before`, perhaps none, and may be returned itself. Raises `LayoutError` when no rank holds some
    of the requested elements. Raises `CollectiveError` when a rank is gone or late."""
    rank, here, there = group.index, before[group.index], after[group.index]
    if before == after:
        return flat
    # A CPU tensor uses the control group where the other groups are an accelerator's.
    purpose: GroupPurpose = "data" if on_accelerator(flat) or not group.on_stream else "control"
    out = flat if here == there else flat.new_empty(_length(there))
    if after.count(after[0]) == len(after) and _merged(before) == _merged(after[:1]):
        received = [_length(spans) for spans in before]
        kind = Collective.ALL_GATHER if sum(map(bool, received)) > 1 else Collective.BROADCAST
        begin = sum(received[:rank])
        given = out[begin : begin + received[rank]] if out is flat else flat
        group.start(kind, CollectiveCall(out, given, what, received, purpose=purpose)).wait()
        return out
    moves = [_copies(before, after, index) for index in range(group.size)]
    for each in moves[rank] if out is not flat else ():
        if each.source == rank:
            out[each.target] = flat[each.origin]
    gets = [[each for each in moves[rank] if each.source == index != rank] for index in range(group.size)]
    gives = [[each for each in moves[index] if each.source == rank != index] for index in range(group.size)]
    if any(each.source != index for index, copies in enumerate(moves) for each in copies):
        given = torch.cat([flat[:0], *(flat[each.origin] for copies in gives for each in copies)])
        received, sent = ([sum(each.length for each in copies) for copies in side] for side in (gets, gives))
        arrived = flat.new_empty(sum(received))
        group.start(Collective.ALL_TO_ALL, CollectiveCall(arrived, given, what, received, sent, purpose)).wait()
        parts = [each for copies in gets for each in copies]
        for each, part in zip(parts, torch.split(arrived, [each.length for each in parts]), strict=True):
            out[each.target] = part
    return out


def join_regions(local: Tensor, regions: Sequence[Region], group: ProcessSet, what: str) -> Tensor:
    """Return the whole tensor on all ranks from `local`, this rank's flat part; `regions` has the parts of the ranks of `group`."""
    lengths = [region.numel for region in regions]
    everyone = redistribute(local, one_after_another(lengths), replicated(sum(lengths), group.size), group, what)
    whole = local.new_empty(regions[0].shape)
    for region, flat in zip(regions, torch.split(everyone, lengths), strict=True):
        part = flat.view(region.local_shape)
        for here, there in region.boxes():
            whole[there] = part[here]
    return whole


class _Copy(NamedTuple):
    """A copy of `length` elements, `origin` in the memory of rank `source` and `target` in that of the rank that gets them."""

    source: int
    origin: slice
    target: slice
    length: int


@lru_cache(maxsize=1024)
def _copies(before: FlatPlacement, after: FlatPlacement, index: int) -> list[_Copy]:
    """Return the copies that rank `index` needs, in order: from its own memory if possible, else from the first rank with them."""
    order = [index, *(each for each in range(len(before)) if each != index)]
    holders = [
        (held, source, end - held.length)
        for source in order
        for held, end in zip(before[source], accumulate(each.length for each in before[source]), strict=True)
    ]
    copies: list[_Copy] = []
    place = 0
    for target in after[index]:
        begin = target.start
        while begin < target.end:
            holder = next((each for each in holders if each[0].start <= begin < each[0].end), None)
            if holder is None:
                raise LayoutError(f"no rank holds element {begin}, which the rank at position {index} is to get")
            held, source, at = holder
            length = min(held.end, target.end) - begin
            first = at + begin - held.start
            copies.append(_Copy(source, slice(first, first + length), slice(place, place + length), length))
            place, begin = place + length, begin + length
    return copies


def _merged(placement: FlatPlacement) -> list[Interval]:
    merged: list[Interval] = []
    for each in (each for spans in placement for each in spans if each.length):
        begin = merged.pop().start if merged and merged[-1].end == each.start else each.start
        merged.append(Interval(start=begin, end=each.end))
    return merged


def _length(spans: Sequence[Interval]) -> int:
    return sum(each.length for each in spans)
