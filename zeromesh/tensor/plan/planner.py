"""Plans the division of a model's layers among the ranks of the tensor axis. Pure: nothing is changed or moved.

Rules come from the user, from a table, and from the model: its `tp_plan` of transformers, or without one the shapes of its layers.
The first rule that matches a module counts. Rules name styles of `Style`, which transformers has too, and:

    packed_colwise                   as colwise, for two projections in one
    qkv_stacked, qkv_by_head         as colwise, for queries, keys and values in one, in this order or head by head
    rowwise_heads                    as rowwise, after an attention that is a sibling module
    replicate                        whole on all ranks

By their shapes are recognised, in the blocks of a model:

    attention   q, k and v of one module, or all three in one layer; what follows takes as many inputs as queries have outputs
    MLP         up, of the width that passes through the block, or several of them or two in one; down, from there back to it

A shape tells how a layer may be divided, not what the surrounding code computes. So a recognised plan is first tried on a small
copy of the model (`trainer/models/tensor_trial.py`), and refused if a module computes something else."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import translate
from itertools import chain
from typing import Any

from torch import nn

from zeromesh.errors import LayoutError, some, summary
from zeromesh.flat.layout import ParameterPart, Region
from zeromesh.intervals import Interval, balanced, grouped
from zeromesh.tensor.plan import attention_split, layer_plan
from zeromesh.tensor.plan.attention_split import AttentionDivision, forward_source, intermediate_dims, is_transposed
from zeromesh.tensor.plan.layer_plan import WHOLE, LayerPlan, Style, TensorPlan, inside
from zeromesh.units.plan import block_modules, embedding_of, without_adapters

_SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_STYLES = (
    *(style.value for style in Style if style not in (Style.SLICED, Style.HEAD, Style.NORMS)),
    *("packed_colwise", "qkv_stacked", "qkv_by_head", "qkv_falcon", "rowwise_heads", "replicate", *_SYNONYMS),
)
_NORM = re.compile(r"(q|k|v|query|key|value)_?(layer)?_?norm")
_OF_HEADS = re.compile(r"(q|k|v|query|key|value)_embed(s|dings?)?")
_ACTIVATION = re.compile(r"act(ivation)?(_fn)?")
_SCALED = re.compile(
    r"def forward\(self, (\w+)[^)]*\)[^:]*:\s+return super\(\)\.forward\(\1\) \* self\.\w+(\.to\(self\.weight\.dtype\))?"
)
_QUERIES = ("q_proj", "q_b_proj", "q_lin", "query", "q")
_KEYS = ("k_proj", "v_proj", "kv_b_proj", "k_lin", "v_lin", "key", "value", "k", "v")
_FUSED = ("query_key_value", "qkv_proj", "qkv", "c_attn", "Wqkv")
"""The names of layers that project queries, keys or values, or (`_FUSED`) all three, which shapes alone cannot tell apart."""
_BY_SHAPE = ("phi3",)
"""Model types divided by their layers' shapes, as transformers' plan gathers outputs that the next layer could take divided."""
_EXTRA_RULES: Mapping[str, Mapping[str, str]] = {
    "deepseek_v3": {
        **dict.fromkeys(("*.self_attn.q_proj", "*.self_attn.q_b_proj", "*.self_attn.kv_b_proj"), "colwise"),
        "*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "*.self_attn.o_proj": "rowwise",
    }
}
"""The rules that transformers' plans lack, by `config.model_type`: name patterns with their styles."""


def plan_tensor(model: nn.Module, size: int, rules: Mapping[str, str] | None = None) -> TensorPlan:
    """Plan how to divide `model`, which may be on the meta device, among `size` ranks. `rules` are the user's, FQN pattern ->
    style, which take precedence over all others. Raises `LayoutError` when there is no plan for the model; when a rule of the user
    matches nothing or has an unknown style; when a module cannot be divided so (more ranks than heads, say)."""
    base, prefix = without_adapters(model)
    planner = _Planner(base, size)
    planner.choose(rules or {})
    planner.embeddings()
    planner.attention_layers()
    planner.parameters_of_attentions()
    planner.other_layers()
    planner.check_ties()
    return layer_plan.with_adapters(planner.plan(), base, prefix)


