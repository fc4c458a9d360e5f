"""The other side of the comparison: one plain PyTorch process, the whole batch at once, torch's own optimizers."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from tests.support.plain import plain_loop

from .models import SUBJECTS, Batch, gpt2
from .recipe import DTYPES, LEARNING_RATE, Problem

GRADIENT_STEP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    losses: list[float]
    norms: list[float]
    final_loss: float
    """On the first batch, after the last step."""
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def build(problem: Problem) -> Any:
    """The model of a problem with its initial values: equal in every process."""
    torch.manual_seed(11)
    model = gpt2(problem.dropout) if problem.dropout else SUBJECTS[problem.model].build()
    return model.train()


def batch_of(problem: Problem, step: int) -> dict[str, torch.Tensor]:
    return SUBJECTS[problem.model].batch(torch.Generator().manual_seed(1000 + step), problem.samples)


def part(batch: Batch, start: int, end: int) -> dict[str, torch.Tensor]:
    return {name: values[start:end] for name, values in batch.items()}


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def train_plainly(problem: Problem) -> Trained:
    subject, model = SUBJECTS[problem.model], build(problem)
    convert(model, DTYPES[problem.precision][0])

    def mean(model: Any, batch: Batch) -> torch.Tensor:
        with problem.arithmetic():
            return subject.loss_sum(model, batch) / subject.count(batch)

    batches = [batch_of(problem, step) for step in range(problem.steps)]
    plain = plain_loop(model, batches, mean, _optimizer(problem, model), clip_norm=problem.clip)
    with torch.no_grad():
        final = float(mean(model, batches[0]))
    gradients = plain.gradients[GRADIENT_STEP] if problem.steps > GRADIENT_STEP else {}
    return Trained(losses=plain.losses, norms=plain.norms, final_loss=final, gradients=gradients, parameters=plain.states[-1])


def _optimizer(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    settings = problem.settings()
    groups = _groups(problem, model, settings.weight_decay)
    if problem.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=settings.momentum)
    if problem.optimizer == "adagrad":
        return torch.optim.Adagrad(groups, lr=LEARNING_RATE, eps=settings.eps)
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=settings.betas, eps=settings.eps)


def _groups(problem: Problem, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            patterns = SUBJECTS[problem.model].no_decay if problem.decay else ()
            (plain if any(fnmatchcase(name, each) for each in patterns) else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
