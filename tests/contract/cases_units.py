"""Cases about units: how blocks are written, what they return, who reads whose weights.

Each stack has blocks of more than 4096 elements, so that they are units of their own.
"""

import copy
import dataclasses
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.contract.harness import CLASSES, FEATURES, WIDTH, Batch, Case, Refusal
from zeromesh import Callback, Trainer


class Block(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """A stem, equal blocks, a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x = self.stem(values)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        """How a block is called."""
        made: torch.Tensor = block(x)
        return made


# What blocks return


@dataclasses.dataclass
class Made:
    """What a block returns, which PyTorch's pytrees do not know."""

    hidden: torch.Tensor
    extra: float = 0.0


class Holder:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.inner = {"hidden": [hidden]}


class Pair(NamedTuple):
    """A named tuple."""

    hidden: torch.Tensor
    extra: torch.Tensor


class Slots:
    """An object without a `__dict__`: nothing finds its tensor."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Returning(Block):
    """A block whose result is wrapped into something."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


class Unwrapping(Stack):
    """Takes results out again."""

    def __init__(
        self, wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor], **named: Any
    ) -> None:
        super().__init__(partial(Returning, wrap), **named)
        self.unwrap = unwrap

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return self.unwrap(block(x))


class FrozenUnwrapping(Unwrapping):
    """Blocks in the middle are frozen: no gradient arrives there, but what comes before needs one through them."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.blocks.requires_grad_(False)


class Auxiliary(Block):
    """Keeps a loss on itself, and a tensor in a closure."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(x))
        self.loss = self.down(hidden).pow(2).mean()
        return x + self.down(hidden)


class WithAuxiliary(Stack):
    """Adds up what blocks kept."""

    def __init__(self, block: Callable[[], nn.Module] = Auxiliary) -> None:
        super().__init__(block)
        self.extra = torch.zeros(())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made = super().forward(values)
        self.extra = sum((block.loss for block in self.blocks), torch.zeros(()))
        return made


class OnlyAuxiliary(Auxiliary):
    """Its auxiliary loss alone has a gradient: the output is detached."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


def auxiliary_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """Cross entropy and what blocks kept; of whole batches: per-sample, so that microbatches add up."""
    total = F.cross_entropy(model(batch["values"]), batch["classes"], reduction="sum")
    return total + model.extra * len(batch["classes"]), len(batch["classes"])


class Hidden(Block):
    """Hands its result on beside the module system."""

    kept: ClassVar[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Hidden.kept.append(super().forward(x))
        return x


class Closures(Stack):
    """Takes the results that blocks have put elsewhere."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        block(x)
        return Hidden.kept.pop()


class Vmapped(Stack):
    """Blocks under `torch.vmap`."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(block, randomness="different")(x)


class ReturnsWeight(Block):
    """Returns a view of its weight beside the result, for a penalty."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.up.weight.t()


class UsesViews(Stack):
    """Multiplies by the views that blocks have returned."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x, weight = block(x)
        return x + torch.tanh(x @ weight)


class KeepsView(Block):
    """Keeps a view of its weight as an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned = self.up.weight.t()
        return super().forward(x)


class UsesKeptViews(Stack):
    """Multiplies by the views that blocks have kept."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = block(x)
        return x + torch.tanh(x @ block.turned)


class HidesView(Block):
    """Puts a view of its weight where nobody looks."""

    kept: ClassVar[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        HidesView.kept.append(self.up.weight.t())
        return super().forward(x)


class UsesHiddenViews(Stack):
    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = block(x)
        return x + torch.tanh(x @ HidesView.kept.pop())


# Who reads whose weights


class Penalized(Stack):
    """Squares of all parameters are part of the loss."""


def penalty(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """Cross entropy and squares of all parameters, whose modules have run."""
    total = F.cross_entropy(model(batch["values"]), batch["classes"], reduction="sum")
    squares = sum((parameter.pow(2).sum() for parameter in model.parameters()), torch.zeros((), dtype=torch.float64))
    return total + 1e-2 * squares * len(batch["classes"]), len(batch["classes"])


def penalty_first(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """The same, read before any module runs."""
    squares = sum((parameter.pow(2).sum() for parameter in model.parameters()), torch.zeros((), dtype=torch.float64))
    total = F.cross_entropy(model(batch["values"]), batch["classes"], reduction="sum")
    return total + 1e-2 * squares * len(batch["classes"]), len(batch["classes"])


def detached_norm(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """A loss scaled by norms of weights, which get no gradient of it."""
    scale = 1.0 / (1.0 + sum(float(parameter.detach().norm()) for parameter in model.parameters()) * 1e-2)
    total = F.cross_entropy(model(batch["values"]), batch["classes"], reduction="sum")
    return total * scale, len(batch["classes"])


class TwoBlocks(Block):
    """Uses the weight of the block before it as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        other = self.__dict__.get("other")
        return x if other is None else x + torch.tanh(F.linear(x, other.up.weight))


