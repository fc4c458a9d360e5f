"""Cases about units: how blocks are written, what they return, who reads whose weights.

Each stack has blocks of more than 4096 elements, so that they are units of their own.
"""

import copy
import dataclasses
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.contract.harness import CLASSES, FEATURES, WIDTH, Batch, Case, Refusal, cross_entropy, summed
from tests.support.plain import after_steps
from zeromesh import Trainer


class Block(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class Around(Block):
    """Calls `before(block)` first, and returns `after(block, result)`."""

    def __init__(
        self,
        *,
        before: Callable[[Any], object] = lambda block: None,
        after: Callable[[Any, torch.Tensor], Any] = lambda block, x: x,
    ) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor) -> Any:
        self.before(self)
        return self.after(self, super().forward(x))


def called(block: Any, x: torch.Tensor) -> Any:
    return block(x)


class Stack(nn.Module):
    """A stem, equal blocks that `call(block, x)` calls, a head."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, layers: int = 3, call: Callable[[Any, torch.Tensor], Any] = called
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.call = call

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(self.stem(values)))


class Layer(nn.Module):
    """Any parts, and what is computed of them."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


# What blocks return


@dataclasses.dataclass
class Made:
    """PyTorch's pytrees do not know it."""

    hidden: torch.Tensor
    extra: float = 0.0


class Holder:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.inner = {"hidden": [hidden]}


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: torch.Tensor


class Slots:
    """An object without a `__dict__`: nothing finds its tensor."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def returning(wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor], *, frozen: bool) -> nn.Module:
    """Blocks return wrapped results. Frozen ones get no gradient, but what comes before needs one through them."""
    model = Stack(lambda: Around(after=lambda block, x: wrap(x)), call=lambda block, x: unwrap(block(x)))
    model.blocks.requires_grad_(not frozen)
    return model


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
    total, count = cross_entropy(model, batch)
    return total + model.extra * count, count


KEPT: list[torch.Tensor] = []
"""What blocks hand on beside the module system."""


class Hidden(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.append(super().forward(x))
        return x


def by_closure(block: Any, x: torch.Tensor) -> torch.Tensor:
    block(x)
    return KEPT.pop()


def keep_view(block: Any) -> None:
    block.turned = block.up.weight.t()


def with_view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ weight)


# Who reads whose weights


def squares(model: Any) -> torch.Tensor:
    return 1e-2 * sum((parameter.pow(2).sum() for parameter in model.parameters()), torch.zeros(()).double())


def penalty(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """Cross entropy and squares of all parameters, whose modules have run."""
    total, count = cross_entropy(model, batch)
    return total + squares(model) * count, count


def penalty_first(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """The same, read before any module runs."""
    added = squares(model)
    total, count = cross_entropy(model, batch)
    return total + added * count, count


def detached_norm(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """A loss scaled by norms of weights, which get no gradient of it."""
    scale = 1.0 / (1.0 + sum(float(parameter.detach().norm()) for parameter in model.parameters()) * 1e-2)
    total, count = cross_entropy(model, batch)
    return total * scale, count


class TwoBlocks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        other = self.__dict__.get("other")
        return x if other is None else x + torch.tanh(F.linear(x, other.up.weight))


def reads_another(step: int) -> nn.Module:
    """Each block reads a weight of the block that is `step` places further."""
    model = Stack(TwoBlocks)
    for block, other in zip(model.blocks[max(0, -step) :], model.blocks[max(0, step) :], strict=False):
        block.__dict__["other"] = other
    return model


def by_weights(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes with the weights of a block and never calls it."""
    return x + F.linear(F.gelu(F.linear(x, block.up.weight, block.up.bias)), block.down.weight, block.down.bias)


def by_functional_call(block: Any, x: torch.Tensor) -> Any:
    return torch.func.functional_call(block, dict(block.named_parameters()), (x,))


