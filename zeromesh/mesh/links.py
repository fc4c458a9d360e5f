"""`Links`: the process groups behind a mesh, made once for each set of ranks and left together."""

from __future__ import annotations

import atexit
import itertools
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from zeromesh.errors import ConfigError
from zeromesh.mesh.interfaces import interface_for
from zeromesh.mesh.launch import INTERFACE, LaunchEnvironment, export, setting
from zeromesh.mesh.watch import Watch

_NUMBERS = itertools.count()
START_SECONDS = 300
"""Start-up may wait longer than a step: processes import and read models at different speeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Groups of the same ranks. Calls on one of them match in order, so what may come in another order has one of its own."""

    control: dist.ProcessGroup
    """CPU group for agreements."""
    data: dist.ProcessGroup
    """Group that gathers parameters."""
    reduce: dist.ProcessGroup
    """Group that reduces gradients. Reductions start as gradients arrive, so their order relative to gathers differs between
    ranks; a common group would match one with the other."""


@dataclass(kw_only=True, slots=True)
class _Default:
    """The process's default group, which meshes share."""

    made_here: bool = False
    users: int = 0
    in_doubt: bool = False
    """Whether some mesh has left groups behind in which something may still be in flight."""


_DEFAULT = _Default()


class Links:
    """What a mesh holds of the others: process groups and the watch. Each group keeps threads, so none may be forgotten."""

    def __init__(self, environment: LaunchEnvironment, device: torch.device) -> None:
        self._environment = environment
        self._on_cuda = device.type == "cuda"
        self._links: dict[tuple[int, ...], Link | None] = {}
        self._joined = False
        self.watch: Watch | None = None

    def join(self) -> None:
        """Join the default process group, unless the process has done so.

        Raises:
            ConfigError: when it has another number of ranks than the launch.
        """
        environment = self._environment
        if not dist.is_initialized():
            # A later group must not find the addresses that an earlier one has left in the store.
            prefix = f"zeromesh/group-{next(_NUMBERS)}"
            store = dist.distributed_c10d.PrefixStore(prefix, _rendezvous_store(environment))
            _choose_interface(store, environment)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._on_cuda else "gloo",
                store=store,
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timedelta(seconds=START_SECONDS),
            )
            _DEFAULT.made_here = True
            atexit.register(_leave_default)
        _DEFAULT.users += 1
        self._joined = True
        if dist.get_world_size() != environment.world_size:
            raise ConfigError(
                f"the process group has {dist.get_world_size()} ranks, the launch environment {environment.world_size}"
            )

    def store(self) -> dist.distributed_c10d.Store:
        """A store for one mesh: what an earlier one of the process has stored must not be taken for this one's."""
        prefix = f"zeromesh/mesh-{next(_NUMBERS)}"
        return dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def between(self, ranks: tuple[int, ...]) -> Link | None:
        """The groups of these ranks; None on others. All ranks of the world ask for the same ones in the same order."""
        if ranks not in self._links:
            backend = "nccl" if self._on_cuda else "gloo"
            control, data, reduce = (_new_group(ranks, kind) for kind in ("gloo", backend, backend))
            here = self._environment.rank in ranks
            self._links[ranks] = Link(control=control, data=data, reduce=reduce) if here else None
        return self._links[ranks]

    def leave(self, *, default: bool = False) -> None:
        """Leave the board and this mesh's groups; with `default` also the default group, where it was made here for meshes of
        which this is the last. Leaving twice is allowed.

        A group waits for what is in flight in it. After a wait that ended with an error that may be a rank that hangs: then the
        groups stay until the process ends. Without `default` ranks need not leave alike.
        """
        links, self._links = self._links, {}
        watch, self.watch = self.watch, None
        joined, self._joined = self._joined, False
        _DEFAULT.users -= joined
        if watch is not None:
            _DEFAULT.in_doubt |= watch.in_doubt
            watch.close()
        if not dist.is_initialized() or (watch is not None and watch.in_doubt):
            return
        for link in filter(None, links.values()):
            for group in (link.reduce, link.data, link.control):
                dist.destroy_process_group(group)
        if default and joined and not _DEFAULT.users:
            _leave_default()


def _leave_default() -> None:
    """Leave the default group, if it was made here. Its threads must not outlive the interpreter, which could abort the process."""
    if _DEFAULT.made_here and not _DEFAULT.in_doubt and dist.is_initialized():
        _DEFAULT.made_here = False
        dist.destroy_process_group()


def _choose_interface(store: dist.distributed_c10d.Store, environment: LaunchEnvironment) -> None:
    """Tell gloo the interface that leads to the other hosts, unless it has been told, or there are none.

    A rank that has been told still says its route, which others may wait for.
    """
    if environment.local_world_size == environment.world_size:
        return
    name = interface_for(
        store, rank=environment.rank, world_size=environment.world_size, master_address=environment.master_address
    )
    if name is not None and setting(INTERFACE) is None:
        export({INTERFACE: name})


def _new_group(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=START_SECONDS))
    return made


@cache
def _rendezvous_store(environment: LaunchEnvironment) -> dist.distributed_c10d.Store:
    """The store of the launch, kept for as long as the process lives.

    Rank 0 serves it where the launcher does not: were it made anew for each group, a fast rank would join the group to come in
    the store of the one before, which is about to go.
    """
    address = f"tcp://{environment.master_address}:{environment.master_port}"
    url = "env://" if environment.launcher == "torchrun" else address
    patience = timedelta(seconds=START_SECONDS)
    store: dist.distributed_c10d.Store
    store, _, _ = next(rendezvous(url, environment.rank, environment.world_size, timeout=patience))
    return store
