"""Temporary replacements: an instance's `forward`, tensors cached by modules, functions of libraries. `PATCHES` lists every
replaced function of a library; `tests/unit/test_library_patches.py` fails where another version of it is installed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

WIDE_LOSSES = "binary_cross_entropy_with_logits cross_entropy huber_loss kl_div l1_loss mse_loss smooth_l1_loss".split()  # noqa: SIM905
PATCHES = {
    "torch.autocast": "2.13.0",  # planning/tracing/meter.py: PEFT turns it off on the device of its weights, which may be meta.
    "torch.autograd._engine_run_backward": "2.13.0",  # models/small_copy.py: a dispatch mode stays active in backward.
    "torch.distributed.distributed_c10d.ProcessGroupGloo": "2.13.0",  # mesh/process_groups.py: its waits end where ranks are lost.
    # losses/losses.py: in float32, as under autocast.
    **{f"torch.nn.functional.{loss}": "2.13.0" for loss in WIDE_LOSSES},
    "torch.nn.functional.scaled_dot_product_attention": "2.13.0",  # planning/tracing/meter.py: traces a device's kernel.
    # attention/packed_attention.py: documents are those of the batch, and a mask that stands for them has an attention of ours.
    "transformers.masking_utils.find_packed_sequence_indices": "5.23.0",
    "transformers.modeling_utils.AttentionInterface.get_interface": "5.23.0",
    "transformers.trainer.Accelerator": "5.23.0",  # integrations/transformers.py: an accelerate class on zeromesh.
    "trl.trainer.utils._ChunkedLogProbFunction": "1.16.0",  # integrations/transformers.py: our kernel for the fused head.
    "trl.trainer.utils._use_triton": "1.16.0",
}
"""The replaced functions and classes of libraries, with the versions that the replacements were written for."""


@contextmanager
def replaced(library: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace names of a library inside the block; they must be among `PATCHES`."""
    if unknown := [name for name in values if f"{library.__name__}.{name}" not in PATCHES]:
        raise RuntimeError(f"{library.__name__}: {', '.join(unknown)} is not among PATCHES of {__name__}")
    with ExitStack() as undo:
        for name, value in values.items():
            undo.callback(override(vars(library), name, value))
        yield


class Undo(ExitStack):
    """Restores the state before a replacement when it is called, or at the end of a block."""

    __call__ = ExitStack.close


def override(instance: object, name: str, value: Any) -> Undo:
    """Set an attribute on the instance itself, or an entry of a dict; returns what restores the previous state."""
    own, undo = instance if isinstance(instance, dict) else vars(instance), Undo()
    undo.callback(*((own.__setitem__, name, own[name]) if name in own else (own.pop, name, None)))
    own[name] = value
    return undo


@contextmanager
def cached_tensors_removed(root: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Remove, after the block, tensors that modules cached as attributes inside it, such as a recurrent state. Yields a function
    that returns the names of attributes that hold such a tensor."""
    had = [(name, module, dict(vars(module))) for name, module in root.named_modules()]

    def found() -> Iterator[tuple[str, nn.Module, str, bool]]:
        for name, module, before in had:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, Tensor) and before.get(attribute) is None:
                    yield f"{name}.{attribute}".strip("."), module, attribute, attribute in before

    try:
        yield lambda: [name for name, *_ in found()]
    finally:
        for _, module, attribute, was_none in found():
            if was_none:
                setattr(module, attribute, None)
            else:
                delattr(module, attribute)
