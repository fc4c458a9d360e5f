"""A directory of checkpoints: each appears all at once, what a kill leaves is never read, and old ones go."""

import errno
import os
import random
import re
import stat
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.stored_cases import SOME, bits, manifest_of, read, spec, split, values_of, verify, write, written
from zeromesh.checkpoint import store as stores
from zeromesh.checkpoint.io.format import Manifest, plan_files
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.store import CheckpointStore, Remover, publish, write_directory
from zeromesh.errors import CheckpointError, ConfigError, StorageError

LEFT = ("step-00000003.tmp", ".trash-00000002-17", "step-100000000.tmp")


def test_a_checkpoint_appears_all_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    files = plan_files(SOME, 2)
    dealt = split(values_of(SOME, 0), 2, random.Random(3))
    (store.temporary(4) / "optimizer").mkdir(parents=True)
    (store.temporary(4) / "old.safetensors").write_bytes(b"left by a save before")
    directory = store.create(4, files)
    sizes = {p.relative_to(directory).as_posix(): p.stat().st_size for p in directory.rglob("*") if p.is_file()}
    assert sizes == {file.path: file.nbytes for file in files}
    assert store.steps() == []
    pieces = written(directory, files, dealt)
    assert store.steps() == []
    with pytest.raises(CheckpointError, match=r"has no manifest\.json: it is no whole checkpoint"):
        CheckpointReader(directory)
    store.commit(4, manifest_of(4, files, pieces))
    assert store.steps() == [4]
    assert store.trash.wait(seconds=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004"]


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        values = values_of(SOME, seed)
        reader = write(tmp_path, 4, split(values, 2, random.Random(seed)))
    for each in SOME[:3]:
        found = read(reader, each.name, 0, torch.zeros(each.shape, dtype=each.dtype).reshape(-1))
        assert bits(found) == bits(values[each].reshape(-1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004"]


def test_an_old_checkpoint_goes_once_the_new_one_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename, removed = CheckpointStore(tmp_path), Path.rename, list[Path | None]()
    monkeypatch.setattr(store.trash, "remove", removed.append)
    store.create(4, ())
    store.commit(4, Manifest(step=4, files={}))
    store.create(4, ())

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        store.commit(4, Manifest(step=4, files={}))
    assert not any(removed)


def test_what_a_kill_leaves_is_never_listed_and_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 12, split(values_of(SOME, 0), 1, random.Random(0)))
    for name in LEFT:
        (tmp_path / name / "optimizer").mkdir(parents=True)
        (tmp_path / name / "optimizer" / "x.safetensors").write_bytes(b"half")
    (tmp_path / ".seen-0a1b-12").touch()
    kept = (".seen-by-me", "notes.txt", "step-12", "step-00000013.tmp.old", "best")
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000014").write_bytes(b"no directory")
    store = CheckpointStore(tmp_path)
    assert store.steps() == [12]
    assert store.leftovers() == sorted([*LEFT, ".seen-0a1b-12"])
    for _ in range(2):
        store.clean()
        assert store.leftovers() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "step-00000012", "step-00000014"])
    verify(CheckpointReader(store.path(12)))


def test_checkpoints_are_listed_newest_first_and_old_ones_retired(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (3, 100_000_000, 20):
        store.path(step).mkdir()
    assert store.steps() == [100_000_000, 20, 3]
    store.retire({20})
    assert store.steps() == [20]
    assert store.trash.wait(seconds=20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]
    store.remove(99)
    store.remove(20)
    assert store.steps() == []


def test_what_is_not_there_or_was_abandoned_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "nowhere")
    store.clean()
    assert (store.steps(), store.leftovers()) == ([], [])
    assert not store.root.exists()
    store.create(4, plan_files(SOME, 1))
    store.abandon(4)
    assert store.trash.wait(seconds=20)
    assert list(store.root.iterdir()) == []


