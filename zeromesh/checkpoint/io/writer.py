"""Plans which bytes of files each rank writes ("Pieces, blocks and writers" in docs/checkpoint-format.md), and streams them from
live shards, with a checksum for each piece. The state is not copied, but for rows that tensor ranks exchange: elements that the
next update changes first are written first, and the update waits for those that are not copied yet."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeromesh.checkpoint.io import file_slices
from zeromesh.checkpoint.io.file_slices import GRID, PlacedValues, TensorShard, cut_at_grid, overlapping
from zeromesh.checkpoint.io.format import ChecksumPiece, FileLayout, checksum
from zeromesh.errors import CheckpointError, StorageError
from zeromesh.flat.layout import Region, StridedRows
from zeromesh.intervals import Interval, grouped, merged
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import TieredTensor, accelerator, allocate_lasting
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import StagingPool, allocate_pages
from zeromesh.telemetry.step_recorder import Collective

CPU = torch.device("cpu")
STAGING_BUFFERS = 4
_IO_THREADS = 2
_PROGRESS_SECONDS = 0.2  # between two reports that this rank's disk is at work
LONGEST_ROW = 512 << 10  # bytes of a row that is put together from columns; longer ones make few enough pieces as it is


def columns_to_rows(shards: Iterable[TensorShard], axis: ProcessSet, device: torch.device) -> list[TensorShard]:
    """Return the shards that this rank writes after the ranks of the tensor axis, which all call it, have exchanged columns for
    rows. Rows that are not on all ranks, such as the first and the last one of a shard, stay where they are. Raises
    `StorageError` after the exchange, where this rank could not read its own values."""
    found, columns, own = list(shards), dict[str, tuple[int, StridedRows]](), dict[str, Any]()
    failures: list[StorageError] = []
    for number, shard in enumerate(found if axis.size > 1 else ()):
        rows, spec = shard.region.rows(), shard.spec
        if rows is not None and rows.count > 1 and rows.width * spec.dtype.itemsize <= LONGEST_ROW:
            key = f"{spec.kind} {spec.name}"
            columns[key] = number, rows
            own[key] = {  # The rows of which this rank has all its columns.
                "taken": rows.local_width,
                "first": -(-shard.interval.start // rows.local_width),
                "last": shard.interval.end // rows.local_width,
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
        edges = [(start, first * rows.local_width), (last * rows.local_width, shard.interval.end)]
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
        whole = TieredTensor.of(_exchange_columns(values, rows, cuts, [part["columns"] for part in parts], axis))
        interval = Interval(start=cuts[axis.index] * rows.width, end=cuts[axis.index + 1] * rows.width)
        region = Region.whole(shard.spec.shape)
        found[number] = replace(shard, region=region, interval=interval, values=whole, owner=None)
    if failures:
        raise failures[0]
    return found


def _exchange_columns(
    values: Tensor, rows: StridedRows, cuts: Sequence[int], columns: Sequence[Sequence[Sequence[int]]], axis: ProcessSet
) -> Tensor:
    """Exchange columns for rows, flat and on the CPU: returns this rank's whole rows, where rank r's rows start at `cuts[r]`."""
    count = cuts[axis.index + 1] - cuts[axis.index]
    widths = [[end - begin for begin, end in each] for each in columns]
    received = values.new_empty(count * sum(map(sum, widths)))
    gets = [count * sum(each) * values.itemsize for each in widths]
    gives = [(end - begin) * rows.local_width * values.itemsize for begin, end in pairwise(cuts)]
    # Sent as bytes, so that no bit changes, not even of NaNs.
    out, given = received.view(torch.uint8), values.view(torch.uint8)
    axis.start(Collective.ALL_TO_ALL, CollectiveCall(out, given, "rows of divided tensors", gets, gives)).wait()
    parts = torch.split(received, [count * sum(each) for each in widths])
    whole = allocate_lasting((count, rows.width), values.dtype, torch.device("cpu"))
    for part, width, places in zip(parts, widths, columns, strict=True):
        for (begin, end), column in zip(places, torch.split(part.view(count, sum(width)), width, 1), strict=True):
            whole[:, begin:end] = column
    return whole.view(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePiece:
    """The bytes `where` of the file `path`, copied from `sources`, which updates of the buckets `owners` change."""

    path: str
    where: Interval
    sources: tuple[PlacedValues, ...]
    owners: frozenset[int]


Runs = Mapping[str, Sequence[PlacedValues]]  # the contiguous runs that a rank has the elements of, by file, in order


def plan_runs(files: Sequence[FileLayout], shards: Iterable[TensorShard], rank: int) -> Runs:
    """List the runs of a rank's shards; rank 0 also writes the headers."""
    tensors = {(each.kind, each.name): each for file in files for each in file.tensors}
    headers = [PlacedValues.of_bytes(file.path, 0, file.header) for file in files] if rank == 0 else []
    runs = (PlacedValues.runs(tensors[shard.spec.kind, shard.spec.name], shard) for shard in shards)
    return _by_file(chain(headers, *runs))


