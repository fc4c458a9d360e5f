"""What is checked on request: determinism, resumption in another layout, and the random numbers of dropout."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zeromesh.mesh.mesh_shape import AXES, MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.verification.compare import Difference, ExactBounds
from zeromesh.trainer.verification.observe import Observer
from zeromesh.trainer.verification.reference import PlainRun
from zeromesh.trainer.verification.shrink import SmallRun
from zeromesh.zero.gather_order import PassMode

SAVED = 2
"""The step after which a run is saved and another one goes on from there."""
_RATE = 0.25
_RATES = ("dropout", "attention_dropout", "attn_pdrop", "hidden_dropout", "activation_dropout", "classifier_dropout")


class TrainsCopies(Protocol):
    """What trains copies of the subject by the engine."""

    subject: SmallRun
    mesh: Mesh
    folder: Path

    def train(
        self,
        config: TrainerConfig,
        callback: Any,
        *,
        model: nn.Module | None = None,
        joins: bool = True,
        around: AbstractContextManager[object] | None = None,
    ) -> None: ...

    def exact(self, name: str = "exact", **sections: Mapping[str, Any]) -> TrainerConfig: ...


Check = Callable[[TrainsCopies, PlainRun, str], tuple[str, list[Difference]]]
"""Given the digest of the run that was compared; returns what to say, and what was found on this rank."""


def determinism(bench: TrainsCopies, plain: PlainRun, digest: str) -> tuple[str, list[Difference]]:
    """The same run once more gives the same bits."""
    again = _observer(bench, plain, bench.subject)
    # The same configuration: budgets and all.
    budget = {"gathered_budget": 0} if bench.subject.config.zero.stage == 3 else {}
    bench.train(bench.exact("again", zero=budget), again)
    again.close()
    if again.digest == digest:
        return f"the same bits in two runs ({digest})", []
    return "two runs differ", [_found(bench, "determinism", f"two runs gave {digest} and {again.digest}")]


def resume(bench: TrainsCopies, plain: PlainRun, digest: str) -> tuple[str, list[Difference]]:
    """A run that is saved and goes on in another layout is the run that was not interrupted."""
    bench.train(bench.exact("saved", checkpoint={"every_steps": SAVED, "keep_last": 0}), _StopAfter(SAVED))
    parallel, zero = bench.subject.config.parallel, bench.subject.config.zero
    shape, stage = bench.mesh.shape, 1 if zero.stage == 3 else 3
    divided = shape.tensor * shape.pipeline > 1
    axes = {"replicate": 1 if divided or shape.replicate > 1 or shape.shard % 2 else 2}
    other = MeshShape.resolve(shape.world_size, **axes)
    changed = {**axes, "shard": "auto", "tensor": 1, "pipeline": 1, "sequence": False}
    config = bench.exact(
        "resumed",
        zero={"stage": stage},
        parallel={**changed, "schedule": "1f1b", "chunks": 1, "stages": None},
        checkpoint={"resume": str(bench.folder / "saved")},
        offload={"parameters": type(bench.subject.config.offload.parameters)()},
    )
    watch = _observer(bench, plain, replace(bench.subject, data_ranks=other.replicate * other.shard))
    bench.train(config, watch, joins=False)
    watch.close()
    before = ", ".join(f"{axis} {getattr(parallel, axis)}" for axis in AXES)
    said = f"saved after step {SAVED} as {before}, stage {zero.stage}; went on as {other}, stage {stage}"
    problems = [_found(bench, "resume", each.line(), step=each.step) for each in watch.differences]
    if len(watch.losses) != len(plain.steps) - SAVED:
        problems.append(_found(bench, "resume", f"{len(watch.losses)} steps were made after step {SAVED}", step=SAVED))
    return said, problems


def dropout(bench: TrainsCopies, plain: PlainRun, digest: str) -> tuple[str, list[Difference]]:
    """Random numbers belong to what is computed: see `mask_problems`."""
    model = copy.deepcopy(bench.subject.model)
    if not _drop(model):
        return "the model has no dropout", []
    shapes = _whole_masks(model, bench.subject)
    if not shapes:
        return "the model draws nothing", []
    masks = _Masks(shapes, bench.subject.data_ranks, bench.subject.blocks())
    bench.train(bench.exact("dropout", run={"max_steps": 2}, ema={"decay": 0.0}), masks, model=model, around=masks.mode)
    mesh = bench.mesh
    rows = mesh.world.gather_json([mesh.rank, masks.drawn], "masks of dropout")
    drawn = [
        Drawn(rank, mesh.shape.coordinate(rank).pipeline, mesh.shape.coordinate(rank).tensor, *each)
        for rank, found in rows
        for each in found
    ]
    problems = [
        replace(
            _found(bench, "dropout", f"of {mask.module or 'the loss'}: {what}", step=mask.step + 1),
            ranks=ranks,
            microbatch=mask.block + 1,
            module=mask.module,
        )
        for what, mask, ranks in mask_problems(drawn)
    ]
    return f"{len(drawn)} masks: other ones for each sample and layer, alike where ranks share them", problems


CHECKS: Mapping[str, Check] = {"determinism": determinism, "resume": resume, "dropout": dropout}


def _observer(bench: TrainsCopies, plain: PlainRun, subject: SmallRun) -> Observer:
    bounds = ExactBounds(plain=plain, rate=subject.config.optimizer.lr)
    return Observer(plain, bounds, subject, modules=False)


def _found(bench: TrainsCopies, check: str, what: str, *, step: int = 0) -> Difference:
    return Difference(kind="check", name=check, step=step, ranks=(bench.mesh.rank,), detail=what)


class _StopAfter(Callback):
    """Ends a run early."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self._step:
            trainer.request(stop=True)


