"""Starts a run on several hosts, and again on those that are left when some are lost."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zeromesh.environment import SECRET
from zeromesh.errors import ConfigError
from zeromesh.launch.hostfile import Host
from zeromesh.launch.log_forwarding import Output
from zeromesh.launch.ssh import HostFailure, HostLine, Outcome, Reach, watch
from zeromesh.launch.stop_requests import StopSignals, noted_signals

_PORTS = range(20000, 30000)
"""Below the ports that systems hand out to connections."""
_USERS_MISTAKE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What the launcher of one host needs to know of all: its number, how many there are, and where they meet."""

    host: Host
    index: int
    hosts: int
    endpoint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """How few hosts a run goes on with, and how many failures of ranks may end in a new start of all. Raises `ConfigError`."""

    least: int
    max_restarts: int

    def __post_init__(self) -> None:
        if self.least < 1 or self.max_restarts < 0:
            raise ConfigError(f"--min-hosts {self.least} with --max-restarts {self.max_restarts}: at least 1, and 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How to start: `command` gives the command of a host's launcher, `check` refuses hosts that the run cannot use."""

    hosts: tuple[Host, ...]
    reach: Reach
    port: int | None
    elastic: Elastic
    command: Callable[[Start], Sequence[str]]
    check: Callable[[Sequence[Host]], None]

    def arguments(self) -> list[list[str]]:
        """The local command for each host, the first of which the others meet at."""
        endpoint = f"{self.hosts[0].address}:{self.port or random.choice(_PORTS)}"
        starts = [
            Start(host=host, index=index, hosts=len(self.hosts), endpoint=endpoint)
            for index, host in enumerate(self.hosts)
        ]
        return [self.reach.arguments(start.host, self.command(start)) for start in starts]


def supervise(plan: Plan, tell: Callable[[str], None]) -> HostFailure | int:
    """Run until all hosts have ended. `tell` is given a line for a person.

    Returns 0 when all succeed, what all else followed from when one does not, and 128 plus the signal's number when this process
    was told to stop. Nothing is left running then, but on hosts that cannot be reached, which end by themselves.

    Raises:
        ConfigError: when the command of `Reach.ssh` cannot be started, or `check` refuses the hosts.
    """
    failures = 0
    with noted_signals() as requests:
        while True:
            plan.check(plan.hosts)
            outcome = _start(plan, requests)
            if code := requests.exit_code():
                return code
            cause = outcome.cause
            if cause is None:
                return 0
            gone = _gone(plan.hosts, outcome)
            left = tuple(host for host in plan.hosts if host not in gone)
            failures += not gone
            if (not cause.lost and cause.exit_code == _USERS_MISTAKE) or failures > plan.elastic.max_restarts:
                return cause
            if len(left) < plan.elastic.least:
                return cause
            tell(str(cause))
            tell(_goes_on(left))
            plan = replace(plan, hosts=left)
            while time.monotonic() < outcome.safe_at and not requests.exit_code():
                time.sleep(0.1)
            if code := requests.exit_code():
                return code


def _start(plan: Plan, requests: StopSignals) -> Outcome:
    output = Output()
    try:
        return watch(_open_lines(plan, output), requests, plan.reach.silence_seconds)
    finally:
        output.close()


def _open_lines(plan: Plan, output: Output) -> list[HostLine]:
    lines: list[HostLine] = []
    reach = replace(plan.reach, variables={SECRET: secrets.token_hex(), **plan.reach.variables})
    try:
        for host, arguments in zip(plan.hosts, plan.arguments(), strict=True):
            lines.append(HostLine(host, arguments, reach, output))
    except OSError as error:
        for line in lines:
            line.close()
        raise ConfigError(f"--ssh: {plan.reach.ssh[0]!r} cannot be started ({error.strerror or error})") from error
    return lines


def _gone(hosts: Sequence[Host], outcome: Outcome) -> set[Host]:
    """The hosts to go on without: the lost ones, and those that the first one cannot be reached from."""
    return {each.host for each in outcome.failures if each.lost or (each.apart and each.host != hosts[0])}


def _goes_on(left: Sequence[Host]) -> str:
    processes = sum(host.slots for host in left)
    return (
        f"going on from the newest checkpoint with {len(left)} host{'s' * (len(left) != 1)} "
        f"({', '.join(host.name for host in left)}) and {processes} process{'es' * (processes != 1)}"
    )
