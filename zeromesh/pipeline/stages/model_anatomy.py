"""Analyses a model for a pipeline: its blocks, the modules before and after them, their arguments and results.
The model is run once on the meta device. If it reads a value (is anything masked?), the answer is yes; a module inside a block that
cannot run without values (an expert that picks its tokens) is assumed to return a tensor like its input. Tensors computed from the
embedding are tracked through all operators, so a model whose later blocks need more than the hidden state is refused here."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.errors import LayoutError, summary
from zeromesh.overrides import cached_tensors_removed, override
from zeromesh.units.plan import without_adapters

HIDDEN = "hidden state"
"""The placeholder of the hidden state among the leaves of a block's output structure (`Anatomy.outputs`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """The parts of a model that a pipeline can cut. Names are FQNs."""

    body: str  # the module that runs the blocks and returns the head's input; empty for the model itself
    blocks: str
    count: int
    hidden_argument: int | str  # the block argument that is the hidden state: a position, or a name
    outputs: tuple[Any, ...]
    """The structure that each block returns, with `HIDDEN` and, for the other tensors, None as its leaves."""
    before: tuple[str, ...]  # modules with parameters that run before the blocks; they belong to the first stage
    after: tuple[str, ...]
    """Modules with parameters that run after the blocks, or not at all; they belong to the last stage."""
    reshapes: bool
    """True if some block changes the shape of the hidden state, as in image models with several resolutions."""
    idle: tuple[str, ...]  # modules of the body that did not run at all, so that their stage is unknown


