"""Small float64 copies on CPU of transformers models, which may be on meta: fewer and smaller layers, to compare two runs."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from zeromesh.errors import PhaseError, summary
from zeromesh.intervals import grouped
from zeromesh.overrides import replaced
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.weight_init.weight_sources import INITIALISER_ERRORS, seeded_cpu
from zeromesh.zero.hooks import tensors_in, watch_outputs

TOLERANCE, LOSS_TOLERANCE = 1e-9, 1e-10
"""How far float64 results may be apart, relative, of models and of losses. Sums in different orders differ by less than 1e-13."""
_LARGEST_COPY = 30_000_000  # parameters: 240 MB in float64, and as much for gradients
Outputs = list[tuple[str, list[Tensor]]]
"""Names of modules with copies of their outputs, in the order in which calls ended."""
PartOf = Callable[[Tensor, Tensor], Tensor | None]
"""Returns the part of a whole output with which another pass's output is to be compared; None: they are not comparable."""


class Pass(NamedTuple):
    """The results of a forward and its backward."""

    outputs: Outputs
    gradients: dict[str, Tensor]  # of trained parameters, and under the empty name the loss


ERRORS = (*INITIALISER_ERRORS, PhaseError, NotImplementedError, OSError, AssertionError)
_SIZES = read_texts(Path(__file__).with_suffix(".yaml"))


def named_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes by the names that configurations give to them, from sizes by their kinds in `small_copy.yaml`."""
    return {name: size for kind, size in sizes.items() for name in _SIZES[kind]["names"].split()}


# Sizes of a small copy and of its nested configurations; smaller values stay.
_SMALL = named_sizes({kind: row["copy"] for kind, row in _SIZES.items() if "copy" in row})
_WIDTHS = {name: _SMALL[name] for name in ("vocab_size", "num_experts", "num_local_experts", "num_experts_per_tok")}
_NARROW = {**_SMALL, "head_dim": 8}
# Sizes and layers to try one after the other: architectures tie sizes to each other, and hybrids need several layers.
_REDUCTIONS: tuple[tuple[Mapping[str, int], int], ...] = (
    *((_NARROW, 2), (_SMALL, 2), (_NARROW, 8), ({**_NARROW, "num_key_value_heads": 4}, 2)),
    *((_WIDTHS, 2), ({}, 2), ({}, 10**6)),
)
_SPECIAL_IDS = _SIZES["special tokens"]["names"].split()


class InFloat64(TorchFunctionMode):
    """A mode that turns explicit casts to fp32 in models and losses into casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].to(torch.float64)
        named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **named)


