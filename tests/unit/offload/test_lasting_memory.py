"""Memory for what lives as long as a run."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zeromesh import environment
from zeromesh.offload import accelerator, allocate_lasting

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


def test_the_allocator_of_a_gpu_gets_segments_that_grow_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for kind, given, expected in (
        (None, {}, None),
        ("cuda", {}, "expandable_segments:True"),
        ("xpu", {}, None),
        ("cuda", {names[0]: "backend:native"}, "backend:native"),
        ("cuda", {names[1]: "backend:native"}, None),
    ):
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(accelerator, "found", lambda device=device: device)
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        environment.set_default(names[0], accelerator.allocator_settings(), names[1])
        assert environment.setting(names[0]) == expected
    monkeypatch.delenv(names[0], raising=False)


def test_blocks_of_a_device_are_written_where_torch_knows_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, path = torch.device("cuda", 0), tmp_path / "blocks.pickle"
    said: list[object] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda max_entries: said.append(max_entries),
        _dump_snapshot=lambda name: said.append(name),
    )
    monkeypatch.setattr(accelerator, "_module", lambda device: SimpleNamespace(memory=memory))
    assert accelerator.record_allocations(device)
    assert accelerator.write_allocations(device, path)
    assert said == [100_000, str(path)]
    assert not accelerator.write_allocations(CPU, path)
    monkeypatch.setattr(accelerator, "_module", lambda device: SimpleNamespace())
    assert not accelerator.record_allocations(device)
    assert not accelerator.write_allocations(device, path)