def bytes_for_others(runs: Runs) -> list[tuple[str, int, bytes]]:
    """List this rank's parts of blocks that other ranks write: the file, the first byte, and the bytes."""
    return [
        (path, edge.start, b"".join(run.cut(edge).to_bytes() for run in overlapping(members, edge.start, edge.end)))
        for path, members in runs.items()
        for edge in file_slices.starts_in_others_blocks(_extents(members))
    ]


def plan_pieces(
    files: Sequence[FileLayout], runs: Runs, received: Iterable[tuple[str, int, bytes]], order: Mapping[int, int]
) -> list[WritePiece]:
    """List the pieces that this rank writes, with bytes `received` from others, by the `order` of owners in the next update."""
    content = _by_file(chain(*runs.values(), (PlacedValues.of_bytes(*each) for each in received)))
    sizes, last, found = {file.path: file.nbytes for file in files}, len(order), list[WritePiece]()
    for path, members in runs.items():
        for where in chain.from_iterable(map(cut_at_grid, file_slices.written_blocks(_extents(members), sizes[path]))):
            sources = tuple(each.cut(where) for each in overlapping(content[path], where.start, where.end))
            owners = frozenset(each.owner for each in sources if each.owner is not None)
            found.append(WritePiece(path=path, where=where, sources=sources, owners=owners))
    return sorted(found, key=lambda piece: min((order.get(owner, last) for owner in piece.owners), default=last))


def _by_file(sources: Iterable[PlacedValues]) -> dict[str, list[PlacedValues]]:
    ordered = sorted(sources, key=lambda each: (each.tensor.path, each.begin))
    return grouped((source.tensor.path, source) for source in ordered if source.values.numel)


def _extents(runs: Sequence[PlacedValues]) -> list[Interval]:
    return merged(Interval(start=run.begin, end=run.end) for run in runs)


def in_thread(name: str, work: Callable[[], Any], *, daemon: bool = False) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits has to know
            future.set_exception(error)

    threading.Thread(target=run, name=f"zeromesh-{name}", daemon=daemon).start()
    return future


