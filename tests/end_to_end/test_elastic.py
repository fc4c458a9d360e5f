"""Hosts come and go: launchers of one run on one machine, each with one rank, are killed and started while it trains."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import logged_steps, sessions, wait_for
from zeromesh.trainer.monitoring.step_metrics import read_metrics

pytestmark = pytest.mark.usefixtures("at_once")

CONFIG = """\
model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
                 num_key_value_heads: 2}}
data: {train: FOLDER/text.txt, sequence_length: 64, eval_fraction: 0.0}
precision: {compute: float64, master: float64, reduce: float64}
batch: {global_size: 24, micro_size: 1}
schedule: {name: constant, warmup_steps: 0}
run: {name: run, output_dir: FOLDER, max_steps: STEPS}
checkpoint: {every_steps: 10}
parallel: {timeout_seconds: 20}
"""
STEPS = 160

Start = Callable[..., subprocess.Popen[bytes]]


def config(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("What a run learns does not depend on who computes it. " * 400)
    path = folder / "config.yaml"
    path.write_text(CONFIG.replace("FOLDER", str(folder)).replace("STEPS", str(STEPS)))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `zeromesh train` in a session of its own; all are ended afterwards."""
    numbers = itertools.count()
    with sessions() as begin:

        def train(path: Path, *options: str, host: str = "") -> Any:
            named = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"] if host else []
            # What is forked from a process that is there already has its host's name.
            python = str(Path(sys.prefix, "bin", "python")) if host else sys.executable
            command = [*named, python, "-m", "zeromesh", "train", str(path), *options]
            with (tmp_path / f"log-{next(numbers)}").open("wb") as log:
                variables = {**os.environ, "OMP_NUM_THREADS": "1"}
                return begin(command, stdout=log, stderr=subprocess.STDOUT, env=variables)

        yield train


@pytest.mark.full
def test_a_host_is_lost_and_another_joins(start: Start, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    path, alone = config(tmp_path / "elastic"), config(tmp_path / "alone")
    options = ("run.max_steps=1000000", "--nproc", "1", "--nnodes", "1:4", "--rdzv-endpoint", endpoint)
    first = start(path, *options)
    wait_for(lambda: listens(endpoint), 120, lambda: logs(tmp_path))  # it leads
    others = [start(path, *options) for _ in range(2)]
    folder = tmp_path / "elastic"
    wait_for(lambda: logged_steps(folder) >= 15, 120, lambda: logs(tmp_path))
    os.killpg(others[-1].pid, signal.SIGKILL)
    wait_for(lambda: sizes(tmp_path)[-1:] == ["2"] and logged_steps(folder) >= 25, 120, lambda: logs(tmp_path))
    start(path, *options)
    wait_for(lambda: sizes(tmp_path).count("3") == 2, 120, lambda: logs(tmp_path))
    at = logged_steps(folder)
    wait_for(lambda: logged_steps(folder) >= at + 10, 120, lambda: logs(tmp_path))
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(timeout=60) == 128 + signal.SIGTERM
    assert "stopping after this step" in logs(tmp_path)
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert start(alone, f"run.max_steps={len(lines)}").wait(timeout=120) == 0
    expected = read_metrics(tmp_path / "alone" / "run" / "metrics.jsonl")
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(lines, expected, strict=True)) <= 1e-9


