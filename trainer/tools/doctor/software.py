"""What surrounds a run on this host: packages, launch variables and the network. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import operator
import platform
import re
import socket
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import zeromesh
from zeromesh.environment import (
    DEFAULT_PORT,
    INTERFACE,
    LOOPBACK,
    LaunchEnvironment,
    available_cores,
    read_environment,
    setting,
)
from zeromesh.errors import ConfigError
from zeromesh.launch.self_test import Trial, try_exchange
from zeromesh.mesh.network_interfaces import interface_of, interfaces, is_loopback
from zeromesh.trainer.formatting import human_seconds
from zeromesh.trainer.tools.doctor.findings import Finding

_SHOWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "WANDB_MODE")
_SECRET = ("WANDB_API_KEY", "HF_TOKEN")
_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "Every kernel is waited for."),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "Every collective is checked against those of all ranks before it runs."),
    "NCCL_P2P_DISABLE": ("1", "Devices talk through the host's memory, also where NVLink joins them."),
    "PYTHONMALLOC": ("debug", "Every allocation of Python is checked."),
}
"""Variables that help to find mistakes and slow runs down: the value that does so, and its effect."""
_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_SLOW_NAME_SECONDS = 1.0


def packages() -> Iterator[Finding]:
    """Python, zeromesh and each of its dependencies."""
    yield Finding("python", f"{platform.python_implementation()} {platform.python_version()}")
    yield Finding("zeromesh", f"{zeromesh.__version__} in {Path(zeromesh.__file__).parent}")
    needed = _requirements()
    if not needed:
        yield Finding.warning(
            "requirements",
            "not known",
            "zeromesh is not installed as a package, and has no pyproject.toml beside it: versions cannot be checked.",
            "Install it: pip install -e DIRECTORY",
        )
    for text in needed:
        if ";" not in text:  # What follows a semicolon limits a requirement to an extra or to another platform.
            yield requirement(text)


def requirement(text: str, version: str | None = None) -> Finding:
    """Judge the `version` of a package, by default the installed one, by a requirement such as `torch>=2.11,<3`."""
    name = re.split(r"[^\w.-]", text)[0]
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = version or metadata.version(name)
    if version is None:
        return Finding.problem(name, "not installed", f"zeromesh needs {text}.", f"pip install '{text}'")
    failed = [
        sign + other
        for sign, other in re.findall(r"([<>=!]=|[<>])\s*([\d.]+)", text)
        if not _COMPARISONS[sign](_release(version), _release(other))
    ]
    means = f"zeromesh needs {name}{', '.join(failed)}, and was not tried with this version."
    return Finding.problem(name, version, means, f"pip install '{text}'", when=bool(failed))


def _release(version: str) -> list[int]:
    """The numbers of a release: 2.13.0+cpu is [2, 13]. Vendors' 2.11.0a0+abc counts as the release that it leads to."""
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(each) for each in re.sub(r"(\.0+)+$", "", match[0]).split(".")] if match else []


def _requirements() -> list[str]:
    """What zeromesh needs, from the pyproject.toml beside the files that run, else from the installed package."""
    with contextlib.suppress(OSError, tomllib.TOMLDecodeError):
        path = Path(zeromesh.__file__).resolve().parent.parent / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "zeromesh":
            return [str(each) for each in project.get("dependencies", [])]
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.requires("zeromesh") or []
    return []


def launch() -> Iterator[Finding]:
    """Which launcher has started this process, and the variables that change how runs behave."""
    try:
        yield _launcher(read_environment())
    except ConfigError as error:
        yield Finding.problem(
            "launcher",
            str(error),
            "A run that is started here does not know its rank.",
            "Set all of a launcher's variables or none of them; srun, mpirun and torchrun set them all.",
        )
    for name in (*_SHOWN, *_SECRET):
        if value := setting(name):
            yield Finding(name, "set (its value is not shown)" if name in _SECRET else value)
    for name, (slow, means) in _DEBUGGING.items():
        if setting(name) == slow:
            yield Finding.warning(name, slow, means, f"Unset {name} when the mistake is found.")
    if fault := setting("ZEROMESH_FAULT"):
        means = "Runs that are started here fail on purpose."
        yield Finding.warning("ZEROMESH_FAULT", fault, means, "Unset ZEROMESH_FAULT.")


