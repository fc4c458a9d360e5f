"""What a run sets in torch and in the environment before it computes: devices of ranks, TF32, kernels with the same bits."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zeromesh.environment import kept_environment
from zeromesh.errors import ConfigError
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import pick_device
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.setup.build import set_tf32, use_deterministic_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("visible", "local_rank", "taken"), [(8, 3, 3), (1, 0, 0), (1, 3, 0), (2, 2, None)])
def test_the_device_of_ranks(monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, taken: int | None) -> None:
    """A launcher may show every process all devices of the host, or its own alone."""
    current: list[Any] = []
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    if taken is None:
        with pytest.raises(ConfigError, match="local rank 2 has no CUDA device: this process sees 2"):
            pick_device(local_rank)
        return
    assert pick_device(local_rank) == torch.device("cuda", taken)
    assert current == [taken]


@pytest.fixture
def kept() -> Iterator[None]:
    """What torch and the environment are set to comes back afterwards."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    with kept_environment():
        yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = convolutions, benchmark
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("kept")
def test_products_are_rounded_where_that_is_asked_for() -> None:
    for on, name in ((True, "tf32"), (False, "ieee")):
        set_tf32(load_config({"precision": {"tf32": on}}), GPU)
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is on
        assert torch.backends.cuda.matmul.fp32_precision == name
        # By both of torch's interfaces.
        assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is on  # type: ignore[attr-defined]
    before = torch.get_float32_matmul_precision()
    set_tf32(load_config({}), CPU)
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ConfigError, match=r"precision\.tf32: TF32 is a format of GPUs"):
        set_tf32(load_config({"precision": {"tf32": True}}), CPU)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("cublas", "given", "begun", "words"),
    [
        (True, None, False, ""),
        (True, ":16:8", True, ""),
        (True, None, True, "has used its GPU before the run began.*set CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        (True, ":4096:2:16:8", False, "CUBLAS_WORKSPACE_CONFIG is ':4096:2:16:8'; set"),
        (False, None, True, ""),
    ],
)
def test_the_same_bits_need_fixed_workspaces_before_a_gpu_is_used(
    monkeypatch: pytest.MonkeyPatch, cublas: bool, given: str | None, begun: bool, words: str
) -> None:
    monkeypatch.setattr(accelerator, "has_cublas", lambda: cublas)
    monkeypatch.setattr(accelerator, "is_initialized", lambda: begun)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if given is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = given
    if words:
        with pytest.raises(ConfigError, match=words):
            use_deterministic_kernels()
        return
    use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ((given or ":4096:8") if cublas else None)
