"""The trial, on a small copy in float64, whether a model divided over ranks, threads here, computes equal outputs and gradients."""

import copy
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeromesh.comm.activation_collectives import Exchange, Pending
from zeromesh.errors import ConfigError, LayoutError, summary
from zeromesh.experts.dispatch import spread_experts
from zeromesh.flat.layout import ParameterPart, part_of
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.tensor.parallelize_module import Parallelized, replace_parameter
from zeromesh.tensor.plan.planner import divides_by_shape, plan_tensor, recognise_styles
from zeromesh.trainer.models import small_copy
from zeromesh.trainer.models.user_model import integer, positive, text_part
from zeromesh.units.plan import experts_of
from zeromesh.zero.hooks import tensors_in

_RANKS, _TOKENS, _FIRST_ID = 2, 8, 3
_Value = TypeVar("_Value")
_Divide = Callable[[nn.Module, Exchange], Parallelized | Mapping[str, ParameterPart]]
_Divided = tuple[small_copy.Pass, Mapping[str, ParameterPart]]  # the results of a rank, and what it has of parameters


def require_equal_when_divided(model: nn.Module, rules: Mapping[str, str], *, sequence: bool) -> None:
    """Run a small copy of a model whole and divided over two ranks; raises `ConfigError` with the module that differs, or if no
    division could be tried. `rules` are the user's styles by name pattern. With them or a `tp_plan`, a model without a small copy
    passes. With `sequence`, blocks exchange shards of the sequence."""

    def refused(reason: str, where: str = "parallel.tensor") -> ConfigError:
        what = f"{type(model).__name__} would be divided by a plan, by the shapes of its layers or by your rules"
        cure = "give rules under which it computes the same (parallel.plan), or set parallel.tensor: 1"
        return ConfigError(f"{what}, and in a trial on a small copy {reason}; {cure}", where=where)

    by_shape = divides_by_shape(model)
    if not by_shape and not rules and not getattr(model, "tp_plan", None):
        return
    plan = _numberless(recognise_styles(model)) if by_shape else {}
    tried = _Tried(model, plan.keys())
    if isinstance(small := small_copy.small_copy(model, tried.check), str):
        if rules or not plan:
            return
        raise refused(f"no small copy of it could be tried ({small})")
    small_copy.perturb(small)
    run = tried.run
    if found := _copy_difference(model, small, plan) if by_shape else "":
        raise refused(found)
    for shares in dict.fromkeys((sequence, False)):
        try:
            divided = partial(Parallelized, plan=plan_tensor(small, _RANKS, rules), sequence=shares)
            found = _difference_when_divided(small, divided, run, inside=bool(plan or rules))
        except LayoutError as error:
            found = str(error)
            continue
        if found:
            raise refused(found, "parallel.plan" if rules else "parallel.tensor")
        return
    if plan and not rules:
        raise refused(f"the copy could not be divided ({found})")


def require_equal_when_spread(model: nn.Module) -> None:
    """Run a small copy whole, and with its experts over two ranks; raises `ConfigError` with what differs, or without a copy."""

    def refused(reason: str) -> ConfigError:
        what = f"experts of {type(model).__name__} would be spread over ranks, and in a trial on a small copy {reason}"
        return ConfigError(f"{what}; set it to 1", where="parallel.expert")

    if not experts_of(model):
        return  # Spreading refuses it by a better reason.
    tried = _Tried(model)
    if isinstance(small := small_copy.small_copy(model, tried.check), str):
        raise refused(f"nothing could be tried ({small})")
    small_copy.perturb(small)
    try:
        spread = partial(spread_experts, parts={}, undo=ExitStack())
        found = _difference_when_divided(small, spread, tried.run, inside=True, spread=experts_of(small))
    except LayoutError as error:
        found = str(error)
    if found:
        raise refused(found)


class _Tried:
    """The inputs of a trial, and a copy's outputs in float64; it must have modules named `required`, and experts as the model."""

    def __init__(self, model: nn.Module, required: AbstractSet[str] = frozenset()) -> None:
        self._required, self._given = required, dict[str, Any]()
        self._has_experts = bool(experts_of(model))

    def run(self, model: Any) -> list[Tensor]:
        with small_copy.InFloat64():
            return [out for out in tensors_in(model(**self._given)) if out.is_floating_point()]

    @torch.no_grad()
    def check(self, model: nn.Module) -> Tensor:
        self._given.update(example_inputs(model))
        try:
            outputs = self.run(model)
        except small_copy.ERRORS:
            if not (self._given.pop("pixel_values", None) is not None and "input_ids" in self._given):
                raise
            outputs = self.run(model)  # A model of text and pictures may run with text alone.
        if missing := next(iter(self._required - _numberless(dict(model.named_modules())).keys()), ""):
            raise LayoutError(f"it has no {missing}")
        if self._has_experts and not experts_of(model):
            raise LayoutError("it has no experts")
        return torch.cat([out.flatten() for out in outputs])