def _launcher(environment: LaunchEnvironment) -> Finding:
    if environment.launcher == "single":
        return Finding("launcher", "none: zeromesh train starts the ranks itself (--nproc)")
    ranks = environment.local_world_size
    place = f"rank {environment.rank} of {environment.world_size}, {ranks} on this host"
    return Finding.warning(
        "launcher",
        f"{environment.launcher}: {place}; they meet at {environment.master_address}:{environment.master_port}",
        f"OMP_NUM_THREADS is not set: each of the {ranks} ranks takes threads for all cores.",
        f"Set OMP_NUM_THREADS={max(1, available_cores() // ranks)} before the launch.",
        when=ranks > 1 and setting("OMP_NUM_THREADS") is None,
    )


def network() -> Iterator[Finding]:
    """How ranks of this host, and of several, would find each other."""
    name, began = socket.gethostname(), time.perf_counter()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = ""
    yield host_name(name, address, seconds=time.perf_counter() - began)
    present = interfaces()
    listed = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in present.items())
    yield Finding("interfaces", listed or "not known")
    yield from chosen_interfaces({each: setting(each) for each in (INTERFACE, "NCCL_SOCKET_IFNAME")}, present)
    if setting(INTERFACE) is None:
        taken = (
            f"{(interface_of(address) if address else None) or 'not known'} by itself; lo in zeromesh train on one host"
        )
        several = "; on several hosts the one that leads to the first host" if len({*present} - {"lo"}) > 1 else ""
        yield Finding("gloo takes", taken + several)
    refused = ""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        refused = f"cannot be connected: {error.strerror or error}"
    yield Finding.problem(
        "loopback",
        refused or "connects",
        "Ranks of one host cannot meet.",
        "Bring it up (ip link set lo up), and let a firewall pass what stays on this host.",
        when=bool(refused),
    )
    try:
        socket.create_server((LOOPBACK, DEFAULT_PORT)).close()
    except OSError:
        yield Finding.warning(
            f"port {DEFAULT_PORT}",
            "another process listens there",
            "torchrun and others meet there unless they are given another port. zeromesh train looks for a free one by itself.",
            "Give torchrun --master-port or set MASTER_PORT, if you start runs with them.",
        )
    yield exchange(try_exchange())


def host_name(name: str, address: str, *, seconds: float) -> Finding:
    """Judge where the host's own name leads (`address` is empty: nowhere), and after how many seconds."""
    if not address:
        return Finding.warning(
            "host name",
            f"{name} leads nowhere",
            "Ranks of this host find each other all the same; other hosts do not find it, and some libraries wait for it.",
            f"Add the line '{LOOPBACK} {name}' (or this host's address) to /etc/hosts.",
        )
    slow = seconds > _SLOW_NAME_SECONDS
    loopback = ", the loopback: other hosts need another name for it" if is_loopback(address) else ""
    return Finding.warning(
        "host name",
        f"{name} is {address}{f', after {human_seconds(seconds)}' if slow else loopback}",
        "Whatever asks for this name waits as long, as each rank does at its start.",
        f"Add the line '{address} {name}' to /etc/hosts, or look at the name servers in /etc/resolv.conf.",
        when=slow,
    )


def chosen_interfaces(variables: Mapping[str, str | None], present: Collection[str]) -> Iterator[Finding]:
    """Judge the variables that name interfaces by the interfaces that this host has; NCCL takes beginnings of names."""
    for variable, value in variables.items():
        if value is None:
            continue
        wanted = tuple(value.lstrip("^=").split(","))
        missing = bool(present) and not any(name.startswith(wanted) for name in present)
        yield Finding.problem(
            variable,
            f"{value}, which this host does not have" if missing else value,
            "Ranks cannot connect.",
            f"Unset it, or set it to one of {', '.join(present)}.",
            when=missing,
        )


def exchange(trial: Trial) -> Finding:
    """Judge a sum over gloo by two processes of this host."""
    if trial.failure:
        return Finding.problem(
            "two processes",
            trial.failure,
            "Two processes of this host could not exchange a tensor over gloo, as the ranks of a run do.",
            f"Look at what is wrong above, and at {INTERFACE}; TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch say more.",
        )
    shared = "share memory" if trial.shares_memory else "share no memory"
    return Finding.warning(
        "two processes",
        f"a sum of 1 MiB over gloo in {1000 * trial.seconds:.2g} ms; they {shared}",
        "Ranks of one host fall back from host-shared memory to gloo, which is slower and needs a copy for each rank.",
        "Let processes of one user open each other's files in /proc: one process namespace, one user, no hidepid.",
        when=not trial.shares_memory,
    )
