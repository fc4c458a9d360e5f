"""Cases of runs that are tracked: each trains something tiny, and says what the console said."""

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.tracking import GeneralTracker, register_tracker_class

from tests.support.checkpoint_cases import Slow, configured
from tests.support.plain import after_steps, fitted
from tests.support.trainer_cases import llama, sentences
from tests.support.waiting import wait_for
from tests.support.wandb_log import files, rows
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh

ENVIRONMENT = {
    "WANDB_API_KEY": "planted0wandb0api0key0000000000000000000",
    "HF_TOKEN": "planted-hf-token-in-the-environment",
    "BILLING_SERVICE_PASSWORD": "planted-password-in-the-environment",
    "PGPASSWORD": "planted-password-of-a-database",
}
IN_CONFIG = "hf_plantedTokenInTheConfiguration00"
IN_ARGUMENTS = "planted-token-in-the-arguments"
SECRETS = (*ENVIRONMENT.values(), IN_CONFIG, IN_ARGUMENTS, "planted")
"""No file of a run holds one."""


class Noted(GeneralTracker):
    """A tracker of accelerate's kind that writes lines into a file."""

    name = "noted"
    requires_logging_directory = True

    def __init__(self, project: str, folder: str) -> None:
        super().__init__()
        self._path = Path(folder) / f"{project}.jsonl"

    @property
    def tracker(self) -> Path:
        return self._path

    def start(self) -> None:
        self._path.parent.mkdir(exist_ok=True)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"config": values})

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self._write({"step": step, **values})

    def finish(self) -> None:
        self._write({"finished": True})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def services() -> list[int]:
    """wandb's own processes that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and b"wandb-core" in path.joinpath("cmdline").read_bytes():
                found.append(int(path.name))
    return found


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Have accelerate know `Noted` inside a block."""
    with patch.dict("accelerate.tracking.LOGGER_TYPE_TO_CLASS"):
        register_tracker_class(Noted)
        yield


def tracked(
    mesh: Mesh,
    *,
    folder: str,
    steps: int,
    backends: Sequence[str],
    sections: Mapping[str, Any] | None = None,
    marker: str | None = None,
    rest: float = 0.0,
    kills: int = 0,
    stops: bool = False,
    breaks: int = 0,
    looks: bool = False,
) -> dict[str, Any]:
    """Train up to `steps`, with an evaluation after every third one. After step `kills` wandb's process is killed (or `stops`).

    With `looks` it says how long it takes until the row of a step is on the disk, once there are some.
    """
    killed: list[int] = []
    lag = 0.0

    def after(trainer: Trainer, step: int) -> None:
        nonlocal lag
        if step == breaks:
            raise KeyError("a mistake in a callback")
        if looks and step in (3, 4) and mesh.rank == 0:
            began, run = time.monotonic(), Path(folder, "run")
            wait_for(lambda: any(row["train/global_step"] >= step for path in files(run) for row in rows(path)), 60)
            lag = time.monotonic() - began
        if kills and step == kills and mesh.rank == 0:
            wait_for(services)
            time.sleep(1.0)  # until it has taken rows
            killed.extend(services())
            for pid in killed:
                os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        if kills and step >= kills:
            time.sleep(0.05)

    watching: list[Callback] = [*([Slow(Path(marker), rest)] if marker else []), after_steps(after)]
    config = configured(
        folder, steps, {"tracking": {"backends": backends, "tags": ["small"], "name": "a small run"}, **(sections or {})}
    )
    config["run"] = {**config["run"], "eval_every": 3}
    torch.manual_seed(7)
    said = io.StringIO()
    with (
        noted(),
        patch("zeromesh.trainer.monitoring.tracking._FINISH_SECONDS", 1.0 if stops else 30.0),
        contextlib.redirect_stdout(said),
        Trainer(llama(), config, sentences(), sentences(5, seed=4), callbacks=watching) as trainer,
    ):
        report = trainer.fit()
    # wandb asks its service about each module of these names that is imported.
    Path(folder, "xgboost.py").touch()
    with patch.object(sys, "path", [folder, *sys.path]), patch.dict(sys.modules):
        importlib.import_module("xgboost")
    return {
        "losses": list(report.losses),
        "said": said.getvalue(),
        "killed": len(killed),
        "left": len(services()),
        "lag": lag,
        "threads": torch.get_num_threads(),
    }


def planted(
    mesh: Mesh, *, folder: str, backends: Sequence[str], steps: int = 6, places: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """As `tracked`, with secrets in the environment, the arguments and the configuration; `places` are variables of trackers."""
    sections = {
        "tracking": {
            "backends": backends,
            "tags": ["small", IN_CONFIG, "https://example.org/x?token=planted-in-a-query", ENVIRONMENT["PGPASSWORD"]],
            "name": f"with {ENVIRONMENT['BILLING_SERVICE_PASSWORD']}",
        },
        "model": {
            "config": {
                "model_type": "llama",
                "hub_token": "planted-value-of-a-secret-key",
                "store": {"credentials": {"user": "planted-user", "keys": ["planted-key-in-a-list"]}},
            }
        },
        "data": {"train": "https://someone:planted-password/of@an-address@example.org/text", "eval": "redis://:planted@host"},
        "parallel": {"timeout_seconds": 60},  # as by default: half of it is the time that trackers have to end
    }
    arguments = [*sys.argv, f"--token={IN_ARGUMENTS}", f"--key={ENVIRONMENT['HF_TOKEN']}"]
    with patch.dict(os.environ, {**ENVIRONMENT, **(places or {})}), patch.object(sys, "argv", arguments), contextlib.chdir(folder):
        return tracked(mesh, folder=folder, steps=steps, backends=backends, sections=sections)


def leaking(mesh: Mesh, *, folder: str, memory: bool) -> str:
    """A run that ends with an error, on the last rank, whose words hold secrets; what this rank says."""
    error = MemoryError if memory else RuntimeError

    def after(trainer: Trainer, step: int) -> None:
        if mesh.rank == mesh.world_size - 1:
            raise error(f"no entry with {ENVIRONMENT['HF_TOKEN']} to https://me:planted@host/?token=planted")

    config = configured(folder, 5, {"tracking": {"backends": ["noted"]}})
    with patch.dict(os.environ, ENVIRONMENT), noted():
        fitted(llama(), config, sentences(), callbacks=[after_steps(after)])
    return "nothing"
