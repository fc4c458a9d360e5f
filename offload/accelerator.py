"""All access to an accelerator, by `torch.accelerator`, which serves CUDA, ROCm and XPU: no other module names a kind of device.
"The device" is the one on which a process computes; a CPU is a device without streams, whose work is done when a call returns."""

import math
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, supported_activities

from zeromesh.errors import ConfigError


def is_accelerator(device: torch.device) -> bool:
    """Return True if work on `device` runs asynchronously in streams, with memory of its own."""
    return device.type not in ("cpu", "meta")


def on_accelerator(tensor: torch.Tensor) -> bool:
    return is_accelerator(tensor.device)


def current_accelerator() -> torch.device | None:
    """Return the accelerator that this process sees, as a device without an index; None on a machine that has only CPUs."""
    return torch.accelerator.current_accelerator(check_available=True)


def build_platform() -> str:
    """Return the platform that torch was built for beside CPUs, such as `CUDA 13.0`; empty without one."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    kind = torch.accelerator.current_accelerator()
    return next((f"{name} {version}" for name, version in versions.items() if version), kind.type if kind else "")


def initialize() -> list[torch.device]:
    """Initialize the accelerator; returns the devices that this process sees. Raises `RuntimeError` with the driver's reason."""
    if (kind := torch.accelerator.current_accelerator()) is None:
        return []
    _module(kind).init()
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def is_initialized() -> bool:
    """Return True if this process has initialized its accelerator, whose libraries have then read their environment variables."""
    return _initialized_module() is not None


def has_cublas() -> bool:
    return torch.version.cuda is not None and current_accelerator() is not None


def allow_tf32(on: bool) -> None:
    """Enable or disable TF32 (10 bits of fraction) for products and convolutions of float32 matrices on the device."""
    # Torch and its compiler can always read the settings of this older interface, but not always those of the newer one.
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def pick_device(local_rank: int) -> torch.device:
    """Make the accelerator of this process's local rank, or the only one that its launcher shows it, the current device and
    return it; return the CPU without accelerators. Raises `ConfigError` when the host has fewer accelerators than ranks."""
    if (kind := current_accelerator()) is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = 0 if count == 1 else local_rank
    if index >= count:
        why = f"local rank {local_rank} has no {kind.type.upper()} device: this process sees {count}"
        raise ConfigError(f"{why}; start as many ranks on a host as it has devices")
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


