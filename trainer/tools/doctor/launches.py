"""The launch environment: who has started this process, and variables that change how runs behave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zeromesh.environment import LaunchEnvironment, available_cores, read_environment, setting
from zeromesh.errors import ConfigError
from zeromesh.trainer.tools.doctor.findings import Finding, Level

_SHOWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "WANDB_MODE")
"""Variables whose values are no secrets."""
_SECRET = ("WANDB_API_KEY", "HF_TOKEN")
"""Variables of which is said only that they are set."""
_SLOWING: dict[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "Every kernel is waited for."),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "Every collective is checked against those of all ranks before it runs."),
    "NCCL_P2P_DISABLE": ("1", "Devices talk through the host's memory, also where NVLink joins them."),
    "PYTHONMALLOC": ("debug", "Every allocation of Python is checked."),
}
"""What is for finding mistakes: the value, and what it does."""


def look() -> Iterator[Finding]:
    """The launcher, and the variables."""
    try:
        environment = read_environment()
    except ConfigError as error:
        yield Finding(
            what="launcher",
            found=str(error),
            level=Level.PROBLEM,
            means="A run that is started here does not know its rank.",
            do="Set all of a launcher's variables or none of them; srun, mpirun and torchrun set them all.",
        )
    else:
        yield _launcher(environment)
    yield from judge(
        {name: value for name in (*_SHOWN, *_SECRET, *_SLOWING, "ZEROMESH_FAULT") if (value := setting(name))}
    )


def _launcher(environment: LaunchEnvironment) -> Finding:
    if environment.launcher == "single":
        return Finding(what="launcher", found="none: zeromesh train starts the ranks itself (--nproc)")
    place = f"rank {environment.rank} of {environment.world_size}, {environment.local_world_size} on this host"
    found = f"{environment.launcher}: {place}; they meet at {environment.master_address}:{environment.master_port}"
    threads = setting("OMP_NUM_THREADS")
    if environment.local_world_size > 1 and threads is None:
        share = max(1, available_cores() // environment.local_world_size)
        return Finding(
            what="launcher",
            found=found,
            level=Level.WARNING,
            means=f"OMP_NUM_THREADS is not set: each of the {environment.local_world_size} ranks takes threads for all cores.",
            do=f"Set OMP_NUM_THREADS={share} before the launch.",
        )
    return Finding(what="launcher", found=found)


def judge(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is set, and what of that should not be in a run that is to be fast."""
    for name in _SHOWN:
        if name in variables:
            yield Finding(what=name, found=variables[name])
    for name in _SECRET:
        if name in variables:
            yield Finding(what=name, found="set (its value is not shown)")
    for name, (value, means) in _SLOWING.items():
        if variables.get(name) == value:
            yield Finding(
                what=name, found=value, level=Level.WARNING, means=means, do=f"Unset {name} when the mistake is found."
            )
    if "ZEROMESH_FAULT" in variables:
        yield Finding(
            what="ZEROMESH_FAULT",
            found=variables["ZEROMESH_FAULT"],
            level=Level.WARNING,
            means="Runs that are started here fail on purpose.",
            do="Unset ZEROMESH_FAULT.",
        )