@pytest.mark.full
def test_ranks_stay_when_hosts_come_and_go(start: Start, tmp_path: Path) -> None:
    """3 + 1 + 4 ranks, of which the last two hosts are lost, then 2 more: the first host has the same processes all the time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    path, alone, folder = config(tmp_path / "elastic"), config(tmp_path / "alone"), tmp_path / "elastic"

    def host(ranks: int) -> subprocess.Popen[bytes]:
        options = ("run.max_steps=1000000", "--nproc", str(ranks), "--nnodes", "1:4", "--rdzv-endpoint", endpoint)
        return start(path, *options)

    def ranks_become(number: int) -> list[int]:
        wait_for(lambda: sizes(tmp_path)[-1:] == [str(number)], 120, lambda: logs(tmp_path))
        at = logged_steps(folder)
        wait_for(lambda: logged_steps(folder) >= at + 5, 120, lambda: logs(tmp_path))
        return [each["pid"] for each in json.loads((folder / "run" / "ranks.json").read_text())["ranks"]]

    first = host(3)
    wait_for(lambda: listens(endpoint), 120, lambda: logs(tmp_path))  # It leads.
    pids = ranks_become(3)
    second = host(1)
    assert ranks_become(4)[:3] == pids
    third = host(4)
    assert ranks_become(8)[:3] == pids
    for each in (second, third):
        os.killpg(each.pid, signal.SIGKILL)
    assert ranks_become(3) == pids
    host(2)
    assert ranks_become(5)[:3] == pids
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(timeout=60) == 128 + signal.SIGTERM
    lines, recoveries = (read_metrics(folder / "run" / name) for name in ("metrics.jsonl", "recoveries.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    grown = [each for each in recoveries if each["cause"] == "another host has come"]
    assert len(grown) == 3
    assert not any(each["lost_steps"] for each in grown)
    assert start(alone, f"run.max_steps={len(lines)}").wait(timeout=120) == 0
    expected = read_metrics(tmp_path / "alone" / "run" / "metrics.jsonl")
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(lines, expected, strict=True)) <= 1e-12


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="hosts with names need root and unshare")
@pytest.mark.parametrize(("names", "victim"), [("abc", "b"), ("abc", "c"), ("ab", "b")])
def test_a_lost_host_has_left_copies_on_another(start: Start, tmp_path: Path, names: str, victim: str) -> None:
    """Of hosts with 1, 1 and 2 ranks one is lost, and there is no checkpoint: the others, or the one, have all images, and other
    shards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    path, alone, folder = config(tmp_path / "elastic"), config(tmp_path / "alone"), tmp_path / "elastic"
    words = ("run.max_steps=1000000", "checkpoint.every_steps=0", "recovery.copies=1", "recovery.every_steps=3")
    launchers, ranks = {}, {"a": 1, "b": 1, "c": 2}
    for name in names:
        options = (*words, "--nproc", str(ranks[name]), "--nnodes", "1:3", "--rdzv-endpoint", endpoint)
        launchers[name] = start(path, *options, host=name)
        wait_for(lambda: logged_steps(folder) >= 2, 120, lambda: logs(tmp_path))  # The first one leads.
    wait_for(lambda: sizes(tmp_path)[-1:] == [str(sum(map(ranks.get, names)))], 120, lambda: logs(tmp_path))
    at = logged_steps(folder)
    wait_for(lambda: logged_steps(folder) >= at + 9, 120, lambda: logs(tmp_path))
    os.killpg(launchers[victim].pid, signal.SIGKILL)
    wait_for(lambda: "from a snapshot in memory" in logs(tmp_path), 120, lambda: logs(tmp_path))
    at = logged_steps(folder)
    wait_for(lambda: logged_steps(folder) >= at + 9, 120, lambda: logs(tmp_path))
    os.kill(launchers["a"].pid, signal.SIGTERM)
    assert launchers["a"].wait(timeout=60) == 128 + signal.SIGTERM
    lines, recoveries = (read_metrics(folder / "run" / name) for name in ("metrics.jsonl", "recoveries.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert recoveries[0]["cause"] == "another host has come", "a single rank stays too"
    assert recoveries[-1]["source"] == "snapshot"
    assert recoveries[-1]["lost_steps"] <= 3
    assert start(alone, f"run.max_steps={len(lines)}").wait(timeout=120) == 0
    expected = read_metrics(tmp_path / "alone" / "run" / "metrics.jsonl")
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(lines, expected, strict=True)) <= 1e-12


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "victims", "source"), [(4, (0, 2), "resumed from step"), (4, (0, 1), "memory of"), (2, (1,), "memory of")]
)
def test_ranks_that_have_different_experts_are_lost(
    start: Start, tmp_path: Path, ranks: int, victims: tuple[int, ...], source: str
) -> None:
    """Where both with the same experts are lost, nobody has the buffer in which they had them together."""
    folder = tmp_path / "elastic"
    path = config(folder)
    text = path.read_text().replace("model_type: llama", "model_type: mixtral, num_local_experts: 4")
    path.write_text(text.replace("every_steps: 10", "every_steps: 5").replace("float64", "float32"))
    launcher = start(path, "run.max_steps=1000000", "parallel.expert=2", "--nproc", str(ranks))
    wait_for(lambda: logged_steps(folder) >= 7, 120, lambda: logs(tmp_path))
    before = pids(tmp_path)
    for each in victims:
        os.kill(before[each], signal.SIGKILL)
    wait_for(lambda: source in logs(tmp_path), 60, lambda: logs(tmp_path))
    trained(tmp_path, 2)
    launcher.terminate()
    assert launcher.wait(60) == 143


