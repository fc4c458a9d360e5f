"""In which order processes become ranks, so that those that talk most are near each other. No torch and no processes.

The mesh numbers its axes from outer to inner, pipeline, replicate, shard, tensor, and neighbours along tensor are neighbouring
ranks. So it is enough that ranks run through one host after the other, and within a host through one island (NUMA node, or
devices joined by NVLink) after the other. Launchers mostly number processes so; `srun --distribution=cyclic` and
`mpirun --map-by node` do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zeromesh.errors import ConfigError
from zeromesh.mesh.axes import MeshShape

Order = Literal["topology", "launch"] | Sequence[int]
"""How ranks are numbered: by topology, as the launcher has done, or which process becomes rank 0, 1, 2 and so on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process runs."""

    host: str
    """Equal for processes that can share memory."""
    name: str = ""
    """The host's name, for a person."""
    island: int = 0
    """Which part of the host, by whatever number; processes of one island are nearer to each other."""


def rank_order(places: Sequence[Place], order: Order = "topology") -> tuple[int, ...]:
    """Which process, by its number in the launch, becomes rank 0, 1, 2 and so on.

    By topology, hosts come in the order of their first process, so do the islands of a host, and processes of one island in the
    order of the launch. Process 0 is always rank 0: it keeps the rendezvous store.

    Raises:
        ConfigError: when a given order is none of these processes, each once, that begins with 0.
    """
    world = range(len(places))
    if order == "launch":
        return tuple(world)
    if order == "topology":
        first_of_host: dict[str, int] = {}
        first_of_island: dict[tuple[str, int], int] = {}
        for process, place in enumerate(places):
            first_of_host.setdefault(place.host, process)
            first_of_island.setdefault((place.host, place.island), process)

        def key(process: int) -> tuple[int, int, int]:
            place = places[process]
            return first_of_host[place.host], first_of_island[place.host, place.island], process

        return tuple(sorted(world, key=key))
    given = tuple(order)
    if sorted(given) != list(world) or given[0] != 0:
        raise ConfigError(
            f"order of ranks: got {list(given)}; allowed are topology, launch, or the numbers 0 to {len(places) - 1}, each once, "
            "of which 0 is the first (process 0 keeps the rendezvous store)"
        )
    return given


def far_groups(shape: MeshShape, places: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
    """The tensor groups whose ranks are on more than one host. `places` are those of ranks, in their order."""
    return tuple(ranks for ranks in shape.groups("tensor") if len({places[rank].host for rank in ranks}) > 1)


def far_warning(shape: MeshShape, places: Sequence[Place]) -> str:
    """What to tell the user when tensor groups span hosts; empty when none does."""
    groups = far_groups(shape, places)
    if not groups:
        return ""
    shown = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in groups[:3]) + (" ..." if groups[3:] else "")
    sizes = [sum(place.host == host for place in places) for host in dict.fromkeys(place.host for place in places)]
    return (
        f"{len(groups)} of {len(shape.groups('tensor'))} tensor groups span hosts ({shown}), and their activations cross the "
        f"network in every layer; choose parallel.tensor so that it divides the processes of every host ({_sizes(sizes)})"
    )


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:6])) + (", ..." if sizes[6:] else "")
