"""Memory for what lives as long as a run."""

import gc
from pathlib import Path

import pytest
import torch

from zeromesh.offload import allocate_lasting

CPU = torch.device("cpu")


def _in_heap(address: int) -> bool:
    heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]"))
    start, end = (int(part, 16) for part in heap.split()[0].split("-"))
    return start <= address < end


@pytest.mark.parametrize("shape", [0, 1, 5, 100_000, (3, 1000, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_zeros_that_can_be_written(shape: int | tuple[int, ...], dtype: torch.dtype) -> None:
    found = allocate_lasting(shape, dtype, CPU)
    assert torch.equal(found, torch.zeros(shape, dtype=dtype))
    found.fill_(1)
    assert int(found.sum(dtype=torch.float64)) == found.numel()


def test_large_ones_are_not_on_the_heap_and_go_with_their_tensor() -> None:
    found = allocate_lasting(1 << 20, torch.float32, CPU)
    assert not _in_heap(found.data_ptr())
    address = f"{found.data_ptr():x}-"
    part = found[5:]
    del found
    gc.collect()
    assert any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())
    del part
    gc.collect()
    assert not any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())
