"""Divides a model in place by a `TensorPlan`, so that this rank holds and computes its part.

Modules and parameters keep their names, and the model's code is unchanged. With `sequence`, blocks pass on shares of the sequence:

    embeddings | split | norm | gather: attention: scatter | + | norm | gather: MLP: scatter | + | ... | gather | norm | head
    whole        share                                                                              share    whole"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import LayoutError, some
from zeromesh.intervals import Interval
from zeromesh.overrides import override
from zeromesh.tensor import autograd_collectives, layers
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.tensor.layers import SequenceShares, SharedInput
from zeromesh.tensor.plan.attention_split import forward_source
from zeromesh.tensor.plan.layer_plan import WHOLE, LayerPlan, Style, TensorPlan, inside
from zeromesh.tensor.plan.planner import parts_of
from zeromesh.units.plan import block_modules

_Forward = Callable[..., Any]
_HIDDEN = "hidden_states"
_READS_WIDTH = re.compile(r"\w+, \w+, (\w+) = hidden_states\.size\(\)[\s\S]*reshape\(\w+, \w+, \1\)")
"""Matches the source of an attention's `forward` that reshapes its heads to the width of its input."""


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter, undo: ExitStack) -> None:
    """Replace the parameter `old` by `new` everywhere; `undo` restores it, as a meta tensor of the old shape."""
    placeholder = nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=old.requires_grad)
    _replace_in((module._parameters for module in model.modules()), old, new, placeholder, undo)
    # A user's optimizer may keep the parameter, and with it the memory of values that nobody reads through it any more.
    old.data = old.data.new_zeros(()).expand(old.shape)


def _replace_in(tables: Iterable[dict[str, Any]], old: Any, new: Any, restored: Any, undo: ExitStack) -> None:
    places = [(table, leaf) for table in tables for leaf, value in table.items() if value is old]
    for table, leaf in places:
        table[leaf] = restored
        undo.callback(override(table, leaf, new))


