"""Functions of libraries that are replaced, and names that they do not promise: each is as in the version that it was read from."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from zeromesh.overrides import PATCHES, replaced

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {
    *("torch", "transformers", "accelerate", "lightning", "peft", "trl", "wandb", "tokenizers", "datasets", "rich"),
    "plotly",
}
FINGERPRINTS = {
    "torch.autocast": "b610967e",
    "torch.autograd._engine_run_backward": "13d9e5bc",
    "torch.distributed.distributed_c10d.ProcessGroupGloo": "dd3fdc4d",
    "torch.nn.functional.binary_cross_entropy_with_logits": "6837f314",
    "torch.nn.functional.cross_entropy": "c19505b2",
    "torch.nn.functional.huber_loss": "907f85e7",
    "torch.nn.functional.kl_div": "63607067",
    "torch.nn.functional.l1_loss": "fb4a839d",
    "torch.nn.functional.mse_loss": "fa7c8d97",
    "torch.nn.functional.smooth_l1_loss": "ee5b04a3",
    "torch.nn.functional.scaled_dot_product_attention": "582db9a4",
    "transformers.masking_utils.find_packed_sequence_indices": "b05ec500",
    "transformers.modeling_utils.AttentionInterface.get_interface": "80dd3bb0",
    "transformers.trainer.Accelerator": "3cc3e816",
    "trl.trainer.utils._ChunkedLogProbFunction": "6ec8d8fe",
    "trl.trainer.utils._use_triton": "4b745781",
}
INTERNALS = (
    "accelerate.PartialState._reset_state",
    "accelerate.PartialState._shared_state",
    "torch.Tensor._make_subclass",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.TensorBase",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_graph_task_id",
    "torch._C._distributed_c10d",
    "torch._C._dynamo.eval_frame",
    "torch._C._functorch",
    "torch._C._will_engine_execute_node",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._guards.CompileContext.try_get",
    "torch._has_compatible_shallow_copy_type",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd._get_sequence_nr",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.nn.utils.parametrizations._SpectralNorm",
    "torch.ops.aten._local_scalar_dense.default",
    "torch._compile._disable_dynamo",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "torch.utils.checkpoint._CachedTorchDispatchMode",
    "transformers.GenerationMixin._get_logits_processor",
    "transformers.SchedulerType._value2member_map_",
)
"""Names of libraries that begin with an underscore and are used as they are, or that hold such names."""


def named(name: str) -> Any:
    found: Any = importlib.import_module(name.partition(".")[0])
    for depth, part in enumerate(name.split(".")[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(name.split(".")[:depth]))
    return found


def fingerprint(found: Any) -> str:
    """The digest of a function's source; of a class that of its parameters, of a builtin that of the first line of its words."""
    if inspect.isclass(found) and not inspect.isfunction(found.__init__):
        text = found.__init__.__doc__
    elif inspect.isclass(found):
        text = ", ".join(inspect.signature(found).parameters)
    elif inspect.isfunction(found):
        text = inspect.getsource(found)
    else:
        text = found.__doc__.strip().partition("\n")[0]
    return xxhash.xxh32_hexdigest(text.encode())


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_replaced_is_as_it_was_read(name: str) -> None:
    library = name.partition(".")[0]
    pytest.importorskip(library)
    assert fingerprint(named(name)) == FINGERPRINTS[name], (
        f"{name} was read from {library} {PATCHES[name]}, and is another in {metadata.version(library)}: read it, look at what "
        "replaces it, and then renew its version in zeromesh/overrides.py and its fingerprint here"
    )


@pytest.mark.parametrize("name", INTERNALS)
def test_what_is_not_promised_is_there(name: str) -> None:
    assert named(name) is not None


def test_only_what_is_listed_is_replaced() -> None:
    before = torch.autograd.backward
    with pytest.raises(RuntimeError, match="backward is not among PATCHES"):
        replaced(torch.autograd, {"backward": None}).__enter__()
    assert torch.autograd.backward is before


def test_what_was_replaced_is_put_back_after_an_error() -> None:
    before = vars(torch.autograd)["_engine_run_backward"]
    seen = []
    with pytest.raises(KeyError), replaced(torch.autograd, {"_engine_run_backward": print}):  # noqa: PT012
        seen.append(vars(torch.autograd)["_engine_run_backward"])
        raise KeyError
    assert seen == [print]
    assert vars(torch.autograd)["_engine_run_backward"] is before


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The name of an attribute of a library, from what it was imported as; empty for any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *reversed(parts)])


def found_in(path: Path) -> Iterator[tuple[str, str]]:
    """What a file does with libraries: `uses` of names with an underscore, and `sets` of their attributes."""
    names: dict[str, str] = {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                each.asname or each.name.partition(".")[0]: each.name if each.asname else each.name.partition(".")[0]
                for each in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    names = {alias: name for alias, name in names.items() if name.partition(".")[0] in LIBRARIES}
    yield from (("uses", name) for name in names.values() if private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, names)):
            if isinstance(node.ctx, ast.Store):
                yield "sets", name
            if private(name):
                yield "uses", name


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_every_use_of_a_name_that_is_not_promised_is_listed() -> None:
    paths = [path for root in ("zeromesh", "trainer", "offload") for path in (ROOT / root).rglob("*.py")]
    found = {each for path in paths for each in found_in(path)}
    used = {name for what, name in found if what == "uses"}
    # Switches that torch offers to be set.
    switches = {"torch.backends.cudnn.benchmark", "torch.backends.cudnn.allow_tf32"}
    assert {name for what, name in found if what == "sets"} <= switches
    beginnings = {name for name in used if any(other.startswith(f"{name}.") for other in {*used, *INTERNALS})}
    covered = {name for name in used for known in INTERNALS if f"{name}.".startswith(f"{known}.")}
    assert used - beginnings - covered == set()
    assert [known for known in INTERNALS if not any(f"{name}.".startswith(f"{known}.") for name in used)] == []
