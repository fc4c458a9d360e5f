"""Exchanges columns for rows: tensor ranks' columns of a tensor become contiguous runs of a file before they are written.

    each row of the tensor    rank 0 | rank 1 | rank 0 | rank 1        as tensor parallelism divides it
    after the exchange        rows 0 to n: rank 0,  rows n to 2n: rank 1

A file has whole tensors, in which the ranks' bytes would otherwise alternate in runs of a few KB, each with a separate checksum.
Each rank gets about as many rows as the others, as a copy in host memory that no update changes and that is freed once written.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.errors import StorageError
from zeromesh.flat.layout import Region, StridedRows
from zeromesh.intervals import Interval
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import TieredTensor, allocate_lasting
from zeromesh.telemetry.step_recorder import Collective

LONGEST_ROW = 512 << 10
"""The longest row, in bytes, that is exchanged. Runs of longer rows are few enough to be separate pieces."""


def columns_to_rows(
    shards: Iterable[TensorShard],
    axis: ProcessSet,
    device: torch.device,
    on_copy: Callable[[int], None] = lambda nbytes: None,
) -> list[TensorShard]:
    """Return the shards that this rank writes after the exchange over the tensor axis; all ranks of the axis call it. `on_copy`
    receives the bytes of each copy in host memory.

    Rows that are not on all ranks, such as the first and the last one of a shard, stay where they are. Raises `StorageError` after
    the exchange, where this rank could not read its own values.
    """
    found, columns, own = list(shards), dict[str, tuple[int, StridedRows]](), dict[str, Any]()
    failures: list[StorageError] = []
    for number, shard in enumerate(found if axis.size > 1 else ()):
        rows, spec = shard.region.rows(), shard.spec
        if rows is not None and shard.region.is_strided and rows.width * spec.dtype.itemsize <= LONGEST_ROW:
            columns[f"{spec.kind} {spec.name}"] = number, rows
            own[f"{spec.kind} {spec.name}"] = {  # The rows of which this rank has all its columns.
                "taken": rows.taken,
                "first": -(-shard.interval.start // rows.taken),
                "last": shard.interval.end // rows.taken,
                "columns": [[each.start, each.end] for each in rows.columns],
            }
    everyone = axis.gather_json(own, "columns of divided tensors") if axis.size > 1 else [{}]
    for name in sorted(set.intersection(*map(set, everyone))):
        parts = [row[name] for row in everyone]
        first = max(part["first"] for part in parts)
        last = min(part["last"] for part in parts)
        number, rows = columns[name]
        if last <= first or sum(part["taken"] for part in parts) != rows.width:
            continue
        shard, start = found[number], found[number].interval.start
        edges = [(start, first * rows.taken), (last * rows.taken, shard.interval.end)]
        given = shard.values.slice(edges[0][1] - start, edges[1][0] - start)
        cuts = [first + (last - first) * each // axis.size for each in range(axis.size + 1)]
        for begin, end in edges:
            rest = shard.values.slice(begin - start, end - start)
            found.append(replace(shard, interval=Interval(start=begin, end=end), values=rest))
        values = given.whole(device) if given.dtype == shard.spec.dtype else None
        if values is None:
            values = torch.empty(given.numel, dtype=shard.spec.dtype, device=device)
            try:
                given.read(0, values).wait()
            except StorageError as error:  # The other ranks go on, so this rank must too.
                failures.append(error)
        whole = TieredTensor.of(_exchange(values, rows, cuts, [part["columns"] for part in parts], axis))
        on_copy(whole.nbytes)
        interval = Interval(start=cuts[axis.index] * rows.width, end=cuts[axis.index + 1] * rows.width)
        found[number] = TensorShard(
            spec=shard.spec, region=Region.whole(shard.spec.shape), interval=interval, values=whole
        )
    if failures:
        raise failures[0]
    return found


def _exchange(
    values: torch.Tensor,
    rows: StridedRows,
    cuts: Sequence[int],
    columns: Sequence[Sequence[Sequence[int]]],
    axis: ProcessSet,
) -> torch.Tensor:
    """Exchange columns for rows, flat and on the CPU: returns this rank's whole rows, where rank r's rows start at `cuts[r]`."""
    count = cuts[axis.index + 1] - cuts[axis.index]
    widths = [[end - begin for begin, end in each] for each in columns]
    received = values.new_empty(count * sum(map(sum, widths)))
    gets = [count * sum(each) * values.itemsize for each in widths]
    gives = [(end - begin) * rows.taken * values.itemsize for begin, end in pairwise(cuts)]
    # Sent as bytes, so that no bit changes, not even of NaNs.
    out, given = received.view(torch.uint8), values.view(torch.uint8)
    axis.start(Collective.ALL_TO_ALL, CollectiveCall(out, given, "rows of divided tensors", gets, gives)).wait()
    parts = torch.split(received, [count * sum(each) for each in widths])
    whole = allocate_lasting((count, rows.width), values.dtype, torch.device("cpu"))
    for part, width, places in zip(parts, widths, columns, strict=True):
        for (begin, end), column in zip(places, torch.split(part.view(count, sum(width)), width, 1), strict=True):
            whole[:, begin:end] = column
    return whole.view(-1)
