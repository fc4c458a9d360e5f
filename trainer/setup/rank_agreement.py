"""Settings, models and weights that all ranks of a run must have in common, compared before anything else waits for a rank."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from zeromesh.errors import ConfigError, LayoutError, some
from zeromesh.mesh.process_mesh import Mesh, ProcessSet
from zeromesh.mesh.process_set import require_same
from zeromesh.trainer.config.trainer_config import TrainerConfig

_OF_A_HOST = frozenset(
    {"data.eval", "data.tokenizer", "data.train", "model.source", "offload.directory", "run.output_dir", "tracking"}
)
"""Keys that may differ: where files lie on a host (what is in them is compared), and what rank 0 alone does."""

_CHUNK = 64 * 2**20
"""Bytes of a weight that are sent at a time."""


def require_same_settings(mesh: Mesh, config: TrainerConfig, inputs: Mapping[str, object]) -> None:
    """Compare the configurations and the inputs of the user on all ranks. Raises `ConfigError` where they differ."""
    values = {**dict(_flat(config.model_dump(mode="json"))), **inputs}
    if config.checkpoint.resume not in ("auto", "never"):
        values["checkpoint.resume"] = "a path"
    advice = "Give every rank the same configuration and arguments; what only one rank is to do belongs behind its rank's number"
    require_same(mesh.world, values, ConfigError, advice=advice)


def share_weights(model: nn.Module, mesh: Mesh) -> list[str]:
    """Compare the models of all ranks, and give all of them the weights and buffers of rank 0 where theirs have other values.

    Returns notes. Parameters on the meta device have no values yet, and are left as they are.

    Raises:
        LayoutError: for models with other parameters or buffers.
    """
    tensors: dict[str, Tensor] = {f"parameter {name}": each for name, each in model.named_parameters()}
    tensors |= {f"buffer {name}": each for name, each in model.named_buffers()}
    plan = {
        name: f"{list(t.shape)} {t.dtype} {'trained' if t.requires_grad else 'frozen'}" for name, t in tensors.items()
    }
    advice = "All ranks must build one model, with the same shapes, dtypes and frozen parameters"
    mesh.meet("comparison of models")
    require_same(mesh.world, {"model": type(model).__name__, **plan}, LayoutError, advice=advice)
    if mesh.world_size == 1:
        return []
    held = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    digests = [xxhash.xxh3_64_intdigest(_bytes_of(tensor).numpy().data) >> 1 for tensor in held.values()]
    rows = mesh.world.gather_integers(digests)
    differing = [name for index, name in enumerate(held) if len({row[index] for row in rows}) > 1]
    for name in differing:
        _take_from_first(held[name], mesh.world)
    if not differing:
        return []
    others = ", ".join(str(rank) for rank, row in enumerate(rows) if row != rows[0])
    return [f"initial weights differed on ranks {others} ({some(differing)}): every rank begins with those of rank 0"]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        key = prefix + name
        if key in _OF_A_HOST:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _bytes_of(tensor: Tensor) -> Tensor:
    """Its values on CPU, as uint8 [bytes]."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _take_from_first(tensor: Tensor, world: ProcessSet) -> None:
    """Overwrite a tensor with what the first rank has, in place: bytes are summed with zeros, which keeps every bit."""
    content = _bytes_of(tensor).clone()
    if world.index:
        content.zero_()
    for start in range(0, len(content), _CHUNK):
        world.sum_(content[start : start + _CHUNK], "initial weights of rank 0")
    if world.index:
        tensor.detach().copy_(content.view(tensor.dtype).view(tensor.shape))
