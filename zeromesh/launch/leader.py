"""The launcher that leads: it waits for enough launchers, numbers the hosts, and sends each its ranks. When a rank fails, or a host
is lost or joins, all ranks end, or rest if they can do without the others, and the leader numbers the hosts anew."""

import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zeromesh.environment import LOOPBACK, SECRET, RankRange, setting
from zeromesh.errors import ConfigError, counted
from zeromesh.launch import messages
from zeromesh.launch.messages import LauncherConnection, Message, MessageError, field
from zeromesh.launch.rank_processes import STOPPED, USERS_MISTAKE, WorkersFailed
from zeromesh.mesh.network_interfaces import listen

_JOIN_SECONDS = 600.0  # until there are enough launchers
_SAME_STEP = 3  # recoveries after the same step, each of which failed before the next one was made: the run ends then
_HOUR = 3600.0
MARGIN_SECONDS = 1.0  # beyond the silence after which a launcher has surely killed its ranks
_MOST_STRANGERS = 64  # connections that have not introduced themselves, and addresses that are told of


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
    rest_seconds: int = messages.REST_SECONDS
    """Seconds that ranks may take to save and end before a restart; 0: those that do not stay are killed."""
    last_call_seconds: float = 1.0
    """Seconds for further launchers to come before the first start, once there are enough of them."""
    cause_seconds: float = 0.0
    """Seconds that ranks go on after one has noticed another's failure, until that one is reported or lost."""
    grows: bool = True
    """True if hosts that come later are taken in after the present step, and False if they wait until another is lost."""
    fits: Callable[[int], bool] = bool
    """Tells if a number of ranks makes a mesh; those above the largest such number wait."""
    settings: Message | None = None  # which all launchers that have some must have alike
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
    port: int = 0  # that it listens on, to lead if it has to
    drawn: str = ""  # its name among heirs
    processes: int = 0
    slots: int = 0  # the number of its ranks, if the leader has started it and so knows; it is then sent the `greeting`
    greeting: Message | None = None
    rank: int | None = None
    numbered: bool = False  # True if the launcher has ranks in the latest start of the run
    running: bool = False  # True if the launcher's ranks of the latest start have not ended
    failure: WorkersFailed | None = None
    began: bool = False  # True if it has said that it knows of the latest start
    on_trial: bool = False  # True if it came to a run that had begun, and its ranks have been the first to fail in each start since


