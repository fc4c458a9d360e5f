"""What is asked of an accelerator, where stand-ins for torch's modules answer."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromesh.offload import accelerator

CPU, CARD = torch.device("cpu"), torch.device("cuda", 3)


def answering(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **functions: Any) -> None:
    """Torch's module of any device has these functions alone; `hip` is the version of an AMD build."""
    monkeypatch.setattr(accelerator, "_module", lambda device: SimpleNamespace(**functions))
    monkeypatch.setattr(torch.version, "hip", hip)


def test_memory_of_the_host_and_of_no_device_is_no_accelerators() -> None:
    kinds = ("cpu", "meta", "cuda", "xpu")
    assert [accelerator.is_accelerator(torch.device(kind)) for kind in kinds] == [False, False, True, True]


@pytest.mark.parametrize(
    ("capability", "hip", "name", "float8"),
    [
        ((8, 6), None, "sm_86", False),
        ((8, 9), None, "sm_89", True),
        ((9, 0), None, "sm_90", True),
        ((10, 0), None, "sm_100", True),
        ("gfx90a:sramecc+:xnack-", "6.4", "gfx90a", False),
        ("gfx942:sramecc+:xnack-", "6.4", "gfx942", True),
        ("gfx950", "6.4", "gfx950", True),
        ("gfx1100", "6.4", "gfx1100", False),
        ("gfx1201", "6.4", "gfx1201", True),
    ],
)
def test_the_architecture_says_what_is_multiplied_in_8_bits(
    monkeypatch: pytest.MonkeyPatch, capability: Any, hip: str | None, name: str, float8: bool
) -> None:
    properties = SimpleNamespace(gcnArchName=capability)
    functions = {"get_device_capability": lambda device: capability, "get_device_properties": lambda device: properties}
    answering(monkeypatch, hip, **functions)
    assert (accelerator.architecture(CARD), accelerator.multiplies_float8(CARD)) == (name, float8)
    for other in (CPU, torch.device("xpu")):
        assert (accelerator.architecture(other), accelerator.multiplies_float8(other)) == ("", False)


def test_a_device_is_identified_where_its_identifier_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")}
    for hip, functions, device, found in (
        (None, known, CARD, "GPU-3"),
        (None, known, CPU, ""),
        ("6.4", known, CARD, ""),
        (None, {}, CARD, ""),
        (None, {"get_device_properties": lambda device: SimpleNamespace()}, CARD, ""),
    ):
        answering(monkeypatch, hip, **functions)
        assert accelerator.device_uuid(device) == found


def test_peers_are_the_lower_devices_whose_memory_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, can_device_access_peer=lambda index, other: index == 3 and other in (0, 2, 3, 4))
    assert accelerator.peer_devices(CARD) == [0, 2]
    assert accelerator.peer_devices(torch.device("cuda")) == []
    answering(monkeypatch)
    assert accelerator.peer_devices(CARD) == []


def test_a_profile_has_the_host_and_the_kernels_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [SimpleNamespace(name=name) for name in ("CPU", "CUDA", "XPU", "MTIA")]
    monkeypatch.setattr(accelerator, "supported_activities", lambda: known)
    for device, names in ((CPU, ["CPU"]), (CARD, ["CPU", "CUDA"]), (torch.device("xpu"), ["CPU", "XPU"])):
        assert [each.name for each in accelerator.profiler_activities(device)] == names  # type: ignore[attr-defined]


def test_figures_of_memory_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (1, 2))
    for name, nbytes in (("memory_allocated", 3), ("memory_reserved", 4), ("max_memory_allocated", 5)):
        monkeypatch.setattr(torch.accelerator, name, lambda device, nbytes=nbytes: nbytes)
    expected = accelerator.DeviceMemory(free=1, total=2, allocated=3, reserved=4, peak=5)
    assert accelerator.device_memory(CARD) == expected


