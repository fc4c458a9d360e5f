"""Who leads after a leader is lost: no two groups of launchers go on, and who comes back joins those that have."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zeromesh.environment import RankRange
from zeromesh.launch import leader as leading
from zeromesh.launch import messages
from zeromesh.launch.leader import Leader, Nodes, Stop
from zeromesh.launch.messages import MessageError
from zeromesh.launch.rank_processes import WorkersFailed
from zeromesh.launch.rendezvous import Follower

LATEST = RankRange(first=1, processes=1, world_size=4, master_address="a", master_port=1, run_id="run", restart=4)
GONE = WorkersFailed(message="host a, which led, is gone", exit_code=1)


def heir(own: str, others: str, ended: set[str], former: str = "127.0.0.1:1", **nodes: Any) -> Leader:
    """The launcher `own` of those that had a leader, of whom some have come to it and none has the rest of a time to come."""
    server = socket.create_server(("127.0.0.1", 0))
    where = f"127.0.0.1:{server.getsockname()[1]}"
    found = Leader(Nodes(endpoint=where, most=9, **nodes), 1, lambda line: None, bool, listener=server)
    will = {"heirs": {each: f"10.0.0.1:{1 + at}" for at, each in enumerate(others)}, "failures": 2, "recoveries": {"1500": 7}}
    found.inherit(will, own, LATEST, ended, GONE, former)
    return found


def test_an_heir_goes_on_where_the_leader_was() -> None:
    found = heir("b", "bc", {""})
    assert (found._starts, found._world_size, found._run_id, found._failures) == (5, 4, "run", 2)
    assert [step for _, step in found._recoveries] == [7]
    assert found._recoveries[0][0] == pytest.approx(time.monotonic() - 1.5, abs=1)
    found.close()


@pytest.mark.parametrize("heirs", ["b", "bc", "bcd", "bcde", "bcdef"])
def test_one_of_two_groups_goes_on(heirs: str) -> None:
    """However launchers are divided, whether the leader has ended or is silent, and with some of them."""
    for sides in itertools.product((0, 1), repeat=len(heirs)):
        groups = [{each for each, side in zip(heirs, sides, strict=True) if side == number} for number in (0, 1)]
        assert sum(goes_on(group, heirs, {""}) for group in groups) == 1
        for without in groups:
            leader = Leader(Nodes(), 1, lambda line: None, bool)
            leader._electorates, leader._silent = [{*heirs}], without
            assert goes_on(without, heirs, set()) + (not leader.lacks()) == 1


def goes_on(group: set[str], heirs: str, ended: set[str]) -> bool:
    """Whether the first of a group of followers, to which the others have come, may lead."""
    if not group:
        return False
    found = heir(min(group), heirs, ended)
    found._silent -= group
    found.close()
    return not found.lacks()


def test_the_first_heir_that_may_be_alive_wins_a_tie() -> None:
    for own, ended, lacks in (("b", {""}, False), ("c", {""}, True), ("c", {"", "b"}, False), ("b", set(), True)):
        found = heir(own, "bcd" if ended == {"", "b"} else "bc", ended)
        assert found.lacks() is lacks, (own, ended)
        found.close()


def test_an_heir_waits_until_ranks_elsewhere_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where all are here; once for the silence of a leader, and twice where another launcher is missing."""
    clock = [100.0]
    monkeypatch.setattr(leading.time, "monotonic", lambda: clock[0])
    for ended, silent, seconds in (({""}, set(), 0.0), (set(), {""}, 3.0), ({""}, {"d"}, 5.0), (set(), {"", "d"}, None)):
        found = heir("b", "bcd", ended, silence_seconds=2.0)
        found._silent, began, found._wait = silent, clock[0], lambda: clock.__setitem__(0, clock[0] + 0.5)  # type: ignore[method-assign]
        start = found.first_start()
        if seconds is None:
            assert isinstance(start, WorkersFailed)
            assert "which led, is gone: 2 of 4 launchers may be alive elsewhere" in start.message
            assert clock[0] >= began + messages.REACH_SECONDS, "they may still come"
        else:
            assert isinstance(start, RankRange)
            assert (start.restart, clock[0] - began) == (5, seconds)
        found.close()


class Wire:
    """A connection to a launcher that says nothing."""

    readers, was_closed = (), False

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.said: list[Any] = []

    def receive(self) -> Any:
        said = self.said.pop(0) if self.said else []
        if isinstance(said, Exception):
            raise said
        return said

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def loss(self, error: Exception) -> tuple[str, float]:
        return " is gone", 0.0

    def close(self) -> None:
        self.sent.append("closed")


def leader_of(*names: str) -> tuple[Leader, dict[str, Any]]:
    """A leader after its first start, and the connections of its followers."""
    found, wires = Leader(Nodes(endpoint="127.0.0.1:0", most=9, last_call_seconds=0.0), 1, lambda line: None, bool), {}
    for name in names:
        wires[name] = Wire()
        found._members.append(leading.Member(connection=wires[name], name=name, drawn=name, address="there", port=7, processes=1))
    assert isinstance(found.first_start(), RankRange)
    for name in names:
        assert wires[name].sent[0]["heirs"] == dict.fromkeys(names, "there:7")
        wires[name].said.append([{"began": 0}])
    assert found.poll() is None
    return found, wires


LOST = ConnectionError("no sign")


