"""The line to a host: both ends on this machine, over a stand-in for ssh that runs the command here."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.waiting import is_running, wait_for
from zeromesh.environment import RankRange
from zeromesh.errors import ConfigError
from zeromesh.launch import ssh
from zeromesh.launch.rank_processes import WorkersFailed
from zeromesh.launch.ssh import Host, HostProcess, LaunchPlan, Output, supervise

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """\
import sys
from zeromesh.launch.ssh import run_attached
silence, *arguments = sys.argv[1:]
result = run_attached(arguments, float(silence), print, modules=())
sys.exit(result if isinstance(result, int) else result.exit_code)
"""
RANK = """\
import os, signal, sys, time
from zeromesh.errors import CollectiveError, ConfigError, StorageError
from zeromesh.launch.rank_processes import become_worker
become_worker(lambda error: 2 if isinstance(error, ConfigError) else 1)
folder, alone, *bodies = sys.argv[1:]
host, launcher = os.environ.get("HOST_NAME", "a"), int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])

def there():
    open(f"{folder}/{host}", "a").write(f"{os.getpid()}\\n")

exec(alone if os.environ["WORLD_SIZE"] == "1" and alone else bodies["ab".index(host)])
"""
SILENCE = 1.0


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
        self.rank = folder / "rank.py"
        self.rank.write_text(RANK)

    def plan(self, a: str, b: str, *, alone: str = "", least: int = 2, restarts: int = 0) -> LaunchPlan:
        return LaunchPlan(
            hosts=tuple(Host(name=name, slots=1, address="127.0.0.1") for name in "ab"),
            command=(sys.executable, "-c", LAUNCHER, str(SILENCE), str(self.rank), str(self.folder), alone, a, b),
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
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(ssh, "MARGIN_SECONDS", 0.2)
    return Launch(tmp_path)


WAIT = "there()\ntime.sleep(60)"
DONE = "pass"
MET = "while not os.path.exists(f'{folder}/a'): time.sleep(0.05)\n"


def test_hosts_that_end_well(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    b = "print('half', end='')\nprint('no output is lost ' + os.environ['SAID_ON_THE_LINE'], file=sys.stderr)"
    assert launch.run("print('one\\ntwo')", b) == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["[a] one", "[a] two", "[b] half"]
    assert said.err == "[b] no output is lost hush\n"


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_have_a_place_for_copies_of_another_host_if_there_is_one(launch: Launch, hosts: int) -> None:
    body = f"assert ('ZEROMESH_COPIES' in os.environ) == {hosts > 1}"
    plan = launch.plan(body, body)
    assert supervise(replace(plan, hosts=plan.hosts[:hosts], least=hosts), launch.told.append) == 0, launch.told


@pytest.mark.parametrize(
    ("a", "b", "how", "said", "code", "starts"),
    [
        (WAIT, MET + "raise ConfigError('no text in it')", {}, "host b: rank 1: no text in it", 2, 1),
        ("there()\nraise StorageError('no memory')", WAIT, {"restarts": 1}, "host a: rank 0: no memory", 1, 2),
        pytest.param(
            *("there()\nraise ConfigError('no such file')", WAIT, {"least": 1, "restarts": 3}),
            *("host a: rank 0: no such file", 2, 1),
            marks=pytest.mark.full,
            id="what the user has to change is not tried again",
        ),
    ],
)
def test_a_failure_is_told_with_its_host_and_ends_the_others(
    launch: Launch, a: str, b: str, how: dict[str, int], said: str, code: int, starts: int
) -> None:
    failed = launch.run(a, b, **how)
    assert isinstance(failed, WorkersFailed)
    assert (str(failed), failed.exit_code) == (said, code)
    assert len(launch.pids("a")) == starts
    assert not any(map(is_running, launch.pids("a") + launch.pids("b")))


def test_who_only_noticed_waits_for_the_cause(launch: Launch) -> None:
    """Host b stops in the middle, processes and all; a's rank says that it waits for a rank."""
    stop = "there()\ntime.sleep(0.2)\nos.kill(launcher, signal.SIGSTOP)\ntime.sleep(60)"
    failed = launch.run("time.sleep(0.5)\nraise CollectiveError('rank 1 is late')", stop)
    assert isinstance(failed, WorkersFailed)
    assert str(failed).startswith("host b: nothing has been heard for")
    wait_for(lambda: not any(map(is_running, launch.pids("b"))), 5.0)


