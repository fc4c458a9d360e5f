"""The other side of the comparison: one plain process, by torch alone.

The model runs whole, a microbatch at a time; the loss is a sum that is divided by the targets of the global batch; gradients are
those of `loss.backward()`, the norm and clipping torch's, the update one of `torch.optim`. Nothing here is of the engine, so that
what is wrong there is not wrong here too. With a compute dtype below that of the master weights it is mixed precision as it is
written by hand: gradients of microbatches are added to those of master weights in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.losses.trial import InFloat64
from zeromesh.trainer.lr_schedule import LRSchedule
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.torch_lr_scheduler import MakeScheduler
from zeromesh.trainer.verification.shrink import STEPS, SmallRun
from zeromesh.zero.hooks import after_every_module, tensors_in

_IGNORED = -100
_EXEMPT = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""What transformers' Trainer does not decay, beside the parameters of `nn.LayerNorm`."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainStep:
    """What a step of the plain process gave. Tensors are by all names of the whole model, a tied one by each of its names."""

    loss: float
    norm: float
    """Of all gradients, before clipping."""
    sums: tuple[float, ...]
    """The summed loss of each microbatch."""
    read: Tensors
    """The parameters that forward read, in the compute dtype."""
    gradients: Tensors
    parameters: Tensors
    """Master weights after the update."""
    averages: Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainRun:
    """The steps of the plain process, and what its modules returned."""

    steps: tuple[PlainStep, ...]
    outputs: Mapping[tuple[int, int, str], Tensor]
    """By step, microbatch and name of the module: the first tensor that it returned, in its first call."""
    order: tuple[str, ...]
    """Names of modules, in the order in which their forwards end."""
    names: tuple[str, ...]
    """Names of parameters, tied ones once, in the order of the model."""
    trained: frozenset[str]


def train_plainly(
    subject: SmallRun,
    *,
    exact: bool,
    keep_outputs: Callable[[int], bool] = lambda block: False,
    make_scheduler: MakeScheduler | None = None,
) -> PlainRun:
    """Train in this process alone; `exact`: in float64 throughout, else in the precision of the configuration.

    `keep_outputs(block)`: whether the outputs of modules are kept of a microbatch of each step.
    """
    return _PlainTraining(subject, exact=exact, make_scheduler=make_scheduler).run(keep_outputs)


@dataclass(kw_only=True, slots=True)
class _OutputRecorder:
    """Keeps what modules return."""

    names: dict[int, str]
    outputs: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    order: dict[str, None] = field(default_factory=dict)
    at: tuple[int, int] | None = None

    def see(self, module: nn.Module, output: Any) -> None:
        name = self.names.get(id(module))
        found = first_tensor(output)
        if name is None or found is None:
            return
        self.order[name] = None
        if self.at is not None:
            self.outputs.setdefault((*self.at, name), found.detach().clone())


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of real numbers among what a module returned."""
    return next((each for each in tensors_in(output) if each.is_floating_point()), None)


