"""Starts a command as the ranks of this host, together with the launchers of other hosts, and restarts it when hosts come or go.

The launcher on the endpoint's host leads (see `leader`), and others follow. A single launcher leads itself, and listens nowhere; so
does `zeromesh launch`, which leads those it has started (see `ssh`).

An heir is a follower of the latest start. When the leader is lost, followers go to the first heir that answers, and that one leads
from then on, as far as it may (see `Leader`). Where the kernel has closed the connection, the leader's process has ended, and ranks
rest here until the next start. A leader that is silent may have ranks that train, so those here are killed as without heirs."""

import errno
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from zeromesh.environment import SECRET, RankRange, export, files_handed_on, setting, worker_environment
from zeromesh.errors import ConfigError
from zeromesh.launch import messages
from zeromesh.launch.leader import ALONE, Leader, Nodes, Notify, Result, Stop, Stopped
from zeromesh.launch.messages import REST_SECONDS, TICK_SECONDS, LauncherConnection, Message, MessageError, field
from zeromesh.launch.nursery import Nursery
from zeromesh.launch.rank_processes import STOPPED, RankProcesses, WorkersFailed
from zeromesh.launch.signals import StopSignals, noted_signals
from zeromesh.mesh.network_interfaces import is_this_host, listen

TRAINER = ("zeromesh.trainer.cli.main", "zeromesh.trainer.trainer", "zeromesh.trainer.inference.generator")
"""The modules that ranks import for most commands."""
Attach = Callable[[], LauncherConnection]


