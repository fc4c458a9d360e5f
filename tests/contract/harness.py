"""Cases of the contract with user code: a model and a loop that a user could write, compared with plain PyTorch or refused.

To add cases, write `tests/contract/cases_<area>.py` with a list `CASES` of `Case`; nothing else has to be registered.
`test_contract.py` runs every case through the public `Trainer` in kept worker processes, on two ranks (and on one), at stages 0
to 3, with gathers kept and released, over host-shared memory and gloo. One run takes about 0.3 s. `make test` takes a diagonal
of this product: each case at stage 3 with gathers released, every 24th one in one other layout too. The rest is marked `full`.

    CASES = [
        Case(name="scaled output", build=lambda: Stack(block=Scaled)),
        Case(name="own loss", build=MyModel, loss=my_loss, dataset=my_samples),
        Case(name="forked", build=MyModel, refused=Refusal(error="ConfigError", match="Linear.weight is", stages=(3,))),
    ]

    pytest tests/contract -k 'scaled_output and s3'

Equal means: the loss of each step, every gradient of each step (`gradients=False` leaves them out) and, after the last step,
every parameter by name, within 1e-9 (relative) of a plain loop in float64 that takes each global batch at once. What a case
leaves out is: float64 inputs `values` [24] and `classes`, `model(values)` giving logits of 3 classes, their summed cross entropy,
3 steps of 8 samples, AdamW. Blocks below 4096 elements are merged into the root unit, which hides most defects: two linear
layers of `WIDTH` are above that.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.plain import Gradients, Plain, apart, distances, nothing, plain_fit
from tests.support.trainer_cases import seeded, settings
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.accelerator import is_accelerator

WIDTH = 48
"""A block of two linear layers of this size has more than 4096 elements."""
FEATURES, CLASSES = 24, 3
TOLERANCE = 1e-9

Batch = Mapping[str, Any]
LossSum = Callable[[Any, Batch], tuple[torch.Tensor, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a case is run. `kept`: at stage 3, gathered parameters stay in memory between uses."""

    stage: int
    transport: str = "shared"
    kept: bool = True
    ranks: int = 2

    @property
    def name(self) -> str:
        released = "" if self.stage < 3 else "-kept" if self.kept else "-released"
        return f"s{self.stage}{released}-{self.transport if self.ranks > 1 else 'alone'}"

    def sections(self) -> dict[str, dict[str, Any]]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3 and self.ranks > 1:
            zero["gathered_budget"] = 2**30 if self.kept else 0
        return {"zero": zero, "parallel": {"transport": self.transport if self.ranks > 1 else "auto"}}


