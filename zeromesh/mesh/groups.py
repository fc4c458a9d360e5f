"""The names that the rest of the house uses: `Mesh`, short for `ProcessMesh`, its `ProcessSet`s, and this process's device."""

from __future__ import annotations

import torch

from zeromesh.errors import CollectiveError, ConfigError
from zeromesh.mesh.process_mesh import ProcessMesh
from zeromesh.mesh.process_set import ProcessSet

Mesh = ProcessMesh


def pick_device(local_rank: int) -> torch.device:
    """The accelerator of this process's local rank, made current, if there is one; else the CPU.

    Raises:
        ConfigError: when the host has fewer accelerators than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no CUDA device: this host has {torch.cuda.device_count()}; start as many ranks"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


__all__ = ["CollectiveError", "Mesh", "ProcessSet", "pick_device"]
