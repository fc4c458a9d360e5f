"""Averaged weights (`ema`): as torch's AveragedModel, in every layout and over processes."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.contract import cases_flags
from tests.contract.cases_units import Stack
from tests.contract.harness import Case, Layout, cross_entropy, plain_loop, samples
from tests.support.plain import after_steps, distance, fitted, plain_fit, stacked, stopping
from tests.support.trainer_cases import llama, seeded, sentences, settings
from tests.support.workers import Workers
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.export import export_checkpoint
from zeromesh.trainer.tools.checkpoint.reading import checkpoint_at

STEPS = 6
Flags = Callable[[Any, int], None]


class Plain:
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
    mesh: Mesh, layout: dict[str, Any], folder: str, stop: int, ema: dict[str, Any], flagged: bool = False, **sections: Any
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
    callbacks = [cases_flags.flagging(flags), after_steps(look), stopping(stop)]
    data, held = samples(), samples()[:7]
    with Trainer(seeded(build).double(), config, data, held, compute_loss=cross_entropy, callbacks=callbacks) as trainer:
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
        save = after_steps(lambda trainer, step, to=saved: trainer.save(to, ema=True) if step == 4 else None)
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

    config = {**Case(name="own", build=Stack, steps=4).settings(folder, Layout(stage=3)), "ema": {"decay": 0.5}}
    with Trainer(seeded(Stack).double(), config, samples(), compute_loss=loss, callbacks=[after_steps(look)]) as trainer:
        assert trainer.fit().skipped_steps == 1
        found = {name: value.clone() for name, value in trainer.state_dict(ema=True)}
    return distance(found, {name: seen[0][name] / 4 + seen[1][name] / 4 + seen[3][name] / 2 for name in found})


def begun_later(mesh: Mesh, folder: str) -> float:
    case = Case(name="own", build=Stack, steps=4)
    config = {**case.settings(folder, Layout(stage=2)), "checkpoint": {"every_steps": 2}}
    fitted(seeded(Stack).double(), config, samples(), compute_loss=cross_entropy, callbacks=[stopping(2)])
    seen: list[dict[str, torch.Tensor]] = []
    look = after_steps(lambda trainer, step: seen.append({name: value.clone() for name, value in trainer.state_dict()}))
    again = {**config, "run": {**config["run"], "name": "later"}, "ema": {"decay": 0.5}}
    again["checkpoint"] = {"every_steps": 0, "resume": str(Path(folder, "run"))}
    with Trainer(seeded(Stack).double(), again, samples(), compute_loss=cross_entropy, callbacks=[look]) as trainer:
        trainer.fit()
        found = {name: value.clone() for name, value in trainer.state_dict(ema=True)}
    return distance(found, {name: seen[0][name] / 2 + seen[1][name] / 2 for name in found})


FILES = {"offload": {"optimizer": "file"}}
RUNS = [
    pytest.param(Layout(stage=3, kept=False, transport="gloo"), {"decay": 0.8}, {}, id="released"),
    pytest.param(Layout(stage=1), {"decay": 0.5, "every_steps": 2, "start_step": 3}, {}, id="every second from the third"),
    pytest.param(Layout(stage=3), {"decay": 0.9}, FILES, id="files"),
    pytest.param(Layout(stage=0, transport="gloo"), {"decay": 0.7}, {}, id="replicated", marks=pytest.mark.full),
    pytest.param(Layout(stage=2), {"decay": 0.7, "every_steps": 3}, {}, id="every third", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "ema", "sections"), RUNS)
def test_averages_are_those_of_torch(
    workers: Workers, tmp_path: Path, layout: Layout, ema: dict[str, Any], sections: dict[str, Any]
) -> None:
    arguments = {"layout": asdict(layout), "folder": str(tmp_path), "ema": ema, "stop": 6, **sections}
    for found in workers.run(2, "test_weight_average:averaged", **arguments):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}


@pytest.mark.parametrize("flagged", [pytest.param(False, marks=pytest.mark.full), True], ids=["plain", "flags change"])
def test_averages_go_on_in_another_layout(workers: Workers, tmp_path: Path, flagged: bool) -> None:
    layouts = (Layout(stage=3, kept=False), 2), (Layout(stage=1, ranks=1), 4), (Layout(stage=2, transport="gloo"), 6)
    for layout, stop in layouts:
        arguments = {"layout": asdict(layout), "folder": str(tmp_path), "ema": {"decay": 0.8}, "flagged": flagged}
        for found in workers.run(layout.ranks, "test_weight_average:averaged", stop=stop, **arguments):
            assert {name: value for name, value in found.items() if not value < 1e-9} == {}


@pytest.mark.parametrize("axis", [*(pytest.param(axis, marks=pytest.mark.full) for axis in ("replicate", "pipeline")), "tensor"])
def test_averages_are_saved(workers: Workers, tmp_path: Path, axis: str) -> None:
    for found in workers.run(2, "test_weight_average:averaged_models", folder=str(tmp_path), **{axis: 2}):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}
    export_checkpoint(checkpoint_at(tmp_path / "runFalse"), tmp_path / "exported", "keep", Console(), ema=True)
    exported, saved = (load_file(tmp_path / each / "model.safetensors") for each in ("exported", "savedFalse"))
    assert distance(exported, saved) == 0


def test_skipped_steps_and_runs_without_averages_before(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(2, "test_weight_average:skipped", folder=str(tmp_path / "skipped"))) < 1e-9
    assert max(workers.run(2, "test_weight_average:begun_later", folder=str(tmp_path / "later"))) < 1e-9


def test_evaluation_with_no_average_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ema\.evaluate: true needs averaged weights; set ema\.decay, such as 0\.999"):
        load_config({"ema": {"evaluate": True}})
