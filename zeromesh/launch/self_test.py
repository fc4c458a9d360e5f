"""Two processes of this host join in a mesh and add up a tensor: whether that works here, and how long it takes.

try_exchange()      starts them; each is `python -m zeromesh.launch.self_test`
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

import torch

from zeromesh.environment import (
    LOOPBACK,
    die_with_launcher,
    exported,
    python_arguments,
    rank_variables,
    read_environment,
    worker_environment,
)
from zeromesh.errors import ZeromeshError
from zeromesh.launch.rank_processes import RankRange
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh

_RANKS = 2
_PORT = 29500
"""Nothing listens there: the two are on one host."""
_NBYTES = 1 << 20
_TIMES = 9
_WAIT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """`seconds` of a sum of a MiB over gloo; whether the two share memory; `failure` says why there is neither."""

    seconds: float = 0.0
    shares_memory: bool = False
    failure: str = ""


def try_exchange(timeout_seconds: float = 60.0) -> Trial:
    """Start two processes, and let them find each other over the loopback as the workers of a launch on one host do."""
    place = RankRange(
        first=0,
        processes=_RANKS,
        world_size=_RANKS,
        master_address=LOOPBACK,
        master_port=_PORT,
        run_id=uuid.uuid4().hex,
    )
    workers = []
    with ExitStack() as files:
        said, *errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(1 + _RANKS)]
        for rank in range(_RANKS):
            variables = rank_variables(place.environment(rank), run_id=place.run_id)
            with exported({**worker_environment(_RANKS), **variables}):
                arguments = [sys.executable, *python_arguments("zeromesh.launch.self_test", ())]
                workers.append(subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=said, stderr=errors[rank]))
        in_time = _end(workers, timeout_seconds)
        lines, *complaints = map(_text, (said, *errors))
    if not in_time:
        return Trial(failure=f"the two were not done after {timeout_seconds:g} seconds")
    if any(worker.returncode for worker in workers):
        last = [complaint.splitlines()[-1] for complaint in complaints if complaint]
        return Trial(failure=last[0] if last else "they ended without a word")
    found = json.loads(lines)
    return Trial(seconds=found["seconds"], shares_memory=found["shares_memory"])


def _text(file: IO[bytes]) -> str:
    """What was written into a file."""
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _end(workers: list[subprocess.Popen[bytes]], timeout_seconds: float) -> bool:
    """Wait until all have ended, and end those that do not; returns whether all did by themselves."""
    deadline = time.monotonic() + timeout_seconds
    in_time = True
    for worker in workers:
        try:
            worker.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            in_time = False
            worker.kill()
            worker.wait()
    return in_time


def main() -> int:
    """One of the two: rank 0 writes what was found, as JSON."""
    die_with_launcher()
    try:
        environment = read_environment()
        mesh = Mesh(
            MeshShape(shard=_RANKS),
            environment,
            device=torch.device("cpu"),
            timeout_seconds=_WAIT_SECONDS,
            order="launch",
        )
        tensor = torch.ones(_NBYTES // 4)
        times = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            mesh.world.sum_(tensor, "sum of the trial")
            times.append(time.perf_counter() - began)
        right = bool((tensor == float(_RANKS**_TIMES)).all())
        shares_memory = mesh.world.one_host
        mesh.close()
    except ZeromeshError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not right:
        sys.stderr.write("the sum was wrong\n")
        return 1
    if environment.rank == 0:
        sys.stdout.write(json.dumps({"seconds": sorted(times)[_TIMES // 2], "shares_memory": shares_memory}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
