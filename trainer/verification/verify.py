"""`verify`: a few steps of a small copy of the user's model in the user's layout, beside one plain process.

Every rank runs the plain process by itself, before the engine runs: it takes a second, and each then compares what it has.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.errors import ConfigError, ZeromeshError, summary
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.verification.certificate import (
    Certificate,
    RoundedRun,
    StepNumbers,
    digest_of,
    largest_of,
    layout_of,
)
from zeromesh.trainer.verification.checks import CHECKS as CHECKS
from zeromesh.trainer.verification.compare import FACTOR, Bounds, Difference, ExactBounds, RoundedBounds, merged
from zeromesh.trainer.verification.observe import ModelsInFloat64, Observer
from zeromesh.trainer.verification.reference import PlainRun, train_plainly
from zeromesh.trainer.verification.shrink import SmallRun, make_subject
from zeromesh.trainer.weights.safetensors_source import quiet_library

FOLDER = "verification"
"""In a run's directory, while it is verified."""
_EXACT = {"compute": "float64", "master": "float64", "reduce": "float64"}
_PATIENCE = 5.0
"""Seconds that rank 0 waits for what others have found, after an error."""

MakeTrainer = Callable[..., Any]
"""Makes a trainer of the model, the configuration, the samples, a callback and a mesh."""


@dataclass(kw_only=True, slots=True)
class Bench:
    """What the runs of a verification have in common."""

    subject: SmallRun
    mesh: Mesh
    make_trainer: MakeTrainer
    folder: Path

    def train(
        self,
        config: TrainerConfig,
        callback: Any,
        *,
        model: nn.Module | None = None,
        joins: bool = True,
        around: AbstractContextManager[object] | None = None,
    ) -> None:
        """Train a copy of the model by the engine; all ranks call it.

        Args:
            config: of the run; in float64 where its compute dtype is that.
            callback: sees the run.
            model: another one than the subject's.
            joins: whether the run is on the verification's mesh; else on one of its own, as its configuration says.
            around: is in force while it trains.
        """
        subject = self.subject
        copied = copy.deepcopy(subject.model if model is None else model)
        trainer = self.make_trainer(copied, config, subject, callback, self.mesh if joins else None)
        quiet = io.StringIO()
        arithmetic = ModelsInFloat64() if config.precision.compute == "float64" else nullcontext()
        try:
            with redirect_stdout(quiet), redirect_stderr(quiet):
                trainer.prepare()  # What is tried on the way is the model in float32.
                with arithmetic, around or nullcontext():
                    trainer.fit()
        finally:
            if joins:
                trainer.leave()
            else:
                trainer.close()

    def exact(self, name: str = "exact", **sections: Mapping[str, Any]) -> TrainerConfig:
        """The configuration in float64, with a name of its own."""
        config = self.subject.config
        changed = {**sections, "precision": {**sections.get("precision", {}), **_EXACT}}
        changed["run"] = {**changed.get("run", {}), "name": name}
        update = {each: getattr(config, each).model_copy(update=dict(values)) for each, values in changed.items()}
        return config.model_copy(update=update)


def verify(
    config: TrainerConfig,
    inputs: UserInputs,
    mesh: Mesh,
    make_trainer: MakeTrainer,
    *,
    checks: Sequence[str] = (),
    out: Path | None = None,
) -> Certificate:
    """Verify the layout of a run; all ranks call it, and all get the certificate, which rank 0 writes to `out`.

    Raises:
        ConfigError: for what cannot be verified.
    """
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise ConfigError(f"check {unknown[0]!r} is not known; there are {', '.join(CHECKS)}")
    began = time.perf_counter()
    folder = (Path(config.run.output_dir) / config.run.name / FOLDER).expanduser().absolute()
    if mesh.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    mesh.meet("folder of the verification")
    with quiet_library():
        subject = make_subject(config, inputs, mesh.shape, folder)
    bench = Bench(subject=subject, mesh=mesh, make_trainer=make_trainer, folder=folder)
    try:
        certificate = _verified(bench, config, inputs, checks, began)
    finally:
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if out is not None and mesh.rank == 0:
        certificate.write(out)
    return certificate


def _verified(
    bench: Bench, config: TrainerConfig, inputs: UserInputs, checks: Sequence[str], began: float
) -> Certificate:
    subject, mesh = bench.subject, bench.mesh
    mine = mesh.data_index
    plain = train_plainly(
        subject,
        exact=True,
        keep_outputs=lambda block: block % subject.data_ranks == mine,
        make_scheduler=inputs.lr_scheduler,
    )
    bounds = ExactBounds(plain=plain, rate=subject.config.optimizer.lr)
    # A model that does not fit is gathered again and again, and this one would be kept.
    budget = {"gathered_budget": 0} if subject.config.zero.stage == 3 else {}
    observer, failure = _observed(bench, bench.exact(zero=budget), plain, bounds, exact=True)
    rounded, second, done = None, None, {}
    if not failure and subject.config.precision.compute != "float64":
        own = train_plainly(subject, exact=False, make_scheduler=inputs.lr_scheduler)
        compute = getattr(torch, subject.config.precision.compute)
        run = subject.config.run.model_copy(update={"name": "rounded"})
        settings = subject.config.model_copy(update={"run": run})
        second, failure = _observed(bench, settings, plain, RoundedBounds(plain, own, compute), exact=False)
        rounded = _rounded(subject.config, second)
    differences = observer.differences + [
        each for each in (second.differences if second is not None else []) if not observer.differences
    ]
    for name in () if failure else checks:
        done[name], problems = CHECKS[name](bench, plain, observer.digest)
        differences += problems
    rows = _gathered(bench, observer, differences, failure)
    return _certificate(bench, config, plain, rows, rounded, done, time.perf_counter() - began)


