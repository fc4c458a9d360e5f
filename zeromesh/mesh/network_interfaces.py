"""Which network interface leads to another host: what gloo has to be told where a host has more than one.

Left alone, gloo takes the address that the host's own name resolves to, which is the loopback on many systems, or an
interface that the other hosts cannot reach.
"""

import ipaddress
import socket
from contextlib import suppress

import psutil

from zeromesh.environment import LOOPBACK
from zeromesh.errors import ConfigError

_ROUTE_PORT = 9  # discard; nothing is sent


def listen(name: str, port: int) -> socket.socket:
    """A socket that listens at the address by which the other hosts know this one as `name`, and at no other. Port 0: any.

    Raises:
        ConfigError: when that address is not known, or the port is in use.
    """
    address = own_address(name)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"{name}:{port}: this host cannot listen there ({error.strerror or error})") from error


def own_address(name: str) -> str:
    """The address of this host that `name` leads to from other hosts. A host's own name often leads to its loopback there.

    Raises:
        ConfigError: when `name` leads to no address of this host but the loopback, and the host has several others.
    """
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
    raise ConfigError(
        f"{name!r}, by which the other hosts are to find this one, leads to {' and '.join(found) or 'no address'} here, which they "
        f"cannot reach; give one of this host's addresses in its place: {there}"
    )


def is_here(name: str) -> bool:
    """Return True if a host's name or address leads to this one."""
    own = by_address()
    return any(address in own or is_loopback(address) for address in addresses_of(name))


def addresses_of(name: str) -> list[str]:
    """The addresses that a host's name leads to from here, each once; none when it is not known."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def address_towards(host: str) -> str | None:
    """The address of this host that packets to `host` leave from; None when there is no route, or no such host."""
    try:
        found = socket.getaddrinfo(host, _ROUTE_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def is_loopback(host: str) -> bool:
    """Return True if an address, or the name localhost, reaches only its own host."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`, without an alias's suffix."""
    return by_address().get(address.partition("%")[0])


def interfaces() -> dict[str, list[str]]:
    """The interfaces of this host that have an address, with their addresses."""
    found: dict[str, list[str]] = {}
    for address, name in by_address().items():
        found.setdefault(name, []).append(address)
    return found


def by_address() -> dict[str, str]:
    """The name of the interface of each address of this host, without an alias's suffix."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        each.address.partition("%")[0]: name.partition(":")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in families
    }
