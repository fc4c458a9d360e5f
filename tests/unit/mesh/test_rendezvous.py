"""Launchers that lead and follow: who gets which ranks, what ends a run, and what only starts it again."""

import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from zeromesh.environment import RankRange
from zeromesh.errors import ConfigError
from zeromesh.launch import leader as leading
from zeromesh.launch import rendezvous
from zeromesh.launch.leader import ALONE, Leader, Member, Nodes, Stop
from zeromesh.launch.messages import Message, MessageError
from zeromesh.launch.rank_processes import WorkersFailed
from zeromesh.launch.rendezvous import Follower, launch_workers, run_starts
from zeromesh.launch.signals import StopSignals


class Wire:
    """A connection to another launcher, of which a test says what comes."""

    readers: Sequence[Any] = ()
    drawn = "word"

    def __init__(self, *coming: list[Message] | Exception) -> None:
        self.coming, self.sent, self.open = list(coming), list[Message](), True

    def receive(self) -> list[Message]:
        found = self.coming.pop(0) if self.coming else []
        if isinstance(found, Exception):
            raise found
        return found

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def loss(self, error: Exception) -> tuple[str, float]:
        return f" is gone: {error}", time.monotonic() + 0.1

    def close(self) -> None:
        self.open = False


def member(name: str, *coming: list[Message] | Exception, processes: int = 2, **more: Any) -> Member:
    """A host that has introduced itself, unless its `processes` are 0."""
    connection: Any = Wire(*coming)
    return Member(connection=connection, name=name, processes=processes, slots=2, greeting={}, **more)


def sent_to(each: Member) -> list[Message]:
    found: Any = each.connection
    return found.sent  # type: ignore[no-any-return]


def leader_of(members: list[Member], told: list[str] | None = None, **nodes: Any) -> Leader:
    """A leader that has no ranks itself, as that of `zeromesh launch` over ssh; its ranks meet at a fixed address."""
    nodes = {"most": 1 + len(members), "least": 1 + len(members), "rest_seconds": 7} | nodes
    notify = (lambda line: None) if told is None else told.append
    found = Leader(Nodes(**nodes), 0, notify, bool, members=members, address_of=lambda left: ("there", 1234))
    assert isinstance(found.first_start(), RankRange)
    return found


@pytest.mark.parametrize(
    ("endpoint", "where"),
    [
        *(("gpu1:29400", ("gpu1", 29400)), ("[::1]:1", ("::1", 1)), ("a:65535", ("a", 65535)), ("a:0", ("a", 0))),
        *((each, None) for each in ("a:65536", "a:655350", "a", ":1", "a:", "a:x", "a:-1", "")),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, where: tuple[str, int] | None) -> None:
    if where is not None:
        assert Nodes(endpoint=endpoint).where == where
        return
    with pytest.raises(ConfigError, match=f"--rdzv-endpoint {endpoint!r}: allowed is HOST:PORT"):
        _ = Nodes(endpoint=endpoint).where


def test_hosts_are_numbered_by_their_number_and_no_more_than_wanted() -> None:
    hosts = [member(name, rank=rank, processes=rank + 1) for name, rank in (("c", 2), ("b", 1), ("d", 3))]
    leader = Leader(Nodes(most=3, run_id="run"), 1, print, bool, members=hosts, address_of=lambda left: ("there", 1234))
    start = leader.first_start()
    common = {"world_size": 6, "master_address": "there", "master_port": 1234, "run_id": "run", "restart": 0, "hosts": 3}
    assert start == RankRange(first=0, processes=1, **common)  # type: ignore[arg-type]
    (third,), (second,), left_out = map(sent_to, hosts)
    assert second["start"] == {"first": 1, "processes": 2, **common}
    assert third["start"] == {"first": 3, "processes": 3, **common}
    assert left_out == []
    assert [(each.numbered, each.running) for each in hosts] == [(True, True), (True, True), (False, False)]
    assert leader._start().restart == 1


def failed(message: str = "no memory", code: int = 1, distance: int = 0) -> WorkersFailed:
    return WorkersFailed(message=message, exit_code=code, distance=distance)


@pytest.mark.parametrize(
    ("distance", "ending", "later", "stops"),
    [(0, False, 0.0, True), (1, False, 9.9, False), (1, False, 10.0, True), (0, True, 60.0, False)],
)
def test_a_failure_elsewhere_stops_the_ranks_once_it_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, distance: int, ending: bool, later: float, stops: bool
) -> None:
    """A rank that has only noticed one leaves the cause some time to be told; a run that is stopping saves to its end."""
    clock = [100.0]
    monkeypatch.setattr(leading.time, "monotonic", lambda: clock[0])
    hosts = [member("b"), member("c")]
    leader = leader_of(hosts, cause_seconds=10.0)
    assert leader.poll() is None
    hosts[0].failure, leader.ending = failed(distance=distance), ending
    leader.poll()
    clock[0] += later
    for _ in range(2):
        assert leader.poll() == (Stop(7, "no memory") if stops else None)
    assert [each for each in sent_to(hosts[1]) if "stop" in each] == [
        {"stop": 7, "reason": "no memory", "after_step": False}
    ] * stops


