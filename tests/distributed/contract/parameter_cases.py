"""What callbacks and loops do to parameters outside of passes."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.contract import cases_flags
from tests.contract.cases_units import Stack
from tests.contract.harness import CLASSES, FEATURES, WIDTH, Case, Layout, cross_entropy, plain_loop, samples
from tests.support.plain import compare, distance, plain_fit
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import LayoutError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.callback import Callback

NAMES = ["stem.weight", "blocks.1.up.weight"]


class Look(Callback):
    """Looks at whole parameters after each step, and catches what goes wrong meanwhile."""

    def __init__(self, look: Callable[[Any, int], None]) -> None:
        self.look = look

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.look(trainer, step)


def train(
    layout: Layout, callbacks: list[Any], build: Callable[[], nn.Module] = Stack, **sections: Any
) -> dict[str, Any]:
    """Train as the contract's cases do; the difference from the plain loop."""
    case = Case(name="own", build=build)
    with tempfile.TemporaryDirectory() as folder:
        config = {**case.settings(folder, layout), **sections}
        return {"difference": apart_in(config, case, callbacks)}


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

    def with_error(trainer: Any, act: Callable[[], Any]) -> None:
        try:
            with trainer.gathered(NAMES), torch.no_grad():
                assert all(bool(trainer.model.get_parameter(name).isfinite().all()) for name in NAMES)
                act()
        except (ZeroDivisionError, RuntimeError, ZeromeshError) as error:
            seen.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    return {**train(Layout(**layout), [Look(look)]), "seen": seen}


class Scaled(Stack):
    """A hook multiplies a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)


class Masked(Stack):
    """A hook multiplies by a mask that `__init__` has computed."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(WIDTH) % 2
        self.blocks[1].down.weight.register_hook(lambda gradient: gradient * mask)


class InPlace(Stack):
    """A hook changes what was accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.register_post_accumulate_grad_hook(self.change)

    @staticmethod
    def change(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(-3)


class Counted(Stack):
    """A hook waits for several gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        torch.autograd.graph.register_multi_grad_hook([self.stem.weight, self.head.weight], self.count)

    def count(self, gradients: Any) -> None:
        self.seen += 1


class Listed(Stack):
    """Parameters are in a plain list too, and forward takes them from there."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(2, CLASSES))
        self.listed = [self.own, self.head.bias]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As modules of torch have it."""
        nn.init.constant_(self.own, 0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values) * self.listed[0].sum(0) + self.listed[1] ** 2


class ParameterLists(nn.Module):
    """All weights are in a ParameterList."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(FEATURES, FEATURES) / 5) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            values = values + torch.tanh(values @ weight)
        return self.head(values)


HOOKED = (Scaled, Masked, InPlace, Counted, Listed, ParameterLists)


def given_as_callables(mesh: Mesh, layout: dict[str, Any]) -> dict[str, Any]:
    """Models with hooks and lists, built by the trainer: differences from a plain loop that begins with the same weights."""
    torch.set_default_dtype(torch.float64)
    try:
        return {build.__name__: _built_by_trainer(build, Layout(**layout)) for build in HOOKED}
    finally:
        torch.set_default_dtype(torch.float32)


def _built_by_trainer(build: type[nn.Module], layout: Layout) -> dict[str, Any]:
    case = Case(name="own", build=build, config={"batch": {"micro_size": 4}})
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(build, case.settings(folder, layout), train_dataset=samples(), compute_loss=cross_entropy) as trainer,
    ):
        first = {name: value.detach().clone() for name, value in trainer.state_dict()}
        trainer.fit()
        found = {name: value.detach().clone() for name, value in trainer.state_dict()}
        seen = getattr(trainer.model, "seen", None)

    def begin() -> nn.Module:
        model = build()
        model.load_state_dict(first)
        return model

    return {"difference": distance(found, plain_loop(replace(case, build=begin)).states[-1]), "seen": seen}


def hooks_refused(mesh: Mesh) -> str:
    """A model on the meta device whose hooks cannot be kept."""
    with torch.device("meta"):
        model = Masked()
    try:
        with tempfile.TemporaryDirectory() as folder:
            Trainer(model, Case(name="own", build=Masked).settings(folder, Layout(stage=3)), samples()).fit()
    except LayoutError as error:
        return str(error)
    return ""


class Stop(Callback):
    """Asks to stop after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        trainer.request(stop=step == self.at)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gradual": (cases_flags.Headed, cases_flags.thaw),
    "resting": (Stack, cases_flags.rest_from_two),
    "adapters": (cases_flags.AdaptedStack, cases_flags.merge_some_at_two),
}
STEPS = 6


