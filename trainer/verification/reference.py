"""The reference of a verification: one plain PyTorch process with torch's own optimizers, short enough for a reader to check. It
uses no part of the engine, no mesh, no distribution of batches and no chunked losses."""

import copy
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree
from transformers import get_scheduler

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.optimizer import make_optimizer
from zeromesh.trainer.config.sections.schedule import LRSchedule
from zeromesh.trainer.config.trainer_config import TrainerConfig, schedule_of
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.losses.losses import ComputeLoss
from zeromesh.trainer.models.adapters import add_adapters, encoded_weights, pretrained_of
from zeromesh.trainer.models.prepare import use_attention
from zeromesh.trainer.models.small_copy import whole_passes_in_float64
from zeromesh.trainer.models.user_model import ForwardInputs
from zeromesh.trainer.setup.engine_options import biases_and_norms, choose_trained
from zeromesh.trainer.torch_lr_scheduler import TorchSchedule
from zeromesh.trainer.verification.shrink import SmallRun
from zeromesh.units.plan import encoded_names
from zeromesh.weight_init.weight_sources import wrap_passed_model
from zeromesh.zero.hooks import watch_outputs

IGNORED = -100
_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
Outputs = dict[str, list[list[Tensor]]]
"""The tensors that each call of a module in a microbatch returned, by module name."""