def test_old_checkpoints_are_removed_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention returns while the disk is still at the first file; more than a few that wait hold up the next retention."""
    store, go_on = CheckpointStore(tmp_path), threading.Event()
    for step in (1, 2):
        store.path(step).mkdir()
        (store.path(step) / "model.safetensors").write_bytes(b"old")
    unlink = os.unlink

    def slow(*arguments: Any, **named: Any) -> None:
        assert go_on.wait(20)
        unlink(*arguments, **named)

    monkeypatch.setattr(os, "unlink", slow)
    store.retire({2})
    assert store.steps() == [2]
    assert not store.trash.wait(seconds=0.05)
    go_on.set()
    assert store.trash.wait(seconds=20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_what_cannot_be_removed_is_told_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.path(step).mkdir()
        (store.path(step) / "model.safetensors").write_bytes(b"old")

    def refuse(path: Any, **named: Any) -> None:
        raise PermissionError(errno.EPERM, "not yours", path)

    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", refuse)
        store.retire({2, 3})
        assert store.trash.wait(seconds=20)
        assert re.search(r"\.trash-00000001-.*model\.safetensors' cannot be removed: not yours", store.trash.problems())
        assert store.trash.problems() == ""
        store.retire({3})
        assert store.trash.wait(seconds=20)
        assert ".trash-00000002-" in store.trash.problems()
        assert len(store.leftovers()) == 2
    store.remove(3)
    assert store.trash.wait(seconds=20)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_or_refuses_is_found_before_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = plan_files([spec("w", (1 << 18,))], 1)
    (tmp_path / "file").write_bytes(b"a file")
    with pytest.raises(StorageError, match=r"step-00000001\.tmp.*Not a directory"):
        CheckpointStore(tmp_path / "file").create(1, files)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    said = r"takes 1,052,672 bytes, and 16,777,216 stay free; 1,048,576 are free; make room"
    with pytest.raises(StorageError, match=said):
        CheckpointStore(tmp_path).create(1, files)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_a_save_waits_for_room_that_is_being_made_and_needs_no_more_than_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, free = CheckpointStore(tmp_path), [(16 << 20) + 4096]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[0]))
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        free[0] += 1

    monkeypatch.setattr(store.trash, "wait", wait)
    store.create(1, plan_files([spec("w", (1 << 18,))], 1), part_nbytes=4096)
    store.require_room(4096)
    assert waited == []
    store.require_room(4097)
    assert waited == [10.0]
    with pytest.raises(StorageError, match="takes 4,099 bytes"):
        store.require_room(4099)


def test_a_removal_that_is_slow_holds_up_only_what_comes_long_after_it() -> None:
    remover, tasks = Remover(), [Future[Any]() for _ in range(3)]
    remover._tasks = {Path(str(number)): task for number, task in enumerate(tasks)}
    assert remover.wait(left=3, seconds=0)
    assert not remover.wait(left=2, seconds=0)
    threading.Timer(0.02, tasks[0].set_result, [""]).start()
    assert remover.wait(left=2, seconds=5), "it waits for the oldest"
    assert [remover.wait(left=left, seconds=0) for left in (2, 1, 0)] == [True, False, False]
    tasks[1].set_result("it is still there")
    tasks[2].set_result("so is that")
    assert remover.wait(seconds=0)
    assert remover.problems() == "it is still there (and 1 more directory)"
    assert remover.problems() == ""


def test_a_name_appears_once_all_below_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, final, done = tmp_path / "new", tmp_path / "final", list[tuple[str, bool]]()
    (new / "below" / "deep").mkdir(parents=True)
    monkeypatch.setattr(stores, "sync_directory", lambda path: done.append((path.name, final.exists())))
    assert publish(new, final, lambda: done.append(("set aside", final.exists())) or tmp_path) == tmp_path  # type: ignore[func-returns-value]
    assert sorted(done[:3]) == [("below", False), ("deep", False), ("new", False)]
    assert done[3:] == [("set aside", False), (tmp_path.name, True)]


def test_the_first_of_two_new_directories_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = write_directory(out, 0), write_directory(out, 0)
    for number, each in enumerate((first, second)):
        (each.__enter__() / "file").write_text(str(number))
    assert not first.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="out cannot be written: something else has been written there meanwhile"):
        second.__exit__(None, None, None)
    assert (out / "file").read_text() == "0"
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(ConfigError, match="out exists and is not an empty directory"):
        write_directory(out, 0).__enter__()
    said = re.escape(f"'{tmp_path}/new/a/b' cannot be written: No such file")
    with pytest.raises(StorageError, match=said), write_directory(tmp_path / "new", 0) as folder:
        (folder / "a" / "b").touch()
    assert list(tmp_path.iterdir()) == [out]


def test_a_small_file_is_added_to_a_checkpoint_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two manifests that are both true."""
    write(tmp_path, 4, split(values_of(SOME, 0), 2, random.Random(0)), {"config.json": b"{}"})
    store, seen = CheckpointStore(tmp_path), list[list[str]]()
    put = CheckpointStore.put_manifest

    def noted(directory: Path, manifest: Manifest) -> None:
        put(directory, manifest)
        verify(CheckpointReader(directory))
        seen.append([name for name in ("config.json", "metrics.json") if name in manifest.files])

    monkeypatch.setattr(CheckpointStore, "put_manifest", staticmethod(noted))
    for data in (b"first", b"the second"):
        store.amend(4, "metrics.json", data)
        reader = CheckpointReader(store.path(4))
        assert (reader.content("metrics.json"), reader.content("config.json")) == (data, b"{}")
    both = ["config.json", "metrics.json"]
    assert seen == [both, ["config.json"], both]


