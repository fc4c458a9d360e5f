"""The findings of `zeromesh doctor` about software: packages, launch variables and the network. Nothing here imports torch."""

import contextlib
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import zeromesh
from zeromesh.environment import INTERFACE, LOOPBACK, available_cores, read_environment, setting
from zeromesh.errors import ConfigError
from zeromesh.launch.self_test import try_exchange
from zeromesh.mesh.network_interfaces import interfaces
from zeromesh.trainer.formatting import human_seconds

_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "Every kernel is waited for."),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "Every collective is checked against those of all ranks before it runs."),
    "NCCL_P2P_DISABLE": ("1", "Devices talk through the host's memory, also where NVLink joins them."),
    "PYTHONMALLOC": ("debug", "Every allocation of Python is checked."),
}
"""Debugging variables that slow runs down: the value that does so, and its effect."""
_SLOW_NAME_SECONDS = 1.0


class Level(StrEnum):
    """The severity of a finding: a `PROBLEM` keeps runs from working, a `WARNING` some runs from working, or working well."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The checked item `what` and the state `found`; if that is not ok, also its consequence `means` and the remedy `do`."""

    what: str
    found: str
    level: Level = Level.OK
    means: str = ""
    do: str = ""


def problem(what: str, found: str, means: str, do: str, *, when: bool = True, level: Level = Level.PROBLEM) -> Finding:
    """Return a finding that is a problem if `when`, and ok otherwise."""
    return Finding(what, found, level, means, do) if when else Finding(what, found)


warning = partial(problem, level=Level.WARNING)
"""Returns a finding that is a warning if `when`, and ok otherwise."""


def report_lines(part: str, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings of one part of the machine as lines of plain text."""
    width = max((len(finding.what) for finding in findings), default=0)
    yield part
    for finding in findings:
        mark = finding.level.value if finding.level is Level.OK else finding.level.value.upper()
        yield f"  {mark:<8} {finding.what:<{width}}  {finding.found}"
        if finding.level is not Level.OK:
            indent = " " * (width + 13)
            yield f"{indent}{finding.means}"
            yield f"{indent}-> {finding.do}"


def packages() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_implementation()} {platform.python_version()}")
    yield Finding("zeromesh", f"{zeromesh.__version__} in {Path(zeromesh.__file__).parent}")
    try:
        needed = metadata.requires("zeromesh") or []
    except metadata.PackageNotFoundError:
        means = "zeromesh is not installed as a package: the versions of what it needs cannot be checked."
        yield warning("requirements", "not known", means, "Install it: pip install -e DIRECTORY")
        return
    # A marker after a semicolon limits a requirement to an extra or to another platform.
    yield from (requirement(text) for text in needed if ";" not in text)


def requirement(text: str) -> Finding:
    """Judge the installed version of a package by a requirement such as `torch>=2.11,<3`."""
    needed = Requirement(text)
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return problem(needed.name, "not installed", f"zeromesh needs {text}.", f"pip install '{text}'")
    means = f"zeromesh needs {text}, and was not tried with this version."
    # A vendor's pre-release, such as 2.11.0a0+abc, counts as its release.
    fits = Version(version).base_version in needed.specifier
    return problem(needed.name, version, means, f"pip install '{text}'", when=not fits)


def launch() -> Iterator[Finding]:
    try:
        environment = read_environment()
        ranks = environment.local_world_size
        place = f"rank {environment.rank} of {environment.world_size}, {ranks} on this host"
        yield warning(
            "launcher",
            "none: zeromesh train starts the ranks itself (--nproc)"
            if environment.launcher == "single"
            else f"{environment.launcher}: {place}; they meet at {environment.master_address}:{environment.master_port}",
            f"OMP_NUM_THREADS is not set: each of the {ranks} ranks takes threads for all cores.",
            f"Set OMP_NUM_THREADS={max(1, available_cores() // ranks)} before the launch.",
            when=ranks > 1 and setting("OMP_NUM_THREADS") is None,
        )
    except ConfigError as error:
        yield problem(
            "launcher",
            str(error),
            "A run that is started here does not know its rank.",
            "Set all of a launcher's variables or none of them; srun, mpirun and torchrun set them all.",
        )
    for name, (slow, means) in _DEBUGGING.items():
        if setting(name) == slow:
            yield warning(name, slow, means, f"Unset {name} when the mistake is found.")


def network() -> Iterator[Finding]:
    present = interfaces()
    for variable in (INTERFACE, "NCCL_SOCKET_IFNAME"):
        if (value := setting(variable)) is not None:
            # NCCL matches prefixes of names.
            missing = bool(present) and not any(
                name.startswith(tuple(value.lstrip("^=").split(","))) for name in present
            )
            yield problem(
                variable,
                f"{value}, which this host does not have" if missing else value,
                "Ranks cannot connect.",
                f"Unset it, or set it to one of {', '.join(present)}.",
                when=missing,
            )
    host, began = socket.gethostname(), time.perf_counter()
    address = ""
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    seconds = time.perf_counter() - began
    yield warning(
        "host name",
        f"{host} {f'is {address}' if address else 'leads nowhere'}, after {human_seconds(seconds)}",
        "Other hosts do not find this one by its name, and whatever asks for the name waits, as each rank does at its start.",
        f"Add the line '{address or LOOPBACK} {host}' to /etc/hosts, or look at the name servers in /etc/resolv.conf.",
        when=seconds > _SLOW_NAME_SECONDS or not address,
    )
    trial = try_exchange()
    if trial.failure:
        yield problem(
            "two processes",
            trial.failure,
            "Two processes of this host could not exchange a tensor over gloo, as the ranks of a run do.",
            f"Look at what is wrong above, and at {INTERFACE}; TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch say more.",
        )
        return
    shared = "share memory" if trial.shares_memory else "share no memory"
    yield warning(
        "two processes",
        f"a sum of 1 MiB over gloo in {1000 * trial.seconds:.2g} ms; they {shared}",
        "Ranks of one host fall back from host-shared memory to gloo, which is slower and needs a copy for each rank.",
        "Let processes of one user open each other's files in /proc: one process namespace, one user, no hidepid.",
        when=not trial.shares_memory,
    )
