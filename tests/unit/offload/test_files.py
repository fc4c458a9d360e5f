"""Files of a run: links are not followed, pipes are not waited for, the umask sets permissions, locks work where they can."""

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.plain import error_of
from tests.support.trainer_cases import llama, seeded, sentences, settings
from tests.unit.offload.file_cases import refusing
from zeromesh import Trainer, environment, files
from zeromesh.errors import CollectiveError, ConfigError, StorageError
from zeromesh.files import (
    disk_call,
    longest_disk_call,
    open_regular,
    read_whole,
    refusals,
    remove_unfinished,
    try_lock,
    write_whole,
)
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.monitoring import run_directory
from zeromesh.trainer.monitoring.run_directory import RunDirectory
from zeromesh.trainer.monitoring.step_metrics import MetricsWriter, read_metrics
from zeromesh.trainer.setup.build import connect

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


def link(path: Path) -> None:
    path.with_name("target").write_text("untouched")
    path.symlink_to(path.with_name("target"))


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


PLANTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "link": (link, "it is a symbolic link"),
    "dangling": (lambda path: path.symlink_to(path.with_name("nothing")), "it is a symbolic link"),
    "pipe": (os.mkfifo, "it is a named pipe"),
    "directory": (Path.mkdir, "it is a directory"),
    "socket": (listening, "it is a socket"),
}


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_what_is_no_regular_file_is_refused_by_what_it_is(tmp_path: Path, kind: str, flags: int) -> None:
    plant, words = PLANTED[kind]
    plant(tmp_path / "file")
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=words) as refused:
        open_regular(tmp_path / "file", flags)
    assert str(refused.value.strerror).endswith("; remove it") is bool(flags & os.O_CREAT)
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert "nothing" not in {path.name for path in tmp_path.iterdir()}
    with pytest.raises(StorageError, match=words):
        PositionalFile(tmp_path / "file", write=bool(flags))


def test_a_file_is_written_whole(tmp_path: Path, umask: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    umask(0o027)
    path = tmp_path / ("n" * 255)
    write_whole(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    link(tmp_path / "link")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_text() == "untouched"
    assert read_whole(tmp_path / "link", 3) == b"new"
    with pytest.raises(OSError, match="it has 3 bytes, and at most 2 are read"):
        read_whole(tmp_path / "link", 2)

    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as failed:
        write_whole(path, b"new")
    assert failed.value.filename == str(path)  # and not that of a file that nobody knows
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 3


def test_files_that_need_not_outlast_the_machine_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    write_whole(tmp_path / "file", b"new", sync=False)
    assert read_whole(tmp_path / "file") == b"new"
    with pytest.raises(OSError, match="No such file") as missing:
        write_whole(tmp_path / "none" / "file", b"new", sync=False)
    assert missing.value.filename == str(tmp_path / "none" / "file")


def test_the_disk_call_that_runs_longest_is_told_with_all_calls_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(files, "DISK_CALLS", {1: [("read", "/old", -1.0), ("read", "/b", 7.0)], 2: []})
    with disk_call("write", Path("/a")):
        clock[0] = 5.0
        with pytest.raises(OSError, match="why") as named, disk_call("sync", "/a/b"):  # noqa: PT012
            clock[0] = 10.0
            assert longest_disk_call() == ("sync of '/a/b'", 5.0, 10.0)
            raise OSError(errno.EIO, "why")
        assert named.value.filename == "/a/b"
        assert longest_disk_call() == ("write of '/a'", 10.0, 10.0)
    assert longest_disk_call() == ("read of '/b'", 3.0, 11.0)
    files.DISK_CALLS.pop(1)
    assert files.DISK_CALLS == {2: []}
    assert longest_disk_call() is None


def test_a_refusal_has_the_path_the_reason_and_the_cure() -> None:
    with pytest.raises(StorageError) as caught, refusals(Path("/a"), "written", "; free some space"):
        raise OSError(errno.ENOSPC, "No space left")
    assert str(caught.value) == "'/a' cannot be written: No space left; free some space"
    for name, said in (("/a/b", "/a/b"), ("/ab", "/a")):
        with pytest.raises(StorageError, match=f"^'{said}' cannot be written: "), refusals("/a", "written"):
            raise OSError(errno.EISDIR, "Is a directory", name)


def test_what_a_kill_left_unfinished_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".zeromesh-0123456789abcdef.tmp", ".zeromesh-0123.tmp", "kept.tmp"):
        (tmp_path / name).touch()
    saving = tmp_path / ".zeromesh-00000000deadbeef.tmp"
    saving.mkdir()  # A model that is saved into a run's directory, or what a kill has left of one.
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [saving.name, ".zeromesh-0123.tmp", "kept.tmp"]


@pytest.mark.parametrize("number", NO_LOCKS)
def test_without_flock_there_are_locks_of_fcntl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    one, two = RunDirectory(tmp_path, 0), RunDirectory(tmp_path, 0)
    with one.locked():
        held = pytest.raises(ConfigError, match=rf"belongs to a run that is going on \(pid {os.getpid()} on")
        with held, two.locked():
            pass
    with two.locked():
        pass


@pytest.mark.parametrize("survivor", [0, 1])
def test_ranks_that_stay_keep_other_runs_out_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survivor: int
) -> None:
    """Also where rank 0 is lost. No file is copied then, which may lack room: nobody else writes it."""
    started = ["start 0 of run x"]
    monkeypatch.setattr(run_directory, "starts_of_run", lambda: started)
    monkeypatch.setattr(run_directory, "_KEPT", {})
    monkeypatch.setattr(run_directory, "write_whole", lambda *_: pytest.fail("a copy of a file"))
    (tmp_path / "metrics.jsonl").touch()
    with RunDirectory(tmp_path, 0).locked():
        pass
    with pytest.raises(CollectiveError, match="rank 2 is lost"), RunDirectory(tmp_path, survivor).locked():
        raise CollectiveError("rank 2 is lost")
    for others in (["start 0 of run y"], ["start 0 of run y", "start 1 of run y"]):
        started = others
        with pytest.raises(ConfigError, match="belongs to a run that"), RunDirectory(tmp_path, 0).locked():
            pass
    started = ["start 0 of run x", "start 1 of run x"]
    with RunDirectory(tmp_path, 0).locked():
        pass
    assert (tmp_path / "run.lock").read_text() == "ended\nstart 1 of run x\n"


