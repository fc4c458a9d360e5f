"""`ProcessMesh` (`Mesh` for short): the connected ranks of a run, their locations, process sets, board, watchdog and device."""

import base64
import gc
import json
import logging
import os
import platform
import socket
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeromesh.environment import LaunchEnvironment
from zeromesh.errors import CollectiveError, ConfigError, LayoutError, StorageError, ZeromeshError, counted
from zeromesh.intervals import grouped
from zeromesh.mesh.device_works import DeviceWorks, record_collectives
from zeromesh.mesh.mesh_shape import AXES, EXPERT, EXPERT_SHARD, MODEL_AXES, SIZES, Axis, Divided, MeshShape, axes_of
from zeromesh.mesh.process_groups import GroupPurpose, MeshGroups, SetGroups, making
from zeromesh.mesh.process_set import ProcessSet, ProcessSets, differences
from zeromesh.mesh.rank_order import Order, ProcessLocation, mesh_picture, rank_order, tensor_groups_warning
from zeromesh.mesh.run_store import START_SECONDS, rows, wait_for_ranks
from zeromesh.offload import accelerator
from zeromesh.offload.memory.allocation import SharedSegment
from zeromesh.telemetry.status_board import ROW_WORDS, StatusBoard, Store, StoreBoard, new_row, shared_rows
from zeromesh.telemetry.step_recorder import CommAccount, StepRecorder
from zeromesh.telemetry.watchdog import Watchdog

_LOGGER = logging.getLogger(__name__)
# A forked child, such as a data worker, collects no garbage of this process: the end of a process group would wait there for
# threads, and the end of a mapping could unmap pages that the child has got since.
os.register_at_fork(after_in_child=gc.freeze)
_STARTS_AS_LONG = 5  # times the timeout of a step: processes import and read models at different speeds
_NODES = Path("/sys/devices/system/node")

_PURPOSES: dict[tuple[Axis, ...], tuple[GroupPurpose, ...]] = {(name,): ("data",) for name in AXES}
_PURPOSES |= {axes_of("batch", but=["states"]): ("data",), axes_of("states"): ("gather", "reduce")}
_PURPOSES |= {(EXPERT,): ("data",), (EXPERT_SHARD,): ("gather", "reduce")}
"""The process groups besides the control group that a set over these axes has."""


