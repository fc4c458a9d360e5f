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
    """What the launcher of one host needs to know: its number, the number of hosts, and where they meet."""

    host: Host
    index: int
    hosts: int
    endpoint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """How to start a run on `hosts`, and when to start it again. Raises `ConfigError`.

    `command` gives the command of a host's launcher, and `check` refuses hosts that the run cannot use. After a failure of ranks
    the run starts again at most `max_restarts` times; after a loss of hosts it goes on with the others, `least` at least.
    """

    hosts: tuple[Host, ...]
    reach: Reach
    port: int | None
    least: int
    max_restarts: int
    command: Callable[[Start], Sequence[str]]
    check: Callable[[Sequence[Host]], None]

    def __post_init__(self) -> None:
        if self.least < 1 or self.max_restarts < 0:
            raise ConfigError(f"--min-hosts {self.least} with --max-restarts {self.max_restarts}: at least 1, and 0")

    def arguments(self) -> list[list[str]]:
        """The local command for each host. The launchers meet at the first host."""
        endpoint = f"{self.hosts[0].address}:{self.port or random.choice(_PORTS)}"
        starts = [
            Start(host=host, index=index, hosts=len(self.hosts), endpoint=endpoint)
            for index, host in enumerate(self.hosts)
        ]
        return [self.reach.arguments(start.host, self.command(start)) for start in starts]


def supervise(plan: LaunchPlan, notify: Callable[[str], None]) -> HostFailure | int:
    """Run until all hosts have ended. `notify` gets lines for a person.

    Returns 0 when all succeed, the first failure when one does not, and 128 plus the signal's number when this process got a
    signal to stop. Nothing is left running then, except on hosts that cannot be reached, which end by themselves.

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
            if (not cause.lost and cause.exit_code == _USERS_MISTAKE) or failures > plan.max_restarts:
                return cause
            if len(left) < plan.least:
                return cause
            notify(str(cause))
            notify(_goes_on(left))
            plan = replace(plan, hosts=left)
            while time.monotonic() < outcome.safe_at and not requests.exit_code():
                time.sleep(0.1)
            if code := requests.exit_code():
                return code


def _start(plan: LaunchPlan, requests: StopSignals) -> Outcome:
    output = Output()
    try:
        return watch(_open_lines(plan, output), requests, plan.reach.silence_seconds)
    finally:
        output.close()


def _open_lines(plan: LaunchPlan, output: Output) -> list[HostLine]:
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
    """The hosts to leave out: the lost ones, and those that cannot reach the first host."""
    return {each.host for each in outcome.failures if each.lost or (each.apart and each.host != hosts[0])}


def _goes_on(left: Sequence[Host]) -> str:
    processes = sum(host.slots for host in left)
    return (
        f"going on from the newest checkpoint with {len(left)} host{'s' * (len(left) != 1)} "
        f"({', '.join(host.name for host in left)}) and {processes} process{'es' * (processes != 1)}"
    )
