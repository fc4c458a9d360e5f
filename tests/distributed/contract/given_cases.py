"""Cases of models and schedulers as users give them: modes, recomputation, compiled models, cycled momentum. Workers run them."""

from collections.abc import Callable as Function
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from tests.distributed.contract.sameness_cases import samples, squares
from tests.support.plain import compare, distance, plain_fit
from tests.support.trainer_cases import gpt2, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.sampler import SampleOrder


class Modes(nn.Module):
    """Computes something else in evaluation mode, as a whole and in each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubled() for _ in range(2))
        self.head = nn.Linear(80, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 if self.training else 3)


class Doubled(nn.Module):
    """A block above 4096 elements that also gives more in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(80, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * (1 if self.training else 2)


class Forgetful(Callback):
    """Puts the model into evaluation mode, and leaves it so."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        trainer.model.eval()

    def on_substep_end(self, trainer: Trainer, step: int) -> None:
        trainer.model.eval()


def _frozen() -> Any:
    model = Modes()
    model.blocks[0].eval()
    return model


def _trained(folder: str, name: str, build: Function[[], Any], callbacks: Any = (), **sections: Any) -> float:
    """Train a model, and say how far its parameters are from those of a plain loop without the callbacks."""
    reference = seeded(build)
    reference = getattr(reference, "_orig_mod", reference)
    frozen = [module for module in reference.modules() if not module.training] if reference.training else []
    reference.train = lambda mode=True: reference  # type: ignore[method-assign]  # a plain loop keeps the modes it was given
    plain = plain_fit(reference, samples(23), settings(folder), squares)
    assert all(not module.training for module in frozen)
    config = settings(folder, run={"name": name}, **sections)
    model = seeded(build).double()
    return compare(model, config, samples(23), plain, callbacks=callbacks, compute_loss=squares)[0]["parameters"]


def modes(mesh: Mesh, folder: str, stages: list[int]) -> dict[str, float]:
    """Modes that a callback changes, modules frozen in evaluation mode, compiled models: differences from plain loops."""
    found = {}
    for stage in stages:
        zero = {"zero": {"stage": stage}}
        found[f"forgotten {stage}"] = _trained(folder, f"forgotten{stage}", Modes, [Forgetful()], **zero)
        found[f"frozen {stage}"] = _trained(folder, f"frozen{stage}", _frozen, [Forgetful()], **zero)
        compiled = lambda: torch.compile(Modes(), backend="eager")  # noqa: E731
        found[f"compiled {stage}"] = _trained(folder, f"compiled{stage}", compiled, **zero)
    return found


def compiled_fields(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A compiled Hugging Face model, and one that recomputes its layers because its user has said so."""
    build = partial(gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    plain = plain_fit(seeded(build), sentences(), settings(folder))
    found: dict[str, Any] = {}
    for name, change in (("compiled", partial(torch.compile, backend="eager")), ("recomputed", _recomputing)):
        model = change(seeded(build).double())
        with Trainer(model, settings(folder, run={"name": name}), sentences()) as trainer:
            flags = {
                bool(m.gradient_checkpointing) for m in trainer.model.modules() if hasattr(m, "gradient_checkpointing")
            }
            trainer.fit()
            end = {key: value.clone() for key, value in trainer.state_dict()}
        found[name] = {"apart": distance(end, plain.states[-1]), "recomputes": sorted(flags)}
    model = seeded(build)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    try:
        Trainer(model, settings(folder, run={"name": "reentrant"}), sentences()).fit()
    except ValueError as error:
        found["reentrant"] = str(error)
    return found


def _recomputing(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)


def _cyclic(optimizer: Optimizer) -> LRScheduler:
    return CyclicLR(optimizer, base_lr=1e-3, max_lr=2e-2, step_size_up=2, base_momentum=0.7, max_momentum=0.95)


def momentum(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Schedulers that cycle the momentum, beside torch's own optimizers."""
    found: dict[str, Any] = {}
    data = samples(23)
    for name, make in (("adamw", _one_cycle), ("adamw", _cyclic), ("sgd", _one_cycle), ("sgd", _cyclic)):
        model = seeded(Modes).double()
        optimizer: Optimizer = (
            AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
            if name == "adamw"
            else SGD(model.parameters(), lr=1e-2, momentum=0.8, weight_decay=0.1)
        )
        scheduler, order = make(optimizer), SampleOrder(length=len(data), seed=5)
        for step in range(4):
            x = torch.stack([data[order.dataset_index(index)]["x"] for index in range(step * 8, step * 8 + 8)])
            (model(x).square().sum() / 8).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        wanted = {key: value.detach() for key, value in model.named_parameters()}
        key = f"{name} {make.__name__}"
        config = settings(folder, optimizer={"name": name, "momentum": 0.8}, run={"name": key.replace(" ", "-")})
        with Trainer(seeded(Modes).double(), config, data, compute_loss=squares, lr_scheduler=make) as trainer:
            trainer.fit()
            found[key] = distance({key: value.clone() for key, value in trainer.state_dict()}, wanted)
    for name in ("sgd", "adagrad"):
        try:
            config = settings(folder, optimizer={"name": name}, run={"name": "refused"})
            Trainer(seeded(Modes).double(), config, data, compute_loss=squares, lr_scheduler=_one_cycle).fit()
        except ValueError as error:
            found[name] = str(error)
    return found