@pytest.mark.parametrize(("most", "asked"), [(3, None), (4, Stop(7, "another host has come", after_step=True))])
def test_a_host_that_comes_stops_the_ranks_where_there_is_room(most: int, asked: Stop | None) -> None:
    """Nobody is lost, so that all end their step."""
    hosts = [member("b"), member("c")]
    leader = leader_of(hosts, most=most)
    hosts.append(member("d", processes=0))
    assert leader.poll() is None, "it has not introduced itself"
    hosts[-1].processes = 1
    assert leader.poll() == asked


def test_as_many_ranks_as_make_a_mesh_have_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of hosts, of which one may have fewer than it offers; the others wait until there are enough."""
    hosts, told = [member("b", processes=3), member("c", processes=1)], list[str]()
    leader = Leader(
        Nodes(most=5, fits=lambda ranks: ranks % 4 == 0), 2, told.append, bool, members=hosts,
        address_of=lambda left: ("there", 1234),
    )  # fmt: skip
    start = leader.first_start()
    assert isinstance(start, RankRange)
    assert (start.processes, start.world_size) == (2, 4)
    assert [each["start"]["processes"] for each in sent_to(hosts[0])] == [2]
    assert sent_to(hosts[1]) == []
    assert told == ["4 of 6 ranks make a mesh (parallel), and the others wait"]
    assert leader.poll() is None, "one that waits has not come just now"
    hosts.append(member("d", processes=2))
    hosts[-1].numbered = False
    assert leader.poll() == Stop(300, "another host has come", after_step=True)


def test_hosts_that_make_no_mesh_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    listener = SimpleNamespace(setblocking=lambda blocks: None, close=lambda: None)
    monkeypatch.setattr(leading, "listen", lambda *where: listener)
    nodes = Nodes(most=3, fits=lambda ranks: ranks % 4 == 0, endpoint="a:1")
    leader = Leader(nodes, 2, told.append, bool, address_of=lambda left: ("there", 1234))
    leader._members.append(member("b", processes=1))
    served: list[int] = []

    def serve() -> None:
        served.append(len(served))
        if len(served) == 3:
            leader._members.append(member("c", processes=1))

    monkeypatch.setattr(leader, "_serve", serve)
    monkeypatch.setattr(leader, "_wait", lambda: None)
    start = leader.first_start()
    assert isinstance(start, RankRange)
    assert (start.world_size, len(served)) == (4, 3)


def test_a_host_that_comes_waits_where_the_run_does_not_grow() -> None:
    hosts = [member("b")]
    leader = leader_of(hosts, most=3, grows=False)
    hosts.append(member("c"))
    hosts[-1].numbered = False
    assert leader.poll() is None
    leader.first_start()
    assert hosts[-1].numbered, "it is taken in when ranks start again anyway"


@pytest.mark.parametrize(
    ("code", "limit", "lost", "taken"), [(137, 20, False, False), (137, 20, True, True), (143, 0, False, True)]
)
@pytest.mark.parametrize("grows", [True, False])
def test_a_start_that_replaces_a_rank_has_the_same_hosts(code: int, limit: int, lost: bool, taken: bool, grows: bool) -> None:
    """Steps are in memory, which counts in the layout that there was; a host that has come is taken in after that."""
    hosts = [member("b"), member("c")]
    leader = leader_of(hosts, most=4, least=2, grows=grows, max_restarts=1)
    hosts.append(member("d"))
    assert (leader.poll() is not None) is grows
    hosts[0].running = hosts[1].running = False
    hosts[0].failure = replace(recovering(limit=limit, code=code), distance=0)
    if lost:
        leader._lost.append(failed("host c is gone"))
    assert isinstance(leader.next_start(None), RankRange)
    assert hosts[2].numbered is taken
    if not taken:
        assert (leader.poll() is not None) is grows, "now its turn has come"


@pytest.mark.parametrize(
    ("end", "again"),
    [
        ({"message": "rests", "exit_code": 1, "distance": 1, "limit": 20}, True),
        ({"message": "rests while hosts are waited for", "exit_code": 1, "distance": 1, "limit": 20}, False),
        ({"message": "gone", "exit_code": 137, "limit": 20}, True),
        ({"message": "was killed by SIGKILL", "exit_code": 137, "distance": 2, "limit": 20}, False),
        ({"message": "stopped", "exit_code": 143}, False),
        ({"message": "gone", "exit_code": 137}, False),
    ],
)
def test_a_stop_after_which_a_rank_is_lost_is_passed_on_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: dict[str, Any], again: bool
) -> None:
    """To those that go on, which save what nobody has saved yet; once, and not where it is the launcher that has killed them."""
    passed: list[int] = []

    def run(ranks: Any, start: Any, others: Any, requests: StopSignals, nursery: Any) -> WorkersFailed:
        if not passed:
            requests.receive(signal.SIGTERM, None)
        ranks.recover = False
        requests.pass_on(passed.append, lambda: passed.append(9))
        ranks.recover = True
        return WorkersFailed(**end)

    monkeypatch.setattr(rendezvous, "Nursery", lambda *_: SimpleNamespace(lost=False, ready=True, close=lambda: None))
    monkeypatch.setattr(rendezvous, "_run", run)
    starts = [RankRange(**{**START, "restart": number}) for number in range(4)]  # type: ignore[arg-type]
    others: Any = Others(*starts)
    others.waits = "waited for" in end["message"]
    assert run_starts([], others, StopSignals()) == 143
    assert passed == [signal.SIGTERM] * (1 + again)
    assert ("was killed by SIGKILL, 300 s after the signal" in capsys.readouterr().out) is (end.get("distance") == 2)


def test_what_a_host_says_of_its_end() -> None:
    host = member("b")
    leader = leader_of([host])
    for said, running, found in (
        ({"x": 1}, True, None),
        ({"rest": 0, "text": "unheard"}, False, None),
        ({"rest": 3, "text": "after the end"}, False, None),
    ):
        leader._take(host, said)
        assert (host.running, host.failure) == (running, found)
    host.running = True
    leader._take(host, {"rest": 3, "text": "late", "noticed": True, "limit": 20, "step": 7})
    assert host.failure == replace(failed("late", 3, 1), limit=20, step=7)
    host.running, host.failure, leader._starts = True, None, 2
    leader._take(host, {"rest": 3, "of": 0, "text": "of the start before"})
    assert (host.running, host.failure) == (True, None)
    # A host that comes to an heir may know of a later start than the heir, which its ranks have ended then.
    leader._take(host, {"rest": 0, "of": leader._starts, "text": ""})
    assert not host.running


@pytest.fixture
def come_and_go(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Leader, list[Member]]]:
    """Starts hosts with these numbers of ranks, the leader's first, of which one is enough."""
    listener = SimpleNamespace(setblocking=lambda blocks: None, close=lambda: None)
    monkeypatch.setattr(leading, "listen", lambda *where: listener)
    monkeypatch.setattr(Leader, "_wait", lambda self: None)
    monkeypatch.setattr(Leader, "_last_will", lambda self, counts: {})
    monkeypatch.setattr(Leader, "_serve", lambda self: None)

    def start(own: int, *others: int, **nodes: Any) -> tuple[Leader, list[Member]]:
        nodes = {"most": 5, "endpoint": "a:1", "last_call_seconds": 0.0, "max_restarts": 3} | nodes
        leader = Leader(Nodes(**nodes), own, lambda line: None, bool, address_of=lambda left: ("there", 1234))
        leader._members += (hosts := [member(f"b{number}", processes=it) for number, it in enumerate(others)])
        assert isinstance(leader.first_start(), RankRange)
        return leader, hosts

    return start