class Follower:
    """A launcher that starts ranks when its leader says so, and kills them if that is gone. `attach` connects it to the `zeromesh
    launch` that has started it, which also sends variables, signals and the number of ranks (`processes` is 0); without it the
    follower goes to the endpoint. `notify` receives lines for the user."""

    def __init__(self, nodes: Nodes, processes: int, notify: Notify, stopped: Stopped, attach: Attach | None = None) -> None:
        self._nodes, self.processes, self._stopped, self._attach = nodes, processes, stopped, attach
        self._connection: LauncherConnection | None = None
        self._result: Result | None = None
        self._assigned: RankRange | None = None
        self._stop: Stop | None = None
        self.notify, self._drawn = notify, secrets.token_hex(8)
        self._will: Message | None = None  # what the leader has left to its heirs, if there can be any
        self._listener: socket.socket | None = None  # for other heirs to come to
        self._leader: Leader | None = None  # once this launcher leads
        self._latest: RankRange | None = None
        self._runs = False  # True if ranks of the latest start have not ended.
        self._is_joined = False  # True if the leader, or the heir that this launcher is at, knows this one
        self._lost: WorkersFailed | None = None  # the leader, until there is another
        self._alone_since = 0.0  # the monotonic time since which there is none
        self._at = ""  # the name of the heir at the other end; empty: the leader of the latest start
        self._ended: set[str] = set()
        self._waits = False

    def first_start(self) -> RankRange | Result:
        self._alone_since = time.monotonic()
        return self._wait(None)

    def _connect(self) -> LauncherConnection:
        """Connect to the leader at the endpoint, or to the heir whose turn it is. Listen at the address by which it knows this
        host, which may have to lead: at the endpoint's port, which a firewall lets through, or any. Nobody is answered before."""
        nodes, heirs = self._nodes, messages.heirs(self._will or {})
        where = replace(nodes, endpoint=heirs.get(self._at, nodes.endpoint)).where
        # Ranks whose leader is lost may have to be killed meanwhile.
        reached = socket.create_connection(where, messages.LOOK_SECONDS if self._lost else messages.HELLO_SECONDS)
        if self._listener is None and nodes.most > 1 and nodes.rank is None:
            own, (host, port) = reached.getsockname()[0], nodes.where
            # On the endpoint's host the port is that of the launcher which comes to lead there.
            with suppress(ConfigError):
                self._listener = listen(own, 0 if is_this_host(host) else port)
            self._listener = self._listener or listen(own, 0)
        secret, silence = setting(SECRET) or "", nodes.silence_seconds
        return LauncherConnection(reached, reached, secret, serves=False, silence_seconds=silence)

    @property
    def waits(self) -> bool:
        """True while fewer hosts are there than a start needs, which may never come."""
        return self._waits if self._leader is None else self._leader.waits

    def poll(self) -> Stop | None:
        self._receive()
        stop = None if self._leader is None else self._leader.poll()
        settled = self._lost is None or (self._is_joined if self._leader is None else not self._leader.lacks())
        if not settled and time.monotonic() > self._alone_since + self._nodes.silence_seconds:
            return Stop(0)  # Another heir may lead by now, which waits for ranks that it does not know of as long.
        return self._stop or stop

    def next_start(self, failure: WorkersFailed | None) -> RankRange | Result:
        """Tell the leader that the ranks here have ended; returns the ranks of the next start, or the result of the run."""
        self._receive()  # Sending to a leader that has ended would lose its last message.
        self._runs, start = False, 0 if self._latest is None else self._latest.restart
        if self._connection is not None and self._is_joined:
            end = failure or WorkersFailed(message="", exit_code=0)
            code, noticed = min(end.exit_code, messages.MAX_EXIT_CODE), end.distance > 0
            more = {"limit": end.limit, "step": end.step, "left_out": end.left_out, "leaves": bool(code) and self._stopped()}
            self._connection.send({"rest": code, "of": start, "text": str(end), "noticed": noticed, **more})
        found = self._wait(failure)
        # A cause on this host says more than the leader's text; ranks that only noticed a failure say less.
        if failure is not None and not failure.distance and isinstance(found, WorkersFailed):
            return failure
        return found

    def close(self) -> None:
        for each in (self._leader, self._connection, self._listener):
            if each is not None:
                each.close()
        self._connection = None

    def _introduce(self, connection: LauncherConnection) -> None:
        nodes, port = self._nodes, 0 if self._listener is None else self._listener.getsockname()[1]
        heir = {"heir": self._drawn, "port": port, "running": self._runs} if port else {}
        told = {"processes": self.processes, "run_id": nodes.run_id, "rank": nodes.rank or 0, "drawn": connection.drawn}
        connection.send({**told, "name": socket.gethostname(), "settings": nodes.settings or {}, **heir})
        self._is_joined = True

    def _wait(self, failure: WorkersFailed | None) -> RankRange | Result:
        while not self._stopped():
            self._receive()
            if self._result is not None:
                return self._result
            if self._leader is not None:
                self._stop = self._lost = None
                return self._leader.next_start(failure)
            if self._assigned is not None:
                self._latest = assigned = self._assigned
                self._assigned, self._lost, self._waits = None, None, False
                self._at, self._runs = "", True
                self._ended.clear()
                return assigned
            readers = () if self._connection is None else self._connection.readers
            select.select(readers, [], [], TICK_SECONDS)
        return 0

    def _receive(self) -> None:
        """Handle the messages that have come from the leader, and connect to one where there is none."""
        if self._result is not None or self._leader is not None:
            return
        try:
            if self._connection is None:
                self._connection = (self._attach or self._connect)()
            for message in self._connection.receive():
                self._take(message)
        except MessageError as error:
            if self._will is None and not self._is_joined:
                raise ConfigError(f"--rdzv-endpoint {self._nodes.endpoint}: {error}") from error
            self._give_up(str(error))
        except OSError as error:
            self._leave(error)

    def _leave(self, error: OSError) -> None:
        """Leave a leader that is lost, or one that does not answer, and go to the next heir, or to the endpoint again."""
        connection, was_joined, reason = self._connection, self._is_joined, error.strerror or str(error)
        self._connection, self._is_joined, will, has_ended = None, False, self._will, False
        if connection is not None:
            if not was_joined:
                reason = "what listens there is no launcher of zeromesh, or it is about to end"
            elif will is not None:
                has_ended = connection.was_closed
                connection.send({"left": True})
            connection.close()
        if has_ended:
            self._ended.add(self._at)
        if self._lost is None and will is not None:
            self._alone_since = time.monotonic()
            self._lost = WorkersFailed(message=f"host {field(will, 'leader', '')}, which led, is gone", exit_code=1)
            self._stop = Stop(0, self._lost.message if has_ended else "")
        is_late = time.monotonic() > self._alone_since + messages.REACH_SECONDS
        if is_late or (will is None and (was_joined or self._attach is not None)):
            self._give_up(reason)
        elif will is not None and self._lost is not None:
            names = ["", *(heirs := messages.heirs(will))]
            self._at = names[names.index(self._at) + 1] if self._at != names[-1] else names[1]
            if self._at == self._drawn and self._latest is not None:
                nodes = replace(self._nodes, endpoint=heirs[self._drawn])
                self._leader = Leader(nodes, self.processes, self.notify, self._stopped, listener=self._listener)
                self._leader.inherit(will, self._drawn, self._latest, self._ended, self._lost, self._nodes.endpoint)

    def _take(self, message: Message) -> None:
        if "zeromesh" in message and self._connection is not None:  # An heir leads, to which this launcher has come.
            self._introduce(self._connection)
        elif "start" in message:
            self._assigned, self._stop = messages.rank_range(message), None  # What may follow at once stops this start.
            self._will = message if messages.heirs(message) else None
            if self._will is not None and self._connection is not None:
                self._connection.send({"began": self._assigned.restart})
        elif "heirs" in message:
            self._will = message
        elif "waits" in message:
            self._waits = True
        elif "stop" in message:
            seconds, reason = field(message, "stop", messages.MISSING), field(message, "reason", "")
            self._stop = Stop(seconds, reason, field(message, "after_step", False))
        elif "over" in message:
            end = field(message, "over", {})
            code = field(end, "code", messages.MISSING, most=messages.MAX_EXIT_CODE)
            self._result = code and WorkersFailed(message=field(end, "text", ""), exit_code=code, distance=1)
            self._stop = self._stop or Stop(REST_SECONDS if self._attach is None else 0)
            self.close()
        elif self._attach is not None and "variables" in message:
            export(messages.variables(message))
        elif self._attach is not None and "signal" in message:
            os.kill(os.getpid(), field(message, "signal", messages.MISSING, least=1, most=signal.NSIG - 1))

    def _give_up(self, reason: str) -> None:
        why = f"the launcher at {self._nodes.endpoint}, which the others meet at, cannot be reached from here ({reason})"
        cure = "once it is there, start all again, and the run goes on from its newest checkpoint"
        self._result, self._stop = WorkersFailed(message=f"{why}; {cure}", exit_code=1), Stop(0)
        self.close()