_PAIRS = [(0, True), (1, True), (2, True), (3, True), (3, False)]
LAYOUTS = tuple(
    [Layout(stage=stage, kept=kept, transport=transport) for stage, kept in _PAIRS for transport in ("shared", "gloo")]
    + [Layout(stage=stage, ranks=1) for stage in (1, 3)]
)
_RELEASED = [layout for layout in LAYOUTS if not layout.kept]
_OTHERS = [layout for layout in LAYOUTS if layout.kept]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The error that ends a case: its class, and what its message says. `stages`, `ranks`: where; elsewhere the case is equal."""

    error: str
    match: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    released: bool = False
    """Whether only where gathers are released."""
    ranks: tuple[int, ...] = (1, 2)

    def holds(self, layout: Layout) -> bool:
        released = not self.released or (layout.stage == 3 and not layout.kept)
        return layout.stage in self.stages and layout.ranks in self.ranks and released


def samples(count: int = 23) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [
        {"values": torch.randn(FEATURES, generator=generator, dtype=torch.float64), "classes": torch.tensor(index % CLASSES)}
        for index in range(count)
    ]


def summed(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(logits, batch["classes"], reduction="sum"), len(batch["classes"])


def cross_entropy(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return summed(model(batch["values"]), batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A user's model and loop, and what becomes of them.

    `build` makes the model (it is seeded, and converted to float64), `loss` is the trainer's `compute_loss` and the plain
    loop's, `config` holds sections of the configuration. `callbacks` makes the trainer's callbacks; what they do to the model,
    `before_step` and `after_step` do in the plain loop, with steps counted from 1. `plain` stands in for the whole plain loop.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: LossSum = cross_entropy
    dataset: Callable[[], list[dict[str, Any]]] = samples
    steps: int = 3
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Any]] = list
    before_step: Callable[[nn.Module, int], None] = nothing
    after_step: Callable[[nn.Module, int], None] = nothing
    plain: Callable[[Case], Plain] | None = None
    refused: Refusal | tuple[Refusal, ...] = ()
    gradients: bool = True

    def refusal(self, layout: Layout) -> Refusal | None:
        all_of_them = self.refused if isinstance(self.refused, tuple) else (self.refused,)
        return next((each for each in all_of_them if each.holds(layout)), None)

    def settings(self, folder: str, layout: Layout) -> dict[str, Any]:
        found = settings(folder, run={"max_steps": self.steps}, schedule={"name": "linear", "warmup_steps": 1})
        for sections in (layout.sections(), self.config):
            for name, section in sections.items():
                found[name] = {**found.get(name, {}), **section}
        return found


@cache
def cases() -> dict[str, Case]:
    """All cases, by name, of the files `cases_*.py` beside this one."""
    found: dict[str, Case] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if module.startswith("cases_"):
            for case in importlib.import_module(f"tests.contract.{module}").CASES:
                if case.name in found:
                    raise ValueError(f"two cases of the contract are called {case.name!r}")
                found[case.name] = case
    return found


def short(number: int) -> tuple[Layout, ...]:
    """The layouts in which `make test` runs case `number`."""
    others = (_OTHERS[number // 24 % len(_OTHERS)],) if number % 24 == 0 else ()
    return _RELEASED[number % len(_RELEASED)], *others


# In the worker


def run(mesh: Mesh, name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Run a case through the trainer: its differences from the plain loop, or the error that ended it."""
    case, where = cases()[name], Layout(**layout)
    if is_accelerator(mesh.device):
        where = replace(where, transport="auto")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"differences": _differences(case, where, folder)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the test compares it with the case's refusal
            return {"error": type(error).__name__, "message": str(error)}


def _differences(case: Case, layout: Layout, folder: str) -> dict[str, float]:
    refused = case.refusal(layout) is not None
    plain = Plain() if refused else _plain(case.name)
    model = seeded(case.build).double()
    callbacks = [*case.callbacks(), *([Gradients(plain)] if case.gradients and not refused else [])]
    config = case.settings(folder, layout)
    data = case.dataset()
    with Trainer(model, config, train_dataset=data, compute_loss=case.loss, callbacks=callbacks) as trainer:
        report = trainer.fit()
        if refused:
            return {}
        found = {name: value.detach().clone() for name, value in trainer.state_dict()}
    worst = distances(found, plain.states[-1])
    differences = {"losses": apart(report.losses, plain.losses), "skipped": float(report.skipped_steps)}
    if callbacks and isinstance(callbacks[-1], Gradients):
        differences["gradients"] = callbacks[-1].worst
    return {**differences, **{name: value for name, value in worst.items() if not value <= TOLERANCE}}


@cache
def _plain(name: str) -> Plain:
    case = cases()[name]
    return case.plain(case) if case.plain is not None else plain_loop(case)


def plain_loop(case: Case) -> Plain:
    """What a user writes without zeromesh: the global batch at once, AdamW, clipping, a linear schedule; one process."""
    model, config = seeded(case.build).double(), case.settings("", LAYOUTS[0])
    return plain_fit(model, case.dataset(), config, case.loss, case.before_step, case.after_step)


# In the test


def check(results: Sequence[Mapping[str, Any]], refusal: Refusal | None) -> None:
    """Raise `AssertionError` unless what ranks found is what the case says."""
    errors = [f"{result['error']}: {result['message']}" for result in results if "error" in result]
    if refusal is None:
        assert not errors, f"the case was to be equal, and ended with {errors[0]}"
        for result in results:
            far = {name: value for name, value in result["differences"].items() if not value <= TOLERANCE}
            assert not far, f"differs from the plain loop: {far}"
        return
    assert len(errors) == len(results), f"{len(results) - len(errors)} ranks went on where the case is to be refused"
    pattern = re.compile(f"{refusal.error}: .*(?:{refusal.match})", re.DOTALL)
    assert any(map(pattern.match, errors)), f"refused with other words than {refusal.match!r}: {errors}"
    # A rank whose peer has refused first may say that its peer has failed.
    assert all(pattern.match(error) or error.startswith("CollectiveError: ") for error in errors), errors
