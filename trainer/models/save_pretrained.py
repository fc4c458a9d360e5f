"""Writing a partitioned model as a Hugging Face model directory, one parameter in memory at a time."""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.checkpoint.io.format import INDEX, SINGLE, TensorSpec, spec_of
from zeromesh.checkpoint.store import write_directory, write_weights
from zeromesh.errors import CollectiveError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.overrides import override
from zeromesh.pipeline.stages.build import stubs_removed
from zeromesh.telemetry.status_board import Activity
from zeromesh.trainer.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_names, is_adapted, pretrained_of
from zeromesh.weight_init.weight_sources import canonical_names
from zeromesh.zero.full_state import FullState, persistent_buffers

BASE_MODEL = "base_model"  # The folder in a checkpoint with adapters that holds the base model's configuration.
_ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin")
"""Files of an earlier adapter in the directory, which `from_pretrained` would load on top of a saved model."""


def save_model(model: nn.Module, state: FullState | None, path: Path, mesh: Mesh, *, processing_class: Any = None) -> str:
    """Write `path` so that `from_pretrained(path)` loads the model, or an adapted one's adapter. All ranks call it, rank 0 writes;
    `state` is None for a whole model. A failure keeps the old files, other files stay. Returns its reason on all ranks, else ""."""
    path = Path(os.path.abspath(path))
    adapter = gathered_adapter(model, state, mesh) if is_adapted(model) else None
    specs: list[TensorSpec] = []
    tensors: Iterator[tuple[str, Tensor]] = iter(())
    if adapter is None and state is not None:
        specs, tensors = state.stored_specs(), state.stored()
    elif adapter is None:
        whole = _stored_tensors(model)
        specs, tensors = [spec_of(name, tensor) for name, tensor in whole.items()], iter(whole.items())

    failure = ""
    if mesh.rank == 0:
        try:
            with write_directory(path, sum(spec.nbytes for spec in specs), update=True) as folder:
                if adapter is not None:
                    _write_adapter(model, adapter, folder)
                    _save_part(processing_class, folder)
                else:
                    written = write_weights(folder, specs, tensors, lambda: mesh.post(Activity.SAVE))
                    # `from_pretrained` loads a model in a single dtype: the widest stored floating-point one.
                    found = [spec.dtype for spec in specs if spec.dtype.is_floating_point]
                    save_configuration(model, max(found, key=lambda dtype: dtype.itemsize, default=None), processing_class, folder)
            if adapter is None:
                numbered = [file.name for file in path.glob("model-*-of-*.safetensors")]
                for stale in {SINGLE, INDEX, *numbered, *_ADAPTER_FILES}.difference(written):
                    (path / stale).unlink(missing_ok=True)
        except CollectiveError:
            raise
        except Exception as error:  # noqa: BLE001 - of somebody else's `save_pretrained` too; all ranks have to know
            reason = getattr(error, "strerror", None) or error
            failure = str(error) if isinstance(error, StorageError) else f"{str(path)!r} cannot be written ({reason})"
    for _ in tensors:  # Ranks gather tensors together, so rank 0 goes on after a failure too.
        continue
    failed = int(mesh.world.all_reduce_max(torch.tensor([int(bool(failure))]), "end of saving")[0])
    return failure or (f"{path} could not be written by rank 0, whose error says why" if failed else "")


def gathered_adapter(model: nn.Module, state: FullState | None, mesh: Mesh) -> dict[str, Tensor]:
    """Return the whole tensors of `adapter_names` on rank 0's CPU, an empty dict elsewhere; all ranks call it, as `save_model`."""
    with stubs_removed(model):
        names = adapter_names(model)
    tensors = iter(_stored_tensors(model).items()) if state is None else chain(state.parameters(names), state.buffers())
    gathered = {}
    for name, tensor in tensors:
        if name in names and mesh.rank == 0:
            gathered[name] = tensor.detach().to("cpu", copy=True)
            mesh.post(Activity.SAVE)
    return gathered


def _write_adapter(model: Any, adapter: dict[str, Tensor], directory: Path) -> None:
    # `adapter` has the trained embeddings; PEFT would look them up on the Hub to see if they have changed.
    own = {} if pretrained_of(model) is model else {"save_embedding_layers": False}
    with stubs_removed(model):
        shared = {id(each): name for name, each in model.named_buffers()}
        firsts = canonical_names(model) | {n: shared[id(one)] for n, one in model.named_buffers(remove_duplicate=False)}
        ties = {name: adapter[first] for name, first in firsts.items() if first in adapter}
        with peft_reading(model, tensors := adapter | ties):
            model.save_pretrained(directory, state_dict=tensors, **own)


@contextmanager
def peft_reading(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Make PEFT read `tensors` for parameters inside the block, of modules that it trains whole and of encoders of prompts."""
    prompts: Any = getattr(model, "prompt_encoder", {})
    with ExitStack() as undone:
        for prefix, each in ((f"{name}.", each) for name, each in model.named_modules() if ".modules_to_save." in name):
            own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            undone.callback(override(each, "state_dict", lambda own=own: own))
        for name, each in [*prompts.items()]:
            undone.callback(override(prompts._modules, name, copy_with(each, tensors, f"prompt_encoder.{name}.")))
        yield


def copy_with(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str) -> nn.Module:
    """Return a copy of a module without hooks, its parameters taken from `tensors` under `prefix`, if there are any."""
    made: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(made)
    vars(made).update({name: value for name, value in vars(module).items() if name not in vars(made)})
    for name, buffer in module.named_buffers(recurse=False):
        made.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
    for name, each in module.named_parameters(recurse=False):
        value = tensors[f"{prefix}{name}"] if tensors else each.detach()
        made.register_parameter(name, nn.Parameter(value, requires_grad=False))
    for name, child in module.named_children():
        made.add_module(name, copy_with(child, tensors, f"{prefix}{name}."))
    return made


def save_configuration(
    model: nn.Module, dtype: torch.dtype | None, processor: Any, folder: Path, adapter: dict[str, Tensor] | None = None
) -> None:
    """Write the files that `from_pretrained` reads beside the weights; the configuration has their dtype and the model's class.
    `adapter` is written for PEFT, and the base's configuration into its own folder, as transformers would miss its weights."""
    inside = pretrained_of(model) if adapter is not None else model
    config: Any = copy.deepcopy(getattr(inside, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(inside).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
    if adapter is not None:
        _write_adapter(model, adapter, folder)
        # The adapter that is trained is that of the directory, whatever its name is; PEFT would put it beside the others.
        if not (folder / ADAPTER_CONFIG).is_file():
            active: Any = model.active_adapters
            trained = folder / active[0]
            for path in trained.iterdir():
                path.rename(folder / path.name)
            trained.rmdir()
    for part in (config, getattr(inside, "generation_config", None)):
        _save_part(part, folder if adapter is None else folder / BASE_MODEL)
    _save_part(processor, folder)


def _save_part(part: Any, directory: Path) -> None:
    if hasattr(part, "save_pretrained"):
        part.save_pretrained(directory)


def _stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**{name: parameter.detach() for name, parameter in model.named_parameters()}, **persistent_buffers(model)}
