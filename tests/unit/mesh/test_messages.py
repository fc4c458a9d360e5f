"""Messages between launchers: whatever comes is taken, or refused by name."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.mesh.test_hostfile import Printed
from zeromesh.environment import SECRET, RankRange
from zeromesh.errors import ConfigError
from zeromesh.launch import messages
from zeromesh.launch.leader import ALONE, Leader, Member, Nodes, Stop, WorkersFailed
from zeromesh.launch.messages import LauncherConnection, MessageError
from zeromesh.launch.rendezvous import Follower, launch_workers
from zeromesh.launch.ssh import BEGIN, Host, HostStream, LaunchPlan, supervise

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 1 << 63])
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "\0", "A=B", "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["beat", "end", "text", "noticed", "echo", "signal", "variables", "start", "rest", "x"])
MESSAGES = st.dictionaries(FIELDS, VALUES, max_size=4)


def refusal(read: Callable[[], object]) -> str:
    """Why something is refused; empty when it is not. Any other error fails the test."""
    try:
        read()
    except MessageError as error:
        return str(error)
    return ""


@settings(max_examples=300, deadline=None)
@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_bytes_are_a_message_or_refused(data: bytes) -> None:
    assert refusal(lambda: messages.parsed(data)).isprintable()
    stream = HostStream(Printed(), True, "a")
    assert stream.feed(BEGIN + b"0 " + data + b"\nand more\n") or stream.last == "and more"


@pytest.mark.parametrize("data", [b"[" * 100_000, b"9" * 5000, b"null", b""], ids=["deep", "long", "null", "empty"])
def test_what_json_itself_refuses_is_refused_by_name(data: bytes) -> None:
    assert refusal(lambda: messages.parsed(data)).startswith("a message is not ")
    assert HostStream(Printed(), True, "a").feed(BEGIN + b"0 " + data + b"\n") == []


@settings(max_examples=300, deadline=None)
@given(MESSAGES)
def test_every_field_is_taken_or_refused(message: dict[str, Any]) -> None:
    readers = [
        lambda: messages.field(message, "rest", messages.MISSING, most=255),
        lambda: messages.field(message, "text", ""),
        lambda: messages.field(message, "noticed", False),
        lambda: os.environ.copy() | messages.variables(message),
        lambda: messages.rank_range(message),
    ]
    for read in readers:
        said = refusal(read)
        assert said.isprintable()
        assert len(said) < 300


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"rest": "0"}, "'rest' is '0'; allowed is an integer from 0 to 255"),
        ({"rest": 10**400}, "'rest' is 1000000"),
        ({"rest": 1e400}, "'rest' is inf"),
        ({"rest": True}, "'rest' is True"),
        ({"rest": None}, "'rest' is None; allowed is an integer from 0 to 255"),
        ({"rest": 1, "text": ["x"]}, "'text' is ['x']; allowed is a text"),
        ({"rest": 1, "noticed": 2}, "'noticed' is 2; allowed is true or false"),
    ],
)
def test_a_host_that_sends_nonsense_is_refused(said: dict[str, Any], named: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        member = Member(connection=LauncherConnection(ours, ours, "", serves=True), name="b", processes=1, running=True)
        assert named in refusal(lambda: Leader(ALONE, 1, print, bool)._take(member, said))


def test_a_beat_that_is_no_number_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leads = LauncherConnection(ours, ours, "", serves=True)
        follows = LauncherConnection(theirs, theirs, "", serves=False)
        follows.receive()
        follows.send({"beat": None, "drawn": follows.drawn})
        assert refusal(leads.receive).startswith("'beat' is None")


def test_a_host_whose_lines_are_not_its_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "said").write_bytes(BEGIN + b"0 {}\n")
    plan = LaunchPlan(
        hosts=(Host(name="b", slots=1, address="b"),),
        command=("cat", str(tmp_path / "said")),
        ssh=("sh", "-c", "eval $1"),
        directory="/",
        python_path=None,
        variables={},
        silence_seconds=2.0,
        port=None,
        least=1,
        max_restarts=0,
        check=lambda hosts: None,
    )
    failure = supervise(plan, lambda line: None)
    assert str(failure).startswith("host b: what it has sent makes no sense: a message has not the digest")


def test_a_start_has_numbers_in_their_ranges() -> None:
    start = {"world_size": 8, "first": 4, "processes": 2, "master_port": 29_500, "restart": 3, "hosts": 2}
    ranges = {"world_size": (5, 1 << 32), "first": (0, 7), "processes": (1, 65_536), "master_port": (1, 65_535)}
    most_of_all = (1 << 53) - 1
    for name, (least, most) in {**ranges, "restart": (0, most_of_all), "hosts": (1, most_of_all)}.items():
        for value in (least - 1, least, most, most + 1):
            said = refusal(lambda changed={**start, name: value}: messages.rank_range({"start": changed}))  # type: ignore[misc]
            assert bool(said) == (not least <= value <= most), (name, value)
    found = messages.rank_range({"start": {**start, "master_address": "node0", "run_id": "run"}})
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID"
    more = "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE"
    values = "5 8 1 2 node0 29500 run 3 False"
    assert found.variables(1) == dict(zip(f"{names} {more}".split(), values.split(), strict=True))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"signal": 1e9}, "'signal' is 1000000000.0"),
        ({"signal": 70}, "'signal' is 70; allowed is an integer from 1 to 64"),
        ({"stop": "now"}, "'stop' is 'now'"),
        ({"variables": {"A=B": ""}}, "'variables' has 'A=B', which cannot be set; its value is not shown"),
        ({"start": {"world_size": 0}}, "'world_size' is 0"),
    ],
)
def test_a_host_refuses_nonsense_of_the_launching_side(said: dict[str, Any], named: str) -> None:
    assert named in refusal(lambda: Follower(ALONE, 1, print, bool, lambda: pytest.fail("no leader is asked"))._take(said))


@pytest.mark.parametrize("said", [{"variables": {"LD_PRELOAD": "evil.so"}}, {"signal": 9}])
def test_a_host_takes_variables_and_signals_from_the_command_that_has_started_it_alone(said: dict[str, Any]) -> None:
    before = dict(os.environ)
    Follower(ALONE, 1, print, bool)._take(said)
    assert dict(os.environ) == before


def joined(port: int, secret: str, hello: dict[str, Any] | bytes) -> list[bytes]:
    """What a launcher that leads answers to a hello, before it hangs up."""
    until = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)
    with connection:
        line = LauncherConnection(connection, connection, secret, serves=False)
        found: list[bytes] = []
        said = False
        while time.monotonic() < until:
            lines = line.read()
            if lines is None:
                return found
            found += lines
            if found and not said:
                said = True
                if isinstance(hello, bytes):
                    connection.sendall(hello)
                else:
                    drawn = json.loads(found[0].partition(b" ")[2])["drawn"]
                    line._numbers[True] += 1
                    line.agree(drawn, hello["drawn"])
                    line.send(hello)
            time.sleep(0.01)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def leading(nodes: Nodes, notify: Callable[[str], object] = print) -> Iterator[tuple[Leader, threading.Thread]]:
    stop = threading.Event()
    leader = Leader(nodes, 1, notify, stop.is_set)
    waiting = threading.Thread(target=leader.first_start)
    waiting.start()
    try:
        yield leader, waiting
    finally:
        stop.set()
        waiting.join()
        leader.close()


def two_hosts(**more: Any) -> Nodes:
    return Nodes(least=2, most=2, endpoint=f"127.0.0.1:{free_port()}", **more)


def test_who_does_not_know_the_secret_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "the secret of this run")
    told: list[str] = []
    nodes = two_hosts()
    port = nodes.where[1]
    hello = {"processes": 1, "run_id": "", "name": "stranger", "drawn": "00", "rank": 0}
    with leading(nodes, told.append) as (_, waiting):
        for attempt in (b"\x80\x04pickle\n", b"[" * 50_000 + b"\n", b"{}\n", b"x {}\n", os.urandom(50) + b"\n"):
            joined(port, "", attempt)
        joined(port, "a guess", hello)
        joined(port, "the secret of this run", hello | {"processes": 10**30})
        joined(port, "the secret of this run", hello | {"name": "\x1b[2J"})
        assert waiting.is_alive(), "a stranger was taken for the second host"
    assert len(told) == 1, "what one address sends is said once"
    assert told[0].startswith(f"127.0.0.1, which came to {nodes.endpoint}, is refused: ")


def test_no_line_of_a_connection_can_be_sent_again() -> None:
    """Neither at once, nor after another one: the digest covers the line's number."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leads = LauncherConnection(ours, ours, "secret", serves=True)
        follows = LauncherConnection(theirs, theirs, "secret", serves=False)
        assert follows.receive() == [{"zeromesh": 1, "drawn": leads.drawn}]
        follows.send({"drawn": follows.drawn})
        follows.send({"rest": 0})
        first, second = leads.read() or ()
        assert [leads.verified_message(line) for line in (first, second)] == [{"drawn": follows.drawn}, {"rest": 0}]
        for line in (second, first):
            with pytest.raises(MessageError, match="has not the digest"):
                leads.verified_message(line)


