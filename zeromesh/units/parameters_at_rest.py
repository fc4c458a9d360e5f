"""Parameters at rest: their values are sharded away or out of date, and whoever reads or writes one calls back first.

While a parameter rests, its class is a subclass of its own whose `__torch_function__` sees every operation of PyTorch on it. What
only asks for metadata (shape, dtype, gradient, hooks) is answered. Anything else calls `wake`, which makes the parameter's unit
live or raises, and then runs on the same object, whose class and values are by then what they were. Operations that do not ask for
overrides (TorchScript, collectives of torch.distributed) see NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zeromesh.errors import PhaseError

Wake = Callable[[nn.Parameter], None]


def _metadata() -> frozenset[Any]:
    """Functions, as `__torch_function__` gets them, that read or write nothing of a tensor's values."""
    attributes = (
        "shape dtype device layout ndim requires_grad grad _grad grad_fn is_leaf grad_dtype names name output_nr retains_grad "
        "itemsize nbytes is_cpu is_cuda is_meta is_quantized is_sparse is_sparse_csr is_mkldnn is_mps is_xla is_xpu is_ipu is_mtia "
        "is_maia is_vulkan is_nested _version _base _cdata _backward_hooks _post_accumulate_grad_hooks"
    )
    methods = (
        "size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex "
        "is_signed is_inference is_conj is_neg is_same_size get_device register_hook register_post_accumulate_grad_hook "
        "requires_grad_ retain_grad dim_order __len__ __hash__ _is_view"
    )
    found: set[Any] = set()
    for name in attributes.split():
        descriptor = getattr(torch.Tensor, name, None)
        found |= {
            getattr(descriptor, each) for each in ("__get__", "__set__", "__delete__") if hasattr(descriptor, each)
        }
    for name in methods.split():
        found |= {getattr(owner, name) for owner in (torch.Tensor, torch) if hasattr(owner, name)}
    return frozenset(found)


_METADATA = _metadata()


class AtRest(nn.Parameter):
    """The class of a parameter at rest. `wake` is called with a parameter that is used."""

    wake: ClassVar[Wake]
    kind: ClassVar[type[nn.Parameter]]
    """What the parameter is while it does not rest."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what asks for metadata; wake all parameters at rest for anything else."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for each in pytree.tree_leaves((args, kwargs)):
            if isinstance(each, AtRest):
                wake(each)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the values, in the class of the parameter."""
        wake(self)
        return self.__deepcopy__(memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The values where they can be had, else what is known without them: for debuggers."""
        try:
            wake(self)
        except PhaseError as error:
            return f"Parameter at rest, {tuple(self.shape)}, {self.dtype}: {error}"
        return repr(self)


def wake(parameter: AtRest) -> None:
    """Make a parameter's values usable. Raises `PhaseError` where they cannot be."""
    type(parameter).wake(parameter)
    if isinstance(parameter, AtRest):
        raise PhaseError(f"a parameter of shape {tuple(parameter.shape)} was to be made usable, and still rests")


def resting_class(kind: type[nn.Parameter], on_use: Wake) -> type[nn.Parameter]:
    """What parameters of class `kind` are at rest; each use of one calls `on_use` first, which shows the values or raises."""
    bases = (AtRest,) if kind is nn.Parameter else (AtRest, kind)
    return type(f"{kind.__name__}AtRest", bases, {"wake": staticmethod(on_use), "kind": kind})


def set_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter, which may rest, other values."""
    # `type` instead of `isinstance`, which asks the metaclass of parameters: this runs four times a step for each of them.
    kind = type(parameter)
    if issubclass(kind, AtRest):
        parameter.__class__ = kind.kind
    parameter.data = values
