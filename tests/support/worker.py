"""The life of one worker: it joins a mesh when its first case comes, and runs cases one after the other."""

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.support.workers import host_of
from zeromesh.environment import read_environment
from zeromesh.mesh import process_mesh
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.accelerator import pick_device
from zeromesh.trainer.losses import losses, trial

_TESTS = Path(__file__).resolve().parents[1]


def serve(address: str, options: dict[str, Any]) -> None:
    """Run the cases that come over the connection until it is closed."""
    warnings.filterwarnings("ignore")
    environment = read_environment()
    simulated: Any = simulate() if options["device"] == "sim" else None
    remember_trials()
    connection: Connection = Client(address)
    connection.send_bytes(json.dumps({"rank": environment.rank}).encode())
    mesh: Mesh | None = None
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        reply: dict[str, Any]
        try:
            mesh = mesh or join(options)
            torch.manual_seed(0)  # Whatever ran before, all ranks begin a case alike.
            begun = simulated.begin() if simulated else 0
            reply = {"result": find(request["case"])(mesh, **request["arguments"])}
            if simulated:
                reply["launched"] = simulated.end(begun)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test wants to know
            reply = {
                "error": type(error).__name__,
                "message": str(error),
                "traceback": "".join(traceback.format_exception(error)),
                "at": time.monotonic(),
            }
            error = error.with_traceback(None)
        gc.collect()
        gc.freeze()  # What is there still, such as modules, is not looked through again.
        connection.send_bytes(json.dumps(reply).encode())


def join(options: dict[str, Any]) -> Mesh:
    """This process's mesh. `hosts`: see `PoolOptions`."""
    environment = read_environment()
    if options.get("hosts"):
        host = host_of(environment.rank, options["hosts"])
        process_mesh.host_identity = lambda: f"host {host}"
    axes = {name: options.get(name, 1) for name in ("replicate", "tensor", "pipeline")}
    shape = MeshShape.resolve(environment.world_size, **axes)
    device = pick_device(environment.local_rank)
    return Mesh(shape, environment, device=device, timeout_seconds=options["timeout_seconds"])


def remember_trials() -> None:
    """Try the loss of each class and configuration of a model once in a worker, and not once for each trainer of it."""
    examine, verdicts = losses.examine, {}

    def remembered(model: Any, known: bool | None = None) -> Any:
        config = model.config
        told = (config.to_json_string(use_diff=False), config._attn_implementation, trial._unlike_its_class(model))
        key = (type(model), known, *told)
        if key not in verdicts:
            verdicts[key] = examine(model, known)
        return verdicts[key]

    losses.examine = remembered


def simulate() -> ModuleType:
    """Compute on the simulated device, which sees to what cases do on it."""
    from tests.simulated import cases

    return cases


@cache
def find(case: str) -> Callable[..., Any]:
    """The function named `module:function`; a module of the tests by its own name alone, which no other one of them has."""
    module, _, name = case.partition(":")
    if "." not in module:
        (path,) = _TESTS.rglob(f"{module}.py")
        module = ".".join(path.relative_to(_TESTS.parent).with_suffix("").parts)
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def main() -> None:
    """Run a worker: its address, its options as JSON, and the file for what it prints."""
    from tests.support import worker  # This module by its own name, as cases know it.

    address, options, path = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(stream, number)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    worker.serve(address, json.loads(options))


if __name__ == "__main__":
    main()