def examine(model: nn.Module, example: Mapping[str, Any] | None = None) -> Anatomy:
    """Run a model on the meta device to find its parts. `example` is a batch, by default token ids alone; its values do not matter.
    Raises `LayoutError` for a model that cannot be cut, with the reason."""
    config = getattr(model, "config", None)
    for name, reason in _REFUSED.items():
        if getattr(config, name, None):
            raise refusal(model, f"{reason} (config.{name})")
    # The base model of transformers, or the model itself.
    base = getattr(without_adapters(model)[0], "base_model", None)
    body = next((name for name, module in model.named_modules() if module is base), "")
    batch = dict(example) if example is not None else {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    inputs = body_inputs(model, model.get_submodule(body), batch)
    refusals: list[LayoutError] = []
    for blocks in _block_lists(model, body):
        if refusals and len(list(model.get_submodule(blocks).children())) == 1:
            continue
        try:
            return _anatomy(model, body, blocks, inputs)
        except LayoutError as error:
            refusals.append(error)
        except _RUN_ERRORS as error:
            raise refusal(model, f"it could not be run for a trial with {', '.join(batch)} ({summary(error)})") from error
    raise refusals[0]


def _anatomy(model: nn.Module, body: str, blocks: str, inputs: Mapping[str, Any]) -> Anatomy:
    """Return the anatomy of a model with this block list. Modules outside it whose children run directly count as the children."""
    opened: set[str] = set()
    while True:
        recorder = _Recorder(model, body, blocks, _outside(model, blocks, opened))
        try:
            return recorder.conclude(recorder.run(inputs))
        except LayoutError:
            if recorder.called_in_part <= opened:
                raise
            opened |= recorder.called_in_part


def refusal(model: nn.Module, reason: str) -> LayoutError:
    return LayoutError(f"{type(model).__name__} cannot be cut into pipeline stages: {reason}")


_REFUSED = {
    "is_encoder_decoder": "every decoder block needs the encoder's output",
    "layerdrop": "it leaves out blocks at random, each rank others",
    "num_kv_shared_layers": "its last blocks use keys and values of earlier ones",
}
"""The reason why a pipeline cannot run a model, by the configuration key that implies it."""

_VALUE_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""Errors of a module that reads values on the meta device, whose result is then replaced by a tensor."""
_RUN_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError)


def body_inputs(model: nn.Module, body: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Select the items of a batch that the body's forward takes, without those that only the model's forward names (labels). A
    model that is its own body gets no labels if it accepts that: only the last stage computes a loss."""
    named = inspect.signature(body.forward).parameters
    if body is model:
        own = {"labels"} if "labels" in named and named["labels"].default is None else set()
    elif not any(each.kind is each.POSITIONAL_OR_KEYWORD for each in named.values()):
        return dict(batch)  # A wrapper that passes on all of its arguments.
    else:
        own = set(inspect.signature(model.forward).parameters) - set(named)
    return {name: value for name, value in batch.items() if name not in own}


def _block_lists(model: Any, body: str) -> list[str]:
    """List candidates for the list of blocks, the likeliest first: those of a decoder, as long as configured, the largest."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    layer_count = getattr(config, "num_hidden_layers", None)
    decoder = getattr(model, "get_decoder", lambda: None)()
    inside = set(decoder.modules()) if isinstance(decoder, nn.Module) else set()
    found: list[tuple[bool, bool, int, str]] = []
    for name, module in model.get_submodule(body).named_modules(prefix=body):
        outer = any(name.startswith(f"{other}.") for *_, other in found)
        plain = all(isinstance(child, nn.Embedding | nn.ModuleList) for child in module.children())
        if isinstance(module, nn.ModuleList) and not plain and not outer:
            size = sum(parameter.numel() for parameter in module.parameters())
            found.append((module in inside, len(module) == layer_count, size, name))
    if not found:
        raise refusal(model, "it has no list of modules, which its blocks would be")
    found.sort(reverse=True)
    return [name for among, *_, name in found if among == found[0][0]]


def _outside(model: nn.Module, blocks: str, opened: Collection[str] = ()) -> list[str]:
    """List the outermost modules with parameters that do not contain the blocks, and those inside the `opened` modules."""
    parts = blocks.split(".")
    around = [".".join(parts[:end]) for end in range(len(parts))]
    found: list[str] = []
    for parent in around:
        module = model.get_submodule(parent)
        for name in dict(module.named_parameters(recurse=False)):
            fqn = f"{parent}.{name}".strip(".")
            kind = "of which parts run without it" if parent in opened else "that runs blocks"
            raise refusal(model, f"{fqn} is a parameter of a module {kind}, so it is not known which stage uses it")
        for name, child in module.named_children():
            fqn = f"{parent}.{name}".strip(".")
            if fqn in around or fqn == blocks or not any(True for _ in child.parameters()):
                continue
            (around if fqn in opened else found).append(fqn)
    return found


class WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers operators that read values of meta tensors, and marks all tensors computed from marked ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return True if args[0].dtype == torch.bool else torch.zeros((), dtype=args[0].dtype).item()
        output = func(*args, **kwargs)
        creates = "like" in func.name() or ".new_" in func.name() or "::new_" in func.name()
        if not creates and any(map(_is_marked, pytree.tree_leaves((args, kwargs)))):
            _mark(output)
        return output


_MARK = "_zeromesh_from_outside"


def _mark(structure: Any, value: bool = True) -> None:
    for leaf in pytree.tree_leaves(structure):
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, _MARK, value)


def _is_marked(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and getattr(leaf, _MARK, False)


class _Recorder:
    """One trial run of a model, and its record of the modules that ran."""

    def __init__(self, model: nn.Module, body: str, blocks: str, outside: Sequence[str]) -> None:
        self._model, self._body, self._blocks, self._outside = model, body, blocks, outside
        self._block_modules = list(model.get_submodule(blocks).children())
        self._hidden_arguments: list[int | str] = []
        """The position or name of the argument that is the hidden state, for each block after the first."""
        self._outputs: list[Any] = []
        self._hidden_leaf = 0  # the index of the hidden state among the leaves of a block's output
        self._order: list[int] = []
        self._guessed_module = ""
        """The first module in a block that could not run without values, so that its result is guessed, and its error."""
        self._ran_after: dict[str, set[int]] = {}
        """The numbers of blocks that had begun at the calls of each module outside the blocks."""
        self._running_outside = ""
        self.called_in_part: set[str] = set()
        """Names of modules outside the blocks of which a submodule was called directly, without the module's own forward."""

    def run(self, inputs: Mapping[str, Any]) -> Any:
        body = self._model.get_submodule(self._body)
        batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), dict(inputs))
        # Tensors that modules cache for later calls, such as rotary embeddings, have no values here.
        with ExitStack() as undo, cached_tensors_removed(body), torch.no_grad():

            def wrap(module: nn.Module, run: Callable[..., Any], given: Any) -> None:
                # The forward is replaced, rather than hooked, so that the model's hooks stay as they are.
                undo.callback(override(module, "forward", partial(run, given, module.forward)))

            for name in self._outside:
                outer = self._model.get_submodule(name)
                for module in outer.modules():
                    wrap(module, self._run_outside if module is outer else self._run_part, name)
            for index, block in enumerate(self._block_modules):
                for module in block.modules():
                    wrap(module, self._run_or_guess, type(module).__name__)
                wrap(block, self._run_block, index)
            for module in body.modules():
                undo.callback(override(module, "training", False))
                # torch's functional_call would leave its own tensors in a module that has several names.
                for own in (module._parameters, module._buffers):
                    for name, tensor in own.items():
                        if tensor is not None:
                            undo.callback(override(own, name, torch.empty_like(tensor, device="meta")))
            with WithoutValues():  # type: ignore[no-untyped-call]
                return body(**batch)

    def _run_block(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(enumerate(args)) | kwargs
        if self._order:
            arguments = self._check_arguments(index, arguments)
        self._order.append(index)
        positional = (arguments[place] for place in range(len(args)))
        output = forward(*positional, **{name: arguments[name] for name in kwargs})
        _mark(output)
        self._outputs.append(output)
        if len(self._order) == len(self._block_modules) > 1:
            _mark(pytree.tree_leaves(output)[self._hidden_leaf], value=False)
        return output

    def _run_or_guess(self, kind: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _VALUE_ERRORS as error:
            if not (tensors := [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]):
                raise
            self._guessed_module = self._guessed_module or f"{kind}: {summary(error)}"
            return torch.empty_like(tensors[0])

    def _check_arguments(self, index: int, arguments: Mapping[int | str, Any]) -> dict[Any, Any]:
        """Check that the hidden state alone depends on modules before the blocks; returns the arguments with an unmarked copy."""
        returned = [id(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in pytree.tree_leaves(self._outputs[-1])]
        if not (places := [place for place, value in arguments.items() if id(value) in returned]):
            reason = f"block {index} does not take what the block before it returns just as it is"
            if self._guessed_module:
                reason += f", as far as can be told in a trial without values ({self._guessed_module})"
            raise refusal(self._model, reason)
        self._hidden_arguments.append(places[0])
        hidden = arguments[places[0]]
        self._hidden_leaf = returned.index(id(hidden))
        for place, value in arguments.items():
            if value is not hidden and any(map(_is_marked, pytree.tree_leaves(value))):
                which = f"its argument {place + 1}" if isinstance(place, int) else place
                reason = "which is computed from parameters of earlier stages, besides the hidden state"
                raise refusal(self._model, f"block {index} takes {which}, {reason}")
        plain = hidden.detach()
        _mark(plain, value=False)
        return {place: plain if value is hidden else value for place, value in arguments.items()}

    def _run_part(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._running_outside != name:
            self.called_in_part.add(name)
        return forward(*args, **kwargs)

    def _run_outside(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        begun = len(self._order)
        self._ran_after.setdefault(name, set()).add(begun)
        if begun == len(self._block_modules) > 1 and any(map(_is_marked, pytree.tree_leaves((args, kwargs)))):
            raise refusal(self._model, f"{name} takes what is computed from parameters of earlier stages")
        with override(self, "_running_outside", name):
            output = forward(*args, **kwargs)
        if not begun:
            _mark(output)
        return output

    def conclude(self, output: Any) -> Anatomy:
        if self.called_in_part:
            raise refusal(self._model, f"parts of {min(self.called_in_part)} run without it")
        count = len(self._block_modules)
        if self._order != list(range(count)):
            raise refusal(self._model, f"its blocks run in the order {self._order}, instead of each once")
        if count > 1 and any(map(_is_marked, pytree.tree_leaves(output)[:1])):
            raise refusal(self._model, "what comes after the blocks is computed from parameters of the first stage")
        if len(set(self._hidden_arguments)) > 1:
            raise refusal(self._model, "its blocks take the hidden state in different places")
        for name, when in self._ran_after.items():
            if not (when == {0} or when == {count}):
                raise refusal(self._model, f"{name} runs between blocks, or both before and after them")
        return Anatomy(
            body=self._body,
            blocks=self._blocks,
            count=count,
            hidden_argument=self._hidden_arguments[0] if self._hidden_arguments else 0,
            outputs=tuple(map(self._structure_of, self._outputs)),
            reshapes=len({pytree.tree_leaves(each)[self._hidden_leaf].shape for each in self._outputs}) > 1,
            before=tuple(name for name in self._outside if self._ran_after.get(name) == {0}),
            after=tuple(name for name in self._outside if self._ran_after.get(name) != {0}),
            idle=tuple(name for name in self._outside if name not in self._ran_after and name.startswith(self._body)),
        )

    def _structure_of(self, output: Any) -> Any:
        leaves, structure = pytree.tree_flatten(output)
        if len(leaves) <= self._hidden_leaf:
            raise refusal(self._model, "its blocks return structures that differ")
        leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        leaves[self._hidden_leaf] = HIDDEN
        return pytree.tree_unflatten(leaves, structure)
