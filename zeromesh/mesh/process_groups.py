"""`MeshGroups`: the torch process groups of a mesh, created once for each set of ranks and destroyed together."""

import atexit
import itertools
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from zeromesh.environment import INTERFACE, LaunchEnvironment, export, number_of_start, setting
from zeromesh.errors import CollectiveError, ConfigError, counted
from zeromesh.mesh.device_works import DeviceWorks
from zeromesh.mesh.mesh_shape import Axis, MeshShape
from zeromesh.mesh.network_interfaces import interface_for
from zeromesh.mesh.run_store import START_SECONDS, forget_run, run_store, wait_for_ranks
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.overrides import replaced
from zeromesh.telemetry.watchdog import Watchdog

_numbers = itertools.count()
_sockets: dict[int, str] = {}
"""The descriptors that gloo has opened for groups, and what `/proc` says that they are, since numbers are used again."""
GroupPurpose = Literal["control", "data", "gather", "reduce"]
"""The purpose of a process group. Calls on one group match in order, so calls without a common order need separate groups.

`control` is a CPU group for agreements. `data` moves activations in the order of the program, `gather` parameters as reads of
shards end, `reduce` gradients as they arrive. So their order among each other differs between ranks, and sets along different
axes may have equal ranks: a common group would match one with the other."""
Purposes = Collection[GroupPurpose]
SetGroups = dict[GroupPurpose, dist.ProcessGroup]
"""The process groups of a set of ranks. A purpose that was not requested uses the group of gathers, or else the control group."""


class MeshGroups:
    """A mesh's process groups and watchdog. Groups keep threads, so they are created only where used; `leave` destroys them."""

    _default_made_here, _default_users, _default_may_hang = False, 0, False
    """The state of the process's default group, which meshes share; the last: a mesh may have left groups with work in flight."""
    _meshes = 0  # of this process in this start

    def __init__(self, environment: LaunchEnvironment, device: torch.device) -> None:
        self._environment, self._device, self._rank = environment, device, environment.rank
        MeshGroups._meshes += 1
        self._groups: dict[tuple[GroupPurpose, tuple[int, ...], str], dist.ProcessGroup | None] = {}
        """Groups by purpose, ranks, and the name of the process set that alone uses them; None if this rank is no member."""
        self._joined = False
        self.watch: Watchdog | None = None
        self.works: DeviceWorks | None = None
        """The supervised collectives of an accelerator; None on CPUs, and for a single rank."""

    def store(self, seconds: float) -> dist.distributed_c10d.Store:
        """Return a store for one mesh, whose keys do not collide with those of earlier meshes of the process. The first call waits
        up to `seconds` for it. Raises `ConfigError` if the process's default group and the launch differ in the number of ranks."""
        if not dist.is_initialized():
            store = wait_for_ranks(partial(run_store, self._environment, seconds))
        elif dist.get_world_size() == self._environment.world_size:
            store = dist.distributed_c10d._get_default_store()
        else:
            ranks = counted(dist.get_world_size(), "rank")
            raise ConfigError(f"the process group has {ranks}, the launch environment {self._environment.world_size}")
        return dist.distributed_c10d.PrefixStore(f"zeromesh/{number_of_start()}/mesh-{next(_numbers)}", store)

    def join(self, rank: int) -> None:
        """Join the default process group as `rank`, if the process has not done so."""
        if not dist.is_initialized():
            # The key prefix is new for each group, so that it does not read addresses that an earlier one has stored.
            name = f"zeromesh/{number_of_start()}/group-{next(_numbers)}"
            store = dist.distributed_c10d.PrefixStore(name, run_store(self._environment))
            if self._environment.local_world_size != self._environment.world_size:
                # A rank whose interface the user has set still stores its route, since others may wait for it.
                interface = wait_for_ranks(partial(interface_for, store, self._environment))
                if interface is not None and setting(INTERFACE) is None:
                    export({INTERFACE: interface})
            backend, size = "gloo", self._environment.world_size
            if is_accelerator(self._device):
                backend = f"cpu:gloo,{self._device.type}:{dist.get_default_backend_for_device(self._device)}"
            with making():
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=START_SECONDS))
            MeshGroups._default_made_here = True
            atexit.register(_leave_default)
        MeshGroups._default_users += 1
        self._joined = True
        self._rank = rank

    def create(self, ranks: tuple[int, ...], purposes: Purposes = (), *, name: str = "") -> SetGroups | None:
        """Create the groups of these ranks: the control group and one for each of `purposes`; returns None on other ranks, which
        make the same call. Equal ranks share a purpose's group, unless `name` is given: it is then theirs until `leave_named`."""
        found: dict[GroupPurpose, dist.ProcessGroup | None] = {}
        for purpose in ("control", *purposes):
            key = purpose, ranks, name
            if key not in self._groups:
                made = make_group(ranks, None if purpose == "control" else self.works, self.watch, START_SECONDS)
                self._groups[key] = made if self._rank in ranks else None
            found[purpose] = self._groups[key]
        control = found["control"]
        if control is None:
            return None
        return {each: found.get(each) or found.get("gather") or control for each in ("control", "data", "reduce")}

    def create_along(self, shape: MeshShape, axes: Sequence[Axis], purposes: Purposes = ()) -> SetGroups | None:
        """Create the groups of this rank's set over `axes` of the mesh. All ranks of the world call this in the same order."""
        own = shape.group_of(self._rank, *axes)
        if self.works is not None:  # A device launches gathers in the order of the program too.
            purposes = ["data" if each == "gather" else each for each in purposes]
        made = sum((purpose, own, "") not in self._groups for purpose in ("control", *purposes))
        links = [self.create(ranks, purposes) for ranks in groups_in_turn(shape, self._rank, axes, made)]
        return next(filter(None, links), None)

    def leave_named(self, name: str) -> None:
        """Destroy the groups created under `name`. All ranks call this, when no collective is in flight in them."""
        for key in [key for key in self._groups if key[2] == name]:
            group = self._groups.pop(key)
            if group is not None and (self.watch is None or not self.watch.may_hang):
                leave_group(group, self.works)

    def adopt(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Connect groups that torch has created, in the same order on all their ranks, and leave them with this mesh's groups."""
        for group in groups:
            if self.works is not None:
                self.works.connect(group, dist.get_process_group_ranks(group))
            if group is not dist.group.WORLD:
                self._groups["data", tuple(dist.get_process_group_ranks(group)), f"adopted {len(self._groups)}"] = group

    def leave(self, *, default: bool = False) -> None:
        """Leave the board and this mesh's groups; with `default`, which ranks do at the same time, also the default group, if this
        module created it and no other mesh uses it. Leaving waits for collectives in flight; after a failed wait groups stay."""
        groups, self._groups = [group for group in self._groups.values() if group is not None], {}
        watch, self.watch = self.watch, None
        joined, self._joined = self._joined, False
        MeshGroups._default_users -= joined
        if watch is not None:
            MeshGroups._default_may_hang |= watch.may_hang
            watch.close()
        if not dist.is_initialized() or (watch is not None and watch.may_hang):
            return
        for group in reversed(groups):
            dist.destroy_process_group(group)
        if default and joined and not self._default_users:
            _leave_default()


def make_group(ranks: Sequence[int], works: DeviceWorks | None, watch: Watchdog | None, patience: float) -> dist.ProcessGroup:
    """Create a process group of these ranks; all ranks of the world make the same calls. With `works` the group is for tensors on
    its device, and is connected at once, since ranks may differ in the order in which they first use their groups; `works`
    supervises its collectives; gloo's time out after `patience` seconds. Raises `CollectiveError` if ranks cannot be connected."""
    # torch sorts ranks by default, and only newer versions can be told not to.
    as_given: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    backend = "gloo"
    if works is not None:
        backend = str(dist.get_default_backend_for_device(works.device))
        # torch's own watchdog, which ends the process without naming a peer, comes later than `works`.
        patience = 2 * START_SECONDS + works.watch.timeout_seconds
    with making(watch, ranks):
        made: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=patience), **as_given)
    if works is not None and dist.get_rank() in ranks:
        works.connect(made, ranks)
    return made


