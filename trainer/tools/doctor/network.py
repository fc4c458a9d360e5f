"""Names and interfaces: how ranks of one host, and of several, would find each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zeromesh.environment import DEFAULT_PORT, INTERFACE, LOOPBACK, setting
from zeromesh.launch.self_test import Trial, try_exchange
from zeromesh.mesh.network_interfaces import interface_of, interfaces, is_loopback
from zeromesh.trainer.formatting import human_seconds
from zeromesh.trainer.tools.doctor.findings import Finding, Level

_NCCL = "NCCL_SOCKET_IFNAME"
_SLOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What the system says. `address` is what the host's own name leads to, empty if nowhere; `asked_seconds`: after how long."""

    name: str
    address: str
    asked_seconds: float
    interfaces: Mapping[str, Sequence[str]]
    gloo: str | None = None
    """The interface that gloo was told to use."""
    nccl: str | None = None
    loopback: str = ""
    """Why two sockets on the loopback cannot be connected; empty where they can."""
    port_is_free: bool = True
    """Whether torchrun's own port can be listened on."""
    trial: Trial | None = None


def look() -> Network:
    """What this host says, and what two processes on it find."""
    name = socket.gethostname()
    began = time.perf_counter()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = ""
    return Network(
        name=name,
        address=address,
        asked_seconds=time.perf_counter() - began,
        interfaces=interfaces(),
        gloo=setting(INTERFACE),
        nccl=setting(_NCCL),
        loopback=_loopback(),
        port_is_free=_is_free(DEFAULT_PORT),
        trial=try_exchange(),
    )


def judge(network: Network) -> Iterator[Finding]:
    """What that means for runs."""
    yield _host_name(network)
    yield Finding(what="interfaces", found=_listed(network.interfaces) or "not known")
    yield _gloo(network)
    if network.nccl is not None:
        yield _chosen(network, _NCCL, network.nccl.lstrip("^="))
    yield _local(network)
    if not network.port_is_free:
        yield Finding(
            what=f"port {DEFAULT_PORT}",
            found="somebody listens there",
            level=Level.WARNING,
            means="torchrun and others meet there if they are told no other port. zeromesh train looks for a free one by itself.",
            do="Give torchrun --master-port or set MASTER_PORT, if you start runs with them.",
        )
    if network.trial is not None:
        yield _exchange(network.trial)


def _host_name(network: Network) -> Finding:
    what, name, address = "host name", network.name, network.address
    if not address:
        return Finding(
            what=what,
            found=f"{name} leads nowhere",
            level=Level.WARNING,
            means="Ranks of this host find each other all the same; other hosts do not find it, and some libraries wait for it.",
            do=f"Add the line '{LOOPBACK} {name}' (or this host's address) to /etc/hosts.",
        )
    if network.asked_seconds > _SLOW_SECONDS:
        return Finding(
            what=what,
            found=f"{name} is {address}, after {human_seconds(network.asked_seconds)}",
            level=Level.WARNING,
            means="Whatever asks for this name waits as long, as each rank does at its start.",
            do=f"Add the line '{address} {name}' to /etc/hosts, or look at the name servers in /etc/resolv.conf.",
        )
    loopback = ", the loopback: other hosts need another name for it" if is_loopback(address) else ""
    return Finding(what=what, found=f"{name} is {address}{loopback}")


def _gloo(network: Network) -> Finding:
    """The interface that gloo takes: the one that it is told, else that of the host's own address."""
    if network.gloo is not None:
        return _chosen(network, INTERFACE, network.gloo)
    found = interface_of(network.address) if network.address else None
    others = [name for name in network.interfaces if name != "lo"]
    words = f"{found or 'not known'} by itself; lo in zeromesh train on one host"
    if len(others) > 1:
        return Finding(what="gloo takes", found=f"{words}; on several hosts the one that leads to the first host")
    return Finding(what="gloo takes", found=words)


def _chosen(network: Network, variable: str, given: str) -> Finding:
    """An interface that a variable names; NCCL takes beginnings of names."""
    wanted = given.split(",")
    there = [each for each in wanted if any(name.startswith(each) for name in network.interfaces)]
    if there or not network.interfaces:
        return Finding(what=variable, found=given)
    return Finding(
        what=variable,
        found=f"{given}, which this host does not have",
        level=Level.PROBLEM,
        means="Ranks cannot connect.",
        do=f"Unset it, or set it to one of {', '.join(network.interfaces)}.",
    )


def _local(network: Network) -> Finding:
    if not network.loopback:
        return Finding(what="loopback", found="connects")
    return Finding(
        what="loopback",
        found=network.loopback,
        level=Level.PROBLEM,
        means="Ranks of one host cannot meet.",
        do="Bring it up (ip link set lo up), and let a firewall pass what stays on this host.",
    )


def _exchange(trial: Trial) -> Finding:
    what = "two processes"
    if trial.failure:
        return Finding(
            what=what,
            found=trial.failure,
            level=Level.PROBLEM,
            means="Two processes of this host could not exchange a tensor over gloo, as the ranks of a run do.",
            do=f"Look at what is wrong above, and at {INTERFACE}; TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch say more.",
        )
    speed = f"a sum of 1 MiB over gloo in {1000 * trial.seconds:.2g} ms"
    if trial.shares_memory:
        return Finding(what=what, found=f"{speed}; they share memory")
    return Finding(
        what=what,
        found=f"{speed}; they share no memory",
        level=Level.WARNING,
        means="Ranks of one host fall back from host-shared memory to gloo, which is slower and needs a copy for each rank.",
        do="Let processes of one user open each other's files in /proc: one process namespace, one user, no hidepid.",
    )


def _listed(found: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in found.items())


# From the system


def _loopback() -> str:
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return ""
    except OSError as error:
        return f"cannot be connected: {error.strerror or error}"


def _is_free(port: int) -> bool:
    try:
        with socket.create_server((LOOPBACK, port)):
            return True
    except OSError:
        return False