class ShardWriter:
    """Writes a rank's `pieces` in order, in a thread: `start`, `wait_until_copied` before the update of an owner, then `join`."""

    def __init__(self, directory: Path, pieces: Sequence[WritePiece], rank: int, device: torch.device = CPU) -> None:
        self._directory, self._device = directory, device
        self._pieces = deque(pieces)
        self._rank = rank
        self._not_copied = Counter(owner for piece in pieces for owner in piece.owners)
        """The number of pieces that are not copied yet, by owner (bucket), which must not be updated before."""
        self._changed = threading.Condition()
        self._checksums: list[ChecksumPiece] = []
        self._written: Future[Any] = Future()

    def start(self) -> Future[Any]:
        """Begin to write in a thread; the future is done when all writing has ended."""
        launched = None
        if accelerator.is_accelerator(self._device):
            launched = accelerator.record_event(accelerator.current_stream(self._device))
        self._written = in_thread("save", partial(self._write_all, launched), daemon=True)
        return self._written

    def wait_until_copied(self, owner: int, on_progress: Callable[[], None]) -> None:
        """Wait until the elements of `owner` were copied or the save has failed; `on_progress` is called now and then meanwhile."""
        self._wait(lambda: not self._not_copied.get(owner), on_progress)

    def join(self, on_progress: Callable[[], None]) -> list[ChecksumPiece]:
        """Wait until everything is on the disk; returns the pieces that this rank has written. Raises the thread's error."""
        self._wait(self._written.done, on_progress)
        self._written.result()
        return sorted(self._checksums, key=lambda piece: (piece.path, piece.begin))

    def stop(self) -> None:
        """Write no further piece; what is being written ends."""
        self._pieces.clear()

    def _wait(self, over: Callable[[], bool], on_progress: Callable[[], None]) -> None:
        seen = -1
        while not over():
            if len(self._checksums) != seen:
                seen = len(self._checksums)
                on_progress()  # Peers wait for a rank whose disk is at work, not for one whose disk hangs.
            with self._changed:
                self._changed.wait_for(over, timeout=_PROGRESS_SECONDS)

    def _write_all(self, launched: torch.Event | None) -> None:
        """Write all pieces; those of a device are copied on a stream that waits for `launched` and for nothing later."""
        try:
            with ExitStack() as stack, ThreadPoolExecutor(_IO_THREADS) as threads:
                if launched is not None:
                    stream = torch.Stream(self._device)
                    stream.wait_event(launched)
                    stack.enter_context(accelerator.launching_on(stream))
                allocate = allocate_pages if launched is None else accelerator.allocate_pinned
                pool = StagingPool(STAGING_BUFFERS, GRID, allocate)
                files, enter = dict[str, PositionalFile](), stack.enter_context
                for path in {piece.path for piece in self._pieces}:
                    files[path] = enter(PositionalFile(self._directory / path, write=True))
                in_flight: deque[Future[None]] = deque()
                while self._pieces:
                    piece = self._pieces.popleft()  # Dropped here with its memory, if that is a copy.
                    buffer = pool.get()
                    self._fill(piece, buffer[: piece.where.length])
                    in_flight.append(threads.submit(self._store, files[piece.path], piece, buffer, pool))
                    while in_flight and (in_flight[0].done() or len(in_flight) > STAGING_BUFFERS):
                        in_flight.popleft().result()
                for future in in_flight:
                    future.result()
                for future in [threads.submit(file.sync) for file in files.values()]:
                    future.result()
        finally:
            with self._changed:
                self._not_copied.clear()
                self._changed.notify_all()

    def _fill(self, piece: WritePiece, data: Tensor) -> None:
        """Copy the bytes of a piece into `data`; afterwards the elements may change."""
        filled = 0
        for source in piece.sources:
            first = source.begin - piece.where.start
            source.fill(data[first : first + source.nbytes])
            filled += source.nbytes
        if filled != piece.where.length:
            why = f"{piece.path}: {filled} of the bytes [{piece.where.start}, {piece.where.end}) belong to some rank"
            raise CheckpointError(f"{why}; the ranks' parts do not make whole tensors")
        with self._changed:
            for owner in piece.owners:
                self._not_copied[owner] -= 1
            self._changed.notify_all()

    def _store(self, file: PositionalFile, piece: WritePiece, buffer: Tensor, pool: StagingPool) -> None:
        where, data = piece.where, buffer[: piece.where.length]
        try:
            digest = checksum(data)
            file.write(data, where.start)
        finally:
            pool.put(buffer)
        row = ChecksumPiece(path=piece.path, begin=where.start, end=where.end, checksum=digest, rank=self._rank)
        with self._changed:
            self._checksums.append(row)
            self._changed.notify_all()
