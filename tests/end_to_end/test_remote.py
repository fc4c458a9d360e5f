"""The line to a host: both ends on this machine, over a stand-in for ssh that runs the command here."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from zeromesh.launch.messages import line
from zeromesh.launch.rank_processes import RankRange, WorkersFailed
from zeromesh.launch.ssh import Host, HostStream, LaunchPlan, Output, supervise

ROOT = Path(__file__).resolve().parents[2]
HEAD = """\
import os, signal, subprocess, sys, time
from zeromesh.launch.messages import Lifeline
folder, silence, alone, *bodies = sys.argv[1:]
host = os.environ.get("HOST_NAME", "a")
line = Lifeline(float(silence))
place = line.read_start()

def there():
    open(f"{folder}/{host}", "a").write(f"{os.getpid()}\\n")

with line:
"""
SILENCE = 2.0


class Launch:
    """Runs a script on hosts `a` and `b`: its `alone` part on the only host that is left, else the part of the host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        ssh = folder / "ssh"
        ssh.write_text(
            "#!/bin/sh\nexport HOST_NAME=$1\n[ -e refused-$1 ] && { echo Connection refused >&2; exit 255; }\n"
            'shift\nexec sh -c "$*"\n'
        )
        ssh.chmod(0o755)
        self.ssh = str(ssh)

    def plan(self, a: str, b: str, *, alone: str = "", least: int = 2, restarts: int = 0) -> LaunchPlan:
        body = "    exec(alone if place.world_size == 1 and alone else bodies['ab'.index(host)])\n"
        return LaunchPlan(
            hosts=tuple(Host(name=name, slots=1, address="127.0.0.1") for name in "ab"),
            command=(sys.executable, "-c", HEAD + body, str(self.folder), str(SILENCE), alone, a, b),
            ssh=(self.ssh,),
            directory=str(self.folder),
            python_path=str(ROOT),
            variables={"SAID_ON_THE_LINE": "hush"},
            silence_seconds=SILENCE,
            port=None,
            least=least,
            max_restarts=restarts,
            check=lambda hosts: None,
        )

    def run(self, a: str, b: str, **how: object) -> WorkersFailed | int:
        return supervise(self.plan(a, b, **how), self.told.append)  # type: ignore[arg-type]

    def pids(self, host: str) -> list[int]:
        path = self.folder / host
        return [int(word) for word in path.read_text().split()] if path.exists() else []


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


WAIT = "there()\ntime.sleep(60)"
DONE = "line.end(0)"
MET = "while not os.path.exists(f'{folder}/a'): time.sleep(0.05)\n"


