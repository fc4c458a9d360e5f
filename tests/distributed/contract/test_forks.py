"""Processes that a dataset or a callback forks while a run goes on."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.checkpoint_cases import configured
from tests.support.tables import row, tried
from tests.support.trainer_cases import llama, sentences
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.monitoring.step_metrics import read_metrics

_FORK = multiprocessing.get_context("fork")


class Forking:
    """Sentences whose tokens pass through processes that are forked for each of them."""

    def __init__(self) -> None:
        self._samples = sentences()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        sample = self._samples[index]
        if index % 4 == 0:
            with _FORK.Pool(1) as pool:  # It ends its process with SIGTERM.
                tokens = pool.map(int, sample["input_ids"].tolist())
            sample = {**sample, "input_ids": torch.tensor(tokens)}
        elif index % 4 == 1:
            loader = DataLoader([sample["input_ids"]], batch_size=None, num_workers=1, multiprocessing_context=_FORK)
            (tokens,) = loader
            sample = {**sample, "input_ids": tokens}
        elif index % 4 == 2:
            child = os.fork()
            if child == 0:
                sys.exit(7)  # Through all that is around it here.
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code != 7:
                raise RuntimeError(f"the child has ended with {code}")
        return sample


class Terminating(Callback):
    def __init__(self) -> None:
        self.codes: list[int | None] = []

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            child = _FORK.Process(target=time.sleep, args=(20.0,))
            child.start()
            time.sleep(0.2)
            os.kill(child.pid or 0, number)
            child.join(5)
            self.codes.append(child.exitcode)
            child.kill()


def forking(mesh: Mesh, *, folder: str, transport: str) -> None:
    """Processes that are forked in a run end when they are told, and change nothing."""
    losses = []
    for name in ("plain", "forked"):
        torch.manual_seed(7)
        ending = Terminating()
        callbacks = [ending] if name == "forked" else []
        sections = {"checkpoint": {"every_steps": 1}, "parallel": {"transport": transport, "timeout_seconds": 20.0}}
        config = configured(f"{folder}/{name}", 2, sections)
        dataset: Any = Forking() if name == "forked" else sentences()
        with Trainer(llama(), config, dataset, callbacks=callbacks) as trainer:
            losses.append(trainer.fit().losses)
    assert losses[0] == losses[1]
    assert len(read_metrics(Path(folder) / "forked" / "run" / "metrics.jsonl")) == 2
    assert ending.codes[0] == -signal.SIGTERM
    assert ending.codes[1] in (1, -signal.SIGINT)  # A process of multiprocessing ends with KeyboardInterrupt.


test_forks = tried("test_forks", [row(2, "forking", transport="shared"), row(2, "forking", pytest.mark.full, transport="gloo")])
