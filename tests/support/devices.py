"""Where tests compute: on the accelerator that is there, a real one or the simulated one of `--device sim`, or on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

from zeromesh.offload.accelerator import current_accelerator

_KIND = current_accelerator()
DEVICE = torch.device("cpu") if _KIND is None else torch.device(_KIND.type, 0)
accelerated = pytest.mark.skipif(_KIND is None, reason="needs an accelerator: a GPU, or --device sim")


@contextmanager
def one_race() -> Iterator[None]:
    """Inside the block is a race that is meant: the simulated device has seen it, and torch's sanitizer has, where it looks."""
    sanitizer = os.environ.get("TORCH_CUDA_SANITIZER") == "1" and DEVICE.type == "cuda"
    with pytest.raises(CUDASanitizerErrors) if sanitizer else nullcontext():
        yield
    torch.accelerator.synchronize()
    if DEVICE.type == "sim":
        from tests.simulated import device

        assert len(device.races()) == 1
        device.clear()