def reads_the_one_before() -> nn.Module:
    """Each block reads a weight of the block before it."""
    model = Stack(TwoBlocks)
    for block, before in zip(model.blocks[1:], model.blocks[:-1], strict=True):
        block.__dict__["other"] = before
    return model


def reads_the_next() -> nn.Module:
    """Each block reads a weight of the block after it."""
    model = Stack(TwoBlocks)
    for block, after in zip(model.blocks[:-1], model.blocks[1:], strict=True):
        block.__dict__["other"] = after
    return model


class NeverCalled(Stack):
    """Computes with the weights of blocks and never calls them."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(F.gelu(F.linear(x, block.up.weight, block.up.bias)), block.down.weight, block.down.bias)


class OwnMethod(Stack):
    """Calls methods of blocks that are not forward."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return x + block.down(F.gelu(block.up(x)))


class Functional(Stack):
    """Blocks through `functional_call` with their own parameters."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block, dict(block.named_parameters()), (x,))


class Ensemble(Stack):
    """All blocks at once: their parameters stacked, under `vmap`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x = self.stem(values)
        stacked = {
            name: torch.stack([block.get_parameter(name) for block in self.blocks])
            for name, _ in self.blocks[0].named_parameters()
        }

        def one(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(F.linear(x, parameters["up.weight"], parameters["up.bias"]))
            return F.linear(hidden, parameters["down.weight"], parameters["down.bias"])

        return self.head(x + torch.vmap(one, in_dims=(0, None))(stacked, x).mean(dim=0))


class ScaledFirst(Stack):
    """A parameter of the root is read by the loss before any module runs, and calls go to a method."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def logits(self, values: torch.Tensor) -> torch.Tensor:
        """What the loss calls instead of forward."""
        return Stack.forward(self, values * self.scale) * self.scale


def by_method(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """The loss calls a method of the model."""
    return F.cross_entropy(model.logits(batch["values"]), batch["classes"], reduction="sum"), len(batch["classes"])


class FunctionalHead(Stack):
    """All of it functional: the loss reads parameters and calls no module."""

    def logits(self, values: torch.Tensor) -> torch.Tensor:
        """Computes by functions alone."""
        x = F.linear(values, self.stem.weight, self.stem.bias)
        for block in self.blocks:
            x = x + F.linear(torch.tanh(F.linear(x, block.up.weight)), block.down.weight)
        return F.linear(x, self.head.weight, self.head.bias)


class Codebook(nn.Module):
    """Nearest rows of a table, which another module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(96, WIDTH) * 0.3)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        chosen = self.table[torch.cdist(x.detach(), self.table.detach()).argmin(dim=-1)]
        return x + (chosen - x).detach() + 0.1 * (chosen - chosen.detach())


class Quantized(Stack):
    """A penalty reads all tables."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made = super().forward(values)
        return made + sum(block.table.pow(2).mean() for block in self.blocks)


class GradientReads(torch.autograd.Function):
    """Reads a module's weight in backward, not from what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Any) -> torch.Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.block.up.weight.detach().norm(), None


class ReadsInBackward(Stack):
    """A function's backward reads the weight of a block that ran long before."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x = self.stem(values)
        for number, block in enumerate(self.blocks):
            x = GradientReads.apply(block(x), self.blocks[(number + 1) % 3])
        return self.head(x)


# Containers and shapes of models


class Nested(nn.Module):
    """Layers are containers without a forward."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x = self.stem(values)
        for layer in self.layers:
            parts = layer.values() if isinstance(layer, nn.ModuleDict) else layer
            for part in parts:
                x = x + torch.tanh(part(x) if isinstance(part, nn.Module) else F.linear(x, part))
        return self.head(x)


def lists() -> nn.Module:
    return Nested(lambda: nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]))


def dicts() -> nn.Module:
    return Nested(lambda: nn.ModuleDict({"first": Block(), "second": nn.Linear(WIDTH, WIDTH)}))


def parameter_lists() -> nn.Module:
    return Nested(lambda: nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(2)))


def deep_lists() -> nn.Module:
    """Containers inside containers inside containers."""
    return Nested(lambda: nn.ModuleList([nn.Sequential(Block(), nn.Sequential(Block(), Block()))]))