def test_a_host_that_is_asked_to_end_is_no_failure_of_the_others(come_and_go: Any) -> None:
    """It may come back and be asked to end any number of times."""
    leader, _ = come_and_go(1)
    for _ in range(7):
        leader._members.append(member("b"))
        leader._has_new_hosts = True
        assert leader.next_start(failed("another host has come", distance=1)).world_size == 3
        (host,) = leader._members
        with pytest.raises(ConnectionError) as error:
            leader._take(host, {"rest": 143, "leaves": True})
        leader._report_loss(host, error.value)
        leader._members.clear()
        assert leader.next_start(failed("was stopped by SIGTERM", 143)).world_size == 1


GONE = ConnectionError("no sign")


def test_a_host_that_has_ended_and_goes_is_not_lost() -> None:
    hosts = [member("b", [], GONE), member("c")]
    leader = leader_of(hosts)
    hosts[0].running = False
    assert leader.poll() is None
    assert [each.name for each in hosts] == ["c"]


@pytest.mark.parametrize(
    ("own", "theirs", "gone", "nodes", "said"),
    [
        (None, None, False, {}, 0),
        (failed(), None, False, {}, "no memory"),
        (failed(), None, False, {"max_restarts": 1}, ["None", "going on from"]),
        (failed(code=2), None, False, {"max_restarts": 9}, "no memory"),
        (failed("noticed", distance=1), failed("the cause"), False, {}, "host b: the cause"),
        (failed("first"), failed("second"), False, {}, "first"),
        (None, failed(code=2), False, {"max_restarts": 9}, "host b: no memory"),
        (None, None, True, {}, "host b is gone: no sign"),
        (None, None, True, {"least": 2}, ["host b is gone: no sign", "going on from"]),
        (failed("noticed", distance=1), None, True, {"least": 2}, ["host b is gone: no sign", "going on from"]),
    ],
)
def test_a_run_ends_or_starts_again(own: Any, theirs: Any, gone: bool, nodes: dict[str, Any], said: Any) -> None:
    """Only failures are counted against `max_restarts`; a mistake of the user, and too few hosts, end it at once."""
    told: list[str] = []
    hosts = [member("b"), member("c")]
    leader = leader_of(hosts, told, **nodes)
    lost: Any = hosts[0].connection
    for each in hosts:
        each.running = False
    hosts[0].failure = theirs
    if gone:
        hosts[0].running, lost.coming = True, [GONE]
        leader.poll()
    began = time.monotonic()
    found = leader.next_start(own)
    if isinstance(said, list):
        assert isinstance(found, RankRange)
        assert not gone or time.monotonic() > began + 0.05, "its processes may still live"
        assert (found.restart, found.world_size) == (1, 2 if gone else 4)
        assert len(told) == 2
        assert told[1].startswith(said[1])
        assert told[1].endswith("with 1 host (c) and 2 processes" if gone else "with 2 hosts (b, c) and 4 processes")
        assert told[0] == (said[0] if gone else str(own))
        return
    assert str(found) == str(said)
    assert told == []
    code, text = (0, "") if found == 0 else (found.exit_code, str(found))  # type: ignore[union-attr]
    assert not hosts, "the connections are closed"
    assert gone or lost.sent[-1] == {"over": {"code": code, "text": text}}
    assert not lost.open


