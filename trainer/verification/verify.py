"""`verify`: train a small run for a few steps in the user's layout and in one plain process, and certify the differences. Optional
checks: bitwise determinism, resuming in another layout, and dropout masks."""

import platform
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
import xxhash
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import zeromesh
from zeromesh.errors import ConfigError, counted
from zeromesh.files import refusals, write_whole
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import accelerator
from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.models.small_copy import deviation
from zeromesh.trainer.verification.certificate import Certificate, Difference, merged
from zeromesh.trainer.verification.observe import Recorder, Verification, bytes_of, differences_of
from zeromesh.trainer.verification.reference import batches_of, loss_sum, tensors_of, whole_model
from zeromesh.trainer.verification.shrink import SmallRun, exact, shrink
from zeromesh.zero.hooks import watch_outputs


def verify(
    make: Callable[..., Any], config: TrainerConfig, inputs: UserInputs, mesh: Mesh, checks: Collection[str], out: Path
) -> Certificate:
    """Train a small run in the user's layout beside a plain process, as `Trainer.verify`. Rank 0 writes to `out`."""
    if unknown := [name for name in checks if name not in CHECKS]:
        raise ConfigError(f"{', '.join(unknown)} cannot be checked; there are {', '.join(CHECKS)}", where="check")
    if problems := disagreements(config, under="verify"):
        raise ConfigError(problems)
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
    if mesh.rank == 0:
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
    text = subject.config.changed(run={"output_dir": "verify"}).to_yaml()
    parts = {"config": text.encode(), "weights": weights, "data": b"".join(data)}
    return {name: xxhash.xxh3_128_hexdigest(part) for name, part in parts.items()}


CheckResult = tuple[list[Difference], str]  # The differences that a check has found, and a sentence about it.
_LEAST_ELEMENTS = 32
"""The least number of elements of a mask that is compared, since smaller masks may be equal by chance."""


def _check_determinism(each: Verification) -> CheckResult:
    """Train once more in the user's precision, and compare losses, norms and parameters bitwise."""
    first, again, differences = each.recorder, Recorder(), []
    each.run(each.subject.config, again)
    for kind, one, two in (("loss", first.losses, again.losses), ("norm", first.norms, again.norms)):
        for step, (before, now) in enumerate(zip(one, two, strict=True), start=1):
            if repr(before) != repr(now):  # NaN has equal text, and is not equal to itself.
                what = f"the {kind} of step {step} of an equal run"
                differences.append(_issue("determinism", what, abs(now - before), step=step))
    for name, value in first.parameters.items():
        if not torch.equal(value, again.parameters[name]):
            size = deviation(again.parameters[name], value)
            differences.append(_issue("determinism", f"{name} after an equal run", size, name=name))
    return differences, "the same bits in a second run"


def _check_resume(each: Verification) -> CheckResult:
    """Train two steps in the user's layout, one in another and the rest in the user's, and compare with an uninterrupted run."""
    config = exact(each.subject.config)
    config = config.changed(run={"name": "verify-resume"}, checkpoint={"resume": "auto", "asynchronous": False})
    # The other layout of as many ranks is data parallelism alone or, where that is the user's, another stage.
    divided = each.mesh.shard.size < each.mesh.world_size
    values = config.model_dump(mode="json")
    values["parallel"] |= dict.fromkeys(("replicate", "tensor", "context", "pipeline", "chunks"), 1)
    values["parallel"] |= {"shard": "auto", "sequence": False, "plan": None, "schedule": "1f1b", "stages": None}
    values["parallel"]["context_method"] = "auto"
    stage = values["zero"]["stage"] = config.zero.stage if divided else 1 if config.zero.stage == 3 else 3
    if stage < 3:
        values["offload"]["parameters"] = {"tier": "none", "fraction": 1.0}
    each.run(config, Recorder(stop_after=2, saves=True))
    each.run(TrainerConfig.model_validate(values), Recorder(stop_after=3, saves=True))
    each.run(config, last := Recorder())
    differences = list(differences_of(last, each.plain, run="resume", first=3))
    return differences, "saved after step 2, loaded in another layout, saved after step 3, loaded in this one"


