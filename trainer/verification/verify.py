"""`verify`: train a small run for a few steps in the user's layout and in one plain process, and certify the differences."""

import copy
import io
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from torch import Tensor

import zeromesh
from zeromesh.errors import ConfigError, ZeromeshError, counted, summary
from zeromesh.files import refusals, write_whole
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.verification.certificate import Certificate, Difference, PassRecord, merged
from zeromesh.trainer.verification.checks import check_determinism, check_dropout, check_resume
from zeromesh.trainer.verification.observe import (
    EXACT,
    Observer,
    Recorder,
    bytes_of,
    differences_of,
    errors_of,
    own_microbatches,
)
from zeromesh.trainer.verification.reference import PlainRun, train_plainly
from zeromesh.trainer.verification.shrink import SmallRun, exact, shrink

CHECKS = ("determinism", "resume", "dropout")
"""The names of the optional checks."""
MakeTrainer = Callable[..., Any]
"""Creates a trainer as `zeromesh.Trainer` does."""
_ROUNDING = 4.0
"""The allowed error of the user's layout, as a multiple of the error of a plain process in the same precision."""
_EPSILONS = 8.0
"""The tolerance in units of the compute dtype's epsilon."""


@dataclass(kw_only=True)
class Verification:
    """The passes of one verification on this rank."""

    make: MakeTrainer
    mesh: Mesh
    config: TrainerConfig
    inputs: UserInputs
    subject: SmallRun
    differences: list[Difference] = field(default_factory=list)
    passes: dict[str, PassRecord] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    plain: PlainRun = field(init=False)
    """The plain process's run in float64."""
    own: Recorder = field(init=False)
    """The run in the user's precision."""
    failed: Exception | None = None
    """The exception that ended a run in the user's layout."""

    def run(self, config: TrainerConfig, recorder: Recorder, subject: SmallRun | None = None) -> None:
        """Train a copy of the subject's model, by default the small run's, by `config`, without output."""
        given, subject = self.inputs, subject or self.subject
        with closing(recorder), redirect_stdout(io.StringIO()):
            trainer = self.make(
                copy.deepcopy(subject.model),
                config,
                subject.samples,
                data_collator=subject.collate,
                compute_loss=given.compute_loss,
                lr_scheduler=given.lr_scheduler,
                callbacks=[recorder],
            )
            try:
                with trainer:
                    trainer.fit()
            except Exception as error:  # Any error that ends the run is a finding, except refusals.
                if recorder.began or not (isinstance(error, ZeromeshError) and isinstance(error, ValueError)):
                    self.failed = error
                    step = len(recorder.losses) + 1
                    said = f"the run ends in step {step}, and rank {self.mesh.rank} says: {summary(error)}"
                    self.differences += getattr(recorder, "differences", [])
                    self.differences.append(Difference(kind="error", step=step, name="", size=0.0, detail=said))
                raise

    def check(self, names: Collection[str]) -> None:
        """Run the requested checks, after both passes."""
        small, wide = self.subject.config, exact(self.subject.config)
        for name in names:
            if name == "determinism":
                found, done = list(check_determinism(self.run, small, self.own)), "the same bits in a second run"
            elif name == "resume":
                found = list(check_resume(self.run, wide, self.mesh, self.plain))
                done = "saved after step 2, loaded in another layout, saved after step 3, loaded in this one"
            else:
                drops = shrink(self.config, self.inputs, self.mesh, Path(small.run.output_dir), dropout=True)
                given = self.inputs.compute_loss
                found, done = check_dropout(self.run, drops, exact(drops.config), self.mesh, given)
            self.differences += found
            self.checks[name] = done

    def exact_pass(self) -> None:
        """Train in float64, once with every output and gradient recorded, and once as the user trains, without hooks."""
        config = exact(self.subject.config)
        self.plain = plain = train_plainly(self.subject, config, self.inputs, own_microbatches(config, self.mesh))
        observer, recorder = Observer(plain), Recorder()
        self.run(config, observer)
        self.run(config, recorder)
        self.differences += observer.differences
        self.differences += differences_of(recorder, plain, config.optimizer.lr, run="while nobody watched")
        self.passes["exact"] = _record(
            observer,
            plain,
            EXACT,
            gradients=dict(observer.gradient_sizes),
            parameters=dict(observer.parameter_sizes),
            outputs=observer.compared,
        )

    def own_pass(self) -> None:
        """Train in the user's precision; the error may be a few times that of a plain process in that precision."""
        config, rate = self.subject.config, self.subject.config.optimizer.lr
        wide = exact(config).model_copy(update={"optimizer": config.optimizer})
        true, plain = (train_plainly(self.subject, each, self.inputs) for each in (wide, config))
        recorder = self.own = Recorder()
        self.run(config, recorder)
        compute = config.precision.compute
        least = _EPSILONS * torch.finfo(getattr(torch, compute)).eps
        bounds = dict.fromkeys(("loss", "norm", "parameter"), max(EXACT, least))
        for kind, _, _, size in errors_of(plain, true, rate):
            bounds[kind] = max(bounds[kind], _ROUNDING * size + least)
        parameters = {}
        for kind, step, name, size in errors_of(recorder, true, rate):
            if kind == "parameter":
                parameters[name] = size
            if not size <= bounds[kind]:
                what = f"the {kind}{f' of {name}' if name else ''} in {compute} (bound {bounds[kind]:.2g})"
                self.differences.append(
                    Difference(kind="rounding", step=step, name=name, size=size, run="own precision", detail=what)
                )
        self.passes[compute] = _record(recorder, plain, max(bounds.values()), parameters=parameters)


