"""The processes of ranks: what is said of their ends, which of them is the cause, and when the others are stopped."""

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeromesh import environment
from zeromesh.environment import LINE, RankRange
from zeromesh.launch import rank_processes
from zeromesh.launch.rank_processes import RankProcesses, WorkersFailed

WHERE = {"master_address": "node0", "master_port": 29400, "run_id": "run", "restart": 0}


class Forks:
    """A nursery whose forks end as a test says; `variables` are those that each was given, `lines` their ends of the lines."""

    def __init__(self) -> None:
        self.forks: list[Any] = []
        self.variables: list[dict[str, str]] = []
        self.lines: list[Connection] = []

    def fork(self, arguments: Any, variables: dict[str, str], handles: dict[str, int]) -> Any:
        fork = SimpleNamespace(pid=100 + len(self.forks), returncode=None)
        fork.poll = fork.wait = lambda: fork.returncode
        self.forks.append(fork)
        self.variables.append(variables)
        self.lines.append(Connection(os.dup(handles[LINE])))
        return fork

    def tell(self, number: int, **message: Any) -> None:
        """Send a message as a rank does."""
        self.lines[number].send_bytes(json.dumps(message).encode())

    def heard(self, number: int) -> list[Any]:
        """Return the messages that have come to a rank."""
        found = []
        while self.lines[number].poll():
            found.append(json.loads(self.lines[number].recv_bytes()))
        return found


Started = tuple[RankProcesses, Forks]


def assigned(first: int = 4, processes: int = 3, world_size: int = 8, restart: int = 0) -> RankRange:
    where = {**WHERE, "restart": restart}
    return RankRange(first=first, processes=processes, world_size=world_size, **where)  # type: ignore[arg-type]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Ranks 4 to 6 of eight, to which no signal is sent."""
    forks: Any = Forks()
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    monkeypatch.setattr(rank_processes, "process_state", lambda pid: "S")
    ranks = RankProcesses([])
    ranks.start(assigned(), forks)
    yield ranks, forks
    for fork in forks.forks:
        fork.returncode = 0
    ranks.close()


def record(forks: Forks, number: int, **details: Any) -> None:
    """Tell a rank's error as the rank does."""
    forks.tell(number, error={"message": "an error", "exit_code": 1, "distance": 0, "time": 5.0, **details})


@pytest.mark.parametrize(
    ("code", "exit_code", "distance", "message"),
    [
        (7, 7, 0, "ended with exit code 7 and no Python error"),
        (143, 143, 0, "was stopped by SIGTERM"),
        (138, 138, 0, "was stopped by SIGUSR1"),
        (131, 131, 0, "ended with exit code 131 and no Python error"),
        (-9, 137, 0, "was killed by SIGKILL; the kernel kills like this when memory runs out (see dmesg)"),
        (-15, 143, 2, "was killed by SIGTERM"),
        (-11, 139, 0, "was killed by SIGSEGV"),
        (-50, 178, 0, "was killed by signal 50"),
    ],
)
def test_what_is_said_of_an_end_without_an_error(started: Started, code: int, exit_code: int, distance: int, message: str) -> None:
    ranks, forks = started
    assert not ranks.over()
    for fork, ended in zip(forks.forks, (0, code, 0), strict=True):
        fork.returncode = ended
    assert ranks.over()
    found = ranks.failure()
    assert found is not None
    assert (found.message, found.exit_code, found.distance, found.pid) == (message, exit_code, distance, 101)
    assert str(found) == f"rank 5 (pid 101): {message}"
    assert found.time > 1e9


def test_all_that_end_well_are_no_failure(started: Started) -> None:
    ranks, forks = started
    for fork in forks.forks:
        fork.returncode = 0
    assert ranks.over()
    assert ranks.failure() is None
    assert str(WorkersFailed(message="all", exit_code=1)) == "all"


def test_the_cause_is_named_before_what_it_has_led_to(started: Started) -> None:
    """The nearest to the cause, of these the first; all ranks with the same error are named together."""
    ranks, forks = started
    for fork in forks.forks:
        fork.returncode = 1
    record(forks, 0, message="a rank is gone", distance=1, time=1.0)
    record(forks, 1, message="no text", time=3.0, exit_code=2)
    record(forks, 2, message="no memory", time=2.0)
    assert ranks.over()
    assert ranks.failure() == WorkersFailed(ranks=(6,), message="no memory", exit_code=1, time=2.0)
    record(forks, 2, message="no text", time=2.0)
    assert ranks.over()
    found = ranks.failure()
    assert found is not None
    assert (found.ranks, found.exit_code, str(found)) == ((5, 6), 1, "ranks 5, 6: no text")


