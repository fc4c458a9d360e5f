"""The stream: what it computes is what is computed directly, in a bounded number of buffers, beside its reads and writes."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.unit.offload.file_cases import CPU, SECONDS, check_refused, in_time, small_tiers, values
from zeromesh.errors import StorageError
from zeromesh.offload import FileTier, Purpose, TierChoice, TieredTensor, Tiers, Transfer, WaitTime, update_stream
from zeromesh.offload.io import file_tier
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.offload.io.transfer import AllocateBuffer, StagingPool
from zeromesh.offload.update_stream import Access, StreamOperand, StreamRow, UpdateStream, run_whole, stream_bytes

LEAST_BYTES = stream_bytes(1, 1, 0)  # before the buffers are made smaller for these tests

F32, BF16 = torch.float32, torch.bfloat16
FILE, NONE = TierChoice(tier="file"), TierChoice()
BUFFER = 4 * BLOCK
"""Bytes of a buffer, where there are to be many rows."""
ROW = BUFFER // F32.itemsize
IN_FLIGHT = 5
"""Rows that have buffers."""
choices = st.builds(
    lambda tier, fraction: TierChoice(tier=tier, fraction=fraction),
    st.sampled_from(["none", "host", "file", "file"]),
    st.sampled_from([0.3, 0.5, 1.0, 1.0]),
)


class Pool(StagingPool):
    """A pool that counts what is out."""

    def __init__(self, count: int, nbytes: int, memory: AllocateBuffer) -> None:
        self._out: set[int] = set()
        self._changed = threading.Condition()
        self.twice = 0
        super().__init__(count, nbytes, memory)
        self.count, self.most, self.twice = count, 0, 0  # The first buffers were never out.

    def get(self, block: bool = True, timeout: float | None = None) -> torch.Tensor:
        buffer = super().get(block, timeout or SECONDS / 2)
        with self._changed:
            self._out.add(buffer.data_ptr())
            self.most = max(self.most, len(self._out))
        return buffer

    def put(self, item: torch.Tensor, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            self.twice += item.data_ptr() not in self._out
            self._out.discard(item.data_ptr())
            super().put(item, block, timeout)
            self._changed.notify_all()

    @property
    def out(self) -> int:
        return len(self._out)

    def all_come_back(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._out, SECONDS) and self.qsize() == self.count and not self.twice


def pool_of(found: UpdateStream) -> Pool:
    assert isinstance(found._pool, Pool)
    return found._pool


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Streams have small buffers, and pools that count: in the end all are there."""
    pools: list[Pool] = []

    def counting(count: int, nbytes: int, memory: AllocateBuffer) -> Pool:
        pools.append(Pool(count, nbytes, memory))
        return pools[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_stream, "StagingPool", counting)
        patch.setattr(update_stream, "_LEAST_BYTES", BUFFER)
        yield
    assert all(pool.all_come_back() for pool in pools)


class Numbers:
    """One tensor, to which `add` adds: in rows, and in a plain tensor beside."""

    def __init__(self, tiers: Tiers, rows: int, seed: int, choice: TierChoice = FILE) -> None:
        self.numel = rows * ROW
        self.key = seed
        self.tensor = tiers.allocate(self.numel, F32, choice, Purpose.MASTER, f"numbers {seed}")
        self.model = torch.zeros(self.numel)
        self.set(seed)

    def set(self, seed: int) -> None:
        self.model.copy_(values(self.numel, F32, seed))
        self.tensor.write(0, self.model.clone()).wait()

    def rows(self, found: UpdateStream) -> list[StreamRow]:
        return list(found.rows(self.key, self.numel, [StreamOperand(tensor=self.tensor, mode=Access.UPDATE)]))

    def check(self, added: int = 1) -> None:
        """The tensor is what the model is after `added` runs more."""
        self.model.add_(added)
        assert torch.equal(self.tensor.load(CPU), self.model)


def add(row: StreamRow, tensors: list[torch.Tensor]) -> None:
    tensors[0].add_(1)