def test_hosts_with_different_secrets_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = two_hosts(rank=0)
    with leading(nodes):
        monkeypatch.setenv(SECRET, "another")
        with pytest.raises(ConfigError, match="ZEROMESH_SECRET on every host"):
            launch_workers(["-c", "pass"], processes=1, nodes=replace(nodes, rank=1), modules=())


@pytest.mark.parametrize("in_order", [True, False])
def test_a_leader_that_is_gone_is_named_not_ranks_that_noticed(in_order: bool) -> None:
    """Gone without a word, it counts this host as lost, and starts the others again, no earlier than ranks are killed here."""
    nodes = two_hosts(rank=0)  # With numbers, no other host can lead.
    with leading(nodes) as (leader, waiting):
        follower = Follower(replace(nodes, rank=1), 1, print, bool)
        assert isinstance(follower.first_start(), RankRange)
        waiting.join()
        assert follower.poll() is None
        if in_order:
            leader.close()
        else:
            leader._members.pop().connection.close()
        assert follower.poll() == Stop(300 if in_order else 0)
        if in_order:
            noticed = WorkersFailed(ranks=(1,), message="rank 0 is gone", exit_code=1, distance=1)
            found = follower.next_start(noticed)
            assert isinstance(found, WorkersFailed)
            assert str(found) == f"the launcher at {nodes.endpoint} has ended"


