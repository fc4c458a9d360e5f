"""One rank of one system that saves and loads: `python -m bench.checkpointing SYSTEM WORKLOAD FOLDER ROUNDS`.

States are as after the first step. In every round plain I/O of as many bytes is timed beside the system, in the same processes:
disks are faster at one moment than at another. Before every load the operating system is asked to drop what it has cached of
files. A transfer ends when all ranks have ended, with everything on the disk.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.probe import memory_now
from bench.worker import RESULT, die_with_parent
from bench.workload import Workload
from zeromesh.checkpoint.io.file_slices import GRID
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import StagingPool

_BYTES_PER_PARAMETER = 12  # fp32: the parameter and two moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Seconds of one save and one load over all ranks, and how far this rank's memory rose in them, in bytes."""

    save_seconds: float
    load_seconds: float
    save_memory: int
    load_memory: int


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """How a system saves to a directory and loads from it."""

    save: Callable[[Path], None]
    load: Callable[[Path], None]


def main() -> None:
    """Join the group, save and load, print."""
    name, workload, folder, rounds = sys.argv[1], Workload.from_json(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    die_with_parent()
    torch.set_num_threads(1)
    if name == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    system = _SYSTEMS[name](workload)
    plain = _plain(workload)
    found = []
    for number in range(rounds):
        pair = {}
        for which in ("plain", "system") if number % 2 else ("system", "plain"):
            pair[which] = asdict(_round(plain if which == "plain" else system, folder / f"{which}-{number}"))
        found.append(pair)
    print(RESULT + json.dumps(found), flush=True)
    dist.destroy_process_group()


def _round(system: System, folder: Path) -> Transfer:
    save_seconds, save_memory = _timed(lambda: system.save(folder))
    _drop_caches(folder)
    load_seconds, load_memory = _timed(lambda: system.load(folder))
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return Transfer(save_seconds=save_seconds, load_seconds=load_seconds, save_memory=save_memory, load_memory=load_memory)


def _timed(action: Callable[[], None]) -> tuple[float, int]:
    """Seconds until all ranks are done, and the rise of the highest resident memory."""
    dist.barrier()
    before = memory_now(dist.get_world_size()).total
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts again
    began = time.perf_counter()
    action()
    dist.barrier()
    seconds = time.perf_counter() - began
    status = Path("/proc/self/status").read_text().splitlines()
    peak, now = (next(int(line.split()[1]) * 1024 for line in status if line.startswith(field)) for field in ("VmHWM:", "VmRSS:"))
    return seconds, memory_now(dist.get_world_size()).total - before + peak - now


def _drop_caches(folder: Path) -> None:
    """As far as this user may: pages of files that are on the disk leave memory."""
    import os

    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


def _plain(workload: Workload) -> System:
    """Sequential writes and reads of as many bytes by the same processes, past the page cache, with nothing else."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in workload.build_model().parameters())
    nbytes = count * _BYTES_PER_PARAMETER // dist.get_world_size() // GRID * GRID
    buffer = StagingPool(1, GRID).get()
    buffer.random_(0, 255)
    name = f"rank-{dist.get_rank()}"

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with PositionalFile(folder / name, write=True) as file:
            for offset in range(0, nbytes, GRID):
                file.write(buffer, offset)
            file.sync()

    def load(folder: Path) -> None:
        with PositionalFile(folder / name) as file:
            for offset in range(0, nbytes, GRID):
                file.read(buffer, offset)

    return System(save=save, load=load)


def _zeromesh(workload: Workload, tensor: int = 1) -> System:
    from zeromesh.checkpoint.loader import fill_shards, open_checkpoint
    from zeromesh.checkpoint.saver import SaveContent, Saver
    from zeromesh.checkpoint.store import CheckpointStore
    from zeromesh.environment import read_environment
    from zeromesh.mesh.mesh_shape import MeshShape
    from zeromesh.mesh.process_mesh import Mesh
    from zeromesh.options import Precision, ZeroOptions
    from zeromesh.parallelize import divide
    from zeromesh.settings.keys import ParallelOptions
    from zeromesh.weight_init.weight_sources import build_deferred
    from zeromesh.zero.engine import ZeroEngine

    environment = read_environment()
    shape = MeshShape.resolve(environment.world_size, pipeline=1, replicate=1, shard="auto", tensor=tensor)
    mesh = Mesh(shape, environment, device=torch.device("cpu"), timeout_seconds=60)
    built = build_deferred(workload.build_model, workload.seed)
    options = ZeroOptions(stage=3, precision=Precision(compute=workload.compute))
    divided = divide(built.model, mesh, ParallelOptions())
    engine = ZeroEngine.build(built.model, mesh, options, built.source, cuts=divided.cuts)

    def save(folder: Path) -> None:
        saver, holdings = Saver(CheckpointStore(folder), mesh), engine.checkpoint_state
        content = SaveContent(
            tensors=holdings.tensors(), shards=holdings.shards_to_write(), order={}, documents=lambda directory: None, keep=set
        )
        saver.begin(1, content)
        saved = saver.finish()
        if saved is None or saved.failure:
            raise RuntimeError(f"not saved: {saved}")

    def load(folder: Path) -> None:
        holdings = engine.checkpoint_state
        reader = open_checkpoint(mesh, CheckpointStore(folder).path(1))
        with engine.loading():
            fill_shards(mesh, reader, holdings.tensors(reading=True), holdings.shards_to_read())

    return System(save=save, load=load)


def _deepspeed(workload: Workload) -> System:
    from bench import peers

    engine: Any = peers.deepspeed_engine(workload.build_model(), workload, 3)
    tokens = workload.tokens()[0, : workload.micro]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()  # without one it has no moments to save

    def save(folder: Path) -> None:
        engine.save_checkpoint(str(folder))
        _sync(folder)

    return System(save=save, load=lambda folder: engine.load_checkpoint(str(folder)))


def _fsdp2(workload: Workload) -> System:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from bench import peers

    model: Any = peers.sharded(workload.build_model(), workload, keep=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    def save(folder: Path) -> None:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=str(folder))
        _sync(folder)

    def load(folder: Path) -> None:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=str(folder))
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])

    return System(save=save, load=load)


def _sync(folder: Path) -> None:
    """Bring this rank's share of the files to the disk, for a system that does not."""
    import os

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


_SYSTEMS: dict[str, Callable[[Workload], System]] = {
    "zeromesh": _zeromesh,
    "zeromesh-tensor": lambda workload: _zeromesh(workload, tensor=dist.get_world_size()),
    "deepspeed": _deepspeed,
    "fsdp2": _fsdp2,
}


if __name__ == "__main__":
    main()