def _numberless(named: Mapping[str, _Value]) -> dict[str, _Value]:
    """Replace block numbers in the names by `*`, as a copy has fewer blocks; of equal names the last value stays."""
    return {re.sub(r"\.\d+(?=\.)", ".*", name): value for name, value in named.items()}


def _copy_difference(model: nn.Module, small: nn.Module, plan: Mapping[str, str]) -> str:
    """Describe a difference of modules or division that makes the trial of `small` invalid for `model`; empty if there is none."""
    modules = (one.named_modules() for one in (model, small))
    kinds, copied = ({(*_numberless({n: ""}), type(each).__name__) for n, each in named} for named in modules)
    for name, kind in sorted(copied - kinds):
        return f"its forward puts a {kind} in the place of {name}"
    others = _numberless(recognise_styles(small))
    unlike = next((name for name in (*plan, *others) if plan.get(name) != others.get(name)), "")
    return f"its sizes do not tell how {unlike} is to be divided" if unlike else ""


def example_inputs(small: Any) -> Iterator[tuple[str, Any]]:
    """Yield fixed arguments of a forward for two samples: tokens, pictures or sound."""
    config, names = small.config, inspect.signature(type(small).forward).parameters
    generator = torch.Generator().manual_seed(0)
    main = getattr(small, "main_input_name", "input_ids")
    text = text_part(config)
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    ids = torch.randint(_FIRST_ID, positive(text, "vocab_size") or 2 * _FIRST_ID, (2, _TOKENS), generator=generator)
    ids[:, -1] = integer(text, "eos_token_id") or ids[0, -1]
    if main == "input_ids" or (config.model_type.startswith(("clip", "siglip", "metaclip")) and "input_ids" in names):
        yield "input_ids", ids
    if config.is_encoder_decoder or (main != "input_ids" and "decoder_input_ids" in names):
        yield "decoder_input_ids", ids[:, :6]
    sizes: dict[str, tuple[int, ...]] = {}
    if "pixel_values" in names and (main == "pixel_values" or vision is not config):
        size = getattr(vision, "image_size", 32)
        picture = (getattr(vision, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size)))
        frames = positive(config, "num_frames")
        sizes["pixel_values"] = (frames, *picture) if frames else picture
    elif main == "input_values":
        bins = positive(config, "num_mel_bins")
        sizes[main] = (config.max_length, bins) if bins and hasattr(config, "max_length") else (3200,)
    elif main == "input_features":
        bands = positive(config, "num_mel_bins", "input_feat_per_channel", "feature_size")
        sizes[main] = (bands, 2 * config.max_source_positions) if positive(config, "num_mel_bins") else (64, bands)
    for name, shape in sizes.items():
        yield name, torch.randn(2, *shape, generator=generator, dtype=torch.float64)


