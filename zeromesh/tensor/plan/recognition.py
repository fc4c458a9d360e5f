"""Recognises plain attention and MLPs in the blocks of a model by their shapes, and names a style for each of their layers.

    attention   q, k and v of one module, or all three in one layer; what follows takes as many inputs as queries have outputs
    MLP         up, of the width that passes through the block, or several of them or two in one; down, from there back to it

A shape tells how a layer may be divided, not what the surrounding code computes. So a recognised plan is first tried on a small
copy of the model (`trainer/models/tensor_trial.py`), and refused if a module computes something else."""

from collections.abc import Iterator, Mapping
from inspect import signature
from itertools import chain

from torch import nn

from zeromesh.tensor.plan.attention_split import count_heads, is_transposed, linear_sizes
from zeromesh.units.plan import block_modules

QUERIES = ("q_proj", "q_b_proj", "q_lin", "query", "q")
KEYS = ("k_proj", "v_proj", "kv_b_proj", "k_lin", "v_lin", "key", "value", "k", "v")
FUSED = ("query_key_value", "qkv_proj", "qkv", "c_attn", "Wqkv")
"""The names of layers that project queries, keys or values, or (`FUSED`) all three, which shapes alone cannot tell apart."""
_BY_SHAPE = ("phi3",)
"""Model types divided by their layers' shapes, as transformers' plan gathers outputs that the next layer could take divided."""
EXTRA_RULES: Mapping[str, Mapping[str, str]] = {
    "deepseek_v3": {
        **dict.fromkeys(("*.self_attn.q_proj", "*.self_attn.q_b_proj", "*.self_attn.kv_b_proj"), "colwise"),
        "*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "*.self_attn.o_proj": "rowwise",
    }
}
"""The rules that transformers' plans lack, by `config.model_type`: name patterns with their styles."""


def divides_by_shape(model: nn.Module) -> bool:
    """Return True for a transformers model whose `tp_plan` has no pattern for the layers of blocks, or gathers needlessly."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return bool(kind) and (kind in _BY_SHAPE or not any("*" in name for name in getattr(model, "tp_plan", None) or ()))


def recognise_styles(model: nn.Module) -> dict[str, str]:
    """Return the style of each layer of plain attention and of plain MLPs in the blocks of a model, by FQN."""
    modules = dict(model.named_modules())
    lists = (each for each in modules.values() if isinstance(each, nn.ModuleList))
    blocks = {id(each) for each in chain(block_modules(model), *(each.children() for each in lists))}
    # `block_modules` knows the blocks of one stack, so children of all lists count as blocks, but none inside another block.
    found = [name for name, module in modules.items() if id(module) in blocks]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    styles = dict(chain(*(_block_styles(modules[name], name) for name in outermost)))
    attentions = {name.rpartition(".")[0] for name in styles if name.rpartition(".")[2] in QUERIES}
    biased = [name for name in attentions if "position_bias" in signature(modules[name].forward).parameters]
    heads = {count_heads(modules[name]) for name in biased}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and module.embedding_dim in heads and name not in styles:
            styles[name] = "replicated_with_grad_allreduce"  # Each rank uses the biases of its own heads alone.
    return styles


def _block_styles(block: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    modules = dict(block.named_modules())
    linear = {name: linear_sizes(module) for name, module in modules.items() if is_transposed(module) is not None}
    order, left = list(linear), dict(linear)
    width = 0
    for parent, attention in modules.items():
        inside = f"{parent}." if parent else ""
        own = {name: leaf for leaf, _ in attention.named_children() if (name := f"{inside}{leaf}") in left}
        fused = [name for name, leaf in own.items() if leaf in FUSED]
        queries = [name for name, leaf in own.items() if leaf in QUERIES]
        keys = [name for name, leaf in own.items() if leaf in KEYS]
        if not fused and not (queries and keys):
            continue
        columns = fused or [*queries, *keys]
        width = linear[columns[0]][1]
        for name in fused:
            plain = "qkv_by_head" if own[name] == "query_key_value" else "qkv_stacked"
            yield f"{prefix}.{name}", "qkv_falcon" if hasattr(attention, "multi_query") else plain
        for name in queries + keys if not fused else ():
            yield f"{prefix}.{name}", "colwise"
        features = linear[queries[0]][0] if queries else width
        rest = [name for name in own if name not in columns and linear[name][1] == features]
        after = [name for name in order[order.index(columns[-1]) + 1 :] if linear[name] == (width, features)]
        if rest or after:
            row = (rest or after)[0]
            yield f"{prefix}.{row}", "rowwise" if rest else "rowwise_heads"
            columns = [*columns, row]
        for leaf, child in attention.named_children():
            if isinstance(child, nn.Embedding) and child.embedding_dim == count_heads(attention):
                yield f"{prefix}.{inside}{leaf}", "embedding_heads"
        for name in columns:
            left.pop(name, None)
    yield from ((f"{prefix}.{name}", style) for name, style in _mlp_styles(modules, left, width))


def _mlp_styles(
    modules: Mapping[str, nn.Module], linear: Mapping[str, tuple[int, int]], width: int
) -> Iterator[tuple[str, str]]:
    """Yield the layers of MLPs: those that widen the hidden states of a block, and the following one that narrows them again."""

    def is_plain(name: str) -> bool:
        # Recurrent and convolutional mixers have other matrices beside the layers.
        parent = name.rpartition(".")[0]
        held = [each for each in modules[parent].children() if is_transposed(each) is None and not [*each.children()]]
        matrices = any(parameter.dim() > 1 for each in held for parameter in each.parameters())
        return not parent or not (matrices or [*modules[parent].parameters(recurse=False)])

    ups: list[str] = []
    for name, (outputs, inputs) in linear.items():
        wide = [up for up in ups if linear[up][0] in (inputs, 2 * inputs) and linear[up][1] == outputs]
        if wide and all(map(is_plain, (*wide, name))):
            for up in wide:
                yield up, "colwise" if linear[up][0] == inputs else "packed_colwise"
            yield name, "rowwise"
            ups = []
        elif not width or inputs == width:
            ups.append(name)
