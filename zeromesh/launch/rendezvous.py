"""Starts a command as the ranks of this host, together with the launchers of other hosts, and restarts it when hosts come or go.

The launcher on the endpoint's host leads: it waits for enough launchers, numbers the hosts, and sends each its ranks. When a rank
fails, or a host is lost or joins, all ranks end, or rest if they can do without the others, and the leader numbers the hosts anew.
A single launcher leads itself, and listens nowhere; so does `zeromesh launch`, which leads those it has started (see `ssh`)."""

import errno
import os
import select
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from zeromesh.environment import LOOPBACK, SECRET, RankRange, export, setting, worker_environment
from zeromesh.errors import ConfigError, counted
from zeromesh.launch import messages
from zeromesh.launch.messages import LauncherConnection, Message, MessageError, field
from zeromesh.launch.nursery import Nursery
from zeromesh.launch.rank_processes import USERS_MISTAKE, RankProcesses, WorkersFailed
from zeromesh.launch.signals import StopSignals, noted_signals
from zeromesh.mesh.network_interfaces import is_this_host, listen

_REACH_SECONDS = 120.0  # for a launcher to reach the leader
_JOIN_SECONDS = 600.0  # until there are enough launchers
_TICK_SECONDS = 0.05  # between two looks at the ranks and at other launchers
REST_SECONDS = 300  # for ranks to save and end before a restart
_SAME_STEP = 3  # recoveries after the same step, each of which failed before the next one was made: the run ends then
_HOUR = 3600.0
_MOST_STRANGERS = 64  # connections that have not introduced themselves, and addresses that are told of
TRAINER = ("zeromesh.trainer.trainer", "zeromesh.trainer.inference.generator")
"""The modules that ranks import for most commands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The launchers that start a run together, and may come and go. `endpoint` is `HOST:PORT` of the leader. When a host is lost or
    joins, all workers start again; after a failure they do so at most `max_restarts` times. With a `rank`, exactly `most` launchers
    take part, whose ranks have the same order; number 0 serves the endpoint, none joins later, and losing one ends the run."""

    least: int = 1
    most: int = 1
    endpoint: str = f"{LOOPBACK}:0"
    run_id: str = ""
    max_restarts: int = 0
    rank: int | None = None
    restarts_from: str = "the newest checkpoint"
    """The state from which workers resume after a restart, as a message says it."""
    rest_seconds: int = REST_SECONDS
    """Seconds that ranks may take to save and end before a restart; 0: those that do not stay are killed."""
    last_call_seconds: float = 1.0
    """Seconds for further launchers to come before the first start, once there are enough of them."""
    cause_seconds: float = 0.0
    """Seconds that ranks go on after one has noticed another's failure, until that one is reported or lost."""
    grows: bool = True
    """True if hosts that come later are taken in after the present step, and False if they wait until another is lost."""
    fits: Callable[[int], bool] = bool
    """Tells if a number of ranks makes a mesh; those above the largest such number wait."""
    silence_seconds: float = messages.SILENCE_SECONDS
    """Seconds without a message after which a launcher counts as lost, the same for all launchers of a run."""

    @property
    def where(self) -> tuple[str, int]:
        """The host and the port of the endpoint. Raises `ConfigError`."""
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdecimal() or int(port[:6]) > 65535:
            raise ConfigError(f"--rdzv-endpoint {self.endpoint!r}: allowed is HOST:PORT, such as gpu1:29400")
        return host.strip("[]"), int(port)


ALONE = Nodes()
Result = WorkersFailed | int


class Stop(NamedTuple):
    """The seconds in which ranks have to end or rest, 0 to kill those that do not stay. Ranks that stay rest at once if some are
    lost, and `after_step` if hosts have come; `reason` is empty where none is to rest."""

    seconds: int
    reason: str = ""
    after_step: bool = False


Stopped = Callable[[], bool]
Notify = Callable[[str], object]


