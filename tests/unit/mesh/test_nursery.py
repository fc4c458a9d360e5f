"""The process that ranks are forked from: what forks run, how they end, and when none are made."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from zeromesh.errors import CollectiveError
from zeromesh.launch.nursery import Fork, Nursery
from zeromesh.launch.signals import STOP_SIGNALS

MODULES = {
    "imported": "import os\nPID = os.getpid()\n",
    "slow": "import os, time\nled = os.setsid\nos.setsid = lambda: (time.sleep(0.3), led())\n",
    "threaded": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "broken": "raise ValueError('not today')\n",
    "killed": "import os\nos._exit(9)\n",
    "program": """\
import atexit, os, signal, sys, threading, time
what, path = sys.argv[1:]
def write(text):
    with open(path, "a") as file:
        file.write(text + "\\n")
if what == "tells":
    import imported
    atexit.register(write, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.2), write("thread"))).start()
    mine = [str(imported.PID == os.getppid()), str(os.getsid(0) == os.getpid()), str(signal.getsignal(signal.SIGCHLD))]
    write(" ".join([__name__, os.environ["GIVEN"], os.environ["EARLY"], *mine]))
elif what == "keeps":
    import gc
    atexit.register(gc.freeze)
    held = open(path, "w")
    held.write("kept open")
elif what == "draws":
    import random
    import numpy
    write(f"{random.random()} {numpy.random.random()}")
elif what == "waits":
    write("waiting")
    time.sleep(60)
elif what == "raises":
    sys.excepthook = lambda kind, error, trace: write(f"{kind.__name__}: {error}")
    raise KeyError("gone")
else:
    sys.exit(int(what) if what.isdigit() else what)
""",
}


@pytest.fixture
def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Nursery, list[str]]]]:
    """Start nurseries that import one of MODULES each, and have the others on their path; also what they have notified."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    started: list[Nursery] = []

    def start(module: str) -> tuple[Nursery, list[str]]:
        notified: list[str] = []
        started.append(Nursery([module], {"EARLY": "early"}, notified.append))
        until = time.monotonic() + 30
        while not started[-1].ready:
            assert time.monotonic() < until
            started[-1].receive(1.0)
        return started[-1], notified

    yield start
    for each in started:
        each.close()


def fork(found: Nursery, *words: object, **variables: str) -> Fork:
    """Fork a process that runs the program."""
    return found.fork(["-m", "program", *map(str, words)], variables, {})


def wait_for_line(path: Path) -> None:
    until = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_fork_runs_a_module_with_its_variables_and_ends_in_order(nursery, tmp_path):
    found, notified = nursery("imported")
    forks = [fork(found, "tells", tmp_path / name, GIVEN=name) for name in "ab"]
    assert [each.wait() for each in forks] == [0, 0]
    for name in "ab":
        first, *rest = (tmp_path / name).read_text().splitlines()
        assert first == f"__main__ {name} early True True 0"
        assert rest == ["thread", "at exit"]
    assert notified == []


@pytest.mark.parametrize(("what", "code", "written"), [("3", 3, ""), ("a text", 1, ""), ("raises", 1, "KeyError: 'gone'\n")])
def test_the_end_of_a_fork_is_that_of_an_interpreter(nursery, tmp_path, what, code, written):
    (tmp_path / "out").touch()
    assert fork(nursery("imported")[0], what, tmp_path / "out").wait() == code
    assert (tmp_path / "out").read_text() == written


def test_what_a_fork_has_written_is_in_its_file(nursery, tmp_path):
    """Also where nobody closes it, and an exit function hides all objects from the collector."""
    assert fork(nursery("imported")[0], "keeps", tmp_path / "out").wait() == 0
    assert (tmp_path / "out").read_text() == "kept open"


def test_forks_draw_different_numbers(nursery, tmp_path):
    found, notified = nursery("numpy.random")
    assert [fork(found, "draws", tmp_path / "out").wait() for _ in range(3)] == [0, 0, 0]
    assert notified == []
    assert len(set((tmp_path / "out").read_text().split())) == 6


def test_a_killed_fork_says_so_and_others_go_on(nursery, tmp_path):
    found, _ = nursery("imported")
    waiting = [fork(found, "waits", tmp_path / name) for name in "ab"]
    os.killpg(waiting[0].pid, signal.SIGTERM)
    assert waiting[0].wait() == -signal.SIGTERM
    assert waiting[1].poll() is None
    assert fork(found, 0, "-").wait() == 0


def test_a_stop_that_comes_to_all_processes_is_for_the_forks(nursery, tmp_path):
    found, _ = nursery("imported")
    waiting = fork(found, "waits", tmp_path / "out")
    wait_for_line(tmp_path / "out")
    for number in STOP_SIGNALS:
        os.kill(found._process.pid, number)
    assert fork(found, 3, "-").wait() == 3
    assert waiting.poll() is None
    os.killpg(waiting.pid, signal.SIGINT)
    assert waiting.wait() == 130


def test_the_process_that_imports_keeps_no_code_of_libraries_mapped(nursery, tmp_path):
    found, _ = nursery("torch")
    forked = fork(found, "waits", tmp_path / "out")
    wait_for_line(tmp_path / "out")
    memory = psutil.Process(psutil.Process(forked.pid).ppid()).memory_info()
    assert memory.shared < 2**24 < memory.rss - memory.shared


def test_a_fork_is_told_of_once_signals_to_its_group_reach_it(nursery, tmp_path):
    found, _ = nursery("slow")
    waiting = fork(found, "waits", tmp_path / "out")
    os.killpg(waiting.pid, signal.SIGKILL)
    assert waiting.wait() == -signal.SIGKILL


def test_forks_die_with_their_nursery(nursery, tmp_path):
    found, _ = nursery("imported")
    waiting = fork(found, "waits", tmp_path / "out")
    wait_for_line(tmp_path / "out")
    found.close()
    assert waiting.poll() == -signal.SIGKILL
    assert found.lost
    assert fork(found, 0, "-").wait() == -signal.SIGKILL
    until = time.monotonic() + 10
    while Path(f"/proc/{waiting.pid}").exists() and "Z" not in Path(f"/proc/{waiting.pid}/stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("module", "at_start", "reason"),
    [
        ("threaded", "", "has started a thread"),
        ("broken", "", "ValueError: not today"),
        ("killed", "", "ended with exit code 9"),
        ("imported", "threaded", "has started a thread"),
    ],
)
def test_where_imports_hinder_forks_nothing_is_imported(nursery, tmp_path, module, at_start, reason):
    """`at_start` is what Python runs by itself, which is there before any import; each rank has its own then."""
    (tmp_path / "sitecustomize.py").write_text(MODULES.get(at_start, ""))
    found, notified = nursery(module)
    forks = [fork(found, "tells", tmp_path / name, GIVEN=name) for name in "ab"]
    assert [each.wait() for each in forks] == [0, 0]
    for name in "ab":
        assert (tmp_path / name).read_text().splitlines()[0] == f"__main__ {name} early False True 0"
    assert not found.lost
    assert len(notified) == 1
    assert notified[0].startswith("each rank imports for itself: ")
    assert reason in notified[0]


def test_where_python_itself_does_not_start_a_line_says_so(nursery, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(MODULES["killed"])
    with pytest.raises(CollectiveError, match=r"exit code 9, before it imported anything; look at what Python itself runs"):
        nursery("imported")
