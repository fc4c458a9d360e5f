"""`verify`: train a small run for a few steps in the user's layout and in one plain process, and certify the differences."""

import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from torch import Tensor

import zeromesh
from zeromesh.errors import ConfigError, counted
from zeromesh.files import refusals, write_whole
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.verification.certificate import Certificate, Difference, merged
from zeromesh.trainer.verification.checks import CHECKS
from zeromesh.trainer.verification.observe import Verification, bytes_of
from zeromesh.trainer.verification.shrink import SmallRun, shrink


def verify(
    make: Callable[..., Any],
    config: TrainerConfig,
    inputs: UserInputs,
    mesh: Mesh,
    *,
    checks: Collection[str] = (),
    out: Path | None = None,
) -> Certificate:
    """Train a small run in the user's layout beside a plain process, as `Trainer.verify`. Rank 0 writes to `out`, if given."""
    if unknown := [name for name in checks if name not in CHECKS]:
        raise ConfigError(f"{', '.join(unknown)} cannot be checked; there are {', '.join(CHECKS)}", where="check")
    began = time.perf_counter()
    with _scratch_directory(config, mesh) as folder:
        subject = shrink(config, inputs, mesh, folder)
        verification = Verification(make=make, mesh=mesh, config=config, inputs=inputs, subject=subject)
        try:
            verification.exact_pass()
            verification.user_precision_pass()
            for name in checks:
                differences, verification.checks[name] = CHECKS[name](verification)
                verification.differences += differences
            rows = mesh.world.gather_json([asdict(one) for one in verification.differences], "differences of all ranks")
        except Exception as error:
            if error is not verification.failed:
                raise
            # Other ranks stop after this error, so no collective can follow.
            rows = [[]] * mesh.rank + [[asdict(one) for one in verification.differences]]
    sorted_differences = merged([[Difference(**{**values, "ranks": ()}) for values in row] for row in rows])
    certificate = Certificate(
        passed=not sorted_differences,
        differences=sorted_differences,
        layout=_layout(config, mesh),
        versions={each.__name__: each.__version__ for each in (zeromesh, torch, transformers)}
        | {"python": platform.python_version()},
        digests=_digests(subject),
        passes=verification.passes,
        checks=verification.checks,
        notes=(*subject.notes, *filter(None, [verification.plain.rounding])),
        seconds=time.perf_counter() - began,
    )
    if out is not None and mesh.rank == 0:
        with refusals(out, "written"):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, certificate.to_json().encode())
    return certificate


@contextmanager
def _scratch_directory(config: TrainerConfig, mesh: Mesh) -> Iterator[Path]:
    """Create a temporary directory for the small runs, the same on all ranks, which is removed at the end."""
    parent, name = Path(config.run.output_dir).expanduser(), ""
    if mesh.rank == 0:
        parent.mkdir(parents=True, exist_ok=True)
        name = Path(tempfile.mkdtemp(prefix=".verify-", dir=parent)).name
    folder = parent / mesh.world.gather_bytes(name.encode(), "folder of the verification")[0].decode()
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        if mesh.environment.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _layout(config: TrainerConfig, mesh: Mesh) -> dict[str, Any]:
    axes = [f"{axis} {size}" for axis, size in zip(AXES, mesh.shape.sizes, strict=True) if size > 1]
    parallel, offload = config.parallel, config.offload.model_dump(mode="json")
    layout: dict[str, Any] = {
        "layout": f"{counted(mesh.world_size, 'rank')}: {' x '.join(axes) or 'one'}",
        "zero.stage": config.zero.stage,
        "precision": f"{config.precision.compute}, master {config.precision.master}, reduce {config.precision.reduce}",
    }
    if parallel.pipeline > 1:
        layout["schedule"] = f"{parallel.schedule}, {parallel.chunks} stages a rank"
    if parallel.sequence:
        layout["sequence"] = "shared out to tensor ranks"
    tiers = {name: offload[name] for name in ("optimizer", "gradients", "parameters", "activations")}
    if moved := [f"{name} {tier}" for name, tier in tiers.items() if tier not in ("none", "auto")]:
        layout["offload"] = ", ".join(moved)
    return layout


def _digests(subject: SmallRun) -> dict[str, str]:
    weights = b"".join(name.encode() + bytes_of(each) for name, each in subject.model.named_parameters())
    values = [pair for sample in subject.samples for pair in sorted(sample.items())]
    data = [name.encode() + (bytes_of(one) if isinstance(one, Tensor) else repr(one).encode()) for name, one in values]
    run = subject.config.run.model_copy(update={"output_dir": "verify"})
    text = subject.config.model_copy(update={"run": run}).to_yaml()
    parts = {"config": text.encode(), "weights": weights, "data": b"".join(data)}
    return {name: xxhash.xxh3_128_hexdigest(part) for name, part in parts.items()}