@pytest.mark.parametrize(("code", "named"), [(-9, 5), (-11, 5), (-6, 4), (7, 4)])
def test_a_rank_that_was_killed_is_named_before_an_error_that_it_may_have_led_to(started: Started, code: int, named: int) -> None:
    """In loops that use torch's groups any error may come of it; such an error may end a process too, but not kill it."""
    ranks, forks = started
    for fork, ended in zip(forks.forks, (1, code, 0), strict=True):
        fork.returncode = ended
    record(forks, 0, message="connection reset by peer", time=1.0)
    assert ranks.over()
    found = ranks.failure()
    assert found is not None
    assert found.ranks == (named,)


def test_ranks_that_end_alike_are_named_together(started: Started) -> None:
    ranks, forks = started
    for fork in forks.forks:
        fork.returncode = 7
    assert ranks.over()
    found = ranks.failure()
    assert found is not None
    assert (found.ranks, found.pid) == ((4, 5, 6), 0)


@pytest.mark.parametrize("how", ["cause", "noticed", "recorded"])
def test_the_others_are_stopped_once_the_cause_is_known(started: Started, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """At once, or after a while if its error does not come; those that go on long after that are killed."""
    ranks, forks = started
    clock, sent = [100.0], list[tuple[int, int]]()
    monkeypatch.setattr(rank_processes, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 9.0))
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    assert not ranks.over()
    if how == "recorded":
        record(forks, 0)
    else:
        forks.forks[0].returncode = 1
        record(forks, 0, distance=int(how == "noticed"))
    assert not ranks.over()
    running = [101, 102] if how != "recorded" else [100, 101, 102]
    stops = [(pid, signal.SIGTERM) for pid in running]
    assert sent == (stops if how == "cause" else [])
    clock[0] = 102.1
    ranks.over()
    assert sent == stops
    clock[0] = 129.9 if how == "cause" else 132.0
    ranks.over()
    assert sent == stops, "a stop is sent once"
    clock[0] += 0.2
    ranks.over()
    assert sent == [*stops, *((pid, signal.SIGKILL) for pid in running)]
    forks.forks[1].returncode = -9
    assert ranks._ranks[1].end().distance == 2, "who had to be killed is not the cause"
    assert ranks._ranks[1].end().message == "was killed by SIGKILL"


def recovers(forks: Forks, *numbers: int, patience: float = 60.0) -> None:
    for number in numbers:
        forks.tell(number, recovers={"limit": 20, "patience": patience})


def test_a_rank_may_rest_before_it_has_told_that_it_recovers(started: Started) -> None:
    """A new one, which has waited for others in vain before the first step."""
    ranks, forks = started
    recovers(forks, 0, 2)
    for number in range(3):
        forks.tell(number, rests="ranks 7, 8 are late")
    assert ranks.over()
    ranks.start(assigned(first=2, restart=1), forks)
    assert [each.process for each in ranks._ranks] == forks.forks
    for number in range(3):
        forks.tell(number, rests="ranks 7, 8 are late")
    assert ranks.over()
    found = ranks.failure()
    assert found is not None
    assert found.limit == 20, "as another one has told"