def _record(recorder: Recorder, plain: PlainRun, bound: float, **compared: Any) -> PassRecord:
    return PassRecord(
        losses=recorder.losses,
        plain_losses=plain.losses,
        norms=recorder.norms,
        plain_norms=plain.norms,
        bound=bound,
        **compared,
    )


def verify(
    make: MakeTrainer,
    config: TrainerConfig,
    inputs: UserInputs,
    mesh: Mesh,
    *,
    checks: Collection[str] = (),
    out: Path | None = None,
) -> Certificate:
    """Train a small run of the user's model in the user's layout beside a plain process; all ranks call it.

    `out` is the path of the certificate, which rank 0 writes; None: no file.

    Raises:
        ConfigError: for an unknown check, and for a model that cannot be made small.
        StorageError: where the certificate cannot be written.
    """
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} cannot be checked; there are {', '.join(CHECKS)}", where="check")
    began = time.perf_counter()
    with scratch(config, mesh) as folder:
        subject = shrink(config, inputs, mesh, folder)
        each = Verification(make=make, mesh=mesh, config=config, inputs=inputs, subject=subject)
        try:
            each.exact_pass()
            each.own_pass()
            each.check(checks)
            own = [asdict(found) for found in each.differences]
            rows = mesh.world.gather_json(own, "differences of all ranks")
        except Exception as error:
            if error is not each.failed:
                raise
            # Other ranks have left, or will once they hear of it: no gather can follow.
            rows = [[]] * mesh.rank + [[asdict(found) for found in each.differences]]
    differences = merged([[Difference(**{**found, "ranks": ()}) for found in row] for row in rows])
    certificate = Certificate(
        passed=not differences,
        differences=differences,
        layout=_layout(config, mesh),
        versions={each.__name__: each.__version__ for each in (zeromesh, torch, transformers)}
        | {"python": platform.python_version()},
        digests=_digests(subject),
        passes=each.passes,
        checks=each.checks,
        notes=subject.notes,
        seconds=time.perf_counter() - began,
    )
    if out is not None and mesh.rank == 0:
        with refusals(out, "written"):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, certificate.to_json().encode())
    return certificate


@contextmanager
def scratch(config: TrainerConfig, mesh: Mesh) -> Iterator[Path]:
    """Create a temporary directory for the small runs, the same on all ranks, which is removed at the end."""
    parent = Path(config.run.output_dir).expanduser()
    made = ""
    if mesh.rank == 0:
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=".verify-", dir=parent)
    name = Path(mesh.world.gather_bytes(made.encode(), "folder of the verification")[0].decode()).name
    folder = parent / name
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        if mesh.environment.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _layout(config: TrainerConfig, mesh: Mesh) -> dict[str, Any]:
    axes = [f"{axis} {size}" for axis, size in zip(AXES, mesh.shape.sizes, strict=True) if size > 1]
    parallel, offload = config.parallel, config.offload.model_dump(mode="json")
    found: dict[str, Any] = {
        "layout": f"{counted(mesh.world_size, 'rank')}: {' x '.join(axes) or 'one'}",
        "zero.stage": config.zero.stage,
        "precision": f"{config.precision.compute}, master {config.precision.master}, reduce {config.precision.reduce}",
    }
    if parallel.pipeline > 1:
        found["schedule"] = f"{parallel.schedule}, {parallel.chunks} stages a rank"
    if parallel.sequence:
        found["sequence"] = "shared out to tensor ranks"
    tiers = {name: offload[name] for name in ("optimizer", "gradients", "parameters", "activations")}
    moved = [f"{name} {tier}" for name, tier in tiers.items() if tier not in ("none", "auto")]
    if moved:
        found["offload"] = ", ".join(moved)
    return found


def _digests(subject: SmallRun) -> dict[str, str]:
    weights = b"".join(name.encode() + bytes_of(each) for name, each in subject.model.named_parameters())
    values = [pair for sample in subject.samples for pair in sorted(sample.items())]
    data = [
        name.encode() + (bytes_of(each) if isinstance(each, Tensor) else repr(each).encode()) for name, each in values
    ]
    text = subject.config.model_copy(
        update={"run": subject.config.run.model_copy(update={"output_dir": "verify"})}
    ).to_yaml()
    parts = {"config": text.encode(), "weights": weights, "data": b"".join(data)}
    return {name: xxhash.xxh3_128_hexdigest(part) for name, part in parts.items()}