class _PlainTraining:
    """The model, its optimizer, and master weights where the model computes in another dtype."""

    def __init__(self, subject: SmallRun, *, exact: bool, make_scheduler: MakeScheduler | None) -> None:
        config, precision = subject.config, subject.config.precision
        compute, master = ("float64", "float64") if exact else (precision.compute, precision.master)
        self._subject, self._config = subject, config
        self._arithmetic = InFloat64 if exact else nullcontext
        self.model = copy.deepcopy(subject.model)
        self.model.train()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, compute))
        self.aliases = _names_by_parameter(self.model)
        self.named = dict(self.model.named_parameters())
        wide = getattr(torch, master)
        self.masters = {
            name: parameter
            if parameter.dtype == wide
            else nn.Parameter(parameter.detach().to(wide), requires_grad=parameter.requires_grad)
            for name, parameter in self.named.items()
        }
        # Initial values are float32, whatever computes with them.
        for name, parameter in subject.model.named_parameters():
            if self.masters[name] is not self.named[name]:
                self.masters[name].data.copy_(parameter.data)
        reduce = "float64" if exact else precision.reduce
        self._sums = torch.float32 if reduce == "bfloat16" else getattr(torch, reduce)
        self._scale = precision.loss_scale.initial_scale if not exact and compute == "float16" else 1.0
        self._trained = {name: each for name, each in self.masters.items() if each.requires_grad}
        self._optimizer = _optimizer(config, self.model, self._trained)
        own = make_scheduler or _scheduler_of(config)
        self._scheduler = own(self._optimizer) if own is not None else None
        self._rates = LRSchedule(total_steps=STEPS, **config.schedule.model_dump(exclude={"warmup_ratio"}))
        self._averages: Tensors = {}

    def run(self, keep_outputs: Callable[[int], bool]) -> PlainRun:
        """All steps."""
        recorder = _OutputRecorder(names={id(module): name for name, module in self.model.named_modules()})
        handle = after_every_module(recorder.see)
        try:
            steps = tuple(self._step(step, recorder, keep_outputs) for step in range(STEPS))
        finally:
            handle.remove()
        return PlainRun(
            steps=steps,
            outputs=recorder.outputs,
            order=tuple(recorder.order),
            names=tuple(self.named),
            trained=frozenset(self._trained),
        )

    def _step(self, step: int, recorder: _OutputRecorder, keep_outputs: Callable[[int], bool]) -> PlainStep:
        subject, config = self._subject, self._config
        read = self._by_all_names(self.named)
        batches = [subject.batch(step, block) for block in range(subject.blocks())]
        objective = Objective.of(self.model, config, subject.compute_loss)
        counts = [objective.count(batch) for batch in batches]
        sums: list[float] = []
        gradients: Tensors = {}
        for block, batch in enumerate(batches):
            recorder.at = (step, block) if keep_outputs(block) else None
            with self._arithmetic():
                total, count = objective.total(self.model, batch, counts[block])
            counts[block] = count
            sums.append(float(total.detach()))
            if total.requires_grad:
                total.backward(torch.full_like(total, self._scale * self._share(batches, counts, block)))  # type: ignore[no-untyped-call]
            self._collect(gradients)
        targets = sum(each or 0 for each in counts)
        late = 1.0 / max(1, targets) if objective.late else 1.0
        for name, parameter in self._trained.items():
            parameter.grad = gradients.get(name, torch.zeros_like(parameter, dtype=self._sums)).mul(late / self._scale)
            parameter.grad = parameter.grad.to(parameter.dtype)
        found = {
            name: parameter.grad.clone() for name, parameter in self._trained.items() if parameter.grad is not None
        }
        shares = [self._share(batches, counts, block) for block in range(len(batches))]
        loss = sum(total * share for total, share in zip(sums, shares, strict=True)) * late
        limit = config.run.clip_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self._trained.values(), limit))
        self._update(step)
        return PlainStep(
            loss=loss,
            norm=norm,
            sums=tuple(sums),
            read=read,
            gradients=self._by_all_names(found),
            parameters=self._by_all_names(self.masters),
            averages=self._by_all_names(self._averages or self.masters) if config.ema.decay else {},
        )

    def _share(self, batches: list[dict[str, Any]], counts: list[int | None], block: int) -> float:
        """What the summed loss of a microbatch is multiplied by in the loss of the step."""
        if self._subject.compute_loss is not None:
            return 1.0  # Its count comes after forward, and gradients are divided then.
        known = [count or 0 for count in counts]
        if self._config.batch.average == "tokens":
            return 1.0 / max(1, sum(known))
        rows = [next(len(each) for each in batch.values() if isinstance(each, Tensor)) for batch in batches]
        return rows[block] / sum(rows) / max(1, known[block])

    def _collect(self, gradients: Tensors) -> None:
        """Add the gradients of a microbatch to those before."""
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                own = parameter.grad.to(self._sums)
                gradients[name] = own if name not in gradients else gradients[name] + own
                parameter.grad = None

    def _update(self, step: int) -> None:
        for group in self._optimizer.param_groups if self._scheduler is None else ():
            group["lr"] = self._config.optimizer.lr * self._rates.factor(step)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        for name, master in self.masters.items():
            if master is not self.named[name]:
                self.named[name].data.copy_(master.data)
            master.grad = None
        ema, number = self._config.ema, step + 1
        if not ema.decay or number < ema.start_step or number % ema.every_steps:
            return
        if not self._averages:
            self._averages = {name: each.detach().clone() for name, each in self.masters.items()}
            return
        average = get_ema_multi_avg_fn(ema.decay)  # type: ignore[no-untyped-call]
        trained = list(self._trained)
        average([self._averages[name] for name in trained], [self.masters[name].detach() for name in trained], number)

    def _by_all_names(self, tensors: Mapping[str, Tensor]) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            kept = tensor.detach().clone()
            found |= dict.fromkeys(self.aliases[id(self.named[name])], kept)
        return found


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _optimizer(config: TrainerConfig, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own, with decay for the parameters that the configuration leaves."""
    section = config.optimizer
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _EXEMPT)) if section.exempt != "none" else set(trained)
    plain = {
        name for name in trained if name not in decayed or any(fnmatchcase(name, each) for each in section.no_decay)
    }
    groups: list[dict[str, Any]] = [
        {"params": [each for name, each in trained.items() if (name in plain) is exempt], "weight_decay": decay}
        for exempt, decay in ((False, section.weight_decay), (True, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    if section.name == "adagrad":
        return torch.optim.Adagrad(groups, lr=section.lr, eps=section.eps)
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=section.betas, eps=section.eps)


def _scheduler_of(config: TrainerConfig) -> MakeScheduler | None:
    """The scheduler of transformers; None where the schedule has options of its own."""
    section = config.schedule
    options = section.model_dump(exclude={"name", "warmup_steps", "warmup_ratio"}, exclude_none=True)
    if options or section.name not in ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial"):
        return None
    return lambda optimizer: get_scheduler(section.name, optimizer, 0, STEPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What the plain process sums over a microbatch, and counts."""

    compute_loss: Any = None
    """The user's own: `(model, batch) -> (sum, count)`."""
    labelled: bool = False
    """Whether the loss is a mean over labels, of which -100 is none."""
    causal: bool = False
    """Whether the first label of a sequence is no target."""
    smoothing: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, config: TrainerConfig, compute_loss: Any) -> Objective:
        """That of a run."""
        smoothing = config.run.label_smoothing
        inside = pretrained_of(model)
        if compute_loss is not None or inside is None:
            return cls(compute_loss=compute_loss)
        kind = str(getattr(inside, "loss_type", None))
        if kind in ("ForQuestionAnswering", "ForCTC", "ForSemanticSegmentation"):
            raise ConfigError(
                f"verify does not know how a plain process counts the loss of {type(inside).__name__} ({kind}); give Trainer a "
                "compute_loss=(model, batch) -> (sum, count)",
                where="model.head",
            )
        causal = type(inside).__name__.endswith(("ForCausalLM", "LMHeadModel")) and not inside.config.is_encoder_decoder
        return cls(labelled=True, causal=causal, smoothing=smoothing)

    @property
    def late(self) -> bool:
        """Whether only the forward tells the number of targets."""
        return self.compute_loss is not None

    def count(self, batch: Mapping[str, Any]) -> int | None:
        """Targets of a batch; None where the forward tells."""
        if self.late:
            return None
        if not self.labelled or "labels" not in batch:
            return next(len(each) for each in batch.values() if isinstance(each, Tensor) and each.dim())
        labels = batch["labels"][..., 1:] if self.causal else batch["labels"]
        return int((labels != _IGNORED).sum())

    def total(self, model: nn.Module, batch: Mapping[str, Any], count: int | None) -> tuple[Tensor, int]:
        """The sum of the losses of a batch, and their number."""
        if self.compute_loss is not None:
            total, counted = self.compute_loss(model, batch)[:2]
            return total.reshape(()), int(counted)
        if not count:
            return torch.zeros(()), 0
        output = model(**batch)
        if self.smoothing:
            labels, logits = batch["labels"], output.logits
            if self.causal:
                logits, labels = logits[..., :-1, :], labels[..., 1:]
            wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
            smooth = self.smoothing
            return cross_entropy(wide, labels.flatten(), reduction="sum", label_smoothing=smooth), count
        found = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.loss
        return found * count, count