class Computed(list[int]):
    def __call__(self, row: StreamRow, tensors: list[torch.Tensor]) -> None:
        self.append(row.start // ROW)
        add(row, tensors)


def make(width: int = 1) -> UpdateStream:
    return UpdateStream(CPU, width=width, longest=1 << 30, nbytes=0, waits=WaitTime())


# What is computed


class Bucket:
    """What an update reads and writes, on tiers and in plain tensors."""

    def __init__(self, tiers: Tiers, key: int, numel: int, dtype: torch.dtype, choices: Sequence[TierChoice]) -> None:
        self.key, self.numel = key, numel
        kinds = (dtype, dtype, dtype, BF16)
        purposes = (Purpose.MASTER, Purpose.MOMENTS, Purpose.GRADIENTS, Purpose.PARAMETERS)
        self.tensors = [
            tiers.allocate(numel, kind, choice, purpose, purpose.value)
            for kind, choice, purpose in zip(kinds, choices, purposes, strict=True)
        ]
        self.models = [torch.zeros(numel, dtype=kind) for kind in kinds]
        self.set(0, values(numel, dtype, key))

    def set(self, number: int, content: torch.Tensor) -> None:
        self.models[number].copy_(content)
        self.tensors[number].write(0, content.clone()).wait()

    def uses(self) -> list[StreamOperand]:
        modes = (Access.UPDATE, Access.UPDATE, Access.READ, Access.WRITE)
        return [StreamOperand(tensor=tensor, mode=mode) for tensor, mode in zip(self.tensors, modes, strict=True)]

    def rows(self, found: UpdateStream) -> list[StreamRow]:
        return list(found.rows(self.key, self.numel, self.uses()))


def update(tensors: Sequence[torch.Tensor]) -> None:
    master, moment, grad, copy = tensors
    moment.mul_(0.9).add_(grad)
    master.sub_(moment)
    copy.copy_(master)


@given(data=st.data(), stripes=st.integers(1, 3), checksums=st.booleans(), dtype=st.sampled_from([F32, torch.float64]))
@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink what hangs takes minutes
def test_rows_make_what_one_pass_makes(data: st.DataObject, stripes: int, checksums: bool, dtype: torch.dtype) -> None:
    piece = data.draw(st.sampled_from([2, 3, 256])) * BLOCK
    with small_tiers(stripes, piece=piece, checksums=checksums) as tiers:
        where = data.draw(st.tuples(*[choices] * 4))
        lengths = data.draw(st.lists(st.integers(0, 14_000), min_size=1, max_size=3))
        buckets = [Bucket(tiers, key, numel, dtype, where) for key, numel in enumerate(lengths)]
        width = max(sum(tensor.whole(CPU) is None for tensor in bucket.tensors) for bucket in buckets)
        longest = max(lengths) * dtype.itemsize
        nbytes = data.draw(st.integers(0, 40 * BUFFER))
        found = UpdateStream(CPU, width=width, longest=longest, nbytes=nbytes, waits=WaitTime())
        assert found.nbytes == stream_bytes(width, longest, nbytes) <= max(nbytes, width * IN_FLIGHT * BUFFER)
        for step in range(2):
            found.drop_read_ahead()
            for bucket in buckets:
                bucket.set(2, values(bucket.numel, dtype, 10 * step + bucket.key))
            order = data.draw(st.permutations(buckets))
            for number, bucket in enumerate(order):
                told = data.draw(st.sampled_from(["the truth", "nothing", "something else"]))
                after = {"the truth": order[number + 1 :], "nothing": [], "something else": order[number + 2 :]}[told]
                found.run(
                    bucket.rows(found),
                    lambda row, tensors: update(tensors),
                    chain.from_iterable(each.rows(found) for each in after),
                )
                update(bucket.models)
        for bucket in buckets:
            for tensor, model in zip(bucket.tensors, bucket.models, strict=True):
                assert torch.equal(tensor.load(CPU), model)
        if width:
            assert pool_of(found).most <= width * IN_FLIGHT


def test_buffers_are_as_large_as_is_useful_and_allowed() -> None:
    assert LEAST_BYTES == 5 * 65_536
    # Pages of a fifth of the bytes for each tensor; grains of 2048 elements of 8 bytes, where that is less.
    assert stream_bytes(2, 1 << 30, 1_000_000) == 2 * 5 * 24 * 4096
    assert stream_bytes(1, 100_000, 1 << 30) == 5 * 7 * 16_384


@given(length=st.integers(0, 40_000), where=st.tuples(choices, choices), nbytes=st.integers(0, 60 * BUFFER))
@settings(max_examples=40)
def test_rows_follow_each_other_on_one_tier(length: int, where: tuple[TierChoice, TierChoice], nbytes: int) -> None:
    with small_tiers(1, piece=file_tier.PIECE, checksums=False) as tiers:
        tensors = [tiers.allocate(length, F32, choice, Purpose.MASTER, "some") for choice in where]
        found = UpdateStream(CPU, width=2, longest=4 * length, nbytes=nbytes, waits=WaitTime())
        uses = [StreamOperand(tensor=tensor, mode=Access.READ) for tensor in tensors]
        rows = list(found.rows(5, length, uses))
        assert [row.start for row in rows[:1]] == [0] * bool(length)
        assert [row.end for row in rows[-1:]] == [length] * bool(length)
        assert all(first.end == second.start for first, second in pairwise(rows))
        away = any(tensor.whole(CPU) is None for tensor in tensors)
        for row in rows:
            assert row.start < row.end
            assert row.key == (5, len(uses))
            assert not away or (row.end - row.start) * 4 <= found.nbytes // (2 * IN_FLIGHT)
            for tensor in tensors:
                assert sum(part.start < row.end and part.end > row.start for part in tensor.parts) == 1


def test_what_is_in_memory_needs_no_buffers(tiers: Tiers) -> None:
    numbers = Numbers(tiers, 3, 1, NONE)
    found = make(0)
    assert found.nbytes == 0
    rows = numbers.rows(found)
    assert [(row.start, row.end) for row in rows] == [(0, numbers.numel)]
    memory = numbers.tensor.whole(CPU)
    assert memory is not None
    found.run(rows, lambda row, tensors: tensors[0].fill_(float(tensors[0].data_ptr() == memory.data_ptr())))
    assert bool(memory.all())


# What goes on at the same time


class Pace:
    """Says to reads and writes of the file when they may go on, by the number of their row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: dict[tuple[str, int], threading.Event] = {}
        self.before: Callable[[str, int], None] = lambda what, row: None
        for what in ("read", "write"):
            monkeypatch.setattr(FileTier, what, self._paced(what, getattr(FileTier, what)))

    def _paced(self, what: str, move: Callable[[FileTier, torch.Tensor, int], None]) -> object:
        def moved(tier: FileTier, data: torch.Tensor, offset: int) -> None:
            row = offset // BUFFER
            self.tell(f"{what} begins", row)
            self.before(what, row)
            move(tier, data, offset)
            self.tell(f"{what} ends", row)

        return moved

    def event(self, what: str, row: int) -> threading.Event:
        return self.events.setdefault((what, row), threading.Event())

    def tell(self, what: str, row: int) -> None:
        self.event(what, row).set()

    def wait(self, what: str, row: int) -> None:
        if not self.event(what, row).wait(SECONDS / 4):
            raise StorageError(f"{what} {row} does not happen")


def test_rows_are_read_while_one_is_computed(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that begins after a row's turn has come ends before it is over: two of them, as many as are read ahead."""
    numbers, found, count = Numbers(tiers, 6, 1), make(), 6
    pace = Pace(monkeypatch)
    too_early: list[int] = []

    def before(what: str, row: int) -> None:
        if what == "read" and row > 0:
            pace.wait("compute begins", max(0, row - 2))

    def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
        number = row.start // ROW
        pace.tell("compute begins", number)
        for later in range(number + 1, min(number + 3, count)):
            pace.wait("read ends", later)
        too_early.extend([number] * pace.event("read begins", number + 3).is_set())
        add(row, tensors)

    pace.before = before
    in_time(lambda: found.run(numbers.rows(found), compute))
    assert too_early == []
    numbers.check()


def test_rows_are_written_while_the_next_ones_are_computed(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, found = Numbers(tiers, 6, 1), make()
    pace = Pace(monkeypatch)

    def before(what: str, row: int) -> None:
        if what == "write" and row < 5:
            pace.wait("compute begins", row + 1)

    def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
        number = row.start // ROW
        pace.tell("compute begins", number)
        if number:
            pace.wait("write ends", number - 1)
        add(row, tensors)

    pace.before = before
    in_time(lambda: found.run(numbers.rows(found), compute))
    numbers.check()


def test_the_next_tensors_are_read_before_their_run(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, found = Numbers(tiers, 1, 1), Numbers(tiers, 2, 2), make()
    pace = Pace(monkeypatch)
    found.run(one.rows(found), add, iter(two.rows(found)))
    for row in (1, 2):
        pace.wait("read ends", row)
        pace.events.pop(("read begins", row))
    found.run(two.rows(found), add)
    assert not pace.event("read begins", 1).is_set()
    assert not pace.event("read begins", 2).is_set()
    for numbers in (one, two):
        numbers.check()


def test_a_disk_that_does_not_keep_up_takes_no_more_memory(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = WaitTime()
    numbers, found = Numbers(tiers, 12, 1), UpdateStream(CPU, width=1, longest=1 << 30, nbytes=0, waits=waits)
    pace = Pace(monkeypatch)
    computed: list[int] = []

    def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
        computed.append(row.start // ROW)
        pace.tell("compute begins", computed[-1])
        add(row, tensors)

    pace.before = lambda what, row: pace.wait("gate", 0) if what == "write" else None
    running = threading.Thread(target=found.run, args=(numbers.rows(found), compute), daemon=True)
    running.start()
    pace.wait("compute begins", IN_FLIGHT - 1)
    assert not pace.event("compute begins", IN_FLIGHT).wait(0.2)
    assert pool_of(found).out == IN_FLIGHT
    pace.tell("gate", 0)
    running.join(SECONDS)
    assert computed == list(range(12))
    assert pool_of(found).all_come_back()
    assert pool_of(found).most == IN_FLIGHT
    assert waits.seconds > 0.1
    numbers.check()


def test_what_was_read_ahead_in_vain_is_dropped(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is still being read: its buffers come back when that is over, and nobody else's are written to."""
    one, two, three, found = Numbers(tiers, 1, 1), Numbers(tiers, 2, 2), Numbers(tiers, 6, 3), make()
    pace = Pace(monkeypatch)
    pace.before = lambda what, row: pace.wait("gate", 0) if what == "read" and row in (1, 2) else None
    found.run(one.rows(found), add, two.rows(found))
    in_time(lambda: found.run(three.rows(found), add))
    in_time(three.tensor.wait_for_writes)
    assert pool_of(found).out == 2
    pace.tell("gate", 0)
    assert pool_of(found).all_come_back()
    two.set(7)
    found.run(two.rows(found), add)
    for numbers in (one, two, three):
        numbers.check()


def test_what_changes_after_it_was_read_ahead_is_read_again(tiers: Tiers) -> None:
    one, two, found = Numbers(tiers, 1, 1), Numbers(tiers, 3, 2), make()
    found.run(one.rows(found), add, two.rows(found))
    found.drop_read_ahead()
    two.set(9)
    found.run(two.rows(found), add)
    two.check()


# What goes wrong


def failing(monkeypatch: pytest.MonkeyPatch, move: str, first: int, code: int) -> tuple[Callable[[], None], list[int]]:
    """`os.preadv` or `os.pwritev` fails from row `first` on: what ends that, and the rows that it was tried with."""
    tried: list[int] = []
    real = getattr(os, move)

    def fails(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset // BUFFER >= first:
            tried.append(offset // BUFFER)
            raise OSError(code, os.strerror(code))
        count: int = real(descriptor, views, offset)
        return count

    monkeypatch.setattr(os, move, fails)
    return lambda: monkeypatch.setattr(os, move, real), tried


def test_a_row_that_cannot_be_read_is_an_error_at_its_turn(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, found = Numbers(tiers, 8, 1), make()
    mend, _ = failing(monkeypatch, "preadv", 3, errno.EIO)
    computed = Computed()
    for _ in range(2 * IN_FLIGHT):  # Were buffers lost, there would soon be none to wait for.
        computed.clear()
        check_refused(
            r"file tier, numbers 1: .* cannot be read \(16,384 bytes at 49,152\)", lambda: found.run(numbers.rows(found), computed)
        )
        assert computed == [0, 1, 2]
        assert pool_of(found).all_come_back()
        numbers.model[: 3 * ROW].add_(1)
    mend()
    found.run(numbers.rows(found), computed)
    numbers.check()


def test_an_error_of_one_tensor_leaves_the_others_reads_to_end(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their buffers come back no sooner: nobody gets one that is still being read into."""
    bad, slow = Numbers(tiers, 1, 1), Numbers(tiers, 1, 2)
    found = make(2)
    pace = Pace(monkeypatch)
    pace.before = lambda what, row: pace.wait("gate", 0) if (what, row) == ("read", 1) else None
    mend, tried = failing(monkeypatch, "preadv", 0, errno.EIO)
    rows = list(found.rows(0, ROW, [StreamOperand(tensor=each.tensor, mode=Access.UPDATE) for each in (bad, slow)]))
    check_refused("numbers 1", lambda: found.run(rows, add))
    assert tried
    assert pool_of(found).out == 1
    mend()
    pace.tell("gate", 0)


def test_what_compute_raises_leaves_nothing_behind(tiers: Tiers) -> None:
    numbers, other, found = Numbers(tiers, 6, 1), Numbers(tiers, 6, 2), make()

    def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
        if row.start == 2 * ROW:
            raise KeyboardInterrupt
        add(row, tensors)

    for _ in range(2 * IN_FLIGHT):
        with pytest.raises(KeyboardInterrupt):
            found.run(numbers.rows(found), compute)
        assert pool_of(found).all_come_back()
        numbers.model[: 2 * ROW].add_(1)
    in_time(lambda: found.run(other.rows(found), add))
    numbers.check(0)
    other.check()


def test_a_row_that_cannot_be_written_is_an_error_when_read_next(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, other, found = Numbers(tiers, 8, 1), Numbers(tiers, 2, 2), make()
    mend, tried = failing(monkeypatch, "pwritev", 5, errno.ENOSPC)
    in_time(lambda: found.run(numbers.rows(found), add))
    assert pool_of(found).all_come_back()
    assert set(tried) == {5, 6, 7}
    mend()
    computed = Computed()
    said = r"file tier, numbers 1: .* cannot be written \(16,384 bytes at 81,920\): No space left"
    for _ in range(2 * IN_FLIGHT):
        computed.clear()
        check_refused(said, lambda: found.run(numbers.rows(found), computed))
        assert computed == [0, 1, 2, 3, 4]
        assert pool_of(found).all_come_back()
    check_refused(said, numbers.tensor.wait_for_writes)
    in_time(lambda: found.run(other.rows(found), add))
    other.check()


def test_a_write_that_does_not_begin_leaves_no_buffer_behind(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, found = Numbers(tiers, 3, 1), Numbers(tiers, 3, 2), make(2)
    rows = list(found.rows(0, 3 * ROW, [StreamOperand(tensor=each.tensor, mode=Access.UPDATE) for each in (one, two)]))
    write = TieredTensor.write

    def refusing(tensor: TieredTensor, start: int, data: torch.Tensor) -> Transfer:
        if tensor is two.tensor:
            raise RuntimeError("the device is gone")
        return write(tensor, start, data)

    monkeypatch.setattr(TieredTensor, "write", refusing)
    for _ in range(2 * IN_FLIGHT):
        check_refused("the device is gone", lambda: found.run(rows, add), error=RuntimeError)


def test_a_tier_that_is_closed_meanwhile_is_an_error(tiers: Tiers) -> None:
    numbers, found = Numbers(tiers, 12, 1), make()

    def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
        if row.start == 2 * ROW:
            tiers.close()

    check_refused(r"file tier, numbers 1: bytes .* the tier is closed", lambda: found.run(numbers.rows(found), compute))


@pytest.mark.parametrize("width", [0, 1])
def test_a_row_that_is_too_wide_does_not_wait_for_ever(tiers: Tiers, width: int) -> None:
    both = [Numbers(tiers, 1, seed) for seed in (1, 2)]
    found = make(width)
    uses = [StreamOperand(tensor=each.tensor, mode=Access.UPDATE) for each in both]
    rows = list(make(2).rows(0, ROW, uses))
    for _ in range(2 * IN_FLIGHT):
        check_refused(
            f"a row of 2 tensors out of reach, in a stream of width {width}", lambda: found.run(rows, add), error=ValueError
        )


def test_a_tensor_beside_is_taken_as_it_is(tiers: Tiers) -> None:
    """What is in memory is no copy, also where it is in a row with what is not."""
    numbers, found = Numbers(tiers, 3, 1), make()
    beside = torch.zeros(numbers.numel)
    uses = [
        StreamOperand(tensor=numbers.tensor, mode=Access.READ),
        StreamOperand(tensor=TieredTensor.of(beside), mode=Access.UPDATE),
    ]
    rows = list(found.rows(0, numbers.numel, uses))
    assert len(rows) == 3

    def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
        tensors[1].copy_(tensors[0])
        tensors[0].zero_()  # It was to be read: this is only a buffer.

    found.run(rows, compute)
    assert torch.equal(beside, numbers.model)
    assert pool_of(found).all_come_back()
    numbers.check(0)


@pytest.mark.parametrize("count", [0, 5])
def test_elements_at_once_are_read_where_they_count(tiers: Tiers, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states, copy = (tiers.allocate(count, dtype, FILE, Purpose.MASTER, "numbers") for dtype in (F32, BF16))
    states.write(0, values(count, F32, 1)).wait()
    monkeypatch.setattr(copy, "read", lambda *_: pytest.fail("the copy was read"))
    uses = [StreamOperand(tensor=states, mode=Access.UPDATE), StreamOperand(tensor=copy, mode=Access.WRITE)]

    def compute(row: StreamRow, tensors: list[torch.Tensor]) -> None:
        assert (row.start, row.end) == (0, count)
        tensors[1].copy_(tensors[0].add_(1))

    run_whole(uses, compute, CPU)
    monkeypatch.undo()
    expected = values(count, F32, 1) + 1
    assert torch.equal(states.load(CPU), expected)
    assert torch.equal(copy.load(CPU), expected.bfloat16())
