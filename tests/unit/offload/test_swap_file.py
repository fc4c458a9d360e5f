"""Swap files: several as one range of bytes, gone with the process that made them, and nothing left where they cannot be had."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromesh.errors import StorageError
from zeromesh.offload import remove_leftovers
from zeromesh.offload.io import swap_file
from zeromesh.offload.io.direct_io import BLOCK, PositionalFile
from zeromesh.offload.io.swap_file import Stripes, SwapFile

LEAVE = """
import sys, time
from pathlib import Path
from zeromesh.offload.io.swap_file import SwapFile
file = SwapFile(Path(sys.argv[1]), "theirs")
file.grow(1 << 20)
print(file.path, flush=True)
time.sleep(60)
"""


@contextmanager
def no_more_than(nbytes: int) -> Iterator[None]:
    """This process's files cannot be longer, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def some_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def folders(root: str | Path, count: int) -> list[Path]:
    return [Path(root, f"disk{number}") for number in range(count)]


# One range of bytes


@given(data=st.data(), count=st.integers(1, 3), stripe=st.integers(1, 3))
@settings(max_examples=40)
def test_stripes_are_one_range_of_bytes(data: st.DataObject, count: int, stripe: int) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch, ExitStack() as closed:
        patch.setattr(swap_file, "STRIPE", stripe * BLOCK)
        stripes = closed.enter_context(closing(Stripes(folders(root, count), "some")))
        model = torch.zeros(0, dtype=torch.uint8)
        for number in range(data.draw(st.integers(1, 6))):
            room = data.draw(st.integers(0, 5 * BLOCK))
            begin = stripes.take(room)
            assert begin == model.numel()
            assert stripes.nbytes % BLOCK == 0
            assert 0 <= stripes.nbytes - begin - room < BLOCK
            model = torch.cat([model, torch.zeros(stripes.nbytes - begin, dtype=torch.uint8)])
            first, last = sorted(data.draw(st.tuples(*[st.integers(0, model.numel())] * 2)))
            written = some_bytes(last - first, number)
            stripes.write(written, first)
            model[first:last] = written
            first, last = sorted(data.draw(st.tuples(*[st.integers(0, model.numel())] * 2)))
            found = torch.full((last - first,), 7, dtype=torch.uint8)
            stripes.read(found, first)
            assert torch.equal(found, model[first:last])
            stripes.check()
        sizes = [os.path.getsize(path) for path in stripes.paths]
        assert stripes.nbytes <= sum(sizes) < stripes.nbytes + stripe * BLOCK
        assert max(sizes) - min(sizes) <= stripe * BLOCK
        stripes.close()
        assert [path for path in Path(root).rglob("*") if not path.is_dir()] == []


def test_what_is_reserved_is_on_the_disk(tmp_path: Path) -> None:
    """A disk that is full is an error at the start, and none hours later."""
    stripes = Stripes(folders(tmp_path, 2), "some")
    stripes.take(5 << 20)
    assert sum(os.stat(path).st_blocks * 512 for path in stripes.paths) >= 5 << 20
    stripes.close()


# Whose they are


def test_what_a_dead_process_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    def leftovers() -> list[str]:
        return sorted(map(str, tmp_path.glob("zeromesh-theirs-*")))

    one, two = (
        subprocess.Popen([sys.executable, "-c", LEAVE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    try:
        assert one.stdout is not None
        assert two.stdout is not None
        paths = [process.stdout.readline().strip() for process in (one, two)]  # type: ignore[union-attr]
        assert leftovers() == sorted(paths)
        assert remove_leftovers(tmp_path) == 0
        one.kill()
        one.wait(30)
        assert leftovers() == sorted(paths)
        assert remove_leftovers(tmp_path) >= 1 << 20
        assert leftovers() == [paths[1]]
    finally:
        for process in (one, two):
            process.kill()
            process.wait(30)
            process.stdout.close()  # type: ignore[union-attr]


def test_this_processs_own_files_and_what_others_call_theirs_stay(tmp_path: Path) -> None:
    mine = SwapFile(tmp_path, "mine")
    kept = [tmp_path / name for name in ("zeromesh-x.swap", "zeromesh-x-0123456789abcdef.swap.txt", "other.swap")]
    for path in kept:
        path.write_bytes(b"content")
    target = tmp_path / "target"
    target.write_bytes(b"content")
    (tmp_path / "zeromesh-link-0123456789abcdef.swap").symlink_to(target)
    (tmp_path / "zeromesh-folder-0123456789abcdef.swap").mkdir()
    (tmp_path / "zeromesh-dead-0123456789abcdef.swap").write_bytes(bytes(BLOCK))
    before = set(tmp_path.iterdir())
    assert remove_leftovers(tmp_path) == BLOCK
    assert before - set(tmp_path.iterdir()) == {tmp_path / "zeromesh-dead-0123456789abcdef.swap"}
    mine.check()
    mine.close()
    assert remove_leftovers(tmp_path / "nowhere") == 0
    assert remove_leftovers(target) == 0


def test_one_who_looks_for_leftovers_may_take_a_file_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    lock = fcntl.flock

    def disturbed(descriptor: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # It holds the lock, and removes the file after.
            raise BlockingIOError(errno.EWOULDBLOCK, "somebody holds it")
        if calls == 2:  # It has removed the file, and holds nothing any more.
            os.unlink(os.readlink(f"/proc/self/fd/{descriptor}"))
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", disturbed)
    before = descriptors()
    file = SwapFile(tmp_path, "some")
    assert calls == 3
    assert [str(path) for path in tmp_path.iterdir()] == [file.path]
    file.grow(BLOCK)
    file.check()
    file.close()
    assert descriptors() == before


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.ENOLCK, errno.EIO])
def test_a_directory_without_locks_is_an_error_and_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refusing(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refusing)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command, how: refusing(descriptor, command))
    before = descriptors()
    with pytest.raises(StorageError, match=rf"swap files .*{tmp_path}.*offload\.directory"):
        SwapFile(tmp_path, "some")
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


def test_a_file_that_cannot_be_opened_again_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: PositionalFile, path: str, **options: object) -> None:
        raise StorageError(f"{path!r} cannot be opened: Too many open files")

    monkeypatch.setattr(PositionalFile, "__init__", failing)
    before = descriptors()
    with pytest.raises(StorageError, match="Too many open files"):
        SwapFile(tmp_path, "some")
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


