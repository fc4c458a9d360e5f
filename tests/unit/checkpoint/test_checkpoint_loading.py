"""Loading and saving by ranks, of which one is here: what is compared before anything is read, and who looks for room."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.stored_cases import spec, split, write
from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.checkpoint.io.format import TensorSpec
from zeromesh.checkpoint.loader import PartsReader, candidates, fill_shards, open_checkpoint, places_of
from zeromesh.checkpoint.saver import SaveContent, Saver, SharedStorage
from zeromesh.checkpoint.store import CheckpointStore, Remover
from zeromesh.errors import CheckpointError, LayoutError
from zeromesh.flat.layout import Region
from zeromesh.intervals import Interval
from zeromesh.offload import TieredTensor

HERE = 1
W, V = spec("w", (3, 4)), spec("v", (5,))


def mesh_of(answers: Callable[[Any], Sequence[Any]] = lambda own: [own], size: int = 1) -> Any:
    """A mesh whose ranks answer as `answers` says, given this rank's own answer."""

    def all_or_raise(what: str, work: Callable[[], Any], error: type[Exception], **_: Any) -> Sequence[Any]:
        return answers(work())

    world = SimpleNamespace(all_or_raise=all_or_raise, gather_bytes=lambda own, what: answers(own))
    return SimpleNamespace(world=world, rank=HERE, world_size=size, post=lambda activity: None)


def shard_of(each: TensorSpec) -> TensorShard:
    numel = each.numel
    values = TieredTensor.of(torch.full((numel,), -1.0))
    return TensorShard(spec=each, region=Region.whole(each.shape), interval=Interval(start=0, end=numel), values=values)


@pytest.fixture
def values() -> dict[TensorSpec, torch.Tensor]:
    return {W: torch.rand(3, 4), V: torch.rand(5)}


@pytest.fixture
def stored(tmp_path: Path, values: dict[TensorSpec, torch.Tensor]) -> Path:
    """A checkpoint of two tensors, of which `tied.weight` is another name of the first one stored."""
    return write(tmp_path, 7, split(values, 1, random.Random(0))).directory