@dataclass(kw_only=True, slots=True)
class PlainStep:
    """The results of one step. `gradients` are of the mean loss before clipping, `norm` is their norm."""

    loss: float = 0.0
    norm: float = 0.0
    sums: list[tuple[float, int]] = field(default_factory=list)
    """The summed loss and the number of targets of each microbatch."""
    outputs: list[Outputs] = field(default_factory=list)
    """The outputs of modules for each microbatch; empty for one that was not recorded."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # The master weights after the step.


def whole_model(subject: SmallRun, config: TrainerConfig) -> nn.Module:
    seed, compute = config.run.seed, getattr(torch, config.precision.compute)
    model = add_adapters(wrap_passed_model(copy.deepcopy(subject.model), seed), config.model, seed, compute).model
    choose_trained(model, config.model.train)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"{name} has no values", where="model.lora")
    return model


class PlainRun:
    """Trains a copy of the subject's model with the precision of `config`, and has the results."""

    def __init__(self, subject: SmallRun, config: TrainerConfig, inputs: UserInputs) -> None:
        self.subject, self.config = subject, config
        self.model = model = whole_model(subject, config).train()
        self.compute = getattr(torch, config.precision.compute)
        master = getattr(torch, config.precision.master, torch.bfloat16)  # As the engine's, where there is none.
        if config.model.attention is not None:
            use_attention(model, config.model.attention, self.compute, torch.device("cpu"))
        self.rounding = ""
        """A sentence on how much a codec changes the frozen weights before training; empty without one."""
        if (weights := encoded_weights(config.model.weights)) is not None:
            names, change, size = encoded_names(model, weights), 0.0, 0.0
            for parameter in map(model.get_parameter, names):
                given = parameter.detach().to(self.compute)
                parameter.data = weights.codec.rounded(given).to(parameter.dtype)
                change += float((parameter.detach() - given).double().square().sum())
                size += float(given.double().square().sum())
            self.rounding = f"{weights.codec.name} rounds {len(names)} matrices by {(change / size) ** 0.5:.2g} of their norm"
        self.masters = {
            name: nn.Parameter(each.detach().to(master), requires_grad=each.requires_grad)
            for name, each in model.named_parameters()
        }
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.compute)
        self.trained = {name: each for name, each in self.masters.items() if each.requires_grad}
        exempt = biases_and_norms(model) if config.optimizer.exempt != "none" else ()
        self.optimizer = make_optimizer(config.optimizer, model, exempt, config.folders)
        updated: dict[Tensor, Tensor] = {each: self.masters[name] for name, each in model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [updated[each] for each in group["params"]]
            group["initial_lr"] = float(group["lr"])
        self.optimizer.state.update({updated[each]: state for each, state in [*self.optimizer.state.items()]})
        section, steps = config.schedule, config.run.max_steps
        options = section.model_dump(exclude={"name", "warmup_steps", "warmup_ratio"}, exclude_none=True)
        scheduler = inputs.lr_scheduler
        if scheduler is None and not options and section.name in _SCHEDULES:
            # The schedule of transformers is independent of the one under test.
            scheduler = lambda each: get_scheduler(section.name, each, section.warmup_of(steps), steps)  # noqa: E731
        self.schedule: LRSchedule | TorchSchedule = (
            schedule_of(config) if scheduler is None else TorchSchedule(scheduler, config.optimizer, config.folders)
        )
        self.users_loss = inputs.compute_loss
        self.loss = partial(loss_sum, compute_loss=self.users_loss, smoothing=config.run.label_smoothing)
        self.scale = config.precision.loss_scale.initial_scale if config.precision.compute == "float16" else 1.0
        self.forward_order: dict[str, int] = {}  # The position of each module in the order of finished forwards.
        self.outputs: Outputs | None = None
        """The outputs of the current microbatch; None for one that is not watched."""
        self.initial, self.average = _copies(self.masters), dict[str, Tensor]()
        """The master weights before training, and their averages at the end; no averages without `ema`."""

    def train(self, watched: Collection[int] = ()) -> Self:
        """Train, and return the run. `watched` are the microbatches of each step whose module outputs are recorded."""
        model = self.model
        end_watch = watch_outputs([each for each in model.named_modules() if each[0]], self._keep_outputs)
        with whole_passes_in_float64() if self.compute == torch.float64 else nullcontext():
            getattr(self.optimizer, "train", dict)()  # Schedule-Free's trains other weights than it evaluates.
            self.steps = [self._step(number, watched) for number in range(self.config.run.max_steps)]
            getattr(self.optimizer, "eval", dict)()
        end_watch()
        self.losses, self.norms = [step.loss for step in self.steps], [step.norm for step in self.steps]
        self.parameters = self.steps[-1].parameters
        last: dict[int, int] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                last[id(parameter)] = max(last.get(id(parameter), -1), self.forward_order.get(name, -1))
        self.backward_order = {name: -last[id(parameter)] for name, parameter in model.named_parameters()}
        """The position of each parameter in the order of backward, assumed to reverse the order of finished forwards."""
        return self

    def _step(self, number: int, watched: Collection[int]) -> PlainStep:
        step = PlainStep()
        batches = batches_of(self.subject, self.config, number)
        sums = {name: torch.zeros_like(master) for name, master in self.trained.items()}
        by_samples = self.config.batch.average == "samples"
        samples = sum(map(_length, batches))
        # A loss of the user's own says after forward how many targets it has.
        known = 0 if self.users_loss else sum(count_of(self.model, batch) for batch in batches)
        for index, batch in enumerate(batches):
            inputs = {name: each for name, each in batch.items() if isinstance(each, Tensor) and name != "labels"}
            cast = {name: each.to(self.compute) for name, each in inputs.items() if each.is_floating_point()}
            self.outputs = {} if index in watched else None
            total, count = self.loss(self.model, {**batch, **cast})
            step.outputs.append(self.outputs or {})
            step.sums.append((float(total.detach()), count))
            share = _length(batch) / samples / max(1, count) if by_samples else 1 / known if known else 1.0
            if total.requires_grad:
                torch.autograd.backward(total * (share * self.scale))
            for name, parameter in self.model.named_parameters():
                if name in sums and parameter.grad is not None:
                    sums[name] += parameter.grad.to(sums[name].dtype)
                parameter.grad = None
            step.loss += step.sums[-1][0] * share
        late = 1.0 if known or by_samples else 1 / max(1, sum(count for _, count in step.sums))
        step.loss *= late
        self._update(step, number, {name: each.mul_(late / self.scale) for name, each in sums.items()})
        return step

    def _keep_outputs(self, name: str, output: Any) -> None:
        self.forward_order.setdefault(name, len(self.forward_order))
        if self.outputs is not None:
            self.outputs.setdefault(name, []).append(tensors_of(output))

    def _update(self, step: PlainStep, number: int, gradients: dict[str, Tensor]) -> None:
        step.gradients = _copies(gradients)
        for name, master in self.trained.items():
            master.grad = gradients[name]
        step.norm = float(nn.utils.clip_grad_norm_(list(self.trained.values()), self.config.run.clip_norm or float("inf")))
        factor, momentum = self.schedule.factor(number), self.schedule.momentum(number)
        for group in self.optimizer.param_groups:
            rate, lr = group["initial_lr"] * factor, group["lr"]
            group["lr"] = lr.fill_(rate) if isinstance(lr, Tensor) else rate  # A class may insist on tensors.
            if momentum is not None:
                group |= {"betas": (momentum, group["betas"][1])} if "betas" in group else {"momentum": momentum}
        if torch.isfinite(torch.tensor(step.norm)):
            self.optimizer.step()
        elif self.config.precision.compute == "float16":
            self.scale *= self.config.precision.loss_scale.backoff_factor
        self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(self.masters[name].data)
        step.parameters, ema = _copies(self.masters), self.config.ema
        if ema.decay and number + 1 >= ema.start_step and (number + 1) % ema.every_steps == 0:
            # The first update of the average copies the weights.
            self.average = {
                name: torch.lerp(self.average[name], value, 1 - ema.decay) if self.average else value.clone()
                for name, value in step.parameters.items()
            }


def batches_of(subject: SmallRun, config: TrainerConfig, step: int) -> list[dict[str, Any]]:
    """Return the microbatches of step `step` (from 0), in the order of their samples."""
    size, micro = config.batch.global_size, config.batch.micro_size
    batches = []
    for start in range(step * size, (step + 1) * size, micro):
        end = min(start + micro, (step + 1) * size)
        rows = [subject.samples[index % len(subject.samples)] for index in range(start, end)]
        if subject.collate is not None:
            batches.append(dict(subject.collate(rows)))
        else:
            batches.append({name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]})
    return batches