class Namespace(nn.Module):
    """A module of the user's own that only holds others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.gain = nn.Parameter(torch.ones(WIDTH))


class Namespaced(Stack):
    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return block.first(x) * block.gain


class OwnForward(Stack):
    """A container whose instances have a forward of their own."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList([Block()]))
        for block in self.blocks:
            block.forward = partial(self.chain, block)

    @staticmethod
    def chain(block: Any, x: torch.Tensor) -> torch.Tensor:
        for each in block:
            x = each(x)
        return x


class Recomputed(Stack):
    """Blocks are checkpointed by the model itself, each alone or all together."""

    def __init__(self, *, together: bool, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(block)
        self.together = together

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x = self.stem(values)
        if self.together:
            return self.head(checkpoint(self.all_of_them, x, use_reentrant=False))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)

    def all_of_them(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InPlace(Stack):
    """Results of blocks are changed in place."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = block(x)
        made += 1.0
        made[:, :2] *= 2.0
        return made


class Twice(Stack):
    """Blocks are called twice, the second time in reverse order."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x = self.stem(values)
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = block(x)
        return self.head(x)


class Alternating(Stack):
    """Leaves a block out in every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.stem(values)
        for number, block in enumerate(self.blocks):
            x = block(x) if number != 1 else x + 0 * block(x).sum() + values.sum(dim=-1, keepdim=True)
        return self.head(x)


class Gated(Block):
    """A parameter is multiplied directly: autograd saves the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.gate


def sharing() -> nn.Module:
    """Two blocks share a weight."""
    model = Stack()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def same_block() -> nn.Module:
    """One block stands in two places."""
    model = Stack()
    model.blocks[2] = model.blocks[0]
    return model


class Parallel(nn.Module):
    """Block's weights through a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.down = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Subclassed(nn.Parameter):
    """A user's own class of parameters."""

    def doubled(self) -> torch.Tensor:
        return self * 2


class OwnParameters(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight = Subclassed(self.up.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(F.linear(x, self.up.weight.doubled())))


class Recurrent(nn.Module):
    """An LSTM as a block."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x[:, None])[0][:, 0]


class Attention(nn.Module):
    """torch's own attention, whose fast path reads weights by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x[:, None])
        return made[:, 0]


# Weights that forward writes


class Written(Block):
    """Changes a weight in forward, in one of the ways that users have."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.up.weight)
        return super().forward(x)


class Tokens(nn.Module):
    """An embedding that keeps its rows short."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH, max_norm=1.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding((values.abs() * 40).long() % 128).mean(dim=1))

    def get_input_embeddings(self) -> nn.Module:
        """A unit of its own."""
        return self.embedding


def clamped(weight: nn.Parameter) -> None:
    """Through `.data`, which leaves no trace in version counters."""
    weight.data.clamp_(-0.1, 0.1)


def rolled(weight: nn.Parameter) -> None:
    """The same numbers in other places, through `.data` too."""
    weight.data.copy_(weight.data.roll(1, 0))


# What callbacks see


class Looks(Callback):
    """Reads the model in a callback, in one of the ways that users have, and compares it with what the trainer gives."""

    def __init__(self, look: Callable[[nn.Module], dict[str, torch.Tensor]]) -> None:
        self.look = look

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        found = {name: value.clone() for name, value in self.look(trainer.model).items()}
        wanted = {name: value.clone() for name, value in trainer.state_dict()}
        assert found.keys() >= wanted.keys(), "names differ"
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), "values differ"


def saved_whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model through a file that pickles it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    assert all(type(parameter) is nn.Parameter for parameter in found.parameters())
    return dict(found.named_parameters())


LOOKS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: {name: p.detach() for name, p in model.named_parameters()},
    "data": lambda model: {name: p.data for name, p in model.named_parameters()},
    "deepcopy": lambda model: dict(copy.deepcopy(model).named_parameters()),
    "numpy": lambda model: {name: torch.from_numpy(p.detach().numpy()) for name, p in model.named_parameters()},
    "torch.save": saved_whole,
    "AveragedModel": lambda model: dict(torch.optim.swa_utils.AveragedModel(model).module.named_parameters()),
}
AT_REST = Refusal(error="PhaseError", match="trainer.state_dict", stages=(3,), ranks=(2,))


class Adds(Callback):
    """Changes weights between steps."""

    def __init__(self, change: Callable[[nn.Module, int], None]) -> None:
        self.change = change

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self.change(trainer.model, step)


