"""Workers that this host starts itself: they share one fate, and the rank that failed first is named."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.waiting import ended, is_running, wait_for
from zeromesh.environment import python_arguments
from zeromesh.launch import rank_processes
from zeromesh.launch.leader import Nodes, WorkersFailed
from zeromesh.launch.rendezvous import launch_workers

WORKER = """\
import os, signal, sys, time
from zeromesh.errors import CollectiveError, DataError
from zeromesh.launch.rank_processes import become_worker
become_worker(lambda error: 2 if isinstance(error, DataError) else 1)
rank = int(os.environ["RANK"])
folder = sys.argv[1]
"""

DRIVER = """\
import sys
from zeromesh.launch.leader import Nodes
from zeromesh.launch.rendezvous import launch_workers
sys.exit(int(launch_workers(sys.argv[1:], processes=2, nodes=Nodes(max_restarts=1), modules=())))
"""


def script(folder: Path, body: str, head: str = WORKER) -> Path:
    path = folder / "script.py"
    path.write_text(head + body, encoding="utf-8")
    return path


def launch(folder: Path, body: str, restarts: int = 0) -> tuple[WorkersFailed | int, list[str]]:
    """Run two ranks; returns the outcome, and the lines about restarts."""
    told: list[str] = []
    arguments = [str(script(folder, body)), str(folder)]
    return launch_workers(arguments, processes=2, nodes=Nodes(max_restarts=restarts), notify=told.append, modules=()), told


def test_workers_get_their_place_and_a_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    handler = signal.getsignal(signal.SIGTERM)
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    body = f"open(f'{{folder}}/rank{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    assert launch(tmp_path, body) == (0, [])
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == f"{rank} 2 2 127.0.0.1 {threads}"
    assert signal.getsignal(signal.SIGTERM) is handler


def test_the_rank_that_failed_first_is_named_not_those_that_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
if rank == 0:
    raise CollectiveError("rank 1 is gone")
time.sleep(0.05)
raise DataError("data.train: no text in it")
"""
    failed, _ = launch(tmp_path, body)
    assert isinstance(failed, WorkersFailed)
    # Should rank 1 have been stopped before it failed, rank 0 is all there is to name.
    assert str(failed) in {"rank 1: data.train: no text in it", "rank 0: rank 1 is gone"}
    assert failed.exit_code in {1, 2}
    assert capfd.readouterr().err == ""


ALL_AT_ONCE = """
open(f"{folder}/there-{rank}", "w").close()
while not all(os.path.exists(f"{folder}/there-{each}") for each in range(2)):
    time.sleep(0.001)
raise DataError("no text")
"""
KILLED_AFTER = """
if rank == 0:
    raise CollectiveError("rank 1 does not go on")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
CANNOT_END = """
import atexit
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 0:
    time.sleep(20)
atexit.register(time.sleep, 20)
raise CollectiveError("rank 0 does not go on")
"""
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("body", "restarts", "ranks", "code", "words"),
    [
        pytest.param(ALL_AT_ONCE, 3, None, 2, r"no text\Z", id="a user's mistake on all ranks is told once, and not tried again"),
        pytest.param(KILLED_AFTER, 0, (0,), 1, "rank 1 does not go on", marks=FULL, id="who had to be killed is not the cause"),
        pytest.param(CANNOT_END, 0, (1,), 1, "rank 0 does not go on", id="who has failed and cannot end is not waited for"),
        ("time.sleep(60) if rank == 0 else {}['weights']", 0, (1,), 1, "KeyError\nTraceback .*script.py"),
        (
            "time.sleep(60) if rank == 0 else os.kill(os.getpid(), signal.SIGKILL)",
            *(2, (1,), 137, "was killed by SIGKILL; the kernel kills like this"),
        ),
        pytest.param(
            "time.sleep(60) if rank == 0 else os._exit(7)", *(0, (1,), 7, "ended with exit code 7 and no Python error"), marks=FULL
        ),
    ],
)
def test_a_failure_names_its_rank_and_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, restarts: int, ranks: tuple[int, ...] | None, code: int, words: str
) -> None:
    """Also in the line about each restart."""
    monkeypatch.setattr(rank_processes, "_STOP_SECONDS", 0.3)
    began = time.monotonic()
    failed, told = launch(tmp_path, body, restarts)
    assert isinstance(failed, WorkersFailed)
    assert (failed.ranks, failed.exit_code) == (ranks or failed.ranks, code)
    assert re.match(words, failed.message, re.DOTALL)
    assert time.monotonic() - began < 15
    assert len(told) == (0 if code == 2 else restarts)
    for number, line in enumerate(told, start=1):
        assert re.match(rf"rank 1 \(pid \d+\): {words}", line)
        assert line.endswith(f"restart {number} of {restarts}")


OPEN = """\
import os, sys
log = open(sys.argv[1] + "/open-" + os.environ.get("RANK", "0"), "w")
def main():
    log.write("written")
