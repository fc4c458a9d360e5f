"""`zeromesh launch` without hosts: hostfiles, the commands that it would start, messages in output, interfaces."""

import json
import os
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError
from zeromesh.launch import ssh
from zeromesh.launch.ssh import BEGIN, Host, HostStream, LaunchPlan, Output, read_hosts
from zeromesh.mesh import network_interfaces, run_store
from zeromesh.mesh.run_store import LocalRowStore
from zeromesh.trainer.cli.main import _parse, main

NAMES = st.text("ab7.-_", max_size=5).map("h{}".format)
ENDPOINT = ("--rdzv-endpoint", "a:1")
SPACE = st.sampled_from([" ", "\t", "   "])


@given(st.lists(st.tuples(NAMES, st.integers(1, 1024), SPACE), min_size=1, max_size=5, unique_by=lambda row: row[0]))
def test_a_hostfile_is_read_as_it_is_written(rows: list[tuple[str, int, str]]) -> None:
    text = "# all of them\n\n" + "".join(f"{gap}{name}{gap}slots={slots}{gap}# {name}\n" for name, slots, gap in rows)
    expected = tuple(Host(name=name, slots=slots, address=name) for name, slots, _ in rows)
    assert read_hosts(text, where="hosts") == expected


def test_a_user_is_for_ssh_and_an_address_for_the_other_hosts() -> None:
    one, two = read_hosts("me@gpu1 slots=2\ngpu2 address=10.0.0.2 slots=3", where="hosts")
    assert (one.name, one.address) == ("me@gpu1", "gpu1")
    assert (two.name, two.address, two.slots) == ("gpu2", "10.0.0.2", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts: no host in it"),
        ("# nothing", "no host in it"),
        *(
            (text, f"{text.strip()!r}; allowed is `NAME slots=N [address=NAME]`, N from 1 to 1024; names have letters")
            for text in (
                *("a slots=0", "a slots=2000", "a slots=two", "a slots=-1", "a slots=", "a", "slots=2"),
                *("a slots=1 slots=2", "a slots=1 max_slots=2", "-oProxyCommand=x slots=1", "-v slots=1"),
                *("a;b slots=1", "a slots=1 address=$(x)", "a address=b slots=1 address=c"),
            )
        ),
        ("a slots=1\n\nb slots=0", "line 3: 'b slots=0'; allowed"),
        ("a slots=1\nb slots=1\na slots=2", "line 3: host 'a' is on line 1 already"),
    ],
)
def test_a_mistake_in_a_hostfile_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hosts(text, where="hosts")
    assert message in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_hosts("a\nb slots=x\nc slots=1", where="hosts")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["line 1", "line 2"]


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


PIECES = st.one_of(st.binary(max_size=20), st.sampled_from([BEGIN, b"\n", BEGIN[:4], BEGIN + b"{no json", BEGIN + b"[]\n"]))


class Printed(Output):
    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def put(self, number: int, text: str) -> None:
        self.lines.append((number, text))


@given(st.lists(st.one_of(PIECES, st.integers(0, 99)), max_size=8), st.lists(st.integers(1, 9), max_size=40))
def test_messages_are_found_however_the_output_is_cut(parts: list[bytes | int], cuts: list[int]) -> None:
    """What printed bytes look like matters only where they hold an open beginning of a message, which takes what follows."""
    data = b"".join(BEGIN + b"0 " + line({"beat": part}) if isinstance(part, int) else part for part in parts)
    outputs = Printed(), Printed()
    whole, pieces = (HostStream(output, True, "a") for output in outputs)
    expected, messages, at = whole.feed(data), [], 0
    for size in [*cuts, len(data)]:
        messages += pieces.feed(data[at : at + size])
        at += size
    whole.flush()
    pieces.flush()
    assert (outputs[1].lines, messages) == (outputs[0].lines, expected)
    if not any(isinstance(part, bytes) and b"\x1e" in part for part in parts):
        assert messages == [b"0 " + line({"beat": part})[:-1] for part in parts if isinstance(part, int)]
        printed = b"".join(part for part in parts if isinstance(part, bytes)).decode(errors="replace")
        lines = printed.removesuffix("\n").split("\n") if printed else []
        assert [text for _, text in outputs[0].lines] == ["[a] " + each.rstrip("\r") for each in lines]


