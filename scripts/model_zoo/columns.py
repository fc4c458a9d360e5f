"""Trains a small model by zeromesh on the ranks of a launch, and by a plain loop of PyTorch, and compares them by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model_zoo.samples import Samples, documents
from model_zoo.small_models import SmallModel
from zeromesh import Callback, Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.trainer.models.small_copy import whole_passes_in_float64
from zeromesh.trainer.verification.shrink import without_dropout

Settings = Mapping[str, Mapping[str, Any]]
SAVED = "save and load"
DOCUMENTS = "packed documents"
SHARED = "shared sequences"
EXPERTS = "spread experts"
LORA = "LoRA"
COLUMNS: Mapping[str, Settings] = {
    "stage 3": {"zero": {"stage": 3}},
    SAVED: {"zero": {"stage": 3}},
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"parallel": {"pipeline": 2}},
    LORA: {"zero": {"stage": 3}, "model": {"lora": {"rank": 4, "targets": "all-linear"}}},
    DOCUMENTS: {"zero": {"stage": 3}, "data": {"shuffle": False, "separate_documents": True}},
    SHARED: {"zero": {"stage": 3}, "parallel": {"context": 2}},
    EXPERTS: {"zero": {"stage": 3}, "parallel": {"expert": 2}},
}
"""Each column of the page, tried for every type on two ranks, with the trainer's settings for it."""

EQUAL, DIFFERENT, REFUSED, CRASHED, ABSENT, PLAIN = "equal", "different", "refused", "crashed", "-", "plain"
"""The outcomes; the last two: the type has no such thing, and what plain transformers does not do right either."""
_STEPS, _GLOBAL, _MICRO, _RATE = 2, 4, 2, 0.1
_TOLERANCE = 1e-7
"""The largest relative difference of two orders of the same sums in float64, with all that a step makes of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One column of one type."""

    outcome: str
    reason: str = ""
    difference: float = 0.0


def outcomes(small: SmallModel, columns: Sequence[str], folder: Path, rank: int) -> Any:
    """Yield the outcome of each column in turn; all ranks of the launch call it."""
    saved: Outcome | None = None
    for column in columns:
        if column == SAVED and saved is not None:
            yield column, saved
            continue
        outcome, saved_now = _outcome(small, column, folder, rank)
        saved = saved_now or saved
        yield column, saved_now if column == SAVED and saved_now is not None else outcome


def _outcome(small: SmallModel, column: str, folder: Path, rank: int) -> tuple[Outcome, Outcome | None]:
    """The outcome of a column, and that of the directory that stage 3 has saved."""
    if column in (DOCUMENTS, SHARED, "sequence") and small.head != "causal_lm":
        return Outcome(outcome=ABSENT, reason="its task is no causal language model"), None
    if column == EXPERTS and not _has_experts(small):
        return Outcome(outcome=ABSENT, reason="its tokens choose no experts"), None
    samples, alone = small.samples, None
    if column == DOCUMENTS:
        samples, alone = documents(small.samples)
    model, begin = small.build(), _Beginning()
    directory = folder / "saved" if column in ("stage 3", SAVED) else None
    try:
        settings = _settings(folder, small.head, COLUMNS[column])
        with whole_passes_in_float64(), Trainer(model, settings, samples, callbacks=[begin]) as trainer:
            losses = list(trainer.fit().losses)
            trained = trainer.model
            if directory is not None:
                trainer.save(directory)
    except ZeromeshError as error:
        kind = REFUSED if isinstance(error, ValueError) and not begin.values else CRASHED
        return Outcome(outcome=kind, reason=f"{type(error).__name__}: {error}" if kind == CRASHED else str(error)), None
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the table
        return Outcome(outcome=CRASHED, reason=f"{type(error).__name__}: {error}"), None
    if rank:
        return Outcome(outcome=EQUAL), None if directory is None else Outcome(outcome=EQUAL)
    reference = _reference(small, column, trained, begin)
    initial = {name: each.detach().clone() for name, each in reference.named_parameters()}
    wanted = _plain(reference, samples if alone is None else alone)
    worst, where = _difference(trained, reference, initial, losses, wanted)
    equal = worst <= _TOLERANCE
    found = Outcome(outcome=EQUAL if equal else DIFFERENT, reason="" if equal else where, difference=worst)
    return found, None if directory is None else _loaded(small, directory, reference)


def _has_experts(small: SmallModel) -> bool:
    """True for a model with several experts, by the names that types give to them."""
    names = (name.lower() for name, _ in small.build().named_modules())
    return any("expert" in name.split(".")[-1] and "shared" not in name for name in names)