class Parallelized:
    """Makes `model` compute rank `exchange.index`'s part of `plan`, and can restore the whole model. Divided parameters become
    local ones on the meta device, which the engine fills. With `sequence`, norms, residuals and dropout of blocks are divided too.
    Raises `LayoutError` when the plan is for another number of ranks, and for blocks that may need the whole `sequence`."""

    def __init__(self, model: nn.Module, exchange: Exchange, plan: TensorPlan, *, sequence: bool = False) -> None:
        if plan.size != exchange.size:
            raise LayoutError(f"a plan for {plan.size} tensor ranks on an axis of {exchange.size}")
        if sequence:
            check_blocks(model, plan)
        self.plan = plan
        self.parts = parts_of(model, plan, exchange.index, sequence=sequence)
        randomness = ShardedRandomness(exchange.index) if _has_dropout(model) else None
        self.shares = SequenceShares(exchange, randomness) if sequence else None
        """The state of sequence parallelism; None if blocks pass on the whole sequence."""
        self._randomness = None if sequence else randomness
        """That of activations between divided layers; None without dropout, and where whole blocks have their own."""
        self._model, self._exchange, self._whole_sequence = model, exchange, plan.whole_sequence_modules()
        self._sources: dict[str, SharedInput] = {}
        self._undo = ExitStack()
        names = dict(model.named_parameters())
        for name, part in self.parts.items():
            if part.region.local_shape != tuple(names[name].shape):
                local = torch.empty(part.region.local_shape, dtype=names[name].dtype, device="meta")
                own = nn.Parameter(local, requires_grad=names[name].requires_grad)
                replace_parameter(model, names[name], own, self._undo)
        for layer in plan.layers:
            if (made := self._replacement_of(layer)) is not None:
                old, tables = model.get_submodule(layer.module), (module._modules for module in model.modules())
                _replace_in(tables, old, made.train(old.training), old, self._undo)
        self._patch()
        if self.shares is not None:
            self._share_sequence(self.shares)

    def restore(self) -> None:
        """Restore the model's own modules and attributes. Divided parameters are then whole and on the meta device."""
        self._undo.close()

    def _replacement_of(self, layer: LayerPlan) -> nn.Module | None:
        module: Any = self._model.get_submodule(layer.module)
        exchange, index, style = self._exchange, self._exchange.index, layer.style
        if style is Style.EXPERTS:
            self._wrap(module, layers.run_sharded_experts, exchange)
        elif style is Style.LATENT:
            attention: Any = self._model.get_submodule(layer.parent)
            self._wrap(module, layers.project_latent, attention.kv_lora_rank, exchange)
        elif style is Style.EMBEDDING:
            # The lookup takes local token numbers, as it took global ones before.
            (tokens,), padding = layer.shares[index], module.padding_idx
            owned = padding is not None and tokens.start <= padding < tokens.end
            self._set(module, "padding_idx", padding - tokens.start if owned else None)
            self._set(module, "num_embeddings", tokens.length)
            self._wrap(module, layers.lookup_sharded_embedding, tokens, exchange)
        elif style is Style.NORMS:
            adapted, _, adapter = layer.module.partition(".lora_magnitude_vector.")
            around: Any = self._model.get_submodule(adapted)
            self._set(module, "get_weight_norm", partial(layers.norms_over_ranks, around, adapter, exchange))
        elif style is Style.HEAD:
            return layers.ColumnParallelLinear(module, SharedInput(exchange), sizes=layer.sizes)
        if style in (*WHOLE, Style.EXPERTS, Style.EMBEDDING, Style.EMBEDDING_FEATURES):
            return None
        # Modules beside experts get the whole sequence, not a share, since the router's losses are not sums over tokens.
        on_shares = self.plan.in_block(layer.module) and not self.plan.in_experts(layer.module)
        shares = self.shares if on_shares else None
        if style in (Style.ROW, Style.ROW_SPLIT):
            source = self._sources.get(layer.parent)
            splits = layer.sizes if style is Style.ROW_SPLIT else None
            return layers.RowParallelLinear(
                module, exchange, shares=shares, randomness=self._randomness, source=source, splits=splits
            )
        gathered = layer.parent in self._whole_sequence
        source = self._sources.setdefault(layer.parent, SharedInput(exchange, None if gathered else shares))
        if style is Style.COLUMN_GATHERED:
            return layers.ColumnParallelLinear(module, source, sizes=layer.sizes)
        rows = layer.shares[index] if style is Style.SLICED else None
        return layers.ColumnParallelLinear(module, source, rows=rows, randomness=self._randomness)

    def _set(self, module: nn.Module, attribute: str, value: Any) -> None:
        self._undo.callback(override(module, attribute, value))

    def _wrap(self, module: nn.Module, run: _Forward, /, *given: Any) -> None:
        """Have `run(forward, *given, ...)` run in place of a module's `forward`."""
        self._set(module, "forward", partial(run, module.forward, *given))

    def _patch(self) -> None:
        index = self._exchange.index
        for name, path, values in self.plan.patches:
            module: Any = self._model.get_submodule(name)
            attribute, _, inner = path.partition(".")
            value = values[index]
            if inner:
                value = copy.copy(getattr(module, attribute))
                setattr(value, inner, values[index])
            self._set(module, attribute, value)
        for attention, division in self.plan.attentions.items():
            module = self._model.get_submodule(attention)
            own, taken = division.shares[index].queries, inspect.signature(module.forward).parameters
            if _READS_WIDTH.search(forward_source(module)):
                width = own.length * getattr(module, "head_dim", 0)
                self._wrap(module, _with_narrow_input, self._sources[attention], width)
            for name in {"alibi", "position_bias"} & taken.keys():
                self._wrap(module, _biased, list(taken), name, own, division.queries)

    def _share_sequence(self, shares: SequenceShares) -> None:
        """Wrap the forwards of blocks, attentions and blocks of experts, which take hidden states [batch, sequence, hidden] first,
        or as `hidden_states`. Attentions and blocks of experts run on the whole sequence, since their code reads its length."""
        for stack in self.plan.stacks:
            for name in stack:
                block = self._model.get_submodule(name)
                self._wrap(block, _run_block, block, shares, name == stack[0], name == stack[-1])
        rows = [layer.module for layer in self.plan.layers if layer.style in (Style.ROW, Style.ROW_SPLIT)]
        for name in self._whole_sequence:
            reader = self._model.get_submodule(name)
            # Such as linear attention, whose outputs are all gathered.
            gathered = name not in self.plan.attentions and not any(inside(row, (name,)) for row in rows)
            self._wrap(reader, _run_on_whole_sequence, shares, None if gathered else self._sources[name])
        for layer in self.plan.layers:
            if layer.style is Style.EXPERTS:
                module = self._model.get_submodule(layer.parent)
                if float(getattr(module, "jitter_noise", 0.0) or 0.0) > 0:
                    noise = "noise of a router cannot be drawn where the sequence is divided"
                    raise LayoutError(f"{layer.parent}: {noise}; set parallel.sequence: false")
                self._wrap(module, _run_on_whole_sequence, shares, None)


def _with_narrow_input(forward: _Forward, source: SharedInput, width: int, /, *args: Any, **kwargs: Any) -> Any:
    """Run an attention that reads its heads' width from its input's shape, on an input cut to `width`; layers read all of it."""
    args, kwargs = _map_hidden_states(args, kwargs, lambda x: source.narrow_for_shape(x, width))
    return forward(*args, **kwargs)


