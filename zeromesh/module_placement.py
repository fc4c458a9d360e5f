"""Places modules of a model on process sets: each computes only on the ranks of its set, and all ranks receive its output.

    sets = mesh.process_sets.declare({"left": [0, 1], "right": [2, 3]})
    placement = place(model, {"encoder": sets["left"], "decoder": sets["right"]}, mesh)
    loss(model(batch)).backward()        # on every rank, with the same batch
    placement.clip_grad_norm_(1.0)       # over the parameters of all ranks
    optimizer.step()                     # of this rank's parameters

Every rank runs the same program, and all compute what is outside of placed modules. A stub replaces each module of other ranks:
its output, and in backward the gradients of its inputs, come from the first rank of the module's set. Autograd visits a graph in
reverse, so ranks communicate in the same order in backward. Recompute inside a placed module: around it, ranks would differ."""

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zeromesh.comm.point_to_point import HEADER_BYTES, MessageSpec, read_header, write_header
from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.pipeline.stages.build import Stub, meta_copy
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.units.plan import names_by_parameter

Gradients = tuple[torch.Tensor | None, ...]
_Convert = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def place(model: nn.Module, homes: Mapping[str, ProcessSet], mesh: Mesh) -> "ModulePlacement":
    """Place each module whose fully qualified name matches a pattern of `homes` on a process set, changing `model` in place.
    All ranks of the mesh call this alike, on equal models. A pattern may contain `*`; the first one that matches a name counts.
    Ranks outside of the set lose the module's parameters; other names do not change. Raises `LayoutError` on all ranks alike, for
    a pattern without a module, a module inside of one that is placed, and a parameter that a placed module shares with others."""
    placed: dict[str, ProcessSet] = {}
    for pattern, home in homes.items():
        names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(f"placement of {pattern!r} on process set {home.name}: the model has no such module")
        for name in names:
            placed.setdefault(name, home)
    for name in placed:
        if (outer := _placed_module_of(name, placed)) is not None:
            raise LayoutError(f"placement: {name} is inside {outer}, which is placed as a whole; name one of them")
    for _, names in names_by_parameter(model):
        if len({_placed_module_of(name, placed) for name in names}) > 1:
            why = f"placement: {' and '.join(names)} are one parameter in parts of the model that are placed apart"
            raise LayoutError(f"{why}; untie them, or place a module that holds all of them")
    for name, home in placed.items():
        module = model.get_submodule(name)
        exchange = _ModuleExchange(f"{name} on process set {home.name}", home, mesh)
        if home.member:
            module.forward = partial(_run_and_send, module.forward, exchange)
        else:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._modules[leaf] = _RemoteModule(module, exchange)
    return ModulePlacement(model, mesh, placed)


def _placed_module_of(name: str, placed: Mapping[str, ProcessSet]) -> str | None:
    return next((module for module in placed if name.startswith(f"{module}.")), None)


class ModulePlacement:
    """The placement of a model's modules: `homes` maps each placed module's name to its process set."""

    def __init__(self, model: nn.Module, mesh: Mesh, homes: Mapping[str, ProcessSet]) -> None:
        self.homes, self._model, self._mesh = dict(homes), model, mesh

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients to a norm of at most `max_norm`, on all ranks; returns the norm before. Each parameter counts once."""
        world, total = self._mesh.world, torch.zeros(1, dtype=torch.float64)
        gradients = {name: each.grad.detach() for name, each in self._model.named_parameters() if each.grad is not None}
        for name, gradient in gradients.items():
            if self.homes.get(_placed_module_of(name, self.homes) or "", world).index == 0:
                total += float(gradient.double().pow(2).sum())
        norm = math.sqrt(world.all_reduce(total, "gradient norm of a placed model").item())
        factor = min(max_norm / (norm + 1e-6), 1.0)
        for gradient in gradients.values():
            gradient.mul_(factor)
        return norm


class _ModuleExchange:
    """Sends tensors of one placed module from the ranks of its set to all ranks."""

    def __init__(self, what: str, home: ProcessSet, mesh: Mesh) -> None:
        self.what = what
        self.randomness = ShardedRandomness(0)
        self._world, self._device = mesh.world_of_tensors(), mesh.device
        self._source = mesh.world.ranks.index(home.ranks[0])

    def send(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Broadcast tensors of the module's first rank to the world, and return them; its other ranks have equal ones."""
        self._broadcast(write_header([MessageSpec.of(each) for each in tensors]).to(self._device))
        # Contiguous copies: the first rank's tensor may be changed in place later, and the other ranks' may be views.
        return [self._broadcast(each.detach().clone(memory_format=torch.contiguous_format)) for each in tensors]

    def receive(self) -> tuple[list[torch.Tensor], list[MessageSpec]]:
        specs = read_header(self._broadcast(torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=self._device)))
        return [self._broadcast(spec.empty(self._device)) for spec in specs], specs

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        # Tensors travel as bytes, since not every backend takes every dtype.
        if tensor.numel():
            self._world.broadcast(tensor.view(-1).view(torch.uint8), self._source, self.what)
        return tensor


