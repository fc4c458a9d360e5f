"""CUDA devices: whether torch, the driver and the devices fit together."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.tools.doctor.findings import Finding, Level

_MODULE = Path("/proc/driver/nvidia/version")
_BUSY = 0.1
"""Part of a device's memory that is in use without a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device; sizes are in bytes. `supported`: torch has kernels for it."""

    name: str
    memory: int
    free: int
    architecture: str
    supported: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuda:
    """What torch and the system say of CUDA. `built` is the version that torch was built with, `driver` the highest that the driver
    knows; `error` is why no device can be used. `apart` are pairs of devices that do not reach each other's memory."""

    torch: str
    built: str | None
    driver: tuple[int, int] | None = None
    module: str = ""
    """The version of the kernel's module."""
    devices: Sequence[Device] = ()
    apart: Sequence[tuple[int, int]] = ()
    nccl: str = ""
    error: str = ""


def look() -> Cuda:
    """What this machine says. Where devices can be used, some of their memory is taken until the process ends."""
    found = Cuda(torch=torch.__version__, built=torch.version.cuda, driver=_driver(), module=_module())
    if found.built is None:
        return found
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
        devices = [_device(index) for index in range(count)]
        pairs = [(one, two) for one in range(count) for two in range(one + 1, count)]
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return replace(found, error=(str(error).splitlines() or [type(error).__name__])[0])
    return replace(found, devices=devices, apart=apart, nccl=nccl)


def judge(cuda: Cuda) -> Iterator[Finding]:
    """What that means for runs."""
    if cuda.built is None:
        yield _without(cuda)
        return
    yield _driver_fits(cuda)
    if not cuda.devices:
        yield _none(cuda)
        return
    for index, device in enumerate(cuda.devices):
        yield _judge_device(index, device)
    yield Finding(what="NCCL", found=cuda.nccl)
    if len(cuda.devices) > 1:
        yield _peers(cuda)


def _without(cuda: Cuda) -> Finding:
    if not cuda.module and cuda.driver is None:
        return Finding(what="CUDA", found=f"no device; torch {cuda.torch} computes on the CPU")
    return Finding(
        what="CUDA",
        found=f"a driver ({cuda.module or _dotted(cuda.driver)}), but torch {cuda.torch} is built without CUDA",
        level=Level.PROBLEM,
        means="Runs would compute on the CPU, beside devices that stand still.",
        do="Install a build of torch with CUDA: the selector on pytorch.org gives the command.",
    )


def _driver_fits(cuda: Cuda) -> Finding:
    built = tuple(map(int, (cuda.built or "0").split(".")[:2]))
    found = f"torch {cuda.torch} for CUDA {cuda.built}; driver {cuda.module or 'not found'}"
    if cuda.driver is None:
        return Finding(what="CUDA", found=found)
    found += f", up to CUDA {_dotted(cuda.driver)}"
    if cuda.driver[0] >= built[0]:  # Drivers run what was built for an older or equal major version.
        return Finding(what="CUDA", found=found)
    return Finding(
        what="CUDA",
        found=found,
        level=Level.PROBLEM,
        means="The driver is too old for this build of torch.",
        do=f"Update the driver, or install torch for CUDA {cuda.driver[0]}.",
    )


def _none(cuda: Cuda) -> Finding:
    if cuda.module or cuda.driver is not None:
        return Finding(
            what="devices",
            found=f"none can be used: {cuda.error or 'torch sees none'}",
            level=Level.PROBLEM,
            means="There is a driver, but no device for this process: runs would compute on the CPU.",
            do="Look at CUDA_VISIBLE_DEVICES, at what nvidia-smi says, and whether the container was started with --gpus all.",
        )
    return Finding(what="devices", found="none; torch computes on the CPU")


def _judge_device(index: int, device: Device) -> Finding:
    what = f"device {index}"
    found = f"{device.name}, {human_bytes(device.free)} free of {human_bytes(device.memory)}, {device.architecture}"
    if not device.supported:
        return Finding(
            what=what,
            found=found,
            level=Level.PROBLEM,
            means=f"This build of torch has no kernels for {device.architecture}.",
            do="Install a build of torch for it, or leave it out with CUDA_VISIBLE_DEVICES.",
        )
    if device.free < (1 - _BUSY) * device.memory:
        return Finding(
            what=what,
            found=found,
            level=Level.WARNING,
            means="Somebody else computes there: a run has less memory, and waits.",
            do="Look at nvidia-smi, end what should not be there, or choose others with CUDA_VISIBLE_DEVICES.",
        )
    return Finding(what=what, found=found)


def _peers(cuda: Cuda) -> Finding:
    count = len(cuda.devices) * (len(cuda.devices) - 1) // 2
    if not cuda.apart:
        return Finding(what="peer access", found=f"all {count} pairs of devices")
    some = ", ".join(f"{one}-{two}" for one, two in cuda.apart[:4]) + (" ..." if len(cuda.apart) > 4 else "")
    return Finding(
        what="peer access",
        found=f"{len(cuda.apart)} of {count} pairs do not reach each other ({some})",
        level=Level.WARNING,
        means="What they tell each other goes through the host's memory, which is slower than NVLink or one PCIe switch.",
        do="Keep parallel.tensor within devices that do (nvidia-smi topo -m); in a virtual machine, ask for peer access.",
    )


# From the system


def _device(index: int) -> Device:
    free, memory = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return Device(
        name=torch.cuda.get_device_name(index),
        memory=memory,
        free=free,
        architecture=f"sm_{major}{minor}",
        supported=has_kernels(torch.cuda.get_arch_list(), major, minor),
    )


def has_kernels(built: Sequence[str], major: int, minor: int) -> bool:
    """Whether code for `built`, such as `sm_90` and `compute_90`, runs on a device of this compute capability."""
    for each in built:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", each)
        if match and match[1] == "sm" and int(match[2]) == major and int(match[3]) <= minor:
            return True
        if match and match[1] == "compute" and (int(match[2]), int(match[3])) <= (major, minor):
            return True
    return False


def _driver() -> tuple[int, int] | None:
    """The highest version of CUDA that the driver knows; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _module() -> str:
    """The version of the driver in the kernel; empty where there is none."""
    try:
        match = re.search(r"(?:Kernel Module|x86_64|aarch64)\s+([\d.]+)", _MODULE.read_text(encoding="ascii"))
    except OSError:
        return ""
    return match[1] if match else "of an unknown version"


def _dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ()))
