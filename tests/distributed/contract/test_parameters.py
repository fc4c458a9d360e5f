"""Parameters outside of passes: reading them whole, following their flags, averaging them."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract import cases_flags
from tests.contract.cases_units import Stack
from tests.contract.harness import CLASSES, FEATURES, WIDTH, Case, Layout, cross_entropy, plain_loop, samples
from tests.support.plain import after_steps, compare, distance, error_of, fitted, plain_fit, stopping
from tests.support.trainer_cases import llama, seeded, sentences, settings
from tests.support.workers import Workers
from zeromesh import Trainer
from zeromesh.errors import LayoutError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

NAMES = ["stem.weight", "blocks.1.up.weight"]


def train(layout: Layout, callbacks: list[Any], build: Callable[[], nn.Module] = Stack, **sections: Any) -> dict[str, Any]:
    case = Case(name="own", build=build)
    with tempfile.TemporaryDirectory() as folder:
        return {"difference": apart_in({**case.settings(folder, layout), **sections}, case, callbacks)}


def apart_in(config: dict[str, Any], case: Case, callbacks: list[Any]) -> float:
    """The difference of a case's parameters from the plain loop's, after a run with these callbacks."""
    model, plain = seeded(case.build).double(), plain_loop(case)
    found, _ = compare(
        model, config, samples(), plain, callbacks=callbacks, gradients=False, losses=False, compute_loss=cross_entropy
    )
    return found["parameters"]


def caught_in_gathered(mesh: Mesh, layout: dict[str, Any]) -> dict[str, Any]:
    """Errors inside `gathered` that the user catches: on one rank alone, on all, in a call of the model, and of a write."""
    seen: list[str] = []

    def look(trainer: Any, step: int) -> None:
        if step == 1 and mesh.rank == 0:
            with_error(trainer, lambda: 1 / 0)
        elif step == 1:
            with_error(trainer, lambda: None)
        elif step == 2:
            with_error(trainer, lambda: trainer.model(torch.ones(1, 7, dtype=torch.float64)))
        elif step == 3:
            with_error(trainer, lambda: trainer.model.stem.weight.data.mul_(2))
            with_error(trainer, lambda: torch.nn.init.zeros_(trainer.model.blocks[1].up.weight))

    def inside(trainer: Any, act: Callable[[], Any]) -> None:
        with trainer.gathered(NAMES), torch.no_grad():
            assert all(bool(trainer.model.get_parameter(name).isfinite().all()) for name in NAMES)
            act()

    def with_error(trainer: Any, act: Callable[[], Any]) -> None:
        seen.extend(error_of(partial(inside, trainer, act)).splitlines()[:1])

    return {**train(Layout(**layout), [after_steps(look)]), "seen": seen}


def hooked(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack()
        change(model)
        return model

    return build


def change_in_place(parameter: Any) -> None:
    parameter.grad.mul_(-3)


def mask(model: Any) -> None:
    kept = torch.arange(WIDTH) % 2
    model.blocks[1].down.weight.register_hook(lambda gradient: gradient * kept)


def count(model: Any) -> None:
    model.seen = []
    torch.autograd.graph.register_multi_grad_hook([model.stem.weight, model.head.weight], model.seen.append)


class Listed(Stack):
    """Parameters are in a plain list too, and forward takes them from there."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(2, CLASSES))
        self.listed = [self.own, self.head.bias]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.own, 0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values) * self.listed[0].sum(0) + self.listed[1] ** 2


class ParameterLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(FEATURES, FEATURES) / 5) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            values = values + torch.tanh(values @ weight)
        return self.head(values)


HOOKED: dict[str, Callable[[], nn.Module]] = {
    "Scaled": hooked(lambda model: model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)),
    "Masked": hooked(mask),
    "InPlace": hooked(lambda model: model.head.bias.register_post_accumulate_grad_hook(change_in_place)),
    "Counted": hooked(count),
    "Listed": Listed,
    "ParameterLists": ParameterLists,
}


def given_as_callables(mesh: Mesh, layout: dict[str, Any]) -> dict[str, Any]:
    """Models with hooks and lists, built by the trainer: differences from a plain loop that begins with the same weights."""
    torch.set_default_dtype(torch.float64)
    try:
        return {name: _built_by_trainer(build, Layout(**layout)) for name, build in HOOKED.items()}
    finally:
        torch.set_default_dtype(torch.float32)