def test_files_of_a_directory_are_replaced_together_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, replaced = tmp_path / "out", list[str]()
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda old, new: (replaced.append(new.name), replace(old, new)))
    (out / "config.json").mkdir(parents=True)
    for name in ("notes", "model.safetensors"):
        (out / name).write_text("old")
    fill = write_directory(out, 0, update=True)
    folder = fill.__enter__()
    (folder / "model.safetensors").write_text("new")
    assert not fill.__exit__(ValueError, ValueError(), None)
    assert (out / "model.safetensors").read_text() == "old"
    folder.mkdir()
    (folder / "left behind by a kill").touch()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with write_directory(out, 0, update=True) as folder:
        for name in ("model.safetensors", "config.json"):
            (folder / name).write_text("new")
    found = {path.name: path.read_text() for path in out.iterdir()}
    assert found == {"notes": "old", "model.safetensors": "new", "config.json": "new"}
    assert replaced == ["config.json", "model.safetensors"], "who finds the new weights finds all else too"
    assert list(tmp_path.iterdir()) == [out]
    for name, words in (("notes", r" \(there is a file of this name; give a"), ("notes/below", ": Not a directory")):
        with pytest.raises(StorageError, match=rf"out/{name}' cannot be written{words}"):
            write_directory(out / name, 0, update=True).__enter__()
    for there in (out, tmp_path / "new"):
        with write_directory(there, 0, update=True) as folder:
            (folder / "model.safetensors").write_text("first")
            with pytest.raises(StorageError, match=r"cannot be written \(it is being written already; wait for that"):
                write_directory(there, 0, update=True).__enter__()
        assert (there / "model.safetensors").read_text() == "first"
    folder.symlink_to(out)
    with pytest.raises(StorageError, match="new' cannot be written: Not a directory"):
        write_directory(there, 0, update=True).__enter__()
    assert (out / "model.safetensors").read_text() == "first", "what a link in its place names is left alone"
    late = write_directory(tmp_path / "late", 0, update=True)
    late.__enter__()
    (tmp_path / "late/other").mkdir(parents=True)
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "late" and os.path.exists(path))
    with pytest.raises(ConfigError, match="late cannot be written: something else has been written there meanwhile"):
        late.__exit__(None, None, None)
    with pytest.raises(StorageError, match="below' cannot be written: Not a directory"):
        write_directory(out / "notes/below", 0).__enter__()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_says_who_may_read_every_file_however_it_was_made(tmp_path: Path, umask: int, mode: int) -> None:
    old = os.umask(umask)
    try:
        store = CheckpointStore(tmp_path)
        files = plan_files(SOME, 1)
        directory = store.create(1, files)
        descriptor = os.open(directory / "config.json", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, b"{}")
        os.close(descriptor)
        dealt = split(values_of(SOME, 0), 1, random.Random(0))
        store.commit(1, manifest_of(1, files, written(directory, files, dealt)))
    finally:
        os.umask(old)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.path(1).rglob("*") if path.is_file()}
    assert len(found) == len(files) + 2
    assert set(found.values()) == {mode}
