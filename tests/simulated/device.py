"""The simulated accelerator of `device.cpp` in a process: `load()` makes it what `torch.accelerator` finds, called `sim`.

What it has seen is asked for afterwards: `races()`, `waits()`. `late(False)` has copies run at once, as on a device that is fast.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILT = SOURCE.parents[2] / "build" / "simulated"
ops: Any = torch.ops.sim


def compiler() -> str | None:
    """The C++ compiler of this machine; None where it has none, and the simulated device cannot be had."""
    return shutil.which("g++") or shutil.which("clang++")


def build() -> Path:
    """The compiled library, made anew when its source or torch has changed. Processes that start together wait for one of them."""
    content = SOURCE.read_bytes() + torch.__version__.encode()
    library = BUILT / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            torch_folder = Path(torch.__file__).parent
            include = torch_folder / "include"
            made = library.with_suffix(".made")
            subprocess.run(
                [
                    *(str(compiler()), "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
                    *(f"-I{include}", f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(made)),
                    *(f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"),
                ],
                check=True,
            )
            made.rename(library)
    return library


def load() -> torch.device:
    """Make the simulated device this process's accelerator; for good, since torch keeps what is registered."""
    if not hasattr(torch, "sim"):
        torch.utils.rename_privateuse1_backend("sim")
        torch.ops.load_library(str(build()))
        torch._register_device_module("sim", _module())
        torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
        torch.empty(1, pin_memory=True)  # torch asks a device about pinned memory only once it has been begun, as CUDA is.
        # `Module.to` keeps parameters the objects that they are, as it does between a CPU and a GPU.
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.Tensor.data = _data()  # type: ignore[method-assign, assignment]
    return torch.device("sim", 0)


def _data() -> property:
    """`Tensor.data`, which may be set to a tensor of the device, as a CPU tensor's may to one of a GPU."""
    plain = torch.Tensor.data

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if tensor.device.type == value.device.type:
            plain.__set__(tensor, value)  # type: ignore[attr-defined]
            return
        fresh = value.detach().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(fresh, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, fresh)

    return property(plain.__get__, assign)  # type: ignore[attr-defined]


def _module() -> ModuleType:
    """What `torch.cuda` is for CUDA."""
    module, begun = ModuleType("torch.sim"), os.getpid()

    @contextmanager
    def device(index: object) -> Iterator[None]:
        yield

    @contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        with chosen or nullcontext():
            yield

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: os.getpid() == begun,  # a process that was forked from this one has lost the device
        _initialized=True,
        is_bf16_supported=lambda *_a, **_k: True,
        _is_in_bad_fork=lambda: os.getpid() != begun,
        init=lambda: None,
        _lazy_init=lambda: None,
        device_count=ops.count,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        synchronize=torch.accelerator.synchronize,
        current_stream=torch.accelerator.current_stream,
        device=device,
        stream=stream,
        manual_seed=ops.seed,
        manual_seed_all=ops.seed,
        get_rng_state=lambda *_a: ops.generator_state(),
        set_rng_state=lambda state, *_a: ops.set_generator_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_device_name=lambda *_a: "simulated device",
        get_device_properties=lambda where=None: SimpleNamespace(uuid=f"simulated-{torch.device(where or 'sim').index or 0}"),
        get_device_capability=lambda *_a: (8, 0),
        can_device_access_peer=lambda *_a: True,
        Stream=torch.Stream,
        Event=torch.Event,
        cudart=lambda: SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, _flags: ops.register_host(address, nbytes),
            cudaHostUnregister=lambda address: ops.unregister_host(address),
        ),
    )
    return module


def races() -> list[str]:
    """Pairs of accesses to the same bytes that nothing orders, since `clear`."""
    return list(ops.races())


def waits() -> list[str]:
    """What the host has waited for since `clear`, in the thread that trains and in those of autograd; helpers may wait."""
    helpers = {
        thread.native_id
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    }
    found = (text.split(" ", 1) for text in ops.waits())
    return [what for thread, what in found if int(thread) not in helpers]


def clear() -> None:
    ops.clear()


def late(on: bool) -> None:
    """Whether copies of side streams run as late as is legal (the default) or at once."""
    ops.set("late", int(on))


@contextmanager
def no_waits(why: str) -> Iterator[None]:
    """Inside the block a wait of the host for the device is an error, raised where it waits."""
    ops.forbid(why)
    try:
        yield
    finally:
        ops.forbid("")


@contextmanager
def judged() -> Iterator[None]:
    clear()
    yield
    torch.accelerator.synchronize()
    found = races()
    assert not found, "\n".join(dict.fromkeys(found))
