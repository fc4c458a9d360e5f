"""Copies of a rank's states in memory that outlives it, every few steps: for states on a device, or that no journal guards.

Two slots are written in turn, between two steps. One counts once its record is there and the memory's word has its number, so
that a rank has a whole one at any instant. Ranks go on together from the newest that all of them have."""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.intervals import round_up
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import available_bytes
from zeromesh.offload.memory.state_memory import StateMemory
from zeromesh.trainer.checkpoints.trainer_state import TrainerState
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import MODEL

_COST = 0.02  # the part of the time of training that copies take at most, where their steps are not given
_ROOM = 0.5  # the part of a host's available memory that slots take at most
_ALIGNMENT = 64


class Snapshots:
    """The snapshots of a rank in `memory`, of the layout `key`, every `every_steps` steps (auto: as copies take 2 % of the time).
    `frozen`: weights that are not trained are copied too, since nothing else has their values. All ranks make the same calls."""

    def __init__(
        self, memory: StateMemory, mesh: Mesh, key: int, every_steps: int | Literal["auto"], *, frozen: bool
    ) -> None:
        self._memory, self._mesh, self._key, self._frozen = memory, mesh, key, frozen
        self._every_steps = every_steps
        self._slots: list[Tensor] = []
        newest, _ = memory.position(key) or (0, 0)
        own = [number for number in (newest, newest - 1) if memory.record(number) is not None]
        self.number = max(set(own).intersection(*mesh.world.gather_json(own, "snapshots")), default=0)
        """The number of the latest one that all ranks have; 0: there is none."""
        self._since = (0, 0.0)  # The step after which training has gone on, and when.
        self._due = 0  # The step after which the next one is taken.

    @property
    def state(self) -> TrainerState:
        """The state of the trainer in the latest one."""
        return TrainerState.from_json((self._memory.record(self.number) or {})["state"], "a snapshot")

    def load(self, engine: ZeroEngine) -> bool:
        """Fill a new engine from the latest one. Returns False, with the states as before, where that has other tensors."""
        state = self.state
        engine.load_progress(
            updates=state.updates, trained=state.trained, loss_scale=state.loss_scale, good_steps=state.good_steps
        )
        shards, record = self._shards(engine), self._memory.record(self.number) or {}
        if not all(row[0] for row in self._mesh.world.gather_integers([int(record.get("of") == _digest(shards))])):
            return False
        self._memory.warm = True
        self._allocate(shards)
        self._memory.mark(self.number)
        with engine.loading(averaged_updates=state.averages):
            for shard, part in self._parts(shards):
                shard.values.copy_from(part)
        return True

    def begin(self, engine: ZeroEngine, step: int) -> bool:
        """Expect that training goes on after `step`. Returns False, on all ranks, where a host has no room for slots."""
        if not self._slots:
            self._memory.warm = False
            shards, hosts = self._shards(engine), [each.host for each in self._mesh.locations]
            wanted = 2 * _nbytes(shards) * hosts.count(hosts[self._mesh.rank])
            rows = self._mesh.world.gather_integers([int(wanted <= _ROOM * available_bytes())])
            if not all(row[0] for row in rows):
                return False
            self._allocate(shards)
            self.number = 0
            self._memory.begin(0, self._key)
        self._since = (step, time.perf_counter())
        self._due = step + (1 if self._every_steps == "auto" else self._every_steps)
        return True

    def is_due(self, step: int) -> bool:
        return bool(self._slots) and step >= self._due

    def take(self, engine: ZeroEngine, state: TrainerState) -> None:
        """Copy all states after a step. `state` is that of the trainer then."""
        (before, since), began = self._since, time.perf_counter()
        self.number += 1
        shards = self._shards(engine)
        for shard, part in self._parts(shards):
            shard.values.copy_to(part)
        self._memory.write_record(self.number, {"state": json.loads(state.to_json()), "of": _digest(shards)})
        self._memory.mark(self.number)
        self._since = (state.step, time.perf_counter())
        steps = self._every_steps
        if steps == "auto":
            cost = (self._since[1] - began) / _COST * (state.step - before) / max(began - since, 1e-9)
            most = torch.tensor([max(1, math.ceil(cost))])
            steps = int(self._mesh.world.all_reduce_max(most, "steps between snapshots")[0])
        self._due = state.step + steps

    def clear(self) -> None:
        """Give the memory back."""
        self._slots.clear()
        self._memory.clear()

    def _shards(self, engine: ZeroEngine) -> list[TensorShard]:
        shards = engine.checkpoint_state.shards_to_read()
        return [each for each in shards if self._frozen or each.owner is None or each.spec.kind != MODEL]

    def _allocate(self, shards: list[TensorShard]) -> None:
        with self._memory.allocating():
            self._slots = [self._memory.allocate(max(1, _nbytes(shards))) for _ in range(2)]

    def _parts(self, shards: list[TensorShard]) -> Iterator[tuple[TensorShard, Tensor]]:
        """Yield each shard with its part of the slot of the latest snapshot, as elements."""
        slot, at = self._slots[self.number % 2], 0
        for each in shards:
            length = each.values.numel * each.values.dtype.itemsize  # As elements are read: states in int8 are decoded.
            yield each, slot[at : at + length].view(each.values.dtype)
            at += round_up(length, _ALIGNMENT)


def _nbytes(shards: list[TensorShard]) -> int:
    return sum(round_up(each.values.numel * each.values.dtype.itemsize, _ALIGNMENT) for each in shards)


def _digest(shards: list[TensorShard]) -> str:
    """Return a digest of what is copied, in which order."""
    rows = [(each.spec.kind, each.spec.name, str(each.values.dtype), each.values.numel) for each in shards]
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()
