"""Experts that are spread over ranks, each whole on one of them: tokens travel to their experts and back.

    hidden states [tokens, hidden], numbers of experts and weights [tokens, chosen]
        pairs of token and expert, sorted by expert | counts to all ranks | rows to the ranks that have their experts
        the module's own forward on rows with one expert each, by weight 1
        rows back | times their weights, summed by token

The sort is stable and rows arrive in the order of ranks, so an expert sees tokens in the order of one process that has all samples.
No token is dropped, and none is padded (Gale et al. 2022, MegaBlocks: arXiv:2211.15841). Losses are divided by the number of all
targets, and gradients are sums, so that the gradient of an expert needs no factor."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import LayoutError, some
from zeromesh.flat.layout import ParameterPart, Region
from zeromesh.intervals import Interval
from zeromesh.overrides import override
from zeromesh.tensor.autograd_collectives import apply_collective, uncompiled
from zeromesh.tensor.parallelize_module import replace_parameter
from zeromesh.units.plan import COUNT, experts_of

_Forward = Callable[..., Tensor]


def spread_experts(
    model: nn.Module, exchange: Exchange, parts: Mapping[str, ParameterPart], undo: ExitStack, layer_ranks: int = 1
) -> dict[str, ParameterPart]:
    """Have `model` keep the experts of rank `exchange.index` of each module of experts, and send tokens to those of others. Returns
    the parts of all parameters; `parts` are those of tensor parallelism, of `layer_ranks` ranks. `undo` restores the model's own
    modules, with experts that are whole and on the meta device. Raises `LayoutError` for none, and for an indivisible number."""
    counts, found, divided = experts_of(model), dict(parts), set[nn.Parameter]()
    if not counts:
        why = f"{type(model).__name__} has no modules of experts whose forward takes hidden states, numbers of experts and weights"
        raise LayoutError(f"{why}; set parallel.expert: 1")
    if uneven := [name for name, count in counts.items() if count % exchange.size]:
        sizes = some([f"{name} has {counts[name]}" for name in uneven], 2)
        raise LayoutError(f"parallel.expert: {exchange.size} ranks cannot have equally many experts: {sizes}")

    def divide(name: str, parameter: nn.Parameter, dim: int, *own: Interval) -> None:
        """Leave this rank the intervals `own` of a parameter along `dim`, once if several modules have it."""
        if parameter in divided:
            return
        whole = Region.whole(tuple(parameter.shape))
        before = found.get(name) or ParameterPart(region=whole, holders=tuple(range(layer_ranks)))
        dims = (*before.region.dims[:dim], own, *before.region.dims[dim + 1 :])
        region = Region(shape=before.region.shape, dims=dims)
        found[name] = replace(before, region=region, experts=True)
        local = torch.empty(region.local_shape, dtype=parameter.dtype, device="meta")
        divided.add(made := nn.Parameter(local, requires_grad=parameter.requires_grad))
        replace_parameter(model, parameter, made, undo)

    for name, count in counts.items():
        module, each = model.get_submodule(name), count // exchange.size
        own = Interval(start=exchange.index * each, end=(exchange.index + 1) * each)
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            divide(f"{name}.{leaf}", parameter, 0, own)
        for path, adapter in adapters_of(model, module):
            if adapter._param_ndim == 2:  # PEFT has biases `[experts, .]` as one matrix, which has A whole and a row of B for each.
                for leaf, parameter in list(adapter.lora_B.named_parameters()):
                    divide(f"{path}.lora_B.{leaf}", parameter, 0, own)
                continue
            for leaf, parameter in list(adapter.named_parameters()):
                # PEFT has the rows of an expert side by side in A, and the columns of a row of B for all experts.
                if leaf.startswith("lora_A."):
                    rank = parameter.shape[0] // count
                    divide(f"{path}.{leaf}", parameter, 0, Interval(start=own.start * rank, end=own.end * rank))
                elif leaf.startswith("lora_B."):
                    columns = (own.after(-count * row) for row in range(parameter.shape[1] // count))
                    divide(f"{path}.{leaf}", parameter, 1, *columns)
            undo.callback(override(adapter, COUNT, each))
            if each == 1:
                undo.callback(override(adapter, "get_delta_weight", partial(_added_by, adapter)))
        undo.callback(override(module, COUNT, each))
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        run = partial(run_rows, module.forward, partial(_run_spread, exchange), count, names)
        undo.callback(override(module, "forward", run))
    return found


def adapters_of(model: nn.Module, experts: nn.Module) -> list[tuple[str, Any]]:
    """Return PEFT's adapters of parameters of a module of experts (`target_parameters`), by name."""
    wrappers: Iterator[tuple[str, Any]] = ((name, each) for name, each in model.named_modules() if hasattr(each, "parameter_name"))
    return [(name, each) for name, each in wrappers if each.get_base_layer() is experts]