def changed(mesh: Mesh, layout: dict[str, Any], folder: str, name: str, stop: int, **sections: Any) -> float:
    """A run whose flags change, which goes on with what is in `folder`; its difference from the plain loop in the end."""
    build, flags = CHANGES[name]
    case = Case(name="own", build=build, steps=STEPS, before_step=flags, config=sections)
    config = {**case.settings(folder, Layout(**layout)), "checkpoint": {"every_steps": 1}}
    callbacks = [cases_flags.Flagging(flags), Stop(stop)]
    return apart_in(config, case, callbacks)


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
        flags = cases_flags.Flagging(lambda model, step: _turn_layers(model.model.layers, step))
        with Trainer(model, config, train_dataset=sentences(), callbacks=[flags]) as trainer:
            trainer.fit()
            ends.append({name: value.detach().clone() for name, value in trainer.state_dict()})
    assert distance(ends[0], dict(seeded(llama).double().named_parameters())) > 1e-3
    return max(distance(end, ends[0]) for end in ends)


def _turn_layers(layers: Any, step: int) -> None:
    layers[0].requires_grad_(step in (2, 4))
    layers[1].mlp.requires_grad_(step != 3)


def changed_in_bfloat16(mesh: Mesh, folder: str) -> float:
    """Master weights of what is trained later: stage 3 with gathers released, and stage 1."""
    ends = []
    for stage in (1, 3):
        case = Case(name="own", build=Stack)
        config = case.settings(folder, Layout(stage=stage, kept=False))
        config |= {"precision": {"compute": "bfloat16"}, "zero": {**config["zero"]}}
        config["run"] |= {"name": f"run{stage}"}
        callbacks = [cases_flags.Flagging(cases_flags.thaw)]
        data, model = samples(), seeded(cases_flags.Headed)
        with Trainer(model, config, data, compute_loss=cross_entropy, callbacks=callbacks) as trainer:
            trainer.fit()
            ends.append({name: value.detach().clone() for name, value in trainer.state_dict()})
    assert ends[0]["blocks.1.up.weight"].dtype == torch.float32
    return distance(*ends)


def flags_that_differ(mesh: Mesh) -> str:
    """A flag that each rank sets otherwise."""
    flags = cases_flags.Flagging(lambda model, step: model.head.bias.requires_grad_(mesh.rank == 0 or step == 1))
    both = cases_flags.Flagging(lambda model, step: model.stem.requires_grad_(step == 1))
    try:
        train(Layout(stage=3), [flags, both])
    except ZeromeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def changed_over_axes(mesh: Mesh, folder: str) -> float:
    """Flags that change under tensor and pipeline parallelism, against one process."""
    config = settings(
        folder, parallel={axis: getattr(mesh.shape, axis) for axis in ("pipeline", "tensor", "replicate")}
    )
    reference, data = seeded(llama).double(), sentences()

    def flags(model: Any, step: int) -> None:
        for name, parameter in model.named_parameters():
            if ".layers.0." in name:
                parameter.requires_grad_(step in (2, 4))
            elif "mlp.up_proj" in name:
                parameter.requires_grad_(step != 3)

    plain = plain_fit(reference, data, config, before_step=flags)
    callbacks = [cases_flags.Flagging(flags)]
    return compare(seeded(llama).double(), config, data, plain, callbacks=callbacks, gradients=False)[0]["parameters"]
