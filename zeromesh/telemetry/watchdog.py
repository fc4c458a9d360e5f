"""`Watchdog`: bounds every wait for another rank, and names the ranks waited for."""

import math
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Protocol

from zeromesh.errors import CollectiveError, ZeromeshError, ranks_text
from zeromesh.files import DISK_CALLS, longest_disk_call
from zeromesh.overrides import override
from zeromesh.telemetry import status_board
from zeromesh.telemetry.status_board import STEP_SHIFT, UNIT_BITS, Activity, EventRing, RankNote, StatusBoard, phrase_of

_ANNOUNCED = ("gather of ", "all-gather of ", "reduction of gradients")
"""Prefixes of the names of waits before which ranks post an event; a peer that has posted it does not count as missing."""
_TOTAL_OF = {"data": 0, "offload_wait": 2, "communication": 3}
"""The index in `TOTALS` of the phases of a step; phases that are not listed count as computation (1)."""
_GATHERS, _REDUCTIONS, _CALLS = range(3)
"""The numbers of the event streams. On a device, reductions are events of the stream `_GATHERS`."""
_AT_WORK = (Activity.FORWARD, Activity.BACKWARD, Activity.GATHER, Activity.REDUCE, Activity.OPTIMIZER, Activity.AGREE)

_CODE_BITS = 31  # of an event's word; the others are a digest of all events before
_CODE = (1 << _CODE_BITS) - 1
"""The mask of an event's code (activity and unit). Above it is a digest of all events of the stream so far, so that ranks which
diverged before the events that rows still hold differ in the digest."""


def _at_step(step: int) -> str:
    return f"at step {step}" if step else "before the first step"