def test_a_line_without_end_is_printed_before_it_is_too_long() -> None:
    """What may be a message is waited for longer, as a message may be longer."""
    for begun, is_stdout, most in ((b"", True, 1 << 16), (b"", False, 1 << 16), (BEGIN, True, 1 << 20)):
        printed = Printed()
        stream = HostStream(printed, is_stdout, "a")
        stream.feed(begun + b"x" * (most - len(begun)))
        assert printed.lines == []
        stream.feed(b"x")
        assert [number for number, _ in printed.lines] == [1 if is_stdout else 2]
        stream.feed(b"\n \nend\r\n")
        assert [text for _, text in printed.lines[1:]] == ["[a] ", "[a]  ", "[a] end"]
        stream.feed(b"  \n")
        assert stream.last == "end", "the last line that says something"


@pytest.mark.parametrize(("python_path", "port"), [(None, 1234), ("/my code", None)])
def test_a_host_gets_its_command_and_the_place_where_ranks_meet(python_path: str | None, port: int | None) -> None:
    checked: list[object] = []
    hosts = (Host(name="me@b", slots=1, address="10.0.0.2"), Host(name="c", slots=2, address="c"))
    plan = LaunchPlan(
        hosts=hosts,
        command=("python", "-m", "it's"),
        ssh=("ssh", "-p", "2"),
        directory="/a b",
        python_path=python_path,
        variables={},
        silence_seconds=2.0,
        port=port,
        least=1,
        max_restarts=0,
        check=checked.append,
    )
    *begin, command = plan.arguments(hosts[0])
    assert begin == ["ssh", "-p", "2", "me@b"]
    path = ["env", f"PYTHONPATH={python_path}"] if python_path else []
    assert shlex.split(command) == ["cd", "/a b", "&&", "exec", *path, "python", "-m", "it's"]
    address, found = plan.meeting_address(hosts)
    assert address == "10.0.0.2"
    assert found == port or (port is None and found in ssh.PORTS)
    assert checked == [hosts]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("run: {name: here}\n")
    (tmp_path / "hosts").write_text("gpu1 slots=4\nme@gpu2 slots=2 address=10.0.0.2\n")
    return tmp_path


def launch(*words: str) -> int:
    return main(["launch", "--hostfile", "hosts", "run.yaml", *words])