def test_ranks_that_rest_are_those_of_the_next_start(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 is lost: the others rest, and get places in the same processes; a new one takes over its memory."""
    ranks, forks = started
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    recovers(forks, 0, 1, 2)
    assert not ranks.over()
    assert ranks.recover is None, "nothing is in memory yet"
    for number in range(3):
        forks.tell(number, trains=True)
    assert not ranks.over()
    assert ranks.recover is False
    states = [os.fstat(memory).st_ino for each in ranks._ranks for memory in each.memories]
    forks.forks[1].returncode = -9
    assert not ranks.over()
    assert forks.heard(0) == forks.heard(2)
    assert not sent, "who can do without others is not stopped"
    for number, step in ((0, 7), (2, 8)):
        forks.tell(number, step=step)
        assert not ranks.over()
        forks.tell(number, rests="rank 5 is gone")
    assert ranks.over()
    found = ranks.failure()
    assert found is not None
    assert (found.ranks, found.distance, found.limit, found.step) == ((5,), 0, 20, 8)
    assert ranks.recover is True
    ranks.start(assigned(first=2, restart=1), forks)
    for number in (0, 2, 3):
        assert not ranks.over()
        assert ranks.recover is True, "until all train again"
        forks.tell(number, trains=True)
    assert not ranks.over()
    assert ranks.recover is False
    forks.tell(0, trains=False)
    assert not ranks.over()
    assert ranks.recover is None, "what one has ended, all have in a checkpoint or in their hands"
    forks.tell(0, trains=True)
    assert not ranks.over()
    assert ranks.recover is False, "in another `fit`"
    assert len(forks.forks) == 4
    assert [each.process for each in ranks._ranks] == [forks.forks[0], forks.forks[3], forks.forks[2]]
    assert [os.fstat(memory).st_ino for each in ranks._ranks for memory in each.memories] == states
    places = [forks.heard(0)[0]["place"], forks.variables[3], forks.heard(2)[0]["place"]]
    assert [(each["RANK"], each["TORCHELASTIC_RESTART_COUNT"]) for each in places] == [("2", "1"), ("3", "1"), ("4", "1")]
    assert not ranks.over()
    forks.forks[3].returncode = -9
    ranks.over()
    assert ["lost" in forks.heard(number)[-1] for number in (0, 2)] == [True, True]
    assert not sent, "who has not joined the mesh yet leaves it, too"
    for number in (0, 2):
        forks.tell(number, rests="rank 3 is gone")
    assert ranks.over()
    found = ranks.failure()
    assert found is not None
    assert (found.ranks, found.limit) == ((3,), 20)


def test_ranks_that_end_in_order_are_killed_when_they_are_to_end_now(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _ = started
    sent = list[tuple[int, int]]()
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    ranks.stop(signal.SIGINT, 300.0)
    sent.clear()
    ranks.leave(5, "rank 7 is lost")
    assert not sent, "they are ending"
    for _ in range(2):
        ranks.leave(0)
    assert sent == [(pid, signal.SIGKILL) for pid in (100, 101, 102)]


@pytest.mark.parametrize(
    ("patience", "seconds", "lost", "number", "until"),
    [
        (60.0, 7, "rank 1", None, 60.0),
        (3.0, 7, "rank 1", None, 3.0),
        (60.0, 7, "", signal.SIGTERM, 7.0),
        (0.0, 7, "rank 1", signal.SIGTERM, 7.0),
        (60.0, 0, "rank 1", None, 60.0),
        (60.0, 0, "", signal.SIGKILL, 0.0),
        (0.0, 0, "rank 1", signal.SIGKILL, 0.0),
    ],
)
def test_how_ranks_are_told_to_leave(
    started: Started, monkeypatch: pytest.MonkeyPatch, patience: float, seconds: int, lost: str, number: Any, until: float
) -> None:
    """Those that can do without the lost ranks have their own patience, and others a signal; then they are killed."""
    ranks, forks = started
    clock, sent = [100.0], list[tuple[int, int]]()
    monkeypatch.setattr(rank_processes, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 9.0))
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    recovers(forks, 0, 1, 2, patience=patience)
    assert not ranks.over()
    for _ in range(2):
        ranks.leave(seconds, lost)
    assert sent == ([(pid, number) for pid in (100, 101, 102)] if number else [])
    assert [forks.heard(each) for each in range(3)] == [[] if number else [{"lost": lost}]] * 3
    sent.clear()
    clock[0] = 100.0 + until
    assert not ranks.over()
    assert sent == []
    clock[0] += 0.1
    assert not ranks.over()
    assert sent == [(pid, signal.SIGKILL) for pid in (100, 101, 102)]


def test_ranks_that_stay_end_their_step_where_more_come(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the seconds for it, and not their patience with lost ranks; others end by a signal."""
    ranks, forks = started
    clock, sent = [100.0], list[tuple[int, int]]()
    monkeypatch.setattr(rank_processes, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 9.0))
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    recovers(forks, 0, 1, patience=2.0)
    assert not ranks.over()
    ranks.leave(30, "another host has come", after_step=True)
    assert [forks.heard(each) for each in range(3)] == [[{"asked": "another host has come"}]] * 2 + [[]]
    assert sent == [(102, signal.SIGTERM)]
    clock[0] += 30.0
    assert not ranks.over()
    assert len(sent) == 1


