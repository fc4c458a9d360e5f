"""Process sets: who is in them, what is refused and how it is named, no deadlock where they overlap, nothing left behind."""

import gc
import os
import random
import threading
from typing import Any

import pytest
import torch

from tests.support.tables import row, tried
from tests.support.workers import Workers
from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.errors import CollectiveError, LayoutError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet

test_sets_on_three_ranks = tried(
    "test_process_sets",
    [
        *(row(3, case) for case in ("life", "disagreements", "agreements")),
        row(3, "overlapping", rounds=10),
        row(3, "churn", count=24, kept=4),
        row(3, "churn", pytest.mark.full, count=1000, kept=4),
    ],
    folder=False,
    timeout=600.0,
)


@pytest.fixture(autouse=True, scope="module")
def no_sets(workers: Workers) -> None:
    """Workers live on from one file of tests to the next."""
    workers.run(3, "test_process_sets:cleared")


def cleared(mesh: Mesh) -> None:
    """Remove what other cases have left in these workers."""
    for name in list(mesh.process_sets):
        mesh.process_sets.remove(name)


def life(mesh: Mesh) -> None:
    """Sets declared, used, asked for by name, split by colour, and removed."""
    sets, edge = mesh.process_sets, mesh.rank != 1
    declared = sets.declare({"edges": [0, 2], "turned": [2, 0, 1], "one": [1]})
    edges, turned = declared["edges"], declared["turned"]
    assert [declared[name].member for name in ("edges", "turned", "one")] == [edge, True, not edge]
    assert mesh.group("edges") is edges
    assert mesh["turned"] is turned
    assert turned.gather_integers([mesh.rank]) == [[2], [0], [1]]
    if edge:
        assert edges.all_reduce(torch.tensor([mesh.rank + 1]), "sum").item() == 4
        exchange = open_exchange(edges, mesh.device)
        assert exchange.all_reduce_async(torch.tensor([mesh.rank + 1.0])).wait().tolist() == [4.0]
    else:
        for call in (lambda: edges.barrier("a moment"), lambda: open_exchange(edges, mesh.device)):
            with pytest.raises(CollectiveError, match=r"this rank is not in process set edges \(ranks 0, 2\)"):
                call()
    parity = sets.split(7 if edge else None, -mesh.rank, name="even")
    assert (parity is not None) == edge
    assert parity is None or (parity.ranks, parity.gather_integers([mesh.rank])) == ((2, 0), [[2], [0]])
    assert list(sets) == ["edges", "one", "turned", "even 7"]
    wrong: Any = [0, 3, "x"]
    for ranks, name, said in (
        ([0, 2], "edges", r"there is one of that name already \(ranks \[0, 2\]\)"),
        ([0, 2], "tensor", "the name is one of the mesh's own"),
        (wrong, "wrong", r"'wrong' of ranks \[0, 3, -1\]: allowed are ranks 0 to 2"),
    ):
        with pytest.raises(LayoutError, match=said):
            sets.add(ranks, name=name)
    for each in (edges, "turned", "one", "even 7"):
        sets.remove(each)
    if edge:
        with pytest.raises(CollectiveError, match=r"process set edges \(ranks 0, 2\) was removed"):
            edges.barrier("a moment")
    with pytest.raises(LayoutError, match="cannot be removed: there is none"):
        sets.remove("edges")
    assert not sets
    assert sets.add([1, 2]).name == "ranks 1, 2"
    sets.remove("ranks 1, 2")


def disagreements(mesh: Mesh) -> None:
    """What is said when one rank declares, splits or removes something else; then all goes on."""
    sets, odd = mesh.process_sets, mesh.rank == 1
    some = "to declare 'some' of ranks [0, 1] on ranks 0, 2, to declare"
    both = "to declare 'a' of ranks [0, 1], 'b' of ranks [1, 2] on ranks 0, 2, to declare nothing on rank 1."
    for call, said in (
        (lambda: sets.add([0, 2] if odd else [0, 1], name="some"), f"{some} 'some' of ranks [0, 2] on rank 1."),
        (lambda: sets.add([0, 1], name="mine" if odd else "some"), f"{some} 'mine' of ranks [0, 1] on rank 1."),
        (
            lambda: sets.split(0, name="half") if odd else sets.remove("some"),
            "the call is to remove 'some' on ranks 0, 2, to split the world as 'half' on rank 1.",
        ),
        (lambda: sets.declare({} if odd else {"a": [0, 1], "b": [1, 2]}), both),
    ):
        with pytest.raises(CollectiveError) as caught:
            call()
        assert said in str(caught.value)
    assert not sets
    some_set = sets.add([0, 1], name="some")
    assert not some_set.member or some_set.gather_integers([mesh.rank]) == [[0], [1]]
    sets.remove(some_set)