class ProcessMesh:
    """The process sets along the axes of a `MeshShape`, and the status board, watchdog and device of the ranks.

        mesh.group("tensor")                        the ranks that differ from this one along tensor only
        mesh.data, mesh["replicate", "shard"]       those that see different samples
        mesh.coordinate, mesh.neighbour("pipeline", 1), mesh.picture()
        mesh.process_sets.add([0, 3], name="edges")

    Ranks are numbered by `order` (see `mesh/rank_order.py`), so `rank` may differ from the launcher's process number. Every rank
    creates the mesh, with equal arguments except for `environment` and `device`. Raises `ConfigError` when the shape or the order
    does not fit the launch, and `CollectiveError` when the others cannot be reached."""

    def __init__(
        self,
        shape: MeshShape,
        environment: LaunchEnvironment,
        *,
        device: torch.device,
        timeout_seconds: float,
        order: Order = "topology",
        traces: Path | None = None,
    ) -> None:
        """Connect the mesh. `traces` is the folder for a rank's latest collectives, written when others miss one on a device."""
        if shape.world_size != environment.world_size:
            raise ConfigError(f"the mesh has {counted(shape.world_size, 'rank')}, the launch {environment.world_size}")
        self.shape, self.device, self.environment = shape, device, environment
        self.rank, self.world_size = environment.rank, environment.world_size
        self.recorder = StepRecorder(partial(accelerator.now, device), accelerator.seconds_between)
        """The recorder of the time of a step and of the bytes that this rank sends."""
        self.processes: tuple[int, ...] = (0,)
        """The launcher's process number of each rank."""
        self.locations: tuple[ProcessLocation, ...] = (ProcessLocation(host="here"),)
        self._mesh_groups = MeshGroups(environment, device)
        self.watch: Watchdog
        """The watchdog that bounds waits for other ranks; a single rank has none to wait for."""
        self.one_host = True
        """True if all ranks are on one host and share memory."""
        self._shares_memory = True
        self._sets: dict[frozenset[Axis], ProcessSet] = {}
        # A mesh dropped without `close` leaves its groups when it is collected, at the latest at the end of the process.
        weakref.finalize(self, self._mesh_groups.leave)
        try:
            if self.world_size > 1:
                self._connect(timeout_seconds, order, traces)
            else:
                self.watch = Watchdog(StatusBoard({0: new_row()}, 0), 0, timeout_seconds, compare_events=True)
                self._mesh_groups.watch = self.watch
            self._make_sets()
        except ZeromeshError:
            self._mesh_groups.leave()
            raise
        except RuntimeError as error:  # torch has no narrower class for errors of gloo and the store
            where = f"{environment.master_address}:{environment.master_port} ({str(error).splitlines()[0]})"
            time = f"{_STARTS_AS_LONG * timeout_seconds:g} seconds, {_STARTS_AS_LONG} times timeout_seconds"
            cause = f"a rank has ended meanwhile, cannot be reached, or has not started within {time}"
            raise CollectiveError(f"rank {self.rank} could not join the others at {where}; {cause}") from error
        together = shape.group_of(self.rank, *MODEL_AXES)
        self.model_size, self.model_index = len(together), together.index(self.rank)
        """The number of ranks that compute one batch together, and this rank's position among them."""
        self.data_index, self.coordinate = self.data.index, shape.coordinate(self.rank)
        self.process_sets = ProcessSets(self.world, self._mesh_groups, self.recorder, self._as_set)
        self.watch.ranks_with_same_events, self.watch.ring = frozenset(self.peers.ranks), self.recorder.ring
        self.watch.ranks = self.world.ranks
        self.post: Callable[..., None] = self.watch.post
        """Post this rank's activity on the board: `post(activity, unit, step=...)`, see `Watchdog.post`."""

    def _make_sets(self) -> None:
        self.world = self._axes_set("world", AXES)
        self.data = self._axes_set("data", axes_of("batch"))
        self.shard = self._with_states("shard", "states")
        """The ranks over which states are sharded."""
        self.replicate = self.group(*axes_of("batch", but=["states"]))
        """The ranks that hold the same shards and see different samples."""
        self.peers = self._with_states("data", "batch", "states")
        """The ranks that hold the same parameters, whose gradients are summed."""
        self.tensor, self.pipeline = self.group(*axes_of("layers")), self.group(*axes_of("blocks"))
        self.context = self.group(*axes_of("sequence", but=["layers"]))
        self.experts = self._axes_set(EXPERT, [EXPERT])
        """The ranks over which the experts of a layer are spread."""
        self.expert_shard = self._axes_set("shard of experts", [EXPERT_SHARD]) if self.experts.size > 1 else self.shard
        """The ranks over which the states of experts are sharded, since they have the same ones."""
        together = [*axes_of("layers"), EXPERT]
        self.experts_and_layers = self._axes_set("expert x tensor", together) if self.experts.size > 1 else self.tensor
        """The ranks that have all parts of a layer's experts."""

    def _connect(self, timeout_seconds: float, order: Order, traces: Path | None) -> None:
        launched, process, patience = self.environment, self.rank, _STARTS_AS_LONG * timeout_seconds
        store: Any = self._mesh_groups.store(patience)
        requested = {"order": order} | {name: getattr(self.shape, name) for name in SIZES}
        usual = store.timeout
        store.set_timeout(timedelta(seconds=patience))
        locations = wait_for_ranks(lambda: exchange_locations(store, process, self.world_size, self.device, requested))
        store.set_timeout(usual)
        self.processes = rank_order(locations, order)
        if dist.is_initialized():  # The numbering of an existing default group can no longer be changed.
            ranks = _gather_all(store, "rank-of", process, self.world_size, dist.get_rank())
            found = tuple(sorted(range(self.world_size), key=ranks.__getitem__))
            if order != "topology" and found != self.processes:
                there = f"the process group that is there already numbers the processes {list(found)}, which stays"
                asked = f"order of ranks: {list(self.processes)} was asked for"
                raise ConfigError(f"{asked}, but {there}; ask for that, or for topology")
            self.processes = found
        self.locations = tuple(locations[each] for each in self.processes)
        self.rank = self.processes.index(process)
        self.environment = replace(self.environment, rank=self.rank)
        if on_device := accelerator.is_accelerator(self.device):
            record_collectives(traces)
        self._mesh_groups.join(self.rank)
        self.one_host = len({location.host for location in self.locations}) == 1
        board = self._shared_board(store) if self.one_host else None
        if board is None:
            self.one_host, self._shares_memory = False, not self.one_host
            local = rows(launched)  # The file of rows is shared under the launch's process numbers.
            # Threads need connections of their own: one that waits in the store keeps the others of its connection waiting.
            board = StoreBoard(local or store.clone(), local or store.clone(), self.rank, stale_seconds=timeout_seconds)
            dist.all_reduce(torch.zeros(1))  # All have rows to read from now on. A barrier would run on the device.
        self.watch = Watchdog(board, self.rank, timeout_seconds, compare_events=self.one_host, one_order=on_device)
        self._mesh_groups.watch = self.watch
        if on_device:
            self._mesh_groups.works = DeviceWorks(self.device, self.watch, traces=traces)
        if self.rank == 0 and (warning := tensor_groups_warning(self.shape, self.locations)):
            _LOGGER.warning("%s", warning)

    def _shared_board(self, store: Store) -> StatusBoard | None:
        """Create the board in a segment of rank 0; None when some rank cannot map it."""
        segment: SharedSegment | None = None
        nbytes = self.world_size * ROW_WORDS * 8
        if self.rank == 0:
            segment = SharedSegment.create("board", nbytes)
            store.set("board-at", f"{os.getpid()} {segment.descriptor}")
        else:
            pid, descriptor = map(int, wait_for_ranks(lambda: store.get("board-at")).split())
            with suppress(StorageError):
                segment = SharedSegment.attach(pid, descriptor, nbytes, "board")
        mapped = torch.tensor([0 if segment is None else 1])
        dist.all_reduce(mapped, op=dist.ReduceOp.MIN)
        if segment is None or not mapped.item():
            return None
        segment.close()  # All have mapped it, and the mapping stays.
        return StatusBoard(shared_rows(segment.words()), self.rank)

    def group(self, *names: str) -> ProcessSet:
        """Return this rank's set over these axes, or the process set of this name. `world`, `data` and the single axes exist from
        the start. All ranks create other sets at their first use, in one order. Raises `LayoutError` for names that are neither."""
        if names in (("world",), ("data",)):
            return self.world if names == ("world",) else self.data
        if set(names) <= set(AXES) and names:
            return self._axes_set(" x ".join(axis for axis in AXES if axis in names), names)
        if len(names) == 1 and names[0] in self.process_sets:
            return self.process_sets[names[0]]
        allowed = f"axes ({', '.join(AXES)}), or a process set ({', '.join(self.process_sets) or 'there are none'})"
        raise LayoutError(f"group {', '.join(names)!r}: allowed are world, data, {allowed}")

    def __getitem__(self, names: str | tuple[str, ...]) -> ProcessSet:
        return self.group(*((names,) if isinstance(names, str) else names))

    def _with_states(self, name: str, *divided: Divided) -> ProcessSet:
        """Return the set over the axes of these things, named after axes of the states alone too that have several ranks."""
        more = [axis for axis in axes_of("states", but=["batch"]) if getattr(self.shape, axis) > 1]
        return self._axes_set(" x ".join([name, *more]), axes_of(*divided))

    def _axes_set(self, name: str, axes: Sequence[Axis]) -> ProcessSet:
        key = frozenset(axes)
        if key not in self._sets:
            own = self.shape.group_of(self.rank, *axes)
            link = self._mesh_groups.create_along(self.shape, axes, _PURPOSES.get(tuple(axes), ())) if len(own) > 1 else None
            self._sets[key] = self._as_set(name, own, link)
        return self._sets[key]

    def _as_set(self, name: str, ranks: tuple[int, ...], groups: SetGroups | None) -> ProcessSet:
        joined = self.rank in ranks and len(ranks) > 1
        return ProcessSet(
            name=name,
            ranks=ranks,
            index=ranks.index(self.rank) if self.rank in ranks else -1,
            watch=self.watch,
            groups=groups,
            one_host=self._shares_memory and len({self.locations[rank].host for rank in ranks}) == 1,
            works=self._mesh_groups.works,
            traffic=self.recorder.account(name, len(ranks)) if joined else CommAccount(self.recorder, name, 1),
        )

    @cached_property
    def within_replica(self) -> "ProcessMesh":
        """This mesh as a rank needs it in local steps: the world, the ranks with other samples and those with the same parameters
        are of its own replica. The shape, the numbers of ranks and all else are those of the whole mesh."""
        inside, others = copy(self), axes_of("batch", but=["states"])
        inside.world = self._axes_set("replica", [name for name in AXES if name not in others])
        inside.data = self.group(*(name for name in axes_of("batch") if name not in others))
        inside.peers, inside.replicate = self.shard, self._as_set("one replica", (self.rank,), None)
        return inside

    @property
    def communicator_bytes(self) -> int:
        """Device bytes used by communicators, measured as each was connected; 0 on CPUs."""
        return self._mesh_groups.works.nbytes if self._mesh_groups.works is not None else 0

    def world_of_tensors(self) -> ProcessSet:
        """Return the world with a group for tensors of the device (`world` has a CPU group only). All ranks call this alike."""
        if self._mesh_groups.works is None:
            return self.world
        return replace(self.world, groups=self._mesh_groups.create(self.world.ranks, ["data"]))

    def neighbour(self, axis: Axis, step: int, *, wrap: bool = False) -> int | None:
        """Return the rank `step` places further along `axis` (back when negative); None past an end, unless `wrap` closes it."""
        return self.shape.neighbour(self.rank, axis, step, wrap=wrap)

    def picture(self) -> str:
        """Draw the ranks host by host with their coordinates, in at most 100 columns."""
        return mesh_picture(self.shape, self.locations, here=self.rank, processes=self.processes)

    __str__ = picture

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The torch `DeviceMesh` with these axes and ranks, for DTensor. All ranks create its process groups at the first use."""
        if not dist.is_initialized():
            raise LayoutError("a single rank has joined no process group, so torch can make no DeviceMesh of it")
        with making(self.watch, self.world.ranks):
            made = DeviceMesh(self.device.type, torch.arange(self.world_size).view(self.shape.sizes), mesh_dim_names=AXES)
        self._mesh_groups.adopt(made.get_all_groups())
        return made

    def wait_for_all_ranks(self, what: str) -> None:
        """Wait until all ranks call this, with at least the timeout of a start; `what` names the wait in errors."""
        with self.watch.patience(START_SECONDS):
            self.world.barrier(what)

    def call(self, name: str) -> AbstractContextManager[None]:
        """Mark the block as a call that all ranks make, such as `trainer.evaluate()`; see `Watchdog.call`."""
        return self.watch.call(name, self.world.ranks)

    def fail(self, error: BaseException) -> None:
        """Publish the error that stops this rank in the middle of a common operation, so that other ranks' errors name it. Raises
        `CollectiveError` in place of a library's error that an abort has caused, with the reason of the abort."""
        self.watch.may_hang = self.world_size > 1
        cause = self.watch.cause_of(error)
        self.watch.fail(cause)
        if cause is not error:
            raise cause from error

    def publish_failed_start(self, error: BaseException) -> None:
        """Publish the error because of which this rank does not start, and leave the groups; the mesh is unusable afterwards."""
        self.watch.fail(error)
        self._mesh_groups.leave()

    def forget(self) -> None:
        """Leave the mesh though other ranks may be gone or not answer. The mesh cannot be used afterwards."""
        self.watch.may_hang = True  # So that groups are not destroyed before their connections are cut.
        self._mesh_groups.leave()

    def close(self) -> None:
        """Leave the process groups, on all ranks alike, when no collective is in flight. The mesh cannot be used afterwards."""
        self._mesh_groups.leave(default=True)