def test_ranks_that_have_trained_are_not_disturbed_by_hosts_that_come(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script does after its `fit` goes on, until it trains again."""
    ranks, forks = started
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    recovers(forks, 0, 1, 2, patience=0.0)
    for rank in range(3):
        forks.tell(rank, trains=False)
    assert not ranks.over()
    ranks.leave(30, "another host has come", after_step=True)
    assert sent == []
    for rank in range(3):
        forks.tell(rank, trains=True)
    assert not ranks.over()
    ranks.leave(30, "another host has come", after_step=True)
    assert len(sent) == 3


def test_a_stopped_process_is_killed_once_the_others_have_noticed(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, forks = started
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(rank_processes, "process_state", lambda pid: "T" if pid == 101 else "S")
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    recovers(forks, 0, 1, 2)
    forks.tell(0, rests="rank 5 does not go on")
    assert not ranks.over()
    assert sent == [], "rank 6 may still say what happened"
    forks.tell(2, rests="rank 5 does not go on")
    assert not ranks.over()
    assert sent == [(101, signal.SIGKILL)]
    forks.forks[1].returncode = -9
    assert ranks.over()
    assert str(ranks.failure()).startswith("ranks 4, 6: rank 5 does not go on")


def test_ranks_that_rest_end_by_themselves_where_there_is_no_next_start(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, forks = started
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    forks.forks[1].returncode = forks.forks[2].returncode = 0
    forks.tell(0, rests="rank 5 is gone")
    assert ranks.over()

    def ends(seconds: float) -> None:
        with pytest.raises(EOFError):
            forks.lines[0].recv_bytes()
        forks.forks[0].returncode = 1

    monkeypatch.setattr(rank_processes.time, "sleep", ends)
    ranks.close()
    assert sent == []


def test_ranks_without_a_place_in_the_next_start_do_not_delay_it(started: Started) -> None:
    """Where those that are left make no mesh, some of a host wait, or one computes wrongly: their line ends, and so do they."""
    ranks, forks = started

    def waits() -> None:
        raise AssertionError("it may take its time to end")

    forks.forks[2].wait = waits
    for number in range(3):
        forks.tell(number, rests="rank 7 is gone")
    assert ranks.over()
    ranks.start(assigned(first=0, processes=2, world_size=2, restart=1), forks)
    assert [each.process for each in ranks._ranks] == forks.forks[:2]
    with pytest.raises(EOFError):
        forks.lines[2].recv_bytes()
    assert not ranks.over()
    forks.forks[2].wait = lambda: 1


def test_ranks_read_the_files_of_the_command_as_they_were_at_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Configurations, their bases and scripts may be edited or removed while others train."""
    first, other = tmp_path / "first.yaml", tmp_path / "other.yaml"
    for path in (first, other):
        path.write_text("lr: 1")
    assert environment.file_as_launched(first, 2) == b"lr"
    assert environment.file_as_launched(first) == b"lr: 1"
    for name, value in environment.files_handed_on().items():
        monkeypatch.setenv(name, value)
    first.unlink()
    other.write_text("lr: 2")
    with pytest.raises(FileNotFoundError):
        environment.file_as_launched(first)
    monkeypatch.setenv(LINE, f"{os.getpid()}:0")
    environment._handed_files.cache_clear()
    assert environment.file_as_launched(first) == b"lr: 1"
    assert environment.file_as_launched(other) == b"lr: 2", "which the launcher has not read"
    other.write_text("lr: 3")
    assert environment.file_as_launched(other) == b"lr: 3", "which a script may write anew"
    other.unlink()
    environment._READINGS.clear()  # In another process,
    environment._handed_files.cache_clear()
    monkeypatch.setenv(environment.RECOVERS, "1")  # which takes the place of this one.
    assert [environment.file_as_launched(each) for each in (first, other, other)] == [b"lr: 1", b"lr: 2", b"lr: 3"]
    other.write_text("lr: 4")
    assert environment.file_as_launched(other) == b"lr: 4", "which nobody has read before"
    monkeypatch.setenv(environment.FILES, str(tmp_path / "absent"))
    environment._handed_files.cache_clear()
    assert environment.file_as_launched(other) == b"lr: 4"
    environment._handed_files.cache_clear()


def test_a_rank_gets_its_place_and_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def shared(processes: int, alone: bool) -> dict[str, str]:
        asked.append((processes, alone))
        return {"SHARED": "yes"}

    monkeypatch.setattr(rank_processes, "worker_environment", shared)
    for world in (2, 4):
        forks: Any = Forks()
        ranks = RankProcesses([])
        ranks.start(assigned(first=0, processes=2, world_size=world), forks)
        assert [each["RANK"] for each in forks.variables] == ["0", "1"]
        assert {each["SHARED"] for each in forks.variables} == {"yes"}
        for fork in forks.forks:
            fork.returncode = 0
        ranks.close()
    assert asked == [(2, True), (2, False)]