# Masks of dropout


@dataclass(frozen=True, slots=True)
class Drawn:
    """A mask that a rank has drawn, the `call`-th of its microbatch."""

    rank: int
    stage: int
    tensor: int
    step: int
    block: int
    """The microbatch's number in the global batch."""
    call: int
    again: bool
    """Whether backward drew it, where it computes forward again."""
    whole: bool
    """Whether it is for all of a tensor, rather than for a tensor rank's share."""
    digest: str
    module: str
    """The module that drew it."""


class _Masks(Callback):
    """Records what dropout sets to zero."""

    def __init__(self, shapes: frozenset[tuple[int, ...]], data_ranks: int, blocks: int) -> None:
        self.drawn: list[tuple[int, int, int, bool, bool, str, str]] = []
        self.mode = _DropoutMode(self._see)
        self._shapes, self._data_ranks, self._blocks = shapes, data_ranks, blocks
        self._trainer: Any = None
        self._names: dict[int, str] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._calls: dict[tuple[int, int, bool], int] = {}

    def on_train_begin(self, trainer: Any) -> None:
        self._trainer = trainer
        self._names = {id(module): name for name, module in trainer.model.named_modules()}

    def _drawing(self) -> str:
        """The innermost module of the model whose code runs."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            for local in ("self", "module"):
                name = self._names.get(id(frame.f_locals.get(local)))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""

    def _see(self, mask: torch.Tensor) -> None:
        if self._trainer is None or self._trainer.engine is None:
            return
        mode, position = self._trainer.engine.present
        if position is None or mode not in (PassMode.FORWARD, PassMode.BACKWARD):
            return
        step, again = position.step, mode is PassMode.BACKWARD
        of_step = [key for key in self._numbers if key[0] == step]
        number = self._numbers.setdefault((step, position.first_sample), len(of_step))
        block = number * self._data_ranks + int(self._trainer.mesh.data_index)
        if block >= self._blocks:
            return  # One that repeats another, with weight 0.
        call = self._calls.get((step, block, again), 0)
        self._calls[step, block, again] = call + 1
        bits = mask.detach().cpu().contiguous().numpy().tobytes()
        whole = tuple(mask.shape) in self._shapes
        digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
        self.drawn.append((step, block, call, again, whole, digest, self._drawing()))


class _DropoutMode(TorchFunctionMode):
    """Shows the masks of every dropout that is computed by `torch.nn.functional.dropout`."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.dropout:
            return func(*args, **(kwargs or {}))
        # What is zero before is no part of the mask.
        (value, *rest), named = args, dict(kwargs or {})
        mask = func(torch.ones_like(value), *rest, **named)
        self._see(mask == 0)
        return value * mask


def _whole_masks(model: nn.Module, subject: SmallRun) -> frozenset[tuple[int, ...]]:
    """The shapes of all masks that the whole model draws."""
    shapes: set[tuple[int, ...]] = set()
    with _DropoutMode(lambda mask: shapes.add(tuple(mask.shape))), torch.no_grad():
        plain = copy.deepcopy(model).train()
        batch = subject.batch(0, 0)
        if subject.compute_loss is not None:
            subject.compute_loss(plain, batch)
        else:
            plain(**batch)
    return frozenset(shapes)


def _drop(model: nn.Module) -> bool:
    """Have the model drop; returns whether it has anything that drops. Attention is computed where its masks can be seen."""
    drops = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p, drops = _RATE, True
        for holder in (vars(module), vars(getattr(module, "config", nn.Module()))):
            for name in _RATES:
                if isinstance(holder.get(name), float):
                    holder[name], drops = _RATE, True
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation = "eager"
    return drops


def mask_problems(drawn: Sequence[Drawn]) -> Iterator[tuple[str, Drawn, tuple[int, ...]]]:
    """What is wrong about masks, as text, the first mask that is, and ranks.

    Masks of one call differ between steps, microbatches and data ranks, and between calls; tensor ranks draw the same for what each
    has whole, and different ones for their shares; what backward draws again is what forward drew.
    """
    forward = [each for each in drawn if not each.again]
    by_call: dict[tuple[int, int], list[Drawn]] = {}
    for each in forward:
        by_call.setdefault((each.stage, each.tensor), []).append(each)
    for found in by_call.values():
        first: dict[str, Drawn] = {}
        for each in found:
            other = first.setdefault(each.digest, each)
            if (other.step, other.block, other.call) != (each.step, each.block, each.call):
                where = f"step {other.step + 1}, microbatch {other.block + 1}"
                what = f"mask {each.call + 1} is that of mask {other.call + 1} of {where}"
                yield what, each, tuple(sorted({other.rank, each.rank}))
                break
    shared: dict[tuple[int, int, int, int], list[Drawn]] = {}
    for each in forward:
        shared.setdefault((each.stage, each.step, each.block, each.call), []).append(each)
    for group in shared.values():
        digests, one = {each.digest for each in group}, group[0]
        ranks = tuple(each.rank for each in group)
        if len(group) > 1 and one.whole and len(digests) > 1:
            yield f"tensor ranks drew different masks {one.call + 1} of what each has whole", one, ranks
            break
        if len(group) > 1 and not one.whole and len(digests) < len(group):
            yield f"tensor ranks drew the same mask {one.call + 1} for different shares", one, ranks
            break
    known = {(each.rank, each.step, each.block, each.digest) for each in forward}
    for each in drawn:
        if each.again and (each.rank, each.step, each.block, each.digest) not in known:
            what = f"mask {each.call + 1} that backward drew again is none of forward's"
            yield what, each, (each.rank,)
            break