def launch_workers(
    arguments: Sequence[str],
    *,
    processes: int,
    nodes: Nodes = ALONE,
    notify: Notify = lambda line: sys.stderr.write(f"zeromesh: {line}\n"),
    talks: bool = False,
    passes: int = 1,
    modules: Sequence[str] = TRAINER,
) -> WorkersFailed | int:
    """Run `python ARGUMENTS` as `processes` ranks on this host, beside those of other nodes, and wait for all of them, without
    loading torch. The ranks are forked from a process that has imported `modules`. `notify` receives a line for the user at a
    restart. `talks`: a user interacts with the ranks, and Ctrl-C is only passed on to them. The first `passes` signals to stop are
    passed on, and the next one kills. Returns 0 when all succeed, the failure when one fails, and 128 plus the signal's number
    after a signal to stop; the workers have ended then. Raises `ConfigError` when this host must serve the endpoint, and cannot."""
    with noted_signals((signal.SIGINT,) if talks else (), passes) as requests:
        stopped, must_lead = lambda: bool(requests.first), nodes.most == 1 or nodes.rank == 0
        others: Leader | Follower = Follower(nodes, processes, notify, stopped)
        if must_lead or (nodes.rank is None and is_this_host(nodes.where[0])):
            try:
                others = Leader(nodes, processes, notify, stopped)
            except ConfigError as error:  # Without numbers, the first launcher that can listen at the endpoint leads.
                cause = error.__cause__
                if must_lead or not (isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE):
                    raise
        result = run_starts(arguments, others, requests, modules)
        if isinstance(others, Leader) and others.moved is not None:
            (endpoint,) = messages.heirs(others.moved).values()
            others = Follower(replace(nodes, endpoint=endpoint), processes, notify, stopped)
            return run_starts(arguments, others, requests, modules)
        return result


def run_starts(
    arguments: Sequence[str], others: Leader | Follower, requests: StopSignals, modules: Sequence[str] = TRAINER
) -> Result:
    """Run the ranks of this host, again as often as `others` says, and leave these; returns as `launch_workers` does."""
    nursery, ranks, files = None, RankProcesses(arguments), files_handed_on()
    requests.holds, requests.show = lambda: bool(ranks.recover) and not others.waits, others.notify
    try:
        if others.processes:
            nursery = Nursery(modules, worker_environment(others.processes, alone=False) | files, others.notify)
            # Ranks that rest for a host that joins their run do not wait for its imports.
            while isinstance(others, Follower) and not (nursery.ready or requests.first):
                nursery.receive(TICK_SECONDS)
        found = others.first_start()
        while isinstance(found, RankRange) and not requests.first:
            if nursery is None or nursery.lost:
                shared = worker_environment(found.processes, alone=False) | files
                nursery = Nursery(modules if found.processes else (), shared, others.notify)
            failure = _run(ranks, found, others, requests, nursery)
            if failure is not None and failure.distance == 2 and failure.exit_code not in STOPPED and requests.passed_on == 1:
                others.notify(f"{failure}, {REST_SECONDS} s after the signal")
            elif failure is not None and failure.limit and (failure.distance or failure.exit_code not in STOPPED):
                requests.take_back()  # Nothing was saved: those that go on do it, as where it comes while they recover.
            found = others.next_start(failure)
    finally:
        others.close()
        ranks.close()
        if nursery is not None:
            nursery.close()
    return (requests.first and 128 + requests.first) or (0 if isinstance(found, RankRange) else found)


def _run(
    ranks: RankProcesses, assigned: RankRange, others: Leader | Follower, requests: StopSignals, nursery: Nursery
) -> WorkersFailed | None:
    """Start ranks, pass signals on until all have ended or rest, and return the failure that caused the others."""
    while not nursery.ready:
        if number := requests.first:
            return WorkersFailed(message=f"stopped by {signal.Signals(number).name} while importing", exit_code=128 + number)
        if others.poll() is not None:  # These ranks have not ended well: they have not begun.
            return WorkersFailed(message="others stopped it while it imported", exit_code=1, distance=1)
        nursery.receive(TICK_SECONDS)
    ranks.start(assigned, nursery)

    def hand_on(number: int) -> None:
        if number not in requests.only_forwarded:
            ranks.stop(number, REST_SECONDS)
        if number in requests.only_forwarded or requests.passed_on:  # They are stopping already, and must now end soon.
            ranks.send(number)

    while not ranks.over():
        if (stop := others.poll()) is not None:
            ranks.leave(*stop)
        requests.pass_on(hand_on, lambda: ranks.send(signal.SIGKILL))
        time.sleep(TICK_SECONDS)
    return ranks.failure()