def test_what_a_dry_run_says(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    given = ("--port", "23456", "--env", "HF_TOKEN", "--env", "MORE=quiet", "run.seed=3", "run.name=a-b")
    assert launch("--dry-run", "--ssh", "ssh -p 2222", *given) == 0
    said = capsys.readouterr().out
    assert not [secret for secret in ("hush", "quiet") if secret in said]
    *commands, last = said.splitlines()
    assert last.endswith(": HF_TOKEN, MORE, OMP_NUM_THREADS")
    begin = ["ssh", "-p", "2222"]
    assert [shlex.split(command)[:4] for command in commands] == [[*begin, "gpu1"], [*begin, "me@gpu2"]]
    for command, ranks in zip(commands, ("0 to 3", "4 to 5"), strict=True):
        assert command.endswith(f"    # ranks {ranks} of 6, which meet at gpu1:23456")
        remote = shlex.split(command)[4]
        assert remote.startswith(f"cd {folder} && exec ")
        words = shlex.split(remote)
        options = _parse(words[words.index("train") :])
        assert (options.config, options.overrides) == ("run.yaml", ["run.seed=3", "run.name=a-b"])
        assert options.attached == 15.0


def test_numbers_of_hosts() -> None:
    numbers = ("2", "1:2", "2:")
    assert [_parse(["train", "run.yaml", "--nnodes", each]).nnodes for each in numbers] == [(2, 2), (1, 2), (2, 2)]


def test_ssh_asks_for_no_password(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--dry-run") == 0
    assert capsys.readouterr().out.startswith("ssh -o BatchMode=yes ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.shard=4"], "the run has 6 ranks"),
        (["zero.stage=5"], "zero.stage: got 5"),
        (["--env", "NOT_THERE_AT_ALL"], "--env NOT_THERE_AT_ALL: the variable is not set here"),
        (["--env", "a-b=1"], "--env 'a-b' is no variable's name"),
        (["--min-hosts", "3"], "--min-hosts 3: hosts has 2"),
        (["--ssh", ""], "--ssh is empty"),
        (["--ssh", "'"], "cannot be read"),
        (["--hostfile", "gone"], "--hostfile 'gone' cannot be read: No such file"),
        (["--ssh", "./no-such-program"], "'./no-such-program' cannot be started (No such file or directory)"),
        (["train", "--node-rank", "2", "--nnodes", "2", *ENDPOINT], "--node-rank 2 is for --nnodes N with N above"),
        (["train", "--node-rank", "0", "--nnodes", "1:2", *ENDPOINT], "not MIN:MAX"),
        (["train", "--node-rank", "0", "--nnodes", "2"], "--rdzv-endpoint"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    train = words[0] == "train"
    assert (main(["train", "run.yaml", *words[1:]]) if train else launch(*words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("loopback", [False, True])
@pytest.mark.parametrize("addresses", [["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.1", "10.0.0.2"]])
def test_an_interface_leads_to_others(monkeypatch: pytest.MonkeyPatch, addresses: list[str], loopback: bool) -> None:
    """Ranks have an address each; a master's own name may lead to its loopback."""
    monkeypatch.setattr(network_interfaces, "by_address", lambda: {each: f"to {each}" for each in addresses})
    stored: dict[str, str] = {}
    store = SimpleNamespace(set=stored.__setitem__, get=lambda key: stored[key].encode())
    for rank, mine in reversed(list(enumerate(addresses))):
        own = "127.0.0.1" if mine == addresses[0] and loopback else mine
        routes = {"master": own} | dict.fromkeys(("127.0.0.1", *addresses), mine)
        monkeypatch.setattr(network_interfaces, "address_towards", routes.__getitem__)
        stored.update({f"route/{lower}": "127.0.0.1" for lower in range(rank)})
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(addresses)), "MASTER_ADDR": "master", "MASTER_PORT": "1"}
        assert network_interfaces.interface_for(store, read_environment(place)) == f"to {mine}"


def test_this_host_has_a_loopback() -> None:
    assert network_interfaces.address_towards("127.0.0.1") == "127.0.0.1"
    assert network_interfaces.by_address()["127.0.0.1"] == "lo"
    assert "203.0.113.1" not in network_interfaces.by_address()
    assert network_interfaces.address_towards("no host has this name") is None


HOST = {"10.0.0.5": "eth0", "fe80::1": "eth0", "127.0.0.1": "lo", "::1": "lo"}


@pytest.mark.parametrize(
    ("name", "leads_to", "host", "found"),
    [
        ("gpu1", ["10.0.0.5"], HOST, "10.0.0.5"),
        ("gpu1", ["127.0.1.1"], HOST, "10.0.0.5"),
        ("service", ["172.20.0.9"], HOST, "10.0.0.5"),
        ("gpu1", ["127.0.1.1", "10.0.0.5"], HOST | {"10.1.0.5": "ib0"}, "10.0.0.5"),
        ("localhost", ["127.0.0.1"], HOST, "127.0.0.1"),
        ("127.0.0.1", ["127.0.0.1"], HOST, "127.0.0.1"),
    ],
)
def test_the_address_to_listen_at_is_the_one_that_others_know(
    monkeypatch: pytest.MonkeyPatch, name: str, leads_to: list[str], host: dict[str, str], found: str
) -> None:
    monkeypatch.setattr(network_interfaces, "by_address", lambda: host)
    monkeypatch.setattr(network_interfaces, "addresses_of", lambda name: leads_to)
    assert network_interfaces.address_for_others(name) == found


def test_an_address_that_cannot_be_told_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interfaces, "by_address", lambda: HOST | {"10.1.0.5": "ib0"})
    monkeypatch.setattr(network_interfaces, "addresses_of", lambda name: ["127.0.1.1"])
    with pytest.raises(ConfigError, match=r"'gpu1'.* leads to 127.0.1.1 here.*: 10.0.0.5 \(eth0\), 10.1.0.5 \(ib0\)"):
        network_interfaces.address_for_others("gpu1")


def test_a_host_knows_itself_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (socket.AF_INET, socket.AF_INET6)
    listed = {
        "eth0": [(kinds[0], "10.0.0.5"), (kinds[1], "fe80::1%eth0"), (socket.AF_PACKET, "aa:bb")],
        "eth0:1": [(kinds[0], "10.0.0.6")],
        "lo": [(kinds[0], "127.0.0.1")],
        "down": [],
    }
    found = {name: [SimpleNamespace(family=a, address=b) for a, b in rows] for name, rows in listed.items()}
    monkeypatch.setattr(network_interfaces.psutil, "net_if_addrs", lambda: found)
    assert network_interfaces.by_address() == {"10.0.0.5": "eth0", "fe80::1": "eth0", "10.0.0.6": "eth0", "127.0.0.1": "lo"}
    names = {"me": ["10.9.9.9", "10.0.0.6"], "old": ["127.0.1.1"], "other": ["10.9.9.9"], "unknown": []}
    monkeypatch.setattr(network_interfaces, "addresses_of", names.__getitem__)
    assert [network_interfaces.is_this_host(name) for name in names] == [True, True, False, False]
    loops = ("127.0.0.1", "127.9.9.9", "::1", "LocalHost", "10.0.0.5", "localhosts", "::")
    assert [network_interfaces.is_loopback(each) for each in loops] == [True] * 4 + [False] * 3


def test_other_hosts_are_reached_at_the_only_address_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interfaces, "by_address", lambda: HOST | {"2001:db8::5": "eth0"})
    for there, found in ((["172.20.0.9"], "10.0.0.5"), (["2001:db8::9"], "2001:db8::5"), ([], "10.0.0.5")):
        monkeypatch.setattr(network_interfaces, "addresses_of", lambda name, there=there: there)
        assert network_interfaces.address_for_others("gpu1") == found
    assert network_interfaces.address_for_others("localhost") == "127.0.0.1"