def test_hosts_that_end_well(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    b = "print('half', end='')\nprint('no output is lost ' + os.environ['SAID_ON_THE_LINE'], file=sys.stderr)\nline.end(0)"
    assert launch.run("print('one\\ntwo')\nline.end(0)", b) == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["[a] one", "[a] two", "[b] half"]
    assert said.err == "[b] no output is lost hush\n"


def test_a_failure_is_told_with_its_host_and_ends_the_others(launch: Launch) -> None:
    failed = launch.run(WAIT, MET + "line.end(2, text='rank 1: no text in it')")
    assert isinstance(failed, WorkersFailed)
    assert (str(failed), failed.exit_code) == ("host b: rank 1: no text in it", 2)
    assert not is_running(*launch.pids("a"))


def test_who_only_noticed_waits_for_the_cause(launch: Launch) -> None:
    """Host b stops in the middle, processes and all; a's rank says that it waits for a rank."""
    stop = "there()\ntime.sleep(0.5)\nos.kill(os.getpid(), signal.SIGSTOP)"
    failed = launch.run("time.sleep(1)\nline.end(1, text='rank 0: rank 1 is late', noticed=True)", stop)
    assert isinstance(failed, WorkersFailed)
    assert str(failed).startswith("host b: nothing has been heard for")
    wait_for(lambda: not is_running(*launch.pids("b")), 5.0)


def test_a_connection_that_fails_is_told_with_its_words(launch: Launch) -> None:
    (launch.folder / "refused-b").touch()
    os.chdir(launch.folder)
    try:
        failed = launch.run(WAIT, WAIT)
    finally:
        os.chdir(ROOT)
    assert isinstance(failed, WorkersFailed)
    assert "exit code 255 before the host had said how its part ended: Connection refused" in str(failed)


def test_the_run_goes_on_without_a_lost_host(launch: Launch) -> None:
    lost = MET + "os._exit(9)"
    assert launch.run(WAIT, lost, alone="assert (place.first, place.processes) == (0, 1)\nline.end(0)", least=1) == 0
    assert launch.told[0].startswith("host b: ")
    assert launch.told[1] == "going on from the newest checkpoint with 1 host (a) and 1 process"
    assert not is_running(*launch.pids("a"))


@pytest.mark.full
def test_the_first_host_may_be_the_lost_one(launch: Launch) -> None:
    assert launch.run("os._exit(9)", WAIT, alone=DONE, least=1) == 0
    assert "1 host (b)" in launch.told[1]


def test_a_failing_rank_starts_all_again_a_few_times(launch: Launch) -> None:
    failed = launch.run("there()\nline.end(1, text='out of memory')", WAIT, restarts=1)
    assert isinstance(failed, WorkersFailed)
    assert str(failed) == "host a: out of memory"
    assert len(launch.pids("a")) == 2


@pytest.mark.full
def test_what_the_user_has_to_change_is_not_tried_again(launch: Launch) -> None:
    failed = launch.run("there()\nline.end(2, text='no such file')", WAIT, least=1, restarts=3)
    assert isinstance(failed, WorkersFailed)
    assert len(launch.pids("a")) == 1


def after(launch: Launch, *signals: int) -> threading.Thread:
    """Send signals to this process, half a second apart, when both hosts are there."""

    def send() -> None:
        wait_for(lambda: bool(launch.pids("a") and launch.pids("b")))
        for number in signals:
            time.sleep(0.5)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_a_signal_is_passed_on_and_hosts_end_in_order(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), line.end(143), os._exit(0)))\n" + WAIT
    thread = after(launch, signal.SIGTERM)
    assert launch.run(body, body, least=1, restarts=3) == 143
    assert sorted(capfd.readouterr().out.splitlines()) == ["[a] saved", "[b] saved"]
    thread.join()


@pytest.mark.full
def test_a_second_signal_ends_hosts_at_once(launch: Launch) -> None:
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAIT
    thread = after(launch, signal.SIGINT, signal.SIGINT)
    began = time.monotonic()
    assert launch.run(body, body) == 130
    assert time.monotonic() - began < 20
    assert not any(map(is_running, launch.pids("a") + launch.pids("b")))
    thread.join()


class Alone:
    """A host's end, whose other end is this test; it has started a process of its own."""

    def __init__(self, folder: Path) -> None:
        body = "    subprocess.Popen(['sleep', '60'])\n    there()\n    time.sleep(60)\n"
        command = [sys.executable, "-c", HEAD + body, str(folder), "1.0", ""]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
        )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin
        place = RankRange(first=0, processes=1, world_size=1, master_address="a", master_port=1, run_id="")
        self.say({"variables": {}, "start": asdict(place)})
        wait_for(lambda: (folder / "a").exists())
        self.group = os.getpgid(self.process.pid)

    def say(self, message: dict[str, object]) -> None:
        self.stdin.write(line(message))
        self.stdin.flush()

    def wait(self, seconds: float) -> int:
        code = self.process.wait(timeout=seconds)
        # `sleep` was in the group, which is gone with it.
        wait_for(lambda: not self.members(), 5.0)
        return code

    def members(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.group and fields[0] not in "ZX":
                found.append(int(path.parent.name))
        return found


def test_a_host_ends_itself_when_nobody_answers(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    assert len(alone.members()) == 2
    assert alone.wait(10.0) != 0


def test_old_answers_keep_no_host_alive(tmp_path: Path) -> None:
    """An echo that was under way for long says nothing about now."""
    alone = Alone(tmp_path)
    deadline = time.monotonic() + 10.0
    while alone.process.poll() is None:
        assert time.monotonic() < deadline
        try:
            alone.say({"echo": 1})
        except BrokenPipeError:
            break
        time.sleep(0.1)
    alone.wait(10.0)


def test_a_host_lives_while_it_is_answered_and_ends_with_its_line(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    stream, until = HostStream(Output(), 1, "a"), time.monotonic() + 2.5
    assert alone.process.stdout is not None
    while time.monotonic() < until:
        for message in stream.feed(os.read(alone.process.stdout.fileno(), 4096)):
            alone.say({"echo": message["beat"]})
    assert alone.process.poll() is None
    alone.stdin.close()
    alone.wait(10.0)
