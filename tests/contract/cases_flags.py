"""Cases about `requires_grad`, changed by callbacks while training goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.cases_units import Block, Stack
from tests.contract.harness import WIDTH, Case
from tests.support.plain import calling
from zeromesh.trainer.callbacks.callback import Callback

Flags = Callable[[Any, int], None]
"""Sets `requires_grad` of a model before a step, counted from 1."""


def flagging(flags: Flags) -> Callback:
    return calling(on_step_begin=lambda trainer, step: flags(trainer.model, step))


class Headed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class Adapted(Block):
    """A frozen block beside which a low-rank one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2) / 8), nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x) + x @ self.a @ self.b))


AdaptedStack = partial(Stack, Adapted)


def thaw(model: Any, step: int) -> None:
    """One more block at a time, the last one first."""
    if step > 1:
        (model.blocks[4 - step] if step < 4 else model.stem).requires_grad_(True)


def freeze_and_thaw(model: Any, step: int) -> None:
    """A whole unit rests for two steps, and goes on with the moments that it had."""
    model.blocks[0].requires_grad_(step not in (2, 3))


def parts(model: Any, step: int) -> None:
    """Parts of units: one weight of a block, the bias of another, the stem's from the first step on."""
    model.stem.weight.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(step < 3)
    model.blocks[2].down.bias.requires_grad_(step % 2 == 0)


def take_turns(model: Any, step: int) -> None:
    model.requires_grad_(step % 2 == 0)
    model.blocks.requires_grad_(step % 2 == 1)


def merge_some(model: Any, step: int) -> None:
    """The base of a block joins its adapter; an adapter ends."""
    model.blocks[0].up.requires_grad_(step > 1)
    model.blocks[2].a.requires_grad_(step < 3)


def rest_from_two(model: Any, step: int) -> None:
    """Set once: what a run goes on from has to remember it."""
    if step == 2:
        model.blocks[0].requires_grad_(False)
        model.head.bias.requires_grad_(False)
    if step == 6:
        model.blocks[0].requires_grad_(True)


def merge_some_at_two(model: Any, step: int) -> None:
    """Set once: the base of a part of a block is trained from step 2 on, and rests from step 5 on."""
    if step in (2, 5):
        model.blocks[0].up.weight.requires_grad_(step == 2)


def merge_in_turn(model: Any, step: int) -> None:
    """Set once: of the base of a block, a matrix is trained from step 2 on, and another one from step 5 on."""
    if step in (2, 5):
        (model.blocks[0].up if step == 2 else model.blocks[0].down).weight.requires_grad_(True)


def flagged(name: str, build: Callable[[], nn.Module], flags: Flags) -> Case:
    return Case(name=name, build=build, callbacks=lambda: [flagging(flags)], before_step=flags)


CASES = [
    flagged("gradual unfreezing", Headed, thaw),
    flagged("a block rests", Stack, freeze_and_thaw),
    flagged("parts of blocks rest", Stack, parts),
    flagged("parts are trained in turn", Stack, take_turns),
    flagged("adapters whose base is trained later", AdaptedStack, merge_some),
]
