"""Averaged weights against torch's own AveragedModel in a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.contract import cases_flags
from tests.contract.cases_units import Stack
from tests.contract.harness import Case, Layout, cross_entropy, plain_loop, samples
from tests.distributed.contract.parameter_cases import Look, Stop
from tests.support.plain import distance, plain_fit, stacked
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier

STEPS = 6
Flags = Callable[[Any, int], None]


class Plain:
    """Averages of a plain loop after each step, by `before_step` and `after_step`."""

    def __init__(self, flags: Flags, decay: float, every: int = 1, start: int = 0) -> None:
        self.flags, self.decay, self.every, self.start = flags, decay, every, start
        self.averaged: Any = None
        self.states: list[dict[str, torch.Tensor]] = [{}]
        self.losses: list[float] = [0.0]

    def before(self, model: nn.Module, step: int) -> None:
        if step == 1:
            self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        self.flags(model, step)

    def after(self, model: nn.Module, step: int) -> None:
        counts = step >= self.start and step % self.every == 0
        if counts:
            self.averaged.update_parameters(model)
        now = self.averaged.module if self.averaged.n_averaged else model
        self.states.append({name: value.detach().clone() for name, value in now.named_parameters()})
        with torch.no_grad():
            total, count = cross_entropy(now, stacked(samples(), range(7)))
        self.losses.append(float(total) / count)


def averaged(
    mesh: Mesh,
    layout: dict[str, Any],
    folder: str,
    stop: int,
    ema: dict[str, Any],
    flagged: bool = False,
    **sections: Any,
) -> dict[str, float]:
    """A run with averages, which goes on with what is in `folder`: the largest differences from the plain loop."""
    flags: Flags = cases_flags.thaw if flagged else lambda model, step: None
    plain = Plain(flags, ema["decay"], ema.get("every_steps", 1), ema.get("start_step", 0))
    build = cases_flags.Headed if flagged else Stack
    case = Case(name="own", build=build, steps=STEPS, config=sections, before_step=plain.before, after_step=plain.after)
    trained = plain_loop(case).states[-1]
    found: dict[str, float] = {"state": 0.0, "loss": 0.0}

    def look(trainer: Any, step: int) -> None:
        state = {name: value.clone() for name, value in trainer.state_dict(ema=True)}
        found["state"] = max(found["state"], distance(state, plain.states[step]))
        counted = trainer.engine.ledger.by_purpose(*Tier)
        found["bytes"] = float(abs(2 * counted[Purpose.AVERAGES] - counted[Purpose.MOMENTS]))
        found["loss"] = max(found["loss"], abs(trainer.evaluate()["eval_loss"] - plain.losses[step]))

    config = {**case.settings(folder, Layout(**layout)), "checkpoint": {"every_steps": 1}}
    config["ema"] = {**ema, "evaluate": True}
    callbacks = [cases_flags.Flagging(flags), Look(look), Stop(stop)]
    data, held = samples(), samples()[:7]
    with Trainer(
        seeded(build).double(), config, data, held, compute_loss=cross_entropy, callbacks=callbacks
    ) as trainer:
        trainer.fit()
        found["last loss"] = abs(trainer.evaluate()["eval_loss"] - plain.losses[stop])
        found["last"] = distance(dict(trainer.state_dict(ema=True)), plain.states[stop])
        if stop == STEPS:
            found["weights"] = distance({n: v.detach() for n, v in trainer.state_dict()}, trained)
    return found


def averaged_models(mesh: Mesh, folder: str) -> dict[str, float]:
    """A language model with averages over the mesh's axes, after and inside backward: what is saved, in training and after it."""
    axes = {axis: getattr(mesh.shape, axis) for axis in ("pipeline", "tensor", "replicate")}
    reference, data = seeded(llama).double(), sentences()
    model = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.6))

    def before(now: Any, step: int) -> None:
        if step > 1:
            model.update_parameters(now)

    config = settings(folder, parallel=axes, ema={"decay": 0.6})
    config["run"] |= {"clip_norm": 1e9}
    config["checkpoint"] = {"every_steps": 4}
    plain_fit(reference, data, config, before_step=before)
    model.update_parameters(reference)
    wanted = {name: value.detach() for name, value in model.module.named_parameters()}
    found: dict[str, float] = {}
    for inside in (False, True):
        config["run"] |= {"name": f"run{inside}"}
        if inside:
            config["run"] |= {"clip_norm": 0, "on_nonfinite": "stop"}
            config["optimizer"] |= {"in_backward": True}
        saved = Path(folder, f"saved{inside}")
        save = Look(lambda trainer, step, to=saved: trainer.save(to, ema=True) if step == 4 else None)
        with Trainer(seeded(llama).double(), config, data, callbacks=[save]) as trainer:
            trainer.fit()
            own = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
            trainer.save(saved / "after", ema=True)
            now = {name: value.detach() for name, value in trainer.model.named_parameters()}
            found[f"own {inside}"] = distance(now, own)
        for name, path in (("during", saved), ("after", saved / "after")):
            read = load_file(path / "model.safetensors")
            found[f"{name} {inside}"] = distance(read, {name: wanted[name] for name in read})
    return found


def skipped(mesh: Mesh, folder: str) -> float:
    """A step whose gradient is not finite changes no average; its difference from the weights that were averaged by hand."""
    seen: list[dict[str, torch.Tensor]] = []

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        total, count = cross_entropy(model, batch)
        return total * (float("inf") if len(seen) == 2 and torch.is_grad_enabled() else 1.0), count

    def look(trainer: Any, step: int) -> None:
        seen.append({name: value.clone() for name, value in trainer.state_dict()})

    config = {**Case(name="own", build=Stack).settings(folder, Layout(stage=3)), "ema": {"decay": 0.5}}
    with Trainer(seeded(Stack).double(), config, samples(), compute_loss=loss, callbacks=[Look(look)]) as trainer:
        assert trainer.fit().skipped_steps == 1
        found = {name: value.clone() for name, value in trainer.state_dict(ema=True)}
    wanted = {name: seen[0][name] / 4 + seen[1][name] / 4 + seen[3][name] / 2 for name in found}
    return distance(found, wanted)


def begun_later(mesh: Mesh, folder: str) -> float:
    """Averages of a run that goes on with a checkpoint without them."""
    case = Case(name="own", build=Stack)
    config = {**case.settings(folder, Layout(stage=2)), "checkpoint": {"every_steps": 2}}
    with Trainer(seeded(Stack).double(), config, samples(), compute_loss=cross_entropy, callbacks=[Stop(2)]) as trainer:
        trainer.fit()
    seen: list[dict[str, torch.Tensor]] = []
    look = Look(lambda trainer, step: seen.append({name: value.clone() for name, value in trainer.state_dict()}))
    again = {**config, "run": {**config["run"], "name": "later"}, "ema": {"decay": 0.5}}
    again["checkpoint"] = {"every_steps": 0, "resume": str(Path(folder, "run"))}
    with Trainer(seeded(Stack).double(), again, samples(), compute_loss=cross_entropy, callbacks=[look]) as trainer:
        trainer.fit()
        found = {name: value.clone() for name, value in trainer.state_dict(ema=True)}
    return distance(found, {name: seen[0][name] / 2 + seen[1][name] / 2 for name in found})