def _settings(folder: Path, head: str, changes: Settings) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "precision": {"compute": "float64", "master": "float64", "reduce": "float64"},
        "optimizer": {"name": "sgd", "lr": _RATE, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": _GLOBAL, "micro_size": _MICRO},
        "run": {"output_dir": str(folder), "name": "run", "max_steps": _STEPS, "clip_norm": 1.0, "log_every": 1},
        "parallel": {"timeout_seconds": 20},
        "checkpoint": {"every_steps": 0, "resume": "never"},
        "data": {"shuffle": False},
        "model": {"head": head},
    }
    for name, section in changes.items():
        base[name] = {**base.get(name, {}), **section}
    return base


class _Beginning(Callback):
    """Keeps the initial values of adapters, which are the trainer's own."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def on_train_begin(self, trainer: Trainer) -> None:
        names = [name for name, _ in trainer.model.named_parameters() if ".lora_" in name]
        with trainer.gathered(names):
            self.values = {name: each.detach().cpu().clone() for name, each in trainer.model.named_parameters() if name in names}
        self.values[""] = torch.empty(0)  # The run has begun: what is raised now is no refusal.


def _reference(small: SmallModel, column: str, trained: Any, begin: _Beginning) -> nn.Module:
    made: Any = small.build()
    if column == LORA:
        import peft

        made = peft.get_peft_model(made, copy.deepcopy(trained.peft_config["default"]), autocast_adapter_dtype=False)
        own = dict(made.named_parameters())
        with torch.no_grad():
            for name, value in begin.values.items():
                if name:
                    own[name].copy_(value)
        made.double()
    without_dropout(made)
    return made.train()  # type: ignore[no-any-return]


def _plain(model: nn.Module, samples: Samples) -> list[float]:
    """Train as users of torch do; returns the losses. Of samples apart there are as many times more."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=_RATE), []
    times = len(samples) // (_STEPS * _GLOBAL)
    for step in range(_STEPS):
        total = 0.0
        for micro in range(_GLOBAL // _MICRO):
            first = (step * _GLOBAL + micro * _MICRO) * times
            rows = samples[first : first + _MICRO * times]
            with whole_passes_in_float64():
                loss = _loss(model, rows) / (_GLOBAL // _MICRO)
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _loss(model: nn.Module, rows: Samples) -> torch.Tensor:
    found: torch.Tensor = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
    return found


def _difference(
    trained: nn.Module, reference: nn.Module, initial: Mapping[str, torch.Tensor], losses: Sequence[float], wanted: Sequence[float]
) -> tuple[float, str]:
    """The largest relative difference and what has it: of losses, and of the way that each parameter went."""
    found, right = dict(trained.named_parameters()), dict(reference.named_parameters())
    if found.keys() != right.keys():
        return float("inf"), f"names of parameters: {sorted(found.keys() ^ right.keys())[:3]}"
    apart = [(abs(a - b) / (abs(b) + 1e-12), "the loss") for a, b in zip(losses, wanted, strict=True)]
    ways = {name: float((right[name] - initial[name]).norm()) for name in right}
    floor = 1e-3 * max(ways.values()) + 1e-12
    with torch.no_grad():
        apart += [(float((found[name].cpu() - right[name]).norm()) / (ways[name] + floor), name) for name in right]
    return max((value if value == value else float("inf"), name) for value, name in apart)


def _loaded(small: SmallModel, directory: Path, reference: Any) -> Outcome:
    """The outcome of a saved directory. Where it is not equal, one that the reference has saved by itself says whose that is."""
    found = _read_again(small, directory, reference)
    if found.outcome == EQUAL:
        return found
    plain = directory.with_name("plain")
    reference.save_pretrained(plain)
    own = _read_again(small, plain, reference)
    if (own.outcome, own.reason) != (found.outcome, found.reason):
        return found
    what = own.reason if own.outcome == CRASHED else f"{own.reason} is read with other values"
    return Outcome(outcome=PLAIN, reason=f"the same with plain transformers' save_pretrained: {what}", difference=own.difference)


def _read_again(small: SmallModel, directory: Path, reference: nn.Module) -> Outcome:
    try:
        made = type(small.build()).from_pretrained(directory, dtype=torch.float64)
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the table
        return Outcome(outcome=CRASHED, reason=f"{type(error).__name__}: {error}")
    found = dict(made.named_parameters())
    for name, wanted in reference.named_parameters():
        if name not in found or found[name].shape != wanted.shape:
            return Outcome(outcome=DIFFERENT, reason=f"{name} is not in it")
        worst = float((found[name] - wanted).detach().norm()) / (float(wanted.detach().norm()) + 1e-9)
        if not worst <= _TOLERANCE:
            return Outcome(outcome=DIFFERENT, reason=name, difference=worst)
    return Outcome(outcome=EQUAL)
