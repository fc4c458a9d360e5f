"""zeromesh on the workload, through its public `Trainer` and one configuration for time and memory alike."""

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bench.probe import Probe
from bench.timeline import Recorder
from bench.workload import Workload
from zeromesh.trainer import Trainer
from zeromesh.trainer.callbacks.callback import Callback


class Tokens:
    """The workload's token ids as a dataset, in the order of steps and ranks."""

    def __init__(self, workload: Workload) -> None:
        self._rows = workload.tokens().flatten(0, 1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Watcher(Callback):
    """Tells the probe when steps begin and end, and stops it before the model is made whole."""

    def __init__(self, probe: Probe, recorder: Recorder, last: int) -> None:
        self._probe = probe
        self._recorder = recorder
        self._last = last

    def on_train_begin(self, trainer: Trainer) -> None:
        self._probe.training()

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        self._probe.begin()
        self._recorder.on = step == self._last

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self._recorder.on = False
        self._probe.end(float(metrics["loss"]))

    def on_train_end(self, trainer: Trainer) -> None:
        self._probe.close()
        engine = trainer.engine
        if engine is not None:
            ledger = {purpose.name: nbytes for purpose, nbytes in engine.ledger.by_purpose().items()}
            self._probe.found.notes = {
                "transport": engine.groups[0].reduction.name,
                "ledger": ledger,
                "ledger_peak": engine.ledger.peak(),
                "events": self._recorder.events,
            }


def configuration(workload: Workload, stage: int, output_dir: str) -> dict[str, Any]:
    """Return the configuration of a workload; what is not here is zeromesh's default."""
    return {
        "model": {"activation_checkpointing": "block" if workload.checkpointing else "none", "loss": workload.loss},
        "data": {"shuffle": False},
        "parallel": {"transport": workload.transport},
        "zero": {"stage": stage, "prefetch": workload.prefetch},
        "precision": {"compute": {torch.bfloat16: "bfloat16", torch.float32: "float32"}[workload.compute]},
        "optimizer": {
            "lr": workload.learning_rate,
            "betas": list(workload.betas),
            "weight_decay": workload.weight_decay,
            "in_backward": workload.in_backward and not workload.clip,
        },
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": workload.ranks * workload.micro, "micro_size": workload.micro},
        "run": {
            "name": "bench",
            "output_dir": output_dir,
            "max_steps": workload.steps,
            "clip_norm": workload.clip,
            "on_nonfinite": "stop",
            "seed": workload.seed,
        },
        "checkpoint": {"every_steps": workload.checkpoint_every, "keep_last": 100},
        "offload": {**_OFFLOAD[workload.offload], "directory": workload.folder or None},
    }


_OFFLOAD: dict[str, dict[str, str]] = {
    "none": {},
    "host": {"optimizer": "host", "parameters": "host"},
    "optimizer": {"optimizer": "file"},
    "file": {"optimizer": "file", "parameters": "file"},
}


def train(workload: Workload, stage: int, probe: Probe) -> None:
    """Run the workload at a ZeRO stage."""
    recorder = Recorder()
    watching = recorder.watching() if workload.timeline else nullcontext()
    with tempfile.TemporaryDirectory() as temporary, watching:
        output_dir = workload.checkpoint_folder or temporary
        trainer = Trainer(
            workload.build_model,
            configuration(workload, stage, output_dir),
            train_dataset=Tokens(workload),
            callbacks=[Watcher(probe, recorder, workload.warmup + workload.timed)],
        )
        trainer.fit()
        trainer.close()