class Leader:
    """The launcher that numbers the ranks of all hosts: of those that come to its endpoint, or of `members` that it has started.
    `address_of` refuses members that cannot go on together, or returns the address and port at which their ranks meet; by default
    they meet at this host. An heir has its `listener` already. Raises `ConfigError` when this host cannot listen at the endpoint.

    Where followers can lead, a leader that is silent may still have ranks that train, and so may its followers without it. Only
    those go on who are more than half of the launchers that may be alive; where they are just half, the leader's, or else those
    of the first heir. A start counts by those who took part in it, once all of these have said that they know of it."""

    def __init__(
        self,
        nodes: Nodes,
        processes: int,
        notify: Notify,
        stopped: Stopped,
        *,
        members: list[Member] | None = None,
        address_of: Callable[[Sequence[Member]], tuple[str, int]] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._nodes, self.processes = nodes, processes
        self.notify, self._stopped, self._address_of = notify, stopped, address_of
        self._secret = setting(SECRET) or ""
        self._listener = listener or (listen(*nodes.where) if nodes.most > 1 and members is None else None)
        if self._listener is not None:
            self._listener.setblocking(False)
        self._comes_and_goes = self._listener is not None and nodes.least < nodes.most
        self._members: list[Member] = [] if members is None else members
        self.ending = False
        """True once ranks were signalled to stop: a failure then does not stop the other ranks, which may still be saving."""
        self._lost: list[WorkersFailed] = []  # the members lost since the latest start
        self._hosts_dead_at = 0.0  # the monotonic time after which no process of the run is alive on lost hosts
        self._failed_at: float | None = None
        self._refused: set[str] = set()
        self._has_new_hosts = self._replaces = False
        """`_replaces`: the next start has the hosts of the latest one, since it goes on from the memory of their ranks."""
        self.waits = False  # True while fewer hosts are there than a start needs
        self._stop_told: Stop | None = None
        self._failures = self._starts = self._world_size = 0
        # The monotonic times of those of the last hour, and the steps before.
        self._recoveries: list[tuple[float, int]] = []
        self._run_id = nodes.run_id or uuid.uuid4().hex
        self._will: Message = {}
        # The other launchers, by name, of each start since the latest one that all of its launchers know of.
        self._electorates: list[set[str]] = []
        self._silent, self._gone = set[str](), set[str]()  # those of them that are silent, or have surely ended
        self._come_until = 0.0  # the monotonic time until which silent ones may come to this heir
        self._wins_ties = True
        self.moved: Message | None = None
        """The message that tells where the run goes on, if others lead it already."""

    def first_start(self) -> RankRange | Result:
        """Wait until enough launchers have joined; returns the ranks of this host, or the result if there is no start."""
        nodes, reported = self._nodes, len(self._lost)
        began, enough_since = time.monotonic(), float("inf")
        while not self._stopped():
            self._serve()
            now, present, lost = time.monotonic(), 1 + len(self._known), self._lost[reported:]
            if self._is_cut_off:
                return self._end_cut_off()
            if lost and self._too_few:
                return self._end(lost[0])
            if self.moved is not None:
                return self._end(WorkersFailed(message="another launcher leads the run", exit_code=1), self.moved)
            if self._listener is None:
                ready = present > len(self._members) and now >= self._hosts_dead_at
            else:
                enough = present >= nodes.least and nodes.fits(sum(self._places())) and not self.lacks()
                enough_since = min(enough_since, now) if enough else float("inf")
                before, self.waits = self.waits, not (enough or (self._silent and now < self._come_until))
                if self.waits and not before:
                    self.send({"waits": True})
                wait = nodes.last_call_seconds * (not self._starts and present < nodes.most)
                if self._come_until and self._silent:
                    # A leader that lives has noticed after one such time; whom only it reaches, as much later at most.
                    wait = (1 + (self._silent != {""})) * nodes.silence_seconds + MARGIN_SECONDS
                ready = enough_since + wait <= now
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
        if self._is_cut_off and self._stop_told != Stop(0):
            self._stop_told = Stop(0)
            self.send({"stop": 0})
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
            self.processes -= failure.left_out * (failure.left_out < self.processes)
        while self.running or self._is_cut_off:
            self.poll()
            if self._is_cut_off:
                return self._end_cut_off()
            if self._stopped():
                return 0
            self._wait()
        found = [failure] if failure else []
        for each in self._members:
            each.on_trial &= not each.numbered or (each.failure is not None and not each.failure.distance)
            if each.failure:
                found.append(replace(each.failure, message=f"host {each.name}: {each.failure.message}"))
                each.processes -= each.failure.left_out * (each.failure.left_out < each.processes)
        cause = min([*found, *self._lost], key=lambda each: each.distance, default=None)
        if cause is None:
            return self._end(0)
        if (cause.exit_code == USERS_MISTAKE and not self._leaves_out()) or (self._lost and self._too_few):
            return self._end(cause)
        # Hosts that have come are taken in once the steps that are in memory are safe.
        died = any(each.limit and not each.distance and each.exit_code not in STOPPED for each in found)
        self._has_new_hosts = self._has_new_hosts and not died
        self._replaces = recovers = not self._has_new_hosts and self._recovers(found)
        if not (self._lost or self._has_new_hosts or recovers or self._leaves_out(sum(not each.distance for each in found))):
            self._failures += 1
            if self._failures > self._nodes.max_restarts:
                return self._end(cause)
        if not self._stopped():  # After a stop, ranks end like failed ones, and none start again.
            self._explain_restart(cause, recovers=recovers)
            lacks_one = not self._nodes.fits(sum(self._places()))
            if (few := max(self._nodes.least - 1 - len(self._known), int(lacks_one))) > 0:
                self.notify(f"waiting for {counted(few, 'more host')}")
        return self.first_start()

    def _leaves_out(self, among: int | None = None) -> bool:
        """Leave out hosts on trial that have failed, if these are all of the `among` that have. Returns True if there are any."""
        failed = [each for each in self._members if each.on_trial and each.failure]
        if among not in (None, len(failed)):
            return False
        for each in failed:
            cause: Any = each.failure
            why = f"host {each.name} is left out, as its ranks have failed in each start since it came ({cause.message})"
            each.connection.send({"over": {"code": cause.exit_code, "text": why}})
            each.connection.close()
            self._members.remove(each)
            self._lost.append(replace(cause, message=why))
        return bool(failed)

    def _recovers(self, failures: Sequence[WorkersFailed]) -> bool:
        """Return True if there are ranks that have not failed themselves, which go on, within their limit, and count that."""
        now, limit = time.monotonic(), max((each.limit for each in failures), default=0)
        step = max((each.step for each in failures), default=0)
        self._recoveries = [each for each in self._recoveries if each[0] > now - _HOUR]
        stuck = [each for _, each in self._recoveries[1 - _SAME_STEP :]] == [step] * (_SAME_STEP - 1)
        if len(self._recoveries) >= limit or stuck:
            if limit:
                self.notify(f"no more recovery: {f'the third after step {step}' if stuck else f'its limit is {limit}'}")
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

    def lacks(self) -> bool:
        """Return True if more than half of the launchers may go on without this one."""
        tie = not self._wins_ties
        return any(2 * len(each & self._silent) + tie > 1 + len(each - self._gone) for each in self._electorates)

    @property
    def _is_cut_off(self) -> bool:
        return self.lacks() and time.monotonic() >= self._come_until

    @property
    def _known(self) -> list[Member]:
        return [each for each in self._members if each.processes]

    @property
    def _too_few(self) -> bool:
        """True if the run does not go on without the hosts that are lost."""
        return self._nodes.rank is not None if self._listener else 1 + len(self._members) < self._nodes.least

    @property
    def _candidates(self) -> list[Member]:
        there = [each for each in self._known if each.numbered or self._lost or not self._replaces]
        return sorted(there, key=lambda each: each.rank or 0)[: self._nodes.most - 1]

    def _places(self) -> list[int]:
        """Return how many ranks of this host, and of each candidate in turn, have places in the largest mesh that they make."""
        there = [self.processes, *(each.processes for each in self._candidates)]
        left = next((each for each in range(sum(there), 0, -1) if self._nodes.fits(each)), sum(there))
        found: list[int] = []
        for each in there:
            found.append(min(each, left - sum(found)))
        return found

    def _start(self) -> RankRange:
        found, (own, *others) = self._candidates, self._places()
        counts = {each: count for each, count in zip(found, others, strict=True) if count}
        there, self._world_size = self.processes + sum(each.processes for each in found), own + sum(others)
        if self._world_size < there:
            self.notify(f"{self._world_size} of {there} ranks make a mesh (parallel), and the others wait")
        if self._address_of is not None:
            host, port = self._address_of([*counts])
        else:
            # On one host the ranks do not listen on this port; only the user's code may.
            with listen(self._nodes.where[0], 0) as free:
                host, port = self._nodes.where[0], free.getsockname()[1]
        start: dict[str, Any] = {"world_size": self._world_size, "run_id": self._run_id, "restart": self._starts}
        start |= {"master_address": host, "master_port": port, "hosts": self._nodes.most - (not self.processes)}
        first, self._will = own, {}
        if self._listener is not None and self._nodes.rank is None and self.processes:
            self._will = self._last_will(counts)
        for each, count in counts.items():
            each.connection.send({"start": {**start, "first": first, "processes": count}, **self._will})
            each.running, each.failure, each.began = True, None, False
            first += count
        for each in self._members:
            each.numbered = each in counts
            if self._will and each in self._known and not each.numbered:
                each.connection.send(self._will)
        self._come_until, self._wins_ties = 0.0, True
        self._count_electors()
        self._starts, self._replaces = self._starts + 1, False
        self._lost, self._failed_at, self._has_new_hosts, self._stop_told = [], None, False, None
        return RankRange(first=0, processes=own, **start)

    def _count_electors(self) -> None:
        """Forget those of earlier starts if all launchers of the latest one know of it: they do not go on by an earlier one."""
        if all(each.began for each in self._members if each.numbered):
            self._electorates = self._electorates[-1:]

    def _last_will(self, members: Iterable[Member]) -> Message:
        """Return the message that tells what launchers have to know to go on without this one."""
        now, heirs = time.monotonic(), {each.drawn: f"{each.address}:{each.port}" for each in members}
        self._electorates.append({*heirs})
        recoveries = {str(int(1000 * (now - at))): step for at, step in self._recoveries}
        return {"heirs": heirs, "leader": socket.gethostname(), "failures": self._failures, "recoveries": recoveries}

    def inherit(self, will: Message, drawn: str, latest: RankRange, ended: set[str], lost: WorkersFailed, former: str) -> None:
        """Go on as the leader would that is `lost`, by what it has left, as its heir `drawn`. Of the leader, whose name is empty,
        and the heirs before this one those have surely `ended`; new launchers come to the endpoint `former`."""
        heirs, now = [*messages.heirs(will)], time.monotonic()
        before, later = {"", *heirs[: heirs.index(drawn)]}, {*heirs[heirs.index(drawn) + 1 :]}
        self._electorates, self._gone, self._silent = [before | later], ended, before - ended
        self._wins_ties, self._lost = before == ended, [lost]
        # Nobody is waited for where all later ones together would not be enough.
        self._come_until = 0.0 if self.lacks() else now + messages.REACH_SECONDS
        self._silent |= later
        self._starts, self._world_size, self._run_id = latest.restart + 1, latest.world_size, latest.run_id
        self._failures, recoveries = field(will, "failures", 0), field(will, "recoveries", {})
        self._recoveries = [(now - int(age) / 1000, field(recoveries, age, 0)) for age in recoveries if age.isdecimal()]
        told = {"heirs": {drawn: self._nodes.endpoint}, "run_id": self._nodes.run_id}
        threading.Thread(target=self._watch, args=(former, told), name="former", daemon=True).start()
        self.notify(f"this host leads from now on; others join at --rdzv-endpoint {self._nodes.endpoint}")

    def _watch(self, former: str, told: Message) -> None:
        """Tell launchers that lead at the endpoint `former`, such as that of a host which is back, where the run goes on."""
        where, seconds = replace(self._nodes, endpoint=former).where, messages.LOOK_SECONDS
        while self._listener is not None:
            with suppress(OSError, MessageError):
                reached = socket.create_connection(where, timeout=seconds)
                found = LauncherConnection(reached, reached, self._secret, serves=False)
                with closing(found):
                    while not found.receive():
                        select.select(found.readers, [], [], messages.TICK_SECONDS)
                    found.send({**told, "drawn": found.drawn})
            time.sleep(seconds)

    def _stop(self, cause: WorkersFailed | None) -> None:
        if self._stop_told is None:
            reason = "another host has come" if cause is None else str(cause)
            self._stop_told = Stop(self._nodes.rest_seconds, reason, cause is None)
            self.send({"stop": self._stop_told.seconds, "reason": reason, "after_step": cause is None})

    def send(self, message: Message) -> None:
        """Send a message to all launchers that have introduced themselves."""
        for each in self._known:
            each.connection.send(message)

    def _end(self, result: Result, last: Message | None = None) -> Result:
        code, reason = (result, "") if isinstance(result, int) else (result.exit_code, str(result))
        self.send(last or {"over": {"code": code, "text": reason}})
        while self._members:
            self._members.pop().connection.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        return result

    def _end_cut_off(self) -> Result:
        others = max((each - self._gone for each in self._electorates), key=len)
        alive = f"{len(others & self._silent)} of {1 + len(others)} launchers may be alive elsewhere"
        why = f"{alive}, and only more than half go on, so that no two runs write into one directory"
        again = "it joins those, or once all hosts reach each other it goes on from the newest checkpoint"
        message = f"{'; '.join(map(str, self._lost))}: {why}. Start the same command again: {again}"
        return self._end(WorkersFailed(message=message, exit_code=1))

    def _explain_restart(self, cause: WorkersFailed, *, recovers: bool = False) -> None:
        again = f"all ranks start again from {self._nodes.restarts_from}"
        if recovers:
            again = "the run goes on, with new processes for the ranks that have ended"
        if names := [each.name for each in self._members if each.slots]:
            hosts, processes = counted(len(names), "host"), sum(each.slots for each in self._members)
            left = f"{hosts} ({', '.join(names)}) and {counted(processes, 'process')}"
            self.notify("; ".join(map(str, self._lost or [cause])))
            self.notify(f"going on from {self._nodes.restarts_from} with {left}")
        elif self._lost:
            self.notify(f"{'; '.join(map(str, self._lost))}; {again}")
        elif self._has_new_hosts:
            self.notify("another host has come; all ranks go on with it")
        else:
            count = "" if recovers else f": restart {self._failures} of {self._nodes.max_restarts}"
            self.notify(f"{cause}\nzeromesh: {again}{count}")

    def _wait(self) -> None:
        streams = [stream for each in self._members for stream in each.connection.readers]
        select.select([*streams, *([self._listener] if self._listener else [])], [], [], messages.TICK_SECONDS)

    def _serve(self) -> None:
        """Accept connections and handle the messages that have arrived, without waiting."""
        with suppress(OSError):
            while self._listener is not None:
                accepted, (address, *_) = self._listener.accept()
                if len(self._members) - len(self._known) >= _MOST_STRANGERS:
                    accepted.close()
                    continue
                silence, name = self._nodes.silence_seconds, str(address)
                connection = LauncherConnection(accepted, accepted, self._secret, serves=True, silence_seconds=silence)
                self._members.append(Member(connection=connection, name=name, address=name))
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
                self.notify(f"{each.name}, which came to {self._nodes.endpoint}, is refused: {error}")
            each.connection.send({"over": {"code": 1, "text": str(error)}})
        if each.drawn and any(each.drawn in names for names in self._electorates):  # A stranger has no name.
            (self._gone if each.connection.was_closed else self._silent).add(each.drawn)
        if each.running or (each.slots and not each.numbered):
            reason, safe_at = each.connection.loss(error)
            self._lost.append(WorkersFailed(message=f"host {each.name}{reason}", exit_code=1))
            self._hosts_dead_at = max(self._hosts_dead_at, safe_at)

    def _take(self, each: Member, message: Message) -> None:
        """Handle a message: the first of a launcher introduces it, `rest` says that its ranks `of` the latest start have ended."""
        if not each.processes:
            self._introduce(each, message)
        elif "began" in message:
            each.began = field(message, "began", 0) == self._starts - 1
            self._count_electors()
        elif "left" in message:
            raise ConnectionError("it takes this leader for lost, and closes the connection alive")
        elif self._comes_and_goes and field(message, "leaves", False):
            raise ConnectionError("it was asked to end, as its ranks have, and others go on without it")
        elif "rest" in message and each.running and field(message, "of", self._starts) >= self._starts - 1:
            each.running = False
            if code := field(message, "rest", messages.MISSING, most=messages.MAX_EXIT_CODE):
                text, noticed = field(message, "text", ""), field(message, "noticed", False)
                counts: dict[str, Any] = {name: field(message, name, 0) for name in ("limit", "step", "left_out")}
                each.failure = WorkersFailed(message=text, exit_code=code, distance=int(noticed), **counts)

    def _introduce(self, each: Member, message: Message) -> None:
        if each.greeting is not None:
            each.processes = each.slots
            each.connection.send(each.greeting)
            return
        if field(message, "run_id", "") != self._nodes.run_id:
            raise MessageError(f"its --rdzv-id is {message.get('run_id')!r}, not {self._nodes.run_id!r}")
        if not field(message, "name", "").isprintable():
            raise MessageError("its host's name has characters that cannot be printed")
        theirs = field(message, "settings", {})
        for key, value in (self._nodes.settings or {}).items():
            if (other := theirs.get(key, value)) != value:
                raise MessageError(f"its {key} is {other!r:.99}, not {value!r:.99}; give all hosts the same")
        if "heirs" in message and self._listener is not None and self._nodes.rank is None:
            self.moved = None if self._starts or not messages.heirs(message) else message
            return
        processes = field(message, "processes", messages.MISSING, least=1, most=messages.MAX_PROCESSES)
        each.name, each.drawn = field(message, "name", ""), field(message, "heir", "")
        each.port, running = field(message, "port", 0, most=65535), field(message, "running", False)
        if self._nodes.rank is not None:
            each.rank = field(message, "rank", messages.MISSING, least=1, most=self._nodes.most - 1)
            if each.rank in [other.rank for other in self._known]:
                raise MessageError(f"--node-rank {each.rank} is there twice")
        # It may come from a lost leader, and have ranks that end or come to rest.
        each.processes, each.running, each.on_trial = processes, running, bool(self._starts) and not running
        self._silent.discard(each.drawn)
        if self._will:
            each.connection.send(self._will)