@dataclass(kw_only=True, slots=True, eq=False)
class Member:
    """The leader's record of another launcher; `processes` is 0 until the launcher's first message has come."""

    connection: LauncherConnection
    name: str  # the name of the launcher's host; until that is known, its address
    address: str = ""  # that it connects from
    processes: int = 0
    slots: int = 0  # the number of its ranks, if the leader has started it and so knows; it is then sent the `greeting`
    greeting: Message | None = None
    rank: int | None = None
    numbered: bool = False  # True if the launcher has ranks in the latest start of the run
    running: bool = False  # True if the launcher's ranks of the latest start have not ended
    failure: WorkersFailed | None = None


class Leader:
    """The launcher that numbers the ranks of all hosts: of those that come to its endpoint, or of `members` that it has started.
    `address_of` refuses members that cannot go on together, or returns the address and port at which their ranks meet; by default
    they meet at this host. Raises `ConfigError` when this host cannot listen at the endpoint."""

    def __init__(
        self,
        nodes: Nodes,
        processes: int,
        notify: Notify,
        stopped: Stopped,
        *,
        members: list[Member] | None = None,
        address_of: Callable[[Sequence[Member]], tuple[str, int]] | None = None,
    ) -> None:
        self._nodes, self._processes = nodes, processes
        self._notify, self._stopped, self._address_of = notify, stopped, address_of
        self._secret = setting(SECRET) or ""
        self._listener = listen(*nodes.where) if nodes.most > 1 and members is None else None
        if self._listener is not None:
            self._listener.setblocking(False)
        self._members: list[Member] = [] if members is None else members
        self.ending = False
        """True once ranks were signalled to stop: a failure then does not stop the other ranks, which may still be saving."""
        self._lost: list[WorkersFailed] = []  # the members lost since the latest start
        self._hosts_dead_at = 0.0  # the monotonic time after which no process of the run is alive on lost hosts
        self._failed_at: float | None = None
        self._refused: set[str] = set()
        self._has_new_hosts = False
        self._stop_told: Stop | None = None
        self._failures = self._starts = self._world_size = 0
        # The monotonic times of those of the last hour, and the steps before.
        self._recoveries: list[tuple[float, int]] = []
        self._run_id = nodes.run_id or uuid.uuid4().hex

    def first_start(self) -> RankRange | Result:
        """Wait until enough launchers have joined; returns the ranks of this host, or the result if there is no start."""
        nodes, reported = self._nodes, len(self._lost)
        began, enough_since = time.monotonic(), float("inf")
        while not self._stopped():
            self._serve()
            now, present, lost = time.monotonic(), 1 + len(self._known), self._lost[reported:]
            if lost and self._too_few:
                return self._end(lost[0])
            if self._listener is None:
                ready = present > len(self._members) and now >= self._hosts_dead_at
            else:
                enough = present >= nodes.least and nodes.fits(sum(self._places()))
                enough_since = min(enough_since, now) if enough else float("inf")
                ready = present >= nodes.most or enough_since + nodes.last_call_seconds * (not self._starts) <= now
            if ready:
                if lost:
                    self._explain_restart(lost[0])
                return self._start()
            if self._listener is not None and now > began + _JOIN_SECONDS:
                few = f"{present} came to {nodes.endpoint} in time, and at least {nodes.least} are needed"
                return self._end(WorkersFailed(message=f"of the hosts (--nnodes), {few}", exit_code=1))
            self._wait()
        return 0

    def poll(self) -> Stop | None:
        """Return how ranks have to end or rest, or None to let them run."""
        self._serve()
        waiting = self._nodes.grows and not all(each.numbered for each in self._known)
        self._has_new_hosts = waiting and sum(self._places()) > self._world_size
        failures, now = [each.failure for each in self._members if each.failure], time.monotonic()
        self._failed_at = now if failures and self._failed_at is None else self._failed_at
        late = self._failed_at is not None and now >= self._failed_at + self._nodes.cause_seconds
        failed = late or bool(self._lost) or any(not each.distance for each in failures)
        if self._has_new_hosts or (failed and not self.ending):
            self._stop(min([*self._lost, *failures], key=lambda each: each.distance, default=None))
        return self._stop_told

    def next_start(self, failure: WorkersFailed | None) -> RankRange | Result:
        """Wait until other hosts' ranks have ended, as this host's have; returns its ranks in the next start, or the result."""
        if failure is not None:
            self._stop(failure)
            self._processes -= failure.left_out * (failure.left_out < self._processes)
        while self.running:
            self.poll()
            if self._stopped():
                return 0
            self._wait()
        found = [failure] if failure else []
        for each in self._members:
            if each.failure:
                found.append(replace(each.failure, message=f"host {each.name}: {each.failure.message}"))
                each.processes -= each.failure.left_out * (each.failure.left_out < each.processes)
        cause = min([*found, *self._lost], key=lambda each: each.distance > 0, default=None)
        if cause is None:
            return self._end(0)
        if cause.exit_code == USERS_MISTAKE or (self._lost and self._too_few):
            return self._end(cause)
        recovers = not self._has_new_hosts and self._recovers(found)
        if not self._lost and not self._has_new_hosts and not recovers:
            self._failures += 1
            if self._failures > self._nodes.max_restarts:
                return self._end(cause)
        if not self._stopped():  # After a stop, ranks end like failed ones, and none start again.
            self._explain_restart(cause, recovers=recovers)
            lacks_one = not self._nodes.fits(sum(self._places()))
            if (few := max(self._nodes.least - 1 - len(self._known), int(lacks_one))) > 0:
                self._notify(f"waiting for {counted(few, 'more host')}")
        return self.first_start()

    def _recovers(self, failures: Sequence[WorkersFailed]) -> bool:
        """Return True if there are ranks that have not failed themselves, which go on, within their limit, and count that."""
        now, limit = time.monotonic(), max((each.limit for each in failures), default=0)
        step = max((each.step for each in failures), default=0)
        self._recoveries = [each for each in self._recoveries if each[0] > now - _HOUR]
        before = [each for _, each in self._recoveries[1 - _SAME_STEP :]]
        if len(self._recoveries) >= limit or before == [step] * (_SAME_STEP - 1):
            return False
        self._recoveries.append((now, step))
        return True

    def close(self) -> None:
        """Leave, and tell the connected launchers that the run is over."""
        self._end(WorkersFailed(message=f"the launcher at {self._nodes.endpoint} has ended", exit_code=1))

    @property
    def running(self) -> bool:
        """True if ranks of other hosts have not ended."""
        return any(each.running for each in self._members)

    @property
    def _known(self) -> list[Member]:
        return [each for each in self._members if each.processes]

    @property
    def _too_few(self) -> bool:
        """True if the run does not go on without the hosts that are lost."""
        return self._nodes.rank is not None if self._listener else 1 + len(self._members) < self._nodes.least

    @property
    def _candidates(self) -> list[Member]:
        return sorted(self._known, key=lambda each: each.rank or 0)[: self._nodes.most - 1]

    def _places(self) -> list[int]:
        """Return how many ranks of this host, and of each candidate in turn, have places in the largest mesh that they make."""
        there = [self._processes, *(each.processes for each in self._candidates)]
        left = next((each for each in range(sum(there), 0, -1) if self._nodes.fits(each)), sum(there))
        found: list[int] = []
        for each in there:
            found.append(min(each, left - sum(found)))
        return found

    def _start(self) -> RankRange:
        """Number the hosts, this one first, and send each its ranks."""
        members, (own, *others) = self._candidates, self._places()
        counts = {id(each): count for each, count in zip(members, others, strict=True) if count}
        there, members = self._processes + sum(each.processes for each in members), members[: len(counts)]
        self._world_size = own + sum(others)
        if self._world_size < there:
            self._notify(f"{self._world_size} of {there} ranks make a mesh (parallel), and the others wait")
        if self._address_of is not None:
            host, port = self._address_of(members)
        else:
            # On one host the ranks do not listen on this port; only the user's code may.
            with listen(self._nodes.where[0], 0) as free:
                host, port = self._nodes.where[0], free.getsockname()[1]
        assigned = RankRange(
            first=0,
            processes=own,
            world_size=self._world_size,
            master_address=host,
            master_port=port,
            run_id=self._run_id,
            restart=self._starts,
        )
        first = own
        for each in members:
            each.connection.send({"start": {**asdict(assigned), "first": first, "processes": counts[id(each)]}})
            each.running, each.failure = True, None
            first += counts[id(each)]
        for each in self._members:
            each.numbered = each in members
        self._starts += 1
        self._lost, self._failed_at, self._has_new_hosts, self._stop_told = [], None, False, None
        return assigned

    def _stop(self, cause: WorkersFailed | None) -> None:
        if self._stop_told is None:
            reason = "another host has come" if cause is None else str(cause)
            self._stop_told = Stop(self._nodes.rest_seconds, reason, cause is None)
            self.send({"stop": self._stop_told.seconds, "reason": reason, "after_step": cause is None})

    def send(self, message: Message) -> None:
        """Send a message to all launchers that have introduced themselves."""
        for each in self._known:
            each.connection.send(message)

    def _end(self, result: Result) -> Result:
        code, reason = (result, "") if isinstance(result, int) else (result.exit_code, str(result))
        self.send({"over": {"code": code, "text": reason}})
        while self._members:
            self._members.pop().connection.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        return result

    def _explain_restart(self, cause: WorkersFailed, *, recovers: bool = False) -> None:
        again = f"all ranks start again from {self._nodes.restarts_from}"
        if recovers:
            again = "the run goes on, with new processes for the ranks that have ended"
        if names := [each.name for each in self._members if each.slots]:
            hosts, processes = counted(len(names), "host"), sum(each.slots for each in self._members)
            self._notify(str(cause))
            self._notify(
                f"going on from {self._nodes.restarts_from} with {hosts} ({', '.join(names)}) and {counted(processes, 'process')}"
            )
        elif self._lost:
            self._notify(f"{'; '.join(map(str, self._lost))}; {again}")
        elif self._has_new_hosts:
            self._notify("another host has come; all ranks go on with it")
        elif recovers:
            self._notify(f"{cause}\nzeromesh: {again}")
        else:
            self._notify(f"{cause}\nzeromesh: {again}: restart {self._failures} of {self._nodes.max_restarts}")

    def _wait(self) -> None:
        streams = [stream for each in self._members for stream in each.connection.readers]
        select.select([*streams, *([self._listener] if self._listener else [])], [], [], _TICK_SECONDS)

    def _serve(self) -> None:
        """Accept connections and handle the messages that have arrived, without waiting."""
        with suppress(OSError):
            while self._listener is not None:
                accepted, (address, *_) = self._listener.accept()
                if len(self._members) - len(self._known) >= _MOST_STRANGERS:
                    accepted.close()
                else:
                    silence = self._nodes.silence_seconds
                    connection = LauncherConnection(
                        accepted, accepted, self._secret, serves=True, silence_seconds=silence
                    )
                    self._members.append(Member(connection=connection, name=str(address), address=str(address)))
        for each in list(self._members):
            try:
                for message in each.connection.receive():
                    self._take(each, message)
            except (MessageError, ConnectionError) as error:
                self._report_loss(each, error)
                each.connection.close()
                self._members.remove(each)

    def _report_loss(self, each: Member, error: MessageError | ConnectionError) -> None:
        if self._listener is not None and isinstance(error, MessageError):
            # A stranger may connect here: one line per address, and for a few addresses only.
            if each.name not in self._refused and len(self._refused) < _MOST_STRANGERS:
                self._refused.add(each.name)
                self._notify(f"{each.name}, which came to {self._nodes.endpoint}, is refused: {error}")
            each.connection.send({"over": {"code": 1, "text": str(error)}})
        if each.running or (each.slots and not each.numbered):
            reason, safe_at = each.connection.loss(error)
            self._lost.append(WorkersFailed(message=f"host {each.name}{reason}", exit_code=1))
            self._hosts_dead_at = max(self._hosts_dead_at, safe_at)

    def _take(self, each: Member, message: Message) -> None:
        """Handle a message: the first of a launcher introduces it, `rest` says that its ranks have ended."""
        if not each.processes:
            self._introduce(each, message)
        elif "rest" in message and each.running:
            each.running = False
            if code := field(message, "rest", messages.MISSING, most=messages.MAX_EXIT_CODE):
                text, noticed = field(message, "text", ""), field(message, "noticed", False)
                limit, step, left_out = (field(message, name, 0) for name in ("limit", "step", "left_out"))
                each.failure = WorkersFailed(
                    message=text, exit_code=code, distance=int(noticed), limit=limit, step=step, left_out=left_out
                )

    def _introduce(self, each: Member, message: Message) -> None:
        if each.greeting is not None:
            each.processes = each.slots
            each.connection.send(each.greeting)
            return
        processes = field(message, "processes", messages.MISSING, least=1, most=messages.MAX_PROCESSES)
        if field(message, "run_id", "") != self._nodes.run_id:
            raise MessageError(f"its --rdzv-id is {message.get('run_id')!r}, not {self._nodes.run_id!r}")
        if not field(message, "name", "").isprintable():
            raise MessageError("its host's name has characters that cannot be printed")
        each.name = field(message, "name", "")
        if self._nodes.rank is not None:
            each.rank = field(message, "rank", messages.MISSING, least=1, most=self._nodes.most - 1)
            if each.rank in [other.rank for other in self._known]:
                raise MessageError(f"--node-rank {each.rank} is there twice")
        each.processes = processes


