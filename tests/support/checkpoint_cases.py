"""Cases of saving and resuming that workers run: each trains something tiny, with checkpoints, and says what it saw."""

import contextlib
import io
import json
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.support import fault_injection
from tests.support.plain import after_steps, calling, error_of, fitted, sentence_loss
from tests.support.trainer_cases import gpt2, llama, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.checkpoint.saver import SaveContent, Saver
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.monitoring.step_metrics import read_metrics

MODELS = {"llama": llama, "gpt2": lambda: gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)}


def saved_again(trainer: Trainer, folder: Path) -> None:
    """Save what was loaded, before the first step: the bytes have to be those that were read."""
    engine = trainer.engine
    assert engine is not None
    state, saver = engine.checkpoint_state, Saver(CheckpointStore(folder), trainer.mesh)
    tensors, shards = state.tensors(), state.shards_to_write()
    saver.begin(0, SaveContent(tensors=tensors, shards=shards, order={}, documents=lambda directory: None, keep=set))
    saved = saver.finish()
    assert saved is not None
    assert not saved.failure, saved


class Slow(Callback):
    """Leaves time for a kill: says when training begins, and rests after every step."""

    def __init__(self, marker: Path, rest: float) -> None:
        self._marker = marker
        self._rest = rest

    def on_train_begin(self, trainer: Trainer) -> None:
        self._marker.write_text("")

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        time.sleep(self._rest)


