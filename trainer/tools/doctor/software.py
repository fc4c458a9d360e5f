"""The findings of `zeromesh doctor` about software: packages, launch variables and the network. Nothing here imports torch."""

import contextlib
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import zeromesh
from zeromesh.environment import INTERFACE, LOOPBACK, available_cores, read_environment, setting
from zeromesh.errors import ConfigError
from zeromesh.launch.self_test import try_exchange
from zeromesh.mesh.network_interfaces import by_address
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.formatting import human_seconds

_TEXTS: dict[str, dict[str, str]] = read_texts(Path(__file__).with_name("findings.yaml"))
_DEBUGGING = {name: texts["slow"] for name, texts in _TEXTS.items() if "slow" in texts}
"""The values of debugging variables that slow runs down."""
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


def judge(name: str, found: str, *, when: bool = True, **values: object) -> Finding:
    """Return the finding `name` of `findings.yaml`, with `values` in its texts. It is ok unless `when`."""
    texts = {key: text.format(**values) for key, text in _TEXTS[name].items()}
    what = texts.get("what", name)
    if not when:
        return Finding(what, found)
    level = next(level for level in Level if level in texts)
    return Finding(what, found, level, texts[level], texts["do"])


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
        yield judge("requirements", "not known")
        return
    # A marker after a semicolon limits a requirement to an extra or to another platform.
    yield from (requirement(text) for text in needed if ";" not in text)


def requirement(text: str) -> Finding:
    """Judge the installed version of a package by a requirement such as `torch>=2.11,<3`."""
    needed = Requirement(text)
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return judge("package missing", "not installed", package=needed.name, needed=text)
    # A vendor's pre-release, such as 2.11.0a0+abc, counts as its release.
    fits = Version(version).base_version in needed.specifier
    return judge("package version", version, when=not fits, package=needed.name, needed=text)


def launch() -> Iterator[Finding]:
    try:
        environment = read_environment()
        ranks = environment.local_world_size
        place = f"rank {environment.rank} of {environment.world_size}, {ranks} on this host"
        yield judge(
            "launcher",
            "none: zeromesh train starts the ranks itself (--nproc)"
            if environment.launcher == "single"
            else f"{environment.launcher}: {place}; they meet at {environment.master_address}:{environment.master_port}",
            when=ranks > 1 and setting("OMP_NUM_THREADS") is None,
            ranks=ranks,
            threads=max(1, available_cores() // ranks),
        )
    except ConfigError as error:
        yield judge("launch variables", str(error))
    yield from (judge(name, slow) for name, slow in _DEBUGGING.items() if setting(name) == slow)


def network() -> Iterator[Finding]:
    present = list(dict.fromkeys(by_address().values()))
    for variable in (INTERFACE, "NCCL_SOCKET_IFNAME"):
        if (value := setting(variable)) is not None:
            # NCCL matches prefixes of names.
            missing = bool(present) and not any(one.startswith(tuple(value.lstrip("^=").split(","))) for one in present)
            found = f"{value}, which this host does not have" if missing else value
            yield judge("interface variable", found, when=missing, variable=variable, present=", ".join(present))
    host, began = socket.gethostname(), time.perf_counter()
    address = ""
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    seconds = time.perf_counter() - began
    yield judge(
        "host name",
        f"{host} {f'is {address}' if address else 'leads nowhere'}, after {human_seconds(seconds)}",
        when=seconds > _SLOW_NAME_SECONDS or not address,
        host=host,
        address=address or LOOPBACK,
    )
    trial = try_exchange()
    if trial.failure:
        yield judge("exchange", trial.failure, variable=INTERFACE)
        return
    found = f"a sum of 1 MiB over gloo in {1000 * trial.seconds:.2g} ms; they share "
    shares = trial.shares_memory
    yield judge("shared exchange", found + ("memory" if shares else "no memory"), when=not shares)
