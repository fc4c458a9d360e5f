"""Plans a model's units and parameter specs: which modules are gathered together (docs/architecture.md), and in which dtype."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from inspect import getattr_static, signature, unwrap
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from zeromesh.errors import LayoutError
from zeromesh.flat.encoded_shard import codec_of_part
from zeromesh.flat.layout import ParameterPart, ParameterSpec, StageCopies
from zeromesh.intervals import grouped
from zeromesh.options import EncodedWeights
from zeromesh.rng import kept_generators

ROOT = ""
COUNT = "num_experts"
"""The attribute of a module of experts that has their number, as transformers' modules read it."""
_LEAST_ELEMENTS = 4096  # the number of elements below which a collective costs its latency alone


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """A module whose parameters are gathered together, in the order of `named_parameters`."""

    module: str
    specs: tuple[ParameterSpec, ...]

    @property
    def name(self) -> str:
        return self.module or "root"

    def buckets(self) -> tuple[tuple[ParameterSpec, ...], ...]:
        """Group the specs with equal `bucket_key`, in the order in which each key first appears."""
        return tuple(map(tuple, grouped((spec.bucket_key, spec) for spec in self.specs).values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCuts:
    """The part of the whole model that tensor and pipeline parallelism leave on this rank."""

    parts: Mapping[str, ParameterPart] = field(default_factory=dict)
    """Parts under tensor parallelism, by the parameter's name in checkpoints."""
    copies: Mapping[str, StageCopies] = field(default_factory=dict)
    """Copies on other pipeline stages, by the parameter's name on this rank."""
    chunks: int = 1  # the number of model chunks (pipeline stages of this rank), which run one after the other
    chunk_of: Callable[[str], int] = lambda name: 0  # returns the chunk of a parameter, from its name on this rank


def plan_model(
    model: nn.Module,
    compute_dtype: torch.dtype,
    group_of: Callable[[str], int] = lambda fqn: 0,
    cuts: ModelCuts | None = None,
    weights: EncodedWeights | None = None,
) -> list[UnitPlan]:
    """Divide `model` into units: the root first, the others in module order. Every parameter is in exactly one. `group_of`
    returns a parameter's optimizer group from its name, `cuts` describes this rank's part of the whole model. The model's main
    dtype becomes `compute_dtype`; parameters of a wider dtype, those to be kept in fp32 and non-floats keep theirs. Frozen
    matrices of linear layers and experts are kept as `weights` encodes them. Raises `LayoutError` when the model has no
    parameters, or modules whose parameters cannot be gathered around their use."""
    cuts = cuts or ModelCuts()
    _require_supported_modules(model, compute_dtype)
    if not (names := names_by_parameter(model)):
        raise LayoutError(f"{type(model).__name__} has no parameters to train")
    _require_own_memory(names)
    dtypes = _dtypes(model, names, compute_dtype)
    codecs = {} if weights is None else dict.fromkeys(encoded_names(model, weights), weights.codec)
    experts, known = experts_of(model), dict[Any, bool]()
    ends = _names_of(model, "input") + _names_of(model, "output")
    modules = _outermost(model, _block_names(model) + ends)
    members: dict[str, list[ParameterSpec]] = {ROOT: [], **{module: [] for module in modules}}
    for parameter, fqns in names:
        copies = cuts.copies.get(fqns[0])
        name = fqns[0] if copies is None else copies.name
        owners = {next((each for each in modules if fqn.startswith(f"{each}.")), ROOT) for fqn in fqns}
        unit = owners.pop() if len(owners) == 1 else ROOT
        part, codec, owner = cuts.parts.get(name), codecs.get(fqns[0]), fqns[0].rpartition(".")[0]
        apart = owner in experts and not parameter.requires_grad and len(fqns) == 1
        members[unit].append(
            ParameterSpec(
                fqn=fqns[0],
                aliases=tuple(fqns[1:]),
                shape=tuple(parameter.shape),
                dtype=dtypes[fqns[0]],
                requires_grad=parameter.requires_grad,
                group=group_of(name),
                part=part,
                copies=copies,
                codec=codec if codec is None or part is None else codec_of_part(codec, part.region, name),
                experts=owner if apart and _adds_rows(model.get_submodule(owner), known) else "",
            )
        )
    least = _LEAST_ELEMENTS if cuts.chunks == 1 else 0  # Other chunks have no root.
    for module in [module for module in modules if sum(spec.numel for spec in members[module]) < least]:
        members[ROOT] += members.pop(module)
    return [UnitPlan(module=module, specs=tuple(specs)) for module, specs in members.items()]


def encoded_names(model: nn.Module, weights: EncodedWeights, *, of_experts: bool = True) -> set[str]:
    """Return the first names of the parameters that are encoded: frozen matrices of linear layers, but neither the output embedding
    nor what is tied to another parameter, as those that bitsandbytes and transformers replace; and, with `of_experts`, matrices of
    experts, `[experts, ., .]`, which these libraries keep in 16 bits."""
    heads, experts = _names_of(model, "output"), experts_of(model) if of_experts else {}

    def is_matrix(fqn: str, parameter: nn.Parameter) -> bool:
        name, _, leaf = fqn.rpartition(".")
        module = model.get_submodule(name)
        # A layer of torch, one that is divided over tensor ranks, or GPT-2's with a transposed weight.
        linear = hasattr(module, "in_features") or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
        return (linear and leaf == "weight" and name not in heads) or (name in experts and parameter.dim() == 3)

    return {
        fqn
        for parameter, (fqn, *others) in names_by_parameter(model)
        if not (others or parameter.requires_grad)
        and is_matrix(fqn, parameter)
        and not any(fnmatchcase(fqn, pattern) for pattern in weights.skip)
    }


def embedding_of(model: Any, kind: Literal["input", "output"]) -> Any:
    """Return the input or the output embedding that a model names; None where it names none, as not all of transformers' do."""
    with suppress(NotImplementedError, AttributeError):
        return getattr(model, f"get_{kind}_embeddings")()
    return None


def experts_of(model: nn.Module) -> dict[str, int]:
    """Return the modules of experts by name, each with the number of its experts: those of whose own parameters each has a row
    for every expert, and whose forward takes hidden states, numbers of experts and weights, as transformers' modules do."""
    found = {}
    for name, module in model.named_modules():
        own, count = [*module.parameters(recurse=False)], getattr(module, COUNT, None)
        if own and type(count) is int and all(each.dim() > 1 and each.shape[0] == count for each in own):
            taken = list(signature(type(module).forward).parameters)[1:]
            if len(taken) == 3 and taken[0] == "hidden_states":
                found[name] = count
    return found


def _adds_rows(module: nn.Module, known: dict[Any, bool]) -> bool:
    """Return True if experts add up results of one expert each, times their weights, as a trial on the CPU tells: others multiply
    what goes in, or drop tokens beyond a capacity. `known` has what earlier trials told."""
    if (key := (type(module), *(each.shape for each in module.parameters(recurse=False)))) in known:
        return known[key]
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    values, known[key] = dict[str, Tensor](), False
    for name, each in module.named_parameters(recurse=False):  # All rows of a matrix are alike, which takes no memory.
        row = random(3, *[1] * (each.dim() - 2), each.shape[-1]) / each.shape[-1] ** 0.5
        values[name] = row.expand(3, *each.shape[1:])

    def run(begin: int, end: int, *args: Tensor) -> Any:
        few = _twin(module)
        vars(few).update({COUNT: end - begin, "_parameters": {name: each[begin:end] for name, each in values.items()}})
        return unwrap(type(module).forward)(few, *args)

    for size in sorted({size for each in values.values() for size in each.shape[1:]}):  # One is that of hidden states.
        hidden, weights, chosen = random(6, size), random(6, 2).sigmoid(), torch.tensor([[0, 2]] * 6, device="cpu")
        with suppress(Exception), kept_generators():  # Of another size, or of other arguments.
            wanted = run(0, 3, hidden, chosen, weights)
            first, last = (run(at, at + 1, hidden, 0 * chosen[:, :1], torch.ones_like(weights[:, :1])) for at in (0, 2))
            apart = wanted - first * weights[:, :1] - last * weights[:, 1:]
            known[key] |= bool(apart.abs().max() <= 1e-3 * wanted.abs().max() > 0)
    return known[key]


def _twin(module: nn.Module) -> Any:
    """Return a module with these parameters, and copies of what a forward may change, such as a buffer that counts."""
    made, own = type(module).__new__(type(module)), vars(module).items()
    vars(made).update({name: copy(each) if isinstance(each, list | dict | set) else each for name, each in own})
    made._buffers.update({name: each.clone() for name, each in made._buffers.items() if each is not None})
    made._modules.update({name: _twin(each) for name, each in made._modules.items() if each is not None})
    return made


def _require_supported_modules(model: nn.Module, compute_dtype: torch.dtype) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            why = f"module {name or 'root'} is TorchScript, which reads parameters where nobody can gather them"
            raise LayoutError(f"{why}; give the Python module, and torch.compile (model.compile) in place of TorchScript")
        if getattr(module, "_is_expert_parallel", False):
            why = f"module {name}: transformers has spread its experts over ranks (ep_size of its DistributedConfig)"
            raise LayoutError(f"{why}; load the model without, and give parallel.expert")
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        vectors = [module.get_buffer(f"{hook.name}_u") for hook in hooks]
        for vector in module.buffers(recurse=False) if isinstance(module, _SpectralNorm) else vectors:
            if vector.dtype != compute_dtype:
                why = f"{vector.dtype} vectors, which PyTorch does not multiply by weights in {compute_dtype}"
                cure = f"set precision.compute to {str(vector.dtype).removeprefix('torch.')}, or convert the model before"
                raise LayoutError(f"module {name} has a spectral norm with {why}; {cure}: model.to({compute_dtype})")


def _require_own_memory(names: Iterable[tuple[nn.Parameter, list[str]]]) -> None:
    """Refuse parameters in the same memory if one is trained: here they would be apart."""
    placed = ((each.data_ptr(), name, each) for each, (name, *_) in names if each.numel() and not each.is_meta)
    for (start, name, each), (next_start, other, second) in pairwise(sorted(placed)):
        inside = next_start == start or (each.is_contiguous() and next_start < start + each.nbytes)
        if inside and (each.requires_grad or second.requires_grad):
            raise LayoutError(f"{name} and {other} share memory; make them one parameter, or clone() one of them")


def without_adapters(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model that PEFT has wrapped, and the beginning of the names of its modules; the model itself without a wrapper."""
    get_base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    if get_base is None:
        return model, ""
    inner = get_base()
    return inner, next(f"{name}." if name else "" for name, module in model.named_modules() if module is inner)


def names_by_parameter(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Return every parameter once, with all of its names in the order of the model."""
    return list(grouped((each, fqn) for fqn, each in model.named_parameters(remove_duplicate=False)).items())


def main_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """Return the floating-point dtype of most elements; float32 without any."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.is_floating_point():
            counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def parts_in_fp32(model: object) -> set[str]:
    """Return the parts of names of parameters and buffers that a transformers model keeps in float32."""
    attributes = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {part for attribute in attributes for part in getattr(model, attribute, None) or ()}


def _dtypes(model: nn.Module, names: Iterable[tuple[nn.Parameter, list[str]]], compute: torch.dtype) -> dict[str, torch.dtype]:
    main = main_dtype(parameter for parameter, _ in names)
    # Parameters that a transformers model names stay in fp32, and those of batch norms, whose running statistics are fp32 buffers:
    # PyTorch takes 16-bit inputs with fp32 weights, not the reverse.
    parts = parts_in_fp32(model)
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    kept = {f"{name}.{leaf}" for name, module in norms for leaf, _ in module.named_parameters()}
    gathered: dict[str, torch.dtype] = {}
    for parameter, (fqn, *_) in names:
        dtype = parameter.dtype
        if dtype.is_floating_point and compute.itemsize < 4 and (fqn in kept or any(part in fqn for part in parts)):
            dtype = torch.float32
        elif dtype.is_floating_point and dtype.itemsize <= max(main.itemsize, compute.itemsize):
            dtype = compute
        gathered[fqn] = dtype
    return gathered


def block_modules(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model that become units; empty for models without such structure."""
    return [model.get_submodule(fqn) for fqn in _outermost(model, _block_names(model))]


def _block_names(model: nn.Module) -> list[str]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [fqn for fqn, module in model.named_modules() if fqn and type(module).__name__ in names]
    for fqn, module in () if blocks else model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in module if any(True for _ in child.parameters()))
            repeated = [name for name, child in module.named_children() if kinds[type(child)] > 1]
            blocks += [f"{fqn}.{name}" if fqn else name for name in repeated]
    return [called for fqn in blocks for called in _with_forward(fqn, model.get_submodule(fqn))]


def _with_forward(fqn: str, module: nn.Module) -> Iterator[str]:
    """Yield the module, or if it has no forward, its children; its parameters then belong to the enclosing unit."""
    if getattr_static(type(module), "forward") is not nn.Module.forward or "forward" in vars(module):
        yield fqn
        return
    for name, child in module.named_children():
        yield from _with_forward(f"{fqn}.{name}", child)


def _outermost(model: nn.Module, blocks: list[str]) -> tuple[str, ...]:
    inside = tuple(f"{fqn}." for fqn in blocks)
    return tuple(fqn for fqn, _ in model.named_modules() if fqn in blocks and not fqn.startswith(inside))


def _names_of(model: nn.Module, kind: Literal["input", "output"]) -> list[str]:
    target = embedding_of(model, kind)
    return [fqn for fqn, module in model.named_modules() if fqn and module is target]