Mesh = ProcessMesh


def exchange_locations(
    store: Store, process: int, processes: int, device: torch.device, requested: Mapping[str, object]
) -> list[ProcessLocation]:
    """Return the locations of all processes, in the order of the launch; waits for the last process. Raises `ConfigError` when
    processes request different meshes (`requested`), or share one accelerator, which NCCL would refuse less clearly."""
    location = {"host": host_identity(), "name": socket.gethostname(), "island": island_of(device)}
    wanted = {name: str(value) for name, value in requested.items()}
    found = _gather_all(store, "location", process, processes, [location, wanted, accelerator.device_uuid(device)])
    different = differences([each[1] for each in found], range(processes))
    if different:
        raise ConfigError(f"ranks ask for different meshes: {'; '.join(different)}. Give all the same configuration")
    users = grouped(((where["host"], identity), each) for each, (where, _, identity) in enumerate(found))
    shared = next((ranks for (_, identity), ranks in users.items() if identity and len(ranks) > 1), None)
    if shared is not None:
        who = f"ranks {', '.join(map(str, shared))} on {found[shared[0]][0]['name']}"
        why = f"{who} would compute on the same {device.type.upper()} device, and each needs one of its own"
        cure = "start as many ranks on a host as it has devices, show each rank another one, or have all compute on the CPU"
        raise ConfigError(f"{why}; {cure} by CUDA_VISIBLE_DEVICES= (empty; on AMD HIP_VISIBLE_DEVICES=)")
    return [ProcessLocation(**each[0]) for each in found]