def _built_by_trainer(build: Callable[[], nn.Module], layout: Layout) -> dict[str, Any]:
    case = Case(name="own", build=build, config={"batch": {"micro_size": 4}})
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(build, case.settings(folder, layout), train_dataset=samples(), compute_loss=cross_entropy) as trainer,
    ):
        first = {name: value.detach().clone() for name, value in trainer.state_dict()}
        trainer.fit()
        found = {name: value.detach().clone() for name, value in trainer.state_dict()}
        seen = len(getattr(trainer.model, "seen", ()))

    def begin() -> nn.Module:
        model = build()
        model.load_state_dict(first)
        return model

    return {"difference": distance(found, plain_loop(replace(case, build=begin)).states[-1]), "seen": seen}


def hooks_refused(mesh: Mesh) -> str:
    with torch.device("meta"):
        model = HOOKED["Masked"]()
    with tempfile.TemporaryDirectory() as folder:
        config = Case(name="own", build=HOOKED["Masked"]).settings(folder, Layout(stage=3))
        return error_of(lambda: Trainer(model, config, samples()).fit(), LayoutError)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gradual": (cases_flags.Headed, cases_flags.thaw),
    "resting": (Stack, cases_flags.rest_from_two),
    "adapters": (cases_flags.AdaptedStack, cases_flags.merge_some_at_two),
    "later": (cases_flags.AdaptedStack, cases_flags.merge_in_turn),
}
STEPS = 6


def changed(mesh: Mesh, layout: dict[str, Any], folder: str, name: str, stop: int, **sections: Any) -> float:
    """A run whose flags change, which goes on with what is in `folder`; its difference from the plain loop in the end."""
    build, flags = CHANGES[name]
    case = Case(name="own", build=build, steps=STEPS, before_step=flags, config=sections)
    config = {**case.settings(folder, Layout(**layout)), "checkpoint": {"every_steps": 1}}
    return apart_in(config, case, [cases_flags.flagging(flags), stopping(stop)])


def changed_inside_backward(mesh: Mesh, folder: str) -> float:
    """Flags that change, with the optimizer inside backward and after it, with states on files and in memory."""
    ends = []
    for number, sections in enumerate(
        (
            {"optimizer": {"lr": 1e-2}},
            {"optimizer": {"lr": 1e-2, "in_backward": True}},
            {"offload": {"optimizer": "file", "parameters": "file", "directory": folder}, "zero": {"stage": 3}},
        )
    ):
        config = settings(folder, **sections)
        config["run"] |= {"clip_norm": 0, "on_nonfinite": "stop", "name": f"run{number}"}
        model = seeded(llama)
        model.model.layers[0].requires_grad_(False)
        flags = cases_flags.flagging(lambda model, step: _turn_layers(model.model.layers, step))
        ends.append(fitted(model, config, sentences(), callbacks=[flags]))
    assert distance(ends[0], dict(seeded(llama).double().named_parameters())) > 1e-3
    return max(distance(end, ends[0]) for end in ends)


def _turn_layers(layers: Any, step: int) -> None:
    layers[0].requires_grad_(step in (2, 4))
    layers[1].mlp.requires_grad_(step != 3)


def changed_in_bfloat16(mesh: Mesh, folder: str) -> float:
    ends = []
    for stage in (1, 3):
        config = Case(name="own", build=Stack).settings(folder, Layout(stage=stage, kept=False))
        config |= {"precision": {"compute": "bfloat16"}, "zero": {**config["zero"]}}
        config["run"] |= {"name": f"run{stage}"}
        callbacks = [cases_flags.flagging(cases_flags.thaw)]
        model = seeded(cases_flags.Headed)
        ends.append(fitted(model, config, samples(), compute_loss=cross_entropy, callbacks=callbacks))
    assert ends[0]["blocks.1.up.weight"].dtype == torch.float32
    return distance(*ends)


def flags_that_differ(mesh: Mesh) -> str:
    flags = cases_flags.flagging(lambda model, step: model.head.bias.requires_grad_(mesh.rank == 0 or step == 1))
    both = cases_flags.flagging(lambda model, step: model.stem.requires_grad_(step == 1))
    return error_of(lambda: train(Layout(stage=3), [flags, both]), ZeromeshError)