def test_what_listens_for_several_hosts_is_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the store of rank 0 and the launcher that the others find do."""
    monkeypatch.setattr(network_interfaces, "address_for_others", lambda name: "127.0.0.2")
    with network_interfaces.listen("gpu1", 0) as listener:
        port = listener.getsockname()[1]
        assert listener.getsockname()[0] == "127.0.0.2"
        with pytest.raises(ConfigError, match=f"gpu1:{port}: this host cannot listen there"):
            network_interfaces.listen("gpu1", port)


def test_rows_of_ranks_that_cannot_map_each_others_memory_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("rows")
    first, second = LocalRowStore(descriptor, 0, 2), LocalRowStore(descriptor, 1, 2)
    for number in range(100):
        first.set("zeromesh/board/1", f"row {number}")
        second.set("zeromesh/board/1", "another mesh")
    assert first.get("zeromesh/board/1") == b"row 99"
    assert second.get("zeromesh/board/1") == b"another mesh"
    assert os.fstat(descriptor).st_size <= 4 << 15
    long = "x" * (1 << 16)
    first.set("zeromesh/board/0", long)
    assert first.get("zeromesh/board/0") == long[: (1 << 15) - 8].encode()
    assert first.get("zeromesh/board/1") == b"row 99", "a long row ends before the next one"
    os.pwrite(descriptor, b"\0", 20)
    monkeypatch.setattr(run_store, "START_SECONDS", 0.05)
    for board, key in ((first, "zeromesh/board/0"), (second, "zeromesh/board/0")):
        with pytest.raises(RuntimeError, match=f"nothing was stored under {key} within 0.05 seconds"):
            board.get(key)
    os.close(descriptor)