@pytest.mark.parametrize(
    ("before", "then", "number", "wanted"),
    [
        ([], [], 0, False),
        ([], [], 1, True),
        (["start 0 of run x"], ["start 0 of run x", "start 1 of run x"], 1, True),
        (["start 0 of run x"], ["start 0 of run y", "start 1 of run y"], 1, False),
        (["start 0 of run x"], ["start 0 of run x"], 0, False),
        ([], ["start 0 of run y", "start 1 of run y"], 1, False),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_what_a_directory_has_is_a_runs_own_if_it_began_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str], then: list[str], number: int, wanted: bool, ends: bool
) -> None:
    """Not if only another trainer of its script did."""
    started = before
    for module in (run_directory, environment):
        monkeypatch.setattr(module, "starts_of_run", lambda: started)
        monkeypatch.setattr(module, "number_of_start", lambda: number)
    with contextlib.nullcontext() if ends else pytest.raises(ValueError, match="an end"), RunDirectory(tmp_path, 0).locked():
        if not ends:
            raise ValueError("an end")
    started = then
    mesh: Any = SimpleNamespace(world=SimpleNamespace(all_or_raise=lambda _what, look, *_, **__: [look()]))
    with (directory := RunDirectory(tmp_path, 0)).locked():
        assert directory.goes_on(mesh) == wanted


@pytest.mark.parametrize("number", NO_LOCKS)
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    monkeypatch.setattr(fcntl, "fcntl", refusing(number))
    said = error_of(RunDirectory(tmp_path, 0).locked().__enter__, StorageError)
    assert re.search(r"run\.lock.*has no locks, neither flock nor fcntl.*run\.output_dir", said)
    assert "going on" not in said


def test_a_lock_that_somebody_has_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("rb+") as one, (tmp_path / "lock").open("rb+") as two:
        assert try_lock(one.fileno())
        assert not try_lock(two.fileno())


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    found = connect(TrainerConfig())
    yield found
    found.close()


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["run.lock", "config.resolved.yaml", "starts.jsonl", "evaluations.jsonl", "metrics.jsonl"])
def test_nothing_planted_in_a_run_is_written_through(tmp_path: Path, mesh: Mesh, name: str, kind: str) -> None:
    """A link's target is not touched; what cannot be replaced as a whole is refused, and no pipe is waited for."""
    plant, words = PLANTED[kind]
    plant(tmp_path / name)
    replaced = name == "config.resolved.yaml" and kind != "directory"
    refused = pytest.raises(StorageError, match=rf"{re.escape(name)}.*({words}|cannot be written: Is a directory)")
    directory = RunDirectory(tmp_path, 0)
    with contextlib.nullcontext() if replaced else refused, directory.locked(), directory.open(TrainerConfig(), 0, {}, mesh):
        pass
    if kind == "link":
        assert (tmp_path / "target").read_text() == "untouched"
    assert not (tmp_path / "nothing").exists()


def test_a_pipe_in_the_place_of_metrics_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    for use in (read_metrics, MetricsWriter):
        with pytest.raises(StorageError, match="it is a named pipe, not a regular file"):
            use(tmp_path / "metrics.jsonl")


def test_every_file_of_a_run_obeys_the_umask(tmp_path: Path, umask: Callable[[int], int]) -> None:
    umask(0o077)
    config = settings(str(tmp_path), run={"max_steps": 2, "name": "private"}, checkpoint={"every_steps": 1})
    with Trainer(seeded(llama), config, sentences()) as trainer:
        trainer.fit()
        trainer.save(tmp_path / "model")
    found = list(tmp_path.rglob("*"))
    assert {"manifest.json", "trainer_state.json", "config.json", "run.lock"} <= {path.name for path in found}
    assert [path for path in found if path.stat().st_mode & 0o077] == []
