"""`zeromesh launch` on several hosts, which are network namespaces: it trains, names the host that is lost, goes on without."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Hosts, hosts
from tests.support.waiting import logged_steps, sessions, wait_for
from zeromesh.trainer.monitoring.step_metrics import read_metrics

CONFIG = """\
model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
                 num_key_value_heads: 2}}
data: {train: FOLDER/text.txt, sequence_length: 32, eval_fraction: 0.0}
precision: {compute: float32}
batch: {global_size: 8, micro_size: 4}
schedule: {name: constant, warmup_steps: 0}
run: {name: run, output_dir: FOLDER, max_steps: 3}
checkpoint: {every_steps: 0}
"""
FOREVER = ("run.max_steps=1000000", "checkpoint.every_steps=20")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(tmp_path_factory.mktemp("hosts"), "alpha", "beta") as made:
        yield made


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("What a run learns does not depend on who computes it. " * 100)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    return path


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(two: Hosts, config: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts the launch where the hosts can be reached from; all is over afterwards."""
    with sessions() as begin:

        def launch(*words: str, slots: int = 1) -> Any:
            hostfile = two.hostfile(tmp_path / "hosts", slots)
            command = [sys.executable, "-m", "zeromesh", "launch", "--hostfile", str(hostfile), "--ssh", two.ssh]
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            variables.pop("GLOO_SOCKET_IFNAME", None)
            with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
                words = (*two.middle, *command, str(config), *words)
                return begin(words, stdout=out, stderr=err, text=True, env=variables)

        yield launch


def heard(folder: Path) -> str:
    return (folder / "out").read_text() + (folder / "err").read_text()


def all_over(two: Hosts) -> bool:
    return not any(two.processes(name) for name in two.names)


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.full)])
def test_two_hosts_train(two: Hosts, start: Start, tmp_path: Path, slots: int) -> None:
    """gloo left alone would bind the loopback here, where each host's own name leads, and rank 0 listens elsewhere."""
    assert start("batch.micro_size=2", slots=slots).wait(timeout=120) == 0, (tmp_path / "err").read_text()
    said = (tmp_path / "out").read_text().splitlines()
    assert said[0] == f"[alpha] run: ZeRO stage 3 on {2 * slots} CPU ranks: shard {2 * slots}"
    assert [line for line in said if "over gloo" in line], said
    assert logged_steps(tmp_path) == 3
    assert "zeromesh:" not in (tmp_path / "err").read_text()
    assert all_over(two)


@pytest.mark.full
@pytest.mark.parametrize("wire", ["int8", "auto"])
def test_hosts_that_divide_states_send_codes(two: Hosts, start: Start, tmp_path: Path, wire: str) -> None:
    """Without a word about the transport, since there is a wire between them."""
    divided = ("parallel.replicate=2", "zero.replicas=divided", f"parallel.wire={wire}")
    assert start(*divided).wait(timeout=120) == 0, (tmp_path / "err").read_text()
    said = next(line for line in (tmp_path / "out").read_text().splitlines() if "between replicas" in line)
    assert ("int8 between replicas" in said) if wire == "int8" else ("elements took exact" in said)
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert {"reduce-scatter", "all-gather"} <= line["communication"]["replicate"].keys()


@pytest.fixture
def plugged(two: Hosts) -> Iterator[None]:
    """Puts cables back that a test has pulled."""
    yield
    for name in two.names:
        subprocess.run(["ip", "-n", two.prefix, "link", "set", f"to-{name}", "up"], check=True, timeout=30)


@pytest.mark.full
@pytest.mark.parametrize("noticed_first", [True, False])
def test_a_host_that_is_lost_is_named(two: Hosts, start: Start, tmp_path: Path, plugged: None, noticed_first: bool) -> None:
    """Whether the ranks that are left notice it before the launcher does, or after."""
    ranks, line = (3, 8) if noticed_first else (30, 3)
    process = start("--host-timeout", str(line), f"parallel.timeout_seconds={ranks}", *FOREVER)
    wait_for(lambda: logged_steps(tmp_path) >= 5, 120, lambda: heard(tmp_path))
    two.pull("beta")
    pulled = time.monotonic()
    assert process.wait(timeout=60) == 1
    assert time.monotonic() - pulled < 2 * 8 + 5
    (said,) = [line for line in (tmp_path / "err").read_text().splitlines() if not line.startswith("[")]
    assert said.startswith("zeromesh: host beta: nothing has been heard for"), said
    wait_for(lambda: all_over(two), line + 5, lambda: heard(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("lost", ["alpha", "beta"])
def test_a_run_goes_on_with_the_other_host(two: Hosts, start: Start, tmp_path: Path, plugged: None, lost: str) -> None:
    """All had met at the first of them."""
    left = "beta" if lost == "alpha" else "alpha"
    process = start("--min-hosts", "1", "--host-timeout", "3", "parallel.timeout_seconds=5", *FOREVER)
    wait_for(lambda: logged_steps(tmp_path) >= 25, 120, lambda: heard(tmp_path))
    for name in two.names:
        assert two.listening(name) == {two.address(name)}, "a run listens where the other hosts find it, and nowhere else"
    two.pull(lost)
    wait_for(lambda: f"[{left}] run: ZeRO stage 3 on 1 CPU rank" in (tmp_path / "out").read_text(), 120, lambda: heard(tmp_path))
    assert not two.processes(lost)
    at = logged_steps(tmp_path)
    wait_for(lambda: logged_steps(tmp_path) >= at + 10, 120, lambda: heard(tmp_path))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert all_over(two)
    said = (tmp_path / "err").read_text()
    assert f"zeromesh: host {lost}: nothing has been heard" in said
    assert f"going on from the newest checkpoint with 1 host ({left}) and 1 process" in said
    assert "resumed from step" in (tmp_path / "out").read_text()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    newest = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert newest == f"step-{len(lines):08d}"


@pytest.mark.full
def test_a_host_that_vanishes_costs_seconds(two: Hosts, config: Path, tmp_path: Path, plugged: None) -> None:
    """Launchers that meet by themselves: the ranks that are left stay in their processes, and are told as soon as it is sure."""
    words = f"{config} --nproc 1 --nnodes 1:2 --rdzv-endpoint {two.address('alpha')}:29500 parallel.timeout_seconds=5"
    variables = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}:{os.getcwd()} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1"
    command = f"env {variables} {sys.executable} -m zeromesh train {words} {' '.join(FOREVER)}"
    with sessions() as begin, (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        for name in two.names:
            begin([*two.middle, *two.ssh.split(), name, command], stdout=out, stderr=err)
        together = "run: ZeRO stage 3 on 2 CPU ranks"
        wait_for(lambda: together in heard(tmp_path) and logged_steps(tmp_path) >= 25, 120, lambda: heard(tmp_path))
        two.pull("beta")
        pulled = time.monotonic()
        # Where beta was late, both resumed the run of alpha.
        resumed = re.compile(rf"{together}(?!.*{together}).*on 1 CPU rank.*(resumed from|went on after) step", re.S)
        wait_for(lambda: resumed.search(heard(tmp_path)), 60, lambda: heard(tmp_path))
        assert time.monotonic() - pulled < 8
        assert "host beta is gone; the run goes on" in heard(tmp_path)
        wait_for(lambda: not two.processes("beta"), 8, lambda: heard(tmp_path))
