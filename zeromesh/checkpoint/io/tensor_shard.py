"""What a rank holds of a checkpoint's tensors: the one thing that engine and checkpoint tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.checkpoint.format.safetensors_layout import TensorSpec
from zeromesh.flat.regions import Region
from zeromesh.intervals import Interval
from zeromesh.offload import TensorSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """`values` are the elements `interval` of the flattened local tensor that `region` takes of the tensor `spec`.

    `owner` numbers the bucket whose update changes them; None for what no update changes.
    """

    spec: TensorSpec
    region: Region
    interval: Interval
    values: TensorSlice
    owner: int | None = None