def test_a_connection_that_fails_is_told_with_its_words(launch: Launch) -> None:
    (launch.folder / "refused-b").touch()
    os.chdir(launch.folder)
    try:
        failed = launch.run(WAIT, WAIT)
    finally:
        os.chdir(ROOT)
    assert isinstance(failed, WorkersFailed)
    assert "exit code 255 before the host had said how its part ended: Connection refused" in str(failed)


def test_hosts_that_were_started_are_cut_off_when_another_cannot_be(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, start = list[bool](), subprocess.Popen

    def popen(arguments: list[str], **how: object) -> object:
        if arguments[1] == "b":
            raise OSError(errno.EMFILE, "Too many open files")
        return start(arguments, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(ssh.subprocess, "Popen", popen)
    monkeypatch.setattr(ssh, "drain", lambda hosts, until: cut.extend(each._writer.closed for each in hosts))
    with pytest.raises(ConfigError, match=r"--ssh: .* cannot be started \(Too many open files\)"):
        launch.run("there()", "there()")
    assert cut == [True]


def test_the_run_goes_on_without_a_lost_host(launch: Launch) -> None:
    lost = MET + "os.kill(launcher, signal.SIGKILL)\ntime.sleep(60)"
    assert launch.run(WAIT, lost, alone="assert os.environ['RANK'] == '0'", least=1) == 0
    assert launch.told[0].startswith("host b: ")
    assert launch.told[1] == "going on from the newest checkpoint with 1 host (a) and 1 process"
    assert not any(map(is_running, launch.pids("a")))


@pytest.mark.full
def test_the_first_host_may_be_the_lost_one(launch: Launch) -> None:
    assert launch.run("os.kill(launcher, signal.SIGKILL)\ntime.sleep(60)", WAIT, alone=DONE, least=1) == 0
    assert "1 host (b)" in launch.told[1]


def after(launch: Launch, *signals: int) -> threading.Thread:
    """Send signals to this process, a moment apart, when both hosts are there."""

    def send() -> None:
        wait_for(lambda: bool(launch.pids("a") and launch.pids("b")))
        for number in signals:
            time.sleep(0.3)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_a_signal_is_passed_on_and_hosts_end_in_order(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), os._exit(143)))\n" + WAIT
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
    """A host's end, whose other end is this test, and which has started a rank."""

    def __init__(self, launch: Launch) -> None:
        plan, self.heard = launch.plan(WAIT, WAIT), list[object]()
        self.process = HostProcess(plan.hosts[0], replace(plan, silence_seconds=60.0), Output())
        self.answer(lambda: bool(self.heard))
        place = RankRange(first=0, processes=1, world_size=2, master_address="a", master_port=1, run_id="")
        self.process.send({"start": asdict(place)})
        self.answer(lambda: bool(launch.pids("a")))
        (self.rank,) = launch.pids("a")

    def answer(self, until: Callable[[], bool]) -> None:
        """Answer beats until something is so."""

        def over() -> bool:
            self.heard = [*self.heard, *self.process.receive()]
            return until()

        wait_for(over)

    def is_over(self) -> bool:
        return not is_running(self.rank) and not is_running(self.process.pid)


@pytest.fixture
def alone(launch: Launch) -> Iterator[Alone]:
    found = Alone(launch)
    yield found
    found.process.finish()


@pytest.mark.parametrize("old_answers", [False, True])
def test_a_host_ends_itself_when_nobody_answers(alone: Alone, old_answers: bool) -> None:
    """An echo that was under way for long says nothing about now."""

    def over() -> bool:
        if old_answers:
            alone.process.send({"echo": 1})
        return alone.is_over()

    wait_for(over, 2 * SILENCE + 1)


def test_a_host_lives_while_it_is_answered_and_ends_with_its_line(alone: Alone) -> None:
    until = time.monotonic() + 1.5 * SILENCE
    alone.answer(lambda: time.monotonic() > until)
    assert not alone.is_over()
    alone.process.close()
    wait_for(alone.is_over, 0.8 * SILENCE)