def clip_weights(model: nn.Module, step: int) -> None:
    """As critics of GANs have it."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


CHANGED = Refusal(error="PhaseError", match="changed in place during a pass", ranks=(2,))

_UNWRAPPED: Sequence[tuple[str, Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = (
    ("dataclass", Made, lambda made: made.hidden),
    ("object", Holder, lambda made: made.inner["hidden"][0]),
    ("named tuple", lambda x: Pair(x, x * 2), lambda made: made.hidden + made.extra),
    ("dict", lambda x: {"a": {"b": [x]}}, lambda made: made["a"]["b"][0]),
    ("object with slots", Slots, lambda made: made.hidden),
    ("function", lambda x: lambda: x, lambda made: made()),
    ("generator", lambda x: iter((x,)), next),
)

CASES = [
    Case(name="plain stack", build=Stack),
    *(
        Case(name=f"blocks return a {name}", build=partial(Unwrapping, wrap, unwrap))
        for name, wrap, unwrap in _UNWRAPPED
    ),
    *(
        Case(name=f"frozen blocks return a {name}", build=partial(FrozenUnwrapping, wrap=wrap, unwrap=unwrap))
        for name, wrap, unwrap in _UNWRAPPED
        if name in ("dataclass", "object with slots")
    ),
    Case(name="auxiliary loss on self", build=WithAuxiliary, loss=auxiliary_loss, config={"batch": {"micro_size": 8}}),
    Case(name="auxiliary loss alone", build=partial(WithAuxiliary, OnlyAuxiliary), loss=auxiliary_loss),
    Case(name="hidden in a list of the class", build=partial(Closures, Hidden)),
    Case(name="vmap over a block", build=Vmapped),
    Case(name="blocks return a view of a weight", build=partial(UsesViews, ReturnsWeight)),
    Case(name="blocks keep a view of a weight", build=partial(UsesKeptViews, KeepsView)),
    Case(
        name="blocks hide a view of a weight",
        build=partial(UsesHiddenViews, HidesView),
        refused=Refusal(error="PhaseError", match="a view of .* was used after it", stages=(3,)),
    ),
    Case(name="penalty over all parameters", build=Stack, loss=penalty),
    Case(name="penalty before the model", build=Stack, loss=penalty_first),
    Case(name="detached norms of parameters", build=Stack, loss=detached_norm),
    Case(name="reads the block before", build=reads_the_one_before),
    Case(name="reads the next block", build=reads_the_next),
    Case(name="blocks never called", build=NeverCalled),
    Case(name="methods of blocks", build=OwnMethod),
    Case(name="functional call", build=Functional),
    Case(name="ensemble under vmap", build=Ensemble),
    Case(name="parameter before the first module", build=ScaledFirst, loss=by_method),
    Case(name="functional head", build=FunctionalHead, loss=by_method),
    Case(name="codebooks", build=partial(Quantized, Codebook)),
    Case(name="weight read in backward", build=ReadsInBackward),
    Case(name="lists in a list", build=lists),
    Case(name="dicts in a list", build=dicts),
    Case(name="parameter lists in a list", build=parameter_lists),
    Case(name="sequentials in lists in a list", build=deep_lists),
    Case(name="namespaces", build=partial(Namespaced, Namespace)),
    Case(name="a container with its own forward", build=OwnForward),
    Case(name="blocks recomputed", build=partial(Recomputed, together=False)),
    Case(name="blocks recomputed together", build=partial(Recomputed, together=True)),
    Case(name="gated blocks recomputed together", build=partial(Recomputed, together=True, block=Gated)),
    Case(name="results changed in place", build=InPlace),
    Case(name="blocks called twice", build=Twice),
    Case(name="a block without influence", build=Alternating),
    Case(name="parameters multiplied directly", build=partial(Stack, Gated)),
    Case(name="a shared weight", build=sharing),
    Case(name="a block in two places", build=same_block),
    Case(name="parametrized weights", build=partial(Stack, Parallel)),
    Case(name="an own class of parameters", build=partial(Stack, OwnParameters)),
    Case(name="lstm blocks", build=partial(Stack, Recurrent)),
    Case(name="attention blocks", build=partial(Stack, Attention)),
    Case(
        name="weights renormed in forward",
        build=partial(Stack, partial(Written, lambda w: w.renorm_(2, 0, 0.5))),
        refused=CHANGED,
    ),
    Case(name="weights clamped in forward", build=partial(Stack, partial(Written, clamped)), refused=CHANGED),
    Case(name="weights rolled in forward", build=partial(Stack, partial(Written, rolled)), refused=CHANGED),
    *(
        Case(name=f"callback reads {name}", build=Stack, callbacks=partial(list, (Looks(look),)), refused=AT_REST)
        for name, look in LOOKS.items()
    ),
    Case(
        name="weights clipped in a callback",
        build=Stack,
        callbacks=lambda: [Adds(clip_weights)],
        after_step=clip_weights,
        refused=(
            AT_REST,
            Refusal(error="PhaseError", match="changed in place between steps", stages=(1, 2), ranks=(2,)),
        ),
    ),
    Case(name="embedding with max_norm", build=Tokens, refused=CHANGED),
]
