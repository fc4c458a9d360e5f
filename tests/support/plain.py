"""The other side of every comparison: one process of plain PyTorch, which takes each global batch at once."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from zeromesh import Callback, Trainer
from zeromesh.trainer.data.sampler import SampleOrder

Batch = Mapping[str, Any]
Sum = Callable[[Any, Any], tuple[torch.Tensor, int]]
"""The sum of a batch's losses, and what it is to be divided by."""
Hook = Callable[[Any, int], object]
"""Called with the model and the number of a step, from 1."""


@dataclass(slots=True)
class Plain:
    """What a plain loop in one process did: per step the loss, the norm, every gradient; states[n] is after n steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)


def sentence_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Sum and count of a language model's loss."""
    logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def stacked(dataset: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([dataset[index][name] for index in indices]) for name in dataset[0]}


def nothing(model: Any, step: int) -> None:
    """A loop that does nothing beside training."""


def plain_loop(
    model: Any,
    batches: Iterable[Any],
    mean: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float = 0.0,
    schedule: Any = None,
    before_step: Hook = nothing,
    after_step: Hook = nothing,
) -> Plain:
    """Take a step for each batch, by the `mean` of its losses."""
    found = Plain(states=[clones(model)])
    for step, batch in enumerate(batches, 1):
        before_step(model, step)
        loss = mean(model, batch)
        loss.backward()
        found.losses.append(float(loss.detach()))
        found.gradients.append(
            {
                name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
                for name, each in model.named_parameters()
                if each.requires_grad
            }
        )
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        after_step(model, step)
        found.states.append(clones(model))
    return found


def plain_fit(
    model: Any,
    dataset: Any,
    config: Mapping[str, Any],
    loss_sum: Sum = sentence_loss,
    before_step: Hook = nothing,
    after_step: Hook = nothing,
    rows: Sequence[Sequence[int]] = (),
    groups: Callable[[Any], list[Any]] = lambda model: [*model.parameters()],
    dtype: torch.dtype = torch.float64,
) -> Plain:
    """Train as torch's users do, in float64 or another `dtype` of all that has a fraction, by the rules that `settings` names.
    `rows` are the samples of each step, by default those that the trainer takes; `groups` those of the optimizer."""
    run, size = config["run"], config["batch"]["global_size"]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype) if parameter.is_floating_point() else parameter.data
    if not rows:
        order = SampleOrder(length=len(dataset), seed=run["seed"])
        numbers = [range(step * size, (step + 1) * size) for step in range(run["max_steps"])]
        rows = [[order.dataset_index(number) for number in each] for each in numbers]
    eps = config["optimizer"].get("eps", 1e-8)
    optimizer = torch.optim.AdamW(groups(model), lr=config["optimizer"]["lr"], betas=(0.9, 0.95), eps=eps, weight_decay=0.1)

    def mean(model: Any, batch: Any) -> torch.Tensor:
        total, count = loss_sum(model, batch)
        return total / count

    return plain_loop(
        model.train(),
        (stacked(dataset, each) for each in rows),
        mean,
        optimizer,
        clip_norm=run["clip_norm"],
        schedule=tf.get_scheduler("linear", optimizer, 1, len(rows)),
        before_step=before_step,
        after_step=after_step,
    )


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by name, as it is now."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Gradients(Callback):
    """Compares all gradients of the first and the last step with the plain loop's."""

    def __init__(self, plain: Plain) -> None:
        self.plain, self.worst = plain, 0.0

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        if step not in (1, len(self.plain.gradients)):
            return
        wanted = self.plain.gradients[step - 1]
        found = {name: trainer.gradient(name) for name in wanted}
        self.worst = max(self.worst, distance({name: g.cpu() for name, g in found.items() if g is not None}, wanted))


def distances(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Relative differences by name; of what is zero but for rounding, in parts of the largest tensor. Infinite for what is not
    there, not a number, or of another dtype."""
    least = 1e-3 * max(float(value.norm()) for value in wanted.values())

    def one(name: str, value: torch.Tensor) -> float:
        if name not in found or found[name].dtype != value.dtype:
            return math.inf
        difference = float((found[name].cpu() - value.cpu()).norm()) / (float(value.norm()) + least)
        return math.inf if math.isnan(difference) else difference

    return {name: one(name, value) for name, value in wanted.items()}


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest of `distances`; infinite where names differ."""
    return math.inf if found.keys() != wanted.keys() else max(distances(found, wanted).values())


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of two lists of numbers; infinite where one is NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def like(mine: Any, theirs: Any, *, rel: float = 1e-9, abs_: float = 0.0, where: str = "") -> None:
    """Assert that two nests of values are the same but for rounding of their numbers with a fraction, and tensors."""
    if isinstance(theirs, Mapping):
        assert list(mine) == list(theirs), where
        for name, value in theirs.items():
            like(mine[name], value, rel=rel, abs_=abs_, where=f"{where}.{name}")
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs), where
        for number, value in enumerate(theirs):
            like(mine[number], value, rel=rel, abs_=abs_, where=f"{where}[{number}]")
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=rel, atol=abs_, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, float) and isinstance(mine, float | int):
        assert math.isclose(mine, theirs, rel_tol=rel, abs_tol=abs_), (where, mine, theirs)
    else:
        assert mine == theirs, (where, mine, theirs)


def compare(
    model: Any,
    config: Mapping[str, Any],
    data: Any,
    plain: Plain,
    *,
    callbacks: Sequence[Any] = (),
    gradients: bool = True,
    losses: bool = True,
    after: Callable[[Trainer], object] = lambda trainer: None,
    **arguments: Any,
) -> tuple[dict[str, float], Any]:
    """Train by the trainer; its differences from the plain loop in losses, gradients and parameters, and its report. `after` is
    called at its end."""
    watched = Gradients(plain)
    seen = [*callbacks, *([watched] if gradients else [])]
    with Trainer(model, config, data, callbacks=seen, **arguments) as trainer:
        report = trainer.fit()
        state = {name: value.detach().clone() for name, value in trainer.state_dict()}
        after(trainer)
    found = {"parameters": distance(state, plain.states[-1]), "gradients": watched.worst}
    return found | ({"losses": apart(report.losses, plain.losses)} if losses else {}), report


def calling(**events: Callable[..., object]) -> Callback:
    """A callback that calls each function at the event that it is named after."""
    found = Callback()
    vars(found).update(events)
    return found


def after_steps(look: Callable[[Any, int], object]) -> Callback:
    """A callback that calls `look(trainer, step)` after each step."""
    return calling(on_step_end=lambda trainer, step, metrics: look(trainer, step))


def stopping(at: int) -> Callback:
    """A callback that asks to stop after step `at`."""
    return after_steps(lambda trainer, step: trainer.request(stop=step == at))


def fitted(*arguments: Any, **named: Any) -> dict[str, torch.Tensor]:
    """The parameters after a run of the trainer with these arguments."""
    with Trainer(*arguments, **named) as trainer:
        trainer.fit()
        return {name: value.detach().clone() for name, value in trainer.state_dict()}


def error_of(call: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...] = Exception) -> str:
    """The class and the text of the error of this kind that a call raises; empty where it raises none."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""
