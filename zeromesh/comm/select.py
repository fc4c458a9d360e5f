"""Which transport and which exchange a group uses."""

import platform
from collections.abc import Sequence
from typing import Literal

import torch

from zeromesh.comm.activation_collectives import Exchange, GroupExchange, SharedExchange
from zeromesh.comm.shm_transport import SharedTransport
from zeromesh.comm.torch_transport import CollectiveTransport
from zeromesh.comm.transport import BufferRequest, RingRequest, Transport
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import ProcessSet

TransportName = Literal["auto", "shared", "gloo", "nccl"]
_STRONG_ORDER = {"x86_64", "AMD64"}


def choose_transport(kind: TransportName, group: ProcessSet, device: torch.device) -> str:
    """The transport that `kind` means for this group: `local`, `shared`, `gloo` or `nccl`.

    Raises:
        ConfigError: when the named one cannot serve the group.
        CollectiveError: when this rank is not in it.
    """
    group.require_member()
    if device.type == "cuda":
        if kind in ("shared", "gloo"):
            raise ConfigError(
                f"parallel.transport is {kind}, which moves CPU memory, but the ranks compute on CUDA; use auto or nccl"
            )
        return "local" if group.size == 1 else "nccl"
    if kind == "nccl":
        raise ConfigError("parallel.transport is nccl, but no CUDA device is here; use auto, shared or gloo")
    if group.size == 1:
        return "local"
    obstacle, machine = "", platform.machine()
    if not group.one_host:
        obstacle = "the ranks of the group do not share one host and one process namespace"
    elif machine not in _STRONG_ORDER:
        obstacle = f"{machine} orders memory more weakly than x86-64, which its counters rely on"
    if kind == "shared" and obstacle:
        raise ConfigError(f"parallel.transport is shared, but {obstacle}; use auto or gloo")
    return "gloo" if kind == "gloo" or obstacle else "shared"


def open_transport(
    name: str, group: ProcessSet, device: torch.device, requests: Sequence[BufferRequest], ring: RingRequest
) -> Transport:
    """Allocate the buffers and slots of a group. Every rank of it calls this with the same requests.

    Raises:
        StorageError: when the memory cannot be had.
    """
    if name == "local":
        return Transport(requests, device)
    if name == "shared":
        return SharedTransport(group, requests, ring)
    return CollectiveTransport(group, device, requests, ring)


def open_exchange(group: ProcessSet, device: torch.device, kind: TransportName = "auto") -> Exchange:
    """The exchange of activations over `group`. Every rank of it calls this, in the same order.

    Raises:
        ConfigError: when the named kind cannot serve the group.
        StorageError: when the memory cannot be had.
    """
    name = choose_transport(kind, group, device)
    if name == "local":
        return Exchange()
    return SharedExchange(group) if name == "shared" else GroupExchange(group)