def noised(samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack samples, and leave labels out by all the generators that a collator may draw from."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    for row in batch["labels"]:
        row[random.randrange(len(row))] = -100
        row[np.random.randint(len(row))] = -100
        row[torch.rand(len(row)) < 0.1] = -100
    return batch


def configured(folder: str, steps: int, sections: Mapping[str, Any]) -> dict[str, Any]:
    """A run of `steps` steps with a checkpoint after every fifth."""
    base: dict[str, Any] = {
        "run": {"max_steps": steps, "log_every": 1},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": 5},
    }
    return settings(folder, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


def trained(
    mesh: Mesh,
    *,
    folder: str,
    steps: int,
    sections: dict[str, Any],
    kind: str = "llama",
    mirror: str | None = None,
    marker: str | None = None,
    rest: float = 0.03,
    noisy: bool = False,
    disks: Sequence[int] = (),
    lost_disk: bool = False,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train up to `steps`, going on from what is there; the losses of this process and where it began.

    `mirror` is where what was loaded is saved again. `disks`: for each rank, the disk that its host has; the folder is then another
    on each disk. `lost_disk` takes the directory of checkpoints away once training begins.
    """
    folder = f"{folder}/disk-{disks[mesh.rank]}" if disks else folder
    torch.manual_seed(7)

    class Watching(Callback):
        def on_train_begin(self, trainer: Trainer) -> None:
            if mirror:
                saved_again(trainer, Path(mirror))
            if lost_disk and mesh.rank == 0:
                (Path(folder) / "run" / "checkpoints").rmdir()
                (Path(folder) / "run" / "checkpoints").write_text("a file where the directory should be")

    slow = [Slow(Path(marker), rest)] if marker else []
    with Trainer(
        MODELS[kind](),
        configured(folder, steps, sections),
        sentences(),
        data_collator=noised if noisy else None,
        callbacks=[*callbacks, Watching(), *slow],
    ) as trainer:
        report = trainer.fit()
    metrics = Path(folder) / "run" / "metrics.jsonl"
    losses = [line["loss"] for line in read_metrics(metrics)] if metrics.exists() else []
    return {"losses": list(report.losses), "all": losses, "step": report.final_step}


def struck(mesh: Mesh, *, fault: str, **arguments: Any) -> dict[str, Any]:
    """As `trained`, with a fault that `fault_injection` describes."""
    fault_injection.install(fault, mesh.rank)
    return trained(mesh, **arguments)


def noted(mesh: Mesh, *, fault: str = "", **arguments: Any) -> dict[str, Any]:
    """As `trained`, with what the console said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = struck(mesh, fault=fault, **arguments) if fault else trained(mesh, **arguments)
    return {**found, "said": said.getvalue()}


def slowed(mesh: Mesh, *, folder: str, rank: int, seconds: float, evaluations: bool = False) -> dict[str, Any]:
    """13 steps in which one rank is slow, or the evaluations after every 4 of them; what the console said, the file of ranks in
    between, and the largest part of a step that went to communication."""
    during: list[dict[str, Any]] = []

    class Late(Callback):
        def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
            if mesh.rank == rank and not evaluations:
                time.sleep(seconds)

        def on_prediction_step(self, trainer: Trainer, done: int, total: int) -> None:
            if mesh.rank == rank and done == total:
                time.sleep(seconds)

        def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
            path = Path(folder) / "run" / "ranks.json"
            if step == 13 and path.exists():
                during.extend(json.loads(path.read_text())["ranks"])

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        config = configured(folder, 13, {"checkpoint": {"every_steps": 0}, "run": {"eval_every": 4 if evaluations else 0}})
        fitted(llama(), config, sentences(), sentences(), callbacks=[Late()])
    parts = [
        sum(row["seconds"] for rows in line["communication"].values() for row in rows.values()) / line["step_seconds"]
        for line in read_metrics(Path(folder) / "run" / "metrics.jsonl")
    ]
    return {"said": said.getvalue(), "during": during, "communication": max(parts)}


def opened(mesh: Mesh, *, folder: str, compute: str) -> None:
    """transformers alone makes the trained model of a checkpoint, and a run starts from it as from any model."""
    torch.manual_seed(7)
    precision = {"compute": compute, "master": "float32", "reduce": "float32"}
    checkpoint = Path(folder) / "run" / "checkpoints" / "step-00000005"
    ids = torch.arange(12, device=mesh.device).reshape(1, 12)
    with Trainer(llama(), configured(folder, 5, {"precision": precision}), sentences()) as trainer:
        trainer.fit()
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint).eval().to(mesh.device)
        dtype = theirs.dtype
        ours = trainer.model.eval()
        for parameter in ours.parameters():
            parameter.data = parameter.data.to(dtype)
        with torch.no_grad():
            assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    model = {"source": str(checkpoint), "config": None}
    sections = {"model": model, "precision": precision, "run": {"name": "second"}}
    with Trainer(None, configured(folder, 2, sections), sentences()) as second:
        before = second.evaluate(sentences())["eval_loss"]
        second.fit()
        after = second.evaluate(sentences())["eval_loss"]
    assert dtype == getattr(torch, compute)
    assert after < before < 4.0, "it does not learn on"


def cramped(mesh: Mesh, *, folder: str, free: int) -> dict[str, Any]:
    """As `trained`, on a disk that has so many bytes free."""
    with patch("shutil.disk_usage", lambda path: SimpleNamespace(free=free)):
        return trained(mesh, folder=folder, steps=5, sections={})


def after_damage(mesh: Mesh, *, folder: str, steps: int) -> list[str]:
    """What a trainer says that found no whole checkpoint, and what it says to one who wants its weights all the same."""
    torch.manual_seed(7)
    with Trainer(llama(), configured(folder, steps, {}), sentences()) as trainer:
        acts = (trainer.fit, lambda: dict(trainer.state_dict()), trainer.fit)
        return [error_of(act, ZeromeshError) for act in acts]


def signalled(mesh: Mesh, *, folder: str, number: int) -> dict[str, Any]:
    """A run that is told to stop in the middle of its first evaluation; what it was doing, and how far evaluation had got."""
    seen: list[int] = []

    def loss(model: Any, batch: Any) -> Any:
        if not model.training:
            seen.append(1)
            if len(seen) == 3 and mesh.rank == 1:
                os.kill(os.getpid(), number)
        return sentence_loss(model, batch)

    section = {"run": {"max_steps": 8, "eval_every": 4, "log_every": 1}, "batch": {"micro_size": 1, "global_size": 4}}
    ended = ""
    try:
        fitted(llama(), configured(folder, 8, section), sentences(), eval_dataset=sentences(), compute_loss=loss)
    except (SystemExit, KeyboardInterrupt) as end:
        ended = f"{type(end).__name__} {getattr(end, 'code', '')}".strip()
    return {"ended": ended, "batches": len(seen), "all": len(sentences()) // mesh.world_size}


def removed_late(mesh: Mesh, *, folder: str) -> None:
    """A checkpoint a step, of which one is kept; no file is removed before the last of 5 steps is over, or long after."""
    trained, held = threading.Event(), []
    unlink = os.unlink

    def slow(path: Any, *arguments: Any, **named: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and str(path).endswith(".safetensors"):
            held.append(not trained.wait(8))
        unlink(path, *arguments, **named)

    config = configured(folder, 5, {"checkpoint": {"every_steps": 1, "keep_last": 1}})
    with patch.object(os, "unlink", slow):
        fitted(llama(), config, sentences(), callbacks=[after_steps(lambda _, step: step == 5 and trained.set())])
    mesh.world.barrier("the end of the run")
    assert not any(held)
    assert [path.name for path in (Path(folder) / "run" / "checkpoints").iterdir()] == ["step-00000005"]


def slow_calls(mesh: Mesh, *, folder: str, calls: list[str], seconds: float, patience: float, limit: float) -> dict[str, Any]:
    """A run of 3 steps in which each of these calls of the system takes so long once on rank 0, longer than ranks may be without
    progress: the calls that did, and how the run ended."""
    struck: list[str] = []

    def slow(name: str, real: Any, *arguments: Any, **named: Any) -> Any:
        if name not in struck and "zeromesh-remove" not in threading.current_thread().name:
            struck.append(name)
            time.sleep(seconds)
        return real(*arguments, **named)

    def slow_down(trainer: Trainer, step: int) -> None:
        for name in calls if step == 2 and mesh.rank == 0 else ():
            stack.enter_context(patch.object(os, name, partial(slow, name, getattr(os, name))))

    section = {"every_steps": 1, "keep_last": 2, "timeout_seconds": patience}
    config = configured(folder, 3, {"checkpoint": section, "parallel": {"timeout_seconds": limit}})
    with contextlib.ExitStack() as stack:
        run = partial(fitted, llama(), config, sentences(), callbacks=[calling(on_step_begin=slow_down)])
        return {"ended": error_of(run, ZeromeshError), "struck": sorted(struck)}