@pytest.mark.parametrize("kind", ["model", "master", "ema"])
def test_masters_and_averages_that_are_not_there_are_the_parameters(
    stored: Path, values: dict[TensorSpec, torch.Tensor], kind: str
) -> None:
    wanted = [spec(each.name, each.shape, kind=kind) for each in (W, V)]
    shards = [shard_of(each) for each in wanted]
    fill_shards(mesh_of(), open_checkpoint(mesh_of(lambda own: [own] * 2), stored), wanted, shards)
    for shard, each in zip(shards, (W, V), strict=True):
        assert torch.equal(shard.values.memory, values[each].reshape(-1))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([spec("w", (4, 3)), V], [r"w is \[3, 4\] in it and \[4, 3\] here \(model\)"]),
        ([W, V, spec("u", (2,))], ["u has no model in it"]),
        ([W, V, spec("w", (3, 4), kind="exp_avg")], ["w has no exp_avg in it"]),
        ([W], ["v is in it and not in the model"]),
        ([W, V, *(spec(f"n{number}", (2,)) for number in range(5))], [*(f"n{number} has" for number in range(5))]),
        ([V, *(spec(f"n{number}", (2,)) for number in range(6))], [*(f"n{n} has" for n in range(5)), "and 2 more$"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_it_is_read(
    stored: Path, wanted: list[TensorSpec], said: list[str]
) -> None:
    shards = [shard_of(each) for each in (W, V)]
    reader = open_checkpoint(mesh_of(lambda own: [own] * 2), stored)
    with pytest.raises(LayoutError, match=f"{stored} does not fit this model and optimizer: {'.*; '.join(said)}") as caught:
        fill_shards(mesh_of(), reader, wanted, shards)
    assert str(caught.value).count(";") == len(said) - 1
    assert all(bool((shard.values.memory == -1).all()) for shard in shards)
    with pytest.raises(LayoutError, match="has no exp_avg of w"):
        list(places_of(reader, [shard_of(spec("w", (3, 4), kind="exp_avg"))]))


def test_ranks_that_see_other_checkpoints_are_named(stored: Path, tmp_path: Path) -> None:
    for answers, said in (
        (
            lambda own: ["", own, "1 other"] if isinstance(own, str) else [b"", own, own],
            f"{stored} is another checkpoint on rank 2 than on rank 1; give all hosts the same directory",
        ),
        (
            lambda own: [own, own, "1 other"] if isinstance(own, str) else [own] * 2,
            f"{stored} is another checkpoint on rank 2 than on rank 0; give all hosts the same directory",
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(mesh_of(answers), stored)
    with pytest.raises(CheckpointError, match=f"no rank sees {tmp_path / 'nowhere'}"):
        open_checkpoint(mesh_of(lambda own: [own, own]), tmp_path / "nowhere")
    for there in (["", "own"], ["", "own", ""]):
        answers = lambda own, there=there: [own if each else own[:0] for each in there]  # noqa: E731
        found = open_checkpoint(mesh_of(answers), stored)
        assert (type(found), found.manifest.step) == (PartsReader, 7), "those that do not see it read it through others"
    assert open_checkpoint(mesh_of(lambda own: [own, own]), stored).manifest.step == 7
    store: Any = SimpleNamespace(root=stored, steps=lambda: [7, 3])
    assert candidates(mesh_of(lambda own: [own, [12, 3], []]), store) == [12, 7, 3]


def test_frozen_weights_are_taken_from_where_they_were_if_they_are_still_there(stored: Path, tmp_path: Path) -> None:
    mesh, moved = mesh_of(lambda own: [own] * 2), tmp_path / "moved"
    reader = open_checkpoint(mesh, stored, moved)
    assert reader.source == Path(), "what refers to no weights has no source elsewhere"
    CheckpointStore(tmp_path).temporary(9).mkdir()
    whole = reader.manifest.__class__(step=9, files={}, source=str(tmp_path / "old"))
    CheckpointStore(tmp_path).commit(9, whole)
    assert open_checkpoint(mesh, tmp_path / "step-00000009", moved).source == moved
    (tmp_path / "old").mkdir()
    assert open_checkpoint(mesh, tmp_path / "step-00000009", moved).source == tmp_path / "old"


@pytest.mark.parametrize(("ranks", "leads", "asked"), [((0, 1), True, [34]), ((1,), True, [17]), ((0, 1), False, [])])
def test_room_is_looked_for_once_on_a_disk_for_the_share_of_its_ranks(
    tmp_path: Path, ranks: tuple[int, ...], leads: bool, asked: list[int]
) -> None:
    store, found = CheckpointStore(tmp_path), list[int]()
    store.require_room = found.append  # type: ignore[method-assign, assignment]
    saver = Saver(store, mesh_of(size=4))
    saver.__dict__["storage"] = SharedStorage(parts=2, part=0, ranks=ranks, leads=leads)
    saver.require_room([W, V])
    assert found == asked


def test_a_save_in_flight_is_named_and_given_up_with_its_files(tmp_path: Path) -> None:
    saver = Saver(CheckpointStore(tmp_path), mesh_of())
    saver.__dict__["storage"] = SharedStorage(parts=1, part=0, ranks=(0,), leads=True)
    saver.give_up()
    assert saver.poll() is None
    saver.wait_until_copied(3)
    content = SaveContent(tensors=[], shards=[], order={}, documents=lambda path: None, keep=set)
    saver.in_flight = 4
    with pytest.raises(CheckpointError, match="the checkpoint of step 4 is still being written"):
        saver.begin(5, content)
    saver.store.temporary(4).mkdir()
    saver._task.set_result(None)
    saver.give_up()
    assert saver.in_flight is None
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_are_waited_for_no_longer_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, waits, posted = CheckpointStore(tmp_path), [False, False, True], list[object]()
    mesh = mesh_of(size=2)
    mesh.post = posted.append
    monkeypatch.setattr(Remover, "wait", lambda self, *, seconds: waits.pop(0))
    monkeypatch.setattr(Remover, "problems", lambda self: "it is still there")
    mesh.world.all_or_raise = lambda what, work, error: ["", work(), work()]
    assert Saver(store, mesh).remove_old(60.0) == "rank 1: it is still there"
    assert (waits, len(posted)) == ([], 2)
    waits[:] = [False, False]
    assert Saver(store, mesh).remove_old(0.0) == "rank 1: it is still there"
    assert (waits, len(posted)) == ([False], 2)
