"""Finds the network interface that leads to another host. By default, gloo takes the address of the host's own name, often the
loopback or an interface that other hosts cannot reach."""

import ipaddress
import socket
from contextlib import suppress
from typing import Any

import psutil

from zeromesh.environment import LOOPBACK, LaunchEnvironment
from zeromesh.errors import ConfigError, errors_as

_ROUTE_PORT = 9  # discard; nothing is sent


def listen(name: str, port: int) -> socket.socket:
    """Open a socket that listens at the address by which other hosts know this one as `name`, and at no other. Port 0: any. Raises
    `ConfigError` when that address is unknown, or the port is in use."""
    address = address_for_others(name)
    with errors_as(ConfigError, f"{name}:{port}: this host cannot listen there (", OSError, after=")"):
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024)


def address_for_others(name: str) -> str:
    """Return the address of this host to which `name` resolves on other hosts; locally it is often the loopback. Raises
    `ConfigError` when `name` resolves to no address of this host but the loopback, and the host has several others."""
    found = addresses_of(name)
    if is_loopback(name):
        return found[0] if found else LOOPBACK
    own = by_address()
    for address in found:
        if address in own and not is_loopback(address):
            return address
    kinds = {":" in address for address in found} or {False}
    others = [each for each in own if not is_loopback(each) and not each.startswith("fe80:") and (":" in each) in kinds]
    if len(others) == 1:
        return others[0]
    there = ", ".join(f"{each} ({own[each]})" for each in others) or "none"
    why = f"{name!r}, by which the other hosts are to find this one, leads to {' and '.join(found) or 'no address'} here"
    raise ConfigError(f"{why}, which they cannot reach; give one of this host's addresses in its place: {there}")


def is_this_host(name: str) -> bool:
    return any(address in by_address() or is_loopback(address) for address in addresses_of(name))


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a host name resolves to here, each once; an empty list for an unknown name."""
    with suppress(OSError):
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    return []


def address_towards(host: str) -> str | None:
    """Return the source address of packets to `host`; None if there is no route, or no such host."""
    for address in addresses_of(host):
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ROUTE_PORT))
            return str(probe.getsockname()[0])
    return None


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def interface_for(store: Any, environment: LaunchEnvironment) -> str | None:
    """Return the name of this host's network interface towards the master, or on the master's host towards a rank on another one,
    which the store tells; None if unknown. All ranks call this."""
    own = address_towards(environment.master_address)
    store.set(f"route/{environment.rank}", own or "")
    if own is None or is_loopback(own):
        routes = (store.get(f"route/{other}").decode() for other in range(environment.world_size))
        elsewhere = next((address for address in routes if address and not is_loopback(address)), None)
        own = address_towards(elsewhere) if elsewhere else own
    return by_address().get(own.partition("%")[0]) if own else None


def by_address() -> dict[str, str]:
    """Return the interface name of each address of this host, without an alias's suffix."""
    return {
        each.address.partition("%")[0]: name.partition(":")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