class _Planner:
    """Builds a `TensorPlan` step by step; `styles` has the style of each module that is not in `layers` yet, by FQN."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.model, self.size, self.modules = model, size, layer_plan.base_modules(model)
        self.names = {id(module): name for name, module in model.named_modules() if name in self.modules}
        """The name of each module, and of PEFT's layer around one."""
        self.styles: dict[str, str] = {}
        self.layers: dict[str, LayerPlan] = {}
        self.attentions: dict[str, AttentionDivision] = {}
        self.patches: list[tuple[str, str, tuple[int, ...]]] = []
        self.notes: list[str] = []
        self.user_rules: dict[str, str] = {}

    @contextmanager
    def _planning(self, name: str) -> Iterator[None]:
        """Add the user's rule and the class of the module to errors inside the block, if a user's rule names the module."""
        try:
            yield
        except (LayoutError, AttributeError, TypeError, IndexError, ArithmeticError) as error:
            module, rule = self.modules.get(name), self.user_rules.get(name)
            if rule is None or module is None:
                raise
            held = some([f"{leaf} {list(each.shape)}" for leaf, each in module.named_parameters()]) or "no parameters"
            kind = type(module).__name__
            raise LayoutError(f"{rule} does not fit {name}, a {kind} with {held} ({summary(error)})") from error

    def choose(self, rules: Mapping[str, str]) -> None:
        config = getattr(self.model, "config", None)
        kind = str(getattr(config, "model_type", ""))
        builtin, by_shape = _EXTRA_RULES.get(kind, {}), divides_by_shape(self.model)
        library: Mapping[str, str] = {} if by_shape else (getattr(self.model, "tp_plan", None) or {})
        self.styles = recognise_styles(self.model) if by_shape else {}
        if not rules and not builtin and not library and not self.styles:
            parts = (child for block in block_modules(self.model) or [self.model] for child in block.children())
            found = [each for each in parts if any(parameter.dim() > 1 for parameter in each.parameters())]
            kinds = (f"{_without_numbers([self.names[id(each)]])} ({type(each).__name__})" for each in found)
            held = some(dict.fromkeys(kinds)) or "nothing that is known"
            why = f"there is no tensor-parallel plan for {type(self.model).__name__} (model_type {kind or 'unknown'})"
            cure = "give rules (pattern of module names -> style), or set parallel.tensor: 1"
            raise LayoutError(f"{why}, whose blocks hold {held}; {cure}")
        if getattr(config, "slow_but_exact", False):
            raise LayoutError("slow_but_exact takes weights apart by itself; set it to false, or parallel.tensor: 1")
        names = [*self.modules, *dict(self.model.named_parameters(remove_duplicate=False))]
        patterns = [(re.escape(pattern).replace(r"\*", r"[^.]+"), style, "") for pattern, style in library.items()]
        patterns += [(translate(pattern), style, "") for pattern, style in builtin.items()]
        patterns += [(translate(each), style, f"tensor-parallel rule {each!r}: ") for each, style in rules.items()]
        for expression, style, given in patterns:
            matched = [name for name in names if re.fullmatch(expression, name)]
            self.styles.update(dict.fromkeys(matched, _SYNONYMS.get(style, style)))
            if given and style not in _STYLES:
                raise LayoutError(f"{given}there is no style {style!r}; styles are {', '.join(_STYLES)}")
            if given and not matched:
                like = some([name for name in self.modules if name.count(".") > 1] or [*self.modules], 4)
                why = f"{given}{style} matches no module of {type(self.model).__name__}"
                raise LayoutError(f"{why}; its modules are named like {like}")
            self.user_rules.update(dict.fromkeys(matched if given else (), f"{given}{style}"))

    def embeddings(self) -> None:
        """Divide the input and output embedding by tokens, unless a rule says `replicate`."""
        found_embeddings = embedding_of(self.model, "input"), embedding_of(self.model, "output")
        for found, style in zip(found_embeddings, (Style.EMBEDDING, Style.HEAD), strict=True):
            name = self.names.get(id(found), "")
            if found is None or not name or self.styles.pop(name, "") == "replicate":
                continue
            target: Any = self.modules[name]
            if layer_plan.is_wrapped(found):
                self.notes.append(f"{name} is whole on all tensor ranks, as it has adapters")
            elif _divisible_embedding(target) or is_transposed(target) is False:
                self._divide(name, style, target.weight.shape[0])
            else:
                self.notes.append(f"{name} ({type(target).__name__}) is whole on all tensor ranks")

    def _add(self, name: str, style: Style, shares: attention_split.Shares = ()) -> None:
        self.layers[name] = LayerPlan(module=name, style=style, shares=shares)

    def _divide(self, name: str, style: Style, length: int) -> None:
        self._add(name, style, tuple((interval,) for interval in balanced(length, self.size)))

    def attention_layers(self) -> None:
        """Divide the projections of queries, keys and values, and the output projection, by heads."""
        for name, style in list(self.styles.items()):
            parent, _, leaf = name.rpartition(".")
            fused = style in ("qkv_stacked", "qkv_by_head", "qkv_falcon") or (style == "colwise" and leaf in _FUSED)
            if not fused and not (style == "colwise" and leaf in (*_QUERIES, *_KEYS)):
                continue
            del self.styles[name]
            with self._planning(name):
                features, _ = self._linear(name)
                attention = self.modules[parent]
                if parent not in self.attentions:
                    division = self.attentions[parent] = attention_split.division_of(attention, parent, self.size)
                    patches = division.patches(attention, stacked=style == "qkv_stacked")
                    self.patches += [(parent, attribute, values) for attribute, values in patches]
                division = self.attentions[parent]
                if fused:
                    grouped = getattr(attention, "new_decoder_architecture", False)
                    one_key = style == "qkv_falcon" and getattr(attention, "multi_query", False) and not grouped
                    shares = division.fused(name, features, stacked=style == "qkv_stacked" or one_key)
                    self._add(name, Style.COLUMN if division.exclusive else Style.SLICED, shares)
                else:
                    self._add(name, Style.COLUMN, division.by_head(name, features, keys=leaf in _KEYS))
        for parent in self.attentions:
            for leaf in (*_QUERIES, *_KEYS):
                name = f"{parent}.{leaf}"
                if name in self.modules and name not in self.layers:
                    cure = "give all of them the same style"
                    raise LayoutError(f"{name} would be whole beside projections of {parent} that are divided; {cure}")

    def parameters_of_attentions(self) -> None:
        """Plan the norms of queries and keys, and attention sinks; an attention with other parameters of its own is refused."""
        for parent in self.attentions:
            attention = self.modules[parent]
            if whole := [each for each in inspect.signature(attention.forward).parameters if _OF_HEADS.fullmatch(each)]:
                raise LayoutError(f"{parent}: its argument {whole[0]} is of all heads; set parallel.tensor: 1")
            for leaf, child in attention.named_children():
                name = f"{parent}.{leaf}"
                if _NORM.fullmatch(leaf) and name not in self.styles and any(True for _ in child.parameters()):
                    self.styles[name] = "replicated_with_grad_allreduce"
            for leaf, parameter in attention.named_parameters(recurse=False):
                if self.styles.get(f"{parent}.{leaf.removesuffix('_bias')}") == "rowwise":
                    continue  # It is added after the sum, as the bias of a row layer.
                if leaf != "sinks" or tuple(parameter.shape) != (self.attentions[parent].queries,):
                    why = f"{parent}: nothing says how its parameter {leaf} is divided among tensor ranks"
                    raise LayoutError(f"{why}; set parallel.tensor: 1")
                self.styles.pop(f"{parent}.{leaf}", None)
                self._add(parent, Style.LOCAL, self.attentions[parent].by_head(parent, parameter.shape[0]))

    def other_layers(self) -> None:
        """Plan the remaining modules of `styles`, and activation functions with parameters, which run on divided features."""
        experts = [name for name, style in self.styles.items() if style == "moe_tp_experts"]
        for name, style in self.styles.items():
            if style == "moe_identity_expert":
                raise LayoutError(f"{name}: every rank would add what this expert passes on; set parallel.tensor: 1")
            of_sinks = style == "local_params" and name in self.attentions
            if style != "replicate" and not of_sinks and name.rpartition(".")[0] not in experts:
                with self._planning(name):
                    self._plan_other(name, style)
        for parent in {layer.parent for layer in self.layers.values() if layer.style is Style.COLUMN}:
            for leaf, child in self.modules[parent].named_children():
                name = f"{parent}.{leaf}"
                if _ACTIVATION.fullmatch(leaf) and any(True for _ in child.parameters()) and name not in self.layers:
                    self._add(name, Style.PARTIAL)

    def _plan_other(self, name: str, style: str) -> None:
        module: Any = self.modules.get(name)
        if module is None:
            raise LayoutError(f"{name}: style {style} of a parameter alone is not known; give its module another one")
        if style == "moe_tp_experts":
            held = {leaf: tuple(parameter.shape) for leaf, parameter in module.named_parameters()}
            if any(leaf.startswith("base_layer.") for leaf in held):
                why = f"{name}: parallel.tensor does not divide experts that adapters change (target_parameters)"
                raise LayoutError(f"{why}; set parallel.tensor: 1, and spread them over ranks by parallel.expert")
            dims = intermediate_dims(held) if getattr(module, "is_concatenated", True) else None
            if dims is None:
                shapes = ", ".join(f"{leaf} {list(shape)}" for leaf, shape in held.items())
                known = "gate_up_proj [experts, 2 x intermediate, hidden] with down_proj [experts, hidden, intermediate]"
                why = f"{name}: experts with parameters {shapes} cannot be divided"
                raise LayoutError(f"{why}; known are {known}, or both transposed")
            self._divide(name, Style.EXPERTS, held["down_proj"][dims["down_proj"]])
        elif style == "replicated_with_grad_allreduce":
            self._add(name, Style.PARTIAL)
        elif style == "embedding_heads" and isinstance(module, nn.Embedding):
            self._add(name, Style.EMBEDDING_FEATURES, self._attention_around(name).by_head(name, module.weight.shape[1]))
        elif style not in ("embedding_rowwise", "embedding_heads"):
            self._plain_linear(name, style)
        elif name not in self.layers:
            if not _divisible_embedding(module):
                raise LayoutError(f"{name}: a {type(module).__name__} cannot be divided by tokens, or is no embedding")
            self._divide(name, Style.EMBEDDING, module.weight.shape[0])

    def _plain_linear(self, name: str, style: str) -> None:
        outputs, inputs = self._linear(name)
        parent = name.rpartition(".")[0]
        attention = self.attentions.get(parent)
        if style == "mla_kv_a_proj":
            if not hasattr(self.modules[parent], "kv_lora_rank"):
                raise LayoutError(f"{name}: what is around it has no kv_lora_rank, the number of its latent outputs")
            self._add(name, Style.LATENT)
        elif style == "colwise" and attention is not None:
            rows = [row for row, of in self.styles.items() if of == "rowwise" and row.rpartition(".")[0] == parent]
            # Only layers of the query heads can have these outputs, such as gates.
            if outputs not in (attention.queries, *(self._linear(row)[1] for row in rows)):
                raise LayoutError(f"{name}: nothing assigns its {outputs} outputs to heads; set parallel.tensor: 1")
            self._add(name, Style.COLUMN, attention.by_head(name, outputs))
        elif style == "packed_colwise":
            half = balanced(outputs // 2, self.size)
            second = (interval.after(-(outputs // 2)) for interval in half)
            self._add(name, Style.COLUMN, tuple(zip(half, second, strict=True)))
        elif style == "rowwise_heads" or (style == "rowwise" and attention is not None):
            self._add(name, Style.ROW, (attention or self._attention_around(name)).by_head(name, inputs))
        elif style in ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"):
            self._divide(name, Style(style), outputs if style.startswith("colwise") else inputs)
        else:
            cure = "see zeromesh/tensor/plan/planner.py for those that are"
            raise LayoutError(f"{name}: tensor-parallel style {style!r} is not known; {cure}")

    def _attention_around(self, name: str) -> AttentionDivision:
        around = name
        while around := around.rpartition(".")[0]:
            if found := [each for one, each in self.attentions.items() if inside(f"{one}.", (around,))]:
                return found[0]
        raise LayoutError(f"{name}: there is no attention around it whose heads it could be divided by")

    def _linear(self, name: str) -> tuple[int, int]:
        module = self.modules.get(name)
        if module is None or is_transposed(module) is None:
            kind = "parameter" if module is None else type(module).__name__
            raise LayoutError(f"{name}: a {kind} cannot be divided; allowed are torch.nn.Linear and GPT-2's Conv1D")
        return attention_split.linear_sizes(module)

    def check_ties(self) -> None:
        """Check that modules with a tied parameter divide it alike; otherwise embeddings stay whole."""
        own = ((name, module.parameters(recurse=False)) for name, module in self.modules.items())
        for names in grouped((id(parameter), name) for name, parameters in own for parameter in parameters).values():
            planned = [self.layers.get(name) for name in names]
            shares = {layer.shares for layer in planned if layer is not None}
            bearers = [n for n in names if n in self.layers or not any(other.startswith(f"{n}.") for other in names)]
            if not shares or (len(shares) == 1 and all(name in self.layers for name in bearers)):
                continue
            for name in names:
                if (layer := self.layers.pop(name, None)) and layer.style not in (Style.EMBEDDING, Style.HEAD):
                    raise LayoutError(f"{' and '.join(names)} hold one parameter, which they would divide differently")
            self.notes.append(f"{' and '.join(names)} share a parameter that not all of them can divide; it is whole on all ranks")

    def plan(self) -> TensorPlan:
        order = {name: number for number, name in enumerate(self.modules)}
        layers = tuple(sorted(self.layers.values(), key=lambda layer: order[layer.module]))
        whole = [
            name
            for name, module in self.modules.items()
            if not inside(f"{name}.", (layer.module for layer in layers if layer.style not in WHOLE))
            and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        ]
        if whole:
            self.notes.append(f"whole on all tensor ranks: {_without_numbers(whole)}")
        if sliced := [layer.module for layer in layers if layer.style is Style.SLICED]:
            shown = f"{_without_numbers(sliced)}, since ranks share key-value heads"
            self.notes.append(f"whole on all tensor ranks, though each computes its part alone: {shown}")
        names = [self.names[id(block)] for block in block_modules(self.model)]
        stacks = grouped((name.rpartition(".")[0], name) for name in names)
        divided = [layer.module for layer in layers if layer.style not in (Style.EMBEDDING, Style.HEAD)]
        return TensorPlan(
            size=self.size,
            layers=layers,
            patches=tuple(self.patches),
            attentions=self.attentions,
            stacks=tuple(tuple(each) for each in stacks.values() if any(inside(name, each) for name in divided)),
            notes=tuple(self.notes),
        )


def _divisible_embedding(module: nn.Module) -> bool:
    """Return True for an embedding whose rows may lie on several ranks, since it returns them unchanged or scaled."""
    if not isinstance(module, nn.Embedding) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    plain = type(module).forward is nn.Embedding.forward or _SCALED.fullmatch(forward_source(module).strip())
    special = "forward" in vars(module) or module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    return bool(plain) and not special


def _without_numbers(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))


def parts_of(model: nn.Module, plan: TensorPlan, rank: int, *, sequence: bool) -> Mapping[str, ParameterPart]:
    """Return a rank's part of each parameter of `model` that is divided or has partial gradients, by its first FQN. All others are
    whole on every rank, with equal gradients. `sequence`: blocks pass on shares of the sequence. Raises `LayoutError` when modules
    divide a parameter that they share in different ways."""
    layers = {layer.module: layer for layer in plan.layers}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, ParameterPart] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        module, _, leaf = full.rpartition(".")
        name, shape, layer = first[id(parameter)], tuple(parameter.shape), layers.get(module)
        part = None if layer is None else _part(layer, model.get_submodule(module), leaf, shape, rank)
        if part is None and _partial(plan, full, sequence):
            part = ParameterPart(region=Region.whole(shape), holders=tuple(range(plan.size)), partial=True)
        if part is not None and found.setdefault(name, part) != part:
            raise LayoutError(f"{name} and {full} are one parameter, which two modules divide differently")
    return found


def _part(layer: LayerPlan, module: nn.Module, leaf: str, shape: tuple[int, ...], rank: int) -> ParameterPart | None:
    if layer.style in (Style.PARTIAL, Style.LATENT, Style.SLICED, Style.NORMS):
        return None
    transposed = bool(is_transposed(module))
    if layer.style is Style.EXPERTS:
        dim = (intermediate_dims({name: tuple(held.shape) for name, held in module.named_parameters()}) or {})[leaf]
    elif layer.style in (Style.ROW, Style.ROW_SPLIT):
        if leaf == "bias":
            return None
        dim = 0 if transposed else 1
    else:
        dim = 1 if layer.style is Style.EMBEDDING_FEATURES or (transposed and leaf != "bias") else 0
    intervals = layer.shares[rank]
    if layer.style is Style.EXPERTS and leaf == "gate_up_proj":
        (own,), half = intervals, shape[dim] // 2
        intervals = (own, own.after(-half))
    dims = tuple(intervals if number == dim else (Interval(start=0, end=size),) for number, size in enumerate(shape))
    holders = tuple(other for other, share in enumerate(layer.shares) if share == layer.shares[rank])
    return ParameterPart(region=Region(shape=shape, dims=dims), holders=holders, partial=len(holders) > 1)


def _partial(plan: TensorPlan, full: str, sequence: bool) -> bool:
    """Return True if a whole parameter is used on divided activations, or on shares of the `sequence`."""

    def of(*styles: Style) -> list[str]:
        return [layer.module for layer in plan.layers if layer.style in styles]

    if inside(full, of(Style.PARTIAL, Style.SLICED)):
        return True
    if not sequence or not plan.in_block(full) or plan.in_experts(full):
        return False
    rows = of(Style.ROW, Style.ROW_SPLIT)
    return inside(full, rows) or full.removesuffix("_bias") in rows or not inside(full, plan.whole_sequence_modules())


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
    attentions = {name.rpartition(".")[0] for name in styles if name.rpartition(".")[2] in _QUERIES}
    biased = [name for name in attentions if "position_bias" in inspect.signature(modules[name].forward).parameters]
    heads = {attention_split.count_heads(modules[name]) for name in biased}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and module.embedding_dim in heads and name not in styles:
            styles[name] = "replicated_with_grad_allreduce"  # Each rank uses the biases of its own heads alone.
    return styles


def _block_styles(block: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    modules = dict(block.named_modules())
    linear = {name: attention_split.linear_sizes(m) for name, m in modules.items() if is_transposed(m) is not None}
    order, left = list(linear), dict(linear)
    width = 0
    for parent, attention in modules.items():
        inside = f"{parent}." if parent else ""
        own = {name: leaf for leaf, _ in attention.named_children() if (name := f"{inside}{leaf}") in left}
        fused = [name for name, leaf in own.items() if leaf in _FUSED]
        queries = [name for name, leaf in own.items() if leaf in _QUERIES]
        keys = [name for name, leaf in own.items() if leaf in _KEYS]
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
            if isinstance(child, nn.Embedding) and child.embedding_dim == attention_split.count_heads(attention):
                yield f"{prefix}.{inside}{leaf}", "embedding_heads"
        for name in columns:
            left.pop(name, None)
    yield from ((f"{prefix}.{name}", style) for name, style in _mlp(modules, left, width))


def _mlp(parts: Mapping[str, nn.Module], sizes: Mapping[str, tuple[int, int]], width: int) -> Iterator[tuple[str, str]]:
    """Yield the layers of MLPs: those that widen the hidden states of a block, and the following one that narrows them again."""

    def is_plain(name: str) -> bool:
        # Recurrent and convolutional mixers have other matrices beside the layers.
        parent = name.rpartition(".")[0]
        held = [each for each in parts[parent].children() if is_transposed(each) is None and not [*each.children()]]
        matrices = any(parameter.dim() > 1 for each in held for parameter in each.parameters())
        return not parent or not (matrices or [*parts[parent].parameters(recurse=False)])

    ups: list[str] = []
    for name, (outputs, inputs) in sizes.items():
        wide = [up for up in ups if sizes[up][0] in (inputs, 2 * inputs) and sizes[up][1] == outputs]
        if wide and all(map(is_plain, (*wide, name))):
            for up in wide:
                yield up, "colwise" if sizes[up][0] == inputs else "packed_colwise"
            yield name, "rowwise"
            ups = []
        elif not width or inputs == width:
            ups.append(name)