def _gather_all(store: Store, key: str, process: int, processes: int, own: Any) -> list[Any]:
    """Return every process's value `own`, which JSON can express, in the order of the launch. Process 0 stores all values under one
    key, so that the store answers 2 `processes` reads instead of their square."""
    store.set(f"{key}/{process}", json.dumps(own))
    if process == 0:
        rows = [json.loads(store.get(f"{key}/{each}")) for each in range(processes)]
        store.set(f"{key}/all", base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode())
    return list(json.loads(zlib.decompress(base64.b64decode(store.get(f"{key}/all")))))


def host_identity() -> str:
    """Return a text that is equal for processes that can share memory: same boot of the same kernel, same PID namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {platform.machine()} {os.getpid()}"


def island_of(device: torch.device) -> int:
    """Return the NUMA node with all cores of this process, or the lowest device that reaches the memory of `device`; 0: unknown."""
    if accelerator.is_accelerator(device):
        return min([*accelerator.peer_devices(device), device.index or 0])
    own_cores = os.sched_getaffinity(0)
    for folder in sorted(_NODES.glob("node[0-9]*")):
        cores = {int(core.name.removeprefix("cpu")) for core in folder.glob("cpu[0-9]*")}
        if own_cores <= cores:
            return int(folder.name.removeprefix("node"))
    return 0
