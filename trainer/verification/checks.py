"""What a verification checks on request: the same bits again, a resumed run in another layout, streams of dropout."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.verification.certificate import Difference
from zeromesh.trainer.verification.observe import EXACT, Recorder, apart, own_modules
from zeromesh.trainer.verification.reference import PlainRun, tensors_of
from zeromesh.zero.hooks import watch_outputs

Run = Callable[..., None]
"""`(config, recorder, resume=..., model=..., samples=...)`: trains in the user's layout, see `Verification.run`."""


def check_determinism(run: Run, config: TrainerConfig, first: Recorder) -> Iterator[Difference]:
    """Train once more in the user's own precision; every loss, norm and parameter has the same bits."""
    again = Recorder()
    run(config, again)
    for kind, one, two in (("loss", first.losses, again.losses), ("norm", first.norms, again.norms)):
        for step, (before, now) in enumerate(zip(one, two, strict=True), start=1):
            if before != now and now == now:
                yield _found("determinism", f"the {kind} of step {step} of an equal run", abs(now - before), step=step)
    for name, value in first.parameters.items():
        if not torch.equal(value, again.parameters[name]):
            size = apart(again.parameters[name], value)
            yield _found("determinism", f"{name} after an equal run", size, name=name)


class _Leaver(Recorder):
    """Saves, and ends the run after a step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        super().on_step_end(trainer, step, metrics)
        if step == self._last:
            trainer.request(save=True, stop=True)


def check_resume(run: Run, config: TrainerConfig, mesh: Mesh, plain: PlainRun) -> Iterator[Difference]:
    """Two steps, one more in another layout, and the others in the user's again: what an uninterrupted run has trained."""
    named = config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": "verify-resume"}),
            "checkpoint": config.checkpoint.model_copy(
                update={"every_steps": 0, "resume": "auto", "asynchronous": False}
            ),
        }
    )
    other = other_layout(named, mesh)
    last = Recorder()
    run(named, _Leaver(2))
    run(other, _Leaver(3))
    run(named, last)
    for step, loss in zip(plain.steps[3:], last.losses, strict=True):
        size = abs(loss - step.loss) / abs(step.loss)
        if not size <= EXACT:
            yield _found("resume", "a loss after the run was resumed", size)
    for name, wanted in plain.steps[-1].parameters.items():
        size = apart(last.parameters[name], wanted, config.optimizer.lr * len(plain.steps) * wanted.numel() ** 0.5)
        if not size <= EXACT:
            yield _found("resume", f"{name} after the run was resumed", size, name=name)


def other_layout(config: TrainerConfig, mesh: Mesh) -> TrainerConfig:
    """A layout of as many ranks that keeps states otherwise: data ranks alone and, where these were so already, another stage."""
    divided = mesh.tensor.size * mesh.pipeline.size * mesh.replicate.size > 1
    alone = {"replicate": 1, "shard": "auto", "tensor": 1, "pipeline": 1, "sequence": False, "plan": None}
    parallel = {**alone, "schedule": "1f1b", "chunks": 1, "stages": None}
    stage = config.zero.stage if divided else 1 if config.zero.stage == 3 else 3
    none = {"tier": "none", "fraction": 1.0}
    values = config.model_dump(mode="json")
    values["parallel"].update(parallel)
    values["zero"]["stage"] = stage
    if stage < 3:
        values["offload"]["parameters"] = none
    return TrainerConfig.model_validate(values)


class _Streams(Recorder):
    """Keeps digests of what modules return in the first step, in forward and where backward computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        self.again: dict[str, list[str]] = defaultdict(list)
        self.draws: list[str] = []

    def on_train_begin(self, trainer: Any) -> None:
        super().on_train_begin(trainer)
        modules = own_modules(trainer.model)
        self.draws = [name for name, module in modules if isinstance(module, nn.Dropout) and module.p > 0]
        self._leaving.callback(watch_outputs(modules, self._see))

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        super().on_step_end(trainer, step, metrics)
        trainer.request(stop=True)

    def _see(self, name: str, output: Any) -> None:
        tensors = [each for each in tensors_of(output) if each.dim() > 1]
        if not tensors or not torch.is_grad_enabled() or bool(tensors[0].isnan().all()):
            return
        mark = xxhash.xxh3_64_hexdigest(_bytes_of(tensors[0]))
        if torch._C._current_graph_task_id() == -1:
            self.forward[name].append((mark, tuple(tensors[0].shape)))
        else:
            self.again[name].append(mark)


def check_dropout(
    run: Run, config: TrainerConfig, model: nn.Module, samples: Sequence[Any], mesh: Mesh, plain: PlainRun
) -> tuple[list[Difference], str]:
    """One step on copies of a single sample, so that what differs between microbatches was drawn; returns what is wrong, and what
    was checked."""
    random = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    if not random:
        return [], "nothing to check: no nn.Dropout of the model draws"
    watch, size = _Streams(), config.batch.micro_size
    whole = config.batch.global_size - config.batch.global_size % (size * mesh.data.size)
    even = config.model_copy(update={"batch": config.batch.model_copy(update={"global_size": whole})})
    full = max(samples, key=lambda sample: int((torch.as_tensor(sample.get("labels", 0)) != -100).sum()))
    run(even, watch, model=copy.deepcopy(model), samples=[full] * whole)
    found: list[Difference] = []
    for name, marks in watch.again.items():
        known = {mark for mark, _ in watch.forward[name]}
        if name in watch.draws and not known.issuperset(marks):
            found.append(_found("dropout", f"what {name} draws when backward computes it again", 1.0, name=name))
    own = {
        "place": [mesh.data_index, mesh.tensor.index, mesh.pipeline.index],
        "draws": {name: watch.forward[name] for name in watch.draws},
        "whole": {
            name: marks for name, marks in watch.forward.items() if _is_whole(name, marks, plain, mesh.data_index)
        },
    }
    rows = mesh.world.gather_json(own, "streams of dropout")
    seen: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for name, marks in row["draws"].items():
            for turn, (mark, _) in enumerate(marks):
                place = [row["place"][0], turn]
                other = seen.setdefault((name, mark), place)
                if other != place:
                    what = (
                        f"{name} draws alike in data rank {other[0]}, microbatch {other[1]}, and data rank {place[0]}, "
                    )
                    found.append(_found("dropout", f"{what}microbatch {turn}", 1.0, name=name))
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        data, _, stage = row["place"]
        first = groups.setdefault(f"{data}/{stage}", row["whole"])
        for name in first.keys() & row["whole"].keys():
            if first[name] != row["whole"][name]:
                found.append(
                    _found("dropout", f"the output of {name} on tensor ranks that compute it alike", 1.0, name=name)
                )
    unique = {each.detail: each for each in found}
    return list(unique.values()), f"{len(random)} modules that draw, {whole} copies of one sample"


def _is_whole(name: str, marks: Sequence[tuple[str, tuple[int, ...]]], plain: PlainRun, data_index: int) -> bool:
    """Whether this rank computes the whole output of a module."""
    outputs = plain.steps[0].outputs[data_index].get(name) if data_index < len(plain.steps[0].outputs) else None
    tensors = [each for each in outputs[0] if each.dim() > 1] if outputs else []
    return bool(tensors) and all(shape == tuple(tensors[0].shape) for _, shape in marks)


def _found(check: str, what: str, size: float, *, name: str = "", step: int = 0) -> Difference:
    return Difference(kind="check", step=step, name=name, size=size, run=check, detail=f"{check}: {what}")


def _bytes_of(tensor: Tensor) -> bytes:
    found: bytes = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found