def test_who_has_not_introduced_itself_is_told_nothing() -> None:
    """What it has drawn is not known yet, so it would take a message for one of somebody else."""
    nodes = Nodes(least=1, most=3, endpoint=f"127.0.0.1:{free_port()}")
    leader = Leader(nodes, 1, lambda line: None, bool)
    assert isinstance(leader.first_start(), RankRange)
    with socket.create_connection(nodes.where) as stranger:
        joining = threading.Thread(target=Follower(nodes, 1, print, bool).first_start)
        joining.start()
        while leader.poll() is None:
            time.sleep(0.01)
        assert stranger.recv(1 << 16).count(b"\n") == 1
        leader.close()
        joining.join()


@pytest.mark.parametrize("rank", [None, 1])
def test_a_failure_on_another_host_counts_as_one(rank: int | None) -> None:
    """It is not taken for a host that has come, after which all would start again without end."""
    nodes = two_hosts(rank=rank and 0)
    found: list[object] = []
    told: list[str] = []

    def lead() -> None:
        leader = Leader(nodes, 1, told.append, lambda: False)
        leader.first_start()
        while not leader.poll():
            time.sleep(0.01)
        found.append(leader.next_start(None))

    leading = threading.Thread(target=lead)
    leading.start()
    follower = Follower(replace(nodes, rank=rank), 1, print, lambda: False)
    assert isinstance(follower.first_start(), RankRange)
    failure = WorkersFailed(ranks=(1,), message="out of memory", exit_code=1)
    assert follower.next_start(failure) is failure
    leading.join()
    assert str(found[0]) == f"host {socket.gethostname()}: rank 1: out of memory"
    assert not told
