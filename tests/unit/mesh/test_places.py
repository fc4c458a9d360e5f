"""How processes of a run find each other and say where they are, and how long a launcher is taken to be alive."""

import json
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromesh.environment import read_environment
from zeromesh.errors import CollectiveError, ConfigError
from zeromesh.launch import messages
from zeromesh.launch.messages import LauncherConnection
from zeromesh.mesh import network_interfaces, process_mesh, run_store
from zeromesh.mesh.device_works import record_collectives
from zeromesh.mesh.process_mesh import exchange_locations, island_of
from zeromesh.mesh.process_set import differences

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{"a": "1"}, {"a": "1"}, {"a": "1"}], []),
        ([{"a": "1"}, {"a": "2"}, {"a": "1"}], ["a is 1 on ranks 4, 6, 2 on rank 5"]),
        ([{"a": "1", "b": "x"}, {"a": "1"}, {"a": "1", "b": "x"}], ["b is x on ranks 4, 6, (absent) on rank 5"]),
        ([{"a": "y" * 100}, {"a": "z" * 101}, {"a": "y" * 100}], [f"a is {'y' * 100} on ranks 4, 6, {'z' * 97}... on rank 5"]),
    ],
)
def test_what_differs_between_ranks_is_said_with_who_has_what(rows: list[dict[str, str]], found: list[str]) -> None:
    assert differences(rows, [4, 5, 6]) == found


def test_only_the_first_differences_are_said() -> None:
    for count, more in ((8, []), (9, ["and 1 more"])):
        rows = [{f"n{number}": str(rank) for number in range(count)} for rank in range(2)]
        found = differences(rows, [0, 1])
        assert found[8:] == more
        assert found[7] == "n7 is 0 on rank 0, 1 on rank 1"


class Places(dict[str, str]):
    set = dict.__setitem__

    def get(self, key: str) -> str:  # type: ignore[override]
        return self[key]


@pytest.mark.parametrize(
    ("host", "asked", "uuid", "said"),
    [
        ("here", "topology", "GPU-1", "ranks 0, 1 on the-name would compute on the same CUDA device"),
        ("here", "topology", "GPU-2", ""),
        ("there", "topology", "GPU-1", ""),
        ("here", "topology", "", ""),
        ("here", "launch", "GPU-2", "ranks ask for different meshes: order is topology on rank 0, launch on rank 1. Give"),
    ],
)
def test_processes_ask_for_one_mesh_and_have_a_device_each(
    monkeypatch: pytest.MonkeyPatch, host: str, asked: str, uuid: str, said: str
) -> None:
    monkeypatch.setattr(process_mesh, "host_identity", lambda: "here")
    monkeypatch.setattr(process_mesh, "island_of", lambda device: 3)
    monkeypatch.setattr(process_mesh.socket, "gethostname", lambda: "the-name")
    monkeypatch.setattr(process_mesh.accelerator, "device_uuid", lambda device: "GPU-1" if uuid else "")
    store: Any = Places()
    store["location/1"] = json.dumps([{"host": host, "name": "n", "island": 1}, {"order": asked}, uuid])
    exchange = lambda: exchange_locations(store, 0, 2, torch.device("cuda"), {"order": "topology"})  # noqa: E731
    if said:
        with pytest.raises(ConfigError, match=said):
            exchange()
        return
    assert [(each.host, each.name, each.island) for each in exchange()] == [("here", "the-name", 3), (host, "n", 1)]