@pytest.mark.parametrize("on_trial", [True, False])
@pytest.mark.parametrize(
    ("own", "theirs", "other", "left_out"),
    [
        (None, failed(), None, True),
        (failed("noticed", distance=1), failed(), None, True),
        (failed(), failed(), None, False),
        (None, failed(), failed(), False),
        (failed(code=2), failed(code=2), failed(code=2), True),
        (failed(code=2), None, None, False),
    ],
)
def test_a_host_that_came_later_and_fails_each_time_is_left_out(
    own: Any, theirs: Any, other: Any, left_out: bool, on_trial: bool
) -> None:
    """The run of the others goes on, unless their own ranks fail too, other than by what the host was given."""
    told: list[str] = []
    new, old = member("new", on_trial=on_trial), member("old")
    leader = leader_of(hosts := [new, old], told, least=1)
    for each, failure in ((new, theirs), (old, other)):
        each.running, each.failure = False, failure
    found = leader.next_start(own)
    if not (left_out and on_trial):
        assert isinstance(found, WorkersFailed)
        assert not hosts
        return
    assert isinstance(found, RankRange)
    assert (hosts, found.world_size, leader._failures) == ([old], 2, 0)
    said = sent_to(new)[-1]["over"]
    assert said["code"] == theirs.exit_code
    assert told[0] == said["text"] == "host new is left out, as its ranks have failed in each start since it came (no memory)"