class _MaskDigests(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Digests every mask that modules draw from PyTorch's generators: in `nn.Dropout`, by a function, or inside an attention
    kernel, whose random state or, where it returns none, whose output is digested."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        self.again: dict[str, list[str]] = defaultdict(list)
        """The digests of masks that recomputation in backward draws, by module."""
        self._names = {id(module): name for name, module in model.named_modules()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = _generators()
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and each.numel()]
        mask = min(tensors, key=lambda each: each.is_floating_point(), default=None)
        # An attention kernel without dropout draws no random numbers.
        if mask is not None and max(each.numel() for each in tensors) >= _LEAST_ELEMENTS and before != _generators():
            frame: FrameType | None = sys._getframe()
            while frame is not None and id(frame.f_locals.get("self")) not in self._names:
                frame = frame.f_back
            name = "" if frame is None else self._names[id(frame.f_locals["self"])]
            with _disable_current_modes():  # Selective recomputation would count the operators of a digest.
                mark = xxhash.xxh3_64_hexdigest(bytes_of(mask))
            if torch._C._current_graph_task_id() == -1:
                self.forward[name].append((mark, tuple(mask.shape)))
            else:
                self.again[name].append(mark)
        return result

    def after(self, name: str, output: Any) -> None:
        """Drop the last mask of a module whose output is NaN: it stands for a module of another pipeline stage."""
        tensors, drawn = tensors_of(output), self.forward.get(name)
        if drawn and tensors and bool(tensors[0].isnan().all()) and torch._C._current_graph_task_id() == -1:
            drawn.pop()


class _MaskRecorder(Recorder):
    def on_train_begin(self, trainer: Any) -> None:
        super().on_train_begin(trainer)
        self.draws = self.cleanup.enter_context(_MaskDigests(trainer.model))
        if trainer.run.model.divided.pipeline is not None:
            self.cleanup.callback(watch_outputs(list(trainer.model.named_modules()), self.draws.after))


def _check_dropout(each: Verification) -> CheckResult:
    mesh, folder = each.mesh, Path(each.subject.config.run.output_dir)
    subject = shrink(each.config, each.inputs, mesh, folder, dropout=True)
    config = exact(subject.config)
    model = whole_model(subject, config)
    plain = _MaskDigests(model)
    with plain:
        loss_sum(model.train(), batches_of(subject, config, 0)[0], compute_loss=each.inputs.compute_loss)
    if not plain.forward:
        return [], "nothing to check: the model draws nothing"
    batch, size = config.batch, config.batch.micro_size * mesh.data.size
    # In an incomplete round, a rank without a microbatch computes the first one again, and its equal masks would count as wrong.
    whole_rounds = config.changed(batch={"global_size": batch.global_size // size * size})
    each.run(whole_rounds, watch := _MaskRecorder(stop_after=2), subject)
    redrawn = [
        _issue("dropout", f"{name} draws otherwise when backward computes it again", name=name)
        for name, marks in watch.draws.again.items()
        if not {mark for mark, _ in watch.draws.forward[name]}.issuperset(marks)
    ]
    rows = mesh.world.gather_json([mesh.peers.index, mesh.coordinate["tensor"], watch.draws.forward], "masks of dropout")
    return [*redrawn, *_wrong_masks(rows, plain)], f"{sum(len(each) for row in rows for each in row[2].values())} masks"


def _wrong_masks(rows: Sequence[Any], plain: _MaskDigests) -> Iterator[Difference]:
    """Yield a difference for masks that are wrongly equal or unequal. `rows` has each rank's data index, tensor index and masks."""
    draws: dict[str, tuple[Any, ...]] = {}
    masks: dict[tuple[Any, ...], str] = {}
    for data, tensor, forward in rows:
        for name, marks in forward.items():
            whole = [shape for _, shape in plain.forward.get(name, [])]
            calls = max(1, len(whole))
            for call, (mark, shape) in enumerate(marks):
                share = -1 if tuple(shape) in whole else tensor
                draw = (name, data, call, share)
                other = draws.setdefault(mark, draw)
                if other != draw:
                    first, second = (f"data rank {each[1]}, microbatch {each[2] // calls}" for each in (other, draw))
                    who = f"{name} draws" if other[0] == name else f"{other[0]} and {name} draw"
                    shares = f" (shares {other[3]} and {share})" if share >= 0 else ""
                    yield _issue("dropout", f"{who} alike in {first} and {second}{shares}", name=name)
                elif masks.setdefault(draw, mark) != mark:
                    yield _issue("dropout", f"{name} draws otherwise on tensor ranks that compute it alike", name=name)


def _generators() -> tuple[bytes, ...]:
    states = (torch.get_rng_state(), accelerator.generator_state())
    with _disable_current_modes():
        return tuple(bytes_of(each) for each in states if each is not None)


def _issue(check: str, what: str, size: float = 0.0, *, name: str = "", step: int = 0) -> Difference:
    return Difference(kind="check", step=step, name=name, size=size, run=check, detail=f"{check}: {what}")


CHECKS = {"determinism": _check_determinism, "resume": _check_resume, "dropout": _check_dropout}
