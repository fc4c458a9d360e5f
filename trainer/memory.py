"""What the states of a run need of a host's memory at least: a run that cannot fit is refused before it is begun."""

from __future__ import annotations

from torch import nn

from zeromesh.errors import StorageError
from zeromesh.flat.placement import Placement
from zeromesh.mesh.groups import Mesh
from zeromesh.offload import available_bytes, swap_bytes
from zeromesh.trainer.console import human_bytes, human_count
from zeromesh.zero.options import ZeroOptions

_MOMENTS = {"adamw": 2, "adam": 2, "adagrad": 1, "sgd": 0}


def least_bytes(model: nn.Module, options: ZeroOptions, ranks: int, *, shared: bool) -> dict[str, int]:
    """Bytes of one rank's states by purpose, without buckets in flight and activations.

    `shared`: gathered parameters are pages that the ranks of the host have in common.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    precision, placements = options.precision, options.placements
    sharded = {name: getattr(placements, name) is Placement.SHARDED for name in ("parameters", "optimizer")}
    own = ranks if sharded["optimizer"] else 1
    copies = ranks if sharded["parameters"] or (shared and sharded["optimizer"]) else 1
    master = precision.master.itemsize if precision.master != precision.compute else 0
    gradients = 0 if options.gradients_pass_through else precision.reduce.itemsize
    return {
        "parameters": everything * precision.compute.itemsize // copies,
        "master weights": trained * master // own,
        "gradients": trained * gradients // own,
        "optimizer moments": trained * _MOMENTS[options.optimizer.name] * precision.master.itemsize // own,
    }


def require_memory(model: nn.Module, options: ZeroOptions, mesh: Mesh, *, shared: bool) -> None:
    """Raise `StorageError` where a host of CPU ranks has less memory, and swap, than the states need at the least."""
    free = available_bytes()
    if mesh.device.type != "cpu" or not free:
        return
    terms = least_bytes(model, options, mesh.shard.size, shared=shared)
    local = mesh.environment.local_world_size
    needed = local * sum(terms.values())
    given_back = local * sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    if needed > free + swap_bytes() + given_back:
        listed = ", ".join(f"{human_bytes(local * nbytes)} {purpose}" for purpose, nbytes in terms.items() if nbytes)
        count = human_count(sum(p.numel() for p in model.parameters()))
        raise StorageError(
            f"{count} parameters at stage {options.stage} need at least {human_bytes(needed)} on this host ({listed}), and "
            f"{human_bytes(free)} are free; make the model smaller, raise zero.stage, or use more hosts"
        )