def test_an_island_is_the_node_that_has_all_cores_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node, cores in ((0, (0, 1)), (1, (2, 3)), (10, (4,))):
        for core in cores:
            (tmp_path / f"node{node}" / f"cpu{core}").mkdir(parents=True)
        (tmp_path / f"node{node}" / "cpulist").touch()
    monkeypatch.setattr(process_mesh, "_NODES", tmp_path)
    for own, island in (({0}, 0), ({2, 3}, 1), ({4}, 10), ({1, 2}, 0), ({3, 4}, 0), ({9}, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, own=own: own)
        assert island_of(CPU) == island
    for peers, island in (([], 3), ([2], 2), ([1, 2], 1)):
        monkeypatch.setattr(process_mesh.accelerator, "peer_devices", lambda device, peers=peers: peers)
        assert island_of(torch.device("cuda", 3)) == island


@pytest.mark.parametrize("given", [{}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, {"TORCH_FR_BUFFER_SIZE": "7"}])
def test_the_latest_collectives_are_kept_unless_a_user_says_how_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str]
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
    for name in (*names, "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    kept = given.get(names[0], None if given else "2000")
    for traces, where in ((None, None), (tmp_path, f"{tmp_path}/collectives_rank_")):
        record_collectives(traces)
        assert [os.environ.get(name) for name in names] == [kept, "1", where]


def test_ranks_of_a_host_get_the_files_of_their_own_run_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "_DESCRIPTORS", {})
    port = 20_000 + os.getpid() % 40_000  # No other test process of this machine has the same.
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, second = (read_environment({**place, "RANK": each, "LOCAL_RANK": each}) for each in "01")
    with pytest.raises(CollectiveError, match=r"rank 1 has not heard of rank 0 within 0\.05 seconds"):
        run_store._descriptors(second, 0.05)
    mine = run_store._descriptors(first)
    assert run_store._descriptors(first) == mine
    with monkeypatch.context() as patch:
        patch.setattr(run_store, "_DESCRIPTORS", {})
        with pytest.raises(ConfigError, match=f"port {port}: another run on this host uses this MASTER_PORT"):
            run_store._descriptors(first)
    with monkeypatch.context() as patch:
        patch.setattr(run_store, "_user_at", lambda connection: os.geteuid() + 1)
        with pytest.raises(ConfigError, match=f"user {os.geteuid() + 1} has taken the name"):
            run_store._descriptors(second, 1.0)
    theirs = run_store._descriptors(second, 5.0)
    assert [os.fstat(each).st_ino for each in theirs] == [os.fstat(each).st_ino for each in mine]
    assert run_store.rows(replace(first, local_world_size=1)) is None
    for each in (*mine, *theirs):
        os.close(each)


def test_an_end_is_alive_as_long_as_it_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has introduced itself it has other patience; a follower counts from its own echoed beats."""
    clock = [100.0]
    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ours, theirs = socket.socketpair()
    how = {"hello_seconds": 50.0, "silence_seconds": 10.0}
    leads = LauncherConnection(ours, ours, "", serves=True, **how)  # type: ignore[arg-type]
    follows = LauncherConnection(theirs, theirs, "", serves=False, **how)  # type: ignore[arg-type]
    clock[0] = 150.0
    assert leads.receive() == []
    assert follows.receive() == [{"zeromesh": 1, "drawn": leads.drawn}]
    follows.send({"drawn": follows.drawn})
    assert leads.receive() == [{"drawn": follows.drawn}]
    clock[0] = 152.1
    assert follows.receive() == [], "it sends a beat after a fifth of the silence"
    clock[0] = 155.0
    assert leads.receive() == []
    assert (leads.alive_at, follows.alive_at) == (155.0, 150.0)
    assert follows.receive() == []
    assert follows.alive_at == pytest.approx(152.1), "the time at which the echoed beat was sent"
    for clock[0] in (155.0, 165.0):
        assert leads.receive() == []
    clock[0] = 165.1
    for each in (leads, follows):
        with pytest.raises(ConnectionError, match="the connection is gone"):
            each.receive()
        each.close()


def test_ranks_of_rank_0s_host_meet_it_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not where the name of their host leads on it."""
    for module in (run_store, network_interfaces):
        monkeypatch.setattr(module, "address_for_others", lambda name: "127.0.0.2")
    monkeypatch.setattr(run_store, "_STORES", {})
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    first, second = (run_store.run_store(read_environment(place | {"RANK": rank, "LOCAL_RANK": rank}), 5.0) for rank in "01")
    first.set("met", "here")
    assert second.get("met") == b"here"


def test_a_wait_for_lost_ranks_is_left_alone_and_so_is_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start's file does not get the number by which the thread that waits reads."""
    for name in ("_DESCRIPTORS", "_STORES"):
        monkeypatch.setattr(run_store, name, {})
    monkeypatch.setattr(run_store, "_former", [])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0"}
    starts = [read_environment({**place, "MASTER_PORT": str(20_000 + (os.getpid() + later) % 40_000)}) for later in (1, 2, 3)]
    store = run_store.run_store(starts[0])
    store.set_timeout(timedelta(seconds=20))
    read = run_store._descriptors(starts[0])
    assert run_store.wait_for_ranks(lambda: store.check(["never"])) is False
    with pytest.raises(ZeroDivisionError):
        run_store.wait_for_ranks(lambda: 1 // 0)
    run_store.end_waits("rank 1 is lost")
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 1 is lost"):
        run_store.wait_for_ranks(lambda: store.get("never"))
    assert time.monotonic() - began < 10
    run_store.forget_run()
    after = run_store._descriptors(starts[1])
    assert not {*read} & {*after}
    assert os.fstat(read[0]).st_ino != os.fstat(after[0]).st_ino
    run_store.forget_run()
    assert run_store._descriptors(starts[2]) == after, "where no wait was left, numbers are taken again"
    run_store.forget_run()
