"""Where tests compute: on the accelerator that is there, a real one or the simulated one of `--device sim`, or on the CPU."""

import pytest
import torch

from zeromesh.offload.accelerator import found

_KIND = found()
DEVICE = torch.device("cpu") if _KIND is None else torch.device(_KIND.type, 0)
accelerated = pytest.mark.skipif(_KIND is None, reason="needs an accelerator: a GPU, or --device sim")


def expected_races(count: int) -> None:
    """On the simulated device: so many races were meant, and are forgotten."""
    if DEVICE.type == "sim":
        from simulated import device

        assert len(device.races()) == count
        device.clear()
