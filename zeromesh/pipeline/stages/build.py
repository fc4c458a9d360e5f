"""A rank's stages: the unmodified model, in which stubs replace everything that belongs to other stages. Names do not
change. Parameters of other stages are removed, so that iterating over the model's parameters gives this rank's alone. The model
runs unmodified from the batch: it computes masks, positions and rotary embeddings itself."""

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zeromesh.errors import LayoutError, PhaseError, counted
from zeromesh.overrides import override
from zeromesh.pipeline.stages.model_anatomy import HIDDEN, Anatomy, WithoutValues, body_inputs, refusal
from zeromesh.settings.keys import Balance
from zeromesh.units.plan import names_by_parameter, without_adapters

if TYPE_CHECKING:
    from zeromesh.tensor.layers import SequenceShares

BALANCE = "load_balancing_loss_func"
"""The function of transformers' modules that balances experts by the router logits of all layers."""


def cut_by_cost(costs: Sequence[float], *, stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return the number of blocks of each stage in the cut that minimizes the cost of the most expensive stage, and among such cuts
    the sum of squares of stage costs. `costs` are those of the blocks; `first` and `last` of the modules before and after them, in
    the same unit. Raises `LayoutError` with fewer blocks than stages, or a cost that is negative."""
    if stages < 1 or stages > len(costs):
        why = f"{counted(len(costs), 'block')} cannot be cut into {stages} pipeline stages: each has at least one"
        raise LayoutError(f"{why}; take fewer ranks along pipeline, or fewer chunks")
    if min(*costs, first, last) < 0:
        raise LayoutError("a block cannot cost less than nothing")
    sums = list(accumulate(costs, initial=0.0))

    def cost(start: int, end: int, stage: int) -> float:
        return sums[end] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    # best[end]: the cut of the blocks before `end` into the stages so far, as (largest stage, sum of squares, counts of blocks)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        best = {
            end: min(
                (max(largest, cost(start, end, stage)), squares + cost(start, end, stage) ** 2, (*counts, end - start))
                for start, (largest, squares, counts) in best.items()
                if start < end
            )
            for end in range(stage + 1, len(costs) - (stages - 1 - stage) + 1)
        }
    return best[len(costs)][2]


BlockCosts = tuple[list[float], float, float]
"""The costs of each block, of the modules before the blocks, and of those after."""


def block_costs(model: nn.Module, anatomy: Anatomy, balance: Balance = "parameters") -> BlockCosts:
    """Compute costs as parameters, or as multiplications per token, one for each element of a matrix, of as many experts as a token
    is routed to. A tied weight counts at both ends. Attention scores are left out, as they are alike in all blocks."""
    config = getattr(model, "config", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)

    def products(parameter: nn.Parameter) -> float:
        if parameter.ndim == 3 and experts == parameter.shape[0]:
            return float(parameter.numel() * (getattr(config, "num_experts_per_tok", None) or experts) / experts)
        return parameter.numel() if parameter.ndim > 1 else 0

    def size(name: str) -> float:
        module = model.get_submodule(name)
        if balance == "parameters":
            return float(sum(parameter.numel() for parameter in module.parameters()))
        owners = [each for each in module.modules() if not isinstance(each, nn.Embedding)]
        return sum((products(each) for owner in owners for each in owner.parameters(recurse=False)), 0.0)

    blocks = [size(f"{anatomy.blocks}.{index}") for index in range(anatomy.count)]
    return blocks, sum(map(size, anatomy.before)), sum(map(size, anatomy.after))


def plan_cut(costs: BlockCosts, stages: int, counts: Sequence[int] = ()) -> tuple[int, ...]:
    """Choose the number of blocks of each stage: `counts` if given, else so that stages cost about the same. Raises `LayoutError`
    for counts that are not the model's, or more stages than blocks."""
    blocks, first, last = costs
    if counts:
        if (len(counts), sum(counts)) != (stages, len(blocks)) or min(counts) < 1:
            why = f"a cut into {list(counts)} blocks has {sum(counts)} of them, the model {len(blocks)}"
            raise LayoutError(f"{why}; it has {len(counts)} stages, the pipeline {stages}; each stage has at least 1 block")
        return tuple(counts)
    return cut_by_cost(blocks, stages=stages, first=first, last=last)


def copies_outside(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    """Copy the modules outside the blocks to the meta device, to compute the shapes of other stages' results."""
    return {name: meta_copy(model.get_submodule(name)) for name in (*anatomy.before, *anatomy.after)}


class Stages:
    """The chunks of one rank, made from a model that nothing else uses meanwhile. `own` has the stage of each chunk, in order.
    Outside of `chunk` all modules of all own chunks are in the model."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        counts: Sequence[int],
        own: Sequence[int],
        outside: Mapping[str, nn.Module] | None = None,
        shares: "SequenceShares | None" = None,
    ) -> None:
        """`counts` are of `plan_cut`, and `outside` of `copies_outside` before layers were divided. Blocks pass on `shares`."""
        self.model = model
        self.own = tuple(own)
        self.count = len(counts)
        self.ranges = tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))
        self._anatomy = anatomy
        self._stages = {f"{anatomy.blocks}.{index}": n for n, blocks in enumerate(self.ranges) for index in blocks}
        """The stage of each module that belongs to one, by the module's name."""
        self._stages |= dict.fromkeys(anatomy.before, 0) | dict.fromkeys(anatomy.after, self.count - 1)
        self._slot = StageSlot(anatomy.count - 1, shares)
        outside = outside or copies_outside(model, anatomy)
        idle = [(name, each) for name in anatomy.idle for each in (model.get_submodule(name), outside[name])]
        self._undo = [override(module, "forward", partial(self._refuse_to_run, name)) for name, module in idle]
        self._balance: dict[str, Any] | None = None
        """The globals that hold the load-balancing loss function of a transformers model with experts, which the last stage
        computes from the router logits of all layers: those of earlier stages travel with the hidden state."""
        if self.count > 1 and getattr(getattr(model, "config", None), "output_router_logits", False):
            self._balance = inspect.unwrap(type(without_adapters(model)[0]).forward).__globals__
            if BALANCE not in self._balance:
                raise refusal(model, "it is not known how it balances its experts; output_router_logits: false trains without")
        self._modules = {name: model.get_submodule(name) for name in self._stages}
        self._parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in self._stages}
        self._stubs = {name: self._stub(name, module, outside) for name, module in self._modules.items()}
        self._names = [tuple(names) for _, names in names_by_parameter(model)]
        self.ties: dict[tuple[str, ...], dict[int, str]] = {}
        """For the names of each parameter that several stages have, the first one being that in checkpoints: the first name in each
        stage that has one. Its gradients are summed and counted once."""
        for names in self._names:
            held: dict[int, str] = {}
            for name in names:
                held.setdefault(self.stage_of(name), name)
            if len(held) > 1:
                self.ties[names] = held
        self._install_modules(self.own)
        self._remove_foreign()

    def _remove_foreign(self) -> None:
        """Give the modules of other stages meta parameters. Of modules that own stages share, the others have copies."""
        parts = [(each, self._stages[name] in self.own) for name, each in self._modules.items()]
        here, away = ({each for part, own in parts if own is kind for each in part.modules()} for kind in (True, False))
        held = {each for module in away for each in module.parameters(recurse=False)}
        known: dict[int, Any] = {id(each): each for each in self.model.buffers()}
        for each in held:
            known[id(each)] = nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
            vars(known[id(each)]).update(vars(each))
        for module in away - here:
            for leaf, parameter in module._parameters.items():
                module._parameters[leaf] = None if parameter is None else known[id(parameter)]
            for leaf, child in module._modules.items():
                if child in here and any(True for _ in child.parameters()):
                    self._undo.append(override(module._modules, leaf, copy.deepcopy(child, known)))

    def _stub(self, name: str, module: nn.Module, outside: Mapping[str, nn.Module]) -> nn.Module:
        anatomy, slot = self._anatomy, self._slot
        if name in outside:
            return NanStub(module, outside[name], slot, before=name in anatomy.before)
        shape = NanStub(module, meta_copy(module), slot, before=False) if anatomy.reshapes else None
        return BlockStub(module, int(name.rpartition(".")[2]), anatomy, slot, shape)

    def _refuse_to_run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        reason = f"{name} did not run for the first batch, so no stage has it; give that the fields of all batches"
        raise refusal(self.model, reason)

    def stage_of(self, name: str) -> int:
        """Find the stage of a parameter by its name, on any rank. Raises LayoutError for a name without a stage."""
        for module, stage in self._stages.items():
            if name.startswith(f"{module}."):
                return stage
        raise LayoutError(f"no stage has a parameter {name}")

    @contextmanager
    def chunk(self, chunk: int, received: Sequence[torch.Tensor] = (), *, balance: bool = True) -> Iterator[None]:
        """Inside the block, the model runs as chunk number `chunk` of this rank, on the tensors `received` from the previous stage
        (none for the first one). `balance`: compute the experts' load-balancing loss, if the model has one."""
        stage = self.own[chunk]
        names = self._balance if balance and stage + 1 == self.count else None
        function = None if names is None else names[BALANCE]
        slot, blocks = self._slot, self.ranges[stage]
        slot.inject_at = blocks.start - 1
        slot.capture_at = blocks.stop if stage + 1 < self.count else -1
        slot.received = received[0] if received else None
        try:
            if len(self.own) > 1:
                self._install_modules([stage])
            if names is not None and function is not None:
                # The router logits of earlier stages count in the model's balance loss.
                names[BALANCE] = lambda logits, *args, **kwargs: function((*received[1], *logits), *args, **kwargs)
            yield
        finally:
            if names is not None:
                names[BALANCE] = function
            slot.received = slot.captured = None
            if len(self.own) > 1:
                self._install_modules(self.own)

    def _install_modules(self, stages: Collection[int]) -> None:
        for name, stage in self._stages.items():
            here = self._modules if stage in stages else self._stubs
            self._parents[name]._modules[name.rpartition(".")[2]] = here[name]

    def is_last(self, chunk: int) -> bool:
        """Return True if a chunk ends with the head: then the model itself is called inside `chunk`, labels included."""
        return self.own[chunk] == self.count - 1

    def forward(
        self, chunk: int, batch: Mapping[str, Any], received: Sequence[torch.Tensor] = (), *, balance: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Run a chunk that is not the last stage; returns the tensors for the next stage: the hidden state `[batch, sequence,
        hidden]`, and for experts, with `balance`, the router logits of all layers so far `[layers, tokens, experts]`. Raises
        `PhaseError` when the model did not run its blocks."""
        with self.chunk(chunk, received, balance=balance):
            body = self.model.get_submodule(self._anatomy.body)
            output = body(**body_inputs(self.model, body, batch))
            hidden = self._slot.captured
        if hidden is None:
            raise PhaseError(f"stage {self.own[chunk]} ended without a hidden state: its blocks did not run")
        if self._balance is None or not balance:
            return (hidden,)
        return hidden, torch.stack((*(received[1] if received else ()), *output.router_logits))

    def restore(self) -> None:
        """Restore the whole model. Parameters of other stages are on the meta device, and tied ones are tied again."""
        while self._undo:
            self._undo.pop()()
        self._install_modules(range(self.count))
        for names in self._names:
            found = [self.model.get_parameter(name) for name in names]
            best = next((each for each in found if each.device.type != "meta"), found[0])
            for name in names:
                parent, _, leaf = name.rpartition(".")
                self.model.get_submodule(parent)._parameters[leaf] = best


@dataclass(slots=True)
class StageSlot:
    """The hidden states that the running stage has received and will send. All stubs of a model share one slot."""

    last: int
    shares: "SequenceShares | None"  # the state of sequence parallelism; None if blocks pass on the whole sequence
    inject_at: int = -1  # the index of the block that returns the received hidden state; -1 for none
    capture_at: int = -1
    received: torch.Tensor | None = None
    captured: torch.Tensor | None = None


class Stub(nn.Module):
    """A stand-in without parameters for a module of another stage, to which it delegates missing attributes. For a stage with
    blocks 2 and 3 of six:

        embedding   0      1       2   3   4        5      norm  head
        NaN         pass   inject  own own capture  pass   NaN   not run

    In a model that can be cut, nothing uses the result of a NaN stub; in any other model the loss is NaN instead of silently wrong.
    If tensor ranks hold shares of the sequence between blocks, inject and capture have shares; the last result is gathered."""

    def __init__(self, foreign: nn.Module) -> None:
        super().__init__()
        # A module in a tuple is no submodule, so its parameters are not the model's.
        self._foreign = (foreign,)
        self.training = foreign.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (foreign := self.__dict__.get("_foreign")) is None:
                raise
            return getattr(foreign[0], name)


@contextmanager
def stubs_removed(model: nn.Module) -> Iterator[None]:
    """Inside the block the model has the modules of other stages, with meta parameters, in place of their stubs."""
    with ExitStack() as undone:
        for parent in list(model.modules()):
            for leaf, child in list(parent.named_children()):
                if isinstance(child, Stub):
                    undone.callback(override(parent._modules, leaf, child._foreign[0]))
        yield


class BlockStub(Stub):
    """A stub of another stage's block, which passes the hidden state on or, where blocks reshape it, returns what `shape` makes."""

    def __init__(self, foreign: nn.Module, index: int, anatomy: Anatomy, slot: StageSlot, shape: "NanStub | None" = None) -> None:
        super().__init__(foreign)
        self._index, self._slot, self._shape = index, slot, (shape,)
        self._output, self._argument = anatomy.outputs[index], anatomy.hidden_argument

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: torch.Tensor = args[self._argument] if isinstance(self._argument, int) else kwargs[self._argument]
        slot = self._slot
        length = hidden.shape[1]
        if slot.shares is not None:
            if self._index == 0:
                slot.shares.decide(length)
            elif self._index > slot.inject_at:
                length *= slot.shares.exchange.size if slot.shares.active else 1
        if self._index == slot.inject_at:
            if slot.received is None:
                raise PhaseError(f"block {self._index} was to hand on a hidden state, but none was received")
            hidden = slot.received
        if self._index == slot.capture_at:
            slot.captured = hidden
        if self._shape[0] is not None:
            leaves, structure = pytree.tree_flatten(self._shape[0](*args, **kwargs))
            if self._index == slot.inject_at:
                leaves[pytree.tree_leaves(self._output).index(HIDDEN)] = hidden
            return pytree.tree_unflatten(leaves, structure)
        cache = next((value for value in (*args, *kwargs.values()) if hasattr(value, "get_mask_sizes")), None)
        if cache is not None and not getattr(cache, "length_without_layers", False):
            # Models ask one layer's cache for the length, and it may not be one of this stage's: this cache has one too, of width
            # 1. A layer that keeps a state in place of keys and values has no length.
            layer = next(iter(cache.layers[self._index : self._index + 1]), None)
            if layer is None or hasattr(layer, "update"):
                nothing = hidden.new_zeros(hidden.shape[0], 1, length, 1)
                cache.update(nothing, nothing, self._index)
        if self._index == slot.last:
            hidden = hidden.new_full((hidden.shape[0], length, *hidden.shape[2:]), float("nan"))
        return pytree.tree_map(lambda leaf: hidden if leaf is HIDDEN else leaf, self._output)


class NanStub(Stub):
    """A stub for a module outside the blocks, which returns NaN in the shapes of the module's results. `shape` is the module's copy
    on the meta device, see `meta_copy`. `before`: the module runs before the blocks."""

    def __init__(self, foreign: nn.Module, shape: nn.Module, slot: StageSlot, *, before: bool) -> None:
        super().__init__(foreign)
        self._slot, self._copy, self._before = slot, (shape,), before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Models move inputs to the device of a weight, but this stage has no such weight: take the device of known tensors.
        known = pytree.tree_leaves((self._slot.received, args, kwargs))
        devices = (leaf.device for leaf in known if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
        device = next(devices, torch.device("cpu"))
        floats = [each.dtype for each in self._copy[0].parameters() if each.is_floating_point()]

        def on_meta(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("meta", floats[0] if floats and tensor.is_floating_point() else None)

        positional, named = pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs))
        with torch.no_grad(), WithoutValues():  # type: ignore[no-untyped-call]
            output = self._copy[0](*positional, **named)

        def nan(like: torch.Tensor) -> torch.Tensor:
            # Models take dtypes of masks from it, and may write into results of embeddings. A head's large one is one number.
            shape = like.shape if self._before else ()
            if not like.is_floating_point():
                return torch.zeros(shape, dtype=like.dtype, device=device).expand(like.shape)
            received = self._slot.received
            dtype = like.dtype if received is None else received.dtype
            return torch.full(shape, float("nan"), dtype=dtype, device=device).expand(like.shape)

        return pytree.tree_map_only(torch.Tensor, nan, output)


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, to compute the shapes of its results; later changes of `module` do not affect it."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(each): torch.empty_like(each, device="meta") for each in tensors}).eval()
