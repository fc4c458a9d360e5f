"""The order in which processes become ranks, so that ranks that communicate most are near each other, and a picture of the mesh.
Most launchers number processes host by host; `srun --distribution=cyclic` and `mpirun --map-by node` do not."""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeVar

from zeromesh.errors import ConfigError, counted, plural, ranks_text, some
from zeromesh.intervals import grouped
from zeromesh.mesh.mesh_shape import AXES, Axis, MeshShape

Order = Literal["topology", "launch"] | Sequence[int]
"""The numbering of ranks: by topology, by the launcher, or a list of the process that becomes rank 0, 1, 2 and so on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLocation:
    host: str
    """An identity that is equal for processes that can share memory."""
    name: str = ""
    island: int = 0
    """The number of the part of the host (NUMA node, or devices joined by NVLink) whose processes are near each other."""


def rank_order(locations: Sequence[ProcessLocation], order: Order = "topology") -> tuple[int, ...]:
    """Return the launch number of the process that becomes rank 0, 1, 2 and so on. By topology, hosts are in the order of their
    first process, as are the islands of a host, and the processes of an island in launch order. Process 0, which keeps the
    rendezvous store, is always rank 0. Raises `ConfigError` for an explicit order that is no such permutation."""
    world = range(len(locations))
    if order == "launch":
        return tuple(world)
    if order == "topology":
        hosts = grouped((location.host, process) for process, location in enumerate(locations)).values()
        islands = (grouped((locations[each].island, each) for each in host).values() for host in hosts)
        return tuple(chain.from_iterable(chain.from_iterable(islands)))
    numbers = tuple(order)
    if sorted(numbers) != list(world) or numbers[0] != 0:
        why = f"order of ranks: got {list(numbers)}; allowed are topology, launch, or the numbers 0 to {len(world) - 1}"
        raise ConfigError(f"{why}, each once, of which 0 is the first (process 0 keeps the rendezvous store)")
    return numbers


def tensor_groups_warning(shape: MeshShape, locations: Sequence[ProcessLocation]) -> str:
    """Return the warning for tensor groups that span hosts; empty when none does. `locations` are in the order of ranks."""
    every = shape.groups("tensor")
    groups = [ranks for ranks in every if len({locations[rank].host for rank in ranks}) > 1]
    if not groups:
        return ""
    shown = "; ".join(map(ranks_text, groups[:3])) + (" ..." if groups[3:] else "")
    sizes = some(Counter(location.host for location in locations).values(), 6)
    why = f"{len(groups)} of {len(every)} tensor groups span hosts ({shown}), and their activations cross the network"
    return f"{why} in every layer; choose parallel.tensor so that it divides the processes of every host ({sizes})"


WIDTH = 100
_RANKS_SHOWN = 8
_HOSTS_SHOWN = 6
Item = TypeVar("Item")


def mesh_picture(shape: MeshShape, locations: Sequence[ProcessLocation], *, here: int | None, processes: Sequence[int] = ()) -> str:
    """Draw the mesh in lines of at most `WIDTH` columns: the first and the last ranks and hosts, and always the rank `here`, which
    is marked. `locations` and `processes`, the launch numbers, are in the order of ranks."""
    hosts = grouped((location.host, rank) for rank, location in enumerate(locations))
    named = {location.host: location.name or location.host for location in reversed(locations)}
    alike = grouped((named[host], host) for host in hosts)
    axes: list[Axis] = [axis for axis in AXES if getattr(shape, axis) > 1]
    digits = len(str(shape.world_size - 1))

    def of_rank(rank: int) -> list[str]:
        at, words = shape.coordinate(rank), [f"rank {rank:<{digits}} "]
        words += [f"{axis} {at[axis]:<{len(str(getattr(shape, axis) - 1))}}" for axis in axes]
        if len({locations[each].island for each in hosts[locations[rank].host]}) > 1:
            words.append(f"island {locations[rank].island}")
        words += ["<- here"] * (rank == here)
        if processes and processes[rank] != rank:
            words.append(f"(launched as {processes[rank]})")
        return ["  ".join(words).rstrip()]

    def of_host(host: str) -> list[str]:
        same = alike[named[host]]  # Hosts with equal names are numbered.
        name = f"{named[host]} ({same.index(host) + 1})" if same[1:] else named[host]
        ranks = _lines(hosts[host], _RANKS_SHOWN, [] if here is None else [here], "rank", of_rank)
        return [name, *(f"  {line}" for line in ranks)]

    count = f"{counted(shape.world_size, 'rank')} on {counted(len(hosts), 'host')}"
    lines = _lines(list(hosts), _HOSTS_SHOWN, [] if here is None else [locations[here].host], "host", of_host)
    warning = tensor_groups_warning(shape, locations)
    wrapped = textwrap.wrap(f"warning: {warning}", WIDTH - 2) if warning else []
    return "\n".join([f"{shape}: {count}"[:WIDTH], *(f"  {line}"[:WIDTH] for line in [*lines, *wrapped])])


def _lines(items: Sequence[Item], most: int, needed: Sequence[Item], noun: str, show: Callable[[Item], list[str]]) -> list[str]:
    """Return the lines of the items. Of more than `most`, only some at both ends and the `needed` are shown, others counted."""
    found, gap = list[str](), 0
    for number, item in enumerate(items):
        if len(items) <= most or number < most - 2 or number >= len(items) - 2 or item in needed:
            found += [f"... {gap} more {plural(gap, noun)}"] * (gap > 0) + show(item)
            gap = 0
        else:
            gap += 1
    return found
