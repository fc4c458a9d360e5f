"""What one training run of the conformance tests is: plain values that travel as JSON."""

import hashlib
import json
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from zeromesh.offload import FileSettings, TierChoice
from zeromesh.offload.accelerator import current_accelerator
from zeromesh.options import OffloadOptions, OptimizerSettings, Precision, ZeroOptions
from zeromesh.settings.keys import ScalerSettings
from zeromesh.trainer.models.small_copy import InFloat64

from .models import SUBJECTS

LEARNING_RATE = 1e-3
DTYPES = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, torch.float32),
}
"""Compute dtype, and that of master weights and sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    model: str = "llama"
    optimizer: str = "adamw"
    clip: float = 0.0
    decay: bool = True
    """Weight decay 0.1 on all parameters, or 0.2 on those that the model's `no_decay` patterns leave."""
    usual_steps: ClassVar[int] = 10
    """Set by the option `--steps`."""
    steps: int = field(default_factory=lambda: Problem.usual_steps)
    samples: int = 48
    """Of a global batch: a multiple of all numbers of ranks times microbatches."""
    precision: str = "float64"
    dropout: float = 0.0
    wide: bool = False
    """Whether what models cast to float32 by name is float64 too: a sum in another order may round there to another number."""

    def arithmetic(self) -> AbstractContextManager[object]:
        return InFloat64() if self.wide else nullcontext()

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def settings(self) -> OptimizerSettings:
        groups: dict[str, Any] = {"weight_decay": 0.1}
        if self.decay:
            groups = {"weight_decay": 0.2, "no_decay": SUBJECTS[self.model].no_decay}
        momentum = 0.9 if self.optimizer == "sgd" else 0.0
        name: Any = self.optimizer
        # Key biases have gradient zero but for rounding. Adagrad with a small eps would make whole steps of that.
        eps = 1e-3 if self.optimizer == "adagrad" else 1e-8
        return OptimizerSettings(name=name, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=eps, momentum=momentum, **groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    stage: int = 3
    accumulation: int = 1
    transport: str = "auto"
    overlap: bool = True
    prefetch: int = 1
    budget: int | None = None
    slots: int = 2
    in_backward: bool = False
    checkpointing: str = ""
    """`hf` or `call`: how activations are checkpointed; empty for not."""
    compile: bool = False
    on_nonfinite: str = "skip"
    scale: float = 0.0
    """Initial loss scale; 0 for none."""
    reduce_once: bool = False
    replicas: str = "whole"
    reduce: str = ""
    """The dtype in which gradients travel; empty for that of their sums."""
    states: str = "float32"
    master: str = ""
    """`none` or `kahan`; empty for master weights in the dtype of sums."""
    sequence: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    offload: str = ""
    """What rests where: `optimizer=file gradients=none parameters=host:0.5`, and `checksums` or `stripes`."""

    def options(self, problem: Problem) -> ZeroOptions:
        compute, wide = DTYPES[problem.precision]
        reduce = getattr(torch, self.reduce) if self.reduce else wide
        scale = ScalerSettings(initial_scale=self.scale, growth_interval=4) if self.scale else None
        transport: Any = self.transport if current_accelerator() is None else "auto"  # The others move the host's memory.
        narrow: Any = self.states
        masterless = {"master": torch.bfloat16, "compensated": self.master == "kahan"} if self.master else {}
        replicas: Any = self.replicas
        stop: Any = "stop" if self.in_backward else self.on_nonfinite
        return ZeroOptions(
            stage=self.stage,
            prefetch=self.prefetch,
            gathered_budget="auto" if self.budget is None else self.budget,
            overlap=self.overlap,
            transport=transport,
            precision=Precision(**{"compute": compute, "master": wide, **masterless}, reduce=reduce, loss_scale=scale),
            optimizer=replace(problem.settings(), states=narrow),
            offload=offload_options(self.offload),
            accumulation=self.accumulation,
            reduce_once=self.reduce_once,
            replicas=replicas,
            clip_norm=problem.clip,
            on_nonfinite=stop,
            optimizer_in_backward=self.in_backward,
            gradient_slots=self.slots,
            seed=7,
        )


def offload_options(text: str) -> OffloadOptions:
    words = text.split()
    choices: dict[str, Any] = {}
    for word in words:
        purpose, _, where = word.partition("=")
        if where:
            tier, _, fraction = where.partition(":")
            name: Any = tier
            choices[purpose] = TierChoice(tier=name, fraction=float(fraction or 1))
    folder = Path(tempfile.gettempdir(), "zeromesh-offload-tests")
    directories = (folder / "a", folder / "b") if "stripes" in words else (folder,)
    files = FileSettings(directories=directories, label="test", checksums="checksums" in words)
    return OffloadOptions(**choices, files=files, staging_bytes=1 << 20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    gradient_step: int = 3
    """Gradients are read at this step; -1 for never."""
    inspect_every: int = 0
    """Evaluate, read parameters and generate after every so many steps, which must change nothing."""
    infinite: dict[str, int] = field(default_factory=dict)
    """`rank` and `step` whose loss is multiplied by infinity."""


def as_arguments(problem: Problem, layout: Layout, extra: Extra) -> dict[str, Any]:
    return {"problem": asdict(problem), "layout": asdict(layout), "extra": asdict(extra)}


SMALL = Problem(model="llama", steps=3, samples=12)