@contextmanager
def launching_on(stream: torch.Stream) -> Iterator[None]:
    """Launch this thread's work inside the block on `stream`, whose device stays current in the thread."""
    # Not `with stream`: torch keeps the previous stream in the stream object, so that two threads would restore each other's.
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def make_current(device: torch.device) -> None:
    """Make `device` current in this thread, which would otherwise initialize the first device and take memory there."""
    if is_accelerator(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def host_wait_for(stream: torch.Stream) -> Callable[[], None]:
    """Return a function that waits for all work launched on `stream` so far, asleep if the device can wake the thread. A
    `torch.Event` ignores its `blocking` argument, but device-specific events, such as CUDA's, support it."""
    try:
        ending = _module(stream.device).Event(blocking=True)
    except TypeError:  # This device's events have no argument `blocking`.
        return record_event(stream).synchronize
    with launching_on(stream):
        ending.record()
    return ending.synchronize  # type: ignore[no-any-return]


def record_event(stream: torch.Stream, *, timed: bool = False) -> torch.Event:
    """Record an event after all work launched on `stream` so far. A thread that waits for this event spins, see `host_wait_for`."""
    made = torch.Event(stream.device, enable_timing=timed)
    made.record(stream)
    return made


Moment = float | torch.Event
"""A point in time: seconds of the host's clock; on an accelerator, which the host does not wait for, a timed event."""


def now(device: torch.device) -> Moment:
    return record_event(current_stream(device), timed=True) if is_accelerator(device) else time.perf_counter()


def seconds_between(end: Any, begin: Any) -> float | None:
    """Return the seconds between two moments of one device; None if the device has not come to `end` yet."""
    if isinstance(end, float):
        return end - begin  # type: ignore[no-any-return]
    return begin.elapsed_time(end) / 1e3 if end.query() else None


def synchronize(device: torch.device) -> None:
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def time_call(call: Callable[[], object], device: torch.device, *, rounds: int = 5, fill: float = 0.005) -> float:
    """Return the seconds that one `call` takes: the minimum over `rounds` measurements, each of as many calls as take about `fill`
    seconds, after a warm-up call. On a CPU this is the thread's processor time, since other processes may use the processor."""

    def when_computed() -> float:
        synchronize(device)
        return time.perf_counter() if is_accelerator(device) else time.thread_time()

    timer, count = timeit.Timer(call, timer=when_computed), 1
    timer.timeit(1)
    while (seconds := timer.timeit(count)) < fill / 2 and count < 1 << 20:
        count = max(count + 1, min(16 * count, math.ceil(count * fill / max(seconds, 1e-7))))
    return min(timer.repeat(rounds, count)) / count


def read_scalars(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of tensors of one element each; the host waits for the device once for all of them together."""
    if not (there := [scalar.detach().reshape(()) for scalar in scalars if on_accelerator(scalar)]):
        return [float(scalar) for scalar in scalars]
    # Integers may need float64 to keep their value, but some devices lack that dtype, so it is used only where it is needed.
    narrow = all(scalar.is_floating_point() and scalar.itemsize <= 4 for scalar in there)
    found = iter(torch.stack([scalar.to(torch.float32 if narrow else torch.float64) for scalar in there]).tolist())
    return [next(found) if on_accelerator(scalar) else float(scalar) for scalar in scalars]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes of a device's memory: `free` and `total` count all processes; of this process, `allocated` are the bytes of tensors,
    `peak` is their maximum since its last reset, and `reserved` includes the cache of torch's allocator."""

    free: int
    total: int
    allocated: int
    reserved: int
    peak: int


def device_memory(device: torch.device) -> DeviceMemory:
    free, total = torch.accelerator.get_memory_info(device)
    allocated, reserved = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
    peak = torch.accelerator.max_memory_allocated(device)
    return DeviceMemory(free=free, total=total, allocated=allocated, reserved=reserved, peak=peak)


def allocator_settings() -> str:
    """Return the settings of torch's memory allocator for the accelerator that this process sees, empty for none; they must be set
    before torch allocates. With expandable segments, memory freed by activations of one length fits those of another length."""
    kind = current_accelerator()
    return "expandable_segments:True" if kind is not None and kind.type == "cuda" and torch.version.hip is None else ""


def record_allocations(device: torch.device) -> bool:
    """Have torch record allocations and frees of device memory; returns True if the device supports this."""
    # A step of a large model has some ten thousand.
    return _call_memory_module(device, "_record_memory_history", max_entries=100_000)


def write_allocations(device: torch.device, path: Path) -> bool:
    """Write torch's record for https://pytorch.org/memory_viz; returns True if the device supports this. Raises `OSError`."""
    return _call_memory_module(device, "_dump_snapshot", str(path))


def _call_memory_module(device: torch.device, name: str, *values: object, **options: object) -> bool:
    call = getattr(getattr(_module(device), "memory", None), name, None) if is_accelerator(device) else None
    if call is not None:
        call(*values, **options)
    return call is not None


def device_name(device: torch.device) -> str:
    return str(_module(device).get_device_name(device))


def device_uuid(device: torch.device) -> str:
    """Return a unique identifier of a device, independent of its number in a process; empty if unknown."""
    if not is_accelerator(device) or torch.version.hip:
        return ""  # Parts of one AMD GPU, each of which is a device, may report the same identifier.
    properties = getattr(_module(device), "get_device_properties", None)
    return "" if properties is None else str(getattr(properties(device), "uuid", ""))


def architecture(device: torch.device) -> str:
    """Return the architecture that kernels are compiled for, such as `sm_90` or `gfx942`; empty if the device has none."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return str(_module(device).get_device_properties(device).gcnArchName).partition(":")[0]
    return "sm_{}{}".format(*_module(device).get_device_capability(device))


def multiplies_float8(device: torch.device) -> bool:
    """Return True if a device multiplies 8-bit float matrices: NVIDIA's from compute capability 8.9 on, and some of AMD's."""
    kind = architecture(device)
    if kind.startswith("sm_"):
        return int(kind.removeprefix("sm_")) >= 89
    return kind.startswith(("gfx942", "gfx95", "gfx120"))


def collectives_library() -> str:
    """Return the library of collectives between devices and its version, such as `NCCL 2.27.3`; empty if torch names none."""
    if (library := getattr(_module(current_accelerator() or torch.device("cpu")), "nccl", None)) is None:
        return ""
    return f"{'RCCL' if torch.version.hip else 'NCCL'} {'.'.join(map(str, library.version()))}"


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities that torch's profiler records on `device`: CPU operators, and the device's kernels if supported."""
    known = supported_activities()  # type: ignore[no-untyped-call]
    return [each for each in known if each.name in ("CPU", device.type.upper())]


def peer_devices(device: torch.device) -> list[int]:
    """List the indices, lower than this device's, of the devices whose memory it accesses directly (NVLink or a PCIe switch)."""
    can_access = getattr(_module(device), "can_device_access_peer", None)
    index = device.index or 0
    return [other for other in range(index) if can_access is not None and can_access(index, other)]


def seed(number: int) -> None:
    if module := _initialized_module():
        module.manual_seed_all(number)


def generator_state() -> torch.Tensor | None:
    """Return the state of the current device's generator; None without an initialized accelerator."""
    module = _initialized_module()
    return None if module is None else module.get_rng_state()


def set_generator_state(state: torch.Tensor | None) -> None:
    """Set the current device's generator to a state that `generator_state` has returned."""
    if state is not None and (module := _initialized_module()):
        module.set_rng_state(state)


def allocate_pinned(nbytes: int) -> torch.Tensor:
    """Allocate pinned host memory, `[nbytes]` uint8. torch caches it for later allocations."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def pin(address: int, nbytes: int, device: torch.device) -> Callable[[], object] | None:
    """Have the driver pin host memory, without regard to RLIMIT_MEMLOCK; returns a call that unpins it, or None if it refuses."""
    if (runtime := getattr(_module(device), "cudart", None)) is None:
        return None
    if int(runtime().cudaHostRegister(address, nbytes, 0)) == 0:
        return partial(runtime().cudaHostUnregister, address)
    with suppress(RuntimeError):  # This launch takes the refusal's error, which the next one would raise.
        torch.zeros(1, device=device)
    return None


def _module(device: torch.device) -> ModuleType:
    return torch.get_device_module(device)  # type: ignore[no-any-return]


def _initialized_module() -> ModuleType | None:
    """Return torch's module of the accelerator (such as `torch.cuda`); None before it is initialized, as a query would do that."""
    kind = current_accelerator()
    return _module(kind) if kind is not None and _module(kind).is_initialized() else None