def _biased(run: _Forward, names: list[str], name: str, own: Interval, heads: int, /, *args: Any, **kwargs: Any) -> Any:
    """Run an attention on this rank's heads of its argument `name`: position biases, or a mask, of all heads, with or without a
    batch. Those made by an attention of this rank have only its heads already. `names` are its arguments in order."""
    kwargs |= dict(zip(names, args, strict=False))
    biases, mask = kwargs.get(name), kwargs.get("attention_mask")
    if biases is not None and biases.shape[-3] % heads == 0:
        apart = biases.view(-1, heads, *biases.shape[-2:])[:, own.start : own.end]
        kwargs[name] = apart if biases.dim() == 4 else apart.flatten(0, 1)
        if mask is not None and mask.dim() == 4 and mask.shape[1] == heads > 1:
            kwargs["attention_mask"] = mask[:, own.start : own.end]
    return run(**kwargs)


def _has_dropout(model: nn.Module) -> bool:
    rates = [module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    own = chain.from_iterable(vars(module).items() for module in model.modules())
    rates += [value for name, value in own if ("dropout" in name or "pdrop" in name) and isinstance(value, float)]
    return any(rate > 0 for rate in rates)


def check_blocks(model: nn.Module, plan: TensorPlan) -> None:
    """Raise `LayoutError` if a module that may mix tokens would get a share of the sequence only: when blocks are unknown, have no
    divided attention, or hold a matrix that is not in the plan."""
    off = "set parallel.sequence: false"
    if not plan.stacks:
        kinds = dict.fromkeys(type(block).__name__ for block in block_modules(model))
        blocks = f"the plan divides no layer of its blocks ({some(kinds)})" if kinds else "it has no repeated blocks"
        raise LayoutError(f"{type(model).__name__}: {blocks}, so that the sequence cannot be shared out; {off}")
    known = (*plan.whole_sequence_modules(), *(layer.module for layer in plan.layers if layer.style not in WHOLE))
    for block in (name for stack in plan.stacks for name in stack):
        if not any(inside(reader, (block,)) for reader in plan.whole_sequence_modules()):
            raise LayoutError(f"{block} has no attention divided among ranks, so it needs the whole sequence; {off}")
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            is_known = plan.in_experts(name) or inside(f"{name}.", known)
            if not is_known and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                why = f"{name} ({type(module).__name__}) may need the whole sequence, as the plan does not know it"
                raise LayoutError(f"{why}; {off}")


def _run_block(
    forward: _Forward, block: nn.Module, shares: SequenceShares, first: bool, last: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a block on a share of the sequence, with this rank's dropout; a stack's `first` block splits, the `last` one gathers."""
    if first and shares.decide(_hidden(args, kwargs).shape[1]):
        args, kwargs = _map_hidden_states(args, kwargs, lambda x: autograd_collectives.split(x, 1, shares.exchange))
    if not shares.active:
        return forward(*args, **kwargs)
    # Without dropout nothing is drawn, and sampling continues with the random numbers of a single process.
    with shares.randomness.sharded() if shares.randomness is not None and block.training else nullcontext():
        output = forward(*args, **kwargs)
    return _map_first(output, lambda x: autograd_collectives.all_gather(x, 1, shares.exchange)) if last else output


def _run_on_whole_sequence(
    forward: _Forward, shares: SequenceShares, source: SharedInput | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Gather the shares of the sequence and run a module's `forward` on it: of an attention, whose projections read it as `source`
    and whose output projection divides it again, or without `source` of experts or linear attention, whose output is split."""
    if not shares.active:
        return forward(*args, **kwargs)

    def gathered(share: torch.Tensor) -> torch.Tensor:
        whole = autograd_collectives.all_gather(share, 1, shares.exchange)
        if source is not None:
            source.gathered = whole, share
        return whole

    args, kwargs = _map_hidden_states(args, kwargs, gathered)
    if source is not None:
        try:
            return forward(*args, **kwargs)
        finally:
            source.forget()
    shape = _hidden(args, kwargs).shape

    def shared(out: torch.Tensor) -> torch.Tensor:
        own = autograd_collectives.split(out.view(shape), 1, shares.exchange)
        return own if out.dim() == len(shape) else own.flatten(0, 1)

    return _map_first(forward(*args, **kwargs), shared)


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    value = args[0] if args else kwargs.get(_HIDDEN)
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        why = "the first argument of a block is not hidden states [batch, sequence, hidden]"
        raise LayoutError(f"{why}, so the sequence cannot be shared out; set parallel.sequence: false")
    return value


def _map_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    changed = change(_hidden(args, kwargs))
    return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, _HIDDEN: changed})


def _map_first(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to an output tensor, or to the first element of a tuple or list."""
    if isinstance(output, torch.Tensor):
        return change(output)
    first, *rest = output
    return type(output)((change(first), *rest))
