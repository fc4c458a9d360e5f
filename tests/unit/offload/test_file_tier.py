"""The file tier: slots hold what was written, whatever goes on beside; what cannot be had is an error, and never a wrong number."""

import errno
import fcntl
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import wait_for
from tests.unit.offload.file_cases import SECONDS, Gate, check_refused, in_time, refusing, small_tiers
from zeromesh.errors import StorageError
from zeromesh.files import open_regular
from zeromesh.offload import DONE, FileSlot, FileTier, Transfer, WaitTime
from zeromesh.offload.io import direct_io, file_tier
from zeromesh.offload.io.direct_io import BLOCK

A_MOMENT = 0.4
"""Seconds in which a thread that nothing keeps from it gets ahead."""
SMALL = 2 * BLOCK
"""Bytes of a piece, where there are to be many."""
MOVES = ("direct", "direct and short", "refused at open", "refused at every move", "refused at every move, and short")
checked = pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])


def some_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def memory(count: int, shift: int) -> torch.Tensor:
    """`[count]` bytes that begin `shift` bytes after a multiple of `BLOCK`."""
    room = torch.empty(count + 2 * BLOCK, dtype=torch.uint8)
    begin = -room.data_ptr() % BLOCK + shift
    return room[begin : begin + count].fill_(7)


def placed(content: torch.Tensor, shift: int) -> torch.Tensor:
    return memory(content.numel(), shift).copy_(content)