def test_a_leader_ends_where_more_than_half_are_silent() -> None:
    found, wires = leader_of("b", "c")
    wires["b"].said.append([{"left": True}])
    assert found.poll() == Stop(300, "host b is gone")
    wires["c"].said.append(LOST)
    assert found.poll() == Stop(0), "they may lead without this one, which kills its ranks"
    result = found.next_start(None)
    assert "host b is gone; host c is gone: 2 of 3 launchers may be alive elsewhere" in str(result)


def test_a_leader_goes_on_alone_where_the_others_have_ended_or_are_half() -> None:
    found, wires = leader_of("b", "c")
    for each in wires.values():
        each.was_closed = True
        each.said.append(LOST)
    assert found.poll() == Stop(300, "host b is gone")
    assert isinstance(found.next_start(None), RankRange)
    found, wires = leader_of("b")
    wires["b"].said.append(LOST)
    found.poll()
    assert isinstance(found.next_start(None), RankRange)
    found.close()


@pytest.mark.parametrize("knows", [True, False])
def test_a_start_counts_once_all_know_of_it(knows: bool) -> None:
    """Otherwise those who have lost the leader one by one, at the same time, would go on together by the start before it."""
    found, wires = leader_of("b", "c")
    wires["b"].said.append(LOST)
    found.poll()
    found._members[0].running = False
    assert isinstance(found.next_start(None), RankRange)
    wires["c"].said += [[{"began": int(knows)}], LOST]
    for _ in range(2):
        found.poll()
    assert isinstance(found.next_start(None), RankRange) is knows
    found.close()


@pytest.mark.parametrize("closed", [True, False])
def test_a_stranger_that_goes_again_is_not_the_leader_that_is_lost(closed: bool) -> None:
    """Neither has a name: who is lost before it has introduced itself, and the leader among those who were with an heir."""
    found = heir("b", "bc", {""})
    silent, gone, stranger = {*found._silent}, {*found._gone}, Wire()
    stranger.was_closed = closed
    stranger.said.append(LOST)
    found._members.append(leading.Member(connection=stranger, name="there"))  # type: ignore[arg-type]
    found._serve()
    assert (found._members, found._silent, found._gone) == ([], silent, gone)
    found.close()


def test_an_heir_whose_run_is_over_sends_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as former:
        found = heir("b", "bc", {""}, f"127.0.0.1:{former.getsockname()[1]}")
        former.settimeout(20)
        former.accept()[0].close()
        time.sleep(messages.LOOK_SECONDS / 2)  # Until it waits to come again.
        found.close()
        former.settimeout(2 * messages.LOOK_SECONDS)
        with pytest.raises(TimeoutError):
            former.accept()


def test_heirs_have_addresses() -> None:
    for heirs in ({"b": "there"}, {"b": 7}, {"b": "a b:7"}, ["there:7"]):
        with pytest.raises(MessageError, match="'heirs' is"):
            messages.heirs({"heirs": heirs})


@contextmanager
def launchers(number: int) -> Iterator[tuple[Nodes, list[Follower], list[Any]]]:
    """Followers of one run that are on their way in threads of their own, and what each of them has found."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nodes = Nodes(endpoint=f"127.0.0.1:{probe.getsockname()[1]}", most=number + 1, least=number + 1, silence_seconds=1.0)
    stop, found = threading.Event(), [None] * number
    followers = [Follower(nodes, 1, print, stop.is_set) for _ in range(number)]

    def begin(at: int) -> None:
        found[at] = followers[at].first_start()  # type: ignore[call-overload]

    threads = [threading.Thread(target=begin, args=(at,)) for at in range(number)]
    for each in threads:
        each.start()
    try:
        yield nodes, followers, threads
    finally:
        stop.set()
        for each in threads:
            each.join()
        for follower in followers:
            follower.close()


def test_followers_find_their_new_leader_and_who_comes_back_does_too() -> None:
    with launchers(2) as (nodes, followers, threads):
        leader = Leader(nodes, 1, lambda line: None, bool)
        assert isinstance(leader.first_start(), RankRange)
        for each in threads:
            each.join()
        for member in leader._members:  # As the kernel does for a process that is killed.
            member.connection.readers[0].close()  # type: ignore[attr-defined]
        leader._listener.close()  # type: ignore[union-attr]
        until = time.monotonic() + 20
        while not any(each._leader and not each._leader._silent for each in followers):  # The other has come.
            stops = [each.poll() for each in followers]
            assert time.monotonic() < until
            time.sleep(0.01)
        assert all(stop is None or stop == Stop(0, stop.reason) for stop in stops)
        (heir,) = [each for each in followers if each._leader]
        (other,) = [each for each in followers if not each._leader]
        waiting = threading.Thread(target=lambda: results.append(other.next_start(None)))
        results: list[Any] = []
        waiting.start()
        back = Leader(nodes, 1, lambda line: None, bool)  # On the first host again.
        moves: list[Any] = []
        returning = threading.Thread(target=lambda: moves.append(back.first_start()))
        returning.start()
        heir._leader._nodes = Nodes(endpoint=heir._leader._nodes.endpoint, most=3, silence_seconds=1.0)  # type: ignore[union-attr]
        own = heir.next_start(None)
        waiting.join(20)
        returning.join(20)
        assert isinstance(own, RankRange)
        assert (own.restart, own.world_size, results[0].first, results[0].restart) == (1, 2, 1, 1)
        assert isinstance(moves[0], WorkersFailed)
        assert back.moved is not None
        assert [*back.moved["heirs"].values()] == [heir._leader._nodes.endpoint]  # type: ignore[union-attr]
