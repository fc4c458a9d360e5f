"""Steps of the trainer on the simulated device: how often the host waits for it, and what is launched before backward ends."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zeromesh
from tests.simulated import collectives, device
from tests.support.plain import fitted
from tests.support.trainer_cases import gpt2, llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.optim.gradients import GradientReducer


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


def _dropping() -> Any:
    return gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "dropout": _dropping}


def fit(
    mesh: Mesh, *, folder: str, sections: Mapping[str, Any], data: str = "plain", model: str = "llama", own_loss: bool = False
) -> dict[str, Any]:
    """Losses and waits of each step of a run."""
    watch = Watch(simulated=mesh.device.type == "sim")
    given = {"compute_loss": _own_loss} if own_loss else {}
    # What a device could do at most takes a while to find out.
    peak = patch("zeromesh.trainer.models.flops._timed", return_value=1e12)
    made, samples = seeded(MODELS[model]), DATA[data]()
    with peak, Trainer(made, settings(folder, **sections), samples, callbacks=[watch], **given) as trainer:
        trainer.fit()
    return {"losses": watch.losses, "waits": watch.waits}


def own_loop(mesh: Mesh) -> dict[str, Any]:
    """Losses and waits of each step of a loop of a user's own, which clips, and reads its loss when it is over."""
    model = seeded(llama).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wide = {"compute": "float64", "master": "float64", "reduce": "float64"}
    model, optimizer = zeromesh.shard(model, optimizer, precision=wide)
    samples = sentences()
    losses, waits = [], []
    for step in range(4):
        rows = [samples[4 * step + 2 * mesh.rank + number] for number in range(2)]
        batch = {name: torch.stack([row[name] for row in rows]).to(mesh.device) for name in rows[0]}
        if mesh.device.type == "sim":
            device.clear()
        hidden = model(input_ids=batch["input_ids"], attention_mask=_causal(batch["input_ids"])).logits
        loss = nn.functional.cross_entropy(hidden[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        waits.append(device.waits() if mesh.device.type == "sim" else [])
        losses.append(float(loss.detach()))
    zeromesh.unshard(model)
    return {"losses": losses, "waits": waits}


def _causal(ids: Tensor) -> Tensor:
    """A mask that the model takes as it is, without looking into it."""
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    return seen.expand(ids.shape[0], 1, -1, -1)


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
    with patch.object(GradientReducer, "flush", noting):
        fitted(model, settings(folder, **sections), sentences(), callbacks=[_FarAhead(mesh.rank)])
    return {"reductions": found, "order": [launch[1:] for launch in collectives.launched[begun:]]}