def _run_and_send(forward: Callable[..., Any], exchange: _ModuleExchange, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a placed module on the ranks of its set, and send output and input gradients to the other ranks."""
    if given := _needing_grad((args, kwargs)):
        views: _Convert = lambda tensors: [each.view_as(each) for each in tensors]  # noqa: E731
        entered = iter(_apply(_MovedGradients, views, exchange.send, *given))
        args, kwargs = pytree.tree_map(lambda leaf: next(entered) if _needing_grad(leaf) else leaf, (args, kwargs))
    with exchange.randomness.sharded():
        output = forward(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    left = iter(_apply(_MovedGradients, exchange.send, list, *tensors))
    return pytree.tree_map_only(torch.Tensor, lambda _: next(left), output)


class _RemoteModule(Stub):
    def __init__(self, module: nn.Module, exchange: _ModuleExchange) -> None:
        super().__init__(meta_copy(module))
        self._exchange = exchange

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = _needing_grad((args, kwargs))
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        # Generators advance alike on all ranks, so the draw that this call makes on the set is made here too.
        with self._exchange.randomness.sharded(), torch.no_grad():
            output = self._foreign[0](*args, **kwargs)
        tensors, specs = self._exchange.receive()
        promised = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(output))
        if promised != len(tensors):
            why = f"{self._exchange.what} returned {len(tensors)} tensors, where its shapes promise {promised}"
            raise CollectiveError(f"{why}: what a placed module returns may depend on the shapes of its inputs alone")
        differentiable = [index for index, each in enumerate(specs) if each.differentiable]
        if differentiable:
            anchor = torch.zeros((), requires_grad=True)
            given = [*(tensors[index] for index in differentiable), *given]
            received = _apply(_ReceivedGradients, self._exchange, anchor, len(differentiable), *given)
            for index, tensor in zip(differentiable, received, strict=True):
                tensors[index] = tensor
        left = iter(tensors)
        return pytree.tree_map_only(torch.Tensor, lambda _: next(left), output)


class _MovedGradients(torch.autograd.Function):
    """Applies one function to tensors and another to their gradients, at the inputs or outputs of a module on its own ranks."""

    @staticmethod
    def forward(ctx: Any, forward: _Convert, backward: _Convert, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.move = backward
        passed = forward(list(tensors))
        ctx.mark_non_differentiable(*(to for to, each in zip(passed, tensors, strict=True) if not each.requires_grad))
        return tuple(passed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        return None, None, *ctx.move(list(gradients))


class _ReceivedGradients(torch.autograd.Function):
    """Returns `count` outputs of the module on other ranks; in backward, its set sends the gradients of the inputs."""

    @staticmethod
    def forward(ctx: Any, exchange: _ModuleExchange, anchor: torch.Tensor, count: int, *tensors: torch.Tensor) -> Any:
        ctx.exchange, ctx.count, ctx.inputs = exchange, count, len(tensors) - count
        return tuple(each.view_as(each) for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Gradients:
        return None, None, None, *([None] * ctx.count), *(ctx.exchange.receive()[0] if ctx.inputs else ())


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> tuple[torch.Tensor, ...]:
    return cast("tuple[torch.Tensor, ...]", function.apply(*arguments))  # type: ignore[no-untyped-call]


def _needing_grad(structure: Any) -> list[torch.Tensor]:
    tensors = (leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor))
    return [each for each in tensors if each.requires_grad and torch.is_grad_enabled()]