def _observed(
    bench: Bench, config: TrainerConfig, plain: PlainRun, bounds: Bounds, *, exact: bool
) -> tuple[Observer, str]:
    """Watch a run; returns the observer, and the error by which the run ended, if it did."""
    observer = Observer(plain, bounds, bench.subject, modules=exact)
    try:
        bench.train(config, observer)
    except Exception as error:  # Whatever ends the run is what was to be found out.
        if not observer.begun and isinstance(error, ZeromeshError) and isinstance(error, ValueError):
            raise
        ranks = (bench.mesh.rank,)
        place = Difference(kind="error", name="", step=observer.step, ranks=ranks, detail=summary(error, lines=3))
        observer.differences.append(place)
        return observer, place.detail
    finally:
        observer.close()
    return observer, ""


def _rounded(config: TrainerConfig, observer: Observer) -> RoundedRun:
    precision = config.precision
    largest = {kind: max(values.values(), default=0.0) for kind, values in observer.worst.items()}
    return RoundedRun(
        precision=f"{precision.compute} (master {precision.master}, sums {precision.reduce})",
        bound=f"allowed is {FACTOR:g} times what rounding does to the plain process in the same precision",
        largest=largest,
    )


def _gathered(bench: Bench, observer: Observer, differences: Sequence[Difference], failure: str) -> list[Any]:
    """What every rank has found; where the run has ended with an error, through files, as far as they are there in time."""
    row = {
        "differences": [asdict(each) for each in differences],
        "worst": observer.worst,
        "losses": observer.losses,
        "norms": observer.norms,
        "copies": observer.copies,
        "compared": observer.compared,
        "digest": observer.digest,
        "rank": bench.mesh.rank,
    }
    mesh = bench.mesh
    if not failure:
        return mesh.world.gather_json(row, "results of the verification")
    path = bench.folder / f"found-{mesh.rank}.json"
    bench.folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(row).encode(), sync=False)
    until = time.monotonic() + _PATIENCE
    paths = [bench.folder / f"found-{rank}.json" for rank in range(mesh.world_size)]
    while time.monotonic() < until and not all(each.exists() for each in paths):
        time.sleep(0.05)
    time.sleep(0.2)  # Others read the same files before rank 0 takes them away.
    return [json.loads(each.read_text(encoding="utf-8")) for each in paths if each.exists()] or [row]


def _certificate(
    bench: Bench,
    config: TrainerConfig,
    plain: PlainRun,
    rows: Sequence[Mapping[str, Any]],
    rounded: RoundedRun | None,
    checks: Mapping[str, str],
    seconds: float,
) -> Certificate:
    subject, first = bench.subject, rows[0]
    differences = merged(
        [Difference(**{**each, "ranks": tuple(each["ranks"])}) for row in rows for each in row["differences"]]
        + _unequal_copies(rows, plain)
    )
    numbers = zip(first["losses"], first["norms"], plain.steps, strict=False)
    shape = bench.mesh.shape
    worst = {
        kind: largest_of([row["worst"].get(kind, {}) for row in rows]) for kind in ("gradient", "parameter", "output")
    }
    model: nn.Module = subject.model
    return Certificate(
        passed=not differences,
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layout=layout_of(subject.config, shape, -(-subject.blocks() // subject.data_ranks)),
        changes=subject.changes,
        config_digest=digest_of(config),
        result_digest=first["digest"],
        steps=tuple(
            StepNumbers(step=step, loss=loss, plain_loss=each.loss, norm=norm, plain_norm=each.norm)
            for step, (loss, norm, each) in enumerate(numbers, 1)
        ),
        gradients=worst["gradient"],
        weights=worst["parameter"],
        outputs=worst["output"],
        compared=sum(row["compared"] for row in rows),
        rounded=rounded,
        checks=checks,
        differences=differences,
        seconds=seconds,
    )


def _unequal_copies(rows: Sequence[Mapping[str, Any]], plain: PlainRun) -> list[Difference]:
    """Parameters that several ranks read, and that are not the same bits on all of them, in the first step in which that is so."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        for key, digest in row["copies"].items():
            found.setdefault(key, {}).setdefault(digest, []).append(row["rank"])
    apart = {key: groups for key, groups in found.items() if len(groups) > 1}
    if not apart:
        return []
    places = {name: place for place, name in enumerate(plain.names)}
    first = min(int(key.partition("|")[0]) for key in apart)
    made = []
    for key, groups in apart.items():
        step, name, _ = key.split("|")
        if int(step) == first:
            common = max(groups.values(), key=len)
            others = sorted(rank for group in groups.values() if group is not common for rank in group)
            made.append(
                Difference(
                    kind="copies",
                    name=name,
                    step=first + 1,
                    ranks=tuple(others),
                    place=places.get(name, 0),
                    detail=f"unlike those of ranks {', '.join(map(str, common))}",
                )
            )
    return made