def count_of(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Return the number of targets of a batch: labels, without the first of each row for next-token prediction, or samples."""
    kind = _loss_unit(model)
    labels = batch.get("labels")
    if kind == "positions":
        return int(batch["start_positions"].numel() + batch["end_positions"].numel())
    if kind == "samples" or not isinstance(labels, Tensor):
        return _length(batch)
    return int(((labels[..., 1:] if kind == "next" else labels) != IGNORED).sum())


def loss_sum(
    model: Any, batch: Mapping[str, Any], *, compute_loss: ComputeLoss | None = None, smoothing: float = 0.0
) -> tuple[Tensor, int]:
    """Return the summed loss of a batch, and its targets: the user's own loss, or the model's mean times the targets."""
    if compute_loss is not None:
        total, count = compute_loss(model, batch)[:2]
        return total.reshape(()), int(count)
    fields = ForwardInputs.of(model, users_loss=False).fields
    inputs = {name: value for name, value in batch.items() if fields is None or name in fields}
    inputs |= {"use_cache": False} if "use_cache" in (fields or ()) else {}
    count = count_of(model, batch)
    labels = inputs.get("labels")
    if not count and isinstance(labels, Tensor):
        inputs["labels"] = torch.zeros_like(labels)  # A mean over no targets is NaN.
    outputs = model(**inputs)
    if smoothing and isinstance(labels, Tensor):
        logits = outputs.logits
        if _loss_unit(model) == "next":
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        return cross_entropy(wide, labels.flatten(), reduction="sum", label_smoothing=smoothing), count
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    mean: Any = outputs["loss"] if isinstance(outputs, Mapping) else first
    return getattr(mean, "loss", mean).reshape(()) * count, count


def _loss_unit(model: nn.Module) -> str:
    """Return the unit of a model's mean loss: the `next` tokens, `labels`, `positions` of answers, or `samples`."""
    inside = pretrained_of(model)
    kind = getattr(inside, "loss_type", None)
    encodes = bool(getattr(getattr(inside, "config", None), "is_encoder_decoder", False))
    if inside is not None and type(inside).__name__.endswith("LMHeadModel"):
        return "next"
    if kind in ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"):
        return "labels" if kind == "ForMaskedLM" or encodes else "next"
    if kind == "ForQuestionAnswering":
        return "positions"
    return "labels" if kind is not None and "Classification" in kind else "samples"


def _length(batch: Mapping[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, Tensor))


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def tensors_of(output: Any) -> list[Tensor]:
    """Return copies of the floating-point tensors in a module's output, except losses."""
    tensors = [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
    return [each.detach().clone() for each in tensors if each.dim()]
