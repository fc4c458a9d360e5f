"""Cases about loops: how losses call the model, what callbacks do between steps, what datasets do when samples are asked for."""

import os
import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.contract.cases_units import Stack
from tests.contract.harness import Batch, Case, cross_entropy, plain_loop, samples, summed
from tests.support.plain import after_steps, calling, error_of
from zeromesh import Trainer
from zeromesh.errors import ZeromeshError

Found = tuple[torch.Tensor, int]


# Losses


def two_views(model: Any, batch: Batch) -> Found:
    first, second = model(batch["values"]), model(-batch["values"])
    total, count = summed(first, batch)
    return total + (first - second).square().mean(dim=1).sum(), count


def own_teacher(model: Any, batch: Batch) -> Found:
    """The model runs under `no_grad` first, and is to agree with what it said then."""
    with torch.no_grad():
        wanted = model(batch["values"].flip(1)).softmax(dim=1)
    logits = model(batch["values"])
    total, count = summed(logits, batch)
    return total - (wanted * logits.log_softmax(dim=1)).sum(), count


def half_known(model: Any, batch: Batch) -> Found:
    """Parts of the model are called one by one, by a loss that knows them."""
    hidden = model.stem(batch["values"])
    for block in model.blocks:
        hidden = block(hidden)
    return summed(model.head(hidden) + model.head(hidden.detach()), batch)


def recomputed(model: Any, batch: Batch) -> Found:
    logits: torch.Tensor = checkpoint(model, batch["values"], use_reentrant=False)
    return summed(logits, batch)


def drawn_beside(model: Any, batch: Batch) -> Found:
    """Numbers are drawn before and after the model, from every generator, by a loss that they leave alone."""
    drawn = torch.rand(3).sum() + random.random() + np.random.rand()
    total, count = cross_entropy(model, batch)
    return total + 0 * (drawn + torch.randn(()).double()), count


def weighted(model: Any, batch: Batch) -> Found:
    weights = 1 + batch["classes"]
    losses = F.cross_entropy(model(batch["values"]), batch["classes"], reduction="none")
    return (losses * weights).sum(), int(weights.sum())


def in_place(model: Any, batch: Batch) -> Found:
    logits = model(batch["values"].mul_(0.5).add_(0.1))
    return summed(logits.mul_(2), batch)


# Models whose way depends on the data


class EarlyExit(Stack):
    """Blocks after the first are left out in every second step, on all ranks alike."""

    odd = True

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.odd else self.blocks[:1]:
            x = block(x)
        return x


class Reversed(Stack):
    odd = True

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[:: 1 if self.odd else -1]:
            x = block(x)
        return x


def choose(model: Any, step: int) -> None:
    model.odd = step % 2 == 1


class Recurrent(Stack):
    """One block is applied until it has run five times; its weights get five gradients."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.tanh(self.blocks[0](x))
        return self.blocks[1](x)


# Callbacks


CHOOSING = calling(on_step_begin=lambda trainer, step: choose(trainer.model, step))


def busy(trainer: Trainer, step: int) -> None:
    """Evaluate and read between steps, and forget to go back to training mode."""
    trainer.evaluate(samples(5))
    with trainer.gathered(["head.weight"]):
        assert not trainer.model.get_parameter("head.weight").isnan().any()
    assert all(not value.isnan().any() for _, value in trainer.state_dict())
    trainer.model.eval()


def failing(trainer: Trainer, step: int) -> None:
    for wrong in (lambda: trainer.gradient("nothing"), lambda: trainer.evaluate(3)):  # type: ignore[arg-type]
        assert error_of(wrong, ZeromeshError), "nothing was refused"


# Datasets


class Forking:
    def __init__(self) -> None:
        self.samples = samples()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return self.samples[index]


CASES = [
    Case(name="two calls of the model", build=Stack, loss=two_views),
    Case(name="the model as its own teacher", build=Stack, loss=own_teacher),
    Case(name="parts called by the loss", build=Stack, loss=half_known),
    Case(name="the whole model recomputed", build=Stack, loss=recomputed),
    Case(name="numbers drawn beside the model", build=Stack, loss=drawn_beside),
    Case(name="weighted samples", build=Stack, loss=weighted),
    Case(name="a batch changed in place", build=Stack, loss=in_place),
    Case(name="early exits", build=EarlyExit, before_step=choose, callbacks=lambda: [CHOOSING]),
    Case(name="another order of blocks", build=Reversed, before_step=choose, callbacks=lambda: [CHOOSING]),
    Case(name="a block in a loop", build=partial(Recurrent, layers=2)),
    Case(name="evaluations in callbacks", build=Stack, callbacks=lambda: [after_steps(busy)]),
    Case(name="errors caught in callbacks", build=Stack, callbacks=lambda: [after_steps(failing)]),
    Case(name="a dataset that forks", build=Stack, dataset=Forking, plain=lambda case: plain_loop(replace(case, dataset=samples))),  # type: ignore[arg-type]
]
