"""Cases about layers and calls that an engine of flat buffers may not know: sparse, complex, scripted, second derivatives."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.cases_units import Block, Layer, Stack, Tokens, normed
from tests.contract.harness import CLASSES, WIDTH, Batch, Case, Refusal, cross_entropy, plain_loop, samples, summed
from tests.support.plain import after_steps
from zeromesh import Trainer


class Bags(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(128, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag((values.abs() * 40).long() % 128))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.fft.ifft(torch.fft.fft(x).to(self.filters.dtype) @ self.filters).real.to(x.dtype)


def scripted() -> nn.Module:
    return Stack(lambda: torch.jit.script(Block()))


def traced() -> nn.Module:
    return Stack(lambda: torch.jit.trace(Block().double(), torch.randn(2, WIDTH, dtype=torch.float64)))


class ScriptInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.jit.script(nn.Linear(WIDTH, WIDTH))


def all_scripted() -> nn.Module:
    parts = nn.Sequential(nn.Linear(24, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES))
    return Layer(lambda self, values: self.inner(values), inner=torch.jit.script(parts))


def gradient_penalty(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    values = batch["values"].clone().requires_grad_(True)
    total, count = summed(model(values), batch)
    (gradient,) = torch.autograd.grad(total, values, create_graph=True)
    return total + gradient.pow(2).sum(), count


def saliency(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """The gradient with respect to the inputs weighs the loss, without a graph of its own."""
    values = batch["values"].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(summed(model(values), batch)[0], values)
    losses = F.cross_entropy(model(batch["values"]), batch["classes"], reduction="none")
    return (losses * (1 + gradient.abs().sum(dim=-1))).sum(), len(batch["classes"])


def jvp(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    made, moved = torch.func.jvp(model, (batch["values"],), (torch.ones_like(batch["values"]),))
    total, count = summed(made, batch)
    return total + moved.pow(2).sum(), count


def per_sample_gradients(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    def one(values: torch.Tensor) -> torch.Tensor:
        return model(values[None]).sum()

    gradients = torch.vmap(torch.func.grad(one))(batch["values"])
    total, count = cross_entropy(model, batch)
    return total + gradients.pow(2).sum(), count


class Forces(Stack):
    """Computes derivatives with respect to its inputs inside forward, in evaluation as well, as models of atoms do."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            values = values.detach().requires_grad_(True)
            made = super().forward(values)
            (force,) = torch.autograd.grad(made.sum(), values, create_graph=True)
        return made + force.sum(dim=-1, keepdim=True)


def evaluates(trainer: Trainer, step: int) -> None:
    """Compare an evaluation in the middle of training with the loss of the gathered weights, in one process."""
    model = Forces().double()
    model.load_state_dict(dict(trainer.state_dict()))
    data = samples(7)
    total, count = cross_entropy(model, {name: torch.stack([row[name] for row in data]) for name in data[0]})
    found = trainer.evaluate(data)["eval_loss"]
    assert abs(found - float(total.detach()) / count) < 1e-9, "the evaluation differs"


def densely(build: Any) -> Any:
    """A plain loop with dense gradients: AdamW of torch takes no others."""
    return lambda case: plain_loop(replace(case, build=partial(build, sparse=False)))


WHOLE = {"batch": {"micro_size": 8}}
"""A power iteration is made in every call: one call a step, as in the plain loop."""
HALF = {"precision": {"compute": "bfloat16", "master": "float32", "reduce": "float32"}}
SCRIPT = Refusal(error="LayoutError", match="is TorchScript")
SPECTRAL = Refusal(error="LayoutError", match=r"blocks.0.up.* has a spectral norm .* model.to\(torch.bfloat16\)")

CASES = [
    Case(name="sparse embedding", build=partial(Tokens, sparse=True), plain=densely(Tokens)),
    Case(name="sparse embedding bag", build=partial(Bags, sparse=True), plain=densely(Bags)),
    Case(
        name="complex parameters",
        build=partial(Stack, Complex),
        refused=Refusal(error="LayoutError", match="blocks.0.filters is torch.complex64, .*view_as_complex"),
    ),
    *(
        Case(name=f"{name} in {dtype}", build=partial(Stack, partial(normed, norm, norm)), config=config, refused=refused)
        for name, norm in (
            ("spectral norm", nn.utils.spectral_norm),
            ("parametrized spectral norm", nn.utils.parametrizations.spectral_norm),
        )
        for dtype, config, refused in (("float64", WHOLE, ()), ("bfloat16", HALF, SPECTRAL))
    ),
    Case(name="old weight norm", build=partial(Stack, partial(normed, nn.utils.weight_norm, nn.utils.weight_norm))),
    Case(name="scripted blocks", build=scripted, refused=SCRIPT),
    Case(name="traced blocks", build=traced, refused=SCRIPT),
    Case(name="a scripted part of a block", build=partial(Stack, ScriptInside), refused=SCRIPT),
    Case(name="all scripted", build=all_scripted, refused=SCRIPT),
    Case(name="gradient penalty", build=Stack, loss=gradient_penalty),
    Case(name="saliency", build=Stack, loss=saliency),
    Case(name="forces", build=Forces, callbacks=lambda: [after_steps(evaluates)]),
    Case(name="forward derivatives", build=Stack, loss=jvp),
    Case(name="gradients of samples", build=Stack, loss=per_sample_gradients),
]