Hosts = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def hosts(start: Start, tmp_path: Path) -> Hosts:
    """Starts the launcher of one rank on a host with a name, which has copies of others' states, or without a name on this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    path, named = config(tmp_path / "elastic"), os.geteuid() == 0 and shutil.which("unshare") is not None
    words = ("run.max_steps=1000000", "parallel.timeout_seconds=4", "recovery.every_steps=3", "recovery.copies=1")
    options = ("--nproc", "1", "--nnodes", "1:3", "--rdzv-endpoint", endpoint)

    def host(name: str) -> Any:
        return start(path, *words[: 4 if named and name else 2], *options, host=name if named else "")

    return host


def three(hosts: Hosts, folder: Path, names: Sequence[str] = "abc") -> list[subprocess.Popen[bytes]]:
    """Three hosts, of which the first leads and the second is its heir, after some steps together."""
    found: list[subprocess.Popen[bytes]] = []
    for name in names:
        found.append(hosts(name))
        wait_for(lambda: len(pids(folder)) == len(found), 120, lambda: logs(folder))
    trained(folder, 4)
    return found


def trained(folder: Path, steps: int) -> None:
    at = logged_steps(folder / "elastic")
    wait_for(lambda: logged_steps(folder / "elastic") >= at + steps, 120, lambda: logs(folder))


def pids(folder: Path) -> list[int]:
    """The processes of the ranks of the run, those of rank 0 first."""
    path = folder / "elastic" / "run" / "ranks.json"
    return [each["pid"] for each in json.loads(path.read_text())["ranks"]] if path.exists() else []


def ends_as_if_nothing_happened(start: Start, folder: Path, leader: subprocess.Popen[bytes]) -> None:
    os.kill(leader.pid, signal.SIGTERM)
    assert leader.wait(timeout=60) == 128 + signal.SIGTERM, logs(folder)
    lines = read_metrics(folder / "elastic" / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert start(config(folder / "alone"), f"run.max_steps={len(lines)}").wait(timeout=120) == 0
    expected = read_metrics(folder / "alone" / "run" / "metrics.jsonl")
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(lines, expected, strict=True)) <= 1e-12


def test_the_host_that_leads_is_lost(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    """The ranks on the others stay in their processes, and the next host leads them."""
    first, second, _ = three(hosts, tmp_path, ("", "", ""))
    before = pids(tmp_path)
    os.killpg(first.pid, signal.SIGKILL)
    wait_for(lambda: pids(tmp_path) == before[1:], 60, lambda: logs(tmp_path))
    trained(tmp_path, 3)
    ends_as_if_nothing_happened(start, tmp_path, second)


@pytest.mark.full
def test_leaders_are_lost_one_after_another_and_come_back(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    first, second, third = three(hosts, tmp_path)
    trained(tmp_path, 4)  # Then there is a snapshot.
    stays = pids(tmp_path)[2]
    os.killpg(first.pid, signal.SIGKILL)
    wait_for(lambda: pids(tmp_path)[1:] == [stays], 60, lambda: logs(tmp_path))
    trained(tmp_path, 5)
    recovery = read_metrics(tmp_path / "elastic" / "run" / "recoveries.jsonl")[-1]
    assert recovery["source"] != "snapshot" or recovery["lost_steps"] <= 3
    saved = (recovery["step"] - recovery["lost_steps"]) % 10 == 0  # A checkpoint that is as new comes first.
    assert (recovery["source"] == "snapshot") == (os.geteuid() == 0 and not saved)
    first = hosts("a")  # It would lead, and is told where the run goes on.
    wait_for(lambda: len(pids(tmp_path)) == 3, 60, lambda: logs(tmp_path))
    trained(tmp_path, 5)
    os.killpg(second.pid, signal.SIGKILL)
    wait_for(lambda: len(pids(tmp_path)) == 2 and pids(tmp_path)[0] == stays, 60, lambda: logs(tmp_path))
    trained(tmp_path, 5)
    os.killpg(first.pid, signal.SIGKILL)
    wait_for(lambda: pids(tmp_path) == [stays], 60, lambda: logs(tmp_path))
    trained(tmp_path, 5)
    ends_as_if_nothing_happened(start, tmp_path, third)


@pytest.mark.full
def test_a_leader_that_was_only_silent_writes_nothing_once_it_wakes(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    first, second, _ = three(hosts, tmp_path)
    stopped = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for each in stopped:
        each.suspend()
    wait_for(lambda: len(pids(tmp_path)) == 2, 60, lambda: logs(tmp_path))
    trained(tmp_path, 5)
    for each in stopped:
        each.resume()
    assert first.wait(timeout=30) == 1
    assert "2 of 3 launchers may be alive elsewhere" in logs(tmp_path)
    trained(tmp_path, 5)
    ends_as_if_nothing_happened(start, tmp_path, second)


@pytest.mark.full
def test_one_of_two_hosts_does_not_go_on_without_a_silent_leader(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    """It cannot know whether that trains alone, and so it does as soon as it wakes."""
    first = hosts("a")
    wait_for(lambda: len(pids(tmp_path)) == 1, 120, lambda: logs(tmp_path))
    second = hosts("b")
    wait_for(lambda: len(pids(tmp_path)) == 2, 120, lambda: logs(tmp_path))
    trained(tmp_path, 8)
    stopped = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for each in stopped:
        each.suspend()
    assert second.wait(timeout=30) == 1
    assert "which led, is gone: 1 of 2 launchers may be alive elsewhere" in logs(tmp_path)
    for each in stopped:
        each.resume()
    trained(tmp_path, 5)
    ends_as_if_nothing_happened(start, tmp_path, first)


def listens(endpoint: str) -> bool:
    """Whether there is a launcher at the endpoint, which takes this for a stranger."""
    host, _, port = endpoint.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def logs(folder: Path) -> str:
    """What all launchers' ranks have said; who is rank 0 changes."""
    return "".join(log.read_text(errors="replace") for log in sorted(folder.glob("log-*"), key=lambda log: log.stat().st_mtime))