def perturb(model: nn.Module) -> None:
    """Perturb each parameter slightly, so that zeros (a gate, say) hide nothing, and equal biases and scales differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.05)


@contextmanager
def whole_passes_in_float64() -> Iterator[None]:
    """Apply `InFloat64` also to recomputation in backward, since torch runs backward outside of its modes."""
    own = vars(torch.autograd)["_engine_run_backward"]

    def run_backward(*arguments: Any, **named: Any) -> Any:
        with InFloat64():
            return own(*arguments, **named)

    with replaced(torch.autograd, {"_engine_run_backward": run_backward}), InFloat64():
        yield


def run_pass(model: nn.Module, loss: Callable[[], Tensor]) -> Pass:
    """Compute a loss of the model, its gradients and the outputs of modules."""
    outputs: Outputs = []

    def keep(name: str, found: Any) -> None:
        outputs.append((name, [each.detach().clone() for each in tensors_in(found)]))

    with ExitStack() as undone:
        undone.callback(watch_outputs(model.named_modules(), keep))
        total = loss()
    return Pass(outputs, gradients_of(model, total))


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the loss under the empty name, and its gradients for all trained parameters, zeros for unused ones."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return {"": loss.detach(), **dict(zip(named, gradients, strict=True))}


def weighted_sum(outputs: Any) -> Tensor:
    """Return the sum of outputs that depend on parameters; each element has its own weight, so that errors cannot cancel."""
    tensors = [each for each in tensors_in(outputs) if each.requires_grad]
    return torch.stack([(x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in tensors]).sum()


def deviation(found: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    """Return the norm of the difference of two tensors over the norm of `wanted` plus `scale`, since some gradients are zero up to
    rounding (those of an attention's key biases); infinite for another shape and for values that are not finite."""
    distance = float((found.to(wanted.device, wanted.dtype) - wanted).norm()) if found.shape == wanted.shape else float("nan")
    if distance != distance:
        return float("inf")
    size = float(wanted.norm())
    if size == float("inf"):  # Masked logits are the lowest finite number, and their norm overflows.
        size = float(wanted[wanted.abs() < torch.finfo(wanted.dtype).max ** 0.25].norm())
    return distance / max(size + scale, 1e-300) if distance else 0.0


def differing_gradient(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> str | None:
    """Return the name of the first differing gradient, the empty one of the loss if that alone differs; None if all are equal."""
    rounding = 1e-4 * max(float(each.norm()) for each in wanted.values())
    names = [name for name, each in wanted.items() if not deviation(found[name], each, rounding) <= tolerance]
    return next(filter(None, names), "") if names else None


def first_difference(found: Outputs, wanted: Outputs, part_of: PartOf, tolerance: float) -> str | None:
    """Return the name of the first module, by call, with an output that is another than its part of the wanted one; None: none."""
    left = grouped(wanted)
    for name, outputs in found:
        for each, whole in zip(outputs, left[name].pop(0) if left.get(name) else (), strict=False):
            if (part := part_of(whole, each)) is not None and not deviation(each, part, 1.0) <= tolerance:
                return name
    return None


def pass_difference(
    model: nn.Module, sums: Mapping[str, Tensor], parts: Iterable[tuple[Outputs, PartOf]], whole: Pass, tolerance: float
) -> str:
    """Return where passes of parts of a batch, whose gradients have these `sums`, are another one than that of the whole: in the
    first module that mixes tokens, a gradient, or the loss; empty if they are equal."""
    if (gradient := differing_gradient(sums, whole.gradients, tolerance)) is None:
        return ""
    names = (first_difference(outputs, whole.outputs, part_of, tolerance) for outputs, part_of in parts)
    if (name := next((each for each in names if each is not None), None)) is None:
        return f"first in the gradient of {gradient}" if gradient else "in its loss"
    module = model.get_submodule(name)
    if not any(True for _ in module.children()) and not isinstance(module, nn.Conv1d | nn.RNNBase):
        name = name.rpartition(".")[0]  # Other leaves act on each token alone, so the parent mixes tokens.
    return f"first in {module_label(model, name)}"


def changed_dims(whole: Tensor, part: Tensor) -> list[int]:
    """Return the dims along which a part has another size than the whole."""
    return [dim for dim, sizes in enumerate(zip(whole.shape, part.shape, strict=False)) if len({*sizes}) > 1]


def module_label(model: nn.Module, name: str) -> str:
    return f"{name or 'the model'}, a {type(model.get_submodule(name)).__name__}"


def small_copy(model: Any, run: Callable[[Any], Tensor]) -> Any | str:
    """Return the first small float64 copy that can be built and for which `run` gives finite numbers, else the reason."""

    def check(small: Any) -> None:
        with torch.enable_grad(), InFloat64():
            if not bool(torch.isfinite(run(small)).all()):
                raise ValueError("its numbers are not finite")

    if not hasattr(model, "config"):
        return "it has no configuration of which a small one could be made"
    found = first_copy(model.config, lambda config: type(model)(config).double().eval(), _REDUCTIONS, check, most=_LARGEST_COPY)
    return found[-1] if isinstance(found, list) else found


def first_copy(
    config: Any,
    build: Callable[[Any], nn.Module],
    reductions: Iterable[tuple[Mapping[str, int], int]],
    check: Callable[[nn.Module], None],
    *,
    most: int,
    seed: int = 0,
) -> Any | list[str]:
    """Return the first copy, by `shrink_config`, of at most `most` parameters that passes `check`, else the list of reasons."""
    reasons = []
    for sizes, layers in reductions:
        try:
            small = shrink_config(config, sizes, layers)
            with torch.device("meta"):
                count = sum(each.numel() for each in build(copy.deepcopy(small)).parameters())
            if count > most:
                reasons.append(f"{count:,} parameters")
                continue
            with seeded_cpu(seed, "small copy"):
                model = build(small)
                check(model)
                return model
        except ERRORS as error:
            reasons.append(summary(error))
    return reasons


def shrink_config(config: Any, sizes: Mapping[str, int], layers: int) -> Any:
    """Return a copy of a configuration with at most these `sizes`, nested ones too, and `layers` (up to 8 to keep each type)."""
    small = copy.deepcopy(config)
    for name, inside in list(vars(small).items()):
        if isinstance(inside, PreTrainedConfig):
            setattr(small, name, shrink_config(inside, sizes, layers))
    if isinstance(before := getattr(small, "num_hidden_layers", None), int):
        lists = {name: each for name, each in vars(small).items() if isinstance(each, list) and len(each) == before > 0}
        layers = max(layers, *(min(8, 1 + max(map(each.index, each))) for each in lists.values()), 0)
        for name, listed in lists.items():
            setattr(small, name, listed[:layers])
        small.num_hidden_layers = min(before, layers)
    for name, size in sizes.items():
        try:
            value = getattr(small, name, None)
        except ERRORS:  # The value differs per layer.
            continue
        if isinstance(value, int) and value > size:
            setattr(small, name, size)
    for name in _SPECIAL_IDS:
        value = getattr(small, name, None)
        if isinstance(value, int) and value >= getattr(small, "vocab_size", value + 1):
            setattr(small, name, 0)
    if getattr(small, "use_cache", False):  # Each position is read once. Not all models hand on what `forward` is told of it.
        small.use_cache = False
    # Fused implementations do not support float64.
    if str(getattr(small, "_attn_implementation", "sdpa")) not in ("sdpa", "eager"):
        small._attn_implementation = "eager"
    small._experts_implementation = "eager"
    return small