def agreements(mesh: Mesh) -> None:
    """What all ranks get of work that each does, and what they raise where it fails on some."""

    def all_or_raise(*errors: Exception | None, **how: Any) -> list[Any]:
        def work() -> int:
            if error := errors[mesh.rank]:
                raise error
            return mesh.rank

        return mesh.world.all_or_raise("look", work, StorageError, **how)

    full, wrong, odd = StorageError("the disk is full"), LayoutError("another model"), KeyError("x")
    assert all_or_raise(None, None, None) == [0, 1, 2]
    assert all_or_raise(None, full, full, first=True) == [0, None, None]
    rows: tuple[tuple[tuple[Exception | None, ...], dict[str, Any], str], ...] = (
        ((None, full, None), {}, "rank 1: the disk is full"),
        ((None, full, odd), {}, "rank 1: the disk is full (and 1 more rank)"),
        ((full, full, full), {}, "the disk is full"),
        ((None, None, OSError(28, "No space left on device", "/disk")), {}, "rank 2: /disk: No space left on device"),
        ((odd, None, None), {}, "rank 0: look: KeyError: 'x'"),
        ((full, wrong, None), {"kept": LayoutError}, "rank 1: another model (and 1 more rank)"),
        ((full, wrong, None), {}, "rank 0: the disk is full (and 1 more rank)"),
        ((full, None, None), {"first": True}, "the disk is full"),
    )
    for errors, how, said in rows:
        with pytest.raises(how.get("kept", StorageError)) as caught:
            all_or_raise(*errors, **how)
        assert str(caught.value) == said
    with pytest.raises(LayoutError) as caught:
        mesh.world.require_same({"a": 1, "b": mesh.rank == 2}, LayoutError, advice="Agree")
    given = "ranks were given different things"
    assert str(caught.value) == f"{given}: b is False on ranks 0, 1, True on rank 2. Agree"


def overlapping(mesh: Mesh, rounds: int) -> None:
    """Sets that overlap, each used by a thread of its own, which every rank starts in another order; and by one thread, which
    starts sums in one order and waits for them in another."""
    names = {"a": [0, 1], "b": [1, 2], "c": [0, 2], "d": [0, 1, 2], "e": [0, 1, 2]}
    mine = [each for each in mesh.process_sets.declare(names).values() if each.member]
    equal: list[bool] = []

    def use(group: ProcessSet) -> None:
        wanted = [[rank, number] for number in range(rounds) for rank in group.ranks]
        rows = [group.gather_integers([mesh.rank, number]) for number in range(rounds)]
        equal.append([row for each in rows for row in each] == wanted)

    random.Random(mesh.rank).shuffle(mine)
    threads = [threading.Thread(target=use, args=(group,)) for group in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine.sort(key=lambda group: group.name)
    for kind in ("gloo", "shared"):
        exchanges = [(group, open_exchange(group, mesh.device, kind)) for group in mine]  # type: ignore[arg-type]
        for number in range(rounds):
            random.Random(mesh.rank + number).shuffle(exchanges)
            pending = [(group, each.all_reduce_async(torch.full((300,), mesh.rank + 1.0))) for group, each in exchanges]
            pending.reverse()
            equal += [float(each.wait()[0]) == sum(group.ranks) + group.size for group, each in pending]
    mesh.world.barrier("all are through")
    for name in names:
        mesh.process_sets.remove(name)
    assert len(equal) == 4 * (1 + 2 * rounds)
    assert all(equal)


def churn(mesh: Mesh, count: int, kept: int) -> None:
    """Add and remove `count` sets, of which up to `kept` are there at a time, beside a thread that never stops to use another.

    Threads and descriptors are those of before; memory may grow by what a store remembers of a set.
    """
    sets = mesh.process_sets
    load = sets.add([0, 1, 2], name="load")
    rounds = [0]
    wrong: list[int] = []

    def use() -> None:
        exchange = open_exchange(load, mesh.device)
        going = 1
        while going:
            total = exchange.all_reduce_async(torch.full((4096,), mesh.rank + 1.0)).wait()
            wrong.extend([rounds[0]] * (total[0] != 6))
            rounds[0] += 1
            going = int(load.all_reduce(torch.tensor([int(not stop.is_set())]), "going on")[0]) // 3

    stop = threading.Event()
    thread = threading.Thread(target=use)
    thread.start()
    choice = random.Random(5)  # the same on all ranks
    there: list[ProcessSet] = []
    before: dict[str, int] = {}
    for number in range(count + count // 4):
        if number == count // 4:
            before = holdings()  # what the first ones have left, as any would
        there.append(sets.add(choice.sample(range(3), choice.choice([1, 2, 3])), name=f"set {number}"))
        if there[-1].member:
            there[-1].gather_integers([number])
        if len(there) == kept:
            sets.remove(there.pop(choice.randrange(kept)))
    for each in there:
        sets.remove(each)
    del there
    gc.collect()
    after = holdings()
    stop.set()
    thread.join()
    sets.remove(load)
    assert rounds[0] > count
    assert wrong == []
    assert list(sets) == []
    assert after["task"] <= before["task"]
    assert after["fd"] <= before["fd"]
    assert after["KiB"] - before["KiB"] < 2048 + 8 * count


def holdings() -> dict[str, int]:
    """Threads, file descriptors and KiB of memory of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    counts = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}
    return counts | {"KiB": pages * os.sysconf("SC_PAGE_SIZE") // 1024}
