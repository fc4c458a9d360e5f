"""Whether ranks that compute one batch together have been given the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from zeromesh.errors import DataError
from zeromesh.mesh.process_mesh import Mesh

_LOOKED_AT = 65536
"""Elements of each tensor that ranks compare: all tokens of a microbatch, and the beginning of an image."""


def require_same(batches: Sequence[Mapping[str, Any]], mesh: Mesh) -> None:
    """Raise `DataError` where ranks of a tensor group or of a pipeline, which compute one batch together, have others."""
    if mesh.shape.tensor == mesh.shape.pipeline == 1:
        return
    mine = [mesh.data_index, len(batches), _digest(batches)]
    rows = mesh.world.gather_integers(mine)
    others = [str(rank) for rank, row in enumerate(rows) if row[0] == mine[0] and row != mine]
    if others:
        raise DataError(
            f"rank{'s' if len(others) > 1 else ''} {', '.join(others)} got other data than rank {mesh.rank}, and they "
            "compute one batch together (parallel.tensor, parallel.pipeline); datasets and collators must give the same "
            "samples for the same index on every rank"
        )


def _digest(batches: Sequence[Mapping[str, Any]]) -> int:
    """32 bits of the names, shapes, dtypes and first values of the tensors of batches."""
    found = 0
    for batch in batches:
        for name, value in sorted(batch.items()):
            if isinstance(value, Tensor):
                found = crc32(f"{name} {list(value.shape)} {value.dtype}".encode(), found)
                some = value.detach().reshape(-1)[:_LOOKED_AT].contiguous()
                found = crc32(some.view(torch.uint8).numpy().tobytes(), found)
    return found