@pytest.mark.parametrize("label", ["a b", "a/b", "../a", "ä", "a\n"])
def test_a_label_that_would_hide_a_leftover_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(ValueError, match="give letters, digits"):
        SwapFile(tmp_path, label)
    assert list(tmp_path.iterdir()) == []


# What goes wrong


def test_a_directory_that_is_none_is_named_and_the_others_are_left_clean(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    before = descriptors()
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/zeromesh")):
        with pytest.raises(StorageError, match=rf"swap files cannot be made in '{bad}'.*offload\.directory"):
            Stripes([tmp_path / "good", bad], "some")
    assert list((tmp_path / "good").iterdir()) == []
    assert descriptors() == before
    with pytest.raises(ValueError, match="need a directory"):
        Stripes([], "some")


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_disk_names_the_file_and_the_bytes_and_takes_nothing(tmp_path: Path, count: int) -> None:
    stripes = Stripes(folders(tmp_path, count), "some")
    stripes.take(2 << 20)
    kept = some_bytes(2 << 20, 1)
    stripes.write(kept, 0)
    with (
        no_more_than(4 << 20),
        pytest.raises(StorageError, match=r"zeromesh-some-.*swap' cannot be given [\d,]+ bytes more: File too large"),
    ):
        stripes.take(64 << 20)
    assert stripes.take(BLOCK) == 2 << 20
    stripes.check()
    found = torch.zeros_like(kept)
    stripes.read(found, 0)
    assert torch.equal(found, kept)
    stripes.close()


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stripes = Stripes([tmp_path], "some")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"8,192 bytes more: the disk is full; free some .*offload\.directory"):
        stripes.take(2 * BLOCK - 5)
    stripes.close()


def test_check_finds_files_that_were_removed_or_shortened(tmp_path: Path) -> None:
    for spoil, said in (
        (os.unlink, r"zeromesh-some-.*, 3,145,728 bytes, was removed while"),
        (lambda path: os.truncate(path, 5000), r"has 5,000 bytes, 3,145,728 were reserved"),
        (
            lambda path: (os.truncate(path, 0), os.truncate(path, 3 << 20)),
            r"was shortened while .*: 0 bytes of 3,145,728",
        ),
    ):
        stripes = Stripes(folders(tmp_path, 2), "some")
        stripes.take(6 << 20)
        stripes.check()
        spoil(stripes.paths[1])
        with pytest.raises(StorageError, match=said):
            stripes.check()
        stripes.close()


def test_closing_takes_the_file_away_once(tmp_path: Path) -> None:
    before = descriptors()
    file = SwapFile(tmp_path, "some")
    file.grow(BLOCK)
    path = Path(file.path)
    assert path.exists()
    file.close()
    path.write_bytes(b"somebody else's")
    file.close()
    assert path.read_bytes() == b"somebody else's"
    assert descriptors() == before
    with pytest.raises(StorageError, match="cannot be looked at"):
        file.check()


def test_a_file_that_nobody_closes_goes_with_the_process(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
from zeromesh.offload.io.swap_file import SwapFile
file = SwapFile(Path({str(tmp_path)!r}), "left")
file.grow(8192)
if os.fork() == 0:
    raise SystemExit  # A child's end is not its parent's.
os.wait()
assert len(os.listdir({str(tmp_path)!r})) == 1
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