class Ensemble(Stack):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        stacked = {
            name: torch.stack([block.get_parameter(name) for block in self.blocks]) for name, _ in self.blocks[0].named_parameters()
        }

        def one(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(F.linear(x, parameters["up.weight"], parameters["up.bias"]))
            return F.linear(hidden, parameters["down.weight"], parameters["down.bias"])

        return x + torch.vmap(one, in_dims=(0, None))(stacked, x).mean(dim=0)


class ScaledFirst(Stack):
    """A parameter of the root is read by the loss before any module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def logits(self, values: torch.Tensor) -> torch.Tensor:
        return Stack.forward(self, values * self.scale) * self.scale


def by_method(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return summed(model.logits(batch["values"]), batch)


class FunctionalHead(Stack):
    def logits(self, values: torch.Tensor) -> torch.Tensor:
        x = F.linear(values, self.stem.weight, self.stem.bias)
        for block in self.blocks:
            x = x + F.linear(torch.tanh(F.linear(x, block.up.weight)), block.down.weight)
        return F.linear(x, self.head.weight, self.head.bias)


class Codebook(nn.Module):
    """Nearest rows of a table, which another module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(96, WIDTH) * 0.3)
        self.project = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        chosen = self.table[torch.cdist(x.detach(), self.table.detach()).argmin(dim=-1)]
        return x + (chosen - x).detach() + 0.1 * (chosen - chosen.detach())


class Quantized(Stack):
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
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = GradientReads.apply(block(x), self.blocks[(number + 1) % 3])
        return x


# Containers and shapes of models


def part_by_part(layer: Any, x: torch.Tensor) -> torch.Tensor:
    for part in layer.values() if isinstance(layer, nn.ModuleDict) else layer:
        x = x + torch.tanh(part(x) if isinstance(part, nn.Module) else F.linear(x, part))
    return x


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "lists": lambda: nn.ModuleList([Block(), linear()]),
    "dicts": lambda: nn.ModuleDict({"first": Block(), "second": linear()}),
    "parameter lists": lambda: nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(2)),
    "sequentials in lists": lambda: nn.ModuleList([nn.Sequential(Block(), nn.Sequential(Block(), Block()))]),
}


class Namespace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.gain = nn.Parameter(torch.ones(WIDTH))


class OwnForward(Stack):
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
    def through(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().through, x, use_reentrant=False)


def change_in_place(block: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = block(x)
    made += 1.0
    made[:, :2] *= 2.0
    return made


class Twice(Stack):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = block(x)
        return x


class Alternating(Stack):
    """A block has no influence on the result."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
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
    model = Stack()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def same_block() -> nn.Module:
    model = Stack()
    model.blocks[2] = model.blocks[0]
    return model


def normed(up: Callable[[nn.Module], nn.Module], down: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return Layer(lambda self, x: x + self.down(torch.tanh(self.up(x))), up=up(linear()), down=down(linear()))


def parametrized() -> nn.Module:
    return normed(parametrizations.weight_norm, parametrizations.orthogonal)


class Subclassed(nn.Parameter):
    def doubled(self) -> torch.Tensor:
        return self * 2


class OwnParameters(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight = Subclassed(self.up.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(F.linear(x, self.up.weight.doubled())))


def recurrent() -> nn.Module:
    cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    return Layer(lambda self, x: x + self.cell(x[:, None])[0][:, 0], cell=cell)


def attention() -> nn.Module:
    """torch's own attention, whose fast path reads weights by itself."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
    return Layer(lambda self, x: self.layer(x[:, None])[:, 0], layer=layer)


# Weights that forward writes


def writing(write: Callable[[torch.Tensor], object]) -> nn.Module:
    """Blocks change a weight in forward."""
    return Stack(lambda: Around(before=torch.no_grad()(lambda block: write(block.up.weight))))


class Tokens(nn.Module):
    """An embedding, which may keep its rows short."""

    def __init__(self, *, sparse: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH, max_norm=max_norm, sparse=sparse)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding((values.abs() * 40).long() % 128).mean(dim=1))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


# What callbacks see


def looks(look: Callable[[nn.Module], dict[str, torch.Tensor]], trainer: Trainer, step: int) -> None:
    """Compare what a way of reading the model in a callback finds with what the trainer gives."""
    found = {name: value.clone() for name, value in look(trainer.model).items()}
    wanted = {name: value.clone() for name, value in trainer.state_dict()}
    assert found.keys() >= wanted.keys(), "names differ"
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), "values differ"


def saved_whole(model: nn.Module) -> dict[str, torch.Tensor]:
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


