"""Steps of the trainer on the simulated device: how often the host waits for it, and what is launched before backward ends."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from simulated import collectives, device
from torch import Tensor, nn
from trainer_cases import llama, seeded, sentences, settings

from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.zero.gradient_reducer import GradientReducer


class Watch(Callback):
    """Notes the loss of each step, and on the simulated device what the host has waited for in it."""

    def __init__(self, *, simulated: bool) -> None:
        self.simulated = simulated
        self.losses: list[float] = []
        self.waits: list[list[str]] = []

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        device.clear() if self.simulated else None

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self.losses.append(metrics["loss"])
        self.waits.append(device.waits() if self.simulated else [])


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A user's loss that leaves its count on the device."""
    with torch.no_grad():
        count = (batch["labels"][:, 1:] != -100).sum()
    logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), count


def _padded() -> list[dict[str, Tensor]]:
    """Sentences, every other one of which ends with padding."""
    samples = sentences()
    for number, sample in enumerate(samples):
        sample["attention_mask"] = torch.ones_like(sample["input_ids"])
        if number % 2:
            sample["attention_mask"][-2:], sample["labels"][-2:] = 0, -100
    return samples


def _packed() -> list[dict[str, Tensor]]:
    """Sentences of two parts, whose positions begin anew."""
    samples = sentences()
    for sample in samples:
        length = len(sample["input_ids"])
        sample["position_ids"] = torch.arange(length) % (length // 2)
    return samples


DATA = {"plain": sentences, "padded": _padded, "packed": _packed}


def fit(
    mesh: Mesh, *, folder: str, sections: Mapping[str, Any], data: str = "plain", own_loss: bool = False
) -> dict[str, Any]:
    """Losses and waits of each step of a run."""
    watch = Watch(simulated=mesh.device.type == "sim")
    more = {"compute_loss": _own_loss} if own_loss else {}
    with (
        patch(
            "zeromesh.trainer.models.flops._measured", return_value=1e12
        ),  # What a device could do takes a while to find out.
        Trainer(seeded(llama), settings(folder, **sections), DATA[data](), callbacks=[watch], **more) as trainer,
    ):
        trainer.fit()
    return {"losses": watch.losses, "waits": watch.waits}


class _FarAhead(Callback):
    """In a step, what nobody waits for is never seen to be over on even ranks, and always on others."""

    def __init__(self, rank: int) -> None:
        self.patience = 0 if rank % 2 else 10**9

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        device.ops.set("patience", self.patience)

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        device.ops.set("patience", 20)


def launches(mesh: Mesh, *, folder: str, sections: Mapping[str, Any]) -> dict[str, Any]:
    """How many reductions each backward has launched when autograd has ended, and how many in all; and what was launched."""
    found: list[tuple[int, int]] = []
    end_backward = GradientReducer.flush

    def reductions() -> int:
        return sum(name == "reduce_scatter" for _, name, _ in collectives.launched)

    def noting(reducer: GradientReducer) -> None:
        before, ahead = counted.pop(), reductions()
        end_backward(reducer)
        found.append((ahead - before, reductions() - before))
        counted.append(reductions())

    begun = len(collectives.launched)
    counted = [reductions()]
    model = seeded(lambda: llama(num_hidden_layers=6))
    with (
        patch.object(GradientReducer, "flush", noting),
        Trainer(model, settings(folder, **sections), sentences(), callbacks=[_FarAhead(mesh.rank)]) as trainer,
    ):
        trainer.fit()
    return {"reductions": found, "order": [launch[1:] for launch in collectives.launched[begun:]]}