class Follower:
    """A launcher that starts ranks when its leader says so, and kills them if that is gone. `attach` connects it to the `zeromesh
    launch` that has started it, which also sends variables and signals; without it the follower goes to the endpoint."""

    def __init__(
        self, nodes: Nodes, processes: int, stopped: Stopped, attach: Callable[[], LauncherConnection] | None = None
    ) -> None:
        self._nodes, self._processes, self._stopped, self._attach = nodes, processes, stopped, attach
        self.rest_seconds = REST_SECONDS if attach is None else 0
        """Seconds that ranks here have to end when the run is over."""
        self._connection: LauncherConnection | None = None
        self._result: Result | None = None
        self._assigned: RankRange | None = None
        self._stop: Stop | None = None

    def first_start(self) -> RankRange | Result:
        until = time.monotonic() + (_REACH_SECONDS if self._attach is None else 0.0)
        while self._connection is None:
            try:
                self._connection = self._join((self._attach or self._dial)())
            except OSError as error:
                if time.monotonic() > until:
                    return self._unreachable_error(error.strerror or str(error))
                time.sleep(4 * _TICK_SECONDS)
            if self._stopped():
                return 0
        return self._wait()

    def _dial(self) -> LauncherConnection:
        reached = socket.create_connection(self._nodes.where, timeout=messages.HELLO_SECONDS)
        silence = self._nodes.silence_seconds
        return LauncherConnection(reached, reached, setting(SECRET) or "", serves=False, silence_seconds=silence)

    def poll(self) -> Stop | None:
        self._receive()
        return self._stop

    def next_start(self, failure: WorkersFailed | None) -> RankRange | Result:
        """Tell the leader that the ranks here have ended; returns the ranks of the next start, or the result of the run."""
        self._receive()  # Sending to a leader that has ended would lose its last message.
        if self._connection is not None:
            end = failure or WorkersFailed(message="", exit_code=0)
            code, noticed = min(end.exit_code, messages.MAX_EXIT_CODE), end.distance > 0
            counts = {"limit": end.limit, "step": end.step, "left_out": end.left_out}
            self._connection.send({"rest": code, "text": str(end), "noticed": noticed, **counts})
        found = self._wait()
        # A cause on this host says more than the leader's text; ranks that only noticed a failure say less.
        if failure is not None and not failure.distance and isinstance(found, WorkersFailed):
            return failure
        return found

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _join(self, connection: LauncherConnection) -> LauncherConnection:
        """Introduce this launcher to the leader at the other end. Raises `OSError` where there is none."""
        try:
            while not connection.receive():
                select.select(connection.readers, [], [], _TICK_SECONDS)
        except MessageError as error:
            raise ConfigError(f"--rdzv-endpoint {self._nodes.endpoint}: {error}") from error
        except ConnectionError:
            raise ConnectionError("what listens there is no launcher of zeromesh, or it is about to end") from None
        nodes = self._nodes
        introduction = {"processes": self._processes, "run_id": nodes.run_id, "rank": nodes.rank or 0}
        connection.send({**introduction, "name": socket.gethostname(), "drawn": connection.drawn})
        return connection

    def _wait(self) -> RankRange | Result:
        while not self._stopped():
            self._receive()
            if self._result is not None:
                return self._result
            if self._assigned is not None:
                assigned, self._assigned, self._stop = self._assigned, None, None
                return assigned
            if self._connection is not None:
                select.select(self._connection.readers, [], [], _TICK_SECONDS)
        return 0

    def _receive(self) -> None:
        if self._connection is None:
            return
        try:
            for message in self._connection.receive():
                self._take(message)
        except (MessageError, ConnectionError) as error:
            if self._result is None:
                self._result, self._stop = self._unreachable_error(str(error)), Stop(0)
        if self._result is not None:
            self._stop = self._stop or Stop(self.rest_seconds)
            self.close()

    def _take(self, message: Message) -> None:
        if "start" in message:
            self._assigned = messages.rank_range(message)
        elif "stop" in message:
            seconds, reason = field(message, "stop", messages.MISSING), field(message, "reason", "")
            self._stop = Stop(seconds, reason, field(message, "after_step", False))
        elif "over" in message:
            end = field(message, "over", {})
            code = field(end, "code", messages.MISSING, most=messages.MAX_EXIT_CODE)
            self._result = code and WorkersFailed(message=field(end, "text", ""), exit_code=code, distance=1)
        elif self._attach is not None and "variables" in message:
            export(messages.variables(message))
        elif self._attach is not None and "signal" in message:
            os.kill(os.getpid(), field(message, "signal", messages.MISSING, least=1, most=signal.NSIG - 1))

    def _unreachable_error(self, reason: str) -> WorkersFailed:
        message = (
            f"the launcher at {self._nodes.endpoint}, which the others meet at, cannot be reached from here ({reason}); once it is "
            "there, start all again, and the run goes on from its newest checkpoint"
        )
        return WorkersFailed(message=message, exit_code=1)


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
        others: Leader | Follower = Follower(nodes, processes, stopped)
        if must_lead or (nodes.rank is None and is_this_host(nodes.where[0])):
            try:
                others = Leader(nodes, processes, notify, stopped)
            except ConfigError as error:  # Without numbers, the first launcher that can listen at the endpoint leads.
                cause = error.__cause__
                if must_lead or not (isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE):
                    raise
        return run_starts(arguments, others, requests, notify, modules, processes)