def clip_weights(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


CHANGED = Refusal(error="PhaseError", match="changed in place during a pass", ranks=(2,))

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "renormed": lambda weight: weight.renorm_(2, 0, 0.5),
    "clamped": lambda weight: weight.data.clamp_(-0.1, 0.1),  # `.data` leaves no trace in version counters.
    "rolled": lambda weight: weight.data.copy_(weight.data.roll(1, 0)),  # The same numbers in other places.
}
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
        Case(name=f"{'frozen ' * frozen}blocks return a {name}", build=partial(returning, wrap, unwrap, frozen=frozen))
        for frozen in (False, True)
        for name, wrap, unwrap in _UNWRAPPED
        if not frozen or name in ("dataclass", "object with slots")
    ),
    Case(name="auxiliary loss on self", build=WithAuxiliary, loss=auxiliary_loss, config={"batch": {"micro_size": 8}}),
    Case(name="auxiliary loss alone", build=partial(WithAuxiliary, OnlyAuxiliary), loss=auxiliary_loss),
    Case(name="hidden in a list of the class", build=partial(Stack, Hidden, call=by_closure)),
    Case(name="vmap over a block", build=partial(Stack, call=lambda block, x: torch.vmap(block, randomness="different")(x))),
    Case(
        name="blocks return a view of a weight",
        build=partial(
            Stack, lambda: Around(after=lambda block, x: (x, block.up.weight.t())), call=lambda block, x: with_view(*block(x))
        ),
    ),
    Case(
        name="blocks keep a view of a weight",
        build=partial(Stack, lambda: Around(before=keep_view), call=lambda block, x: with_view(block(x), block.turned)),
    ),
    Case(
        name="blocks hide a view of a weight",
        build=partial(
            Stack,
            lambda: Around(before=lambda block: KEPT.append(block.up.weight.t())),
            call=lambda block, x: with_view(block(x), KEPT.pop()),
        ),
        refused=Refusal(error="PhaseError", match="a view of .* was used after it", stages=(3,), ranks=(2,)),
    ),
    Case(name="penalty over all parameters", build=Stack, loss=penalty),
    Case(name="penalty before the model", build=Stack, loss=penalty_first),
    Case(name="detached norms of parameters", build=Stack, loss=detached_norm),
    Case(name="reads the block before", build=partial(reads_another, -1)),
    Case(name="reads the next block", build=partial(reads_another, 1)),
    Case(name="blocks never called", build=partial(Stack, call=by_weights)),
    Case(name="methods of blocks", build=partial(Stack, call=lambda block, x: x + block.down(F.gelu(block.up(x))))),
    Case(name="functional call", build=partial(Stack, call=by_functional_call)),
    Case(name="ensemble under vmap", build=Ensemble),
    Case(name="parameter before the first module", build=ScaledFirst, loss=by_method),
    Case(name="functional head", build=FunctionalHead, loss=by_method),
    Case(name="codebooks", build=partial(Quantized, Codebook)),
    Case(name="weight read in backward", build=ReadsInBackward),
    *(Case(name=f"{name} in a list", build=partial(Stack, layer, call=part_by_part)) for name, layer in CONTAINERS.items()),
    Case(name="namespaces", build=partial(Stack, Namespace, call=lambda block, x: block.first(x) * block.gain)),
    Case(name="a container with its own forward", build=OwnForward),
    Case(name="blocks recomputed", build=partial(Stack, call=partial(checkpoint, use_reentrant=False))),
    Case(name="blocks recomputed together", build=Recomputed),
    Case(name="gated blocks recomputed together", build=partial(Recomputed, Gated)),
    Case(name="results changed in place", build=partial(Stack, call=change_in_place)),
    Case(name="blocks called twice", build=Twice),
    Case(name="a block without influence", build=Alternating),
    Case(name="parameters multiplied directly", build=partial(Stack, Gated)),
    Case(name="a shared weight", build=sharing),
    Case(name="a block in two places", build=same_block),
    Case(name="parametrized weights", build=partial(Stack, parametrized)),
    Case(name="an own class of parameters", build=partial(Stack, OwnParameters)),
    Case(name="lstm blocks", build=partial(Stack, recurrent)),
    Case(name="attention blocks", build=partial(Stack, attention)),
    *(
        # A plain loop calls the model once a step.
        Case(name=f"weights {name} in forward", build=partial(writing, write), refused=CHANGED, config={"batch": {"micro_size": 8}})
        for name, write in WRITES.items()
    ),
    *(
        Case(
            name=f"callback reads {name}",
            build=Stack,
            callbacks=partial(list, (after_steps(partial(looks, look)),)),
            refused=AT_REST,
        )
        for name, look in LOOKS.items()
    ),
    Case(
        name="weights clipped in a callback",
        build=Stack,
        callbacks=lambda: [after_steps(lambda trainer, step: clip_weights(trainer.model, step))],
        after_step=clip_weights,
        refused=(AT_REST, Refusal(error="PhaseError", match="changed in place between steps", stages=(1, 2), ranks=(2,))),
    ),
    Case(name="embedding with max_norm", build=partial(Tokens, max_norm=1.0), refused=CHANGED),
]