def test_scalars_come_in_their_order_from_device_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the device in one transfer, as wide as their values need."""
    assert accelerator.read_scalars([torch.tensor(1.5), torch.tensor([[2]])]) == [1.5, 2.0]
    stacked, stack = list[torch.dtype](), torch.stack
    monkeypatch.setattr(torch, "stack", lambda given: stacked.append(given[0].dtype) or stack(given))
    monkeypatch.setattr(accelerator, "on_accelerator", lambda tensor: tensor.dtype is not torch.int8)
    here, narrow = torch.tensor([7], dtype=torch.int8), torch.tensor([0.5], dtype=torch.bfloat16)
    wide, whole = torch.tensor(0.1, dtype=torch.float64), torch.tensor((1 << 24) + 1, dtype=torch.int32)
    assert accelerator.read_scalars([here, narrow, here, torch.tensor(3.0)]) == [7.0, 0.5, 7.0, 3.0]
    assert accelerator.read_scalars([wide, here, narrow]) == [0.1, 7.0, 0.5]
    assert accelerator.read_scalars([narrow, whole]) == [0.5, (1 << 24) + 1]
    assert stacked == [torch.float32, torch.float64, torch.float64]


def test_a_call_is_timed_by_the_fastest_round_of_as_many_as_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], [0]

    def call() -> None:
        """1/1024 second; the first call takes a second, and those of the second round twice as long."""
        calls[0] += 1
        now[0] += 1.0 if calls[0] == 1 else 2 / 1024 if 15 <= calls[0] <= 20 else 1 / 1024

    monkeypatch.setattr(accelerator.time, "thread_time", lambda: now[0])
    assert accelerator.time_call(call, CPU) == 1 / 1024
    assert calls == [1 + 1 + 6 + 5 * 6]
    assert accelerator.time_call(call, CPU, rounds=2, fill=0.0011) == 1 / 1024
    assert calls == [38 + 1 + 1 + 2]


@pytest.mark.parametrize("begun", [True, False])
def test_generators_are_those_of_devices_in_use(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """A seed must not make a process that computes on the host begin to use the device."""
    said: list[Any] = []
    state = torch.arange(3)
    answering(
        monkeypatch,
        is_initialized=lambda: begun,
        manual_seed_all=said.append,
        get_rng_state=lambda: state,
        set_rng_state=said.append,
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert accelerator.is_initialized() is begun
    accelerator.seed(5)
    found = accelerator.generator_state()
    accelerator.set_generator_state(found)
    accelerator.set_generator_state(None)
    assert said == ([5, state] if begun else [])
    assert (found is state) is begun


def test_pages_are_pinned_where_the_driver_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def runtime(code: int) -> Callable[[], SimpleNamespace]:
        register = lambda *given: asked.append(given) or code  # noqa: E731
        return lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda at: asked.append((at,)))

    answering(monkeypatch, cudart=runtime(0))
    unpin = accelerator.pin(4096, 8192, CPU)
    assert unpin is not None
    unpin()
    assert asked == [(4096, 8192, 0), (4096,)]
    answering(monkeypatch, cudart=runtime(1))
    assert accelerator.pin(4096, 8192, CPU) is None
    answering(monkeypatch)
    assert accelerator.pin(4096, 8192, CPU) is None


def test_a_thread_gets_its_stream_and_its_device_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"before on {device}")
    for name in ("set_stream", "set_device_index"):
        monkeypatch.setattr(torch.accelerator, name, said.append)
    stream: Any = SimpleNamespace(device="a card")
    with suppress(KeyError), accelerator.launching_on(stream):
        assert said == [stream]
        raise KeyError
    assert said == [stream, "before on a card"]
    for device in (CPU, torch.device("cuda"), CARD):
        accelerator.make_current(device)
    assert said[2:] == [3]


def test_a_host_begins_to_use_all_devices_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answering(monkeypatch, init=lambda: said.append("begun"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert accelerator.initialize() == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert said == ["begun"]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert accelerator.initialize() == []
