"""The description of this machine, for the head of the table: no tensor is made."""

import os
from typing import Any

import torch
import transformers

from zeromesh.offload import available_bytes
from zeromesh.offload.accelerator import collectives_library, device_memory, device_name, initialize


def describe() -> dict[str, Any]:
    """Its devices, and the versions that matter."""
    devices = initialize()
    found: dict[str, Any] = {"devices": len(devices)}
    if devices:
        found["device"] = device_name(devices[0])
        found["device GiB"] = round(device_memory(devices[0]).total / 2**30, 1)
        found["collectives"] = collectives_library()
    found["host GiB free"] = round(available_bytes() / 2**30, 1)
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {**found, "torch": torch.__version__, "transformers": transformers.__version__}