def test_a_host_that_came_later_is_on_trial_until_a_start_ends_well() -> None:
    (host,) = hosts = [member("new", processes=0)]
    leader = Leader(Nodes(most=3), 1, print, bool, members=hosts, address_of=lambda left: ("there", 1234))
    introduction: Message = {"name": "new", "processes": 1, "run_id": ""}
    host.greeting, leader._starts = None, 1
    leader._introduce(host, introduction)
    assert host.on_trial
    leader.first_start()
    host.running = False
    leader.next_start(failed("another rank"))
    assert not host.on_trial
    leader._introduce(host, {**introduction, "running": True})
    assert not host.on_trial, "it comes from a lost leader"


def test_failures_are_counted_over_all_starts() -> None:
    told: list[str] = []
    leader = Leader(Nodes(max_restarts=2), 1, told.append, bool)
    assert isinstance(leader.first_start(), RankRange)
    for number in (1, 2):
        again = leader.next_start(failed(f"error {number}"))
        assert isinstance(again, RankRange)
        assert again.restart == number
    assert leader.next_start(failed("error 3")) == failed("error 3")
    again = "all ranks start again from the newest checkpoint"
    assert told == [f"error {number}\nzeromesh: {again}: restart {number} of 2" for number in (1, 2)]


def recovering(message: str = "gone", step: int = 0, limit: int = 20, code: int = 1) -> WorkersFailed:
    return WorkersFailed(message=message, exit_code=code, limit=limit, step=step)


@pytest.mark.parametrize(
    ("steps", "limit", "code", "recoveries", "end"),
    [
        ((3, 5, 7, 7), 20, 1, 4, []),
        ((3, 5, 7), 2, 1, 2, ["no more recovery: its limit is 2"]),
        ((5, 5, 5), 20, 1, 2, ["no more recovery: the third after step 5"]),
        ((5, 5, 6, 5, 5, 5), 20, 1, 5, ["no more recovery: the third after step 5"]),
        ((5,), 0, 1, 0, []),
        ((5,), 20, 2, 0, []),
    ],
)
def test_a_run_recovers_within_its_limit(steps: tuple[int, ...], limit: int, code: int, recoveries: int, end: list[str]) -> None:
    """Not from what the user has to change, nor where nobody is left, nor from what comes back at the same step."""
    told: list[str] = []
    leader = Leader(ALONE, 1, told.append, bool)
    leader.first_start()
    found = [leader.next_start(recovering(step=step, limit=limit, code=code)) for step in steps]
    assert sum(isinstance(each, RankRange) for each in found) == recoveries
    assert all(isinstance(each, RankRange) for each in found[:recoveries])
    goes_on = "gone\nzeromesh: the run goes on, with new processes for the ranks that have ended"
    assert told == [goes_on] * recoveries + end
    if recoveries < len(steps):
        assert str(found[recoveries]) == "gone"


