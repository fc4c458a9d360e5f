"""Cases on process sets: declared, split, added and removed, alike or not, alone or under load."""

import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.errors import LayoutError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet


def said(call: Callable[[], Any]) -> str:
    """The error of a call, or nothing."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cleared(mesh: Mesh) -> None:
    """Remove what other cases have left in these workers."""
    for name in list(mesh.process_sets):
        mesh.process_sets.remove(name)


def life(mesh: Mesh) -> dict[str, Any]:
    """Sets declared, used, asked for by name, split by colour, and removed."""
    sets = mesh.process_sets
    declared = sets.declare({"edges": [0, 2], "turned": [2, 0, 1], "one": [1]})
    edges, turned = declared["edges"], declared["turned"]
    found: dict[str, Any] = {
        "member": [declared[name].member for name in ("edges", "turned", "one")],
        "same": mesh.group("edges") is edges and mesh["turned"] is turned,
        "turned": [row[0] for row in turned.gather_integers([mesh.rank])],
        "outside": said(lambda: edges.barrier("a moment")) if mesh.rank == 1 else "",
        "no exchange": said(lambda: open_exchange(edges, mesh.device)) if mesh.rank == 1 else "",
    }
    if edges.member:
        found["edges"] = edges.all_reduce(torch.tensor([mesh.rank + 1]), "sum").item()
        found["exchange"] = (
            open_exchange(edges, mesh.device).all_reduce_async(torch.tensor([mesh.rank + 1.0])).wait().tolist()
        )
    parity = sets.split(None if mesh.rank == 1 else 7, -mesh.rank, name="even")
    found["split"] = [list(parity.ranks), parity.gather_integers([mesh.rank])] if parity else None
    found["names"] = list(sets)
    found["twice"] = said(lambda: sets.add([0, 2], name="edges"))
    found["reserved"] = said(lambda: sets.add([0, 2], name="tensor"))
    found["wrong"] = said(lambda: sets.add([0, 3, "x"], name="wrong"))  # type: ignore[list-item]
    for name in (edges, "turned", "one", "even 7"):
        sets.remove(name)
    found["removed"] = said(lambda: edges.barrier("a moment")) if edges.member else ""
    found["gone"] = said(lambda: sets.remove("edges"))
    found["left"] = list(sets)
    found["unnamed"] = sets.add([1, 2]).name
    sets.remove("ranks 1, 2")
    return found


def disagreements(mesh: Mesh) -> dict[str, Any]:
    """What is said when one rank declares, splits or removes something else; then all goes on."""
    sets, odd = mesh.process_sets, mesh.rank == 1
    found = {
        "ranks": said(lambda: sets.add([0, 2] if odd else [0, 1], name="some")),
        "names": said(lambda: sets.add([0, 1], name="mine" if odd else "some")),
        "calls": said(lambda: sets.split(0, name="half") if odd else sets.remove("some")),
        "number": said(lambda: sets.declare({} if odd else {"a": [0, 1], "b": [1, 2]})),
    }
    found["there"] = list(sets)
    some = sets.add([0, 1], name="some")
    found["after"] = some.gather_integers([mesh.rank]) if some.member else [[0], [1]]
    sets.remove(some)
    return found


def agreements(mesh: Mesh) -> dict[str, Any]:
    """What all ranks get of work that each does, and what they raise where it fails on some."""

    def fails(*errors: Exception | None) -> Callable[[], int]:
        def work() -> int:
            if error := errors[mesh.rank]:
                raise error
            return mesh.rank

        return work

    def ends(*errors: Exception | None, **how: Any) -> str:
        return said(lambda: mesh.world.all_or_raise("look", fails(*errors), StorageError, **how))

    full, wrong, odd = StorageError("the disk is full"), LayoutError("another model"), KeyError("x")
    return {
        "all": mesh.world.all_or_raise("look", fails(None, None, None), StorageError),
        "first": mesh.world.all_or_raise("look", fails(None, full, full), StorageError, first=True),
        "one": ends(None, full, None),
        "several": ends(None, full, odd),
        "same": ends(full, full, full),
        "of the system": ends(None, None, OSError(28, "No space left on device", "/disk")),
        "of others": ends(odd, None, None),
        "kept": ends(full, wrong, None, kept=LayoutError),
        "not kept": ends(full, wrong, None),
        "of the first": ends(full, None, None, first=True),
        "other things": said(
            lambda: mesh.world.require_same({"a": 1, "b": mesh.rank == 2}, LayoutError, advice="Agree")
        ),
    }


def overlapping(mesh: Mesh, rounds: int) -> list[bool]:
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
    return equal


def churn(mesh: Mesh, count: int, kept: int) -> dict[str, Any]:
    """Add and remove `count` sets, of which up to `kept` are there at a time, beside a thread that never stops to use another."""
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
    return {"before": before, "after": after, "rounds": rounds[0], "wrong": wrong, "left": list(sets)}


def holdings() -> dict[str, int]:
    """Threads, file descriptors and KiB of memory of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    counts = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}
    return counts | {"KiB": pages * os.sysconf("SC_PAGE_SIZE") // 1024}