class AsyncWork(Protocol):
    """An asynchronous collective, as torch.distributed returns it."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = ...) -> bool: ...


class Watchdog:
    """Bounds waits for other ranks and explains their errors. A wait ends with `CollectiveError` when a peer is gone, has failed or
    posted another event than this rank, or for `timeout_seconds` neither the condition nor any peer's progress counter changed."""

    FIRST_SLICE, SLICE = timedelta(seconds=0.05), timedelta(seconds=0.25)
    """The time of one wait for a collective; after the first slice the board says that this rank waits."""
    PAUSE_SECONDS = 0.02
    LEFT_SECONDS = 0.5
    """Seconds that a wait goes on after a peer has left the call: its earlier messages may still be on their way."""

    def __init__(
        self, board: StatusBoard, rank: int, timeout_seconds: float, *, compare_events: bool, one_order: bool = False
    ) -> None:
        """`compare_events`: compare all events, since reading is free. `one_order`: gathers and reductions share one order, as on
        devices; on CPUs, reductions start as gradients arrive, between any gathers."""
        self.board, self._rank, self.timeout_seconds = board, rank, timeout_seconds
        self._compare_events = compare_events
        self._reductions = _GATHERS if one_order else _REDUCTIONS
        self.unit_names: dict[int, Sequence[str]] = {}  # the names of unit numbers in messages, by rank
        self.ranks_with_same_events: frozenset[int] | None = None
        """The ranks that post the same events as this one; None: all ranks."""
        self.ranks: Sequence[int] = ()  # all ranks, once they are connected
        self.microbatch = 0  # the number of the latest one, from 0
        self._step = 0  # Counted from 1, as in all messages; 0 before the first step.
        self._activity = (Activity.IDLE, -1)
        self._events: dict[int, tuple[int, int]] = {}
        self._calls: list[tuple[int, str]] = []  # numbers and names of those that this rank is in, innermost last
        self.operations_begun = 0
        """The number of collective operations that this rank has begun. If an error changes it, one may be half done."""
        self.waited_seconds = 0.0  # seconds that this rank has waited for others so far
        self.may_hang = False
        """True if collectives may be in flight that never end: a wait failed, or this rank stopped in the middle of a step."""
        self.broken: CollectiveError | None = None
        """The error found by a supervising thread; the next wait for others raises it."""
        self.error_raised = threading.Event()
        self.on_beat: Callable[[], None] = lambda: None
        """A function that the heartbeat thread calls a few times a second."""
        self.on_post: Callable[[], None] = lambda: None
        self.on_request: Callable[[], None] = lambda: None
        """Called by the heartbeat thread when traces of all ranks are requested."""
        self.ring = EventRing()
        self._step_ended = 0.0
        self.step_seconds = math.inf  # as `timeout_seconds`, for peers that are stopped, or at work in the same step
        self.in_step = False  # True while this rank trains a step
        self.disk_patience = 600.0  # seconds of a single disk operation after which it no longer counts as progress
        self.closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="zeromesh-heartbeat", daemon=True)
        self._heartbeat.start()

    def _beat(self) -> None:
        """Move this rank's progress counter while it waits for a disk, for the patience at most, and call `on_beat`. The board
        shows the disk operation, so that an error after the patience can name it."""
        period, number, answered = min(0.25, self.timeout_seconds / 4), 0, self.board.trace_request()
        while not self.closed.wait(period):
            self.on_beat()
            if (request := self.board.trace_request()) != answered:
                answered = request
                self.on_request()
            what, seconds, in_all = (longest_disk_call() if DISK_CALLS else None) or ("", 0.0, 0.0)
            if in_all < period:
                self.board.write(RankNote.DISK, 0)
                continue
            number += 1
            late = seconds >= self.disk_patience
            limit = f", longer than checkpoint.timeout_seconds ({self.disk_patience:g})" if late else ""
            self.board.write(RankNote.DISK, number, f"{what} for {seconds:.0f} seconds{limit}")
            if not late:
                self.board.beat()

    def patience(self, seconds: float) -> AbstractContextManager[object]:
        """Set a minimum of `seconds` for waits inside the block before peers without progress count as late."""
        return override(self, "timeout_seconds", max(self.timeout_seconds, seconds))

    def post(self, activity: Activity, unit: int = -1, *, step: int | None = None) -> None:
        """Post this rank's activity; `step` counts from 0."""
        own = self.board.own
        if step is not None:
            self._step, own[status_board.MICROBATCH] = step + 1, 0
        self.raise_if_broken()
        self._activity = (activity, unit)
        state = (self._step << STEP_SHIFT) | (activity << UNIT_BITS) | (unit + 1)
        if own[status_board.STATE] != state:  # Repeated posts of one state keep its start time.
            own[status_board.STATE], own[status_board.SINCE] = state, (now := time.monotonic_ns())
            self.ring.add(state, now)
        own[status_board.PROGRESS] += 1
        self.on_post()

    def begin_microbatch(self, number: int) -> None:
        self.microbatch = number
        self.board.own[status_board.MICROBATCH] = number + 1
        self.ring.add(status_board.NEW_MICROBATCH | (number + 1))

    def count_step(self, seconds: Mapping[str, float]) -> None:
        """Post the seconds of the phases of a finished step. The rest of the time since the last call was between steps."""
        found, now = [0.0] * 5, time.monotonic()
        for phase, value in seconds.items():
            found[_TOTAL_OF.get(phase, 1)] += value
        found[4] = max(0.0, now - self._step_ended - sum(found)) if self._step_ended else 0.0
        self._step_ended = now
        if seconds:
            self.board.count_step([int(1e9 * value) for value in found])

    def event(self, activity: Activity, unit: int, peers: Sequence[int], *, known_order: bool = True, call: str = "") -> None:
        """Post an event that all peers post in the same order; `call` is the name for `Activity.CALL`. On one host every event is
        compared; across hosts only one without a `known_order` (as recorded in an earlier pass): this rank then publishes it and
        waits for the peers' events. Raises `CollectiveError` when a peer has posted another event in its place."""
        self._activity = (activity, unit)
        state = (activity << UNIT_BITS) | (unit + 1)
        if activity is Activity.CALL:
            stream, code = _CALLS, zlib.crc32(call.encode()) & ((1 << UNIT_BITS) - 1)
        else:
            stream, code = self._reductions if activity is Activity.REDUCE else _GATHERS, state
            self.operations_begun += len(peers) > 1
        digest = zlib.crc32(code.to_bytes(8, "little"), self._events.get(stream, (0, 0))[1] >> _CODE_BITS) & _CODE
        word = (digest << _CODE_BITS) | code
        now, state = time.monotonic_ns(), (self._step << STEP_SHIFT) | state
        number = self.board.event(stream, word, state, now)
        self.ring.add(state, now)
        self._events[stream] = (number, word)
        if self._compare_events:
            # A peer that is not here yet compares with this rank later; a wait compares all streams (`examine`).
            self._compare(peers, stream)
        elif not known_order:
            self.board.publish()
            behind = partial(self._late_peers, peers, stream, number)
            self.wait(lambda: not behind(), peers, f"agreement on {self._phrase(word)}", behind=behind)
            self._compare(peers)

    @contextmanager
    def call(self, name: str, peers: Sequence[int]) -> Iterator[None]:
        """Mark the block as a call that all `peers` make, and wait at its start until all of them have made it. A rank that leaves
        the block with an error tells it to those that still wait in it. Raises `CollectiveError`, naming the call, when a peer
        makes another one, does not come within the patience, or is gone."""
        before = self._activity
        number = self._events.get(_CALLS, (-1, 0))[0] + 2
        self.board.write(RankNote.CALL, number, name)
        self.event(Activity.CALL, -1, (), call=name)
        self.board.publish()

        def not_called() -> CollectiveError:
            missing = behind()
            why = f"{name} must be called on all ranks: rank {self._rank} called it"
            late = f"{ranks_text(missing)} did not within {self.timeout_seconds:g} seconds (parallel.timeout_seconds)"
            return CollectiveError(f"{why}, and {late}. {'; '.join(map(self.describe, missing))}")

        behind = partial(self._late_peers, peers, _CALLS, number - 1)
        try:
            self.wait(lambda: not behind(), peers, f"the call of {name} by all ranks", behind=behind, late=not_called, polls=0)
            self._compare(peers, _CALLS)
        except BaseException as error:
            self.fail(error)
            raise
        self.post(*before)
        entry = (number, name)
        self._calls.append(entry)
        try:
            yield
            self.raise_if_broken()
        except BaseException as error:
            cause = self.cause_of(error)
            self.board.write(RankNote.LEFT, number, f"{type(cause).__name__}: {cause}".removesuffix(": "))
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._calls.remove(entry)
            self.board.write(RankNote.CALL, *(self._calls[-1] if self._calls else (0, "")))

    def _late_peers(self, peers: Sequence[int], stream: int, number: int) -> list[int]:
        return [peer for peer in peers if not self.board.reached(peer, stream, number)]

    def _missing(self, peers: Sequence[int], what: str) -> list[int]:
        """Return the peers that have neither posted a wait for the same collective nor announced as many events as this rank."""
        announced = what.startswith(_ANNOUNCED)
        early = [(stream, at) for stream, (at, _) in self._events.items() if announced and stream != _CALLS]
        return [
            peer
            for peer in self._others(peers)
            if self.board.read(peer, RankNote.WAIT)[1].partition("|")[2] != what
            and not (early and all(self.board.reached(peer, *each) for each in early))
        ]

    def wait(
        self,
        done: Callable[[], bool],
        peers: Sequence[int],
        what: str,
        pause: Callable[[float], None] | None = None,
        behind: Callable[[], list[int]] | None = None,
        *,
        late: Callable[[], CollectiveError] | None = None,
        polls: int = 200,
    ) -> None:
        """Wait until `done()`, a condition that peers make true. `pause` sleeps for some seconds or until a change; None: poll.
        `behind` returns the late ranks; None: the board tells them. `late` makes the error after the deadline of a wait that begins
        no operation. A wait that is over within `polls` calls of `done` leaves no record."""
        self.operations_begun += late is None
        for _ in range(polls):
            if done():
                return
        self.raise_if_broken()
        since = time.monotonic_ns()
        self.ring.add(status_board.WAIT | self.ring.name(what), since)
        began, seconds, look_at, say_at = time.perf_counter(), 0.0, 0.0, 0.0
        patience = self.patience_with(peers, what, late)
        missing = behind() if behind is not None else []
        try:
            while not done():
                if pause is not None:
                    pause(self.PAUSE_SECONDS)
                else:
                    time.sleep(seconds)
                    seconds = min(seconds + 2e-6, 2e-4)
                now = time.perf_counter()
                if now < (look_at or began + 0.02):
                    continue
                look_at = now + 0.05
                self.raise_if_broken()
                try:
                    next(patience)
                except CollectiveError:  # A peer that has done its part before leaves its error to the next wait.
                    if self.may_hang or not done():
                        raise
                if now >= say_at:  # Reading rows of other hosts costs requests to the store.
                    say_at = now + 0.5
                    found = self._missing(peers, what) if behind is None else behind()
                    missing = found or missing
                    self.board.write(RankNote.WAIT, since, f"{' '.join(map(str, found[:32]))}|{what}")
        except BaseException:
            self.may_hang = True
            self.error_raised.set()
            raise
        finally:
            self.waited_seconds += time.perf_counter() - began
            self.ring.add(status_board.WAITED | (missing[0] + 1 if len(missing) == 1 else 0))
            if say_at:
                self.board.write(RankNote.WAIT, 0)

    def wait_work(self, work: AsyncWork, peers: Sequence[int], what: str) -> None:
        """Wait for an asynchronous collective. Raises `CollectiveError` with the peers' status, also when the collective failed."""
        piece = self.FIRST_SLICE

        def arrived() -> bool:
            nonlocal piece
            try:
                work.wait(piece)
            except RuntimeError:
                if not work.is_completed():
                    piece = self.SLICE
                    return False
                try:  # The work has failed, or completed just after the timeout.
                    work.wait(piece)
                except RuntimeError as error:
                    raise self.broken_transport(error, peers, what) from error
            return True

        self.wait(arrived, peers, what, polls=0)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return an error's cause: the abort of communicators, or for torch's own collectives, as in callbacks, a lost rank."""
        follows = isinstance(error, RuntimeError) and not isinstance(error, ZeromeshError)
        modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
        if follows and self.broken is None and any(name.startswith("torch.distributed") for name in modules):
            return self._lost_peer(self.ranks, "a collective of torch") or error
        return self.broken if follows and self.broken is not None else error

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            self.error_raised.set()
            raise self.broken

    def fail(self, error: BaseException) -> None:
        """Post this rank's error, so that peers name the cause and not its consequence."""
        self.board.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self.closed.set()
        self._heartbeat.join()
        self.board.close()

    def state(self, rank: int) -> tuple[status_board.RankStatus, str]:
        row = self.board.row(rank)
        return row, phrase_of(Activity(row.activity), row.unit, self.unit_names.get(rank, ()))

    def describe(self, rank: int) -> str:
        row, doing = self.state(rank)
        call, disk = (self.board.read(rank, note)[1] for note in (RankNote.CALL, RankNote.DISK))
        more = (f", in {call}" if call else "") + (f", and waited for a disk: {disk}" if disk else "")
        return f"rank {rank} (pid {row.pid}) was {doing} {_at_step(row.step)}{more}"

    def _others(self, peers: Sequence[int]) -> list[int]:
        return [peer for peer in peers if peer != self._rank]

    def broken_transport(self, error: RuntimeError, peers: Sequence[int], what: str) -> CollectiveError:
        """Return the error for a transport's failure, usually a closed connection, with the rank that explains it."""
        return self._lost_peer(peers, what) or CollectiveError(f"rank {self._rank}: {what} failed: {error}")

    def _lost_peer(self, peers: Sequence[int], what: str) -> CollectiveError | None:
        seconds = min(2.0, self.timeout_seconds)
        deadline = time.monotonic() + seconds
        while self._others(peers) and time.monotonic() < deadline:
            try:
                self.examine(peers, what)
            except CollectiveError as found:
                return found
            time.sleep(0.02)
        silent = [peer for peer in self._others(peers) if self.board.silent_seconds(peer) > 0.75 * seconds]
        lines = "; ".join(f"rank {peer} has not been heard of since; before, {self.describe(peer)}" for peer in silent)
        return CollectiveError(f"rank {self._rank}: {what} failed: {lines}") if silent else None

    def examine(self, peers: Sequence[int], what: str) -> None:
        """Raise `CollectiveError` for a peer that is gone, has failed or does something else."""
        for peer in self._others(peers):
            if failure := self.board.read(peer, RankNote.FAILURE)[1]:
                why = f"failed with {failure}"
            elif not self.board.alive(peer):
                why = f"is gone (killed or exited); before, {self.describe(peer)}"
            else:
                continue
            raise CollectiveError(f"rank {self._rank}: {what} cannot end: rank {peer} {why}")
        self._compare(peers)

    def _compare(self, peers: Sequence[int], *streams: int) -> None:
        """Raise `CollectiveError` if a peer posted another event in place of this rank's latest in `streams`, by default all."""
        for stream in streams or list(self._events):
            (number, word), same = self._events[stream], self.ranks_with_same_events
            for peer in peers:
                if peer == self._rank or (stream != _CALLS and same is not None and peer not in same):
                    continue
                other = self.board.event_of(peer, stream, number)
                if other is not None and other != word:
                    self.may_hang = True
                    raise self._different_events(peer, stream, number, word, other)

    def _different_events(self, peer: int, stream: int, number: int, own: int, other: int) -> CollectiveError:
        """Return the error for different events of one number, naming the first difference that both rows still hold."""
        if stream == _CALLS:
            calls = [(rank, self.board.read(rank, RankNote.CALL)[1]) for rank in sorted((self._rank, peer))]
            both = " and ".join(f"rank {rank} called {name or 'another method'}" for rank, name in calls)
            why = f"{both} ({_at_step(self._step)}). These methods are for all ranks: each of them makes the same calls"
            return CollectiveError(f"{why} in the same order, whatever it then does with the result")
        for earlier in range(number - 1, -1, -1):
            earlier_own, earlier_other = (self.board.event_of(rank, stream, earlier) for rank in (self._rank, peer))
            if earlier_own is None or earlier_other is None or earlier_own == earlier_other:
                break
            own, other = earlier_own, earlier_other
        if own & _CODE != other & _CODE:
            where = f"rank {self._rank} is {self._phrase(own)} where rank {peer} was {self._phrase(other)}"
        else:
            both = f"ranks {self._rank} and {peer} have gone through different units"
            back = f"further back than the last {status_board.HISTORY} events, which are all that is remembered"
            where = f"{both} {back}, before both were {self._phrase(own)}"
        why = f"ranks disagree on the order of units: {where} ({_at_step(self._step)})"
        cure = "Every rank must run the same modules in the same order; a branch that depends on a rank's own data breaks this"
        return CollectiveError(f"{why}. {cure}")

    def _phrase(self, word: int) -> str:
        activity, unit = divmod(word & _CODE, 1 << UNIT_BITS)
        return phrase_of(Activity(activity), unit - 1, self.unit_names.get(self._rank, ()))

    def _timeout_error(self, others: Sequence[int], what: str) -> CollectiveError:
        """Return the error for a wait without progress, which names a call that others wait in and this rank has not made."""
        made = self._events.get(_CALLS, (-1, 0))[0] + 1
        waiting = [peer for peer in others if self.board.row(peer).activity == Activity.CALL]
        calls = {peer: self.board.read(peer, RankNote.CALL) for peer in waiting}
        ahead = {peer: name for peer, (number, name) in calls.items() if number > made}
        if ahead:
            where = f" in {self._calls[-1][1]}" if self._calls else ""
            why = f"{next(iter(ahead.values()))} must be called on all ranks: {ranks_text(ahead)} called it"
            return CollectiveError(f"{why}, and rank {self._rank} did not: it waits for {what}{where} ({_at_step(self._step)})")
        why = f"{what} did not end within {self._limit(others):.3g} seconds (parallel.timeout_seconds) and no peer made progress"
        return CollectiveError(f"rank {self._rank}: {why}. {'; '.join(map(self.describe, others))}")

    def _limit(self, peers: Sequence[int]) -> float:
        """Return the seconds without progress after which `peers` are late: fewer where all are at work, or one is stopped. Data,
        callbacks between steps and evaluations may take longer."""
        rows = [self.board.row(peer) for peer in peers]
        at_work = self.in_step and all(row.activity in _AT_WORK and row.step == self._step for row in rows)
        sooner = at_work or any(self.board.stopped(peer) for peer in peers)
        return min(self.step_seconds, self.timeout_seconds) if sooner else self.timeout_seconds

    def patience_with(self, peers: Sequence[int], what: str, late: Callable[[], CollectiveError] | None = None) -> Iterator[None]:
        """Check the peers of a wait at each step of the iterator, a few times a second; `what` names the wait in errors. Raises
        `CollectiveError` when one is gone, has failed, runs another operation or left the call, and the error that `late` makes if
        for `timeout_seconds` none makes progress."""
        others = self._others(peers)
        latest_progress, since, peer_left_at = -1, 0.0, float("inf")
        while True:
            now = time.perf_counter()
            self.examine(others, what)
            inside = dict(self._calls)
            for peer in others if inside else ():
                number, why = self.board.read(peer, RankNote.LEFT)
                if number in inside:
                    peer_left_at = min(peer_left_at, now)
                    if now - peer_left_at >= self.LEFT_SECONDS:
                        raise CollectiveError(f"{what} cannot end: rank {peer} has left {inside[number]} with {why}")
                    break
            progress = sum(map(self.board.progress, others))
            if progress != latest_progress:
                latest_progress, since = progress, now
            elif now - since > min(self.step_seconds, self.timeout_seconds) and now - since > self._limit(others):
                raise late() if late is not None else self._timeout_error(others, what)
            yield