def groups_in_turn(shape: MeshShape, rank: int, axes: Sequence[Axis], made: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups over `axes` for which a rank calls `make_group`, `made` times for each: its own, and all only where torch
    waits for all ranks, or splits a communicator bound to a device. Others' groups are skipped: torch names groups by number."""
    c10d = dist.distributed_c10d
    if c10d._get_default_group().bound_device_id is not None or c10d._is_barrier_after_init():
        yield from shape.groups(*axes)
        return
    own, index = shape.group_of(rank, *axes), shape.group_index(rank, *axes)
    c10d._world.group_count += made * index
    yield own
    c10d._world.group_count += made * (shape.world_size // len(own) - index - 1)


def leave_group(group: dist.ProcessGroup, works: DeviceWorks | None) -> None:
    """Destroy a group created by `make_group`, in which no collective is in flight."""
    if works is not None:
        works.groups = [each for each in works.groups if each is not group]
    dist.destroy_process_group(group)


class _Gloo(dist.ProcessGroupGloo):
    """gloo's part of a group. Waits for lost ranks end, and all are connected before one has it, since that may leave at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        wait_for_ranks(partial(super().__init__, *arguments, **options))
        wait_for_ranks(cast(Any, self).barrier().wait)


@contextmanager
def making(watch: Watchdog | None = None, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Note the connections made in the block, for `forget_groups`; with the `watch` of `ranks` a failure is a `CollectiveError`."""
    before = _open_sockets()
    try:
        with replaced(dist.distributed_c10d, {"ProcessGroupGloo": _Gloo}):
            yield
    except RuntimeError as error:
        if watch is None or isinstance(error, CollectiveError):
            raise
        raise watch.broken_transport(error, ranks, "connecting ranks") from error
    _sockets.update(_open_sockets().items() - before.items())


def _open_sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # It was closed meanwhile.
            if (what := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                found[int(name)] = what
    return found


def are_ours() -> bool:
    """Return True if this process has had the groups of one mesh alone in this start. So `forget_groups` takes them from nobody
    else, and a new process that runs the same program meets those who stay in their present mesh."""
    return MeshGroups._default_made_here == dist.is_initialized() and MeshGroups._meshes == 1


def forget_groups() -> None:
    """Leave all process groups of a mesh whose ranks do not answer, and the run's store, so that this process can join the next
    start. Destroying a group waits for its collectives in flight, which end once their connections are cut."""
    global _numbers
    for number, _what in _sockets.items() & _open_sockets().items():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:  # gloo may close it itself.
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
    _sockets.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d = dist.distributed_c10d
    c10d._world.group_count = 0  # Also after a failure to make the first one, which counts by now.
    MeshGroups._default_made_here, MeshGroups._default_users, MeshGroups._default_may_hang = False, 0, False
    MeshGroups._meshes = 0
    _numbers = itertools.count()
    forget_run()


def _leave_default() -> None:
    """Destroy torch's default group if it was created here, since its threads could abort the process at the interpreter's exit."""
    if MeshGroups._default_made_here and not MeshGroups._default_may_hang and dist.is_initialized():
        MeshGroups._default_made_here = False
        dist.destroy_process_group()