def sizes(folder: Path) -> list[str]:
    """How many ranks each start of the run had, as far as it has got to its first step."""
    return [line.partition(" on ")[2].split()[0] for line in logs(folder).splitlines() if "ZeRO stage" in line]


@pytest.mark.full
@pytest.mark.parametrize("everyone", [False, True])
def test_a_terminated_command_saves_and_goes_on(start: Start, tmp_path: Path, everyone: bool) -> None:
    """Also where all of its processes are, as by the stop of a service or of a machine."""
    folder = tmp_path / "run-twice"
    path = config(folder)
    short = ("--nproc", "2", "run.max_steps=60")
    command = start(path, *short)
    wait_for(lambda: logged_steps(folder) >= 12, 120, lambda: logs(tmp_path))
    os.kill(command.pid, signal.SIGTERM)
    if everyone:
        ranks = [psutil.Process(each["pid"]) for each in json.loads((folder / "run" / "ranks.json").read_text())["ranks"]]
        for each in (ranks[0].parent(), *ranks):  # The first is what they are forked from.
            each.terminate()
    assert command.wait(timeout=60) == 128 + signal.SIGTERM
    saved = sorted(each.name for each in (folder / "run" / "checkpoints").iterdir())
    assert saved[-1] == f"step-{logged_steps(folder):08d}"
    assert start(path, *short).wait(timeout=120) == 0
    assert "resumed from step" in (tmp_path / "log-1").read_text()
    assert logged_steps(folder) == 60
