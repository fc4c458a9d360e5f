"""Training the architectures: by the trainer on several ranks, and by a plain loop in one process, with the model's own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from architectures import ARCHITECTURES
from torch import nn
from trainer_cases import Plain, apart, distance, lines_of, settings, stacked

from zeromesh import Callback, Trainer
from zeromesh.mesh.groups import Mesh
from zeromesh.trainer.batching import SampleOrder
from zeromesh.trainer.hf.loss_check import InFloat64

STEPS = 5
SAMPLES = 17


def own_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean that the model itself gives for a batch."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def plainly_trained(model: Any, data: Sequence[Mapping[str, torch.Tensor]], config: Mapping[str, Any]) -> Plain:
    """Train as torch's users do: the global batch at once, in float64."""
    run, size, found = config["run"], config["batch"]["global_size"], Plain()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = tf.get_scheduler("linear", optimizer, 1, run["max_steps"])
    order = SampleOrder(length=len(data), seed=run["seed"])
    for step in range(run["max_steps"]):
        batch = stacked(data, [order.dataset_index(index) for index in range(step * size, (step + 1) * size)])
        loss = own_loss(model, batch)
        loss.backward()
        found.losses.append(float(loss.detach()))
        for parameter in trained.values():  # One that got no gradient has gradient zero, and decays.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.gradients.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
        found.norms.append(float(nn.utils.clip_grad_norm_(trained.values(), run["clip_norm"])))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


class Watch(Callback):
    """Compares every gradient of every step."""

    def __init__(self, plain: Plain) -> None:
        self.plain, self.worst = plain, 0.0

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        wanted = self.plain.gradients[step - 1]
        found = {name: trainer.gradient(name) for name in wanted}
        self.worst = max(self.worst, distance({name: g for name, g in found.items() if g is not None}, wanted))


def differences(
    folder: str, name: str, pair: tuple[Any, Any], data: Sequence[Any], **sections: Mapping[str, Any]
) -> dict[str, float]:
    """How far the trainer's run of one of two equal models is from the plain one of the other."""
    mine, reference = pair
    sizes = {"batch": {"global_size": 10, "micro_size": 2}, "run": {"name": name, "max_steps": STEPS}}
    config = settings(folder, **{**sizes, **sections})
    with InFloat64():
        plain = plainly_trained(reference.train(), data, config)
        watch, held = Watch(plain), data[:7]
        with Trainer(mine, config, data, held, callbacks=[watch]) as trainer:
            report = trainer.fit()
        with torch.no_grad():
            wanted = float(own_loss(reference.eval(), stacked(held, range(len(held)))))
    return {
        "losses": apart(report.losses, plain.losses),
        "norms": apart([line["grad_norm"] for line in lines_of(Path(folder) / name)], plain.norms),
        "gradients": watch.worst,
        "parameters": distance(dict(mine.named_parameters()), dict(reference.named_parameters())),
        "evaluation": apart([report.eval_loss or 0.0], [wanted]),
    }


def seeded_pair(build: Any) -> tuple[Any, Any]:
    """Two models with the same weights."""
    made = []
    for _ in range(2):
        torch.manual_seed(11)
        made.append(build())
    return made[0], made[1]


def trained(mesh: Mesh, folder: str, name: str, stage: int) -> dict[str, float]:
    """One of the fifteen."""
    subject = ARCHITECTURES[name]
    data = subject.samples(SAMPLES)
    return differences(folder, f"{name}-{stage}", seeded_pair(subject.build), data, zero={"stage": stage})