def changed_over_axes(mesh: Mesh, folder: str) -> float:
    """Flags that change under tensor and pipeline parallelism, against one process."""
    config = settings(folder, parallel={axis: getattr(mesh.shape, axis) for axis in ("pipeline", "tensor", "replicate")})
    reference, data = seeded(llama).double(), sentences()

    def flags(model: Any, step: int) -> None:
        for name, parameter in model.named_parameters():
            if ".layers.0." in name:
                parameter.requires_grad_(step in (2, 4))
            elif "mlp.up_proj" in name:
                parameter.requires_grad_(step != 3)

    plain = plain_fit(reference, data, config, before_step=flags)
    callbacks = [cases_flags.flagging(flags)]
    return compare(seeded(llama).double(), config, data, plain, callbacks=callbacks, gradients=False)[0]["parameters"]


FULL = pytest.mark.full
LAYOUTS = [
    Layout(stage=3, kept=False, transport="gloo"),
    Layout(stage=1, transport="shared"),
    pytest.param(Layout(stage=3, kept=True, transport="shared"), marks=FULL),
    pytest.param(Layout(stage=0, transport="gloo"), marks=FULL),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_an_error_in_gathered_that_is_caught_ends_nothing(workers: Workers, layout: Layout) -> None:
    first, second = workers.run(2, "test_parameters:caught_in_gathered", layout=asdict(layout))
    assert first["difference"] < 1e-9
    assert first["seen"][0].startswith("ZeroDivisionError")
    for result in (first["seen"][1:], second["seen"]):
        assert result[0].startswith("RuntimeError: mat1 and mat2 shapes")
        assert result[1].startswith("PhaseError: stem.weight: written inside gathered()")
        assert result[2].startswith("PhaseError: blocks.1.up.weight: written inside gathered()")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_hooks_and_lists_of_parameters_survive_a_build_on_meta(workers: Workers, layout: Layout) -> None:
    first, second = workers.run(2, "test_parameters:given_as_callables", layout=asdict(layout))
    for found in (first, second):
        assert {name: each["difference"] for name, each in found.items() if not each["difference"] < 1e-9} == {}
        assert found["Counted"]["seen"] == 3


def test_hooks_on_meta_are_refused(workers: Workers) -> None:
    (found,) = workers.run(1, "test_parameters:hooks_refused")
    assert found.startswith("LayoutError: blocks.1.down.weight: the model was passed on the meta device with hooks on gradients")


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.full) for name in ("gradual", "adapters")), "resting", "later"]
)
def test_a_run_goes_on_with_the_flags_that_it_had(workers: Workers, tmp_path: Path, name: str) -> None:
    first, second, third = Layout(stage=3, kept=False), Layout(stage=1, ranks=1), Layout(stage=2, transport="gloo")
    for layout, stop in ((first, 3), (second, 5), (third, 6)):
        arguments = {"layout": asdict(layout), "folder": str(tmp_path), "name": name, "stop": stop}
        assert (max(workers.run(layout.ranks, "test_parameters:changed", **arguments)) < 1e-9) == (stop == 6)


@pytest.mark.parametrize(
    ("case", "axes", "most"),
    [
        ("changed_inside_backward", {}, 1e-12),
        ("changed_in_bfloat16", {}, 0.0),
        *(("changed_over_axes", {axis: 2}, 1e-9) for axis in ("tensor", "pipeline")),
        pytest.param("changed_over_axes", {"replicate": 2}, 1e-9, marks=FULL),
    ],
)
def test_runs_whose_flags_change_end_alike(workers: Workers, tmp_path: Path, case: str, axes: dict[str, int], most: float) -> None:
    assert max(workers.run(2, f"test_parameters:{case}", folder=str(tmp_path), **axes)) <= most


def test_flags_that_differ_between_ranks_are_refused(workers: Workers) -> None:
    found = workers.run(2, "test_parameters:flags_that_differ")
    message = "given different things: requires_grad of head.bias, changed is (absent) on rank 0, False on rank 1"
    assert any(message in each for each in found), found