def _added_by(adapter: Any, name: str) -> Any:
    """Return what an adapter adds to one expert `[1, ., .]`. PEFT takes it for a layer, and may add the transpose."""
    lhs, rhs, scaling = adapter.get_delta_factors(name)
    return lhs @ rhs * scaling


@uncompiled
def run_rows(
    forward: _Forward, run: Callable[..., Tensor], count: int, names: Sequence[str], /, *args: Tensor, **kwargs: Tensor
) -> Tensor:
    """Run `count` experts on hidden states `[..., hidden]` with numbers of experts and weights `[tokens, chosen]`, as rows that are
    sorted by expert. `run(call, rows, counts)` returns the results of rows `[rows, hidden]`, of which `counts` says how many each
    expert has; `call(rows, numbers)` is the module's own forward on rows with one expert each. Pairs with a number beyond the
    experts add nothing: their rows, the last ones, have no result."""
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden, chosen, weights = (given[name] for name in names)
    states, pairs = hidden.reshape(-1, hidden.shape[-1]), chosen.reshape(-1)
    order = pairs.sort(stable=True).indices

    def call(rows: Tensor, numbers: Tensor) -> Tensor:
        return forward(rows, numbers.unsqueeze(1), weights.new_ones(len(numbers), 1))

    back = run(call, states[order // chosen.shape[-1]], torch.bincount(pairs, minlength=count)[:count])
    placed = back.new_zeros(len(pairs), back.shape[-1]).index_copy(0, order[: len(back)], back)
    weighted = placed.view(*chosen.shape, placed.shape[-1]) * weights.unsqueeze(-1)
    return weighted.to(hidden.dtype).sum(-2).view(hidden.shape)


def _run_spread(exchange: Exchange, call: _Forward, rows: Tensor, own: Tensor) -> Tensor:
    """Send rows to the ranks with their experts, of which each has equally many, and bring the results back."""
    ranks, each = exchange.size, len(own) // exchange.size
    everyone = exchange.all_gather_async(own.view(1, -1), 0).wait()
    sent = everyone.view(ranks, ranks, each).sum(2).tolist()
    rows = _swap(rows[: sum(sent[exchange.index])], sent, exchange)
    arrived = everyone[:, exchange.index * each : (exchange.index + 1) * each].reshape(-1)
    numbers = torch.arange(each, device=arrived.device).repeat(ranks).repeat_interleave(arrived)
    spare = not len(numbers) and torch.is_grad_enabled()
    # Others exchange gradients in backward: a spare row ties `rows` to the graph, and gives experts and adapters gradients of zero.
    out = call(nn.functional.pad(rows, (0, 0, 0, 1), value=1), own.new_zeros(1))[:0] if spare else call(rows, numbers)
    return _swap(out, [list(row) for row in zip(*sent, strict=True)], exchange)


def _swap(rows: Tensor, counts: Sequence[Sequence[int]], exchange: Exchange) -> Tensor:
    """Give each rank its rows; `counts[i][j]` is the number that rank i gives to rank j, one after the other."""
    back, swap = [list(row) for row in zip(*counts, strict=True)], exchange.swap_rows_async
    return apply_collective(rows, None, lambda given: swap(given, counts).wait(), lambda grad: swap(grad, back).wait())