def run_starts(
    arguments: Sequence[str],
    others: Leader | Follower,
    requests: StopSignals,
    notify: Notify,
    modules: Sequence[str] = TRAINER,
    processes: int = 0,
) -> Result:
    """Run the ranks of this host, again as often as `others` says, and leave these; returns as `launch_workers` does. `processes`
    is the number of ranks; 0: `others` knows it."""
    nursery, ranks = None, RankProcesses(arguments)
    try:
        if processes:
            nursery = Nursery(modules, worker_environment(processes, alone=False), notify)
            # Ranks that rest for a host that joins their run do not wait for its imports.
            while isinstance(others, Follower) and not (nursery.ready or requests.pending):
                nursery.receive(_TICK_SECONDS)
        found = others.first_start()
        while isinstance(found, RankRange) and not requests.first:
            if nursery is None or nursery.lost:
                shared = worker_environment(found.processes, alone=False)
                nursery = Nursery(modules if found.processes else (), shared, notify)
            found = others.next_start(_run(ranks, found, others, requests, nursery))
    finally:
        others.close()
        ranks.close()
        if nursery is not None:
            nursery.close()
    return requests.exit_code() or (0 if isinstance(found, RankRange) else found)


def _run(
    ranks: RankProcesses, assigned: RankRange, others: Leader | Follower, requests: StopSignals, nursery: Nursery
) -> WorkersFailed | None:
    """Start ranks, pass signals on until all have ended or rest, and return the failure that caused the others."""
    while not nursery.ready:
        if requests.pending:
            name = signal.Signals(requests.pending[0]).name
            return WorkersFailed(message=f"stopped by {name} while importing", exit_code=128 + requests.pending[0])
        if others.poll() is not None:  # These ranks have not ended well: they have not begun.
            return WorkersFailed(message="others stopped it while it imported", exit_code=1, distance=1)
        nursery.receive(_TICK_SECONDS)
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
        time.sleep(_TICK_SECONDS)
    return ranks.failure()
