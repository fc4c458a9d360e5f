"""Cases of programs that come from other trainers, which workers run."""

from typing import Any

import torch
import transformers as tf
from trainer_cases import gpt2, sentences

from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh


def _model() -> Any:
    torch.manual_seed(1)
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def trained(
    mesh: Mesh, folder: str, fields: dict[str, Any], config: dict[str, Any] | None = None, shared: int = 1
) -> dict[str, Any]:
    """Train a tiny GPT-2 with TrainingArguments on all ranks; how far it is from what transformers' Trainer makes of them.

    That one takes `shared` times the batch, on one process.
    """
    arguments = tf.TrainingArguments(output_dir=f"{folder}/ours", **fields)
    with Trainer(_model(), config, sentences(24), args=arguments) as trainer:
        trainer.fit()
        mine = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        notes, keys = list(trainer.config.notes), trainer.config.model_dump(mode="json")
        given = trainer.args is arguments
    batch = fields["per_device_train_batch_size"] * shared
    theirs = tf.TrainingArguments(
        output_dir=f"{folder}/theirs-{mesh.rank}", **{**fields, "per_device_train_batch_size": batch}
    )
    other = tf.Trainer(_model(), theirs, train_dataset=sentences(24))
    other.train()
    states = other.model.state_dict()
    start = _model().state_dict()
    return {
        "apart": max(float((states[name] - value).abs().max()) for name, value in mine.items()),
        "moved": max(float((start[name] - value).abs().max()) for name, value in mine.items()),
        "notes": notes,
        "given": given,
        "keys": keys,
    }


def ordered(mesh: Mesh, folder: str, seeds: list[int | None]) -> list[list[float]]:
    """Losses of two steps for each seed of the data, with one seed of the run and one model."""
    found = []
    for number, seed in enumerate(seeds):
        config = {
            "data": {"seed": seed},
            "run": {"output_dir": folder, "name": f"run-{number}", "max_steps": 2, "seed": 3},
            "batch": {"global_size": 4},
            "checkpoint": {"every_steps": 0},
        }
        with Trainer(_model(), config, sentences(24)) as trainer:
            found.append(list(trainer.fit().losses))
    return found