def moves(how: str, move: Callable[..., int]) -> Callable[..., int]:
    """`os.preadv` or `os.pwritev` as other file systems have them."""

    def moved(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if direct and "refused at every move" in how:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        most = (BLOCK if direct else 1000) if "short" in how else 1 << 30
        return move(descriptor, [views[0][:most]], offset)

    return moved


@contextmanager
def small_tier(stripes: int, how: str, *, checksums: bool) -> Iterator[FileTier]:
    """A tier of small pieces and stripes that do not meet, on a file system that moves bytes in its own way."""
    with small_tiers(stripes, checksums=checksums, piece=SMALL) as tiers, pytest.MonkeyPatch.context() as patch:
        if how == "refused at open":
            patch.setattr(direct_io, "open_regular", _without_direct)
        patch.setattr(os, "preadv", moves(how, os.preadv))
        patch.setattr(os, "pwritev", moves(how, os.pwritev))
        yield tiers.file()


@pytest.fixture
def tier(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FileTier]:
    """A tier in one directory, with the test's `checksums`, if it has them."""
    checksums = "checksums" in request.fixturenames and request.getfixturevalue("checksums")
    found = FileTier([tmp_path / "swap"], "some", checksums=checksums)
    yield found
    in_time(found.close)


@pytest.fixture
def summed(tmp_path: Path) -> Iterator[FileTier]:
    with closing(FileTier([tmp_path], "some", checksums=True)) as found:
        yield found


Moved = list[tuple[str, int, int, bool]]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    """What the system is asked to move: the call, the offset, the bytes, and whether past the page cache."""
    found: Moved = []

    def noted(name: str, move: Callable[..., int]) -> Callable[..., int]:
        def moving(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
            direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
            found.append((name, offset, len(views[0]), direct))
            return move(descriptor, views, offset)

        return moving

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    return found


def _without_direct(path: str, flags: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return open_regular(path, flags)


def flip(tier: FileTier, offset: int) -> None:
    byte = torch.zeros(1, dtype=torch.uint8)
    tier.read(byte, offset)
    tier.write(byte ^ 1, offset)


def content(slot: FileSlot) -> torch.Tensor:
    out = memory(slot.nbytes, 0)
    slot.read(0, out).wait()
    return out


# What is written is read


class Modelled:
    """A slot, the bytes that it should have, and the reads of it that are in flight."""

    def __init__(self, tier: FileTier, nbytes: int) -> None:
        self.slot = tier.allocate(nbytes, "the model")
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.reads: list[tuple[int, int, torch.Tensor, torch.Tensor, Transfer]] = []

    def read(self, begin: int, end: int, shift: int) -> None:
        out = memory(end - begin, shift)
        self.reads.append((begin, end, out, self.bytes[begin:end].clone(), self.slot.read(begin, out)))

    def write(self, begin: int, end: int, shift: int, seed: int) -> None:
        self.finish(begin, end)
        values = some_bytes(end - begin, seed)
        self.slot.write(begin, placed(values, shift))
        self.bytes[begin:end] = values

    def finish(self, begin: int, end: int) -> None:
        """Wait for the reads of these bytes: they are about to change."""
        mine = [each for each in self.reads if each[0] < end and each[1] > begin]
        self.reads = [each for each in self.reads if not (each[0] < end and each[1] > begin)]
        for _, _, out, expected, transfer in mine:
            transfer.wait()
            assert torch.equal(out, expected)


def near_blocks(most: int) -> st.SearchStrategy[int]:
    blocks = st.integers(0, most // BLOCK)
    exact = st.builds(lambda k, by: min(most, max(0, k * BLOCK + by)), blocks, st.integers(-1, 1))
    return st.one_of(exact, st.integers(0, most))


@given(data=st.data(), checksums=st.booleans(), stripes=st.integers(1, 3), how=st.sampled_from(MOVES))
@settings(max_examples=45)
def test_slots_hold_what_was_written(data: st.DataObject, checksums: bool, stripes: int, how: str) -> None:
    with small_tier(stripes, how, checksums=checksums) as tier:
        slots = [Modelled(tier, data.draw(near_blocks(6 * BLOCK))) for _ in range(data.draw(st.integers(1, 2)))]
        for number in range(data.draw(st.integers(1, 10))):
            slot = data.draw(st.sampled_from(slots))
            begin, end = sorted(data.draw(st.tuples(*[near_blocks(slot.slot.nbytes)] * 2)))
            shift = data.draw(st.sampled_from([0, 0, 8, 1000, begin % BLOCK]))  # Also where blocks lie alike.
            if data.draw(st.booleans()):
                slot.write(begin, end, shift, number)
            else:
                slot.read(begin, end, shift)
        for slot in slots:
            slot.read(0, slot.slot.nbytes, 0)
            slot.finish(-1, slot.slot.nbytes + 1)
            slot.slot.wait_for_writes()


@checked
def test_large_slots_of_the_real_pieces(tmp_path: Path, checksums: bool) -> None:
    with closing(FileTier([tmp_path / "a", tmp_path / "b"], "some", checksums=checksums)) as tier:
        slots = [tier.allocate(nbytes, "large") for nbytes in (5 * file_tier.PIECE + 12_345, 3, 2 * file_tier.PIECE)]
        values = [some_bytes(slot.nbytes, number) for number, slot in enumerate(slots)]
        for slot, value in zip(slots, values, strict=True):
            slot.write(0, placed(value, 0))
        for slot, value in zip(slots, values, strict=True):
            assert torch.equal(content(slot), value)
        assert tier.nbytes >= sum(slot.nbytes for slot in slots)


@checked
def test_whole_blocks_go_past_the_page_cache_without_a_detour(tier: FileTier, checksums: bool) -> None:
    assert all(file.direct for file in tier._files)
    slot = tier.allocate(2 * file_tier.PIECE, "aligned")
    tier.buffer = None  # type: ignore[method-assign, assignment]
    slot.write(0, placed(some_bytes(slot.nbytes, 1), 0)).wait()
    assert torch.equal(content(slot), some_bytes(slot.nbytes, 1))


@checked
def test_nothing_goes_through_the_page_cache(tier: FileTier, moved: Moved, checksums: bool) -> None:
    """Whatever bytes are moved, from wherever: it would fill with what nobody reads twice. Also more than is moved at once."""
    large = file_tier._LARGE_PIECE
    slot = tier.allocate(2 * large + 300, "some")
    model = torch.zeros(slot.nbytes, dtype=torch.uint8)
    near = ((0, 3 * BLOCK + 100, 8), (0, 2 * BLOCK, 1000), (5, 50, 0), (BLOCK, 3 * BLOCK, 0))
    alike = ((10, slot.nbytes - 7), (0, slot.nbytes), (BLOCK, large + 5), (BLOCK - 1, slot.nbytes))
    for begin, end, shift in (*near, *((begin, end, begin % BLOCK) for begin, end in alike)):
        model[begin:end] = some_bytes(end - begin, end)
        slot.write(begin, placed(some_bytes(end - begin, end), shift))
        out = memory(end - begin, shift)
        slot.read(begin, out).wait()
        assert torch.equal(out, model[begin:end])
        assert torch.equal(content(slot), model)
    assert len(moved) >= 8
    assert all(direct for *_, direct in moved)


def test_stripes_of_several_disks_are_moved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is a few stripes long: one thread would have one disk work after the other."""
    lengths: list[int] = []
    submit = FileTier.submit

    def noted(tier: FileTier, work: Callable[[int, torch.Tensor], None], at: int, data: torch.Tensor) -> Future[None]:
        lengths.append(data.numel())
        return submit(tier, work, at, data)

    monkeypatch.setattr(FileTier, "submit", noted)
    for count, longest in ((1, file_tier._LARGE_PIECE), (2, file_tier.STRIPE)):
        with closing(FileTier([tmp_path / str(number) for number in range(count)], "some")) as tier:
            slot = tier.allocate(file_tier._LARGE_PIECE, "a row")
            lengths.clear()
            slot.read(0, memory(slot.nbytes, 0)).wait()
        assert lengths == [longest] * (slot.nbytes // longest)


@pytest.mark.parametrize("how", MOVES)
@settings(max_examples=25)
@given(begin=near_blocks(9 * BLOCK), count=near_blocks(9 * BLOCK), shift=st.one_of(st.none(), st.integers(0, BLOCK - 1)))
def test_only_unaligned_reads_of_a_file_use_a_buffer(how: str, begin: int, count: int, shift: int | None) -> None:
    """Without `shift` the blocks of memory begin where those of the file do."""
    stored = some_bytes(9 * BLOCK + 100, 5)
    end = min(begin + count, stored.numel())
    with small_tier(1, how, checksums=False) as tier, tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        Path(file.name).write_bytes(stored.numpy().tobytes())
        used = []
        buffer = FileTier.buffer
        patch.setattr(FileTier, "buffer", lambda tier: used.append(tier) or buffer(tier))
        out = memory(max(0, end - begin), begin % BLOCK if shift is None else shift)
        tier.open_stored(Path(file.name)).read(begin, out).wait()
        assert torch.equal(out, stored[begin:end])
        alike = shift is None or shift == begin % BLOCK
        assert not (alike and used)


def test_what_is_read_may_go_where_inference_mode_has_made_room(tier: FileTier) -> None:
    slot = tier.allocate(2 * BLOCK, "some")
    slot.write(0, some_bytes(slot.nbytes, 1)).wait()
    with torch.inference_mode():
        out = torch.empty(BLOCK, dtype=torch.uint8)
        slot.read(1, out).wait()
    assert torch.equal(out, some_bytes(slot.nbytes, 1)[1 : BLOCK + 1])


@pytest.mark.parametrize("renamed", [True, False], ids=["under another name", "with its time set back"])
def test_a_stored_file_that_is_overwritten_is_an_error(tmp_path: Path, renamed: bool) -> None:
    """Other weights than those that the model began with would answer, silently."""
    path, kept, other = tmp_path / "weights", tmp_path / "kept", tmp_path / "other"
    path.write_bytes(bytes(3 * BLOCK))
    other.write_bytes(bytes([1]) * 3 * BLOCK)
    with closing(FileTier([tmp_path], "test")) as tier:
        slot, out = tier.open_stored(path), torch.empty(2 * BLOCK, dtype=torch.uint8)
        slot.read(5, out).wait()
        before = path.stat()
        if renamed:
            os.replace(path, kept)
            os.replace(other, path)
            slot.read(5, out).wait()
            assert not out.any(), "a file that takes its name is another file"
        with (kept if renamed else path).open("r+b") as file:
            file.write(b"x")
        if not renamed:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert path.stat().st_mtime_ns == before.st_mtime_ns
        check_refused(f"{path}' has changed since it was opened", slot.read(BLOCK, out).wait)


@pytest.mark.parametrize(
    ("begin", "end", "first", "last"), [(10, 4 * BLOCK + 3, 1, 4), (0, 2 * BLOCK, 0, 2), (5, 100, 0, 0), (7, BLOCK, 0, 0)]
)
def test_a_file_is_read_and_written_past_the_page_cache_from_its_first_whole_block_to_its_last(
    tmp_path: Path, moved: Moved, begin: int, end: int, first: int, last: int
) -> None:
    with direct_io.PositionalFile(tmp_path / "some", write=True, size=5 * BLOCK) as file:
        content, out = some_bytes(end - begin, end), memory(end - begin, begin % BLOCK)
        file.write(placed(content, begin % BLOCK), begin)
        file.read(out, begin)
        assert torch.equal(out, content)
        blocks = [each[:3] for each in moved if each[3]]
        wanted = [(name, first * BLOCK, (last - first) * BLOCK) for name in ("pwritev", "preadv")]
        assert blocks == (wanted if last > first else [])
        moved.clear()
        file.read(placed(content, (begin + 8) % BLOCK), begin)
        assert not any(direct for *_, direct in moved), "memory and file have their blocks at other bytes"


def test_bytes_outside_a_slot_are_refused(tier: FileTier) -> None:
    slot, other = tier.allocate(100, "small"), tier.allocate(100, "neighbour")
    for begin, count in ((-1, 5), (0, 101), (96, 5), (101, 0)):
        for move in (slot.read, slot.write):
            with pytest.raises(ValueError, match="do not lie in the 100 of small"):
                move(begin, memory(count, 0))
    assert not content(slot).any()
    assert not content(other).any()


# Side by side


@checked
def test_a_piece_is_written_while_it_is_read(tier: FileTier, monkeypatch: pytest.MonkeyPatch, checksums: bool) -> None:
    """A stream reads its next row while it writes the last: they meet within a piece, whose checksum changes."""
    slot = tier.allocate(SMALL, "shared")
    slot.write(0, some_bytes(SMALL, 1)).wait()
    begun, written = threading.Event(), threading.Event()
    read, write = FileTier.read, FileTier.write

    def late(self: FileTier, data: torch.Tensor, offset: int) -> None:
        read(self, data, offset)
        if not begun.is_set():
            begun.set()
            written.wait(A_MOMENT)

    def noted(self: FileTier, data: torch.Tensor, offset: int) -> None:
        write(self, data, offset)
        written.set()

    monkeypatch.setattr(FileTier, "read", late)
    monkeypatch.setattr(FileTier, "write", noted)
    out = memory(BLOCK, 0)
    reading = slot.read(0, out)
    assert begun.wait(SECONDS)
    slot.write(BLOCK, some_bytes(BLOCK, 2)).wait()
    reading.wait()
    expected = some_bytes(SMALL, 1)
    assert torch.equal(out, expected[:BLOCK])
    expected[BLOCK:] = some_bytes(BLOCK, 2)
    assert torch.equal(content(slot), expected)


def test_a_write_is_waited_for_whatever_another_thread_does(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's thread reads a slot and looks at what is being written, while training begins to write."""
    slot = tier.allocate(4 * BLOCK, "shared")
    slot.write(0, some_bytes(BLOCK, 1)).wait()
    looking, go = threading.Event(), threading.Event()
    done, write = Transfer.done, FileTier.write

    def slowly(self: Transfer) -> bool:
        found = done(self)
        if threading.current_thread() is saver and not looking.is_set():
            looking.set()
            go.wait(A_MOMENT)
        return found

    def late(self: FileTier, data: torch.Tensor, offset: int) -> None:
        go.wait(A_MOMENT)
        threading.Event().wait(A_MOMENT / 4)
        write(self, data, offset)

    monkeypatch.setattr(Transfer, "done", slowly)
    monkeypatch.setattr(FileTier, "write", late)
    saver = threading.Thread(target=lambda: slot.read(0, memory(10, 0)).wait(), daemon=True)
    saver.start()
    assert looking.wait(SECONDS)
    slot.write(3 * BLOCK, some_bytes(BLOCK, 2))
    go.set()
    saver.join(SECONDS)
    out = memory(BLOCK, 0)
    slot.read(3 * BLOCK, out).wait()
    assert torch.equal(out, some_bytes(BLOCK, 2))


@checked
def test_threads_that_share_a_slot(checksums: bool) -> None:
    """One writes its half and reads it back, the other the other half: they meet in the middle of a piece."""
    with small_tier(2, "direct", checksums=checksums) as tier:
        slot = tier.allocate(4 * SMALL, "shared")
        middle = slot.nbytes // 2 + 1000
        wrong: list[int] = []

        def use(begin: int, end: int) -> None:
            for seed in range(40):
                values = some_bytes(end - begin, seed)
                slot.write(begin, values)
                out = memory(end - begin, 0)
                slot.read(begin, out).wait()
                wrong.extend([seed] * (not torch.equal(out, values)))

        other = threading.Thread(target=use, args=(middle, slot.nbytes), daemon=True)
        other.start()
        use(0, middle)
        other.join(SECONDS)
        assert not other.is_alive()
        assert wrong == []


# What goes wrong


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    threads = threading.active_count()
    with pytest.raises(StorageError, match=rf"file tier: cannot make swap files in '{tmp_path}/taken'"):
        FileTier([tmp_path / "good", tmp_path / "taken"], "some")
    assert list((tmp_path / "good").iterdir()) == []
    assert threading.active_count() == threads


def test_files_are_nobody_elses_and_gone_with_their_process(tmp_path: Path) -> None:
    """They have no name from the beginning, so that a process that is killed leaves nothing."""
    child = os.fork()
    if child == 0:
        try:
            FileTier([tmp_path], "some").allocate(1 << 20, "some")
            os.kill(os.getpid(), signal.SIGKILL if os.listdir(tmp_path) == [] else signal.SIGABRT)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_reserved_is_on_the_disk(tmp_path: Path, count: int) -> None:
    """A disk that is full is an error at the start, and none hours later. A tier that nobody closes frees its files too."""
    before = len(os.listdir("/proc/self/fd"))
    tier = FileTier([tmp_path / str(number) for number in range(count)], "some")
    for _ in range(3):
        tier.allocate(5 << 20, "some")
    found = [os.fstat(file._buffered) for file in tier._files]
    assert 15 << 20 <= sum(each.st_size for each in found) < (15 << 20) + count * file_tier.STRIPE
    assert sum(512 * each.st_blocks for each in found) >= 15 << 20
    del tier
    assert len(os.listdir("/proc/self/fd")) == before


@checked
def test_a_full_disk_when_room_is_taken(tier: FileTier, monkeypatch: pytest.MonkeyPatch, checksums: bool) -> None:
    first = tier.allocate(1000, "first")
    first.write(0, some_bytes(1000, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
        said = rf"file tier, exp_avg of layer 3: '{tier.paths[0]}' cannot be given 40,960 bytes more: No space left on device"
        with pytest.raises(StorageError, match=said):
            tier.allocate(40_000, "exp_avg of layer 3")
    second = tier.allocate(1000, "second")
    assert not content(second).any()
    assert torch.equal(content(first), some_bytes(1000, 1))


@checked
@pytest.mark.parametrize("whole", [True, False], ids=["whole pieces", "some bytes"])
def test_what_no_disk_has_taken(tier: FileTier, monkeypatch: pytest.MonkeyPatch, whole: bool, checksums: bool) -> None:
    slot, other = tier.allocate(3 * file_tier.PIECE, "master of layer 3"), tier.allocate(100, "other")
    slot.write(0, some_bytes(slot.nbytes, 1)).wait()
    begin, end = (0, slot.nbytes) if whole else (file_tier.PIECE + 10, file_tier.PIECE + 5000)
    write = os.pwritev

    def full(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset >= file_tier.PIECE + BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, [views[0][:BLOCK]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        transfer = slot.write(begin, some_bytes(end - begin, 2))
        said = rf"file tier, master of layer 3: '{tier.paths[0]}' cannot be written \([\d,]+ bytes at [\d,]+\): No space left"
        check_refused(said, transfer.wait)
    assert transfer.done()
    assert transfer.failed()
    for _ in range(2):
        check_refused(said, slot.read(file_tier.PIECE + 4000, memory(1000, 0)).wait, slot.wait_for_writes)
    later = slot.write(file_tier.PIECE + 4000, some_bytes(3000, 3))
    check_refused(said, later.wait)
    with pytest.raises(StorageError, match=said):  # It was to begin after the one that failed: it has not.
        in_time(slot.read(file_tier.PIECE + 6500, memory(10, 0)).wait)
    other.write(0, some_bytes(100, 4))
    assert torch.equal(content(other), some_bytes(100, 4))


@checked
def test_a_file_that_was_shortened(tier: FileTier, checksums: bool) -> None:
    slot = tier.allocate(3 * file_tier.PIECE, "exp_avg of layer 3")
    slot.write(0, some_bytes(slot.nbytes, 1)).wait()
    os.ftruncate(tier._files[0]._buffered, file_tier.PIECE + 100)
    out = memory(slot.nbytes, 0)
    asked = "1,048,576 were to be read at 1,048,576" if checksums else "3,145,728 were to be read at 0"
    said = rf"file tier, exp_avg of layer 3: '{tier.paths[0]}' ends after 1,048,676 bytes; {asked}"
    check_refused(said, slot.read(0, out).wait)
    first = memory(file_tier.PIECE, 0)
    slot.read(0, first).wait()
    assert torch.equal(first, some_bytes(slot.nbytes, 1)[: file_tier.PIECE])


@checked
def test_a_disk_that_cannot_read(tier: FileTier, monkeypatch: pytest.MonkeyPatch, checksums: bool) -> None:
    slot = tier.allocate(2 * file_tier.PIECE, "exp_avg")
    slot.write(0, some_bytes(slot.nbytes, 1)).wait()

    said = rf"file tier, exp_avg: '{tier.paths[0]}' cannot be read \([\d,]+ bytes at [\d,]+\): Input/output error"
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refusing(errno.EIO))
        check_refused(said, slot.read(5, memory(slot.nbytes - 5, 0)).wait)
        part = slot.write(file_tier.PIECE + 5, some_bytes(10, 2))  # The rest of its blocks has to be read.
        check_refused(said, part.wait)
    first = memory(file_tier.PIECE, 0)
    slot.read(0, first).wait()  # Reads may be tried again.
    assert torch.equal(first, some_bytes(slot.nbytes, 1)[: file_tier.PIECE])


# Bytes that change on the disk


@pytest.mark.parametrize("offset", [0, file_tier.PIECE - 1, file_tier.PIECE, 2 * file_tier.PIECE + 99, 2 * file_tier.PIECE + 100])
def test_a_changed_byte_is_an_error(summed: FileTier, offset: int) -> None:
    slot = summed.allocate(2 * file_tier.PIECE + 100, "exp_avg of layer 3")
    slot.write(0, some_bytes(slot.nbytes, 1)).wait()
    assert torch.equal(content(slot), some_bytes(slot.nbytes, 1))
    flip(summed, offset)
    first = offset // file_tier.PIECE * file_tier.PIECE
    last = min(first + file_tier.PIECE, 2 * file_tier.PIECE + BLOCK)
    said = rf"file tier, exp_avg of layer 3: bytes \[{first:,}, {last:,}\) are not what was written.*{re.escape(summed.paths[0])}"
    for move in (
        lambda: slot.read(0, memory(slot.nbytes, 0)),
        lambda: slot.read(first + 50, memory(3, 0)),  # Other bytes of the piece than the one that has changed.
        lambda: slot.write(first + 60, some_bytes(3, 2)),
        lambda: slot.read(0, memory(slot.nbytes, 0)),
    ):
        check_refused(said, move().wait)


def test_a_changed_byte_of_what_was_never_written_is_an_error(summed: FileTier) -> None:
    slot = summed.allocate(2 * file_tier.PIECE, "exp_avg")
    assert not content(slot).any()
    flip(summed, file_tier.PIECE + 7)
    first = memory(file_tier.PIECE, 0)
    slot.read(0, first).wait()
    check_refused(r"bytes \[1,048,576, 2,097,152\) are not what was written", slot.read(file_tier.PIECE, first).wait)


def test_a_whole_piece_may_replace_a_changed_one(summed: FileTier) -> None:
    slot = summed.allocate(file_tier.PIECE + 10, "exp_avg")
    slot.write(0, some_bytes(slot.nbytes, 1)).wait()
    flip(summed, 5)
    flip(summed, file_tier.PIECE + 5)
    slot.write(0, some_bytes(slot.nbytes, 2))
    assert torch.equal(content(slot), some_bytes(slot.nbytes, 2))


def check_closed(transfer: Transfer, ended: threading.Event, span: str) -> None:
    """The transfer is over, has told so, and says that its tier is closed."""
    assert ended.wait(SECONDS)
    assert transfer.done()
    assert transfer.failed()
    said = f"file tier, exp_avg: bytes {span} were not moved: the tier is closed"
    check_refused(re.escape(said), transfer.wait)


def test_closing_with_transfers_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(file_tier, "THREADS", 2)
    monkeypatch.setattr(file_tier, "_LARGE_PIECE", file_tier.PIECE)
    tier = FileTier([tmp_path], "some")
    slot = tier.allocate(8 * file_tier.PIECE, "exp_avg")
    reads = Gate(monkeypatch, "read")
    out, ended = memory(slot.nbytes, 0), threading.Event()
    transfer = slot.read(0, out)
    transfer.on_end(ended.set)
    wait_for(lambda: len(reads.began) == 2)
    waiting = threading.Thread(target=transfer.wait_for_end, daemon=True)
    waiting.start()  # Somebody waits already when pieces are given up.
    assert not ended.wait(A_MOMENT / 4)
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    wait_for(transfer.failed)  # What had not begun is given up before the rest may end.
    reads.open()
    closing.join(SECONDS)
    waiting.join(SECONDS)
    assert not closing.is_alive()
    assert not waiting.is_alive()
    check_closed(transfer, ended, "[0, 8,388,608)")
    assert list(tmp_path.iterdir()) == []
    assert not [each for each in threading.enumerate() if each.name.startswith("zeromesh-swap")]
    assert set(os.listdir("/proc/self/fd")) <= before
    tier.close()


def test_after_the_end_nothing_is_moved_and_nothing_hangs(tmp_path: Path) -> None:
    tier = FileTier([tmp_path], "some")
    slot = tier.allocate(5 * BLOCK, "exp_avg")
    tier.close()
    for start in (slot.read, slot.write):
        transfer = start(0, memory(slot.nbytes, 0))
        ended = threading.Event()
        transfer.on_end(ended.set)
        assert ended.is_set()
        check_closed(transfer, ended, "[0, 20,480)")
    with pytest.raises(StorageError, match="file tier, more:"):
        tier.allocate(BLOCK, "more")


def test_a_transfer_that_fails_is_over_when_it_says_so() -> None:
    """Nobody writes any more into memory whose owner was told that it is of no use."""
    bad: Future[None] = Future()
    slow: Future[None] = Future()
    bad.set_exception(StorageError("this one"))
    transfer = Transfer([bad, slow])
    told = threading.Event()

    def wait() -> None:
        check_refused("this one", transfer.wait)
        told.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not transfer.done()
    assert transfer.failed()
    assert not told.wait(A_MOMENT / 4)
    slow.set_result(None)
    assert told.wait(SECONDS)
    assert transfer.done()


def test_the_end_is_told_once_when_all_pieces_are_over() -> None:
    pieces: list[Future[None]] = [Future() for _ in range(3)]
    calls: list[int] = []
    transfer = Transfer(pieces)
    transfer.on_end(lambda: calls.append(1))
    pieces[2].set_exception(StorageError("no"))
    pieces[0].set_result(None)
    assert calls == []
    pieces[1].cancel()
    assert calls == [1]
    transfer.on_end(lambda: calls.append(2))
    assert calls == [1, 2]
    DONE.on_end(lambda: calls.append(3))
    assert calls == [1, 2, 3]
    DONE.wait()
    assert DONE.done()
    assert not DONE.failed()


def test_only_time_that_was_waited_is_counted() -> None:
    waits = WaitTime()
    over: Future[None] = Future()
    over.set_result(None)
    Transfer([over], waits).wait()
    assert waits.seconds == 0.0
    late: Future[None] = Future()
    threading.Timer(0.05, late.set_result, [None]).start()
    Transfer([late], waits).wait()
    assert 0.02 < waits.take() < SECONDS
    assert waits.seconds == 0.0