def test_the_limit_is_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(leading, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    leader = Leader(ALONE, 1, lambda line: None, bool)
    leader.first_start()
    for step, later, recovers in ((1, 0.0, True), (2, 1800.0, True), (3, 1801.0, True), (4, 1700.0, False)):
        clock[0] += later
        assert isinstance(leader.next_start(recovering(step=step, limit=2)), RankRange) is recovers


def test_recoveries_are_counted_beside_restarts() -> None:
    """Once the limit is used up, `max_restarts` counts, if there is any."""
    told: list[str] = []
    leader = Leader(Nodes(max_restarts=1), 1, told.append, bool)
    leader.first_start()
    found = [leader.next_start(recovering(step=step, limit=1)) for step in (1, 2, 3)]
    assert [isinstance(each, RankRange) for each in found] == [True, True, False]
    assert told[1] == "no more recovery: its limit is 1"
    assert told[2].endswith("restart 1 of 1")


def test_a_run_that_was_stopped_says_nothing_of_starts() -> None:
    told: list[str] = []
    stopped: list[bool] = []
    leader = Leader(Nodes(max_restarts=2), 1, told.append, lambda: bool(stopped))
    leader.first_start()
    stopped.append(True)
    assert leader.next_start(failed("was stopped")) == 0
    assert told == []


def listening(**nodes: Any) -> Leader:
    return Leader(Nodes(endpoint="127.0.0.1:0", **nodes), 1, print, bool)


def test_who_introduces_itself_wrongly_is_refused() -> None:
    leader = listening(most=3, rank=0, run_id="run", settings={"run.name": "run", "optimizer.lr": 0.1})
    hello = {"processes": 2, "run_id": "run", "name": "b", "rank": 1}
    for change, said in (
        ({"run_id": "other"}, "its --rdzv-id is 'other', not 'run'"),
        (
            {"settings": {"run.name": "run", "optimizer.lr": 0.2}},
            r"its optimizer\.lr is 0\.2, not 0\.1; give all hosts the same",
        ),
        ({"name": "\x1b[2J"}, "its host's name has characters that cannot be printed"),
        ({"rank": 3}, "'rank' is 3; allowed is an integer from 1 to 2"),
        ({"rank": 0}, "'rank' is 0; allowed"),
        ({"processes": 0}, "'processes' is 0; allowed"),
    ):
        with pytest.raises(MessageError, match=said):
            leader._take(Member(connection=Wire(), name=""), {**hello, **change})  # type: ignore[arg-type]
    # A script's launcher knows no settings, and another version may have other keys.
    knows = {2: {"settings": {"optimizer.lr": 0.1, "zero.new": 3}}, 1: {}}
    for number, refused in ((2, None), (1, None), (2, "--node-rank 2 is there twice")):
        each = Member(connection=Wire(), name="")  # type: ignore[arg-type]
        leader._members.append(each)
        if refused:
            with pytest.raises(MessageError, match=refused):
                leader._take(each, {**hello, "rank": number})
        else:
            leader._take(each, {**hello, **knows[number], "rank": number})
            assert (each.processes, each.rank, each.name) == (2, number, "b")
    leader.close()
    started = member("c", processes=0)
    leader_of([member("b")])._take(started, {})
    assert (started.processes, sent_to(started)) == (2, [{}]), "a host that was started gets its greeting"


def test_hosts_are_waited_for_as_long_as_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are enough, others may come for a moment."""
    monkeypatch.setattr(leading, "_JOIN_SECONDS", 0.0)
    leader = listening(least=2, most=3)
    found = leader.first_start()
    said = "of the hosts (--nnodes), 1 came to 127.0.0.1:0 in time, and at least 2 are needed"
    assert found == WorkersFailed(message=said, exit_code=1)
    monkeypatch.undo()
    leader, began = listening(least=1, most=2, last_call_seconds=0.1), time.monotonic()
    assert isinstance(leader.first_start(), RankRange)
    assert 0.1 <= time.monotonic() - began < 5
    leader.close()
    leader = listening(least=1, most=2, last_call_seconds=60.0)
    leader._members.append(member("b"))
    start = leader.first_start()
    assert isinstance(start, RankRange)
    assert start.world_size == 3, "all are there, so nobody is waited for"
    leader.close()


def test_a_run_does_not_go_on_with_fewer_hosts_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start as before it, until another host comes, and it says so."""
    told: list[str] = []
    leader = Leader(Nodes(endpoint="127.0.0.1:0", least=3, most=3, max_restarts=1), 1, told.append, bool)
    leader._members += [member("b"), member("c")]
    assert isinstance(leader.first_start(), RankRange)
    lost = leader._members.pop()
    for each in leader._members:
        each.running = False
    waited: list[bool] = []
    monkeypatch.setattr(leader, "_wait", lambda: (waited.append(leader.waits), leader._members.append(lost)))
    start = leader.next_start(failed())
    assert isinstance(start, RankRange)
    assert start.world_size == 5
    assert told[-1] == "waiting for 1 more host"
    assert waited == [True]
    assert not leader.waits
    (other, _) = leader._members
    assert {"waits": True} in sent_to(other), "its launcher holds no stop either"
    leader.close()


def following(*coming: list[Message] | Exception, attached: bool = True) -> tuple[Follower, Wire]:
    wire: Any = Wire([{"zeromesh": 1, "drawn": "theirs"}], *coming)
    follower = Follower(ALONE, 4, print, bool, lambda: wire)
    return follower, wire


START = {"first": 2, "processes": 2, "world_size": 4, "master_port": 1, "restart": 0, "hosts": 2}
START |= {"master_address": "a", "run_id": ""}


@pytest.mark.parametrize(("own", "theirs", "ranks"), [(1, 0, 3), (0, 1, 3), (1, 1, 2), (2, 0, 4)])
def test_ranks_that_compute_wrongly_are_left_out(own: int, theirs: int, ranks: int) -> None:
    """Each host has two; the last one of a host is not."""
    hosts = [member("b")]
    leader = Leader(Nodes(most=2, max_restarts=1), 2, lambda text: None, lambda: False, members=hosts)
    hosts[0].failure = replace(failed("wrong"), left_out=theirs) if theirs else failed("noticed", distance=1)
    found = leader.next_start(replace(failed("wrong"), left_out=own) if own else failed("noticed", distance=1))
    leader.close()
    assert isinstance(found, RankRange)
    assert found.world_size == ranks


def test_a_follower_does_what_its_leader_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROMESH_SENT", "")
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    sent = [{"variables": {"ZEROMESH_SENT": "yes"}}, {"signal": 10}, {"start": START}]
    asked = {"stop": 5, "reason": "rank 0", "after_step": True}
    follower, wire = following(sent, [asked], [], [{"waits": True}], [{"start": START}], [], [{"start": START}, asked])
    assert follower.first_start() == RankRange(**START)  # type: ignore[arg-type]
    hello = {"processes": 4, "run_id": "", "rank": 0, "name": "", "drawn": "word", "settings": {}}
    assert wire.sent[0] | {"name": ""} == hello
    assert os.environ["ZEROMESH_SENT"] == "yes"
    assert killed == [(os.getpid(), 10)]
    assert follower.poll() == Stop(5, "rank 0", after_step=True)
    long = WorkersFailed(message="no memory", exit_code=1000, distance=1, ranks=(3,), limit=20, step=7)
    waited: list[bool] = []
    monkeypatch.setattr(follower, "_stopped", lambda: waited.append(follower.waits) is not None)
    assert isinstance(follower.next_start(long), RankRange)
    assert waited == [False, False, True]
    assert not follower.waits
    counts = {"limit": 20, "step": 7, "left_out": 0, "leaves": False}
    assert wire.sent[-1] == {"rest": 255, "of": 0, "text": "rank 3: no memory", "noticed": True, **counts}
    assert follower.poll() is None, "a stop is over with the start after it"
    assert isinstance(follower.next_start(long), RankRange)
    assert follower.poll() == Stop(5, "rank 0", after_step=True), "a stop may come together with its start"
    follower.close()
    assert not wire.open


@pytest.mark.parametrize(
    ("own", "over", "found"),
    [
        (failed("the cause"), {"code": 1, "text": "theirs"}, failed("the cause")),
        (failed("noticed", distance=1), {"code": 3, "text": "theirs"}, failed("theirs", 3, 1)),
        (failed("the cause"), {"code": 0}, 0),
        (None, {"code": 3, "text": "theirs"}, failed("theirs", 3, 1)),
    ],
)
def test_the_end_of_a_run_is_the_cause_that_is_nearest(own: Any, over: Any, found: Any) -> None:
    follower, wire = following([{"start": START}], [], [{"over": over}])
    follower.first_start()
    assert follower.next_start(own) == found
    assert follower.poll() == Stop(0), "one that `zeromesh launch` has started has no time to end"
    assert wire.sent[-1]["rest"] == (own.exit_code if own else 0)
    assert not wire.open


def test_ranks_of_a_leader_that_is_gone_are_killed_at_once() -> None:
    follower, _ = following([{"start": START}], GONE)
    follower.first_start()
    assert follower.poll() == Stop(0)
    found = follower.next_start(None)
    assert isinstance(found, WorkersFailed)
    assert "cannot be reached from here (no sign)" in found.message
    nobody = Follower(ALONE, 1, print, bool, lambda: (_ for _ in ()).throw(OSError(errno.EPIPE, "Broken pipe")))
    assert "cannot be reached from here (Broken pipe)" in str(nobody.first_start())


@pytest.mark.parametrize(
    ("most", "rank", "here", "busy", "leads"),
    [
        (1, None, False, False, True),
        (2, 0, False, False, True),
        (2, 1, True, False, False),
        (2, None, True, False, True),
        (2, None, False, False, False),
        (2, None, True, errno.EADDRINUSE, False),
        (2, None, True, errno.EACCES, None),
        (2, 0, True, errno.EADDRINUSE, None),
    ],
)
def test_who_leads(monkeypatch: pytest.MonkeyPatch, most: int, rank: Any, here: bool, busy: int, leads: Any) -> None:
    """The only launcher, number 0, or without numbers the first at the endpoint; None: it cannot, and says so."""

    def listen(name: str, port: int) -> Any:
        if busy:
            raise ConfigError("taken") from OSError(busy, "")
        return SimpleNamespace(setblocking=lambda on: None)

    monkeypatch.setattr(leading, "listen", listen)
    monkeypatch.setattr(rendezvous, "is_this_host", lambda name: here)
    monkeypatch.setattr(rendezvous, "run_starts", lambda arguments, others, *_, **__: others)
    how = {"processes": 1, "nodes": Nodes(least=most, most=most, rank=rank)}
    if leads is None:
        with pytest.raises(ConfigError, match="taken"):
            launch_workers([], **how)  # type: ignore[arg-type]
    else:
        assert isinstance(launch_workers([], **how), Leader) is leads  # type: ignore[arg-type]


class Others:
    """The other launchers of a run, which say what comes next."""

    processes, notify, waits = 0, print, False

    def __init__(self, *starts: Any, stop: Stop | None = None) -> None:
        self.starts, self.stop, self.ended = list(starts), stop, list[Any]()

    def first_start(self) -> Any:
        return self.starts.pop(0)

    def next_start(self, failure: Any) -> Any:
        self.ended.append(failure)
        return self.starts.pop(0)

    def poll(self) -> Stop | None:
        return self.stop

    def close(self) -> None:
        self.ended.append("closed")


def test_each_start_has_a_nursery_that_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def nursery(modules: Sequence[str], variables: Any, notify: Any) -> Any:
        made.append(SimpleNamespace(modules=modules, lost=False, close=lambda: made.append("closed")))
        return made[-1]

    def run(arguments: Any, start: Any, others: Any, requests: Any, nursery: Any) -> WorkersFailed:
        nursery.lost = start.restart == 1
        return failed(f"end {start.restart}")

    monkeypatch.setattr(rendezvous, "Nursery", nursery)
    monkeypatch.setattr(rendezvous, "_run", run)
    starts = [RankRange(**{**START, "restart": number}) for number in range(3)]  # type: ignore[arg-type]
    others: Any = Others(*starts, failed())
    assert run_starts([], others, StopSignals(), modules=("torch",)) == failed()
    assert others.ended == [*(failed(f"end {number}") for number in range(3)), "closed"]
    assert [each if each == "closed" else each.modules for each in made] == [("torch",), ("torch",), "closed"]
    requests, others = StopSignals(), Others(RankRange(**{**START, "processes": 0}), 0)  # type: ignore[arg-type]
    made.clear()
    assert run_starts([], others, requests, modules=("torch",)) == 0
    assert made[0].modules == (), "a launcher without ranks imports nothing"
    requests.receive(signal.SIGTERM, None)
    assert run_starts([], Others(starts[0]), requests) == 143  # type: ignore[arg-type]


def test_a_stop_while_modules_are_imported_ends_the_start() -> None:
    run: Callable[..., Any] = rendezvous._run
    waited: list[float] = []
    importing = SimpleNamespace(ready=False, receive=waited.append)
    requests = StopSignals()
    not_begun = failed("others stopped it while it imported", distance=1)
    assert run([], None, Others(stop=Stop(30)), requests, importing) == not_begun
    hosts = [member("b")]
    leader = leader_of(hosts, most=3)
    hosts.append(member("c"))
    hosts[-1].numbered = hosts[0].running = False
    assert leader.poll() is not None
    assert isinstance(leader.next_start(not_begun), RankRange), "a host came, and nothing has ended well"
    requests.receive(signal.SIGTERM, None)
    assert run([], None, Others(), requests, importing) == failed("stopped by SIGTERM while importing", 143)
    assert waited == []
