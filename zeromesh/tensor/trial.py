"""The trial of a tensor plan: a divided model, whose ranks are threads of this process, compared with the whole model.

The outputs of modules with whole features and all gradients must be equal up to rounding; the model is to be float64.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.comm.activation_collectives import Exchange, ExchangeKind, Pending
from zeromesh.errors import LayoutError, summary
from zeromesh.flat.layout import ParameterPart
from zeromesh.tensor.parallelize_module import Parallelized, replace_parameter
from zeromesh.tensor.plan.planner import TensorPlan
from zeromesh.zero.hooks import tensors_in, watch_outputs

_TOLERANCE = 1e-9
"""The relative tolerance: sums of float64 numbers in different orders differ by less than 1e-13."""
Run = Callable[[nn.Module], Iterable[Tensor]]
"""A function that runs a model and returns the outputs to compare."""


class _ThreadExchange(Exchange):
    """Collectives between threads, each of which leaves its tensor in `left` and reads those of all."""

    def __init__(self, barrier: threading.Barrier, left: list[Tensor], index: int) -> None:
        self.size, self.index, self._barrier, self._left = len(left), index, barrier, left

    def _start(self, kind: ExchangeKind, tensor: Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        self._left[self.index] = tensor.detach()
        self._barrier.wait()
        result = self._combine(kind, list(self._left), dim, lengths)
        self._barrier.wait()
        return Pending(lambda: result)


@dataclass(kw_only=True)
class _Passed:
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """The outputs of each module's first call, in the order in which calls ended."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, ParameterPart] = field(default_factory=dict)
    failed: str = ""


def load_parts(model: nn.Module, parts: Mapping[str, ParameterPart], whole: Mapping[str, Tensor]) -> None:
    """Load every parameter on the meta device on CPU; divided ones get this rank's part.

    `whole` holds the whole tensors by FQN. Dtype and `requires_grad` of the parameters do not change.

    Raises:
        LayoutError: for a tensor that is missing or has another shape.
    """
    for name, parameter in list(model.named_parameters()):
        value, part = whole.get(name), parts.get(name)
        shape = tuple(parameter.shape) if part is None else part.region.shape
        if value is None or tuple(value.shape) != shape:
            found = "is missing" if value is None else f"has shape {list(value.shape)}"
            raise LayoutError(f"{name} {found}; it is to be {list(shape)}")
        made = nn.Parameter(
            _own(value, part).detach().to(parameter.dtype, copy=True), requires_grad=parameter.requires_grad
        )
        replace_parameter(model, parameter, made)


def _own(whole: Tensor, part: ParameterPart | None) -> Tensor:
    for dim, intervals in enumerate(part.region.dims if part is not None else ()):
        whole = torch.cat([whole.narrow(dim, one.start, one.length) for one in intervals], dim)
    return whole


def difference_when_divided(
    whole: nn.Module, plan: TensorPlan, run: Run, *, sequence: bool = False, inside: bool = True
) -> str:
    """Run `whole` and its copies divided by `plan`; returns name and class of the first module that differs, or an empty text.

    `sequence`: blocks pass on shares of the sequence. Without `inside`, of the outputs only the model's own must be equal.

    Raises:
        LayoutError: for a model that cannot be divided so.
    """
    barrier, left = threading.Barrier(plan.size), [torch.empty(0)] * plan.size
    values = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}

    copies = [
        copy.deepcopy(whole) for _ in range(plan.size)
    ]  # A model that has run may hold tensors that cannot be copied.

    def rank(index: int) -> _Passed:
        model, passed = copies[index], _Passed()
        try:
            parallel = Parallelized(model, _ThreadExchange(barrier, left, index), plan, sequence=sequence)
            load_parts(model, parallel.parts, values)
            passed.parts = parallel.parts
            _run(model, run, passed)
        except threading.BrokenBarrierError:
            passed.failed = ""  # Another rank reports the cause.
        except Exception as error:
            barrier.abort()
            if isinstance(error, LayoutError):
                raise
            passed.failed = _where(error, model)
        return passed

    expected = _Passed()
    _run(whole, run, expected)
    with ThreadPoolExecutor(plan.size) as pool:
        ranks = list(pool.map(rank, range(plan.size)))
    if failed := next((each.failed for each in ranks if each.failed), ""):
        return failed
    for name, found in expected.outputs.items():
        if name and not inside:
            continue
        pairs = [pair for each in ranks for pair in zip(found, each.outputs.get(name, ()), strict=False)]
        if any(one.shape == other.shape and _differ(one, other) for one, other in pairs):
            return f"{_shown(whole, name)} computes something else"
    for name, gradient in expected.gradients.items():
        for index, each in enumerate(ranks):
            part = each.parts.get(name)
            summed = part.holders if part is not None and part.partial else (index,)
            partial_sums = torch.stack([ranks[other].gradients[name] for other in summed]).sum(0)
            if _differ(_own(gradient, part), partial_sums):
                return f"{_shown(whole, name.rpartition('.')[0])} has another gradient of its {name.rpartition('.')[2]}"
    return ""


def _run(model: nn.Module, run: Run, passed: _Passed) -> None:
    model.zero_grad()
    end = watch_outputs(model.named_modules(), partial(_keep, passed.outputs))
    try:
        outputs = [each for each in run(model) if each.requires_grad]
    finally:
        end()
    # Each output element gets its own weight, so that errors cannot cancel.
    weighed = [(each * torch.linspace(0.5, 1.5, each.numel()).view(each.shape)).sum() for each in outputs]
    torch.autograd.backward(weighed)
    passed.gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in model.named_parameters()
    }


def _keep(outputs: dict[str, list[Tensor]], name: str, found: Any) -> None:
    if name not in outputs:
        outputs[name] = [each.detach().clone() for each in tensors_in(found) if each.is_floating_point()]


def _differ(wanted: Tensor, found: Tensor) -> bool:
    # Some gradients are zero up to rounding, such as those of an attention's key biases.
    return not float((found - wanted).norm()) <= _TOLERANCE * (float(wanted.norm()) + 1.0)


def _shown(model: nn.Module, name: str) -> str:
    return f"{name or 'the model'}, a {type(model.get_submodule(name)).__name__},"


def _where(error: Exception, model: nn.Module) -> str:
    """Describe an error with the innermost module of the model in which it was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    name, frame = "", error.__traceback__
    while frame is not None:
        name = names.get(id(frame.tb_frame.f_locals.get("self")), name)
        frame = frame.tb_next
    return f"{_shown(model, name)} cannot compute its part ({summary(error)})"