class _ThreadExchange(Exchange):
    """Collectives between threads: each stores its tensor in the shared list `tensors`, and reads all after a barrier."""

    def __init__(self, barrier: threading.Barrier, tensors: list[Tensor], index: int) -> None:
        self.size, self.index, self._barrier, self._tensors = len(tensors), index, barrier, tensors

    def _start(self, kind: Collective, tensor: Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        self._tensors[self.index] = tensor.detach()
        self._barrier.wait()
        result = self._combine(kind, list(self._tensors), dim, lengths)
        self._barrier.wait()
        return Pending(lambda: result)


def load_parts(model: nn.Module, parts: Mapping[str, ParameterPart], whole: Mapping[str, Tensor]) -> None:
    """Load all meta parameters from whole tensors by FQN, or parts of them. Raises `LayoutError` for a missing or unlike one."""
    for name, parameter in list(model.named_parameters()):
        value, part = whole.get(name), parts.get(name)
        shape = tuple(parameter.shape) if part is None else part.region.shape
        if value is None or tuple(value.shape) != shape:
            found = "is missing" if value is None else f"has shape {list(value.shape)}"
            raise LayoutError(f"{name} {found}; it is to be {list(shape)}")
        local = (value if part is None else part_of(value, part.region)).detach().to(parameter.dtype, copy=True)
        replace_parameter(model, parameter, nn.Parameter(local, requires_grad=parameter.requires_grad), ExitStack())


def _difference_when_divided(
    whole: nn.Module, divide: _Divide, run: Callable[[Any], list[Tensor]], *, inside: bool, spread: Iterable[str] = ()
) -> str:
    """Return the first module with other outputs (inner ones if `inside`) or gradients in copies that `divide` has divided; empty:
    none. `spread` are modules of experts in which ranks see tokens of others."""
    barrier, left = threading.Barrier(_RANKS), [torch.empty(0)] * _RANKS
    values = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    # `whole` itself does not run: a model that has run with gradients may hold tensors that cannot be copied for the next trial.
    reference, *copies = (copy.deepcopy(whole) for _ in range(1 + _RANKS))

    experts = tuple(f"{name}." for name in spread)

    def passed(model: nn.Module) -> small_copy.Pass:
        outputs, gradients = small_copy.run_pass(model, lambda: small_copy.weighted_sum(run(model)))
        return small_copy.Pass([each for each in outputs if not each[0] or (inside and not each[0].startswith(experts))], gradients)

    def rank(index: int) -> _Divided | str:
        model = copies[index]
        try:
            divided = divide(model, _ThreadExchange(barrier, left, index))
            parts = divided.parts if isinstance(divided, Parallelized) else divided
            load_parts(model, parts, values)
            return passed(model), parts
        except threading.BrokenBarrierError:
            return ""  # Another rank reports the cause.
        except Exception as error:
            barrier.abort()
            if isinstance(error, LayoutError):
                raise
            return _module_error(error, model)

    expected = passed(reference)
    if idle := [name for name in spread if name not in dict(expected.outputs)]:
        return f"{small_copy.module_label(whole, idle[0])}, was not called, as where some tokens alone go to it: ranks wait there"
    with ThreadPoolExecutor(_RANKS) as pool:
        results = list(pool.map(rank, range(_RANKS)))
    if failed := next((each for each in results if each and isinstance(each, str)), ""):
        return failed
    ranks = [each for each in results if not isinstance(each, str)]

    def alike(whole: Tensor, out: Tensor) -> Tensor | None:
        # Outputs may be parts of the whole ones, or masks with infinities; gradients may not, but for those that are divided.
        return whole if out.shape == whole.shape and out.is_floating_point() and bool(whole.isfinite().all()) else None

    found = [small_copy.first_difference(each.outputs, expected.outputs, alike, small_copy.TOLERANCE) for each, _ in ranks]
    # One rank's part may be right, and what is wrong on another one reaches it only in a later module.
    if (name := next((name for name, _ in expected.outputs if name in found), None)) is not None:
        return f"{small_copy.module_label(whole, name)}, computes something else"
    return _differing_gradient(whole, ranks, expected, spread=bool(experts))


def _differing_gradient(whole: nn.Module, ranks: Sequence[_Divided], expected: small_copy.Pass, *, spread: bool) -> str:
    """Return the first module with another gradient in passes of ranks with these parts; empty: none. `spread`: so are experts."""
    everyone = tuple(range(_RANKS))
    for name, gradient in expected.gradients.items():
        # Where experts are spread, ranks have samples of their own, which are alike here.
        times = _RANKS if spread else 1
        for index, (_, parts) in enumerate(ranks):
            part = parts.get(name)
            summed = part.holders if part is not None and part.partial else (index,)
            if spread and part is None:
                summed = everyone
            partial_sums = torch.stack([ranks[other][0].gradients[name] for other in summed]).sum(0)
            wanted = times * (gradient if part is None else part_of(gradient, part.region))
            if not small_copy.deviation(partial_sums, wanted, 1.0) <= small_copy.TOLERANCE:
                module, _, leaf = name.rpartition(".")
                return f"{small_copy.module_label(whole, module)}, has another " + (f"gradient of its {leaf}" if leaf else "result")
    return ""


def _module_error(error: Exception, model: nn.Module) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    name, frame = "", error.__traceback__
    while frame is not None:
        name = names.get(id(frame.tb_frame.f_locals.get("self")), name)
        frame = frame.tb_next
    return f"{small_copy.module_label(model, name)}, cannot compute its part ({summary(error)})"