main()
"""


def test_what_scripts_have_written_is_there_at_their_end(tmp_path: Path) -> None:
    """Also in files that nobody closes, of a rank alone and of ranks that are forked."""
    path = script(tmp_path, OPEN, head="")
    for ranks in (1, 2):
        words = ["-m", "zeromesh", "run", "--nproc", str(ranks), str(path), str(tmp_path)]
        assert subprocess.run([sys.executable, *words], timeout=100, check=False).returncode == 0
        assert [(tmp_path / f"open-{rank}").read_text() for rank in range(ranks)] == ["written"] * ranks
        (tmp_path / "open-0").unlink()


LOG = """\
from zeromesh import Callback
class Log(Callback):
    def on_train_begin(self, trainer):
        self.file = open(f"log-{trainer.mesh.rank}", "w")
    def on_step_end(self, trainer, step, metrics):
        self.file.write(f"{step} ")
"""
LOGGED = """\
model: {config: {model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1}}
data: {train: text.txt, sequence_length: 8, eval_fraction: 0.0}
batch: {global_size: 2}
run: {name: run, max_steps: 3, callbacks: [{python: "mine:Log"}]}
checkpoint: {every_steps: 0}
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_callbacks_have_written_is_there_at_the_end(tmp_path: Path, ranks: int) -> None:
    """Also in files that nobody closes."""
    for name, text in (("mine.py", LOG), ("run.yaml", LOGGED), ("text.txt", "What is written is read. " * 40)):
        (tmp_path / name).write_text(text)
    words = [sys.executable, "-m", "zeromesh", "train", "run.yaml", "--nproc", str(ranks)]
    found = ended(words, seconds=100, folder=tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert found.returncode == 0, found.stderr
    assert [(tmp_path / f"log-{rank}").read_text() for rank in range(ranks)] == ["1 2 3 "] * ranks


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_no_worker_outlives_the_command(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    body = "open(f'{folder}/rank{rank}', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    command = [sys.executable, str(tmp_path / "driver.py"), str(script(tmp_path, body)), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
        files = [tmp_path / f"rank{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        driver.send_signal(number)
        assert driver.wait(timeout=20) == code
        assert driver.stderr is not None
        assert "start again" not in driver.stderr.read(), "what a person stops does not start again"
    for file in files:
        wait_for(lambda file=file: not is_running(int(file.read_text())), seconds=10.0)


def test_a_worker_whose_launcher_is_gone_already_leaves(tmp_path: Path) -> None:
    """It was starting Python when the launcher was killed."""
    command = [sys.executable, "-m", "zeromesh", "train", "--worker", "--", str(tmp_path / "none.yaml")]
    done = ended(command, seconds=60, ZEROMESH_LAUNCHER_PID="1")
    assert (done.returncode, done.stdout, done.stderr) == (137, "", "")


def test_workers_search_the_working_directory_only_where_this_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/usr/bin", *sys.path])
    assert python_arguments("zeromesh", ["train"]) == ("-P", "-m", "zeromesh", "train")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert python_arguments("zeromesh", ["train"]) == ("-m", "zeromesh", "train")
